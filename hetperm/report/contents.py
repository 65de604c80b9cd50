"""Read a run folder: its summary, its tables as rows, its pictures as bytes."""

import csv
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetperm.report.fields import figure, listing, table, word
from hetperm.report.summary import Row, Rows, Summary
from hetperm.texts import shown

RESOURCES = "resources.json"
FEDERATION = "federation.json"
WORDS = ("tier", "method", "diverged")  # columns of texts


@dataclass(frozen=True)
class Contents:
    """What a run folder holds; a field is empty if the folder lacks the file.

    Attributes:
        summary: None in a folder that holds a resource benchmark and no run.
        config: the text of config.toml; `settings`: its keys and values.
        clients: the rows of clients.csv, a list for each seed.
        metrics: one row per epoch.
        profile: one row per tier: the cost per device.
        seeds: one row per seed.
        images: name -> bytes of each PNG.
        resources: the results of the resource benchmark.
        nodes: of a federation of real machines, what each did and what went wrong.
    """

    summary: Summary | None = None
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    clients: Sequence[Rows] = ()
    metrics: Rows = ()
    profile: Rows = ()
    seeds: Rows = ()
    images: Mapping[str, bytes] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[Row] = ()


def read(folder: Path) -> Contents:
    """The contents of a run folder, or of the folder of several seeds.

    A folder without summary.json may hold a resource benchmark; if it holds neither, a ValueError says so.
    """
    resources = _parsed(folder / RESOURCES, _resources, otherwise={})
    # Files only: a pipe of that name would wait for ever for somebody to write to it.
    images = {path.name: path.read_bytes() for path in sorted(folder.glob("*.png")) if path.is_file()}
    if resources and not (folder / "summary.json").is_file():
        return Contents(images=images, resources=resources)
    summary = read_summary(folder)
    # profile.csv is in the folder of each seed. Seeds of one sweep have the same tiers, so the first stands for all.
    profiles = [_rows(home / "profile.csv") for home in (folder, *seed_folders(folder, summary))]
    return Contents(
        summary=summary,
        config=_parsed(folder / "config.toml", str, otherwise=""),
        settings=read_settings(folder),
        clients=_complete(_by_seed(read_figures(folder / "clients.csv")), summary, folder / "clients.csv"),
        metrics=read_figures(folder / "metrics.csv"),
        profile=next(filter(None, profiles), []),
        seeds=_rows(folder / "seeds.csv"),
        images=images,
        resources=resources,
        nodes=_parsed(folder / FEDERATION, _nodes, otherwise=()),
    )


def read_settings(folder: Path) -> Mapping[str, Any]:
    """The keys and values of config.toml; empty if there is none."""
    return _parsed(folder / "config.toml", tomllib.loads, otherwise={})


def read_summary(folder: Path) -> Summary:
    """The summary of a folder; a ValueError of one sentence if there is none, or the file is something else."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no summary.json; name the folder of a run that has ended")
    return _parsed(path, lambda text: Summary.from_json(table(json.loads(text), "the whole file")), otherwise=None)


def _nodes(text: str) -> list[Row]:
    """The table of nodes in federation.json."""
    try:
        return [_node(node) for node in table(json.loads(text), "the whole file")["nodes"]]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no table of nodes: {error!r}") from error


def _node(node: Row) -> Row:
    counts = {name: node["events"].get(key, 0) for name, key in _COUNTED.items()}
    return {"client": node["client"], **counts, "last reason": node["reasons"][-1] if node["reasons"] else None}


_COUNTED = {"tasks done": "done", "failed": "failed", "absent": "absent", "restarted": "restarted"}


def _resources(text: str) -> Row:
    """The content of resources.json."""
    content = table(json.loads(text), "the whole file")
    if content:
        for row in listing(content.get("tiers"), "tiers"):
            table(row, "tiers")
        for line in listing(content.get("lines"), "lines"):
            word(line, "lines")
    return content


def seed_folders(folder: Path, summary: Summary) -> list[Path]:
    """The folder of each seed; none for a single run."""
    return [folder / f"seed-{seed}" for seed in summary.seeds]


def _parsed(path: Path, parse: Callable[[str], Any], *, otherwise: Any) -> Any:
    """The parsed text of a file, or ``otherwise`` if there is no such file."""
    try:
        return parse(path.read_text(encoding="utf-8-sig")) if path.is_file() else otherwise
    # JSON, TOML and UTF-8 all raise kinds of ValueError; tables inside tables inside tables are too deep for Python.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file of a run: numbers as numbers, empty cells as None, tiers as text."""
    rows: list[dict[str, Any]] = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin files with a mark
            for row in csv.DictReader(file):
                if None in row or None in row.values():  # what DictReader makes of too many and of too few cells
                    raise ValueError(f"row {len(rows) + 1} has not as many cells as the heading")
                rows.append({column: _value(column, text) for column, text in row.items()})
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error
    return rows


def _value(column: str, text: str) -> Any:
    if column == "tier":  # a name, also if it is made of digits
        return text
    for kind in (int, float):  # int first: 3 is a count, and would come back as 3.0
        try:
            return figure(kind(text), column)
        except ValueError:
            pass
    return text or None


def _rows(path: Path) -> Rows:
    return read_csv(path) if path.is_file() else []


def read_figures(path: Path) -> Rows:
    """The rows of a file in which all but `WORDS` are numbers; none if there is no such file."""
    rows = _rows(path)
    for row in rows:
        for column, value in row.items():
            if column not in WORDS and isinstance(value, str):
                raise ValueError(f"{path}: {column!r} is {shown(value)}; it must be a number; remove it or run again")
    return rows


def read_clients(folder: Path) -> Rows:
    """The rows of the clients of a run; an error if they lack what says who a client is."""
    path = folder / "clients.csv"
    rows = read_figures(path)
    lost = [column for column in ("client", "tier", "width", "n_train") if not rows or column not in rows[0]]
    if lost:
        raise ValueError(f"{path} has no column {lost[0]!r}; copy it again from the run")
    for row in rows:
        for column in ("client", "width", "n_train"):
            if row[column] is None:
                raise ValueError(f"{path}: {column!r} is empty; it must be a number; copy it again from the run")
    return rows


def _complete(runs: list[Rows], summary: Summary, path: Path) -> list[Rows]:
    """The rows of each seed; an error if there is not one for every client that the run had."""
    for rows in runs or ([[]] if path.is_file() else []):
        trained = [row for row in rows if not row.get("joined")]
        if len(trained) != summary.num_clients:
            raise ValueError(
                f"{path} has rows of {len(trained)} clients and the run had {summary.num_clients}; copy it "
                "again from the run"
            )
    return runs


def _by_seed(rows: Rows) -> list[Rows]:
    # A single run has no column "seed": all of its rows come together under None.
    runs: dict[Any, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.get("seed"), []).append(row)
    return list(runs.values())
