"""The tables of a run and the lines below them."""

import math

import pytest
from rich.console import Console
from summaries import clients, several, single

from hetperm.report import tables
from hetperm.report.summary import Gain, Summary

LARGEST_FIRST = ["flagship", "mid", "entry"]


def lines_of(table, width: int = 120) -> list[list[str]]:
    """The words of every line of a table, as a terminal shows it."""
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return [line.split() for line in console.export_text().splitlines() if line.split()]


# All methods


def summary(**changes) -> Summary:
    """A summary without what a closing table can do without."""
    method = {
        "accuracy": {"mean": 0.9, "std": 0.02, "worst": 0.8},
        "loss": {"mean": 0.3},
        "alpha": {"effective_partners": 2.5, "nonzero": 3.0, "self_weight": 0.5, "same_group_mass": 0.99},
        "cost": {"visits": 12, "rounds": 3, "client_steps": 40, "bytes_down": 2**20, "bytes_up": 2**20},
    }
    rival = {**method, "accuracy": {"mean": 0.7, "std": 0.1, "worst": math.nan}, "alpha": None}
    about = {"algorithm": "perm", "dataset": "digits", "num_clients": 4, "seed": 0}
    return Summary.from_json({**about, **method, "baselines": {"fedavg-ft": rival}, **changes})


def test_the_closing_table_has_a_line_for_each_method_and_fits_a_terminal():
    *_, perm, rival = lines_of(tables.closing_table(summary()), width=80)  # a cell that does not fit ends in "…"
    assert perm == "perm 0.900 ± 0.020 0.800 2.5 12 3 10 2.0".split()
    assert rival == "fedavg-ft 0.700 ± 0.100 - - 12 3 10 2.0".split()


def test_the_table_of_several_seeds_shows_the_spread_over_seeds():
    spread = {"accuracy": {"mean": 0.005}, "baselines": {"fedavg-ft": {"accuracy": {"mean": 0.001}}}}
    title, _, _, perm, rival = lines_of(tables.closing_table(summary(seeds=[0, 1], spread=spread)))
    assert "seeds 0, 1: mean test accuracy (± over seeds)" in " ".join(title)
    assert (perm[1:4], rival[1:4]) == ("0.900 ± 0.005".split(), "0.700 ± 0.001".split())
    rows = tables.results_rows(summary(seeds=[0, 1], spread=spread))
    assert [(row["method"], row["accuracy_spread"], row["loss_spread"]) for row in rows] == [
        ("perm", 0.005, None),
        ("fedavg-ft", 0.001, None),
    ]
    assert "| perm | 0.900 ± 0.005 | 0.300 | 0.800 | 2.5 | 3 | 10 | 2.0 |" in tables.results_markdown(rows).splitlines()


def test_mixing_weights_and_visits_have_a_line_each():
    assert tables.mixing_lines(summary()) == [
        "perm: same-group mass 0.990, weight on oneself 0.500, a client learns from 3.0 (2.5 effective)"
    ]
    history = [{"epoch_visits": 10, "epoch_rounds": 3}, {"epoch_visits": 12, "epoch_rounds": 4}]
    assert tables.visit_lines({"perm": [history], "local": [[{"epoch": 1}]]}, 5) == [
        "perm: 11 visits an epoch; a tour of all visits takes 3.5 rounds (all pairs would be 25 visits in 5 rounds)"
    ]


def test_attendance_has_a_line_only_if_somebody_was_away():
    def lines(absent: float) -> list[str]:
        of = {"asked": 22.0, "absent": absent, "most": absent / 22, "missed_steps": 5 * absent}
        return tables.attendance_lines(summary(attendance=of))

    assert lines(2.0) == ["perm: a client was away 2 of 22 times (at most 9% of them) and missed 10 steps"]
    assert lines(0.0) == [] == tables.attendance_lines(summary())


# By tier


def test_the_tier_table_has_the_largest_width_first_and_all_clients_last():
    title, head, _, *lines = lines_of(tables.tier_table(Summary.from_json(single()), clients()))
    assert title == "accuracy by tier".split()
    assert head == "tier clients width params perm local fedavg-ft partners".split()
    assert lines[:4] == [
        "flagship 1 1 1,600 0.902 0.802 0.852 4.0".split(),
        "mid 2 1/4 400 0.852 0.752 0.802 4.0".split(),
        "entry 3 1/16 100 0.803 0.703 0.753 5.0".split(),
        "all 6 0.836 0.736 0.786 4.5".split(),
    ]
    assert lines[4] == "Trained with 100 parameters whatever the tier: fedavg-ft.".split()


