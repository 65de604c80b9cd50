"""The work inside a device process: a visit as every engine does it, and the same with memory or time measured."""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.bench.devices.limits import Limit
from hetperm.client import Client
from hetperm.device.bench import Loss, Workbench
from hetperm.device.updates import Sgd
from hetperm.engine.sequential import run_task
from hetperm.engine.task import Failure, Task
from hetperm.runs.memory import status
from submodels import cost


@dataclass(frozen=True)
class OneBench:
    """A shop for one visit.

    A `Workshop` and its benches refer to each other until garbage is collected: during a second visit in the same
    process, the model of the first would still be in memory.
    """

    bench: Workbench

    def at(self, width: float) -> Workbench:
        """The bench, which was made for the width of the visit."""
        return self.bench

    @property
    def full(self) -> Workbench:
        """The only bench there is; engines ask it which device it is on."""
        return self.bench


def visit(task: Task, client: Client, module: nn.Module, loss: Loss = F.cross_entropy) -> Any:
    """The outcome of a task at its host, which trains one copy of the module.

    Args:
        task: holds the model as it was sent.
        module: has the shape of that model. Both exist before the limit holds, as a file would; the copy is made under
            the limit.
    """
    bench = Workbench(copy.deepcopy(module), loss, width=task.width)
    outcome = run_task(task, {task.host: client}, OneBench(bench))
    if isinstance(outcome, Failure):
        raise outcome.error
    return outcome


def training(module: nn.Module, example: Tensor, *, batch_size: int, steps: int) -> Callable[[], Any]:
    """A visit of a few steps on random data, as a function to run in another process.

    Args:
        example: (1, ...) an input of the module.
    """
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    task = Task(Sgd(steps, batch_size, lr=1e-3), params, host=0, seed=0)
    return partial(visit, task, _client(example, batch_size), module)


def _client(example: Tensor, batch_size: int) -> Client:
    """A client with random inputs, enough for one batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, *example.shape[1:], generator=generator, dtype=example.dtype)
    return Client((x, torch.arange(batch_size) % 2))


# Memory


@dataclass(frozen=True)
class Peak:
    """The peak memory of a visit, above the baseline.

    Attributes:
        resident: bytes of private memory in use, as the operating system counts them; None where it does not say.
        charged: bytes that count against the limit; None without a limit.
    """

    resident: int | None
    charged: int | None


def watched(work: Callable[[], Any], limit: Limit | None = None, *, rehearsed: bool = False) -> Peak:
    """The peak memory of a visit.

    The work is done twice. The resident peak also counts pages of program files, which are subtracted. The first time
    loads such pages while it runs; the second time they are all there, and no longer blur the difference.

    Args:
        rehearsed: whether work is done once before that; kernels compiled then do not count against the limit.
    """
    if rehearsed and limit is not None:
        limit.note()
        work()
    if limit is not None:
        # None: nothing is refused, and the limit only counts.
        limit.enter(None)
    before, peaks = status(), []
    for _ in range(2):
        _forget_peak()
        work()
        now = status()
        if "RssAnon" in now:
            peaks.append(now["VmHWM"] - now["RssFile"] - now.get("RssShmem", 0) - before["RssAnon"])
    return Peak(max(peaks, default=None), None if limit is None else limit.peak())


def _forget_peak() -> None:
    """Set VmHWM to what is resident now, where the system allows that."""
    with contextlib.suppress(OSError):
        # 5 is the code for resetting the peak, see proc(5).
        Path("/proc/self/clear_refs").write_text("5")


def allocated(module: nn.Module, example: Tensor, *, batch_size: int) -> int:
    """Peak bytes of tensors, as torch's own allocator counts them in real steps."""
    return cost.measure(module, example, batch_size=batch_size)


# Time


def timed(module: nn.Module, example: Tensor, *, batch_size: int, repeats: int = 3) -> float:
    """Seconds of one training step on one thread of this machine: processor time, the median of a few steps."""
    x, y = _client(example, batch_size).train
    bench, times = Workbench(module, F.cross_entropy), []
    for _ in range(1 + repeats):
        began = time.process_time()
        bench.descend(bench.gradient(x, y), 1e-3)
        times.append(time.process_time() - began)
    return statistics.median(times[1:])  # kernels are compiled in the first
