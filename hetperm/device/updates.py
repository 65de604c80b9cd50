"""Updates: what a host does with a model it is handed. Each is a frozen callable with a name (`device.wire`).

An update is called ``update(bench, params, shard, generator)``. Its fields are plain values. Tensors that it needs
beside the model travel in ``params``. ``samples(n)`` is the number of samples it processes at a host that has n.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.device.bench import Shard, Workbench
from hetperm.params import Params


class Update(Protocol):
    """The interface of all updates."""

    def __call__(self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator) -> Any:
        """What the host sends back: one model, several models or a report. ``params`` stays unchanged."""

    def samples(self, n: int) -> float:
        """The samples that the update processes, over all its gradients, at a host that has n; a loss is a third."""


def batches(n: int, batch_size: int, steps: int, generator: torch.Generator) -> Tensor:
    """(steps, size) the samples of mini-batches of ``min(batch_size, n)``, without replacement within a pass."""
    size = min(batch_size, n)
    per_pass = n // size  # batches in one pass over the shard
    # What is left over at the end of a pass is dropped, so that all batches have one size and can be stacked.
    passes = [torch.randperm(n, generator=generator)[: per_pass * size] for _ in range(-(-steps // per_pass))]
    # The empty tensor is for zero steps: cat refuses an empty list.
    rows = passes[0] if len(passes) == 1 else torch.cat([*passes, torch.empty(0, dtype=torch.long)])
    return rows.view(-1, size)[:steps]


@dataclass(frozen=True)
class Sgd:
    r"""K steps of SGD: :math:`v \leftarrow v - \min(\eta, \rho |v| / |g|) \, g, \; g = \nabla f_j(v; \xi)`.

    Attributes:
        steps: K.
        lr: eta, the step size of the visit, which includes the mixing weight.
        cap: rho: no step is longer than this share of the model's own length; 0 is no cap.

    Example:
        >>> Sgd(steps=5, batch_size=10, lr=0.1).samples(8)
        40
    """

    steps: int
    batch_size: int
    lr: float
    cap: float = 0.0

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        x, y = shard
        bench.load(params)
        for batch in self.batches(len(x), generator):
            bench.descend(bench.gradient(x[batch], y[batch]), self.lr, self.cap)
        return bench.take()

    def batches(self, n: int, generator: torch.Generator) -> Tensor:
        """(steps, size) the samples of each step at a host that has n."""
        return batches(n, self.batch_size, self.steps, generator)

    def samples(self, n: int) -> int:
        """The samples of all steps."""
        return self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Ordered:
    """K steps of SGD, each on a static part of the model whose width is drawn for that step (ordered dropout, FjORD).

    Attributes:
        widths: the widths to draw from, none wider than the model.
        cap: no step is longer than this share of the length of the part; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    widths: tuple[float, ...]
    cap: float = 0.0

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        x, y = shard
        bench.load(params)
        for batch, width in self.draws(len(x), generator):
            if width >= bench.width:
                bench.descend(bench.gradient(x[batch], y[batch]), self.lr, self.cap)
            else:
                part, index = bench.narrower(width)
                bench.descend_part(part, index, part.gradient(x[batch], y[batch]), self.lr, self.cap)
        return bench.take()

    def draws(self, n: int, generator: torch.Generator) -> Iterator[tuple[Tensor, float]]:
        """Yield (batch, width) of each step at a host that has n."""
        # All batches are drawn before the first width, so that they are the batches of plain SGD.
        for batch in batches(n, self.batch_size, self.steps, generator):
            yield batch, self.widths[int(torch.randint(len(self.widths), (), generator=generator))]

    @property
    def trained_widths(self) -> tuple[float, ...]:
        """The widths that are trained, each equally often on average."""
        return self.widths

    def samples(self, n: int) -> int:
        """The samples of all steps."""
        return self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Distil:
    r"""K steps in which the model also teaches a narrower part of itself (in-place distillation).

    .. math:: v \leftarrow v - \eta \nabla_v \big( f_j(v; \xi) + \beta \,
        \mathrm{KL}(\text{softmax } v(x) \,\|\, \text{softmax } v_{[p]}(x)) \big)

    The teacher is held fixed. :math:`v_{[p]}` is the static part of v of width p, drawn for each step.

    Attributes:
        widths: the widths to draw from, all narrower than the model.
        weight: beta.
        cap: neither of the two steps is longer than this share of what it changes; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    widths: tuple[float, ...]
    weight: float
    cap: float = 0.0

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        x, y = shard
        bench.load(params)
        drawing = Ordered(self.steps, self.batch_size, self.lr, self.widths)
        for batch, width in drawing.draws(len(x), generator):
            outputs = bench.outputs(x[batch])
            gradient = bench.gradient_of(bench.loss(outputs, y[batch]))
            # The pupil is cut out before the teacher's step, so that both gradients are those of one model.
            pupil, index = bench.narrower(width)
            target = outputs.detach().log_softmax(1)
            answer = pupil.outputs(x[batch]).log_softmax(1)
            lesson = pupil.gradient_of(F.kl_div(answer, target, reduction="batchmean", log_target=True))
            bench.descend(gradient, self.lr, self.cap)
            bench.descend_part(pupil, index, lesson, self.lr * self.weight, self.cap)
        return bench.take()

    def samples(self, n: int) -> int:
        """The samples of all steps, twice: the pupil runs them too."""
        return 2 * self.steps * min(self.batch_size, n)
