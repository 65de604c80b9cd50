"""Engines: all of them give the same numbers, whoever works and in whatever order; and which one is chosen."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_models import convolutional, deep, dropping, result
from federation import (
    CLASSES,
    FULL,
    INPUTS,
    apart,
    build,
    equal,
    make_clients,
    make_federation,
    make_shop,
    same,
    start,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.device.bench import Workshop
from hetperm.device.updates import Sgd
from hetperm.engine.choice import choose, opened
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task, longest_first
from hetperm.engine.threads import Threads
from hetperm.server.global_model import local_sgd_round

NAMES = ["perm", "perm-two-stage", "local", "fedavg-ft", "heterofl-ft", "feddropout", "fjord-ft"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_threads_and_processes_give_the_bits_of_the_sequential_engine(kind, name):
    assert same(result("sequential", name), result(kind, name, workers=2))


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, torch.float64, 1e-10) for name in NAMES),
        *((name, torch.float32, 1e-5) for name in ("perm", "fedavg-ft")),
    ],
)
def test_the_batched_engine_gives_the_numbers_of_the_sequential_one_up_to_rounding(name, dtype, tolerance):
    one, other = (result(kind, name, dtype=dtype) for kind in ("sequential", "batched"))
    assert apart(one, other) <= tolerance
    assert one.work == other.work
    assert one.alpha is None or torch.allclose(one.alpha, other.alpha, atol=10 * tolerance)


@pytest.mark.parametrize("variant", ["random", "distilled", "sketched"])
def test_so_they_do_with_other_options(variant):
    one = result("sequential", variant=variant)
    assert apart(one, result("batched", variant=variant)) <= 1e-10
    assert same(one, result("processes", workers=2, variant=variant))


def test_processes_run_models_with_dropout_as_the_sequential_engine_does():
    assert same(result("sequential", model=dropping), result("processes", model=dropping, workers=2))


def test_threads_and_the_sequential_engine_agree_on_convolutions():
    clients, shop = make_clients(FULL), make_shop(convolutional)
    tasks = [Task(Sgd(4, 4, 0.3), start(convolutional), host=j, seed=j) for j in range(4)]
    with opened("threads", 3, clients, shop) as threads:
        assert all(map(equal, Sequential(clients, shop).run(tasks), threads.run(tasks)))


# Models that draw random numbers of their own


class Jittery(nn.Module):
    """Dropout as many write it: a function, which no list of layers shows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(INPUTS, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.dropout(self.one(x).relu(), 0.5, training=self.training))


class Reversing(Sequential):
    def run(self, tasks):
        return super().run(tasks[::-1])[::-1]


def test_models_that_draw_random_numbers_give_the_same_numbers_in_any_order_and_on_threads():
    clients, updates = make_clients((1.0, 0.5, 0.5, 1.0)), [Sgd(2, 4, 0.3)] * 4

    def trained(engine):
        federation = make_federation(clients, model=Jittery, engine=engine)
        return local_sgd_round(federation, start(Jittery), updates, batch_size=4, round=0)[0]

    one = trained(Sequential)
    assert equal(one, trained(Reversing))
    for workers in (1, 3):
        with opened("threads", workers, clients, make_shop(Jittery)) as threads:
            for _ in range(3):  # and again, once it has found out
                assert equal(one, trained(lambda clients, shop, engine=threads: engine))


def test_a_task_draws_by_its_seed_alone_and_leaves_the_global_generator_alone():
    clients, shop = make_clients(FULL), make_shop(dropping)
    task = Task(Sgd(2, 4, 0.3), start(dropping), host=0, seed=5)
    before = torch.get_rng_state()
    one, again, other = Sequential(clients, shop).run([task, task, replace(task, seed=6)])
    assert equal(one, again) and not equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_on_another_device_its_generator_is_seeded_for_the_task_and_restored(monkeypatch):
    """No such device is needed: what would be seeded is recorded."""
    clients, shop, calls = make_clients(FULL), make_shop(dropping), []
    task = Task(Sgd(2, 4, 0.3), start(dropping), host=0, seed=5)
    expected = Sequential(clients, shop).run([task])[0]

    @contextmanager
    def forked(devices, device_type):
        calls.append(("forked", devices, device_type))
        yield
        calls.append("restored")

    class Elsewhere(Workshop):
        @property
        def full(self):
            return SimpleNamespace(slots=[SimpleNamespace(device=torch.device("cuda:1"))])

    def seeded(seed):
        calls.append(seed)
        torch.default_generator.manual_seed(seed)

    shop.__class__ = Elsewhere
    monkeypatch.setattr("torch.random.fork_rng", forked)
    monkeypatch.setattr("torch.manual_seed", seeded)
    before = torch.get_rng_state()
    assert equal(Sequential(clients, shop).run([task])[0], expected)
    torch.set_rng_state(before)
    assert calls == [("forked", [1], "cuda"), 5, "restored"]


