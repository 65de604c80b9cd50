"""The figures of a benchmark as tables and as a picture."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hetperm.report.grid import Grid, markdown

Results = Mapping[str, Any]


def tables(results: Results) -> str:
    """Every figure that was taken, as tables in Markdown, under the command that took them."""
    machine = results["machine"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, torch {machine['torch']}; "
        f"{results['taken']}. Wall seconds; a ratio is the median of {results['runs']} runs, followed by the smallest "
        "and the largest.",
    ]
    parts = [f"\n**{grid.title}**\n\n{markdown(grid, words=words)}" for grid, words in _tables(results)]
    return "\n".join(lines) + "\n" + "".join(parts)


def _tables(results: Results) -> Iterator[tuple[Grid, int]]:
    """The table of each part that was run, and how many of its columns hold words."""
    if "workloads" in results:
        rows = [
            [*_what(name, row), _s(row["bare_seconds"]), _s(row["round_seconds"]), _spread(row, "ratio_to_bare")]
            if "ratio_to_bare" in row
            else [name, row["about"], row["skipped"], *[""] * 5]
            for name, row in results["workloads"].items()
        ]
        header = ("", "model", "size", "engine", "cores", "bare loop, s", "FedAvg round, s", "times faster")
        yield Grid(header, rows, title="A FedAvg round against a bare torch loop of the same steps on one core"), 4
    if "peers" in results:
        rows = []
        for name, peer in results["peers"].items():
            if "skipped" in peer:
                rows.append([name, peer["skipped"], "", "", ""])
            for workload, row in peer.get("workloads", {}).items():
                if "skipped" in row:
                    rows.append([name, f"{workload}: {row['skipped']}", "", "", ""])
                else:
                    seconds = [_s(row["bare_seconds"]), _s(row["round_seconds"])]
                    rows.append([name, workload, *seconds, _spread(row, "ratio_to_bare")])
        header = ("peer", "workload", "bare loop, s", "its round, s", "times faster than bare")
        yield Grid(header, rows, title="The same rounds by other frameworks, one core"), 2
    if "perm_rounds" in results:
        rows = [
            [*_what(name, row), _s(row["fedavg_seconds"]), _s(row["visits_seconds"]), _spread(row, "ratio_to_fedavg")]
            for name, row in results["perm_rounds"].items()
        ]
        header = ("", "model", "size", "engine", "cores", "FedAvg round, s", "round of visits, s", "visits / FedAvg")
        yield Grid(header, rows, title="A round of PERM's visits against a FedAvg round of as many steps"), 4
    if "epochs" in results:
        rows = [
            [
                row["about"],
                row["size"],
                row["engine"],
                str(row["cores"]),
                f"{row['visits']} of {row['literal_visits']}",
                _s(row["literal_seconds"]),
                _s(row["perm_seconds"]),
                _spread(row, "speedup", "speedups"),
                f"{row['accuracy']:.4f} / {row['literal_accuracy']:.4f}",
            ]
            for row in results["epochs"].values()
        ]
        header = ("data", "clients", "engine", "cores", "visits", "literal epoch, s", "PERM epoch, s", "times faster")
        title = "A PERM epoch against the paper's literal one; alpha excluded"
        yield Grid((*header, "accuracy / literal"), rows, title=title), 3
    if "alpha" in results:
        row = results["alpha"]
        figures = [_s(row["alpha_seconds"]), _s(row["visits_seconds"]), _spread(row, "share_of_epoch", "shares")]
        header = ("data", "clients", "K", "estimate, s", "visits, s", "share of the epoch")
        rows = [[row["about"], row["size"], str(row["local_steps"]), *figures]]
        yield Grid(header, rows, title="What alpha costs"), 2
    if "scaling" in results:
        rows = [
            [
                str(row["num_clients"]),
                row["engine"],
                f"{row['partners']:.1f}",
                _s(row["seconds"]),
                f"{row['peak_mb']:.0f}",
                f"{row['peak_mb'] - row['imports_mb']:.0f}",
                f"{row['models_mb']:.0f}",
                row["alpha"],
            ]
            for row in results["scaling"]
        ]
        header = ("clients", "engine", "partners", "epoch, s", "peak, MB", "above imports, MB", "models, MB", "alpha")
        title = "An epoch of more and more clients in groups of ten (MLP, one core, a process each)"
        yield Grid(header, rows, title=title), 2


def _what(name: str, row: Mapping[str, Any]) -> list[str]:
    return [name, row["about"], row["size"], row["engine"], str(row["cores"])]


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


def _spread(row: Mapping[str, Any], ratio: str, single: str = "ratios") -> str:
    return f"{row[ratio]:.3g} ({min(row[single]):.3g} to {max(row[single]):.3g})"


# The picture

OURS, THEIRS, PALE = "#D55E00", "#56B4E9", "#999999"


def picture(results: Results) -> Figure | None:
    """Bars of how much faster rounds and epochs are, and curves over the number of clients; None without any."""
    drawn = [
        (draw, results[part])
        for part, draw in (("workloads", _bare_bars), ("epochs", _literal_bars), ("scaling", _curves))
        if part in results
    ]
    if not drawn:
        return None
    figure = Figure(figsize=(4.6 * len(drawn) + 0.6, 3.9), layout="constrained")
    for axes, (draw, found) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn):
        draw(axes, found, results)
    return figure


def _bare_bars(axes, found: Results, results: Results) -> None:
    bars = [(name, row, OURS) for name, row in found.items() if "ratio_to_bare" in row]
    for peer, each in results.get("peers", {}).items():
        bars += [(f"{peer} {name}", row, THEIRS) for name, row in each.get("workloads", {}).items()]
    bars = [(name, row, colour) for name, row, colour in bars if "ratio_to_bare" in row]
    _bars(axes, [(name, row["ratio_to_bare"], row["ratios"], colour) for name, row, colour in bars])
    axes.set(title="a FedAvg round", ylabel="times faster than a bare torch loop", yscale="log")


def _literal_bars(axes, found: Results, results: Results) -> None:
    _bars(axes, [(name, row["speedup"], row["speedups"], OURS) for name, row in found.items()])
    axes.set(title="a PERM epoch", ylabel="times faster than the literal epoch")


def _bars(axes, bars: Sequence[tuple[str, float, Sequence[float], str]]) -> None:
    for k, (_, height, single, colour) in enumerate(bars):
        spread = [[height - min(single)], [max(single) - height]]
        axes.bar(k, height, color=colour, yerr=spread, capsize=3)
        axes.annotate(f"{height:.3g}", (k, max(single)), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], rotation=30, ha="right")
    axes.margins(y=0.15)


def _curves(axes, found: Sequence[Mapping[str, Any]], results: Results) -> None:
    N = [row["num_clients"] for row in found]
    axes.plot(N, [row["seconds"] for row in found], marker="o", color=OURS, label="time, s")
    memory = [row["peak_mb"] - row["imports_mb"] for row in found]
    axes.plot(N, memory, marker="s", color=THEIRS, label="peak memory, MB")
    axes.plot(N, [row["models_mb"] for row in found], linestyle="--", color=PALE, label="personal models, MB")
    axes.set(title="an epoch, groups of ten", xlabel="clients", xscale="log", yscale="log")
    axes.set_xticks(N, N, minor=False)
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25)
    axes.legend()
