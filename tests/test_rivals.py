"""The rivals of PERM: against loops typed out from their papers, by what they reduce to, and by what they may spend."""

import dataclasses
import itertools
import math

import pytest
import torch
from federation import INPUTS, equal, linear, make_method, start, with_classes
from federation import make_clients as clients_of
from federation import run as run_epochs
from reference import rivals as loops
from reference_inputs import batches

from hetperm.params import NotFinite, num_bytes
from hetperm.randomness import seed_for
from hetperm.state import State

SEED = 5
COMMON = {"epochs": 3, "local_steps": 3, "batch_size": 4, "lr": 0.3, "steps": 43, "tail_average": 0.0}
K = COMMON["local_steps"]
TUNE = {"fine_tune_steps": 7, "fine_tune_lr": 0.2}
META = dict(inner_lr=0.15, **TUNE)
ENVELOPE = {"prox": 2.0, "inner_steps": 4, "inner_lr": 0.25, "server_step": 0.8}

# What a choice between two clusters costs the client with the most samples, 14: a loss is a third of a gradient.
CHOICE = 2 * 14 / 3 / COMMON["batch_size"]

# Every rival: its method, the options it adds, and the gradients that a round costs.
RIVALS = {
    "local": ("local", {}, K),
    "fedavg": ("fedavg", {}, K),
    "fedavg-ft": ("fedavg-ft", TUNE, K),
    "perfedavg-fo": ("perfedavg", META | {"variant": "first-order"}, 2 * K),
    "perfedavg-hf": ("perfedavg", META | {"variant": "hessian-free"}, 4 * K),
    "pfedme": ("pfedme", ENVELOPE, 4 * K),
    "apfl": ("apfl", {"mix": 0.4, "adaptive": False}, 2 * K),
    "apfl-adaptive": ("apfl", {"mix": 0.4, "adaptive": True}, 2 * K),
    "ifca": ("ifca", {"clusters": 2}, K + CHOICE),
    "ditto": ("ditto", {"prox": 0.7}, 2 * K),
    "fedrep": ("fedrep", {"head_steps": 2, "head_lr": 0.2, "fine_tune_steps": 0}, 2 + K),
}
every_rival = pytest.mark.parametrize("name", RIVALS)


def spare_of(name) -> float:
    """The gradients that are not for rounds: those of fine-tuning, and of the first choice."""
    return RIVALS[name][1].get("fine_tune_steps", 0) + (CHOICE if name == "ifca" else 0)


def steps_for(name, rounds) -> int:
    """The smallest budget that pays for so many rounds."""
    return math.ceil(rounds * RIVALS[name][2] + spare_of(name) - 1e-9)


def make_clients(sizes=(9, 14, 1, 11, 6), *, seed=0):
    """Clients of unequal size in two groups without noise, so that clusters are worth having."""
    return clients_of((1.0,) * len(sizes), sizes=sizes, noise=0.0, seed=seed)


def make(name, clients, *, begin=None, seed=SEED, **changes):
    """A rival of the table with some options changed, on softmax regression."""
    method, extra, _ = RIVALS[name]
    setup = {"cut": False, "seed": seed}
    return make_method(method, clients, model=linear, begin=begin, setup=setup, **(COMMON | extra | changes))


def make_start():
    return {name: x.clone() for name, x in start(linear).items()}


def run(algorithm, epochs=COMMON["epochs"]) -> State:
    return run_epochs(algorithm, epochs)


def as_array(params):
    return torch.cat([params["weight"], params["bias"][:, None]], dim=1).numpy()


def as_shards(clients):
    return [(client.train[0].tolist(), client.train[1].tolist()) for client in clients]


def draw_for(clients, count, *what, seed=SEED):
    """(..., i) -> the batches of client i, ``count`` of them; ``what`` names the use they are drawn for."""

    def draw(*where):
        *t, i = where
        generator = torch.Generator().manual_seed(seed_for(seed, *what, *t, clients[i].key))
        return batches(clients[i].n_train, COMMON["batch_size"], count, generator)

    return draw


def assert_models(got, expected, tolerance=1e-12):
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert abs(as_array(a) - b).max() <= tolerance, f"client {i}"


