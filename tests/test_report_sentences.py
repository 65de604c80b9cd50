"""What a page says of a run in sentences."""

from dataclasses import replace

import pytest
from summaries import single

from hetperm.report.contents import Contents
from hetperm.report.sentences import about, gain_grid, outcome, title
from hetperm.report.summary import Summary


def gain(mean: float, low: float | None, high: float | None, verdict: str, each=(0.1, 0.2)) -> dict:
    return {"mean": mean, "low": low, "high": high, "verdict": verdict, "each": list(each)}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            gain(0.05, 0.04, 0.06, "ahead"),
            "0.050 ahead of fedavg-ft, the best rival, with 0.786 (95% interval of the gain over seeds: +0.040 ",
        ),
        (
            gain(-0.05, -0.06, -0.04, "behind"),
            "0.050 behind fedavg-ft, the best rival, with 0.786 (95% interval of the gain over seeds: -0.060 ",
        ),
        (
            gain(0.01, -0.06, 0.08, "level"),
            "level with fedavg-ft, the best rival, with 0.786 (95% interval of the gain over seeds: -0.060 ",
        ),
        (gain(0.05, None, None, "one seed"), "0.050 ahead of fedavg-ft, the best rival, with 0.786."),
    ],
)
def test_the_outcome_compares_with_the_best_rival(found, said):
    pairs = {"local": gain(0.3, 0.2, 0.4, "ahead"), "fedavg-ft": found}
    sentence = outcome(Summary.from_json(single()), pairs, "seeds")
    assert sentence.startswith(f"perm reaches a mean test accuracy of 0.836: {said}")


def test_without_rivals_the_outcome_is_the_figure():
    summary = Summary.from_json(single())
    assert outcome(summary, {}, "clients") == "perm reaches a mean test accuracy of 0.836."
    blank = replace(summary, main=replace(summary.main, score=replace(summary.main.score, mean=None)))
    assert outcome(blank, {}, "clients") == ""


def test_a_gain_in_a_figure_of_which_less_is_better_says_so():
    grid = gain_grid(
        {"local": gain(-0.1, -0.3, 0.1, "level", (0.1, -0.3))},
        ours="perm",
        over="clients",
        metric="mae",
        better="lower",
    )
    assert grid.title == "gain of perm in test mae, on the same clients; positive: perm has the lower mae"
    assert grid.rows == [["local", "-0.100", "-0.300 to +0.100", "1 of 2", "level"]]


def test_data_of_ones_own_are_called_so():
    summary = replace(
        Summary.from_json(single()), dataset="own", partition=None, model="torch.nn.modules.container.Sequential"
    )
    assert title(summary) == "perm on your own data"
    said = about(Contents(summary, clients=[[{"n_train": 30}, {"n_train": 12}]]))
    assert "your own data (42 training samples), 6 clients, model Sequential, " in said


def test_a_rival_without_a_figure_is_not_the_best():
    summary = Summary.from_json(single())
    blank = replace(summary.baselines["fedavg-ft"], score=replace(summary.baselines["fedavg-ft"].score, mean=None))
    summary = replace(summary, baselines={**summary.baselines, "fedavg-ft": blank})
    pairs = {name: gain(0.05, None, None, "one seed") for name in ("local", "fedavg-ft")}
    assert "ahead of local, its rival" in outcome(summary, pairs, "seeds")
    assert outcome(summary, {"fedavg-ft": pairs["fedavg-ft"]}, "seeds").endswith("of 0.836.")
