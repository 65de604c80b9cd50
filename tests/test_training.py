"""One method from beginning to end: its epochs, where they go on from, the steps it may take, and its metrics."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from hetperm import Client, Config
from hetperm.engine import choice
from hetperm.methods import METHODS
from hetperm.params import NotFinite
from hetperm.runs import origin, training
from hetperm.runs.setting import Setting, from_model
from hetperm.runs.training import algorithm_for, default_steps, epochs, states, steps_taken
from hetperm.state import State, Work


def setting_of(**changes) -> Setting:
    """Four clients of two widths and a small network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    clients = []
    for i in range(4):
        x = torch.randn(3, 10, 3, generator=torch.Generator().manual_seed(i))
        pairs = [(part, (part.sum(1) > 0).long()) for part in x]
        clients.append(Client(*pairs, width=(1.0, 0.5)[i % 2]))
    few = {"epochs": 4, "local_steps": 1, "steps": 0, "warmup_rounds": 1, "baselines": (), "num_clients": 4}
    return from_model(model, clients, Config(**few | changes), loss=None, metric=None)


def same(a: State, b: State) -> bool:
    """Whether two states hold the same models to the bit, and the same work."""
    models = zip((a.w, *a.deployed), (b.w, *b.deployed), strict=True)
    return a.work == b.work and all(torch.equal(x[name], y[name]) for x, y in models for name in x)


# Epochs


def test_a_method_is_given_before_its_first_epoch_and_after_every_one():
    *before, last = epochs(setting_of(), "perm", steps=20)
    assert [saved.state.r for saved in (*before, last)] == [0, 1, 2, 3, 4]
    assert [len(saved.history) for saved in (*before, last)] == [0, 1, 2, 3, 4]
    assert [saved.finished for saved in (*before, last)] == [False] * 4 + [True]
    assert [row["epoch"] for row in last.history] == [1, 2, 3, 4]
    assert [len(last.extra[name]) for name in ("score", "loss")] == [4, 4]
    tail_mean = last.history[-1]["tail_accuracy_mean"]  # the tail average is what is deployed
    assert sum(last.extra["score"]) / 4 == pytest.approx(tail_mean)


@pytest.mark.parametrize("method", ["perm", "perm-two-stage", "local", "fedrolex-ft", "apfl"])
def test_from_any_epoch_a_method_goes_on_to_the_same_end(method):
    setting = setting_of()
    whole = list(epochs(setting, method, steps=20))
    for begin in whole[:-1]:
        rest = list(epochs(setting, method, steps=20, saved=begin))
        assert [saved.state.r for saved in rest] == list(range(begin.state.r + 1, 5))
        assert same(rest[-1].state, whole[-1].state)
        assert rest[-1].history == whole[-1].history
        assert rest[-1].extra["seconds"] > begin.extra["seconds"]


def test_a_finished_method_is_not_trained_again(monkeypatch):
    setting = setting_of(epochs=1)
    *_, last = epochs(setting, "local", steps=4)
    monkeypatch.setattr(training, "states", None)
    assert list(epochs(setting, "local", steps=4, saved=last)) == [last]


def test_an_error_says_which_method_it_is_about_and_keeps_its_kind():
    rates = {"rivals": {"fedavg": {"lr": 1e38}}, "step_cap": 0.0}
    with pytest.raises(NotFinite, match=r"^fedavg: .*client \d: .*; lower the learning rate"):
        list(epochs(setting_of(**rates), "fedavg", steps=20))
    with pytest.raises(ValueError, match=r"^local: a budget of 1 steps a client pays for no round, which takes 3"):
        list(epochs(setting_of(local_steps=3), "local", steps=1))


# Steps


def test_steps_by_hand():
    config = Config(steps=0, warmup_rounds=3, epochs=4, num_clients=5, local_steps=2)
    assert default_steps(config) == (3 + 4 * 5) * 2
    assert default_steps(config.override(steps=9)) == 9
    state = State(0, {}, ({}, {}, {}), work=Work(client_steps=10))
    assert steps_taken(state) == 4  # of three clients, rounded up


@pytest.mark.parametrize("method", ["local", "fedavg", "fedavg-ft", "heterofl", "fedrolex-ft"])
def test_a_rival_takes_the_steps_it_is_given_and_fine_tuning_is_part_of_them(method):
    *_, last = epochs(setting_of(), method, steps=20)
    # The losses of clusters do not come in whole steps, so what is left at the end may be too little for a round.
    assert 0 <= 20 * 4 - last.state.work.client_steps < (2 * 4 if method == "ifca" else 1e-9)


def test_the_losses_of_a_choice_are_part_of_the_steps():
    *_, last = epochs(setting_of(), "ifca", steps=20)
    # Two losses on the whole shard, one batch: 2/3 of a gradient at the start, and 1 + 2/3 a round leave 11 rounds.
    assert last.state.work.client_steps == pytest.approx(4 * (2 / 3 + 11 * (1 + 2 / 3)))


# Tail averages and fine-tuning


def test_fine_tuning_begins_from_the_tail_average():
    still = {"rivals": {"fedavg-ft": {"fine_tune_lr": 0.0}}, "tail_average": 1.0}
    setting = setting_of(**still).one_size()
    with choice.opened("sequential", 1, setting.clients, setting.shop) as engine:
        algorithm = algorithm_for(setting, "fedavg-ft", engine, steps=20)
        _, *after = states(algorithm, 4)
        done = algorithm.finish(after[-1])
    for i, params in enumerate(done.v):
        for name, x in params.items():
            assert torch.allclose(x, torch.stack([state.v[i][name] for state in after]).mean(0), atol=1e-6)
            assert not torch.allclose(x, after[-1].v[i][name], atol=1e-4)
    assert done.tail is None and done.deployed == done.v


