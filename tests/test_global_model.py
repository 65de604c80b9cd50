"""Training of the one global model: averages over who holds a coordinate, and over who may vote on it."""

import pytest
import torch
from federation import (
    FULL,
    HEADS,
    NAMES,
    engine_that_records,
    equal,
    make_clients,
    make_federation,
    mlp,
    part_of,
    random,
    start,
    with_classes,
)
from torch import nn
from torch.nn import functional as F

from hetperm.device.gradients import BatchGradient
from hetperm.device.updates import Sgd
from hetperm.params import NotFinite
from hetperm.server.global_model import covered_mean, drawn_widths, gradient_step, local_sgd_round, mean_model
from hetperm.state import State, Work
from submodels import WHOLE

SGD = [Sgd(steps=2, batch_size=4, lr=0.3)] * 4


@pytest.mark.parametrize("extraction", ["static", "random", "rolling"])
def test_coordinates_that_nobody_holds_keep_their_value(extraction):
    federation = make_federation(make_clients((0.5, 0.25, 0.25, 0.5)))
    indices = federation.handed_out(extraction, 2)
    after, _ = local_sgd_round(federation, start(), SGD, batch_size=4, round=2, extraction=extraction)
    stepped = gradient_step(federation, State(2, start(), ()), BatchGradient(4), indices, lr=0.3, batch_size=4).w
    for name, old in start().items():
        covered = torch.stack([index.mask(name) for index in indices]).any(0)
        assert torch.equal(after[name] != old, covered) and torch.equal(stepped[name] != old, covered)
    assert not torch.stack([index.mask("2.weight") for index in indices]).any(0).all()


def test_a_step_goes_down_the_mean_of_the_clients_gradients():
    clients, w = make_clients(FULL), {name: x.clone().requires_grad_() for name, x in start().items()}
    losses = [
        F.cross_entropy(torch.func.functional_call(mlp().double(), w, client.train[0]), client.train[1])
        for client in clients
    ]
    slopes = torch.autograd.grad(sum(losses) / len(losses), list(w.values()))
    whole = BatchGradient(max(client.n_train for client in clients))  # no sample is left to the draw
    state = State(0, start(), ())
    stepped = gradient_step(make_federation(clients), state, whole, [WHOLE] * 4, lr=0.3, batch_size=4).w
    for (name, x), slope in zip(start().items(), slopes, strict=True):
        torch.testing.assert_close(stepped[name], x - 0.3 * slope, rtol=0, atol=1e-12)


def test_the_mean_by_hand():
    """Units held by all three, by two and by one of clients that hold 1, 2 and 6."""
    widths = (1.0, 0.5, 0.25)
    federation = make_federation(make_clients(widths))
    models = [
        {name: torch.full_like(x, value) for name, x in part_of(start(), width).items()}
        for width, value in zip(widths, (1.0, 2.0, 6.0), strict=True)
    ]
    mean = covered_mean(federation, start(), models, federation.handed_out("static", 0))
    assert mean["0.bias"].tolist() == [3, 3, 1.5, 1.5, 1, 1, 1, 1]
    assert mean["4.bias"].tolist() == [3, 3, 3]


def test_the_plain_mean_counts_every_client_alike_and_sums_in_the_order_of_keys():
    clients = make_clients(FULL)
    models = [{"x": torch.tensor([value, 1.0], dtype=torch.float64)} for value in (1.0, 2.0, 3.0, 6.0)]
    assert mean_model(models, clients)["x"].tolist() == [3.0, 1.0]
    models = [{"x": random((50,), seed=i)} for i in range(4)]
    order = [2, 0, 3, 1]
    assert equal(mean_model(models, clients), mean_model([models[i] for i in order], [clients[i] for i in order]))


def test_work_of_a_round_and_of_a_step_by_hand():
    """Models of 123 and of 51 numbers, 8 bytes each, there and back; a batch of six is one and a half of four."""
    federation = make_federation(make_clients((1.0, 0.5)))
    moved = 8 * (123 + 51)
    _, work = local_sgd_round(federation, start(), SGD[:2], batch_size=4, round=0)
    assert work == Work(rounds=1, client_steps=4, bytes_down=moved, bytes_up=moved)
    indices = federation.handed_out("static", 0)
    state = gradient_step(federation, State(0, start(), ()), BatchGradient(6), indices, lr=0.1, batch_size=4)
    assert state.work == Work(rounds=1, client_steps=3, bytes_down=moved, bytes_up=moved)


