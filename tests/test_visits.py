"""Visits: step sizes, schedules, who is there, what a visit changes and what it costs."""

from dataclasses import replace

import pytest
import torch
from federation import (
    FULL,
    NAMES,
    SEED,
    engine_that_records,
    equal,
    generator,
    make_clients,
    make_federation,
    part_of,
    random,
    scalable,
    start,
)
from reference import perm_maths

from hetperm import mixing
from hetperm.device.updates import Distil, Sgd
from hetperm.params import NotFinite
from hetperm.randomness import seed_for
from hetperm.server.presence import Presence
from hetperm.server.slicer import Slicer
from hetperm.server.visits import (
    Visiting,
    mixed_by_alpha,
    personal_epoch,
    projected,
    scheduled,
    step_sizes,
)
from hetperm.state import State, Work

RULE = Visiting(local_steps=3, batch_size=4, personal_lr=0.5)
ALL_PAIRS = [[(i, (i + t) % 4) for i in range(4)] for t in range(4)]


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def state_of(clients, alpha, r=0) -> State:
    """Personal models that are static parts of the start."""
    return State(r, start(), tuple(part_of(start(), client.width) for client in clients), alpha=double(alpha))


# Step sizes


def test_step_sizes_by_hand():
    alpha = double([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]])
    assert step_sizes(alpha, 0.4, "paper").tolist() == pytest.approx(
        [pytest.approx([0.6, 0.3, 0.3]), pytest.approx([0, 1.2, 0]), pytest.approx([0.24, 0.24, 0.72])]
    )
    expected = double([[0.4, 0.2, 0.2], [0.0, 0.4, 0.0], [0.4 / 3, 0.4 / 3, 0.4]])
    torch.testing.assert_close(step_sizes(alpha, 0.4, "max"), expected, rtol=0, atol=1e-15)


