"""The progress bar of a run, for whoever starts it: a command, `run` or `fit`. It is shown on a terminal only."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class Bar:
    """A progress bar, called after every epoch with the method and its metrics; it appears once work begins."""

    metric = "accuracy"  # what it shows beside the method; the setting of a run tells

    def __init__(self, method: str, total: int):
        from rich import progress as bars
        from rich.console import Console

        columns = [
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("epochs"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(),
        ]
        console = Console(stderr=True)
        # Only on a terminal, and removed at the end: stderr keeps warnings and the one line of an error.
        self._bar = bars.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._first, self._total, self._task, self._last = method, total, None, ("", 0)

    def start(self) -> None:
        """Show the bar."""
        if self._task is None:
            self._task = self._bar.add_task(self._first, total=self._total)
            self._bar.start()

    def stop(self) -> None:
        """Remove the bar, if it was shown."""
        if self._task is not None:
            self._bar.stop()

    def __call__(self, method: str, row: Mapping[str, Any]) -> None:
        self.start()
        score = row.get(f"tail_{self.metric}_mean", row.get(f"{self.metric}_mean", math.nan))
        description = method if math.isnan(score) else f"{method} {score:.3f}"
        last_method, last_epoch = self._last
        # A resumed method reports all its earlier epochs at once. Another method, or the same with an epoch that is not
        # larger (the next seed), starts from zero.
        goes_on = method == last_method and row["epoch"] > last_epoch
        advance = row["epoch"] - last_epoch if goes_on else row["epoch"]
        self._last = method, row["epoch"]
        self._bar.update(self._task, advance=advance, description=description)


@contextlib.contextmanager
def progress(methods: Sequence[str], *, epochs: int, runs: int, quiet: bool) -> Iterator[Bar | None]:
    """A context that provides a progress bar, or None if `quiet`."""
    if quiet:
        yield None
        return
    bar = Bar(methods[0], total=len(methods) * epochs * runs)
    try:
        yield bar
    finally:
        bar.stop()
