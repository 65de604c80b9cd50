"""What an algorithm is: how to begin, how to go on, how to end."""

from collections.abc import Callable
from typing import NamedTuple

from hetperm.state import State


class Algorithm(NamedTuple):
    """``begin() -> State`` (warm-up included), ``epoch(State) -> State``, ``finish(State) -> State``."""

    begin: Callable[[], State]
    epoch: Callable[[State], State]
    finish: Callable[[State], State]
