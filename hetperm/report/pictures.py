"""Pictures of a run: who learns from whom, the metric by tier, and the metric against cost."""

import io
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hetperm.report import tables
from hetperm.report.summary import Rows, Summary, Tier, deployed, method_column

# A method has one colour in every picture. The first are Okabe and Ito's, which colour-blind readers can tell apart;
# there are not enough of them, so methods that slice one global model also have dash-dotted lines and hatched bars.
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
    "ditto": "#6B4A3A",
    "fedrep": "#22AA22",
    "heterofl": "#B39DDB",
    "heterofl-ft": "#6A3D9A",
    "heterofl-clustered": "#DD55DD",
    "heterofl-clustered-ft": "#2233CC",
    "fedrolex": "#8BC34A",
    "fedrolex-ft": "#33691E",
    "feddropout": "#FF9E9E",
    "feddropout-ft": "#C2185B",
    "fjord": "#5FD3C4",
    "fjord-ft": "#12355B",
}
LARGEST_MAP = 400  # clients up to which a map shows every mixing weight; with more it shows means of neighbours
BINS = 200  # rows of a map of more clients
LEGEND = 5  # tiers in a line of the map's legend
SLICING = ("ditto", "fedrep", "heterofl", "heterofl-clustered", "fedrolex", "feddropout", "fjord")  # and with -ft


def png(figure: Figure) -> bytes:
    """The figure as a PNG file, with the same bytes for the same figure."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        # The name of a tier may have letters that the font lacks: they are boxes in the picture, and right on the page.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})  # the version of matplotlib stays out
    return file.getvalue()


# Who learns from whom


def order(
    alpha: np.ndarray,
    groups: Sequence[int] | None = None,
    tiers: Sequence[str] | None = None,
    *,
    largest_first: Sequence[str] = (),
) -> np.ndarray:
    """(N,) clients in an order that shows the structure of alpha: by group if groups are known, else by `clustered`.

    Args:
        tiers: the tier of each client; clients of a group are ordered by it.
        largest_first: the names of the tiers, largest first; tiers that are missing here come last.

    Example:
        >>> order(np.eye(4), groups=[1, 0, 1, 0]).tolist()
        [1, 3, 0, 2]
        >>> order(np.eye(4), [1, 0, 1, 0], ["small", "small", "large", "large"], largest_first=["large"]).tolist()
        [3, 1, 2, 0]
    """
    if groups is None:
        return clustered(alpha)
    rank = _ranks(tiers, largest_first) if tiers is not None else np.zeros(len(groups))
    return np.lexsort((rank, groups))


def _ranks(tiers: Sequence[str], largest_first: Sequence[str]) -> np.ndarray:
    """(N,) the rank of each client's tier, 0 for the largest."""
    names = list(dict.fromkeys([*largest_first, *tiers]))
    return np.array([names.index(tier) for tier in tiers])


