"""The choice of an engine: the one asked for, or the one that suits the model."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.device.recipe import PLAIN, Recipe
from hetperm.engine.batched import NO_CHAIN, Batched, can_batch
from hetperm.engine.processes import Processes, can_fork
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Engine
from hetperm.engine.threads import Threads, draws
from hetperm.memory import keep_freed_memory


def choose(kind: str, workers: int, clients: Sequence[Client], shop: Workshop, recipe: Recipe = PLAIN) -> str:
    """The name of the engine for a run; an error if the one asked for cannot run this model.

    "auto" takes "batched" for chains of linear layers that are trained by plain SGD. For other models one worker is
    "sequential", and several are "threads", or "processes" if the model draws random numbers in training.
    """
    drawing, on_cpu = draws(shop.full.module), shop.full.slots[0].device.type == "cpu"
    if kind == "auto":
        # Before the number of workers is looked at: batched sums round differently, and workers must not change a bit.
        if recipe == PLAIN and can_batch(clients, shop):
            return "batched"
        if workers == 1:
            return "sequential"
        # Threads share torch's global generator, which dropout draws from; processes have one each.
        if not drawing:
            return "threads"
        return "processes" if on_cpu and can_fork() else "sequential"
    if kind == "batched" and not can_batch(clients, shop):
        raise ValueError(NO_CHAIN)
    if kind == "threads" and drawing:
        raise ValueError("threads would disturb each other in dropout-like layers; use engine 'processes' or 'auto'")
    if kind == "processes" and not (on_cpu and can_fork()):
        raise ValueError(
            "engine 'processes' needs models on the CPU, on a system where a forked process can train; "
            "use engine 'threads'"
        )
    if kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("engine 'ray' needs Ray: pip install 'hetperm[ray]', or use engine 'processes'")
    if kind == "ray" and not on_cpu:
        raise ValueError("engine 'ray' trains on the CPUs of a cluster; set device to 'cpu'")
    return kind


@contextmanager
def opened(
    kind: str, workers: int, clients: Sequence[Client], shop: Workshop, *, address: str | None = None
) -> Iterator[Engine]:
    """A context with an engine of the kind that `choose` returned. Its workers end with the context.

    Args:
        address: of the cluster, for "ray".
    """
    keep_freed_memory()
    match kind:
        case "sequential":
            engine = Sequential(clients, shop)
        case "batched":
            engine = Batched(clients, shop, workers)
        case "threads":
            engine = Threads(clients, shop, workers)
        case "processes":
            engine = Processes(clients, shop, workers)
        case "ray":
            from hetperm.engine.ray_actors import RayActors  # takes seconds, and may not be installed

            engine = RayActors(clients, shop, workers, address)
        case _:
            raise ValueError(f"unknown engine {kind!r}; use sequential, batched, threads, processes or ray")
    try:
        yield engine
    finally:
        engine.close()
