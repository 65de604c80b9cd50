"""Parameters of a model, by name, and the arithmetic that treats a model as one vector."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]
Keep = Callable[[Params], Params]  # stores a model until its next visit, in memory or on disk, and returns it


class NotFinite(ArithmeticError):
    """A model went non-finite; the message names epoch, model, host and quantity."""


def check_finite(params: Params, where: str, detail: str = "") -> Params:
    """Return the model unchanged; raise an error that says where if it holds a number that is not finite.

    Args:
        detail: what led there, such as "; this step's was 0.3"; it ends the error.
    """
    for name, x in params.items():
        # A finite sum proves it at a third of the cost. A sum of finite numbers may overflow, hence the second look.
        if not math.isfinite(float(x.sum())) and not torch.isfinite(x).all():
            raise NotFinite(
                f"{where}: {name} is not finite; lower the learning rate (personal_lr, global_lr, a rival's lr){detail}"
            )
    return params


def mixed(*terms: tuple[Params, float]) -> Params:
    """The weighted sum of models, added up in the given order, which decides the last bits."""
    (first, share), *rest = terms
    total = {name: x * share for name, x in first.items()}
    for params, weight in rest:
        for name, x in total.items():
            x.add_(params[name], alpha=weight)
    return total


def subtract(w: Params, gradient: Params, lr: float) -> Params:
    """The model after one gradient step of size ``lr``; the model itself if that is 0, whatever the gradient."""
    return {name: x - lr * gradient[name] for name, x in w.items()} if lr else w


def step_size(lr: float, cap: float, model: Sequence[Tensor], gradient: Sequence[Tensor]) -> float:
    r"""The step size of a step that is at most ``cap`` times as long as the model: :math:`\min(\eta, \rho |v| / |g|)`.

    It is 0, no step, if the gradient is not finite. A cap of 0 is no cap, and a model of length 0 has none.

    Args:
        lr: eta.
        cap: rho.
        model: v, as tensors.
        gradient: g, likewise.

    Example:
        >>> v, g = [torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 10.0])]
        >>> step_size(0.05, 0.2, v, g), step_size(0.5, 0.2, v, g), step_size(0.5, 0.0, v, g)
        (0.05, 0.1, 0.5)
    """
    if not cap:
        return lr
    return capped(lr, cap, norm(model), norm(gradient))


def capped(lr: float, cap: float, length: float, slope: float) -> float:
    """The step size of `step_size`, from the length of the model and that of the gradient."""
    if not math.isfinite(slope):
        return 0.0
    return lr if slope * lr <= cap * length or length == 0 else cap * length / slope


def norm(tensors: Sequence[Tensor]) -> float:
    """The l2 norm of all tensors together.

    Example:
        >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
        5.0
    """
    found = math.hypot(*torch.stack(torch._foreach_norm(tensors)).tolist())
    if math.isfinite(found):
        return found
    # In float32 squares overflow long before numbers do.
    return math.hypot(*torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).tolist())


def distance(a: Params, b: Params) -> Tensor:
    """The l2 distance between two models."""
    return torch.sqrt(sum((a[name] - b[name]).square().sum() for name in a))


def project(params: Params, centre: Params, radius: float) -> Params:
    """The point nearest to a model in the l2 ball around ``centre`` (P_W)."""
    # Inside the ball the model itself is returned, so that its bits stay as they are.
    away = float(distance(params, centre))
    return params if away <= radius else mixed((centre, 1 - radius / away), (params, radius / away))


def num_bytes(params: Params) -> int:
    """The size of a model in bytes when it is sent."""
    return sum(x.nbytes for x in params.values())


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """(d,) all tensors in one vector, one after the other."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unflatten(vector: Tensor, like: Params) -> Params:
    """A flat vector (d,) split into tensors with the names and shapes of the model ``like``."""
    pieces = vector.split([x.numel() for x in like.values()])
    return {name: piece.reshape(x.shape) for (name, x), piece in zip(like.items(), pieces, strict=True)}
