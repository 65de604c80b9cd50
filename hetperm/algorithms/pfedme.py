"""pFedMe: personal models held to the global one by a spring (Moreau envelopes).

T. Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import RivalOptions, at_home, begin, budgeted
from hetperm.client import Client
from hetperm.device.bench import Params, Shard, Workbench, batches
from hetperm.server.global_model import mean_model
from hetperm.state import State, Work, mixed, num_bytes


@dataclass(frozen=True)
class Options(RivalOptions):
    """What pFedMe needs to know beyond what every rival does."""

    prox: float
    inner_steps: int
    inner_lr: float
    server_step: float

    def __post_init__(self):
        if self.inner_steps < 1:
            raise ValueError(f"{self.inner_steps} inner_steps: pfedme needs at least 1")


def pfedme(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    r"""pFedMe: FedAvg on the Moreau envelopes of the clients' losses.

    .. math:: F_i(w) = \min_\theta f_i(\theta) + \frac\lambda2 \|\theta - w\|^2, \quad
        w_{i,k+1} = w_{i,k} - \eta \lambda (w_{i,k} - \theta_{i,k}), \quad
        w \leftarrow (1 - \beta) w + \beta \frac1N \sum_i w_{i,K}

    with :math:`\lambda` = `prox`, :math:`\eta` = `lr`, :math:`\beta` = `server_step`, and :math:`\theta` found by
    `inner_steps` steps of `inner_lr` (see `envelope_update`). Personal models: the :math:`\theta_i` that client i found
    last. A local step costs `inner_steps` gradients.
    """
    cost = options.local_steps * options.inner_steps
    update = partial(
        envelope_update,
        steps=options.local_steps,
        batch_size=options.batch_size,
        lr=options.lr,
        prox=options.prox,
        inner_steps=options.inner_steps,
        inner_lr=options.inner_lr,
    )

    def advance(state: State, t: int) -> State:
        N = len(clients)
        outcomes = at_home(clients, engine, [update] * N, [state.w] * N, seed=options.seed, t=t)
        mean = mean_model([local for local, _ in outcomes], clients)
        w = mixed((state.w, 1 - options.server_step), (mean, options.server_step))
        moved = N * num_bytes(w)
        work = Work(rounds=1, client_steps=cost * N, bytes_down=moved, bytes_up=moved)
        return replace(state, w=w, v=tuple(theta for _, theta in outcomes), work=state.work + work)

    epoch = budgeted(advance, options, cost=cost)
    return Algorithm(partial(begin, clients, start), epoch, finish=lambda state: state)


def envelope_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    prox: float,
    inner_steps: int,
    inner_lr: float,
    generator: torch.Generator,
) -> tuple[Params, Params]:
    r"""The local model w and the personal model theta after K local steps at a client.

    For one batch D a step, `inner_steps` times
    :math:`\theta \leftarrow \theta - \eta_{in} (\nabla f_i(\theta; D) + \lambda (\theta - w))`, then
    :math:`w \leftarrow w - \eta \lambda (w - \theta)`. Theta starts at the model received and goes on from one step to
    the next, as in the authors' code.
    """
    x, y = shard
    bench.load(params)
    w = dict(params)
    theta = w
    for D in batches(len(x), batch_size, steps, generator):
        for _ in range(inner_steps):
            gradient = bench.gradient(x[D], y[D])
            spring = [theta[name] - w[name] for name in bench.names]
            bench.descend(tuple(g + prox * s for g, s in zip(gradient, spring, strict=True)), inner_lr)
            theta = bench.take()
        w = {name: value - lr * prox * (value - theta[name]) for name, value in w.items()}
    return w, theta
