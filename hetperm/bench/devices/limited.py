"""An engine whose every task is done in a process that holds no more than its host's tier can."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hetperm.bench.devices.device import Devices, Exceeded
from hetperm.bench.devices.limits import MB, Limit
from hetperm.bench.devices.measure import visit
from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.task import Failure, Task


class Limited:
    """Runs tasks one after the other, each in a device process under the limit of its host: the same numbers.

    What does not fit comes back as a Failure, whose error is `Exceeded`.

    Args:
        shop: where models of all widths are; a device gets one of them at a time.
        rooms: (N,) bytes that each client's processes may take above the baseline; None: as many as they like.
        limit, rehearsed: as `Devices.do` takes them.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        shop: Workshop,
        devices: Devices,
        *,
        rooms: Sequence[int | None],
        limit: Limit | None,
        rehearsed: bool = False,
    ):
        self.clients = [replace(client, val=None, test=None) for client in clients]  # what is scored stays here
        self.shop, self.devices, self.rooms = shop, devices, rooms
        self.how = {"limit": limit, "rehearsed": rehearsed}
        self.done = [0] * len(clients)  # tasks of each host

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """One outcome per task, in task order; a task that raised, or was killed, gives a Failure."""
        return [self._run(task) for task in tasks]

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """``function`` of every item, in order; that is the server's work and not limited."""
        return [function(item) for item in items]

    def close(self) -> None:
        """Nothing; the devices belong to whoever made them."""

    def _run(self, task: Task) -> Any | Failure:
        module = self.shop.at(task.width).module
        work = partial(visit, task, self.clients[task.host], module, self.shop.loss)
        try:
            outcome = self.devices.do(work, room=self.rooms[task.host], **self.how)
        except Exceeded as error:
            allowed = self.rooms[task.host] / MB
            return Failure(task, Exceeded(f"{error} at width {task.width:g} under a limit of {allowed:.1f} MB"))
        except RuntimeError as error:
            return Failure(task, error)
        self.done[task.host] += 1
        return outcome
