"""An engine that tells how far a method is, round by round: in its warm-up, in its epochs and in fine-tuning."""

from collections.abc import Callable, Sequence
from typing import Any

from hetperm.engine.task import Engine, Task
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
        for task in tasks:
            n = self._sizes[task.host]
            self._spent += task.update.samples(n) / min(self._batch, n)
        self._tell(min(1.0, self._spent / self._total))
        return outcomes

    def close(self) -> None:
        """End the engine's workers."""
        self._engine.close()
