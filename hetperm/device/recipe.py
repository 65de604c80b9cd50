"""Recipe: how local steps are taken, as plain values that training updates carry; the default is plain SGD.

The state of an optimizer begins anew with every task: a model that travels brings no state along, and what one host
has gathered about its own data says nothing at the next. Reports, losses and steps of the server take no part in any of
this: they are plain gradients.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.augment import AUGMENTS, OWN
from hetperm.device.bench import Workbench
from hetperm.params import capped, norm
from hetperm.shards import Batch, Shard, named_tensors, not_finite, parts, rows_of, taken
from submodels import IndexSet

BETAS, EPSILON = (0.9, 0.999), 1e-8  # of adamw, as torch has them


@dataclass(frozen=True)
class Recipe:
    r"""How the steps of a task are taken.

    With :math:`g` the gradient of a mini-batch, :math:`\lambda` the weight decay and :math:`\eta` the step size:

    .. math:: \text{sgd:} &\quad d = g + \lambda v \\
        \text{momentum:} &\quad m \leftarrow \mu m + g + \lambda v, \quad d = m \\
        \text{adamw:} &\quad m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
            s \leftarrow \beta_2 s + (1 - \beta_2) g^2, \quad
            d = \frac{m / (1 - \beta_1^t)}{\sqrt{s / (1 - \beta_2^t)} + \epsilon} + \lambda v \\
        &\quad v \leftarrow v - \min(\eta, \rho |v| / |d|) \, d

    m and s are 0 at the start of every task. :math:`\rho` is the step cap.

    Attributes:
        optimizer: "sgd", "momentum" or "adamw".
        momentum: mu, of "momentum".
        weight_decay: lambda, of all parameters.
        accumulate: the pieces that a mini-batch is run in, one after the other, to save memory.
        autocast: whether forward passes compute in bfloat16 where torch holds that to be safe.
        augment: "none", "flip-crop", or "own": the function that the workshop was given.
        schedule: how step sizes change over the run: "constant", "linear" or "cosine".
        warmup: the share of the run over which they rise first.
        scale: what every step size is multiplied by.
        begin, end: how far the run is, from 0 to 1, at the start and at the end of the task.
    """

    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    accumulate: int = 1
    autocast: bool = False
    augment: str = "none"
    schedule: str = "constant"
    warmup: float = 0.0
    scale: float = 1.0
    begin: float = 0.0
    end: float = 0.0

    def __post_init__(self):
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("augment", (*AUGMENTS, OWN, "none"))):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; use {', '.join(known)}")

    @property
    def changes_steps(self) -> bool:
        """Whether step sizes change over the run."""
        return self.schedule != "constant" or self.warmup > 0

    def rate(self, t: int, steps: int) -> float:
        r"""What the step size of step t, counted from 0, of a task of so many steps is multiplied by.

        With p the progress of the run before the step, p' after it and w the warm-up: :math:`\min(1, p' / w)` times
        :math:`1 - q` ("linear") or :math:`(1 + \cos \pi q) / 2` ("cosine"), :math:`q = \max(0, (p - w) / (1 - w))`.

        Example:
            >>> [Recipe(schedule="linear", begin=0.5, end=1.0).rate(t, 4) for t in (0, 2)]
            [0.5, 0.25]
        """
        if not self.changes_steps:
            return self.scale
        before, after = (self.begin + (self.end - self.begin) * k / max(1, steps) for k in (t, t + 1))
        rise = min(1.0, after / self.warmup) if self.warmup else 1.0
        q = min(1.0, max(0.0, (before - self.warmup) / (1 - self.warmup)))
        return self.scale * rise * SCHEDULES[self.schedule](q)

    def on(self, bench: Workbench, steps: int, names: Sequence[str] | None = None) -> "Stepper":
        """The steps of a task on a bench; see `Stepper`."""
        return Stepper(self, bench, steps, names)


OPTIMIZERS = {"sgd": 0, "momentum": 1, "adamw": 2}  # and how many tensors each keeps for every parameter
SCHEDULES = {
    "constant": lambda q: 1.0,
    "linear": lambda q: 1 - q,
    "cosine": lambda q: (1 + math.cos(math.pi * q)) / 2,
}
PLAIN = Recipe()


class Stepper:
    """The steps of one task: it reads mini-batches, computes gradients and takes steps as a recipe says.

    It holds the state of the optimizer, which is that of one model and ends with the task. An update that trains two
    models has two of them.

    Args:
        bench: where the model lies that takes the steps.
        steps: how many there will be, for the schedule.
        names: the parameters that are moved; None: all.
    """

    def __init__(self, recipe: Recipe, bench: Workbench, steps: int, names: Sequence[str] | None = None):
        self.recipe, self.bench, self.steps = recipe, bench, steps
        # Without a state or decay a step is the gradient itself, and plain SGD stays what it was to the bit.
        self.plain = recipe.optimizer == "sgd" and not recipe.weight_decay
        self._moved = [k for k, name in enumerate(bench.names) if names is None or name in names]
        self._t = 0  # steps whose size was asked for
        self._updates = 0  # gradients in the state
        self._state: list[tuple[Tensor, ...]] = []

    # Reading and gradients

    def read(self, shard: Shard, rows: Tensor, generator: torch.Generator) -> list[Batch]:
        """The mini-batch of some rows, augmented, in the pieces in which it is run."""
        if self.recipe.accumulate == 1:
            return [self._augmented(rows_of(shard, rows), generator)]
        # A batch norm needs two samples in every piece.
        count = min(self.recipe.accumulate, max(1, len(rows) // (2 if self.bench.norms else 1)))
        pieces = parts(taken(shard, rows), count)
        return [self._augmented(batch, generator) for batch in pieces]

    def _augmented(self, batch: Batch, generator: torch.Generator) -> Batch:
        name = self.recipe.augment
        if name != OWN:
            return batch if name == "none" else AUGMENTS[name](*batch, generator)
        batch = self.bench.augment(*batch, generator)
        if len(batch[1]) == 0:
            raise ValueError(
                "augment returns no samples; let it return a changed sample for every one that it is given"
            )
        for part, x in named_tensors(batch):
            wrong = not_finite(x)
            if wrong:
                raise ValueError(f"augment returns {part} that hold {wrong[1]}; let it return finite numbers")
        return batch

    def gradient(self, pieces: Sequence[Batch], on: Workbench | None = None) -> tuple[Tensor, ...]:
        """The gradient of the mean loss over the pieces of a mini-batch, of the model on the bench or on another."""
        bench = self.bench if on is None else on
        if len(pieces) == 1:
            if not self.recipe.autocast:
                return bench.gradient(*pieces[0])
            with self.casting():
                value = bench.value(*pieces[0])
            return bench.gradient_of(value)
        return bench.summed_gradient(pieces, self.casting)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """A context in which forward passes compute in the precision of the recipe."""
        if not self.recipe.autocast:
            yield
            return
        with torch.autocast(self.bench.slots[0].device.type, torch.bfloat16):
            yield

    # Steps

    def next_rate(self) -> float:
        """What the size of the next step is multiplied by; every call is a step."""
        self._t += 1
        return self.recipe.rate(self._t - 1, self.steps)

    def descend(self, gradient: Sequence[Tensor], lr: float, cap: float, scale: float = 1.0) -> None:
        """Take one step with the model on the bench, at most ``cap`` times as long as the model.

        Args:
            gradient: parameter by parameter.
            scale: what the gradient is multiplied by (of plain SGD, which is the same, the step size).
        """
        lr = lr * self.next_rate()
        if self.plain:
            self.bench.descend(gradient, lr * scale, cap)
            return
        data = self.bench.data
        # What is not finite is no step, and must not stay in the state either.
        if not lr or (cap and not math.isfinite(norm(gradient))):
            return
        moved = [gradient[k] if scale == 1 else gradient[k] * scale for k in self._moved]
        self._remember(moved)
        directions = [(data[k], n, g) for n, (k, g) in enumerate(zip(self._moved, moved, strict=True))]
        if cap:
            # Twice over the parameters, each time one by one: all directions at once would be another model in memory.
            slope = math.hypot(*(float(torch.linalg.vector_norm(self._direction(*one))) for one in directions))
            lr = capped(lr, cap, norm(data), slope)
        for p, n, g in directions:
            p.sub_(self._direction(p, n, g), alpha=lr)

    def descend_part(self, part: Workbench, index: IndexSet, gradient: Sequence[Tensor], lr: float, cap: float) -> None:
        """Take one step with the gradient of a part (`Workbench.narrower`).

        Plain SGD leaves the rest of the model as it is. Otherwise the gradient of the rest is 0, as it would be for a
        model whose channels are switched off: its state fades, and its weights decay.
        """
        if self.plain:
            self.bench.descend_part(part, index, gradient, lr * self.next_rate(), cap)
        else:
            self.descend(self.embedded(index, gradient), lr, cap)

    def embedded(self, index: IndexSet, gradient: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradient of a part in the shape of the whole model, zero elsewhere."""
        named = zip(self.bench.names, self.bench.data, gradient, strict=True)
        return tuple(index.scatter_(name, torch.zeros_like(p), g) for name, p, g in named)

    def _remember(self, gradient: Sequence[Tensor]) -> None:
        """Take a gradient into the state of the optimizer."""
        recipe, data = self.recipe, self.bench.data
        if not self._state:
            self._state = [tuple(torch.zeros_like(g) for _ in range(OPTIMIZERS[recipe.optimizer])) for g in gradient]
        self._updates += 1
        for k, g, state in zip(self._moved, gradient, self._state, strict=True):
            if recipe.optimizer == "momentum":
                (m,) = state
                m.mul_(recipe.momentum).add_(g.add(data[k], alpha=recipe.weight_decay) if recipe.weight_decay else g)
            elif recipe.optimizer == "adamw":
                m, s = state
                m.lerp_(g, 1 - BETAS[0])
                s.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])

    def _direction(self, p: Tensor, n: int, g: Tensor) -> Tensor:
        """The direction d of one parameter, the n-th that is moved."""
        decay = self.recipe.weight_decay
        if self.recipe.optimizer == "momentum":
            return self._state[n][0]
        if self.recipe.optimizer == "adamw":
            m, s = self._state[n]
            root = s.div(1 - BETAS[1] ** self._updates).sqrt_().add_(EPSILON)
            g = torch.div(m, root, out=root).div_(1 - BETAS[0] ** self._updates)
            return g.add_(p, alpha=decay) if decay else g
        return g.add(p, alpha=decay)
