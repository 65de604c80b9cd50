"""Tables over settings and seeds, by hand: intervals, who is first, what diverged, and pictures of them."""

import math

import pytest

from hetperm.report import comparison, comparison_pictures
from hetperm.report.comparison import best_rival, sample
from hetperm.report.paired import Difference, Sample, paired
from hetperm.report.pictures import png

CASES = {"a": "setting A", "b": "setting B"}


def row(setting, method, seed, accuracy, *, variant="steps", tiers=(0.5,), steps=100, macs=1.0, sent=1):
    """The row of a cell; without an accuracy it diverged."""
    about = {"setting": setting, "method": method, "seed": seed, "variant": variant, "seconds": 2.0, "num_clients": 2}
    if accuracy is None:
        return {**about, "diverged": "went non-finite"}
    return {
        **about,
        "diverged": None,
        "accuracy": {"mean": accuracy, "worst": accuracy - 0.1},
        "loss": {"mean": 1 - accuracy},
        "tiers": {f"tier {k}": {"accuracy": value} for k, value in enumerate(tiers)},
        "alpha": None,
        "cost": {"client_steps": steps, "macs": macs, "bytes_down": sent, "bytes_up": 0, "rounds": 3},
    }


def rows_of(setting, method, *accuracies, **more):
    return [row(setting, method, seed, accuracy, **more) for seed, accuracy in enumerate(accuracies)]


# Intervals


def test_a_paired_interval_is_that_of_students_t_by_hand():
    # Differences 0.01, 0.02, 0.03: mean 0.02, deviation 0.01; t with 2 degrees of freedom at 97.5% is 4.302653.
    gain = paired(Sample({0: 0.91, 1: 0.82, 2: 0.73}), Sample({0: 0.90, 1: 0.80, 2: 0.70}))
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.02, 0.02 - half, 0.02 + half), abs=1e-6)
    assert (gain.seeds, gain.verdict) == (3, "level")


def test_differences_are_taken_seed_by_seed_whatever_the_order():
    gain = paired(Sample({0: 0.5, 1: 0.9}), Sample({1: 0.8, 0: 0.4, 7: 0.0}))
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.1, 0.1, 0.1))
    assert gain.verdict == "ahead"
    assert paired(Sample({0: 0.4, 1: 0.8}), Sample({0: 0.5, 1: 0.9})).verdict == "behind"


def test_one_seed_has_no_interval_and_none_no_difference():
    assert paired(Sample({0: 0.5}), Sample({0: 0.25})) == Difference(0.25, None, None, 1)
    assert paired(Sample({0: 0.5}), Sample({1: 0.25})) is None
    assert paired(Sample({0: 0.5, 1: None}), Sample({0: 0.25, 1: 0.25})) is None


def test_a_method_that_diverged_with_a_seed_has_no_mean():
    one = sample([*rows_of("a", "perm", 0.9, None, 0.8)], setting="a", method="perm")
    assert (one.mean, one.diverged, str(one)) == (None, 1, "diverged (1 of 3)")


# Who wins where

ROWS = [
    *rows_of("a", "perm", 0.92, 0.93, 0.94, tiers=(0.9, 0.8)),
    *rows_of("a", "local", 0.90, 0.90, 0.90, tiers=(0.7, 0.6)),
    *rows_of("a", "ifca", 0.91, 0.91, 0.91, tiers=(0.5, 0.4)),
    *rows_of("b", "perm", 0.60, 0.61, 0.62),
    *rows_of("b", "local", 0.70, 0.71, 0.73),
    *rows_of("b", "ifca", 0.99, None, 0.99),
]
METHODS = ("perm", "local", "ifca")


def test_the_best_rival_is_one_that_did_not_diverge():
    assert best_rival(ROWS, "a", ["local", "ifca"]) == "ifca"
    assert best_rival(ROWS, "b", ["local", "ifca"]) == "local"
    assert best_rival(rows_of("a", "local", None), "a", ["local"]) is None


def test_the_first_is_bold_and_ours_is_compared_with_the_best_rival():
    table = comparison.ranking(ROWS, CASES, METHODS, ours=["perm"])
    first, second = table.grid.rows
    assert first[:4] == ["setting A", "**0.930 ± 0.010**", "0.900 ± 0.000", "0.910 ± 0.000"]
    assert first[4] == "+0.020 [-0.005, +0.045] ifca"
    assert second[:4] == ["setting B", "0.610 ± 0.010", "**0.713 ± 0.015**", "diverged (1 of 3)"]
    assert second[4].startswith("-0.103 [")
    assert table.rows[5] == {
        "setting": "b",
        "method": "ifca",
        "mean": None,
        "spread": 0.0,
        "seeds": 3,
        "diverged": 1,
        "seed_0": 0.99,
        "seed_1": None,
        "seed_2": 0.99,
    }


def test_who_wins_where_says_also_where_ours_does_not():
    at_equal_flops = [*rows_of("a", "perm", 0.92, 0.93, 0.94), *rows_of("a", "local", 0.95, 0.96, 0.97)]
    table = comparison.wins({"steps": ROWS, "macs": at_equal_flops}, CASES, METHODS, ours=["perm"])
    first, second = table.grid.rows
    assert list(table.grid.columns) == [
        *("setting", "first", "perm", "best rival", "difference", "", "at equal FLOPs", "worst client", "worst tier")
    ]
    assert (first[1], first[3], first[5]) == ("perm", "0.910 ± 0.000 ifca", "level")
    assert first[6] == "-0.030 [-0.030, -0.030] local"
    assert first[7:] == ["0.830 / 0.810", "0.800 / 0.400"]
    assert (second[1], second[5], second[6]) == ("local", "behind", "-")


