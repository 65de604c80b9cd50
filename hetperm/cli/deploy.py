"""``hetperm deploy``: write what the machines of a federation need."""

from collections.abc import Sequence

from hetperm.cli.console import say
from hetperm.cli.flags import parse
from hetperm.federated.options import DeployOptions


def main(args: Sequence[str]) -> None:
    """Write the folder of a federation."""
    # The folder may be given as a word of its own: hetperm deploy FOLDER.
    if args and not args[0].startswith("-"):
        args = ["--folder", *args]
    options = parse(DeployOptions, args, prog="hetperm deploy")
    from hetperm.federated.serve import missing_flower

    sentence = missing_flower()
    if sentence:
        raise ValueError(sentence)
    from hetperm.federated.deploy import deploy

    folder = deploy(options)
    if options.renew:
        say(f"written to {folder / 'server'}: server.pem and server.key, valid for {options.days} days")
    else:
        say(f"written to {folder}: server/, nodes/0 to nodes/{options.nodes - 1}; README says what to copy where")
