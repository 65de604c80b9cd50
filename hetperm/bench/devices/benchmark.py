"""What a width costs, predicted and measured, and whether it fits under the limit of each tier."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.bench.devices.device import Devices, Exceeded
from hetperm.bench.devices.limits import LARGEST_SLACK, Limit, allowed_bytes, slack
from hetperm.bench.devices.measure import Peak, allocated, timed, training, watched
from hetperm.profile import Profile, Tier
from hetperm.runs.clock import Speed
from hetperm.runs.memory import MB
from submodels import Budget, Cost, ScalableModel, zoo
from submodels.budget import needs
from submodels.cost import count

Say = Callable[[str], object]


@dataclass(frozen=True)
class Network:
    """A model that can be cut to widths, and what it is trained on.

    Attributes:
        scalable: None for a model that cannot be cut; it has width 1 only.
        example: (1, ...) an input.
    """

    module: nn.Module
    scalable: ScalableModel | None
    example: Tensor
    batch_size: int

    def at(self, width: float) -> nn.Module:
        """The model of a width."""
        return self.module if self.scalable is None else self.scalable.extract(width).module

    def cost(self, width: float) -> Cost:
        """The counted cost of a width."""
        if self.scalable is None:
            return count(self.module, self.example, batch_size=self.batch_size)
        return self.scalable.cost(width, self.batch_size)


@dataclass(frozen=True)
class Measured:
    """What a width costs: as counted, as torch's allocator sees it, and as the operating system sees it.

    Attributes:
        tensors: bytes of tensors at the peak.
        peak: bytes of the whole process above its baseline.
        seconds: time of a step on one thread of this machine.
    """

    width: float
    cost: Cost
    tensors: int
    peak: Peak
    seconds: float

    @property
    def overhead_bytes(self) -> int:
        """Bytes that count against the limit and do not belong to tensors."""
        return (self.peak.charged or 0) - self.tensors


def network(name: str, shape: Sequence[int], *, batch_size: int, profile: Profile, seed: int = 0) -> Network:
    """The model of that name with ten classes, cut if the profile has widths below 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = zoo.build(name, in_channels=shape[0], num_classes=10, image_size=tuple(shape[1:]))
    example, scalable = torch.zeros(1, *shape), None
    if profile.widths[0] < 1:
        try:
            scalable = ScalableModel(module, example)
        except ValueError as error:
            raise ValueError(f"{name} cannot be cut ({error}); use --capacity-profile homogeneous") from error
    return Network(module, scalable, example, batch_size)


def check(profile: Profile, net: Network, name: str) -> None:
    """Raise an error if, by the counted costs, no tier can train its width of the model."""
    budgets = {tier.name: tier.train_mb for tier in profile.tiers}
    # A tier without a budget can train anything.
    if None in budgets.values():
        return
    needed = {tier.name: net.cost(tier.width).train_bytes / MB for tier in profile.tiers}
    if all([needed[tier] > budgets[tier] for tier in budgets]):
        tier = min(budgets, key=lambda tier: needed[tier] / budgets[tier])
        raise ValueError(
            f"{name} fits no tier of profile {profile.name!r} at batch size {net.batch_size}: tier {tier!r} comes "
            f"nearest and needs {needed[tier]:.3g} MB of {budgets[tier]:g}; lower --batch-size or --input, take a "
            "smaller model, or raise train_mb in a profile of your own"
        )


# Measuring


def measure(
    net: Network, width: float, devices: Devices, timer: Devices, limit: Limit | None, *, rehearsed: bool
) -> Measured:
    """What a width costs; memory and time are measured in separate processes.

    Args:
        devices: processes without caches, for memory.
        timer: processes with the caches that torch has by default, for time.
    """
    module, example, size = net.at(width), net.example, net.batch_size
    work = training(module, example, batch_size=size, steps=1)
    try:
        return Measured(
            width,
            net.cost(width),
            tensors=allocated(module, example, batch_size=size),
            peak=devices.do(partial(watched, work, limit, rehearsed=rehearsed)),
            seconds=timer.do(partial(timed, module, example, batch_size=size)),
        )
    except RuntimeError as error:
        raise ValueError(
            f"the model takes no training step at width {width:g} ({error}); raise --batch-size"
        ) from error


def calibrated(
    net: Network, widths: Sequence[float], devices: Devices, timer: Devices, limit: Limit | None, *, say: Say
) -> tuple[dict[float, Measured], bool]:
    """width -> what it costs, and whether work must be rehearsed to keep the slack small enough."""

    def every(rehearsed: bool) -> dict[float, Measured]:
        measured = {}
        for width in widths:
            say(f"measuring width {width:g}{' again, with kernels compiled before' if rehearsed else ''}")
            measured[width] = measure(net, width, devices, timer, limit, rehearsed=rehearsed)
        return measured

    # Without a rehearsal first: it is one more visit, needed only if compiled kernels make the slack too large.
    fresh = every(False)
    if limit is None or slack([width.overhead_bytes for width in fresh.values()]) <= LARGEST_SLACK:
        return fresh, False
    # Only the charged bytes are replaced: limits are about these, and the other figures were measured well.
    return {
        width: replace(fresh[width], peak=replace(fresh[width].peak, charged=again.peak.charged))
        for width, again in every(True).items()
    }, True


# Verdicts