def test_ours_that_diverged_is_behind_and_all_that_diverged_have_no_first():
    table = comparison.wins(
        {"steps": [*rows_of("a", "perm", 0.9, None), *rows_of("a", "local", 0.8, 0.8), *rows_of("b", "perm", None)]},
        CASES,
        ("perm", "local"),
        ours=["perm"],
    )
    assert table.grid.rows[0][1:6] == ["local", "diverged (1 of 2)", "0.800 ± 0.000 local", "-", "behind"]
    assert table.grid.rows[1][1:3] == ["all diverged", "diverged (1 of 1)"]


def test_worst_clients_and_tiers_stand_side_by_side():
    table = comparison.worst(ROWS, CASES, METHODS)
    assert table.grid.rows[0] == ["setting A", "0.830 / 0.800", "0.800 / 0.600", "0.810 / 0.400"]
    assert table.grid.rows[1][3] == "diverged (1 of 3)"


def test_spending_is_relative_to_ours_at_equal_steps():
    equal = [*rows_of("a", "perm", 0.9, macs=4.0), *rows_of("a", "local", 0.9, macs=8.0, sent=0)]
    matched = [*rows_of("a", "perm", 0.9, macs=4.0), *rows_of("a", "local", 0.9, macs=4.2)]
    table = comparison.spending({"steps": equal, "macs": matched}, {"a": "A"}, ("perm", "local"), ours="perm")
    assert table.grid.rows == [["A, steps", "1.00", "1.00"], ["A, FLOPs", "1.00", "1.05"]]


def test_methods_of_one_setting_come_best_first_and_those_that_diverged_last():
    rows = [*rows_of("a", "ifca", None, 0.9), *rows_of("a", "local", 0.7, 0.8), *rows_of("a", "perm", 0.8, 0.9)]
    table = comparison.methods_table(rows, ("ifca", "local", "perm", "fedavg"))
    assert [line[0] for line in table.grid.rows] == ["**perm**", "local", "ifca"]
    assert table.grid.rows[1][1:] == ["0.750 ± 0.071", "0.250 ± 0.071", "0.650", "-", "3", "50", "0.0"]
    assert table.grid.rows[2][1] == "diverged (1 of 2)"


# Other tables


def test_an_ablation_is_compared_with_the_default_of_the_same_seeds():
    rows = [
        *rows_of("a", "perm", 0.90, 0.80, variant="default"),
        *rows_of("a", "perm", 0.85, 0.75, variant="nested = skip"),
        *rows_of("a", "perm", None, 0.75, variant="step_cap = 0.0"),
    ]
    names = ["nested = skip", "step_cap = 0.0"]
    table = comparison.ablations(rows, {"a": "A"}, names, default="default")
    assert table.grid.rows == [
        ["default", "0.850 ± 0.071"],
        ["nested = skip", "0.800, **-0.050 [-0.050, -0.050]**"],
        ["step_cap = 0.0", "diverged (1 of 2)"],
    ]
    assert [row["difference_mean"] for row in table.rows] == pytest.approx([-0.05, math.nan], nan_ok=True)


def mixing_row(setting, seed, *, N, partners, mass):
    alpha = {"effective_partners": partners, "nonzero": 4.0, "self_weight": 0.5, "same_group_mass": mass}
    about = {"setting": setting, "method": "perm", "seed": seed, "num_clients": N, "group_size": 10.0, "seconds": 3.0}
    return {**about, "diverged": None, "alpha": alpha}


def test_mixing_weights_are_averaged_over_seeds():
    rows = [mixing_row("a", seed, N=1000, partners=8.0 + seed, mass=1.0) for seed in (0, 1)]
    rows += [mixing_row("b", 0, N=50, partners=2.0, mass=None)]
    table = comparison.mixing_table(rows, CASES)
    assert table.grid.rows == [
        ["setting A", "1,000", "10.0", "8.5 ± 0.7", "4.0 ± 0.0", "0.500 ± 0.000", "1.000 ± 0.000", "3.0"],
        ["setting B", "50", "10.0", "2.0", "4.0", "0.500", "-", "3.0"],
    ]
    figure = comparison_pictures.against_clients(table.rows, {"effective_partners": "partners"}, title="")
    assert figure.axes[0].get_ylabel() == "partners"


def test_round_times_have_a_line_for_every_model_and_method():
    timed = {"seconds": 0.5, "ratio": 1.25, "ratio_low": 1.0, "ratio_high": 1.5, "cpu_ratio": 1.2, "gradients": 20.0}
    rows = [{"setting": "a", "methods": {"fedavg": timed, "perm": timed}}]
    table = comparison.runtime_table(rows, CASES, ("fedavg", "perm"))
    assert table.grid.rows[1] == ["setting A", "perm", "0.5", "1.25 (1.00 to 1.50)", "1.20", "20"]
    assert len(png(comparison_pictures.side_by_side(table.rows, title=""))) > 1000


def test_a_forest_has_a_dot_for_every_known_difference():
    series = {"x": [Difference(0.1, 0.0, 0.2, 5), None], "y": [Difference(0.1, None, None, 1)] * 2}
    axes = comparison_pictures.forest(["one", "two"], series, title="", axis="gain").axes[0]
    assert [len(container[0].get_xdata()) for container in axes.containers] == [1, 2]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
