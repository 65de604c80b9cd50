"""An engine that does every task in a process with no more memory than its host's tier allows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hetperm.bench.devices.device import Devices, Exceeded
from hetperm.bench.devices.limits import Limit
from hetperm.bench.devices.measure import visit
from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.task import Failure, Task
from hetperm.runs.memory import MB


class Limited:
    """Run tasks one after the other, each in a device process under the limit of its host.

    Limits change no number. A task that does not fit comes back as a Failure, whose error is `Exceeded`.

    Args:
        shop: holds models of all widths; a device gets one of them at a time.
        allowed: (N,) bytes that each client's processes may take above the baseline; None: no limit.
        limit, rehearsed: as `Devices.do` takes them.

    Attributes:
        done: (N,) tasks that each client has done.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        shop: Workshop,
        devices: Devices,
        *,
        allowed: Sequence[int | None],
        limit: Limit | None,
        rehearsed: bool = False,
    ):
        self.clients, self.shop, self.devices, self.allowed = clients, shop, devices, allowed
        self.limit, self.rehearsed = limit, rehearsed
        self.done = [0] * len(clients)

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised, or was killed, gives a Failure."""
        return [self._run(task) for task in tasks]

    def close(self) -> None:
        """Do nothing: the caller made the devices, and closes them."""

    def _run(self, task: Task) -> Any | Failure:
        module, allowed, client = self.shop.at(task.width).module, self.allowed[task.host], self.clients[task.host]
        # Without data that the task does not use: they would count against the host's memory. Of a view only its own
        # rows are sent, not the pool.
        client = replace(client, val=tuple(client.val) if task.part == "val" else None, test=None)
        work = partial(visit, task, client, module, self.shop.loss)
        try:
            outcome = self.devices.do(work, allowed=allowed, limit=self.limit, rehearsed=self.rehearsed)
        except Exceeded as error:
            # Only work with a limit raises Exceeded, so `allowed` is a number here.
            return Failure(task, Exceeded(f"{error} at width {task.width:g} under a limit of {allowed / MB:.1f} MB"))
        except RuntimeError as error:
            return Failure(task, error)
        self.done[task.host] += 1
        return outcome
