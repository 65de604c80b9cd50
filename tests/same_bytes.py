"""Same bytes as before: run the same cases by two checkouts of hetperm and compare every file they wrote.

    python tests/same_bytes.py CHECKOUT               compare this checkout with another one, all cases
    python tests/same_bytes.py CHECKOUT --quick       the same with few clients and epochs
    python tests/same_bytes.py CHECKOUT main cnn      only these cases

The other checkout is a worktree of an earlier commit: `git worktree add --detach ../before COMMIT`. Both sides run on
this machine: figures differ in their last digits from one CPU to another, so files written elsewhere would not do.
With --before FOLDER what the other checkout wrote stays in that folder, and is not run again where it is there.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

RIVALS = (
    *("local", "fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"),
    *("heterofl", "heterofl-ft", "feddropout", "feddropout-ft", "fedrolex", "fedrolex-ft", "fjord", "fjord-ft"),
)
ALONE = {"baselines": ()}

# Settings of the paper, with which runs are as they were before there was a budget of steps. Those that a checkout does
# not know are left out: it has no other way.
AS_BEFORE = {
    "steps": 0,
    "warmup": "static",
    "start": "plain",
    "step_cap": 0.0,
    "decay": "none",
    "rate_rule": "plain",
    "alpha_every": 1,
    "first_alpha": "estimated",
    "early_report": 0.0,
    "denoise": False,
    "personal_lr": 0.3,
    "global_lr": 0.5,
    "model_options": {},
}
PAPER = {"step_rule": "paper", "schedule": "ring", "regularization": 0.5, "alpha_steps": 20, "personal_lr": 0.05}

# Name of the case -> settings on top of configs/digits.toml, which is the main job.
CASES: dict[str, dict[str, Any]] = {
    "main": {},
    "rivals": {"baselines": RIVALS, "epochs": 4},
    "two-stage": {"algorithm": "perm-two-stage", **ALONE},
    "masked": {"discrepancy": "masked", "vc_weight": "raw", **ALONE},
    "random": {"extraction": "random", "nested": "random", **ALONE},
    "rolling": {"extraction": "rolling", "nested": "rolling", **ALONE},
    "masked-rolling": {"discrepancy": "masked", "extraction": "rolling", "sketch": 64, **ALONE},
    "skip": {"nested": "skip", **ALONE},
    "server-mix": {"server_mix": "alpha", **ALONE},
    "distillation": {"inplace_kd": 0.5, **ALONE},
    "participation": {"participation": 0.7, **ALONE},
    "paper": {"step_rule": "paper", "schedule": "ring", "regularization": 0.5, "alpha_steps": 20, **ALONE},
    "level": {"regularization": "level", "personal_width": "smallest", **ALONE},
    "last-step": {"final_lr": 0.05, "tail_average": 0.0, "projection": 3.0, "engine": "sequential", **ALONE},
    "sequential": {"engine": "sequential", "baselines": ("heterofl-ft",)},
    "processes": {"engine": "processes", "workers": 2, **ALONE},
    "disk": {"idle_models": "disk", **ALONE},
    "budget": {"widths_from": "budget", "capacity_profile": "mobile-ram", **ALONE},
    "classes": {"partition": "classes:2", "label_mask": True, "baselines": ("fedavg-ft", "heterofl")},
    "cnn": {"model": "cnn", "model_options": {}, "engine": "threads", "workers": 2, "epochs": 2, "num_clients": 6},
    "fjord": {"algorithm": "fjord-ft", "baselines": ("ifca",), "epochs": 4, "eval_finished": 2},
    "as-before": {**AS_BEFORE, **PAPER, **ALONE},
    "as-before-two-stage": {**AS_BEFORE, "algorithm": "perm-two-stage", "regularization": "level", **ALONE},
    "as-before-random": {
        **AS_BEFORE,
        "extraction": "random",
        "nested": "random",
        "discrepancy": "masked",
        "regularization": 40.0,
        "final_lr": 0.05,
        "tail_average": 0.0,
        "engine": "sequential",
        **ALONE,
    },
    "fedrolex": {"algorithm": "fedrolex", "epochs": 4, **ALONE},
    "float64": {"dtype": "float64", "capacity_profile": "homogeneous", "epochs": 3, "baselines": ("apfl", "pfedme")},
}
QUICK = {"num_clients": 8, "epochs": 3, "warmup_rounds": 4, "samples_per_client": 40}
# What depends on the clock, is rendered from the other files (as pictures are), is only there to resume from, or
# predicts the cost of a device instead of computing with it.
LEFT_OUT = {"timing.json", "report.html", "checkpoint", "profile.csv", "checksums.txt"}

DRIVER = """
import json, sys
import hetperm
from hetperm import config
from matplotlib.figure import Figure

