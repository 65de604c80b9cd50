"""Short federated runs: hetero-PERM inside the limits of every tier, and methods against a simulated clock."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from hetperm.algorithms.base import Algorithm
from hetperm.bench.devices.benchmark import Enforcement, Say
from hetperm.bench.devices.clock import Clock, Speed
from hetperm.bench.devices.limited import Limited
from hetperm.config import Config
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Engine
from hetperm.profile import Profile
from hetperm.runs.scores import by_tier, figures, score
from hetperm.runs.setting import Setting, from_config
from hetperm.runs.training import algorithm_for, default_steps, states, steps_taken
from hetperm.state import State
from submodels.cost import count

COMPARED = ("perm", "heterofl-ft", "fedrolex-ft")
FINE_TUNING = 25  # steps of methods that train on at home
POINTS = 3  # of a curve, if each takes fine-tuning


# Inside limits


@dataclass(frozen=True)
class UnderLimits:
    """How a federated run went in which every task was done under its host's limit.

    Attributes:
        completed: whether every task fitted; `reason`: what did not.
        same: whether models and mixing weights are, bit by bit, those of a run without limits.
        tasks: tier -> tasks done there.
    """

    epochs: int
    completed: bool
    same: bool
    tasks: Mapping[str, int]
    reason: str = ""


def under_limits(config: Config, profile: Profile, enforcement: Enforcement) -> UnderLimits:
    """Hetero-PERM with one client of each tier, once inside limits and once without."""
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
    free = _last_state(setting, Sequential(setting.clients, setting.shop))
    return UnderLimits(config.epochs, True, same(limited, free), tasks)


def _last_state(setting: Setting, engine: Engine) -> State:
    """Where hetero-PERM ends on an engine."""
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
    """What each method's models are worth, how long it took devices of the profile to get there, and what was sent.

    Methods that are fine-tuned at home at the end are, at every point, what they would be if they ended there: the
    time of the fine-tuning is in that point and in no later one.
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
        if method == "perm":  # the first: its rivals may take as many steps
            steps = steps_taken(state)
    return rows


def points(epochs: int) -> list[int]:
    """The epochs after which methods that take fine-tuning are evaluated: the last, and some on the way.

    Example:
        >>> points(6), points(2)
        ([2, 4, 6], [1, 2])
    """
    return sorted({math.ceil(epochs * k / POINTS) for k in range(1, POINTS + 1)})


def _point(setting: Setting, algorithm: Algorithm, state: State, clock: Clock) -> dict[str, Any]:
    """A point of a curve: the method as it would be deployed now. The clock is left as it was."""
    seconds, sent = clock.seconds, clock.sent
    clock.uploads = False  # what is fine-tuned at home stays there
    done = algorithm.finish(state) if algorithm.finish else state
    row = {"epoch": state.r, "seconds": clock.seconds, "bytes": clock.sent}
    clock.seconds, clock.sent, clock.uploads = seconds, sent, True
    widths = [client.width for client in setting.clients]
    accuracies, losses = score(setting, done.deployed, widths, "test", where=f"after epoch {state.r}")
    row["accuracy"] = figures(setting, accuracies, losses)["accuracy"]["mean"]
    return row | {f"accuracy_{tier}": mean for tier, mean in by_tier(setting, accuracies).items()}


def to_reach(rows: Sequence[Mapping[str, Any]], accuracy: float) -> dict[str, dict[str, float] | None]:
    """method -> the first point at which it was that good: seconds and bytes; None if it never was.

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
