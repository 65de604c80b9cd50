"""``hetperm compare RUN RUN ...``: runs side by side, in the terminal and as a page."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from hetperm.cli import examples
from hetperm.cli.console import say
from hetperm.cli.flags import UsageError, folder_of
from hetperm.config import folder_path

log = logging.getLogger(__name__)

USAGE = """\
usage: hetperm compare RUN RUN ... [--out PAGE]

Compare runs on the same clients: their figures with paired differences from
the first run, the settings that differ, every tier and every method. The same,
with curves, is written as a page that needs no network.

  RUN         the folder of a run, or of several seeds
  --out PAGE  the page to write, a file that ends in .html
              (default: beside the first run)"""


def main(args: Sequence[str]) -> None:
    """Compare runs, print the tables and write the page."""
    if not args or {"-h", "--help"} & set(args):
        print(f"{USAGE}\n\n{examples.text('compare')}")
        return
    folders, out = _parsed(args)
    from hetperm.report import compare
    from hetperm.report.grid import terminal
    from hetperm.runs import files

    with files.reading(*folders):
        found = compare.compare(folders)
    target = out or _beside(folders)
    _check(target)
    say(terminal(compare.run_grid(found)))
    settings = compare.setting_grid(found)
    say("all settings are the same" if settings is None else terminal(settings))
    for grid in (compare.tier_grid(found), compare.method_grid(found)):
        if grid is not None:
            say(terminal(grid))
    files.write(target, compare.render(found))
    say(f"written to {target}: open it in a browser")


def _parsed(args: Sequence[str]) -> tuple[list[Path], Path | None]:
    """The folders and the page that the words name."""
    words, out = list(args), None
    folders = []
    while words:
        word, *words = words
        flag, equals, value = word.partition("=")
        if flag == "--out":
            if not equals:
                if not words:
                    raise UsageError("--out: the value is missing; name a file that ends in .html")
                value, *words = words
            if not value.endswith(".html") or Path(value).name == ".html":  # which would be a hidden file
                raise UsageError(f"--out: {value!r} is no page; name a file that ends in .html")
            if out is not None:
                log.warning("--out is given twice; the last one counts")
            out = folder_path("--out", value)  # a page, which is as little to hold control characters
        elif word.startswith("--"):
            raise UsageError(f"unknown flag {flag}; compare takes folders and --out")
        else:
            folders.append(folder_of(word))
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}; name the folder of a run, such as runs/digits-perm")
    return folders, out


def _beside(folders: Sequence[Path]) -> Path:
    """The page beside the first run, named after all of them."""
    names = "-".join(folder.resolve().name for folder in folders)
    return folders[0].resolve().parent / f"compare-{names[:100]}.html"


def _check(target: Path) -> None:
    """Raise an error if the page would take the place of something else."""
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}; make it, or name another page with --out")
    if os.path.lexists(target) and not target.is_file():  # a pipe would wait for ever
        raise UsageError(f"{target} exists and is no file; name another with --out")
    if target.exists() and b"hetperm compare" not in _beginning(target):
        raise UsageError(f"{target} exists and is no page of hetperm compare; name another with --out")


def _beginning(page: Path) -> bytes:
    with page.open("rb") as file:
        return file.read(500)
