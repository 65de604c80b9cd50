"""The paper's experiments with all rivals, and the tuning of rivals on validation data."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from hetperm.config import Config
from hetperm.methods import METHODS
from hetperm.params import NotFinite
from hetperm.report import pictures, tables
from hetperm.report.contents import Summary
from hetperm.runs import experiment, files, training
from hetperm.runs.experiment import OnEpoch, Result
from hetperm.runs.setting import Setting, from_config, one_thread

Point = Mapping[str, Any]  # a value for each parameter of a method
Row = dict[str, Any]


# Running an experiment


def compare(
    config: Config, *, title: str, made_by: str, on_epoch: OnEpoch | None = None
) -> tuple[Mapping[str, Any], Sequence[Result]]:
    """Run every method with every seed, and write a figure and tables beside the runs.

    Args:
        title: the title of the figure.
        made_by: the command, which is shown above the table.
        on_epoch: called with the method and the row of metrics after every epoch of every method.

    Returns:
        The summary over seeds, and the result of each seed.
    """
    summary, results = experiment.sweep(config, on_epoch=on_epoch)
    folder, rows = results[0].folder.parent, tables.results_rows(Summary.from_json(summary))
    seeds = ", ".join(map(str, config.seeds))
    about = f"{results[0].setting.description}; {config.num_clients} clients, {config.epochs} epochs, seeds {seeds}"
    files.write_csv(folder / "table.csv", rows)
    files.write(
        folder / "table.md", f"`{made_by}`\n\n{about}; ± is the spread over seeds.\n\n{tables.results_markdown(rows)}"
    )
    figure = pictures.curves(
        experiment.histories(results),
        figures=[("accuracy_mean", "test accuracy, mean over clients"), ("loss_mean", "test loss, mean over clients")],
        against=[
            ("client_steps", "local steps per client", config.num_clients),
            ("rounds", "rounds of communication", 1),
        ],
        strong=Summary.from_json(summary).mixing,
        title=f"{title}: {config.num_clients} clients, {len(config.seeds)} seeds",
    )
    files.write(folder / "figure.png", pictures.png(figure))
    return summary, results


# Tuning the rivals


def tune(
    config: Config,
    points: Mapping[str, Sequence[Point]],
    folder: Path,
    *,
    made_by: str,
    on_epoch: OnEpoch | None = None,
) -> str:
    """Run every point; write the score of each and the best of each method; return the best points as TOML."""
    rows = []
    for row in scores(config, points, on_epoch):
        rows.append(row)
        files.write_csv(folder / "tuning.csv", rows)  # after every point, so that an interrupted grid keeps its scores
    text = as_toml(best(rows, points), made_by)
    files.write(folder / "chosen.toml", text)
    return text


def combinations(table: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value for each parameter.

    Example:
        >>> list(combinations({"lr": [1, 2], "mix": [0.5]}))
        [{'lr': 1, 'mix': 0.5}, {'lr': 2, 'mix': 0.5}]
    """
    for values in itertools.product(*table.values()):
        yield dict(zip(table, values, strict=True))


def scores(config: Config, points: Mapping[str, Sequence[Point]], on_epoch: OnEpoch | None = None) -> Iterator[Row]:
    """Yield a row per seed, method and point, with its accuracy on validation data; None if it went non-finite."""
    for seed in config.seeds:
        setting = without_test_data(from_config(config.override(seed=seed, seeds=())))
        with one_thread():
            for row in _scores_of_seed(setting, points, on_epoch):
                yield {"seed": seed, **row}


def without_test_data(setting: Setting) -> Setting:
    """The setting without test data, so that these can play no part in a choice."""
    return replace(setting, clients=tuple(replace(client, test=None) for client in setting.clients))


def _scores_of_seed(setting: Setting, points: Mapping[str, Sequence[Point]], on_epoch: OnEpoch | None) -> Iterator[Row]:
    config, steps = setting.config, training.default_steps(setting.config)
    for method, point in ((method, point) for method, choices in points.items() for point in choices):
        rivals = {**config.rivals, method: {**config.rivals.get(method, {}), **point}}
        tried = replace(setting, config=config.override(rivals=rivals))
        accuracy = None
        try:
            for saved in training.epochs(tried, method, steps=steps):
                if on_epoch and saved.history:
                    on_epoch(method, saved.history[-1])
        except NotFinite:
            pass  # a point that diverges loses
        else:
            accuracy = validation_accuracy(saved.history[-1])
            if method == config.algorithm and not config.steps:
                # Rivals get as many steps as the algorithm took. It is the first in `points`, so its steps are known.
                steps = training.steps_taken(saved.state)
        yield {"method": method, **point, "val_accuracy": accuracy}


def validation_accuracy(row: Mapping[str, Any]) -> float:
    """The score for tuning: the mean accuracy on validation data, of the tail average if there is one."""
    return row.get("tail_val_accuracy_mean", row["val_accuracy_mean"])


def best(rows: Sequence[Mapping[str, Any]], points: Mapping[str, Sequence[Point]]) -> dict[str, dict]:
    """method -> the point with the best mean accuracy over seeds, and that accuracy. Of equal points the first wins."""
    chosen = {}
    for method, choices in points.items():
        means = [_mean_accuracy([row for row in rows if row["method"] == method], point) for point in choices]
        k = means.index(max(means))
        chosen[method] = {"point": dict(choices[k]), "val_accuracy": means[k]}
    return chosen


def _mean_accuracy(rows: Sequence[Mapping[str, Any]], point: Point) -> float:
    """The mean accuracy of a point over seeds; minus infinity if it diverged with any seed."""
    accuracies = [row["val_accuracy"] for row in rows if point.items() <= row.items()]
    return -math.inf if None in accuracies else sum(accuracies) / len(accuracies)


def as_toml(chosen: Mapping[str, Mapping[str, Any]], made_by: str) -> str:
    """The chosen points as tables for a configuration. PERM keeps its defaults, so its point is only a comment."""
    lines = [f"# Chosen on validation data by: {made_by}", ""]
    for method, choice in chosen.items():
        table = tomli_w.dumps({method: choice["point"]})
        if METHODS[method].mixes:
            table = "".join(f"# {line}\n" for line in table.splitlines())
        lines.append(f"# validation accuracy {choice['val_accuracy']:.4f}\n{table}")
    return "\n".join(lines)
