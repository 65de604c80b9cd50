"""State: what an epoch takes and gives. Frozen; nothing in it is edited in place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from hetperm.params import Keep, Params, mixed


@dataclass(frozen=True)
class Work:
    """Logical work done so far: what a deployment would pay, whatever the engine did to get there."""

    visits: int = 0
    rounds: int = 0
    client_steps: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    skipped: int = 0  # visits to hosts that were away

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class State:
    """Everything an algorithm carries from one epoch to the next.

    Attributes:
        r: epochs done; `w`: the global model; `v`: every client's personal model.
        alpha: (N, N) mixing weights, or None for algorithms that have none.
        tail: the running mean of v over the last epochs, once it has begun, and how many are in it.
        memory: what else an algorithm keeps, models by name (the centre of a projection, the models of clusters).
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
        """The models clients would use now: the tail average where it has begun."""
        return self.tail if self.tail is not None else self.v

    def averaged(self, begins: float, keep: Keep) -> "State":
        """The state with v taken into the tail average, from epoch ``begins`` on; ``keep``: where its models wait."""
        if self.r < begins:
            return self
        # A running mean: no epoch's models are kept for it.
        count = self.tail_count + 1
        if self.tail is None:
            return replace(self, tail=self.v, tail_count=1)
        pairs = zip(self.tail, self.v, strict=True)
        tail = tuple(keep(mixed((old, 1 - 1 / count), (new, 1 / count))) for old, new in pairs)
        return replace(self, tail=tail, tail_count=count)


def tail_begins(tail_average: float, epochs: int) -> float:
    """The first epoch, counted from 1, that the tail average takes in; never (inf) without one.

    Example:
        >>> tail_begins(0.5, epochs=5), tail_begins(1.0, epochs=5), tail_begins(0.0, epochs=5)
        (3, 1, inf)
    """
    return epochs - math.ceil(tail_average * epochs) + 1 if tail_average else math.inf
