"""``hetperm who``: whom a client of a run learns from, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hetperm.checks import check_fields, whole
from hetperm.cli.console import say
from hetperm.cli.flags import UsageError, read_run


@dataclass(frozen=True)
class Options:
    """Show whom a client of a run (RUN, its folder) learns from, and why: how far its gradient is from theirs, and how
    much of that distance is noise."""

    client: Annotated[int | None, whole(0)] = None
    """Number of the client."""
    rows: Annotated[int, whole(1)] = 30
    """Lines to show: the largest weights first, then the nearest clients."""

    def __post_init__(self):
        check_fields(self, label="--{}")


def main(args: Sequence[str]) -> None:
    """Print whom the client learns from."""
    folder, options = read_run("hetperm who", Options, args)
    if options.client is None:
        raise UsageError("which client? give --client 7")
    from hetperm.runs import files

    with files.reading(folder):
        show(folder, options.client, rows=options.rows)


def show(folder: Path, client: int, *, rows: int = 30) -> None:
    """Print the table of a client's partners, and a sentence about it."""
    from hetperm.report.tables import profile_table
    from hetperm.runs import partners

    found = partners.of(folder, client)
    say(found.sentence)
    shown = found.rows[:rows]
    more = "" if len(shown) == len(found.rows) else f" (the first {len(shown)} of {len(found.rows)})"
    say(profile_table(shown, title=f"distance and noise of gradients{more}"))
    say(found.why)