def clustered(alpha: np.ndarray) -> np.ndarray:
    """(N,) clients ordered by cluster, so that clients who learn from each other stand side by side.

    Average linkage builds a tree from the clients' rows of the symmetrised weights. Its leaves are then ordered so that
    neighbours are as alike as possible.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage

    # linkage refuses a single client, and two need no order.
    if len(alpha) < 3:
        return np.arange(len(alpha))
    weights = (alpha + alpha.T) / 2
    np.fill_diagonal(weights, weights.max(axis=1))  # how much a client trusts itself does not tell clusters apart
    # The best order of the leaves is slow to find; with many clients, any order of the tree has to do.
    return leaves_list(linkage(weights, method="average", optimal_ordering=len(alpha) <= 500))


def alpha_map(
    alpha: np.ndarray,
    groups: Sequence[int] | None,
    *,
    title: str,
    tiers: Sequence[str] | None = None,
    largest_first: Sequence[str] = (),
) -> Figure:
    """The mixing weights as a heat map: row i is client i, column j whom it learns from.

    Args:
        groups: the group of each client, if known: clients are ordered by it, and lines separate the groups.
        tiers: the tier of each client: a strip beside the map, dark for large, and faint lines within a group.
        largest_first: the names of the tiers, largest first.
    """
    stripes = tiers is not None and len(set(tiers)) > 1
    lines = math.ceil(len(set(tiers)) / LEGEND) if stripes else 0  # of the legend, below the map
    figure, axes, scale = _square(below=0.8 + 0.25 * stripes + 0.2 * lines, beside=0.25 * stripes)
    at = order(alpha, groups, tiers, largest_first=largest_first)
    image = axes.imshow(alpha[np.ix_(at, at)], cmap="viridis", vmin=0, interpolation="nearest")
    figure.colorbar(image, cax=scale, label="mixing weight")
    by = "similarity" if groups is None else "group, then tier" if stripes else "group"
    axes.set(xlabel=f"host j (ordered by {by})", ylabel=f"client i (ordered by {by})")
    axes.set_title(_plain(title), pad=24 if stripes else 8)
    # The numbers of more clients would overlap.
    numbers = at.tolist() if len(at) <= 30 else []
    axes.set_xticks(range(len(numbers)), numbers, fontsize=7, rotation=90)
    axes.set_yticks(range(len(numbers)), numbers, fontsize=7)
    if stripes:
        rank = _ranks(tiers, largest_first)[at]
        # Clients that are ordered by similarity have their tiers mixed: lines between tiers would be everywhere.
        if groups is not None:
            _separate(axes, rank, linewidth=0.5, alpha=0.5)
        _tier_strips(figure, axes, rank, list(dict.fromkeys([*largest_first, *tiers])))
    if groups is not None:
        _separate(axes, np.asarray(groups)[at], linewidth=1.8)
        _name_groups(axes, np.asarray(groups)[at], pad=20 if numbers else 3)
    return figure


def neighbour_map(
    weights: tuple[np.ndarray, np.ndarray, np.ndarray],
    groups: Sequence[int] | None,
    *,
    title: str,
    tiers: Sequence[str],
    largest_first: Sequence[str] = (),
) -> Figure:
    """The mixing weights of very many clients: a point is the mean over neighbours, in the order of groups if known.

    Args:
        weights: (K,) clients, hosts and weights that are not zero.
        groups: the group of each client, if known.
        tiers: the tier of each client, which orders those of a group.
        largest_first: the names of the tiers, largest first.
    """
    at = np.arange(len(tiers)) if groups is None else order(np.empty(0), groups, tiers, largest_first=largest_first)
    means, size = between_neighbours(weights, at)
    figure, axes, scale = _square(below=0.8, beside=0.0)
    edges = (-0.5, len(at) - 0.5)
    image = axes.imshow(means, cmap="viridis", vmin=0, interpolation="nearest", extent=(*edges, *edges[::-1]))
    figure.colorbar(image, cax=scale, label=f"mixing weight of {size} neighbours together")
    by = "" if groups is None else " (ordered by group)"
    axes.set(xlabel=f"host j{by}", ylabel=f"client i{by}")
    axes.set_title(_plain(title), pad=8)
    return figure


def between_neighbours(
    weights: tuple[np.ndarray, np.ndarray, np.ndarray], at: np.ndarray, bins: int = BINS
) -> tuple[np.ndarray, int]:
    """(B, B) the mean weight that neighbours give to neighbours, B at most ``bins``, and how many are neighbours.

    Args:
        weights: (K,) clients, hosts and weights that are not zero.
        at: (N,) the clients in order.

    Example:
        >>> i = j = np.arange(4)
        >>> between_neighbours((i, j, np.ones(4)), np.array([0, 2, 1, 3]), bins=2)[0].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    i, j, values = weights
    size = math.ceil(len(at) / bins)
    bin_of = np.empty(len(at), dtype=int)
    bin_of[at] = np.arange(len(at)) // size
    count = int(bin_of.max()) + 1
    total = np.zeros((count, count))
    np.add.at(total, (bin_of[i], bin_of[j]), values)
    # Mean over the clients of a row of what all clients of a column give: rows still sum to one.
    return total / np.bincount(bin_of, minlength=count)[:, None], size


