"""One rule per ATen operation: how the axes of its operands and results relate.

A rule is ``rule(t, out, *args, **kwargs)``: ``t[x]`` are the axes of tensor x, ``t[x] = axes`` sets them. It unifies
what the operation forces to be equal, freezes what it reads by position, and tags axes whose channels it mixes in a
way that a missing channel changes (a mean divides by their number). An operation without a rule freezes every axis
it touches: safe, and reported.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from submodels.axes import Axis, concat, cut, fixed, freeze, is_frozen, product, regroup, split_factor, tag, unify

Rule = Callable[..., None]
RULES: dict[str, Rule] = {}

# Pointwise operations that torch does not tag as such.
POINTWISE = frozenset(
    "clone detach alias _to_copy contiguous lift_fresh lift_fresh_copy native_dropout copy bernoulli dropout fill zero "
    "ones_like zeros_like empty_like full_like rand_like randn_like normal uniform exponential random _prelu_kernel "
    "log_normal masked_fill where native_dropout_backward hardswish hardsigmoid hardtanh".split()
)


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def same(t: Mapping[Tensor, list[Axis]], axes: list[Axis], others: list[Axis]) -> None:
    """Unify two lists of axes from the back, as broadcasting aligns them; size-1 axes are broadcast."""
    for a, b in zip(reversed(axes), reversed(others), strict=False):
        if a.size == b.size:
            unify(a, b)


def outputs(out: Any) -> list[Tensor]:
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, Tensor)]


def pointwise(t, out, inputs: list[Tensor]) -> None:
    """Equal positions are equal axes, as broadcasting aligns them."""
    for o in outputs(out):
        axes: list[Axis | None] = [None] * o.dim()
        for x in inputs:
            for i, axis in enumerate(reversed(t[x]), start=1):
                if i > o.dim() or axis.size != o.shape[-i]:
                    continue
                if axes[-i] is None:
                    axes[-i] = axis
                else:
                    unify(axes[-i], axis)
        t[o] = [axis or fixed(size, "constant") for axis, size in zip(axes, o.shape, strict=True)]


# ------------------------------------------------------------------------------------------------ moving axes


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy")
def _(t, out, x, *_args, **_kw):
    axes, sizes, got = list(t[x]), list(out.shape), []
    while axes or sizes:  # the smallest blocks of old and new dimensions with equal products
        old, new = axes[:1], sizes[:1]
        del axes[:1], sizes[:1]
        while (have := math.prod(a.size for a in old)) != (want := math.prod(new)):
            source, block = (axes, old) if have < want else (sizes, new)
            block.append(source.pop(0))
        if len(old) == len(new) == 1:
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


@rule("permute")
def _(t, out, x, dims):
    t[out] = [t[x][d] for d in dims]


@rule("transpose", "swapaxes")
def _(t, out, x, a, b):
    axes = list(t[x])
    axes[a], axes[b] = axes[b], axes[a]
    t[out] = axes


@rule("t", "numpy_T", "mT")
def _(t, out, x):
    t[out] = t[x][::-1]


@rule("unsqueeze")
def _(t, out, x, dim):
    axes = list(t[x])
    axes.insert(dim % out.dim(), fixed(1, "size 1"))
    t[out] = axes


@rule("squeeze")
def _(t, out, x, dim=None):
    dims = range(x.dim()) if dim is None else [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    t[out] = [axis for i, axis in enumerate(t[x]) if not (i in dims and axis.size == 1)]


@rule("expand", "broadcast_to", "expand_copy")
def _(t, out, x, *_args, **_kw):
    # A broadcast axis has as many positions as whoever meets it wants: a fresh axis, bound by what follows.
    old = [None] * (out.dim() - x.dim()) + list(t[x])
    t[out] = [a if a is not None and a.size == n else Axis(n) for a, n in zip(old, out.shape, strict=True)]


@rule("repeat")
def _(t, out, x, repeats):
    old = [fixed(1, "size 1")] * (out.dim() - x.dim()) + list(t[x])
    t[out] = [
        product([fixed(int(n), "repeat"), a]) if a.size > 1 else (a if n == 1 else Axis(int(n)))
        for a, n in zip(old, repeats, strict=True)
    ]


@rule("select", "select_copy")
def _(t, out, x, dim, index):
    axes = list(t[x])
    freeze(axes.pop(dim % x.dim()), "op:select")
    t[out] = axes


@rule("unbind")
def _(t, out, x, dim=0):
    axes = list(t[x])
    freeze(axes.pop(dim % x.dim()), "op:unbind")
    for o in out:
        t[o] = axes


@rule("slice", "slice_copy", "narrow")
def _(t, out, x, dim=0, start=None, end=None, step=1):
    axes, dim = list(t[x]), dim % x.dim()
    size, kept = x.shape[dim], out.shape[dim]
    if kept != size:
        start = 0 if start is None else max(start + size if start < 0 else start, 0)
        runs = [n for n in (start, kept, size - start - kept) if n]
        pieces = cut(axes[dim], runs) if step == 1 and kept else None
        if pieces is None:
            freeze(axes[dim], "op:slice")
        axes[dim] = fixed(kept, "op:slice") if pieces is None else pieces[1 if start else 0]
    t[out] = axes


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split", "unsafe_split_with_sizes")
def _(t, out, x, _sizes, dim=0):
    dim = dim % x.dim()
    sizes = [o.shape[dim] for o in out]
    pieces = cut(t[x][dim], sizes)
    if pieces is None:
        freeze(t[x][dim], "op:split")
        pieces = [fixed(size, "op:split") for size in sizes]
    for o, piece in zip(out, pieces, strict=True):
        t[o] = [*t[x][:dim], piece, *t[x][dim + 1 :]]


@rule("cat", "concat")
def _(t, out, tensors, dim=0):
    dim = dim % out.dim()
    rows = [t[x] for x in tensors if x.dim() == out.dim()]
    axes = list(rows[0])
    for row in rows[1:]:
        for i in range(out.dim()):
            if i != dim:
                unify(axes[i], row[i])
    axes[dim] = concat([row[dim] for row in rows if row[dim].size])
    t[out] = axes


@rule("stack")
def _(t, out, tensors, dim=0):
    axes = list(t[tensors[0]])
    for x in tensors[1:]:
        same(t, axes, t[x])
    axes.insert(dim % out.dim(), fixed(len(tensors), "op:stack"))
    t[out] = axes


@rule("roll")
def _(t, out, x, shifts, dims=()):
    for d in dims or range(x.dim()):
        freeze(t[x][d], "op:roll")
    t[out] = t[x]


@rule("flip")
def _(t, out, x, dims):
    for d in dims:
        freeze(t[x][d], "op:flip")
    t[out] = t[x]


@rule("constant_pad_nd")
def _(t, out, x, *_args, **_kw):
    t[out] = [_resized(a, n, "op:pad") for a, n in zip(t[x], out.shape, strict=True)]


def _resized(axis: Axis, size: int, why: str) -> Axis:
    """The axis if its size did not change, else a fixed one: its positions were read one by one."""
    if axis.size == size:
        return axis
    freeze(axis, why)
    return fixed(size, why)


@rule("as_strided")
def _(t, out, x, *_args, **_kw):
    if x.shape != out.shape or not x.is_contiguous():
        raise NotImplementedError("as_strided that is more than an alias")
    t[out] = t[x]


@rule("unfold")
def _(t, out, x, dim, _size, _step):
    freeze(t[x][dim], "op:unfold")
    t[out] = [_resized(a, n, "op:unfold") for a, n in zip(t[x], out.shape, strict=False)] + [
        fixed(out.shape[-1], "op:unfold")
    ]


@rule("pixel_shuffle")
def _(t, out, x, factor):
    channels = regroup([t[x][-3]], [out.shape[-3], factor * factor])
    if channels is None:
        raise NotImplementedError("channels do not factor")
    freeze(channels[1], "op:pixel_shuffle")
    t[out] = [*t[x][:-3], channels[0], *(fixed(n, "spatial") for n in out.shape[-2:])]


@rule("pixel_unshuffle")
def _(t, out, x, factor):
    channels = product([t[x][-3], fixed(factor * factor, "op:pixel_unshuffle")])
    t[out] = [*t[x][:-3], channels, *(fixed(n, "spatial") for n in out.shape[-2:])]


@rule("channel_shuffle", "native_channel_shuffle")
def _(t, out, x, groups):
    pair = split_factor(t[x][1], groups)
    if pair is None:
        raise NotImplementedError("channels do not factor")
    freeze(pair[0], "op:channel_shuffle")
    t[out] = [t[x][0], product(pair[::-1]), *t[x][2:]]


@rule("im2col")
def _(t, out, x, *_args, **_kw):
    for axis in t[x][2:]:
        freeze(axis, "spatial")
    channels = product([t[x][1], fixed(out.shape[1] // x.shape[1], "kernel")])
    t[out] = [t[x][0], channels, fixed(out.shape[2], "spatial")]


@rule("col2im")
def _(t, out, x, *_args, **_kw):
    channels = regroup([t[x][1]], [out.shape[1], x.shape[1] // out.shape[1]])
    if channels is None:
        raise NotImplementedError("channels do not factor")
    freeze(channels[1], "kernel")
    t[out] = [t[x][0], channels[0], *(fixed(n, "spatial") for n in out.shape[2:])]


# ------------------------------------------------------------------------------------------------ contractions


@rule("mm")
def _(t, out, a, b, **_kw):
    unify(t[a][1], t[b][0])
    t[out] = [t[a][0], t[b][1]]


@rule("addmm")
def _(t, out, bias, a, b, **_kw):
    RULES["mm"](t, out, a, b)
    same(t, t[out], t[bias])


@rule("bmm")
def _(t, out, a, b, **_kw):
    batch, _, inner = t[a]
    unify(batch, t[b][0])
    unify(inner, t[b][1])
    tag(batch, "heads")
    t[out] = [batch, t[a][1], t[b][2]]


@rule("baddbmm")
def _(t, out, bias, a, b, **_kw):
    RULES["bmm"](t, out, a, b)
    same(t, t[out], t[bias])


@rule("mv")
def _(t, out, a, b):
    unify(t[a][1], t[b][0])
    t[out] = [t[a][0]]


@rule("dot", "vdot")
def _(t, out, a, b):
    unify(t[a][0], t[b][0])
    t[out] = []


@rule("linear")
def _(t, out, x, weight, bias=None):
    unify(t[x][-1], t[weight][1])
    if bias is not None:
        unify(t[weight][0], t[bias][0])
    t[out] = [*t[x][:-1], t[weight][0]]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_fused_attention_overrideable",
)
def _(t, out, q, k, v, attn_mask=None, *_args, **kw):
    *batch, rows, inner = t[q]
    for i, axis in enumerate(batch):
        unify(axis, t[k][i])
        unify(axis, t[v][i])
    unify(inner, t[k][-1])
    unify(t[k][-2], t[v][-2])
    freeze(t[k][-2], "op:softmax")
    mask = attn_mask if isinstance(attn_mask, Tensor) else kw.get("attn_mask")
    if mask is not None:
        same(t, [*batch, rows, t[k][-2]], t[mask])
    first, *rest = outputs(out)
    t[first] = [*batch, rows, t[v][-1]]
    for o in rest:
        t[o] = [fixed(n, "attention statistics") for n in o.shape]


@rule("convolution", "_convolution", "convolution_overrideable")
def _(t, out, x, weight, bias, _stride, _padding, _dilation, transposed, _output_padding, groups, *_flags):
    for axis in t[x][2:]:
        freeze(axis, "spatial")
    for axis in t[weight][2:]:
        freeze(axis, "kernel")
    first, second = t[weight][:2]
    if groups == 1:
        channels, result = (first, second) if transposed else (second, first)
        unify(t[x][1], channels)
    else:
        block = Axis(groups)
        tag(block, "groups")
        # Grouped: weight is (groups * rows, columns); transposed: (groups * columns, rows).
        grouped = product([block, Axis(weight.shape[0] // groups)])
        unify(first, grouped)
        other = product([block, second])
        inputs, result = (grouped, other) if transposed else (other, grouped)
        unify(t[x][1], inputs)
    if bias is not None:
        unify(t[bias][0], result)
    t[out] = [t[x][0], result, *(fixed(n, "spatial") for n in out.shape[2:])]


# ------------------------------------------------------------------------------------------------ norms, reductions


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update",
    "_batch_norm_no_update",
    "cudnn_batch_norm",
    "batch_norm",
)
def _(t, out, x, *args, **_kw):
    for vector in args[:4]:
        if isinstance(vector, Tensor):
            unify(t[vector][0], t[x][1])
    if x.shape[0] * math.prod(x.shape[2:]) > 1:
        for axis in (t[x][0], *t[x][2:]):
            tag(axis, "op:batch_norm")  # over scaled channels this is a weight standardisation
    first, *rest = outputs(out)
    t[first] = t[x]
    for o in rest:
        t[o] = [t[x][1]] if o.shape == x.shape[1:2] else [fixed(n, "norm statistics") for n in o.shape]


@rule("native_layer_norm", "_fused_rms_norm", "layer_norm", "rms_norm")
def _(t, out, x, normalized_shape, *args, **_kw):
    inner = t[x][-len(normalized_shape) :]
    for vector in args[:2]:
        if isinstance(vector, Tensor):
            same(t, t[vector], inner)
    for axis in inner:
        tag(axis, "norm:layer_norm")
    first, *rest = outputs(out)
    t[first] = t[x]
    for o in rest:
        t[o] = [a if a.size == n else fixed(n, "norm statistics") for a, n in zip(t[x], o.shape, strict=False)]


@rule("native_group_norm")
def _(t, out, x, weight, bias, _n, channels, _hw, groups, _eps):
    for vector in (weight, bias):
        if vector is not None:
            unify(t[vector][0], t[x][1])
    block, inner = Axis(groups), Axis(channels // groups)
    tag(block, "groups")
    tag(inner, "norm:group_norm")
    unify(t[x][1], product([block, inner]))
    t[out[0]] = t[x]
    for o in out[1:]:
        t[o] = [fixed(n, "norm statistics") for n in o.shape]


@rule("_softmax", "_log_softmax", "_safe_softmax")
def _(t, out, x, dim, *_args):
    # What a softmax runs over (tokens, branches, features of a cross-covariance) sums to one: dropping some changes all.
    freeze(t[x][dim], "op:softmax")
    t[out] = t[x]


def _reduction(name: str, mixes: bool) -> Rule:
    """A rule for an operation that reduces dimensions; ``mixes``: a missing channel is not a zero channel."""

    def reduce(t, out, x, *args, **kw):
        dims = next((a for a in args if isinstance(a, list | tuple)), kw.get("dim"))
        if dims is None and args and isinstance(args[-1 if name == "norm" else 0], int) and name in ONE_DIM:
            dims = args[0]
        dims = [dims] if isinstance(dims, int) else dims
        dims = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
        for d in dims:
            if mixes:
                tag(t[x][d], f"op:{name}")
        for o in outputs(out):
            kept = o.dim() == x.dim()
            t[o] = [fixed(1, "size 1") if i in dims else axis for i, axis in enumerate(t[x]) if kept or i not in dims]

    return reduce


ONE_DIM = frozenset({"max", "min", "prod", "any", "all", "argmax", "argmin", "median", "mode", "count_nonzero"})
for _name in ("sum", "linalg_vector_norm", "norm", "nansum", "count_nonzero", "any"):
    RULES[_name] = _reduction(_name, mixes=False)
for _name in (
    "mean var std var_mean std_mean amax amin max min prod all argmax argmin logsumexp median mode aminmax nanmean"
).split():
    RULES[_name] = _reduction(_name, mixes=True)


@rule("cumsum", "cumprod", "sort", "topk", "kthvalue", "logcumsumexp")
def _(t, out, x, *args, **kw):
    ints = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    dim = kw.get("dim", ints[-1] if ints else -1)
    freeze(t[x][dim], "op:ordered along this axis")
    for o in outputs(out):
        t[o] = [_resized(a, n, "op:topk") for a, n in zip(t[x], o.shape, strict=True)]


def _spatial(dims: int) -> Rule:
    """A rule for an operation that works on the last ``dims`` dimensions of its first operand."""

    def window(t, out, x, *_args, **_kw):
        for axis in t[x][-dims:]:
            freeze(axis, "spatial")
        for o in outputs(out):
            t[o] = [*t[x][:-dims], *(fixed(n, "spatial") for n in o.shape[-dims:])]

    return window


for _dims in (1, 2, 3):
    for _name in (
        "max_pool{}d_with_indices max_pool{}d avg_pool{}d _adaptive_avg_pool{}d adaptive_avg_pool{}d "
        "adaptive_max_pool{}d upsample_nearest{}d _upsample_nearest_exact{}d reflection_pad{}d replication_pad{}d "
        "grid_sampler_{}d mkldnn_adaptive_avg_pool{}d"
    ).split():
        RULES[_name.format(_dims)] = _spatial(_dims)
for _name in ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
    RULES[_name] = _spatial(2)
RULES["upsample_linear1d"] = _spatial(1)
RULES["upsample_trilinear3d"] = _spatial(3)


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _(t, out, x, dims, *_args):
    for d in dims:
        freeze(t[x][d], "op:fft")
    t[out] = [_resized(a, n, "op:fft") for a, n in zip(t[x], out.shape, strict=True)]


@rule("view_as_real")
def _(t, out, x):
    t[out] = [*t[x], fixed(2, "complex")]


@rule("view_as_complex")
def _(t, out, x):
    freeze(t[x][-1], "complex")
    t[out] = t[x][:-1]


# ------------------------------------------------------------------------------------------------ indexing


@rule("embedding")
def _(t, out, weight, index, *_args):
    freeze(t[weight][0], "op:embedding")
    t[out] = [*t[index], t[weight][1]]


@rule("index", "_unsafe_index")
def _(t, out, x, indices):
    places = [i for i, index in enumerate(indices) if index is not None]
    tensors = [indices[i] for i in places]
    for i, index in zip(places, tensors, strict=True):
        for axis in (t[x][i], *t[index]):
            freeze(axis, "op:index")
    if any(index.dtype == torch.bool for index in tensors) or places != list(range(places[0], places[-1] + 1)):
        raise NotImplementedError("boolean or scattered indices")
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    t[out] = [*t[x][: places[0]], *(fixed(n, "op:index") for n in shape), *t[x][places[-1] + 1 :]]


@rule("index_select")
def _(t, out, x, dim, _index):
    freeze(t[x][dim], "op:index_select")
    t[out] = [_resized(a, n, "op:index_select") for a, n in zip(t[x], out.shape, strict=True)]


@rule("gather")
def _(t, out, x, dim, index, **_kw):
    dim = dim % x.dim()
    for i, (a, b) in enumerate(zip(t[x], t[index], strict=True)):
        if i == dim or a.size != b.size:
            freeze(a, "op:gather")
            freeze(b, "op:gather")
        else:
            unify(a, b)
    t[out] = t[index]


@rule("glu")
def _(t, out, x, dim=-1):
    axes, dim = list(t[x]), dim % x.dim()
    halves = cut(axes[dim], [out.shape[dim]] * 2)
    if halves is None:
        raise NotImplementedError("the halves do not align")
    unify(*halves)
    axes[dim] = halves[0]
    t[out] = axes


@rule("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")
def _(t, out, _x, *_args, **_kw):
    t[out] = [fixed(n, "constant") for n in out.shape]  # the tracer knows better where the sizes have a source


def apply(t, name: str, elementwise: bool, args: tuple, kwargs: dict, out: Any, inputs: list[Tensor]) -> bool:
    """True if a rule explained the operation; else every axis it touches has been frozen."""
    try:
        if name in RULES:
            RULES[name](t, out, *args, **kwargs)
            return True
        if elementwise or name in POINTWISE:
            pointwise(t, out, inputs)
            return True
    except (NotImplementedError, AssertionError, IndexError, ValueError, TypeError, AttributeError):
        pass  # a rule that cannot cope freezes, like an operation without one
    harmless = all(is_frozen(axis) for x in inputs for axis in t[x])
    for x in inputs:
        for axis in t[x]:
            freeze(axis, f"op:{name}")
    for o in outputs(out):
        t[o] = [fixed(n, f"op:{name}") for n in o.shape]
    return harmless
