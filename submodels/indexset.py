"""IndexSet: the m_i of the paper, as kept channels instead of a mask."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from submodels.axismap import AxisMap, check_counts
from submodels.terms import Term, scales
from submodels.texts import shown

_MAX_BLOCKS = 64  # beyond this many rectangles an indexed copy is cheaper
_SMALL_TENSOR = 8192  # up to this many numbers, cut along one axis, two rectangles are dearer than one indexed copy

Block = tuple[tuple[slice, ...], tuple[slice, ...]]  # (where in the whole tensor, where in the sub-tensor)


@dataclass(frozen=True, eq=False)
class IndexSet:
    """Which channels of every group a sub-model keeps, and how its tensors lie in the whole ones.

    Kept channels that run on (static and rolling windows) move as rectangles; scattered ones (random) by index.

    Attributes:
        kept: the kept channels of every group, in the sub-model's order.
        sizes: channels of every group in the space indexed into; the global model's unless this is a sub-model's.
    """

    axis_map: AxisMap
    kept: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    # By terms, not by name: all tensors made of the same groups in the same way are cut alike.
    _plans: dict[tuple[Term, ...], "_Plan"] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        if not isinstance(self.axis_map, AxisMap):
            raise TypeError(f"axis_map is {shown(self.axis_map)}; it must be that of a ScalableModel")
        groups = self.axis_map.groups
        check_counts("sizes", self.sizes, self.axis_map.sizes)
        fits = isinstance(self.kept, tuple | list) and len(self.kept) == len(groups)
        if not fits or not all([isinstance(x, Tensor) and x.layout == torch.strided and x.is_cpu for x in self.kept]):
            raise TypeError(
                f"kept is {shown(self.kept)}; it must be a tensor of channels for each of {len(groups)} groups"
            )
        for group, kept, size in zip(groups, self.kept, self.sizes, strict=True):
            numbers = kept.numpy()
            inside = kept.dtype == torch.long and kept.dim() == 1 and bool(((numbers >= 0) & (numbers < size)).all())
            if not inside or len(np.unique(numbers)) != len(numbers):
                raise ValueError(
                    f"kept channels of group {group.name} must be distinct whole numbers below {size}; "
                    f"got {shown(kept.tolist())}"
                )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Channels kept of every group."""
        return tuple(map(len, self.kept))

    @cached_property
    def key(self) -> tuple:
        """Equal for index sets that keep the same channels in the same order."""
        return self.sizes, tuple(kept.numpy().tobytes() for kept in self.kept)

    def __eq__(self, other: object) -> bool:
        same_map = isinstance(other, IndexSet) and (self.axis_map is other.axis_map or self.axis_map == other.axis_map)
        return same_map and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def statistics(self) -> frozenset[str]:
        """Names of the batch-norm statistics, which are never averaged."""
        return self.axis_map.statistics

    def covers(self, name: str, tensor: Tensor) -> bool:
        """Whether all of a tensor of the whole model is kept."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {shown(tensor)}; it must be a tensor of the whole model")
        return self.shape(name) == tensor.shape

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in the sub-model."""
        return tuple(term.size(self.counts) for term in self._terms(name))

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The kept part of a whole tensor, in memory of its own."""
        plan = self._plan(name, tensor)
        if plan.blocks is None:
            for dim, index in plan.indexed:
                tensor = tensor.index_select(dim, index.to(tensor.device))
            return tensor
        if len(plan.blocks) == 1:
            return tensor[plan.blocks[0][0]].clone(memory_format=torch.contiguous_format)
        out = tensor.new_empty(self.shape(name))
        for whole, part in plan.blocks:
            out[part] = tensor[whole]
        return out

    def scatter_(self, name: str, into: Tensor, tensor: Tensor, *, accumulate: bool = False) -> Tensor:
        """``into`` with the kept part overwritten by ``tensor``, or with ``accumulate`` increased by it."""
        _check_flag(accumulate)
        plan = self.check_part(name, into, tensor)
        if plan.blocks is None:
            return _scatter_indexed(plan.indexed, into, tensor.to(into.dtype), accumulate)
        for whole, part in plan.blocks:
            if accumulate:
                into[whole] += tensor[part]
            else:
                into[whole] = tensor[part]
        return into

    def check_part(self, name: str, into: Tensor, tensor: Tensor) -> "_Plan":
        """Raise an error unless ``tensor`` is what this index set keeps of a tensor like ``into``; else how it lies."""
        plan = self._plan(name, into)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != plan.part:
            raise ValueError(f"{name} {_shape(tensor)}; this index set keeps a part of shape {plan.part}")
        if tensor.is_floating_point() and not (into.is_floating_point() or into.is_complex()):
            raise ValueError(f"{name} is {tensor.dtype} and goes into {into.dtype}, which would cut off its decimals")
        _check_plain(name, into, tensor)
        return plan

    def mask(self, name: str) -> Tensor:
        """True where the sub-model has the coordinate; bool, of the whole tensor's shape."""
        mask = torch.ones((), dtype=torch.bool)
        terms = self._terms(name)
        for i, term in enumerate(terms):
            line = torch.zeros(term.size(self.sizes), dtype=torch.bool)
            line[term.index(self.kept, self.sizes)] = True
            mask = mask & line.reshape([-1 if j == i else 1 for j in range(len(terms))])
        return mask

    def overlap(self, other: "IndexSet") -> "IndexSet":
        """The channels that both keep, in this one's order."""
        _check(other)
        if self.sizes != other.sizes:
            raise ValueError("index sets of different models have no overlap; compose them first")
        both = [a[torch.isin(a, b)] for a, b in zip(self.kept, other.kept, strict=True)]
        return IndexSet(self.axis_map, tuple(both), self.sizes)

    def compose(self, inner: "IndexSet") -> "IndexSet":
        """The index set of a sub-model of this sub-model, seen from outside."""
        _check(inner)
        if inner.sizes != self.counts:
            raise ValueError(
                f"the inner index set is of models of {inner.sizes} channels and this one keeps {self.counts}; compose "
                "it with one of its own sub-models"
            )
        kept = tuple(outer[index] for outer, index in zip(self.kept, inner.kept, strict=True))
        return IndexSet(self.axis_map, kept, self.sizes)

    def within(self, outer: "IndexSet") -> "IndexSet":
        """This index set as seen from inside ``outer``, which must keep all its channels; `compose` undoes it."""
        _check(outer)
        inner = []
        for group, kept, outside in zip(self.axis_map.groups, self.kept, outer.kept, strict=True):
            # Global channel -> its number inside ``outer``, -1 where that does not keep it.
            position = torch.full((outer.sizes[group.id],), -1)
            position[outside] = torch.arange(len(outside))
            if bool((position[kept] < 0).any()):
                raise ValueError(f"group {group.name} keeps channels that the outer sub-model does not have")
            inner.append(position[kept])
        return IndexSet(self.axis_map, tuple(inner), outer.counts)

    def _terms(self, name: str) -> tuple[Term, ...]:
        if not isinstance(name, str) or name not in self.axis_map.dims:
            raise ValueError(f"this model has no tensor {shown(name)}; it has {', '.join(self.axis_map.dims)[:200]}")
        return self.axis_map.dims[name]

    def _plan(self, name: str, whole: Tensor) -> "_Plan":
        terms = self._terms(name)
        plan = self._plans.get(terms)
        if plan is None:
            plan = self._plans[terms] = _plan(terms, self)
        if not isinstance(whole, Tensor) or tuple(whole.shape) != plan.whole:
            raise ValueError(f"{name} {_shape(whole)}; this index set cuts tensors of shape {plan.whole}")
        return plan


