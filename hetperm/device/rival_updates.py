"""Updates that only rivals of PERM use; the algorithm of each says where it comes from (`hetperm.algorithms`)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.bench import Shard, Workbench
from hetperm.device.updates import batches
from hetperm.params import Params, mixed

OWN = "own "  # the prefix in params of the client's own model, which travels beside the global one


@dataclass(frozen=True)
class Meta:
    r"""K meta-steps at a client, each with batches D, D' (and D'') of its own (Per-FedAvg).

    .. math:: \tilde w &= w - \alpha \nabla f_i(w; D), \quad g = \nabla f_i(\tilde w; D') \\
        w &\leftarrow w - \beta (g - \alpha h), \quad
        h = \frac{\nabla f_i(w + \delta g; D'') - \nabla f_i(w - \delta g; D'')}{2 \delta}
            \approx \nabla^2 f_i(w) \, g

    Attributes:
        lr, inner_lr: beta and alpha.
        difference: delta; None leaves h out, which is the first-order variant.
    """

    steps: int
    batch_size: int
    lr: float
    inner_lr: float
    difference: float | None

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its meta-steps."""
        x, y = shard
        bench.load(params)
        draws = iter(batches(len(x), self.batch_size, self.steps * self._batches_per_step, generator))
        for _ in range(self.steps):
            w = bench.take()  # the step is taken from here, with a gradient found elsewhere
            D = next(draws)
            bench.descend(bench.gradient(x[D], y[D]), self.inner_lr)
            D = next(draws)
            g = bench.gradient(x[D], y[D])
            if self.difference is not None:
                D = next(draws)
                h = self._hessian_times(bench, w, g, (x[D], y[D]))
                g = tuple(a - self.inner_lr * b for a, b in zip(g, h, strict=True))
            bench.load(w)
            bench.descend(g, self.lr)
        return bench.take()

    @property
    def _batches_per_step(self) -> int:
        return 2 if self.difference is None else 3

    def _hessian_times(
        self, bench: Workbench, w: Params, g: tuple[Tensor, ...], batch: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """The Hessian at w times g, by the difference of two gradients."""
        sides = []
        for sign in (1, -1):
            bench.load(w)
            bench.descend(g, -sign * self.difference)
            sides.append(bench.gradient(*batch))
        return [(a - b) / (2 * self.difference) for a, b in zip(*sides, strict=True)]

    def samples(self, n: int) -> int:
        """Samples of all gradients; the Hessian-free variant takes two gradients of its third batch."""
        gradients = 2 if self.difference is None else 4
        return gradients * self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Envelope:
    r"""K local steps on the Moreau envelope of a client's loss (pFedMe).

    For one batch D a step, `inner_steps` times
    :math:`\theta \leftarrow \theta - \eta_{in} (\nabla f_i(\theta; D) + \lambda (\theta - w))`, then
    :math:`w \leftarrow w - \eta \lambda (w - \theta)`. Theta starts at the model received and goes on from one step to
    the next, as in the authors' code.

    Attributes:
        prox: lambda; `lr`: eta; `inner_lr`: the step size of theta.
    """

    steps: int
    batch_size: int
    lr: float
    prox: float
    inner_steps: int
    inner_lr: float

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> tuple[Params, Params]:
        """The local model w and the personal model theta."""
        x, y = shard
        bench.load(params)
        w = dict(params)
        theta = w  # the bench holds theta from here on; w is only computed with
        for D in batches(len(x), self.batch_size, self.steps, generator):
            for _ in range(self.inner_steps):
                gradient = bench.gradient(x[D], y[D])
                spring = [theta[name] - w[name] for name in bench.names]
                pulled = tuple(g + self.prox * s for g, s in zip(gradient, spring, strict=True))
                bench.descend(pulled, self.inner_lr)
                theta = bench.take()
            w = {name: value - self.lr * self.prox * (value - theta[name]) for name, value in w.items()}
        return w, theta

    def samples(self, n: int) -> int:
        """Samples of all inner steps."""
        return self.steps * self.inner_steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Mixture:
    r"""K steps of the global model and of the client's own, which is trained as part of a mixture (APFL).

    All on the same batches. If ``adaptive``, the weight a of the own model takes one step a round, with the gradient of
    the first batch, and stays in [0, 1]: :math:`a \leftarrow a - \eta \langle u - w, \nabla f_i(\bar v; \xi) \rangle`.

    Attributes:
        mix: a before the first step. The client's own model u is in ``params``, under names that begin with "own ".
    """

    steps: int
    batch_size: int
    lr: float
    mix: float
    adaptive: bool

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> tuple[Params, Params, Params]:
        """The local copy of w, the client's own model u and the weight a of it."""
        x, y = shard
        w = {name: params[name] for name in bench.names}
        u = {name: params[OWN + name] for name in bench.names}
        a = self.mix
        for k, D in enumerate(batches(len(x), self.batch_size, self.steps, generator)):
            bench.load(mixed((u, a), (w, 1 - a)))
            g = bench.gradient(x[D], y[D])
            slope = sum(((u[name] - w[name]) * part).sum() for name, part in zip(bench.names, g, strict=True))
            # By the chain rule u has the gradient of the mixture times a.
            bench.load(u)
            bench.descend(g, self.lr * a)
            u = bench.take()
            bench.load(w)
            bench.descend(bench.gradient(x[D], y[D]), self.lr)
            w = bench.take()
            if self.adaptive and k == 0:
                a = min(max(a - self.lr * float(slope), 0.0), 1.0)
        return w, u, {"mix": torch.tensor(a, dtype=torch.float64)}

    def samples(self, n: int) -> int:
        """Samples of both models' gradients."""
        return 2 * self.steps * min(self.batch_size, n)
