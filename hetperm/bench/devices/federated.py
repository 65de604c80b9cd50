"""Short federated runs: hetero-PERM inside the limits of every tier, and methods against a simulated clock."""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w
import torch

from hetperm.bench.devices.benchmark import Enforcement, Say
from hetperm.bench.devices.clock import Clock, Speed
from hetperm.bench.devices.limited import Limited
from hetperm.config import Config
from hetperm.engine.sequential import Sequential
from hetperm.methods import ALGORITHMS, options_for
from hetperm.profile import Profile
from hetperm.runs.setting import Setting, prepare
from hetperm.runs.training import budget, by_tier, figures, score
from hetperm.state import State
from submodels.cost import count

METHODS = ("perm", "heterofl-ft", "fedrolex-ft")
FINE_TUNING = 25  # steps of methods that train on at home
POINTS = 3  # of a curve, if each takes fine-tuning


def states(setting: Setting, method: str, engine, *, steps: int) -> Iterator[tuple[State, Callable[[State], State]]]:
    """The state before the first epoch and after every one, each with what makes a finished method of it."""
    make, _ = ALGORITHMS[method]
    options = options_for(method, setting.config, steps=steps)
    begin, epoch, finish = make(setting.clients, engine, setting.start, options, parts=setting.parts)
    state = begin()
    yield state, finish
    for _ in range(setting.config.epochs):
        state = epoch(state)
        yield state, finish


@contextmanager
def written(profile: Profile, *, even: bool) -> Iterator[Path]:
    """A context with the profile in a file, with its widths as they were solved, and equal shares if asked for."""
    tables = {}
    for tier in profile.tiers:
        known = {key: value for key, value in asdict(tier).items() if key != "name" and value is not None}
        tables[tier.name] = known | ({"share": 1} if even else {})
    with tempfile.TemporaryDirectory(prefix="hetperm-") as folder:
        path = Path(folder) / f"{profile.name}.toml"
        path.write_text(tomli_w.dumps({"tiers": tables}))
        yield path


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
    with written(profile, even=True) as path:
        setting = prepare(config.override(capacity_profile=str(path), num_clients=len(profile.tiers)))
    tiers = {tier.name: tier for tier in profile.tiers}
    rooms = [enforcement.room(tiers[name]) for name in setting.tiers]
    engine = Limited(
        setting.clients,
        setting.shop,
        enforcement.devices,
        rooms=rooms,
        limit=enforcement.limit,
        rehearsed=enforcement.rehearsed,
    )

    def last(engine) -> State:
        *_, (state, _) = states(setting, "perm", engine, steps=budget(config))
        return state

    def tasks() -> dict[str, int]:
        return {name: engine.done[i] for i, name in enumerate(setting.tiers)}

    try:
        limited = last(engine)
    except RuntimeError as error:
        return UnderLimits(config.epochs, False, False, tasks(), str(error))
    free = last(Sequential(setting.clients, setting.shop))
    return UnderLimits(config.epochs, True, same(limited, free), tasks())


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
    with written(profile, even=False) as path:
        setting = prepare(config.override(capacity_profile=str(path)))
    tiers = {tier.name: tier for tier in profile.tiers}
    example = setting.clients[0].train[0][:1]

    @cache
    def macs(width: float) -> int:
        return count(setting.shop.at(width).module, example, batch_size=config.batch_size).macs

    rows, steps = [], budget(config)
    for method in METHODS:
        clock = Clock(
            Sequential(setting.clients, setting.shop),
            tiers=[tiers[name] for name in setting.tiers],
            samples=[client.n_train for client in setting.clients],
            macs=macs,
            speed=speed,
        )
        for state, finish in states(setting, method, clock, steps=steps):
            say(f"{method}: epoch {state.r} of {config.epochs}")
            if method == "perm" or state.r in points(config.epochs):
                rows.append({"method": method, **_point(setting, state, finish, clock)})
        if method == "perm":
            steps = math.ceil(state.work.client_steps / len(setting.clients))
    return rows


def points(epochs: int) -> list[int]:
    """The epochs after which methods that take fine-tuning are evaluated: the last, and some on the way.

    Example:
        >>> points(6), points(2)
        ([2, 4, 6], [1, 2])
    """
    return sorted({math.ceil(epochs * k / POINTS) for k in range(1, POINTS + 1)})


def _point(setting: Setting, state: State, finish: Callable[[State], State], clock: Clock) -> dict[str, Any]:
    seconds, sent = clock.seconds, clock.sent
    clock.uploads = False  # what is fine-tuned at home stays there
    done = finish(state)
    row = {"epoch": state.r, "seconds": clock.seconds, "bytes": clock.sent}
    clock.seconds, clock.sent, clock.uploads = seconds, sent, True
    widths = [client.width for client in setting.clients]
    accuracies, losses = score(setting, done.deployed, widths, "test", place=f"after epoch {state.r}")
    found = figures(setting, accuracies, losses)["accuracy"]["mean"]
    return row | {
        "accuracy": found,
        **{f"accuracy_{tier}": each for tier, each in by_tier(setting, accuracies).items()},
    }


def to_reach(rows: Sequence[Mapping[str, Any]], accuracy: float) -> dict[str, dict[str, float] | None]:
    """method -> the first point at which it was that good: seconds and bytes; None if it never was.

    Example:
        >>> to_reach([{"method": "a", "accuracy": 0.5, "seconds": 2.0, "bytes": 8}], 0.4)
        {'a': {'seconds': 2.0, 'bytes': 8}}
    """
    found: dict[str, dict[str, float] | None] = {}
    for row in rows:
        found.setdefault(row["method"], None)
        if found[row["method"]] is None and row["accuracy"] >= accuracy:
            found[row["method"]] = {"seconds": row["seconds"], "bytes": row["bytes"]}
    return found
