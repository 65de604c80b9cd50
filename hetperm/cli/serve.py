"""``hetperm serve``: the server of a federation."""

from collections.abc import Sequence

from hetperm.cli.console import say
from hetperm.cli.federation import Lines
from hetperm.cli.flags import parse
from hetperm.federated.options import ServeOptions


def main(args: Sequence[str]) -> None:
    """Serve a federation until its run is done."""
    options = parse(ServeOptions, args, prog="hetperm serve")
    from hetperm.federated.serve import missing_flower, serve

    sentence = missing_flower()
    if sentence:
        raise ValueError(sentence)
    folder = serve(options, Lines(quiet=options.quiet))
    say(f"written to {folder}: report.html, summary.json, federation.json; each node has its own model")
    say(f"report: open {folder / 'report.html'} in a browser")
