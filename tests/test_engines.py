"""Engines: all of them give the same numbers, whoever works, in whatever order, and whoever dies."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.algorithms import perm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions
from hetperm.client import Client
from hetperm.device import chain
from hetperm.device.bench import Workshop, full_gradient, sgd_update
from hetperm.engine import Batched, Failure, Processes, Sequential, Task, Threads, batched, choose, engine_for
from hetperm.engine.processes import Room
from hetperm.methods import ALGORITHMS, ONE_SIZE
from hetperm.server.estimate import report
from hetperm.server.slicer import Parts
from submodels import ScalableModel

INPUTS, CLASSES, WIDTHS = 6, 3, (1.0, 0.5, 0.5, 0.25)
COMMON = {"seed": 3, "epochs": 2, "local_steps": 4, "batch_size": 4, "tail_average": 0.5}
PERM = perm.Options(
    **COMMON,
    personal_lr=0.3,
    global_lr=0.3,
    global_batch=6,
    warmup_rounds=2,
    step_rule="max",
    schedule="colour",
    regularization="noise",
    noise_batches=3,
    alpha_steps=None,
    sketch=None,
    participation=1.0,
    projection=None,
    final_lr=None,
)
RIVAL = RivalOptions(**COMMON, lr=0.3, steps=16)
TUNED = FineTuneOptions(**vars(RIVAL), fine_tune_steps=5, fine_tune_lr=0.2)
OPTIONS = {perm.Options: PERM, RivalOptions: RIVAL, FineTuneOptions: TUNED}


# A small federation


def random(shape, seed) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def build(make, dtype=torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make().to(dtype)


def mlp() -> nn.Module:
    one, two = nn.Linear(INPUTS, 16), nn.Linear(16, 8)
    return nn.Sequential(nn.Flatten(), one, nn.ReLU(), two, nn.Tanh(), nn.Linear(8, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)
    )


def dropping() -> nn.Module:
    one = nn.Linear(INPUTS, 16)
    return nn.Sequential(one, nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def make_clients(widths=WIDTHS, dtype=torch.float64, sizes=(9, 7, 12, 8)) -> list[Client]:
    clients = []
    for i, (width, n) in enumerate(zip(widths, sizes, strict=True)):
        x = random((n, INPUTS), seed=30 + i).to(dtype)
        y = (x[:, :CLASSES] + random((n, CLASSES), seed=60 + i)).argmax(1)
        clients.append(Client(train=(x, (y + i % 2) % CLASSES), width=width, key=5 - i))
    return clients


@functools.cache
def scalable(make=mlp, dtype=torch.float64) -> ScalableModel:
    return ScalableModel(build(make, dtype), torch.zeros(2, INPUTS, dtype=dtype))


def shop(make=mlp, dtype=torch.float64) -> Workshop:
    return Workshop(build(make, dtype), F.cross_entropy, scalable(make, dtype))


def result(kind, name="perm", make=mlp, dtype=torch.float64, workers=1, **changes):
    """The state that an algorithm ends in on an engine of a kind."""
    widths = (1.0,) * 4 if name in ONE_SIZE else WIDTHS
    clients, here = make_clients(widths, dtype), shop(make, dtype)
    algorithm, options = ALGORITHMS[name]
    parts = {} if name in ONE_SIZE else {"parts": Parts(scalable(make, dtype))}
    with engine_for(kind, workers, clients, here) as engine:
        begin, epoch, finish = algorithm(
            clients, engine, here.full.take(), replace(OPTIONS[options], **changes), **parts
        )
        return finish(epoch(epoch(begin())))


def equal(a, b) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def same(a, b) -> bool:
    """Whether two states are the same to the last bit."""
    alphas = (a.alpha is None and b.alpha is None) or torch.equal(a.alpha, b.alpha)
    return alphas and equal(a.w, b.w) and all(map(equal, a.deployed, b.deployed))


def apart(a, b) -> float:
    """How far apart the models of two states are, in the coordinate in which they differ most."""
    pairs = [(a.w, b.w), *zip(a.deployed, b.deployed, strict=True)]
    return max(float((x[name] - y[name]).abs().max()) for x, y in pairs for name in x)


def sgd(steps=4, batch_size=4, lr=0.3):
    return functools.partial(sgd_update, steps=steps, batch_size=batch_size, lr=lr)


def tasks_for(clients, params, update=None) -> list[Task]:
    return [Task(update or sgd(), params, host=j, seed=90 + j) for j in range(len(clients))]


# All engines

METHODS = ["perm", "perm-two-stage", "local", "fedavg-ft", "heterofl-ft", "feddropout", "fjord-ft"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_threads_and_processes_give_the_bits_of_the_sequential_engine(kind, name):
    assert same(result("sequential", name), result(kind, name, workers=2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", METHODS)
def test_the_batched_engine_gives_the_numbers_of_the_sequential_one_up_to_rounding(name, dtype, tolerance):
    one, other = (result(kind, name, dtype=dtype) for kind in ("sequential", "batched"))
    assert apart(one, other) <= tolerance
    assert one.work == other.work
    assert one.alpha is None or torch.allclose(one.alpha, other.alpha, atol=10 * tolerance)


VARIANTS = {
    "random": {"nested": "random", "extraction": "random", "discrepancy": "masked", "final_lr": 0.1},
    "distilled": {"inplace_kd": 0.5, "server_mix": "alpha"},
    "sketched": {"sketch": 16, "participation": 0.7},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_does_with_other_options(variant):
    one = result("sequential", **VARIANTS[variant])
    assert apart(one, result("batched", **VARIANTS[variant])) <= 1e-10
    assert same(one, result("processes", workers=2, **VARIANTS[variant]))


def test_processes_run_models_with_dropout_as_the_sequential_engine_does():
    assert same(result("sequential", make=dropping), result("processes", make=dropping, workers=2))


# Which engine

CHOICES = [
    ("auto", 1, mlp, "batched"),
    ("auto", 2, mlp, "batched"),  # the number of workers decides no bit
    ("auto", 1, cnn, "sequential"),
    ("auto", 2, cnn, "threads"),
    ("auto", 1, dropping, "sequential"),
    ("auto", 2, dropping, "processes"),
    ("sequential", 1, mlp, "sequential"),
    ("threads", 1, mlp, "threads"),
    ("processes", 2, cnn, "processes"),
]


@pytest.mark.parametrize(("kind", "workers", "make", "expected"), CHOICES)
def test_the_engine_is_chosen_by_model_and_workers(kind, workers, make, expected):
    assert choose(kind, workers, make_clients(), shop(make)) == expected


def test_an_engine_that_cannot_do_it_says_so_and_names_another(monkeypatch):
    clients = make_clients()
    with pytest.raises(ValueError, match="dropout-like layers; use engine 'processes' or 'auto'"):
        choose("threads", 2, clients, shop(dropping))
    with (
        pytest.raises(ValueError, match=r"needs a chain of linear layers.* use engine 'auto'"),
        engine_for("batched", 1, clients, shop(cnn)),
    ):
        pass
    monkeypatch.setattr("hetperm.engine.can_fork", lambda: False)
    with pytest.raises(ValueError, match="where a forked process can train; use engine 'threads'"):
        choose("processes", 2, clients, shop(cnn))
    assert choose("auto", 2, clients, shop(dropping)) == "sequential"


def test_counting_the_cost_of_a_model_does_not_keep_processes_from_training():
    """In a process of its own: it takes the first backward pass there is, and on tensors without data."""
    code = (
        "import torch; from torch import nn; from submodels.cost import count; from hetperm.engine import can_fork;"
        "count(nn.Linear(2, 2), torch.zeros(1, 2), batch_size=2); print(can_fork())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda client: replace(client, train=(client.train[0], client.train[1].double())),
        lambda client: replace(client, train=(client.train[0], client.train[1] - 100)),  # what cross-entropy ignores
    ],
)
def test_labels_that_are_no_classes_are_not_batched(change):
    clients = make_clients()
    assert choose("auto", 1, [*clients[:3], change(clients[3])], shop()) == "sequential"


def test_another_loss_is_not_batched():
    here = Workshop(build(mlp), lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1))
    assert choose("auto", 1, make_clients(), here) == "sequential"


@pytest.mark.parametrize(("make", "drawing"), [(nn.Dropout, True), (lambda: nn.Dropout(0.0), False), (nn.RReLU, True)])
def test_only_layers_that_drop_something_keep_threads_away(make, drawing):
    module = lambda: nn.Sequential(nn.Linear(INPUTS, 4), make(), nn.Linear(4, CLASSES), nn.Softplus())  # noqa: E731
    here = Workshop(build(module), F.cross_entropy)
    assert choose("auto", 2, make_clients(), here) == ("processes" if drawing else "threads")


# Chains of linear layers


class Written(nn.Module):
    """A chain that is written as functions."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(torch.flatten(x, 1))))


