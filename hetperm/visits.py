"""Shuffled personal training: models travel, data stays (Algorithm 2 of the paper, Shuffling Local SGD)."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hetperm import shuffle
from hetperm.client import Client
from hetperm.engine import Task, run_all
from hetperm.local import Params, sgd_update
from hetperm.randomness import generator_for, seed_for
from hetperm.state import State, Work, distance, mixed, num_bytes

log = logging.getLogger(__name__)


class NotFinite(ArithmeticError):
    """A model went non-finite; the message names epoch, model, host and quantity."""


def step_sizes(alpha: Tensor, eta: float, rule: str) -> Tensor:
    r"""(N, N) the step size of model i at host j.

    ``"paper"``: :math:`\eta \alpha_i(j) N`; ``"max"``: :math:`\eta \alpha_i(j) / \max_j \alpha_i(j)`, which has the
    same minimiser and cannot grow with N.
    """
    if rule == "paper":
        return eta * alpha * len(alpha)
    if rule == "max":
        return eta * alpha / alpha.amax(dim=1, keepdim=True)
    raise ValueError(f"unknown step_rule {rule!r}; use 'max' or 'paper'")


def present(clients: Sequence[Client], participation: float, *, seed: int, r: int) -> list[bool]:
    """Which clients are there in epoch r; each decides by itself, so relabelling clients relabels the answer."""
    if participation >= 1:
        return [True] * len(clients)
    draws = [torch.rand((), generator=generator_for(seed, "present", r, client.key)) for client in clients]
    return [bool(draw < participation) for draw in draws]


def personal_epoch(
    state: State,
    clients: Sequence[Client],
    engine,
    *,
    rounds: Sequence[Sequence[tuple[int, int]]],
    seed: int,
    local_steps: int,
    batch_size: int,
    personal_lr: float,
    step_rule: str,
    participation: float = 1.0,
    projection: float | None = None,
) -> State:
    """The state after every scheduled visit of one epoch: model i trains K steps at host j, round by round.

    Args:
        rounds: lists of (i, j); within a round no model and no host appears twice.
        projection: radius of the ball about the start that models are projected onto at the end (P_W); None: no ball.
    """
    v = list(state.v)
    lr = step_sizes(state.alpha, personal_lr, step_rule)
    here = present(clients, participation, seed=seed, r=state.r)
    work = Work(rounds=len(rounds))
    for visits in rounds:
        visits = [(i, j) for i, j in visits if state.alpha[i, j] > 0]
        away = sum(not here[j] for _, j in visits)
        visits = [(i, j) for i, j in visits if here[j]]
        tasks = [
            Task(
                partial(sgd_update, steps=local_steps, batch_size=batch_size, lr=float(lr[i, j])),
                v[i],
                host=j,
                seed=seed_for(seed, "visit", state.r, clients[i].key, clients[j].key),
            )
            for i, j in visits
        ]
        places = [f"epoch {state.r}: model {i} at host {j}" for i, j in visits]
        for (i, _), place, params in zip(visits, places, run_all(engine, tasks, places), strict=True):
            v[i] = finite(params, place)
        moved = sum(num_bytes(v[i]) for i, _ in visits)
        steps = local_steps * len(visits)
        work += Work(visits=len(visits), client_steps=steps, bytes_down=moved, bytes_up=moved, skipped=away)
    if work.skipped:
        log.info("epoch %d: %d visits skipped, their hosts were away", state.r, work.skipped)
    if projection is not None:
        v = [project(params, state.memory["centre"], projection) for params in v]
    return replace(state, v=tuple(v), work=state.work + work)


def rounds_of(alpha: Tensor, kind: str, generator: torch.Generator) -> list[list[tuple[int, int]]]:
    """The visits of an epoch: those with weight in as few rounds as can be ("colour"), or the paper's ("ring")."""
    if kind == "colour":
        return shuffle.schedule(alpha, generator)
    if kind == "ring":
        return shuffle.rounds_of(shuffle.ring(len(alpha), generator))
    raise ValueError(f"unknown schedule {kind!r}; use 'colour' or 'ring'")


def finite(params: Params, where: str) -> Params:
    """The model itself; an error that says where if it is not finite."""
    for name, x in params.items():
        if not torch.isfinite(x).all():
            raise NotFinite(f"{where}: {name} is not finite; lower the learning rate (personal_lr, global_lr)")
    return params


def project(params: Params, centre: Params, radius: float) -> Params:
    """The point of the l2 ball about ``centre`` nearest to a model."""
    away = float(distance(params, centre))
    return params if away <= radius else mixed((centre, 1 - radius / away), (params, radius / away))
