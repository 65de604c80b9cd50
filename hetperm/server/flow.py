"""Flow: the visits of several rounds, one round after the other or, where the engine can, each as soon as it may.

A visit may begin when its model has come back from the visit before, and its host has done the visit before. Both
orders are those of the schedule, so models end as they do with a barrier after every round.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetperm.device.updates import Update
from hetperm.engine.task import Absent, Failure, Task
from hetperm.params import Params, num_bytes
from hetperm.server.federation import Federation, check_trained


class Planned(Protocol):
    """A visit that is planned: model i at host j."""

    i: int
    j: int


@dataclass(frozen=True)
class Done:
    """A round that was carried out.

    Attributes:
        tasks: one for each visit; without models, which would fill the memory.
        sent: the bytes of each model that came back; None where the host was absent.
    """

    tasks: list[Task]
    sent: list[int | None]


def carried_out(
    federation: Federation,
    plan: Sequence[tuple[int, Sequence[Planned]]],
    task_of: Callable[[Any], Task],
    put: Callable[[Any, Params], None],
) -> Iterator[Done]:
    """Carry out the visits of several rounds; yield what each took.

    Args:
        plan: (round, visits); within a round no model and no host appears twice.
        task_of: visit -> its task, with the model as it is now.
        put: takes what a host made of a model.
    """
    flow = getattr(federation.engine, "flow", None)
    if flow is not None:
        steps = [[Step(visit, federation, task_of, put) for visit in visits] for _, visits in plan]
        for (round, _), row in zip(plan, steps, strict=True):
            here = federation.present(round)
            for step in row:
                step.round, step.away = round, not here[step.host]
            if federation.pace is not None:
                # Round by round, before any begins: how far the run is must not depend on who is quick.
                asked = [step for step in row if not step.away]
                for step, task in zip(asked, federation.paced([step.task() for step in asked]), strict=True):
                    step.update = task.update
        flow([step for row in steps for step in row if not step.away])
        for row in steps:
            yield Done([step.light or replace(step.task(), params={}) for step in row], [step.sent for step in row])
        return
    for round, visits in plan:
        tasks = [task_of(visit) for visit in visits]
        outcomes = federation.train(tasks, round=round)
        for visit, part in zip(visits, outcomes, strict=True):
            if part is not None:
                put(visit, part)
        yield Done(tasks, sizes_of(outcomes))


def sizes_of(outcomes: Sequence[Params | None]) -> list[int | None]:
    """The bytes of each model that came back; None where the host was absent."""
    return [None if part is None else num_bytes(part) for part in outcomes]


@dataclass
class Step:
    """A visit that waits for its turn, and what came of it.

    Attributes:
        sent: bytes of the model that came back; None if none did.
        light: the task without its model, once it was made.
        round: the round to which it belongs.
        away: whether the host is not there in this round.
        update: what the host does, with the recipe of the run; None: what the task says.
    """

    visit: Planned
    federation: Federation
    task_of: Callable[[Any], Task]
    put: Callable[[Any, Params], None]
    sent: int | None = None
    light: Task | None = None
    round: int = 0
    away: bool = False
    update: Update | None = None

    @property
    def model(self) -> int:
        """The model that travels."""
        return self.visit.i

    @property
    def host(self) -> int:
        """Where it goes."""
        return self.visit.j

    @property
    def work(self) -> float:
        """About how long it takes: multiply-adds grow with the square of the width that both can hold."""
        clients = self.federation.clients
        return min(clients[self.model].width, clients[self.host].width) ** 2

    def task(self) -> Task:
        """The task, with the model as it is now."""
        task = self.task_of(self.visit)
        if self.update is not None:
            task = replace(task, update=self.update)
        self.light = replace(task, params={})
        return task

    def done(self, outcome: Any | Failure) -> None:
        """Take the outcome; an absent host leaves the model as it was."""
        if isinstance(outcome, Failure):
            if not isinstance(outcome.error, Absent):
                raise RuntimeError(f"{outcome.task.label}: {outcome.reason}") from outcome.error
            return
        check_trained(self.light, outcome)
        self.sent = num_bytes(outcome)
        self.put(self.visit, outcome)
