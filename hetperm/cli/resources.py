"""``hetperm bench resources``: does the model fit each device tier? Status 1 if it does not."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hetperm import profile
from hetperm.bench.devices import limits
from hetperm.bench.devices.options import Options
from hetperm.cli.console import say, status
from hetperm.cli.flags import parse
from hetperm.profile import Profile

DOES_NOT_FIT = 1


def main(args: Sequence[str]) -> None:
    """Run the benchmark, print and write it, and exit with status 1 if a tier does not fit."""
    options = parse(Options, args, prog="hetperm bench resources")
    tiers = profile.load(options.capacity_profile)
    limit, enforcement = limits.choose(options.enforce)
    from hetperm.runs import files

    # A model may be written as timm:NAME, with slashes in NAME; only the last part can name a folder.
    name = f"resources-{tiers.name}-{options.model.rpartition(':')[2].rpartition('/')[2]}"
    files.run_folder(options.out, name)  # called for its error, before anything is measured
    result = _measure(options, tiers, limit, enforcement)
    _print(result)
    folder = files.claim(options.out, name)
    from hetperm.bench.devices.run import passed, write

    write(folder, result)
    say(f"written to {folder}: report.html, resources.csv, resources.json, pictures")
    if not passed(result):
        sys.exit(DOES_NOT_FIT)


def _measure(options: Options, tiers: Profile, limit: limits.Limit | None, enforcement: str) -> dict[str, Any]:
    """The results, as resources.json holds them."""
    from hetperm.bench.devices.device import Devices

    with status(quiet=options.quiet) as show:
        show("starting Python and torch")
        with Devices() as devices, Devices(caches=True) as timer:
            # Called for its error: a --device-mb that is too small should fail before anything is measured. It also
            # waits for the devices, and torch is imported only after that: a memory limit that does not let torch load
            # then stops a device first, which is reported in one line.
            limits.allowed_bytes(0, 0, baseline=devices.baseline, device_mb=options.device_mb)
            from hetperm.bench.devices.run import Machinery, run

            return run(options, tiers, Machinery(devices, timer, limit, enforcement), say=show)


def _print(result: Mapping[str, Any]) -> None:
    from hetperm.bench.devices import show
    from hetperm.bench.devices.run import title
    from hetperm.report import grid

    say(grid.terminal(show.grid(result["tiers"], title=title(result))))
    for line in show.sentences(result):
        say(line)
