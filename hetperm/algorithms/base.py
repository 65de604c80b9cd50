"""Algorithm: three functions that begin, continue and end the training of a method."""

from collections.abc import Callable
from typing import NamedTuple

from hetperm.state import State


class Algorithm(NamedTuple):
    """The three functions of a method.

    Attributes:
        begin: returns the state before the first epoch, after the warm-up.
        epoch: takes a state and returns the state after one more epoch.
        finish: takes the state after the last epoch and returns the one to deploy; None if they are the same.
    """

    begin: Callable[[], State]
    epoch: Callable[[State], State]
    finish: Callable[[State], State] | None = None