def test_the_tier_table_of_several_seeds_has_the_spread_over_them():
    rows = [row for seed in range(3) for row in clients(seed)]
    table = lines_of(tables.tier_table(Summary.from_json(several()), rows))
    assert "flagship 1 1 1,600 0.912 ± 0.010 0.802 ± 0.000 0.852 ± 0.000 4.0".split() in table
    assert "all 6 0.846 ± 0.010 0.736 ± 0.000 0.786 ± 0.000 4.5".split() in table


def test_a_tier_that_was_not_scored_has_a_dash_and_so_have_partners_without_clients():
    summary = single()
    summary["tiers"]["mid"]["accuracy"] = None
    summary["baselines"]["local"]["tiers"]["mid"]["accuracy"] = math.nan
    assert "mid 2 1/4 400 - - 0.802 -".split() in lines_of(tables.tier_table(Summary.from_json(summary)))


def test_the_tier_table_works_for_one_tier_and_without_alpha():
    summary = single() | {"alpha": None, "tiers": {"full": {"clients": 6, "width": 1.0, "accuracy": 0.5}}}
    summary["baselines"] = {}
    _, head, _, *lines = lines_of(tables.tier_table(Summary.from_json(summary)))
    assert head == "tier clients width params perm".split()
    assert lines == ["full 6 1 - 0.500".split(), "all 6 0.836".split()]


def test_a_tier_has_its_own_size_also_if_the_algorithm_needs_one_size():
    summary = single()
    rival = summary["baselines"].pop("fedavg-ft")
    turned = Summary.from_json({**summary, **rival, "algorithm": "fedavg-ft", "baselines": {"perm": summary}})
    assert turned.tier_names == LARGEST_FIRST
    assert "flagship 1 1 1,600 0.852 0.902".split() in lines_of(tables.tier_table(turned))


def test_a_table_with_many_methods_stands_on_its_side_and_fits_the_page():
    summary = several()
    for k in range(12):
        summary["baselines"][f"rival-{k}"] = summary["baselines"]["local"]
    shown = tables.tier_grid(Summary.from_json(summary))
    assert list(shown.columns) == ["tier", *LARGEST_FIRST, "all"]
    assert [row[0] for row in shown.rows][:4] == ["clients", "width", "params", "perm"]
    assert shown.width <= tables.WIDE
    assert shown.rows[3] == ("perm", "0.912 ± 0.010", "0.862 ± 0.010", "0.813 ± 0.010", "0.846 ± 0.010")


def test_gains_are_listed_rival_by_rival_and_a_single_run_has_none():
    assert tables.paired_lines(Summary.from_json(several())) == [
        "perm over local: +0.110 ± 0.010 (every seed positive)",
        "perm over fedavg-ft: +0.060 ± 0.010 (every seed positive)",
    ]
    assert tables.paired_lines(Summary.from_json(single())) == []


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ({"mean": 0.02, "std": 0.03, "differences": [0.05, 0.02, -0.01]}, "+0.020 ± 0.030 (2 of 3 seeds positive)"),
        ({"mean": -0.02, "std": 0.01, "differences": [-0.03, -0.01]}, "-0.020 ± 0.010 (every seed negative)"),
        ({"mean": 0.0, "std": 0.0, "differences": [0.0, 0.0]}, "+0.000 ± 0.000 (0 of 2 seeds positive)"),
        ({"mean": 0.04, "std": None, "differences": [0.04]}, "+0.040 (one seed)"),
        ({"mean": None, "std": None, "differences": [0.1, None]}, "- (1 of 2 seeds positive)"),
    ],
)
def test_a_gain_says_how_many_seeds_agree(gain, said):
    assert tables.gain_text(Gain(**gain)) == said


def test_the_profile_table_has_a_column_for_every_key_and_a_dash_where_there_is_nothing():
    rows = [
        {"tier": "large", "clients": 1, "width": 1.0, "params": 11_173_962, "mmacs": 556.3, "train_mb": None},
        {"tier": "small", "clients": 11, "width": 0.0625, "params": 44_000, "mmacs": 2.345, "wire_mb": 0.17},
    ]
    title, head, _, *lines = lines_of(tables.profile_table(rows, title="mobile"))
    assert (title, head) == (["mobile"], "tier clients width params MMACs train MB wire MB".split())
    assert lines == [
        "large 1 1 11,173,962 556 - -".split(),
        "small 11 1/16 44,000 2.35 - 0.17".split(),
    ]
