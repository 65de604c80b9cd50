"""Tuning of every method, PERM too, on validation data: equally many points for each, and no test data anywhere."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tomli_w

from hetperm.config import known_algorithms, read
from hetperm.params import NotFinite
from hetperm.runs import files
from hetperm.runs.reproduce.cells import Cell, Row, Settings, last_epoch
from hetperm.runs.reproduce.plan import Case, grid_file
from hetperm.runs.reproduce.session import Session
from hetperm.runs.setting import Setting

Point = Mapping[str, Any]  # a value for each parameter of a method


def tune(session: Session) -> str:
    """Run every point of every grid; write the scores and the best point of each method in each setting, as TOML."""
    plan, settings = session.plan, Settings()
    points = {case.name: grid(case.grid, plan.methods_of(case)) for case in plan.cases}
    wanted = {case.name: list(point_cells(case, points[case.name], plan.seeds)) for case in plan.cases}
    session.expect([cell for chosen in wanted.values() for cell in chosen])
    rows: list[Row] = []
    chosen: dict[str, dict[str, dict]] = {}
    for name, of_case in wanted.items():
        found = session.run(of_case, lambda cell: figures(settings(cell.config), cell.method))
        rows += found
        chosen[name] = best(found, points[name])
        files.write_csv(session.folder / "tuning.csv", [_flat(row) for row in rows])
        files.write(session.folder / "chosen.toml", as_toml(chosen, session.command))
    return as_toml(chosen, session.command)


def grid(name: str, methods: Sequence[str]) -> dict[str, list[Point]]:
    """method -> the points to try; an error if a method has none, or more or fewer than another."""
    path = grid_file(name)
    tables = read(path, noun="a grid")
    missing = [method for method in methods if method not in tables]
    if missing:
        raise ValueError(f"{path} has no table [{missing[0]}]; every method needs points to try")
    points = {method: list(combinations(tables[method])) for method in methods if method in known_algorithms()}
    sizes = {len(of_method) for of_method in points.values()}
    if len(sizes) > 1:
        raise ValueError(f"{path} has from {min(sizes)} to {max(sizes)} points; give every method equally many")
    return points


def combinations(table: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield every choice of one value for each parameter.

    Example:
        >>> list(combinations({"lr": [1, 2], "mix": [0.5]}))
        [{'lr': 1, 'mix': 0.5}, {'lr': 2, 'mix': 0.5}]
    """
    for values in itertools.product(*table.values()):
        yield dict(zip(table, values, strict=True))


def point_cells(case: Case, points: Mapping[str, Sequence[Point]], seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield a cell for every seed, method and point."""
    # A point is judged by its final models: evaluations on the way would only cost time.
    config = case.config.override(eval_every=case.config.epochs, eval_finished=0, seeds=())
    for seed in seeds:
        for method, choices in points.items():
            for point in choices:
                # The point alone: what was chosen before plays no part.
                tried = config.override(seed=seed, rivals={method: dict(point)})
                label = ",".join(f"{name}={value}" for name, value in point.items())
                yield Cell(case.name, method, tried, label, case.seconds)


def figures(setting: Setting, method: str) -> dict[str, Any]:
    """The point of a method and its accuracy on validation data; None if it went non-finite, and so lost."""
    row: dict[str, Any] = {"point": dict(setting.config.rivals[method]), "diverged": None, "val_accuracy": None}
    try:
        saved = last_epoch(without_test_data(setting), method)
    except NotFinite as error:
        return {**row, "diverged": str(error)}
    return {**row, "val_accuracy": validation_accuracy(saved.history[-1])}


def without_test_data(setting: Setting) -> Setting:
    """The setting without test data, so that these can play no part in a choice."""
    return replace(setting, clients=tuple(replace(client, test=None) for client in setting.clients))


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
    accuracies = [row["val_accuracy"] for row in rows if row["point"] == point]
    return -math.inf if None in accuracies else sum(accuracies) / len(accuracies)


def _flat(row: Row) -> dict[str, Any]:
    kept = ("setting", "seed", "method", "val_accuracy", "diverged", "seconds")
    return {**{name: row[name] for name in kept}, **row["point"]}


def as_toml(chosen: Mapping[str, Mapping[str, Mapping[str, Any]]], made_by: str) -> str:
    """The chosen points as tables, one for each setting and method. A method whose points all diverged has a comment.

    Example:
        >>> print(as_toml({"digits": {"local": {"point": {"lr": 0.5}, "val_accuracy": 0.7}}}, "a command"), end="")
        # Chosen on validation data by: a command
        # The figure above a table is the accuracy there.
        <BLANKLINE>
        # 0.7000
        [digits.local]
        lr = 0.5
    """
    lines = [f"# Chosen on validation data by: {made_by}", "# The figure above a table is the accuracy there."]
    for setting, methods in chosen.items():
        for method, choice in methods.items():
            if choice["val_accuracy"] == -math.inf:
                lines.append(f"\n# {setting}, {method}: every point diverged")
                continue
            table = tomli_w.dumps({setting: {method: choice["point"]}})
            lines.append(f"\n# {choice['val_accuracy']:.4f}\n{table.strip()}")
    return "\n".join(lines) + "\n"
