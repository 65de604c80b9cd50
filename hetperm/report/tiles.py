"""The figures that a reader looks for first, as tiles at the top of a page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetperm.report.summary import Rows, Summary, is_blank

GOOD, BAD = "good", "bad"


@dataclass(frozen=True)
class Tile:
    """A figure with what it is and a few words to judge it by; `tone` colours it."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


def of_run(summary: Summary, pairs: Mapping[str, Mapping[str, Any]]) -> list[Tile]:
    """What was reached, by how much it leads, the worst client, partners and traffic, as far as they are known.

    Args:
        pairs: rival -> the gain of the algorithm over it, as `charts.pair` gives it.
    """
    best = best_rival(summary, pairs)
    tiles = [_reached(summary), _gain(best, pairs), _worst(summary, best), _partners(summary), _traffic(summary, best)]
    return [tile for tile in tiles if tile is not None]


def best_rival(summary: Summary, rivals: Mapping[str, Any]) -> str | None:
    """The rival with the best mean; None if there are no rivals."""
    return max(rivals, key=lambda rival: summary.rank(summary.baselines[rival].score.mean), default=None)


def _reached(summary: Summary) -> Tile | None:
    reached, spread = summary.main.score.mean, summary.spread_of(summary.algorithm).score.mean
    if is_blank(reached):
        return None
    over = f"mean over {summary.num_clients} clients"
    note = over if is_blank(spread) else f"± {spread:.3f} over {len(summary.seeds)} seeds"
    note += "; lower is better" if summary.better == "lower" else ""
    return Tile(f"test {summary.metric} of {summary.algorithm}", f"{reached:.3f}", note)


def _gain(best: str | None, pairs: Mapping[str, Mapping[str, Any]]) -> Tile | None:
    if best is None:
        return None
    gain = pairs[best]
    interval = "" if gain["low"] is None else f", 95% interval {gain['low']:+.3f} to {gain['high']:+.3f}"
    tone = {"ahead": GOOD, "behind": BAD}.get(gain["verdict"], "")
    return Tile(f"gain over {best}", f"{gain['mean']:+.3f}", f"{gain['verdict']}{interval}", tone)


def _worst(summary: Summary, best: str | None) -> Tile | None:
    worst = summary.main.score.worst
    if is_blank(worst):
        return None
    theirs = None if best is None else summary.baselines[best].score.worst
    return Tile("worst client", f"{worst:.3f}", "" if is_blank(theirs) else f"{best} {theirs:.3f}")


def _partners(summary: Summary) -> Tile | None:
    alpha = summary.main.alpha
    if alpha is None or is_blank(alpha.effective_partners):
        return None
    mass = alpha.same_group_mass
    note = f"of {summary.num_clients} clients" if is_blank(mass) else f"{100 * mass:.0f}% of the weight on its own kind"
    return Tile("effective partners", f"{alpha.effective_partners:.1f}", note)


def _traffic(summary: Summary, best: str | None) -> Tile | None:
    sent = summary.main.cost.mb_sent
    if is_blank(sent):
        return None
    theirs = None if best is None else summary.baselines[best].cost.mb_sent
    note = "all clients, down and up" if is_blank(theirs) else f"{best} {_mb(theirs)}"
    return Tile("sent, down and up", _mb(sent), note)


def _mb(value: float) -> str:
    return f"{value:,.1f} MB" if value < 100 else f"{value:,.0f} MB"


def of_tiers(tiers: Rows) -> list[Tile]:
    """Whether a model fits each tier, from the rows of a resource benchmark."""
    tones = {"fits": GOOD, "does not fit": BAD}
    return [
        Tile(str(row.get("tier")), str(row["verdict"]), _memory(row), tones.get(str(row["verdict"]), ""))
        for row in tiers
        if not is_blank(row.get("verdict"))
    ]


def _memory(row: Mapping[str, Any]) -> str:
    needed, budget = row.get("predicted_mb"), row.get("budget_mb")
    known = all([isinstance(value, int | float) and not is_blank(value) for value in (needed, budget)])
    return f"{needed:.3g} MB of {budget:g}" if known else ""
