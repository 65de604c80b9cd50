"""npz:PATH: samples in one numpy file, with who they come from if the file says so.

A file holds x (n, ...) and y (n,). It may hold ``user`` (n,), ``split`` (n,) with 0 for training and 1 for testing, and
``classes``, their names or their number. What x is follows from its shape and type:

=======================  =============================  ==================================
x in the file            meaning                        input of a model
=======================  =============================  ==================================
(n, d)                   vectors                        (d,)
(n, length, channels)    windows of a signal            (channels, length)
uint8 (n, h, w)          grey images                    (1, h, w)
uint8 (n, h, w, 1 or 3)  grey or colour images          (1 or 3, h, w)
=======================  =============================  ==================================
"""

import logging
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from hetperm.advice import closest
from hetperm.data.images import LARGEST_VALUE, MOST_CLASSES, Images, Source, order_by, share_of
from hetperm.memory import GB, available_bytes
from hetperm.texts import LONGEST, one_line, shown

log = logging.getLogger(__name__)

LOST = 0.01  # of the spread of a column: rounding that is worth a warning
TEST_SHARE = 0.25  # of the samples, where the file does not say which are for testing
_KEYS = ("x", "y", "user", "split", "classes")
_SHAPES = "vectors (n, d), windows (n, length, channels), or uint8 images (n, h, w), (n, h, w, 1) or (n, h, w, 3)"


@dataclass(frozen=True, eq=False)
class Contents:
    """What a file holds, checked.

    Attributes:
        samples: its samples, in the order of the file.
        test: (n,) bool, True for testing; None if the file does not say.
        names: of the classes; empty if the file does not say.
    """

    samples: Images
    num_classes: int
    test: Tensor | None
    names: tuple[str, ...] = ()

    @property
    def are_images(self) -> bool:
        """Whether the samples are images, which are independent of each other."""
        return len(self.samples.x.shape) == 4


def read(path: Path, *, natural: bool, validation_share: float) -> Source:
    """The samples of a file, to be divided into pools.

    Args:
        natural: divide what each user has by position (see `by_position`), whatever ``split`` says. Otherwise ``split``
            tells the test samples; without it, a quarter is drawn from all of them.
        validation_share: of what is divided by position.
    """
    contents = _contents(path)
    samples, val, test = contents.samples, None, None
    if natural and samples.writer is not None:
        if contents.test is not None:
            log.warning("%s: split is not used, because natural divides what each user has by position", path)
        gap = 0 if contents.are_images else 1
        pool = by_position(samples.y, samples.writer, validation_share=validation_share, gap=gap)
        samples, val, test = (contents.samples.take((pool == k).nonzero().squeeze(1)) for k in range(3))
    elif contents.test is not None:
        samples, test = (contents.samples.take((contents.test == k).nonzero().squeeze(1)) for k in (False, True))
    peak = 255 if contents.are_images else 1
    return Source(
        samples,
        test,
        contents.num_classes,
        peak=peak,
        mean=None,
        std=None,
        val=val,
        test_share=TEST_SHARE,
        names=contents.names,
    )


def by_position(y: Tensor, user: Tensor, *, validation_share: float, gap: int) -> Tensor:
    """(n,) pool of each sample: 0 for training, 1 for validation, 2 for testing, -1 for none.

    Of what a user has of a class, the first samples are for training, the next for validation and the last quarter for
    testing. Windows overlap with the next one, so ``gap`` of them are left out between the parts. A class with too few
    samples for all parts gives up validation first, then testing.

    Args:
        y: (n,) classes; `user`: (n,) whom each sample comes from.

    Example:
        >>> by_position(torch.zeros(9), torch.zeros(9), validation_share=0.2, gap=1)
        tensor([ 0,  0,  0,  0, -1,  1, -1,  2,  2])
    """
    pool = torch.full((len(y),), -1)
    both = torch.stack([user, y.to(user.dtype)], dim=1).unique(dim=0, return_inverse=True)[1]
    for rows in order_by(both, torch.arange(len(y))):
        n = len(rows)
        train, val, test = _sizes(n, validation_share, gap)
        pool[rows[:train]] = 0
        pool[rows[train + gap : train + gap + val]] = 1
        pool[rows[n - test :]] = 2
    return pool


def _sizes(n: int, validation_share: float, gap: int) -> tuple[int, int, int]:
    """How many of n samples are for training, validation and testing; some are always for training."""
    test = share_of(TEST_SHARE, n)
    rest = n - test - gap
    if rest < 1:
        return n, 0, 0
    val = share_of(validation_share, rest)
    train = rest - val - gap
    return (train, val, test) if val and train >= 1 else (rest, 0, test)


