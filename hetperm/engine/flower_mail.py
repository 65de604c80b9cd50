"""Mail: steps sent to nodes as packets and their answers taken in, whoever is slow, away or lying.

Steps of one model, and steps at one host, are taken in the order in which they are given. Nothing else waits for
anything: there is no barrier between rounds. Steps of a host that are ready together travel in one packet.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetperm.device import packet
from hetperm.device.packet import BadPacket, Shelf, digests_of
from hetperm.engine.task import Absent
from hetperm.params import Params

log = logging.getLogger(__name__)

QUICK, SLOW = 0.01, 0.25  # seconds between two looks for answers: right after one, and after a long silence
LOOK = 1.0  # seconds between two looks at who is online
NOBODY = 0  # the node of a client that has not come yet
LATE = "it has not come yet"
PING = 10.0  # seconds after which a silent node is asked whether it still knows its task
MOST = 16  # steps in a packet


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
    largest: int = packet.LARGEST
    together: bool = True
    lean: bool = True


@dataclass(frozen=True)
class Job:
    """A piece of work for a node.

    Attributes:
        kind: the name of the update, under which costs are added up.
        table: plain values.
        params: the model, and other tensors.
        fault: answer -> what is wrong with it, or None.
    """

    kind: str
    label: str
    table: Mapping[str, Any]
    params: Params
    fault: Callable[[Any], str | None]


@dataclass(frozen=True)
class Step:
    """A job at a host, made when it is its turn.

    Attributes:
        model: steps of one model are taken one after the other; None depends on no other step.
        make: () -> the job.
        done: called with the answer, or with an `Absent`.
    """

    host: int
    make: Callable[[], Job]
    done: Callable[[Any], None]
    model: Hashable | None = None


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
        ping: the dispatch of a ping, and when it was sent.
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


@dataclass
class Flight:
    """A packet on its way: to whom, with what, since when."""

    host: int
    steps: list[Step]
    jobs: list[Job]
    plain: list[Any]
    tensors: Params
    sent: float
    size: int


@dataclass
class Cost:
    """What jobs of a kind cost: seconds from sending to answer, of these at the node, and bytes down and up."""

    jobs: int = 0
    packets: int = 0
    seconds: float = 0.0
    node_seconds: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    model_bytes: int = 0  # of the models that were handed over, as they are in memory


OnEvent = Callable[[str, int, str], None]  # (what happened, host, details)


class Mail:
    """Sends steps to nodes and takes in their answers.

    Args:
        nodes: (N,) the node of every client.
        setup: the table from which a node builds the model; sent to every session once.
        on_event: told of everything that a user should see.
    """

    def __init__(
        self,
        post: Post,
        nodes: Sequence[int],
        setup: Mapping[str, Any],
        rules: Rules | None = None,
        on_event: OnEvent | None = None,
    ):
        self.post, self.setup, self.rules = post, dict(setup), Rules() if rules is None else rules
        self.lines = [Line(node, away="" if node != NOBODY else LATE) for node in nodes]
        self.newcomer: Callable[[int, Mapping[str, Any]], int | None] = lambda node, table: None
        self.costs: dict[str, Cost] = {}
        self._event = on_event or (lambda what, host, detail: None)
        self._number = 0
        self._online: set[int] = set()
        self._looked = -LOOK
        self._flights: dict[str, Flight] = {}
        self._failed: list[Flight] = []  # packets whose steps go back to their queues
        self._hello: dict[int, str] = {}  # node that is no client yet -> the dispatch of the question who it is
        self._strange: set[int] = set()  # nodes that were asked and are no client
        self._server = secrets.token_hex(8)  # with the number of a packet, so that nodes notice one that is replayed

    @property
    def absent(self) -> dict[int, str]:
        """host -> why it is absent."""
        return {host: line.away for host, line in enumerate(self.lines) if line.away}

    def deliver(self, steps: Sequence[Step]) -> None:
        """Carry out steps: each ends with its answer or, if its host is absent, with an `Absent`."""
        queues: dict[int, deque[Step]] = {}
        turns: dict[Hashable, deque[Step]] = {}
        for step in steps:
            queues.setdefault(step.host, deque()).append(step)
            if step.model is not None:
                turns.setdefault(step.model, deque()).append(step)
        self._check_quorum()
        pause = QUICK
        while any(queues.values()) or self._flights:
            busy = {flight.host for flight in self._flights.values()}
            moved = False
            for host, queue in queues.items():
                if queue and host not in busy:
                    moved |= self._next(host, queue, turns)
            came = self._take_in(queues, turns)
            pause = QUICK if moved or came else min(2 * pause, SLOW)
            if not (moved or came) and (self._flights or any(queues.values())):
                time.sleep(pause)
        self._check_quorum()

    # Sending

    def _next(self, host: int, queue: deque[Step], turns: Mapping[Hashable, deque[Step]]) -> bool:
        """Send the next steps of a host, or end them if it is absent; return whether anything happened."""
        line = self.lines[host]
        if line.away:
            self._knock(host)
        if line.lost_at is not None and not self._is_back(host):
            return False
        ready = []
        for step in queue:
            if len(ready) >= (MOST if self.rules.together else 1):
                break
            if step.model is not None and turns[step.model][0] is not step:
                break
            ready.append(step)
        if not ready:
            return False
        if line.away:
            for step in ready:
                queue.popleft()
                self._end(step, Absent(line.away), turns)
            return True
        for _ in ready:
            queue.popleft()
        self._send(host, ready)
        return True

    def _send(self, host: int, steps: list[Step]) -> None:
        line, rules = self.lines[host], self.rules
        jobs = [step.make() for step in steps]
        tensors: Params = {}
        plain = [packet.taken_apart(job.params, tensors) for job in jobs]
        carried = {name: x for name, x in tensors.items() if not (rules.lean and name in line.known)}
        self._number += 1
        table = {
            "kind": "tasks",
            "server": self._server,
            "number": self._number,
            "setup_id": self.setup["id"],
            "tasks": [{**job.table, "params": one} for job, one in zip(jobs, plain, strict=True)],
        }
        if not line.has_setup:
            table["setup"] = self.setup
        content = packet.write(table, carried)
        line.tries += 1
        dispatch = self.post.push(line.node, content, ttl=rules.deadline + rules.patience)
        flight = Flight(host, steps, jobs, plain, tensors, time.monotonic(), len(content))
        for job in jobs:
            self._event("sent", host, job.label)
        if dispatch is None:
            self._flights[f"unsent {self._number}"] = flight
            self._fail(f"unsent {self._number}", "it could not be reached")
            return
        line.known.put(tensors)
        self._flights[dispatch] = flight

    # Taking in

    def _take_in(self, queues: dict[int, deque[Step]], turns: Mapping[Hashable, deque[Step]]) -> bool:
        """Take in answers, and see to those that are late; return whether any came."""
        pings = {line.ping[0]: host for host, line in enumerate(self.lines) if line.ping}
        wanted = [*(name for name in self._flights if not name.startswith("unsent")), *pings]
        answers = self.post.pull(wanted) if wanted else {}
        for dispatch, answer in answers.items():
            if dispatch in pings:
                self._pong(pings[dispatch], answer)
            elif dispatch in self._flights:
                self._answer(dispatch, answer, turns)
        now = time.monotonic()
        for dispatch, flight in list(self._flights.items()):
            line, waited = self.lines[flight.host], now - flight.sent
            if waited > self.rules.deadline:
                line.tries = self.rules.tries  # who was too slow once is not waited for again
                self._fail(dispatch, f"no answer within {self.rules.deadline:g} s")
            elif waited > PING and line.ping is None:
                self._ping(flight.host)
        for flight in self._failed:
            queues.setdefault(flight.host, deque()).extendleft(reversed(flight.steps))
        came = bool(answers) or bool(self._failed)
        self._failed.clear()
        return came

    def _answer(self, dispatch: str, answer: bytes | Lost, turns: Mapping[Hashable, deque[Step]]) -> None:
        flight = self._flights[dispatch]
        line = self.lines[flight.host]
        if isinstance(answer, Lost):
            line.lost_at = time.monotonic()
            return self._fail(dispatch, f"it was lost ({answer})")
        try:
            table, tensors = packet.read(answer, self.rules.largest)
        except BadPacket as error:
            return self._fail(dispatch, f"it sent {error}")
        self._meet(flight.host, table)
        match table:
            case {"kind": "need", "setup": bool(setup), "missing": list(missing)}:
                line.has_setup = line.has_setup and not setup
                if missing:
                    line.known.clear()
                line.needs += 1
                if line.needs > self.rules.tries:
                    return self._fail(dispatch, "it keeps asking for what it was sent")
                line.tries -= 1  # an honest question is no failure
                self._fail(dispatch, "")
            case {"kind": "refused", "reason": str(reason)}:
                self._fail(dispatch, f"it refused: {reason}")
            case {"kind": "answer", "outcomes": list(outcomes)}:
                line.has_setup = True
                values, wrong = self._values(flight, outcomes, tensors)
                if wrong:
                    return self._fail(dispatch, wrong)
                del self._flights[dispatch]
                line.tries, line.needs, line.lost_at = 0, 0, None
                line.known.put(tensors)
                if table.get("stateless"):
                    line.has_setup = False
                    line.known.clear()
                self._count(flight, outcomes, len(answer))
                for step, job, value in zip(flight.steps, flight.jobs, values, strict=True):
                    self._event("done", flight.host, job.label)
                    self._end(step, value, turns)
            case _:
                self._fail(dispatch, "it sent a packet of an unknown kind")

    def _values(self, flight: Flight, outcomes: list[Any], tensors: Params) -> tuple[list[Any], str]:
        """The answers of a node to the jobs of a packet, and what is wrong with them; empty if nothing is."""
        if len(outcomes) != len(flight.jobs):
            return [], f"it sent {len(outcomes)} answers to {len(flight.jobs)} tasks"
        values = []
        for job, outcome in zip(flight.jobs, outcomes, strict=True):
            match outcome:
                case {"error": str(reason)}:
                    return [], f"it failed: {reason}"
                case {"value": plain, "seconds": float() | int()}:
                    pass
                case _:
                    return [], "it sent an answer without a value"
            # What did not change is not sent back: it is among the tensors that the node was handed.
            held = {**flight.tensors, **tensors}
            if not digests_of(plain) <= held.keys():
                return [], "it refers to tensors that it did not send"
            try:
                value = packet.put_together(plain, held)
            except (BadPacket, LookupError, TypeError) as error:
                return [], f"it sent {error}"
            wrong = job.fault(value)
            if wrong:
                return [], f"it sent {wrong}"
            values.append(value)
        return values, ""

    def _fail(self, dispatch: str, reason: str) -> None:
        """Take a packet back: its steps are sent again, or end if its host has been tried often enough."""
        flight = self._flights.pop(dispatch)
        line = self.lines[flight.host]
        if reason:
            label = flight.jobs[0].label
            self._event("failed", flight.host, f"{label}: {reason}")
            log.warning("%s: %s (try %d of %d)", label, reason, line.tries, self.rules.tries)
            line.known.clear()
        if line.tries >= self.rules.tries:
            self._leave(flight.host, reason)
        self._failed.append(flight)

    def _end(self, step: Step, value: Any, turns: Mapping[Hashable, deque[Step]]) -> None:
        if step.model is not None:
            turns[step.model].popleft()
        step.done(value)

    def _count(self, flight: Flight, outcomes: Sequence[Mapping[str, Any]], size: int) -> None:
        share, waited = 1 / len(flight.jobs), time.monotonic() - flight.sent
        for k, (job, outcome) in enumerate(zip(flight.jobs, outcomes, strict=True)):
            cost = self.costs.setdefault(job.kind, Cost())
            cost.jobs += 1
            cost.packets += k == 0
            cost.seconds += waited * share
            cost.node_seconds += outcome["seconds"]
            cost.bytes_down += round(flight.size * share)
            cost.bytes_up += round(size * share)
            cost.model_bytes += sum(x.nbytes for x in job.params.values())

    # Who is there

    def _meet(self, host: int, table: Mapping[str, Any]) -> None:
        """Note the session of a node. A new one knows nothing of what was sent before."""
        if table.get("stateless"):
            return
        line, session = self.lines[host], str(table.get("session", ""))
        if session != line.session:
            if line.session:
                self._event("restarted", host, "")
            line.session, line.has_setup = session, False
            line.known.clear()

    def _leave(self, host: int, reason: str) -> None:
        line = self.lines[host]
        line.away, line.lost_at = reason or "it does not answer", None
        self._event("absent", host, line.away)
        self._check_quorum()

    def _is_back(self, host: int) -> bool:
        """Whether a node that was lost is online again, or counts as absent now."""
        line = self.lines[host]
        if line.node in self.online():
            line.lost_at = None
            return True
        if time.monotonic() - line.lost_at > self.rules.patience:
            self._leave(host, f"it was lost and did not come back within {self.rules.patience:g} s")
            return True
        return False

    def online(self) -> set[int]:
        """The nodes that are connected, as of a moment ago."""
        now = time.monotonic()
        if now - self._looked >= LOOK:
            self._online, self._looked = self.post.online(), now
        return self._online

    def _knock(self, host: int) -> None:
        """Ask an absent node whether it is there again."""
        line = self.lines[host]
        if line.node == NOBODY:
            self._look_for_newcomers()
        elif line.ping is None and line.node in self.online():
            self._ping(host)

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
            try:
                host = None if isinstance(answer, Lost) else self.newcomer(node, packet.read(answer)[0])
            except ValueError as error:  # a packet that is damaged, or an introduction that is none
                log.warning("node %d cannot take part: %s", node, error)
                host = None
            if host is None:
                self._strange.add(node)
            else:
                self.lines[host] = Line(node)
                self._event("back", host, "it came late")

    def _ping(self, host: int) -> None:
        dispatch = self.post.push(self.lines[host].node, packet.write({"kind": "ping"}), ttl=self.rules.deadline)
        if dispatch is not None:
            self.lines[host].ping = (dispatch, time.monotonic())

    def _pong(self, host: int, answer: bytes | Lost) -> None:
        line = self.lines[host]
        line.ping = None
        if isinstance(answer, Lost):
            return
        try:
            table, _ = packet.read(answer, self.rules.largest)
        except BadPacket:
            return
        before = line.session
        self._meet(host, table)
        if line.away:
            line.away, line.tries, line.needs, line.lost_at = "", 0, 0, None
            self._event("back", host, "")
        elif before != line.session:
            # It was restarted: the packet that it was handed before is lost, and nobody will tell.
            for dispatch, flight in list(self._flights.items()):
                if flight.host == host:
                    self._fail(dispatch, "it was restarted")

    def _check_quorum(self) -> None:
        present = len(self.lines) - len(self.absent)
        if present < self.rules.quorum:
            reasons = "; ".join(f"client {host}: {reason}" for host, reason in self.absent.items())
            raise RuntimeError(
                f"{present} of {len(self.lines)} nodes are there and the quorum is {self.rules.quorum} ({reasons}); "
                "bring some back and go on with --resume"
            )
