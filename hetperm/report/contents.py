"""Read a run folder: its summary with names and types, its tables as rows, its pictures as bytes."""

import csv
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

MB = 2**20
RESOURCES = "resources.json"
Row = Mapping[str, Any]
Rows = Sequence[Row]
Part = TypeVar("Part")


def is_blank(value: Any) -> bool:
    """Whether a value has nothing to show: it is None, or a float that is not finite."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


# summary.json. None stands for null, and for a key that an older or shorter summary lacks.


@dataclass(frozen=True)
class Figures:
    """An accuracy or a loss over clients: mean, n-weighted mean, spread, worst client, mean of the worst tenth."""

    mean: float | None = None
    weighted: float | None = None
    std: float | None = None
    worst: float | None = None
    bottom_decile: float | None = None


@dataclass(frozen=True)
class Tier:
    """A tier under one method: its clients, their width, the parameters they train, their mean accuracy."""

    clients: int | None = None
    width: float | None = None
    params: int | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class Mixing:
    """Statistics of the mixing weights alpha, each a mean over clients; `same_group_mass` needs known groups.

    Attributes:
        effective_partners: 1 / sum of squared weights, which is k if k partners weigh the same.
        nonzero: the clients that a client learns from, itself included.
        share: how much difference was found worth sharing, in units of noise; None if nothing was looked for.
    """

    effective_partners: float | None = None
    nonzero: float | None = None
    self_weight: float | None = None
    same_tier_mass: float | None = None
    same_group_mass: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Cost:
    """The work of all clients together, to the end of the run."""

    visits: float | None = None
    rounds: float | None = None
    client_steps: float | None = None
    bytes_down: float | None = None
    bytes_up: float | None = None
    skipped: float | None = None
    macs: float | None = None

    @property
    def mb_sent(self) -> float:
        """Traffic down and up together, in MB."""
        return (self.bytes_down + self.bytes_up) / MB


@dataclass(frozen=True)
class Method:
    """The figures of one method; `alpha` is None if it has no mixing weights.

    Attributes:
        diverged: None if it finished; else when it went non-finite ("diverged at epoch 3"), and of several seeds with
            how many ("2 of 3 seeds; 1 diverged at epoch 3"): then the figures are those of the seeds that it finished.
    """

    accuracy: Figures = Figures()
    loss: Figures = Figures()
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    alpha: Mixing | None = None
    cost: Cost = Cost()
    diverged: str | None = None

    @classmethod
    def from_json(cls, table: Row) -> "Method":
        return cls(
            accuracy=_part(Figures, table.get("accuracy", {})),
            loss=_part(Figures, table.get("loss", {})),
            tiers={name: _part(Tier, tier) for name, tier in table.get("tiers", {}).items()},
            # No default: without mixing weights alpha is None, and not a Mixing full of None.
            alpha=_part(Mixing, table.get("alpha")),
            cost=_part(Cost, table.get("cost", {})),
            diverged=table.get("diverged"),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "accuracy": dict(vars(self.accuracy)),
            "loss": dict(vars(self.loss)),
            "tiers": {name: dict(vars(tier)) for name, tier in self.tiers.items()},
            "alpha": None if self.alpha is None else dict(vars(self.alpha)),
            "cost": dict(vars(self.cost)),
            **({} if self.diverged is None else {"diverged": self.diverged}),
        }


def _part(kind: type[Part], table: Row | None) -> Part | None:
    # By field, not by key: a summary with fewer or more keys than this version knows can still be read.
    return None if table is None else kind(**{part.name: table.get(part.name) for part in fields(kind)})


@dataclass(frozen=True)
class Spread:
    """The standard deviation over seeds of every number of a summary: of its algorithm (`main`) and of its rivals.

    A value without a spread is None and is not written: every word, and every number if there is a single seed.
    """

    num_clients: float | None = None
    epochs: float | None = None
    main: Method = Method()
    baselines: Mapping[str, Method] = field(default_factory=dict)

    @classmethod
    def from_json(cls, table: Row) -> "Spread":
        table = _with_nan(table)
        rivals = {name: Method.from_json(rival) for name, rival in table.get("baselines", {}).items()}
        return cls(table.get("num_clients"), table.get("epochs"), Method.from_json(table), rivals)

    def to_json(self) -> dict[str, Any]:
        about = {"num_clients": self.num_clients, "epochs": self.epochs}
        rivals = {name: rival.to_json() for name, rival in self.baselines.items()}
        return _without_none({**about, **self.main.to_json(), "baselines": rivals})


def _with_nan(value: Any) -> Any:
    """The spread with nan for every null: `to_json` leaves None out, so null was a number that is not finite."""
    if isinstance(value, Mapping):
        return {key: _with_nan(item) for key, item in value.items()}
    return math.nan if value is None else value


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


@dataclass(frozen=True)
class Gain:
    """How far the algorithm is ahead of a rival in mean accuracy, seed by seed on the same data."""

    mean: float | None
    std: float | None
    differences: Sequence[float | None]


@dataclass(frozen=True)
class Summary:
    """summary.json of one run, or of several seeds: then all figures are means over them.

    Attributes:
        main: the algorithm's figures, which stand at the top level of the file.
        seed: the seed of a single run.
        baselines: rival -> its figures.
        seeds: the seeds of several runs; a single run has none, and neither `spread` nor `paired`.
        paired: rival -> the algorithm's gain over it.
    """

    algorithm: str
    dataset: str
    num_clients: int
    main: Method
    seed: int | None = None
    epochs: int | None = None
    capacity_profile: str | None = None
    baselines: Mapping[str, Method] = field(default_factory=dict)
    seeds: Sequence[int] = ()
    spread: Spread = Spread()
    paired: Mapping[str, Gain] = field(default_factory=dict)

    @classmethod
    def from_json(cls, table: Row) -> "Summary":
        """The summary in a JSON object, which has at least the keys of `NEEDED`."""
        return cls(
            algorithm=table["algorithm"],
            dataset=table["dataset"],
            num_clients=table["num_clients"],
            main=Method.from_json(table),
            seed=table.get("seed"),
            epochs=table.get("epochs"),
            capacity_profile=table.get("capacity_profile"),
            baselines={name: Method.from_json(rival) for name, rival in table.get("baselines", {}).items()},
            seeds=tuple(table.get("seeds", ())),
            spread=Spread.from_json(table.get("spread", {})),
            paired={rival: _part(Gain, gain) for rival, gain in table.get("paired", {}).items()},
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON object, with keys in the order of the file; the writer must replace numbers that are not finite."""
        over_seeds = {
            "seeds": list(self.seeds),
            "spread": self.spread.to_json(),
            "paired": {rival: dict(vars(gain)) for rival, gain in self.paired.items()},
        }
        return {
            "algorithm": self.algorithm,
            "dataset": self.dataset,
            "num_clients": self.num_clients,
            **({} if self.seeds else {"seed": self.seed}),  # the file of several seeds has no such key
            "epochs": self.epochs,
            "capacity_profile": self.capacity_profile,
            **self.main.to_json(),
            "baselines": {name: rival.to_json() for name, rival in self.baselines.items()},
            **(over_seeds if self.seeds else {}),
        }

    @property
    def methods(self) -> dict[str, Method]:
        """method -> its figures, the algorithm first."""
        return {self.algorithm: self.main, **self.baselines}

    @property
    def mixing(self) -> dict[str, Mixing]:
        """method -> statistics of its mixing weights, for the methods that have them."""
        return {name: method.alpha for name, method in self.methods.items() if method.alpha is not None}

    @property
    def tier_names(self) -> list[str]:
        """The tiers, the largest width first."""
        return sorted(self.main.tiers, key=lambda name: -or_lowest(self.widest(name).width))

    def widest(self, tier: str) -> Tier:
        """The tier's figures under the method that trains the largest models there."""
        # Some methods train the smallest width in every tier, which does not show what the tier can hold.
        entries = [method.tiers[tier] for method in self.methods.values() if tier in method.tiers]
        return max(entries, key=lambda entry: (or_lowest(entry.width), or_lowest(entry.params)))

    def spread_of(self, method: str) -> Method:
        """The spread of a method's figures over seeds; every figure is None for a single run."""
        return self.spread.main if method == self.algorithm else self.spread.baselines.get(method, Method())