def unpainted(figure, file, **options):  # pictures are not compared
    file.write(b"") if hasattr(file, "write") else open(file, "wb").close()

Figure.savefig = unpainted
for name, settings, out in json.loads(sys.argv[1]):
    if "step_cap" not in config.FIELDS:
        settings.pop("steps", None)  # which only rivals had
    settings = {key: value for key, value in settings.items() if key in config.FIELDS}
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    hetperm.run(config.load("digits").override(**settings, out=out, quiet=True))
    print(name, file=sys.stderr, flush=True)
"""


def jobs(cases: dict[str, dict[str, Any]], out: Path) -> str:
    """What the driver is told: name, settings and folder of each case."""
    return json.dumps([(name, settings, str(out / name)) for name, settings in cases.items()])


def run_cases(checkout: Path, cases: dict[str, dict[str, Any]], out: Path) -> None:
    """Run the cases by the code of a checkout, each into a folder of ``out``."""
    # The checkout comes first on the path, before an installed hetperm.
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER, jobs(cases, out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=checkout)
    if done.returncode:
        raise RuntimeError(f"{checkout} did not run all cases:\n{done.stderr[-3000:]}")


def written(folder: Path) -> dict[str, bytes]:
    """Path inside the folder -> content, of the files that are compared."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if path.suffix != ".png" and not set(name.split("/")) & LEFT_OUT
    }


def differences(before: Path, now: Path, pattern: str = "*") -> list[str]:
    """Files that only one of two run folders has, or that differ, of those that match a pattern."""
    ours, theirs = written(now), written(before)
    names = [name for name in sorted({*ours, *theirs}) if fnmatch(name, pattern)]
    return [name for name in names if ours.get(name) != theirs.get(name)]


def compare(
    checkout: Path, cases: dict[str, dict[str, Any]], before: Path, now: Path, pattern: str = "*"
) -> dict[str, list[str]]:
    """Name of the case -> the files in which two checkouts differ: the other writes to ``before``, this to ``now``."""
    run_cases(checkout, {name: case for name, case in cases.items() if not (before / name).exists()}, before)
    run_cases(ROOT, cases, now)
    return {name: differences(before / name, now / name, pattern) for name in cases}


def chosen(names: list[str], *, quick: bool) -> dict[str, dict[str, Any]]:
    """The cases of these names (all if there are none), small if ``quick``."""
    wrong = [name for name in names if name not in CASES]
    if wrong:
        raise SystemExit(f"error: there is no case {wrong[0]!r}; choose from {', '.join(CASES)}")
    cases = {name: CASES[name] for name in names or CASES}
    return {name: {**settings, **QUICK} for name, settings in cases.items()} if quick else cases


def main() -> int:
    """Print a line per case; return 1 if any file differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="worktree of the earlier commit")
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="few clients and epochs")
    parser.add_argument("--before", type=Path, help="folder to keep what the earlier commit wrote in")
    flags = parser.parse_intermixed_args()
    cases, began = chosen(flags.cases, quick=flags.quick), time.perf_counter()
    with tempfile.TemporaryDirectory() as out:
        before = flags.before.resolve() if flags.before else Path(out) / "before"
        result = compare(flags.checkout.resolve(), cases, before, Path(out) / "now")
        for name, files in result.items():
            count = len(written(Path(out) / "now" / name))
            print(f"{name:16} {count:4} files  {'same bytes' if not files else 'DIFFER: ' + ', '.join(files)}")
    print(f"{sum(map(bool, result.values()))} of {len(result)} cases differ ({time.perf_counter() - began:.0f} s)")
    return int(any(result.values()))


if __name__ == "__main__":
    sys.exit(main())
