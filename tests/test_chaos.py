"""Chaos: workers are killed, stopped and robbed of messages at random; the same bytes come out, or one clear line.

A few faults here; `make chaos` makes many more (HETPERM_CHAOS), and lets some of them happen to whole commands.
"""

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from engine_models import convolutional
from federation import FULL, equal, make_clients, make_shop

from hetperm.device.updates import Sgd
from hetperm.engine import watch
from hetperm.engine.processes import Processes
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task

FAULTS = int(os.environ.get("HETPERM_CHAOS", "0"))
ROOT = Path(__file__).resolve().parent.parent
SGD = Sgd(4, 4, 0.3)
KINDS = ("kill", "terminate", "stop", "lose a task", "lose an answer")


def slow_update(bench, params, shard, generator):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    return SGD(bench, params, shard, generator)


@pytest.fixture(scope="module")
def federation():
    """Clients, a workshop, twelve tasks, and what they give one after the other."""
    clients, shop = make_clients(FULL), make_shop(convolutional)
    tasks = [Task(slow_update, shop.full.take(), host=k % len(clients), seed=k) for k in range(12)]
    return clients, shop, tasks, Sequential(clients, shop).run(tasks)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A watch that looks often and waits for a moment only."""
    monkeypatch.setattr(watch, "TICK", 0.05)
    monkeypatch.setattr(watch, "FLOOR", 1.0)


class Unlucky:
    """Makes one fault of a kind happen to an engine, at a moment drawn from the seed."""

    def __init__(self, engine: Processes, kind: str, seed: int, monkeypatch):
        self.engine, self.kind, self.draw = engine, kind, random.Random(seed)
        if kind == "lose a task":
            self._lose(monkeypatch, "send_bytes", lambda send, pipe, message: None)
        elif kind == "lose an answer":
            # The next message is what is waited for, and it never comes.
            self._lose(monkeypatch, "recv_bytes", lambda receive, pipe: (receive(pipe), receive(pipe))[1])

    def _lose(self, monkeypatch, name: str, instead) -> None:
        original, left = getattr(Connection, name), [self.draw.randrange(1, 12)]

        def sometimes(pipe, *args):
            if pipe not in [worker.pipe for worker in self.engine._workers if worker]:
                return original(pipe, *args)
            left[0] -= 1
            return instead(original, pipe, *args) if left[0] == 0 else original(pipe, *args)

        monkeypatch.setattr(Connection, name, sometimes)

    def strike(self) -> None:
        """Send a signal to one of the workers."""
        number = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}.get(self.kind)
        time.sleep(self.draw.uniform(0.0, 0.4))
        if number is not None and self.engine.pids:
            os.kill(self.draw.choice(self.engine.pids), number)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAULTS or len(KINDS)))
def test_a_fault_of_a_worker_changes_no_bit_or_is_one_clear_line(seed, federation, monkeypatch):
    clients, shop, tasks, expected = federation
    engine = Processes(clients, shop, workers=2)
    try:
        engine.run(tasks[:2])  # so that there are workers
        unlucky = Unlucky(engine, KINDS[seed % len(KINDS)], seed, monkeypatch)
        thread = threading.Thread(target=unlucky.strike)
        thread.start()
        began = time.monotonic()
        outcomes = engine.run(tasks)
        thread.join()
        assert time.monotonic() - began < 20
        for outcome, right in zip(outcomes, expected, strict=True):
            if isinstance(outcome, Failure):
                assert "the worker was ended 3 times" in str(outcome.error)
            else:
                assert equal(outcome, right)
    finally:
        engine.close()


# Whole commands, only in `make chaos`: a fault takes as long as a run

TRAIN = (
    "train --quiet --num-clients 6 --samples-per-client 30 --epochs 3 --steps 200 --baselines local --engine processes "
    "--workers 2"
).split()


def started(out: Path) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hetperm", *TRAIN, "--out", str(out)]
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def digest(folder: Path) -> str:
    """A hash of all files of a run that hold no time."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("timing.json", "report.html") and path.parent.name != "checkpoint":
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("chaos") / "run"
    process = started(out)
    said = process.communicate()[1]
    assert process.returncode == 0, said
    return digest(out)


def workers_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in found.split()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAULTS // 20))
def test_a_fault_of_a_worker_of_a_command_changes_no_file_or_is_one_clear_line(seed, undisturbed, tmp_path):
    draw = random.Random(seed)
    process = started(tmp_path / "run")
    number = draw.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    while process.poll() is None and not workers_of(process.pid):
        time.sleep(0.05)
    time.sleep(draw.uniform(0, 3))
    there = workers_of(process.pid)  # asked once: they come and go
    for pid in draw.sample(there, k=min(1, len(there))):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, as workers do when a method is done
            os.kill(pid, number)
    said = process.communicate(timeout=120)[1]
    assert "Traceback" not in said
    if process.returncode == 0:
        assert digest(tmp_path / "run") == undisturbed
    else:
        assert process.returncode == 2 and said.splitlines()[-1].startswith("error: ")
