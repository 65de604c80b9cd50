"""Is joining later as good as having been there? Some clients are left out of a run, and join when it is over.

    python bench/joining.py --dataset digits --seeds 0 1 2
    python bench/joining.py --dataset mnist --partition label-shift:2 --samples-per-client 200 --data-dir data

Prints for every client that was left out: the accuracy of joining, also with some steps on its own data, of training
alone from scratch, and of having been there from the start; and how much of its weight lies in its group.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from hetperm.cli.main import script
from hetperm.cli.train import parse_train
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


def main(args: list[str]) -> None:
    """Run with all clients and with some left out, for every seed, and print a line for each that joins."""
    config = parse_train(args, prog="bench/joining.py")
    print("seed client tier      width  group mass  joined  +50 steps  alone  there all along", flush=True)
    lines = []
    for seed in config.seeds or (config.seed,):
        # Only the end is scored: that changes no number of it.
        whole = from_config(config.override(seed=seed, seeds=(), baselines=(), eval_every=config.epochs))
        few, left_out = without_some(whole)
        result, there = (experiment._execute(some, None, None) for some in (few, whole))
        # What others do is nothing to a client that trains alone.
        alone = experiment._execute(some_of(whole, left_out, algorithm="local"), None, None)
        for k, i in enumerate(left_out):
            client = whole.clients[i]
            groups = [*(each.group for each in few.clients), client.group]
            new, tuned = (result.join(client, steps=steps) for steps in (0, STEPS))
            mass = sum(float(a) for a, group in zip(new.alpha, groups, strict=True) if group == client.group)
            figures = (mass, new.accuracy, tuned.accuracy, alone.main.score[k], there.main.score[i])
            lines.append(figures)
            print(
                f"{seed:4} {i:6} {whole.tiers[i]:8} {client.width:6.3g}  {mass:10.3f}  {figures[1]:6.3f}  "
                f"{figures[2]:9.3f}  {figures[3]:5.3f}  {figures[4]:15.3f}",
                flush=True,
            )
    means = [mean(column) for column in zip(*lines, strict=True)]
    print(
        "mean ".ljust(28) + "  ".join(f"{value:.3f}" for value in means),
        f"(smallest mass {min(x[0] for x in lines):.3f})",
    )


if __name__ == "__main__":
    sys.exit(script(main))
