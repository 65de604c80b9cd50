"""What an algorithm is: how to begin, how to go on, how to end."""

from collections.abc import Callable
from typing import NamedTuple

from hetperm.state import State


class Algorithm(NamedTuple):
    """What a method does with a federation.

    Attributes:
        begin: the first state, warm-up included.
        epoch: the state after one more epoch.
        finish: the state that would be deployed, from that after the last epoch; None if nothing is done then.
    """

    begin: Callable[[], State]
    epoch: Callable[[State], State]
    finish: Callable[[State], State] | None = None
