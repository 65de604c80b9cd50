"""Randomness: one seed, and a separate stream of numbers for every use."""

import hashlib
import operator

import torch

from hetperm.checks import LARGEST_SEED
from hetperm.texts import shown


def seed_for(seed: int, *key: int | str) -> int:
    """A seed below 2^63 for one use, the same on every machine and in every process.

    Args:
        seed: the one seed of the run.
        key: what the randomness is for, such as ``"visit", r, i, j``. 1 and ``"1"`` are different keys.

    Example:
        >>> seed_for(0, "mask", 3, 7)
        2409423943556737431
    """
    if abs(operator.index(seed)) > LARGEST_SEED:
        raise ValueError(f"seed is {shown(seed)}; it must be below 2^64")
    # repr keeps ("ab", "c") and ("a", "bc") apart. Python's hash() would differ between processes.
    text = repr((operator.index(seed), *map(_part, key)))
    # One bit is dropped so that the seed fits a signed 64-bit integer.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *key: int | str) -> torch.Generator:
    """A new generator for one use. No other use of randomness can change what it draws.

    On the CPU torch uses only the lower 32 bits of a seed, so among a hundred thousand uses two will draw the same
    numbers. That does no harm as long as no result relies on two uses being different.

    Example:
        >>> torch.randperm(5, generator=generator_for(0, "shuffle", 2))
        tensor([3, 1, 0, 4, 2])
    """
    return torch.Generator().manual_seed(seed_for(seed, *key))


def _part(part: int | str) -> int | str:
    # Subclasses of str and numpy integers become plain ones, whose repr is the same everywhere.
    if isinstance(part, str):
        return str(part)
    try:
        return operator.index(part)
    except TypeError:
        raise TypeError(f"a key is made of whole numbers and strings, not of {shown(part)}") from None
