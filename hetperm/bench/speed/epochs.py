"""A PERM epoch against the paper's literal one, in which every model visits every host; and the price of alpha."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetperm import mixing
from hetperm.algorithms.perm import Options, two_stage
from hetperm.bench.speed.timing import Comparison, median, pinned, seconds
from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import sgd_update
from hetperm.engine import Task, choose, engine_for, run_all
from hetperm.methods import options_for
from hetperm.randomness import generator_for, seed_for
from hetperm.runs.setting import Setting, prepare
from hetperm.runs.training import figures, score
from hetperm.server import shuffle
from hetperm.server.estimate import reported
from hetperm.server.visits import finite, step_sizes
from hetperm.state import State, tail_begins

PARTITIONS = ("classes:1", "class-groups:2", "label-shift:2")
ALPHA_PARTITION, ALPHA_STEPS = "label-shift:2", 20  # where the price of alpha is told


@dataclass(frozen=True)
class Problem:
    """The data that epochs run on: MNIST from a folder, or the digits that come with scikit-learn, which are fewer."""

    data_dir: Path | None
    num_clients: int
    warmup_rounds: int
    epochs: int

    def setting(self, partition: str, **changes: Any) -> Setting:
        """Clients of one size with 200 images each (of digits: with all there are, divided), and an MLP."""
        mnist = {"dataset": "mnist", "data_dir": self.data_dir, "samples_per_client": 200}
        config = Config(
            **(mnist if self.data_dir else {"dataset": "digits"}),
            partition=partition,
            num_clients=self.num_clients,
            capacity_profile="homogeneous",
            warmup_rounds=self.warmup_rounds,
            epochs=self.epochs,
            **changes,
        )
        return prepare(config)


def literal_epoch(state: State, clients: Sequence[Client], engine, options: Options) -> State:
    r"""The state after all N^2 visits of the paper's ring, K steps each; where alpha is zero, of step size zero."""
    lr, v, r = step_sizes(state.alpha, options.personal_lr, options.step_rule), list(state.v), state.r
    for visits in shuffle.rounds_of(shuffle.ring(len(clients), generator_for(options.seed, "schedule", r))):
        tasks = [
            Task(
                partial(sgd_update, steps=options.local_steps, batch_size=options.batch_size, lr=float(lr[i, j])),
                v[i],
                host=j,
                seed=seed_for(options.seed, "visit", r, clients[i].key, clients[j].key),
            )
            for i, j in visits
        ]
        places = [f"epoch {r}: model {i} at host {j}" for i, j in visits]
        for (i, _), params, place in zip(visits, run_all(engine, tasks, places), places, strict=True):
            v[i] = finite(params, place)
    state = replace(state, v=tuple(v), r=r + 1)
    return state.averaged(tail_begins(options.tail_average, options.epochs))


def against_literal(problem: Problem, partition: str, *, engine: str, workers: int) -> dict[str, Any]:
    """Times of both epochs from the same models and alpha, in turn, epoch after epoch; and what the models are worth.

    Alpha is estimated once, before, and its time counts for neither.
    """
    with pinned(workers):
        setting = problem.setting(partition)
        clients, options = setting.clients, options_for("perm-two-stage", setting.config, steps=1)
        with engine_for(engine, workers, clients, setting.shop) as chosen:
            begin, epoch, _ = two_stage(clients, chosen, setting.start, options, parts=setting.parts)
            literal = perm = start = begin()
            times = []
            for _ in range(options.epochs):
                slow, literal = _timed(partial(literal_epoch, literal, clients, chosen, options))
                fast, perm = _timed(partial(epoch, perm))
                times.append((slow, fast, slow[0] / fast[0]))
    found = Comparison(*zip(*times))
    visits = (perm.work.visits - start.work.visits) // options.epochs
    return {
        **_described(setting, engine, workers),
        "epochs": options.epochs,
        "visits": visits,
        "literal_visits": len(clients) ** 2,
        "speedup": found.ratio,
        "speedups": found.ratios,
        "accuracy": _accuracy(setting, perm),
        "literal_accuracy": _accuracy(setting, literal),
        **found.row("literal", "perm"),
    }


def price_of_alpha(problem: Problem, *, engine: str, workers: int, repeats: int) -> dict[str, Any]:
    """Times of the estimate of alpha and of the visits of an epoch with K = 20."""
    with pinned(workers):
        setting = problem.setting(ALPHA_PARTITION, local_steps=ALPHA_STEPS)
        clients, options = setting.clients, options_for("perm", setting.config, steps=1)
        with engine_for(engine, workers, clients, setting.shop) as chosen:
            begin, epoch, _ = two_stage(clients, chosen, setting.start, options, parts=setting.parts)
            state = begin()

            def estimate() -> None:
                zeta, q, n, _ = reported(
                    state.w, clients, chosen, seed=options.seed, r=0, noise_batches=options.noise_batches
                )
                mixing.weights(zeta, q, n, regularization=options.regularization)

            estimates, epochs = zip(*[(seconds(estimate), seconds(partial(epoch, state))) for _ in range(repeats)])
    (alpha, alpha_cpu), (visits, visits_cpu) = median(estimates), median(epochs)
    return {
        **_described(setting, engine, workers),
        "local_steps": ALPHA_STEPS,
        "share_of_epoch": alpha / (alpha + visits),
        "shares": [a / (a + e) for (a, _), (e, _) in zip(estimates, epochs, strict=True)],
        "alpha_seconds": alpha,
        "alpha_cpu_seconds": alpha_cpu,
        "visits_seconds": visits,
        "visits_cpu_seconds": visits_cpu,
    }


def _timed(work) -> tuple[tuple[float, float], Any]:
    """The time of one call, and what it gave."""
    kept = []
    return seconds(lambda: kept.append(work())), kept[0]


def _accuracy(setting: Setting, state: State) -> float:
    """Of the models that clients would use, on test data, the mean over clients."""
    found = score(setting, state.deployed, [1.0] * len(setting.clients), "test", place="benchmark")
    return figures(setting, *found)["accuracy"]["mean"]


def _described(setting: Setting, engine: str, workers: int) -> dict[str, Any]:
    clients = setting.clients
    return {
        "about": f"{setting.dataset} {setting.config.partition}",
        "size": f"{len(clients)} clients with {clients[0].n_train} samples",
        "engine": choose(engine, workers, clients, setting.shop),
        "cores": workers,
    }