def finished(algorithm, state):
    return state if algorithm.finish is None else algorithm.finish(state)


# Against the loops


def reference(name, clients, rounds):
    shards, start = as_shards(clients), as_array(make_start())
    draw, tune = draw_for(clients, K, "global"), draw_for(clients, TUNE["fine_tune_steps"], "fine-tune")
    common = {"rounds": rounds, "lr": COMMON["lr"]}
    tuning = {"tune": tune, "tune_lr": TUNE["fine_tune_lr"]}
    if name == "local":
        return loops.local(shards, start, draw, **common)
    if name == "fedavg":
        return loops.fedavg(shards, start, draw, **common)
    if name == "fedavg-ft":
        return loops.fedavg_ft(shards, start, draw, **common, **tuning)
    if name.startswith("perfedavg"):
        draw, delta = {
            "perfedavg-fo": (draw_for(clients, 2 * K, "global"), None),
            "perfedavg-hf": (draw_for(clients, 3 * K, "global"), 1e-3),
        }[name]
        return loops.perfedavg(shards, start, draw, **common, inner_lr=META["inner_lr"], delta=delta, **tuning)
    if name == "pfedme":
        options = {"lam": 2.0, "inner_steps": 4, "inner_lr": 0.25, "beta": 0.8}
        return loops.pfedme(shards, start, draw, **common, **options)
    if name == "ditto":
        return loops.ditto(shards, start, draw, **common, lam=0.7)
    if name == "fedrep":  # softmax regression is nothing but a classifier
        return loops.fedrep(shards, start, draw_for(clients, 2 + K, "global"), rounds=rounds, lr=0.2, head_steps=2)
    if name == "ifca":
        memory = make(name, clients).begin().memory
        return loops.ifca(shards, [as_array(memory[f"cluster {c}"]) for c in range(2)], draw, **common)
    return loops.apfl(shards, start, draw, **common, mix=0.4, adaptive=name == "apfl-adaptive")


@every_rival
def test_an_epoch_of_a_rival_is_the_loops_of_its_paper(name):
    clients = make_clients()
    state = run(make(name, clients, epochs=1, steps=steps_for(name, 3)), epochs=1)
    assert_models(state.v, reference(name, clients, rounds=3))


@every_rival
def test_a_run_in_several_epochs_is_the_run_in_one(name):
    clients = make_clients()
    whole, parts = run(make(name, clients, epochs=1), epochs=1), run(make(name, clients))
    assert all(equal(a, b) for a, b in zip(whole.v, parts.v, strict=True))
    assert whole.work == parts.work


def test_clients_of_ifca_move_to_the_cluster_that_wants_what_they_want():
    algorithm = make("ifca", make_clients((12, 8, 10, 9, 7), seed=16), steps=75)
    first, last = algorithm.begin(), run(algorithm)
    assert first.memory["choice"]["choice"].tolist() == [0, 0, 0, 0, 0]
    assert last.memory["choice"]["choice"].tolist() == [1, 0, 0, 1, 0]  # as their groups
    for i, c in enumerate(last.memory["choice"]["choice"].tolist()):
        assert equal(last.v[i], last.memory[f"cluster {c}"])


def test_the_mixing_weights_of_adaptive_apfl_move_and_stay_weights():
    mix = run(make("apfl-adaptive", make_clients(), lr=3.0, steps=120)).memory["mix"]["mix"]
    assert mix.shape == (5,) and ((mix >= 0) & (mix <= 1)).all() and (mix != 0.4).any()
    assert (run(make("apfl", make_clients())).memory["mix"]["mix"] == 0.4).all()


# What they reduce to


def assert_same(a: State, b: State):
    assert all(equal(x, y) for x, y in zip(a.deployed, b.deployed, strict=True))


def test_fedavg_with_one_client_is_local_training_on_the_same_batches():
    clients = make_clients((10,))
    assert_same(run(make("fedavg", clients, tail_average=0.5)), run(make("local", clients, tail_average=0.5)))


