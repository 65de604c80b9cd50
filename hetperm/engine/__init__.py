"""Engines: how a list of tasks is run. All of them give the same numbers."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetperm.client import Client
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task, run_all
from hetperm.engine.threads import Threads, draws
from hetperm.local import Workshop

__all__ = ["Failure", "Sequential", "Task", "Threads", "engine_for", "run_all"]

log = logging.getLogger(__name__)


@contextmanager
def engine_for(kind: str, workers: int, clients: Sequence[Client], shop: Workshop) -> Iterator[Sequential | Threads]:
    """A context with an engine: "sequential", "threads", or "auto", which goes by the number of workers."""
    if name_of(kind, workers, shop) == "sequential":
        yield Sequential(clients, shop)
        return
    engine = Threads(clients, shop, workers)
    try:
        yield engine
    finally:
        engine.close()


def name_of(kind: str, workers: int, shop: Workshop) -> str:
    """The name of that engine; models with dropout run one after the other, whatever was asked for."""
    if kind == "sequential" or (kind == "auto" and workers == 1):
        return "sequential"
    if draws(shop.full.module):
        log.warning("this model has dropout-like layers, which threads would disturb; visits run one after the other")
        return "sequential"
    return "threads"
