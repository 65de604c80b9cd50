"""The Ray engine: the numbers of the sequential one, also when actors are lost. Needs the extra `ray`."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import dropping, result
from federation import FULL, equal, make_clients, make_shop, same, start

from hetperm.device.updates import Sgd
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task
from hetperm.shards import View

pytest.importorskip("ray", reason="needs the extra ray")

import ray

from hetperm.engine import parcels, ray_actors
from hetperm.engine.ray_actors import AHEAD, RayActors, connect

pytestmark = pytest.mark.slow


def listening() -> set[str]:
    """The addresses in hexadecimal, and ports, on which this machine listens."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {words[1] for words in lines if words[3] == "0A"}


@pytest.fixture(scope="module", autouse=True)
def sockets():
    """The addresses on which Ray listens after it was started by an engine."""
    before = listening()
    connect(None, workers=4)  # more than one engine has, so that two can be open at once
    yield listening() - before
    ray.shutdown()


@pytest.fixture(scope="module")
def engine():
    clients = make_clients(FULL)
    engine = RayActors(clients, make_shop(), 2)
    yield engine
    engine.close()


def rounds_of(clients, update=None):
    return [Task(update or Sgd(3, 4, 0.3), start(), host=j, seed=j) for j in range(len(clients))]


def test_ray_started_here_listens_on_loopback_only(sockets):
    # Little-endian 127.0.0.1, alone or as an address of IPv6.
    assert sockets and all([address.partition(":")[0].endswith("0100007F") for address in sockets])


@pytest.mark.parametrize(("name", "options"), [("fedavg-ft", {}), ("perm", {"model": dropping})])
def test_actors_give_the_bits_of_the_sequential_engine(name, options):
    assert same(result("sequential", name, **options), result("ray", name, workers=2, **options))


def test_actors_killed_in_the_middle_of_a_round_are_replaced_and_change_nothing(engine):
    tasks, pids = rounds_of(engine.clients, Sgd(400, 4, 0.3)), engine.pids
    literal = Sequential(engine.clients, make_shop()).run(tasks)
    timer = threading.Timer(0.2, os.kill, (pids[0], signal.SIGKILL))
    timer.start()
    assert all(map(equal, engine.run(tasks), literal))
    timer.join()
    assert all(map(equal, engine.run(tasks), literal))  # on a fast machine it is killed before this round
    assert pids[0] not in engine.pids and len(engine.pids) == 2


def test_a_task_that_fails_or_ends_every_actor_is_a_failure_and_the_others_are_done(engine):
    # Defined here, so that they travel as code: actors cannot import this file.
    def fail(bench, params, shard, generator):
        raise ArithmeticError("no good")

    def end(bench, params, shard, generator):
        os._exit(1)

    tasks = rounds_of(engine.clients)
    tasks[1:3] = [replace(tasks[1], update=fail), replace(tasks[2], update=end)]
    outcomes = engine.run(tasks)
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [j in (1, 2) for j in range(len(tasks))]
    assert str(outcomes[1].error) == "no good"
    assert "the actor was lost 3 times" in str(outcomes[2].error)
    assert equal(outcomes[0], Sequential(engine.clients, make_shop()).run(tasks[:1])[0])


def test_few_models_are_under_way_at_once_and_a_shard_moves_once(engine, monkeypatch):
    most, shards, begin = [], [], RayActors._start

    def begun(self, actor, task, models):
        before = len(self._shards)
        ref = begin(self, actor, task, models)
        most.append(len(models._refs))
        shards.append(len(self._shards) - before)
        return ref

    engine.run(rounds_of(engine.clients))
    assert len(engine._shards) == len(engine.clients)
    monkeypatch.setattr(RayActors, "_start", begun)
    for _ in range(2):
        engine.run(rounds_of(engine.clients))
    assert max(most) <= AHEAD * engine.workers
    assert sum(shards) == 0


def test_a_client_travels_without_the_pool_that_it_shares_and_without_test_data():
    x, y = torch.randn(1000, 50), torch.zeros(1000, dtype=torch.long)
    client = replace(make_clients()[0], train=View((x, y), torch.tensor([3, 1])), val=None, test=(x, y))
    _, arrays = parcel = parcels.packed(ray_actors._light(client))
    assert sum([array.nbytes for array in arrays]) < 1000
    got = parcels.unpacked(parcel)
    assert torch.equal(got.train[0], x[[3, 1]]) and got.test is None


def test_more_workers_than_cores_are_refused():
    with pytest.raises(ValueError, match=r"the Ray cluster has \d+ CPUs and workers is 200; take --workers \d+"):
        RayActors(make_clients(), make_shop(), 200)


def test_other_versions_at_a_node_are_refused(monkeypatch):
    monkeypatch.setattr(ray_actors, "_versions", lambda: "torch 1.0")
    with pytest.raises(ValueError, match=r"a node .* has hetperm .*, and this machine torch 1.0; install the same"):
        RayActors(make_clients(), make_shop(), 1)


def test_an_address_without_a_cluster_is_refused_in_one_sentence(monkeypatch):
    def refuse(**options):
        raise ConnectionError("nobody answers\nand more")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ValueError, match=r"no Ray cluster can be joined at address 'auto': nobody answers; run `ray"):
        connect("auto", 1)
