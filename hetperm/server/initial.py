"""Where training begins: a new model for a client that trains alone, and a global model whose parts are new models."""

from collections.abc import Iterable

import torch

from hetperm.params import Params
from hetperm.randomness import seed_for
from hetperm.server.slicer import Slicer
from submodels import WHOLE


def fresh_model(slicer: Slicer, width: float, start: Params, *, seed: int) -> Params:
    """A new model of a width; ``start`` itself if the width cuts nothing.

    Layers that can be reset draw new weights for their own size, because the weights of a wide layer are too small for
    a narrow one. What cannot be reset is cut out of ``start``.
    """
    index = slicer.index(width)
    if index is WHOLE:
        return start
    scalable = slicer.scalable
    module = scalable.cut(index).module
    # The scalable model holds the weights that were trained in it last; these must not leak into a new model.
    module.load_state_dict(slicer.cut(start, index), strict=False)
    with torch.random.fork_rng(devices=[]):
        # By channel counts, not by client: all clients of one size start from the same model.
        torch.manual_seed(seed_for(seed, "fresh", *scalable.axis_map.counts(width)))
        for layer in module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def nested_start(slicer: Slicer, widths: Iterable[float], start: Params, *, seed: int) -> Params:
    """A global model in which the static part of every width is a new model of that width, narrow over wide.

    Slices of a wide model are too small: a layer draws its weights for the number of its inputs. Here every client
    begins with weights of the size that its own width calls for, and what only wider clients hold stays as it was.
    """
    w = start
    for width in sorted(set(widths), reverse=True):
        w = slicer.put(w, slicer.index(width), fresh_model(slicer, width, start, seed=seed))
    return w
