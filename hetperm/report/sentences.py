"""What a page says of a run in sentences: what was run, how it ended, who learns from whom and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from hetperm.report import tables
from hetperm.report.contents import Contents
from hetperm.report.details import Run
from hetperm.report.grid import Grid
from hetperm.report.summary import Mixing, Rows, Summary, is_blank
from hetperm.report.tiles import best_rival


def title(summary: Summary) -> str:
    """The heading of a page."""
    return f"{summary.algorithm} on {tables.data_name(summary)}"


def about(contents: Contents) -> str:
    """What was run, in a sentence."""
    summary, settings = contents.summary, contents.settings
    own = summary.dataset == tables.OWN
    against = f" against {_listed(list(summary.baselines))}" if summary.baselines else ""
    seeds = summary.seeds or ["-" if summary.seed is None else summary.seed]
    # Summaries of earlier versions do not say what was used; the configuration does, unless it came from fit.
    partition = summary.partition or ("" if own else settings.get("partition"))
    model = summary.model or ("" if own else settings.get("model"))
    parts = [
        ("your own data" if own else f"data {summary.dataset}") + _in_brackets(partition or _samples(contents)),
        f"{summary.num_clients} clients",
        f"model {model.removeprefix('torch.nn.modules.container.')}" if model else "",
        f"capacity profile {summary.capacity_profile}" if summary.capacity_profile else "",
        "" if summary.epochs is None else f"{summary.epochs} {'epoch' if summary.epochs == 1 else 'epochs'}",
        f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}",
    ]
    return f"{summary.algorithm}{against}: {', '.join(filter(None, parts))}."


def outcome(summary: Summary, pairs: Mapping[str, Mapping[str, Any]], over: str) -> str:
    """How the run ended, in a sentence: the figure of the algorithm, and how it compares with the best rival.

    Args:
        pairs: rival -> the gain of the algorithm over it, as `charts.pair` gives it.
        over: what the gain is paired by, "seeds" or "clients".
    """
    reached = summary.main.score.mean
    if is_blank(reached):
        return ""
    name = summary.algorithm
    start = f"{name} reaches a mean test {summary.metric} of {reached:.3f}"
    means = {rival: summary.baselines[rival].score.mean for rival in pairs}
    rivals = {rival: mean for rival, mean in means.items() if not is_blank(mean)}
    if not rivals:
        return f"{start}."
    best = best_rival(summary, rivals)
    gain = pairs[best]
    low, high = gain["low"], gain["high"]
    interval = "" if low is None else f" (95% interval of the gain over {over}: {low:+.3f} to {high:+.3f})"
    against = f"{best}, {'the best rival' if len(rivals) > 1 else 'its rival'}, with {rivals[best]:.3f}"
    if gain["verdict"] == "level":
        where = "level with"
    else:
        where = f"{abs(gain['mean']):.3f} {'ahead of' if gain['mean'] >= 0 else 'behind'}"
    return f"{start}: {where} {against}{interval}."


def gain_grid(pairs: Mapping[str, Mapping[str, Any]], *, ours: str, over: str, metric: str, better: str) -> Grid:
    """One line per rival: the gain of the algorithm over it, its interval, and for how many seeds or clients."""
    rows = [
        [
            rival,
            f"{gain['mean']:+.3f}",
            "-" if gain["low"] is None else f"{gain['low']:+.3f} to {gain['high']:+.3f}",
            f"{sum(each > 0 for each in gain['each'])} of {len(gain['each'])}",
            gain["verdict"],
        ]
        for rival, gain in pairs.items()
    ]
    columns = ["rival", "gain", "95% interval", f"{over} ahead", f"{ours} is"]
    lower = f"; positive: {ours} has the lower {metric}" if better == "lower" else ""
    return Grid(columns, rows, title=f"gain of {ours} in test {metric}, on the same {over}{lower}")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _samples(contents: Contents) -> str:
    """How many samples the clients of the first seed train on; empty if their table does not say."""
    counts = [row.get("n_train") for row in (contents.clients[0] if contents.clients else ())]
    return "" if not counts or None in counts else f"{sum(counts):,} training samples"


def mixing_sentence(method: str, alpha: Mixing, contents: Contents) -> str:
    """A sentence about a method's mixing weights, compared with what equal weights would give."""
    parts = []
    if not is_blank(alpha.same_group_mass):
        chance = _by_chance(contents.clients, "group")
        parts.append(f"{alpha.same_group_mass:.3f} on clients with the same kind of data (same-group mass{chance})")
    if not is_blank(alpha.same_tier_mass) and len(contents.summary.tier_names) > 1:
        chance = _by_chance(contents.clients, "tier")
        parts.append(f"{alpha.same_tier_mass:.3f} on clients of the same tier (same-tier mass{chance})")
    own, others, effective = (
        "-" if is_blank(value) else f"{value:.{digits}f}"
        for value, digits in ((alpha.self_weight, 3), (alpha.nonzero, 1), (alpha.effective_partners, 1))
    )
    parts.append(f"{own} on the client itself")
    return (
        f"{method}: weight {_listed(parts)}; a client learns from {others} clients, itself included "
        f"({effective} effective partners)."
    )