class Residual(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x.flatten(1))
        return self.two(h + h.relu())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.one(x.flatten(1))))


class Branching(Written):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def hooked() -> nn.Module:
    module = mlp()
    module[1].register_forward_hook(lambda module, args, output: 2 * output)
    return module


def frozen() -> nn.Module:
    module = mlp()
    module[1].bias.requires_grad_(False)
    return module


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES, bias=False))


NO_CHAINS = {
    "a convolution": cnn,
    "dropout": dropping,
    "a residual": Residual,
    "a layer used twice": Twice,
    "a branch": Branching,
    "a hook": hooked,
    "a frozen parameter": frozen,
    "an activation at the end": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES), nn.ReLU()),
    "two activations": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 3)),
    "half a flattening": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(INPUTS, CLASSES)),
    "nothing": nn.Sequential,
    "a norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)),
}


@pytest.mark.parametrize("kind", NO_CHAINS)
def test_what_is_more_than_a_chain_is_not_taken_for_one(kind):
    assert chain.layers_of(NO_CHAINS[kind]()) is None


def by_hand_bench(make) -> chain.Chain:
    module = build(make)
    return chain.Chain(module, F.cross_entropy, layers=chain.layers_of(module, flat=True))


@pytest.mark.parametrize("make", [mlp, Written, linear])
def test_gradients_of_a_chain_are_those_of_autograd(make):
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    plain, by_hand = Workshop(build(make), F.cross_entropy).full, by_hand_bench(make)
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)
    pieces = torch.arange(7).tensor_split(3)  # of 3, 2 and 2 samples
    for a, b in zip(plain.gradients(x, y, pieces, 2), by_hand.gradients(x, y, pieces, 2), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_a_gradient_in_pieces_is_the_gradient(most):
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    bench = Workshop(build(mlp), F.cross_entropy).full
    whole = bench.gradient(x, y)
    for _ in range(2):  # nothing is left behind of the first time
        for a, b in zip(bench.mean_gradient(x, y, most), whole, strict=True):
            assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


def test_so_they_are_where_classes_are_masked():
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 2, 2, 0, 0, 2, 0])
    plain, by_hand = Workshop(build(mlp), F.cross_entropy).full, by_hand_bench(mlp)
    plain.classes = by_hand.classes = torch.tensor([True, False, True])
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)
    assert float(by_hand.gradient(x, y)[-1][1]) == 0


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_so_they_are_for_every_activation(activation):
    make = lambda: nn.Sequential(nn.Linear(INPUTS, 5), activation(), nn.Linear(5, CLASSES))  # noqa: E731
    x, y = random((7, INPUTS), seed=1), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    plain, by_hand = Workshop(build(make), F.cross_entropy).full, by_hand_bench(make)
    for a, b in zip(plain.gradient(x, y), by_hand.gradient(x, y), strict=True):
        assert torch.allclose(a, b, atol=1e-14, rtol=1e-12)


