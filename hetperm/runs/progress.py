"""The progress of a run, for whoever starts it (a command, `run`, `fit`): a bar on a terminal, else a line a minute."""

import abc
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

EVERY = 60.0  # seconds between two lines
AT_ONCE = 1.0  # seconds in which a resumed run tells what came from checkpoints: that says nothing of the time left


class Course:
    """How far a run is: the methods that are done, of all seeds, and the part of the present one.

    Args:
        total: the methods of all seeds together.
        epochs: of each method.
    """

    def __init__(self, total: int, epochs: int):
        self._total, self._epochs = total, epochs
        self._done, self._part, self._spent = 0, 0.0, 0.0
        self.method, self.epoch, self.score = "", 0, math.nan

    @property
    def part(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        return min(1.0, (self._done + self._part) / self._total)

    def moved(self, method: str, spent: float) -> None:
        """Note the part of its steps that a method has spent; less than before is that of the next seed."""
        self._turn(method, begins=spent < self._spent)
        self._spent = spent
        self._part = max(self._part, min(1.0, spent))

    def ended(self, method: str, epoch: int, score: float) -> None:
        """Note an epoch. A resumed method reports all its earlier epochs at once."""
        self._turn(method, begins=epoch <= self.epoch)
        self.epoch, self.score = epoch, score
        self._part = max(self._part, epoch / self._epochs)

    def _turn(self, method: str, *, begins: bool) -> None:
        if method == self.method and not begins:
            return
        self._done += bool(self.method)
        self.method, self.epoch, self.score, self._part, self._spent = method, 0, math.nan, 0.0, 0.0

    def described(self) -> str:
        """The method and its score, if it has one."""
        return self.method if math.isnan(self.score) else f"{self.method} {self.score:.3f}"

    def line(self, metric: str, seconds: float, begun: float) -> str:
        """Where the run is, in a line.

        Args:
            seconds: time since it was at ``begun``, a part that came from checkpoints.
        """
        score = "" if math.isnan(self.score) else f", {metric} {self.score:.3f}"
        left = "" if self.part <= begun else f", about {_time(seconds / (self.part - begun) * (1 - self.part))} left"
        return f"{self.method}: epoch {self.epoch} of {self._epochs}{score}, {self.part:.0%} of the run{left}"


def _time(seconds: float) -> str:
    """A time to read.

    Example:
        >>> _time(40), _time(150), _time(9000)
        ('40 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Shown(abc.ABC):
    """What is called as a run goes on, and shows it; nothing appears before work begins."""

    metric = "accuracy"  # what it shows beside the method; the setting of a run tells

    def __init__(self, course: Course):
        self._course = course

    @abc.abstractmethod
    def start(self) -> None:
        """Begin to show; called again and again."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Take away what was shown."""

    @abc.abstractmethod
    def update(self) -> None:
        """Show how far the course is."""

    def moved(self, method: str, spent: float) -> None:
        """Show that a method has spent a part of its steps: in its warm-up, in an epoch, in fine-tuning."""
        self.start()
        self._course.moved(method, spent)
        self.update()

    def __call__(self, method: str, row: Mapping[str, Any]) -> None:
        """Show the end of an epoch, with its metrics."""
        self.start()
        score = row.get(f"tail_{self.metric}_mean", row.get(f"{self.metric}_mean", math.nan))
        self._course.ended(method, row["epoch"], score)
        self.update()


class Bar(Shown):
    """A progress bar on a terminal."""

    def __init__(self, course: Course):
        from rich import progress as bars
        from rich.console import Console

        super().__init__(course)
        columns = [
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
        ]
        # Removed at the end: stderr keeps warnings and the one line of an error.
        self._bar, self._task = bars.Progress(*columns, console=Console(stderr=True), transient=True), None

    def start(self) -> None:
        """Show the bar."""
        if self._task is None:
            self._task = self._bar.add_task(self._course.described(), total=1.0)
            self._bar.start()

    def stop(self) -> None:
        """Remove the bar, if it was shown."""
        if self._task is not None:
            self._bar.stop()

    def update(self) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=self._course.part, description=self._course.described())


class Lines(Shown):
    """A line a minute, for a log.

    Args:
        now: the time in seconds.
        write: takes a line.
    """

    def __init__(
        self, course: Course, now: Callable[[], float] = time.monotonic, write: Callable[[str], None] | None = None
    ):
        super().__init__(course)
        self._now, self._write = now, write or (lambda line: print(line, file=sys.stderr, flush=True))
        self._start: float | None = None
        self._last, self._begun = 0.0, 0.0

    def start(self) -> None:
        """Begin to count the time."""
        if self._start is None:
            self._start = self._last = self._now()

    def stop(self) -> None:
        """Do nothing: lines stay."""

    def update(self) -> None:
        """Write a line, if the last one is old enough."""
        now, course = self._now(), self._course
        if now - self._start < AT_ONCE:
            self._begun = course.part
        if now - self._last >= EVERY:
            self._last = now
            self._write(course.line(self.metric, now - self._start, self._begun))


@contextlib.contextmanager
def progress(methods: Sequence[str], *, epochs: int, runs: int, quiet: bool) -> Iterator[Shown | None]:
    """A context that provides what shows the progress of a run, or None if `quiet`."""
    if quiet:
        yield None
        return
    shown = (Bar if sys.stderr.isatty() else Lines)(Course(len(methods) * runs, epochs))
    try:
        yield shown
    finally:
        shown.stop()
