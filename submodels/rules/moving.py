"""Operations that move, cut, join or repeat axes."""

import math

from submodels.axes import Axis, concat, cut, fixed, freeze, product, regroup, split_factor, unify
from submodels.rules.operands import require, resized, same


def view(t, out, x, *_args, **_kw):
    """Reshape: axes that merge become a product, an axis that splits falls into factors."""
    axes, sizes, got = list(t[x]), list(out.shape), []
    while axes or sizes:  # the smallest blocks of old and new dimensions with equal products
        old, new = axes[:1], sizes[:1]
        del axes[:1], sizes[:1]
        while (have := math.prod(a.size for a in old)) != (want := math.prod(new)):
            source, block = (axes, old) if have < want else (sizes, new)
            require(source, "a tensor without elements: its sizes do not say which axes correspond")
            block.append(source.pop(0))
        if len(old) == len(new) == 1:  # untouched by the reshape, whatever it is made of
            got += old
            continue
        if not new:  # trailing size-1 dimensions dropped
            continue
        block = regroup(old, new)
        if block is None:
            for axis in old:
                freeze(axis, "op:reshape")
            block = [fixed(size, "op:reshape") for size in new]
        got += block
    t[out] = got


def permute(t, out, x, dims):
    """Axes in another order."""
    t[out] = [t[x][d] for d in dims]


def transpose(t, out, x, a, b):
    """Two axes change places."""
    axes = list(t[x])
    axes[a], axes[b] = axes[b], axes[a]
    t[out] = axes


def transpose_2d(t, out, x):
    """The two axes of a matrix change places."""
    t[out] = t[x][::-1]


def unsqueeze(t, out, x, dim):
    """A new axis of size 1."""
    axes = list(t[x])
    axes.insert(dim % out.dim(), fixed(1, "size 1"))
    t[out] = axes


def squeeze(t, out, x, dim=None):
    """Axes of size 1 go."""
    axes = t[x]  # x itself may have lost the axis already: squeeze_ works in place
    dims = range(len(axes)) if dim is None else [d % len(axes) for d in ([dim] if isinstance(dim, int) else dim)]
    t[out] = [axis for i, axis in enumerate(axes) if not (i in dims and axis.size == 1)]


def expand(t, out, x, *_args, **_kw):
    """Broadcast: an axis of size 1, or none, becomes a fresh axis."""
    # A broadcast axis has as many positions as whoever meets it wants: a fresh axis, bound by what follows.
    old = [None] * (out.dim() - x.dim()) + list(t[x])
    t[out] = [a if a is not None and a.size == n else Axis(n) for a, n in zip(old, out.shape, strict=True)]


def repeat(t, out, x, repeats):
    """Copies one after the other: the product of their number and the axis."""
    old = [fixed(1, "size 1")] * (out.dim() - x.dim()) + list(t[x])
    require(all([a.size or n < 2 for a, n in zip(old, repeats, strict=True)]), "an axis without positions")
    # Copies of a single position broadcast it, as in `expand`; copies of more are a product that a cut must respect.
    t[out] = [
        product([fixed(int(n), "repeat"), a]) if a.size > 1 else (a if n == 1 else Axis(int(n)))
        for a, n in zip(old, repeats, strict=True)
    ]


def select(t, out, x, dim, index):
    """One position of an axis, which stays whole and goes."""
    axes = list(t[x])
    freeze(axes.pop(dim % x.dim()), "op:select")
    t[out] = axes


def unbind(t, out, x, dim=0):
    """All positions of an axis as tensors of their own; it stays whole and goes."""
    axes = list(t[x])
    freeze(axes.pop(dim % x.dim()), "op:unbind")
    for o in out:
        t[o] = axes


def slice_(t, out, x, dim=0, start=None, end=None, step=1):
    """A run of positions: the axis becomes a concatenation of which one part remains."""
    axes, dim = list(t[x]), dim % x.dim()
    size, kept = x.shape[dim], out.shape[dim]
    if kept != size:
        start = 0 if start is None else max(start + size if start < 0 else start, 0)
        runs = [n for n in (start, kept, size - start - kept) if n]  # before, the slice itself, after
        pieces = cut(axes[dim], runs) if step == 1 and kept else None
        if pieces is None:
            freeze(axes[dim], "op:slice")
        axes[dim] = fixed(kept, "op:slice") if pieces is None else pieces[1 if start else 0]
    t[out] = axes


def split(t, out, x, _sizes, dim=0):
    """Consecutive runs: the axis becomes the concatenation of the results' axes."""
    dim = dim % x.dim()
    sizes = [o.shape[dim] for o in out]
    pieces = cut(t[x][dim], sizes)
    if pieces is None:
        freeze(t[x][dim], "op:split")
        pieces = [fixed(size, "op:split") for size in sizes]
    for o, piece in zip(out, pieces, strict=True):
        t[o] = [*t[x][:dim], piece, *t[x][dim + 1 :]]


def cat(t, out, tensors, dim=0):
    """Concatenation along one axis; the other axes of all operands are one."""
    dim = dim % out.dim()
    rows = [t[x] for x in tensors if x.dim() == out.dim()]  # torch skips empty tensors of one dimension
    axes = list(rows[0])
    for row in rows[1:]:
        for i in range(out.dim()):
            if i != dim:
                unify(axes[i], row[i])
    axes[dim] = concat([row[dim] for row in rows if row[dim].size])
    t[out] = axes


def stack(t, out, tensors, dim=0):
    """A new axis, which stays whole, over operands whose axes are one."""
    axes = list(t[tensors[0]])
    for x in tensors[1:]:
        same(t, axes, t[x])
    axes.insert(dim % out.dim(), fixed(len(tensors), "op:stack"))
    t[out] = axes


