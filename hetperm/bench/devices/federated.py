"""Short federated runs: hetero-PERM under the limits of every tier, and methods against a simulated clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from hetperm.algorithms.base import Algorithm
from hetperm.bench.devices.benchmark import Enforcement, Say
from hetperm.bench.devices.limited import Limited
from hetperm.config import Config
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Engine
from hetperm.profile import Profile
from hetperm.runs.clock import Clock, Speed
from hetperm.runs.scores import by_tier, figures, score
from hetperm.runs.setting import Setting, from_config
from hetperm.runs.training import algorithm_for, default_steps, states, steps_taken
from hetperm.state import State
from submodels.cost import count

COMPARED = ("perm", "heterofl-ft", "fedrolex-ft")
FINE_TUNING = 25  # steps of a method that is fine-tuned
POINTS = 3  # points of a curve, if each needs fine-tuning


# Inside limits


@dataclass(frozen=True)
class UnderLimits:
    """The outcome of a federated run in which every task was done under its host's limit.

    Attributes:
        completed: whether every task fitted; `reason`: which one did not.
        same: whether models and mixing weights equal, bit by bit, those of a run without limits.
        tasks: tier -> tasks done there.
    """

    epochs: int
    completed: bool
    same: bool
    tasks: Mapping[str, int]
    reason: str = ""


def under_limits(config: Config, profile: Profile, enforcement: Enforcement) -> UnderLimits:
    """Run hetero-PERM with one client of each tier, once under limits and once without."""
    # Equal shares, so that as many clients as tiers means one in each.
    even = replace(profile, tiers=tuple(replace(tier, share=1) for tier in profile.tiers))
    setting = from_config(config.override(num_clients=len(even.tiers)), tiers=even)
    tiers = {tier.name: tier for tier in even.tiers}
    engine = Limited(
        setting.clients,
        setting.shop,
        enforcement.devices,
        allowed=[enforcement.allowed_bytes(tiers[name]) for name in setting.tiers],
        limit=enforcement.limit,
        rehearsed=enforcement.rehearsed,
    )
    try:
        limited, reason = _last_state(setting, engine), ""
    except RuntimeError as error:
        limited, reason = None, str(error)
    tasks = dict(zip(setting.tiers, engine.done, strict=True))
    if limited is None:
        return UnderLimits(config.epochs, False, False, tasks, reason)
    # Only now: a run that limits have stopped has nothing to be compared with.
    free = _last_state(setting, Sequential(setting.clients, setting.shop))
    return UnderLimits(config.epochs, True, same(limited, free), tasks)


def _last_state(setting: Setting, engine: Engine) -> State:
    """The last state of hetero-PERM on an engine."""
    algorithm = algorithm_for(setting, "perm", engine, steps=default_steps(setting.config))
    *_, state = states(algorithm, setting.config.epochs)
    return state


def same(a: State, b: State) -> bool:
    """Whether two states hold the same models and mixing weights, bit by bit."""
    models = [(a.w, b.w), *zip(a.v, b.v, strict=True)]
    return torch.equal(a.alpha, b.alpha) and all(
        torch.equal(one[name], two[name]) for one, two in models for name in one
    )


# Against the clock


def curves(config: Config, profile: Profile, speed: Speed, *, say: Say) -> list[dict[str, Any]]:
    """Accuracy of each method against simulated time and traffic, a row for each point of its curve.

    A method that is fine-tuned at the end is shown at every point as if it ended there. The time of that fine-tuning
    counts for this point and for no later one.
    """
    setting = from_config(config, tiers=profile)
    tiers = {tier.name: tier for tier in profile.tiers}
    example = setting.clients[0].train[0][:1]

    @cache  # the clock asks at every task
    def macs(width: float) -> int:
        return count(setting.shop.at(width).module, example, batch_size=config.batch_size).macs

    rows, steps = [], default_steps(config)
    for method in COMPARED:
        clock = Clock(
            Sequential(setting.clients, setting.shop),
            tiers=[tiers[name] for name in setting.tiers],
            samples=[client.n_train for client in setting.clients],
            macs=macs,
            speed=speed,
        )
        algorithm = algorithm_for(setting, method, clock, steps=steps)
        for state in states(algorithm, config.epochs):
            say(f"{method}: epoch {state.r} of {config.epochs}")
            if method == "perm" or state.r in points(config.epochs):
                rows.append({"method": method, **_point(setting, algorithm, state, clock)})
        if method == "perm":  # the first method: its rivals may take as many steps
            steps = steps_taken(state)
    return rows


def points(epochs: int) -> list[int]:
    """The epochs after which fine-tuned methods are evaluated: the last one, and some before it.

    Example:
        >>> points(6), points(2)
        ([2, 4, 6], [1, 2])
    """
    return sorted({math.ceil(epochs * k / POINTS) for k in range(1, POINTS + 1)})


def _point(setting: Setting, algorithm: Algorithm, state: State, clock: Clock) -> dict[str, Any]:
    """A point of a curve: the method as it would be deployed now. The clock is put back afterwards."""
    # A look ahead: training goes on from `state`, so the clock must not keep what finishing takes.
    seconds, sent = clock.seconds, clock.sent
    clock.uploads = False  # a model that is fine-tuned by its client stays there
    done = algorithm.finish(state) if algorithm.finish else state
    row = {"epoch": state.r, "seconds": clock.seconds, "bytes": clock.sent}
    clock.seconds, clock.sent, clock.uploads = seconds, sent, True
    widths = [client.width for client in setting.clients]
    accuracies, losses = score(setting, done.deployed, widths, "test", where=f"after epoch {state.r}")
    row["accuracy"] = figures(setting, accuracies, losses)["accuracy"]["mean"]
    return row | {f"accuracy_{tier}": mean for tier, mean in by_tier(setting, accuracies).items()}


def to_reach(rows: Sequence[Mapping[str, Any]], accuracy: float) -> dict[str, dict[str, float] | None]:
    """method -> seconds and bytes of its first point with at least this accuracy; None if there is none.

    Example:
        >>> to_reach([{"method": "a", "accuracy": 0.5, "seconds": 2.0, "bytes": 8}], 0.4)
        {'a': {'seconds': 2.0, 'bytes': 8}}
    """
    first: dict[str, dict[str, float] | None] = {}
    for row in rows:
        first.setdefault(row["method"], None)
        if first[row["method"]] is None and row["accuracy"] >= accuracy:
            first[row["method"]] = {"seconds": row["seconds"], "bytes": row["bytes"]}
    return first
