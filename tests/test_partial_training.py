"""FedAvg, HeteroFL, FjORD, Federated Dropout, FedRolex: against loops over coordinates."""

from types import SimpleNamespace

import pytest
import torch
from federation import (
    FULL,
    HEADS,
    HIDDEN,
    PARTIAL,
    RIVAL,
    TUNE,
    WIDTHS,
    make_clients,
    make_federation,
    make_method,
    make_shop,
    rival_options,
    run,
    same,
    start,
)
from reference import by_parts, hetero
from reference_inputs import Draw, as_list, as_shards, assert_close
from torch import nn

from hetperm import Client, Config, fit
from hetperm.algorithms.partial_training import update_of
from hetperm.device.updates import Ordered, Sgd

RULES = {
    "heterofl": {"extraction": "static"},
    "feddropout": {"extraction": "random"},
    "fedrolex": {"extraction": "rolling"},
    "fjord": {"extraction": "static", "by_steps": True},
}


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("name", PARTIAL)
def test_partial_training_equals_loops_over_coordinates(name, tuned):
    clients = make_clients()
    state = run(make_method(f"{name}-ft" if tuned else name, clients))
    draw = Draw(clients, SimpleNamespace(**RIVAL, **TUNE))
    tune_lr = TUNE["fine_tune_lr"] if tuned else None
    w, v = hetero.partial_training(
        as_shards(clients), WIDTHS, as_list(start()), draw, rounds=4, lr=RIVAL["lr"], tune_lr=tune_lr, **RULES[name]
    )
    assert_close(state.w, w)
    for params, model, width in zip(state.deployed, v, WIDTHS, strict=True):
        assert_close(params, model, width)


def test_only_clients_of_fjord_draw_widths_and_only_those_that_they_can_hold():
    federation = make_federation(make_clients())
    ordered, plain = rival_options("fjord"), rival_options("heterofl")
    drawn = [update_of(client, federation, ordered) for client in federation.clients]
    assert drawn == [Ordered(3, 4, 0.4, tuple(p for p in (0.25, 0.5, 1.0) if p <= width)) for width in WIDTHS]
    assert update_of(federation.clients[0], federation, plain) == Sgd(3, 4, 0.4)


@pytest.mark.parametrize("name", PARTIAL)
def test_at_full_width_partial_training_is_fedavg(name):
    clients = make_clients(FULL)
    for suffix in ("", "-ft"):
        plain = run(make_method(f"fedavg{suffix}", clients, setup={"cut": False}))
        assert same(run(make_method(name + suffix, clients)), plain)


def test_rounds_are_what_the_steps_pay_for_after_those_of_fine_tuning():
    assert rival_options("heterofl", steps=50, local_steps=7).rounds == 7
    assert rival_options("heterofl-ft", steps=50, local_steps=7, fine_tune_steps=9).rounds == 5


# FjORD's options


class Widths(Draw):
    def widths(self, i, t):
        fitting = sorted({p for p in WIDTHS if p <= WIDTHS[i]})
        return fitting[int(torch.randint(len(fitting), (), generator=self.generator("width", t, self.key(i))))]


def test_fjord_may_draw_a_width_for_a_round():
    clients = make_clients()
    state = run(make_method("fjord", clients, draws="round"))
    draw = Widths(clients, SimpleNamespace(**RIVAL))
    w = by_parts.fjord_by_rounds(as_shards(clients), WIDTHS, as_list(start()), draw, rounds=4, lr=RIVAL["lr"])
    assert_close(state.w, w)


def test_clients_of_fjord_may_teach_narrower_parts_of_themselves():
    clients = make_clients()
    state = run(make_method("fjord", clients, distil=0.6, steps=24))
    draw = Draw(clients, SimpleNamespace(**RIVAL))
    w = by_parts.fjord_distilled(as_shards(clients), WIDTHS, as_list(start()), draw, rounds=4, lr=RIVAL["lr"], beta=0.6)
    assert_close(state.w, w)
    # A second gradient in every step, but for the client of the smallest width, which has no narrower part.
    assert state.work.client_steps == (3 * 24 + 12)


