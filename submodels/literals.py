"""Numbers typed into a view: ``x.view(-1, 7 * 7 * 64)``, ``x.view(-1, 32, 4, 4)``.

The number cannot be changed in the code of a forward, but it can be when the forward runs: a sub-model carries hooks
that put the size of its own axis in place of the number. A number is known by the dimensions of the view, its position
there and its value, so all views that agree in these must mean axes that shrink alike.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

VIEW = "view(-1, literal)"  # takes the place of an attribute's name: the number is stored in the code
Place = tuple[int, int, int]  # (dimensions of the view, position of the number, the number)
_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


def sizes_of(args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """The sizes a call was given, one by one or as a tuple."""
    if not args:
        args = (kwargs.get("shape", kwargs.get("size", ())),)
    return tuple(args[0] if isinstance(args[0], tuple | list) else args)


def literals_of(sizes: Sequence[Any]) -> list[Place]:
    """The numbers above one that are typed into a view to these sizes.

    Example:
        >>> literals_of((-1, 32, 4, 1))
        [(4, 1, 32), (4, 2, 4)]
    """
    return [(len(sizes), i, size) for i, size in enumerate(sizes) if type(size) is int and size > 1]


class _Views(TorchFunctionMode):
    """Puts other numbers in place of those typed into views."""

    def __init__(self, numbers: Mapping[Place, int]):
        super().__init__()
        self.numbers = numbers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _VIEWS:
            sizes = sizes_of(args[1:], kwargs)
            replaced = tuple([self.numbers.get((len(sizes), i, size), size) for i, size in enumerate(sizes)])
            if replaced != sizes:
                x = args[0] if args else kwargs["input"]
                return x.reshape(replaced)
        return func(*args, **kwargs)


class ViewHooks:
    """Hooks of a sub-model that replace the numbers in its views; they can be copied and pickled with it.

    Args:
        numbers: number in the code, with its place -> number in this sub-model.
    """

    def __init__(self, numbers: Mapping[Place, int]):
        self.numbers = dict(numbers)
        self._running: list[_Views] = []

    def install(self, module: nn.Module) -> None:
        """Have the numbers replaced whenever the module runs."""
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, _module: nn.Module, _args: tuple) -> None:
        """Begin to replace."""
        self._running.append(_Views(self.numbers))
        self._running[-1].__enter__()

    def leave(self, _module: nn.Module, _args: tuple, _out: Any) -> None:
        """Stop replacing."""
        if self._running:
            self._running.pop().__exit__(None, None, None)