FITS, TOO_LARGE, UNKNOWN = "fits", "does not fit", "undecidable"


@dataclass(frozen=True)
class Verdict:
    """Whether a tier fits, as the operating system decided.

    Attributes:
        verdict: "fits", "does not fit" or "undecidable"; `reason`: a remark about it, or an empty text.
        own, above: how the tier's own width and the next larger one ended: "finished", or how it was stopped; None if
            it was not run.
        wider: the next larger width; None if there is none.
        allowed: bytes above the baseline; None: no limit.
    """

    verdict: str
    reason: str = ""
    own: str | None = None
    wider: float | None = None
    above: str | None = None
    allowed: int | None = None


@dataclass(frozen=True)
class Enforcement:
    """How limits are enforced.

    Attributes:
        slack: bytes beyond the budget; `device_mb`: what a process may take in all; None: no such limit.
        why_not: why nothing can be decided; empty if it can.
    """

    devices: Devices
    limit: Limit | None
    slack: int
    rehearsed: bool
    device_mb: float | None = None
    why_not: str = ""

    def allowed_bytes(self, tier: Tier) -> int | None:
        """Bytes that a device of the tier may take above the baseline; None: no limit."""
        if tier.train_mb is None or self.limit is None:
            return None
        return allowed_bytes(tier.train_mb, self.slack, baseline=self.devices.baseline, device_mb=self.device_mb)

    def ends(self, net: Network, width: float, allowed: int) -> str | None:
        """How two steps at a width end under a limit: None if they finish, otherwise in words."""
        work = training(net.at(width), net.example, batch_size=net.batch_size, steps=2)
        try:
            self.devices.do(work, allowed=allowed, limit=self.limit, rehearsed=self.rehearsed)
        except Exceeded as error:
            return str(error)
        return None


def holds(devices: Devices, limit: Limit) -> bool:
    """Whether a limit is really enforced here: a process may take what it is allowed, and no more."""
    # Both sides are tried: a limit that refuses everything would pass the second test alone.
    devices.do(partial(take, 8 * MB), allowed=32 * MB, limit=limit)
    with suppress(Exceeded):
        devices.do(partial(take, 64 * MB), allowed=32 * MB, limit=limit)
        return False
    return True


def take(size: int) -> None:
    """Allocate ``size`` bytes, and read one byte of every page."""
    bytes(memoryview(bytearray(size))[::4096])


def judge(tier: Tier, profile: Profile, net: Network, enforcement: Enforcement) -> Verdict:
    """Whether the tier's own width finishes under its limit; the next larger one should not."""
    wider = min((width for width in profile.widths if width > tier.width), default=None)
    cost = net.cost(tier.width)
    others = {name: limit for name, limit in tier.limits().items() if name != "train_mb"}
    broken = Budget(**others).excess(cost) if others else {}
    if broken:  # nothing to run: multiply-adds and traffic are counted, not enforced
        need = needs(cost)
        over = ", ".join(f"{name} {need[name]:.3g} of {others[name]:g}" for name in broken)
        return Verdict(TOO_LARGE, f"needs {over}", wider=wider)
    allowed = enforcement.allowed_bytes(tier)
    if tier.train_mb is None:
        return Verdict(UNKNOWN, "the profile gives this tier no train_mb", wider=wider)
    if allowed is None or enforcement.why_not:
        return Verdict(UNKNOWN, enforcement.why_not or "memory is not limited", wider=wider)
    own = enforcement.ends(net, tier.width, allowed)
    # The next larger width should be stopped: only then does it mean something that this one was not.
    above = None if wider is None else enforcement.ends(net, wider, allowed) or "finished"
    reason = f"width {tier.width:g} was {own}" if own else ""
    if not own and above == "finished":  # the limit does not tell the two apart
        reason = f"so does width {wider:g}"
    verdict = TOO_LARGE if own else FITS
    return Verdict(verdict, reason, own=own or "finished", wider=wider, above=above, allowed=allowed)


# Rows


def rows(
    profile: Profile, measured: Mapping[float, Measured], verdicts: Mapping[str, Verdict], speed: Speed, *, samples: int
) -> Iterator[dict[str, Any]]:
    """A row for every tier: what a visit of its width costs, and whether that fits.

    Args:
        samples: samples in a visit: local steps times batch size.
    """
    for tier in profile.tiers:
        width, verdict = measured[tier.width], verdicts[tier.name]
        cost, peak = width.cost, width.peak
        yield {
            "tier": tier.name,
            "width": tier.width,
            "params": cost.params,
            "mmacs": cost.macs / 1e6,
            "predicted_mb": cost.train_bytes / MB,
            "measured_mb": None if peak.resident is None else peak.resident / MB,
            "budget_mb": tier.train_mb,
            "budget_mmacs": tier.mmacs,
            "limit_mb": None if verdict.allowed is None else verdict.allowed / MB,
            "step_ms": 1000 * width.seconds,
            "device_step_ms": 1000 * width.seconds * (tier.slow or 1),
            "down_mb": cost.wire_bytes / MB,
            "up_mb": cost.wire_bytes / MB,
            "visit_seconds": speed.seconds(tier, cost.macs, samples, down=cost.wire_bytes, up=cost.wire_bytes),
            "own": verdict.own,
            "wider": verdict.wider,
            "above": verdict.above,
            "verdict": verdict.verdict,
            "reason": verdict.reason,
        }
