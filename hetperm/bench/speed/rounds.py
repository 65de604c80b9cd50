"""A FedAvg round against a bare torch loop of the same steps, and a round of PERM's visits against a FedAvg round."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hetperm.bench.speed.timing import compare, cores, pinned
from hetperm.bench.speed.workloads import Setup, Workload, bare_loop, build, fedavg_round
from hetperm.engine import choice
from hetperm.engine.task import Engine
from hetperm.randomness import generator_for
from hetperm.server import shuffle
from hetperm.server.visits import Visiting, personal_epoch
from hetperm.state import State

ROUNDS = 4  # of visits, timed together: what is done once an epoch then counts for little, as in a real epoch


def against_bare(workload: Workload, *, engine: str, workers: int, runs: int, repeats: int) -> dict[str, Any]:
    """Times of a round on ``workers`` cores, and of the bare loop, which always uses one."""
    with pinned(workers):
        setup = build(workload)
        kind = choice.choose(engine, workers, setup.clients, setup.shop)
        with choice.opened(kind, workers, setup.clients, setup.shop) as chosen:
            times = compare(partial(bare_loop, setup), partial(fedavg_round, setup, chosen), runs=runs, repeats=repeats)
    return {
        **described(setup, kind, workers),
        "ratio_to_bare": times.ratio,
        "ratios": times.ratios,
        **times.row("bare", "round"),
    }


def against_fedavg(workload: Workload, *, engine: str, runs: int, repeats: int) -> dict[str, Any]:
    """Times of a round of visits and of a FedAvg round; in both, every client trains a model for as many steps."""
    with pinned(1):
        setup = build(workload)
        state, rounds = travelling(setup)
        kind = choice.choose(engine, 1, setup.clients, setup.shop)
        with choice.opened(kind, 1, setup.clients, setup.shop) as chosen:
            times = compare(
                lambda: [fedavg_round(setup, chosen) for _ in rounds],
                lambda: visit_rounds(setup, state, rounds, chosen),
                runs=runs,
                repeats=repeats,
            )
    return {
        **described(setup, kind, 1),
        "rounds": len(rounds),
        # A comparison says how many times faster the visits are; the table, how much longer they take.
        "ratio_to_fedavg": 1 / times.ratio,
        "ratios": [1 / ratio for ratio in times.ratios],
        **{name: total / len(rounds) for name, total in times.row("fedavg", "visits").items()},
    }


def travelling(setup: Setup) -> tuple[State, list[shuffle.Round]]:
    """Personal models with equal mixing weights, and the first rounds of their visits."""
    N = len(setup.clients)
    # Clones, because after an epoch each model has its own memory: shared memory would be kinder to the cache.
    v = tuple({name: x.clone() for name, x in setup.start.items()} for _ in range(N))
    rounds = shuffle.rounds_of(shuffle.ring(N, generator_for(0, "bench", "ring")))[:ROUNDS]
    return State(0, setup.start, v, alpha=torch.full((N, N), 1 / N, dtype=torch.float64)), rounds


def visit_rounds(setup: Setup, state: State, rounds: list[shuffle.Round], engine: Engine) -> State:
    """The state after some rounds of visits, each with as many steps as a client takes in a FedAvg round."""
    workload = setup.workload
    rule = Visiting(workload.local_steps, workload.batch_size, personal_lr=workload.lr)
    return personal_epoch(setup.federation(engine), state, rounds, rule)


def described(setup: Setup, engine: str, workers: int) -> Mapping[str, Any]:
    """A description of what was run."""
    return {
        "about": setup.workload.about,
        "size": setup.workload.size,
        "engine": engine,
        "cores": workers,
        "pinned": len(cores()) > 0,
    }
