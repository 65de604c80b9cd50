"""Per-FedAvg: a global model from which one step of each client goes far, by first-order or Hessian-free MAML.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import FineTuneOptions, at_home, begin, budgeted, fine_tune
from hetperm.client import Client
from hetperm.device.bench import Params, Shard, Workbench, batches
from hetperm.server.global_model import mean_model
from hetperm.state import State, Work, num_bytes

COST = {"first-order": 2, "hessian-free": 4}  # mini-batch gradients of a local step


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """What Per-FedAvg needs to know beyond what every rival does."""

    inner_lr: float
    variant: str
    difference: float = 1e-3  # the delta of the Hessian-free variant

    def __post_init__(self):
        if self.variant not in COST:
            raise ValueError(f"unknown variant {self.variant!r} of perfedavg; use {' or '.join(map(repr, COST))}")
        if self.difference <= 0:
            raise ValueError(f"difference {self.difference:g} of perfedavg must be above 0, such as 0.001")


def perfedavg(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    r"""Per-FedAvg: FedAvg on what each client's loss will be after one step of its own.

    .. math:: F_i(w) = f_i(w - \alpha \nabla f_i(w)), \quad
        w_{i,k+1} = w_{i,k} - \beta \tilde\nabla F_i(w_{i,k}), \quad w \leftarrow \frac1N \sum_i w_{i,K}

    with :math:`\alpha` = `inner_lr`, :math:`\beta` = `lr` (see `meta_update`). Personal models: w until `finish`, which
    adapts w, or its tail average, at each client: `fine_tune_steps` steps of `fine_tune_lr`, part of the budget. The
    authors adapt with one step of :math:`\alpha`. A local step costs 2 gradients, Hessian-free 4.
    """
    cost = COST[options.variant] * options.local_steps
    update = partial(
        meta_update,
        steps=options.local_steps,
        batch_size=options.batch_size,
        lr=options.lr,
        inner_lr=options.inner_lr,
        difference=options.difference if options.variant == "hessian-free" else None,
    )

    def advance(state: State, t: int) -> State:
        N = len(clients)
        w = mean_model(at_home(clients, engine, [update] * N, [state.w] * N, seed=options.seed, t=t), clients)
        moved = N * num_bytes(w)
        work = Work(rounds=1, client_steps=cost * N, bytes_down=moved, bytes_up=moved)
        return replace(state, w=w, v=(w,) * N, work=state.work + work)

    epoch = budgeted(advance, options, cost=cost, spare=options.fine_tune_steps)
    return Algorithm(partial(begin, clients, start), epoch, partial(fine_tune, clients, engine, options))


def meta_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    inner_lr: float,
    difference: float | None,
    generator: torch.Generator,
) -> Params:
    r"""The model after K meta-steps at a client, each with batches D, D' (and D'') of its own.

    .. math:: \tilde w &= w - \alpha \nabla f_i(w; D), \quad g = \nabla f_i(\tilde w; D') \\
        w &\leftarrow w - \beta (g - \alpha h), \quad
        h = \frac{\nabla f_i(w + \delta g; D'') - \nabla f_i(w - \delta g; D'')}{2 \delta}
            \approx \nabla^2 f_i(w) \, g

    Args:
        lr, inner_lr: beta and alpha.
        difference: delta; None leaves h out, which is the first-order variant.
    """
    x, y = shard
    bench.load(params)
    draws = iter(batches(len(x), batch_size, steps * (2 if difference is None else 3), generator))
    for _ in range(steps):
        w = bench.take()
        D = next(draws)
        bench.descend(bench.gradient(x[D], y[D]), inner_lr)
        D = next(draws)
        g = bench.gradient(x[D], y[D])
        if difference is not None:
            D = next(draws)
            ahead, behind = (_moved_gradient(bench, w, g, -sign * difference, x[D], y[D]) for sign in (1, -1))
            h = [(a - b) / (2 * difference) for a, b in zip(ahead, behind, strict=True)]
            g = tuple(a - inner_lr * b for a, b in zip(g, h, strict=True))
        bench.load(w)
        bench.descend(g, lr)
    return bench.take()


def _moved_gradient(bench: Workbench, w: Params, g: tuple[Tensor, ...], lr: float, x: Tensor, y: Tensor):
    """The gradient one step of ``lr`` along g away from w."""
    bench.load(w)
    bench.descend(g, lr)
    return bench.gradient(x, y)
