"""Roster: which nodes are there, which are away and why, and which have come back or come late."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetperm.device import packet
from hetperm.device.packet import BadPacket, Shelf
from hetperm.engine.flower_post import Lost, OnEvent, Post, Rules

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at who is online
PING = 10.0  # seconds after which a silent node is asked whether it still knows its task
NOBODY = 0  # the node of a client that has not come yet
LATE = "it has not come yet"
# (node, its introduction, clients that have no node yet) -> which of them it is; an error if it can be none
Newcomer = Callable[[int, Mapping[str, Any], Collection[int]], int]


@dataclass
class Line:
    """What the server knows of a node.

    Attributes:
        known: digests of the tensors that it has.
        session: drawn by the node when it starts; another one means that it was restarted.
        has_setup: whether this session knows the model.
        away: why it is absent; empty if it is there.
        lost_at: when it was lost, if it may still come back.
        tries: how often the present steps were sent; needs: how often the node asked for what was left out of them.
        ping: the dispatch of a ping that has no answer yet, and when it was sent.
    """

    node: int
    known: Shelf = field(default_factory=lambda: Shelf(holding=False))
    session: str = ""
    has_setup: bool = False
    away: str = ""
    lost_at: float | None = None
    tries: int = 0
    needs: int = 0
    ping: tuple[str, float] | None = None

    def settled(self) -> None:
        """Note that it does its work: what went wrong before does not count any more."""
        self.tries, self.needs, self.lost_at = 0, 0, None


class Roster:
    """The nodes of all clients.

    Args:
        nodes: (N,) the node of every client; `NOBODY` for one that has not come yet.
    """

    def __init__(self, post: Post, nodes: Sequence[int], rules: Rules, on_event: OnEvent):
        self.post, self.rules, self.on_event = post, rules, on_event
        self.lines = [Line(node, away="" if node != NOBODY else LATE) for node in nodes]
        self.newcomer: Newcomer = _nobody
        self._online: set[int] = set()
        self._looked = -LOOK
        self._hello: dict[int, str] = {}  # node that is no client yet -> the dispatch of the question who it is
        self._strange: set[int] = set()  # nodes that were asked and are no client

    @property
    def absent(self) -> dict[int, str]:
        """host -> why it is absent."""
        return {host: line.away for host, line in enumerate(self.lines) if line.away}

    @property
    def pings(self) -> dict[str, int]:
        """dispatch of a ping -> host."""
        return {line.ping[0]: host for host, line in enumerate(self.lines) if line.ping}

    def online(self) -> set[int]:
        """The nodes that are connected, as of a moment ago."""
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._online, self._looked = self.post.online(), now
        return self._online

    def check_quorum(self) -> None:
        """Raise an error that names who is missing if the quorum is."""
        present = len(self.lines) - len(self.absent)
        if present < self.rules.quorum:
            reasons = "; ".join(f"client {host}: {reason}" for host, reason in self.absent.items())
            raise RuntimeError(
                f"{present} of {len(self.lines)} nodes are there and the quorum is {self.rules.quorum} ({reasons}); "
                "bring some back and go on with --resume"
            )

    def leave(self, host: int, reason: str) -> None:
        """Note that a node is absent from now on."""
        line = self.lines[host]
        line.away, line.lost_at = reason or "it does not answer", None
        self.on_event("absent", host, line.away)
        self.check_quorum()

    def lose(self, host: int) -> None:
        """Note that a node was lost. It may come back, which a list of before does not tell."""
        line = self.lines[host]
        line.lost_at = time.monotonic()
        self._online.discard(line.node)
        self._looked = max(self._looked, line.lost_at - LOOK / 2)

    def is_back(self, host: int) -> bool:
        """Whether a node that was lost is online again, or counts as absent now."""
        line = self.lines[host]
        if line.node in self.online():
            line.lost_at = None
            return True
        if time.monotonic() - line.lost_at > self.rules.patience:
            self.leave(host, f"it was lost and did not come back within {self.rules.patience:g} s")
            return True
        return False

    def meet(self, host: int, table: Mapping[str, Any]) -> bool:
        """Note the session of a node, which knows nothing of what was sent before; return whether it is another one."""
        line, session = self.lines[host], str(table.get("session", ""))
        if table.get("stateless") or session == line.session:
            return False
        restarted = bool(line.session)
        if restarted:
            self.on_event("restarted", host, "")
        line.session, line.has_setup = session, False
        line.known.clear()
        return restarted

    # Pings

    def knock(self, host: int) -> None:
        """Ask an absent node whether it is there again."""
        line = self.lines[host]
        if line.node == NOBODY:
            self._look_for_newcomers()
        elif line.node in self.online():
            self.ping(host)

    def ping(self, host: int) -> None:
        """Ask a node whether it is there and in which session, unless it was asked a moment ago."""
        line, now = self.lines[host], time.monotonic()
        # A ping may be lost: a node can end between fetching it and answering.
        if line.ping is None or now - line.ping[1] > PING:
            dispatch = self.post.push(line.node, packet.write({"kind": "ping"}), ttl=self.rules.deadline)
            line.ping = None if dispatch is None else (dispatch, now)

    def pong(self, host: int, answer: bytes | Lost) -> bool:
        """Take the answer to a ping; return whether a node that was thought to be at work has been restarted."""
        line = self.lines[host]
        line.ping = None
        try:
            table = {} if isinstance(answer, Lost) else packet.read(answer, self.rules.largest)[0]
        except BadPacket:
            table = {}
        if not table:
            return False
        restarted, was_away = self.meet(host, table), bool(line.away)
        if was_away:
            line.away = ""
            line.settled()
            self.on_event("back", host, "")
        return restarted and not was_away

    def _look_for_newcomers(self) -> None:
        """Ask nodes that are no client yet who they are; `newcomer` tells which client an answer makes of one."""
        known = {line.node for line in self.lines} | self._strange
        for node in self.online() - known - self._hello.keys():
            dispatch = self.post.push(node, packet.write({"kind": "hello"}), ttl=self.rules.deadline)
            if dispatch is not None:
                self._hello[node] = dispatch
        nodes = {dispatch: node for node, dispatch in self._hello.items()}
        for dispatch, answer in (self.post.pull(list(nodes)) if nodes else {}).items():
            node = nodes[dispatch]
            del self._hello[node]
            if isinstance(answer, Lost):
                continue  # asked again while it is online
            try:
                missing = {i for i, line in enumerate(self.lines) if line.node == NOBODY}
                host = self.newcomer(node, packet.read(answer, self.rules.largest)[0], missing)
            except ValueError as error:  # a packet that is damaged, or an introduction that is none
                log.warning("node %d cannot take part: %s", node, error)
                self._strange.add(node)
            else:
                self.lines[host] = Line(node)
                self.on_event("back", host, "it came late")


def _nobody(node: int, table: Mapping[str, Any], missing: Collection[int]) -> int:
    raise ValueError("nobody is waited for")
