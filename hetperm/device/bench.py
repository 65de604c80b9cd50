"""What runs on a device: SGD on a visiting model, and the gradients a client reports. Knows no server."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from submodels import IndexSet, ScalableModel
from submodels.norms import batch_statistics, has_batch_norm

Params = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean loss of the batch
Shard = tuple[Tensor, Tensor]  # inputs and labels


ABSENT = -1e9  # the logit of a class that a client masks: no probability, and still finite


class Workbench:
    """A module that visiting models are put into, and the loss they are trained with.

    Only parameters travel. Norms use batch statistics and track nothing: a model leaves no trace on its host.

    Attributes:
        classes: (num_classes,) bool, the classes that the present host knows of; None: all.
        norms: whether some layer normalises over the batch.
        shop: where benches of other widths are, for updates that train narrower models beside this one.
    """

    def __init__(self, module: nn.Module, loss: Loss, *, width: float = 1.0, shop: "Workshop | None" = None):
        self.module = module.train()
        self.loss = loss
        self.width, self.shop = width, shop
        self.classes: Tensor | None = None
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.slots = [p for p in module.parameters() if p.requires_grad]
        self.norms = has_batch_norm(module)
        self._data = [p.data for p in self.slots]  # the same memory, outside the autograd graph

    def at(self, width: float) -> "Workbench":
        """This bench: it is a workshop of one width."""
        if width < 1:
            raise ValueError(f"there is no bench for width {width:g}; give the engine a Workshop")
        return self

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Put a model on the bench."""
        torch._foreach_copy_(self._data, [params[name] for name in self.names])

    def descend(self, gradient: tuple[Tensor, ...], lr: float) -> None:
        """One SGD step of the model on the bench."""
        torch._foreach_sub_(self._data, gradient, alpha=lr)

    def take(self) -> Params:
        """The model on the bench, in memory of its own."""
        return {name: p.detach().clone() for name, p in zip(self.names, self.slots, strict=True)}

    def outputs(self, x: Tensor) -> Tensor:
        """What the model on the bench says, with the logits of classes that the host does not know masked."""
        if not self.norms:
            return masked(self.module(x), self.classes)
        with batch_statistics(self.module):
            return masked(self.module(x), self.classes)

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the model on the bench."""
        return self.loss(self.outputs(x), y)

    def gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the model on the bench, parameter by parameter; zero where the loss does not depend on it."""
        return self.gradient_of(self.value(x, y))

    def gradients(self, x: Tensor, y: Tensor, pieces: Sequence[Tensor], most: int) -> Iterator[Tensor]:
        """(d,) the gradient on each of several pieces of the data, rows of ``x`` and ``y``: one is held at a time.

        Args:
            most: samples that are run at once.
        """
        return (flat(self.mean_gradient(x[piece], y[piece], most)) for piece in pieces)

    def mean_gradient(self, x: Tensor, y: Tensor, most: int) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter; at most so many samples are run at once.

        More of them are run in pieces of half as many, and their gradients added up where they arise: while a piece
        is run the sum takes the room of the activations of the other half, so that no more is held than in a step.
        """
        # Pieces of one size; where there are norms, of two samples at least.
        count = 1 if len(x) <= most else math.ceil(2 * len(x) / most)
        count = min(count, max(1, len(x) // (2 if self.norms else 1)))
        if count == 1:
            return self.gradient(x, y)
        for part_x, part_y in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            (self.value(part_x, part_y) * (len(part_x) / len(x))).backward()
        total = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self.slots)
        for p in self.slots:
            p.grad = None
        return total

    def gradient_of(self, value: Tensor) -> tuple[Tensor, ...]:
        """The gradient of something computed from the model on the bench."""
        return torch.autograd.grad(value, self.slots, allow_unused=True, materialize_grads=True)


def masked(logits: Tensor, classes: Tensor | None) -> Tensor:
    """(n, num_classes) logits, with those of absent classes out of the running; all of them if ``classes`` is None."""
    return logits if classes is None else logits.masked_fill(~classes.to(logits.device), ABSENT)


class Workshop:
    """A workbench for every width, of the given kind; made when a model of that width comes in."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        scalable: ScalableModel | None = None,
        kind: Callable[..., Workbench] = Workbench,
    ):
        self.loss, self.scalable, self.kind = loss, scalable, kind
        self._benches = {1.0: kind(module, loss, shop=self)}
        self._inside: dict[tuple[float, float], IndexSet] = {}
        self._lock = threading.Lock()  # workshops of several workers share the scalable model

    @property
    def full(self) -> Workbench:
        """The bench of the whole model."""
        return self._benches[1.0]

    def at(self, width: float) -> Workbench:
        """The bench for models of a width."""
        if width not in self._benches:
            if self.scalable is None:
                raise ValueError(f"there is no bench for width {width:g}: this model comes in one size")
            with self._lock:
                module = self.scalable.extract(width).module
            self._benches[width] = self.kind(module, self.loss, width=width, shop=self)
        return self._benches[width]

    def inside(self, own: float, width: float) -> IndexSet:
        """Where the model of a narrower width lies in one of width ``own``."""
        if (own, width) not in self._inside:
            with self._lock:
                counts = self.scalable.axis_map.counts(own)
                self._inside[own, width] = self.scalable.index(width, within=counts)
        return self._inside[own, width]

    def copy(self, kind: Callable[..., Workbench] | None = None) -> "Workshop":
        """Another workshop for the same models, with benches of its own: for a worker beside this one."""
        other = Workshop(copy.deepcopy(self.full.module), self.loss, self.scalable, kind or self.kind)
        other._lock = self._lock
        return other


