"""The threads engine: several tasks at once, a workshop for each thread. It gives the sequential engine's numbers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.sequential import run_task, work_on
from hetperm.engine.task import Failure, Task, longest_first


class Threads:
    """Runs tasks on ``workers`` threads. No two tasks of one call may use the same model."""

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int):
        self.clients = clients
        self._pool = ThreadPoolExecutor(workers)
        self._alone = False  # whether tasks must be run one at a time
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
                return outcomes
            # The model draws where `draws` cannot see it. Run these tasks again, and all later ones, one at a time.
            torch.set_rng_state(before)
            self._alone = True
        shop = self._shops.get()
        try:
            return [run_task(task, self.clients, shop) for task in tasks]
        finally:
            self._shops.put(shop)

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
