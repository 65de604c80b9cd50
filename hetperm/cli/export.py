"""``hetperm export``: write clients' models as files that their devices run, and print what running them showed."""

import math
import sys
from collections.abc import Sequence
from typing import Any

from hetperm.cli import console
from hetperm.cli.flags import FlagParser, UsageError, folder_of
from hetperm.runs.export.options import Options

USAGE = "hetperm export RUN [FLAGS]"
NOT_WRITTEN = 1  # the exit status if some files were not good, and the others are written


def main(args: Sequence[str]) -> None:
    """Export the models of a run's folder, and print a table."""
    parser = FlagParser(Options, prog="hetperm export", defaults=Options())
    parser.usage = USAGE
    if args and args[0] in ("-h", "--help"):
        parser.exit_with_help()
    if not args or args[0].startswith("-"):
        raise UsageError(f"which run? {USAGE}, with the folder of a run, such as runs/digits-perm")
    given = parser.read(args[1:])
    if given.pop("help", False):
        parser.exit_with_help()
    options = Options(**given)
    from hetperm.federated import kept
    from hetperm.report import grid
    from hetperm.runs import files
    from hetperm.runs.export.export import export_folder

    folder = folder_of(args[0])
    with files.reading(folder), console.status(quiet=options.quiet) as show:
        show("reading the run")
        data = kept.data_of(folder) if kept.is_node(folder) else None
        exported = export_folder(folder, options, lambda one: show(f"client {one.client} is done"), data)
    console.say(grid.terminal(_table(exported, options)))
    for one in exported:
        if one.check.fault:
            console.say(f"not written: client {one.client}: {one.check.fault}")
    good = [one for one in exported if one.path]
    where = f"; written to {good[0].path.parent}, each with a manifest (.json)" if good else ""
    console.say(f"{len(good)} of {len(exported)} verified by running{where}")
    if len(good) < len(exported):
        sys.exit(NOT_WRITTEN)


def _table(exported: Sequence[Any], options: Options) -> Any:
    """What running the files showed, one line for each."""
    from hetperm.report.grid import Grid

    metric = next((one.metric for one in exported), "")
    columns = ["client", "tier", "width", "KB", "ms", "difference", "of at most", metric, "in the file"]
    rows = []
    for one in exported:
        check = one.check
        figures = [
            f"{one.size / 1024:,.1f}",
            _figure(check.ms, ".3f"),
            _figure(check.difference, ".1e"),
            _figure(check.scale, ".1f"),
            _figure(check.before, ".3f"),
            _figure(check.after, ".3f"),
        ]
        rows.append([str(one.client), one.tier, f"{one.width:g}", *figures])
    title = f"{options.format}, {options.precision}, batch {options.batch}: run on validation data"
    return Grid(columns, rows, title=title)


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