def reasons(runs: Sequence[Run]) -> list[str]:
    """What the mixing rule chose, and by which losses: of a single run."""
    if len(runs) != 1 or _share(runs[0]) is None:
        return []
    chosen, alone, everybody = _outlook(runs[0])
    found = [f"{tables.share_sentence(_share(runs[0]))}."]
    if not any(is_blank(loss) for loss in (chosen, alone, everybody)):
        found.append(
            f"one step ahead, the mean validation loss of clients would be {chosen:.4f} with this choice, {alone:.4f} "
            f"if everybody learned alone and {everybody:.4f} if everybody learned from everybody. {TIES}"
        )
    return found


def reason_grid(runs: Sequence[Run]) -> Grid | None:
    """What the mixing rule chose in each of several runs, and by which losses; None if nothing was looked for."""
    chosen = [run for run in runs if _share(run) is not None]
    if len(runs) < 2 or not chosen:
        return None
    rows = [[str(run.summary.seed), _share_text(_share(run)), *map(_loss, _outlook(run))] for run in chosen]
    columns = ["seed", "share", "loss with it", "loss if alone", "loss if everybody shares"]
    return Grid(columns, rows, title="the share that was chosen, by the validation loss one step ahead", note=TIES)


TIES = (
    "Among choices that are as good as the best, the one nearest to a share of 0.7 is taken. Instead of leaving "
    "clients nearly alone, it is the best with four partners or more, unless that is worse by more than chance or by "
    "4 %."
)


def _share(run: Run) -> float | None:
    alpha = run.summary.main.alpha
    return None if alpha is None else alpha.share


def _share_text(share: float) -> str:
    return "0 (alone)" if share == 0 else "everybody" if share >= tables.EVERYBODY else f"{share:g}"


def _outlook(run: Run) -> tuple[float | None, float | None, float | None]:
    """The losses one step ahead: with what was chosen, alone, and with everybody."""
    chosen = next((row.get("loss") for row in run.outlook if row.get("chosen") == 1), None)
    ends = (run.outlook[0].get("loss"), run.outlook[-1].get("loss")) if run.outlook else (None, None)
    return chosen, *ends


def _loss(value: float | None) -> str:
    return "-" if is_blank(value) else f"{value:.4f}"


def _by_chance(runs: Sequence[Rows], column: str) -> str:
    """The weight that clients alike in a column would get if all weights were equal; empty if the column is unknown."""
    labels = [[row.get(column) for row in rows] for rows in runs]
    if not labels or any(None in of_run for of_run in labels):
        return ""
    # Each of the n clients with a label has mass n / N on them, and they are n / N of all clients.
    mass = mean(sum(count**2 for count in Counter(of_run).values()) / len(of_run) ** 2 for of_run in labels)
    return f"; {mass:.3f} if all weights were equal"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
