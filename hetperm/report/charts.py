"""What the script of a page draws: curves, maps, dots and clients, as plain numbers and texts.

Costs of a curve are per client (steps), in MB, and in simulated seconds. Numbers are rounded: nobody sees more digits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetperm.report import pictures, tables
from hetperm.report.details import Run
from hetperm.report.paired import Sample, paired
from hetperm.report.summary import MB, Row, Summary, deployed, is_blank, method_column, tier_columns

PALETTE = tuple(dict.fromkeys(pictures.COLOURS.values()))  # for methods that are not known here, by their position
UNIT = 10_000  # mixing weights are sent as whole ten-thousandths
CLIENTS = 400  # clients that the page shows one by one; of more it shows those with the worst figures
# column of the metrics -> name of the cost
COSTS = {"steps": "local steps per client", "mb": "MB sent, down and up", "seconds": "simulated seconds"}


def of(summary: Summary, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the script of a page needs."""
    return {
        "metric": summary.metric,
        "tiers": summary.tier_names,
        "costs": COSTS,
        "methods": [{"name": name, "colour": colour(name, k)} for k, name in enumerate(summary.methods)],
        "curves": {name: [curve(run, name) for run in runs if run.histories.get(name)] for name in summary.methods},
        "maps": [_map(run, summary.tier_names) for run in runs if run.weights is not None],
        "dots": tier_dots(summary),
        "paired": gains(summary, runs),
        "outlook": _outlook(runs),
        "clients": _clients(runs[0], summary) if len(runs) == 1 and not summary.seeds else [],
        "epochs": _client_epochs(runs[0]) if len(runs) == 1 and not summary.seeds else [],
    }


def colour(method: str, position: int) -> str:
    """The colour of a method in all pictures."""
    return pictures.COLOURS.get(method, PALETTE[position % len(PALETTE)])


def _short(value: Any, digits: int = 4) -> float | None:
    return None if is_blank(value) else round(float(value), digits)


# Curves


def curve(run: Run, method: str) -> dict[str, Any]:
    """The curve of a method in one run: costs so far, and the figure of every tier and of all clients."""
    rows, metric = run.histories[method], run.summary.metric
    # A method that is fine-tuned at the end is only worth showing with it: that is what a client would use.
    if rows[-1].get("finished") == 1:
        rows = [row for row in rows if row.get("finished") == 1]
    rows = [row for row in rows if not is_blank(deployed(row, f"{metric}_mean"))]
    tiers = tier_columns(rows[-1], metric) if rows else {}
    return {
        "seed": run.summary.seed,
        "epoch": [row.get("epoch") for row in rows],
        "steps": [_short(_part(row, "client_steps", run.summary.num_clients), 1) for row in rows],
        "mb": [_short(_mb(row), 4) for row in rows],
        "seconds": [_short(row.get("simulated_seconds"), 3) for row in rows],
        "all": [_short(deployed(row, f"{metric}_mean")) for row in rows],
        "by_tier": {tier: [_short(deployed(row, column)) for row in rows] for tier, column in tiers.items()},
    }


def _part(row: Row, column: str, count: int) -> float | None:
    return None if is_blank(row.get(column)) else row[column] / count


def _mb(row: Row) -> float | None:
    down, up = row.get("bytes_down"), row.get("bytes_up")
    return None if is_blank(down) or is_blank(up) else (down + up) / MB


# Methods by tier and in pairs


def tier_dots(summary: Summary) -> list[dict[str, Any]]:
    """A row for every tier, and one for all clients: the figure of each method, with its spread over seeds if known."""
    rows = []
    for tier in summary.tier_names if len(summary.tier_names) > 1 else ():
        values = {name: method.tiers[tier].score for name, method in summary.methods.items() if tier in method.tiers}
        spreads = {
            name: summary.spread_of(name).tiers[tier].score for name in values if tier in summary.spread_of(name).tiers
        }
        rows.append(_dots(_tier_label(tier, summary.widest(tier).width), values, spreads))
    means = {name: method.score.mean for name, method in summary.methods.items()}
    spreads = {name: summary.spread_of(name).score.mean for name in summary.methods}
    return [*rows, _dots("all clients", means, spreads)]


