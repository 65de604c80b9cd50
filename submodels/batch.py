"""Which axis of which input counts samples?

The axes of all inputs are followed through a run. The batch is the axis that the forward neither reads by position
(time steps, nodes of a graph), nor sums over, nor shares with a weight, and that comes out at the other end.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from submodels.axes import Axis, find, is_frozen, leaves
from submodels.calls import Call
from submodels.skeleton import named_tensors, on_meta, rebuild, tensors_in
from submodels.texts import shown
from submodels.trace import observed_axes

Dims = tuple[int | None, ...]  # for every tensor among the arguments: the dimension that counts samples


@torch.random.fork_rng(devices=[])
def find_batch(model: nn.Module, call: Call) -> Dims:
    """For every tensor of the arguments the dimension that counts samples; None for those that have none.

    All None means that the example is one sample, such as a whole graph.
    """
    copy = on_meta(model)
    try:
        rows, weights, out = observed_axes(copy, call.to("meta"))
    except Exception:  # whatever a forward may raise on tensors without values
        return _leading_if_it_runs(model, call)
    found = _matching(rows, _batch_axes(rows, weights, out))
    return found if any(dim is not None for dim in found) else _doubled(copy, call)


def leading(call: Call) -> Dims:
    """The first dimension of all tensors that have the leading size of the first."""
    tensors = call.tensors()
    size = next((x.shape[0] for x in tensors if x.dim()), None)
    return tuple(0 if x.dim() and x.shape[0] == size else None for x in tensors)


def _leading_if_it_runs(model: nn.Module, call: Call) -> Dims:
    """The leading dimensions, if the model also takes twice as many samples; none at all for a list of images."""
    dims = leading(call)
    rest = iter(dims)

    def repeat(x: Any) -> Any:
        return torch.cat([x, x]) if isinstance(x, Tensor) and next(rest) == 0 else x

    copy = rebuild(model, {id(x): x.detach() for _, x in named_tensors(model)}).eval()
    device = next((x.device for _, x in named_tensors(model)), torch.device("cpu"))
    args, kwargs = tree_map(repeat, tuple(call.to(device)))
    try:
        with torch.no_grad():
            copy(*args, **kwargs)
    except Exception:  # whatever a forward may raise on another number of samples
        return (None,) * len(dims)
    return dims


def stated(batch_dim: int | Sequence[int | None], call: Call) -> Dims:
    """The dimensions a user states: one number for all tensors, or one for each of them."""
    tensors = call.tensors()
    if not isinstance(batch_dim, int) or isinstance(batch_dim, bool):
        if not isinstance(batch_dim, tuple | list):
            raise TypeError(f"batch_dim is {shown(batch_dim)}; it must be a whole number, or one for each tensor")
        dims = tuple(batch_dim)
        if len(dims) != len(tensors):
            given = f"batch_dim {shown(batch_dim)} has {len(dims)} entries"
            raise ValueError(f"{given}; the example has {len(tensors)} tensors")
        for x, dim in zip(tensors, dims):
            if not (dim is None or (isinstance(dim, int) and not isinstance(dim, bool) and -x.dim() <= dim < x.dim())):
                raise ValueError(
                    f"batch_dim {shown(batch_dim)} holds {shown(dim)}; give dimensions of the tensors, or None"
                )
        return dims
    sizes = [x.shape[batch_dim] if -x.dim() <= batch_dim < x.dim() else None for x in tensors]
    size = next((n for n in sizes if n is not None), None)
    if size is None:
        raise ValueError(
            f"batch_dim {shown(batch_dim)} is a dimension of no tensor of the example; count dimensions from 0"
        )
    return tuple(batch_dim % x.dim() if n == size else None for x, n in zip(tensors, sizes, strict=True))


def _batch_axes(rows: Sequence[list[Axis]], weights: Sequence[Axis], out: Sequence[Axis]) -> set[int]:
    """Ids of the axes that count samples."""
    known = {id(leaf) for axis in weights for leaf in leaves(axis)}
    reached = {id(leaf) for axis in out for leaf in leaves(axis)}
    able: list[list[Axis]] = []
    for row in rows:
        axes = [find(axis) for axis in row]
        free = [axis for axis in axes if axis.kind is None and not is_frozen(axis) and id(axis) not in known]
        # Twice in one tensor are the nodes of an adjacency matrix.
        able.append([axis for axis in free if sum(other is axis for other in axes) == 1])
    if any(id(axis) in reached for row in able for axis in row):  # a model may return nothing but its loss
        able = [[axis for axis in row if id(axis) in reached] for row in able]
    first = next((row for row, axes in zip(able, rows, strict=True) if axes), [])
    return {id(axis) for row in able for axis in row if first and axis.size == first[0].size}


def _matching(rows: Sequence[list[Axis]], batch: set[int]) -> Dims:
    return tuple(next((i for i, axis in enumerate(row) if id(find(axis)) in batch), None) for row in rows)


def _doubled(model: nn.Module, call: Call) -> Dims:
    """The leading dimension, if the model runs on twice as many and returns twice as many; else none at all."""
    tensors = call.tensors()
    none = (None,) * len(tensors)
    if len({x.shape[0] for x in tensors if x.dim()}) != 1:
        return none

    def repeated(times: int) -> list[int]:
        def repeat(x: Any) -> Any:
            return torch.cat([x] * times) if isinstance(x, Tensor) and x.dim() else x

        args, kwargs = tree_map(repeat, tuple(call.to("meta")))
        with torch.no_grad(), torch.device("meta"):
            return [x.shape[0] for x in tensors_in(model(*args, **kwargs)) if x.dim()]

    try:
        once, twice = repeated(1), repeated(2)
    except Exception:  # whatever a forward may raise on another number of samples
        return none
    return leading(call) if once and twice == [2 * n for n in once] else none


def repeatable(model: nn.Module, call: Call) -> Dims:
    """The leading dimension of all tensors if it holds one sample and the model also takes two; else none at all."""
    tensors = call.tensors()
    if any(x.shape[0] != 1 for x in tensors if x.dim()):
        return (None,) * len(tensors)
    return _doubled(on_meta(model), call)
