"""Losses inside a forward, and weights that are normalised before they are used."""

from collections.abc import Callable

from torch import Tensor

from submodels.axes import fixed, freeze, tag, unify
from submodels.rules.operands import pointwise, require

_MEAN = 1  # torch's number for reduction="mean"; 0 is "none", 2 is "sum"


def _pointwise_loss(name: str, position: int) -> Callable[..., None]:
    """A rule for a loss that compares position by position; its reduction stands at ``position`` of its options."""

    def loss(t, out, x, target, *args, **kw):
        """Prediction and target are one; a mean over all positions counts them."""
        reduction = args[position] if len(args) > position else kw.get("reduction", _MEAN)
        tensors = [x, target, *(v for v in args if isinstance(v, Tensor))]
        if out.dim():
            pointwise(t, out, tensors)
            return
        require(x.shape == target.shape, "a target that is broadcast")
        for other in tensors[1:]:
            for a, b in zip(t[x], t[other], strict=True):
                unify(a, b)
        for axis in t[x] if reduction == _MEAN else ():
            tag(axis, f"op:{name}")
        t[out] = []

    return loss


def nll_loss(t, out, x, target, *_args, **_kw):
    """Likelihood of one class of many: the classes stay whole, samples and positions are those of the target."""
    classes = 1 if x.dim() > 1 else 0
    freeze(t[x][classes], "op:nll_loss")
    for a, b in zip([axis for i, axis in enumerate(t[x]) if i != classes], t[target], strict=True):
        unify(a, b)
    first, total = out
    t[first] = t[target] if first.dim() else []
    t[total] = [fixed(n, "op:nll_loss") for n in total.shape]


def weight_norm(t, out, v, g, *_args):
    """A direction times a length: both have the axes of the weight; a missing column adds nothing to the length."""
    for a, b in zip(t[v], t[g], strict=True):
        if a.size == b.size:
            unify(a, b)
    weight, norms = out
    t[weight] = t[v]
    t[norms] = [a if a.size == n else fixed(n, "size 1") for a, n in zip(t[v], norms.shape, strict=True)]


RULES = {
    **{name: _pointwise_loss(name, 0) for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")},
    "binary_cross_entropy": _pointwise_loss("binary_cross_entropy", 1),
    "nll_loss_forward": nll_loss,
    "nll_loss2d_forward": nll_loss,
    "_weight_norm_interface": weight_norm,
}
