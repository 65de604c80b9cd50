"""Operations that write positions by number: messages of a graph, bags of words, tables."""

import torch
from torch import Tensor

from submodels.axes import Axis, fixed, freeze, unify
from submodels.rules.operands import require, same


def _along(t, x: Tensor, dim: int, others: list[Tensor], name: str) -> None:
    """Keep whole the axis that is written by number; the other axes of all operands are one."""
    for i, axis in enumerate(t[x]):
        for other in others:
            if i == dim % x.dim() or other.shape[i] != axis.size:  # a shorter operand writes a literal part
                freeze(axis, name)
                freeze(t[other][i], name)
            else:
                unify(axis, t[other][i])


def index_add(t, out, x, dim, index, source, *_args, **_kw):
    """Rows are added, copied or reduced into the rows that an index names; the index and these axes stay whole."""
    require(x.dim() and source.dim() == x.dim(), "a number has no axis")
    for axis in t[index]:
        freeze(axis, "op:index_add")
    _along(t, x, dim, [source], "op:index_add")
    t[out] = t[x]


def index_fill(t, out, x, dim, index, *_args):
    """Rows that an index names become one number; the index and this axis stay whole."""
    require(x.dim(), "a number has no axis")
    for axis in (t[x][dim], *t[index]):
        freeze(axis, "op:index_fill")
    t[out] = t[x]


def scatter(t, out, x, dim, index, source, *_args, **_kw):
    """Positions are added or reduced one by one along ``dim``, which stays whole; elsewhere all operands are one."""
    require(x.dim() == index.dim() == source.dim(), "an empty index may have any number of axes")
    _along(t, x, dim, [index, source], "op:scatter_add")
    t[out] = t[x]


def index_put(t, out, x, indices, values, *_args):
    """``x[i, j] = values``: axes that are indexed stay whole, the others pass to the values."""
    position, indexed, shapes = 0, [], []
    for index in indices:
        if index is None:
            position += 1
            continue
        mask = index.dtype in (torch.bool, torch.uint8)  # a mask stands for as many axes as it has
        indexed += range(position, position + (index.dim() if mask else 1))
        position = indexed[-1] + 1
        shapes.append(None if mask else index.shape)
        for axis in t[index]:
            freeze(axis, "op:index_put")
    for i in indexed:
        freeze(t[x][i], "op:index_put")
    require(indexed == list(range(indexed[0], indexed[-1] + 1)), "scattered indices move the axes between them")
    rest = t[x][indexed[-1] + 1 :]
    if None in shapes:  # as many positions as the mask has marks
        require(indexed[0] == 0 or values.dim() <= len(rest), "a mask behind other axes")
        same(t, rest, t[values][-len(rest) :] if rest else [])
    else:
        chosen = [fixed(n, "op:index_put") for n in torch.broadcast_shapes(*shapes)]
        same(t, [*t[x][: indexed[0]], *chosen, *rest], t[values])
    t[out] = t[x]


def embedding_bag(t, out, weight, index, *_args, **_kw):
    """Sums, means or maxima of rows by number: rows stay whole, the embedded features remain."""
    freeze(t[weight][0], "op:embedding_bag")
    for axis in t[index]:
        freeze(axis, "op:embedding_bag")
    first, *rest = out
    t[first] = [fixed(first.shape[0], "op:embedding_bag"), t[weight][1]]
    for o in rest:  # which row gave the maximum, for every feature; lengths of bags
        t[o] = [t[weight][1] if n == weight.shape[1] and i else fixed(n, "op:embedding_bag")
                for i, n in enumerate(o.shape)]  # fmt: skip


def pack_padded(t, out, x, lengths, *_args):
    """Padded sequences as one row of steps: steps and samples stay whole, the features remain."""
    for axis in (*t[x][:2], *t[lengths]):
        freeze(axis, "op:_pack_padded_sequence")
    data, sizes = out
    t[data] = [fixed(data.shape[0], "op:_pack_padded_sequence"), *t[x][2:]]
    t[sizes] = [fixed(n, "op:_pack_padded_sequence") for n in sizes.shape]


def trilinear(t, out, *call, **_kw):
    """Product of three operands, each with broadcast axes put in, summed over some: equal positions are one axis."""
    operands, expanded, summed = call[:3], call[3:6], call[6]
    rows: list[list[Axis | None]] = []
    for x, places in zip(operands, expanded, strict=True):
        row: list[Axis | None] = list(t[x])
        for place in sorted(places):
            row.insert(place, None)
        rows.append(row)
    axes = []
    for column in zip(*rows, strict=True):
        own = [axis for axis in column if axis is not None and axis.size > 1]
        for axis in own[1:]:
            unify(own[0], axis)
        axes.append(own[0] if own else fixed(1, "size 1"))
    t[out] = [axis for i, axis in enumerate(axes) if i not in {d % len(axes) for d in summed}]


RULES = {
    **dict.fromkeys(("index_add", "index_copy", "index_reduce"), index_add),
    "index_fill": index_fill,
    **dict.fromkeys(("scatter_add", "scatter_reduce"), scatter),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), index_put),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), embedding_bag),
    "_trilinear": trilinear,
    "_pack_padded_sequence": pack_padded,
}
