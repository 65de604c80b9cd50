"""A simulated clock: how long devices of a capacity profile would take, round by round, whatever this machine does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hetperm.device.gradients import Report
from hetperm.engine.task import Engine, Failure, Heard, Task, Visit
from hetperm.profile import Tier


@dataclass(frozen=True)
class Speed:
    """How fast a device without a slow factor trains.

    Attributes:
        per_mac: seconds of training for each multiply-add of the forward pass; the backward pass is in it.
    """

    per_mac: float

    @classmethod
    def of_step(cls, seconds: float, *, macs: int, batch_size: int) -> "Speed":
        """The speed of a machine that takes ``seconds`` for one training step.

        Args:
            macs: multiply-adds of the forward pass of a sample.

        Example:
            >>> Speed.of_step(0.5, macs=10_000, batch_size=5)
            Speed(per_mac=1e-05)
        """
        return cls(seconds / max(1, macs * batch_size))  # a model without products has no multiply-adds

    def seconds(self, tier: Tier, macs: int, samples: int, *, down: int, up: int) -> float:
        r"""Seconds of a visit: the model is sent, trained on ``samples`` samples, and sent back.

        .. math:: 8 b_{down} / B_{down} + s \, c \, \text{macs} \cdot \text{samples} + 8 b_{up} / B_{up}

        with s the tier's slow factor, c `per_mac`, and B in bits a second. If the profile does not give the speed of
        the network, the transfer takes no time.

        Example:
            >>> tier = Tier("a", 1, 1.0, down_mbps=8, up_mbps=4, slow=2)
            >>> Speed(per_mac=1e-6).seconds(tier, 100_000, 10, down=3_000_000, up=1_000_000)
            7.0
        """
        # Megabits are decimal, as networks are sold; only memory is counted in powers of two.
        wire = sum(8 * size / (1e6 * mbps) for size, mbps in ((down, tier.down_mbps), (up, tier.up_mbps)) if mbps)
        return wire + (tier.slow or 1) * self.per_mac * macs * samples


# Of a run, which must not depend on how fast this machine is: our assumption, 10^9 multiply-adds of a forward pass a
# second, backward pass included, on a device without a slow factor.
ASSUMED = Speed(per_mac=1e-9)


class Clock:
    """An engine that lets another do the work, and adds up the time that devices would take; every `run` is one round.

    Hosts of a round work at the same time, so a round takes as long as its slowest host.

    Args:
        tiers: (N,) the tier of every client; `samples`: (N,) how many training samples it has.
        macs: width -> multiply-adds of the forward pass of a sample.

    Attributes:
        seconds: simulated seconds so far; `sent`: bytes down and up so far.
        uploads: whether hosts send back their results, or keep them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tiers: Sequence[Tier],
        samples: Sequence[int],
        macs: Callable[[float], int],
        speed: Speed,
    ):
        self.engine, self.tiers, self.samples, self.macs, self.speed = engine, tiers, samples, macs, speed
        self.seconds, self.sent, self.uploads = 0.0, 0, True
        self.hosts_may_be_absent = getattr(engine, "hosts_may_be_absent", False)

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the other engine."""
        outcomes = self.engine.run(tasks)
        busy: dict[int, float] = {}  # host -> its seconds: tasks of one host follow each other
        for task, outcome in zip(tasks, outcomes, strict=True):
            busy[task.host] = busy.get(task.host, 0.0) + self._seconds(task, outcome)
        # Hosts work at the same time, so the slowest one ends the round.
        self.seconds += max(busy.values(), default=0.0)
        return outcomes

    @property
    def flow(self) -> Callable[[Sequence[Visit]], None] | None:
        """Runs visits of several rounds; None if the other engine cannot, or its hosts may be absent."""
        inner = None if self.hosts_may_be_absent else getattr(self.engine, "flow", None)
        return None if inner is None else partial(self._flow, inner)

    def _flow(self, inner: Callable[[Sequence[Visit]], None], visits: Sequence[Visit]) -> None:
        busy: dict[int, float] = {}  # by the identity of a visit

        def hear(visit: Visit, task: Task, outcome: Any) -> None:
            busy[id(visit)] = self._seconds(task, outcome)

        inner([Heard(visit, hear) for visit in visits])
        # A round takes as long as its slowest host, however the visits of several rounds were mixed here.
        for _, row in groupby(visits, key=lambda visit: visit.round):
            self.seconds += max(busy[id(visit)] for visit in row)

    def _seconds(self, task: Task, outcome: Any) -> float:
        """The time that a device would take for a task; its bytes are counted."""
        j, down = task.host, size(task.params)
        # A task that failed was sent its model all the same, and sends nothing back.
        up = size(outcome) if self.uploads else 0
        self.sent += down + up
        samples = task.update.samples(self.samples[j])
        return self.speed.seconds(self.tiers[j], self.macs(task.width), samples, down=down, up=up)

    def close(self) -> None:
        """Close the other engine."""
        self.engine.close()


def size(sent: Any) -> int:
    """Bytes of the tensors in a message; a report also carries its noise and n (8 bytes each)."""
    if isinstance(sent, Failure):
        return 0
    if isinstance(sent, Report):  # a dataclass is one leaf to torch
        return size(sent.gradient) + 16
    return sum(x.numel() * x.element_size() for x in tree_leaves(sent) if isinstance(x, Tensor))
