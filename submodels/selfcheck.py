"""Self-check of a traced map: run cut models on the meta device and freeze the groups whose cut does not run."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from submodels.axismap import AxisMap
from submodels.calls import Examples
from submodels.recurrence import TwoSteps
from submodels.skeleton import holds_weights, named_tensors, on_meta
from submodels.states import cut_call
from submodels.template import Template

# One channel a group, and half of them: a single channel broadcasts and so hides mistakes that half of them shows.
_WIDTHS = (1e-6, 0.5)


@torch.random.fork_rng(devices=[])
def runnable(model: nn.Module, axis_map: AxisMap, examples: Examples) -> AxisMap:
    """The map with every group frozen whose cut does not run, with a note for each; an error if nothing can be cut."""
    check = _Check(model, examples)
    while axis_map.groups and (failure := check.failure(axis_map)):
        axis_map = axis_map.frozen(*_remedy(axis_map, failure, check))
    axis_map = axis_map.settled()
    if not axis_map.groups:
        reasons = sorted(set(axis_map.frozen_by.values()) - {"size 1", "kernel", "spatial", "model input"})
        raise ValueError(
            f"nothing in {type(model).__name__} can be cut: every axis is kept whole "
            f"({'; '.join(reasons) or 'no weights'}); replace literal sizes in its forward by sizes read from tensors "
            f"or attributes, or state its axes with declare="
        )
    return axis_map


@dataclass(frozen=True)
class _Failure:
    path: str  # the innermost module that was running
    message: str


def _remedy(axis_map: AxisMap, failure: _Failure, check: "_Check") -> tuple[set[int], str]:
    """The groups to freeze: one of those around the failing module if that mends it, else all of them."""
    why = f"cut does not run in {failure.path or 'the model'}: {failure.message}"
    groups = _groups_near(axis_map, failure.path)
    # One group is tried at a time: freezing all that are near would keep more whole than the failure needs.
    moved = None
    for group in sorted(groups):
        after = check.failure(axis_map.frozen({group}, why))
        if after is None:
            return {group}, why
        if moved is None and after.path != failure.path:
            moved = {group}  # this failure is gone and another shows: progress, unless a later group mends all
    return moved or groups, why


def _groups_near(axis_map: AxisMap, path: str) -> set[int]:
    """Groups of the tensors and integers of a module, or of the nearest parent that has any."""
    while True:
        prefix = f"{path}." if path else ""
        groups = {g for name, row in axis_map.dims.items() if name.startswith(prefix) for t in row for g in t.groups()}
        groups |= {
            g
            for source, term in axis_map.attributes.items()
            if f"{source[0]}.".startswith(prefix)
            for g in term.groups()
        }
        if groups or not path:
            return groups
        path = path.rpartition(".")[0]


class _Check:
    """Runs cut models on their example inputs, on the meta device if the model itself runs there."""

    def __init__(self, model: nn.Module, examples: Examples):
        self.model, self.examples = model, examples
        self.device = "meta"
        whole = on_meta(model)
        try:
            self.expected = {False: self._shapes(whole.eval())}
        except Exception:  # the trace succeeded, so it must run on real tensors
            self.device = "cpu"
            whole = _random(model)
            self.expected = {False: self._shapes(whole.eval())}
        try:
            self.expected[True] = self._shapes(whole.train())
        except Exception:  # a model that cannot train on this example (a batch of one) is checked in evaluation only
            self.expected.pop(True, None)

    def failure(self, axis_map: AxisMap) -> _Failure | None:
        """What went wrong at the first width that does not run, or None."""
        for width in _WIDTHS:
            counts = axis_map.counts(width)
            module = Template.of(self.model, axis_map, counts).module
            module = on_meta(module) if self.device == "meta" else _random(module)
            running = _watch(module)
            for training, expected in self.expected.items():
                running.clear()
                try:
                    got = self._shapes(module.train(training), axis_map, counts)
                except Exception as error:
                    first = str(error).splitlines()[0][:160] if str(error) else ""
                    return _Failure(running[-1] if running else "", f"{type(error).__name__}: {first}")
                if got != expected:
                    return _Failure("", f"the output has shapes {got} instead of {expected}")
        return None

    @torch.no_grad()
    def _shapes(
        self, module: nn.Module, axis_map: AxisMap | None = None, counts: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        """Shapes of what the module returns and must stay whole; states are cut as the map says."""
        shapes = []
        for number, call in enumerate(self.examples.on(self.device)):
            if axis_map is not None and axis_map.states:
                kept = [torch.arange(n) for n in counts]
                call = cut_call(call, number, axis_map.states, kept, axis_map.sizes)
            with torch.device(self.device), TwoSteps():
                out = module(*call.args, **call.kwargs)
            shapes += [tuple(x.shape) for x in self.examples.whole(out)]
        return shapes


def _random(module: nn.Module) -> nn.Module:
    tensors = {
        name: torch.randn(x.shape, dtype=x.dtype) * 0.1 if holds_weights(x) else torch.zeros(x.shape, dtype=x.dtype)
        for name, x in named_tensors(module)
    }
    return Template(module).filled(tensors)


def _watch(module: nn.Module) -> list[str]:
    """A list that holds, while the module runs, the path of modules being run; an exception leaves it standing."""
    running: list[str] = []

    def leave(_module, _args, _out):
        running.pop()

    for path, part in module.named_modules():
        part.register_forward_pre_hook(lambda _module, _args, path=path: running.append(path))
        part.register_forward_hook(leave)
    return running
