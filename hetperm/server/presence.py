"""Presence: who is there in which round. Every phase of every method asks here (`Federation.run`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetperm.client import Client
from hetperm.randomness import generator_for


@dataclass(frozen=True)
class Presence:
    """Who is there: each client with a probability, or as a trace says.

    Attributes:
        participation: the probability that a client is there in a round.
        trace: a text for each client, "1" in the rounds in which it is there and "0" in the others; empty if there is
            no trace. The client with key k has text k; texts and rounds begin again after the last.
    """

    participation: float = 1.0
    trace: tuple[str, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether everybody is always there."""
        return self.participation >= 1 and not self.trace


EVERYBODY = Presence()  # always


def absentees(clients: Sequence[Client], presence: Presence) -> list[int]:
    """The clients who are never there, going by the trace.

    Example:
        >>> clients = [Client(train=(torch.zeros(1, 2), torch.zeros(1)), key=key) for key in range(4)]
        >>> absentees(clients, Presence(trace=("10", "00"))), absentees(clients, Presence())
        ([1, 3], [])
    """
    texts = presence.trace or ("1",)
    return [i for i, client in enumerate(clients) if "1" not in texts[client.key % len(texts)]]


def present(clients: Sequence[Client], presence: Presence, *, seed: int, round: int) -> list[bool]:
    """Whether each client is there in a round. It goes by the client's key, so relabelling relabels the answer.

    Example:
        >>> clients = [Client(train=(torch.zeros(1, 2), torch.zeros(1)), key=key) for key in range(2)]
        >>> [present(clients, Presence(trace=("10", "01")), seed=0, round=round) for round in range(3)]
        [[True, False], [False, True], [True, False]]
    """
    if presence.trace:
        texts = [presence.trace[client.key % len(presence.trace)] for client in clients]
        return [text[round % len(text)] == "1" for text in texts]
    if presence.is_certain:
        return [True] * len(clients)
    draws = [torch.rand((), generator=generator_for(seed, "present", round, client.key)) for client in clients]
    return [bool(draw < presence.participation) for draw in draws]
