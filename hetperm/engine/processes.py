"""The processes engine: several tasks at once, each worker a process. It gives the numbers of the sequential engine.

Workers are forked, so they have the clients' data without a copy. Models travel through memory that parent and worker
share. A worker that dies or gets stuck is replaced, and its task is run again: with the same seed, so that it gives the
same numbers.
"""

import contextlib
import io
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hetperm.client import Client
from hetperm.device.bench import Workshop
from hetperm.engine.pickling import TensorPickler
from hetperm.engine.sequential import answer
from hetperm.engine.task import Failure, Task, longest_first
from hetperm.engine.watch import Watch

log = logging.getLogger(__name__)

TRIES = 3  # how often a task is run if its worker dies
PATIENCE = 1.0  # seconds; an idle worker checks this often whether its parent still runs
STUCK = "it did nothing"
PROBED = 5.0  # seconds that a process has to show that it can train


def can_fork() -> bool:
    """Whether a forked process can train. Some systems have no fork, and autograd fails after it has used a GPU."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    # Tried, not deduced: what breaks a fork differs between systems and versions of torch.
    for _ in range(TRIES):
        code = _probe()
        if code is not None and code >= 0:
            return code == 0
    # Ended from outside, every time, which says nothing about forks.
    how = f"was ended by signal {-code}, perhaps for want of memory" if code else f"did not answer in {PROBED:.0f} s"
    log.warning("the process that tries whether workers can be forked %s; the answer is taken to be no", how)
    return False


def _probe() -> int | None:
    """The exit code of a process that tries to train; None if it got stuck."""
    with _quiet_fork():
        child = multiprocessing.get_context("fork").Process(target=_try_to_train)
        child.start()
    child.join(PROBED)
    if child.exitcode is None:
        child.kill()
        child.join()
        return None
    return child.exitcode


def _try_to_train() -> None:
    x = torch.ones((), requires_grad=True)
    # _exit ends the child at once: no traceback, and no clean-up of what it shares with its parent.
    try:
        torch.autograd.grad(x * x, x)
    except RuntimeError:
        os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """A context without the warning that threads do not survive a fork; workers use none of their parent's threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


class Processes:
    """Runs tasks in ``workers`` processes. No two tasks of one call may use the same model."""

    def __init__(self, clients: Sequence[Client], shop: Workshop, workers: int):
        self.clients, self.shop = clients, shop
        # Room for a few models, as some updates send several. What does not fit goes through the pipe, which is slower.
        size = sum(p.numel() * p.element_size() for p in shop.full.slots)
        self._buffers = [SharedBuffer(4 * size + 2**16) for _ in range(workers)]
        self._workers: list[Worker | None] = [None] * workers
        self._watch = Watch()

    def run(self, tasks: Sequence[Task]) -> list[Any | Failure]:
        """The outcomes of the tasks, in order; a Failure for a task that raised an error."""
        outcomes: list[Any] = [None] * len(tasks)
        # Reversed, so that pop() takes the next task and append() puts a lost one at the front.
        waiting, tries = longest_first(tasks, self.clients)[::-1], [0] * len(tasks)
        busy: dict[Connection, tuple[int, int]] = {}  # pipe of a worker -> (which worker, which task)
        free = list(range(len(self._buffers)))
        while waiting or busy:
            while waiting and free:
                w, k = free.pop(), waiting.pop()
                tries[k] += 1
                busy[self._give(w, tasks[k])] = (w, k)
            for pipe in wait(list(busy)):
                w, k = busy.pop(pipe)
                free.append(w)
                try:
                    outcome = self._buffers[w].read(pipe.recv_bytes())
                    self._watch.done(self._workers[w].process)
                except (EOFError, OSError):  # the worker was killed, perhaps in the middle of its answer
                    ended = self._drop(w)
                    if tries[k] < TRIES:
                        waiting.append(k)
                        continue
                    advice = f"is there memory for {len(self._buffers)} workers?"
                    if ended == STUCK:
                        advice = "use engine 'threads' or 'sequential'"
                    outcome = RuntimeError(f"the worker was ended {TRIES} times ({ended}); {advice}")
                outcomes[k] = Failure(tasks[k], outcome) if isinstance(outcome, RuntimeError) else outcome
        return outcomes

    def _give(self, w: int, task: Task) -> Connection:
        """Send a task to worker w, starting it if need be; return the pipe on which it will answer."""
        for _ in range(TRIES):
            if self._workers[w] is None:
                self._workers[w] = Worker(self._buffers[w], self.clients, self.shop)
            pipe = self._workers[w].pipe
            # Watched before it has the task: a stuck worker does not even take a message that is longer than its pipe.
            self._watch.begin(self._workers[w].process)
            try:
                pipe.send_bytes(self._buffers[w].write(task))
                return pipe
            except OSError:
                self._drop(w)
        raise RuntimeError("workers die as soon as they are started; use engine 'sequential'")

    def _drop(self, w: int) -> str:
        """End worker w and forget it; return how it ended."""
        worker, self._workers[w] = self._workers[w], None
        how = worker.end()
        self._watch.done(worker.process)
        return STUCK if self._watch.was_stuck(worker.process) else how

    @property
    def pids(self) -> list[int]:
        """The process ids of the running workers."""
        return [worker.process.pid for worker in self._workers if worker is not None]

    def close(self) -> None:
        """End the workers."""
        for w, worker in enumerate(self._workers):
            if worker is not None:
                self._drop(w)
        self._watch.close()