def _check(index: "IndexSet") -> None:
    if not isinstance(index, IndexSet):
        raise TypeError(f"{shown(index)} is no index set; give that of a sub-model, such as sub.index")


def _shape(tensor: object) -> str:
    return f"has shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else f"is a {type(tensor).__name__}"


def _check_flag(accumulate: object) -> None:
    if not isinstance(accumulate, bool):
        raise TypeError(f"accumulate is {shown(accumulate)}; it must be true or false")


def _check_plain(name: str, into: Tensor, tensor: Tensor) -> None:
    """Raise an error if a part has no plain numbers that fit into the whole."""
    lost = tensor.is_complex() and not into.is_complex()  # its imaginary part would be
    absent = tensor.is_meta and not into.is_meta
    if lost or absent or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"the part of {shown(name)} is {tensor.dtype}, {tensor.layout} on {tensor.device}, and goes into "
            f"{into.dtype} on {into.device}; give plain numbers, as {into.dtype}"
        )


@dataclass(frozen=True)
class _Plan:
    """How a tensor is cut: rectangles, or one index per scaled axis where there would be too many."""

    whole: tuple[int, ...]
    part: tuple[int, ...]
    blocks: tuple[Block, ...] | None
    indexed: tuple[tuple[int, Tensor], ...]


