"""The threads engine: several tasks at once, a workshop for each thread. It gives the sequential engine's numbers."""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.sequential import run_task, work_on
from hetperm.engine.task import Failure, Task, Visit, longest_first


class Threads:
    """Runs tasks on ``workers`` threads. No two tasks of one call may use the same model."""

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int):
        self.clients, self._workers = clients, workers
        self._pool = ThreadPoolExecutor(workers)
        self._alone = False  # whether tasks must be run one at a time
        self._seen = False  # whether a task was seen to draw nothing
        self._shops: SimpleQueue[Workshop] = SimpleQueue()
        for _ in range(workers):
            self._shops.put(shop.copy())

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""
        if not self._alone:
            # If the global generator is untouched, nothing was drawn and no task can have disturbed another.
            before = torch.get_rng_state()
            order = longest_first(tasks, self.clients)
            found = dict(zip(order, self._pool.map(self._run, [tasks[k] for k in order]), strict=True))
            outcomes = [found[k] for k in range(len(tasks))]
            if torch.equal(before, torch.get_rng_state()):
                self._seen = self._seen or bool(tasks)
                return outcomes
            # The model draws where `draws` cannot see it. Run these tasks again, and all later ones, one at a time.
            torch.set_rng_state(before)
            self._alone = True
        shop = self._shops.get()
        try:
            return [run_task(task, self.clients, shop) for task in tasks]
        finally:
            self._shops.put(shop)

    def flow(self, visits: Sequence[Visit]) -> None:
        """Run visits of models at hosts, each as soon as its model and its host have done what comes before it.

        Of several visits that fail, the error of the first in the list is raised, as without threads.
        """
        visits = list(visits)
        while visits and (self._alone or not self._seen):
            visit = visits.pop(0)
            visit.done(self.run([visit.task()])[0])
        before = torch.get_rng_state()
        _in_order(visits, self._pool.submit, self._run, most=self._workers + 1)
        if not torch.equal(before, torch.get_rng_state()):
            raise RuntimeError("the model draws random numbers, but not always; use --engine processes")

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item, in order. It must not use a workshop."""
        return list(self._pool.map(function, items))

    def _run(self, task: Task) -> Any | Failure:
        shop = self._shops.get()
        try:
            return work_on(task, self.clients, shop)
        finally:
            self._shops.put(shop)

    def close(self) -> None:
        """Wait for the threads and end them."""
        self._pool.shutdown()


def _in_order(visits: Sequence[Visit], submit: Callable[..., Future], run: Callable[[Task], Any], *, most: int) -> None:
    """Run visits, at most ``most`` at a time, those first that most work has to wait for.

    Tasks are made and outcomes taken by the calling thread.
    """
    after, missing, chain = _followers(visits)
    ready = [(-chain[k], k) for k in range(len(visits)) if not missing[k]]
    heapq.heapify(ready)
    running: dict[Future, int] = {}
    first, error = len(visits), None  # the first visit that failed: what comes before it is still run
    while ready or running:
        while ready and len(running) < most:
            k = heapq.heappop(ready)[1]
            if k < first:
                running[submit(run, visits[k].task())] = k
        for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
            k = running.pop(future)
            try:
                visits[k].done(future.result())
            except Exception as failed:
                if k < first:
                    first, error = k, failed
                continue
            for later in after[k]:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, (-chain[later], later))
    if error is not None:
        raise error


def _followers(visits: Sequence[Visit]) -> tuple[list[list[int]], list[int], list[float]]:
    """Of each visit: those right after it, of its model and of its host; how many it waits for; work from it on."""
    after: list[list[int]] = [[] for _ in visits]
    missing, chain, last = [0] * len(visits), [visit.work for visit in visits], {}
    for k, visit in enumerate(visits):
        before = {last[who] for who in (("model", visit.model), ("host", visit.host)) if who in last}
        missing[k] = len(before)
        for earlier in before:
            after[earlier].append(k)
        last["model", visit.model] = last["host", visit.host] = k
    for k in reversed(range(len(visits))):
        chain[k] += max((chain[later] for later in after[k]), default=0.0)
    return after, missing, chain


def draws(module: nn.Module) -> bool:
    """Whether a module draws from torch's global generator in training; all threads would share that."""
    # Found by name, since libraries bring their own classes, such as DropPath.
    return any(
        isinstance(part, nn.RReLU)
        or (isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0)
        or ("drop" in type(part).__name__.lower() and _rate(part) > 0)
        for part in module.modules()
    )


def _rate(part: nn.Module) -> float:
    """The rate of a dropout-like layer; 1 if it has no known attribute for it."""
    # 1 errs on the safe side: the layer then counts as one that draws.
    rates = [getattr(part, name) for name in ("p", "drop_prob") if hasattr(part, name)]
    return 1.0 if not rates else rates[0] or 0.0
