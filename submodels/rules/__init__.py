"""One rule per ATen operation: how the axes of its operands and results relate.

A rule is ``rule(t, out, *args, **kwargs)``: ``t[x]`` are the axes of tensor x, ``t[x] = axes`` sets them. It unifies
what the operation forces to be equal, freezes what it reads by position, and tags axes whose channels it mixes in a
way that a missing channel changes (a mean divides by their number). An operation without a rule freezes every axis
it touches: safe, and reported.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from submodels.axes import fixed, freeze, is_frozen
from submodels.rules import contracting, indexing, moving, reducing
from submodels.rules.operands import outputs, pointwise

RULES: dict[str, Callable[..., None]] = {
    **moving.RULES,
    **contracting.RULES,
    **reducing.RULES,
    **indexing.RULES,
}

# Pointwise operations that torch does not tag as such.
POINTWISE = frozenset(
    "clone detach alias _to_copy contiguous lift_fresh lift_fresh_copy native_dropout copy bernoulli dropout fill zero "
    "ones_like zeros_like empty_like full_like rand_like randn_like normal uniform exponential random _prelu_kernel "
    "log_normal masked_fill where native_dropout_backward hardswish hardsigmoid hardtanh".split()
)


def apply(t, name: str, elementwise: bool, args: tuple, kwargs: dict, out: Any, inputs: list[Tensor]) -> bool:
    """True if a rule explained the operation; else every axis it touches has been frozen."""
    try:
        if name in RULES:
            RULES[name](t, out, *args, **kwargs)
            return True
        if elementwise or name in POINTWISE:
            pointwise(t, out, inputs)
            return True
    except (NotImplementedError, AssertionError, IndexError, ValueError, TypeError, AttributeError):
        pass  # a rule that cannot cope freezes, like an operation without one
    harmless = all(is_frozen(axis) for x in inputs for axis in t[x])
    for x in inputs:
        for axis in t[x]:
            freeze(axis, f"op:{name}")
    for o in outputs(out):
        t[o] = [fixed(n, f"op:{name}") for n in o.shape]
    return harmless
