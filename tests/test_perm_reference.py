"""PERM against the paper typed out with loops (tests/reference), epoch by epoch, in float64."""

import functools
from dataclasses import replace

import pytest
import torch
from federation import (
    BUDGET,
    FULL,
    HEADS,
    LOOPS,
    PERM,
    WIDTHS,
    in_one_table,
    make_clients,
    make_federation,
    make_method,
    perm_options,
    run,
    same,
    start,
    with_classes,
    without_intercept,
)
from reference import hetero
from reference import perm as homogeneous
from reference_inputs import Draw, as_list, as_shards, assert_close

from hetperm.algorithms import perm
from hetperm.methods import METHODS

# Clients of different sizes

CASES = {
    "static": {},
    "static, masked": {"discrepancy": "masked", "vc_weight": 0.5},
    "masked, raw complexity": {"discrepancy": "masked", "vc_weight": "raw", "regularization": 40.0},
    "rolling": {"extraction": "rolling", "nested": "rolling", "discrepancy": "masked"},
    "random": {"extraction": "random", "nested": "random", "discrepancy": "masked"},
    "rolling warm-up, static visits": {"extraction": "rolling"},
    "random warm-up, rolling visits": {"extraction": "random", "nested": "rolling", "warmup_rounds": 3},
    "skip": {"nested": "skip"},
    "the paper's step on the ring": {"step_rule": "paper", "schedule": "ring", "personal_lr": 0.1},
    "final step": {"final_lr": 0.3},
    "final step in a ball": {"final_lr": 0.9, "projection": 0.2},
    "ball": {"projection": 0.15, "personal_lr": 2.0},
    "server mix": {"server_mix": "alpha", "epochs": 3},
    "server mix and tail": {"server_mix": "alpha", "epochs": 3, "tail_average": 0.6},
    "tail, skip, mix": {"server_mix": "alpha", "tail_average": 1.0, "nested": "skip"},
    "participation": {"participation": 0.6},
    "participation, rolling": {"participation": 0.5, "nested": "rolling", "extraction": "rolling"},
    "few come": {"participation": 0.3, "epochs": 6, "rate_rule": "partners", "discrepancy": "masked"},
    "few come, reports grow old": {"participation": 0.4, "epochs": 6, "report_age": 1, "vc_weight": 0.3},
    "absent at the final step": {"participation": 0.6, "final_lr": 0.3},
    "everybody as small as the smallest": {"personal_width": "smallest", "server_mix": "alpha"},
    "a number and descent": {"regularization": 30.0, "alpha_steps": 7, "vc_weight": 0.3},
    "a water level": {"regularization": "level", "vc_weight": 0.2},
    "distillation": {"inplace_kd": 0.7, "local_steps": 4},
    "distillation and mixing": {"inplace_kd": 0.7, "server_mix": "alpha"},
    "steps that shrink": {"rate_rule": "partners", "decay": "linear"},
    "slow where partners differ": {"rate_rule": "partners", "share": 5.0, "step_rule": "paper", "personal_lr": 0.2},
    "uniform at first": {"first_alpha": "uniform", "discrepancy": "masked"},
    "parallel": {"visits": "parallel"},
    "parallel, rolling": {"visits": "parallel", "nested": "rolling", "participation": 0.6, "rate_rule": "partners"},
    "no warm-up": {"warmup_rounds": 0, "extraction": "rolling", "discrepancy": "masked"},
    "early reports": {"early_report": 0.5, "warmup_rounds": 3},
    "early reports, few come": {"early_report": 0.5, "warmup_rounds": 4, "participation": 0.5, "epochs": 5},
    "denoised": {"denoise": True},
    "denoised, at two models": {"denoise": True, "early_report": 0.5, "warmup_rounds": 3, "rate_rule": "partners"},
    "denoised, few come": {"denoise": True, "participation": 0.5, "epochs": 5, "regularization": "level"},
    "denoised, masked": {"denoise": True, "discrepancy": "masked"},
    "denoised, a number": {"denoise": True, "regularization": 30.0},
}
BUDGETS = {
    "ordered": {},
    "static": {"warmup": "static"},
    "no cap": {"step_cap": 0.0, "alpha_every": 1},
    "a hard cap": {"step_cap": 0.02, "personal_lr": 5.0, "global_lr": 5.0},
    "random": {"extraction": "random", "nested": "random", "discrepancy": "masked"},
    "rolling": {"extraction": "rolling", "nested": "rolling", "discrepancy": "masked", "alpha_every": 1},
    "several tours an epoch": {"epochs": 2, "steps": 120, "warmup_rounds": 5},
    "one epoch": {"epochs": 1, "tail_average": 1.0},
    "participation": {"participation": 0.6},
    "few come late": {"participation": 0.4, "alpha_every": 3, "rate_rule": "partners"},
    "skip": {"nested": "skip"},
    "ring": {"schedule": "ring", "step_rule": "paper", "personal_lr": 0.1},
    "mix, tail and ball": {"server_mix": "alpha", "tail_average": 0.6, "projection": 0.3},
    "tail": {"tail_average": 1.0},
    "steps that shrink": {"rate_rule": "partners", "decay": "linear"},
    "uniform at first": {"first_alpha": "uniform"},
    "early reports": {"early_report": 0.4},
    "early reports, few come": {"early_report": 0.4, "participation": 0.6, "steps": 90, "rate_rule": "partners"},
    "parallel": {"visits": "parallel", "steps": 120, "epochs": 3, "alpha_every": 1, "decay": "linear"},
}
TWO_STAGES = (
    *("static", "rolling", "random", "server mix and tail", "final step", "participation", "distillation"),
    *("few come", "early reports", "early reports, few come", "denoised", "denoised, few come"),
)


