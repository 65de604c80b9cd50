"""Runs side by side: their figures, paired differences, curves, and what differs in their configurations.

Differences are paired where that means something: by seed if runs share several, else by client. Runs on other data,
or whose clients are others, are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from hetperm.report import charts, page, tables
from hetperm.report.contents import Contents, read
from hetperm.report.details import Run, runs_of
from hetperm.report.grid import Grid
from hetperm.report.summary import is_blank
from hetperm.texts import one_line

MOST = 12  # runs at once
LIKE = ("client", "group", "n_train", "n_val", "most_common")  # columns of clients.csv by which clients are the same


@dataclass(frozen=True)
class Side:
    """One of the runs.

    Attributes:
        label: the name of its folder, or the whole path where names are the same.
        by_seed: seed -> the run with that seed.
    """

    label: str
    contents: Contents
    by_seed: Mapping[int | None, Run]


@dataclass(frozen=True)
class Comparison:
    """Runs that can be compared, the first is what the others are compared with.

    Attributes:
        seeds: those that all runs have.
    """

    sides: Sequence[Side]
    seeds: Sequence[int | None]

    @property
    def metric(self) -> str:
        """What all of them are scored by."""
        return self.sides[0].contents.summary.metric

    @property
    def over(self) -> str:
        """What differences are paired by."""
        return "seeds" if len(self.seeds) > 1 else "clients"

    def figures(self, side: Side, method: str | None = None) -> dict[Any, float | None]:
        """The figures of a method (the run's own algorithm unless given), by seed or by client."""
        if self.over == "seeds":
            return {seed: _mean(side.by_seed[seed], method) for seed in self.seeds}
        run = side.by_seed[self.seeds[0]]
        own = method is None or method == run.summary.algorithm
        column = self.metric if own else f"{self.metric}_{method}"
        trained = [row for row in run.clients if not row.get("joined")]  # who joined later is in one run only
        return {row.get("client"): row.get(column) for row in trained if not is_blank(row.get(self.metric))}

    def pair(self, side: Side, method: str | None = None) -> dict[str, Any] | None:
        """How far a run is ahead of the first, with a 95% interval."""
        ours, first = self.figures(side, method), self.figures(self.sides[0], method)
        better = self.sides[0].contents.summary.better
        return charts.pair(ours, first, better=better) if ours.keys() == first.keys() else None


def compare(folders: Sequence[Path]) -> Comparison:
    """The runs in these folders, ready to be compared; a ValueError of one sentence if that would mean nothing."""
    if len(folders) < 2:
        raise ValueError(f"a comparison takes at least two runs and got {len(folders)}; name two folders")
    if len(folders) > MOST:
        raise ValueError(f"{len(folders)} runs are too many for one table; compare at most {MOST}")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"{_doubled(folders)} is named twice; a run is not compared with itself")
    sides = [_side(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]
    for side in sides[1:]:
        _check_data(sides[0], side)
    seeds = [seed for seed in sides[0].by_seed if all([seed in side.by_seed for side in sides])]
    if not seeds:
        found = "; ".join(f"{side.label} has {', '.join(map(str, side.by_seed))}" for side in sides)
        raise ValueError(
            f"the runs share no seed ({found}), so their clients differ and nothing can be paired; run both with the "
            "same seed"
        )
    for side in sides[1:]:
        for seed in seeds:
            _check_clients(sides[0], side, seed)
    return Comparison(sides, seeds)


def _side(folder: Path, label: str) -> Side:
    contents = read(folder)
    if contents.summary is None:
        raise ValueError(f"{folder} holds a resource benchmark and no run; compare runs of hetperm train")
    runs = runs_of(folder, contents)
    if not runs:
        raise ValueError(f"{folder} holds no folder of a seed; name the folder of a run that has ended")
    return Side(label, contents, {run.summary.seed: run for run in runs})


def _labels(folders: Sequence[Path]) -> list[str]:
    names = [folder.resolve().name for folder in folders]
    return [one_line(name if names.count(name) == 1 else str(folder)) for name, folder in zip(names, folders)]


def _doubled(folders: Sequence[Path]) -> Path:
    resolved = [folder.resolve() for folder in folders]
    return next(folder for folder, path in zip(folders, resolved) if resolved.count(path) > 1)


def _check_data(first: Side, other: Side) -> None:
    """Raise an error if two runs are not about the same data."""
    sets = [side.contents.summary.dataset for side in (first, other)]
    if sets[0] != sets[1]:
        raise ValueError(
            f"{first.label} is on {sets[0]} and {other.label} on {sets[1]}; runs on different data cannot be compared"
        )
    metrics = [side.contents.summary.metric for side in (first, other)]
    if metrics[0] != metrics[1]:
        raise ValueError(
            f"{first.label} is scored by {metrics[0]} and {other.label} by {metrics[1]}; run one of them again with "
            f"--metric {metrics[0]}"
        )
    parts = [side.contents.settings.get("partition") for side in (first, other)]
    if parts[0] != parts[1] and sets[0] != "own":
        raise ValueError(
            f"{first.label} divides the data by {parts[0]} and {other.label} by {parts[1]}; clients with different "
            "data cannot be compared"
        )


def _check_clients(first: Side, other: Side, seed: int | None) -> None:
    """Raise an error if the clients of two runs are not the same."""
    a, b = first.by_seed[seed], other.by_seed[seed]
    counts = [run.summary.num_clients for run in (a, b)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{first.label} has {counts[0]} clients and {other.label} has {counts[1]}; runs with different clients "
            "cannot be compared: run both with the same --num-clients"
        )
    for one, two in zip(a.clients, b.clients):
        column = next((name for name in LIKE if one.get(name) != two.get(name)), None)
        if column is not None:
            raise ValueError(
                f"client {one.get('client')} is not the same in both: {tables.head(column)} {one.get(column)} in "
                f"{first.label} and {two.get(column)} in {other.label}; compare runs with the same data settings"
            )


def _mean(run: Run, method: str | None) -> float | None:
    name = run.summary.algorithm if method is None else method
    figures = run.summary.methods.get(name)
    return None if figures is None else figures.score.mean


# Tables


def run_grid(found: Comparison) -> Grid:
    """One line per run: its algorithm, figures and cost, and how far it is from the first."""
    rows = []
    for k, side in enumerate(found.sides):
        runs = [side.by_seed[seed] for seed in found.seeds]
        cost = [run.summary.main.cost for run in runs]
        rows.append(
            {
                "run": side.label,
                "algorithm": side.contents.summary.algorithm,
                found.metric: _with_spread([_mean(run, None) for run in runs]),
                "gain over the first": "-" if not k else difference_text(found.pair(side)),
                "worst": _average([run.summary.main.score.worst for run in runs], 3),
                "partners": _average(
                    [run.summary.main.alpha and run.summary.main.alpha.effective_partners for run in runs], 1
                ),
                "steps": _average([c.client_steps and c.client_steps / runs[0].summary.num_clients for c in cost], 0),
                "MB": _average([c.mb_sent for c in cost], 1),
                "simulated s": _average([_seconds(run) for run in runs], 1),
            }
        )
    seeds = f"seeds {', '.join(map(str, found.seeds))}" if len(found.seeds) > 1 else f"seed {found.seeds[0]}"
    title = f"{found.sides[0].contents.summary.dataset}, {found.sides[0].contents.summary.num_clients} clients, {seeds}"
    lower = f"; a lower {found.metric} is a gain" if found.sides[0].contents.summary.better == "lower" else ""
    note = f"Gains are paired by {found.over[:-1]}, with their 95% interval{lower}."
    return Grid(list(rows[0]), [list(row.values()) for row in rows], title=title, note=note)


def _seconds(run: Run) -> float | None:
    rows = run.histories.get(run.summary.algorithm)
    return rows[-1].get("simulated_seconds") if rows else None


def _average(values: Sequence[float | None], digits: int) -> str:
    known = [value for value in values if not is_blank(value)]
    return f"{mean(known):,.{digits}f}" if known else "-"


def _with_spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if not is_blank(value)]
    if not known:
        return "-"
    return f"{mean(known):.3f}" + (f" ± {stdev(known):.3f}" if len(known) > 1 else "")


