"""Tables over settings and seeds, from the rows of an experiment's cells: who wins where, and by how much.

A row has at least: setting, method, variant, seed, diverged (None, or a sentence), and the figures of `summary.json`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from hetperm.report.grid import Grid
from hetperm.report.paired import Difference, Sample, paired
from hetperm.report.summary import Row, Rows, is_blank, or_lowest


@dataclass(frozen=True)
class Table:
    """A table as it is shown, and the same figures in full for a CSV file."""

    grid: Grid
    rows: Rows


# Figures of a cell


Figure = Callable[[Row], float | None]


def mean_accuracy(row: Row) -> float | None:
    """The mean over clients."""
    return row["accuracy"]["mean"]


def worst_client(row: Row) -> float | None:
    """The accuracy of the worst client."""
    return row["accuracy"]["worst"]


def worst_tier(row: Row) -> float | None:
    """The accuracy of the worst tier, a mean over its clients."""
    return min(tier["accuracy"] for tier in row["tiers"].values())


def sample(rows: Rows, figure: Figure = mean_accuracy, **keys: Any) -> Sample:
    """A figure of the rows that have these keys, by seed."""
    chosen = [row for row in rows if keys.items() <= row.items()]
    return Sample({row["seed"]: None if row["diverged"] else figure(row) for row in chosen})


# Who wins where


def best_rival(rows: Rows, case: str, rivals: Sequence[str], figure: Figure = mean_accuracy) -> str | None:
    """The rival with the best mean over seeds; None if all diverged or none was run. Of equal ones the first."""
    means = {name: or_lowest(sample(rows, figure, setting=case, method=name).mean) for name in rivals}
    return max(means, key=means.get) if means and max(means.values()) > -math.inf else None


def ranking(rows: Rows, cases: Mapping[str, str], methods: Sequence[str], *, ours: Sequence[str]) -> Table:
    """One line per setting, one column per method: the first in bold, and ours minus the best rival.

    Args:
        cases: setting -> its title.
        ours: the methods that are no rivals of the first of them.
    """
    rivals, lines, figures = [name for name in methods if name not in ours], [], []
    for case, title in cases.items():
        samples = {name: sample(rows, setting=case, method=name) for name in methods}
        top = max(or_lowest(each.mean) for each in samples.values())
        cells = [
            f"**{each}**" if each.mean is not None and each.mean == top else str(each) for each in samples.values()
        ]
        rival = best_rival(rows, case, rivals)
        gain = paired(samples[ours[0]], samples[rival]) if rival and ours[0] in samples else None
        lines.append([title, *cells, "-" if gain is None else f"{gain} {rival}"])
        figures += [_sample_row(case, name, each) for name, each in samples.items()]
    note = "The first of a line is bold."
    return Table(Grid(["setting", *methods, f"{ours[0]} minus the best rival"], lines, note=note), figures)


def _sample_row(case: str, method: str, each: Sample) -> dict[str, Any]:
    return {
        "setting": case,
        "method": method,
        "mean": each.mean,
        "spread": each.spread,
        "seeds": len(each.by_seed),
        "diverged": each.diverged,
        **{f"seed_{seed}": value for seed, value in each.by_seed.items()},
    }


def wins(
    by_budget: Mapping[str, Rows], cases: Mapping[str, str], methods: Sequence[str], *, ours: Sequence[str]
) -> Table:
    """One line per setting: who is first, ours against the best rival at every budget, worst client and worst tier.

    Args:
        by_budget: "steps" and others -> the rows with that budget; the first decides who is first.
    """
    first, rivals = next(iter(by_budget)), [name for name in methods if name not in ours]
    rows, lines, figures = by_budget[first], [], []
    for case, title in cases.items():
        samples = {name: sample(rows, setting=case, method=name) for name in methods}
        if not any([each.by_seed for each in samples.values()]):
            continue
        winner = max(samples, key=lambda name: or_lowest(samples[name].mean))
        rival = best_rival(rows, case, rivals)
        gains = {budget: _gain(chosen, case, ours[0], rivals) for budget, chosen in by_budget.items()}
        gain = gains[first][1]
        lines.append(
            [
                title,
                "all diverged" if samples[winner].mean is None else winner,
                str(samples[ours[0]]),
                "-" if rival is None else f"{samples[rival]} {rival}",
                "-" if gain is None else str(gain),
                _verdict(samples[ours[0]], gain),
                *(_gain_text(*gains[budget]) for budget in list(by_budget)[1:]),
                *(_side_by_side(rows, case, ours[0], rival, figure) for figure in (worst_client, worst_tier)),
            ]
        )
        for budget, (against, each) in gains.items():
            blank = Difference(math.nan, None, None, 0)
            figures.append(
                {"setting": case, "budget": budget, "method": ours[0], "rival": against, **vars(each or blank)}
            )
    others = [f"at equal {BUDGET_WORDS[budget]}" for budget in list(by_budget)[1:]]
    columns = ["setting", "first", ours[0], "best rival", "difference", "", *others, "worst client", "worst tier"]
    return Table(Grid(columns, lines, note=WINS_NOTE.format(ours=ours[0])), figures)


BUDGET_WORDS = {"steps": "steps", "macs": "FLOPs", "bytes": "bytes"}
WINS_NOTE = (
    "Mean over clients ± standard deviation over seeds. Differences are {ours} minus the rival that has the best mean "
    "over these very seeds, seed by seed, with a 95% t interval over seeds; ahead and behind if it leaves out zero. "
    "Worst client and worst tier: {ours} / that rival, at equal steps."
)


def _gain(rows: Rows, case: str, method: str, rivals: Sequence[str]) -> tuple[str | None, Difference | None]:
    """The best rival, and by how much the method is ahead of it."""
    rival = best_rival(rows, case, rivals)
    if rival is None:
        return None, None
    return rival, paired(sample(rows, setting=case, method=method), sample(rows, setting=case, method=rival))


def _gain_text(rival: str | None, gain: Difference | None) -> str:
    return "-" if gain is None else f"{gain} {rival}"


def _verdict(ours: Sample, gain: Difference | None) -> str:
    if gain is not None:
        return f"**{gain.verdict}**" if gain.verdict == "ahead" else gain.verdict
    return "behind" if ours.diverged else "-"


def _side_by_side(rows: Rows, case: str, method: str, rival: str | None, figure: Figure) -> str:
    pair = [sample(rows, figure, setting=case, method=name) for name in (method, rival) if name]
    return " / ".join(
        "diverged" if each.diverged else "-" if each.mean is None else f"{each.mean:.3f}" for each in pair
    )


def worst(rows: Rows, cases: Mapping[str, str], methods: Sequence[str]) -> Table:
    """One line per setting, one column per method: the worst client / the worst tier, means over seeds."""
    lines, figures = [], []
    for case, title in cases.items():
        line = [title]
        for name in methods:
            client, tier = (sample(rows, figure, setting=case, method=name) for figure in (worst_client, worst_tier))
            line.append(str(client) if client.mean is None else f"{client.mean:.3f} / {tier.mean:.3f}")
            figures.append({**_sample_row(case, name, client), "worst_tier": tier.mean})
        lines.append(line)
    return Table(Grid(["setting", *methods], lines, note="Worst client / worst tier, means over seeds."), figures)


def spending(by_budget: Mapping[str, Rows], cases: Mapping[str, str], methods: Sequence[str], *, ours: str) -> Table:
    """One line per setting and budget, one column per method: its steps, FLOPs or bytes over those of ours."""
    lines, figures = [], []
    for case, title in cases.items():
        for budget, rows in by_budget.items():
            line = [f"{title}, {BUDGET_WORDS[budget]}"]
            for name in methods:
                ratio = _spent_ratio(rows, by_budget[next(iter(by_budget))], case, name, ours, SPENT[budget])
                line.append("-" if ratio is None else f"{ratio:.2f}")
                figures.append({"setting": case, "budget": budget, "method": name, "share_of_ours": ratio})
            lines.append(line)
    note = f"What a method spent over what {ours} spent at equal steps, means over seeds; 1 is equal."
    return Table(Grid(["setting and budget", *methods], lines, note=note), figures)


SPENT: dict[str, Callable[[Row], float]] = {
    "steps": lambda cost: cost["client_steps"],
    "macs": lambda cost: cost["macs"],
    "bytes": lambda cost: cost["bytes_down"] + cost["bytes_up"],
}


def _spent_ratio(rows: Rows, equal: Rows, case: str, method: str, ours: str, spent: Callable) -> float | None:
    def total(rows: Rows, name: str) -> float:
        costs = [row["cost"] for row in rows if (row["setting"], row["method"]) == (case, name) and not row["diverged"]]
        return mean(map(spent, costs)) if costs else math.nan

    ratio = total(rows, method) / (total(equal, ours) or math.nan)
    return None if math.isnan(ratio) else ratio


# One setting


def methods_table(rows: Rows, methods: Sequence[str]) -> Table:
    """One line per method, the best first: accuracy, loss, worst client, partners and cost."""
    figures = []
    for name in methods:
        chosen = [row for row in rows if row["method"] == name]
        if not chosen:
            continue
        good = [row for row in chosen if not row["diverged"]]
        accuracy, loss = sample(chosen), sample(chosen, lambda row: row["loss"]["mean"])
        partners = [row["alpha"]["effective_partners"] for row in good if row["alpha"]]
        figures.append(
            {
                **_sample_row(chosen[0]["setting"], name, accuracy),
                "loss": loss.mean,
                "worst": sample(chosen, worst_client).mean,
                "effective_partners": mean(partners) if partners else None,
                "rounds": mean(row["cost"]["rounds"] for row in good) if good else None,
                "steps_per_client": _mean(good, lambda row: row["cost"]["client_steps"] / row["num_clients"]),
                "mb_sent": _mean(good, lambda row: SPENT["bytes"](row["cost"]) / 2**20),
                "shown": (str(accuracy), str(loss)),
            }
        )
    figures.sort(key=lambda row: -or_lowest(row["mean"]))
    lines = [
        [
            row["method"] if k or row["mean"] is None else f"**{row['method']}**",
            *row["shown"],
            *(_text(row[key], form) for key, form in METHOD_COLUMNS.items()),
        ]
        for k, row in enumerate(figures)
    ]
    columns = ["method", "accuracy", "loss", "worst client", "partners", "rounds", "steps a client", "MB sent"]
    return Table(Grid(columns, lines), [{key: row[key] for key in row if key != "shown"} for row in figures])


METHOD_COLUMNS = {
    "worst": ".3f",
    "effective_partners": ".1f",
    "rounds": ",.0f",
    "steps_per_client": ",.0f",
    "mb_sent": ",.1f",
}


def _mean(rows: Rows, figure: Callable[[Row], float]) -> float | None:
    return mean(map(figure, rows)) if rows else None


def _text(value: float | None, form: str) -> str:
    return "-" if is_blank(value) else format(value, form)


# Ablations


def ablations(rows: Rows, cases: Mapping[str, str], variants: Sequence[str], *, default: str) -> Table:
    """One line per change: accuracy in every setting and, below it, the change minus the default, seed by seed."""
    lines, figures = [["default", *(str(sample(rows, setting=case, variant=default)) for case in cases)]], []
    for variant in variants:
        line = [variant]
        for case in cases:
            changed, base = (sample(rows, setting=case, variant=name) for name in (variant, default))
            gain = paired(changed, base)
            text = "-" if gain is None else str(gain)
            sure = gain is not None and gain.verdict in ("ahead", "behind")
            line.append(str(changed) if gain is None else f"{changed.mean:.3f}, {f'**{text}**' if sure else text}")
            blank = Difference(math.nan, None, None, 0)
            figures.append(
                {
                    "setting": case,
                    "variant": variant,
                    "accuracy": changed.mean,
                    "spread": changed.spread,
                    "diverged": changed.diverged,
                    **{f"difference_{key}": value for key, value in vars(gain or blank).items()},
                }
            )
        lines.append(line)
    note = (
        "Mean accuracy, and the change minus the default, seed by seed, with a 95% t interval over seeds; bold where "
        "the interval leaves out zero. A line is one choice that differs from the default, and nothing else."
    )
    return Table(Grid(["change", *cases.values()], lines, note=note), figures)


# Mixing weights


def mixing_table(rows: Rows, cases: Mapping[str, str]) -> Table:
    """One line per setting: clients, partners, and the share of weight in one's own group."""
    lines, figures = [], []
    for case, title in cases.items():
        chosen = [row for row in rows if row["setting"] == case]
        if not chosen:
            continue
        samples = {name: sample(chosen, lambda row, name=name: row["alpha"][name]) for name in MIXING_COLUMNS}
        group = [row["group_size"] for row in chosen if not row["diverged"] and row.get("group_size")]
        size = mean(group) if group else None
        seconds = median(row["seconds"] for row in chosen)
        shown = [_mixing_text(samples[name], form) for name, (_, form) in MIXING_COLUMNS.items()]
        lines.append([title, f"{chosen[0]['num_clients']:,}", _text(size, ".1f"), *shown, f"{seconds:,.1f}"])
        row = {"setting": case, "num_clients": chosen[0]["num_clients"], "group_size": size, "seconds": seconds}
        for name, each in samples.items():
            row |= {name: each.mean, f"{name}_spread": each.spread}
        figures.append(row | {"seeds": len(chosen)})
    heads = [head for head, _ in MIXING_COLUMNS.values()]
    columns = ["setting", "clients", "clients of one's group", *heads, "seconds"]
    return Table(Grid(columns, lines, note=MIXING_NOTE), figures)


