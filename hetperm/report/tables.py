"""The closing table of a run, for the terminal, and tables of several runs for documents."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

MB = 2**20
Summary = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def methods_of(summary: Summary) -> dict[str, Summary]:
    """method -> its part of a summary, the algorithm first."""
    return {summary["algorithm"]: summary, **summary["baselines"]}


def closing_table(summary: Summary) -> Table:
    """One line per method: accuracy over clients, whom they learn from, what it cost (steps of a client; MB sent)."""
    title = f"{summary['dataset']}, {summary['num_clients']} clients, {_runs(summary)}"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    for name in ("accuracy", "worst", "partners", "visits", "rounds", "steps", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(_known(method["accuracy"]["mean"]) for method in methods_of(summary).values())
    for name, method in methods_of(summary).items():
        cost, alpha = method["cost"], method["alpha"]
        table.add_row(
            name,
            _with_spread(summary, name),
            _share(method["accuracy"]["worst"]),
            "-" if alpha is None else f"{alpha['effective_partners']:.1f}",
            f"{cost['visits']:,.0f}",
            f"{cost['rounds']:,.0f}",
            f"{cost['client_steps'] / summary['num_clients']:,.0f}",
            _mb(cost),
            style="bold" if method["accuracy"]["mean"] == best else None,
        )
    return table


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


def _runs(summary: Summary) -> str:
    if "seeds" not in summary:
        return f"seed {summary['seed']}: test accuracy (± over clients)"
    return f"seeds {', '.join(map(str, summary['seeds']))}: mean test accuracy (± over seeds)"


def _with_spread(summary: Summary, name: str) -> str:
    accuracy = methods_of(summary)[name]["accuracy"]
    over_seeds = spread_of(summary, name).get("accuracy", {}).get("mean")
    return _pm(accuracy["mean"], over_seeds if "seeds" in summary else accuracy["std"])


def _mb(cost: Summary) -> str:
    mb = (cost["bytes_down"] + cost["bytes_up"]) / MB
    return f"{mb:,.1f}" if mb < 100 else f"{mb:,.0f}"


def _pm(value: float | None, spread: float | None) -> str:
    return _share(value) if spread is None else f"{_share(value)} ± {spread:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"


def _known(value: float | None) -> float:
    return float("-inf") if value is None or value != value else value
