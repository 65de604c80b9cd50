"""A plain model that several runs of a test process have is traced and priced once, as far as runs are concerned.

Tracing and pricing take half of the time of a tiny run, and tests of submodels look at them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

from hetperm.runs import building
from submodels import ScalableModel, scalable


def is_plain(model: nn.Module) -> bool:
    """Whether what a model computes can be read from how it is shown: it has no code but torch's own."""
    return all(type(part).__module__.startswith("torch.nn.modules.") for part in model.modules())


@contextmanager
def traced_once() -> Iterator[None]:
    """A context in which runs share the maps and the costs of equal models."""
    known = {}

    def traced(model: nn.Module, inputs, outputs=None) -> ScalableModel:
        if not (is_plain(model) and isinstance(inputs, Tensor) and outputs is None):
            return ScalableModel(model, inputs, outputs=outputs)
        tensors = [
            (name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in model.state_dict(keep_vars=True).items()
        ]
        key = (repr(model), model.training, repr(tensors), inputs.shape, inputs.dtype)
        if key not in known:
            known[key] = ScalableModel(model, inputs)
            return known[key]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scalable, "AxisMap", SimpleNamespace(of=lambda *_: known[key].axis_map))
            patch.setattr(scalable, "runnable", lambda model, axis_map, examples: axis_map)
            fresh = ScalableModel(model, inputs)
        fresh._costs = known[key]._costs
        return fresh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "ScalableModel", traced)
        yield
