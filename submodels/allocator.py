"""What torch's allocator hands out while real steps are taken."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.profiler import profile

from submodels.skeleton import named_tensors


def peak_bytes(watched: profile) -> int:
    """The most bytes at once among those that were allocated under the profiler."""
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which the profiler does not write to the terminal; it reads the level from the environment."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def static_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers, shared storages once."""
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for _, x in named_tensors(module)}
    return sum(storages.values())