def _plan(terms: Sequence[Term], index: IndexSet) -> _Plan:
    whole, part = (tuple(term.size(counts) for term in terms) for counts in (index.sizes, index.counts))
    indexed = tuple((i, term.index(index.kept, index.sizes)) for i, term in enumerate(terms) if scales(term))
    runs: list[list[tuple[slice, slice]]] = [[(slice(None), slice(None))] for _ in terms]
    count = 1
    for i, positions in indexed:
        runs[i] = _runs(positions)
        count *= len(runs[i])
        if count > (_MAX_BLOCKS if math.prod(part) > _SMALL_TENSOR or len(indexed) > 1 else 1):
            return _Plan(whole, part, None, indexed)
    blocks = tuple((tuple(r[0] for r in block), tuple(r[1] for r in block)) for block in itertools.product(*runs))
    return _Plan(whole, part, blocks, indexed)


def _runs(positions: Tensor) -> list[tuple[slice, slice]]:
    """(where in the whole, where in the part) of every run of consecutive positions."""
    if not len(positions):
        return []
    numbers = positions.numpy()
    # A run ends where the next position is not the next number.
    edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    starts = numbers[edges[:-1]].tolist()
    return [
        (slice(start, start + b - a), slice(a, b)) for start, a, b in zip(starts, edges[:-1], edges[1:], strict=True)
    ]


def _scatter_indexed(indexed: Sequence[tuple[int, Tensor]], into: Tensor, tensor: Tensor, accumulate: bool) -> Tensor:
    # index_put_ takes any number of axes but is slower than the operations for one.
    if len(indexed) > 1:
        return into.index_put_(_grid(indexed, into), tensor, accumulate=accumulate)
    ((dim, index),) = indexed
    index = index.to(into.device)
    return into.index_add_(dim, index, tensor) if accumulate else into.index_copy_(dim, index, tensor)


def _grid(indexed: Sequence[tuple[int, Tensor]], whole: Tensor) -> tuple[Tensor, ...]:
    """Broadcastable index tensors, one per axis."""
    chosen = dict(indexed)
    lines = [chosen.get(i, torch.arange(n)) for i, n in enumerate(whole.shape)]
    shapes = [[-1 if j == i else 1 for j in range(whole.dim())] for i in range(whole.dim())]
    return tuple(line.reshape(shape).to(whole.device) for line, shape in zip(lines, shapes, strict=True))


class Whole:
    """The index of a whole model: nothing is cut away, and every tensor passes as it is.

    It has the face of an `IndexSet` where models are cut, put back and averaged, also for models that no axis map
    describes because nobody holds less than all of them.
    """

    statistics: tuple[str, ...] = ()

    def covers(self, name: str, tensor: Tensor) -> bool:
        """True: all of every tensor is kept."""
        return True

    def gather(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def check_part(self, name: str, into: Tensor, tensor: Tensor) -> None:
        """Raise an error unless both tensors have one shape."""
        if not isinstance(into, Tensor) or not isinstance(tensor, Tensor) or into.shape != tensor.shape:
            raise ValueError(f"{shown(name)} {_shape(into)} and its new value {_shape(tensor)}; give two of one shape")
        _check_plain(name, into, tensor)

    def scatter_(self, name: str, into: Tensor, tensor: Tensor, *, accumulate: bool = False) -> Tensor:
        """``into`` overwritten by ``tensor``, or with ``accumulate`` increased by it."""
        _check_flag(accumulate)
        self.check_part(name, into, tensor)
        return into.add_(tensor) if accumulate else into.copy_(tensor)


WHOLE = Whole()