NEEDED = ("algorithm", "dataset", "num_clients", "accuracy", "cost")


def or_lowest(value: float | None) -> float:
    """The value as a sort key: a blank one sorts below every number."""
    return float("-inf") if is_blank(value) else value


# Names of columns. metrics.csv has accuracy_mean, tail_loss_worst, accuracy_tier_NAME; clients.csv accuracy_METHOD.


def deployed(row: Row, column: str) -> Any:
    """A figure of the model that a client would use: the tail average once it has begun, before that the last model.

    Example:
        >>> deployed({"loss_mean": 0.5, "tail_loss_mean": 0.4}, "loss_mean"), deployed({"loss_mean": 0.5}, "loss_mean")
        (0.4, 0.5)
    """
    of_tail = row.get(f"tail_{column}")
    return row.get(column) if is_blank(of_tail) else of_tail


def tier_columns(row: Row) -> dict[str, str]:
    """tier -> the name of its accuracy column, from a row of metrics.csv."""
    start = "accuracy_tier_"
    return {column.removeprefix(start): column for column in row if column.startswith(start)}


def method_column(summary: Summary, method: str) -> str:
    """The column of a method's accuracy in clients.csv."""
    return "accuracy" if method == summary.algorithm else f"accuracy_{method}"


def quantity(column: str) -> str:
    """The kind of number that a column holds: the first word of its name.

    Example:
        >>> quantity("accuracy_tier_large"), quantity("loss")
        ('accuracy', 'loss')
    """
    return column.partition("_")[0]


