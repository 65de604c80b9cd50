"""The table, sentences and pictures of the device benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hetperm.report import pictures, tables
from hetperm.report.grid import Grid, transposed
from hetperm.report.summary import is_blank
from hetperm.runs.memory import MB

Rows = Sequence[Mapping[str, Any]]

# key of a row -> its name in the table
LINES = {
    "tier": "tier",
    "width": "width",
    "params": "parameters",
    "mmacs": "MMACs, forward, a sample",
    "predicted_mb": "predicted MB",
    "measured_mb": "measured MB",
    "budget_mb": "budget MB",
    "limit_mb": "limit MB, with slack",
    "step_ms": "step ms, one thread",
    "device_step_ms": "step ms x slow factor",
    "down_mb": "MB down a visit",
    "up_mb": "MB up a visit",
    "visit_seconds": "simulated s a visit",
    "own": "under its limit",
    "above": "next width there",
    "verdict": "verdict",
}


def grid(rows: Rows, *, title: str = "") -> Grid:
    """The table, a column for every tier; the next larger width is named with how it ended."""
    lines = []
    for row in rows:
        above = "-" if is_blank(row["wider"]) else f"{tables.width_text(row['wider'])} {row['above'] or 'not run'}"
        lines.append([tables.cell(key, above if key == "above" else row[key]) for key in LINES])
    return transposed(Grid(list(LINES.values()), lines, title=title))


def sentences(result: Mapping[str, Any]) -> list[str]:
    """The findings of the benchmark, one line each."""
    rows = result["tiers"]
    lines = [result["enforcement"], result["limit"]]
    lines += [f"tier {row['tier']}: {row['verdict']}: {row['reason']}" for row in rows if row["reason"]]
    tried = [row for row in rows if row["above"]]
    if tried:
        stopped = [row for row in tried if row["above"] != "finished"]
        lines.append(
            f"the next larger width was stopped in {len(stopped)} of the {len(tried)} tiers that have one "
            "(killed, or refused memory)"
        )
    ran = result.get("federated")
    if ran:
        tasks = ", ".join(f"{tier} {count}" for tier, count in ran["tasks"].items())
        if not ran["completed"]:
            lines.append(f"hetero-PERM under limits stopped: {ran['reason']}")
        else:
            kind = "the same numbers, bit by bit, as" if ran["same"] else "OTHER NUMBERS than"
            lines.append(
                f"hetero-PERM under limits: {ran['epochs']} epochs with one client a tier, every task in a process "
                f"under its host's limit (tasks: {tasks}); {kind} without limits"
            )
    if result.get("to_reach"):
        reach = result["to_reach"]
        prices = [
            f"{method} {point['seconds']:,.0f} s and {point['bytes'] / MB:,.0f} MB" if point else f"{method} never"
            for method, point in reach["methods"].items()
        ]
        lines.append(f"simulated time and traffic to an accuracy of {reach['accuracy']:.2f}: {'; '.join(prices)}")
    return lines


# Pictures


def picture(rows: Rows, curves: Rows, *, title: str) -> Figure:
    """Memory, multiply-adds, time and accuracy against width, with the budgets of the tiers drawn in."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    memory, macs, time, accuracy = figure.subplots(2, 2).flat
    rows = sorted(rows, key=lambda row: row["width"])
    width = np.array([row["width"] for row in rows])
    memory.plot(width, pictures.column(rows, "predicted_mb"), color="#0072B2", label="predicted")
    memory.plot(width, pictures.column(rows, "measured_mb"), "o", color="#D55E00", label="measured, above the baseline")
    _budgets(memory, rows, "budget_mb", "budget of the tier")
    limits = pictures.column(rows, "limit_mb")
    memory.plot(width, limits, "_", color="#000000", markersize=14, label="enforced limit (budget + slack)")
    memory.set(ylabel="peak training memory (MB)", yscale="log")
    memory.margins(x=0.12)  # room for the numbers of budgets
    macs.plot(width, pictures.column(rows, "mmacs"), "o-", color="#0072B2", label="forward pass of a sample")
    _budgets(macs, rows, "budget_mmacs", "budget of the tier")
    macs.set(ylabel="million multiply-adds", yscale="log")
    time.plot(width, pictures.column(rows, "visit_seconds"), "o-", color="#D55E00", label="visit, simulated")
    steps = pictures.column(rows, "device_step_ms") / 1000
    time.plot(width, steps, "s--", color="#009E73", label="step on one thread x slow factor")
    time.set(ylabel="seconds", yscale="log")
    for method in dict.fromkeys(row["method"] for row in curves):
        last = [row for row in curves if row["method"] == method][-1]
        scores = [last.get(f"accuracy_{row['tier']}") for row in rows]
        at = [k for k, value in enumerate(scores) if not is_blank(value)]  # tiers may have no clients
        colour = pictures.COLOURS.get(method)
        accuracy.plot(width[at], [scores[k] for k in at], "o-", color=colour, label=method)
    accuracy.set(ylabel="test accuracy, mean over the tier's clients")
    if not curves:
        accuracy.text(0.5, 0.5, "not trained", transform=accuracy.transAxes, ha="center")
    # Tiers of the same width share a tick.
    names: dict[float, list[str]] = {}
    for row in rows:
        names.setdefault(row["width"], []).append(row["tier"])
    labels = ["\n".join([tables.width_text(label), *tiers]) for label, tiers in names.items()]
    for axes in (memory, macs, time, accuracy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(names), labels, fontsize=8)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("width, and the tier that trains it")
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title.replace("$", r"\$"))
    return figure


def _budgets(axes, rows: Rows, key: str, label: str) -> None:
    """Draw each tier's budget as a bar across its width."""
    for row in rows:
        if not is_blank(row.get(key)):
            axes.hlines(row[key], row["width"] / 1.35, row["width"] * 1.35, colors="#CC79A7", linewidth=3, label=label)
            axes.annotate(f"{row[key]:g}", (row["width"] * 1.38, row[key]), size=8, color="#CC79A7", va="center")
            label = None  # one entry in the legend is enough


def curve_picture(curves: Rows, *, title: str) -> Figure:
    """Accuracy against simulated time and against what was sent; a line for each method."""
    # In the form of histories of a run; every point shows a method as it would be deployed, so all are "finished".
    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for row in curves:
        point = {"accuracy_mean": row["accuracy"], "finished": 1, "seconds": row["seconds"], "sent": row["bytes"]}
        runs.setdefault(row["method"], [[]])[0].append(point)
    return pictures.curves(
        runs,
        figures=[("accuracy_mean", "test accuracy, mean over clients")],
        against=[("seconds", "simulated seconds", 1), ("sent", "MB sent, down and up", MB)],
        strong=list(runs)[:1],  # the algorithm; its rivals follow
        title=title,
    )
