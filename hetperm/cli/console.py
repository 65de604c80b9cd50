"""Terminal output: lines and tables, a progress bar, and what a run prints at its start and end."""

import contextlib
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
    from hetperm.report import advice, tables
    from hetperm.report.summary import Summary
    from hetperm.runs.output import histories

    summary = Summary.from_json(summary)
    say(tables.closing_table(summary))
    if len(summary.tier_names) > 1:
        say(tables.tier_table(summary, [row for result in results for row in result.clients]))
    lines = tables.mixing_lines(summary) + tables.visit_lines(histories(results), summary.num_clients)
    for line in lines + tables.attendance_lines(summary) + tables.paired_lines(summary):
        say(line)
    for line in advice.lines([result.evidence for result in results]):
        say(f"advice: {line}")


# Progress


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
