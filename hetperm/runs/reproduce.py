"""The paper's experiments with all rivals, and the tuning of the rivals on validation data."""

import itertools
import math
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from hetperm import config as configuration
from hetperm.cli import main as cli
from hetperm.config import SHIPPED, Config

# Experiment (a configuration of the same name, with a grid in configs/tuning) -> the methods that are compared in it
EXPERIMENTS = {
    "synthetic": ("perm", "perm-two-stage", "local", "fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"),
    "digits": (
        *("perm", "perm-two-stage", "local", "fedavg-ft", "ifca"),
        *("heterofl", "heterofl-ft", "feddropout-ft", "fedrolex-ft", "fjord-ft"),
    ),
}
EXPERIMENTS |= dict.fromkeys(("mnist-label-shift", "cifar10"), EXPERIMENTS["digits"])
SEEDS = (0, 1, 2)
TUNING_SEEDS = (100,)  # other data than those that results are reported on
USAGE = """usage: hetperm reproduce EXPERIMENT [FLAGS]        run every method; writes figure.png and table.md
       hetperm reproduce tune EXPERIMENT [FLAGS]   choose the rivals' parameters on validation data

Experiments: {names}. The configuration is that of the same name; flags are those of hetperm train and win.
Seeds are {seeds} unless --seeds says otherwise ({tuning} for tuning), and the folder is runs/reproduce-EXPERIMENT."""


def main(args: Sequence[str]) -> None:
    """Nothing; the experiment that the arguments name is run or tuned."""
    if not args or args[0] in ("-h", "--help"):
        seeds, tuning = (", ".join(map(str, values)) for values in (SEEDS, TUNING_SEEDS))
        print(USAGE.format(names=", ".join(EXPERIMENTS), seeds=seeds, tuning=tuning))
        return
    action = tune if args[0] == "tune" else reproduce
    words = list(args[1:]) if action is tune else list(args)
    if not words or words[0] not in EXPERIMENTS:
        got = f"unknown experiment {words[0]!r}" if words else "which experiment?"
        raise cli.UsageError(f"{got}; known are {', '.join(EXPERIMENTS)}")
    action(words[0], words[1:])


# Running an experiment


def reproduce(experiment: str, args: Sequence[str]) -> None:
    """Nothing; every method is run with every seed, and figure and tables are written beside the runs."""
    base = configuration.load(experiment).override(
        name=f"reproduce-{experiment}", baselines=EXPERIMENTS[experiment], seeds=SEEDS, eval_finished=4
    )
    config = _with_flags(base, args, prog=f"hetperm reproduce {experiment}")
    from hetperm.report import pictures, tables
    from hetperm.report.contents import Summary
    from hetperm.runs import experiment as running
    from hetperm.runs import files

    methods = (config.algorithm, *config.baselines)
    with cli.progress(methods, epochs=config.epochs, runs=len(config.seeds), quiet=config.quiet) as on_epoch:
        summary, results = running.sweep(config, on_epoch=on_epoch)
    folder, rows = results[0].folder.parent, tables.results_rows(Summary.from_json(summary))
    seeds = ", ".join(map(str, config.seeds))
    about = f"{results[0].setting.description}; {config.num_clients} clients, {config.epochs} epochs, seeds {seeds}"
    files.write_csv(folder / "table.csv", rows)
    files.write(
        folder / "table.md", f"`{command()}`\n\n{about}; ± is the spread over seeds.\n\n{tables.results_markdown(rows)}"
    )
    figure = pictures.curves(
        running.histories(results),
        figures=[("accuracy_mean", "test accuracy, mean over clients"), ("loss_mean", "test loss, mean over clients")],
        against=[
            ("client_steps", "local steps per client", config.num_clients),
            ("rounds", "rounds of communication", 1),
        ],
        strong=Summary.from_json(summary).mixing,
        title=f"{experiment}: {config.num_clients} clients, {len(config.seeds)} seeds",
    )
    files.write(folder / "figure.png", pictures.png(figure))
    cli.show(summary, results)
    cli.say(f"written to {folder}: figure.png, table.md, table.csv")


def _with_flags(base: Config, args: Sequence[str], *, prog: str) -> Config:
    """The configuration of an experiment, changed by flags, with one seed at least."""
    if any(arg.partition("=")[0] == "--config" for arg in args):
        raise cli.UsageError("an experiment has the configuration of its name; leave --config out, flags can change it")
    config = cli.parse_train(args, base=base, prog=prog)
    return config if config.seeds else config.override(seeds=(config.seed,))


