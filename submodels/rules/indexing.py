"""Operations that pick positions by number."""

import torch
from torch import Tensor

from submodels.axes import Axis, cut, fixed, freeze, unify
from submodels.rules.operands import outputs, require, resized


def embedding(t, out, weight, index, *_args):
    """Lookup of rows by number: rows stay whole, the embedded features remain."""
    freeze(t[weight][0], "op:embedding")
    t[out] = [*t[index], t[weight][1]]


def index(t, out, x, indices):
    """``x[i, j]``: axes that are indexed stay whole, the others pass."""
    indexed = [i for i, index in enumerate(indices) if index is not None]
    tensors = [indices[i] for i in indexed]
    for i, index in zip(indexed, tensors, strict=True):
        for axis in (t[x][i], *t[index]):
            freeze(axis, "op:index")
    # Frozen before the checks: whatever the shape of the result, positions of these axes are read one by one.
    require(not any(index.dtype in (torch.bool, torch.uint8) for index in tensors), "a mask: the result has any size")
    require(indexed == list(range(indexed[0], indexed[-1] + 1)), "scattered indices move the axes between them")
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    t[out] = [*t[x][: indexed[0]], *(fixed(n, "op:index") for n in shape), *t[x][indexed[-1] + 1 :]]


def index_select(t, out, x, dim, index):
    """Selection along one axis, which stays whole; the others pass."""
    require(x.dim(), "a number has no axis")
    for axis in (t[x][dim], *t[index]):
        freeze(axis, "op:index_select")
    t[out] = [resized(a, n, "op:index_select") for a, n in zip(t[x], out.shape, strict=True)]


def gather(t, out, x, dim, index, **_kw):
    """Selection position by position: along ``dim`` both stay whole, elsewhere index and source are one."""
    require(x.dim() == index.dim(), "an empty index may have any number of axes")
    dim = dim % x.dim()
    for i, (a, b) in enumerate(zip(t[x], t[index], strict=True)):
        if i == dim or a.size != b.size:  # an index may be shorter than its source: then it reads a literal part of it
            freeze(a, "op:gather")
            freeze(b, "op:gather")
        else:
            unify(a, b)
    t[out] = t[index]


def regions(t, out, x, boxes, *_settings):
    """Rectangles of feature maps, brought to one size: channels pass, images and positions are read by number."""
    for axis in (t[x][0], *t[x][2:], t[boxes][1]):
        freeze(axis, "op:regions")
    for o in outputs(out):
        t[o] = [t[boxes][0], t[x][1], *(fixed(n, "spatial") for n in o.shape[2:])]


def bucketize(t, out, x, boundaries, **_kw):
    """The number of the interval that every value falls into: the boundaries stay whole."""
    require(isinstance(x, Tensor), "a number has no axis")
    freeze(t[boundaries][0], "op:bucketize")
    t[out] = t[x]


def glu(t, out, x, dim=-1):
    """Gated unit: the two halves of an axis are one axis, which remains."""
    axes, dim = list(t[x]), dim % x.dim()
    halves = cut(axes[dim], [out.shape[dim]] * 2)
    require(halves, "the halves do not align")
    unify(*halves)
    axes[dim] = halves[0]
    t[out] = axes


def new_constant(t, out, _x, *_args, **_kw):
    """A fresh constant: axes of its own, bound by what it meets."""
    # Made inside an operation, its sizes follow the operands; where the model's code makes it, `Sizes` knows better.
    t[out] = [Axis(n) for n in out.shape]


RULES = {
    "embedding": embedding,
    "index": index,
    "_unsafe_index": index,
    "index_select": index_select,
    "gather": gather,
    "roi_align": regions,
    "roi_pool": regions,
    "bucketize": bucketize,
    "glu": glu,
    "new_zeros": new_constant,
    "new_ones": new_constant,
    "new_empty": new_constant,
    "new_full": new_constant,
    "new_empty_strided": new_constant,
}
