"""Task: one piece of work at one host, with a seed of its own."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hetperm.client import Client
from hetperm.device.updates import Update
from hetperm.params import Params


@dataclass(frozen=True)
class Task:
    """A model handed to a host.

    Attributes:
        update: what the host does with the model.
        params: the model, and other tensors that the update needs.
        host: the position of the host in the list of clients.
        seed: decides all randomness of the task, so that neither engine nor order can change a result.
        width: the width of the model that is handed over.
        label: the name of the task in errors, such as "epoch 3: model 1 at host 2".
        part: the data of the host that the update gets, "train" or "val".
    """

    update: Update
    params: Params
    host: int
    seed: int
    width: float = 1.0
    label: str = "task"
    part: str = "train"


@dataclass(frozen=True)
class Failure:
    """The outcome of a task that raised an error, or whose host is `Absent`. The model is left as it was."""

    task: Task
    error: Exception

    @property
    def reason(self) -> str:
        """What went wrong; the kind of the error if it says nothing itself."""
        return str(self.error) or type(self.error).__name__


class Absent(Exception):
    """The host of a task is not there. A round goes on without it, where any other error would end the run.

    An engine that finds this out returns it as the error of a `Failure`, and has an attribute `hosts_may_be_absent`
    that is True: then it is counted how often each client was asked.
    """


def longest_first(tasks: Sequence[Task], clients: Sequence[Client]) -> list[int]:
    """The positions of the tasks, those with most work first: so that no worker is left with a long one at the end."""

    def work(k: int) -> float:
        task = tasks[k]
        n = clients[task.host].n_train
        # Multiply-adds grow with the square of the width. What says nothing of its samples runs all of them.
        return task.width**2 * getattr(task.update, "samples", lambda n: n)(n)

    return sorted(range(len(tasks)), key=work, reverse=True)


class Visit(Protocol):
    """A visit of a model at a host, whose task can be made once the model's earlier visits are done.

    Attributes:
        round: the round to which it belongs.
        work: about how long it takes, in any unit.
    """

    model: Hashable
    host: int
    round: int
    work: float

    def task(self) -> Task:
        """The task, with the model as it is now."""

    def done(self, outcome: Any | Failure) -> None:
        """Take the outcome."""


class Heard:
    """A visit of which a listener hears, too.

    Args:
        hear: called with the visit, its task and its outcome before the visit gets that.
    """

    def __init__(self, visit: Visit, hear: Callable[[Visit, Task, Any], None]):
        self._visit, self._hear, self._task = visit, hear, None
        self.model, self.host, self.round, self.work = visit.model, visit.host, visit.round, visit.work

    def task(self) -> Task:
        """The task of the visit."""
        self._task = self._visit.task()
        return self._task

    def done(self, outcome: Any | Failure) -> None:
        """Hand on the outcome."""
        task, self._task = self._task, None
        self._hear(self._visit, task, outcome)
        self._visit.done(outcome)


class Engine(Protocol):
    """The interface of all engines.

    An engine may also have a method ``flow(visits)``, which runs visits of several rounds, each as soon as its model
    and its host have done what comes before it.
    """

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""

    def close(self) -> None:
        """End the workers, if there are any."""
