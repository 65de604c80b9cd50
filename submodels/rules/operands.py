"""What rules have in common: lining up the axes of operands and results."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from submodels.axes import Axis, fixed, freeze, unify


class Inexpressible(Exception):
    """A rule met a call whose axes it cannot relate; the call then freezes every axis it touches."""


def require(condition: object, why: str) -> None:
    """Refuse a call that a rule does not cover; ``why`` says what it is about."""
    if not condition:
        raise Inexpressible(why)


def same(t: Mapping[Tensor, list[Axis]], axes: list[Axis], others: list[Axis]) -> None:
    """Unify two lists of axes from the back, as broadcasting aligns them; size-1 axes are broadcast."""
    for a, b in zip(reversed(axes), reversed(others), strict=False):
        if a.size == b.size:
            unify(a, b)


def outputs(out: Any) -> list[Tensor]:
    """The tensors among the results of an operation, as a list."""
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor)]


def pointwise(t, out, inputs: list[Tensor]) -> None:
    """Equal positions are equal axes, as broadcasting aligns them."""
    for o in outputs(out):
        axes: list[Axis | None] = [None] * o.dim()
        for x in inputs:
            for i, axis in enumerate(reversed(t[x]), start=1):
                if i > o.dim() or axis.size != o.shape[-i]:
                    continue
                if axes[-i] is None:
                    axes[-i] = axis
                else:
                    unify(axes[-i], axis)
        t[o] = [axis or fixed(size, "constant") for axis, size in zip(axes, o.shape, strict=True)]


def resized(axis: Axis, size: int, why: str) -> Axis:
    """The axis if its size did not change, else a fixed one: its positions were read one by one."""
    if axis.size == size:
        return axis
    freeze(axis, why)
    return fixed(size, why)
