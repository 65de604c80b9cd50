"""Kill runs of several kinds at random moments, resume them, and compare the folder with that of a run left alone.

    python tests/kills.py                 100 kills (minutes)
    python tests/kills.py --count 14      two of each kind
    python tests/kills.py --seed 1        other moments

`crash_points.py` ends a run at every step that changes a file; here nobody knows where it was. One in three of the
resumed runs is killed as well.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from crash_points import differences, draw_quickly
from tiny_run import tiny, without_what_others_test

from hetperm.runs import experiment, output

KINDS = {
    "sequential": {"engine": "sequential"},
    "processes": {"engine": "processes", "workers": 2},
    "batched": {"engine": "batched"},
    "idle models on disk": {"engine": "sequential", "idle_models": "disk"},
    "clients that come and go": {"participation": 0.6, "alpha_every": 2},
    "five rivals": {"baselines": ("local", "heterofl-ft", "fedavg-ft", "fjord-ft", "ifca"), "epochs": 2},
    "two seeds": {"seeds": (0, 1), "epochs": 2, "baselines": ("local",)},
}


def job(kind: str, out: Path, *, resume: bool) -> None:
    """Do the run of a kind."""
    config = tiny(out=out, resume=resume, **KINDS[kind])
    experiment.sweep(config) if config.seeds else experiment.run(config)


def in_child(action: Callable[[], None], kill_after: float | None = None) -> bool:
    """Do something in a process of its own, killed after so many seconds; whether it was killed before its end."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError("a run failed: see its message above")
    return status != 0


def killed_and_resumed(kind: str, out: Path, duration: float, draw: random.Random) -> int:
    """The kills that a run survived: it is killed at least once, and resumed until it is done."""
    kills = 0
    while not kills:  # until a moment is drawn at which it still runs
        kills += in_child(lambda: job(kind, out, resume=True), draw.uniform(0, duration))
    if draw.random() < 1 / 3:
        kills += in_child(lambda: job(kind, out, resume=True), draw.uniform(0, duration))
    in_child(lambda: job(kind, out, resume=True))
    return kills


def main() -> int:
    """Print a line for every kind; return 1 if a resumed run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="kills, at least; default: 100")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    flags = parser.parse_args()
    draw = random.Random(flags.seed)
    torch.set_num_threads(1)  # threads do not survive a fork
    runs, kills, wrong = Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as name, without_what_others_test():
        output.draw = draw_quickly
        times = {}
        for kind in KINDS:
            if kind == "sequential":  # here, so that what is computed once is computed for all children
                job(kind, Path(name, "first"), resume=False)
            began = time.monotonic()
            in_child(lambda kind=kind: job(kind, Path(name, kind), resume=False))
            times[kind] = time.monotonic() - began
        while kills.total() < flags.count:
            kind = list(KINDS)[runs.total() % len(KINDS)]
            out = Path(name, f"run-{runs.total()}")
            runs[kind] += 1
            kills[kind] += killed_and_resumed(kind, out, times[kind], draw)
            different = differences(out, Path(name, kind))
            if different:
                wrong[kind] += 1
                print(f"{kind}: {', '.join(different)}", flush=True)
    for kind in KINDS:
        print(f"{kind:26} {kills[kind]:4} kills of {runs[kind]} runs, {wrong[kind]} of them with another end")
    print(f"{kills.total()} kills of {runs.total()} runs: {runs.total() - wrong.total()} ended byte-identical")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
