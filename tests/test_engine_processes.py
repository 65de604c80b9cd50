"""The processes engine: workers that die are replaced, and messages come through shared memory as they went in."""

import logging
import os
import re
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch
from engine_models import convolutional
from federation import FULL, equal, make_clients, make_shop
from torch import Tensor

from hetperm.device.updates import Sgd
from hetperm.engine import watch
from hetperm.engine.processes import Processes, SharedBuffer, _probe, can_fork
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


# Workers that get stuck


@pytest.fixture
def impatient(monkeypatch):
    """A watch that looks often and waits for a moment only."""
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "FLOOR", 0.4)


def stop_first(engine, signal_number=signal.SIGSTOP) -> int:
    os.kill(engine.pids[0], signal_number)
    return engine.pids[0]


def test_a_worker_that_is_stopped_is_replaced_said_and_changes_nothing(impatient, processes, caplog):
    engine, clients, here = processes
    tasks = tasks_for(clients, here.full.take())
    expected = engine.run(tasks)
    stuck = stop_first(engine)
    with caplog.at_level(logging.WARNING):
        outcomes = engine.run(tasks)
    assert all(map(equal, expected, outcomes))
    assert stuck not in engine.pids
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"a worker did nothing for \d s; it is replaced, and its task done again", message)


def test_a_stopped_worker_that_is_sent_more_than_its_pipe_holds_is_replaced(impatient, processes):
    engine, clients, here = processes
    engine._buffers = [SharedBuffer(16) for _ in engine._buffers]  # so that models go through the pipe
    params = {name: x.repeat(400, *[1] * (x.dim() - 1)) for name, x in here.full.take().items()}
    tasks = tasks_for(clients, params, first_sum)
    expected = engine.run(tasks)
    stop_first(engine)
    assert engine.run(tasks) == expected


def first_sum(bench, params, shard, generator):
    return float(next(iter(params.values())).sum())


def test_an_answer_that_gets_lost_is_computed_again(impatient, processes, monkeypatch):
    engine, clients, here = processes
    tasks = tasks_for(clients, here.full.take())
    expected = engine.run(tasks)
    pipe = engine._workers[0].pipe
    send, lost = pipe.send_bytes, []

    def lose_the_first(message):
        lost.append(message)
        if len(lost) > 1:
            send(message)

    monkeypatch.setattr(pipe, "send_bytes", lose_the_first)
    assert all(map(equal, expected, engine.run(tasks))) and lost


def busy_update(bench, params, shard, generator):
    end = time.process_time() + 1.2
    while time.process_time() < end:
        pass
    return 7


@pytest.mark.slow
def test_a_worker_that_computes_is_left_alone_however_long_it_takes(impatient, processes, caplog):
    engine, clients, here = processes
    assert engine.run(tasks_for(clients, here.full.take(), busy_update)[:1]) == [7]
    assert not caplog.records


def sleepy_update(bench, params, shard, generator):
    time.sleep(60)


@pytest.mark.slow
def test_a_task_that_gets_every_worker_stuck_is_a_failure(impatient, processes):
    engine, clients, here = processes
    (outcome,) = engine.run(tasks_for(clients, here.full.take(), sleepy_update)[:1])
    assert "ended 3 times (it did nothing); use engine 'threads'" in str(outcome.error)


def half_an_answer(bench, params, shard, generator):
    """Kill the worker while it sends an answer that is larger than its pipe."""
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return torch.zeros(2**24)


@pytest.mark.slow
def test_a_worker_that_dies_in_the_middle_of_an_answer_is_replaced(processes, monkeypatch):
    engine, clients, here = processes
    monkeypatch.setattr(engine, "_buffers", [SharedBuffer(16) for _ in engine._buffers])
    read = Connection.recv_bytes

    def slow_read(pipe):
        time.sleep(0.5)  # until the worker is dead, with a part of its answer in the pipe
        return read(pipe)

    monkeypatch.setattr(Connection, "recv_bytes", slow_read)
    (outcome,) = engine.run(tasks_for(clients, here.full.take(), half_an_answer)[:1])
    assert "ended 3 times (signal 9)" in str(outcome.error)


# The process that tries whether workers can be forked


def test_a_probe_that_is_killed_once_is_tried_again(monkeypatch):
    codes = [-signal.SIGKILL, None, 0]
    monkeypatch.setattr("hetperm.engine.processes._probe", lambda: codes.pop(0))
    assert can_fork() and not codes


@pytest.mark.parametrize(
    ("code", "sentence"), [(-9, "was ended by signal 9, perhaps for want"), (None, "did not answer in 5 s")]
)
def test_a_probe_that_is_always_killed_says_so(code, sentence, monkeypatch, caplog):
    monkeypatch.setattr("hetperm.engine.processes._probe", lambda: code)
    assert not can_fork()
    assert sentence in caplog.text


def test_a_probe_that_gets_stuck_is_ended(monkeypatch):
    monkeypatch.setattr("hetperm.engine.processes.PROBED", 0.2)
    monkeypatch.setattr("hetperm.engine.processes._try_to_train", lambda: time.sleep(60))
    began = time.monotonic()
    assert _probe() is None and time.monotonic() - began < 5


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
def test_workers_do_not_outlive_a_parent_that_was_killed(warm):
    done = warm.run(code=ORPHANS)
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
