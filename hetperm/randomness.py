"""Randomness: one seed, and a stream of its own for every use of it."""

import hashlib
import operator

import torch


def seed_for(seed: int, *key: int | str) -> int:
    """A seed below 2^63 for one use, the same on every machine and in every process.

    Args:
        seed: the one seed of the run.
        key: what the randomness is for, e.g. ``"visit", r, i, j``. 1 and ``"1"`` are different keys.

    Example:
        >>> seed_for(0, "mask", 3, 7)
        2409423943556737431
    """
    # repr keeps the parts apart, ("ab", "c") from ("a", "bc"); hash() would differ between processes
    text = repr((operator.index(seed), *map(_part, key)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_for(seed: int, *key: int | str) -> torch.Generator:
    """A fresh generator for one use; who else draws, and in which order, cannot change what it gives.

    On the CPU torch seeds with the lower 32 bits only: among a hundred thousand uses two will draw the same. That does
    no harm as long as nothing requires two uses to differ.

    Example:
        >>> torch.randperm(5, generator=generator_for(0, "shuffle", 2))
        tensor([3, 1, 0, 4, 2])
    """
    return torch.Generator().manual_seed(seed_for(seed, *key))


def _part(part: int | str) -> int | str:
    if isinstance(part, str):
        return str(part)
    try:
        return operator.index(part)
    except TypeError:
        raise TypeError(f"a key is made of whole numbers and strings, not of {part!r}") from None
