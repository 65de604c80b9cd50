"""What the rivals of PERM share: a budget of steps that their epochs spend, rounds at home, and fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hetperm.client import Client
from hetperm.device.bench import Params, sgd_update
from hetperm.engine import Task, run_all
from hetperm.randomness import seed_for
from hetperm.server.visits import finite
from hetperm.state import State, Work, num_bytes, tail_begins


@dataclass(frozen=True)
class RivalOptions:
    """What every rival needs to know; the names are those of the configuration, which explains them."""

    seed: int
    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int  # mini-batch gradients that a client may compute in the whole run
    tail_average: float


@dataclass(frozen=True)
class FineTuneOptions(RivalOptions):
    """The same for rivals whose clients train on at the end; those steps are part of `steps`."""

    fine_tune_steps: int
    fine_tune_lr: float


def begin(clients: Sequence[Client], start: Params) -> State:
    """The state before the first round: every model is the start."""
    return State(0, start, (start,) * len(clients))


def budgeted(
    advance: Callable[[State, int], State], options: RivalOptions, *, cost: int, spare: int = 0
) -> Callable[[State], State]:
    """An epoch that runs its share of the rounds that the budget pays for, and takes v into the tail average.

    Rounds are dealt out evenly: epochs differ by one round at most, and what is left at the end pays for none.

    Args:
        advance: (state, t) -> the state after round t, counted from the first round of the run.
        cost: mini-batch gradients that a client computes in a round.
        spare: those that are kept for after the last epoch.
    """
    epochs, steps = options.epochs, options.steps - spare
    if cost < 1:
        raise ValueError("a round without steps teaches nothing; local_steps must be at least 1")
    if cost > steps:
        raise ValueError(f"a budget of {steps} steps a client pays for no round, which takes {cost}; raise steps")
    total = steps // cost
    begins = tail_begins(options.tail_average, epochs)

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
        Task(update, params, host=i, seed=seed_for(seed, "global", t, client.key), width=client.width)
        for i, (client, update, params) in enumerate(zip(clients, updates, models, strict=True))
    ]
    places = [f"round {t}: client {i}" for i in range(len(clients))]
    outcomes = run_all(engine, tasks, places)
    for outcome, place in zip(outcomes, places, strict=True):
        for params in outcome if isinstance(outcome, tuple) else (outcome,):
            finite(params, place)
    return outcomes


def fine_tune(clients: Sequence[Client], engine, options: FineTuneOptions, state: State) -> State:
    """The state in which every client has trained the model it would deploy on its own data; the tail ends there."""
    steps = options.fine_tune_steps
    if steps == 0:
        return state
    update = partial(sgd_update, steps=steps, batch_size=options.batch_size, lr=options.fine_tune_lr)
    tasks = [
        Task(update, params, host=i, seed=seed_for(options.seed, "fine-tune", client.key), width=client.width)
        for i, (client, params) in enumerate(zip(clients, state.deployed, strict=True))
    ]
    places = [f"fine-tuning: client {i}" for i in range(len(clients))]
    v = tuple(finite(params, place) for params, place in zip(run_all(engine, tasks, places), places, strict=True))
    work = Work(rounds=1, client_steps=steps * len(clients), bytes_down=sum(num_bytes(params) for params in v))
    return replace(state, v=v, tail=None, tail_count=0, work=state.work + work)
