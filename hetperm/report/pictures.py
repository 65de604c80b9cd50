"""Pictures of a run: who learns from whom, and how accuracy grows with work."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hetperm.report.folder import write

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which colour-blind readers can tell apart; a method has the same colour in every picture.
COLOURS = {
    "perm": "#D55E00",
    "perm-two-stage": "#E69F00",
    "local": "#000000",
    "fedavg": "#999999",
    "fedavg-ft": "#0072B2",
    "perfedavg": "#56B4E9",
    "pfedme": "#009E73",
    "apfl": "#CC79A7",
    "ifca": "#8C6D1F",
}


def save(figure: Figure, path: Path) -> None:
    """Nothing; the file holds the picture, the same bytes for the same picture."""
    write(path, lambda file: figure.savefig(file, format="png", dpi=150, metadata={"Software": None}))


# Who learns from whom


def order(alpha: np.ndarray, groups: Sequence[int] | None = None) -> np.ndarray:
    """(N,) clients in an order in which the structure of alpha shows: by known group, and else by `clustered`.

    Example:
        >>> order(np.eye(4), groups=[1, 0, 1, 0]).tolist()
        [1, 3, 0, 2]
    """
    return clustered(alpha) if groups is None else np.argsort(groups, kind="stable")


def clustered(alpha: np.ndarray) -> np.ndarray:
    """(N,) clients ordered by cluster: those who learn from each other come to stand side by side.

    Leaves of the tree that average linkage builds on the clients' rows of the symmetric weights, in the order in which
    neighbours are most alike.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage

    if len(alpha) < 3:
        return np.arange(len(alpha))
    weights = (alpha + alpha.T) / 2
    np.fill_diagonal(weights, weights.max(axis=1))  # how much a client trusts itself does not tell clusters apart
    return leaves_list(linkage(weights, method="average", optimal_ordering=len(alpha) <= 500))


def alpha_map(alpha: np.ndarray, groups: Sequence[int] | None, *, title: str) -> Figure:
    """The mixing weights as a heat map: row i is client i, column j whom it learns from."""
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    at = order(alpha, groups)
    image = axes.imshow(alpha[np.ix_(at, at)], cmap="viridis", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="mixing weight")
    by = "group" if groups is not None else "similarity"
    axes.set(title=title, xlabel=f"host j (ordered by {by})", ylabel=f"client i (ordered by {by})")
    if len(at) <= 30:
        axes.set_xticks(range(len(at)), at.tolist(), fontsize=7, rotation=90)
        axes.set_yticks(range(len(at)), at.tolist(), fontsize=7)
    if groups is not None:
        sorted_groups = np.asarray(groups)[at]
        for edge in np.flatnonzero(sorted_groups[1:] != sorted_groups[:-1]) + 0.5:
            axes.axhline(edge, color="white", linewidth=0.8)
            axes.axvline(edge, color="white", linewidth=0.8)
    return figure


# How accuracy grows


def deployed(rows: Rows, figure: str) -> np.ndarray:
    """(epochs,) a figure of the model that a client would use: of the tail average once it has begun."""
    return np.array([_number(row.get(f"tail_{figure}", row.get(figure))) for row in rows])


def column(rows: Rows, name: str) -> np.ndarray:
    """(epochs,) a column of a history; nan where it is empty."""
    return np.array([_number(row.get(name)) for row in rows])


def curves(
    runs: Mapping[str, Sequence[Rows]],
    *,
    figures: Sequence[tuple[str, str]],
    against: Sequence[tuple[str, str, float]],
    title: str = "",
) -> Figure:
    """Every method a line, a column of panels per figure and a row per cost; the band is the spread over seeds.

    Args:
        runs: method -> one history per seed.
        figures: (column of the metrics, label); losses are on a logarithmic scale.
        against: (column of the metrics, label, what one unit is): what it cost so far. A method that pays nothing of
            it is a dashed line at the height where it ends.
    """
    figure = Figure(figsize=(5.2 * len(figures) + 1.6, 3.9 * len(against)), layout="constrained")
    panels = figure.subplots(len(against), len(figures), squeeze=False)
    for row, (cost, cost_label, unit) in zip(panels, against):
        for axes, (name, label) in zip(row, figures):
            for method, histories in runs.items():
                _line(axes, method, histories, name, cost, unit)
            axes.set(xlabel=cost_label, ylabel=label, yscale="log" if "loss" in name else "linear")
            axes.grid(alpha=0.25)
    figure.suptitle(title)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _line(axes, method: str, histories: Sequence[Rows], name: str, cost: str, unit: float) -> None:
    if column(histories[0], "finished")[-1:] == 1:  # what comes before a last step is not what a client would use
        histories = [[row for row in rows if row["finished"]] for rows in histories]
    x = np.mean([column(rows, cost) for rows in histories], axis=0) / unit
    y = np.array([deployed(rows, name) for rows in histories])
    there = ~np.isnan(y).any(axis=0)
    if not there.any():
        return
    x, y = x[there], y[:, there]
    ours = method.startswith("perm")
    style = {
        "label": method,
        "color": COLOURS.get(method),
        "linewidth": 2.2 if ours else 1.3,
        "zorder": 3 if ours else 2,
    }
    if x[-1] == 0:
        axes.axhline(y[:, -1].mean(), linestyle="--", **style)
        return
    axes.plot(x, y.mean(0), marker="o" if len(x) == 1 else None, **style)
    if len(y) > 1:
        spread = y.std(0, ddof=1)
        axes.fill_between(x, y.mean(0) - spread, y.mean(0) + spread, color=style["color"], alpha=0.2, linewidth=0)


def _number(value: Any) -> float:
    return float("nan") if value is None or value == "" else float(value)
