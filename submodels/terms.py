"""Axis terms: how the positions of one tensor axis are made of channels. Immutable, hashable, printable.

A term is written as in einops: ``c3`` is a channel group, ``64`` a fixed run, ``(3 h7 64)`` a product (row-major),
``(c1 + c2)`` a concatenation. ``blocks.0.attn.qkv.weight  (3 h7 64) c0`` therefore reads: the rows are query, key
and value, each made of the heads of group 7 with 64 features, the columns are the residual stream.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fixed:
    """A run of positions that is always kept whole."""

    length: int

    def size(self, counts: Sequence[int]) -> int:
        """Positions when ``counts`` channels of every group are kept."""
        return self.length

    def groups(self) -> Iterator[int]:
        """Ids of the groups it is made of."""
        return iter(())

    def index(self, kept: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """(positions,) the kept ones, given the kept channels and the sizes of all groups."""
        return torch.arange(self.length)

    def show(self, names: Sequence[str]) -> str:
        """The term as text, given the names of the groups."""
        return str(self.length)


@dataclass(frozen=True)
class Group:
    """All channels of one coupled group."""

    id: int

    def size(self, counts: Sequence[int]) -> int:
        """Positions when ``counts`` channels of every group are kept."""
        return counts[self.id]

    def groups(self) -> Iterator[int]:
        """Ids of the groups it is made of."""
        yield self.id

    def index(self, kept: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """(positions,) the kept ones, given the kept channels and the sizes of all groups."""
        return kept[self.id]

    def show(self, names: Sequence[str]) -> str:
        """The term as text, given the names of the groups."""
        return names[self.id]


@dataclass(frozen=True)
class Product:
    """Every combination of its factors, the last one running fastest."""

    parts: tuple["Term", ...]

    def size(self, counts: Sequence[int]) -> int:
        """Positions when ``counts`` channels of every group are kept."""
        return math.prod(part.size(counts) for part in self.parts)

    def groups(self) -> Iterator[int]:
        """Ids of the groups it is made of."""
        for part in self.parts:
            yield from part.groups()

    def index(self, kept: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """(positions,) the kept ones, given the kept channels and the sizes of all groups."""
        # Row-major, as torch lays out a reshape: each further factor runs faster than those before it.
        index = torch.zeros(1, dtype=torch.long)
        for part in self.parts:
            index = (index[:, None] * part.size(sizes) + part.index(kept, sizes)).flatten()
        return index

    def show(self, names: Sequence[str]) -> str:
        """The term as text, given the names of the groups."""
        return f"({' '.join(part.show(names) for part in self.parts)})"


@dataclass(frozen=True)
class Sum:
    """Its parts, one after the other."""

    parts: tuple["Term", ...]

    def size(self, counts: Sequence[int]) -> int:
        """Positions when ``counts`` channels of every group are kept."""
        return sum(part.size(counts) for part in self.parts)

    def groups(self) -> Iterator[int]:
        """Ids of the groups it is made of."""
        for part in self.parts:
            yield from part.groups()

    def index(self, kept: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """(positions,) the kept ones, given the kept channels and the sizes of all groups."""
        pieces, offset = [], 0
        for part in self.parts:
            pieces.append(part.index(kept, sizes) + offset)
            offset += part.size(sizes)
        return torch.cat(pieces)

    def show(self, names: Sequence[str]) -> str:
        """The term as text, given the names of the groups."""
        return f"({' + '.join(part.show(names) for part in self.parts)})"


Term = Fixed | Group | Product | Sum


def scales(term: Term) -> bool:
    """True if the term contains a group, that is, if it shrinks with the width."""
    return next(term.groups(), None) is not None


def without(term: Term, frozen: set[int], sizes: Sequence[int]) -> Term:
    """The same term with the groups in ``frozen`` kept whole."""
    if isinstance(term, Group):
        return Fixed(sizes[term.id]) if term.id in frozen else term
    if isinstance(term, Product | Sum):
        parts = tuple(without(part, frozen, sizes) for part in term.parts)
        if all(isinstance(part, Fixed) for part in parts):
            return Fixed(type(term)(parts).size(sizes))
        return type(term)(parts)
    return term


def renumber(term: Term, ids: dict[int, int]) -> Term:
    """The same term under new group numbers."""
    if isinstance(term, Group):
        return Group(ids[term.id])
    if isinstance(term, Product | Sum):
        return type(term)(tuple(renumber(part, ids) for part in term.parts))
    return term


def owners(term: Term, group: int, sizes: Sequence[int]) -> Tensor:
    """(positions,) the channel of ``group`` that each position belongs to, -1 where it belongs to none."""
    if isinstance(term, Group) and term.id == group:
        return torch.arange(sizes[group])
    if isinstance(term, Sum):
        return torch.cat([owners(part, group, sizes) for part in term.parts])
    if isinstance(term, Product):
        owner = torch.full((1,), -1)
        for part in term.parts:
            # Only one factor can belong to the group: the others say -1 and lose.
            owner = torch.maximum(owner[:, None], owners(part, group, sizes)).flatten()
        return owner
    return torch.full((term.size(sizes),), -1)
