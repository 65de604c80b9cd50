"""Pairs of handwritten digits: two of scikit-learn's digits side by side, to be added.

A sixteenth of the MLP reads single digits as well as the whole. Adding two takes more units, so width pays off here.
"""

from dataclasses import replace

import torch
from torch import Tensor

from hetperm.data import images
from hetperm.data.images import Images, Source
from hetperm.randomness import generator_for

PER_DIGIT = 16  # training pairs for every single digit
PER_UNSEEN_DIGIT = 4  # the same of validation and test pairs, which every client is scored on


def digit_pairs(*, validation_share: float, seed: int) -> Source:
    """Images of 8x16 whose class is the sum of their two digits, from 0 to 18.

    Single digits are divided into training, validation and test digits first, and pairs are made inside each: no digit
    of a test pair is seen in training. A pair comes once, though its digits come in other pairs too.
    """
    single = images.digits()
    pools = images.pools(single, validation_share=validation_share, seed=seed)
    count = {"train": PER_DIGIT, "val": PER_UNSEEN_DIGIT, "test": PER_UNSEEN_DIGIT}
    pairs = {
        part: added(pool, count[part] * len(pool), generator=generator_for(seed, "pairs", part))
        for part, pool in pools.items()
    }
    sums = 2 * single.num_classes - 1
    names = tuple(map(str, range(sums)))
    return replace(single, images=pairs["train"], val=pairs["val"], test=pairs["test"], num_classes=sums, names=names)


def added(pool: Images, count: int, *, generator: torch.Generator) -> Images:
    """``count`` pairs of digits of the pool, one beside the other, and their sums."""
    left, right = drawn(len(pool), count, generator=generator)
    return Images(torch.cat([pool.x[left], pool.x[right]], dim=-1), pool.y[left] + pool.y[right])


def drawn(n: int, count: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Left and right rows of ``count`` different ordered pairs of n rows, or of all n (n - 1) if those are fewer.

    Example:
        >>> left, right = drawn(3, 100, generator=torch.Generator().manual_seed(0))
        >>> sorted(zip(left.tolist(), right.tolist()))
        [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    if n < 2:
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    number = torch.randperm(n * (n - 1), generator=generator)[:count]
    left, right = number // (n - 1), number % (n - 1)
    # Numbers from left on stand for the row behind: no row is paired with itself.
    return left, right + (right >= left)