def test_fedavg_ft_without_fine_tuning_is_fedavg():
    clients = make_clients()
    tuned = run(make("fedavg-ft", clients, fine_tune_steps=0, tail_average=0.5))
    plain = run(make("fedavg", clients, tail_average=0.5))
    assert_same(tuned, plain)
    assert tuned.work == plain.work


def test_fine_tuning_begins_at_the_tail_average_and_replaces_it():
    clients = make_clients()
    options = {"fine_tune_steps": 5, "fine_tune_lr": 0.2, "tail_average": 0.7, "steps": 47}
    algorithm = make("fedavg-ft", clients, **options)
    state = algorithm.begin()
    for _ in range(3):
        state = algorithm.epoch(state)
    assert state.tail_count == 3 and all(equal(v, state.w) for v in state.v)
    tune = draw_for(clients, 5, "fine-tune")
    expected = [loops.train(as_array(state.tail[i]), shard, tune(i), 0.2) for i, shard in enumerate(as_shards(clients))]
    done = algorithm.finish(state)
    assert done.tail is None and done.work.client_steps == 47 * 5
    assert_models(done.deployed, expected)


@pytest.mark.parametrize("name", ["perfedavg-fo", "perfedavg-hf"])
def test_perfedavg_without_an_inner_step_takes_the_steps_of_fedavg(name):
    clients = make_clients()
    rounds, cost = 4, RIVALS[name][2]
    options = {
        "inner_lr": 0.0,
        "fine_tune_steps": 0,
        "batch_size": 99,
    }  # the whole shard: one batch is as good as another
    meta = run(make(name, clients, steps=rounds * cost, **options))
    plain = run(make("fedavg", clients, steps=rounds * K, batch_size=99))
    assert_models(meta.v, [as_array(params) for params in plain.v])


def test_pfedme_without_a_spring_trains_from_the_start_and_leaves_the_global_model_there():
    clients = make_clients()
    state = run(make("pfedme", clients, prox=0.0, inner_steps=1, inner_lr=0.3, server_step=1.0, epochs=1, steps=3 * K))
    assert_models([state.w], [as_array(make_start())])
    draw = draw_for(clients, K, "global")  # every round begins at w again: the last one is what remains
    shards, start = as_shards(clients), as_array(make_start())
    assert_models(state.v, [loops.train(start, shard, draw(2, i), 0.3) for i, shard in enumerate(shards)])


def test_personal_models_of_pfedme_draw_near_the_global_model_as_the_spring_stiffens():
    clients = make_clients()
    away = []
    for prox in (0.1, 1.0, 10.0, 100.0):
        state = run(make("pfedme", clients, prox=prox, inner_lr=1 / (2 + prox), lr=1e-3 / prox, inner_steps=4))
        away.append(sum(abs(as_array(v) - as_array(state.w)).max() for v in state.v))
    assert away == sorted(away, reverse=True) and away[-1] < 0.1 * away[0]


def test_pfedme_that_moves_all_the_way_to_one_inner_step_is_fedavg():
    clients = make_clients()
    options = {"prox": 4.0, "lr": 0.25, "inner_steps": 1, "inner_lr": 0.3, "server_step": 1.0}
    state, plain = run(make("pfedme", clients, **options)), run(make("fedavg", clients))
    assert_models([state.w], [as_array(plain.w)])


def test_apfl_with_nothing_of_its_own_is_fedavg():
    clients = make_clients()
    mixed = run(make("apfl", clients, mix=0.0, steps=10 * 2 * K, tail_average=0.4))
    assert_same(mixed, run(make("fedavg", clients, steps=10 * K, tail_average=0.4)))


def test_apfl_with_nothing_but_its_own_is_local_training():
    clients = make_clients()
    mixed = run(make("apfl", clients, mix=1.0, steps=10 * 2 * K, tail_average=0.4))
    assert_same(mixed, run(make("local", clients, steps=10 * K, tail_average=0.4)))


def test_ifca_with_one_cluster_is_fedavg():
    clients = make_clients()
    assert_same(
        run(make("ifca", clients, clusters=1, tail_average=0.4)), run(make("fedavg", clients, tail_average=0.4))
    )


