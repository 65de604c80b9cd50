"""States: inputs that a model also returns, such as the hidden state of an LSTM, and that are cut along with it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from submodels.calls import Call, Examples
from submodels.terms import Term

StateName = tuple[int, int]  # (number of the example, number of the tensor among its arguments)
States = Mapping[StateName, tuple[Term, ...]]


def find_states(model: nn.Module, examples: Examples) -> dict[StateName, int]:
    """State -> its position among the tensors the model returns and that need not stay whole.

    A state has the shape of such a tensor. Without ``outputs`` everything returned stays whole and there are no states;
    the first input is data and is never taken for one.
    """
    if examples.outputs is None:
        return {}
    found: dict[StateName, int] = {}
    for number, call in enumerate(examples.calls):
        try:
            with torch.no_grad():
                rest = examples.rest(model.eval()(*call.args, **call.kwargs))
        except Exception:  # whatever a forward may raise; the traced run will say it
            continue
        free = list(range(len(rest)))
        for k, x in enumerate(call.tensors()):
            position = next((p for p in free if rest[p].shape == x.shape and rest[p].dtype == x.dtype), None)
            if k and x.is_floating_point() and position is not None:
                free.remove(position)
                found[number, k] = position
    return found


def cut_call(call: Call, number: int, states: States, kept: Sequence[Tensor], sizes: Sequence[int]) -> Call:
    """The call with its states cut to the kept channels."""

    def gather(x: Tensor, terms: Sequence[Term]) -> Tensor:
        for dim, term in enumerate(terms):
            x = x.index_select(dim, term.index(kept, sizes).to(x.device))
        return x

    return _changed(call, number, states, gather)


def mask_call(call: Call, number: int, states: States, kept: Sequence[Tensor], sizes: Sequence[int]) -> Call:
    """The call with its states set to zero outside the kept channels."""

    def mask(x: Tensor, terms: Sequence[Term]) -> Tensor:
        for dim, term in enumerate(terms):
            line = torch.zeros(x.shape[dim], dtype=x.dtype)
            line[term.index(kept, sizes)] = 1
            x = x * line.reshape([-1 if i == dim else 1 for i in range(x.dim())])
        return x

    return _changed(call, number, states, mask)


def _changed(call: Call, number: int, states: States, change: Any) -> Call:
    count = iter(range(len(call.tensors())))

    def visit(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        terms = states.get((number, next(count)))
        return x if terms is None else change(x, terms)

    return Call(*tree_map(visit, tuple(call)))
