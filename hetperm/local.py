"""What runs on a device: SGD on a visiting model, and the gradients a client reports. Knows no server."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from submodels.norms import batch_statistics, has_batch_norm

Params = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean loss of the batch
Shard = tuple[Tensor, Tensor]  # inputs and labels


class Workbench:
    """A module that visiting models are put into, and the loss they are trained with.

    Only parameters travel. Norms use batch statistics and track nothing: a model leaves no trace on its host.
    """

    def __init__(self, module: nn.Module, loss: Loss):
        self.module = module.train()
        self.loss = loss
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.slots = [p for p in module.parameters() if p.requires_grad]
        self._norms = has_batch_norm(module)
        self._data = [p.data for p in self.slots]  # the same memory, outside the autograd graph

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Put a model on the bench."""
        torch._foreach_copy_(self._data, [params[name] for name in self.names])

    def descend(self, gradient: tuple[Tensor, ...], lr: float) -> None:
        """One SGD step of the model on the bench."""
        torch._foreach_sub_(self._data, gradient, alpha=lr)

    def take(self) -> Params:
        """The model on the bench, in memory of its own."""
        return {name: p.detach().clone() for name, p in zip(self.names, self.slots, strict=True)}

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the model on the bench."""
        if not self._norms:
            return self.loss(self.module(x), y)
        with batch_statistics(self.module):
            return self.loss(self.module(x), y)

    def gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the model on the bench, parameter by parameter; zero where the loss does not depend on it."""
        return torch.autograd.grad(self.value(x, y), self.slots, allow_unused=True, materialize_grads=True)


def batches(n: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices of ``steps`` mini-batches of ``min(batch_size, n)``, drawn without replacement, shard after shard."""
    size = min(batch_size, n)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(n, generator=generator)
        yield order[:size]
        order = order[size:]


def sgd_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> Params:
    r"""The model after K steps of plain SGD at a host: :math:`v \leftarrow v - \eta \nabla f_j(v; \xi)`.

    Args:
        params: name -> tensor of the visiting model; not changed.
        shard: the host's inputs (n, ...) and labels (n,).
        lr: the whole step size, mixing weight included.
    """
    x, y = shard
    bench.load(params)
    for batch in batches(len(x), batch_size, steps, generator):
        bench.descend(bench.gradient(x[batch], y[batch]), lr)
    return bench.take()


def full_gradient(
    bench: Workbench, params: Mapping[str, Tensor], shard: Shard, *, generator: torch.Generator, batch_size: int = 512
) -> Tensor:
    """(d,) the gradient of the client's mean loss, flat; the whole shard, in pieces that fit in memory."""
    bench.load(params)
    x, y = shard
    total = None
    for part_x, part_y in zip(x.split(batch_size), y.split(batch_size), strict=True):
        part = flat(bench.gradient(part_x, part_y)) * (len(part_x) / len(x))
        total = part if total is None else total + part
    return total


def micro_gradients(
    bench: Workbench, params: Mapping[str, Tensor], shard: Shard, *, parts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(m, d) gradients of m = min(parts, n) random micro-batches that make up the whole shard, and their sizes (m,)."""
    bench.load(params)
    x, y = shard
    pieces = torch.randperm(len(x), generator=generator).tensor_split(min(parts, len(x)))
    gradients = torch.stack([flat(bench.gradient(x[piece], y[piece])) for piece in pieces])
    return gradients, torch.tensor([len(piece) for piece in pieces])


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """(d,) all tensors one after the other."""
    return torch.cat([x.reshape(-1) for x in tensors])
