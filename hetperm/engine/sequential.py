"""The sequential engine: one task after the other. The reference for all others."""

from collections.abc import Sequence
from typing import Any

import torch

from hetperm.client import Client
from hetperm.engine.task import Failure, Task
from hetperm.local import Workbench


class Sequential:
    """Runs tasks in order, on one workbench."""

    def __init__(self, clients: Sequence[Client], bench: Workbench):
        self.clients, self.bench = clients, bench

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised gives a Failure."""
        return [self._run(task) for task in tasks]

    def _run(self, task: Task) -> Any | Failure:
        generator = torch.Generator().manual_seed(task.seed)
        # Dropout and its like ignore generators: the global one is set for the task and put back after it.
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(task.seed)
        try:
            return task.update(self.bench, task.params, self.clients[task.host].train, generator=generator)
        except RuntimeError as error:
            return Failure(task, error)
        finally:
            torch.set_rng_state(before)
