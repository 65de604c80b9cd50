"""What it costs that clients are away: each method with all of them there, with half of them, and by day and night.

python bench/presence.py --baselines heterofl-ft,fjord-ft,fedavg-ft --seeds 0 1 2

The other cases look into the last: as many clients away, but drawn; and PERM alone, with draws in its warm-up and day
and night afterwards, or the other way round.
"""

import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetperm import trace
from hetperm.cli.main import script
from hetperm.cli.train import parse_train
from hetperm.runs import experiment
from hetperm.runs.setting import from_config

THERE = 0.38  # the share of clients that are there by day and night
CASES = {
    "1.0": {},
    "0.5": {"participation": 0.5},
    "day-night": {"trace": "day-night"},
    str(THERE): {"participation": THERE},
}


def drawn(texts: Sequence[str], rounds: range) -> list[str]:
    """A trace in which who is there in some rounds is drawn instead."""
    draw = random.Random(0)
    return ["".join("01"[draw.random() < THERE] if t in rounds else one for t, one in enumerate(x)) for x in texts]


def phases(folder: Path, warmup: int) -> dict[str, Mapping[str, Any]]:
    """Cases of PERM alone, whose warm-up takes so many rounds."""
    texts = [2 * text for text in trace.load("day-night")]  # longer than any run
    cases = {}
    for name, rounds in {"drawn, then day-night": range(warmup), "day-night, then drawn": range(warmup, 999)}.items():
        path = folder / f"{name}.toml"
        path.write_text(f"clients = {drawn(texts, rounds)}\n")
        cases[name] = {"trace": str(path), "baselines": ()}
    return cases


def main(args: list[str]) -> None:
    """Print a line for every seed, case and method, and the means over seeds."""
    config = parse_train(args, prog="bench/presence.py")
    print(f"seed {'presence':21} method       accuracy  worst  steps     MB  rounds  away", flush=True)
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in config.seeds or (config.seed,):
            # Only the end is scored: that changes no number of it.
            setting = from_config(config.override(seed=seed, seeds=(), eval_every=config.epochs))
            half = setting.config.steps // (2 * setting.config.local_steps)
            for case, changes in {**CASES, **phases(Path(folder), half)}.items():
                result = experiment.execute(setting.with_config(setting.config.override(**changes)), None, None)
                summary = result.summary
                for name, method in {summary["algorithm"]: summary, **summary["baselines"]}.items():
                    figures = figures_of(method, summary["num_clients"])
                    found.setdefault((case, name), []).append(figures)
                    print(f"{seed:4} {line(case, name, figures)}", flush=True)
    for (case, name), rows in found.items():
        print("mean", line(case, name, [sum(column) / len(column) for column in zip(*rows, strict=True)]))


def figures_of(method: Mapping[str, Any], clients: int) -> tuple[float, ...]:
    """Accuracy, that of the worst client, steps a client, MB, rounds, and the share of calls that nobody answered."""
    cost, there = method["cost"], method.get("attendance")
    away = 0.0 if there is None else there["absent"] / there["asked"]
    megabytes = (cost["bytes_down"] + cost["bytes_up"]) / 2**20
    accuracy = method["accuracy"]
    return accuracy["mean"], accuracy["worst"], cost["client_steps"] / clients, megabytes, cost["rounds"], away


def line(case: str, name: str, figures: Sequence[float]) -> str:
    """A line of the table."""
    mean, worst, steps, megabytes, rounds, away = figures
    return f"{case:21} {name:12} {mean:8.3f}  {worst:.3f}  {steps:5.0f}  {megabytes:5.1f}  {rounds:6.0f}  {away:.2f}"


if __name__ == "__main__":
    sys.exit(script(main))
