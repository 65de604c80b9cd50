"""A simulated clock: how long devices of a capacity profile would take, round by round, whatever this machine does."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from hetperm.device.bench import full_gradient, sgd_update
from hetperm.engine.task import Failure, Task
from hetperm.profile import Tier
from hetperm.server.estimate import Report, report
from hetperm.server.global_model import batch_gradient

if TYPE_CHECKING:
    from hetperm.bench.devices.benchmark import Measured


@dataclass(frozen=True)
class Speed:
    """How fast a device without a slow factor trains.

    Attributes:
        per_mac: seconds of training for each multiply-add of the forward pass; the backward pass is in it.
    """

    per_mac: float

    @classmethod
    def of(cls, measured: Mapping[float, "Measured"], *, batch_size: int) -> "Speed":
        """The speed of this machine at the largest width: small models are slowed by overhead that is not theirs."""
        largest = measured[max(measured)]
        return cls(largest.seconds / max(1, largest.cost.macs * batch_size))

    def seconds(self, tier: Tier, macs: int, samples: int, *, down: int, up: int) -> float:
        r"""Seconds of a visit: the model comes, is trained on so many samples, and goes.

        .. math:: 8 b_{down} / B_{down} + s \, c \, \text{macs} \cdot \text{samples} + 8 b_{up} / B_{up}

        with s the tier's slow factor, c `per_mac`, and B in bits a second; a speed that the profile does not give costs
        no time.

        Example:
            >>> tier = Tier("a", 1, 1.0, down_mbps=8, up_mbps=4, slow=2)
            >>> Speed(per_mac=1e-6).seconds(tier, 100_000, 10, down=3_000_000, up=1_000_000)
            7.0
        """
        wire = sum(8 * size / (1e6 * mbps) for size, mbps in ((down, tier.down_mbps), (up, tier.up_mbps)) if mbps)
        return wire + (tier.slow or 1) * self.per_mac * macs * samples


# What a host computes: function -> (its options, samples that the host has) -> samples it takes gradients of
SAMPLES: dict[Callable, Callable[[Mapping[str, Any], int], int]] = {
    sgd_update: lambda how, n: how["steps"] * min(how["batch_size"], n),
    batch_gradient: lambda how, n: min(how["batch_size"], n),
    full_gradient: lambda how, n: n,
    report: lambda how, n: n,
}


class Clock:
    """An engine that has another do the work, and counts what it would take devices: every `run` is one round.

    Hosts of a round work at the same time, so a round takes as long as its slowest host.

    Args:
        tiers: (N,) the tier of every client; `samples`: (N,) how many it has.
        macs: width -> multiply-adds of the forward pass of a sample.

    Attributes:
        seconds: simulated so far; `sent`: bytes down and up so far.
        uploads: whether what hosts make is sent back; not when they keep it.
    """

    def __init__(
        self,
        engine,
        *,
        tiers: Sequence[Tier],
        samples: Sequence[int],
        macs: Callable[[float], int],
        speed: Speed,
    ):
        self.engine, self.tiers, self.samples, self.macs, self.speed = engine, tiers, samples, macs, speed
        self.seconds, self.sent, self.uploads = 0.0, 0, True

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes that the other engine gives."""
        outcomes = self.engine.run(tasks)
        took: dict[int, float] = {}
        for task, outcome in zip(tasks, outcomes, strict=True):
            j, down = task.host, size(task.params)
            up = size(outcome) if self.uploads else 0
            work = samples_of(task, self.samples[j])
            seconds = self.speed.seconds(self.tiers[j], self.macs(task.width), work, down=down, up=up)
            took[j] = took.get(j, 0.0) + seconds
            self.sent += down + up
        self.seconds += max(took.values(), default=0.0)
        return outcomes

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item: the server's work, which takes no time here."""
        return self.engine.map(function, items)

    def close(self) -> None:
        """Nothing; the other engine is closed."""
        self.engine.close()


def samples_of(task: Task, n: int) -> int:
    """How many samples a task takes gradients of, at a host that has n.

    Example:
        >>> from functools import partial
        >>> samples_of(Task(partial(sgd_update, steps=5, batch_size=10, lr=0.1), {}, host=0, seed=0), n=8)
        40
    """
    function, how = getattr(task.update, "func", task.update), getattr(task.update, "keywords", {})
    if function not in SAMPLES:
        known = ", ".join(each.__name__ for each in SAMPLES)
        raise ValueError(f"the clock does not know how long {function.__name__} takes; it knows {known}")
    return SAMPLES[function](how, n)


def size(sent: Any) -> int:
    """Bytes of the tensors in what is sent; a report also says its noise and n (8 bytes each)."""
    if isinstance(sent, Failure):
        return 0
    if isinstance(sent, Report):
        return size(sent.gradient) + 16
    return sum(x.numel() * x.element_size() for x in tree_leaves(sent) if isinstance(x, Tensor))
