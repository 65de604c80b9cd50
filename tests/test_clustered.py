"""Clusters over partial training, restarts of clusters, and the price of choosing."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from federation import (
    FULL,
    HEADS,
    RIVAL,
    TUNE,
    WIDTHS,
    engine_that_records,
    equal,
    make_clients,
    make_method,
    make_shop,
    part_of,
    rival_options,
    run,
    same,
    start,
    with_classes,
)
from reference import by_parts
from reference_inputs import Draw, as_list, as_shards, assert_close

from hetperm.device.gradients import MeanLoss
from hetperm.params import num_bytes

K, LR, B = RIVAL["local_steps"], RIVAL["lr"], RIVAL["batch_size"]
CHOICE = 2 * 12 / 3 / B  # of the client with the most samples, 12: a loss of every cluster, each a third of a gradient
ROUND = K + CHOICE


def clusters(state, count=2):
    return [state.memory[f"cluster {c}"] for c in range(count)]


def choice(state):
    return state.memory["choice"]["choice"].tolist()


# Against the loops


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_clusters_by_parts_equal_loops_over_coordinates(masked, tuned):
    clients = make_clients()
    if masked:
        clients = with_classes(clients, [(0, 1), (1, 2), (0, 2), (0, 1)])
    name, spare = ("heterofl-clustered-ft", TUNE["fine_tune_steps"]) if tuned else ("heterofl-clustered", 0)
    algorithm = make_method(name, clients, steps=math.ceil(CHOICE + 4 * ROUND + spare), setup={"heads": HEADS})
    models, chosen, v = by_parts.clustered(
        as_shards(clients),
        WIDTHS,
        [as_list(model) for model in clusters(algorithm.begin())],
        Draw(clients, SimpleNamespace(**RIVAL, **TUNE)),
        rounds=4,
        lr=LR,
        tune_lr=TUNE["fine_tune_lr"] if tuned else None,
    )
    state = run(algorithm)
    assert choice(state) == chosen
    for params, model in zip(clusters(state), models, strict=True):
        assert_close(params, model)
    for params, model, width in zip(state.deployed, v, WIDTHS, strict=True):
        assert_close(params, model, width)


def test_clients_choose_the_cluster_of_their_group():
    clients = make_clients(noise=0.0, sizes=(24, 24, 24, 24))
    options = {"steps": 400, "restarts": 3, "probe_rounds": 5, "lr": 0.8, "epochs": 2}
    chosen = choice(run(make_method("heterofl-clustered", clients, **options)))
    assert chosen[0] == chosen[3] != chosen[1] == chosen[2]


def test_at_full_width_clusters_by_parts_are_ifca():
    clients = make_clients(FULL)
    assert same(
        run(make_method("heterofl-clustered", clients)), run(make_method("ifca", clients, setup={"cut": False}))
    )


def test_one_cluster_is_heterofl_and_needs_no_loss():
    clients = make_clients()
    one, plain = run(make_method("heterofl-clustered", clients, clusters=1)), run(make_method("heterofl", clients))
    assert same(one, plain) and one.work.client_steps == plain.work.client_steps


def test_relabelled_clients_have_relabelled_models():
    clients, order = make_clients(), [2, 0, 3, 1]
    options = {"restarts": 2, "probe_rounds": 1, "steps": 60}
    state = run(make_method("heterofl-clustered", clients, **options))
    other = run(make_method("heterofl-clustered", [clients[i] for i in order], **options))
    assert equal(state.w, other.w)
    assert all(equal(other.v[place], state.v[i]) for place, i in enumerate(order))


# Restarts


def test_the_restart_with_the_lowest_mean_loss_goes_on():
    clients = make_clients()
    options = {"steps": 200, "probe_rounds": 2}
    engine, tasks = engine_that_records()
    algorithm = make_method("heterofl-clustered", clients, restarts=3, setup={"engine": engine}, **options)
    chosen = algorithm.begin()
    judged = [task for task in tasks if isinstance(task.update, MeanLoss)]
    bench = make_shop()
    means = []
    for restart in range(3):
        # Each restart judges three times: at its start and after each probing round; the last one counts.
        last = judged[(3 * restart + 2) * 8 : (3 * restart + 3) * 8]
        losses = [float(t.update(bench.at(t.width), t.params, clients[t.host].train, None)) for t in last]
        means.append(sum(min(losses[2 * i : 2 * i + 2]) for i in range(4)) / 4)
    best = means.index(min(means))
    assert float(chosen.memory["choice"]["loss"]) == pytest.approx(means[best], abs=1e-12)
    final = judged[(3 * best + 2) * 8]
    assert equal(part_of(clusters(chosen)[0], final.width), final.params)


def test_every_restart_begins_elsewhere_and_the_first_as_without_restarts():
    engine, tasks = engine_that_records()
    make_method("ifca", make_clients(FULL), restarts=3, steps=200, setup={"engine": engine, "cut": False}).begin()
    starts = [
        task.params
        for task in tasks
        if task.label in ("round 0: cluster 0 at client 0", "round 0: cluster 1 at client 0")
    ]
    assert len(starts) == 6 and equal(starts[0], start())
    assert not any(equal(a, b) for k, a in enumerate(starts) for b in starts[:k])
    plain = make_method("ifca", make_clients(FULL), steps=200, setup={"cut": False}).begin()
    assert equal(starts[1], clusters(plain)[1])


def test_one_restart_is_none():
    clients = make_clients()
    assert same(
        run(make_method("heterofl-clustered", clients)),
        run(make_method("heterofl-clustered", clients, restarts=1, probe_rounds=7)),
    )


# What they spend


@pytest.mark.parametrize("tune", [0, 5])
@pytest.mark.parametrize("restarts", [1, 3])
def test_choices_restarts_and_fine_tuning_are_part_of_the_budget(restarts, tune):
    clients, steps = make_clients(), 150
    options = {"restarts": restarts, "probe_rounds": 2, "steps": steps}
    name = "heterofl-clustered-ft" if tune else "heterofl-clustered"
    algorithm = make_method(name, clients, **options)
    begins = restarts * (CHOICE + (2 if restarts > 1 else 0) * ROUND)
    rounds = int((steps - tune - begins) / ROUND)
    state = run(algorithm)
    probed = restarts * 2 if restarts > 1 else 0
    assert state.work.rounds == rounds + probed + (1 if tune else 0)
    choices = restarts + probed + rounds
    by_hand = [(rounds + probed) * K + tune + choices * 2 * c.n_train / 3 / min(B, c.n_train) for c in clients]
    assert state.work.client_steps == pytest.approx(sum(by_hand))
    assert max(by_hand) <= steps < max(by_hand) + ROUND


def test_large_shards_are_judged_on_some_samples_that_are_the_same_for_all_clusters():
    clients = make_clients()
    engine, tasks = engine_that_records()
    algorithm = make_method("ifca", clients, choice_samples=4, steps=40, setup={"engine": engine})
    state = algorithm.begin()
    assert state.work.client_steps == pytest.approx(4 * 2 * 4 / 3 / 4)
    assert {task.update for task in tasks} == {MeanLoss(most=4)}
    assert [a.seed == b.seed for a, b in zip(tasks[::2], tasks[1::2], strict=True)] == [True] * 4
    x, y = clients[0].train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(tasks[0].seed))[:4]
    bench = make_shop().at(1.0)
    expected = MeanLoss()(bench, tasks[0].params, (x[order], y[order]), None)
    got = MeanLoss(most=4)(bench, tasks[0].params, (x, y), torch.Generator().manual_seed(tasks[0].seed))
    assert torch.equal(got, expected)
    assert MeanLoss(most=4).samples(9) == 4 / 3 and MeanLoss(most=0).samples(9) == 3


def test_clients_get_all_clusters_at_their_width_and_send_one_back():
    clients = make_clients()
    state = run(make_method("heterofl-clustered", clients, steps=math.ceil(CHOICE + 3 * ROUND)))
    weigh = sum(num_bytes(part_of(start(), width)) for width in WIDTHS)
    assert state.work.bytes_down == 4 * 2 * weigh
    assert state.work.bytes_up == 3 * (weigh + 8 * len(clients))


def test_a_budget_that_restarts_use_up_is_refused():
    with pytest.raises(ValueError, match="a budget of 0 steps a client pays for no round, which takes 5; raise steps"):
        make_method("ifca", make_clients(FULL), restarts=9, steps=100, setup={"cut": False})


@pytest.mark.parametrize("name", ["clusters", "restarts", "probe_rounds"])
def test_none_of_something_is_refused(name):
    with pytest.raises(ValueError, match=f"0 {name}: ifca needs at least 1"):
        rival_options("ifca", **{name: 0})


def test_a_cluster_that_is_not_finite_is_left_for_another():
    clients = make_clients(FULL)
    algorithm = make_method("ifca", clients, steps=100, setup={"cut": False})
    state = algorithm.begin()
    spoilt = {name: torch.full_like(x, math.inf) for name, x in start().items()}
    memory = {
        **state.memory,
        "cluster 1": spoilt,
        "choice": {**state.memory["choice"], "choice": torch.zeros(4).long()},
    }
    after = algorithm.epoch(replace(state, memory=memory, v=(clusters(state)[0],) * 4))
    assert choice(after) == [0] * 4
