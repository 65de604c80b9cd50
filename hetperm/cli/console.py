"""Terminal output: lines and tables, a progress bar, and what a run prints at its start and end."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hetperm.texts import printable


def say(content: Any) -> None:
    """Print a line, or a table that may be 120 characters wide unless it goes to a terminal."""
    from rich.console import Console

    console = Console()
    # In a pipe or a file rich falls back to 80 columns, and would fold the tables.
    if not console.is_terminal:
        console.width = 120
    if isinstance(content, str):
        content = printable(content)
    # No markup: paths and names of tiers may contain brackets.
    console.print(content, highlight=False, markup=False, soft_wrap=isinstance(content, str))


def announce(setting: Any) -> None:
    """Print what will be trained, and what each tier can afford."""
    from hetperm.report import tables

    config = setting.config
    workers = f" with {config.workers} workers" if config.workers > 1 else ""
    say(f"{setting.description}; engine {setting.engine}{workers}")
    if setting.profile:
        say(tables.profile_table(setting.profile, title=f"capacity profile {config.capacity_profile}"))


def show(summary: Mapping[str, Any], results: Sequence[Any]) -> None:
    """Print the closing tables of a run, or of the aggregate of several."""
    from hetperm.report import tables
    from hetperm.report.contents import Summary
    from hetperm.runs.experiment import histories

    summary = Summary.from_json(summary)
    say(tables.closing_table(summary))
    if len(summary.tier_names) > 1:
        say(tables.tier_table(summary, [row for result in results for row in result.clients]))
    lines = tables.mixing_lines(summary) + tables.visit_lines(histories(results), summary.num_clients)
    for line in lines + tables.attendance_lines(summary) + tables.paired_lines(summary):
        say(line)


# Progress


class Bar:
    """A progress bar, called after every epoch with the method and its metrics; it appears once work begins."""

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
        accuracy = row.get("tail_accuracy_mean", row.get("accuracy_mean", math.nan))
        description = method if math.isnan(accuracy) else f"{method} {accuracy:.3f}"
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


@contextlib.contextmanager
def status(*, quiet: bool) -> Iterator[Callable[[str], object]]:
    """A context that provides a function to show what is being done; without a terminal it shows nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as line:
        yield line.update
