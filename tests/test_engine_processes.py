"""The processes engine: workers that die are replaced, and messages come through shared memory as they went in."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from engine_models import convolutional
from federation import FULL, equal, make_clients, make_shop
from torch import Tensor

from hetperm.device.updates import Sgd
from hetperm.engine.processes import Processes, SharedBuffer
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task

SGD = Sgd(4, 4, 0.3)


def tasks_for(clients, params, update=SGD):
    return [Task(update, params, host=j, seed=90 + j) for j in range(len(clients))]


@pytest.fixture
def processes():
    clients, here = make_clients(FULL), make_shop(convolutional)
    engine = Processes(clients, here, workers=2)
    yield engine, clients, here
    engine.close()


def slow_update(bench, params, shard, generator):
    time.sleep(0.3)
    return SGD(bench, params, shard, generator)


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


def deadly_update(bench, params, shard, generator):
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


def failing_update(bench, params, shard, generator):
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
from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.device.updates import Sgd
from hetperm.engine.processes import Processes
from hetperm.engine.task import Task
clients = [Client(train=(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), key=0)]
shop = Workshop(nn.Linear(2, 2), F.cross_entropy)
engine = Processes(clients, shop, 1)
engine.run([Task(Sgd(steps=1, batch_size=2, lr=0.1), shop.full.take(), host=0, seed=0)])
print(*engine.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_do_not_outlive_a_parent_that_was_killed():
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=300)
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
    {"large": torch.arange(300.0)},  # more than the buffer holds
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
]


@pytest.mark.parametrize("value", VALUES, ids=["shapes", "mixture", "large", "bfloat16"])
def test_messages_come_through_a_buffer_as_they_went_in(value):
    buffer = SharedBuffer(256)
    back = buffer.read(buffer.write(value))
    buffer.write({"other": torch.zeros(50)})  # what was read is not in the buffer any more
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves(value), leaves(back), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
