"""``hetperm node``: take part in a federation with the data of this machine."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from hetperm.cli.flags import parse
from hetperm.federated.options import NodeOptions


def main(args: Sequence[str]) -> None:
    """Answer the server's messages until the process is ended."""
    options = parse(NodeOptions, args, prog="hetperm node")
    logging.getLogger("hetperm").setLevel(logging.INFO)
    from hetperm.federated.serve import missing_flower

    sentence = missing_flower()
    if sentence:
        raise ValueError(sentence)
    try:
        _attend(options)
    except KeyboardInterrupt:  # a node has nothing to resume: it is started again as it was
        print("left the federation", file=sys.stderr, flush=True)
        os._exit(0)  # at once: to take apart all modules of torch takes seconds, and there is nothing to save


def _attend(options: NodeOptions) -> None:
    import torch

    from hetperm.federated import shard
    from hetperm.federated.fleet import Address, attend
    from hetperm.federated.node import Limits, Node
    from hetperm.federated.orphans import end_with_named_parent
    from hetperm.federated.places import check_insecure, node_place

    end_with_named_parent()
    place = node_place(options.folder)
    given = {name: getattr(options, name) for name in ("server", "client", "width", "device_mb", "data")}
    place = replace(place, **{name: value for name, value in given.items() if value is not None})
    if options.insecure:
        check_insecure(place.server)
        logging.getLogger(__name__).warning("--insecure: without TLS and without a key, on this machine only")
    torch.set_num_threads(options.threads)
    found = shard.load(place.data, place.config, place.client)
    limits = Limits(place.width, place.device_mb, options.largest_mb * 2**20)
    node = Node(found, limits, options.out or options.folder)
    print(f"client {found.client.key}: {found.client.n_train} training samples, which stay here", file=sys.stderr)
    secured = not options.insecure
    address = Address(place.server, place.certificate if secured else None, place.key if secured else None)
    attend(node.handle, address)
