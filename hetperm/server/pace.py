"""Pace: how local steps are taken in a run, and how far the run is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetperm.device.recipe import Recipe
from hetperm.engine.task import Task
from hetperm.state import State


class Pace:
    """Gives every update that trains its recipe, with the place in the run at which its task begins and ends.

    It counts mini-batch gradients, as `Work.client_steps` does, and goes on from those of a state (`from_state`): a
    resumed run takes the same step sizes.

    Args:
        recipe: how local steps are taken.
        total: mini-batch gradients of all clients together in the whole run.
    """

    def __init__(self, recipe: Recipe, total: float):
        self.recipe, self.total = recipe, total
        self.spent = 0.0

    def prepared(self, tasks: Sequence[Task], steps: float) -> list[Task]:
        """The tasks of a round with their recipe.

        Args:
            steps: mini-batch gradients of these tasks together.
        """
        begin, self.spent = self.spent, self.spent + steps
        recipe = self.recipe
        if recipe.changes_steps:
            recipe = replace(recipe, begin=min(1.0, begin / self.total), end=min(1.0, self.spent / self.total))
        return [
            replace(task, update=replace(task.update, recipe=recipe)) if hasattr(task.update, "recipe") else task
            for task in tasks
        ]

    def from_state(self, function: Callable[[State], State]) -> Callable[[State], State]:
        """The function of an epoch, or of the end, that counts from the steps of the state that it is given."""

        def counted(state: State) -> State:
            self.spent = state.work.client_steps
            return function(state)

        return counted
