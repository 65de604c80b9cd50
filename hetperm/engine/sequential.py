"""The sequential engine: one task after another. It is the reference for all others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.task import Failure, Task


class Sequential:
    """Runs tasks one after another, in one workshop."""

    def __init__(self, clients: Sequence[Client], shop: Workshop):
        self.clients, self.shop = clients, shop

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""
        return [run_task(task, self.clients, self.shop) for task in tasks]

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item, in order."""
        return [function(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no workers."""


def run_task(task: Task, clients: Mapping[int, Client] | Sequence[Client], shop: Workshop) -> Any | Failure:
    """Run a task; return what the host sends back, or a Failure if it raised an error."""
    # Dropout and similar layers take no generator. The global one is seeded for the task and restored after it.
    device = shop.full.slots[0].device
    if device.type != "cpu":  # it has a generator of its own
        with torch.random.fork_rng(devices=[device.index or 0], device_type=device.type):
            torch.manual_seed(task.seed)
            return work_on(task, clients, shop)
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(task.seed)
    try:
        return work_on(task, clients, shop)
    finally:
        torch.set_rng_state(before)


def answer(task: Task, clients: Mapping[int, Client] | Sequence[Client], shop: Workshop) -> Any | RuntimeError:
    """The same as `run_task`, to be sent to another process: an error as text, since not every one can be pickled."""
    outcome = run_task(task, clients, shop)
    if isinstance(outcome, Failure):
        return RuntimeError(outcome.reason)
    return outcome


def work_on(task: Task, clients: Mapping[int, Client] | Sequence[Client], shop: Workshop) -> Any | Failure:
    """The same as `run_task`, for models that draw nothing from torch's global generator."""
    host, bench = clients[task.host], shop.at(task.width)
    bench.classes = host.classes
    # A separate generator, so that the batches do not depend on what dropout draws.
    generator = torch.Generator().manual_seed(task.seed)
    try:
        return task.update(bench, task.params, host.data(task.part), generator)
    except Exception as error:  # model and loss are the user's code, which may raise anything
        return Failure(task, error)
