"""Packets over Flower: a message to one node holds one packet, as bytes. Needs the extra `flower`."""

from collections.abc import Collection, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from hetperm.engine.flower_post import Lost

TYPE = "query.hetperm"  # of all messages: the packet says what it is
PACKET = "packet"  # the key of the record, and of the packet in it
SMALL = 4 * 2**20  # bytes of a packet that travels in one piece


def content_of(packet: bytes) -> RecordDict:
    """A packet as the content of a message."""
    # Every object in a message is a request of its own. A value is one object; an array is three, and sent in pieces.
    if len(packet) <= SMALL:
        return RecordDict({PACKET: ConfigRecord({PACKET: packet})})
    # Made from its parts: from a numpy array, Flower would add numpy's own header.
    array = Array(dtype="uint8", shape=(len(packet),), stype="hetperm", data=packet)
    return RecordDict({PACKET: ArrayRecord({PACKET: array})})


def packet_of(content: RecordDict) -> bytes:
    """The packet in the content of a message; an error if it holds something else."""
    match content.get(PACKET):
        case ConfigRecord() as record:
            found = record.get(PACKET)
        case ArrayRecord() as record:
            found = getattr(record.get(PACKET), "data", None)
        case _:
            found = None
    if not isinstance(found, bytes | bytearray | memoryview):
        raise ValueError("a message without a packet of hetperm; all nodes and the server must run it")
    return bytes(found)


def answer_of(reply: Message) -> bytes | Lost:
    """The packet in an answer, or why there is none."""
    if reply.has_error():
        return Lost(_reason(reply.error))
    try:
        return packet_of(reply.content)
    except ValueError as error:
        return Lost(str(error))


class GridPost:
    """Carries packets over a Flower grid.

    Args:
        grid: a `flwr.serverapp.Grid`.
    """

    def __init__(self, grid: Any):
        self.grid = grid

    def push(self, node: int, packet: bytes, ttl: float) -> str | None:
        """Send a packet to a node; return the number of the message, or None if it could not be sent."""
        message = Message(content_of(packet), node, TYPE, ttl=ttl)
        sent: Iterable[str | None] = self.grid.push_messages([message])
        return next(iter(sent), None) or None

    def pull(self, ids: Collection[str]) -> dict[str, bytes | Lost]:
        """The answers that have come to these messages. Each is given once."""
        # By the message that is answered: an error may come from the SuperLink instead of the node.
        return {reply.metadata.reply_to_message_id: answer_of(reply) for reply in self.grid.pull_messages(list(ids))}

    def online(self) -> set[int]:
        """The nodes that are connected now."""
        return set(self.grid.get_node_ids())


def _reason(error: Error) -> str:
    return " ".join(f"{error.reason or 'no reason given'}".split())[:300] + f", code {error.code}"