def fail(bench, params, shard, generator):
    raise ArithmeticError("no good")


@pytest.mark.parametrize("engine", [Sequential, lambda clients, shop: Threads(clients, shop, 2)])
def test_a_task_that_raises_is_a_failure_and_the_others_are_done(engine):
    clients, shop = make_clients(FULL), make_shop()
    tasks = [Task(fail if j == 1 else Sgd(2, 4, 0.3), start(), host=j, seed=j) for j in range(3)]
    here = engine(clients, shop)
    outcomes = here.run(tasks)
    here.close()
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, True, False]
    assert outcomes[1].task is tasks[1] and str(outcomes[1].error) == "no good"


# Which engine

CHOICES = [
    ("auto", 1, deep, "batched"),
    ("auto", 2, deep, "batched"),  # the number of workers decides no bit
    ("auto", 1, convolutional, "sequential"),
    ("auto", 2, convolutional, "threads"),
    ("auto", 1, dropping, "sequential"),
    ("auto", 2, dropping, "processes"),
    ("sequential", 1, deep, "sequential"),
    ("threads", 1, deep, "threads"),
    ("processes", 2, convolutional, "processes"),
]


@pytest.mark.parametrize(("kind", "workers", "model", "expected"), CHOICES)
def test_the_engine_is_chosen_by_model_and_workers(kind, workers, model, expected):
    assert choose(kind, workers, make_clients(), make_shop(model)) == expected


def test_an_engine_that_cannot_do_it_says_so_and_names_another(monkeypatch):
    clients = make_clients()
    with pytest.raises(ValueError, match="dropout-like layers; use engine 'processes' or 'auto'"):
        choose("threads", 2, clients, make_shop(dropping))
    with (
        pytest.raises(ValueError, match=r"needs a chain of linear layers.* use engine 'auto'"),
        opened("batched", 1, clients, make_shop(convolutional)),
    ):
        pass
    with pytest.raises(ValueError, match=r"needs a chain of linear layers.* use engine 'auto'"):
        choose("batched", 1, clients, make_shop(convolutional))
    monkeypatch.setattr("hetperm.engine.choice.can_fork", lambda: False)
    with pytest.raises(ValueError, match="where a forked process can train; use engine 'threads'"):
        choose("processes", 2, clients, make_shop(convolutional))
    assert choose("auto", 2, clients, make_shop(dropping)) == "sequential"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs Ray: pip install 'hetperm\[ray\]', or use engine 'processes'"):
        choose("ray", 2, clients, make_shop(convolutional))


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with (
        pytest.raises(ValueError, match="unknown engine 'gpu'; use sequential, batched, threads, processes or ray"),
        opened("gpu", 1, make_clients(), make_shop()),
    ):
        pass


@pytest.mark.slow
def test_counting_the_cost_of_a_model_does_not_keep_processes_from_training(warm):
    """In a process of its own: it takes the first backward pass there is, and on tensors without data."""
    code = (
        "import torch; from torch import nn; from submodels.cost import count;"
        "from hetperm.engine.processes import can_fork;"
        "count(nn.Linear(2, 2), torch.zeros(1, 2), batch_size=2); print(can_fork())"
    )
    done = warm.run(code=code)
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
    assert choose("auto", 1, [*clients[:3], change(clients[3])], make_shop()) == "sequential"


def test_another_loss_is_not_batched():
    shop = Workshop(build(deep), lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1))
    assert choose("auto", 1, make_clients(), shop) == "sequential"


@pytest.mark.parametrize(("make", "drawing"), [(nn.Dropout, True), (lambda: nn.Dropout(0.0), False), (nn.RReLU, True)])
def test_only_layers_that_drop_something_keep_threads_away(make, drawing):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 4), make(), nn.Linear(4, CLASSES), nn.Softplus())

    shop = Workshop(build(model), F.cross_entropy)
    assert choose("auto", 2, make_clients(), shop) == ("processes" if drawing else "threads")


