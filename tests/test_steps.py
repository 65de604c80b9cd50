"""PERM within a budget of steps per client: never above it, cut into epochs, tours that go on where they stopped."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from federation import (
    BUDGET,
    FULL,
    LOOPS,
    SEED,
    VARIANTS,
    WIDTHS,
    apart,
    engine_that_records,
    equal,
    make_clients,
    make_method,
    make_shop,
    perm_options,
    run,
    same,
    scalable,
    start,
)
from test_laws import Shuffling, by_key

from hetperm.algorithms import perm
from hetperm.algorithms.steps import num_rounds
from hetperm.device.gradients import BatchGradient, ReportGradient, StepLosses
from hetperm.device.updates import Sgd
from hetperm.engine.choice import opened
from hetperm.methods import METHODS
from hetperm.randomness import generator_for
from hetperm.runs import checkpoint
from hetperm.runs.checkpoint import Saved
from hetperm.server.federation import Federation
from hetperm.server.look_ahead import SHARES, best_candidate
from hetperm.server.slicer import Slicer
from hetperm.server.visits import scheduled

AHEAD = BUDGET | {"share": "look-ahead", "steps": 150}  # a look ahead of these tiny shards takes 24 steps a client
LIKE_DEFAULTS = AHEAD | {"rate_rule": "partners", "decay": "linear", "tail_average": 0.5}


def states_of(algorithm, epochs=BUDGET["epochs"]):
    """The state after the warm-up and after every epoch."""
    return list(itertools.accumulate(range(epochs), lambda state, _: algorithm.epoch(state), initial=algorithm.begin()))


@functools.cache
def usual(name):
    return run(make_method(name, make_clients(), **LIKE_DEFAULTS), BUDGET["epochs"])


# The budget


@pytest.mark.parametrize(
    ("name", "variant"), [*((name, variant) for name in LOOPS for variant in ("plain", "odd", "rolling", "skip"))]
)
@pytest.mark.parametrize("steps", [60, 83])
def test_no_more_steps_are_taken_than_the_budget_has(name, variant, steps):
    changes = VARIANTS[variant] | BUDGET | {"steps": steps, "final_lr": None}
    state = run(make_method(name, make_clients(), **changes), BUDGET["epochs"])
    assert state.work.client_steps <= 4 * steps
    if variant in ("plain", "rolling"):  # in others hosts are away or visits are skipped
        assert state.work.client_steps > 4 * steps - 4 * 3  # what is left is less than a round


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("share", [0.5, "look-ahead"])
def test_the_steps_of_hosts_are_those_that_are_counted(name, share):
    recording, tasks = engine_that_records()
    changes = AHEAD | {"share": share}
    state = run(make_method(name, make_clients(), setup={"engine": recording}, **changes), BUDGET["epochs"])
    n = [client.n_train for client in make_clients()]
    counted = sum(task.update.samples(n[task.host]) / min(4, n[task.host]) for task in tasks)
    assert state.work.client_steps == pytest.approx(counted) and counted <= 4 * AHEAD["steps"]
    looked = [task for task in tasks if isinstance(task.update, StepLosses)]
    assert len(looked) == (4 if share == "look-ahead" else 0)  # once, of every client


def test_epochs_are_equal_parts_of_what_is_left_but_for_whole_rounds():
    states = states_of(make_method("perm-two-stage", make_clients(), **BUDGET | {"steps": 300}))
    begin, *_, end = (state.work.client_steps for state in states)
    for r, state in enumerate(states):
        due = begin + (4 * 300 - begin) * r / BUDGET["epochs"]
        assert due - 4 * 3 < state.work.client_steps <= due + 1e-9
    assert end > begin


def test_rounds_that_can_be_paid_for_by_hand():
    """Visits of 3 steps each: the three rounds take 6, 3 and 3 gradients, and twice as many if models teach."""
    rounds = [[(0, 0), (1, 1)], [(0, 1)], [(1, 0)]]

    def affordable(allowed, t=0, **options):
        return perm._affordable(rounds, t, 10.0, allowed, perm_options(**options).visiting)

    assert [affordable(allowed) for allowed in (15.9, 16.0, 18.9, 19.0)] == [(0, 10), (1, 16), (1, 16), (2, 19)]
    assert affordable(99.0) == (3, 22) and affordable(16.0, t=1) == (3, 16) and affordable(99.0, t=3) == (3, 10)
    assert [affordable(allowed, inplace_kd=0.5) for allowed in (21.9, 22.0)] == [(0, 10), (1, 22)]
    assert [affordable(allowed, visits="parallel") for allowed in (21.9, 22.0)] == [(0, 10), (3, 22)]


def test_thirds_of_a_gradient_lose_no_round_to_rounding():
    """5 steps and two losses of a third: divided by that, the sum of six of them is a hair less than 6."""
    cost = 5 + 1 / 3 + 1 / 3
    for rounds in range(1, 200):
        steps = sum([cost] * rounds)
        assert num_rounds(steps, cost) == num_rounds(steps + 0.1, cost) == rounds
        assert num_rounds(steps + cost - 0.1, cost) == rounds


def test_the_warm_up_takes_half_of_the_steps_unless_rounds_are_given():
    assert perm_options(**BUDGET).num_warmup_rounds == 60 // (2 * 3)
    assert perm_options(**BUDGET | {"steps": 65}).num_warmup_rounds == 10
    assert perm_options(**BUDGET | {"warmup_rounds": 3}).num_warmup_rounds == 3
    assert perm_options(**BUDGET | {"warmup_rounds": 0}).num_warmup_rounds == 0
    assert perm_options(**BUDGET | {"steps": 0}).num_warmup_rounds == 30


def test_a_budget_that_is_spent_leaves_models_as_they_are():
    algorithm = make_method("perm-two-stage", make_clients(), **BUDGET | {"steps": 8, "warmup_rounds": 2})
    begin, *_, end = states_of(algorithm)
    assert begin.work.client_steps == 2 * 4 * 3 + 9 and same(begin, replace(end, r=0))
    assert end.work == begin.work


# Tours


def visits_of(tasks):
    return [(task.label, task.host) for task in tasks if isinstance(task.update, Sgd) and "model" in task.label]


@pytest.mark.parametrize(("name", "epochs"), [("perm-two-stage", 7), ("perm-two-stage", 2), ("perm", 3)])
def test_tours_go_on_in_the_next_epoch_where_they_were_cut(name, epochs):
    recording, tasks = engine_that_records()
    changes = BUDGET | {"steps": 150, "epochs": epochs, "alpha_every": 100}
    algorithm = make_method(name, make_clients(), setup={"engine": recording}, **changes)
    states = states_of(algorithm, epochs)
    expected, tour = [], 0
    while len(expected) < len(visits_of(tasks)):
        for pairs in scheduled(states[0].alpha, "colour", generator_for(SEED, "schedule", tour)):
            expected += pairs
        tour += 1
    made = [(int(label.split("model ")[1].split(" ")[0]), host) for label, host in visits_of(tasks)]
    assert made == expected[: len(made)] and tour > 1
    seeds = [task.seed for task in tasks if "model" in task.label and isinstance(task.update, Sgd)]
    assert len(set(seeds)) == len(seeds)  # no visit draws the batches of another
    places = [tuple(state.memory["tour"]["at"].tolist()) for state in states]
    assert places == sorted(places) and any(t > 0 for _, t in places)


def test_new_weights_begin_a_new_tour():
    states = states_of(make_method("perm", make_clients(), **BUDGET | {"steps": 150, "alpha_every": 2}))
    assert [state.memory["tour"]["at"].tolist()[1] for state in states[2:-1:2]] == [0, 0]
    tours = [int(state.memory["tour"]["at"][0]) for state in states]
    assert tours[2] > tours[1] and tours[4] > tours[3]


@pytest.mark.parametrize(("every", "estimates"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (4, [0, 4]), (9, [0])])
def test_weights_are_estimated_every_so_many_epochs_and_never_after_the_last(every, estimates):
    recording, tasks = engine_that_records()
    changes = BUDGET | {"steps": 200, "alpha_every": every}
    run(make_method("perm", make_clients(), setup={"engine": recording}, **changes), BUDGET["epochs"])
    reports = [task.label for task in tasks if isinstance(task.update, ReportGradient)]
    assert sorted({int(label.split("epoch ")[1].split(":")[0]) for label in reports}) == estimates
    steps = [task.label for task in tasks if isinstance(task.update, BatchGradient)]
    assert len(steps) == 4 * (len(estimates) - 1)  # the global model moves before it is asked again


# Looking ahead


@pytest.mark.parametrize("name", LOOPS)
def test_the_share_that_was_chosen_is_kept_if_steps_do_not_pay_for_another_look(name):
    states = states_of(make_method(name, make_clients(), **AHEAD))
    tables = [state.memory["look ahead"] for state in states]
    assert all(equal(table, tables[0]) for table in tables)
    table = tables[0]
    assert table["shares"].tolist() == list(SHARES)
    assert int(table["chosen"]) == best_candidate(table["losses"], table["partners"])
    chosen = float(table["shares"][int(table["chosen"])])
    fixed = make_method(name, make_clients(), **AHEAD | {"share": chosen}).begin()
    assert torch.equal(states[0].alpha, fixed.alpha)


@pytest.mark.parametrize(("batch_size", "looks"), [(4, 1), (96, 3)])
def test_every_estimate_looks_ahead_anew_if_the_steps_pay_for_it(batch_size, looks):
    """16 samples, 11 shares, 5 rates, a third of a gradient each: 293 samples; 3 % of 150 steps are 4.5 batches."""
    recording, tasks = engine_that_records()
    changes = AHEAD | {"batch_size": batch_size}
    method = make_method("perm", make_clients(), setup={"engine": recording}, **changes)
    tables = [state.memory["look ahead"]["losses"] for state in states_of(method)]
    judged = [task for task in tasks if isinstance(task.update, StepLosses)]
    assert len(judged) == 4 * looks and len({task.seed for task in judged}) == len(judged)
    assert len({tuple(table.flatten().tolist()) for table in tables}) == looks


@pytest.mark.parametrize("regularization", ["level", 0.5])
def test_rules_that_know_no_share_do_not_look(regularization):
    recording, tasks = engine_that_records()
    method = make_method(
        "perm", make_clients(), setup={"engine": recording}, **AHEAD | {"regularization": regularization}
    )
    assert "look ahead" not in method.begin().memory
    assert not any([isinstance(task.update, StepLosses) for task in tasks])


@pytest.mark.parametrize("change", [{"discrepancy": "masked"}, {"sketch": 16}])
def test_without_a_common_model_and_whole_gradients_it_cannot_look(change):
    blind = make_method("perm", make_clients(), **AHEAD | change).begin()
    fixed = make_method("perm", make_clients(), **AHEAD | change | {"share": perm.BLIND_SHARE}).begin()
    assert torch.equal(blind.alpha, fixed.alpha) and "look ahead" not in blind.memory


# Whoever works, in whatever order


@pytest.mark.parametrize("name", LOOPS)
def test_engines_agree(name):
    clients, ends = make_clients(WIDTHS), {}
    for kind, workers in (("sequential", 1), ("threads", 2), ("processes", 2), ("batched", 1)):
        with opened(kind, workers, clients, make_shop()) as engine:
            federation = Federation(clients, engine, Slicer(scalable()), seed=SEED)
            method = METHODS[name].make(federation, start(), perm_options(**LIKE_DEFAULTS))
            ends[kind] = run(method, BUDGET["epochs"])
    assert same(ends["sequential"], ends["threads"]) and same(ends["sequential"], ends["processes"])
    assert apart(ends["sequential"], ends["batched"]) <= 1e-9
    assert len({state.work for state in ends.values()}) == 1
    assert same(ends["sequential"], usual(name))


@pytest.mark.parametrize("name", LOOPS)
def test_the_order_in_which_tasks_run_does_not_matter(name):
    other = run(make_method(name, make_clients(), setup={"engine": Shuffling}, **LIKE_DEFAULTS), BUDGET["epochs"])
    assert same(usual(name), other) and usual(name).work == other.work


@pytest.mark.parametrize("name", LOOPS)
def test_the_order_of_clients_does_not_matter(name, monkeypatch):
    clients, order, ends = make_clients(), [2, 0, 3, 1], []
    for labelled in (clients, [clients[i] for i in order]):
        monkeypatch.setattr(perm, "scheduled", by_key(labelled))
        ends.append(run(make_method(name, labelled, **LIKE_DEFAULTS), BUDGET["epochs"]))
    one, other = ends
    assert equal(one.w, other.w) and torch.equal(one.alpha[order][:, order], other.alpha)
    assert all(equal(one.deployed[old], other.deployed[new]) for new, old in enumerate(order))
    assert one.work == other.work


@pytest.mark.parametrize("name", LOOPS)
def test_from_any_epoch_a_saved_run_goes_on_to_the_same_end(name, tmp_path):
    """Epochs end in the middle of a tour, so the place in the tour must be saved too."""
    states = states_of(make_method(name, make_clients(), **LIKE_DEFAULTS))
    assert any(int(state.memory["tour"]["at"][1]) for state in states)
    for state in states[:-1]:
        checkpoint.save(tmp_path / "x.safetensors", Saved(state))
        again = checkpoint.load(tmp_path / "x.safetensors").state
        algorithm = make_method(name, make_clients(), **LIKE_DEFAULTS)
        while again.r < BUDGET["epochs"]:
            again = algorithm.epoch(again)
        assert same(again, states[-1]) and again.work == states[-1].work


def test_at_full_width_an_ordered_warm_up_is_the_plain_one():
    one, other = (
        run(make_method("perm", make_clients(FULL), **BUDGET | {"warmup": warmup})) for warmup in ("ordered", "static")
    )
    assert same(one, other) and one.work == other.work
