"""Is joining later as good as having been there? Some clients are left out of a run, and join when it is over.

    python bench/joining.py --dataset digits --seeds 0 1 2
    python bench/joining.py --dataset mnist --partition label-shift:2 --samples-per-client 200 --data-dir data

Prints for every client that was left out: the accuracy of joining, also with some steps on its own data, of training
alone from scratch, and of having been there from the start; and how much of its weight on others lies in its group.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from hetperm.cli.main import script
from hetperm.cli.train import parse_train
from hetperm.config import Config
from hetperm.runs import experiment
from hetperm.runs.setting import Setting, from_config

LEFT_OUT, STEPS = 4, 50  # clients that join; steps that they take at home


def without_some(setting: Setting) -> tuple[Setting, list[int]]:
    """The setting of those that are there, and the clients left out: the last of every group in turn."""
    groups = setting.groups or [0] * len(setting.clients)
    members = {group: [i for i, own in enumerate(groups) if own == group] for group in sorted(set(groups))}
    some: list[int] = []
    while len(some) < LEFT_OUT:
        for own in members.values():
            some.append(own.pop())
    some = sorted(some[:LEFT_OUT])
    return some_of(setting, [i for i in range(len(groups)) if i not in some]), some


def some_of(setting: Setting, clients: Sequence[int], **changes: Any) -> Setting:
    """The setting of some of its clients."""
    return replace(
        setting,
        clients=tuple(setting.clients[i] for i in clients),
        tiers=tuple(setting.tiers[i] for i in clients),
        config=setting.config.override(num_clients=len(clients), **changes),
    )


COLUMNS = ("joined", f"and {STEPS} steps", "alone", "there all along")


@dataclass(frozen=True)
class Line:
    """A client that was left out: what it got by joining, and what it would have had.

    Attributes:
        mass: the share of its weight on others that lies in its own group; 0 if it learns from nobody.
        figures: test accuracies, one for each of the columns.
    """

    seed: int
    client: int
    width: float
    mass: float
    figures: tuple[float, ...]


def lines_of(config: Config, seed: int) -> Iterator[Line]:
    """Run with all clients, with some left out and with these alone; yield a line for each of them."""
    # Only the end is scored: that changes no number of it.
    whole = from_config(config.override(seed=seed, seeds=(), baselines=(), eval_every=config.epochs))
    few, left_out = without_some(whole)
    result, there = (experiment.execute(some, None, None) for some in (few, whole))
    # What others do is nothing to a client that trains alone.
    alone = experiment.execute(some_of(whole, left_out, algorithm="local"), None, None)
    for k, i in enumerate(left_out):
        client = whole.clients[i]
        joined = [result.join(client, steps=steps) for steps in (0, STEPS)]
        weights = joined[0].alpha[:-1].tolist()
        own = sum(a for a, each in zip(weights, few.clients, strict=True) if each.group == client.group)
        mass = own / sum(weights) if any(weights) else 0.0
        figures = (*(new.accuracy for new in joined), alone.main.score[k], there.main.score[i])
        yield Line(seed, i, client.width, mass, figures)


def summary(lines: Sequence[Line]) -> str:
    """The mean over clients, and from which to which seed, of every column; and how many found their group."""
    seeds = sorted({line.seed for line in lines})
    cells = []
    for k in range(len(COLUMNS)):
        by_seed = [mean(line.figures[k] for line in lines if line.seed == seed) for seed in seeds]
        cells.append(f"{mean(line.figures[k] for line in lines):.3f} ({min(by_seed):.3f} to {max(by_seed):.3f})")
    return " | ".join(cells)


def main(args: list[str]) -> None:
    """Print a line for every client that joins, then means: of every width, and of all."""
    config = parse_train(args, prog="bench/joining.py")
    print("seed client width  group mass | " + " | ".join(COLUMNS), flush=True)
    lines = []
    for seed in config.seeds or (config.seed,):
        for line in lines_of(config, seed):
            lines.append(line)
            figures = " | ".join(f"{x:.3f}" for x in line.figures)
            print(f"{line.seed:4} {line.client:6} {line.width:5.3g} {line.mass:11.3f} | {figures}", flush=True)
    for width in sorted({line.width for line in lines}):
        some = [line for line in lines if line.width == width]
        print(f"width {width:.3g}, {len(some)} clients | {summary(some)}")
    print(f"all, {len(lines)} clients | {summary(lines)}")
    found = sum(line.mass > 0.5 for line in lines)
    print(f"most weight in their own group: {found} of {len(lines)} (smallest {min(one.mass for one in lines):.3f})")


if __name__ == "__main__":
    sys.exit(script(main))