# Metrics


def test_fine_tuned_models_are_evaluated_where_asked_and_at_the_end():
    for often, finished in ((None, [0, 0, 0, 1]), (2, [0, 1, 0, 1])):
        changes = {} if often is None else {"eval_finished": often}
        *_, last = epochs(setting_of(**changes), "fedavg-ft", steps=20)
        assert [row["finished"] for row in last.history] == finished


def test_evaluation_can_be_left_to_every_other_epoch():
    *_, last = epochs(setting_of(epochs=3, eval_every=2), "perm", steps=20)
    assert ["accuracy_mean" in row for row in last.history] == [False, True, True]


def test_validation_figures_are_in_the_last_row_and_those_of_validation_data():
    setting = setting_of(tail_average=0.0, personal_lr=0.5)
    # Every label of the validation data is wrong, so that no figure of the test data can pass for one of theirs.
    clients = tuple(replace(client, val=(client.val[0], 1 - client.val[1])) for client in setting.clients)
    setting = replace(setting, clients=clients)
    *_, last = epochs(setting, "local", steps=20)
    assert last.history[-1]["val_accuracy_mean"] < 0.4 < 0.6 < last.history[-1]["accuracy_mean"]
    assert ["val_accuracy_mean" in row for row in last.history] == [False, False, False, True]
    for part, prefix in (("val", "val_"), ("test", "")):
        accuracies = []
        for client, params, width in zip(setting.clients, last.state.v, setting.model_widths("local"), strict=True):
            bench, (x, y) = setting.shop.at(width), getattr(client, part)
            bench.load(params)
            accuracies.append(float((bench.module(x).argmax(1) == y).float().mean()))
        assert last.history[-1][f"{prefix}accuracy_mean"] == pytest.approx(sum(accuracies) / 4)


def test_a_row_counts_the_visits_of_its_epoch_and_the_rounds_they_took():
    *_, last = epochs(setting_of(schedule="ring"), "perm", steps=20)
    assert {row["epoch_rounds"] for row in last.history} == {4}  # on the ring as many as there are clients
    visits = [row["visits"] for row in last.history]
    assert [row["epoch_visits"] for row in last.history][1:] == [b - a for a, b in pairwise(visits)]
    *_, rival = epochs(setting_of(), "local", steps=20)
    assert "epoch_visits" not in rival.history[-1]


# Checkpoints


@pytest.mark.parametrize("method", METHODS)
def test_the_checkpoints_of_every_method_are_taken_for_its_own(method, tmp_path):
    setting = setting_of(epochs=2, rivals={"heterofl": {"masked_loss": True}})
    keep = training.keeper(tmp_path, method, None, None)
    for saved in epochs(setting, method, steps=40):
        keep(saved)
        (back,) = training.checkpoints(setting, [method], tmp_path).values()
        assert (back.state.r, back.history, back.finished) == (saved.state.r, saved.history, saved.finished)


def test_a_checkpoint_of_another_origin_says_what_is_other():
    ours = origin.origin_of(setting_of(), "perm")
    others = {
        "it holds 'local' and not 'perm'; remove it": {"method": "local"},
        f"hetperm 0.0 wrote it and this is {ours['hetperm']}; go on with that version": {"hetperm": "0.0"},
        "epochs was 5 and is now 4; set it back": {"config": ours["config"] | {"epochs": 5}},
        "it has other clients, labels or another model": {"setting": "another"},
        "it has another loss, metric or augment; bring": {"functions": ["cross_entropy", "accuracy", "<lambda>"]},
        "its clients had other inputs; bring those back": {"inputs": [x + 0.1 for x in ours["inputs"]]},
    }
    assert origin.refusal(ours, ours) is None
    earlier = {key: value for key, value in ours.items() if key not in ("inputs", "functions")}
    assert origin.refusal(ours, earlier) is None
    for sentence, change in others.items():
        assert (origin.refusal(ours, ours | change) or "taken").startswith(sentence)


def test_inputs_that_were_prepared_otherwise_are_noticed_and_rounding_is_not():
    setting = setting_of()
    first, *others = setting.clients
    x, y = first.train
    ours = origin.origin_of(setting, "perm")
    last = x.clone()
    last[-1] += 1
    changes = [
        (replace(first, train=(changed, y)), noticed)
        for changed, noticed in ((x.flip(0), True), (x * 1.01, True), (last, True), (x * (1 + 1e-6), False))
    ]
    changes.append((replace(first, test=(x, 1 - y)), True))
    for client, noticed in changes:
        other = replace(setting, clients=(client, *others))
        assert bool(origin.refusal(origin.origin_of(other, "perm"), ours)) == noticed


def test_other_labels_widths_and_shapes_are_other_clients():
    setting = setting_of()
    first, *others = setting.clients
    x, y = first.train
    changes = {
        "inputs": {"train": (x + 1, y)},
        "labels": {"train": (x, 1 - y)},
        "samples": {"train": (x[1:], y[1:])},
        "width": {"width": 0.75},
        "key": {"key": 9},
    }
    prints = {
        what: origin._fingerprint(replace(setting, clients=(replace(first, **change), *others)))
        for what, change in changes.items()
    }
    assert prints.pop("inputs") == origin._fingerprint(setting)  # their last bits may depend on the machine
    assert len({origin._fingerprint(setting), *prints.values()}) == 5