def test_fjord_refuses_draws_that_it_does_not_know_and_lessons_without_a_teacher():
    with pytest.raises(ValueError, match="unknown draws 'epoch' of fjord; use 'step' or 'round'"):
        rival_options("fjord", draws="epoch")
    with pytest.raises(ValueError, match="distil 1 teaches a width drawn for every step and draws is 'round'"):
        rival_options("fjord", draws="round", distil=1.0)


# HeteroFL's options


def test_heterofl_with_its_scaler_divides_what_hidden_layers_compute_by_the_width():
    clients = make_clients()
    state = run(make_method("heterofl", clients, scaler=True, setup={"heads": HEADS}))
    draw = Draw(clients, SimpleNamespace(**RIVAL))
    w = by_parts.heterofl_scaled(as_shards(clients), WIDTHS, as_list(start()), draw, rounds=4, lr=RIVAL["lr"])
    assert_close(state.w, w)
    for client, v in zip(clients, state.deployed, strict=True):
        bench, x = make_shop().at(client.width), client.train[0]
        bench.load(v)
        expected = by_parts.scaled_scores(w, hetero.first(client.width, HIDDEN), x, client.width)
        assert torch.allclose(bench.outputs(x), expected, atol=1e-12)


def test_the_scaler_changes_nothing_at_full_width_and_needs_a_classifier():
    clients = make_clients(FULL)
    scaled = run(make_method("heterofl", clients, scaler=True, setup={"heads": HEADS}))
    assert same(scaled, run(make_method("heterofl", clients)))
    with pytest.raises(ValueError, match="scaler divides all layers but the classifier, and this model ends in no"):
        make_method("heterofl", clients, scaler=True)


def class_clients():
    """Two clients with classes 0 and 1, two with classes 1 and 2, of two sizes."""
    clients = []
    for i, width in enumerate((1.0, 0.5, 1.0, 0.5)):
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(i))
        pair = (x, (x[:, 0] > 0).long() + i // 2)
        clients.append(Client(pair, pair, pair, width=width))
    return clients


def fitted(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    few = {
        "algorithm": "local",
        "baselines": ("heterofl", "fedrolex"),
        "epochs": 2,
        "steps": 40,
        "engine": "sequential",
    }
    return fit(model, class_clients(), Config(**few | changes))


def test_a_masked_loss_is_the_label_mask_of_one_method_only():
    plain, masked = fitted(), fitted(label_mask=True)
    mine = fitted(rivals={"heterofl": {"masked_loss": True}})
    rivals = {name: [one.baselines[name] for one in (plain, masked, mine)] for name in ("heterofl", "fedrolex")}
    assert same(rivals["heterofl"][2].state, rivals["heterofl"][1].state)
    assert rivals["heterofl"][2].loss == rivals["heterofl"][1].loss != rivals["heterofl"][0].loss
    assert same(rivals["fedrolex"][2].state, rivals["fedrolex"][0].state)
    assert rivals["fedrolex"][2].loss == rivals["fedrolex"][0].loss
    assert same(mine.state, plain.state) and mine.score == plain.score
    assert all(client.classes is None for client in mine.setting.clients)


def test_the_scaler_finds_the_classifier_of_ones_own_model():
    scaled = fitted(rivals={"heterofl": {"scaler": True}}).baselines["heterofl"].state
    plain = fitted().baselines["heterofl"].state
    assert not torch.equal(scaled.w["0.weight"], plain.w["0.weight"])
    # Folded into the hidden layer of a narrow model, and never into the classifier.
    ratio = scaled.v[1]["0.weight"] / scaled.w["0.weight"][:3]
    assert torch.allclose(scaled.v[1]["2.bias"], scaled.w["2.bias"]) and torch.allclose(ratio, torch.full((3, 4), 2.0))
