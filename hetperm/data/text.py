"""Texts by whom they come from: the next character from those before it.

Two layouts are read. LEAF's Shakespeare has a list of stretches and the character after each; a plain table is {role:
text}, and every stretch of `LENGTH` characters of it is a sample. What somebody has is divided by position, with a gap
as long as a sample: drawn at random, most of a test sample would have been trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetperm.data.images import Images, Source, share_of

LENGTH = 80  # characters that a sample of a plain text holds, as in LEAF
TEST_SHARE = 0.25  # of a text that does not come divided


@dataclass(frozen=True)
class Text:
    """What one person wrote, as samples: ``length`` characters and the one that follows them.

    Attributes:
        letters: all characters, as code points.
        starts: (n,) where in `letters` each sample begins.
        whole: whether it is one text, which must be long enough to be divided.
    """

    letters: np.ndarray
    starts: np.ndarray
    length: int
    whole: bool = False

    @classmethod
    def of(cls, text: str, length: int = LENGTH) -> "Text":
        """All samples of one text."""
        return cls(_code_points(text), np.arange(max(0, len(text) - length)), length, whole=True)

    @classmethod
    def of_samples(cls, x: Sequence[str], y: Sequence[str]) -> "Text":
        """Samples that come one by one, all of one length: their characters, and the next one."""
        length = len(x[0])
        return cls(_code_points("".join(map("".join, zip(x, y)))), np.arange(len(x)) * (length + 1), length)


@dataclass(frozen=True, eq=False)
class Stretches:
    """Inputs that are stretches of a long text; they are cut out when they are needed.

    Attributes:
        symbols: (m,) the long text, every character as its number in the alphabet.
        starts: (n,) where each input begins.

    Example:
        >>> Stretches(torch.arange(9), torch.tensor([0, 4]), 3).decode()
        tensor([[0, 1, 2], [4, 5, 6]])
    """

    symbols: Tensor
    starts: Tensor
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """(n, length)."""
        return len(self.starts), self.length

    def __getitem__(self, rows: Tensor) -> "Stretches":
        return Stretches(self.symbols, self.starts[rows], self.length)

    def decode(self) -> Tensor:
        """(n, length) int64 symbols."""
        return self.symbols[self.starts[:, None] + torch.arange(self.length)].long()


def source(
    train: Mapping[str, Text], test: Mapping[str, Text] | None, *, validation_share: float, where: str
) -> Source:
    """The samples of all texts, divided by position; writers are numbered in the order of their names.

    The alphabet is every character that occurs, in the order of code points. A whole text that is too short to be
    divided is left out.

    Args:
        train: name -> what each person wrote; `test`: what is kept for testing, or None to divide ``train``.
        where: what an error calls the data.
    """
    parts = [train] if test is None else [train, test]
    names = {name: number for number, name in enumerate(sorted(set().union(*parts)))}
    lengths = {text.length for part in parts for text in part.values()}
    if len(lengths) > 1:
        raise ValueError(f"{where}: samples have from {min(lengths)} to {max(lengths)} characters; give all one length")
    alphabet = np.unique(np.concatenate([np.unique(text.letters) for part in parts for text in part.values()]))
    (length,) = lengths
    shares = validation_share, TEST_SHARE if test is None else 0.0
    sizes = {name: part_sizes(len(text.starts), *shares, gap=length) for name, text in train.items()}
    kept = {name: text for name, text in train.items() if test or not text.whole or _suffices(sizes[name], length)}
    if not kept:
        raise ValueError(f"{where}: no text can be trained and tested on; it takes {_shortest(length)} characters")
    pools = [_pools(len(text.starts), sizes[name]) for name, text in kept.items()]
    samples, pool = _joined(kept, names, alphabet), torch.from_numpy(np.concatenate(pools))
    images, val, own_test = (samples.take((pool == k).nonzero().squeeze(1)) for k in range(3))
    tested = own_test if test is None else _joined(test, names, alphabet)
    return Source(images, tested, len(alphabet), peak=1, mean=None, std=None, val=val, symbols=len(alphabet))


def part_sizes(n: int, validation_share: float, test_share: float, *, gap: int) -> tuple[int, int, int]:
    """How many of n samples in a row are for training, validation and testing, with ``gap`` between these parts.

    Too few samples give up validation first (if less than ``gap`` would be left to train on), and then testing.

    Example:
        >>> [part_sizes(n, 0.15, 0.25, gap=80) for n in (1000, 300, 100)]
        [(490, 100, 250), (145, 0, 75), (100, 0, 0)]
    """
    test = share_of(test_share, n)
    rest = n - test - gap if test else n
    if rest < 1:
        return n, 0, 0
    val = share_of(validation_share, rest)
    train = rest - val - gap
    return (train, val, test) if val and train >= max(val, gap) else (rest, 0, test)


def _pools(n: int, sizes: tuple[int, int, int]) -> np.ndarray:
    """(n,) 0 for training, 1 for validation, 2 for testing, -1 for the gaps."""
    train, val, test = sizes
    pool = np.full(n, -1, dtype=np.int8)
    pool[:train] = 0
    pool[n - test :] = 2
    if val:
        end = n - test - (n - test - train - val) // 2  # the gaps before and after it are equally long
        pool[end - val : end] = 1
    return pool


def _suffices(sizes: tuple[int, int, int], length: int) -> bool:
    """Whether a text of these sizes has enough to train on, and something to test."""
    train, _, test = sizes
    return train >= length and test > 0


def _shortest(length: int) -> int:
    """The characters of the shortest text that can be divided."""
    sizes = (n for n in range(10 * length) if _suffices(part_sizes(n, 0.0, TEST_SHARE, gap=length), length))
    return next(sizes) + length


def _joined(texts: Mapping[str, Text], names: Mapping[str, int], alphabet: np.ndarray) -> Images:
    letters = np.concatenate([text.letters for text in texts.values()])
    # Two bytes a character: LEAF repeats every character eighty times.
    symbols = torch.from_numpy(
        np.searchsorted(alphabet, letters).astype(np.int16 if len(alphabet) < 2**15 else np.int32)
    )
    offsets = np.cumsum([0, *(len(text.letters) for text in texts.values())])
    starts = torch.from_numpy(
        np.concatenate([text.starts + offset for text, offset in zip(texts.values(), offsets)]).astype(np.int64)
    )
    length = next(iter(texts.values())).length
    writer = np.repeat([names[name] for name in texts], [len(text.starts) for text in texts.values()])
    return Images(Stretches(symbols, starts, length), symbols[starts + length].long(), torch.from_numpy(writer))


def _code_points(text: str) -> np.ndarray:
    # JSON can spell halves of characters, which are characters here too.
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