def _square(*, below: float, beside: float) -> tuple[Figure, Any, Any]:
    """A figure, its square panel and its colour scale; `below` and `beside` are inches of room around the panel."""
    # Placed by hand: matplotlib's layout engines do not know how far a square panel shrinks.
    left, above, side = 0.95, 0.4 + beside, 4.9
    width, height = left + side + beside + 1.2, below + side + above
    figure = Figure(figsize=(width, height))
    panel = figure.add_axes((left / width, below / height, side / width, side / height))
    scale_left = left + side + beside + 0.2
    scale = figure.add_axes((scale_left / width, below / height, 0.18 / width, side / height))
    return figure, panel, scale


def _separate(axes, labels: np.ndarray, **style) -> None:
    """Draw white lines between neighbours on the map that have different labels."""
    for edge in np.flatnonzero(labels[1:] != labels[:-1]) + 0.5:
        axes.axhline(edge, color="white", **style)
        axes.axvline(edge, color="white", **style)


def _name_groups(axes, groups: np.ndarray, *, pad: float) -> None:
    """Write each group's name in the middle of its clients, unless there are too many names."""
    labels, first, count = np.unique(groups, return_index=True, return_counts=True)
    if len(labels) > 10:
        return
    middle, names = first + (count - 1) / 2, [f"group {label}" for label in labels]
    # Minor ticks: the major ones carry the numbers of the clients.
    axes.set_xticks(middle, names, minor=True, fontsize=8)
    axes.set_yticks(middle, names, minor=True, fontsize=8, rotation=90, verticalalignment="center")
    axes.tick_params(which="minor", length=0, pad=pad)


def _tier_strips(figure: Figure, axes, rank: np.ndarray, names: Sequence[str]) -> None:
    """Draw strips above and beside the map, shaded by the tier of each client."""
    # Not down to 0, which is white and would vanish on the page.
    shades = colormaps["Greys"](np.linspace(1, 0.15, len(names)))
    # Half a rank beyond both ends puts every rank in the middle of its own shade.
    style = {"cmap": ListedColormap(shades), "vmin": -0.5, "vmax": len(names) - 0.5, "aspect": "auto"}
    for box, shown in (((1.015, 0, 0.03, 1), rank[:, None]), ((0, 1.015, 1, 0.03), rank[None])):
        strip = axes.inset_axes(box)
        strip.imshow(shown, interpolation="nearest", **style)
        strip.set(xticks=[], yticks=[])
    handles = [Patch(facecolor=shades[k], edgecolor="black", label=_plain(names[k])) for k in np.unique(rank)]
    figure.legend(handles=handles, title="tier", loc="lower center", ncols=LEGEND, fontsize=8, title_fontsize=8)


# How much to share


