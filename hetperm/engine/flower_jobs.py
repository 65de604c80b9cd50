"""Jobs for nodes: what is asked of them, the packets that carry it, what their answers hold, and what it costs."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetperm.device import packet
from hetperm.device.packet import BadPacket, digests_of
from hetperm.params import Params


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
class Flight:
    """A packet on its way: to whom, with what, since when.

    Attributes:
        tables: the jobs as plain values; their tensors are named by digests.
        tensors: by digest, those that the jobs refer to.
        size: bytes of the packet.
    """

    host: int
    steps: Sequence[Step]
    jobs: Sequence[Job]
    tables: Sequence[Mapping[str, Any]]
    tensors: Params
    sent: float = 0.0
    size: int = 0


def packed(host: int, steps: Sequence[Step]) -> Flight:
    """Steps of a host as a packet that is not sent yet."""
    jobs, tensors = [step.make() for step in steps], {}
    tables = [{**job.table, "params": packet.taken_apart(job.params, tensors)} for job in jobs]
    return Flight(host, steps, jobs, tables, tensors)


def values_of(flight: Flight, outcomes: Sequence[Any], tensors: Params) -> tuple[list[Any], str]:
    """The answers of a node to the jobs of a packet, and what is wrong with them; empty if nothing is."""
    if len(outcomes) != len(flight.jobs):
        return [], f"it sent {len(outcomes)} answers to {len(flight.jobs)} tasks"
    # What did not change is not sent back: it is among the tensors that the node was handed.
    held = {**flight.tensors, **tensors}
    values = []
    for job, outcome in zip(flight.jobs, outcomes, strict=True):
        match outcome:
            case {"error": str(reason)}:
                return [], f"it failed: {reason}"
            case {"value": plain, "seconds": float() | int()}:
                pass
            case _:
                return [], "it sent an answer without a value"
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


def add_costs(costs: dict[str, Cost], flight: Flight, outcomes: Sequence[Mapping[str, Any]], answer_size: int) -> None:
    """Add what a packet and its answer cost, in equal parts for its jobs."""
    share, waited = 1 / len(flight.jobs), time.monotonic() - flight.sent
    for k, (job, outcome) in enumerate(zip(flight.jobs, outcomes, strict=True)):
        cost = costs.setdefault(job.kind, Cost())
        cost.jobs += 1
        cost.packets += k == 0
        cost.seconds += waited * share
        cost.node_seconds += outcome["seconds"]
        cost.bytes_down += round(flight.size * share)
        cost.bytes_up += round(answer_size * share)
        cost.model_bytes += sum(x.nbytes for x in job.params.values())
