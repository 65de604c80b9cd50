"""A node process that lies: ``lying_node.py FOLDER nan|shape|width``."""

import sys
from pathlib import Path

import torch
from flower_loopback import changed, tasks_in

from hetperm.device import packet
from hetperm.federated.fleet import Address, attend
from hetperm.federated.node import from_folder
from hetperm.federated.places import node_place

LIES = {
    "nan": lambda x: torch.full_like(x, torch.nan),
    "shape": lambda x: x.new_zeros((*x.shape, 1)),
    "width": lambda x: x[: max(1, len(x) // 2)] if x.dim() else x,
}


def main(folder: Path, lie: str) -> None:
    """Answer as a node, but change every tensor of every answer."""
    torch.set_num_threads(1)
    node, place = from_folder(folder), node_place(folder)

    def handle(content: bytes) -> bytes:
        answer = node.handle(content)
        table, _ = packet.read(answer)
        return changed(answer, LIES[lie]) if table["kind"] == "answer" and tasks_in(answer) else answer

    attend(handle, Address(place.server, place.certificate, place.key))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
