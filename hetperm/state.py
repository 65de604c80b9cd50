"""State: what an epoch takes and returns. It is frozen, and its tensors are never edited in place."""

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hetperm.params import Keep, Params, mixed


@dataclass(frozen=True)
class Work:
    """Work done so far, as a deployment would count it; it does not depend on the engine."""

    visits: int = 0
    rounds: int = 0
    client_steps: float = 0.0  # mini-batch gradients; a loss counts as a third of one
    bytes_down: int = 0
    bytes_up: int = 0
    skipped: int = 0  # visits to hosts that were away
    macs: float = 0.0  # multiply-adds; a gradient takes three times those of a forward pass
    missed: float = 0.0  # mini-batch gradients that clients would have computed, had they not been away
    asked: tuple[int, ...] = ()  # (N,) how often each client was asked for something; empty if it was not counted
    absent: tuple[int, ...] = ()  # (N,) how often it was away then

    def __add__(self, other: "Work") -> "Work":
        return Work(*(_sum(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def figures(self) -> dict[str, float]:
        """The counts of what was done, without what was not."""
        return {name: value for name, value in vars(self).items() if name not in ("missed", "asked", "absent")}


def _sum(a: float | tuple[int, ...], b: float | tuple[int, ...]) -> float | tuple[int, ...]:
    """The sum of two counts, or of two counts for each client, of which an empty one is zero for all."""
    if not isinstance(a, tuple):
        return a + b
    return tuple(map(operator.add, a, b)) if a and b else a or b


@dataclass(frozen=True)
class State:
    """Everything an algorithm carries from one epoch to the next.

    Attributes:
        r: epochs done so far.
        w: the global model.
        v: every client's personal model.
        alpha: (N, N) mixing weights; None for algorithms that have none.
        tail: the tail average of v; None before its first epoch.
        tail_count: the number of epochs in the tail average.
        work: the work done so far.
        memory: other models that an algorithm keeps, by name (the centre of a projection, the models of clusters).
    """

    r: int
    w: Params
    v: tuple[Params, ...]
    alpha: Tensor | None = None
    tail: tuple[Params, ...] | None = None
    tail_count: int = 0
    work: Work = Work()
    memory: Mapping[str, Params] = field(default_factory=dict)

    @property
    def deployed(self) -> tuple[Params, ...]:
        """The models that clients would deploy now: the tail average if there is one, else v."""
        return self.tail if self.tail is not None else self.v

    def averaged(self, begins: float, keep: Keep) -> "State":
        """The state with v added to the tail average, if epoch ``begins`` has been reached.

        Args:
            begins: the first epoch of the tail average.
            keep: stores the models of the average.
        """
        # r has been raised already: it is the number of the epoch that has just ended.
        if self.r < begins:
            return self
        # A running mean, so that the models of single epochs need not be kept.
        count = self.tail_count + 1
        if self.tail is None:
            return replace(self, tail=self.v, tail_count=1)
        pairs = zip(self.tail, self.v, strict=True)
        tail = tuple(keep(mixed((old, 1 - 1 / count), (new, 1 / count))) for old, new in pairs)
        return replace(self, tail=tail, tail_count=count)


def tail_begins(tail_average: float, epochs: int) -> float:
    """The first epoch in the tail average, counted from 1; inf if there is no tail average.

    Example:
        >>> tail_begins(0.5, epochs=5), tail_begins(1.0, epochs=5), tail_begins(0.0, epochs=5)
        (3, 1, inf)
    """
    return epochs - math.ceil(tail_average * epochs) + 1 if tail_average else math.inf


# What a state may hold

DTYPES = (  # of its tensors: those that checkpoints have names for
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
IN_PARTS = ("client_steps", "macs", "missed")  # counts of the work that need not be whole


def is_whole(value: Any) -> bool:
    """Whether this is a whole number from 0."""
    return isinstance(value, int) and is_count(value)


def strange_count(work: Work) -> str | None:
    """The first of the counts that cannot be one; None if all can.

    Example:
        >>> strange_count(Work(visits=3, macs=0.5)), strange_count(Work(visits=0.5))
        (None, 'visits')
    """
    for name, value in vars(work).items():
        if name in ("asked", "absent"):
            good = isinstance(value, tuple) and all([is_whole(count) for count in value])
        else:
            good = is_count(value) if name in IN_PARTS else is_whole(value)
        if not good:
            return name
    return None


def is_count(value: Any) -> bool:
    """Whether this can be a count of the work."""
    # Of whole numbers, too, reports take none that a float cannot hold.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def is_model(value: Any) -> bool:
    """Whether this is a table of tensors."""
    return isinstance(value, Mapping) and all([isinstance(x, Tensor) for x in value.values()])


def has_values(x: Any) -> bool:
    """Whether this is a tensor whose numbers can be read, dense or sparse (COO)."""
    if not isinstance(x, Tensor) or is_lazy(x) or x.is_nested or x.is_meta:
        return False
    if x.layout != torch.strided:
        return x.layout == torch.sparse_coo
    # Tensors of special kinds have no memory of their own; of an empty one there is none.
    return not x.is_neg() and (x.data_ptr() != 0 or x.numel() == 0)


def can_be_kept(x: Any) -> bool:
    """Whether this is a tensor that a checkpoint can hold."""
    return has_values(x) and x.dtype in DTYPES