def test_a_step_or_round_that_goes_astray_says_where():
    federation = make_federation(make_clients(FULL))
    with pytest.raises(NotFinite, match=r"^global step 2: .* is not finite"):
        gradient_step(federation, State(2, start(), ()), BatchGradient(4), [WHOLE] * 4, lr=float("inf"), batch_size=4)
    with pytest.raises(NotFinite, match=r"^global round 5: client 0: .* is not finite"):
        local_sgd_round(federation, start(), [Sgd(2, 4, float("inf"))] * 4, batch_size=4, round=5)


# Ordered training


def test_the_width_that_a_client_trains_is_drawn_by_key_and_round_from_those_it_can_hold():
    clients, order = make_clients(), [2, 0, 3, 1]
    drawn = [drawn_widths(make_federation(clients), round) for round in range(60)]
    for i, client in enumerate(clients):
        fitting = [width for width in (0.25, 0.5, 1.0) if width <= client.width]
        counts = [[widths[i] for widths in drawn].count(width) for width in fitting]
        assert sum(counts) == 60 and min(counts) >= 60 / len(fitting) / 2
    relabelled = make_federation([clients[i] for i in order])
    assert [drawn_widths(relabelled, round) for round in range(60)] == [[widths[i] for i in order] for widths in drawn]


def test_a_round_of_given_widths_trains_the_parts_of_these_widths():
    recording, tasks = engine_that_records()
    federation, widths = make_federation(make_clients(), engine=recording), [0.25, 0.5, 0.25, 0.25]
    after, work = local_sgd_round(federation, start(), SGD, batch_size=4, round=0, widths=widths)
    assert [task.width for task in tasks] == widths and work.bytes_up == 8 * (3 * 27 + 51)
    assert all(torch.equal(after[name] != x, federation.slicer.index(0.5).mask(name)) for name, x in start().items())


# Masked classes


def test_clients_vote_only_on_the_classes_they_hold():
    federation = make_federation(with_classes(make_clients(), [[0]] * 4), heads=HEADS)
    after, _ = local_sgd_round(federation, start(), SGD, batch_size=4, round=0)
    for name in HEADS:
        assert torch.equal(after[name][1:], start()[name][1:])


def test_votes_by_hand():
    """Client i holds the number i everywhere; widths are 1, 1/2, 1/2, 1/4."""
    federation = make_federation(with_classes(make_clients(), [[0, 1], [0], [0, 2], [0, 2]]), heads=HEADS)
    indices = federation.handed_out("static", 0)
    models = [
        {name: torch.full_like(x, float(i)) for name, x in federation.slicer.cut(start(), index).items()}
        for i, index in enumerate(indices)
    ]
    mean = covered_mean(federation, start(), models, indices)
    assert mean["4.bias"].tolist() == [1.5, 0.0, 2.5]
    assert mean["4.weight"][1].tolist() == [0.0] * 6  # only the widest knows class 1, and it holds all
    assert mean["4.weight"][2, :2].tolist() == [2.5, 2.5] and mean["4.weight"][2, 2] == 2.0
    assert torch.equal(mean["4.weight"][2, 3:], start()["4.weight"][2, 3:])  # held by the widest, which has no say
    assert mean["2.bias"].tolist() == [1.5, 1.5, 1.0, 0.0, 0.0, 0.0]


def test_whole_models_are_averaged_alike_with_and_without_a_map_of_their_channels():
    clients = with_classes(make_clients(FULL), [[0, 1], [0], [0, 1], [1]])
    models = [{name: random(x.shape, seed=10 * i + k) for k, (name, x) in enumerate(start().items())} for i in range(4)]
    one, other = (
        covered_mean(make_federation(clients, cut=cut, heads=HEADS), start(), models, [WHOLE] * 4)
        for cut in (True, False)
    )
    assert equal(one, other)
    assert torch.equal(one["4.weight"][2], start()["4.weight"][2])
    for row, voters in ((0, [0, 1, 2]), (1, [0, 2, 3])):
        expected = sum(models[i]["4.weight"][row] for i in voters) / 3
        torch.testing.assert_close(one["4.weight"][row], expected, rtol=0, atol=1e-15)


def test_a_classifier_that_is_not_trained_needs_no_votes():
    def headless() -> nn.Module:
        model = mlp()
        model[4].requires_grad_(False)
        return model

    clients = with_classes(make_clients(), [[0, 1], [0, 2], [0, 2], [0, 1]])
    federation = make_federation(clients, model=headless, heads=HEADS)
    after, _ = local_sgd_round(federation, start(headless), SGD, batch_size=4, round=0)
    assert list(after) == list(NAMES[:4])
