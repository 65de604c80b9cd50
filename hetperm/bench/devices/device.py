"""Devices: processes that do one piece of work each, under a limit, and may be killed for it.

A server process loads Python and torch, warms up, and forks itself for every piece of work. A piece therefore starts
at once and at the same baseline, and leaves no trace in the next. Caches are off: oneDNN would keep 256 KB of address
space for every kernel, and malloc the memory of freed tensors.
"""

import contextlib
import ctypes
import gc
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetperm.bench.devices.limits import Limit
from hetperm.runs.memory import status

NO_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
DONE, FAILED, REFUSED = 0, 1, 3  # exit codes of a piece of work that was not killed
OUT_OF_MEMORY = re.compile(
    "allocate memory|enough memory|out of memory|bad_alloc|could not (create|execute) a primitive"
)


class Exceeded(MemoryError):
    """Work that did not fit under its limit; the message says how it ended."""


@dataclass(frozen=True)
class Order:
    """A piece of work and where its result goes.

    Attributes:
        work: a function without arguments; it and its result can be pickled.
        allowed: bytes that it may take; None: no limit.
        limit: what enforces that; None: nothing does.
        rehearsed: whether it is done once before the limit holds. The kernels that torch compiles for its shapes, and
            never frees, are then part of the baseline.
        reply: the file that the result, or the error, is written to.
    """

    work: Callable[[], Any]
    allowed: int | None
    limit: Limit | None
    rehearsed: bool
    reply: Path


class Devices:
    """A server process and its forks, which do pieces of work one after the other.

    Args:
        caches: whether kernels and freed memory are kept, as torch does by itself: for work that is timed.
    """

    def __init__(self, *, caches: bool = False):
        if not hasattr(os, "fork"):
            raise OSError(f"{sys.platform} cannot fork processes, which the benchmark needs; run it on Linux or macOS")
        env = {**os.environ, **({} if caches else NO_CACHES), "OMP_NUM_THREADS": "1"}
        # The server must find the same modules, and what it unpickles may come from anywhere on our path.
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        # A new interpreter, not a fork of this one: malloc and oneDNN read their variables when they start.
        code = "from hetperm.bench.devices.device import serve; serve()"
        self._folder = tempfile.TemporaryDirectory(prefix="hetperm-")
        self._log = Path(self._folder.name) / "log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env
            )
        self._baseline: int | None = None

    @property
    def baseline(self) -> int:
        """Bytes of memory that Python and torch take by themselves; 0 where that is not known."""
        if self._baseline is None:
            self._baseline = self._receive()
        return self._baseline

    def do(
        self,
        work: Callable[[], Any],
        *,
        allowed: int | None = None,
        limit: Limit | None = None,
        rehearsed: bool = False,
    ) -> Any:
        """The result of a piece of work, done in its own process; raises `Exceeded` if it takes more than allowed."""
        _ = self.baseline  # the server sends it first, so it must be read before any answer
        reply = Path(self._folder.name) / "reply"
        dump(Order(work, allowed, limit, rehearsed, reply), self._process.stdin)
        self._process.stdin.flush()
        code = self._receive()
        if code == DONE:
            with open(reply, "rb") as file:
                return pickle.load(file)
        if code == FAILED:
            raise RuntimeError(reply.read_text())
        if allowed is None:
            raise RuntimeError(
                f"a process without a limit was {_ending(code)}; is there enough memory on this machine?"
            )
        raise Exceeded(_ending(code))

    def _receive(self) -> int:
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            lines = self._log.read_text(errors="replace").strip().splitlines() or ["without a word"]
            raise RuntimeError(
                f"a process with nothing but Python and torch ended at once ({lines[-1]}); "
                "if its memory is limited (see ulimit -d and ulimit -v), the limit is below what they take: raise it"
            ) from None

    def close(self) -> None:
        """End the processes and remove their files."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _ending(code: int) -> str:
    """How a process was stopped, in words."""
    return f"killed ({signal.Signals(-code).name})" if code < 0 else "refused memory"


# In the server process and its forks


def serve() -> None:
    """Read orders until the input ends, and carry out each in a fork."""
    orders, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what work prints must not mix with answers
    _warm_up()
    gc.collect()
    gc.freeze()  # or a collection in a fork would write to, and so copy, the pages of every object
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # of glibc: give free memory back, or work would use it without being charged
    pickle.dump(status().get("VmRSS", 0), answers)
    answers.flush()
    with contextlib.suppress(EOFError):
        while True:
            order = pickle.load(orders)
            pid = os.fork()
            if pid == 0:
                _carry_out(order)
            _, code = os.waitpid(pid, 0)
            if order.limit is not None:
                order.limit.leave(pid)
            del order  # its tensors would be part of the next one's baseline
            pickle.dump(os.waitstatus_to_exitcode(code), answers)
            answers.flush()


def _carry_out(order: Order) -> None:
    """Do the work inside a fork, and end the process with a code that says how it went."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash shows in its signal
        if order.rehearsed and order.limit is not None:
            order.limit.note()
            order.work()
        if order.limit is not None:
            order.limit.enter(order.allowed)
        result = order.work()
        with open(order.reply, "wb") as file:
            dump(result, file)
    # Nothing may get past this: a fork must not go on with the code of `serve`.
    except BaseException as error:
        # torch and oneDNN raise RuntimeError if malloc fails; only the text tells it from other errors.
        if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error)):
            os._exit(REFUSED)
        with contextlib.suppress(BaseException):
            order.reply.write_text(str(error).strip() or type(error).__name__)
        os._exit(FAILED)
    os._exit(DONE)  # not sys.exit: a fork must not run what its parent wanted done at its own end


def _warm_up() -> None:
    """Train a little and pickle a tensor, so that what torch loads on first use is part of the baseline."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    convolutions = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Flatten()]
    products = [nn.Linear(256, 4096), nn.LayerNorm(4096), nn.GELU(), nn.Linear(4096, 512)]
    warm = nn.Sequential(*convolutions, *products)
    for n in (10, 64):
        F.cross_entropy(warm(torch.zeros(n, 3, 8, 8)), torch.zeros(n, dtype=torch.long)).backward()
    dump(torch.zeros(1), io.BytesIO())


def dump(value: Any, file: Any) -> None:
    """Write a value to a binary file or a pipe, for `pickle.load`; tensors as they lie in memory."""
    from hetperm.engine.pickling import TensorPickler  # with torch, which must not be here before the devices run

    TensorPickler(file, protocol=5).dump(value)