def look_ahead(shares: Sequence[float], losses: np.ndarray, chosen: int, *, title: str = "") -> Figure:
    """The loss one step ahead against how much difference is shared, as a difference to sharing nothing.

    Args:
        shares: (C,) the candidates.
        losses: (C, M) the loss of each client.
        chosen: the position of the candidate that was taken.
    """
    gain = losses - losses[:1]
    mean, error = gain.mean(1), gain.std(1) / np.sqrt(losses.shape[1])
    x = np.arange(len(shares))
    figure = Figure(figsize=(6.0, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(x, mean - error, mean + error, alpha=0.2, linewidth=0)
    axes.plot(x, mean, marker="o", markersize=4)
    axes.plot(x[chosen], mean[chosen], marker="o", markersize=10, markerfacecolor="none", color="black", linestyle="")
    labels = ["alone" if share == 0 else "all" if share >= tables.EVERYBODY else f"{share:g}" for share in shares]
    axes.set_xticks(x, labels, fontsize=8)
    axes.set(title=_plain(title), xlabel="difference worth sharing, in units of noise")
    axes.set_ylabel("loss one step ahead, minus alone")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# The metric by tier


def tiers(summary: Summary, clients: Rows = (), *, title: str = "") -> Figure:
    """The metric by tier, the largest first: a bar with its spread for each method.

    Args:
        summary: of one run, or of several seeds.
        clients: rows of clients.csv; bars of a single run show the standard deviation over a tier's clients.
    """
    methods, names = summary.methods, summary.tier_names
    labels = [_tier_label(summary, tier) for tier in names]
    height = np.array([[_number(method.tiers[tier].score) for tier in names] for method in methods.values()])
    spread = np.array([[_tier_spread(summary, clients, method, tier) for tier in names] for method in methods])
    longest = max(len(line) for label in labels for line in label.splitlines())
    room = max(0.22 * len(methods) + 0.3, 0.075 * longest)  # inches a tier takes: its bars, or its name
    figure = Figure(figsize=(min(max(5.0, 2.4 + room * len(names)), 13.0), 4.2), layout="constrained")
    axes = figure.subplots()
    low, high = _range(height, spread)
    share = 0.84 / len(methods)  # of the room from one tier to the next
    for k, method in enumerate(methods):
        x = np.arange(len(names)) + (k - (len(methods) - 1) / 2) * share
        label = f"{method} (diverged)" if methods[method].diverged and np.isnan(height[k]).all() else method
        _bars(axes, method, x, height[k], spread[k], width=share * 0.92, label=label)
        if len(methods) <= 5:  # more bars are too narrow to read a number on
            _numbers(axes, x, height[k], height[k] + np.nan_to_num(spread[k]))
    axes.set_xticks(range(len(names)), labels, fontsize=8)
    axes.set(ylim=(low, high), xlim=(-0.5, len(names) - 0.5), title=_plain(title))
    axes.set_ylabel(f"test {_plain(summary.scored_by)}")
    if np.isfinite(spread).any():
        over = "seeds" if summary.seeds else "clients of the tier"
        axes.set_xlabel(f"error bars: standard deviation over {over}", fontsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def _bars(
    axes, method: str, x: np.ndarray, height: np.ndarray, spread: np.ndarray, *, width: float, label: str
) -> None:
    """Draw a method's bar in every tier, with its spread."""
    style = {"color": COLOURS.get(method), "hatch": "///" if _slices(method) else None, "label": label}
    axes.bar(x, height, width, edgecolor="white", linewidth=0.5, **style)
    axes.errorbar(x, height, spread, fmt="none", ecolor="#7F7F7F", elinewidth=1.2, capsize=2)


def _numbers(axes, x: np.ndarray, height: np.ndarray, top: np.ndarray) -> None:
    """Write the height of every bar above its top."""
    for k in np.flatnonzero(~np.isnan(height)):
        text = f"{height[k]:.2f}".removeprefix("0")
        axes.annotate(text, (x[k], top[k]), (0, 2), textcoords="offset points", ha="center", size=7)


def _tier_label(summary: Summary, tier: str) -> str:
    entry = summary.widest(tier)
    count = tables.cell("clients", entry.clients)
    return f"{_plain(tier)}\nwidth {tables.width_text(entry.width)}\n{count} {'client' if count == '1' else 'clients'}"


def _tier_spread(summary: Summary, clients: Rows, method: str, tier: str) -> float:
    """The standard deviation of a tier's metric over seeds, or over its clients in a single run; nan if unknown."""
    if summary.seeds:
        return _number(summary.spread_of(method).tiers.get(tier, Tier()).score)
    values = column([row for row in clients if str(row["tier"]) == tier], method_column(summary, method))
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def _range(height: np.ndarray, spread: np.ndarray) -> tuple[float, float]:
    """Both ends of the axis of bars: it holds zero, where bars start, and has room for numbers at the top."""
    low, high = (height + sign * np.nan_to_num(spread) for sign in (-1, 1))
    if np.isnan(low).all():
        return 0.0, 1.0
    # A metric may be negative, an accuracy may not, whatever its spread.
    floor = 0.0 if np.nanmin(height) >= 0 else float(np.nanmin(low))
    top = max(float(np.nanmax(high)), floor + 0.1, 0.0)
    return floor, top + 0.06 * (top - floor)


def _slices(method: str) -> bool:
    return method.removesuffix("-ft") in SLICING


def _plain(text: str) -> str:
    """The text with dollar signs escaped, which matplotlib would otherwise read as the start of a formula."""
    return text.replace("$", r"\$")


# The metric against cost


def column(rows: Rows, name: str) -> np.ndarray:
    """(epochs,) a column of a history; nan for empty cells."""
    return np.array([_number(row.get(name)) for row in rows])


def spent(rows: Rows, cost: str) -> np.ndarray:
    """(epochs,) the cost so far: a column of a history, or "bytes", the sum of those down and up."""
    if cost == "bytes":
        return column(rows, "bytes_down") + column(rows, "bytes_up")
    return column(rows, cost)


def curves(
    runs: Mapping[str, Sequence[Rows]],
    *,
    figures: Sequence[tuple[str, str]],
    against: Sequence[tuple[str, str, float]],
    strong: Collection[str] = (),
    title: str = "",
) -> Figure:
    """A line for each method, with the spread over seeds as a band.

    A row of panels per cost and a column per figure; if there is one figure, its panels stand side by side.

    Args:
        runs: method -> one history per seed.
        figures: (column of the metrics, label); losses are on a logarithmic scale.
        against: (column of the metrics or "bytes", label, size of one unit): the cost so far. A method that has no such
            cost is a dashed line at its final value.
        strong: the methods whose lines are thick and lie above the others.
    """
    rows, columns = (1, len(against)) if len(figures) == 1 else (len(against), len(figures))
    figure = Figure(figsize=(4.6 * columns + 1.6, 3.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey="row" if len(figures) == 1 else False)
    pairs = [(cost, shown) for cost in against for shown in figures]
    for axes, ((cost, cost_label, unit), (name, label)) in zip(panels.flat, pairs):
        for method, histories in runs.items():
            emphasis = {"linewidth": 2.2, "zorder": 3} if method in strong else {"linewidth": 1.3, "zorder": 2}
            _line(axes, method, _points(histories, name, cost, unit), emphasis)
        axes.set(xlabel=cost_label, yscale="log" if "loss" in name else "linear")
        # Panels side by side share the axis, so the first label serves all.
        if len(figures) > 1 or axes is panels[0][0]:
            axes.set_ylabel(label)
        axes.grid(alpha=0.25)
    figure.suptitle(_plain(title))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _points(histories: Sequence[Rows], name: str, cost: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """(points,) the cost so far, mean over seeds, and (seeds, points) the figure, at the points that every seed has."""
    # A method that is fine-tuned at the end is only worth showing with it: that is what a client would use.
    if any(column(histories[0], "finished")[-1:] == 1):
        histories = [[row for row in rows if row["finished"]] for rows in histories]
    # Histories of a method that diverged with every seed end at different epochs.
    shortest = min(map(len, histories))
    histories = [rows[:shortest] for rows in histories]
    x = np.mean([spent(rows, cost) for rows in histories], axis=0) / unit
    y = np.array([[_number(deployed(row, name)) for row in rows] for rows in histories])
    scored = ~np.isnan(y).any(axis=0)
    return x[scored], y[:, scored]


def _line(axes, method: str, points: tuple[np.ndarray, np.ndarray], emphasis: Mapping[str, float]) -> None:
    """Draw a method's mean over seeds with the spread: a band, or an error bar where there is a single point."""
    x, y = points
    if not len(x):
        return
    style = {"label": method, "color": COLOURS.get(method), "linestyle": "-." if _slices(method) else "-", **emphasis}
    if x[-1] == 0:  # its curve would be a single vertical line at zero
        axes.axhline(y[:, -1].mean(), **{**style, "linestyle": "--"})
        return
    axes.plot(x, y.mean(0), marker="o" if len(x) == 1 else None, **style)
    if len(y) > 1:
        spread = y.std(0, ddof=1)
        if len(x) == 1:
            axes.errorbar(x, y.mean(0), spread, fmt="none", ecolor=style["color"], capsize=3)
        axes.fill_between(x, y.mean(0) - spread, y.mean(0) + spread, color=style["color"], alpha=0.2, linewidth=0)


def _number(value: Any) -> float:
    return float("nan") if value is None or value == "" else float(value)
