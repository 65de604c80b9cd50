"""PERM from begin to finish: the tail, the ball, small federations, and what a deployment would pay."""

from dataclasses import replace

import pytest
import torch
from federation import (
    FULL,
    LOOPS,
    equal,
    make_clients,
    make_federation,
    make_method,
    perm_options,
    run,
    start,
    without_intercept,
)
from torch.nn import functional as F

from hetperm.algorithms import perm
from hetperm.params import distance
from hetperm.server.estimate import Reports
from hetperm.server.weights import visit_rates
from hetperm.state import State, Work


def regression(name, clients, **changes):
    """A run of a model that is one matrix: 15 numbers of 8 bytes."""
    return make_method(name, clients, model=without_intercept, setup={"cut": False}, **changes)


def test_the_tail_average_is_the_mean_of_the_last_epochs():
    algorithm = regression("perm-two-stage", make_clients(FULL), epochs=5, tail_average=0.8)
    states = [algorithm.begin()]
    for _ in range(5):
        states.append(algorithm.epoch(states[-1]))
    assert [state.tail_count for state in states] == [0, 0, 1, 2, 3, 4]
    for i in range(4):
        mean = sum(state.v[i]["weight"] for state in states[2:]) / 4
        torch.testing.assert_close(states[-1].deployed[i]["weight"], mean, rtol=0, atol=1e-15)


def test_projection_keeps_models_in_a_ball_about_the_start():
    algorithm = regression("perm-two-stage", make_clients(FULL), projection=0.05, personal_lr=5.0)
    state = algorithm.begin()
    away = [float(distance(params, state.w)) for params in algorithm.epoch(state).v]
    assert max(away) == pytest.approx(0.05) and all(each <= 0.05 + 1e-12 for each in away)


def test_an_epoch_takes_a_state_and_leaves_it_as_it_was():
    algorithm = regression("perm", make_clients(FULL))
    state = algorithm.begin()
    v, alpha, w = [params["weight"].clone() for params in state.v], state.alpha.clone(), state.w["weight"].clone()
    algorithm.epoch(state)
    assert all(torch.equal(a, b["weight"]) for a, b in zip(v, state.v, strict=True))
    assert torch.equal(alpha, state.alpha) and torch.equal(w, state.w["weight"])


def test_only_the_single_loop_moves_the_global_model_and_its_weights():
    clients = make_clients(FULL)
    for name, moves in (("perm", True), ("perm-two-stage", False)):
        algorithm = regression(name, clients)
        state = algorithm.begin()
        after = algorithm.epoch(state)
        assert torch.equal(state.alpha, after.alpha) != moves and equal(state.w, after.w) != moves


@pytest.mark.parametrize("name", LOOPS)
def test_without_a_last_step_there_is_nothing_to_finish(name):
    assert regression(name, make_clients(FULL)).finish is None
    assert regression(name, make_clients(FULL), final_lr=0.1).finish is not None


def test_the_last_step_begins_at_the_tail_average_and_ends_it():
    """With the identity for alpha it is one step of a client's own full gradient; a step of nothing changes nothing."""
    federation = make_federation(make_clients(FULL), model=without_intercept, cut=False)
    options = perm_options(epochs=2, tail_average=1.0, final_lr=0.0)
    state = run(perm.two_stage(federation, start(without_intercept), replace(options, final_lr=None)))
    done = perm.last_step(federation, options, state)
    assert state.tail_count == 2 and done.tail is None and done.tail_count == 0
    assert all(map(equal, done.v, state.tail)) and not any(map(equal, done.v, state.v))