def command() -> str:
    """The command that this process was started with, as one would type it."""
    program = Path(sys.argv[0]).name
    start = "python -m hetperm" if program == "__main__.py" else program
    start = f"python scripts/{program}" if start.endswith(".py") else start
    return shlex.join([*start.split(), *sys.argv[1:]])


# Tuning the rivals


def tune(experiment: str, args: Sequence[str]) -> None:
    """Nothing; every point of the grid is run, and the best of each method on validation data is written."""
    base = configuration.load(experiment).override(
        name=f"tune-{experiment}", baselines=EXPERIMENTS[experiment], seeds=TUNING_SEEDS
    )
    config = _with_flags(base, args, prog=f"hetperm reproduce tune {experiment}")
    config = config.override(eval_every=config.epochs, eval_finished=0)
    from hetperm.runs import files

    methods = (config.algorithm, *config.baselines)
    table = grid(SHIPPED / "tuning" / f"{experiment}.toml")
    points = {method: list(combinations(table[method])) for method in methods}
    folder = files.create(files.place(config.out, f"tune-{experiment}"))
    labels = [method for method in methods for _ in points[method]]
    with cli.progress(labels, epochs=config.epochs, runs=len(config.seeds), quiet=config.quiet) as on_epoch:
        rows = []
        for row in _scores(config, points, on_epoch):
            rows.append(row)
            files.write_csv(folder / "tuning.csv", rows)
    chosen = best(rows, points)
    text = as_toml(chosen, command())
    files.write(folder / "chosen.toml", text)
    cli.say(text)
    cli.say(f"written to {folder}: chosen.toml (for configs/{experiment}.toml), tuning.csv (every point)")


def grid(path: Path) -> dict[str, dict[str, list[Any]]]:
    """method -> parameter -> the values to try."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def combinations(table: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each parameter.

    Example:
        >>> list(combinations({"lr": [1, 2], "mix": [0.5]}))
        [{'lr': 1, 'mix': 0.5}, {'lr': 2, 'mix': 0.5}]
    """
    for values in itertools.product(*table.values()):
        yield dict(zip(table, values, strict=True))


def _scores(config: Config, points: Mapping[str, Sequence[Mapping[str, Any]]], on_epoch) -> Iterator[dict[str, Any]]:
    """One row per seed, method and point: its accuracy on validation data; none if it went non-finite."""
    from hetperm.runs import setting as settings
    from hetperm.runs import training
    from hetperm.server.visits import NotFinite

    def show(method: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if on_epoch:
            on_epoch(method, rows[-1])

    for seed in config.seeds:
        setting = settings.prepare(config.override(seed=seed, seeds=()))
        # Test data are taken away: whatever is chosen here, they had no part in it.
        setting = replace(setting, clients=tuple(replace(client, test=None) for client in setting.clients))
        with settings.one_thread():
            steps = training.budget(config)
            for method, choices in points.items():
                for choice in choices:
                    rivals = {**config.rivals, method: {**config.rivals.get(method, {}), **choice}}
                    here = replace(setting, config=setting.config.override(rivals=rivals))
                    try:
                        trained = training.train(here, method, steps=steps, show=show)
                        last = trained.history[-1]
                        found = last.get("tail_val_accuracy_mean", last["val_accuracy_mean"])
                        if method == config.algorithm and config.steps is None:
                            steps = math.ceil(trained.state.work.client_steps / len(setting.clients))
                    except NotFinite:
                        found = None
                    yield {"seed": seed, "method": method, **choice, "val_accuracy": found}


def best(rows: Sequence[Mapping[str, Any]], points: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict]:
    """method -> the point with the best mean accuracy over seeds, and that accuracy; the first of several."""
    chosen = {}
    for method, choices in points.items():
        means = []
        for choice in choices:
            found = [row["val_accuracy"] for row in rows if row["method"] == method and choice.items() <= row.items()]
            means.append(float("-inf") if None in found else sum(found) / len(found))
        k = means.index(max(means))
        chosen[method] = {"point": dict(choices[k]), "val_accuracy": means[k]}
    return chosen


def as_toml(chosen: Mapping[str, Mapping[str, Any]], made_by: str) -> str:
    """What was chosen, as tables for a configuration; PERM keeps its defaults: its choice is a comment."""
    lines = [f"# Chosen on validation data by: {made_by}", ""]
    for method, each in chosen.items():
        table = tomli_w.dumps({method: each["point"]})
        comment = f"# validation accuracy {each['val_accuracy']:.4f}\n"
        if method.startswith("perm"):
            table = "".join(f"# {line}\n" for line in table.splitlines())
        lines.append(comment + table)
    return "\n".join(lines)
