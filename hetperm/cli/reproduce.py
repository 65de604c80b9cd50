"""``hetperm reproduce``: an experiment of the paper, or the tuning of its rivals."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hetperm import config as configuration
from hetperm.cli import console
from hetperm.cli.flags import UsageError
from hetperm.cli.train import parse_train
from hetperm.config import SHIPPED, Config

# Experiment -> the methods it compares. It has a configuration of its name, and a grid in configs/tuning.
EXPERIMENTS = {
    "synthetic": ("perm", "perm-two-stage", "local", "fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"),
    "digits": (
        *("perm", "perm-two-stage", "local", "fedavg-ft", "ifca"),
        *("heterofl", "heterofl-ft", "feddropout-ft", "fedrolex-ft", "fjord-ft"),
    ),
}
EXPERIMENTS |= dict.fromkeys(("digit-pairs", "mnist-label-shift", "cifar10"), EXPERIMENTS["digits"])
SEEDS = (0, 1, 2)
TUNING_SEEDS = (100,)  # tuning must not see the data that results are reported on
USAGE = """usage: hetperm reproduce EXPERIMENT [FLAGS]        run every method; writes figure.png and table.md
       hetperm reproduce tune EXPERIMENT [FLAGS]   choose the rivals' parameters on validation data

Experiments: {names}. The configuration is that of the same name; flags are those of hetperm train and win.
Seeds are {seeds} unless --seeds says otherwise ({tuning} for tuning), and the folder is runs/reproduce-EXPERIMENT."""


def main(args: Sequence[str]) -> None:
    """Run or tune the experiment that the arguments name."""
    if not args or args[0] in ("-h", "--help"):
        seeds, tuning = (", ".join(map(str, values)) for values in (SEEDS, TUNING_SEEDS))
        print(USAGE.format(names=", ".join(EXPERIMENTS), seeds=seeds, tuning=tuning))
        return
    action, words = (tune, args[1:]) if args[0] == "tune" else (run, args)
    if not words or words[0] not in EXPERIMENTS:
        complaint = f"unknown experiment {words[0]!r}" if words else "which experiment?"
        raise UsageError(f"{complaint}; known are {', '.join(EXPERIMENTS)}")
    action(words[0], words[1:])


def run(experiment: str, args: Sequence[str]) -> None:
    """Run every method with every seed, and write a figure and tables beside the runs."""
    # The curves show methods as they would be deployed, so fine-tuning is also evaluated on the way (eval_finished).
    base = configuration.load(experiment).override(
        name=f"reproduce-{experiment}", baselines=EXPERIMENTS[experiment], seeds=SEEDS, eval_finished=4
    )
    config = _with_flags(base, args, prog=f"hetperm reproduce {experiment}")
    from hetperm.runs import reproduce

    methods = (config.algorithm, *config.baselines)
    with console.progress(methods, epochs=config.epochs, runs=len(config.seeds), quiet=config.quiet) as bar:
        summary, results = reproduce.compare(config, title=experiment, made_by=started_by(), on_epoch=bar)
    console.show(summary, results)
    console.say(f"written to {results[0].folder.parent}: figure.png, table.md, table.csv")


def tune(experiment: str, args: Sequence[str]) -> None:
    """Run every point of the grid, and write the best point of each method on validation data."""
    base = configuration.load(experiment).override(
        name=f"tune-{experiment}", baselines=EXPERIMENTS[experiment], seeds=TUNING_SEEDS
    )
    config = _with_flags(base, args, prog=f"hetperm reproduce tune {experiment}")
    # A point is judged by its final models: evaluations on the way would only cost time.
    config = config.override(eval_every=config.epochs, eval_finished=0)
    from hetperm.runs import files, reproduce

    grid = configuration.read(grid_file(experiment), noun="a grid")
    points = {method: list(reproduce.combinations(grid[method])) for method in (config.algorithm, *config.baselines)}
    folder = files.create(files.run_folder(config.out, f"tune-{experiment}"))
    labels = [method for method, choices in points.items() for _ in choices]
    with console.progress(labels, epochs=config.epochs, runs=len(config.seeds), quiet=config.quiet) as bar:
        chosen = reproduce.tune(config, points, folder, made_by=started_by(), on_epoch=bar)
    console.say(chosen)
    console.say(f"written to {folder}: chosen.toml (for configs/{experiment}.toml), tuning.csv (every point)")


def grid_file(experiment: str) -> Path:
    """The file that lists the values to try for every method and parameter of an experiment."""
    return SHIPPED / "tuning" / f"{experiment}.toml"


def _with_flags(base: Config, args: Sequence[str], *, prog: str) -> Config:
    """The configuration of an experiment, changed by flags, with one seed at least."""
    config = parse_train(args, base=base, prog=prog)
    return config if config.seeds else config.override(seeds=(config.seed,))


def started_by() -> str:
    """The command that started this process, as it would be typed."""
    program = Path(sys.argv[0]).name
    start = "python -m hetperm" if program == "__main__.py" else program
    start = f"python scripts/{program}" if start.endswith(".py") else start
    return shlex.join([*start.split(), *sys.argv[1:]])