def batches(n: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """(steps, size) indices of mini-batches of ``min(batch_size, n)``, drawn without replacement, shard after shard."""
    size = min(batch_size, n)
    fit = n // size  # batches in one pass over the shard
    passes = [torch.randperm(n, generator=generator)[: fit * size] for _ in range(-(-steps // fit))]
    rows = passes[0] if len(passes) == 1 else torch.cat([*passes, torch.empty(0, dtype=torch.long)])
    return rows.view(-1, size)[:steps]


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


def distil_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    widths: Sequence[float],
    weight: float,
    generator: torch.Generator,
) -> Params:
    r"""The model after K steps in which it also teaches a narrower part of itself (in-place distillation).

    .. math:: v \leftarrow v - \eta \nabla_v \big( f_j(v; \xi) + \beta \,
        \mathrm{KL}(\text{softmax } v(x) \,\|\, \text{softmax } v_{[p]}(x)) \big)

    where the teacher is held fixed and :math:`v_{[p]}` is the static part of v of a width p drawn for each step.

    Args:
        widths: the widths to draw from, all narrower than the model.
        weight: beta.
    """
    x, y = shard
    bench.load(params)
    for batch, width in batches_and_widths(len(x), batch_size, steps, widths, generator):
        outputs = bench.outputs(x[batch])
        gradient = bench.gradient_of(bench.loss(outputs, y[batch]))
        pupil, index = _narrower(bench, width)
        target = outputs.detach().log_softmax(1)
        said = pupil.outputs(x[batch]).log_softmax(1)
        lesson = pupil.gradient_of(F.kl_div(said, target, reduction="batchmean", log_target=True))
        bench.descend(gradient, lr)
        _descend_part(bench, index, lesson, lr * weight)
    return bench.take()


def ordered_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    widths: Sequence[float],
    generator: torch.Generator,
) -> Params:
    """The model after K steps, each on its static part of a width drawn for the step (ordered dropout).

    Args:
        widths: the widths to draw from, none wider than the model.
    """
    x, y = shard
    bench.load(params)
    for batch, width in batches_and_widths(len(x), batch_size, steps, widths, generator):
        if width >= bench.width:
            bench.descend(bench.gradient(x[batch], y[batch]), lr)
        else:
            part, index = _narrower(bench, width)
            _descend_part(bench, index, part.gradient(x[batch], y[batch]), lr)
    return bench.take()


def batches_and_widths(
    n: int, batch_size: int, steps: int, widths: Sequence[float], generator: torch.Generator
) -> Iterator[tuple[Tensor, float]]:
    """(batch, width) of every step; widths are drawn after all batches, which so are those of plain SGD."""
    for batch in batches(n, batch_size, steps, generator):
        yield batch, widths[int(torch.randint(len(widths), (), generator=generator))]


def _narrower(bench: Workbench, width: float) -> tuple[Workbench, IndexSet]:
    """A bench with the static part of this bench's model on it, and where that lies."""
    part, index = bench.shop.at(width), bench.shop.inside(bench.width, width)
    part.classes = bench.classes
    part.load({name: index.gather(name, p.detach()) for name, p in zip(bench.names, bench.slots, strict=True)})
    return part, index


def _descend_part(bench: Workbench, index: IndexSet, gradient: tuple[Tensor, ...], lr: float) -> None:
    for name, p, g in zip(bench.names, bench.slots, gradient, strict=True):
        index.scatter_(name, p.data, -lr * g, accumulate=True)


def full_gradient(
    bench: Workbench, params: Mapping[str, Tensor], shard: Shard, *, generator: torch.Generator, most: int = 512
) -> Tensor:
    """(d,) the gradient of the client's mean loss, flat; the whole shard, ``most`` samples at once."""
    bench.load(params)
    return flat(bench.mean_gradient(*shard, most))


def micro_gradients(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    parts: int,
    generator: torch.Generator,
    most: int = 512,
) -> tuple[Iterator[Tensor], list[int]]:
    """The gradients (d,) of m = min(parts, n) random micro-batches that make up the whole shard, and their sizes.

    A batch norm needs two samples in each: m = min(parts, n // 2).

    Args:
        most: samples that are run at once.
    """
    bench.load(params)
    x, y = shard
    m = min(parts, max(1, len(x) // (2 if bench.norms else 1)))
    pieces = torch.randperm(len(x), generator=generator).tensor_split(m)
    return bench.gradients(x, y, pieces, most), [len(piece) for piece in pieces]


def flat(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    """(d,) all tensors one after the other."""
    return torch.cat([x.reshape(-1) for x in tensors])
