"""Norms, reductions, pooling and other operations along whole axes."""

import math
from collections.abc import Callable

from torch import Tensor

from submodels.axes import Axis, fixed, freeze, product, tag, unify
from submodels.rules.operands import outputs, require, resized, same


def batch_norm(t, out, x, *args, **_kw):
    """Batch norm: statistics, affine part and channels are one axis; the axes it averages over count."""
    for vector in args[:4]:
        if isinstance(vector, Tensor):
            unify(t[vector][0], t[x][1])
    # With one value a channel nothing is averaged over these axes, so none of them counts.
    if x.shape[0] * math.prod(x.shape[2:]) > 1:
        for axis in (t[x][0], *t[x][2:]):
            tag(axis, "op:batch_norm")  # over scaled channels this is a weight standardisation
    first, *rest = outputs(out)
    t[first] = t[x]
    for o in rest:
        t[o] = [t[x][1]] if o.shape == x.shape[1:2] else [fixed(n, "norm statistics") for n in o.shape]


def layer_norm(t, out, x, normalized_shape, *args, **_kw):
    """Layer or RMS norm: the affine part and the normalised axes are one, and count."""
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


def group_norm(t, out, x, weight, bias, *settings):
    """Group norm: channels are (groups inner); groups may shrink, the inner factor counts."""
    _samples, channels, _positions, groups, _eps = settings
    for vector in (weight, bias):
        if vector is not None:
            unify(t[vector][0], t[x][1])
    block, inner = Axis(groups), Axis(channels // groups)
    tag(block, "groups")
    for axis in (inner, *t[x][2:]):
        tag(axis, "norm:group_norm")
    unify(t[x][1], product([block, inner]))  # which factor scales is chosen once the whole run is known
    t[out[0]] = t[x]
    for o in out[1:]:
        t[o] = [fixed(n, "norm statistics") for n in o.shape]


def softmax(t, out, x, dim, *_args):
    """Softmax: the axis it runs over stays whole, the others pass."""
    # What a softmax runs over (tokens, branches, features of a covariance) sums to one: dropping some changes all.
    freeze(t[x][dim], "op:softmax")
    t[out] = t[x]


def _reduction(name: str, mixes: bool) -> Callable[..., None]:
    """A rule for an operation that reduces dimensions; ``mixes``: a missing channel is not a zero channel."""

    def reduce(t, out, x, *args, **kw):
        """Reduced axes go, or shrink to size 1; the others pass."""
        # Overloads differ in where the dimensions stand (norm has its order before them), but only they are lists.
        dims = next((a for a in args if isinstance(a, list | tuple)), kw.get("dim"))
        if dims is None and name in _ONE_DIM and args and isinstance(args[0], int):
            dims = args[0]
        dims = [dims] if isinstance(dims, int) else dims
        dims = {d % x.dim() for d in dims} if dims else set(range(x.dim()))
        for d in dims if mixes else ():
            tag(t[x][d], f"op:{name}")
        for o in outputs(out):
            kept = o.dim() == x.dim()
            require(kept or o.dim() == x.dim() - len(dims), "a dimension that the call leaves to the operation")
            t[o] = [fixed(1, "size 1") if i in dims else axis for i, axis in enumerate(t[x]) if kept or i not in dims]

    return reduce


# Operations whose dimension is a bare number.
_ONE_DIM = frozenset("max min prod any all argmax argmin median mode count_nonzero".split())
_SUMS = "sum nansum linalg_vector_norm norm count_nonzero any".split()
_OTHER_REDUCTIONS = (
    "mean nanmean var std var_mean std_mean amax amin aminmax max min argmax argmin prod all logsumexp median mode"
).split()


def _ordered(position: int) -> Callable[..., None]:
    """A rule for an operation that orders or accumulates along the dimension given at that position of its options."""

    def order(t, out, x, *args, **kw):
        """The ordered axis stays whole, the others pass."""
        dim = args[position] if len(args) > position else kw.get("dim", -1)
        freeze(t[x][dim], "op:ordered along this axis")
        require(all([o.dim() == x.dim() for o in outputs(out)]), "a result without the ordered axis")
        for o in outputs(out):
            t[o] = [resized(a, n, "op:topk") for a, n in zip(t[x], o.shape, strict=True)]

    return order


def _spatial(dims: int) -> Callable[..., None]:
    """A rule for an operation that works on the last ``dims`` dimensions of its first operand."""

    def window(t, out, x, *_args, **_kw):
        """The last axes are positions and stay whole, the others pass."""
        for axis in t[x][-dims:]:
            freeze(axis, "spatial")
        for o in outputs(out):
            t[o] = [*t[x][:-dims], *(fixed(n, "spatial") for n in o.shape[-dims:])]

    return window


# Names of operations on the last {} dimensions.
_WINDOWS = (
    "max_pool{}d_with_indices max_pool{}d avg_pool{}d _adaptive_avg_pool{}d adaptive_avg_pool{}d adaptive_max_pool{}d "
    "mkldnn_adaptive_avg_pool{}d upsample_nearest{}d _upsample_nearest_exact{}d upsample_linear{}d "
    "upsample_bilinear{}d "
    "upsample_bicubic{}d _upsample_bilinear{}d_aa _upsample_bicubic{}d_aa upsample_trilinear{}d reflection_pad{}d "
    "replication_pad{}d"
).split()


def _unpool(dims: int) -> Callable[..., None]:
    """A rule for an operation that puts maxima back where they were, in the last ``dims`` dimensions."""

    def unpool(t, out, x, index, *_args):
        """Values and their places have the same axes; positions stay whole, the others pass."""
        same(t, t[x], t[index])
        for axis in t[x][-dims:]:
            freeze(axis, "spatial")
        t[out] = [*t[x][:-dims], *(fixed(n, "spatial") for n in out.shape[-dims:])]

    return unpool


def grid_sampler(t, out, x, grid, *_args):
    """Sampling at given positions: batch and channels pass, positions stay whole."""
    unify(t[x][0], t[grid][0])
    for axis in (*t[x][2:], *t[grid][1:]):
        freeze(axis, "spatial")
    t[out] = [*t[x][:2], *(fixed(n, "spatial") for n in out.shape[2:])]


def fft(t, out, x, dims, *_args):
    """Fourier transform: transformed axes stay whole, the others pass."""
    for d in dims:
        freeze(t[x][d], "op:fft")
    t[out] = [resized(a, n, "op:fft") for a, n in zip(t[x], out.shape, strict=True)]


def view_as_real(t, out, x):
    """A complex tensor as real numbers: a new last axis of two."""
    t[out] = [*t[x], fixed(2, "complex")]


def view_as_complex(t, out, x):
    """Pairs of real numbers as complex ones: the last axis goes."""
    freeze(t[x][-1], "complex")
    t[out] = t[x][:-1]


RULES = {
    "max_unpool2d": _unpool(2),
    "max_unpool3d": _unpool(3),
    "grid_sampler_2d": grid_sampler,
    "grid_sampler_3d": grid_sampler,
    **{name: _reduction(name, mixes=False) for name in _SUMS},
    **{name: _reduction(name, mixes=True) for name in _OTHER_REDUCTIONS},
    **{name: _ordered(0) for name in ("cumsum", "cumprod", "logcumsumexp", "sort")},
    **{name: _ordered(1) for name in ("topk", "kthvalue")},
    **{name.format(dims): _spatial(dims) for dims in (1, 2, 3) for name in _WINDOWS},
    "native_batch_norm": batch_norm,
    "_native_batch_norm_legit": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm,
    "_native_batch_norm_legit_functional": batch_norm,
    "_batch_norm_with_update": batch_norm,
    "_batch_norm_no_update": batch_norm,
    "cudnn_batch_norm": batch_norm,
    "batch_norm": batch_norm,
    "native_layer_norm": layer_norm,
    "_fused_rms_norm": layer_norm,
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "native_group_norm": group_norm,
    "_softmax": softmax,
    "_log_softmax": softmax,
    "_safe_softmax": softmax,
    "_fft_r2c": fft,
    "_fft_c2r": fft,
    "_fft_c2c": fft,
    "view_as_real": view_as_real,
    "view_as_complex": view_as_complex,
}