def test_long_tasks_are_begun_first_and_outcomes_keep_their_order():
    clients = make_clients(FULL)
    tasks = [Task(Sgd(k, 4, 0.3), start(), host=k, seed=k, width=width) for k, width in ((1, 1.0), (3, 1.0), (2, 1.0))]
    assert longest_first(tasks, clients) == [1, 2, 0]
    assert longest_first([replace(tasks[0], width=0.5), tasks[0]], clients) == [1, 0]
    begun = []

    class Noting(Threads):
        def _run(self, task):
            begun.append(task.seed)
            return super()._run(task)

    engine = Noting(clients, make_shop(), 1)
    outcomes = engine.run(tasks)
    engine.close()
    assert begun == [3, 2, 1]
    assert all(map(equal, outcomes, Sequential(clients, make_shop()).run(tasks)))


# Visits of several rounds on threads


class Stay:
    """A visit for tests: its task waits for an event, and everybody writes down what happens."""

    def __init__(self, model, host, told, *, wait=None, work=1.0, fails=False):
        self.model, self.host, self.round, self.work = model, host, 0, work
        self.told, self.wait, self.fails = told, wait, fails

    def task(self):
        self.told.append(("begun", self.model, self.host))
        return Task(self, {}, host=self.host, seed=0)

    def __call__(self, bench, params, shard, generator):
        if self.wait is not None and not self.wait.wait(20):
            raise TimeoutError("nobody went ahead")
        return {}

    def samples(self, n):
        return n

    def done(self, outcome):
        self.told.append(("done", self.model, self.host))
        if self.fails or isinstance(outcome, Failure):
            raise RuntimeError(f"model {self.model}")


@contextmanager
def two_threads():
    clients, shop = make_clients(FULL), make_shop(deep)
    with opened("threads", 2, clients, shop) as threads:
        threads.run([Task(Sgd(1, 4, 0.1), start(deep), host=0, seed=0)])  # seen to draw nothing
        yield threads


def test_on_threads_a_visit_does_not_wait_for_the_end_of_a_round():
    told, event = [], threading.Event()
    slow = Stay(0, 0, told, wait=event)
    last = Stay(1, 3, told)
    last.done = lambda outcome: event.set()  # the slow one ends only after the second visit of the other model
    with two_threads() as threads:
        threads.flow([slow, Stay(1, 1, told), last])
    assert told.index(("begun", 1, 3)) < told.index(("done", 0, 0))


def test_on_threads_a_visit_waits_for_its_model_and_for_its_host():
    told = []
    pairs = [(0, 0), (1, 1), (0, 1), (1, 0), (2, 2), (0, 2), (2, 0)]
    with two_threads() as threads:
        threads.flow([Stay(i, j, told) for i, j in pairs])
    for k, (i, j) in enumerate(pairs):
        for earlier in [pair for pair in pairs[:k] if pair[0] == i or pair[1] == j]:
            assert told.index(("done", *earlier)) < told.index(("begun", i, j))
    assert len(told) == 2 * len(pairs)


def test_on_threads_visits_begin_first_that_most_work_waits_for():
    told = []
    with two_threads() as threads:
        threads.flow([*(Stay(k, k, told) for k in range(3)), Stay(3, 3, told, work=2.0), Stay(2, 0, told, work=9.0)])
    assert {row[1] for row in told[:2]} == {0, 2}  # both come before the long one


def test_of_visits_that_fail_on_threads_the_first_of_the_schedule_is_told():
    told, event = [], threading.Event()
    late = Stay(2, 2, told, work=9.0)

    def failed(outcome):
        event.set()
        raise RuntimeError("model 2")

    late.done = failed
    with two_threads() as threads, pytest.raises(RuntimeError, match="model 0"):
        threads.flow([Stay(0, 0, told, wait=event, fails=True), Stay(1, 1, told), late, Stay(2, 3, told)])
    assert ("begun", 2, 3) not in told


def test_a_model_that_draws_only_sometimes_is_refused_in_visits_on_threads():
    class Sometimes(Stay):
        def __call__(self, bench, params, shard, generator):
            torch.rand(1)
            return {}

    with two_threads() as threads, pytest.raises(RuntimeError, match="draws random numbers, but not always; use --en"):
        threads.flow([Sometimes(0, 0, [])])


def test_visits_of_models_that_draw_are_run_one_by_one_on_threads():
    clients, told = make_clients(FULL), []
    with opened("threads", 2, clients, make_shop(Jittery)) as threads:
        tasks = [Task(Sgd(2, 4, 0.3), start(Jittery), host=j, seed=j) for j in range(3)]
        visits = [SimpleNamespace(model=j, host=j, task=lambda j=j: tasks[j], done=told.append) for j in range(3)]
        threads.flow(visits)
    assert all(map(equal, told, Sequential(clients, make_shop(Jittery)).run(tasks)))
