"""Which models are scored after which epoch: by counted work, unless the configuration says it."""

from dataclasses import replace

import pytest
import torch
from test_training import setting_of

from hetperm.runs import scoring
from hetperm.runs.scoring import FEWEST, SHARE, Wanted, wanted_after, with_fewer
from hetperm.runs.training import epochs

EVERY = ["accuracy_mean", "tail_accuracy_mean", "val_accuracy_mean", "tail_val_accuracy_mean"]


@pytest.fixture
def nothing_is_free(monkeypatch):
    monkeypatch.setattr(scoring, "FREE", 0.0)


def with_test_data(n: int, **changes):
    """A setting whose clients have n test and validation samples each, sorted by class."""
    setting, x = setting_of(**changes), torch.randn(n, 3)
    pair = (x, torch.arange(n) * 2 // n)
    return replace(setting, clients=tuple(replace(client, val=pair, test=pair) for client in setting.clients))


def columns(setting, name="perm"):
    """The columns of scores in the row of every epoch."""
    *_, last = epochs(setting, name, steps=20)
    return [[column for column in EVERY if column in row] for row in last.history], last


def test_every_epoch_is_scored_where_that_is_cheap():
    found, _ = columns(with_test_data(400))
    assert found == [EVERY[:1], EVERY[:1], EVERY[:2], EVERY]


def test_epochs_that_cost_too_much_are_skipped_and_the_last_is_scored_as_deployed(nothing_is_free):
    found, last = columns(with_test_data(4000))
    assert found == [[], [], [], [EVERY[1], EVERY[3]]]
    setting = with_test_data(4000)
    score = sum(last.extra["score"]) / 4
    assert last.history[-1]["tail_accuracy_mean"] == pytest.approx(score)
    # The deployed models on all test data: the same as where everything is scored.
    _, every = columns(setting_like(setting, eval_every=1))
    assert last.extra["score"] == every.extra["score"]
    assert last.history[-1]["tail_accuracy_mean"] == every.history[-1]["tail_accuracy_mean"]


def setting_like(setting, **changes):
    return replace(setting, config=setting.config.override(**changes))


@pytest.mark.parametrize("method", ["perm", "local", "fedavg-ft"])
@pytest.mark.parametrize("n", [3, 12, 40])
def test_what_is_scored_on_the_way_stays_below_its_share_of_training(method, n, nothing_is_free):
    setting = with_test_data(n, epochs=8, tail_average=0.0)
    price = sum([setting.macs(width) * n for width in setting.model_widths(method)])
    *_, last = epochs(setting, method, steps=40)
    spent, scored = 0, 0
    for row in last.history[:-1]:
        spent += price if "accuracy_mean" in row else 0
        scored += "accuracy_mean" in row
        assert spent == 0 or spent + price <= SHARE * row["macs"]
    assert "accuracy_mean" in last.history[-1]
    if n == 3:
        assert scored > 0


def test_how_often_it_is_asked_for_wins(nothing_is_free):
    found, _ = columns(with_test_data(4000, eval_every=2))
    assert found == [[], EVERY[:1], [], EVERY]


def test_fine_tuned_models_are_scored_where_asked(nothing_is_free):
    found, _ = columns(with_test_data(4000, eval_finished=2), "fedavg-ft")
    assert [bool(one) for one in found] == [False, True, False, True]


def test_a_resumed_run_scores_the_same_epochs(nothing_is_free):
    setting = with_test_data(12, epochs=6)
    whole = list(epochs(setting, "perm", steps=20))
    for begin in whole[:-1]:
        *_, last = epochs(setting, "perm", steps=20, saved=begin)
        assert last.history == whole[-1].history


def test_nodes_score_their_models_after_every_epoch(nothing_is_free):
    setting = with_test_data(4000)
    state = next(epochs(setting, "perm", steps=20)).state
    assert wanted_after(setting, "perm", replace(state, r=1), (), finished=False) == []
    setting = replace(setting, nodes=object())
    assert wanted_after(setting, "perm", replace(state, r=1), (), finished=False) == [Wanted("", "")]


def test_fewer_samples_are_spread_over_all_classes():
    clients = with_test_data(4000).clients
    few = with_fewer(clients, Wanted("", "val_", FEWEST))
    assert [len(client.val[1]) for client in few] == [FEWEST] * 4
    assert few[0].val[1].float().mean() == 0.5 and few[0].test is clients[0].test
    assert with_fewer(clients, Wanted("", "val_")) is clients
    assert with_fewer(clients, Wanted("", "val_", 4000))[0].val is clients[0].val
