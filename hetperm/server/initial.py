"""A new model for somebody who trains alone."""

import torch

from hetperm.params import Params
from hetperm.randomness import seed_for
from hetperm.server.slicer import Slicer
from submodels import WHOLE


def fresh_model(slicer: Slicer, width: float, start: Params, *, seed: int) -> Params:
    """A new model of a width: ``start`` itself if that is all of it.

    Layers that can be reset draw weights that suit their own size, as those of a wide layer are too small for a narrow
    one; what cannot be reset is cut out of ``start``.
    """
    index = slicer.index(width)
    if index is WHOLE:
        return start
    scalable = slicer.scalable
    module = scalable.cut(index).module
    # The module of the scalable model holds whatever was trained in it last: begin with the start instead.
    module.load_state_dict(slicer.cut(start, index), strict=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "fresh", *scalable.axis_map.counts(width)))
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
