"""A PERM epoch against the paper's literal one, in which every model visits every host; and the price of alpha."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetperm import mixing
from hetperm.algorithms.perm import Options, two_stage
from hetperm.bench.speed.timing import Comparison, Time, median, pinned, seconds
from hetperm.config import Config
from hetperm.device.gradients import ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine import choice
from hetperm.engine.task import Engine, Task
from hetperm.methods import options_for
from hetperm.randomness import generator_for
from hetperm.runs.scores import figures, score
from hetperm.runs.setting import Setting, from_config
from hetperm.server import shuffle
from hetperm.server.estimate import collect_reports
from hetperm.server.federation import Federation
from hetperm.server.visits import step_sizes
from hetperm.state import State, tail_begins

PARTITIONS = ("classes:1", "class-groups:2", "label-shift:2")
# For the price of alpha. Twenty uncapped steps a visit at the rates of the model diverge on some CPUs.
ALPHA_PARTITION, ALPHA_STEPS, ALPHA_RATES = "label-shift:2", 20, {"personal_lr": 0.05, "global_lr": 0.05}


# An epoch is every visit once, at the paper's step sizes: what the literal epoch does too.
LITERAL = {"steps": 0, "warmup": "static", "step_cap": 0.0, "decay": "none", "rate_rule": "plain", "share": 0.7}


@dataclass(frozen=True)
class Case:
    """What epochs run on: MNIST from a folder, or the digits that come with scikit-learn, which are fewer."""

    data_dir: Path | None
    num_clients: int
    warmup_rounds: int
    epochs: int

    def setting(self, partition: str, **changes: Any) -> Setting:
        """Clients of one size with 200 images each (digits: all images, divided), and an MLP."""
        mnist = {"dataset": "mnist", "data_dir": self.data_dir, "samples_per_client": 200}
        config = Config(
            **(mnist if self.data_dir else {"dataset": "digits"}),
            partition=partition,
            num_clients=self.num_clients,
            capacity_profile="homogeneous",
            **LITERAL,
            warmup_rounds=self.warmup_rounds,
            epochs=self.epochs,
            **changes,
        )
        return from_config(config)


def literal_epoch(federation: Federation, state: State, options: Options) -> State:
    r"""The state after all N^2 visits of the paper's ring, K steps each; the step size is zero where alpha is zero."""
    # Not `personal_epoch` with a ring: that skips the visits without weight, and their price is the point here.
    rule, clients, v, r = options.visiting, federation.clients, list(state.v), state.r
    lr = step_sizes(state.alpha, rule.personal_lr, rule.step_rule)
    for pairs in shuffle.rounds_of(shuffle.ring(len(clients), generator_for(federation.seed, "schedule", r))):
        tasks = [
            Task(
                Sgd(rule.local_steps, rule.batch_size, float(lr[i, j])),
                v[i],
                host=j,
                seed=federation.seed_for("visit", r, clients[i].key, clients[j].key),
                label=f"epoch {r}: model {i} at host {j}",
            )
            for i, j in pairs
        ]
        for (i, _), params in zip(pairs, federation.train(tasks, round=r), strict=True):
            v[i] = params
    state = replace(state, v=tuple(v), r=r + 1)
    return state.averaged(tail_begins(options.tail_average, options.epochs), federation.keep)


def against_literal(case: Case, partition: str, *, engine: str, workers: int) -> dict[str, Any]:
    """Times of both kinds of epoch, taken in turn from the same start, and the accuracy that each ends with.

    Alpha is estimated once before the epochs, and its time counts for neither.
    """
    with pinned(workers):
        setting = case.setting(partition, engine=engine, workers=workers)
        # PERM takes as many steps as its visits need: `steps` binds only its rivals.
        options = options_for("perm-two-stage", setting.config, steps=1)
        with choice.opened(setting.engine, workers, setting.clients, setting.shop) as chosen:
            federation = _federation(setting, chosen)
            algorithm = two_stage(federation, setting.start, options)
            literal = perm = start = algorithm.begin()
            times = []
            for _ in range(options.epochs):
                # In turn, each from its own last state: a machine that is slow for some seconds is slow for both.
                slow, literal = _timed(partial(literal_epoch, federation, literal, options))
                fast, perm = _timed(partial(algorithm.epoch, perm))
                times.append((slow, fast, slow[0] / fast[0]))
    comparison = Comparison(*zip(*times))
    return {
        **_described(setting),
        "epochs": options.epochs,
        "visits": (perm.work.visits - start.work.visits) // options.epochs,
        "literal_visits": len(setting.clients) ** 2,
        "speedup": comparison.ratio,
        "speedups": comparison.ratios,
        "accuracy": _accuracy(setting, perm),
        "literal_accuracy": _accuracy(setting, literal),
        **comparison.row("literal", "perm"),
    }


def price_of_alpha(case: Case, *, engine: str, workers: int, repeats: int) -> dict[str, Any]:
    """Times of the estimate of alpha and of the visits of an epoch with K = 20."""
    with pinned(workers):
        setting = case.setting(ALPHA_PARTITION, local_steps=ALPHA_STEPS, **ALPHA_RATES, engine=engine, workers=workers)
        options = options_for("perm", setting.config, steps=1)
        with choice.opened(setting.engine, workers, setting.clients, setting.shop) as chosen:
            federation = _federation(setting, chosen)
            algorithm = two_stage(federation, setting.start, options)  # its epochs are visits and nothing else
            state, asked = algorithm.begin(), []
            forgotten = replace(state, memory={})  # the reports of `begin`: all clients are asked again

            def estimate() -> None:
                update = ReportGradient(options.mixing.noise_batches)
                reports = collect_reports(federation, forgotten, update, batch_size=options.visiting.batch_size)
                asked.append(reports.work.client_steps)
                mixing.weights(reports.zeta, reports.q, reports.n, regularization=options.mixing.regularization)

            visit = partial(algorithm.epoch, state)
            # Always from the same state, so that all repetitions do the same work.
            estimates, epochs = zip(*[(seconds(estimate), seconds(visit)) for _ in range(repeats)])
    (alpha, alpha_cpu), (visits, visits_cpu) = median(estimates), median(epochs)
    return {
        **_described(setting),
        "local_steps": ALPHA_STEPS,
        "share_of_epoch": alpha / (alpha + visits),
        "report_steps": asked[0],
        "shares": [a / (a + e) for (a, _), (e, _) in zip(estimates, epochs, strict=True)],
        "alpha_seconds": alpha,
        "alpha_cpu_seconds": alpha_cpu,
        "visits_seconds": visits,
        "visits_cpu_seconds": visits_cpu,
    }


def _federation(setting: Setting, engine: Engine) -> Federation:
    return Federation(setting.clients, engine, setting.slicer, setting.config.seed)


def _timed(epoch: Callable[[], State]) -> tuple[Time, State]:
    """The time of one epoch, and the state after it."""
    states = []
    return seconds(lambda: states.append(epoch())), states[0]


def _accuracy(setting: Setting, state: State) -> float:
    """Mean test accuracy, over clients, of the models that they would use."""
    scores = score(setting, state.deployed, [1.0] * len(setting.clients), "test", where="benchmark")
    return figures(setting, *scores)["accuracy"]["mean"]


def _described(setting: Setting) -> dict[str, Any]:
    """A description of what was run."""
    clients, config = setting.clients, setting.config
    return {
        "about": f"{setting.dataset} {config.partition}",
        "size": f"{len(clients)} clients with {clients[0].n_train} samples",
        "engine": setting.engine,
        "cores": config.workers,
    }
