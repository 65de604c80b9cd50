"""``hetperm bench``: time rounds and epochs, and write the figures part by part."""

import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from hetperm.bench.speed.options import Options
from hetperm.cli.console import say
from hetperm.cli.flags import parse


def main(args: Sequence[str]) -> None:
    """Run the benchmark part by part, and write the results so far after each."""
    options = parse(Options, args, prog="hetperm bench")
    from hetperm.bench.speed import output
    from hetperm.bench.speed.run import check_data, run
    from hetperm.report import pictures
    from hetperm.runs import files
    from hetperm.runs.machine import machine

    # Both first of all: nobody should learn after an hour of timing that there are no data, or nowhere to write.
    check_data(options)
    files.made(options.out)
    results: dict[str, Any] = {
        "command": _plain_command(options, args),
        "taken": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        **options.repetitions,
    }
    # Written after every part, so that an interrupted benchmark keeps what it has.
    for part, figures in run(options, say=_timing):
        results[part] = figures
        files.write_json(options.out / "results.json", results)
    table, figure = output.tables(results), output.picture(results)
    files.write(options.out / "table.md", table)
    written = ["results.json", "table.md"]
    if figure:
        files.write(options.out / "speed.png", pictures.png(figure))
        written.append("speed.png")
    say(table)
    say(f"written to {options.out}: {', '.join(written)}")


def _timing(work: str) -> None:
    # stdout is for the tables.
    print(f"timing {work} ...", file=sys.stderr, flush=True)


def _plain_command(options: Options, args: Sequence[str]) -> str:
    """The command without the folders of this machine, so that it can be published."""
    hidden = {str(options.data_dir): "DATA"}
    if options.out.is_absolute():
        hidden[str(options.out)] = options.out.name
    for path, name in hidden.items():
        args = [arg.replace(path, name) for arg in args]
    return shlex.join(["hetperm", "bench", *args])
