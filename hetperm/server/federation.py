"""Federation: the clients, the engine that runs their tasks and the slicer that cuts models for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetperm.client import Client
from hetperm.device.updates import Update
from hetperm.engine.task import Absent, Engine, Failure, Task
from hetperm.params import Keep, Params, check_finite
from hetperm.randomness import seed_for
from hetperm.server.pace import Pace
from hetperm.server.presence import EVERYBODY, Presence, present
from hetperm.server.slicer import Index, Slicer
from hetperm.server.store import in_memory
from hetperm.state import Work


def _unknown(width: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Federation:
    """What every round needs: who takes part, and what does the work.

    Attributes:
        seed: decides all randomness of the run.
        heads: names of the classifier's parameters, which have a row for every class; used if clients mask classes.
        keep: stores personal models between visits.
        macs: width -> multiply-adds of the forward pass of a sample.
        presence: who is there in which round.
        pace: gives updates their recipe; None if local steps are plain SGD.
        batch_size: samples of a local step, in which the pace counts.
    """

    clients: Sequence[Client]
    engine: Engine
    slicer: Slicer = field(default_factory=Slicer)
    seed: int = 0
    heads: tuple[str, ...] = ()
    keep: Keep = in_memory
    macs: Callable[[float], float] = _unknown
    presence: Presence = EVERYBODY
    pace: Pace | None = None
    batch_size: int = 1

    @property
    def order(self) -> list[int]:
        """The clients sorted by key. Sums in this order round alike however the clients are labelled."""
        return sorted(range(len(self.clients)), key=lambda j: self.clients[j].key)

    def seed_for(self, *key: int | str) -> int:
        """The seed for one use of randomness."""
        return seed_for(self.seed, *key)

    def own_widths(self, personal_width: str = "own") -> list[float]:
        """(N,) the width of every personal model; see `own_widths`."""
        return own_widths(self.clients, personal_width)

    def handed_out(self, extraction: str, round: int, widths: Sequence[float] | None = None) -> list[Index]:
        """(N,) the part of the global model that each client trains in a round of global training.

        Args:
            widths: (N,) the width of every part; as much as each client can hold unless given.
        """
        widths = [client.width for client in self.clients] if widths is None else widths
        return [
            # By key, not by position: relabelled clients draw the same parts.
            self.slicer.index(width, extraction, seed=self.seed, round=round, key=(client.key,))
            for client, width in zip(self.clients, widths, strict=True)
        ]

    def present(self, round: int) -> list[bool]:
        """(N,) whether each client is there in a round, as far as it is known beforehand."""
        return present(self.clients, self.presence, seed=self.seed, round=round)

    def run(self, tasks: Sequence[Task], *, round: int) -> list[Any]:
        """The outcomes of the tasks of a round, in order; None where the host is absent.

        A host is absent if the trace or the draw of this round says so, or if the engine finds that it is not there.
        Any other failure is an error that names the first task that failed.
        """
        here = self.present(round)
        asked = [task for task in tasks if here[task.host]]
        found = iter(self.engine.run(self.paced(asked)) if asked else ())
        outcomes = [next(found) if here[task.host] else None for task in tasks]
        for k, (task, outcome) in enumerate(zip(tasks, outcomes, strict=True)):
            if isinstance(outcome, Failure):
                if not isinstance(outcome.error, Absent):
                    raise RuntimeError(f"{task.label}: {outcome.reason}") from outcome.error
                outcomes[k] = None
        return outcomes

    def paced(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """The tasks of a round with the recipe of the run, which goes on by their steps."""
        if self.pace is None:
            return tasks
        return self.pace.prepared(tasks, self.work_of(tasks, self.batch_size).client_steps)

    def work_of(self, tasks: Sequence[Task], batch_size: int, outcomes: Sequence[Any] | None = None) -> Work:
        """The steps and multiply-adds of tasks: every sample that a host runs counts, in mini-batches of its size.

        Args:
            outcomes: what `run` returned. Absent hosts spend nothing; what they missed is counted apart.
        """
        steps = macs = missed = 0.0
        asked, absent = [0] * len(self.clients), [0] * len(self.clients)
        for k, task in enumerate(tasks):
            n = self.clients[task.host].n_train
            samples = task.update.samples(n)
            asked[task.host] = 1
            if outcomes is not None and outcomes[k] is None:
                missed += samples / min(batch_size, n)
                absent[task.host] = 1
                continue
            widths = getattr(task.update, "trained_widths", None) or (task.width,)
            steps += samples / min(batch_size, n)
            macs += 3 * samples * sum(self.macs(width) for width in widths) / len(widths)
        work = Work(client_steps=steps, macs=macs)
        # Counted only where somebody may be absent: elsewhere it would be the same number for all.
        if self.presence.is_certain and not getattr(self.engine, "hosts_may_be_absent", False) and not any(absent):
            return work
        return work + Work(missed=missed, asked=tuple(asked), absent=tuple(absent))

    def train(self, tasks: Sequence[Task], *, round: int) -> list[Any]:
        """Run tasks that return one model or several; raise an error if any of these is not finite."""
        outcomes = self.run(tasks, round=round)
        for task, outcome in zip(tasks, outcomes, strict=True):
            check_trained(task, outcome)
        return outcomes

    def train_at_home(self, updates: Sequence[Update], models: Sequence[Params], *, round: int) -> list[Any]:
        """Let every client train its model on its own data for a round; return one outcome per client, None if absent.

        All algorithms draw the batches of client i in a round from the same stream, so that they differ only in the
        rule.
        """
        return self.train(
            [
                Task(
                    update,
                    params,
                    host=i,
                    seed=self.seed_for("global", round, client.key),
                    width=client.width,
                    label=f"round {round}: client {i}",
                )
                for i, (client, update, params) in enumerate(zip(self.clients, updates, models, strict=True))
            ],
            round=round,
        )

    def work_at_home(self, updates: Sequence[Update], batch_size: int, outcomes: Sequence[Any] | None = None) -> Work:
        """The steps and multiply-adds of `train_at_home`, which returned ``outcomes``."""
        clients = enumerate(zip(self.clients, updates, strict=True))
        tasks = [Task(update, {}, host=i, seed=0, width=client.width) for i, (client, update) in clients]
        return self.work_of(tasks, batch_size, outcomes)


def check_trained(task: Task, outcome: Any) -> None:
    """Raise an error if a model that came of a task is not finite."""
    # Some updates return several models, such as pFedMe's local and personal ones.
    for params in outcome if isinstance(outcome, tuple) else (outcome,):
        if params is not None:
            check_finite(params, task.label, _blame(task))


def _blame(task: Task) -> str:
    """The step size and the width of a task whose model went non-finite, and what would have held it back."""
    rate, cap = getattr(task.update, "lr", None), getattr(task.update, "cap", None)
    what = "the width was" if rate is None else f"this step's was {rate:g} at width"
    return f"; {what} {task.width:g}" + (", and step_cap 0 lets steps be of any length" if cap == 0 else "")


def own_widths(clients: Sequence[Client], personal_width: str = "own") -> list[float]:
    """(N,) the width of every personal model: "own" is what the client can hold, "smallest" what all of them can."""
    widths = [client.width for client in clients]
    return widths if personal_width == "own" else [min(widths)] * len(widths)
