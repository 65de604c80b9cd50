"""Example calls of a model, as people have them, and what of its answers is kept whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from submodels.skeleton import named_tensors, on_meta, rebuild, tensors_in
from submodels.texts import shown


class NothingKept(ValueError):
    """A model answered with nothing that could be kept whole."""


class Call(NamedTuple):
    """The arguments of one forward."""

    args: tuple = ()
    kwargs: Mapping[str, Any] = {}

    def to(self, device: str) -> "Call":
        """The same call with its tensors on a device."""
        return Call(*tree_map(lambda x: x.detach().to(device) if isinstance(x, Tensor) else x, tuple(self)))

    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        found: list[Tensor] = []
        tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tuple(self))
        return found


@dataclass(frozen=True)
class Examples:
    """Calls that together run every part of a model.

    Attributes:
        calls: at least one.
        outputs: from what the model returns to what is kept whole of it; None keeps all of it.
    """

    calls: tuple[Call, ...]
    outputs: Callable[[Any], Any] | None = None

    def whole(self, out: Any) -> list[Tensor]:
        """The tensors among a model's answer that must stay as they are at every width; it has some."""
        kept = out if self.outputs is None else self.outputs(out)
        found = list(tensors_in(kept))
        if not found:
            which, remedy = "the model returns", "say with outputs= where it is, such as outputs=lambda out: out.logits"
            if self.outputs is not None:
                which, remedy = "outputs= gives", "it must give a tensor of the model's answer"
            raise NothingKept(f"{which} {shown(kept)}, which holds no tensor that could be kept whole; {remedy}")
        return found

    def rest(self, out: Any) -> list[Tensor]:
        """The other tensors it returned: states, caches."""
        whole = {id(x) for x in self.whole(out)}
        return [x for x in tensors_in(out) if id(x) not in whole]

    def on(self, device: str) -> Iterator[Call]:
        """The calls, on a device."""
        return (call.to(device) for call in self.calls)


def examples_of(
    model: nn.Module,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    examples: Sequence[Any] | None = None,
    outputs: Callable[[Any], Any] | None = None,
) -> Examples:
    """The examples a user gave.

    Args:
        inputs: one example: a tensor, a tuple of arguments, a mapping of keyword arguments (a dict, a BatchEncoding),
            or a list, which is one argument (as detectors take it) unless the model takes its items.
        kwargs: keyword arguments of that example.
        examples: further ones, each given as ``inputs`` is, or as a pair (tuple of arguments, mapping).
    """
    calls = []
    if inputs is not None or kwargs is not None:
        call = _call(model, () if inputs is None else inputs)
        calls.append(Call(call.args, {**call.kwargs, **(kwargs or {})}))
    if not (examples is None or isinstance(examples, Sequence)) or isinstance(examples, str | bytes):
        raise TypeError(f"examples is {shown(examples)}; it must be a list of examples")
    calls += [_call(model, example) for example in examples or ()]
    if not calls:
        raise ValueError("a model cannot be traced without an example; give example_inputs, example_kwargs or examples")
    return Examples(tuple(calls), outputs)


def _call(model: nn.Module, example: Any) -> Call:
    if isinstance(example, Call):
        return example
    if isinstance(example, Mapping):
        return Call((), dict(example))
    if isinstance(example, tuple):
        if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], Mapping):
            return Call(example[0], dict(example[1]))
        return Call(example)
    if isinstance(example, list):
        apart = Call(tuple(example))
        return apart if _runs(model, apart) else Call((example,))
    return Call((example,))


def _runs(model: nn.Module, call: Call) -> bool:
    real = rebuild(model, {id(x): x.detach().clone() for _, x in named_tensors(model)})
    for copy, device in ((on_meta(model), "meta"), (real, "cpu")):
        args, kwargs = call.to(device)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device(device):
                copy.eval()(*args, **kwargs)
        except Exception:  # whatever a forward may raise on arguments that are not its own
            continue
        return True
    return False


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the model itself; what cannot be traced at all is refused."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{shown(model)} is not a model; give an nn.Module, such as torchvision.models.resnet18()")
    model = getattr(model, "_orig_mod", model)
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            what = f"{name!r} of {type(model).__name__}" if name else part.original_name
            raise TypeError(f"{what} was compiled by torch.jit, which hides its forward; give the module it came from")
    lazy = next((name for name, x in named_tensors(model) if nn.parameter.is_lazy(x)), None)
    if lazy is not None:
        raise ValueError(f"{lazy!r} of {type(model).__name__} has no size yet; run the model once before it is traced")
    return model
