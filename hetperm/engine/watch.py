"""Watch: ends workers that hold a task and do nothing, so that the task can be given to another."""

import logging
import threading
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

log = logging.getLogger(__name__)

TICK = 1.0  # seconds from one look at the workers to the next
FLOOR = 10.0  # seconds without any work that every worker is granted
UNSEEN = 600.0  # the same on systems that do not tell how much a process works


@dataclass
class Held:
    """A worker that holds a task: how long, how long it has done nothing, and its CPU time when last seen at work."""

    process: BaseProcess
    seconds: float = 0.0
    idle: float = 0.0
    cpu: int | None = None


class Watch:
    """A thread that ends stuck workers: those that neither use nor want CPU time for longer than any task has taken.

    They are granted `FLOOR` seconds at least. A worker that computes is never ended, however long its task. Time is
    counted in looks, not by the clock: if the whole run is suspended, nobody is blamed for it.
    """

    def __init__(self):
        self._held: dict[int, Held] = {}
        self._longest = 0.0  # seconds of a finished task
        self._ended: set[int] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, process: BaseProcess) -> None:
        """Watch a worker, which is about to get a task."""
        self._held[process.pid] = Held(process)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
            self._thread.start()

    def done(self, process: BaseProcess) -> None:
        """Watch a worker no longer: it has answered, or it is gone."""
        held = self._held.pop(process.pid, None)
        if held and process.pid not in self._ended:
            self._longest = max(self._longest, held.seconds)

    def was_stuck(self, process: BaseProcess) -> bool:
        """Whether a worker was ended because it did nothing."""
        return process.pid in self._ended

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(TICK):
            for pid, held in list(self._held.items()):
                self._judge(pid, held)

    def _judge(self, pid: int, held: Held) -> None:
        held.seconds += TICK
        seen = _seen(pid)
        # Waiting for a turn on a busy machine, or for the disk, is work too.
        if seen and (seen.cpu != held.cpu or seen.state in "RD"):
            held.cpu, held.idle = seen.cpu, 0.0
            return
        held.idle += TICK
        patience = max(FLOOR if seen else UNSEEN, self._longest)
        if held.idle >= patience and pid in self._held:
            self._ended.add(pid)
            log.warning("a worker did nothing for %.0f s; it is replaced, and its task done again", held.idle)
            held.process.kill()  # its pipe ends, which whoever waits for the answer notices


@dataclass(frozen=True)
class Seen:
    """A process as the system sees it: its state, such as R for running, and its CPU time in ticks of the system."""

    state: str
    cpu: int


def _seen(pid: int) -> Seen | None:
    """What the system tells of a process; None if it tells nothing, or the process is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name of the program, in brackets, may hold anything. Of what follows, 11 is its own time and 12 the system's.
    words = stat.rpartition(")")[2].split()
    return Seen(words[0], int(words[11]) + int(words[12]))
