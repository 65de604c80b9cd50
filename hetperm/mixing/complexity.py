"""How much a client's architecture can express (section 3.3 of the paper, heterogeneous models)."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from hetperm.mixing import borders
from hetperm.texts import shown
from submodels import ScalableModel


def vc(num_params: int, num_layers: int) -> float:
    r"""The VC dimension of a network of piecewise linear units, up to a constant factor.

    .. math:: \mathrm{VC} = W L \log_2 W

    Args:
        num_params: W, the number of weights and biases.
        num_layers: L.

    Example:
        >>> vc(num_params=1024, num_layers=3)
        30720.0
    """
    for name, value in (("num_params", num_params), ("num_layers", num_layers)):
        borders.count(name, value, 0, 2**62)
    if num_params < 1 or num_layers < 1:
        raise ValueError(
            f"a network of {num_params} parameters in {num_layers} layers has no VC dimension; both are at least 1"
        )
    return num_params * num_layers * math.log2(num_params)


def num_layers(module: nn.Module) -> int:
    """The number of modules that own a weight of two or more dimensions.

    Norms do not count. A module that is used twice counts once.

    Example:
        >>> num_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)))
        2
    """
    owners = borders.module("the module", module).modules()
    return sum(any(p.dim() >= 2 for p in owner.parameters(recurse=False)) for owner in owners)


def vc_of(module: nn.Module) -> float:
    """The VC dimension of a module's architecture. The values of its weights do not matter.

    The module may be on the meta device, where weights have no values.

    Example:
        >>> vc_of(nn.Linear(15, 1))
        64.0
    """
    layers = num_layers(module)  # first, because it checks the module
    return vc(sum(p.numel() for p in module.parameters()), layers)


def term(vc: Tensor, n: Tensor) -> Tensor:
    r"""The complexity term h of each client: :math:`h_j = \sqrt{\mathrm{VC}_j / n_j}`.

    Args:
        vc: (N,) VC dimension of the architecture of each client.
        n: (N,) samples held by each client.

    Example:
        >>> term(torch.tensor([64.0, 64.0]), torch.tensor([4, 16]))
        tensor([4., 2.], dtype=torch.float64)
    """
    vc, n = borders.numbers("vc", vc), borders.numbers("n", n)
    if vc.shape != n.shape:
        raise ValueError(f"vc of shape {tuple(vc.shape)} and n of shape {tuple(n.shape)}; give one of each per client")
    if not (vc.isfinite() & (vc >= 0)).all() or not (n.isfinite() & (n > 0)).all():
        raise ValueError(f"the complexity term needs vc >= 0 and n > 0, not vc = {vc.tolist()} and n = {n.tolist()}")
    wrong = (~(vc / n).isfinite()).nonzero().tolist()
    if wrong:
        j = tuple(wrong[0])
        raise ValueError(f"n holds {float(n[j])}, too few for a vc of {float(vc[j])}; give the samples of each client")
    return (vc / n).sqrt()


def num_params(scalable: ScalableModel, width: float) -> int:
    """The number of parameters of the model at a width."""
    borders.scalable("scalable", scalable)
    if isinstance(width, Real) and not isinstance(width, bool) and width == 1:
        return sum(p.numel() for p in scalable.model.parameters())
    return scalable.axis_map.num_params(scalable.axis_map.counts(width))


def vc_of_widths(scalable: ScalableModel | None, widths: Sequence[float]) -> Tensor | None:
    """(N,) the VC dimension of the model at each width; None if all models have the same size."""
    if scalable is None:
        return None
    if not isinstance(widths, Sequence) or not widths:
        raise TypeError(f"widths is {shown(widths)}; it must be a list of widths, one for each client")
    borders.scalable("scalable", scalable)
    # Cutting channels removes no layer: all widths have the same depth.
    layers = num_layers(scalable.model)
    sizes = [num_params(scalable, width) for width in widths]
    # With models of one size this is the paper's homogeneous problem, which has no complexity term.
    if len(set(sizes)) == 1:
        return None
    return torch.tensor([vc(size, layers) for size in sizes], dtype=torch.float64)
