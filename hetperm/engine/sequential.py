"""The sequential engine: one task after the other. The reference for all others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.task import Failure, Task


class Sequential:
    """Runs tasks in order, in one workshop."""

    def __init__(self, clients: Sequence[Client], shop: Workshop):
        self.clients, self.shop = clients, shop

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised gives a Failure."""
        return [run_task(task, self.clients, self.shop) for task in tasks]

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item, in order."""
        return [function(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no workers."""


def run_task(task: Task, clients: Sequence[Client], shop: Workshop) -> Any | Failure:
    """What a host sends back for the model it is handed, or a Failure if it raised."""
    # Dropout and its like ignore generators: the global one is set for the task and put back after it.
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(task.seed)
    try:
        return work_on(task, clients, shop)
    finally:
        torch.set_rng_state(before)


def work_on(task: Task, clients: Sequence[Client], shop: Workshop) -> Any | Failure:
    """The same for models that draw nothing from torch's global generator."""
    host, bench = clients[task.host], shop.at(task.width)
    bench.classes = host.classes
    generator = torch.Generator().manual_seed(task.seed)
    try:
        return task.update(bench, task.params, host.train, generator)
    except Exception as error:  # of the model and the loss, which are the user's
        return Failure(task, error)
