"""The threads engine: tasks at once, each worker with a workshop of its own. The same numbers as the sequential one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.sequential import run_task, work_on
from hetperm.engine.task import Failure, Task


class Threads:
    """Runs tasks on ``workers`` threads; the tasks of one call must not touch each other's models."""

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int):
        self.clients = clients
        self._pool = ThreadPoolExecutor(workers)
        self._alone = False  # one task at a time
        self._shops: SimpleQueue[Workshop] = SimpleQueue()
        for _ in range(workers):
            self._shops.put(shop.copy())

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised gives a Failure."""
        if not self._alone:
            # If nothing was drawn the tasks cannot have disturbed each other.
            before = torch.get_rng_state()
            outcomes = list(self._pool.map(self._run, tasks))
            if torch.equal(before, torch.get_rng_state()):
                return outcomes
            # The model draws where `draws` cannot see it: tasks disturbed each other, and do so no more.
            torch.set_rng_state(before)
            self._alone = True
        shop = self._shops.get()
        try:
            return [run_task(task, self.clients, shop) for task in tasks]
        finally:
            self._shops.put(shop)

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item, in order; it must not use a workshop."""
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


def draws(module: nn.Module) -> bool:
    """Whether a module draws from torch's global generator while it trains, which threads would share."""
    return any(
        isinstance(part, nn.RReLU)
        or (isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0)
        or ("drop" in type(part).__name__.lower() and _rate(part) > 0)
        for part in module.modules()
    )


def _rate(part: nn.Module) -> float:
    """The share that a dropout-like layer drops; 1 if it does not say."""
    rates = [getattr(part, name) for name in ("p", "drop_prob") if hasattr(part, name)]
    return 1.0 if not rates else rates[0] or 0.0