def _tier_label(tier: str, width: float | None) -> str:
    # A tier of `fit` is called by its width.
    called_by_it = not is_blank(width) and tier == f"{width:g}"
    return f"width {tables.width_text(width)}" if called_by_it else f"{tier} (width {tables.width_text(width)})"


def _dots(label: str, values: Mapping[str, Any], spreads: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: _short(value) for name, value in values.items() if not is_blank(value)}
    return {"label": label, "values": known, "spread": {name: _short(spreads.get(name)) for name in known}}


def gains(summary: Summary, runs: Sequence[Run]) -> dict[str, Any]:
    """How far the algorithm is ahead of each rival, with a 95% interval over seeds, or over clients of one run."""
    over = "seeds"
    if summary.seeds:
        figures = {name: {run.summary.seed: _mean_of(run, name) for run in runs} for name in summary.methods}
    else:
        over = "clients"
        columns = {name: method_column(summary, name) for name in summary.methods}
        rows = runs[0].clients if runs else ()
        figures = {
            name: {row.get("client"): row.get(column) for row in rows if not is_blank(row.get(summary.metric))}
            for name, column in columns.items()
        }
    ours = summary.algorithm
    pairs = {rival: pair(figures[ours], figures[rival], better=summary.better) for rival in summary.baselines}
    return {
        "over": over,
        "axis": f"gain of {ours} in test {summary.metric}",
        "rivals": {rival: values for rival, values in pairs.items() if values},
    }


def pair(
    ours: Mapping[int, float | None], theirs: Mapping[int, float | None], *, better: str = "higher"
) -> dict[str, Any] | None:
    """By how much ours is ahead of theirs, by seed or by client, with its 95% interval; None if none can be compared.

    Args:
        better: whether more is better ("higher") or less ("lower"); then theirs minus ours is ahead.
    """
    if better == "lower":
        ours, theirs = ({key: None if is_blank(v) else -v for key, v in side.items()} for side in (ours, theirs))
    difference = paired(Sample(ours), Sample(theirs))
    if difference is None:
        return None
    return {
        "mean": _short(difference.mean),
        "low": _short(difference.low),
        "high": _short(difference.high),
        "verdict": difference.verdict,
        "each": [_short(value - theirs[key]) for key, value in ours.items() if key in theirs],
    }


def _mean_of(run: Run, method: str) -> float | None:
    figures = run.summary.methods.get(method)
    return None if figures is None else figures.score.mean


# Who learns from whom


def _map(run: Run, largest_first: Sequence[str]) -> dict[str, Any]:
    """The mixing weights of a run: all of them in rows, or of many clients the means of neighbours in one order."""
    (i, j, values), count = run.weights, run.summary.num_clients
    tiers = [str(row.get("tier")) for row in run.clients]
    groups = [row.get("group") for row in run.clients]
    known = len(groups) == count and None not in groups and len(set(groups)) > 1
    label = f"seed {run.summary.seed}"
    names = {
        "label": label,
        "tiers": tiers if len(tiers) == count else None,
        "groups": groups if known else None,
        **_scale(values),
    }
    if count > pictures.LARGEST_MAP:
        return {**names, "tiers": None, "groups": None, **_binned(run, groups if known else None, tiers, largest_first)}
    rows: list[tuple[list[int], list[int]]] = [([], []) for _ in range(count)]
    for a, b, value in zip(i.tolist(), j.tolist(), values.tolist(), strict=True):
        rows[a][0].append(b)
        rows[a][1].append(round(value * UNIT))
    alpha = np.zeros((count, count))
    alpha[i, j] = values
    return {**names, "rows": rows, "alike": pictures.clustered(alpha).tolist()}


