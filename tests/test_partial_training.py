"""FedAvg, HeteroFL, FjORD, Federated Dropout, FedRolex: against loops over coordinates."""

from types import SimpleNamespace

import pytest
from federation import (
    FULL,
    PARTIAL,
    RIVAL,
    TUNE,
    WIDTHS,
    make_clients,
    make_federation,
    make_method,
    rival_options,
    run,
    same,
    start,
)
from reference import hetero
from reference_inputs import Draw, as_list, as_shards, assert_close

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
