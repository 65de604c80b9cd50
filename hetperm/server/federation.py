"""Federation: the clients, how their tasks are run and how models are cut for them: what every round is handed."""

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
    """Who takes part, and what does the work.

    Attributes:
        seed: decides all randomness of the run.
        heads: names of the parameters that have a row for every class (the classifier), for clients that mask classes.
        keep: where personal models wait between visits.
    """

    clients: Sequence[Client]
    engine: Engine
    slicer: Slicer = field(default_factory=Slicer)
    seed: int = 0
    heads: tuple[str, ...] = ()
    keep: Keep = in_memory

    @property
    def order(self) -> list[int]:
        """Clients in the order of their keys: sums in it round alike however the clients are labelled."""
        return sorted(range(len(self.clients)), key=lambda j: self.clients[j].key)

    def seed_for(self, *key: int | str) -> int:
        """The seed of one use of randomness."""
        return seed_for(self.seed, *key)

    def own_widths(self, personal_width: str = "own") -> list[float]:
        """(N,) the width of every client's own model: as much as it can hold, or what the smallest client can."""
        return own_widths(self.clients, personal_width)

    def handed_out(self, extraction: str, round: int) -> list[Index]:
        """(N,) the part of the global model that each client holds in a round of global training."""
        return [
            self.slicer.index(client.width, extraction, seed=self.seed, round=round, key=(client.key,))
            for client in self.clients
        ]

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """The outcomes of tasks that must all be done; the first that failed is an error that says which it was."""
        outcomes = self.engine.run(tasks)
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise RuntimeError(f"{task.label}: {outcome.error}") from outcome.error
        return outcomes

    def train(self, tasks: Sequence[Task]) -> list[Any]:
        """The same for tasks that give a model, or several: all of them are finite."""
        outcomes = self.run(tasks)
        for task, outcome in zip(tasks, outcomes, strict=True):
            # Some updates send several models, such as pFedMe's local and personal one.
            for params in outcome if isinstance(outcome, tuple) else (outcome,):
                check_finite(params, task.label)
        return outcomes

    def train_at_home(self, updates: Sequence[Update], models: Sequence[Params], *, round: int) -> list[Any]:
        """What every client makes of its model with its own data in a round: a model or several.

        All algorithms draw the batches of a round at client i from the same stream, so that they differ only in the
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
    """(N,) the width of every client's own model: "own", as much as it can hold; "smallest", as much as all can."""
    widths = [client.width for client in clients]
    return widths if personal_width == "own" else [min(widths)] * len(widths)
