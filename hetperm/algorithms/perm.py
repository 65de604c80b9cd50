"""PERM: the single loop (Algorithm 3 of the paper) and the two stages (Algorithm A1, then Algorithm 2).

Both for clients of different sizes (section 3.3); with clients of one size that reduces to the homogeneous algorithms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hetperm import mixing
from hetperm.algorithms.base import Algorithm
from hetperm.client import Client
from hetperm.device.bench import Params, full_gradient
from hetperm.engine import Task, run_all
from hetperm.randomness import generator_for
from hetperm.server.estimate import reported
from hetperm.server.global_model import gradient_step, local_sgd_round, subtract, unflatten
from hetperm.server.slicer import WHOLE, Parts, own_widths
from hetperm.server.visits import finite, mixed_by_alpha, personal_epoch, projected, rounds_of
from hetperm.state import State, Work, num_bytes, tail_begins


@dataclass(frozen=True)
class Options:
    """What PERM needs to know; the names are those of the configuration, which explains them."""

    seed: int
    epochs: int
    local_steps: int
    batch_size: int
    personal_lr: float
    global_lr: float
    global_batch: int
    warmup_rounds: int
    step_rule: str
    schedule: str
    regularization: float | str
    noise_batches: int
    alpha_steps: int | None
    sketch: int | None
    tail_average: float
    participation: float
    projection: float | None
    final_lr: float | None
    extraction: str = "static"
    nested: str = "static"
    discrepancy: str = "probe"
    vc_weight: float | str = 0.05
    personal_width: str = "own"
    server_mix: str = "none"
    inplace_kd: float = 0.0


def single_loop(clients: Sequence[Client], engine, start: Params, options: Options, parts: Parts = WHOLE) -> Algorithm:
    """Algorithm 3: an epoch of shuffled visits, a step of the global model, new mixing weights; and again."""

    def epoch(state: State) -> State:
        r = state.r
        state = _visits(state, clients, engine, options, parts)
        w, work = gradient_step(
            state.w,
            clients,
            engine,
            seed=options.seed,
            r=r,
            batch_size=options.global_batch,
            lr=options.global_lr,
            parts=parts,
            extraction=options.extraction,
            rounds_before=options.warmup_rounds,
            most=options.batch_size,
        )
        state = replace(state, w=w, work=state.work + work)
        return _with_weights(state, clients, engine, options, parts)

    return Algorithm(
        partial(_begin, clients, engine, start, options, parts),
        epoch,
        partial(_finish, clients, engine, options, parts),
    )


def two_stage(clients: Sequence[Client], engine, start: Params, options: Options, parts: Parts = WHOLE) -> Algorithm:
    """Algorithms A1 and 2: mixing weights once, after the warm-up; then nothing but shuffled visits."""
    return Algorithm(
        partial(_begin, clients, engine, start, options, parts),
        partial(_visits, clients=clients, engine=engine, options=options, parts=parts),
        partial(_finish, clients, engine, options, parts),
    )


def _begin(clients: Sequence[Client], engine, start: Params, options: Options, parts: Parts) -> State:
    """Warm-up rounds of global training, then the first mixing weights; personal models begin as static parts of w."""
    w, work = start, Work()
    for r in range(options.warmup_rounds):
        w, more = local_sgd_round(
            w,
            clients,
            engine,
            seed=options.seed,
            r=r,
            local_steps=options.local_steps,
            batch_size=options.batch_size,
            lr=options.global_lr,
            parts=parts,
            extraction=options.extraction,
        )
        work += more
    v = tuple(parts.cut(w, parts.index(width)) for width in own_widths(clients, options.personal_width))
    state = State(0, w, v, work=work, memory={"centre": w})
    return _with_weights(state, clients, engine, options, parts)


def _with_weights(state: State, clients: Sequence[Client], engine, options: Options, parts: Parts) -> State:
    """The state with mixing weights from the gradients of all clients at w."""
    zeta, q, n, work = reported(
        state.w,
        clients,
        engine,
        seed=options.seed,
        r=state.r,
        noise_batches=options.noise_batches,
        sketch=options.sketch,
        parts=parts,
        compare=options.discrepancy,
        extraction=options.extraction,
        most=options.batch_size,
    )
    found = mixing.weights if len(clients) < mixing.SPARSE_FROM else mixing.sparse_weights
    alpha = found(
        zeta,
        q,
        n,
        regularization=options.regularization,
        vc=parts.vc(own_widths(clients, options.personal_width)),
        vc_weight=options.vc_weight,
        alpha_steps=options.alpha_steps,
    )
    return replace(state, alpha=alpha, work=state.work + work)


def _visits(state: State, clients: Sequence[Client], engine, options: Options, parts: Parts) -> State:
    rounds = rounds_of(state.alpha, options.schedule, generator_for(options.seed, "schedule", state.r))
    widths = own_widths(clients, options.personal_width)
    state = personal_epoch(
        state,
        clients,
        engine,
        rounds=rounds,
        seed=options.seed,
        local_steps=options.local_steps,
        batch_size=options.batch_size,
        personal_lr=options.personal_lr,
        step_rule=options.step_rule,
        participation=options.participation,
        projection=options.projection,
        parts=parts,
        widths=widths,
        nested=options.nested,
        inplace_kd=options.inplace_kd,
    )
    state = replace(state, r=state.r + 1)
    tailed = state.averaged(tail_begins(options.tail_average, options.epochs), parts.keep)
    if options.server_mix == "none" or state.r >= options.epochs:  # mixed models want another epoch of training
        return tailed
    return replace(tailed, v=mixed_by_alpha(state, clients, parts, widths).v)


def _finish(clients: Sequence[Client], engine, options: Options, parts: Parts, state: State) -> State:
    r"""The paper's last step, if asked for: :math:`\hat v_i = P_W(v_i - \frac1L \sum_j \alpha_i(j) \nabla f_j(v_i))`.

    A host that is smaller than the model has a gradient of the part that it can hold, and none of the rest.
    """
    if options.final_lr is None:
        return state
    widths = own_widths(clients, options.personal_width)
    v, work = [], Work()
    for i, (params, own, weights) in enumerate(zip(state.deployed, widths, mixing.rows_of(state.alpha), strict=True)):
        hosts = sorted(weights, key=lambda j: clients[j].key)
        indices = [parts.nested(own, clients[j].width) for j in hosts]
        held = [parts.cut(params, index) for index in indices]
        tasks = [
            Task(
                partial(full_gradient, most=options.batch_size), part, host=j, seed=0, width=min(own, clients[j].width)
            )
            for part, j in zip(held, hosts, strict=True)
        ]
        gradients = run_all(engine, tasks, [f"final step: model {i} at host {j}" for j in hosts])
        mixture = {name: torch.zeros_like(x) for name, x in params.items()}
        for j, index, part, g in zip(hosts, indices, held, gradients, strict=True):
            mixture = parts.add(mixture, index, unflatten(g, part), weights[j])
        v.append(finite(subtract(params, mixture, options.final_lr), f"final step: model {i}"))
        moved = sum(num_bytes(part) for part in held)
        work += Work(visits=len(hosts), bytes_down=moved, bytes_up=moved)
    state = replace(state, v=tuple(v), tail=None, tail_count=0, work=state.work + work)
    return state if options.projection is None else projected(state, parts, widths, options.projection)
