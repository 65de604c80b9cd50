"""The server's carrier of packets: it takes in an answer once all of it is there, and waits for none. Needs `flwr`.

A node announces an answer before it uploads the objects that it is made of. Flower's own grid then waits for them, and
everybody else's answers wait behind: for three minutes if the node has stopped in the midst of its upload.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from hetperm.engine.flower_grid import GridPost, answer_of
from hetperm.engine.flower_post import Lost
from hetperm.federated import flower_private as flower
from hetperm.texts import one_line

FORGET = 60.0  # seconds after which an answer is dropped that nobody asks for any more


class NotYet(Exception):
    """An object of an answer has not been uploaded yet."""


@dataclass
class Arrival:
    """An answer that was announced.

    Attributes:
        objects: numbers of the objects that it is made of; its own is the last.
        pull: number -> content, from the SuperLink.
        asked: when it was last asked for.
        contents: of the objects that have come.
    """

    objects: list[str]
    pull: Callable[[str], bytes]
    asked: float = 0.0
    contents: dict[str, bytes] = field(default_factory=dict)

    def answer(self) -> bytes | Lost:
        """The packet, or why there is none; `NotYet` if some of it is missing."""
        try:
            contents = flower.readable(self.objects, self._object)
        except flower.ObjectPullError as error:
            return Lost(one_line(str(error))[:300])
        reply = flower.inflate_object_from_contents(self.objects[-1], contents)
        if not isinstance(reply, Message):
            return Lost(f"a {type(reply).__name__} instead of a message")
        return answer_of(reply)

    def _object(self, number: str) -> bytes:
        if number not in self.contents:
            try:
                self.contents[number] = self.pull(number)
            except flower.ObjectUnavailableError:
                raise NotYet from None
        return self.contents[number]


class ServerPost:
    """Carries packets between a ServerApp and its SuperLink.

    Args:
        grid: the grid of the ServerApp, a Flower `HttpGrid`.
    """

    def __init__(self, grid: Any):
        self.grid, self._post = grid, GridPost(grid)
        self._arrivals: dict[str, Arrival] = {}  # number of the message that is answered -> the answer

    def push(self, node: int, packet: bytes, ttl: float) -> str | None:
        """Send a packet to a node; return the number of the message, or None if it could not be sent."""
        return self._post.push(node, packet, ttl)

    def pull(self, ids: Collection[str]) -> dict[str, bytes | Lost]:
        """The answers to these messages that have come as a whole. Each is given once."""
        self._look([name for name in ids if name not in self._arrivals])
        now, answers = time.monotonic(), {}
        for name, arrival in [(name, self._arrivals[name]) for name in ids if name in self._arrivals]:
            arrival.asked = now
            try:
                answers[name] = arrival.answer()
            except NotYet:
                continue
            self._drop(name)
        for name in [name for name, arrival in self._arrivals.items() if now - arrival.asked > FORGET]:
            self._drop(name)
        return answers

    def online(self) -> set[int]:
        """The nodes that are connected now."""
        return self._post.online()

    def _look(self, ids: Collection[str]) -> None:
        """Note which of these messages have an answer that was announced: the SuperLink tells it once."""
        if not ids:
            return
        client, run = self.grid._runtime_client, self.grid.run.run_id
        announced = client.PullMessages(flower.PullAppMessagesRequest(message_ids=ids))
        for message, tree in zip(announced.messages_list, announced.message_object_trees, strict=True):
            self._arrivals[message.metadata.reply_to_message_id] = Arrival(
                [one.object_id for one in flower.iterate_object_tree(tree)],
                flower.make_pull_object_fn_protobuf(client.PullObject, self.grid.node, run),
            )

    def _drop(self, name: str) -> None:
        """Forget an answer, here and at the SuperLink; whoever still uploads it is told that nobody waits."""
        number, run = self._arrivals.pop(name).objects[-1], self.grid.run.run_id
        confirm = self.grid._runtime_client.ConfirmMessageReceived
        flower.make_confirm_message_received_fn_protobuf(confirm, self.grid.node, run)(number)