def test_the_last_step_goes_down_the_mean_of_full_gradients_by_alpha():
    clients, weight = make_clients(FULL), start(without_intercept)["weight"]
    alpha = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25, 0.75, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5], [0.25] * 4]).double()
    state = State(2, {"weight": weight}, ({"weight": weight},) * 4, alpha=alpha)
    federation = make_federation(clients, model=without_intercept, cut=False)
    done = perm.last_step(federation, perm_options(final_lr=0.1), state)
    leaf = weight.clone().requires_grad_()
    losses = [F.cross_entropy(x @ leaf.T, y) for x, y in (client.train for client in clients)]
    gradients = torch.stack([torch.autograd.grad(loss, leaf)[0] for loss in losses])
    for row, v in zip(alpha, done.v, strict=True):
        torch.testing.assert_close(v["weight"], weight - 0.1 * torch.einsum("j,jcd->cd", row, gradients))


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_clients_and_a_client_of_one_sample_can_be_trained(n):
    algorithm = regression("perm", make_clients((1.0,) * n, sizes=(5, 1)))
    state = algorithm.epoch(algorithm.begin())
    torch.testing.assert_close(state.alpha.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_work_counts_what_a_deployment_would_pay():
    algorithm = regression("perm-two-stage", make_clients(FULL), final_lr=0.1)
    state = algorithm.begin()
    model = 15 * 8
    reports = (9 + 7 + 12 + 8) / 4  # the shards, in mini-batches
    assert state.work.client_steps == 2 * 4 * 3 + reports
    assert state.work.bytes_down == 2 * 4 * model + 4 * model  # two warm-up rounds, one broadcast for the gradients
    assert state.work.bytes_up == 2 * 4 * model + 4 * (model + 16)  # a gradient, its noise and n_i from each
    after = algorithm.epoch(state)
    visits = int((state.alpha > 0).sum())
    assert after.work.visits == visits and after.work.client_steps - state.work.client_steps == 3 * visits
    assert after.work.bytes_down - state.work.bytes_down == visits * model
    assert after.work.bytes_up - state.work.bytes_up == visits * model
    done = algorithm.finish(after)
    full = sum(client.n_train / 4 * int((state.alpha[:, j] > 0).sum()) for j, client in enumerate(make_clients(FULL)))
    assert done.work.visits == 2 * visits and done.work.client_steps - after.work.client_steps == full
    assert done.work.bytes_down - after.work.bytes_down == visits * model
    assert done.work.bytes_up - after.work.bytes_up == visits * model


def test_an_epoch_of_the_single_loop_pays_for_a_step_and_new_reports_too():
    algorithm = regression("perm", make_clients(FULL))
    state = algorithm.begin()
    after, model, visits = algorithm.epoch(state), 15 * 8, int((state.alpha > 0).sum())
    assert after.work.bytes_down - state.work.bytes_down == (visits + 4 + 4) * model
    assert after.work.bytes_up - state.work.bytes_up == (visits + 4) * model + 4 * (model + 16)
    step, reports = 4 * 6 / 4, (9 + 7 + 12 + 8) / 4
    assert after.work.client_steps - state.work.client_steps == 3 * visits + step + reports


# Step sizes of visits


def test_the_rates_of_visits_by_hand():
    """Batches of at most 4 of 8, 2, 4 and 16 samples have noises of 2, 1, 1 and 4. The first two clients differ by 4
    beyond noise, so that half of each has a spread of 1; the last two do not differ.
    """
    federation, n = make_federation(make_clients(FULL)), torch.tensor([8, 2, 4, 16]).double()
    zeta = torch.full((4, 4), 100.0).double().fill_diagonal_(0)
    zeta[0, 1] = zeta[1, 0] = 6.0
    zeta[2, 3] = zeta[3, 2] = 2.0
    alpha = torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2 + [[0.0, 0.0, 1.0, 1.0]] * 2).double() / 2
    reports = Reports(zeta, torch.ones(4).double(), n, Work())
    rates = visit_rates(federation, alpha, reports, batch_size=4)
    assert rates.tolist() == pytest.approx([2 / 3, 1 / 2, 1.0, 1.0], rel=1e-12)
    exact = replace(reports, zeta=torch.zeros(4, 4).double(), q=torch.zeros(4).double())
    assert visit_rates(federation, alpha, exact, batch_size=4).tolist() == [1.0] * 4


def test_step_sizes_of_visits_fall_to_zero_in_equal_parts():
    options = {"personal_lr": 0.8, "epochs": 4}
    fading = [perm.faded(perm_options(decay="linear", **options), r).personal_lr for r in range(4)]
    assert fading == pytest.approx([0.7, 0.5, 0.3, 0.1])
    assert {perm.faded(perm_options(decay="none", **options), r).personal_lr for r in range(4)} == {0.8}
