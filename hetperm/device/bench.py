"""Workbenches: one module for every width, into which visiting models are loaded to be trained and evaluated."""

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.device.augment import Augment
from hetperm.device.layout import channels_last, prefers_channels_last
from hetperm.params import Params, flat, step_size
from hetperm.shards import Batch, Inputs, Shard, at_once, parts, read, size_of, taken
from submodels import IndexSet, ScalableModel
from submodels.norms import has_batch_norm, tracking, without_statistics

Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean loss of the batch

CHUNK = 512  # samples run at once, unless the caller says otherwise
ABSENT = -1e9  # the logit of a class that a client masks: no probability, and still finite


class Workbench:
    """A module into which visiting models are loaded, and the loss that trains them.

    Only parameters travel. Norms use batch statistics and track nothing, so a model leaves no trace on its host.

    Attributes:
        classes: (num_classes,) bool, the classes of the present host; None means all. Set for every task.
        norms: whether some layer normalises over the batch.
        shop: the benches of other widths, for updates that also train a narrower part.
        data: where a visiting model lies, tensor by tensor, outside the autograd graph.
        augment: a user's function that changes batches before local steps; None if there is none.
        channels_last: whether images are run with channels last in memory (`device.layout`).
    """

    def __init__(self, module: nn.Module, loss: Loss, *, width: float = 1.0, shop: "Workshop | None" = None):
        self.module = module.train()
        self.loss = loss
        self.width, self.shop = width, shop
        self.classes: Tensor | None = None
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.slots = [p for p in module.parameters() if p.requires_grad]  # where a visiting model is copied to
        self.norms = has_batch_norm(module)
        self._tracking = [norm for _, norm in tracking(module)]
        self.data = [p.data for p in self.slots]  # the same memory, outside the autograd graph
        self.channels_last = prefers_channels_last(module)

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy a model onto the bench."""
        torch._foreach_copy_(self.data, [params[name] for name in self.names])

    def descend(self, gradient: tuple[Tensor, ...], lr: float, cap: float = 0.0) -> None:
        """Take one SGD step with the model on the bench, at most ``cap`` times as long as the model (`step_size`)."""
        lr = step_size(lr, cap, self.data, gradient)
        if lr:  # a gradient that is not finite would spoil the model even with a step size of 0
            torch._foreach_sub_(self.data, gradient, alpha=lr)

    def take(self) -> Params:
        """A copy of the model on the bench."""
        return {name: p.detach().clone() for name, p in zip(self.names, self.slots, strict=True)}

    @property
    def augment(self) -> Augment | None:
        return None if self.shop is None else self.shop.augment

    def outputs(self, x: Inputs) -> Tensor:
        """The outputs of the model on the bench, with the logits of classes masked that the host does not have."""
        if self.channels_last:
            x = channels_last(x)
        if not self.norms:
            return masked(outputs_of(self.module, x), self.classes)
        with without_statistics(self._tracking):
            return masked(outputs_of(self.module, x), self.classes)

    def value(self, x: Inputs, y: Tensor) -> Tensor:
        """The mean loss of the model on the bench."""
        return self.loss(self.outputs(x), y)

    def gradient(self, x: Inputs, y: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter; zero where the loss does not depend on one."""
        return self.gradient_of(self.value(x, y))

    def gradients(self, shard: Shard, pieces: Sequence[Tensor], chunk: int) -> Iterator[Tensor]:
        """Yield the gradient (d,) on each piece of the data, one at a time to save memory.

        Args:
            pieces: the rows of the shard in each piece.
            chunk: samples run at once.
        """
        return (flat(self.mean_gradient(taken(shard, piece), chunk)) for piece in pieces)

    def mean_gradient(self, shard: Shard, chunk: int) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter, with at most ``chunk`` samples run at once.

        More samples are read and run in pieces of half a chunk.
        """
        # Half a chunk, because the sum of gradients is in memory beside the activations of a piece: together they take
        # no more than an ordinary step on a whole chunk. All pieces have one size, with norms at least two samples.
        n, chunk = size_of(shard), at_once(shard, chunk)
        count = 1 if n <= chunk else math.ceil(2 * n / chunk)
        count = min(count, max(1, n // (2 if self.norms else 1)))
        return self.gradient(*read(shard)) if count == 1 else self.summed_gradient(parts(shard, count), n=n)

    def summed_gradient(
        self,
        pieces: Iterable[Batch],
        casting: Callable[[], AbstractContextManager] = nullcontext,
        *,
        n: int | None = None,
    ) -> tuple[Tensor, ...]:
        """The gradient of the mean loss over pieces, which are run one after the other and added up in place.

        Args:
            casting: makes the context in which forward passes run.
            n: the samples of all pieces together, if these are not in memory.
        """
        if n is None:
            n = sum([len(y) for _, y in pieces])
        for x, y in pieces:
            with casting():
                value = self.value(x, y) * (len(y) / n)
            value.backward()
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
        part.load({name: index.gather(name, p) for name, p in zip(self.names, self.data, strict=True)})
        return part, index

    def descend_part(self, part: "Workbench", index: IndexSet, gradient: tuple[Tensor, ...], lr: float, cap: float):
        """Take one SGD step with the gradient of a part; the rest of the model stays as it is.

        Args:
            part: the bench on which the part lies; the step is at most ``cap`` times as long as the part.
        """
        lr = step_size(lr, cap, part.data, gradient)
        if not lr:
            return
        for name, p, g in zip(self.names, self.data, gradient, strict=True):
            index.scatter_(name, p, -lr * g, accumulate=True)

    def gradient_of(self, value: Tensor) -> tuple[Tensor, ...]:
        """The gradient of a number that was computed with the model on the bench."""
        gradient = torch.autograd.grad(value, self.slots, allow_unused=True, materialize_grads=True)
        # Parameters and all that leaves the bench have the plain layout, whatever images have.
        return tuple(g.contiguous() for g in gradient) if self.channels_last else gradient


def outputs_of(module: Callable[..., Any], inputs: Inputs) -> Any:
    """What a model makes of inputs: a tensor. Of an object with ``logits``, as Hugging Face's models return, these.

    A tuple of inputs becomes the model's arguments, a dict its keyword arguments.
    """
    if isinstance(inputs, Tensor):
        outputs = module(inputs)
    elif isinstance(inputs, Mapping):
        outputs = module(**inputs)
    else:
        outputs = module(*inputs)
    return outputs if isinstance(outputs, Tensor) else logits_of(outputs)


def logits_of(outputs: Any) -> Any:
    """The logits in what a model returns, as an attribute or under that key; what has none is returned as it is."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


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
        augment: Augment | None = None,
    ):
        self.loss, self.scalable, self.kind, self.augment = loss, scalable, kind, augment
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
        other = Workshop(copy.deepcopy(self.full.module), self.loss, self.scalable, kind or self.kind, self.augment)
        # The copy still shares the scalable model, whose cache of parts two threads must not fill at once.
        other._lock = self._lock
        return other