def roll(t, out, x, shifts, dims=()):
    """Positions shift along axes, which stay whole."""
    for d in dims or range(x.dim()):
        freeze(t[x][d], "op:roll")
    t[out] = t[x]


def rot90(t, out, x, k=1, dims=(0, 1)):
    """Quarter turns: the two axes of the plane stay whole, and change places with every turn."""
    axes, (i, j) = list(t[x]), (d % x.dim() for d in dims)
    for d in (i, j):
        freeze(axes[d], "op:rot90")
    if k % 2:
        axes[i], axes[j] = axes[j], axes[i]
    t[out] = axes


def flip(t, out, x, dims):
    """Positions reverse along axes, which stay whole."""
    for d in dims:
        freeze(t[x][d], "op:flip")
    t[out] = t[x]


def constant_pad_nd(t, out, x, pad, *_args, **_kw):
    """Padded axes stay whole, the others pass."""
    axes = list(t[x])
    for k in range(len(pad) // 2):
        if pad[2 * k] or pad[2 * k + 1]:
            freeze(axes[-1 - k], "op:pad")
            axes[-1 - k] = fixed(out.shape[-1 - k], "op:pad")
    t[out] = axes


def as_strided(t, out, x, *_args, **_kw):
    """An alias with the tensor's own strides; any other is refused."""
    moved = (
        [i for i, n in enumerate(out.shape) if n > 1 and out.stride(i) != x.stride(i)] if x.dim() == out.dim() else [0]
    )
    alias = x.shape == out.shape and not moved and out.storage_offset() == x.storage_offset()
    require(alias, "strides that are not those of the tensor")
    t[out] = t[x]


def unfold(t, out, x, dim, _size, _step):
    """Sliding windows along an axis, which stays whole; a new last axis holds the window."""
    require(x.dim(), "a number has no axis")
    freeze(t[x][dim], "op:unfold")
    t[out] = [resized(a, n, "op:unfold") for a, n in zip(t[x], out.shape, strict=False)] + [
        fixed(out.shape[-1], "op:unfold")
    ]


def pixel_shuffle(t, out, x, factor):
    """Channels (c r r) become channels c; the factor and the positions stay whole."""
    channels = regroup([t[x][-3]], [out.shape[-3], factor * factor])
    require(channels, "channels do not factor")
    for axis in (channels[1], *t[x][-2:]):  # the factor becomes positions, which are never cut
        freeze(axis, "op:pixel_shuffle")
    t[out] = [*t[x][:-3], channels[0], *(fixed(n, "spatial") for n in out.shape[-2:])]


def pixel_unshuffle(t, out, x, factor):
    """Channels c become (c r r); the positions stay whole."""
    for axis in t[x][-2:]:
        freeze(axis, "op:pixel_unshuffle")
    channels = product([t[x][-3], fixed(factor * factor, "op:pixel_unshuffle")])
    t[out] = [*t[x][:-3], channels, *(fixed(n, "spatial") for n in out.shape[-2:])]


def channel_shuffle(t, out, x, groups):
    """Channels (g c) become (c g); the number of groups stays whole."""
    pair = split_factor(t[x][1], groups)
    require(pair, "channels do not factor")
    freeze(pair[0], "op:channel_shuffle")
    t[out] = [t[x][0], product(pair[::-1]), *t[x][2:]]


def im2col(t, out, x, *_args, **_kw):
    """Patches as columns: channels c become (c kernel); positions stay whole."""
    require(x.dim() == 4, "an image without a batch axis")
    for axis in t[x][2:]:
        freeze(axis, "spatial")
    channels = product([t[x][1], fixed(out.shape[1] // x.shape[1], "kernel")])
    t[out] = [t[x][0], channels, fixed(out.shape[2], "spatial")]


def col2im(t, out, x, *_args, **_kw):
    """Columns as an image: channels (c kernel) become c; positions stay whole."""
    require(x.dim() == 3, "columns without a batch axis")
    channels = regroup([t[x][1]], [out.shape[1], x.shape[1] // out.shape[1]])
    require(channels, "channels do not factor")
    freeze(channels[1], "kernel")
    freeze(t[x][2], "spatial")
    t[out] = [t[x][0], channels[0], *(fixed(n, "spatial") for n in out.shape[2:])]


RULES = {
    "view": view,
    "_unsafe_view": view,
    "reshape": view,
    "_reshape_alias": view,
    "_reshape_copy": view,
    "view_copy": view,
    "permute": permute,
    "transpose": transpose,
    "swapaxes": transpose,
    "t": transpose_2d,
    "numpy_T": transpose_2d,
    "mT": transpose_2d,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "broadcast_to": expand,
    "expand_copy": expand,
    "repeat": repeat,
    "select": select,
    "select_copy": select,
    "unbind": unbind,
    "slice": slice_,
    "slice_copy": slice_,
    "narrow": slice_,
    "split": split,
    "split_with_sizes": split,
    "chunk": split,
    "unsafe_split": split,
    "unsafe_chunk": split,
    "tensor_split": split,
    "unsafe_split_with_sizes": split,
    "cat": cat,
    "concat": cat,
    "stack": stack,
    "roll": roll,
    "flip": flip,
    "rot90": rot90,
    "constant_pad_nd": constant_pad_nd,
    "as_strided": as_strided,
    "unfold": unfold,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": channel_shuffle,
    "native_channel_shuffle": channel_shuffle,
    "im2col": im2col,
    "col2im": col2im,
}
