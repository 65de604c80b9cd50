"""The tables of a run: all methods, by tier, seed by seed, and what a tier's devices have to bear."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import mean
from typing import Any

from rich.table import Table

from hetperm.report import grid as grids
from hetperm.report.grid import Grid
from hetperm.runs.files import missing

MB = 2**20
WIDE = 110  # characters; a table by tier that is wider is turned on its side if that makes it narrower
Summary = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def methods_of(summary: Summary) -> dict[str, Summary]:
    """method -> its part of a summary, the algorithm first."""
    return {summary["algorithm"]: summary, **summary.get("baselines", {})}


# All methods


def closing_table(summary: Summary) -> Table:
    """One line per method: accuracy over clients, whom they learn from, what it cost (steps of a client; MB sent)."""
    return grids.terminal(closing_grid(summary))


def closing_grid(summary: Summary) -> Grid:
    """The texts of `closing_table`; the best method stands out."""
    methods = methods_of(summary)
    means = [_known(method["accuracy"]["mean"]) for method in methods.values()]
    return Grid(
        columns=("method", "accuracy", "worst", "partners", "visits", "rounds", "steps", "MB"),
        rows=[_closing_row(summary, name) for name in methods],
        title=f"{summary['dataset']}, {summary['num_clients']} clients, {_runs(summary)}",
        strong=frozenset(k for k, value in enumerate(means) if value == max(means)),
    )


def _closing_row(summary: Summary, name: str) -> tuple[str, ...]:
    method = methods_of(summary)[name]
    cost = method["cost"]
    return (
        name,
        _with_spread(summary, name),
        _share(method["accuracy"]["worst"]),
        _partners(method.get("alpha")),
        f"{cost['visits']:,.0f}",
        f"{cost['rounds']:,.0f}",
        f"{cost['client_steps'] / summary['num_clients']:,.0f}",
        _mb(cost),
    )


def mixing_lines(summary: Summary) -> list[str]:
    """What the mixing weights say, a line for each method that has them."""
    lines = []
    for name, method in methods_of(summary).items():
        alpha = method["alpha"]
        if alpha is not None:
            mass = alpha["same_group_mass"]
            group = "" if mass is None else f"same-group mass {mass:.3f}, "
            lines.append(
                f"{name}: {group}weight on oneself {alpha['self_weight']:.3f}, a client learns from "
                f"{alpha['nonzero']:.1f} ({alpha['effective_partners']:.1f} effective)"
            )
    return lines


def visit_lines(histories: Mapping[str, Sequence[Rows]], num_clients: int) -> list[str]:
    """Visits and rounds of an epoch, a line for each method whose models travel; mean over epochs and runs.

    Args:
        histories: method -> its metrics in each run.
    """
    lines = []
    for name, runs in histories.items():
        rows = [row for rows in runs for row in rows if "epoch_visits" in row]
        if rows:
            visits, rounds = ([row[f"epoch_{what}"] for row in rows] for what in ("visits", "rounds"))
            lines.append(
                f"{name}: {mean(visits):.0f} visits in {mean(rounds):.1f} rounds an epoch (at most {max(visits)} in "
                f"{max(rounds)}; all pairs would be {num_clients**2} in {num_clients})"
            )
    return lines


def paired_lines(summary: Summary) -> list[str]:
    """How far the algorithm is ahead of each rival, seed by seed on the same data; none for a single run.

    Example:
        >>> gain = {"mean": -0.01, "std": 0.02, "differences": [0.004, -0.024]}
        >>> paired_lines({"algorithm": "perm", "paired": {"local": gain}})
        ['perm over local: -0.010 ± 0.020 (1 of 2 seeds positive)']
    """
    return [
        f"{summary['algorithm']} over {rival}: {_signed(gain)} ({_signs(gain['differences'])})"
        for rival, gain in summary.get("paired", {}).items()
    ]


def _signed(gain: Summary) -> str:
    if missing(gain["mean"]):
        return "-"
    return f"{gain['mean']:+.3f}" + ("" if missing(gain.get("std")) else f" ± {gain['std']:.3f}")


def _signs(differences: Sequence[float | None]) -> str:
    known = [each for each in differences if not missing(each)]
    positive, negative = (sum(sign * each > 0 for each in known) for sign in (1, -1))
    if len(differences) == 1:
        return "one seed"
    for count, word in ((positive, "positive"), (negative, "negative")):
        if count == len(differences):
            return f"every seed {word}"
    return f"{positive} of {len(differences)} seeds positive"


# By tier


def tier_table(summary: Summary, clients: Rows | None = None) -> Table:
    """One line per tier, the largest width first, with the accuracy of every method; a last one over all clients.

    Args:
        summary: of one run, or of several seeds: then with the spread over them.
        clients: rows of clients.csv (of all seeds, if several), from which a tier's effective partners are averaged.
    """
    return grids.terminal(tier_grid(summary, clients))


def tier_markdown(summary: Summary, clients: Rows | None = None) -> str:
    """`tier_table` in Markdown."""
    return grids.markdown(tier_grid(summary, clients))


def tier_grid(summary: Summary, clients: Rows | None = None) -> Grid:
    """The texts of `tier_table`; with too many methods for a page, a line for each of them and a column per tier."""
    names, methods = tier_names(summary), methods_of(summary)
    with_partners = summary.get("alpha") is not None
    heads = ["tier", "clients", "width", "params", *methods, *(["partners"] if with_partners else [])]
    rows = []
    for name in names:
        tier = widest(summary, name)
        row = [name, *(cell(key, tier.get(key)) for key in ("clients", "width", "params"))]
        row += [_tier_accuracy(summary, method, name) for method in methods]
        rows.append(row + ([_mean_partners(clients, name)] if with_partners else []))
    over_all = [_pm(each["accuracy"]["mean"], _spread_over_seeds(summary, name)) for name, each in methods.items()]
    rows.append(["all", cell("clients", summary["num_clients"]), "", "", *over_all])
    rows[-1] += [_partners(summary["alpha"])] if with_partners else []
    title = f"accuracy by tier{' (± over seeds)' if summary.get('spread') else ''}"
    upright = Grid(heads, rows, title=title, note=_one_size(summary), strong=frozenset([len(names)]))
    sideways = grids.transposed(upright)
    return sideways if upright.width > max(WIDE, sideways.width) else upright


def tier_names(summary: Summary) -> list[str]:
    """The tiers of a summary, the largest width first."""
    return sorted(summary.get("tiers", {}), key=lambda name: -_known(widest(summary, name).get("width")))


def width_text(width: float | None) -> str:
    """A width as one writes it: a fraction where it is a simple one.

    Example:
        >>> [width_text(width) for width in (1.0, 0.75, 0.0625, 1 / 3, 0.7)]
        ['1', '3/4', '1/16', '1/3', '0.7']
    """
    if missing(width):
        return "-"
    simple = Fraction(width).limit_denominator(256)
    halves = simple.denominator & (simple.denominator - 1) == 0
    return str(simple) if float(simple) == width and (halves or simple.numerator == 1) else f"{width:.3g}"


def widest(summary: Summary, tier: str) -> Summary:
    """A tier as the method sees it that trains the largest models there: some train the smallest everywhere."""
    entries = [method["tiers"][tier] for method in methods_of(summary).values() if tier in method.get("tiers", {})]
    return max(entries, key=lambda entry: (_known(entry.get("width")), _known(entry.get("params"))))


def _one_size(summary: Summary) -> str:
    """A sentence about methods that train models of one size whatever the tier; empty if there are none."""
    sizes = {tier: widest(summary, tier).get("params") for tier in tier_names(summary)}
    methods: dict[int, list[str]] = {}
    for name, method in methods_of(summary).items():
        trained = {tier: entry.get("params") for tier, entry in method.get("tiers", {}).items()}
        if len(set(trained.values())) == 1 and trained != sizes:
            methods.setdefault(next(iter(trained.values())), []).append(name)
    return " ".join(
        f"Trained with {cell('params', size)} parameters whatever the tier: {', '.join(names)}."
        for size, names in methods.items()
    )


def _tier_accuracy(summary: Summary, method: str, tier: str) -> str:
    spread = spread_of(summary, method).get("tiers", {}).get(tier, {}).get("accuracy")
    return _pm(methods_of(summary)[method].get("tiers", {}).get(tier, {}).get("accuracy"), spread)


def _mean_partners(clients: Rows | None, tier: str) -> str:
    rows = [row for row in clients or () if str(row["tier"]) == tier]
    found = [row["effective_partners"] for row in rows if not missing(row.get("effective_partners"))]
    return f"{mean(found):.1f}" if found else "-"


# What a tier's devices have to bear


def profile_table(rows: Rows, *, title: str = "") -> Table:
    """One line per row, under the keys of all rows: tier, clients, width, params, mmacs, train_mb, wire_mb ..."""
    return grids.terminal(row_grid(rows, title=title))


def row_grid(rows: Rows, *, title: str = "") -> Grid:
    """Rows of a CSV file as texts, one column for each key; "-" where a row has no value."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return Grid([head(key) for key in keys], [[cell(key, row.get(key)) for key in keys] for row in rows], title=title)


