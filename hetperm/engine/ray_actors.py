"""The Ray engine: tasks on the machines of a Ray cluster. It gives the numbers of the sequential engine.

Every worker is an actor with a core of its own. Clients live at a node: their shards go there once, through Ray's
object store, and only the actors of that node run their tasks. Models go through the object store too, a few at a time.
An actor that is lost is replaced, and its tasks are run again: with the same seeds, so that they give the same numbers.
"""

import logging
import os
import platform
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.parcels import packed, unpacked
from hetperm.engine.processes import TRIES
from hetperm.engine.sequential import answer
from hetperm.engine.task import Failure, Task, longest_first
from hetperm.memory import keep_freed_memory
from hetperm.shards import Shard, Stored, read

log = logging.getLogger(__name__)

STARTING = 300.0  # seconds that the first actors have to start
AHEAD = 2  # tasks that an actor holds while many wait: one that it runs, and the next, which travels meanwhile


def connect(address: str | None, workers: int) -> None:
    """Join the cluster at an address; without one, start Ray on this machine, which then listens on loopback only.

    Ray that this process has already started or joined is used as it is.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # of Ray that is started here: actors do the work of this process
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR}
    if address is None:
        cores = max(workers, os.cpu_count() or 1)
        ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, num_cpus=cores, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        # Ray's own words may be long; the first line says what is wrong.
        told = str(error).strip().partition("\n")[0][:300]
        raise ValueError(
            f"no Ray cluster can be joined at address {address!r}: {told}; run `ray start` of Ray {ray.__version__} on "
            "every machine, this one too, and give 'auto' or HOST:PORT, or leave --address out to start Ray here"
        ) from error


class Host:
    """What runs in an actor: a workshop, and the clients that it has met."""

    def __init__(self, shop: tuple):
        # Sums on one thread come out as in the other engines.
        torch.set_num_threads(1)
        keep_freed_memory()
        self._shop, self._clients = Workshop(*unpacked(shop)), {}

    def about(self) -> str:
        """What must be the same on all machines."""
        return _versions()

    def pid(self) -> int:
        """The id of the actor's process."""
        return os.getpid()

    def run(self, task: Task, model: tuple, shard: list | None) -> tuple:
        """The outcome of a task, packed.

        Args:
            task: without its model.
            shard: where the host's client lies, if it is new here.
        """
        if shard is not None:
            self._clients[task.host] = unpacked(ray.get(shard[0]), shared=True)
        return packed(answer(replace(task, params=unpacked(model)), self._clients, self._shop))


