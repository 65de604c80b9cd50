"""Operations that sum products over a shared axis: matrix products, attention, convolution."""

from torch import Tensor

from submodels.axes import Axis, fixed, freeze, product, tag, unify
from submodels.rules.operands import outputs, require, same


def mm(t, out, a, b, **_kw):
    """Matrix product: the inner axes are one; the result has the rows of a and the columns of b."""
    unify(t[a][1], t[b][0])
    t[out] = [t[a][0], t[b][1]]


def addmm(t, out, bias, a, b, **_kw):
    """Matrix product plus a bias that broadcasts against the result."""
    mm(t, out, a, b)
    same(t, t[out], t[bias])


def sparse_addmm(t, out, bias, a, b, beta=1, alpha=1):
    """Product with a sparse matrix; without a bias torch hands in zeros of its own, which bind nothing."""
    mm(t, out, a, b)
    if beta:
        same(t, t[out], t[bias])


def bmm(t, out, a, b, **_kw):
    """Batched matrix product: batch and inner axes are shared; a batch that can shrink is one of heads."""
    batch, _, inner = t[a]
    unify(batch, t[b][0])
    unify(inner, t[b][1])
    # Attention written by hand multiplies per head. A batch of samples is frozen as a model input, so the tag is idle.
    tag(batch, "heads")
    t[out] = [batch, t[a][1], t[b][2]]


def baddbmm(t, out, bias, a, b, **_kw):
    """Batched matrix product plus a bias that broadcasts against the result."""
    bmm(t, out, a, b)
    same(t, t[out], t[bias])


def grouped_mm(t, out, a, b, *_args, **_kw):
    """Matrix product per expert: rows of a, sorted by expert, times the matrix of each; experts stay whole."""
    require(a.dim() == 2 and b.dim() == 3, "experts of another layout")
    freeze(t[b][0], "op:_grouped_mm")
    unify(t[a][1], t[b][1])
    t[out] = [t[a][0], t[b][2]]


def mv(t, out, a, b):
    """Matrix times vector: the inner axes are one, the rows remain."""
    unify(t[a][1], t[b][0])
    t[out] = [t[a][0]]


def dot(t, out, a, b):
    """Inner product: the two axes are one, and none remains."""
    unify(t[a][0], t[b][0])
    t[out] = []


def cdist(t, out, a, b, *_how):
    """Distances between all rows of a and of b: features are one axis, which is summed over."""
    require(a.shape[:-2] == b.shape[:-2], "batches of different shapes")
    unify(t[a][-1], t[b][-1])
    same(t, t[a][:-2], t[b][:-2])
    t[out] = [*t[a][:-1], t[b][-2]]


def linear(t, out, x, weight, bias=None):
    """Linear layer: features in are the columns of the weight, features out its rows."""
    unify(t[x][-1], t[weight][1])
    if bias is not None:
        unify(t[weight][0], t[bias][0])
    t[out] = [*t[x][:-1], t[weight][0]]


def attention(t, out, q, k, v, *settings, **kw):
    """Fused attention: queries, keys and values share batch and heads, queries and keys the head's width.

    Where several query heads read one key head (grouped queries), the query heads are (key heads, queries of each).
    """
    *batch, rows, inner = t[q]
    for i, axis in enumerate(batch):
        for other in (t[k][i], t[v][i]):
            require(other.size and axis.size % other.size == 0, "heads of queries and of keys that do not match")
            unify(axis, product([other, Axis(axis.size // other.size)]))
    unify(inner, t[k][-1])
    unify(t[k][-2], t[v][-2])
    freeze(t[k][-2], "op:softmax")  # a softmax runs over the keys: leaving some out changes the weight of the others
    # The variants of the operation have the mask in fourth place, by name, or no such argument there.
    mask = settings[0] if settings and isinstance(settings[0], Tensor) else kw.get("attn_mask")
    if mask is not None:
        same(t, [*batch, rows, t[k][-2]], t[mask])
    first, *rest = outputs(out)
    t[first] = [*batch, rows, t[v][-1]]
    for o in rest:
        t[o] = [fixed(n, "attention statistics") for n in o.shape]


def convolution(t, out, x, weight, bias, *settings):
    """Convolution: channels in and out are the weight's first axes; positions and kernel stay whole."""
    _stride, _padding, _dilation, transposed, _output_padding, groups, *_flags = settings
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


def deformable_convolution(t, out, x, weight, offset, mask, bias, *settings):
    """Convolution whose kernel is moved about at every position, for all channels alike."""
    *_places, groups, offset_groups, use_mask = settings
    require(offset_groups == 1, "channels with offsets of their own")
    for places in (offset, mask) if use_mask else (offset,):
        unify(t[x][0], t[places][0])
        for axis in t[places][1:]:
            freeze(axis, "spatial")
    convolution(t, out, x, weight, bias, None, None, None, False, None, groups)


RULES = {
    "mm": mm,
    "addmm": addmm,
    "_sparse_addmm": sparse_addmm,
    "bmm": bmm,
    "baddbmm": baddbmm,
    "_grouped_mm": grouped_mm,
    "mv": mv,
    "dot": dot,
    "vdot": dot,
    "_cdist_forward": cdist,
    "_euclidean_dist": cdist,
    "linear": linear,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_attention_math": attention,
    "_scaled_dot_product_attention_math_for_mps": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "convolution": convolution,
    "_convolution": convolution,
    "convolution_overrideable": convolution,
    "deform_conv2d": deformable_convolution,
}