def difference_text(pair: Mapping[str, Any] | None) -> str:
    """A paired difference as it is shown.

    Example:
        >>> difference_text({"mean": 0.01, "low": -0.002, "high": 0.022, "verdict": "level"})
        '+0.010 [-0.002, +0.022] level'
    """
    if pair is None:
        return "-"
    interval = "" if pair["low"] is None else f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
    return f"{pair['mean']:+.3f}{interval} {pair['verdict']}"


def setting_grid(found: Comparison) -> Grid | None:
    """The settings that differ, one line each; None if all are the same."""
    settings = [_flat(side.by_seed[found.seeds[0]].settings) for side in found.sides]
    keys = dict.fromkeys(key for one in settings for key in one if key not in ("name", "seed", "seeds"))
    rows = [[key, *(_setting(one.get(key, "-")) for one in settings)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    columns = ["setting", *(side.label for side in found.sides)]
    return Grid(columns, differing, title="settings that differ") if differing else None


def _setting(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The settings with those of tables beside the others, as table.key."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def tier_grid(found: Comparison) -> Grid | None:
    """The figure of every tier in every run; None if runs have other tiers, or a single one."""
    names = found.sides[0].contents.summary.tier_names
    if len(names) < 2 or any(side.contents.summary.tier_names != names for side in found.sides):
        return None
    rows = [[name, *(_tier(found, side, name) for side in found.sides)] for name in names]
    return Grid(["tier", *(side.label for side in found.sides)], rows, title=f"{found.metric} by tier")


def _tier(found: Comparison, side: Side, tier: str) -> str:
    return _with_spread([side.by_seed[seed].summary.main.tiers[tier].score for seed in found.seeds])


def method_grid(found: Comparison) -> Grid | None:
    """Every method in every run; None if there are no rivals."""
    names = dict.fromkeys(name for side in found.sides for name in side.contents.summary.methods)
    if len(names) < 2:
        return None
    rows = [
        [name, *(_with_spread([_mean(side.by_seed[seed], name) for seed in found.seeds]) for side in found.sides)]
        for name in names
    ]
    return Grid(["method", *(side.label for side in found.sides)], rows, title=f"{found.metric} by method")


# The page


def render(found: Comparison) -> str:
    """The page of a comparison, which needs no network and no other file."""
    labels = [side.label for side in found.sides]
    grids = {"grid": run_grid(found), "settings": setting_grid(found), "tiers": tier_grid(found)}
    parts = {
        **page.EMPTY,
        **grids,
        "methods": method_grid(found),
        "title": " and ".join(labels) if len(labels) == 2 else f"{len(labels)} runs side by side",
        "lead": f"{', '.join(labels[1:])} compared with {labels[0]}, on the same clients.",
        "outcome": outcome(found),
        "data": _data(found),
        "generator": "hetperm compare",
        "sections": [(address, name) for address, name in SECTIONS.items() if address != "tiers" or grids["tiers"]],
    }
    return page.filled("compare.html", parts)


SECTIONS = {
    "runs": "Runs",
    "settings": "Settings",
    "tiers": "Tiers",
    "progress": "Progress",
    "methods": "Methods",
}


def outcome(found: Comparison) -> str:
    """How every run compares with the first, in a sentence."""
    first, parts = found.sides[0].label, []
    for side in found.sides[1:]:
        gain = found.pair(side)
        if gain is None:
            continue
        interval = "" if gain["low"] is None else f" (95% interval {gain['low']:+.3f} to {gain['high']:+.3f})"
        word = "level with" if gain["verdict"] == "level" else "ahead of" if gain["mean"] >= 0 else "behind"
        by = "" if gain["verdict"] == "level" else f"{abs(gain['mean']):.3f} "
        parts.append(f"{side.label} is {by}{word} {first}{interval}")
    return f"In mean test {found.metric}, {'; '.join(parts)}." if parts else ""


def _data(found: Comparison) -> dict[str, Any]:
    first = found.sides[0]
    pairs = {side.label: found.pair(side) for side in found.sides[1:]}
    tiers = first.contents.summary.tier_names if tier_grid(found) else []
    return {
        "metric": found.metric,
        "tiers": tiers,
        "costs": charts.COSTS,
        # The colours of methods would be the same for runs of one algorithm.
        "methods": [{"name": side.label, "colour": COLOURS[k % len(COLOURS)]} for k, side in enumerate(found.sides)],
        "curves": {side.label: _curves(found, side) for side in found.sides},
        "maps": [],
        "dots": _dots(found, tiers),
        "paired": {
            "over": found.over,
            "axis": f"gain over {first.label} in test {found.metric}",
            "rivals": {label: pair for label, pair in pairs.items() if pair},
        },
        "outlook": [],
        "clients": [],
        "epochs": [],
    }


COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")


def _curves(found: Comparison, side: Side) -> list[dict[str, Any]]:
    runs = [side.by_seed[seed] for seed in found.seeds]
    return [charts.curve(run, run.summary.algorithm) for run in runs if run.histories.get(run.summary.algorithm)]


def _dots(found: Comparison, tiers: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for tier in tiers:
        values = {
            side.label: [side.by_seed[seed].summary.main.tiers[tier].score for seed in found.seeds]
            for side in found.sides
        }
        known = {name: [value for value in row if not is_blank(value)] for name, row in values.items()}
        rows.append(
            {
                "label": tier,
                "values": {name: round(mean(row), 4) for name, row in known.items() if row},
                "spread": {name: round(stdev(row), 4) if len(row) > 1 else None for name, row in known.items()},
            }
        )
    return rows
