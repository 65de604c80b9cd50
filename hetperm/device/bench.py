"""Workbenches: one module for every width, into which visiting models are loaded to be trained and evaluated."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hetperm.params import Params, flat, step_size
from submodels import IndexSet, ScalableModel
from submodels.norms import batch_statistics, has_batch_norm

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean loss of the batch
Shard = tuple[Tensor, Tensor]  # inputs and labels

CHUNK = 512  # samples run at once, unless the caller says otherwise
ABSENT = -1e9  # the logit of a class that a client masks: no probability, and still finite


class Workbench:
    """A module into which visiting models are loaded, and the loss that trains them.

    Only parameters travel. Norms use batch statistics and track nothing, so a model leaves no trace on its host.

    Attributes:
        classes: (num_classes,) bool, the classes of the present host; None means all. Set for every task.
        norms: whether some layer normalises over the batch.
        shop: the benches of other widths, for updates that also train a narrower part.
    """

    def __init__(self, module: nn.Module, loss: Loss, *, width: float = 1.0, shop: "Workshop | None" = None):
        self.module = module.train()
        self.loss = loss
        self.width, self.shop = width, shop
        self.classes: Tensor | None = None
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.slots = [p for p in module.parameters() if p.requires_grad]  # where a visiting model is copied to
        self.norms = has_batch_norm(module)
        self._data = [p.data for p in self.slots]  # the same memory, outside the autograd graph

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy a model onto the bench."""
        torch._foreach_copy_(self._data, [params[name] for name in self.names])

    def descend(self, gradient: tuple[Tensor, ...], lr: float, cap: float = 0.0) -> None:
        """Take one SGD step with the model on the bench, at most ``cap`` times as long as the model (`step_size`)."""
        lr = step_size(lr, cap, self._data, gradient)
        if lr:  # a gradient that is not finite would spoil the model even with a step size of 0
            torch._foreach_sub_(self._data, gradient, alpha=lr)

    def take(self) -> Params:
        """A copy of the model on the bench."""
        return {name: p.detach().clone() for name, p in zip(self.names, self.slots, strict=True)}

    def outputs(self, x: Tensor) -> Tensor:
        """The outputs of the model on the bench, with the logits of classes masked that the host does not have."""
        if not self.norms:
            return masked(self.module(x), self.classes)
        with batch_statistics(self.module):
            return masked(self.module(x), self.classes)

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the model on the bench."""
        return self.loss(self.outputs(x), y)

    def gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter; zero where the loss does not depend on one."""
        return self.gradient_of(self.value(x, y))

    def gradients(self, x: Tensor, y: Tensor, pieces: Sequence[Tensor], chunk: int) -> Iterator[Tensor]:
        """Yield the gradient (d,) on each piece of the data, one at a time to save memory.

        Args:
            pieces: the rows of ``x`` and ``y`` in each piece.
            chunk: samples run at once.
        """
        return (flat(self.mean_gradient(x[piece], y[piece], chunk)) for piece in pieces)

    def mean_gradient(self, x: Tensor, y: Tensor, chunk: int) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter, with at most ``chunk`` samples run at once.

        More samples are run in pieces of half a chunk, and the gradients of the pieces are added up in place.
        """
        # Half a chunk, because the sum of gradients is in memory beside the activations of a piece: together they take
        # no more than an ordinary step on a whole chunk. All pieces have one size, with norms at least two samples.
        count = 1 if len(x) <= chunk else math.ceil(2 * len(x) / chunk)
        count = min(count, max(1, len(x) // (2 if self.norms else 1)))
        if count == 1:
            return self.gradient(x, y)
        for part_x, part_y in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
            (self.value(part_x, part_y) * (len(part_x) / len(x))).backward()
        # Autograd leaves None where the loss does not depend on a parameter. The rest is handed over, not copied, and
        # the slots are cleared for the next caller.
        total = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self.slots)
        for p in self.slots:
            p.grad = None
        return total

    def narrower(self, width: float) -> tuple["Workbench", IndexSet]:
        """A bench of a smaller width, loaded with the static part of this bench's model, and where that part lies."""
        part, index = self.shop.at(width), self.shop.inside(self.width, width)
        part.classes = self.classes
        part.load({name: index.gather(name, p) for name, p in zip(self.names, self._data, strict=True)})
        return part, index

    def descend_part(self, part: "Workbench", index: IndexSet, gradient: tuple[Tensor, ...], lr: float, cap: float):
        """Take one SGD step with the gradient of a part; the rest of the model stays as it is.

        Args:
            part: the bench on which the part lies; the step is at most ``cap`` times as long as the part.
        """
        lr = step_size(lr, cap, part._data, gradient)
        if not lr:
            return
        for name, p, g in zip(self.names, self._data, gradient, strict=True):
            index.scatter_(name, p, -lr * g, accumulate=True)

    def gradient_of(self, value: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a number that was computed with the model on the bench."""
        return torch.autograd.grad(value, self.slots, allow_unused=True, materialize_grads=True)


def masked(logits: Tensor, classes: Tensor | None) -> Tensor:
    """Logits (n, num_classes) in which no class outside ``classes`` can win; unchanged if ``classes`` is None."""
    return logits if classes is None else logits.masked_fill(~classes.to(logits.device), ABSENT)


class Workshop:
    """A workbench of the given kind for every width, made when the first model of that width arrives."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        scalable: ScalableModel | None = None,
        kind: Callable[..., Workbench] = Workbench,
    ):
        self.loss, self.scalable, self.kind = loss, scalable, kind
        self._benches = {1.0: kind(module, loss, shop=self)}
        self._lock = threading.Lock()  # workshops of several workers share the scalable model

    @property
    def full(self) -> Workbench:
        """The bench for models of full width."""
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
        """Where the static part of a width lies in a model of width ``own``."""
        with self._lock:
            return self.scalable.index(width, within=self.scalable.axis_map.counts(own))

    def copy(self, kind: Callable[..., Workbench] | None = None) -> "Workshop":
        """A workshop for the same models with separate benches, for another worker."""
        other = Workshop(copy.deepcopy(self.full.module), self.loss, self.scalable, kind or self.kind)
        # The copy still shares the scalable model, whose cache of parts two threads must not fill at once.
        other._lock = self._lock
        return other