def test_the_clusters_of_ifca_begin_apart_and_as_large_as_the_start():
    for begin in (make_start(), {key: torch.zeros_like(x) for key, x in make_start().items()}):
        memory = make("ifca", make_clients(), clusters=3, begin=begin).begin().memory
        models = [memory[f"cluster {c}"] for c in range(3)]
        assert equal(models[0], begin)
        assert not any(equal(models[a], models[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
        assert all(torch.equal(model["bias"], begin["bias"]) for model in models)
        sizes = [float(model["weight"].square().mean().sqrt()) for model in models[1:]]
        expected = float(begin["weight"].square().mean().sqrt()) or (3 * INPUTS) ** -0.5
        assert all(0.5 * expected < size < 2 * expected for size in sizes)


def test_a_cluster_of_ifca_that_nobody_chose_keeps_its_model():
    clients = make_clients((12, 12))
    algorithm = make("ifca", [clients[0], dataclasses.replace(clients[0], key=1)])
    first = algorithm.begin()
    after = algorithm.epoch(first)
    idle = 1 - int(first.memory["choice"]["choice"][0])
    assert equal(first.memory[f"cluster {idle}"], after.memory[f"cluster {idle}"])
    assert not equal(first.memory[f"cluster {1 - idle}"], after.memory[f"cluster {1 - idle}"])


# What they spend


@every_rival
@pytest.mark.parametrize(("epochs", "steps"), [(3, 53), (7, 23)])
def test_the_budget_is_spent_to_less_than_a_round_and_never_exceeded(name, epochs, steps):
    clients = make_clients()
    cost, N = RIVALS[name][2], len(clients)
    if name == "ifca":  # so that all clients take equally many losses
        clients = make_clients((14, 14, 14, 14, 14))
    algorithm = make(name, clients, epochs=epochs, steps=steps)
    state, spent = algorithm.begin(), []
    spent.append(state.work.client_steps / N)
    for r in range(epochs):
        state = algorithm.epoch(state)
        assert state.r == r + 1
        spent.append(state.work.client_steps / N)
    in_epochs = [b - a for a, b in itertools.pairwise(spent)]
    assert max(in_epochs) - min(in_epochs) <= cost + 1e-9
    state = finished(algorithm, state)
    assert steps - cost < state.work.client_steps / N <= steps + 1e-9
    assert algorithm.epoch(state).work == state.work  # nothing is left for an epoch too many


@every_rival
def test_bytes_are_those_of_the_models_that_travel(name):
    clients = make_clients()
    rounds, weigh, N = 4, num_bytes(make_start()), len(clients)
    work = run(make(name, clients, steps=steps_for(name, rounds))).work
    # The global model is sent once more to be fine-tuned.
    extra = 1 if RIVALS[name][1].get("fine_tune_steps", 0) else 0
    expected = {
        "local": (0, 0, 0),
        "ifca": (rounds, (rounds + 1) * 2 * N * weigh, rounds * N * (weigh + 8)),
        "fedrep": (rounds, 0, 0),  # a model that is nothing but a classifier stays at home
    }.get(name, (rounds + extra, (rounds + extra) * N * weigh, rounds * N * weigh))
    assert (work.rounds, work.bytes_down, work.bytes_up) == expected


@every_rival
def test_a_budget_that_pays_for_no_round_is_refused(name):
    cost, spare = RIVALS[name][2], spare_of(name)
    steps = steps_for(name, 1) - 1
    sentence = f"budget of {steps - spare:g} steps a client pays for no round, which takes {cost:g}; raise steps"
    with pytest.raises(ValueError, match=sentence):
        make(name, make_clients(), steps=steps)
    assert run(make(name, make_clients(), steps=steps + 1)).work.rounds >= (name != "local")


@pytest.mark.parametrize("name", ["fedavg", "apfl"])
def test_the_tail_average_is_the_mean_of_the_last_epochs(name):
    algorithm = make(name, make_clients(), epochs=5, tail_average=0.8, steps=100)
    state, seen = algorithm.begin(), []
    for _ in range(5):
        state = algorithm.epoch(state)
        seen.append(state.v)
    assert state.tail_count == 4
    assert_models(state.tail, [sum(map(as_array, models)) / 4 for models in zip(*seen[1:], strict=True)])


# Order, randomness, faults


@every_rival
def test_relabelling_clients_relabels_the_models(name):
    clients = make_clients()
    order = [3, 0, 4, 2, 1]
    state = run(make(name, clients, tail_average=0.4))
    relabelled = run(make(name, [clients[i] for i in order], tail_average=0.4))
    for place, i in enumerate(order):
        assert equal(relabelled.deployed[place], state.deployed[i])
    assert equal(relabelled.w, state.w)
    assert relabelled.work == state.work


@every_rival
def test_a_run_leaves_the_start_the_states_and_the_global_generator_alone(name):
    clients, begin = make_clients(), make_start()
    algorithm = make(name, clients, begin=begin)
    before = torch.get_rng_state()
    first = algorithm.epoch(algorithm.begin())
    copy = [as_array(params).copy() for params in first.v]
    again = algorithm.epoch(first)
    finished(algorithm, again)
    assert torch.equal(before, torch.get_rng_state())
    assert equal(begin, make_start())
    assert_models(first.v, copy, tolerance=0)
    assert not equal(first.v[0], again.v[0])


@every_rival
def test_another_seed_draws_other_batches(name):
    clients = make_clients()
    assert not equal(run(make(name, clients)).v[0], run(make(name, clients, seed=6)).v[0])


@every_rival
def test_a_model_that_is_not_finite_stops_the_run_and_says_where(name):
    begin = make_start() | {"bias": torch.full_like(make_start()["bias"], math.inf)}
    where = "round 0: client 0" if name != "fedavg" and name != "fedavg-ft" else "global round 0: client 0"
    with pytest.raises(NotFinite, match=where):
        run(make(name, make_clients(), begin=begin))


def test_fine_tuning_that_goes_astray_says_where():
    with pytest.raises(NotFinite, match=r"fine-tuning: client 0: .* is not finite"):
        run(make("fedavg-ft", make_clients(), fine_tune_lr=math.inf))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("perfedavg-fo", {"variant": "fo"}, "unknown variant 'fo' of perfedavg; use 'first-order' or 'hessian-free'"),
        ("apfl", {"mix": 1.5}, r"mix 1.5 is outside \[0, 1\]"),
        ("perfedavg-hf", {"difference": 0.0}, "difference 0 of perfedavg must be above 0, such as 0.001"),
        ("fedavg", {"local_steps": 0}, "a round without steps teaches nothing; local_steps must be at least 1"),
        ("pfedme", {"inner_steps": 0}, "0 inner_steps: pfedme needs at least 1"),
        ("ifca", {"clusters": 0}, "0 clusters: ifca needs at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        make(name, make_clients(), **changes)


# Classes that clients mask


HELD = [(0, 1), (0, 1), (0, 1), (0, 2), (0, 1)]


@pytest.mark.parametrize("name", [name for name in RIVALS if name not in ("local", "ifca", "fedrep")] + ["one cluster"])
def test_the_row_of_a_class_that_one_client_holds_is_trained_by_it_alone(name):
    clients = with_classes(make_clients((9, 14, 5, 11, 6)), HELD)
    method, extra, cost = RIVALS["ifca" if name == "one cluster" else name]
    if name == "one cluster":
        extra, cost = {"clusters": 1}, K

    def trained(some):
        setup = {"cut": False, "seed": SEED, "heads": ("weight", "bias")}
        # A single round: after it the models of both federations differ, and so do their gradients.
        steps = cost + extra.get("fine_tune_steps", 0)
        options = COMMON | extra | {"steps": steps, "epochs": 1}
        return run_epochs(make_method(method, some, model=linear, setup=setup, **options), 1).w

    together, alone = trained(clients), trained(clients[3:4])
    assert torch.allclose(together["weight"][2], alone["weight"][2], atol=1e-14)
    assert not torch.allclose(together["weight"][0], alone["weight"][0], atol=1e-6)
    nobody = trained([dataclasses.replace(client, classes=clients[0].classes) for client in clients[:3]])
    assert torch.allclose(nobody["weight"][2], make_start()["weight"][2], atol=1e-14)
