"""The flower engine: every task runs on the machine that holds the data of its host. It gives the sequential numbers.

A task is a packet for one node (`device.packet`): an update by name and values, a model by name and tensor, a width and
a seed. How packets travel is Flower's (`engine.flower_grid`); who is late, gone or lying is seen to by `Mail`.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hetperm.client import Client
from hetperm.device import wire
from hetperm.device.bench import Workshop
from hetperm.engine.flower_checks import fault
from hetperm.engine.flower_jobs import Job, Step
from hetperm.engine.flower_mail import Mail
from hetperm.engine.task import Absent, Failure, Task
from hetperm.params import Params


@dataclass(frozen=True)
class Scored:
    """The loss and the metric of a model on data of its client."""

    loss: float
    metric: float


class Visit(Protocol):
    """A visit of a model at a host, whose task can be made once the model's earlier visits are done."""

    model: Hashable
    host: int

    def task(self) -> Task:
        """The task, with the model as it is now."""

    def done(self, outcome: Any | Failure) -> None:
        """Take the outcome."""


class Flower:
    """Runs tasks at nodes.

    Args:
        clients: what the server knows of every client; of its data only their number and shape.
        shop: benches of the same models, by which answers are checked.
        mail: sends and receives.
        base: the width, of the run's global model, that is the whole model here; below 1 for methods that need one
            size.
    """

    hosts_may_be_absent = True

    def __init__(self, clients: Sequence[Client], shop: Workshop, mail: Mail, base: float = 1.0):
        self.clients, self.shop, self.mail, self.base = clients, shop, mail, base

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure with an `Absent` for a task whose host is absent."""
        outcomes: list[Any] = [None] * len(tasks)

        def put(k: int, outcome: Any) -> None:
            outcomes[k] = Failure(tasks[k], outcome) if isinstance(outcome, Absent) else outcome

        self.mail.deliver([Step(task.host, partial(self.job, task), partial(put, k)) for k, task in enumerate(tasks)])
        return outcomes

    def flow(self, visits: Sequence[Visit]) -> None:
        """Run visits of models at hosts, each as soon as its model and its host have done what comes before it."""
        self.mail.deliver([self._step(visit) for visit in visits])

    def _step(self, visit: Visit) -> Step:
        made: list[Task] = []  # made when it is its turn, and kept for the outcome

        def job() -> Job:
            made[:] = [visit.task()]
            return self.job(made[0])

        def end(outcome: Any) -> None:
            visit.done(Failure(made[0] if made else visit.task(), outcome) if isinstance(outcome, Absent) else outcome)

        return Step(visit.host, job, end, visit.model)

    def job(self, task: Task) -> Job:
        """A task as plain values and tensors."""
        update = wire.write(task.update)
        table = {
            "update": update,
            "seed": task.seed,
            "width": self._true_width(task.width),
            "part": task.part,
            "label": task.label,
            "masked": self.clients[task.host].classes is not None,
        }
        bench = self.shop.at(task.width)
        return Job(update["update"], task.label, table, task.params, partial(fault, task.update, task.params, bench))

    def score(self, wanted: Sequence[tuple[int, Params, float, str]]) -> list[Scored | Absent]:
        """The loss and the metric of models, each (host, model, width, "val" or "test"), on the data of the host.

        The width is a share of the run's global model.
        """
        outcomes: list[Any] = [None] * len(wanted)

        def put(k: int, outcome: Any) -> None:
            outcomes[k] = outcome if isinstance(outcome, Absent) else Scored(*outcome)

        steps = [
            Step(host, partial(self._score_job, params, width, part, host), partial(put, k))
            for k, (host, params, width, part) in enumerate(wanted)
        ]
        self.mail.deliver(steps)
        return outcomes

    def hand_over(self, models: Sequence[Params], widths: Sequence[float], facts: Sequence[Mapping[str, Any]]) -> None:
        """Give every client its personal model, to keep; an absent one gets it when it asks for the next run."""
        jobs = [
            Job("keep", f"the model of client {host}", {"keep": dict(fact), "width": width}, params, _nothing)
            for host, (params, width, fact) in enumerate(zip(models, widths, facts, strict=True))
        ]
        self.mail.deliver([Step(host, lambda job=job: job, lambda outcome: None) for host, job in enumerate(jobs)])

    def close(self) -> None:
        """Do nothing: nodes are there for the next method too."""

    def _score_job(self, params: Params, width: float, part: str, host: int) -> Job:
        masked = self.clients[host].classes is not None
        table = {"score": part, "width": width, "masked": masked}
        return Job("score", f"score of client {host} on {part}", table, params, _not_scored)

    def _true_width(self, width: float) -> float:
        if self.base == 1.0:
            return width
        if width != 1.0:
            raise ValueError(f"a task of width {width:g} in a method whose models have one size")
        return self.base


def _nothing(value: Any) -> str | None:
    return None if value is None else "an answer where none was due"


def _not_scored(value: Any) -> str | None:
    fine = isinstance(value, tuple) and len(value) == 2 and all([type(x) is float and abs(x) < 1e30 for x in value])
    return None if fine else "scores that are not two finite numbers"