def test_a_step_of_logistic_regression_by_hand():
    """One sample (1, 2) of class 0 and weights of zero: the error is (-1/2, 1/2), and so are both steps, times lr."""
    layers = [chain.Layer("w", "b")]
    params = {"w": torch.zeros(1, 2, 2), "b": torch.zeros(1, 2)}
    shard = (torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
    chain.descend(layers, params, [shard], [torch.tensor([[0]])], [0.5], [None])
    assert params["w"].tolist() == [[[0.25, 0.5], [-0.25, -0.5]]]
    assert params["b"].tolist() == [[0.25, -0.25]]


# The batched engine


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["perm", "heterofl-ft", "fjord-ft"])
def test_the_number_of_workers_decides_no_bit_of_a_batched_run(name, workers):
    assert same(result("batched", name), result("batched", name, workers=workers))


def test_neither_do_the_size_of_stacks_and_the_order_of_tasks(monkeypatch):
    clients = make_clients((1.0,) * 4, torch.float32)
    here = shop(dtype=torch.float32)
    tasks = tasks_for(clients, here.full.take())
    whole = Batched(clients, here).run(tasks)
    reverse = Batched(clients, here).run(tasks[::-1])[::-1]
    monkeypatch.setattr(batched, "ENTRIES", 1)  # a stack for each model
    monkeypatch.setattr(chain, "ENTRIES", 1)  # and a gather for each step
    single = Batched(clients, here).run(tasks)
    assert all(map(equal, whole, reverse)) and all(map(equal, whole, single))


def test_hosts_with_fewer_samples_than_a_batch_are_batched_by_themselves():
    clients = make_clients((1.0,) * 4, sizes=(9, 2, 1, 2))
    here = shop()
    tasks = tasks_for(clients, here.full.take(), sgd(steps=7))
    for one, other in zip(Sequential(clients, here).run(tasks), Batched(clients, here).run(tasks), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_models_of_a_batched_run_do_not_hold_each_other_in_memory():
    clients, here = make_clients((1.0,) * 4), shop()
    for model in Batched(clients, here).run(tasks_for(clients, here.full.take())):
        for x in model.values():
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_a_batched_task_that_fails_fails_alone():
    clients, here = make_clients((1.0,) * 4), shop()
    x, y = clients[2].train
    clients[2] = replace(clients[2], train=(x, y + CLASSES))  # classes that the model does not have
    outcomes = Batched(clients, here).run(tasks_for(clients, here.full.take()))
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, False, True, False]
    assert outcomes[2].task.host == 2


