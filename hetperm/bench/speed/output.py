"""The figures of a benchmark as tables and as a picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hetperm.report.grid import Grid, markdown

Results = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Any]]


def tables(results: Results) -> str:
    """All figures as tables in Markdown, below the command that took them."""
    machine = results["machine"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}; "
        f"{results['taken']}. Wall seconds; a ratio is the median of {results['runs']} runs, followed by the smallest "
        "and the largest.",
    ]
    for part, (title, header, words, rows) in TABLES.items():
        if part in results:
            grid = Grid(header, list(rows(results[part])))
            lines += ["", f"**{title}**", "", markdown(grid, words=words).rstrip("\n")]
    return "\n".join(lines) + "\n"


# Rows of the tables, one function for each part of the benchmark


def _workloads(rows: Rows) -> Iterator[list[str]]:
    for name, row in rows.items():
        if "skipped" in row:
            yield [name, row["about"], row["skipped"], *[""] * 5]
        else:
            yield [*_work(name, row), *_seconds(row, "bare", "round"), _spread(row, "ratio_to_bare")]


def _hetero(rows: Rows) -> Iterator[list[str]]:
    for name, row in rows.items():
        if "skipped" in row:
            yield [name, row["about"], row["skipped"], *[""] * 6]
        else:
            count = f"{row['tasks']} ({row['steps']} steps)"
            yield [*_work(name, row), count, *_seconds(row, "bare", "epoch"), _spread(row, "ratio_to_bare")]


def _engines(rows: Rows) -> Iterator[list[str]]:
    for name, row in rows.items():
        if "skipped" in row:
            yield [name, row["skipped"], *[""] * 5]
        else:
            task = [1e3 * seconds for seconds in (row["task_seconds"], *row["tasks_seconds"])]
            spread = f"{task[0]:.3g} ({min(task):.3g} to {max(task):.3g})"
            yield [
                name,
                row["size"],
                str(row["cores"]),
                spread,
                *_seconds(row, "bare", "round"),
                _spread(row, "ratio_to_bare"),
            ]


def _peers(rows: Rows) -> Iterator[list[str]]:
    for name, peer in rows.items():
        if "skipped" in peer:
            yield [name, peer["skipped"], "", "", ""]
        for workload, row in peer.get("workloads", {}).items():
            if "skipped" in row:
                yield [name, f"{workload}: {row['skipped']}", "", "", ""]
            else:
                yield [name, workload, *_seconds(row, "bare", "round"), _spread(row, "ratio_to_bare")]


def _perm_rounds(rows: Rows) -> Iterator[list[str]]:
    for name, row in rows.items():
        yield [*_work(name, row), *_seconds(row, "fedavg", "visits"), _spread(row, "ratio_to_fedavg")]


def _epochs(rows: Rows) -> Iterator[list[str]]:
    for row in rows.values():
        visits = f"{row['visits']} of {row['literal_visits']}"
        accuracies = f"{row['accuracy']:.4f} / {row['literal_accuracy']:.4f}"
        speedup = _spread(row, "speedup", "speedups")
        yield [row["about"], *_size(row), visits, *_seconds(row, "literal", "perm"), speedup, accuracies]


def _alpha(row: Mapping[str, Any]) -> Iterator[list[str]]:
    share = _spread(row, "share_of_epoch", "shares")
    yield [row["about"], row["size"], str(row["local_steps"]), *_seconds(row, "alpha", "visits"), share]


def _scaling(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        memory = [row["peak_mb"], row["peak_mb"] - row["imports_mb"], row["models_mb"]]
        yield [
            str(row["num_clients"]),
            row["engine"],
            f"{row['partners']:.1f}",
            _s(row["seconds"]),
            *(f"{mb:.0f}" for mb in memory),
            row["alpha"],
        ]


def _train(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, median in row["phases"].items():
        single = [one[name] for one in row["single"]]
        yield [name, f"{median:.2f} ({min(single):.2f} to {max(single):.2f})", f"{median / row['phases']['total']:.0%}"]


def _work(name: str, row: Mapping[str, Any]) -> list[str]:
    return [name, row["about"], *_size(row)]


def _size(row: Mapping[str, Any]) -> list[str]:
    return [row["size"], row["engine"], str(row["cores"])]


def _seconds(row: Mapping[str, Any], *sides: str) -> list[str]:
    return [_s(row[f"{side}_seconds"]) for side in sides]


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


def _spread(row: Mapping[str, Any], ratio: str, single: str = "ratios") -> str:
    return f"{row[ratio]:.3g} ({min(row[single]):.3g} to {max(row[single]):.3g})"


# Part of the benchmark -> the title of its table, its header, how many columns hold words, and its rows
TABLES: dict[str, tuple[str, Sequence[str], int, Callable[[Any], Iterator[list[str]]]]] = {
    "workloads": (
        "A FedAvg round against a bare torch loop of the same steps on one core",
        ("", "model", "size", "engine", "cores", "bare loop, s", "FedAvg round, s", "times faster"),
        4,
        _workloads,
    ),
    "hetero": (
        "W5: an epoch of PERM with models of five sizes (visits, global step, alpha anew) against its bare steps",
        ("", "model", "size", "engine", "cores", "tasks", "bare steps, s", "epoch, s", "times faster"),
        4,
        _hetero,
    ),
    "engines": (
        "Engines: a task of one small step, and a round of W3 on two workers against a bare torch loop on one core",
        ("engine", "round", "workers", "a small task, ms", "bare loop, s", "FedAvg round, s", "times faster"),
        2,
        _engines,
    ),
    "peers": (
        "The same rounds by other frameworks, one core",
        ("peer", "workload", "bare loop, s", "its round, s", "times faster than bare"),
        2,
        _peers,
    ),
    "perm_rounds": (
        "A round of PERM's visits against a FedAvg round of as many steps",
        ("", "model", "size", "engine", "cores", "FedAvg round, s", "round of visits, s", "visits / FedAvg"),
        4,
        _perm_rounds,
    ),
    "epochs": (
        "A PERM epoch against the paper's literal one; alpha excluded",
        (
            *("data", "clients", "engine", "cores", "visits", "literal epoch, s", "PERM epoch, s", "times faster"),
            "accuracy / literal",
        ),
        3,
        _epochs,
    ),
    "alpha": (
        "What alpha costs",
        ("data", "clients", "K", "estimate, s", "visits, s", "share of the epoch"),
        2,
        _alpha,
    ),
    "scaling": (
        "An epoch of more and more clients in groups of ten (MLP, one core, a process each)",
        ("clients", "engine", "partners", "epoch, s", "peak, MB", "above imports, MB", "models, MB", "alpha"),
        2,
        _scaling,
    ),
    "train": (
        "The main job (`make train`) from the start of the interpreter to its end, by phase",
        ("phase", "s", "share"),
        1,
        _train,
    ),
}


# The picture

OURS, THEIRS, PALE = "#D55E00", "#56B4E9", "#999999"


def picture(results: Results) -> Figure | None:
    """Bars of how much faster rounds and epochs are, and curves over the number of clients; None if none was timed."""
    drawn = [
        (draw, results[part])
        for part, draw in (("workloads", _bare_bars), ("epochs", _literal_bars), ("scaling", _curves))
        if part in results
    ]
    if not drawn:
        return None
    figure = Figure(figsize=(4.6 * len(drawn) + 0.6, 3.9), layout="constrained")
    for axes, (draw, figures) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn):
        draw(axes, figures, results)
    return figure


def _bare_bars(axes, rows: Rows, results: Results) -> None:
    bars = [(name, row, OURS) for name, row in rows.items() if "ratio_to_bare" in row]
    for name, peer in results.get("peers", {}).items():
        bars += [(f"{name} {workload}", row, THEIRS) for workload, row in peer.get("workloads", {}).items()]
    # What was skipped has a reason in place of a ratio.
    bars = [(name, row, colour) for name, row, colour in bars if "ratio_to_bare" in row]
    _bars(axes, [(name, row["ratio_to_bare"], row["ratios"], colour) for name, row, colour in bars])
    axes.set(title="a FedAvg round", ylabel="times faster than a bare torch loop", yscale="log")


def _literal_bars(axes, rows: Rows, results: Results) -> None:
    _bars(axes, [(name, row["speedup"], row["speedups"], OURS) for name, row in rows.items()])
    axes.set(title="a PERM epoch", ylabel="times faster than the literal epoch")


def _bars(axes, bars: Sequence[tuple[str, float, Sequence[float], str]]) -> None:
    for k, (_, height, single, colour) in enumerate(bars):
        # From the slowest run to the fastest, which need not lie evenly about the median.
        spread = [[height - min(single)], [max(single) - height]]
        axes.bar(k, height, color=colour, yerr=spread, capsize=3)
        axes.annotate(f"{height:.3g}", (k, max(single)), xytext=(0, 3), textcoords="offset points", ha="center")
    # As fast as what it is compared with.
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], rotation=30, ha="right")
    axes.margins(y=0.15)


def _curves(axes, rows: Sequence[Mapping[str, Any]], results: Results) -> None:
    N = [row["num_clients"] for row in rows]
    axes.plot(N, [row["seconds"] for row in rows], marker="o", color=OURS, label="time, s")
    memory = [row["peak_mb"] - row["imports_mb"] for row in rows]
    axes.plot(N, memory, marker="s", color=THEIRS, label="peak memory, MB")
    axes.plot(N, [row["models_mb"] for row in rows], linestyle="--", color=PALE, label="personal models, MB")
    axes.set(title="an epoch, groups of ten", xlabel="clients", xscale="log", yscale="log")
    axes.set_xticks(N, N, minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25)
    axes.legend()
