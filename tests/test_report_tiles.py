"""The figures at the top of a page."""

from dataclasses import replace

from summaries import several, single
from test_report_page import Page, write_run

from hetperm.report.page import render
from hetperm.report.summary import Method, Summary
from hetperm.report.tiles import Tile, of_run, of_tiers

AHEAD = {"mean": 0.05, "low": 0.01, "high": 0.09, "verdict": "ahead"}


def test_a_run_is_judged_by_its_best_rival():
    summary = Summary.from_json(single())  # perm 0.836, local 0.736, fedavg-ft 0.786
    reached, gain, worst, partners, sent = of_run(summary, {"local": AHEAD, "fedavg-ft": AHEAD})
    assert reached == Tile("test accuracy of perm", "0.836", "mean over 6 clients")
    assert gain == Tile("gain over fedavg-ft", "+0.050", "ahead, 95% interval +0.010 to +0.090", "good")
    assert (worst.value, worst.note) == ("0.801", "fedavg-ft 0.751")
    assert partners == Tile("effective partners", "4.5", "95% of the weight on its own kind")
    assert (sent.value, sent.note) == ("2.0 MB", "fedavg-ft 2.0 MB")


def test_where_less_is_better_the_rival_with_the_least_is_the_best():
    summary = replace(Summary.from_json(single()), better="lower")
    behind = {"mean": -0.1, "low": None, "high": None, "verdict": "behind"}
    _, gain, *_ = of_run(summary, {"local": behind, "fedavg-ft": behind})
    assert gain == Tile("gain over local", "-0.100", "behind", "bad")


def test_several_seeds_have_their_spread_and_a_run_without_rivals_no_gain():
    assert of_run(Summary.from_json(several()), {})[0].note == "\u00b1 0.010 over 3 seeds"
    assert [tile.label for tile in of_run(Summary.from_json(single()), {})] == [
        "test accuracy of perm",
        "worst client",
        "effective partners",
        "sent, down and up",
    ]


def test_what_is_not_known_has_no_tile():
    assert of_run(Summary("perm", "digits", 3, Method()), {}) == []


def test_the_verdict_of_every_tier_has_a_tile():
    rows = [
        {"tier": "big", "verdict": "fits", "predicted_mb": 124.09, "budget_mb": 128},
        {"tier": "small", "verdict": "does not fit", "predicted_mb": "?", "budget_mb": 4},
        {"tier": "odd", "verdict": "undecidable"},
        {"tier": "none"},
    ]
    assert of_tiers(rows) == [
        Tile("big", "fits", "124 MB of 128", "good"),
        Tile("small", "does not fit", "", "bad"),
        Tile("odd", "undecidable"),
    ]


def test_tiles_are_on_the_page(tmp_path):
    page = Page(render(write_run(tmp_path / "run")))
    assert page.said("strong")[:2] == ["0.836", "+0.050"]
