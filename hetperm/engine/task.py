"""Task: one piece of work at one host, with its own randomness."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetperm.device.updates import Update
from hetperm.params import Params


@dataclass(frozen=True)
class Task:
    """A model handed to a host.

    Attributes:
        update: what the host does with it.
        params: the model, and whatever other tensors the update asks for.
        host: the position of the client that does it.
        seed: decides all randomness of the task, so that neither engine nor order can change a result.
        width: of the model that is handed over.
        label: what errors call it, such as "epoch 3: model 1 at host 2".
    """

    update: Update
    params: Params
    host: int
    seed: int
    width: float = 1.0
    label: str = "task"


@dataclass(frozen=True)
class Failure:
    """What comes back for a task that could not be done; the model stays as it was."""

    task: Task
    error: Exception


class Engine(Protocol):
    """What runs tasks."""

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised gives a Failure."""

    def close(self) -> None:
        """End the workers, if there are any."""
