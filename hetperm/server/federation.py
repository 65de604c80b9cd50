"""Federation: the clients, the engine that runs their tasks and the slicer that cuts models for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hetperm.client import Client
from hetperm.device.updates import Update
from hetperm.engine.task import Engine, Failure, Task
from hetperm.params import Keep, Params, check_finite
from hetperm.randomness import seed_for
from hetperm.server.slicer import Index, Slicer
from hetperm.server.store import in_memory


@dataclass(frozen=True)
class Federation:
    """What every round needs: who takes part, and what does the work.

    Attributes:
        seed: decides all randomness of the run.
        heads: names of the classifier's parameters, which have a row for every class; used if clients mask classes.
        keep: stores personal models between visits.
    """

    clients: Sequence[Client]
    engine: Engine
    slicer: Slicer = field(default_factory=Slicer)
    seed: int = 0
    heads: tuple[str, ...] = ()
    keep: Keep = in_memory

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

    def handed_out(self, extraction: str, round: int) -> list[Index]:
        """(N,) the part of the global model that each client trains in a round of global training."""
        return [
            # By key, not by position: relabelled clients draw the same parts.
            self.slicer.index(client.width, extraction, seed=self.seed, round=round, key=(client.key,))
            for client in self.clients
        ]

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """Run tasks that must all succeed; raise an error that names the first that failed."""
        outcomes = self.engine.run(tasks)
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise RuntimeError(f"{task.label}: {outcome.error}") from outcome.error
        return outcomes

    def train(self, tasks: Sequence[Task]) -> list[Any]:
        """Run tasks that return one model or several; raise an error if any of these is not finite."""
        outcomes = self.run(tasks)
        for task, outcome in zip(tasks, outcomes, strict=True):
            # Some updates return several models, such as pFedMe's local and personal ones.
            for params in outcome if isinstance(outcome, tuple) else (outcome,):
                check_finite(params, task.label)
        return outcomes

    def train_at_home(self, updates: Sequence[Update], models: Sequence[Params], *, round: int) -> list[Any]:
        """Let every client train its model on its own data for a round; return one outcome per client.

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
            ]
        )


def own_widths(clients: Sequence[Client], personal_width: str = "own") -> list[float]:
    """(N,) the width of every personal model: "own" is what the client can hold, "smallest" what all of them can."""
    widths = [client.width for client in clients]
    return widths if personal_width == "own" else [min(widths)] * len(widths)