def _versions() -> str:
    return (
        f"hetperm {sys.modules['hetperm'].__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )


@dataclass(eq=False)
class Actor:
    """An actor: its node, whether it has answered yet, the clients that it has met, and the tasks that it holds."""

    handle: Any
    node: str
    ready: bool = False
    met: set[int] = field(default_factory=set)
    tasks: list[int] = field(default_factory=list)  # in the order in which they are run


class RayActors:
    """Runs tasks in ``workers`` actors. No two tasks of one call may use the same model.

    Args:
        address: of a Ray cluster, "auto" or "HOST:PORT"; None: Ray is started on this machine.
    """

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int, address: str | None = None):
        connect(address, workers)
        cores = sum(_nodes().values())
        if workers > cores:
            raise ValueError(f"the Ray cluster has {cores} CPUs and workers is {workers}; take --workers {cores}")
        self.clients, self.workers = clients, workers
        self._shop = ray.put(packed((shop.full.module, shop.loss, shop.scalable, shop.kind, shop.augment)))
        self._shards: dict[int, Any] = {}  # client -> where it lies in the object store
        self._homes: dict[int, str] = {}  # client -> its node
        self._actors: list[Actor] = []
        self._flying: dict[Any, tuple[Actor, int | None]] = {}  # answer to come -> (actor, task); None: its first word
        self._failed = 0  # actors in a row that ended before they had begun
        self._fill()
        self._greet()

    # Actors

    def _fill(self) -> None:
        """Start actors until there are enough or no node has a free core, each where most cores are free."""
        free = _nodes()
        for actor in self._actors:
            free[actor.node] = free.get(actor.node, 0) - 1
        while len(self._actors) < self.workers and free and max(free.values()) > 0:
            node = max(sorted(free), key=free.get)
            free[node] -= 1
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            # Lost ones are replaced here and not by Ray, which would wait for a node that is gone.
            options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": strategy}
            actor = Actor(ray.remote(Host).options(**options).remote(self._shop), node)
            self._actors.append(actor)
            self._flying[actor.handle.about.remote()] = (actor, None)
        nodes = {actor.node for actor in self._actors}
        self._homes = {client: node for client, node in self._homes.items() if node in nodes}
        if not nodes:
            raise RuntimeError("no node of the Ray cluster is left; start some (ray start) and --resume the run")

    def _greet(self) -> None:
        """Wait for the first actors. Other versions than here are an error: they would give other numbers."""
        try:
            words = ray.get(list(self._flying), timeout=STARTING)
        except GetTimeoutError as error:
            raise ValueError(
                f"actors did not start within {STARTING:.0f} s; other jobs may hold the CPUs of the Ray cluster (see "
                "`ray status`): take fewer --workers"
            ) from error
        except RayError as error:
            raise ValueError(f"actors do not start on the Ray cluster: {_told(error)}; is hetperm there?") from error
        for (actor, _), theirs in zip(self._flying.values(), words, strict=True):
            if theirs != _versions():
                raise ValueError(
                    f"a node of the Ray cluster has {theirs}, and this machine {_versions()}; install the same on all"
                )
            actor.ready = True
        self._flying.clear()

    @property
    def pids(self) -> list[int]:
        """The process ids of the actors, each on its node."""
        return ray.get([actor.handle.pid.remote() for actor in self._actors])

    def close(self) -> None:
        """End the actors. Ray itself runs on, for the next method, and ends with this process."""
        for actor in self._actors:
            ray.kill(actor.handle)
        self._actors, self._shards, self._flying = [], {}, {}

    # Tasks

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""
        self._fill()  # nodes may have come back
        outcomes: list[Any] = [None] * len(tasks)
        waiting, tries = longest_first(tasks, self.clients), [0] * len(tasks)
        models = Models(tasks)
        while waiting or any([actor.tasks for actor in self._actors]):
            waiting = self._hand_out(waiting, tasks, models)
            done, _ = ray.wait(list(self._flying))
            for ref in done:
                if ref not in self._flying:
                    continue  # of an actor that was dropped meanwhile
                actor, k = self._flying.pop(ref)
                try:
                    found = ray.get(ref)
                except RayTaskError as error:  # not the task's own, which comes as an answer: it could not be read
                    found = packed(RuntimeError(_told(error)))
                except RayError as error:
                    waiting = [*actor.tasks, *waiting]
                    if actor.tasks:  # the first was being run, and may be to blame; the others had not begun
                        tries[actor.tasks[0]] += 1
                    self._drop(actor, error)
                    if waiting and tries[waiting[0]] == TRIES:
                        advice = f"is there memory for {self.workers} workers?"
                        gone = RuntimeError(f"the actor was lost {TRIES} times ({_told(error)}); {advice}")
                        outcomes[waiting[0]] = Failure(tasks[waiting[0]], gone)
                        del waiting[0]
                    continue
                actor.ready, self._failed = True, 0
                if k is not None:
                    actor.tasks.remove(k)
                    outcome = unpacked(found)
                    outcomes[k] = Failure(tasks[k], outcome) if isinstance(outcome, RuntimeError) else outcome
                    models.done(tasks[k])
        return outcomes

    def _hand_out(self, waiting: Sequence[int], tasks: Sequence[Task], models: "Models") -> list[int]:
        """Give waiting tasks to the actors of their clients' nodes, a few each; return those that still wait."""
        queues: dict[str, deque[int]] = defaultdict(deque)
        for k in waiting:
            queues[self._home(tasks[k].host)].append(k)
        for node, queue in queues.items():
            actors = [actor for actor in self._actors if actor.node == node and actor.ready]
            while queue and actors:
                actor = min(actors, key=lambda one: len(one.tasks))
                # With few left, the next goes to whoever is done first.
                if len(actor.tasks) >= (AHEAD if len(queue) > len(actors) else 1):
                    break
                k = queue.popleft()
                self._flying[self._start(actor, tasks[k], models)] = (actor, k)
                actor.tasks.append(k)
        left = {k for queue in queues.values() for k in queue}
        return [k for k in waiting if k in left]

    def _start(self, actor: Actor, task: Task, models: "Models") -> Any:
        shard = None
        if task.host not in actor.met:
            if task.host not in self._shards:
                self._shards[task.host] = ray.put(packed(_light(self.clients[task.host])))
            shard = [self._shards[task.host]]  # in a list, so that Ray hands over the reference and not the shard
            actor.met.add(task.host)
        return actor.handle.run.remote(replace(task, params={}), models.put(task), shard)

    def _home(self, client: int) -> str:
        """The node of a client; a new client goes where, for each actor, the fewest of its width live."""
        if client not in self._homes:
            width = self.clients[client].width
            alike = Counter(node for other, node in self._homes.items() if self.clients[other].width == width)
            every, actors = Counter(self._homes.values()), Counter(actor.node for actor in self._actors)
            self._homes[client] = min(sorted(actors), key=lambda n: (alike[n] / actors[n], every[n] / actors[n]))
        return self._homes[client]

    def _drop(self, actor: Actor, error: RayError) -> None:
        """Replace a lost actor; nobody waits for its answers any more."""
        if actor.ready:
            log.warning("an actor was lost (%s); it is replaced, and its task done again", _told(error))
        else:
            self._failed += 1
            if self._failed > TRIES * self.workers:
                raise RuntimeError(f"actors end as soon as they are started: {_told(error)}") from error
        self._actors.remove(actor)
        ray.kill(actor.handle)
        self._flying = {ref: (other, k) for ref, (other, k) in self._flying.items() if other is not actor}
        self._fill()


class Models:
    """The models of tasks in the object store, each from the first task that needs it to the end of the last."""

    def __init__(self, tasks: Sequence[Task]):
        self._users = Counter(id(task.params) for task in tasks)
        self._refs: dict[int, Any] = {}

    def put(self, task: Task) -> Any:
        """The model of a task, which several tasks may share."""
        if id(task.params) not in self._refs:
            self._refs[id(task.params)] = ray.put(packed(task.params))
        return self._refs[id(task.params)]

    def done(self, task: Task) -> None:
        """Forget the model of a finished task if no other needs it."""
        self._users[id(task.params)] -= 1
        if not self._users[id(task.params)]:
            self._refs.pop(id(task.params))


def _nodes() -> dict[str, int]:
    """The nodes that are there, and the cores of each."""
    return {node["NodeID"]: int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]}


def _light(client: Client) -> Client:
    """What tasks need of a client: of a pool that many share only its own rows, and no test data."""
    val = None if client.val is None else _own(client.val)
    # Stored samples have their collate with them, and without any it would be refused.
    return replace(client, train=_own(client.train), val=val, test=None, collate=None)


def _own(shard: Shard) -> Shard:
    return shard if isinstance(shard, Stored) else read(shard)


def _told(error: Exception) -> str:
    """The last line of an error of Ray, which holds the reason."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:300]
