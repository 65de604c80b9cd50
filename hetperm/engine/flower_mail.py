"""Mail: steps sent to nodes as packets and their answers taken in, whoever is slow, away or lying.

Steps of one model, and steps at one host, are taken in the order in which they are given. Nothing else waits for
anything: there is no barrier between rounds. Steps of a host that are ready together travel in one packet.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hetperm.device import packet
from hetperm.device.packet import BadPacket
from hetperm.engine import flower_roster
from hetperm.engine.flower_jobs import Cost, Flight, Step, add_costs, packed, values_of
from hetperm.engine.flower_post import Lost, OnEvent, Post, Rules
from hetperm.engine.flower_roster import Roster
from hetperm.engine.task import Absent

log = logging.getLogger(__name__)

QUICK, SLOW = 0.02, 0.25  # seconds between two looks for answers, at least and at most
PART = 0.1  # of the time since the last answer is the time until the next look
MOST = 16  # steps in a packet


class Mail:
    """Sends steps to nodes and takes in their answers.

    Args:
        nodes: (N,) the node of every client.
        setup: the table from which a node builds the model; sent to every session once.
        on_event: told of everything that a user should see.

    Attributes:
        roster: who is there.
        costs: kind of a job -> what jobs of that kind cost so far.
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
        self._event = on_event or (lambda what, host, detail: None)
        self.roster = Roster(post, nodes, self.rules, self._event)
        self.costs: dict[str, Cost] = {}
        self._number = 0
        self._flights: dict[str, Flight] = {}
        self._failed: list[Flight] = []  # packets whose steps go back to their queues
        self._server = secrets.token_hex(8)  # with the number of a packet, so that nodes notice one that is replayed

    def deliver(self, steps: Sequence[Step]) -> None:
        """Carry out steps: each ends with its answer or, if its host is absent, with an `Absent`."""
        queues: dict[int, deque[Step]] = {}
        turns: dict[Hashable, deque[Step]] = {}
        for step in steps:
            queues.setdefault(step.host, deque()).append(step)
            if step.model is not None:
                turns.setdefault(step.model, deque()).append(step)
        self.roster.check_quorum()
        last = time.monotonic()
        while any(queues.values()) or self._flights:
            busy = {flight.host for flight in self._flights.values()}
            moved = False
            for host, queue in queues.items():
                if queue and host not in busy:
                    moved |= self._next(host, queue, turns)
            came = self._take_in(queues, turns)
            if moved or came:
                last = time.monotonic()
            else:
                time.sleep(min(max(QUICK, PART * (time.monotonic() - last)), SLOW))
        self.roster.check_quorum()

    # Sending

    def _next(self, host: int, queue: deque[Step], turns: Mapping[Hashable, deque[Step]]) -> bool:
        """Send the next steps of a host, or end them if it is absent; return whether anything happened."""
        if self.roster.lines[host].away:
            self.roster.knock(host)
        line = self.roster.lines[host]  # another one if it has come late
        if line.lost_at is not None and not self.roster.is_back(host):
            return False
        ready = []
        for step in queue:
            if len(ready) >= (MOST if self.rules.together else 1):
                break
            if step.model is not None and turns[step.model][0] is not step:
                break
            ready.append(step)
        for _ in ready:
            queue.popleft()
        if line.away:
            for step in ready:
                self._end(step, Absent(line.away), turns)
        elif ready:
            self._send(host, ready)
        return bool(ready)

    def _send(self, host: int, steps: Sequence[Step]) -> None:
        line, rules = self.roster.lines[host], self.rules
        flight = packed(host, steps)
        carried = {name: x for name, x in flight.tensors.items() if not (rules.lean and name in line.known)}
        self._number += 1
        table = {
            "kind": "tasks",
            "server": self._server,
            "number": self._number,
            "setup_id": self.setup["id"],
            "tasks": flight.tables,
        }
        if not line.has_setup:
            table["setup"] = self.setup
        content = packet.write(table, carried)
        flight.sent, flight.size = time.monotonic(), len(content)
        line.tries += 1
        dispatch = self.post.push(line.node, content, ttl=rules.deadline + rules.patience)
        for job in flight.jobs:
            self._event("sent", host, job.label)
        if dispatch is None:
            return self._fail(flight, "it could not be reached")
        line.known.put(flight.tensors)
        self._flights[dispatch] = flight

    # Taking in

    def _take_in(self, queues: dict[int, deque[Step]], turns: Mapping[Hashable, deque[Step]]) -> bool:
        """Take in answers, and see to those that are late; return whether any came."""
        pings = self.roster.pings
        wanted = [*self._flights, *pings]
        answers = self.post.pull(wanted) if wanted else {}
        for dispatch, answer in answers.items():
            if dispatch in pings:
                host = pings[dispatch]
                if isinstance(answer, Lost) and any([flight.host == host for flight in self._flights.values()]):
                    # Of an answer that was cut off in the middle nobody else tells that it does not come any more.
                    self.roster.lose(host)
                    self._fail_all(host, f"it was lost ({answer})")
                if self.roster.pong(host, answer):
                    # The packet that it was handed before it was restarted is lost, and nobody will tell.
                    self._fail_all(host, "it was restarted")
            elif dispatch in self._flights:
                self._answer(self._flights.pop(dispatch), answer, turns)
        self._look_after_the_late()
        for flight in self._failed:
            queues.setdefault(flight.host, deque()).extendleft(reversed(flight.steps))
        came = bool(answers) or bool(self._failed)
        self._failed.clear()
        return came

    def _look_after_the_late(self) -> None:
        """Give up packets that are past the deadline, and ask who has been silent for long."""
        now, deadline = time.monotonic(), self.rules.deadline
        for flight in list(self._flights.values()):
            line, waited = self.roster.lines[flight.host], now - flight.sent
            if waited > deadline:
                line.tries = self.rules.tries  # who was too slow once is not waited for again
                self._fail_all(flight.host, f"no answer within {deadline:g} s")
            elif waited > flower_roster.PING:
                self.roster.ping(flight.host)

    def _answer(self, flight: Flight, answer: bytes | Lost, turns: Mapping[Hashable, deque[Step]]) -> None:
        line = self.roster.lines[flight.host]
        if isinstance(answer, Lost):
            self.roster.lose(flight.host)
            return self._fail(flight, f"it was lost ({answer})")
        try:
            table, tensors = packet.read(answer, self.rules.largest)
        except BadPacket as error:
            return self._fail(flight, f"it sent {error}")
        self.roster.meet(flight.host, table)
        match table:
            case {"kind": "need", "setup": bool(setup), "missing": list(missing)}:
                line.has_setup = line.has_setup and not setup
                if missing:
                    line.known.clear()
                line.needs += 1
                if line.needs > self.rules.tries:
                    return self._fail(flight, "it keeps asking for what it was sent")
                line.tries -= 1  # an honest question is no failure
                self._failed.append(flight)
            case {"kind": "refused", "reason": str(reason)}:
                self._fail(flight, f"it refused: {reason}")
            case {"kind": "answer", "outcomes": list(outcomes)}:
                line.has_setup = not table.get("stateless")
                values, wrong = values_of(flight, outcomes, tensors)
                if wrong:
                    return self._fail(flight, wrong)
                line.settled()
                line.known.put(tensors)
                if table.get("stateless"):
                    line.known.clear()
                add_costs(self.costs, flight, outcomes, len(answer))
                for step, job, value in zip(flight.steps, flight.jobs, values, strict=True):
                    self._event("done", flight.host, job.label)
                    self._end(step, value, turns)
            case _:
                self._fail(flight, "it sent a packet of an unknown kind")

    def _end(self, step: Step, value: Any, turns: Mapping[Hashable, deque[Step]]) -> None:
        if step.model is not None:
            turns[step.model].popleft()
        step.done(value)

    def _fail(self, flight: Flight, reason: str) -> None:
        """Take a packet back: its steps are sent again, or end if its host has been tried often enough."""
        line, label = self.roster.lines[flight.host], flight.jobs[0].label
        self._event("failed", flight.host, f"{label}: {reason}")
        log.warning("%s: %s (try %d of %d)", label, reason, line.tries, self.rules.tries)
        line.known.clear()
        self._failed.append(flight)
        if line.tries >= self.rules.tries:
            self.roster.leave(flight.host, reason)

    def _fail_all(self, host: int, reason: str) -> None:
        """Take back every packet that is on its way to a host."""
        for dispatch, flight in list(self._flights.items()):
            if flight.host == host:
                self._fail(self._flights.pop(dispatch), reason)
