"""Tables and pictures of a run."""

import math

import numpy as np
import pytest
from rich.console import Console

from hetperm.config import ALGORITHMS
from hetperm.report import pictures, tables

# Tables


def summary(**changes):
    method = {
        "accuracy": {"mean": 0.9, "std": 0.02, "worst": 0.8},
        "loss": {"mean": 0.3},
        "alpha": {"effective_partners": 2.5, "nonzero": 3.0, "self_weight": 0.5, "same_group_mass": 0.99},
        "cost": {"visits": 12, "rounds": 3, "client_steps": 40, "bytes_down": 2**20, "bytes_up": 2**20},
    }
    rival = {**method, "accuracy": {"mean": 0.7, "std": 0.1, "worst": math.nan}, "alpha": None}
    return {
        "algorithm": "perm",
        "dataset": "digits",
        "num_clients": 4,
        "seed": 0,
        **method,
        "baselines": {"fedavg-ft": rival},
        **changes,
    }


def printed(table) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    return console.export_text()


def test_the_closing_table_has_a_line_for_each_method_and_fits_a_terminal():
    text = printed(tables.closing_table(summary()))
    perm, rival = (line.split() for line in text.splitlines() if line.split()[:1] in (["perm"], ["fedavg-ft"]))
    assert perm == "perm 0.900 ± 0.020 0.800 2.5 12 3 10 2.0".split()
    assert rival == "fedavg-ft 0.700 ± 0.100 - - 12 3 10 2.0".split()
    assert "…" not in text


def test_the_table_of_several_seeds_shows_the_spread_over_seeds():
    spread = {"accuracy": {"mean": 0.005}, "baselines": {"fedavg-ft": {"accuracy": {"mean": 0.001}}}}
    text = printed(tables.closing_table(summary(seeds=[0, 1], spread=spread)))
    assert "0.900 ± 0.005" in text
    assert "0.700 ± 0.001" in text
    assert "seeds 0, 1" in text
    rows = tables.results_rows(summary(seeds=[0, 1], spread=spread))
    assert [(row["method"], row["accuracy_spread"], row["loss_spread"]) for row in rows] == [
        ("perm", 0.005, None),
        ("fedavg-ft", 0.001, None),
    ]
    assert "| perm | 0.900 ± 0.005 | 0.300 | 0.800 | 2.5 | 3 | 10 | 2.0 |" in tables.markdown(rows)


def test_mixing_weights_and_visits_are_told_in_a_line_each():
    assert tables.mixing_lines(summary()) == [
        "perm: same-group mass 0.990, weight on oneself 0.500, a client learns from 3.0 (2.5 effective)"
    ]
    history = [{"epoch_visits": 10, "epoch_rounds": 3}, {"epoch_visits": 12, "epoch_rounds": 4}]
    assert tables.visit_lines({"perm": [history], "local": [[{"epoch": 1}]]}, 5) == [
        "perm: 11 visits in 3.5 rounds an epoch (at most 12 in 4; all pairs would be 25 in 5)"
    ]


# Pictures


def test_clients_are_ordered_by_group_and_otherwise_so_that_clusters_stand_together():
    cluster = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    alpha = (cluster[:, None] == cluster) / (cluster[:, None] == cluster).sum(1, keepdims=True)
    assert cluster[pictures.order(alpha, cluster)].tolist() == sorted(cluster)
    found = cluster[pictures.order(alpha)]
    assert (found[1:] != found[:-1]).sum() == 2
    assert sorted(pictures.order(alpha)) == list(range(8))


@pytest.mark.parametrize("N", [1, 2, 3])
def test_a_few_clients_have_an_order_too(N):
    assert sorted(pictures.order(np.eye(N))) == list(range(N))


def history(*accuracies: float, **extra) -> list[dict]:
    return [{"client_steps": 10 * (k + 1), "rounds": 0, "accuracy_mean": a, **extra} for k, a in enumerate(accuracies)]


def test_the_deployed_model_is_the_tail_average_once_it_has_begun():
    rows = [{"accuracy_mean": 0.5}, {"accuracy_mean": 0.6, "tail_accuracy_mean": 0.7}, {"accuracy_mean": ""}]
    assert np.array_equal(pictures.deployed(rows, "accuracy_mean"), [0.5, 0.7, math.nan], equal_nan=True)


def test_a_method_is_a_line_with_the_spread_over_seeds_as_band():
    figure = pictures.curves(
        {"perm": [history(0.5, 0.7), history(0.7, 0.9)], "local": [history(0.4, 0.4)]},
        figures=[("accuracy_mean", "accuracy")],
        against=[("client_steps", "steps", 2)],
    )
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines.keys() == {"perm", "local"}
    assert np.allclose(lines["perm"].get_xydata(), [[5, 0.6], [10, 0.8]])
    assert len(axes.collections) == 1


def test_the_lines_that_the_caller_names_are_thicker_and_above_the_others():
    runs = {"perm": [history(0.5, 0.7)], "local": [history(0.4, 0.4)]}
    cost = [("client_steps", "", 1)]
    figure = pictures.curves(runs, figures=[("accuracy_mean", "")], against=cost, strong=["local"])
    perm, local = figure.axes[0].lines
    assert local.get_linewidth() > perm.get_linewidth()
    assert local.get_zorder() > perm.get_zorder()


def test_a_method_that_ends_with_a_last_step_is_drawn_only_where_that_was_taken():
    rows = history(0.4, 0.9, finished=1)
    rows[0]["finished"] = 0
    figure = pictures.curves({"x": [rows]}, figures=[("accuracy_mean", "")], against=[("client_steps", "", 1)])
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[20, 0.9]]


def test_a_method_of_which_one_point_is_known_has_the_spread_as_error_bar():
    runs = {"x": [history(0.4), history(0.6)]}
    figure = pictures.curves(runs, figures=[("accuracy_mean", "")], against=[("client_steps", "", 1)])
    (drawn,) = figure.axes[0].containers
    assert np.allclose(drawn.lines[2][0].get_segments()[0][:, 1], [0.5 - np.sqrt(0.02), 0.5 + np.sqrt(0.02)])


def test_a_method_that_pays_nothing_is_a_dashed_line():
    figure = pictures.curves(
        {"local": [history(0.4, 0.5)]}, figures=[("accuracy_mean", "")], against=[("rounds", "", 1)]
    )
    (line,) = figure.axes[0].lines
    assert (line.get_linestyle(), list(line.get_ydata())) == ("--", [0.5, 0.5])


def test_pictures_are_files_with_the_same_bytes_each_time():
    for groups in ([0, 1, 0, 1], None):
        one, other = (pictures.png(pictures.alpha_map(np.eye(4), groups, title="who")) for _ in range(2))
        assert one == other
        assert len(one) > 5000


def test_every_method_has_a_colour_of_its_own():
    assert set(ALGORITHMS) <= set(pictures.COLOURS)
    assert len(set(pictures.COLOURS.values())) == len(pictures.COLOURS)
