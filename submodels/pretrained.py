"""The config of a pretrained-style model: a sub-model's says its own sizes, so that it can be saved and loaded again.

Hugging Face's ``save_pretrained`` writes the config beside the weights, and ``from_pretrained`` builds the model from
it. Which integer of a config measures what is nowhere written down; it is found by building models from changed
configs, on the meta device, until one has the shapes of the sub-model.
"""

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from submodels.axismap import AxisMap
from submodels.integers import is_plain_object, replace_integer
from submodels.skeleton import named_tensors
from submodels.terms import Product, Sum, Term

log = logging.getLogger(__name__)

Place = tuple[str | int, ...]  # keys and positions inside a config
_MAX_BUILDS = 60  # a config with more wrong guesses than that is given up


def resize_config(module: nn.Module, axis_map: AxisMap, counts: Sequence[int]) -> None:
    """Make the config of a sub-model say its sizes, if it has one and some config does.

    Args:
        module: the sub-model, with the config of the whole model.
        counts: channels it keeps of every group.
    """
    config = getattr(module, "config", None)
    if not hasattr(module, "save_pretrained") or not is_plain_object(config) or tuple(counts) == axis_map.sizes:
        return
    wanted = {name: tuple(x.shape) for name, x in named_tensors(module)}
    changes = _solved(type(module), config, _proposals(config, axis_map, counts), wanted)
    if changes is None:
        log.warning(
            "no config of %s has the sizes of this sub-model; save its state_dict() instead of save_pretrained()",
            type(module).__name__,
        )
        return
    for place, new in changes.items():
        replace_integer(config, place, new)


def _proposals(config: Any, axis_map: AxisMap, counts: Sequence[int]) -> dict[Place, int]:
    """Integers of the config that have the size of an axis which shrinks, and the size it shrinks to."""
    sizes: dict[int, list[int]] = {}
    every = [term for row in axis_map.dims.values() for term in row]
    for term in [part for whole_term in every for part in _parts(whole_term)]:
        whole, cut = term.size(axis_map.sizes), term.size(counts)
        if whole != cut:
            sizes.setdefault(whole, []).append(cut)
    # Of several axes of a size, what most of them shrink to.
    return {place: max(set(sizes[n]), key=sizes[n].count) for place, n in _integers(config) if n in sizes}


def _parts(term: Term) -> Iterator[Term]:
    """A term, its parts, and the products of neighbouring factors: of (h 2 8), h times 2 is a number of heads too."""
    yield term
    if isinstance(term, Product):
        pairs = itertools.combinations(range(len(term.parts) + 1), 2)
        yield from (Product(term.parts[a:b]) for a, b in pairs if 1 < b - a < len(term.parts))
    for part in term.parts if isinstance(term, Product | Sum) else ():
        yield from _parts(part)


def _integers(value: Any, place: Place = ()) -> Iterator[tuple[Place, int]]:
    if type(value) is int and value > 1:
        yield place, value
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _integers(item, (*place, i))
    elif is_plain_object(value) and len(place) < 2:
        for key, item in vars(value).items():
            if not key.startswith("_"):
                yield from _integers(item, (*place, key))


def _solved(kind: type, config: Any, proposals: dict[Place, int], wanted: dict) -> dict[Place, int] | None:
    """The proposals with which a model has the wanted shapes: all of them, or those left when wrong guesses are out."""
    changes = dict(proposals)
    best = _mismatches(kind, config, changes, wanted)
    for _ in range(_MAX_BUILDS):
        if best == 0:
            return changes
        fewer = [{p: n for p, n in changes.items() if p != place} for place in changes]
        scores = [_mismatches(kind, config, trial, wanted) for trial in fewer]
        if not scores or min(scores) >= best:
            return None
        best = min(scores)
        changes = fewer[scores.index(best)]
    return None


@torch.random.fork_rng(devices=[])
def _mismatches(kind: type, config: Any, changes: dict[Place, int], wanted: dict) -> float:
    """Tensors whose shapes differ from those wanted when a model is built from the changed config."""
    changed = copy.deepcopy(config)
    for place, new in changes.items():
        replace_integer(changed, place, new)
    try:
        with torch.device("meta"):
            built = kind(changed)
    except Exception:  # whatever a constructor may raise on sizes that do not go together
        return float("inf")
    shapes = {name: tuple(x.shape) for name, x in named_tensors(built)}
    return sum(shapes.get(name) != wanted.get(name) for name in shapes.keys() | wanted.keys())
