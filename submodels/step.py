"""One training step of any module, with data or without: copies of the module, batches for it, and a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from submodels.batch import Dims
from submodels.calls import Call
from submodels.skeleton import loose_tensors, named_tensors, rebuild
from submodels.texts import plain


def start_autograd() -> None:
    """Have autograd look which devices there are, so that it starts no threads for those that are only played.

    A first backward pass without data would, and no process that was forked later could take another.
    """
    with torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        torch.autograd.grad(x * x, x)


def loss_of(output: Any) -> Tensor | None:
    """A scalar that takes the memory of a cross entropy, or None if nothing in the output can be trained."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad and y.is_floating_point()]
    losses = [F.log_softmax(y, dim=-1).mean() if y.dim() else y for y in outputs]
    return reduce(torch.add, losses) if losses else None


def take_step(module: nn.Module, pieces: Sequence[tuple[tuple, dict]], optimizer: torch.optim.Optimizer | None) -> None:
    """Take one training step; without an optimizer, a forward and a backward pass. Pieces of a batch are added up."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    for args, kwargs in pieces:
        loss = loss_of(module(*args, **kwargs))
        if loss is not None:
            loss.backward()
    if optimizer is not None:
        optimizer.step()


@contextmanager
def real_steps(module: nn.Module, batch_size: int) -> Iterator[None]:
    """A context for real training steps: the caller's random numbers are kept, failures are explained."""
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            yield
    except Exception as error:
        reason = plain(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{type(module).__name__} takes no training step on the example inputs at batch_size {batch_size} "
            f"({reason}); check the inputs, or raise batch_size"
        ) from error


# Copies of the module and batches for it; the module itself is only read.


def fake_copy(module: nn.Module) -> nn.Module:
    """The module in training mode with empty tensors; called under a FakeTensorMode, they take no memory."""
    hollow = [x for x in loose_tensors(module) if x.is_meta]  # the others keep their values, which may be needed
    tensors = [*(x for _, x in named_tensors(module)), *hollow]
    return _dense(rebuild(module, {id(x): torch.empty_like(x, device="cpu") for x in tensors})).train()


def real_copy(module: nn.Module) -> nn.Module:
    """The module in training mode on the CPU, sharing no tensor with the original."""
    tensors = [*(x for _, x in named_tensors(module)), *loose_tensors(module)]
    return _dense(rebuild(module, {id(x): _real(x.detach()) for x in tensors})).train()


def _dense(module: nn.Module) -> nn.Module:
    """The module with dense gradients of embeddings: sparse ones have no storage to count, and are never larger."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
    return module


def _real(x: Tensor) -> Tensor:
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.to("cpu", copy=True)


@dataclass(frozen=True)
class Batch:
    """Arguments of a forward, and how to make as many samples of them as a step takes.

    Attributes:
        call: the example.
        size: samples of a training step.
        dims: for every tensor of the example the dimension that counts samples, None for those that have none.
    """

    call: Call
    size: int
    dims: Dims

    @property
    def samples(self) -> int:
        """Samples of a step: one if no axis counts them, as in a model of a whole graph."""
        return self.size if any(dim is not None for dim in self.dims) else 1

    def made(self, make: Callable[[Tensor, int | None, int], Tensor]) -> tuple[tuple, dict]:
        """The arguments at the batch size: every tensor is made anew by `fake_batch` or `real_batch`."""
        dims = iter(self.dims)

        def resized(x: Any) -> Any:
            return make(x, next(dims), self.size) if isinstance(x, Tensor) else x

        return tree_map(resized, tuple(self.call))


def fake_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    """An empty tensor like x, of `size` samples."""
    shape = [size if i == dim else n for i, n in enumerate(x.shape)]
    return torch.empty(shape, dtype=x.dtype, device="cpu")


def real_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    """A copy of x, its samples repeated until there are `size`."""
    x = _real(x.detach())
    return x if dim is None else x.index_select(dim, torch.arange(size) % x.shape[dim])