def _scale(weights: np.ndarray) -> dict[str, float]:
    """The largest weight, and the one from which on a map is brightest: a few large ones must not darken the rest."""
    largest = float(weights.max(initial=0.0))
    common = float(np.quantile(weights, 0.99)) if weights.size else 0.0
    return {"largest": round(largest, 4), "bright": round(common if common < largest / 2 else largest, 4)}


def _binned(
    run: Run, groups: Sequence[int] | None, tiers: Sequence[str], largest_first: Sequence[str]
) -> dict[str, Any]:
    """A map of the mean weights between neighbours, ordered by group and tier if they are known."""
    count = run.summary.num_clients
    order = (
        np.arange(count) if groups is None else pictures.order(np.empty(0), groups, tiers, largest_first=largest_first)
    )
    total, size = pictures.between_neighbours(run.weights, order)
    rows = [(np.flatnonzero(row > 0).tolist(), [round(x * UNIT) for x in row.tolist() if x > 0]) for row in total]
    return {"rows": rows, "bin": size, "order": order.tolist(), **_scale(total[total > 0])}


def _outlook(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What the look ahead of each run saw: a candidate and how much its loss differs from being alone."""
    return [
        {
            "seed": run.summary.seed,
            "share": [row.get("share") for row in run.outlook],
            "gain": [_short(row.get("minus_alone"), 6) for row in run.outlook],
            "error": [_short(row.get("standard_error"), 6) for row in run.outlook],
            "chosen": next((k for k, row in enumerate(run.outlook) if row.get("chosen") == 1), None),
        }
        for run in runs
        if run.outlook and "minus_alone" in run.outlook[0]
    ]


# Clients


def shown_clients(rows: Sequence[Row], summary: Summary) -> list[Row]:
    """The clients that a page shows one by one: all, or of many those with the worst figures."""
    if len(rows) <= CLIENTS:
        return list(rows)
    worst = sorted(rows, key=lambda row: _rank(row, summary))[:CLIENTS]
    return sorted(worst, key=lambda row: row.get("client") or 0)


def _rank(row: Row, summary: Summary) -> float:
    """The worst first, and clients without a figure last."""
    value = row.get(summary.metric)
    return math.inf if is_blank(value) else value if summary.better == "higher" else -value


def _clients(run: Run, summary: Summary) -> list[dict[str, Any]]:
    partners: dict[int, list[tuple[int, float]]] = {}
    shown = {row.get("client") for row in shown_clients(run.clients, summary)}
    if run.weights is not None:
        for i, j, value in zip(*(part.tolist() for part in run.weights), strict=True):
            if i in shown:
                partners.setdefault(i, []).append((j, _short(value)))
    return [
        {
            "id": row.get("client"),
            "tier": row.get("tier"),
            "group": row.get("group"),
            "facts": [
                [tables.head(key), tables.cell(key, row.get(key))]
                for key in row
                if key not in ("client", summary.metric)
                and not key.startswith(f"{summary.metric}_")
                and not is_blank(row.get(key))
            ],
            "scores": {name: _short(row.get(method_column(summary, name))) for name in summary.methods},
            "partners": sorted(partners.get(row.get("client"), []), key=lambda pair: -pair[1])[:PARTNERS],
            "learns_from": len(partners.get(row.get("client"), [])),
            "files": run.models.get(row.get("client"), []),
            "curve": _client_curve(run, row.get("client")),
        }
        for row in shown_clients(run.clients, summary)
    ]


PARTNERS = 30  # partners that are listed for a client, the weightiest


def _client_curve(run: Run, client: Any) -> list[float | None]:
    return [_short(row.get(run.summary.metric)) for row in run.curves if row.get("client") == client]


def _client_epochs(run: Run) -> list[int]:
    return list(dict.fromkeys(row.get("epoch") for row in run.curves))
