"""``hetperm federate``: a federation on this machine, to look at: a SuperLink and node processes over loopback."""

from collections.abc import Sequence

from hetperm.cli.console import say
from hetperm.cli.federation import Screen
from hetperm.cli.flags import parse
from hetperm.federated.options import FederateOptions


def main(args: Sequence[str]) -> None:
    """Deploy a federation, start its processes, run the job, and end them."""
    options = parse(FederateOptions, args, prog="hetperm federate")
    from hetperm.federated.serve import missing_flower

    sentence = missing_flower()
    if sentence:
        raise ValueError(sentence)
    from hetperm.federated.local import federate, free_folder

    place = free_folder(options)
    say(f"deploying {options.nodes} nodes to {place}: certificates, keys, start commands")
    try:
        with Screen() as screen:
            folder, rows = federate(options, place, screen)
    except KeyboardInterrupt as stop:
        raise type(stop)(f"stopped, and all processes ended; {place} has what they wrote") from None
    for row in rows:
        say(row)
    say(f"written to {folder}: report.html, summary.json, federation.json; models in {place}/nodes/*/models")
    say(f"report: open {folder / 'report.html'} in a browser")
