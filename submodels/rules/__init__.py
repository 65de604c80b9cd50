"""One rule per ATen operation: how the axes of its operands and results relate.

A rule is ``rule(t, out, *args, **kwargs)``: ``t[x]`` are the axes of tensor x, ``t[x] = axes`` sets them. It unifies
what the operation forces to be equal, freezes what it reads by position, and tags axes whose channels it mixes in a
way that a missing channel changes (a mean divides by their number). An operation without a rule freezes every axis
it touches: safe, and reported. So does a call that a rule refuses (`operands.require`); any other exception in a rule
is a bug in the rule and comes out as a `RuleError`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from submodels.axes import fixed, freeze, is_frozen
from submodels.rules import contracting, indexing, losses, moving, reducing, scattering
from submodels.rules.operands import Inexpressible, outputs, pointwise

RULES: dict[str, Callable[..., None]] = {
    **moving.RULES,
    **contracting.RULES,
    **reducing.RULES,
    **indexing.RULES,
    **scattering.RULES,
    **losses.RULES,
}

# Pointwise operations that torch does not tag as such; gradients of activations are met where forwards differentiate.
POINTWISE = frozenset(
    "clone detach alias _to_copy contiguous lift_fresh lift_fresh_copy native_dropout copy bernoulli dropout fill "
    "zero ones_like zeros_like empty_like full_like rand_like randn_like normal uniform exponential random "
    "_prelu_kernel log_normal poisson cauchy geometric _standard_gamma rrelu_with_noise log_sigmoid_forward "
    "masked_fill where native_dropout_backward hardswish hardsigmoid hardtanh polar complex "
    "fake_quantize_per_tensor_affine_cachemask softplus_backward elu_backward gelu_backward silu_backward "
    "mish_backward hardtanh_backward hardswish_backward hardsigmoid_backward leaky_relu_backward "
    "log_sigmoid_backward".split()
)

# Operations that hand numbers on, all or some of them, and compute nothing.
HANDING_ON = frozenset(
    "slice narrow split split_with_sizes alias detach clone _to_copy contiguous view _unsafe_view reshape expand "
    "squeeze unsqueeze transpose permute t lift_fresh lift_fresh_copy".split()
)


class RuleError(RuntimeError):
    """A rule failed on a call it did not refuse: a bug in the rule, not in the traced model."""


def apply(t, name: str, elementwise: bool, args: tuple, kwargs: dict, out: Any, inputs: list[Tensor]) -> bool:
    """True if a rule explained the operation; else every axis it touches has been frozen."""
    results = outputs(out)
    if not any(x.dim() for x in [*inputs, *results]):  # numbers have no axes, though torch lets them have a "dim 0"
        for o in results:
            t[o] = []
        return True
    try:
        if name in RULES and _takes(RULES[name], t, out, *args, **kwargs):
            RULES[name](t, out, *args, **kwargs)
            return True
        if name not in RULES and (elementwise or name in POINTWISE):
            pointwise(t, out, inputs)
            return True
    except Inexpressible:
        pass  # freezes, like an operation without a rule
    except Exception as error:
        shapes = [tuple(x.shape) for x in inputs]
        raise RuleError(f"the rule of {name!r} failed on shapes {shapes}: {type(error).__name__}: {error}") from error
    harmless = all(is_frozen(axis) for x in inputs for axis in t[x])
    for x in inputs:
        for axis in t[x]:
            freeze(axis, f"op:{name}")
    for o in results:
        t[o] = [fixed(n, f"op:{name}") for n in o.shape]
    return harmless


def _takes(rule: Callable[..., None], *args: Any, **kwargs: Any) -> bool:
    """Whether a rule has parameters for a call; an overload that passes others is not covered by it."""
    try:
        _signature(rule).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


_signature = functools.cache(inspect.signature)