# Reading and checking


def _contents(path: Path) -> Contents:
    arrays = arrays_of(path, _KEYS)
    x = _inputs(arrays["x"], path)
    for key in ("y", "user", "split"):
        if key in arrays and arrays[key].shape != (len(x),):
            raise ValueError(
                f"{path}: x has {len(x)} samples and {key} has shape {arrays[key].shape}; "
                f"{key} must be one value a sample"
            )
    y, num_classes = _labels(arrays, path)
    return Contents(Images(x, y, _users(arrays, path)), num_classes, _split(arrays, path), _names(arrays))


def arrays_of(path: Path, keys: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the arrays ``keys`` that a file holds; x and y must be among them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} to read samples from; write npz:PATH with one that exists")
    with path.open("rb"):  # for its error: what may not be read is no damaged file
        pass
    if not zipfile.is_zipfile(path):  # numpy takes any other file for a pickle, and says how to trust it
        raise ValueError(f"{path} is no npz file (a zip archive of arrays), or not a whole one; numpy.savez writes one")
    _check_size(path)
    try:
        # Never unpickled: a pickle can run anything. Opened here, because numpy leaves a broken file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            names, arrays = file.files, {key: file[key] for key in keys if key in file.files}
    except Exception as error:  # a broken file can raise nearly anything, and one array (.npy) is no context
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "numpy.savez writes such a file"
        if "allow_pickle" in reason:  # numpy's advice is to trust it
            reason = "an array of it holds objects, or is damaged"
            remedy = "save numbers or texts of one type, or copy it again"
        raise ValueError(f"{path} cannot be read as an npz file of plain arrays ({reason}); {remedy}") from error
    for key in ("x", "y"):
        if key not in arrays:
            held = one_line(", ".join(names))[:LONGEST]
            raise ValueError(f"{path} has no {key!r} and holds {held or 'nothing'}; save x and y in it")
    missing = [key for key in keys if key not in arrays]
    for name in names:
        meant = None if name in arrays else closest(name.lower(), missing)
        if meant is not None:
            log.warning("%s: %s is not read; is it meant to be %s?", path, shown(name), shown(meant))
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy gives a member of another kind as its bytes
            raise ValueError(f"{path}: {key} is no array of numpy; save it with numpy.savez")
    return arrays