class Worker:
    """A forked process that runs one task after another until it gets an empty message or its parent is gone."""

    def __init__(self, buffer: "SharedBuffer", clients: Sequence[Client], shop: Workshop):
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_work, args=(other, self.pipe, buffer, clients, shop), daemon=True)
        with _quiet_fork():
            self.process.start()
        # Now only the worker holds its end of the pipe, so its death shows here as the end of the stream.
        other.close()

    def end(self) -> str:
        """End the process if it still runs; return how it ended."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")  # closing is not enough: workers forked later hold this end open too
        self.pipe.close()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _work(
    pipe: Connection, parents: Connection, buffer: "SharedBuffer", clients: Sequence[Client], shop: Workshop
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the parent, which then ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does about it
    parents.close()
    # The workers share the cores, and sums on one thread come out as in the other engines.
    torch.set_num_threads(1)
    parent = os.getppid()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            # A killed parent sends no last message, but its children get another parent.
            while not pipe.poll(PATIENCE):
                if os.getppid() != parent:
                    return
            message = pipe.recv_bytes()
            if not message:
                return
            pipe.send_bytes(buffer.write(answer(buffer.read(message), clients, shop)))


@dataclass
class SharedBuffer:
    """Memory shared by parent and worker. It holds one message at a time."""

    size: int

    def __post_init__(self):
        self._memory = mmap.mmap(-1, self.size)

    def write(self, value: Any) -> bytes:
        """The message for a value, to be sent through a pipe. Its tensors go into the buffer, as far as they fit."""
        buffers: list[pickle.PickleBuffer] = []
        text = io.BytesIO()
        TensorPickler(text, protocol=5, buffer_callback=buffers.append).dump(value)
        first, spans = 0, []  # for each tensor its span of the buffer, or its bytes if it did not fit
        for buffer in buffers:
            raw = buffer.raw()
            last = first + raw.nbytes
            if last > self.size:
                spans.append(bytes(raw))
                continue
            self._memory[first:last] = raw
            spans.append((first, last))
            first = last
        return pickle.dumps((text.getvalue(), spans))

    def read(self, message: bytes) -> Any:
        """The value of a message, with its tensors copied out of the buffer."""
        # A bytearray, since torch wants memory that it may write to; copied, since the next message overwrites it.
        text, spans = pickle.loads(message)
        return pickle.loads(
            text, buffers=[bytearray(span if isinstance(span, bytes) else self._memory[slice(*span)]) for span in spans]
        )
