"""Budget: what a device can spend on one training step, and the largest width it pays for."""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Rational, Real

from submodels.cost import MB, Cost
from submodels.texts import shown


@dataclass(frozen=True)
class Budget:
    """Upper limits on a `Cost`; what is None is not limited.

    Attributes:
        train_mb: peak memory of a training step, in MB of 2^20 bytes.
        mmacs: million multiply-adds of the forward pass of a sample.
        wire_mb: what travels one way in one visit, in MB of 2^20 bytes.

    Example:
        >>> Budget(train_mb=1, wire_mb=3).fits(Cost(params=1, macs=1, train_bytes=2**20, wire_bytes=4))
        True
    """

    train_mb: float | None = None
    mmacs: float | None = None
    wire_mb: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not _positive(limit):
                raise ValueError(
                    f"{name} {shown(limit)} is no limit; give a positive finite number, or None for no limit"
                )
        if not self.limits():
            raise ValueError(f"a budget without a limit fits everything; give at least one of {', '.join(vars(self))}")

    def limits(self) -> dict[str, float]:
        """Name -> limit, of those that were given."""
        return {name: limit for name, limit in vars(self).items() if limit is not None}

    def excess(self, cost: Cost) -> dict[str, float]:
        """Name -> by how much the cost breaks the limit, in the limit's unit; empty if it fits."""
        if not isinstance(cost, Cost):
            raise TypeError(f"the cost is {shown(cost)}; it must be that of a width, as ScalableModel.cost gives it")
        need = needs(cost)
        return {name: need[name] - limit for name, limit in self.limits().items() if need[name] > limit}

    def fits(self, cost: Cost) -> bool:
        """Whether the cost stays within every limit."""
        return not self.excess(cost)


def needs(cost: Cost) -> dict[str, float]:
    """Name of a limit -> what the cost takes of it, in the limit's unit."""
    return {"train_mb": cost.train_bytes / MB, "mmacs": cost.macs / 1e6, "wire_mb": cost.wire_bytes / MB}


def largest(cost_of: Callable[[float], Cost], budget: Budget, widths: Iterable[float]) -> float:
    """The largest of the widths whose cost fits the budget; the answer itself was priced, never inferred.

    The search is binary, since costs do not fall as the width grows: of a thousand widths, twelve are priced.

    Args:
        cost_of: the cost of a width.
        budget: the limits.
        widths: a grid; or every width at which the sub-model changes, and the answer is the largest width there is.

    Example:
        >>> quadratic = lambda width: Cost(params=0, macs=int(1e6 * width**2), train_bytes=0, wire_bytes=0)
        >>> largest(quadratic, Budget(mmacs=0.3), widths=[0.25, 0.5, 0.75, 1.0])
        0.5
    """
    ordered = _ordered(widths)
    if budget.fits(cost_of(ordered[-1])):
        return ordered[-1]
    smallest = cost_of(ordered[0])
    if not budget.fits(smallest):
        raise ValueError(_refusal(ordered[0], smallest, budget))
    fitting, broken = 0, len(ordered) - 1  # positions: the first is known to fit, the second not to
    while broken - fitting > 1:
        middle = (fitting + broken) // 2
        if budget.fits(cost_of(ordered[middle])):
            fitting = middle
        else:
            broken = middle
    return ordered[fitting]


def _ordered(widths: Iterable[float]) -> list[float]:
    widths = list(widths)
    if not widths:
        raise ValueError("no widths to choose from; give at least one in (0, 1], such as 0.25")
    for width in widths:
        if not _positive(width) or width > 1:
            raise ValueError(f"width {shown(width)} is outside (0, 1]; leave it out, or write 0.25 for a quarter")
    return sorted(set(widths))


def _positive(value: object) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    # A whole number or a fraction may be larger than any float, and is compared and not converted.
    return 0 < value <= sys.float_info.max if isinstance(value, Rational) else math.isfinite(value) and value > 0


_MEANS = {
    "train_mb": "MB of training memory",
    "mmacs": "million multiply-adds a sample",
    "wire_mb": "MB on the wire",
}


def _refusal(width: float, cost: Cost, budget: Budget) -> str:
    """One sentence: what does not fit, what the smallest sub-model needs, and what to do."""
    broken, need, limits = budget.excess(cost), needs(cost), budget.limits()
    remedy = "raise " + " and ".join(f"{name} to {_rounded_up(need[name])}" for name in broken)
    if list(broken) == ["train_mb"]:
        remedy += " or lower the batch size"
    return (
        f"no width fits {' and '.join(f'{name}={float(limits[name]):g}' for name in broken)}: "
        f"the smallest sub-model (width {float(width):.4g}) needs "
        f"{' and '.join(f'{need[name]:.3g} {_MEANS[name]}' for name in broken)}; {remedy}"
    )


def _rounded_up(value: float) -> str:
    """Two digits, and never less than the value."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.6g}"
