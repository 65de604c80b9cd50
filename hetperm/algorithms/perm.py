"""PERM: the single loop (Algorithm 3 of the paper) and the two stages (Algorithm A1, then Algorithm 2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from hetperm.algorithms.base import Algorithm
from hetperm.client import Client
from hetperm.engine import Task, run_all
from hetperm.estimate import mixing_weights
from hetperm.global_model import gradient_step, local_sgd_round, subtract
from hetperm.local import Params, full_gradient
from hetperm.randomness import generator_for
from hetperm.state import State, Work, num_bytes
from hetperm.visits import personal_epoch, rounds_of


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


def single_loop(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    """Algorithm 3: an epoch of shuffled visits, a step of the global model, new mixing weights; and again."""

    def epoch(state: State) -> State:
        r = state.r
        state = _visits(state, clients, engine, options)
        w, work = gradient_step(
            state.w, clients, engine, seed=options.seed, r=r, batch_size=options.global_batch, lr=options.global_lr
        )
        state = replace(state, w=w, work=state.work + work)
        return _with_weights(state, clients, engine, options)

    return Algorithm(
        partial(_begin, clients, engine, start, options), epoch, partial(_finish, clients, engine, options)
    )


def two_stage(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    """Algorithms A1 and 2: mixing weights once, after the warm-up; then nothing but shuffled visits."""
    return Algorithm(
        partial(_begin, clients, engine, start, options),
        partial(_visits, clients=clients, engine=engine, options=options),
        partial(_finish, clients, engine, options),
    )


def _begin(clients: Sequence[Client], engine, start: Params, options: Options) -> State:
    """Warm-up rounds of global training, then the first mixing weights; personal models begin as the global one."""
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
        )
        work += more
    state = State(0, w, (w,) * len(clients), work=work, memory={"centre": w})
    return _with_weights(state, clients, engine, options)


def _with_weights(state: State, clients: Sequence[Client], engine, options: Options) -> State:
    alpha, work = mixing_weights(
        state.w,
        clients,
        engine,
        seed=options.seed,
        r=state.r,
        regularization=options.regularization,
        noise_batches=options.noise_batches,
        alpha_steps=options.alpha_steps,
        sketch=options.sketch,
    )
    return replace(state, alpha=alpha, work=state.work + work)


def _visits(state: State, clients: Sequence[Client], engine, options: Options) -> State:
    rounds = rounds_of(state.alpha, options.schedule, generator_for(options.seed, "schedule", state.r))
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
    )
    state = replace(state, r=state.r + 1)
    begins = options.epochs - math.ceil(options.tail_average * options.epochs) + 1 if options.tail_average else math.inf
    return state.averaged(begins)


def _finish(clients: Sequence[Client], engine, options: Options, state: State) -> State:
    r"""The paper's last step, if asked for: :math:`\hat v_i = v_i - \frac1L \sum_j \alpha_i(j) \nabla f_j(v_i)`."""
    if options.final_lr is None:
        return state
    v, work = [], Work()
    for i, params in enumerate(state.deployed):
        hosts = state.alpha[i].nonzero().flatten().tolist()
        tasks = [Task(full_gradient, params, host=j, seed=0) for j in hosts]
        gradients = run_all(engine, tasks, [f"final step: model {i} at host {j}" for j in hosts])
        mixture: Tensor = sum(float(state.alpha[i, j]) * g for j, g in zip(hosts, gradients, strict=True))
        v.append(subtract(params, mixture, options.final_lr))
        moved = len(hosts) * num_bytes(params)
        work += Work(visits=len(hosts), bytes_down=moved, bytes_up=moved)
    return replace(state, v=tuple(v), tail=None, tail_count=0, work=state.work + work)
