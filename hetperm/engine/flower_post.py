"""The carrier of packets as mail sees it, and how patient the server is with those who answer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from hetperm.device.limits import LARGEST

OnEvent = Callable[[str, int, str], None]  # (what happened, host, details)


class Lost(Exception):
    """The carrier could not deliver a packet, or its answer."""


class Post(Protocol):
    """The carrier of packets."""

    def push(self, node: int, packet: bytes, ttl: float) -> str | None:
        """Send a packet to a node; return the number of the dispatch, or None if it could not be sent."""

    def pull(self, ids: Collection[str]) -> dict[str, bytes | Lost]:
        """The answers that have come to these dispatches. Each is given once."""

    def online(self) -> set[int]:
        """The nodes that are connected now."""


@dataclass(frozen=True)
class Rules:
    """How patient the server is.

    Attributes:
        deadline: seconds that a node has for an answer.
        patience: seconds that a node which was lost has to come back; after that it is absent.
        tries: how often a step is sent before its host counts as absent.
        quorum: the smallest number of nodes with which the run goes on.
        largest: bytes of a packet that are read.
        together: whether steps that are ready together travel in one packet.
        lean: whether tensors stay out of a packet that the node still has.
    """

    deadline: float = 300.0
    patience: float = 120.0
    tries: int = 3
    quorum: int = 1
    largest: int = LARGEST
    together: bool = True
    lean: bool = True