def assert_run(name, clients, heads=(), **changes):
    """Run a method beside the loops, compare all models and weights after every epoch, and return the last state."""
    own_options = {key: value for key, value in changes.items() if key != "participation"}
    options = in_one_table(perm_options(**own_options), changes.get("participation", 1.0))
    algorithm = make_method(name, clients, setup={"heads": heads}, **changes)
    widths = [client.width for client in clients]
    own = widths if options.personal_width == "own" else [min(widths)] * len(clients)
    expected = hetero.perm(
        as_shards(clients), widths, as_list(start()), options, Draw(clients, options), two_stages=name != "perm"
    )
    state = algorithm.begin()
    for step, (w, alpha, v, tail) in enumerate(expected):
        if step == options.epochs + 1:
            state = algorithm.finish(state) if algorithm.finish else state
        elif step:
            state = algorithm.epoch(state)
        assert_close(state.w, w)
        torch.testing.assert_close(state.alpha, torch.tensor(alpha, dtype=torch.float64), rtol=0, atol=1e-12)
        for i, width in enumerate(own):
            assert_close(state.v[i], v[i], width)
            if tail is not None:
                assert_close(state.deployed[i], tail[i], width)
        assert (state.tail is None) == (tail is None)
    return state


@functools.cache
def plain(name):
    return run(make_method(name, make_clients()))


@pytest.mark.parametrize(
    ("name", "case"), [*(("perm", case) for case in CASES), *(("perm-two-stage", case) for case in TWO_STAGES)]
)
def test_perm_equals_the_paper_typed_out(name, case):
    state = assert_run(name, make_clients(), **CASES[case])
    # Agreeing on cases that are all alike would prove little.
    assert case == "static" or not same(state, plain(name))


def test_in_these_cases_clients_learn_from_some_of_the_others_and_from_smaller_ones():
    for compare in ("probe", "masked"):
        alpha = make_method("perm", make_clients(), discrepancy=compare).begin().alpha
        smaller = [(i, j) for i in range(4) for j in range(4) if alpha[i, j] > 0 and WIDTHS[i] > WIDTHS[j]]
        assert int((alpha > 0).sum()) == 14 and smaller == [(0, 1), (0, 3), (1, 3), (2, 3)]
    draw = Draw(make_clients(), in_one_table(perm_options(), participation=0.6))
    came = [sum(draw.here(j, clock) for j in range(4)) for clock in range(60)]
    assert set(came) >= {1, 2, 3}


@functools.cache
def budgeted(name):
    return run(make_method(name, make_clients(), **BUDGET), BUDGET["epochs"])


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("perm", case) for case in BUDGETS),
        *(("perm-two-stage", case) for case in ("ordered", "rolling", "tail", "few come late")),
    ],
)
def test_within_a_budget_of_steps_perm_equals_loops(name, case):
    changes = BUDGET | BUDGETS[case]
    state = assert_run(name, make_clients(), **changes)
    planned = state.work.client_steps + state.work.missed
    assert 0.8 * changes["steps"] < planned / 4 <= changes["steps"] or case in (
        "skip",
        "ring",
        "parallel",
    )
    assert case == "ordered" or not same(state, budgeted(name))


@pytest.mark.parametrize("name", LOOPS)
def test_perm_of_four_widths_that_divide_nothing_equals_the_paper_typed_out(name):
    options = {"nested": "rolling", "extraction": "rolling", "discrepancy": "masked"}
    assert_run(name, make_clients((0.3, 0.9, 0.1, 0.61)), **options)


@pytest.mark.parametrize("name", LOOPS)
def test_with_the_classes_of_others_masked_perm_equals_the_paper_typed_out(name):
    clients = with_classes(make_clients(), [[0, 1, 2], [0, 2], [1, 2], [0, 1]])
    assert_run(name, clients, HEADS, extraction="rolling", server_mix="alpha", inplace_kd=0.5)


@pytest.mark.parametrize("name", LOOPS)
def test_at_full_width_perm_equals_the_homogeneous_paper_typed_out(name):
    assert_run(name, make_clients(FULL), final_lr=0.2)


# Clients of one size: softmax regression, with gradients written out sample by sample


