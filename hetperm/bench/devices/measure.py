"""What is done inside a device process: a visit as `hetperm.device.bench` does it, and the same watched or timed."""

import contextlib
import copy
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.bench.devices.limits import Limit, status
from hetperm.client import Client
from hetperm.device.bench import Loss, Workbench, sgd_update
from hetperm.engine.sequential import run_task
from hetperm.engine.task import Failure, Task
from submodels import cost


def visit(task: Task, client: Client, module: nn.Module, loss: Loss = F.cross_entropy) -> Any:
    """What a host makes of the model it is handed: one copy of it is trained, as large as the task says.

    Args:
        task: with the model as it was sent; `module`: of its shape. They were there before the limit, as a file would
            be; the copy is made under it.
    """
    bench = Workbench(copy.deepcopy(module), loss, width=task.width)
    outcome = run_task(task, {task.host: client}, SimpleNamespace(at=lambda width: bench))
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def training(module: nn.Module, example: Tensor, *, batch_size: int, steps: int) -> partial:
    """A visit of a few steps on random data, to be done somewhere.

    Args:
        example: (1, ...) an input of the module.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, *example.shape[1:], generator=generator, dtype=example.dtype)
    client = Client((x, torch.arange(batch_size) % 2))
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    update = partial(sgd_update, steps=steps, batch_size=batch_size, lr=1e-3)
    return partial(visit, Task(update, params, host=0, seed=0), client, module)


# Memory


@dataclass(frozen=True)
class Peak:
    """The most memory of a visit, above the baseline.

    Attributes:
        resident: bytes of private memory in use, as the operating system counts them; None where it does not say.
        charged: bytes that count against the limit; None without one.
    """

    resident: int | None
    charged: int | None


def watched(visiting: partial, limit: Limit | None = None, *, rehearsed: bool = False) -> Peak:
    """The most memory that a visit takes.

    It is done twice. Pages of program files come in with the first time; in the second they no longer blur what is
    read off: the resident peak, which counts them, less those that are there.

    Args:
        rehearsed: whether it is done once before, and kernels that are compiled then do not count against the limit.
    """
    if rehearsed and limit is not None:
        limit.note()
        visiting()
    if limit is not None:
        limit.enter(None)
    before, peaks = status(), []
    for _ in range(2):
        _forget_peak()
        visiting()
        now = status()
        if "RssAnon" in now:
            peaks.append(now["VmHWM"] - now["RssFile"] - now.get("RssShmem", 0) - before["RssAnon"])
    return Peak(max(peaks, default=None), None if limit is None else limit.most())


def _forget_peak() -> None:
    """Nothing; VmHWM is what is resident now, where the system allows that."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def allocated(module: nn.Module, example: Tensor, *, batch_size: int) -> int:
    """Bytes of tensors, as torch's own allocator counts them in real steps."""
    return cost.measure(module, example, batch_size=batch_size)


# Time


def timed(module: nn.Module, example: Tensor, *, batch_size: int, repeats: int = 3) -> float:
    """Seconds of one training step on one thread of this machine: processor time, the median of a few."""
    once = training(module, example, batch_size=batch_size, steps=1)
    task, client, module = once.args
    bench = Workbench(module, F.cross_entropy)
    bench.load(task.params)
    found = []
    for _ in range(1 + repeats):  # kernels are compiled in the first
        began = time.process_time()
        bench.descend(bench.gradient(*client.train), 1e-3)
        found.append(time.process_time() - began)
    return statistics.median(found[1:])
