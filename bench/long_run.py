"""A run of many epochs: what the first fifty and the last fifty take, checkpoint and metrics included.

python bench/long_run.py --epochs 500

20 clients of five sizes on the digits, everything evaluated after every epoch, no tail average (which grows a run by
its own work). The history of a run must not make its later epochs slower.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Print CPU seconds of both ends of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=500, help="epochs of the run, at least 100")
    parser.add_argument("--ends", type=int, default=50, help="epochs of each end that are compared")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    from hetperm import Config
    from hetperm.runs.experiment import run

    times = []

    def told(method: str, row: dict) -> None:
        times.append((time.process_time(), time.perf_counter()))

    with tempfile.TemporaryDirectory() as parent:
        length = {"epochs": args.epochs, "steps": 0, "warmup_rounds": 20, "tail_average": 0.0, "eval_every": 1}
        run(
            Config(**length, baselines=(), decay="none", quiet=True, device="cpu", out=Path(parent) / "run"),
            on_epoch=told,
        )
        size = sum(path.stat().st_size for path in Path(parent).rglob("*") if path.is_file()) / 2**20
    print(f"{args.epochs} epochs, {size:.1f} MB")
    print("| | first, s | last, s | last / first | median epoch of the first, ms | of the last, ms |")
    print("|---|" + "--:|" * 5)
    for name, k in (("CPU", 0), ("wall", 1)):
        epochs = [after[k] - before[k] for before, after in itertools.pairwise(times)]
        first, last = epochs[: args.ends], epochs[-args.ends :]
        medians = [1e3 * statistics.median(one) for one in (first, last)]
        cells = [f"{sum(first):.2f}", f"{sum(last):.2f}", f"{sum(last) / sum(first):.2f}"]
        print(f"| {name} | {' | '.join(cells)} | {medians[0]:.1f} | {medians[1]:.1f} |")


if __name__ == "__main__":
    main()