# The folder


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


def read(folder: Path) -> Contents:
    """The contents of a run folder, or of the folder of several seeds.

    A folder without summary.json may hold a resource benchmark; if it holds neither, a ValueError says so.
    """
    resources = _parsed(folder / RESOURCES, json.loads, otherwise={})
    images = {path.name: path.read_bytes() for path in sorted(folder.glob("*.png"))}
    if resources and not (folder / "summary.json").is_file():
        return Contents(images=images, resources=resources)
    summary = read_summary(folder)
    # profile.csv is in the folder of each seed. Seeds of one sweep have the same tiers, so the first stands for all.
    profiles = [_rows(home / "profile.csv") for home in (folder, *seed_folders(folder, summary))]
    return Contents(
        summary=summary,
        config=_parsed(folder / "config.toml", str, otherwise=""),
        settings=_parsed(folder / "config.toml", tomllib.loads, otherwise={}),
        clients=_by_seed(_rows(folder / "clients.csv")),
        metrics=_rows(folder / "metrics.csv"),
        profile=next(filter(None, profiles), []),
        seeds=_rows(folder / "seeds.csv"),
        images=images,
        resources=resources,
    )


def read_summary(folder: Path) -> Summary:
    """The summary of a folder; a ValueError of one sentence if there is none, or the file is something else."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no summary.json; name the folder of a run that has ended")
    table = _parsed(path, json.loads, otherwise={})
    absent = [key for key in NEEDED if key not in table]
    if absent:
        raise ValueError(f"{path} has no {absent[0]!r}; it is not the summary of a run")
    return Summary.from_json(table)


def seed_folders(folder: Path, summary: Summary) -> list[Path]:
    """The folder of each seed; none for a single run."""
    return [folder / f"seed-{seed}" for seed in summary.seeds]


def _parsed(path: Path, parse: Callable[[str], Any], *, otherwise: Any) -> Any:
    """The parsed text of a file, or ``otherwise`` if there is no such file."""
    try:
        return parse(path.read_text(encoding="utf-8")) if path.is_file() else otherwise
    # JSON, TOML and UTF-8 all raise kinds of ValueError.
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it or run again") from error


def read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file of a run: numbers as numbers, empty cells as None, tiers as text."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{column: _value(column, text) for column, text in row.items()} for row in csv.DictReader(file)]


def _value(column: str, text: str) -> Any:
    if column == "tier":  # a name, also if it is made of digits
        return text
    for kind in (int, float):  # int first: 3 is a count, and would come back as 3.0
        try:
            return kind(text)
        except ValueError:
            pass
    return text or None


def _rows(path: Path) -> Rows:
    return read_csv(path) if path.is_file() else []


def _by_seed(rows: Rows) -> list[Rows]:
    # A single run has no column "seed": all of its rows come together under None.
    runs: dict[Any, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.get("seed"), []).append(row)
    return list(runs.values())
