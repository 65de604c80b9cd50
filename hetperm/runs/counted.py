"""An engine that tells how far a method is, round by round: in its warm-up, in its epochs and in fine-tuning."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hetperm.engine.task import Engine, Heard, Task, Visit
from hetperm.runs.setting import Setting


class Counted:
    """An engine that tells, after every list of tasks, which part of its steps a method has spent.

    Args:
        steps: mini-batch gradients of each client in the whole run.
        spent: those of all clients so far.
    """

    def __init__(self, engine: Engine, setting: Setting, steps: int, spent: float, tell: Callable[[float], None]):
        self._engine, self._tell = engine, tell
        self._sizes, self._batch = [client.n_train for client in setting.clients], setting.config.batch_size
        self._total, self._spent = steps * len(self._sizes), spent

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """The outcomes of the tasks."""
        outcomes = self._engine.run(tasks)
        self._count(tasks)
        return outcomes

    @property
    def flow(self) -> Callable[[Sequence[Visit]], None] | None:
        """Runs visits of several rounds; None if the engine cannot."""
        inner = getattr(self._engine, "flow", None)
        return None if inner is None else partial(self._flow, inner)

    def _flow(self, inner: Callable[[Sequence[Visit]], None], visits: Sequence[Visit]) -> None:
        inner([Heard(visit, lambda visit, task, outcome: self._count([task])) for visit in visits])

    def _count(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            n = self._sizes[task.host]
            self._spent += task.update.samples(n) / min(self._batch, n)
        self._tell(min(1.0, self._spent / self._total))

    def close(self) -> None:
        """End the engine's workers."""
        self._engine.close()