def head(key: str) -> str:
    """The name of a column as one reads it.

    Example:
        >>> head("train_mb"), head("n_train"), head("accuracy_fedavg-ft")
        ('train MB', 'n train', 'accuracy fedavg-ft')
    """
    return " ".join(UNITS.get(word, word) for word in key.split("_"))


UNITS = {"mb": "MB", "mbps": "Mbps", "mmacs": "MMACs", "macs": "MACs"}
IDENTITIES = ("tier", "client", "group", "seed")  # numbers that count nothing


def cell(key: str, value: Any) -> str:
    """A value as text, by what its column is called; "-" where there is none.

    Example:
        >>> cell("params", 11_173_962), cell("width", 0.25), cell("accuracy", 0.9), cell("train_mb", 23.456)
        ('11,173,962', '1/4', '0.900', '23.5')
    """
    if missing(value):
        return "-"
    if key in IDENTITIES or not isinstance(value, int | float):
        return str(value)
    if key == "width":
        return width_text(value)
    if isinstance(value, float) and key.partition("_")[0] in ("accuracy", "loss"):
        return _share(value)
    if key == "effective_partners":
        return f"{value:.1f}"
    whole = isinstance(value, int) or abs(value) >= 100
    return f"{value:,.0f}" if whole else f"{value:.3g}"


