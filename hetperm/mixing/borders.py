"""Checks of what users hand to the functions of this room: tensors, numbers of clients, counts."""

from typing import Any

import torch
from torch import Tensor, nn

from hetperm.checks import LARGEST, whole
from hetperm.texts import shown
from submodels import ScalableModel

# Types of numbers with which torch computes; of others, such as uint16 and float8, it mostly only keeps them.
COMPUTED = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def tensor(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor of real numbers; an error says what it is instead.

    Example:
        >>> tensor("zeta", [[0.0]])
        Traceback (most recent call last):
        TypeError: zeta is a list; it must be a tensor of numbers, such as torch.tensor([0.5, 0.5])
    """
    if _real(name, value).dtype not in COMPUTED:
        raise ValueError(f"{name} is of {value.dtype}, with which torch cannot compute; convert it: .double(), .long()")
    return value


def _real(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor of real numbers, of any type."""
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise TypeError(f"{name} is a {kind}; it must be a tensor of numbers, such as torch.tensor([0.5, 0.5])")
    if value.is_complex() or value.is_quantized or value.dtype == torch.bool:
        raise ValueError(f"{name} is of {value.dtype}; it must hold real numbers")
    if value.is_meta or value.is_nested or value.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(f"{name} is {value.layout} on {value.device}; it must be a plain or sparse tensor with values")
    if value.is_sparse and value.dense_dim():
        sparse = value.sparse_dim()
        raise ValueError(f"{name} is sparse in {sparse} of its {value.dim()} dimensions; it must be so in all, or none")
    return value


def dense(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor of real numbers that is not sparse."""
    return _not_sparse(name, tensor(name, value))


def _not_sparse(name: str, value: Tensor) -> Tensor:
    if value.is_sparse:
        raise ValueError(f"{name} is sparse; convert it with .to_dense()")
    return value


def square(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor of one row and one column for each client, dense or sparse."""
    shape = tuple(tensor(name, value).shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}; it must be (N, N), one row and one column for each client")
    return value


def numbers(name: str, value: Any, device: torch.device | None = None) -> Tensor:
    """The value, a number or several, in float64.

    Example:
        >>> numbers("n", [3, 4])
        tensor([3., 4.], dtype=torch.float64)
    """
    if isinstance(value, Tensor):
        _not_sparse(name, _real(name, value))
    if isinstance(value, bool):  # Python takes True for 1, but nobody means it as a number
        raise TypeError(f"{name} is {value}; it must be a number, or a tensor or list of numbers")
    try:
        return torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name} is {shown(value)}; it must be a number, or a tensor or list of numbers") from error


def count(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """The value, which must be a whole number from ``low`` to ``high``."""
    return whole(low, high)(name, value)


def module(name: str, value: Any) -> nn.Module:
    """The value, which must be a module whose parameters have their sizes."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} is {shown(value)}; it must be an nn.Module")
    if any(isinstance(p, nn.UninitializedParameter) for p in value.parameters()):
        raise ValueError(f"{name} has parameters without a size yet; call it once on a batch")
    return value


def scalable(name: str, value: Any) -> ScalableModel:
    """The value, which must be a model that can be cut."""
    if not isinstance(value, ScalableModel):
        raise TypeError(f"{name} is {shown(value)}; it must be a submodels.ScalableModel")
    return value


def order(name: str, value: Any, clients: int) -> Tensor:
    """The value, which must hold the numbers of clients, each below ``clients``."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.int64:
        raise TypeError(f"{name} is {shown(value)}; it must be a tensor (n,) of int64, the numbers of clients")
    if value.is_meta or bool(((value < 0) | (value >= clients)).any()):
        raise ValueError(f"{name} is {shown(value)}; its numbers must be from 0 to {clients - 1}")
    return value
