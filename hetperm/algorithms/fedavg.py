"""FedAvg: one global model for all; localized FedAvg: the same, then trained on by each client at home.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017. What all rivals of
PERM have in common is here too: a round, and a budget of steps that their epochs spend.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetperm.algorithms.base import Algorithm
from hetperm.client import Client
from hetperm.engine import Task, run_all
from hetperm.global_model import local_sgd_round
from hetperm.local import Params, sgd_update
from hetperm.randomness import seed_for
from hetperm.state import State, Work, num_bytes
from hetperm.visits import finite


@dataclass(frozen=True)
class Options:
    """What FedAvg needs to know; the names are those of the configuration, which explains them."""

    seed: int
    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int
    tail_average: float


@dataclass(frozen=True)
class FineTuneOptions:
    """What localized FedAvg needs to know: as FedAvg, and how a client trains on; those steps are part of `steps`."""

    seed: int
    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int
    tail_average: float
    fine_tune_steps: int
    fine_tune_lr: float


def fedavg(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    r"""FedAvg: every client takes K steps from w, and the server averages.

    .. math:: w_{i,0} = w, \quad w_{i,k+1} = w_{i,k} - \eta \nabla f_i(w_{i,k}; \xi), \quad
        w \leftarrow \frac1N \sum_i w_{i,K}

    The average is plain, as in the warm-up of PERM: clients count alike, as they do in the accuracy that is reported.
    Personal models: w, for everybody. A step costs one gradient.
    """
    return Algorithm(
        partial(begin, clients, start),
        _epoch(clients, engine, options, steps=options.steps),
        finish=lambda state: state,
    )


def fedavg_ft(clients: Sequence[Client], engine, start: Params, options: FineTuneOptions) -> Algorithm:
    r"""Localized FedAvg: FedAvg, and at the end every client trains the global model on its own data.

    .. math:: v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi), \quad v_i = w \text{ at first}

    Personal models: w until `finish`, which fine-tunes the tail average of w where there is one.
    """
    return Algorithm(
        partial(begin, clients, start),
        _epoch(clients, engine, options, steps=options.steps - options.fine_tune_steps),
        partial(
            fine_tune,
            clients=clients,
            engine=engine,
            seed=options.seed,
            steps=options.fine_tune_steps,
            batch_size=options.batch_size,
            lr=options.fine_tune_lr,
        ),
    )


def _epoch(clients: Sequence[Client], engine, options: Options | FineTuneOptions, *, steps: int):
    def advance(state: State, t: int) -> State:
        w, work = local_sgd_round(
            state.w,
            clients,
            engine,
            seed=options.seed,
            r=t,
            local_steps=options.local_steps,
            batch_size=options.batch_size,
            lr=options.lr,
        )
        return replace(state, w=w, v=(w,) * len(clients), work=state.work + work)

    return budgeted(
        advance, epochs=options.epochs, steps=steps, cost=options.local_steps, tail_average=options.tail_average
    )


def begin(clients: Sequence[Client], start: Params) -> State:
    """The state before the first round: every model is the start."""
    return State(0, start, (start,) * len(clients))


def budgeted(
    advance: Callable[[State, int], State], *, epochs: int, steps: int, cost: int, tail_average: float
) -> Callable[[State], State]:
    """An epoch that runs its share of the rounds that the budget pays for, and takes v into the tail average.

    Rounds are dealt out evenly: epochs differ by one round at most, and what is left at the end pays for none.

    Args:
        advance: (state, t) -> the state after round t, counted from the first round of the run.
        steps: mini-batch gradients that a client may compute in all epochs together.
        cost: mini-batch gradients that a client computes in a round.
        tail_average: the share of the last epochs that is averaged over; 0 for none.
    """
    if cost < 1:
        raise ValueError("a round without steps teaches nothing; local_steps and inner_steps must be at least 1")
    if cost > steps:
        raise ValueError(f"a budget of {steps} steps a client pays for no round, which takes {cost}; raise steps")
    total = steps // cost
    begins = epochs - math.ceil(tail_average * epochs) + 1 if tail_average else math.inf

    def epoch(state: State) -> State:
        first, end = (min(r, epochs) * total // epochs for r in (state.r, state.r + 1))
        for t in range(first, end):
            state = advance(state, t)
        return replace(state, r=state.r + 1).averaged(begins)

    return epoch


def at_home(
    clients: Sequence[Client],
    engine,
    updates: Sequence[Callable[..., Any]],
    models: Sequence[Params],
    *,
    seed: int,
    t: int,
) -> list[Any]:
    """What every client makes of its model with its own data in round t: a model or several, all of them finite.

    All algorithms draw the batches of round t at client i from the same stream, so that they differ only in the rule.
    """
    tasks = [
        Task(update, params, host=i, seed=seed_for(seed, "global", t, client.key))
        for i, (client, update, params) in enumerate(zip(clients, updates, models, strict=True))
    ]
    places = [f"round {t}: client {i}" for i in range(len(clients))]
    outcomes = run_all(engine, tasks, places)
    for outcome, place in zip(outcomes, places, strict=True):
        for params in outcome if isinstance(outcome, tuple) else (outcome,):
            finite(params, place)
    return outcomes


def fine_tune(
    state: State, clients: Sequence[Client], engine, *, seed: int, steps: int, batch_size: int, lr: float
) -> State:
    """The state in which every client has trained the model it would deploy on its own data; the tail ends there."""
    if steps == 0:
        return state
    update = partial(sgd_update, steps=steps, batch_size=batch_size, lr=lr)
    tasks = [
        Task(update, params, host=i, seed=seed_for(seed, "fine-tune", client.key))
        for i, (client, params) in enumerate(zip(clients, state.deployed, strict=True))
    ]
    places = [f"fine-tuning: client {i}" for i in range(len(clients))]
    v = tuple(finite(params, place) for params, place in zip(run_all(engine, tasks, places), places, strict=True))
    work = Work(rounds=1, client_steps=steps * len(clients), bytes_down=sum(num_bytes(params) for params in v))
    return replace(state, v=v, tail=None, tail_count=0, work=state.work + work)