@pytest.mark.parametrize("most", [2, 512])
def test_gradients_that_clients_report_are_batched_too(most):
    clients, here = make_clients((1.0,) * 4), shop()
    one, other = Sequential(clients, here), Batched(clients, here)
    tasks = tasks_for(clients, here.full.take(), functools.partial(full_gradient, most=most))
    for a, b in zip(one.run(tasks), other.run(tasks), strict=True):
        assert torch.allclose(a, b, atol=1e-13)
    update = functools.partial(report, noise_batches=3, sketch=None, sketch_seed=0, most=most)
    tasks = tasks_for(clients, here.full.take(), update)
    for a, b in zip(one.run(tasks), other.run(tasks), strict=True):
        assert torch.allclose(a.gradient, b.gradient, atol=1e-13)
        assert a.noise == pytest.approx(b.noise, rel=1e-10)


# The processes engine


@pytest.fixture
def processes():
    clients, here = make_clients((1.0,) * 4), shop(cnn)
    engine = Processes(clients, here, workers=2)
    yield engine, clients, here
    engine.close()


def slow_update(bench, params, shard, *, generator):
    time.sleep(0.3)
    return sgd()(bench, params, shard, generator=generator)


def test_workers_killed_in_the_middle_of_a_round_are_replaced_and_change_nothing(processes):
    engine, clients, here = processes
    tasks = tasks_for(clients, here.full.take(), slow_update)
    expected = Sequential(clients, here).run(tasks)
    engine.run(tasks[:2])
    first = engine.pids

    def kill():
        time.sleep(0.1)
        for pid in first:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = engine.run(tasks)
    killer.join()
    assert not set(first) & set(engine.pids)
    assert all(map(equal, expected, outcomes))


def test_workers_killed_between_rounds_are_replaced(processes):
    engine, clients, here = processes
    tasks = tasks_for(clients, here.full.take())
    before = engine.run(tasks)
    for pid in engine.pids:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert all(map(equal, before, engine.run(tasks)))


def deadly_update(bench, params, shard, *, generator):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_task_that_kills_every_worker_is_a_failure_and_the_others_are_done(processes):
    engine, clients, here = processes
    tasks = tasks_for(clients, here.full.take())
    tasks[1] = replace(tasks[1], update=deadly_update)
    outcomes = engine.run(tasks)
    assert isinstance(outcomes[1], Failure) and "ended 3 times (signal 9)" in str(outcomes[1].error)
    assert not any(isinstance(outcomes[k], Failure) for k in (0, 2, 3))


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def failing_update(bench, params, shard, *, generator):
    raise Unpicklable("something", "odd")


def test_what_a_worker_raises_comes_back_as_a_failure(processes):
    engine, clients, here = processes
    outcomes = engine.run(tasks_for(clients, here.full.take(), failing_update))
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert "something odd" in str(outcomes[0].error)


def test_workers_end_with_the_engine(processes):
    engine, clients, here = processes
    engine.run(tasks_for(clients, here.full.take()))
    pids = engine.pids
    assert len(pids) == 2
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 5
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ORPHANS = """
import os, signal, torch
from torch import nn
from torch.nn import functional as F
from functools import partial
from hetperm.client import Client
from hetperm.engine import Processes, Task
from hetperm.device.bench import Workshop, sgd_update
clients = [Client(train=(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), key=0)]
shop = Workshop(nn.Linear(2, 2), F.cross_entropy)
engine = Processes(clients, shop, 1)
engine.run([Task(partial(sgd_update, steps=1, batch_size=2, lr=0.1), shop.full.take(), host=0, seed=0)])
print(*engine.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_do_not_outlive_a_parent_that_was_killed():
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = _state(pid)
        if state in (None, "Z"):
            return
        time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"worker {pid} is still there, in state {state}")


def _state(pid: int) -> str | None:
    """The letter of a process's state; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


VALUES = [
    {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.empty(0, 3), "c": torch.tensor(True)},
    (torch.tensor(2.5, dtype=torch.float64), {"x": torch.arange(3)}, "text", None),
    {"large": torch.arange(300.0)},  # more than the room holds
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
]


@pytest.mark.parametrize("value", VALUES, ids=["shapes", "mixture", "large", "bfloat16"])
def test_messages_come_through_a_room_as_they_went_in(value):
    room = Room(256)
    back = room.read(room.write(value))
    room.write({"other": torch.zeros(50)})  # what was read is not in the room any more
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(value), leaves(back), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b


# Threads


def test_threads_and_the_sequential_engine_agree_on_convolutions():
    clients, here = make_clients((1.0,) * 4), shop(cnn)
    tasks = tasks_for(clients, here.full.take())
    threads = Threads(clients, here, workers=3)
    try:
        assert all(map(equal, Sequential(clients, here).run(tasks), threads.run(tasks)))
    finally:
        threads.close()
