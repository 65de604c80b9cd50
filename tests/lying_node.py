"""A node process that does not do what it should: ``lying_node.py FOLDER LIE``, a name of `LIES` or one of these.

``garbage`` sends answers that Flower cannot read.
``ahead`` has a clock that is a minute ahead.
``slow`` never answers a visit; it leaves a file named ``working`` in the folder when it is in the midst of one.
``halts`` stops itself (SIGSTOP) once, when it has uploaded the first object of its answer to a visit.
``dies`` kills itself (kill -9) when it is handed its task of the first global round.
"""

import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from flower_loopback import changed, tasks_in
from flwr.app import ConfigRecord, RecordDict
from flwr.supernode import node_auth_http_interceptor

from hetperm.device import packet
from hetperm.federated import fleet
from hetperm.federated.node import from_folder
from hetperm.federated.places import node_place

LIES = {
    "nan": lambda x: torch.full_like(x, torch.nan),
    "shape": lambda x: x.new_zeros((*x.shape, 1)),
    "width": lambda x: x[: max(1, len(x) // 2)] if x.dim() else x,
}


class Garbage(ConfigRecord):
    """A record whose content Flower cannot read, under a head that it accepts."""

    def deflate(self) -> bytes:
        body = b"not protobuf"
        return f"ConfigRecord  {len(body)}\0".encode() + body


def garbage_of(content: bytes) -> RecordDict:
    """The content of a message; that of an answer with tensors is not to be read."""
    return RecordDict({"packet": Garbage({"packet": content})}) if tasks_in(content) else plain(content)


def a_minute_later() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)


plain = fleet.content_of


class Halting:
    """Uploads objects of answers one after the other, and stops this process after the next, if it is told to."""

    def __init__(self):
        self.now, self._lock, self._upload = False, threading.Lock(), fleet.flower.push_objects

    def __call__(self, objects, push, **options) -> None:
        """Upload the objects of an answer."""

        def one(number: str, content: bytes) -> None:
            with self._lock:
                push(number, content)
                if self.now:
                    self.now = False
                    os.kill(os.getpid(), signal.SIGSTOP)

        self._upload(objects, one, **options)


def main(folder: Path, lie: str) -> None:
    """Answer as a node, but change every tensor of every answer."""
    torch.set_num_threads(1)
    node, place = from_folder(folder), node_place(folder)
    if lie == "garbage":
        fleet.content_of = garbage_of
    if lie == "ahead":
        node_auth_http_interceptor.now = fleet.now = a_minute_later
    halting, visits = Halting(), []
    if lie == "halts":
        fleet.flower.push_objects = halting

    def handle(content: bytes) -> bytes:
        tasks = str(packet.read(content)[0].get("tasks"))
        if lie == "dies" and "global round 0" in tasks:
            os.kill(os.getpid(), signal.SIGKILL)
        if " at host " in tasks:
            visits.append(1)
            if lie == "slow":
                (folder / "working").touch()
                time.sleep(3600)
            halting.now = len(visits) == 1
        answer = node.handle(content)
        return changed(answer, LIES[lie]) if lie in LIES and tasks_in(answer) else answer

    fleet.attend(handle, fleet.Address(place.server, place.certificate, place.key))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
