"""Updates that only rivals of PERM use. The papers they come from are named in `hetperm.algorithms`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.device.bench import Workbench
from hetperm.device.recipe import PLAIN, Recipe, Stepper
from hetperm.device.updates import batches
from hetperm.params import Params, mixed
from hetperm.shards import Batch, Shard, size_of

OWN = "own "  # prefix in params of the parameters of a client's own model, which travels beside the global one


@dataclass(frozen=True)
class Meta:
    r"""K meta-steps at a client, each on new batches D, D' and, for h, D'' (Per-FedAvg).

    .. math:: \tilde w &= w - \alpha \nabla f_i(w; D), \quad g = \nabla f_i(\tilde w; D') \\
        w &\leftarrow w - \beta (g - \alpha h), \quad
        h = \frac{\nabla f_i(w + \delta g; D'') - \nabla f_i(w - \delta g; D'')}{2 \delta}
            \approx \nabla^2 f_i(w) \, g

    Attributes:
        lr: beta.
        inner_lr: alpha; the step to w~ is part of the formula, and is plain whatever the recipe.
        difference: delta; None leaves h out (the first-order variant).
        cap: no step is longer than this share of the model's length; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    inner_lr: float
    difference: float | None
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its meta-steps."""
        local = self.recipe.on(bench, self.steps)
        bench.load(params)
        rows = batches(size_of(shard), self.batch_size, self.steps * self._batches_per_step, generator)
        draws = (local.read(shard, D, generator) for D in rows)
        for _ in range(self.steps):
            w = bench.take()  # the step starts here, but its gradient is computed elsewhere
            bench.descend(local.gradient(next(draws)), self.inner_lr, self.cap)
            g = local.gradient(next(draws))
            if self.difference is not None:
                h = self._hessian_times(local, w, g, next(draws))
                g = tuple(a - self.inner_lr * b for a, b in zip(g, h, strict=True))
            bench.load(w)
            local.descend(g, self.lr, self.cap)
        return bench.take()

    @property
    def _batches_per_step(self) -> int:
        return 2 if self.difference is None else 3

    def _hessian_times(self, local: Stepper, w: Params, g: tuple[Tensor, ...], pieces: Sequence[Batch]) -> list[Tensor]:
        """The Hessian at w times g, from the difference of two gradients."""
        bench, sides = local.bench, []
        # Both sides use one batch: the noise between two batches, divided by delta, would drown the difference.
        for sign in (1, -1):
            bench.load(w)
            bench.descend(g, -sign * self.difference)
            sides.append(local.gradient(pieces))
        return [(a - b) / (2 * self.difference) for a, b in zip(*sides, strict=True)]

    def samples(self, n: int) -> int:
        """The samples of all gradients. The Hessian-free variant takes two gradients on its third batch."""
        gradients = 2 if self.difference is None else 4
        return gradients * self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Envelope:
    r"""K local steps on the Moreau envelope of a client's loss (pFedMe).

    For one batch D a step, `inner_steps` times
    :math:`\theta \leftarrow \theta - \eta_{in} (\nabla f_i(\theta; D) + \lambda (\theta - w))`, then
    :math:`w \leftarrow w - \eta \lambda (w - \theta)`. Theta starts at the received model and is kept from one step to
    the next, as in the authors' code.

    Attributes:
        lr: eta; the step of w is part of the formula, and is plain whatever the recipe.
        prox: lambda.
        inner_lr: the step size of theta.
        cap: no step of theta is longer than this share of its length; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    prox: float
    inner_steps: int
    inner_lr: float
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> tuple[Params, Params]:
        """The local model w, which the server averages, and the personal model theta."""
        local = self.recipe.on(bench, self.steps * self.inner_steps)
        bench.load(params)
        w = dict(params)
        theta = w  # from here on theta is on the bench, and w is only a dict
        for D in batches(size_of(shard), self.batch_size, self.steps, generator):
            pieces = local.read(shard, D, generator)
            for _ in range(self.inner_steps):
                gradient = local.gradient(pieces)
                spring = [theta[name] - w[name] for name in bench.names]
                pulled = tuple(g + self.prox * s for g, s in zip(gradient, spring, strict=True))
                local.descend(pulled, self.inner_lr, self.cap)
                theta = bench.take()
            w = {name: value - self.lr * self.prox * (value - theta[name]) for name, value in w.items()}
        return w, theta

    def samples(self, n: int) -> int:
        """The samples of all inner steps."""
        return self.steps * self.inner_steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Mixture:
    r"""K steps of the global model w and of the client's own model u, which is trained inside their mixture (APFL).

    Both use the same batches. If ``adaptive``, the weight a of u takes one step a round, on the first batch, and stays
    in [0, 1]: :math:`a \leftarrow a - \eta \langle u - w, \nabla f_i(\bar v; \xi) \rangle`.

    Attributes:
        mix: a before the round. The client's own model u is in ``params``, under names that begin with "own ".
        cap: no step is longer than this share of the length of the model that takes it; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    mix: float
    adaptive: bool
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> tuple[Params, Params, Params]:
        """The local copy of w, the client's own model u and its weight a."""
        of_w, of_u = (self.recipe.on(bench, self.steps) for _ in range(2))
        w = {name: params[name] for name in bench.names}
        u = {name: params[OWN + name] for name in bench.names}
        a = self.mix
        for k, D in enumerate(batches(size_of(shard), self.batch_size, self.steps, generator)):
            pieces = of_w.read(shard, D, generator)
            bench.load(mixed((u, a), (w, 1 - a)))
            g = of_u.gradient(pieces)
            slope = sum(((u[name] - w[name]) * part).sum() for name, part in zip(bench.names, g, strict=True))
            # The chain rule: the mixture holds a times u, so the gradient of u is a times that of the mixture.
            bench.load(u)
            of_u.descend(g, self.lr, self.cap, scale=a)
            u = bench.take()
            bench.load(w)
            of_w.descend(of_w.gradient(pieces), self.lr, self.cap)
            w = bench.take()
            # Updated last: the gradients of the first batch were all taken with the old a.
            if self.adaptive and k == 0:
                a = min(max(a - self.lr * float(slope), 0.0), 1.0)
        return w, u, {"mix": torch.tensor(a, dtype=torch.float64)}

    def samples(self, n: int) -> int:
        """The samples of the gradients of both models."""
        return 2 * self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class Proximal:
    r"""K steps of the global model w and K of the client's own model v, which a spring pulls to w as received (Ditto).

    .. math:: v \leftarrow v - \eta \big( \nabla f_i(v; \xi) + \lambda (v - w^0) \big), \quad
        w \leftarrow w - \eta \nabla f_i(w; \xi)

    Both use the same batches. The client's own model is in ``params``, under names that begin with "own ".

    Attributes:
        lr: eta.
        prox: lambda.
        cap: no step is longer than this share of the length of the model that takes it; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    prox: float
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> tuple[Params, Params]:
        """The local copy of w, which the server averages, and the client's own model v."""
        of_w, of_v = (self.recipe.on(bench, self.steps) for _ in range(2))
        rows = batches(size_of(shard), self.batch_size, self.steps, generator)
        bench.load(params)
        for D in rows:
            of_w.descend(of_w.gradient(of_w.read(shard, D, generator)), self.lr, self.cap)
        w = bench.take()
        v = {name: params[OWN + name] for name in bench.names}
        bench.load(v)
        for D in rows:
            gradient = of_v.gradient(of_v.read(shard, D, generator))
            pulled = tuple(
                g + self.prox * (v[name] - params[name]) for name, g in zip(bench.names, gradient, strict=True)
            )
            of_v.descend(pulled, self.lr, self.cap)
            v = bench.take()
        return w, v

    def samples(self, n: int) -> int:
        """The samples of the gradients of both models."""
        return 2 * self.steps * min(self.batch_size, n)


@dataclass(frozen=True)
class HeadThenBody:
    r"""Steps of the classifier alone, then K steps of the body alone: all other parameters (FedRep).

    .. math:: h \leftarrow h - \eta_h \nabla_h f_i(\phi, h; \xi), \quad
        \phi \leftarrow \phi - \eta \nabla_\phi f_i(\phi, h; \xi)

    Attributes:
        steps: K, the steps of the body phi.
        lr: eta.
        heads: the names of the classifier's parameters h.
        head_steps: the steps of the classifier.
        head_lr: eta_h.
        cap: no step is longer than this share of the model's length; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    heads: tuple[str, ...]
    head_steps: int
    head_lr: float
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its steps."""
        # Two states: what has moved the classifier must not go on moving it while the body is trained.
        body = [name for name in bench.names if name not in self.heads]
        head, body = self.recipe.on(bench, self.head_steps, self.heads), self.recipe.on(bench, self.steps, body)
        bench.load(params)
        for k, D in enumerate(batches(size_of(shard), self.batch_size, self.head_steps + self.steps, generator)):
            of_head = k < self.head_steps
            local = head if of_head else body
            gradient = local.gradient(local.read(shard, D, generator))
            moved = tuple(
                g if (name in self.heads) == of_head else torch.zeros_like(g)
                for name, g in zip(bench.names, gradient, strict=True)
            )
            local.descend(moved, self.head_lr if of_head else self.lr, self.cap)
        return bench.take()

    def samples(self, n: int) -> int:
        """The samples of all steps. A step of the classifier counts like any other."""
        return (self.head_steps + self.steps) * min(self.batch_size, n)


@dataclass(frozen=True)
class Scaled:
    r"""K steps of SGD on a model whose hidden layers are multiplied by a number, as HeteroFL's Scaler does.

    .. math:: v \leftarrow v - \eta \, s \odot \nabla f_j(s \odot v; \xi)

    A layer is linear in its weight and bias, so multiplying its outputs is multiplying these: s is `scale` for hidden
    layers (`hidden_layers`) and 1 elsewhere, which is exact for linear and convolutional layers of any module.

    Attributes:
        lr: eta.
        scale: 1 / width in HeteroFL.
        heads: the names of the classifier's parameters, which are not scaled.
        cap: no step is longer than this share of the length of v; 0 is no cap.
    """

    steps: int
    batch_size: int
    lr: float
    scale: float
    heads: tuple[str, ...]
    cap: float = 0.0
    recipe: Recipe = PLAIN

    def __call__(
        self, bench: Workbench, params: Mapping[str, Tensor], shard: Shard, generator: torch.Generator
    ) -> Params:
        """The model after its K steps, not scaled."""
        local = self.recipe.on(bench, self.steps)
        v, hidden = dict(params), hidden_layers(params, self.heads)
        for D in batches(size_of(shard), self.batch_size, self.steps, generator):
            bench.load(scaled(v, hidden, self.scale))
            gradient = local.gradient(local.read(shard, D, generator))
            slope = tuple(
                g * self.scale if name in hidden else g for name, g in zip(bench.names, gradient, strict=True)
            )
            bench.load(v)
            local.descend(slope, self.lr, self.cap)
            v = bench.take()
        return v

    def samples(self, n: int) -> int:
        """The samples of all steps."""
        return self.steps * min(self.batch_size, n)


def hidden_layers(params: Mapping[str, Tensor], heads: Sequence[str]) -> frozenset[str]:
    """Names of the parameters of layers with a weight of two or more dimensions, without the classifier.

    Example:
        >>> params = {"fc.weight": torch.zeros(2, 3), "fc.bias": torch.zeros(2), "norm.weight": torch.zeros(2)}
        >>> sorted(hidden_layers(params | {"out.weight": torch.zeros(1, 2)}, heads=["out.weight"]))
        ['fc.bias', 'fc.weight']
    """
    layers = {_layer(name) for name, x in params.items() if x.dim() >= 2} - {_layer(name) for name in heads}
    return frozenset(name for name in params if _layer(name) in layers)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def scaled(params: Mapping[str, Tensor], names: Collection[str], scale: float) -> Params:
    """The model with some of its parameters multiplied by a number."""
    return {name: x * scale if name in names else x for name, x in params.items()}
