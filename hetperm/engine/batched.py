"""The batched engine: SGD on many small models of one shape at once. Its sums round differently from the others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.client import Client
from hetperm.device import chain
from hetperm.device.bench import Workshop
from hetperm.device.recipe import PLAIN
from hetperm.device.updates import Sgd
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task
from hetperm.engine.threads import Threads
from hetperm.params import Params

ENTRIES = 2**20  # parameters in a stack: 4 MB in float32, which stays in the cache of a core between steps
NO_CHAIN = (
    "the batched engine needs a chain of linear layers, trained with cross-entropy on classes in memory; use engine "
    "'auto'"
)


def can_batch(clients: Sequence[Client], shop: Workshop) -> bool:
    """Whether the model is a chain of linear layers, trained with cross-entropy on classes."""
    return _layers(clients, shop) is not None


def _layers(clients: Sequence[Client], shop: Workshop) -> list[chain.Layer] | None:
    # Only what is in memory is stacked, and only where the model takes one tensor.
    if not all([isinstance(client.train, tuple | list) and isinstance(client.train[0], Tensor) for client in clients]):
        return None
    # Negative labels are left to autograd: cross-entropy ignores -100, which the written-out gradient cannot.
    labels = [client.train[1] for client in clients]
    classes = all([y.dtype == torch.int64 and y.dim() == 1 and int(y.min()) >= 0 for y in labels])
    flat = all([client.train[0].dim() == 2 for client in clients])
    return chain.layers_of(shop.full.module, flat=flat) if classes and shop.loss is F.cross_entropy else None


class Batched:
    """Runs SGD tasks in stacks of models of one shape, on ``workers`` threads, and other tasks one by one.

    The other models in a stack do not change a bit of a model, so neither workers nor the order of tasks matter.
    """

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int = 1):
        self._layers = _layers(clients, shop)
        if self._layers is None:
            raise ValueError(NO_CHAIN)
        self.clients, self.workers = clients, workers
        shop = shop.copy(partial(chain.Chain, layers=self._layers))
        self._rest = Threads(clients, shop, workers) if workers > 1 else Sequential(clients, shop)

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""
        outcomes: list[Any] = [None] * len(tasks)
        # Tasks of one shape are stacked. Tasks other than SGD, and those of a stack that failed, are run one by one.
        groups: dict[Any, list[int]] = {}
        for k, task in enumerate(tasks):
            groups.setdefault(self._shape(task), []).append(k)
        single = groups.pop(None, [])
        stacks = [stack for group in groups.values() for stack in self._stacks(group, tasks)]
        done = self._rest.map(lambda stack: self._train([tasks[k] for k in stack]), stacks)
        for stack, models in zip(stacks, done, strict=True):
            if models is None:
                single += stack
            else:
                for k, model in zip(stack, models, strict=True):
                    outcomes[k] = model
        for k, outcome in zip(single, self._rest.run([tasks[k] for k in single]), strict=True):
            outcomes[k] = outcome
        return outcomes

    def close(self) -> None:
        """End the threads."""
        self._rest.close()

    def _shape(self, task: Task) -> tuple | None:
        """The key that tasks of one stack share; None for a task other than plain SGD on training data."""
        update = task.update
        if not isinstance(update, Sgd) or update.recipe != PLAIN or task.part != "train":
            return None
        # A host with fewer samples than a batch takes smaller batches, and these need a stack of their own.
        return task.width, update.steps, update.cap, min(update.batch_size, self.clients[task.host].n_train)

    def _stacks(self, group: list[int], tasks: Sequence[Task]) -> list[list[int]]:
        """The tasks in stacks of even size: at least one for each worker, none above `ENTRIES` parameters."""
        largest = max(1, ENTRIES // sum(x.numel() for x in tasks[group[0]].params.values()))
        stacks = min(len(group), max(self.workers, -(-len(group) // largest)))
        return [group[k * len(group) // stacks : (k + 1) * len(group) // stacks] for k in range(stacks)]

    def _train(self, tasks: Sequence[Task]) -> list[Params] | None:
        """The models after their steps; None if one of them failed, so that all must be run one by one."""
        hosts = [self.clients[task.host] for task in tasks]
        try:
            params = {name: torch.stack([task.params[name] for task in tasks]) for name in tasks[0].params}
            # Each task draws the samples that it would draw alone, from its own seed.
            rows = [
                task.update.batches(host.n_train, torch.Generator().manual_seed(task.seed))
                for task, host in zip(tasks, hosts, strict=True)
            ]
            lr = [task.update.lr for task in tasks]
            shards, classes = [host.train for host in hosts], [host.classes for host in hosts]
            chain.descend(self._layers, params, shards, rows, lr, classes, tasks[0].update.cap)
        except (RuntimeError, IndexError):
            return None  # one bad label fails a whole stack; run alone it fails only its own task
        # Copies: a view of one model would keep the whole stack in memory.
        models = zip(*(stack.unbind() for stack in params.values()), strict=True)
        return [{name: x.clone() for name, x in zip(params, model, strict=True)} for model in models]