MIXING_COLUMNS = {
    "effective_partners": ("effective partners", ".1f"),
    "nonzero": ("weights above zero", ".1f"),
    "self_weight": ("weight on oneself", ".3f"),
    "same_group_mass": ("mass on one's group", ".3f"),
}
MIXING_NOTE = (
    "Means over clients ± standard deviation over seeds; the group is known to the table, never to the method; seconds "
    "of a cell, the median."
)


def _mixing_text(each: Sample, form: str) -> str:
    values = each.values
    if not values:
        return "-"
    return format(mean(values), form) + ("" if len(values) == 1 else f" ± {format(stdev(values), form)}")


# Time


def runtime_table(rows: Rows, cases: Mapping[str, str], methods: Sequence[str]) -> Table:
    """One line per model and method: seconds of a round, over those of the first method, gradients of a round."""
    lines, figures = [], []
    for case, title in cases.items():
        for row in (row for row in rows if row["setting"] == case):
            for name in methods:
                timed = row["methods"][name]
                over = f"{timed['ratio']:.2f} ({timed['ratio_low']:.2f} to {timed['ratio_high']:.2f})"
                cost = (f"{timed['cpu_ratio']:.2f}", f"{timed['gradients']:.0f}")
                lines.append([title, name, f"{timed['seconds']:.3g}", over, *cost])
                figures.append({"setting": case, "method": name, **timed})
    times = ("seconds of a round", f"over {methods[0]}", f"CPU time over {methods[0]}")
    return Table(Grid(["model", "method", *times, "gradients of a client"], lines, note=RUNTIME_NOTE), figures)


RUNTIME_NOTE = (
    "Medians of repetitions in which all methods are timed in turn, with the smallest and the largest ratio; ratios "
    "are taken within each repetition."
)
