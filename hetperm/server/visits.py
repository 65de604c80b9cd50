"""Shuffled personal training: models travel, data stays (Algorithm 2 of the paper, Shuffling Local SGD).

A host that is smaller than a visiting model trains a part of it. The rest of the model stays as it is.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.device.updates import Distil, Sgd, Update
from hetperm.engine.task import Task
from hetperm.params import Params, num_bytes, project
from hetperm.server import shuffle
from hetperm.server.federation import Federation
from hetperm.server.shuffle import Round
from hetperm.server.slicer import Index, Slicer
from hetperm.state import State, Work
from submodels import WHOLE, average

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Visiting:
    """Options of a visit. The names are those of the configuration, which explains them."""

    local_steps: int
    batch_size: int
    personal_lr: float
    step_cap: float = 0.0
    step_rule: str = "max"
    nested: str = "static"
    inplace_kd: float = 0.0
    personal_width: str = "own"
    visits: str = "shuffle"


@dataclass(frozen=True)
class Visit:
    """Model i at host j, and the part of the model that the host trains."""

    i: int
    j: int
    index: Index


def step_sizes(alpha: Tensor, eta: float, rule: str) -> Tensor:
    r"""(N, N) the step size of model i at host j; sparse if alpha is.

    ``"paper"`` is :math:`\eta \alpha_i(j) N`. ``"max"`` is :math:`\eta \alpha_i(j) / \max_j \alpha_i(j)`: it has the
    same minimiser and cannot grow with N. ``"plain"`` is :math:`\eta` wherever there is weight, for visits whose
    results are weighted later.
    """
    if rule == "paper":
        return eta * alpha * len(alpha)
    if rule == "plain":
        return eta * (_ones_like(alpha) if alpha.is_sparse else (alpha > 0).to(alpha.dtype))
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


def _ones_like(alpha: Tensor) -> Tensor:
    alpha = alpha.coalesce()
    ones = (alpha.values() > 0).to(alpha.dtype)
    return torch.sparse_coo_tensor(alpha.indices(), ones, alpha.shape, is_coalesced=True, check_invariants=False)


def scheduled(alpha: Tensor, kind: str, generator: torch.Generator) -> list[Round]:
    """The visits of an epoch: "colour", those with weight in the fewest rounds; or "ring", all visits (the paper)."""
    if kind == "colour":
        return shuffle.schedule(alpha, generator)
    if kind == "ring":
        return shuffle.rounds_of(shuffle.ring(len(alpha), generator))
    raise ValueError(f"unknown schedule {kind!r}; use 'colour' or 'ring'")


def personal_epoch(
    federation: Federation,
    state: State,
    rounds: Sequence[Round],
    rule: Visiting,
    *,
    rates: Tensor | None = None,
    tour: int | None = None,
    first: int = 0,
) -> State:
    """The state after some rounds of visits: round by round, model i trains K steps at host j.

    Args:
        rounds: lists of (i, j); within a round no model and no host appears twice.
        rates: (N,) factors of the step size of each model; 1 unless given.
        tour: the tour that they belong to, in which a model visits every host once; the number of the epoch unless
            given.
        first: the number of the first round in its tour.
    """
    tour = state.r if tour is None else tour
    v, clients, own = list(state.v), federation.clients, federation.own_widths(rule.personal_width)
    factors = [1.0] * len(clients) if rates is None else rates.tolist()
    parallel = rule.visits == "parallel"
    sizes = mixing.rows_of(step_sizes(state.alpha, rule.personal_lr, "plain" if parallel else rule.step_rule))
    lr = [{j: size * factor for j, size in row.items()} for row, factor in zip(sizes, factors, strict=True)]
    pupils = _pupils(federation, own) if rule.inplace_kd else {}
    work, begun = Work(rounds=1 if parallel and rounds else len(rounds)), state.work.rounds
    # In parallel all visits of a tour are one round, in which every model appears as often as it has hosts.
    together = [(first, [pair for pairs in rounds for pair in pairs])] if parallel and rounds else []
    for t, pairs in together or enumerate(rounds, first):
        # The ring also schedules visits without weight. They would change nothing, so they are skipped.
        weighty = [(i, j) for i, j in pairs if j in lr[i]]
        # An epoch has at most N rounds, so this number differs for all rounds of the run.
        visits = _visits(federation, weighty, own, rule.nested, round=tour * len(clients) + t)
        # All tasks start from v as it is. Only a host that holds the whole model can run it as a teacher.
        tasks = [
            Task(
                _update(rule, lr[visit.i][visit.j], pupils.get(own[visit.i], ()) if visit.index is WHOLE else ()),
                federation.slicer.cut(v[visit.i], visit.index),
                host=visit.j,
                seed=federation.seed_for("visit", tour, clients[visit.i].key, clients[visit.j].key),
                width=min(own[visit.i], clients[visit.j].width),
                label=f"epoch {state.r}: model {visit.i} at host {visit.j}",
            )
            for visit in visits
        ]
        outcomes = federation.train(tasks, round=begun + t - first)
        work += federation.work_of(tasks, rule.batch_size, outcomes)
        # A visit to a host that is away leaves the model as it was; it comes again in the next tour.
        done = [(visit, part) for visit, part in zip(visits, outcomes, strict=True) if part is not None]
        if parallel:
            v = _means(federation, v, done, mixing.rows_of(state.alpha))
        else:
            for visit, part in done:
                v[visit.i] = federation.keep(federation.slicer.put(v[visit.i], visit.index, part))
        # A visit sends the part to the host and back again.
        moved = sum(num_bytes(part) for _, part in done)
        work += Work(visits=len(done), bytes_down=moved, bytes_up=moved, skipped=len(visits) - len(done))
    if work.skipped:
        log.info("epoch %d: %d visits skipped, their hosts were away", state.r, work.skipped)
    return replace(state, v=tuple(v), work=state.work + work)


def _means(
    federation: Federation,
    v: Sequence[Params],
    done: Sequence[tuple[Visit, Params]],
    weights: Sequence[Mapping[int, float]],
) -> list[Params]:
    r"""Every model as the mean of what its hosts made of it, by alpha, over the hosts that hold a coordinate.

    .. math:: v_{ik} \leftarrow \sum_{j : k \in m_j} \alpha_{ij} u_{ijk} \Big/ \sum_{j : k \in m_j} \alpha_{ij}
    """
    made: dict[int, list[tuple[int, tuple[Params, Index, float]]]] = {}
    for visit, part in done:
        key = federation.clients[visit.j].key
        made.setdefault(visit.i, []).append((key, (part, visit.index, weights[visit.i][visit.j])))
    # Sorted by key, so that sums do not depend on how the clients are labelled.
    parts = {i: [update for _, update in sorted(pairs, key=lambda pair: pair[0])] for i, pairs in made.items()}
    return [federation.keep(average(params, parts[i])) if i in parts else params for i, params in enumerate(v)]


def _visits(federation: Federation, pairs: Round, own: Sequence[float], nested: str, *, round: int) -> list[Visit]:
    """The visits of a round, each with the part that its host trains. "skip" leaves out hosts that are too small."""
    clients, index = federation.clients, federation.slicer.index
    if nested == "skip":
        fits = [(i, j) for i, j in pairs if index(clients[j].width, within=own[i]) is WHOLE]
        return [Visit(i, j, WHOLE) for i, j in fits]
    now = {"seed": federation.seed, "round": round}
    keys = [(clients[i].key, clients[j].key) for i, j in pairs]
    return [
        Visit(i, j, index(clients[j].width, nested, within=own[i], key=key, **now))
        for (i, j), key in zip(pairs, keys, strict=True)
    ]


def _pupils(federation: Federation, own: Sequence[float]) -> dict[float, tuple[float, ...]]:
    """Width of a model -> the widths in use that cut it, which are those it can teach."""
    in_use, index = sorted({client.width for client in federation.clients}), federation.slicer.index
    return {width: tuple(p for p in in_use if index(p, within=width) is not WHOLE) for width in set(own)}


def _update(rule: Visiting, lr: float, pupils: tuple[float, ...]) -> Update:
    """The update of a visit: SGD, with distillation if the model has pupils."""
    if pupils:
        return Distil(rule.local_steps, rule.batch_size, lr, pupils, rule.inplace_kd, rule.step_cap)
    return Sgd(rule.local_steps, rule.batch_size, lr, rule.step_cap)


# The end of an epoch


def projected(federation: Federation, state: State, widths: Sequence[float], radius: float) -> State:
    """The state with personal models projected onto a ball around their start (P_W)."""
    slicer = federation.slicer
    centres = [slicer.cut(state.memory["centre"], slicer.index(width)) for width in widths]
    v = tuple(project(params, centre, radius) for params, centre in zip(state.v, centres, strict=True))
    return replace(state, v=v)


def mixed_by_alpha(federation: Federation, state: State, widths: Sequence[float]) -> State:
    r"""The state with personal models mixed by the weights: :math:`v_i \leftarrow \sum_j \alpha_{ij} v_j`.

    The server has all models at the end of an epoch, so nothing is sent. This step is ours, not the paper's.

    Args:
        widths: (N,) the widths of the personal models.
    """
    # Sorted by key, so that sums do not depend on how the clients are labelled.
    order = federation.order
    rows = [{j: row[j] for j in order if j in row} for row in mixing.rows_of(state.alpha)]
    return replace(state, v=tuple(mixed_over(federation.slicer, i, state.v, widths, row) for i, row in enumerate(rows)))


def mixed_over(
    slicer: Slicer,
    i: int,
    models: Sequence[Params] | Mapping[int, Params],
    widths: Sequence[float],
    weights: Mapping[int, float],
) -> Params:
    r"""Client i's model, each coordinate mixed over the partners whose models have it.

    .. math:: v_{ik} \leftarrow \sum_{j : k \in W_j} \alpha_j v_{jk} \Big/ \sum_{j : k \in W_j} \alpha_j

    Coordinates without any weight keep their value.

    Args:
        i: the client.
        models: of client i and of its partners.
        widths: (N,) of all models.
        weights: partner -> its weight.
    """
    total = {name: torch.zeros_like(x) for name, x in models[i].items()}
    weight = {name: torch.zeros_like(x) for name, x in models[i].items()}
    # Models of one width are summed first, so that each width is cut and added once instead of once per partner.
    for width in sorted(set(widths)):
        members = [j for j in weights if widths[j] == width]
        if not members:
            continue
        share = sum(weights[j] for j in members)
        common = slicer.index(width, within=widths[i])  # where the narrower of both lies in i's model ...
        inside = slicer.index(widths[i], within=width)  # ... and in theirs
        for name in total:
            part = inside.gather(name, sum(models[j][name] * weights[j] for j in members))
            common.scatter_(name, total[name], part, accumulate=True)
            common.scatter_(name, weight[name], torch.full_like(part, share), accumulate=True)
    # Divided by the weight that a coordinate really got: wide coordinates miss the weight of narrow partners.
    return {name: torch.where(weight[name] > 0, total[name] / weight[name], x) for name, x in models[i].items()}
