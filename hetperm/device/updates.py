"""Updates: what a host does with a model it is handed. Each is a frozen callable with a name (`device.wire`).

An update is called ``update(bench, params, shard, generator)``. Its fields are plain values. Tensors that it needs
beside the model travel in ``params``. ``samples(n)`` is the number of samples it processes at a host that has n. An
update that trains has a ``recipe``, which says how its steps are taken (`device.recipe`): plain SGD, unless a run gives
it another (`server.pace`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.device.bench import Workbench
from hetperm.device.recipe import PLAIN, Recipe, Stepper
from hetperm.params import Params
from hetperm.shards import Batch, Shard, size_of


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
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        local = self.recipe.on(bench, self.steps)
        bench.load(params)
        for batch in self.batches(size_of(shard), generator):
            local.descend(local.gradient(local.read(shard, batch, generator)), self.lr, self.cap)
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
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        local = self.recipe.on(bench, self.steps)
        bench.load(params)
        for batch, width in self.draws(size_of(shard), generator):
            pieces = local.read(shard, batch, generator)
            if width >= bench.width:
                local.descend(local.gradient(pieces), self.lr, self.cap)
            else:
                part, index = bench.narrower(width)
                local.descend_part(part, index, local.gradient(pieces, on=part), self.lr, self.cap)
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
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps."""
        local = self.recipe.on(bench, self.steps)
        bench.load(params)
        drawing = Ordered(self.steps, self.batch_size, self.lr, self.widths)
        for batch, width in drawing.draws(size_of(shard), generator):
            pieces = local.read(shard, batch, generator)
            # The pupil is cut out before the teacher's step, so that both gradients are those of one model.
            pupil, index = bench.narrower(width)
            gradient, lesson = _lessons(local, pupil, pieces)
            if local.plain:
                lr = self.lr * local.next_rate()
                bench.descend(gradient, lr, self.cap)
                bench.descend_part(pupil, index, lesson, lr * self.weight, self.cap)
            else:
                # An optimizer takes one step a gradient, so it gets that of the sum of both losses.
                pulls = local.embedded(index, lesson)
                total = [g + self.weight * pull for g, pull in zip(gradient, pulls, strict=True)]
                local.descend(total, self.lr, self.cap)
        return bench.take()

    def samples(self, n: int) -> int:
        """The samples of all steps, twice: the pupil runs them too."""
        return 2 * self.steps * min(self.batch_size, n)


def _lessons(local: Stepper, pupil: Workbench, pieces: Sequence[Batch]) -> tuple[tuple[Tensor, ...], ...]:
    """The gradient of the model's loss, and that of its pupil's distance to it, over the pieces of a mini-batch."""
    bench, n = local.bench, sum([len(y) for _, y in pieces])
    totals = None
    for x, y in pieces:
        with local.casting():
            outputs = bench.outputs(x)
            value = bench.loss(outputs, y)
        gradient = bench.gradient_of(value)
        with local.casting():
            target = outputs.detach().log_softmax(1)
            answer = pupil.outputs(x).log_softmax(1)
            distance = F.kl_div(answer, target, reduction="batchmean", log_target=True)
        both = (gradient, pupil.gradient_of(distance))
        if len(pieces) == 1:
            return both
        shares = [torch._foreach_mul(one, len(y) / n) for one in both]
        if totals is None:
            totals = shares
        else:
            for total, share in zip(totals, shares, strict=True):
                torch._foreach_add_(total, share)
    return tuple(tuple(total) for total in totals)