# For documents


def results_rows(summary: Summary) -> list[dict[str, Any]]:
    """One row per method of an aggregate, with the spread over seeds, for a CSV file."""
    rows = []
    for name, method in methods_of(summary).items():
        spread = spread_of(summary, name)
        alpha, cost, N = method["alpha"] or {}, method["cost"], summary["num_clients"]
        rows.append(
            {
                "method": name,
                "accuracy": method["accuracy"]["mean"],
                "accuracy_spread": spread.get("accuracy", {}).get("mean"),
                "accuracy_std_over_clients": method["accuracy"]["std"],
                "accuracy_worst": method["accuracy"]["worst"],
                "loss": method["loss"]["mean"],
                "loss_spread": spread.get("loss", {}).get("mean"),
                "same_group_mass": alpha.get("same_group_mass"),
                "effective_partners": alpha.get("effective_partners"),
                "rounds": cost["rounds"],
                "steps_per_client": cost["client_steps"] / N,
                "mb_sent": (cost["bytes_down"] + cost["bytes_up"]) / MB,
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """`results_rows` as a table in Markdown, best accuracy first."""
    ordered = sorted(rows, key=lambda row: -_known(row["accuracy"]))
    lines = [
        "| method | accuracy | loss | worst client | partners | rounds | steps a client | MB sent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ordered:
        partners = "" if row["effective_partners"] is None else f"{row['effective_partners']:.1f}"
        lines.append(
            f"| {row['method']} | {_pm(row['accuracy'], row['accuracy_spread'])} "
            f"| {_pm(row['loss'], row['loss_spread'])} | {_share(row['accuracy_worst'])} | {partners} "
            f"| {row['rounds']:,.0f} | {row['steps_per_client']:,.0f} | {row['mb_sent']:,.1f} |"
        )
    return "\n".join(lines) + "\n"


def spread_of(summary: Summary, method: str) -> Summary:
    """The part of an aggregate that says how a method's figures spread over seeds; empty for a single run."""
    spread = summary.get("spread", {})
    return spread if method == summary["algorithm"] else spread.get("baselines", {}).get(method, {})


# Texts


def _runs(summary: Summary) -> str:
    if "seeds" not in summary:
        return f"seed {summary.get('seed', '-')}: test accuracy (± over clients)"
    return f"seeds {', '.join(map(str, summary['seeds']))}: mean test accuracy (± over seeds)"


def _with_spread(summary: Summary, name: str) -> str:
    accuracy = methods_of(summary)[name]["accuracy"]
    return _pm(accuracy["mean"], _spread_over_seeds(summary, name) if "seeds" in summary else accuracy.get("std"))


def _spread_over_seeds(summary: Summary, name: str) -> float | None:
    return spread_of(summary, name).get("accuracy", {}).get("mean")


def _partners(alpha: Summary | None) -> str:
    found = None if alpha is None else alpha.get("effective_partners")
    return "-" if missing(found) else f"{found:.1f}"


def _mb(cost: Summary) -> str:
    mb = (cost["bytes_down"] + cost["bytes_up"]) / MB
    return f"{mb:,.1f}" if mb < 100 else f"{mb:,.0f}"


def _pm(value: float | None, spread: float | None) -> str:
    return _share(value) if missing(value) or missing(spread) else f"{_share(value)} ± {spread:.3f}"


def _share(value: float | None) -> str:
    return "-" if missing(value) else f"{value:.3f}"


def _known(value: float | None) -> float:
    return float("-inf") if missing(value) else value
