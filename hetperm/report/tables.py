"""The tables of a run: all methods, by tier, seed by seed, and the cost per device."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import mean
from typing import Any

from rich.table import Table

from hetperm.report.grid import Grid, markdown, terminal, transposed
from hetperm.report.summary import (
    ACCURACY,
    MB,
    Gain,
    Method,
    Mixing,
    Rows,
    Summary,
    Tier,
    is_blank,
    or_lowest,
    quantity,
)

OWN = "own"  # the data set of `fit`
EVERYBODY = 1e6  # a share from which on everybody learns from everybody
WIDE = 110  # characters; a wider table by tier is turned on its side if that makes it narrower


# All methods


def closing_table(summary: Summary) -> Table:
    """One line per method: the metric over clients, effective partners, and cost (steps a client, MB sent)."""
    return terminal(closing_grid(summary))


def closing_grid(summary: Summary) -> Grid:
    """The cells of `closing_table`; the best method stands out."""
    means = [summary.rank(method.score.mean) for method in summary.methods.values()]
    return Grid(
        columns=("method", summary.metric, "worst", "partners", "visits", "rounds", "steps", "MB"),
        rows=[_closing_row(summary, name) for name in summary.methods],
        title=f"{data_name(summary)}, {summary.num_clients} clients, {_seeds(summary)}",
        note=_diverged(summary),
        strong=frozenset(k for k, value in enumerate(means) if value == max(means)),
    )


def data_name(summary: Summary) -> str:
    """The data set, as readers know it."""
    return "your own data" if summary.dataset == OWN else summary.dataset


def _closing_row(summary: Summary, name: str) -> tuple[str, ...]:
    method = summary.methods[name]
    # A single run only has a spread over clients; with several seeds, the spread over seeds says more.
    spread = summary.spread_of(name).score.mean if summary.seeds else method.score.std
    mb, steps = method.cost.mb_sent, method.cost.client_steps
    return (
        name,
        _score(method, method.score.mean, spread),
        _share(method.score.worst),
        _partners(method.alpha),
        _fixed(method.cost.visits, 0),
        _fixed(method.cost.rounds, 0),
        _fixed(None if is_blank(steps) else steps / summary.num_clients, 0),
        _fixed(mb, 1 if or_lowest(mb) < 100 else 0),
    )


def _diverged(summary: Summary) -> str:
    """A sentence for each method that went non-finite; empty if there is none."""
    return " ".join(f"{name}: {method.diverged}." for name, method in summary.methods.items() if method.diverged)


def _seeds(summary: Summary) -> str:
    if not summary.seeds:
        seed = "-" if summary.seed is None else summary.seed
        return f"seed {seed}: test {summary.scored_by} (± over clients)"
    return f"seeds {', '.join(map(str, summary.seeds))}: mean test {summary.scored_by} (± over seeds)"


def mixing_lines(summary: Summary) -> list[str]:
    """One line about the mixing weights of each method that has them."""
    lines = []
    for name, alpha in summary.mixing.items():
        if alpha.share is not None and not summary.seeds:
            lines.append(f"{name}: {share_sentence(alpha.share)}")
        mass = alpha.same_group_mass
        group = "" if mass is None else f"same-group mass {mass:.3f}, "
        lines.append(
            f"{name}: {group}weight on oneself {_share(alpha.self_weight)}, a client learns from "
            f"{_fixed(alpha.nonzero, 1)} ({_fixed(alpha.effective_partners, 1)} effective)"
        )
    return lines


def attendance_lines(summary: Summary) -> list[str]:
    """One line per method about how often clients were away; none where nobody was."""
    found = {name: method.attendance for name, method in summary.methods.items() if method.attendance is not None}
    if not any([one.absent for one in found.values()]):
        return []  # as in a federation in which all nodes were there to the end
    return [
        f"{name}: a client was away {_fixed(one.absent, 0)} of {_fixed(one.asked, 0)} times (at most "
        f"{_fixed(100 * one.most, 0)}% of them) and missed {_fixed(one.missed_steps, 0)} steps"
        for name, one in found.items()
    ]


def share_sentence(share: float) -> str:
    """What the look ahead chose, in words.

    Example:
        >>> share_sentence(0.0)
        'looking one step ahead, clients are best off alone (share 0)'
    """
    what = f"differences of about {share:g} times the noise of a gradient are worth sharing (share {share:g})"
    if share == 0:
        what = "clients are best off alone (share 0)"
    elif share >= EVERYBODY:
        what = "everybody learns from everybody, by their samples"
    return f"looking one step ahead, {what}"


def visit_lines(histories: Mapping[str, Sequence[Rows]], num_clients: int) -> list[str]:
    """One line per method whose models travel: visits of an epoch and rounds of a tour, averaged over epochs and runs.

    Args:
        histories: method -> its metrics in each run.
    """
    lines = []
    for name, runs in histories.items():
        # Only methods whose models travel have this column.
        rows = [row for rows in runs for row in rows if "epoch_visits" in row]
        if rows:
            visits, rounds = [row["epoch_visits"] for row in rows], [row["epoch_rounds"] for row in rows]
            lines.append(
                f"{name}: {mean(visits):.0f} visits an epoch; a tour of all visits takes {mean(rounds):.1f} rounds "
                f"(all pairs would be {num_clients**2:,} visits in {num_clients} rounds)"
            )
    return lines


def paired_lines(summary: Summary) -> list[str]:
    """How far the algorithm is ahead of each rival, seed by seed on the same data; none for a single run."""
    return [f"{summary.algorithm} over {rival}: {gain_text(gain)}" for rival, gain in summary.paired.items()]


def gain_text(gain: Gain) -> str:
    """The mean gain, its spread, and how many seeds agree.

    Example:
        >>> gain_text(Gain(mean=-0.01, std=0.02, differences=[0.004, -0.024]))
        '-0.010 ± 0.020 (1 of 2 seeds positive)'
    """
    if is_blank(gain.mean):
        text = "-"
    else:
        text = f"{gain.mean:+.3f}" + ("" if is_blank(gain.std) else f" ± {gain.std:.3f}")
    return f"{text} ({_signs(gain.differences)})"


def _signs(differences: Sequence[float | None]) -> str:
    differing = [difference for difference in differences if not is_blank(difference)]
    # Compared with the number of all seeds below: a seed without a result does not agree with the others.
    positive, negative = (sum(sign * difference > 0 for difference in differing) for sign in (1, -1))
    if len(differences) == 1:
        return "one seed"
    for count, word in ((positive, "positive"), (negative, "negative")):
        if count == len(differences):
            return f"every seed {word}"
    return f"{positive} of {len(differences)} seeds positive"


# By tier


def tier_table(summary: Summary, clients: Rows = ()) -> Table:
    """One line per tier, the largest width first, with the metric of every method, and a last line over all clients.

    Args:
        summary: of one run, or of several seeds: then with the spread over them.
        clients: rows of clients.csv (of all seeds if several), to average the effective partners of a tier.
    """
    return terminal(tier_grid(summary, clients))


def tier_grid(summary: Summary, clients: Rows = ()) -> Grid:
    """The cells of `tier_table`; with too many methods for a page, one line per method and one column per tier."""
    names, methods, alpha = summary.tier_names, summary.methods, summary.main.alpha
    rows = []
    for name in names:
        tier = summary.widest(name)
        sizes = [cell("clients", tier.clients), cell("width", tier.width), cell("params", tier.params)]
        rows.append([name, *sizes, *(_tier_score(summary, method, name) for method in methods)])
    means = [_score(method, method.score.mean, summary.spread_of(name).score.mean) for name, method in methods.items()]
    rows.append(["all", cell("clients", summary.num_clients), "", "", *means])
    columns = ["tier", "clients", "width", "params", *methods]
    if alpha is not None:
        columns.append("partners")
        partners = [*(_mean_partners(clients, name) for name in names), _partners(alpha)]
        rows = [[*row, text] for row, text in zip(rows, partners, strict=True)]
    title = f"{summary.metric} by tier{' (± over seeds)' if summary.seeds else ''}"
    note = " ".join(filter(None, [_one_size(summary), _diverged(summary)]))
    upright = Grid(columns, rows, title=title, note=note, strong=frozenset([len(names)]))
    sideways = transposed(upright)
    return sideways if upright.width > max(WIDE, sideways.width) else upright


def width_text(width: float | None) -> str:
    """A width as people write it: as a fraction if it is a simple one.

    Example:
        >>> [width_text(width) for width in (1.0, 0.75, 0.0625, 1 / 3, 0.7)]
        ['1', '3/4', '1/16', '1/3', '0.7']
    """
    if is_blank(width):
        return "-"
    fraction = Fraction(width).limit_denominator(256)
    halves = fraction.denominator & (fraction.denominator - 1) == 0  # the denominator is a power of two
    # Only if the fraction is the very same float: a width of 0.333 must not be shown as 1/3.
    return str(fraction) if float(fraction) == width and (halves or fraction.numerator == 1) else f"{width:.3g}"


def _one_size(summary: Summary) -> str:
    """A sentence about the methods that train models of one size in every tier; empty if there are none."""
    sizes = {tier: summary.widest(tier).params for tier in summary.tier_names}
    methods: dict[int, list[str]] = {}
    for name, method in summary.methods.items():
        trained = {tier: entry.params for tier, entry in method.tiers.items()}
        # If all tiers have the same size, every method is like this and the sentence would say nothing.
        if len(set(trained.values())) == 1 and trained != sizes:
            methods.setdefault(next(iter(trained.values())), []).append(name)
    return " ".join(
        f"Trained with {cell('params', size)} parameters whatever the tier: {', '.join(names)}."
        for size, names in methods.items()
    )


def _tier_score(summary: Summary, method: str, tier: str) -> str:
    entry, spread = (part.tiers.get(tier, Tier()) for part in (summary.methods[method], summary.spread_of(method)))
    return _score(summary.methods[method], entry.score, spread.score)


def _mean_partners(clients: Rows, tier: str) -> str:
    values = [row.get("effective_partners") for row in clients if str(row.get("tier")) == tier]
    values = [value for value in values if not is_blank(value)]
    return f"{mean(values):.1f}" if values else "-"


# Cost per device, and any other rows


def profile_table(rows: Rows, *, title: str = "") -> Table:
    """One line per row, one column per key: tier, clients, width, params, mmacs, train_mb, wire_mb ..."""
    return terminal(row_grid(rows, title=title))


def cost_grid(summary: Summary) -> Grid:
    """What each method took, all clients together."""
    rows = [
        {
            "method": name,
            "visits": method.cost.visits,
            "rounds": method.cost.rounds,
            "steps": method.cost.client_steps,
            "MB down": None if is_blank(method.cost.bytes_down) else method.cost.bytes_down / MB,
            "MB up": None if is_blank(method.cost.bytes_up) else method.cost.bytes_up / MB,
            "GMACs": None if is_blank(method.cost.macs) else method.cost.macs / 1e9,
        }
        for name, method in summary.methods.items()
    ]
    return row_grid(rows, title="cost of the whole run, all clients together")


def row_grid(rows: Rows, *, title: str = "", metric: str = ACCURACY) -> Grid:
    """Rows of a CSV file as texts, one column for each key; "-" where a row has no value.

    What the rows say in the column `NOTE` is written below the table: sentences are too long for a column.
    """
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != NOTE]
    cells = [[cell(key, row.get(key), metric=metric) for key in keys] for row in rows]
    notes = dict.fromkeys(str(row[NOTE]) for row in rows if row.get(NOTE))
    return Grid([head(key) for key in keys], cells, title=title, note="; ".join(notes))


def head(key: str) -> str:
    """The heading of a column: its key as words, with units spelt as usual.

    Example:
        >>> head("train_mb"), head("n_train"), head("accuracy_fedavg-ft")
        ('train MB', 'train samples', 'accuracy fedavg-ft')
    """
    return NAMES.get(key) or " ".join(UNITS.get(word, word) for word in key.split("_"))


UNITS = {"mb": "MB", "mbps": "Mbps", "mmacs": "MMACs", "macs": "MACs"}
NAMES = {
    "n_train": "train samples",
    "n_val": "validation samples",
    "most_common": "most common class",
    # of a resource benchmark
    "limit_mb": "limit MB, with slack",
    "step_ms": "ms per step",
    "device_step_ms": "ms per step on the device",
    "down_mb": "MB down per visit",
    "up_mb": "MB up per visit",
    "visit_seconds": "simulated s per visit",
    "own": "at its width",
    "wider": "next larger width",
    "above": "at the next larger width",
}
NOTE = "note"
IDENTITIES = ("tier", "client", "group", "seed")  # numbers that are names: no commas in them


def cell(key: str, value: Any, *, metric: str = ACCURACY) -> str:
    """A value as text, formatted by the name of its column; "-" if it is blank.

    Args:
        metric: what models are scored by.

    Example:
        >>> cell("params", 11_173_962), cell("width", 0.25), cell("accuracy", 0.9), cell("train_mb", 23.456)
        ('11,173,962', '1/4', '0.900', '23.5')
    """
    if is_blank(value):
        return "-"
    if key in IDENTITIES or not isinstance(value, int | float):
        return str(value)
    if key in ("width", "wider"):
        return width_text(value)
    if isinstance(value, float) and (quantity(key) in (metric, "loss") or key == "most_common"):
        return _share(value)
    if key == "effective_partners":
        return f"{value:.1f}"
    # From 100 on three digits show no decimals, and from 1000 on they would become 1.23e+03.
    whole = isinstance(value, int) or abs(value) >= 100
    return f"{value:,.0f}" if whole else f"{value:.3g}"


# For documents


def results_rows(summary: Summary) -> list[dict[str, Any]]:
    """One row per method of an aggregate, with the spread over seeds, for a CSV file."""
    rows = []
    for name, method in summary.methods.items():
        spread, alpha = summary.spread_of(name), method.alpha or Mixing()
        rows.append(
            {
                "method": name,
                "accuracy": method.score.mean,
                "accuracy_spread": spread.score.mean,
                "accuracy_std_over_clients": method.score.std,
                "accuracy_worst": method.score.worst,
                "loss": method.loss.mean,
                "loss_spread": spread.loss.mean,
                "same_group_mass": alpha.same_group_mass,
                "effective_partners": alpha.effective_partners,
                "rounds": method.cost.rounds,
                "steps_per_client": method.cost.client_steps / summary.num_clients,
                "mb_sent": method.cost.mb_sent,
                "diverged": method.diverged,
            }
        )
    return rows


def results_markdown(rows: Rows) -> str:
    """`results_rows` as a table in Markdown, best accuracy first."""
    columns = ("method", "accuracy", "loss", "worst client", "partners", "rounds", "steps a client", "MB sent")
    lines = [
        (
            row["method"],
            _with_spread(row["accuracy"], row["accuracy_spread"]) + _in_brackets(row.get("diverged")),
            _with_spread(row["loss"], row["loss_spread"]),
            _share(row["accuracy_worst"]),
            "" if row["effective_partners"] is None else f"{row['effective_partners']:.1f}",
            f"{row['rounds']:,.0f}",
            f"{row['steps_per_client']:,.0f}",
            f"{row['mb_sent']:,.1f}",
        )
        for row in sorted(rows, key=lambda row: -or_lowest(row["accuracy"]))
    ]
    return markdown(Grid(columns, lines))


# Texts


def _score(method: Method, value: float | None, spread: float | None) -> str:
    """A figure of a method's metric; "diverged" if it has none because of that. The note below the table says when."""
    return "diverged" if method.diverged and is_blank(value) else _with_spread(value, spread)


def _partners(alpha: Mixing | None) -> str:
    return "-" if alpha is None or is_blank(alpha.effective_partners) else f"{alpha.effective_partners:.1f}"


def _in_brackets(text: str | None) -> str:
    return f" ({text})" if text else ""


def _with_spread(value: float | None, spread: float | None) -> str:
    return _share(value) if is_blank(value) or is_blank(spread) else f"{_share(value)} ± {spread:.3f}"


def _share(value: float | None) -> str:
    return "-" if is_blank(value) else f"{value:.3f}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if is_blank(value) else f"{value:,.{digits}f}"
