"""Pictures over settings and seeds: differences with their intervals, and figures against the number of clients."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from hetperm.report.paired import Difference
from hetperm.report.summary import Rows

SHADES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")  # Okabe and Ito's


def forest(
    labels: Sequence[str], series: Mapping[str, Sequence[Difference | None]], *, title: str, axis: str
) -> Figure:
    """A line per label from top to bottom: every series a dot with its interval, and zero marked.

    Args:
        series: name -> one difference per label; None is left out.
        axis: what is to the right of zero.
    """
    figure = Figure(figsize=(7.2, 1.3 + 0.34 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for k, (name, differences) in enumerate(series.items()):
        offset = (k - (len(series) - 1) / 2) * 0.7 / max(1, len(series))
        at = [y for y, each in enumerate(differences) if each is not None]
        known = [differences[y] for y in at]
        x = np.array([each.mean for each in known])
        # Without an interval, with one seed, the dot stands alone.
        half = np.array([0.0 if each.high is None else each.high - each.mean for each in known])
        style = {"fmt": "o", "markersize": 4, "capsize": 2, "color": SHADES[k % len(SHADES)]}
        axes.errorbar(x, np.array(at) + offset, xerr=half, label=name, **style)
    axes.axvline(0, color="#7F7F7F", linewidth=1)
    axes.set_yticks(range(len(labels)), [label.replace("$", r"\$") for label in labels], fontsize=8)
    axes.set(ylim=(len(labels) - 0.5, -0.5), xlabel=axis, title=title)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        figure.legend(loc="outside lower center", ncols=len(series), fontsize=8)
    return figure


def against_clients(rows: Rows, figures: Mapping[str, str], *, title: str) -> Figure:
    """A panel per figure against the number of clients, with the spread over seeds as error bars.

    Args:
        rows: the figures of `comparison.mixing_table`.
        figures: column -> its label.
    """
    figure = Figure(figsize=(3.6 * len(figures) + 0.6, 3.2), layout="constrained")
    for axes, (name, label) in zip(figure.subplots(1, len(figures), squeeze=False)[0], figures.items()):
        x = [row["num_clients"] for row in rows]
        spread = [row.get(f"{name}_spread") or 0.0 for row in rows]
        axes.errorbar(x, [row[name] for row in rows], yerr=spread, fmt="o-", capsize=3, color=SHADES[0])
        axes.set(xlabel="clients", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(x, [f"{n:,}" for n in x])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    figure.suptitle(title)
    return figure


def side_by_side(rows: Rows, *, title: str) -> Figure:
    """Seconds of a round over those of the first method, a group of bars per model.

    Args:
        rows: the figures of `comparison.runtime_table`.
    """
    from hetperm.report.pictures import COLOURS

    cases, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("setting", "method"))
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(methods)
    for k, name in enumerate(methods):
        heights = [
            next(row["ratio"] for row in rows if (row["setting"], row["method"]) == (case, name)) for case in cases
        ]
        x = np.arange(len(cases)) + (k - (len(methods) - 1) / 2) * width
        axes.bar_label(axes.bar(x, heights, width * 0.92, label=name, color=COLOURS.get(name)), fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(cases)), cases)
    axes.set(ylabel=f"seconds of a round over those of {methods[0]}", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    return figure