def assert_weights(params, expected):
    torch.testing.assert_close(params["weight"], expected, rtol=0, atol=1e-12)


def regression(name, clients, **changes):
    """(algorithm, its federation) for a model that is one matrix."""
    federation = make_federation(clients, model=without_intercept, cut=False)
    return METHODS[name].make(federation, start(without_intercept), perm_options(**changes)), federation


def warm(clients, draw, options):
    """Stage 1 by the reference: (w, alpha)."""
    w, shards = start(without_intercept)["weight"], [client.train for client in clients]
    for r in range(options.warmup_rounds):
        own = [draw.global_batches(i, r) for i in range(len(clients))]
        w = homogeneous.local_sgd(w, shards, own, options.global_lr)
    return w, weights_at(w, clients, draw, r=0)


def weights_at(w, clients, draw, r):
    zeta = homogeneous.discrepancies(homogeneous.full_gradients(w, [client.train for client in clients]))
    q = [homogeneous.noise(w, client.train, draw.pieces(i, r)) for i, client in enumerate(clients)]
    return homogeneous.mixing(zeta, q, [client.n_train for client in clients], PERM["share"])


def shuffled_epoch(v, alpha, clients, draw, options, r):
    everybody = range(len(clients))
    batches = {(i, j): draw.visit_batches(i, j, r) for i in everybody for j in everybody}
    rounds = draw.rounds(r, alpha)
    shards = [client.train for client in clients]
    return homogeneous.shuffled_epoch(v, alpha, shards, rounds, batches, options.personal_lr, options.step_rule)


@pytest.mark.parametrize(("rule", "schedule"), [("max", "colour"), ("paper", "ring")])
def test_two_stage_regression_equals_the_paper_typed_out(rule, schedule):
    changes = {"step_rule": rule, "schedule": schedule, "final_lr": 0.3}
    clients, options = make_clients(FULL), in_one_table(perm_options(**changes))
    algorithm, _ = regression("perm-two-stage", clients, **changes)
    draw, state = Draw(clients, options), algorithm.begin()
    w, alpha = warm(clients, draw, options)
    assert_weights(state.w, w)
    torch.testing.assert_close(state.alpha, alpha, rtol=0, atol=1e-12)
    v = [w] * len(clients)
    for r in range(options.epochs):
        v = shuffled_epoch(v, state.alpha, clients, draw, options, r)
        state = algorithm.epoch(state)
        for ours, theirs in zip(state.v, v, strict=True):
            assert_weights(ours, theirs)
    last = homogeneous.final_step(v, state.alpha, [client.train for client in clients], 0.3)
    for ours, theirs in zip(algorithm.finish(state).v, last, strict=True):
        assert_weights(ours, theirs)


def test_the_single_loop_of_regression_equals_the_paper_typed_out():
    clients, options = make_clients(FULL), in_one_table(perm_options())
    algorithm, _ = regression("perm", clients)
    draw, state = Draw(clients, options), algorithm.begin()
    w, _ = warm(clients, draw, options)
    v, shards = [w] * len(clients), [client.train for client in clients]
    for r in range(options.epochs):
        v = shuffled_epoch(v, state.alpha, clients, draw, options, r)
        w = homogeneous.global_step(w, shards, [draw.large_batch(i, r) for i in range(4)], options.global_lr)
        state = algorithm.epoch(state)
        assert_weights(state.w, w)
        torch.testing.assert_close(state.alpha, weights_at(w, clients, draw, r=r + 1), rtol=0, atol=1e-12)
        for ours, theirs in zip(state.v, v, strict=True):
            assert_weights(ours, theirs)


def test_with_alpha_the_identity_perm_is_local_training():
    clients, options = make_clients(FULL), perm_options()
    algorithm, federation = regression("perm-two-stage", clients)
    state = replace(algorithm.begin(), alpha=torch.eye(4, dtype=torch.float64))
    after, draw = perm.visit(federation, state, options), Draw(clients, in_one_table(options))
    assert after.work.rounds - state.work.rounds == 1
    for i, client in enumerate(clients):
        alone = homogeneous.visit(state.w["weight"], client.train, draw.visit_batches(i, i, 0), 0.5)
        assert_weights(after.v[i], alone)


def test_with_uniform_alpha_and_the_literal_step_perm_is_shuffled_local_sgd():
    clients, options = make_clients(FULL), perm_options(step_rule="paper", schedule="ring")
    algorithm, federation = regression("perm-two-stage", clients)
    state = replace(algorithm.begin(), alpha=torch.full((4, 4), 0.25, dtype=torch.float64))
    after, draw = perm.visit(federation, state, options), Draw(clients, in_one_table(options))
    model = state.w["weight"]
    for visits in draw.rounds(0, state.alpha):
        host = dict(visits)[2]
        model = homogeneous.visit(model, clients[host].train, draw.visit_batches(2, host, 0), 0.5)
    assert_weights(after.v[2], model)
