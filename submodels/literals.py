"""Numbers typed into a view: ``x.view(-1, 7 * 7 * 64)``.

The number cannot be changed in the code of a forward, but it can be when the forward runs: a sub-model carries hooks
that put the size of its own axis in place of the number in every ``view`` and ``reshape`` to two dimensions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

VIEW = "view(-1, literal)"  # takes the place of an attribute's name: the number is stored in the code
_VIEWS = (torch.Tensor.view, torch.Tensor.reshape, torch.reshape)


def sizes_of(args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """The sizes a call was given, one by one or as a tuple."""
    if not args:
        args = (kwargs.get("shape", kwargs.get("size", ())),)
    return tuple(args[0] if isinstance(args[0], tuple | list) else args)


def literal_of(sizes: Sequence[Any]) -> int | None:
    """The number in ``view(-1, number)``, or None if the sizes are others."""
    return sizes[1] if len(sizes) == 2 and type(sizes[1]) is int and sizes[1] > 1 else None


class _Views(TorchFunctionMode):
    """Puts other numbers in place of those in views to two dimensions."""

    def __init__(self, numbers: Mapping[int, int]):
        super().__init__()
        self.numbers = numbers

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _VIEWS:
            sizes = sizes_of(args[1:], kwargs)
            if literal_of(sizes) in self.numbers:
                x = args[0] if args else kwargs["input"]
                return x.reshape(sizes[0], self.numbers[sizes[1]])
        return func(*args, **kwargs)


class ViewHooks:
    """Hooks of a sub-model that replace the numbers in its views; they can be copied and pickled with it.

    Args:
        numbers: number in the code -> number in this sub-model.
    """

    def __init__(self, numbers: Mapping[int, int]):
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