def test_uniform_weights_take_the_whole_step_under_both_rules():
    alpha = torch.full((4, 4), 0.25, dtype=torch.float64)
    for rule in ("max", "paper"):
        assert torch.equal(step_sizes(alpha, 0.5, rule), torch.full((4, 4), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("rule", ["max", "paper"])
def test_sparse_weights_have_the_step_sizes_of_dense_ones(rule):
    alpha = double([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    sparse = step_sizes(mixing.sparse(alpha), 0.3, rule)
    assert sparse.is_sparse and torch.equal(sparse.to_dense(), step_sizes(alpha, 0.3, rule))


def test_unknown_rules_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown step_rule 'min'; use 'max' or 'paper'"):
        step_sizes(torch.eye(2), 1.0, "min")
    with pytest.raises(ValueError, match="unknown schedule 'star'; use 'colour' or 'ring'"):
        scheduled(torch.eye(2), "star", torch.Generator())


# Schedules


def test_the_ring_schedules_all_pairs_in_the_papers_order_and_colours_only_those_with_weight():
    ring = perm_maths.ring(torch.randperm(4, generator=generator(1)).tolist())
    expected = [list(enumerate(hosts)) for hosts in zip(*ring, strict=True)]
    assert scheduled(torch.eye(4), "ring", generator(1)) == expected
    assert scheduled(torch.eye(4), "colour", generator(1)) == [[(0, 0), (1, 1), (2, 2), (3, 3)]]


def test_the_visits_of_an_absent_host_are_skipped_and_counted_and_nothing_else_changes():
    """In round t of four, host t is away (round 0 of these is the sixth of the run)."""
    clients = make_clients(FULL)
    texts = {client.key: "1" * (5 + j) + "0" + "1" * (3 - j) for j, client in enumerate(clients)}
    trace = tuple(texts.get(key, "0" * 9) for key in range(12))
    state = replace(state_of(clients, [[0.25] * 4] * 4), work=Work(rounds=5))
    partly = personal_epoch(make_federation(clients, presence=Presence(trace=trace)), state, ALL_PAIRS, RULE)
    without = [[(i, j) for i, j in visits if j != t] for t, visits in enumerate(ALL_PAIRS)]
    expected = personal_epoch(make_federation(clients), state, without, RULE)
    assert all(map(equal, partly.v, expected.v))
    counted = Work(skipped=4, missed=12, asked=(4,) * 4, absent=(1,) * 4)
    assert partly.work == expected.work + counted


# One visit


def visited(own, host, nested="static", weight=1.0):
    """(model before, model after) of one visit of a model to a host."""
    clients = make_clients((own, host))
    state = state_of(clients, [[1 - weight, weight], [0.0, 1.0]])
    after = personal_epoch(make_federation(clients), state, [[(0, 1)]], replace(RULE, nested=nested))
    assert equal(state.v[1], after.v[1])
    return state.v[0], after.v[0]


@pytest.mark.parametrize("nested", ["static", "random", "rolling"])
@pytest.mark.parametrize(("own", "host"), [(1.0, 0.25), (0.5, 0.25)])
def test_a_visit_to_a_smaller_host_changes_the_nested_part_and_nothing_else(own, host, nested):
    before, after = visited(own, host, nested)
    index = Slicer(scalable()).index(host, nested, within=own, seed=SEED, round=0, key=(7, 3))
    for name in NAMES:
        assert torch.equal(before[name] != after[name], index.mask(name))


@pytest.mark.parametrize("host", [1.0, 0.5])
def test_a_host_that_can_hold_the_visitor_trains_all_of_it(host):
    before, after = visited(0.5, host, "rolling")
    assert all((before[name] != after[name]).all() for name in NAMES)


def test_a_visit_of_weight_zero_and_a_skipped_one_change_nothing():
    assert equal(*visited(1.0, 0.5, weight=0.0))
    assert equal(*visited(1.0, 0.5, "skip"))


def test_rolling_parts_of_visits_move_on_from_round_to_round_and_from_epoch_to_epoch():
    """Round t of epoch r is number 4 r + t for four clients; half of the widest model is a window of 4 of 8 units."""
    clients = make_clients((1.0, 0.5, 0.5, 0.5))
    state, marks = state_of(clients, [[0.25] * 4] * 4, r=1), []
    for rounds in ([[(0, 2)]], [[], [(0, 2)]]):
        after = personal_epoch(make_federation(clients), state, rounds, replace(RULE, nested="rolling"))
        marks.append((after.v[0]["0.bias"] != state.v[0]["0.bias"]).nonzero().flatten().tolist())
    assert marks == [[4, 5, 6, 7], [0, 5, 6, 7]]


def test_a_visit_is_handed_its_own_seed_step_and_label():
    recording, tasks = engine_that_records()
    clients = make_clients()
    state = state_of(clients, [[0.5, 0.0, 0.25, 0.25], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], r=2)
    personal_epoch(make_federation(clients, engine=recording), state, [[(0, 2), (1, 1)], [(0, 3)]], RULE)
    assert [task.update for task in tasks] == [Sgd(3, 4, 0.25), Sgd(3, 4, 0.5), Sgd(3, 4, 0.25)]
    assert [(task.host, task.width) for task in tasks] == [(2, 0.5), (1, 0.5), (3, 0.25)]
    assert [task.seed for task in tasks] == [seed_for(SEED, "visit", 2, *keys) for keys in ((7, 11), (3, 3), (7, 5))]
    assert [task.label for task in tasks] == [
        "epoch 2: model 0 at host 2",
        "epoch 2: model 1 at host 1",
        "epoch 2: model 0 at host 3",
    ]


def test_a_model_teaches_narrower_ones_where_a_host_holds_all_of_it():
    recording, tasks = engine_that_records()
    clients = make_clients()
    state = state_of(clients, [[0.25] * 4] * 4)
    rule = replace(RULE, inplace_kd=0.7)
    personal_epoch(make_federation(clients, engine=recording), state, [[(0, 0), (1, 2), (2, 3)], [(3, 1)]], rule)
    assert [task.update for task in tasks] == [
        Distil(3, 4, 0.5, (0.25, 0.5), 0.7),
        Distil(3, 4, 0.5, (0.25,), 0.7),
        Sgd(3, 4, 0.5),  # the host trains a part
        Sgd(3, 4, 0.5),  # nobody is narrower than the model
    ]


def test_a_model_that_goes_non_finite_is_named_with_epoch_and_host():
    clients = make_clients(FULL)
    state = state_of(clients, [[0.25] * 4] * 4, r=4)
    place = r"^epoch 4: model 0 at host 0: .* is not finite; lower the learning rate"
    with pytest.raises(NotFinite, match=place):
        personal_epoch(make_federation(clients), state, ALL_PAIRS, replace(RULE, personal_lr=1.7e308))


# What visits cost


def test_bytes_of_visits_are_those_of_the_parts_that_travel_there_and_back():
    """At width 1 there are 40 + 8 + 48 + 6 + 18 + 3 numbers, at 0.5 there are 20 + 4 + 12 + 3 + 9 + 3; 8 bytes each."""
    clients = make_clients((1.0, 0.5))
    state = state_of(clients, [[0.5, 0.5], [0.0, 1.0]])
    after = personal_epoch(make_federation(clients), state, [[(0, 0), (1, 1)], [(0, 1)], [(1, 0)]], RULE)
    moved = 8 * (123 + 51 + 51)  # the visit (1, 0) has no weight
    assert after.work == Work(visits=3, rounds=3, client_steps=9, bytes_down=moved, bytes_up=moved)


def test_a_visit_of_weight_zero_costs_nothing():
    clients = make_clients(FULL)
    state = state_of(clients, torch.eye(4).tolist())
    ring = personal_epoch(make_federation(clients), state, ALL_PAIRS, RULE)
    short = personal_epoch(make_federation(clients), state, [[(i, i) for i in range(4)]], RULE)
    assert all(map(equal, ring.v, short.v))
    assert ring.work == replace(short.work, rounds=4) and ring.work.visits == 4


def test_visits_leave_the_state_they_began_with_alone():
    clients = make_clients()
    state = state_of(clients, [[0.25] * 4] * 4)
    before = [{name: x.clone() for name, x in params.items()} for params in state.v]
    personal_epoch(make_federation(clients), state, ALL_PAIRS, RULE)
    assert all(map(equal, before, state.v))


# The end of an epoch


def test_mixing_by_hand():
    """A unit that only the wide model has is its own; what all have is mixed by alpha, renormalised."""
    widths = [1.0, 0.5, 0.25]
    federation = make_federation(make_clients(widths))
    whole = [{name: torch.full_like(x, value) for name, x in start().items()} for value in (1.0, 2.0, 4.0)]
    v = tuple(part_of(w, width) for w, width in zip(whole, widths, strict=True))
    alpha = double([[0.25, 0.25, 0.5], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])
    mixed = mixed_by_alpha(federation, State(1, start(), v, alpha=alpha), widths).v
    assert mixed[0]["0.bias"].tolist() == [2.75, 2.75, 1.5, 1.5, 1, 1, 1, 1]  # two units are common to all, four to two
    assert mixed[1]["0.bias"].tolist() == [3, 3, 2, 2]
    assert mixed[2]["0.bias"].tolist() == [2, 2]
    nobody = State(1, start(), v, alpha=double([[0.0, 0.0, 1.0]] * 3))
    assert mixed_by_alpha(federation, nobody, widths).v[0]["0.bias"].tolist() == [4, 4, 1, 1, 1, 1, 1, 1]


def test_mixing_sums_in_the_order_of_keys():
    """Three models of one width: sums of three depend on their order, and labels must not decide it."""
    widths, order = [0.5, 1.0, 0.5, 0.25, 0.5], [4, 2, 0, 3, 1]
    clients = make_clients(widths)
    whole = [{name: random(x.shape, seed=i) for name, x in start().items()} for i in range(5)]
    v = [part_of(w, width) for w, width in zip(whole, widths, strict=True)]
    alpha = random((5, 5), seed=9).softmax(1)
    one = mixed_by_alpha(make_federation(clients), State(1, start(), tuple(v), alpha=alpha), widths).v
    other = State(1, start(), tuple(v[i] for i in order), alpha=alpha[order][:, order])
    relabelled = make_federation([clients[i] for i in order])
    other = mixed_by_alpha(relabelled, other, [widths[i] for i in order]).v
    assert all(equal(one[old], other[new]) for new, old in enumerate(order))


def test_projection_keeps_models_in_a_ball_about_their_part_of_the_centre():
    clients = make_clients((1.0, 0.5))
    federation, centre = make_federation(clients), start()
    far = {name: x + 1.0 for name, x in centre.items()}
    state = State(1, centre, (far, part_of(centre, 0.5)), memory={"centre": centre})
    after = projected(federation, state, [1.0, 0.5], radius=0.3)
    away = sum(float((after.v[0][name] - x).square().sum()) for name, x in centre.items()) ** 0.5
    assert away == pytest.approx(0.3, abs=1e-12)
    assert equal(after.v[1], state.v[1])
