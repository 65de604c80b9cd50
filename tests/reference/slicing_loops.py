"""Cutting, writing back, averaging and scoring, typed out with loops over single coordinates.

Shares nothing with the package. ``positions`` says how a sub-model's tensor lies in the whole one: for every axis the
list of kept places, in the sub-model's order, which the caller works out by hand.
"""

import copy
import itertools
import math

import torch
from torch import Tensor, nn

Positions = list[list[int]]


def _places(sizes):
    return itertools.product(*(range(size) for size in sizes))


def gather(whole: Tensor, positions: Positions) -> Tensor:
    """The kept part, one coordinate at a time."""
    part = torch.zeros([len(axis) for axis in positions], dtype=whole.dtype)
    for place in _places(part.shape):
        part[place] = whole[tuple(axis[i] for axis, i in zip(positions, place, strict=True))]
    return part


def scatter(into: Tensor, part: Tensor, positions: Positions, *, add: bool = False) -> Tensor:
    """A copy of ``into`` with the kept part overwritten, or increased."""
    out = into.clone()
    for place in _places(part.shape):
        target = tuple(axis[i] for axis, i in zip(positions, place, strict=True))
        out[target] = out[target] + part[place] if add else part[place]
    return out


def mask(shape, positions: Positions) -> Tensor:
    """True where a coordinate is kept."""
    out = torch.zeros(tuple(shape), dtype=torch.bool)
    for place in _places(shape):
        out[place] = all(i in axis for axis, i in zip(positions, place, strict=True))
    return out


def average(old: Tensor, updates: list[tuple[Tensor, Positions, float]], rows: Tensor | None = None) -> Tensor:
    """Every coordinate over the clients that hold it (and, with ``rows``, may vote on its row); else its old value.

    Args:
        updates: (sub-model tensor, where it lies, weight), one per client.
        rows: bool, (clients, rows).
    """
    out = old.clone()
    for place in _places(old.shape):
        values, weights = [], []
        for client, (part, positions, weight) in enumerate(updates):
            held = all(i in axis for axis, i in zip(positions, place, strict=True))
            if held and weight > 0 and (rows is None or rows[client][place[0]]):
                inside = tuple(axis.index(i) for axis, i in zip(positions, place, strict=True))
                values.append(weight * float(part[inside]))
                weights.append(weight)
        if weights:
            out[place] = math.fsum(values) / math.fsum(weights)
    return out


def importance(tensors: dict[str, Tensor], channel_of: dict[str, list[list[int | None]]], size: int) -> list[float]:
    """The summed squared weight of each channel of one group.

    Args:
        channel_of: tensor -> for every axis the channel that each place belongs to, None where it belongs to none.
    """
    scores = [0.0] * size
    for name, axes in channel_of.items():
        for place in _places(tensors[name].shape):
            for axis, i in zip(axes, place, strict=True):
                if axis[i] is not None:
                    scores[axis[i]] += float(tensors[name][place]) ** 2
    return scores


def masked(model: nn.Module, index) -> nn.Module:
    """A copy of the whole model in which every parameter is zero where the sub-model has none."""
    out = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in out.named_parameters():
            parameter.mul_(index.mask(name))
    return out


def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with random weights and statistics everywhere: layers that start at zero would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(x.shape, dtype=torch.float64, generator=generator)
            if name.endswith("running_var"):
                x.copy_(noise.abs() + 0.5)
            elif name.endswith("running_mean"):
                x.copy_(0.1 * noise)
            elif isinstance(x, nn.Parameter) and x.dim() > 1:
                x.copy_(noise / math.sqrt(math.prod(x.shape[1:])))
            elif isinstance(x, nn.Parameter):
                x.copy_(0.3 * noise + name.endswith("weight"))
    return model
