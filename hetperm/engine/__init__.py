"""Engines: how a list of tasks is run. All of them give the same numbers."""

from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Failure, Task, run_all

__all__ = ["Failure", "Sequential", "Task", "run_all"]
