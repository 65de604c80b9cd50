"""PERM against the paper typed out with loops, and the laws it must obey."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from reference import perm as literal
from torch import nn

from hetperm.algorithms.perm import Options, single_loop, two_stage
from hetperm.client import Client
from hetperm.device.bench import Workbench, batches
from hetperm.engine import Sequential
from hetperm.randomness import generator_for, seed_for
from hetperm.server.visits import NotFinite, personal_epoch, present, rounds_of, step_sizes

OPTIONS = Options(
    seed=3,
    epochs=2,
    local_steps=3,
    batch_size=4,
    personal_lr=0.5,
    global_lr=0.2,
    global_batch=6,
    warmup_rounds=2,
    step_rule="max",
    schedule="colour",
    regularization="noise",
    noise_batches=3,
    alpha_steps=None,
    sketch=None,
    tail_average=0.0,
    participation=1.0,
    projection=None,
    final_lr=None,
)
SIZES = (9, 7, 12, 8)


def make_clients(sizes=SIZES, keys=None) -> list[Client]:
    """Two groups with opposite labels; unequal shards."""
    clients = []
    for i, n in enumerate(sizes):
        generator = torch.Generator().manual_seed(100 + i)
        x = torch.randn(n, 5, dtype=torch.float64, generator=generator)
        y = (x[:, 0] + 0.3 * torch.randn(n, dtype=torch.float64, generator=generator) > 0).long()
        shard = (x, y if i % 2 == 0 else 1 - y)
        clients.append(Client(train=shard, val=shard, test=shard, key=i if keys is None else keys[i]))
    return clients


def make_engine(clients) -> Sequential:
    return Sequential(clients, Workbench(nn.Linear(5, 2, bias=False, dtype=torch.float64), F.cross_entropy))


def start() -> dict:
    return {"weight": torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * 0.1}


def visit_batches(options, clients, r):
    """The batches of every possible visit of an epoch, as plain lists."""
    return {
        (i, j): list(
            batches(
                clients[j].n_train,
                options.batch_size,
                options.local_steps,
                torch.Generator().manual_seed(seed_for(options.seed, "visit", r, clients[i].key, clients[j].key)),
            )
        )
        for i in range(len(clients))
        for j in range(len(clients))
    }


def literal_begin(clients, options):
    """Stage 1 by the reference: (w, alpha)."""
    w, shards = start()["weight"], [client.train for client in clients]
    for r in range(options.warmup_rounds):
        own = [
            list(
                batches(
                    c.n_train, options.batch_size, options.local_steps, generator_for(options.seed, "global", r, c.key)
                )
            )
            for c in clients
        ]
        w = literal.local_sgd(w, shards, own, options.global_lr)
    return w, literal_weights(w, clients, options, r=0)


def literal_weights(w, clients, options, r):
    shards = [client.train for client in clients]
    zeta = literal.discrepancies(literal.full_gradients(w, shards))
    q = []
    for client in clients:
        order = torch.randperm(client.n_train, generator=generator_for(options.seed, "report", r, client.key))
        q.append(literal.noise(w, client.train, order.tensor_split(options.noise_batches)))
    return literal.mixing(zeta, q, [client.n_train for client in clients])


@pytest.mark.parametrize("rule", ["max", "paper"])
@pytest.mark.parametrize("schedule", ["colour", "ring"])
def test_two_stage_perm_equals_the_paper_typed_out(rule, schedule):
    options = replace(OPTIONS, step_rule=rule, schedule=schedule, final_lr=0.3)
    clients = make_clients()
    algorithm = two_stage(clients, make_engine(clients), start(), options)
    state = algorithm.begin()
    w, alpha = literal_begin(clients, options)
    torch.testing.assert_close(state.w["weight"], w, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.alpha, alpha, rtol=0, atol=1e-12)
    v, shards = [w] * len(clients), [client.train for client in clients]
    for r in range(2):
        rounds = rounds_of(state.alpha, schedule, generator_for(options.seed, "schedule", r))
        v = literal.shuffled_epoch(
            v, state.alpha, shards, rounds, visit_batches(options, clients, r), options.personal_lr, rule
        )
        state = algorithm.epoch(state)
        for ours, theirs in zip(state.v, v, strict=True):
            torch.testing.assert_close(ours["weight"], theirs, rtol=0, atol=1e-12)
    for ours, theirs in zip(algorithm.finish(state).v, literal.final_step(v, state.alpha, shards, 0.3), strict=True):
        torch.testing.assert_close(ours["weight"], theirs, rtol=0, atol=1e-12)


def test_the_single_loop_equals_the_paper_typed_out():
    clients = make_clients()
    algorithm = single_loop(clients, make_engine(clients), start(), OPTIONS)
    state = algorithm.begin()
    w, _ = literal_begin(clients, OPTIONS)
    v, shards = [w] * len(clients), [client.train for client in clients]
    for r in range(2):
        rounds = rounds_of(state.alpha, "colour", generator_for(OPTIONS.seed, "schedule", r))
        v = literal.shuffled_epoch(
            v, state.alpha, shards, rounds, visit_batches(OPTIONS, clients, r), OPTIONS.personal_lr, "max"
        )
        large = [
            torch.randperm(c.n_train, generator=generator_for(OPTIONS.seed, "step", r, c.key))[: OPTIONS.global_batch]
            for c in clients
        ]
        w = literal.global_step(w, shards, large, OPTIONS.global_lr)
        state = algorithm.epoch(state)
        torch.testing.assert_close(state.w["weight"], w, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.alpha, literal_weights(w, clients, OPTIONS, r=r + 1), rtol=0, atol=1e-12)
        for ours, theirs in zip(state.v, v, strict=True):
            torch.testing.assert_close(ours["weight"], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [single_loop, two_stage])
def test_relabelling_clients_relabels_weights_and_models(make):
    order = [2, 0, 3, 1]
    clients = make_clients()
    shuffled = [clients[i] for i in order]
    options = replace(OPTIONS, schedule="ring")
    one, other = (make(c, make_engine(c), start(), options) for c in (clients, shuffled))
    a, b = one.begin(), other.begin()
    assert torch.equal(a.w["weight"], b.w["weight"])
    assert torch.equal(a.alpha[order][:, order], b.alpha)
    # The schedule is relabelled too: the same visits in the same rounds.
    rounds = rounds_of(a.alpha, "colour", generator_for(0, "any"))
    where = {old: new for new, old in enumerate(order)}
    relabelled = [[(where[i], where[j]) for i, j in visits] for visits in rounds]
    arguments = {"seed": 1, "local_steps": 3, "batch_size": 4, "personal_lr": 0.5, "step_rule": "max"}
    a = personal_epoch(a, clients, make_engine(clients), rounds=rounds, **arguments)
    b = personal_epoch(b, shuffled, make_engine(shuffled), rounds=relabelled, **arguments)
    for new, old in enumerate(order):
        assert torch.equal(a.v[old]["weight"], b.v[new]["weight"])


def test_with_alpha_the_identity_perm_is_local_training():
    clients = make_clients()
    state = two_stage(clients, make_engine(clients), start(), OPTIONS).begin()
    state = replace(state, alpha=torch.eye(4, dtype=torch.float64))
    rounds = rounds_of(state.alpha, "colour", generator_for(0, "any"))
    assert rounds == [[(0, 0), (1, 1), (2, 2), (3, 3)]]
    after = personal_epoch(
        state, clients, make_engine(clients), rounds=rounds, seed=3, local_steps=3, batch_size=4, personal_lr=0.5,
        step_rule="max",
    )  # fmt: skip
    own = visit_batches(OPTIONS, clients, 0)
    for i, client in enumerate(clients):
        alone = literal.visit(state.w["weight"], client.train, own[i, i], 0.5)
        torch.testing.assert_close(after.v[i]["weight"], alone, rtol=0, atol=1e-12)


def test_with_uniform_alpha_and_the_literal_step_perm_is_shuffled_local_sgd():
    clients = make_clients()
    state = two_stage(clients, make_engine(clients), start(), OPTIONS).begin()
    state = replace(state, alpha=torch.full((4, 4), 0.25, dtype=torch.float64))
    assert torch.equal(step_sizes(state.alpha, 0.5, "paper"), torch.full((4, 4), 0.5, dtype=torch.float64))
    rounds = rounds_of(state.alpha, "ring", generator_for(0, "any"))
    after = personal_epoch(
        state, clients, make_engine(clients), rounds=rounds, seed=3, local_steps=3, batch_size=4, personal_lr=0.5,
        step_rule="paper",
    )  # fmt: skip
    own = visit_batches(OPTIONS, clients, 0)
    model = state.w["weight"]
    for visits in rounds:
        host = dict(visits)[2]
        model = literal.visit(model, clients[host].train, own[2, host], 0.5)
    torch.testing.assert_close(after.v[2]["weight"], model, rtol=0, atol=1e-12)


def test_a_visit_of_weight_zero_changes_nothing_and_costs_nothing():
    clients = make_clients()
    state = two_stage(clients, make_engine(clients), start(), OPTIONS).begin()
    state = replace(state, alpha=torch.eye(4, dtype=torch.float64))
    arguments = {"seed": 3, "local_steps": 3, "batch_size": 4, "personal_lr": 0.5, "step_rule": "max"}
    ring = personal_epoch(
        state, clients, make_engine(clients), rounds=rounds_of(state.alpha, "ring", generator_for(0, "r")), **arguments
    )
    short = personal_epoch(state, clients, make_engine(clients), rounds=[[(i, i) for i in range(4)]], **arguments)
    assert all(torch.equal(a["weight"], b["weight"]) for a, b in zip(ring.v, short.v, strict=True))
    assert ring.work.visits - state.work.visits == 4


def test_the_visits_of_an_absent_host_are_skipped_and_counted_and_nothing_else_changes():
    clients = make_clients()
    state = two_stage(clients, make_engine(clients), start(), OPTIONS).begin()
    state = replace(state, alpha=torch.full((4, 4), 0.25, dtype=torch.float64))
    rounds = rounds_of(state.alpha, "ring", generator_for(0, "any"))
    arguments = {"seed": 3, "local_steps": 3, "batch_size": 4, "personal_lr": 0.5, "step_rule": "max"}
    here = present(clients, 0.5, seed=3, r=0)
    assert 0 < sum(here) < 4
    partly = personal_epoch(state, clients, make_engine(clients), rounds=rounds, participation=0.5, **arguments)
    without = [[(i, j) for i, j in visits if here[j]] for visits in rounds]
    expected = personal_epoch(state, clients, make_engine(clients), rounds=without, **arguments)
    assert all(torch.equal(a["weight"], b["weight"]) for a, b in zip(partly.v, expected.v, strict=True))
    assert partly.work.skipped == 4 * (4 - sum(here))


def test_the_tail_average_is_the_mean_of_the_last_epochs():
    clients = make_clients()
    options = replace(OPTIONS, epochs=4, tail_average=0.5)
    algorithm = two_stage(clients, make_engine(clients), start(), options)
    states = [algorithm.begin()]
    for _ in range(4):
        states.append(algorithm.epoch(states[-1]))
    assert [state.tail_count for state in states] == [0, 0, 0, 1, 2]
    for i in range(4):
        mean = (states[3].v[i]["weight"] + states[4].v[i]["weight"]) / 2
        torch.testing.assert_close(states[4].deployed[i]["weight"], mean, rtol=0, atol=1e-15)


def test_projection_keeps_models_in_a_ball_about_the_start():
    clients = make_clients()
    algorithm = two_stage(clients, make_engine(clients), start(), replace(OPTIONS, projection=0.05, personal_lr=5.0))
    state = algorithm.begin()
    after = algorithm.epoch(state)
    away = [float((params["weight"] - state.w["weight"]).norm()) for params in after.v]
    assert max(away) == pytest.approx(0.05)
    assert all(distance <= 0.05 + 1e-12 for distance in away)


def test_an_epoch_takes_a_state_and_leaves_it_as_it_was():
    clients = make_clients()
    algorithm = single_loop(clients, make_engine(clients), start(), OPTIONS)
    state = algorithm.begin()
    before = [params["weight"].clone() for params in state.v], state.alpha.clone(), state.w["weight"].clone()
    algorithm.epoch(state)
    assert all(torch.equal(a, b["weight"]) for a, b in zip(before[0], state.v, strict=True))
    assert torch.equal(before[1], state.alpha) and torch.equal(before[2], state.w["weight"])


def test_a_model_that_goes_non_finite_is_named_with_epoch_and_host():
    clients = make_clients()
    algorithm = two_stage(clients, make_engine(clients), start(), replace(OPTIONS, personal_lr=1e308))
    with pytest.raises(
        NotFinite, match=r"^epoch 0: model \d at host \d: weight is not finite; lower the learning rate"
    ):
        state = algorithm.begin()
        for _ in range(3):
            state = replace(algorithm.epoch(state), r=0)


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_clients_and_a_client_of_one_sample_can_be_trained(n):
    clients = make_clients(sizes=(5, 1)[:n])
    algorithm = single_loop(clients, make_engine(clients), start(), OPTIONS)
    state = algorithm.epoch(algorithm.begin())
    torch.testing.assert_close(state.alpha.sum(1), torch.ones(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_work_counts_what_a_deployment_would_pay():
    clients = make_clients()
    algorithm = two_stage(clients, make_engine(clients), start(), OPTIONS)
    state = algorithm.begin()
    model = 10 * 8  # ten float64 weights
    assert state.work.client_steps == 2 * 4 * 3
    assert state.work.bytes_down == 2 * 4 * model + 4 * model  # two warm-up rounds, one broadcast for the gradients
    assert state.work.bytes_up == 2 * 4 * model + 4 * (model + 16)  # a gradient, its noise and n_i from each
    after = algorithm.epoch(state)
    visits = int((state.alpha > 0).sum())
    assert after.work.visits == visits
    assert after.work.client_steps - state.work.client_steps == 3 * visits
    assert after.work.bytes_down - state.work.bytes_down == visits * model


def test_unknown_rules_are_refused_by_name():
    with pytest.raises(ValueError, match="unknown step_rule 'min'; use 'max' or 'paper'"):
        step_sizes(torch.eye(2), 1.0, "min")
    with pytest.raises(ValueError, match="unknown schedule 'star'; use 'colour' or 'ring'"):
        rounds_of(torch.eye(2), "star", torch.Generator())
