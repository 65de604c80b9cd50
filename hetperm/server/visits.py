"""Shuffled personal training: models travel, data stays (Algorithm 2 of the paper, Shuffling Local SGD).

A host that is smaller than the model that visits it trains a part of the model, and the rest stays as it was.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.client import Client
from hetperm.device.bench import Params, distil_update, sgd_update
from hetperm.engine import Task, run_all
from hetperm.randomness import generator_for, seed_for
from hetperm.server import shuffle
from hetperm.server.slicer import WHOLE, Parts, own_widths
from hetperm.state import State, Work, distance, mixed, num_bytes
from submodels import IndexSet

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
    if rule == "max" and alpha.is_sparse:
        alpha = alpha.coalesce()
        (i, _), values = alpha.indices(), alpha.values()
        largest = values.new_zeros(len(alpha)).scatter_reduce_(0, i, values, "amax")
        return torch.sparse_coo_tensor(
            alpha.indices(), eta * values / largest[i], alpha.shape, is_coalesced=True, check_invariants=False
        )
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
    parts: Parts = WHOLE,
    widths: Sequence[float] | None = None,
    nested: str = "static",
    inplace_kd: float = 0.0,
) -> State:
    """The state after every scheduled visit of one epoch: model i trains K steps at host j, round by round.

    Args:
        rounds: lists of (i, j); within a round no model and no host appears twice.
        projection: radius of the ball about the start that models are projected onto at the end (P_W); None: no ball.
        widths: (N,) of the clients' own models; as wide as the clients can hold if left out.
        nested: which part of a model a smaller host trains: "static", "random", "rolling", or none of it ("skip").
        inplace_kd: weight of in-place distillation at hosts that hold the whole visiting model.
    """
    v = list(state.v)
    own = own_widths(clients) if widths is None else widths
    lr = mixing.rows_of(step_sizes(state.alpha, personal_lr, step_rule))
    here = present(clients, participation, seed=seed, r=state.r)
    pupils = {width: [p for p in sorted({c.width for c in clients}) if parts.nested(width, p)] for width in set(own)}

    def task(i: int, j: int, index: IndexSet | None) -> Task:
        how = {"steps": local_steps, "batch_size": batch_size, "lr": lr[i][j]}
        update = partial(sgd_update, **how)
        if inplace_kd and index is None and pupils[own[i]]:
            update = partial(distil_update, widths=pupils[own[i]], weight=inplace_kd, **how)
        own_seed = seed_for(seed, "visit", state.r, clients[i].key, clients[j].key)
        return Task(update, parts.cut(v[i], index), host=j, seed=own_seed, width=min(own[i], clients[j].width))

    work = Work(rounds=len(rounds))
    for t, visits in enumerate(rounds):
        visits = [(i, j) for i, j in visits if j in lr[i]]
        if nested == "skip":
            visits = [(i, j) for i, j in visits if parts.nested(own[i], clients[j].width) is None]
        away = sum(not here[j] for _, j in visits)
        visits = [(i, j) for i, j in visits if here[j]]
        keys = [(clients[i].key, clients[j].key) for i, j in visits]
        now = {"seed": seed, "round": state.r * len(clients) + t}
        indices = [
            parts.nested(own[i], clients[j].width, nested, key=key, **now)
            for (i, j), key in zip(visits, keys, strict=True)
        ]
        tasks = [task(i, j, index) for (i, j), index in zip(visits, indices, strict=True)]
        places = [f"epoch {state.r}: model {i} at host {j}" for i, j in visits]
        trained = [finite(params, place) for params, place in zip(run_all(engine, tasks, places), places, strict=True)]
        for (i, _), index, params in zip(visits, indices, trained, strict=True):
            v[i] = parts.put(v[i], index, params)
        moved = sum(num_bytes(params) for params in trained)
        steps = local_steps * len(visits)
        work += Work(visits=len(visits), client_steps=steps, bytes_down=moved, bytes_up=moved, skipped=away)
    if work.skipped:
        log.info("epoch %d: %d visits skipped, their hosts were away", state.r, work.skipped)
    state = replace(state, v=tuple(v), work=state.work + work)
    return state if projection is None else projected(state, parts, own, projection)


def mixed_by_alpha(state: State, clients: Sequence[Client], parts: Parts, widths: Sequence[float]) -> State:
    r"""The state with personal models mixed with those they learn from: :math:`v_i \leftarrow \sum_j \alpha_{ij} v_j`.

    Where models differ in size they are mixed over what they have in common (`Parts.mixed`). It is done by the server,
    which has all models at the end of an epoch: nothing is sent. Ours, not in the paper.
    """
    order = sorted(range(len(clients)), key=lambda j: clients[j].key)
    v = tuple(parts.mixed(i, state.v, widths, row, order) for i, row in enumerate(mixing.rows_of(state.alpha)))
    return replace(state, v=v)


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
        # A finite sum settles it at a third of the price; a sum may also overflow, hence the second look.
        if not math.isfinite(float(x.sum())) and not torch.isfinite(x).all():
            raise NotFinite(
                f"{where}: {name} is not finite; lower the learning rate (personal_lr, global_lr, a rival's lr)"
            )
    return params


def projected(state: State, parts: Parts, widths: Sequence[float], radius: float) -> State:
    """The state with personal models in a ball about where they began (P_W)."""
    centres = [parts.cut(state.memory["centre"], parts.index(width)) for width in widths]
    v = tuple(project(params, centre, radius) for params, centre in zip(state.v, centres, strict=True))
    return replace(state, v=v)


def project(params: Params, centre: Params, radius: float) -> Params:
    """The point of the l2 ball about ``centre`` nearest to a model."""
    away = float(distance(params, centre))
    return params if away <= radius else mixed((centre, 1 - radius / away), (params, radius / away))
