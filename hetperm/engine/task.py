"""Task: one piece of work at one host, with its own randomness."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetperm.device.bench import Params


@dataclass(frozen=True)
class Task:
    """A model handed to a host.

    Attributes:
        update: what the host does: ``update(bench, params, shard, generator=...)``, a function of
            `hetperm.device.bench` or like it, with its options bound.
        host: the position of the client that does it.
        seed: decides all randomness of the task, so that neither engine nor order can change a result.
        width: of the model that is handed over.
    """

    update: Callable[..., Any]
    params: Params
    host: int
    seed: int
    width: float = 1.0


@dataclass(frozen=True)
class Failure:
    """What comes back for a task that could not be done; the model stays as it was."""

    task: Task
    error: Exception


def run_all(engine, tasks: Sequence[Task], where: Sequence[str]) -> list[Any]:
    """The outcomes of tasks that must all be done; the first that failed is an error that says where."""
    outcomes = engine.run(tasks)
    for outcome, place in zip(outcomes, where, strict=True):
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{place}: {outcome.error}") from outcome.error
    return outcomes
