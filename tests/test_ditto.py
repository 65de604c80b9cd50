"""Ditto: against loops over coordinates, by what it reduces to, and by what it may spend."""

from types import SimpleNamespace

import pytest
import torch
from federation import (
    FULL,
    HEADS,
    RIVAL,
    WIDTHS,
    equal,
    generator,
    make_clients,
    make_method,
    part_of,
    run,
    same,
    start,
    with_classes,
)
from reference import by_parts
from reference_inputs import Draw, as_list, as_shards, assert_close
from torch import nn
from torch.nn import functional as F

from hetperm.device.bench import Workbench
from hetperm.device.rival_updates import OWN, Proximal
from hetperm.params import num_bytes

K, LR = RIVAL["local_steps"], RIVAL["lr"]


def test_a_step_of_both_models_by_hand():
    """f(w) = ((2w - 1)^2 + 0) / 2: its gradient is 4w - 2, so 2 at w = 1 and 6 at v = 2, where the spring adds 0.5."""
    x, y = torch.tensor([[2.0], [0.0]], dtype=torch.float64), torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    bench = Workbench(nn.Linear(1, 1, bias=False, dtype=torch.float64), F.mse_loss)
    params = {
        name: torch.tensor([[value]], dtype=torch.float64) for name, value in ((OWN + "weight", 2.0), ("weight", 1.0))
    }
    w, v = Proximal(1, 2, 0.1, prox=0.5)(bench, params, (x, y), generator())
    assert w["weight"].item() == pytest.approx(1 - 0.1 * 2, abs=1e-15)
    assert v["weight"].item() == pytest.approx(2 - 0.1 * (6 + 0.5), abs=1e-15)


@pytest.mark.parametrize("masked", [False, True])
def test_ditto_equals_loops_over_coordinates(masked):
    clients = make_clients()
    if masked:
        clients = with_classes(clients, [(0, 1), (1, 2), (0, 2), (0, 1)])
    state = run(make_method("ditto", clients, steps=3 * 2 * K, prox=0.7, setup={"heads": HEADS}))
    draw = Draw(clients, SimpleNamespace(**RIVAL))
    w, v = by_parts.ditto(as_shards(clients), WIDTHS, as_list(start()), draw, rounds=3, lr=LR, prox=0.7)
    assert_close(state.w, w)
    for params, model, width in zip(state.deployed, v, WIDTHS, strict=True):
        assert_close(params, model, width)


def test_without_a_spring_clients_train_alone_from_their_part_of_the_start():
    clients = make_clients(FULL)
    state = run(make_method("ditto", clients, prox=0.0, steps=4 * 2 * K))
    alone = run(make_method("local", clients, steps=4 * K))
    assert all(equal(a, b) for a, b in zip(state.v, alone.v, strict=True))


def test_the_global_model_is_that_of_heterofl():
    clients = make_clients()
    assert equal(
        run(make_method("ditto", clients, steps=4 * 2 * K)).w, run(make_method("heterofl", clients, steps=4 * K)).w
    )


def test_own_models_draw_near_their_part_of_the_global_model_as_the_spring_stiffens():
    away = []
    for prox in (0.0, 1.0, 10.0, 100.0):
        clients, lr = make_clients(), 0.4 / (1 + prox)
        state = run(make_method("ditto", clients, prox=prox, lr=lr, steps=10 * 2 * K))
        parts = [part_of(state.w, width) for width in WIDTHS]
        distance = max(
            float((v[name] - p[name]).abs().max()) for v, p in zip(state.v, parts, strict=True) for name in v
        )
        away.append(distance / lr)  # in units of what a step can do
    assert away[-1] < away[0]


def test_both_gradients_count_and_only_the_part_of_the_global_model_travels():
    clients = make_clients()
    work = run(make_method("ditto", clients, steps=25)).work
    rounds = 25 // (2 * K)
    assert (work.rounds, work.client_steps) == (rounds, rounds * 2 * K * len(clients))
    weigh = sum(num_bytes(part_of(start(), width)) for width in WIDTHS)
    assert (work.bytes_down, work.bytes_up) == (rounds * weigh, rounds * weigh)


def test_relabelled_clients_have_relabelled_models():
    clients, order = make_clients(), [2, 0, 3, 1]
    state, other = run(make_method("ditto", clients)), run(make_method("ditto", [clients[i] for i in order]))
    assert equal(state.w, other.w)
    assert all(equal(other.v[place], state.v[i]) for place, i in enumerate(order))
    assert same(state, run(make_method("ditto", clients)))


def test_a_budget_that_pays_for_no_round_is_refused():
    with pytest.raises(ValueError, match="a budget of 5 steps a client pays for no round, which takes 6; raise steps"):
        make_method("ditto", make_clients(), steps=5)