def _check_size(path: Path) -> None:
    """Raise an error if the arrays, unpacked, do not fit into memory: a small file can hold far more."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):  # what is wrong with it is said where it is read
        return
    available = available_bytes()
    if available is not None and size > available:
        raise ValueError(
            f"{path} holds {size / GB:.2g} GB and {available / GB:.2g} GB of memory are free; save fewer samples, or x "
            "as float32"
        )


def _inputs(x: np.ndarray, path: Path) -> Tensor:
    """x as it is divided and prepared: channels before the sides of an input."""
    if x.dtype == bool:
        if x.ndim != 2:  # of more axes it may be images or windows, and nothing says which
            raise ValueError(
                f"{path}: x is bool of shape {x.shape}; save images with .astype('uint8') * 255, and windows with "
                ".astype('float32')"
            )
        x = x.astype(np.uint8)
    if x.dtype.kind not in "fiu":
        raise ValueError(f"{path}: x is {x.dtype}; it must be numbers")
    if x.size == 0:
        raise ValueError(f"{path}: x has shape {x.shape}, which holds nothing; save at least one sample")
    images = x.dtype == np.uint8 and x.ndim > 2
    if images and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3))):
        return torch.from_numpy(rearrange(x.reshape(*x.shape[:3], -1), "n h w c -> n c h w").copy())
    if images or x.ndim not in (2, 3):
        raise ValueError(f"{path}: x is {x.dtype} of shape {x.shape}; it must be {_SHAPES}")
    _warn_of_offsets(x, path)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is found below
        x = np.ascontiguousarray(np.moveaxis(x, -1, 1), dtype=np.float32)
    with np.errstate(invalid="ignore"):  # of nan, which passes neither
        good = x.min() >= -LARGEST_VALUE and x.max() <= LARGEST_VALUE
    if not good:
        bad = ~(np.abs(x) <= LARGEST_VALUE).reshape(len(x), -1).all(axis=1)
        raise ValueError(
            f"{path}: x is not finite, or beyond {LARGEST_VALUE:g}, in {bad.sum()} samples, first in sample "
            f"{bad.argmax()}; remove them, or scale x"
        )
    return torch.from_numpy(x)


def _warn_of_offsets(x: np.ndarray, path: Path) -> None:
    """Warn of columns, or channels, whose values differ by little more than float32 can tell apart."""
    if x.dtype.itemsize <= 4 and x.dtype.kind == "f":
        return
    axes = tuple(range(x.ndim - 1))
    with np.errstate(all="ignore"):  # numbers that are not finite are refused later
        step = np.abs(x).max(axes).astype(np.float64) * np.finfo(np.float32).eps
        spread = x.std(axes, dtype=np.float64)
    lost = np.flatnonzero((spread > 0) & (step > LOST * spread))
    if len(lost):
        k = lost[0]
        log.warning(
            "%s: the values of %s %d of x differ by about %.3g, and float32 rounds them to steps of %.2g; subtract a "
            "constant from such columns (%d of them)",
            path, "column" if x.ndim == 2 else "channel", k, spread[k], step[k], len(lost),
        )  # fmt: skip


def _labels(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[Tensor, int]:
    """The classes of the samples, and how many classes there are."""
    y = arrays["y"]
    if y.dtype.kind not in "iu":
        raise ValueError(f"{path}: y is {y.dtype}; labels must be whole numbers from 0, saved as integers")
    if y.min() < 0:
        raise ValueError(f"{path}: y has the label {y.min()}; labels must be whole numbers from 0")
    if y.max() >= MOST_CLASSES:
        raise ValueError(
            f"{path}: y has the label {y.max()}; number the classes from 0, at most {MOST_CLASSES} of them"
        )
    num_classes, occur = int(y.max()) + 1, len(np.unique(y))
    if "classes" not in arrays and occur < num_classes / 2:
        log.warning("%s: %d of %d classes up to the largest label occur; number them from 0", path, occur, num_classes)
    elif "classes" not in arrays and y.min() > 0:
        log.warning(
            "%s: y has labels from %d to %d, so that class 0 never occurs; number them from 0", path, y.min(), y.max()
        )
    if "classes" in arrays:
        num_classes = _class_count(arrays["classes"], path)
        if y.max() >= num_classes:
            raise ValueError(f"{path}: y has the label {y.max()} and there are {num_classes} classes, numbered from 0")
    return torch.from_numpy(y.astype(np.int64)), num_classes


def _class_count(classes: np.ndarray, path: Path) -> int:
    """How many classes there are, by their names or their number."""
    if classes.ndim == 1 and classes.dtype.kind in "iuUS":
        names, counts = np.unique(classes, return_counts=True)
        if len(names) < len(classes):
            raise ValueError(
                f"{path}: classes has the name {shown(names[counts > 1].tolist()[0])} twice; it must be different "
                "names, or their number"
            )
        return len(classes)
    if classes.ndim or classes.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: classes is {classes.dtype} of shape {classes.shape}; it must be different names, or their number"
        )
    if not 0 < classes <= MOST_CLASSES:
        raise ValueError(f"{path}: classes is {classes}; a number of classes must be from 1 to {MOST_CLASSES}")
    return int(classes)


def _names(arrays: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    classes = arrays.get("classes", np.empty(0))
    if classes.ndim == 0 or classes.dtype.kind not in "iuUS":
        return ()
    return tuple([name.decode(errors="replace") if isinstance(name, bytes) else str(name) for name in classes.tolist()])


def _users(arrays: Mapping[str, np.ndarray], path: Path) -> Tensor | None:
    """(n,) the number of whom each sample comes from, in the order of their names."""
    if "user" not in arrays:
        return None
    user = arrays["user"]
    if user.dtype.kind not in "iuUS":
        raise ValueError(f"{path}: user is {user.dtype}; it must be whole numbers or texts")
    return torch.from_numpy(np.unique(user, return_inverse=True)[1].reshape(-1))


def _split(arrays: Mapping[str, np.ndarray], path: Path) -> Tensor | None:
    if "split" not in arrays:
        return None
    values = np.unique(arrays["split"])
    if values.dtype.kind not in "iub" or values.tolist() != [0, 1]:
        some = ", ".join(map(str, values[:5]))
        raise ValueError(
            f"{path}: split is {values.dtype} and has the values {some}; it must be whole numbers, 0 for training and "
            "1 for testing, some of each"
        )
    return torch.from_numpy(arrays["split"].astype(bool))
