"""One rule per operation: which axes of operands and results are the same, and is that true of the numbers?

The table is the contract. A row is an operation, the shapes of its operands, and the relation a reader would write
down: letters are axes that may shrink (equal letters shrink together), ``.`` an axis that stays whole, ``(a 3)`` a
product, ``(a + b)`` a concatenation, and ``b~`` an axis over which the operation counts, so that a missing channel is
not a zero channel. A new rule joins by adding a row.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils._pytree import tree_leaves

from submodels import rules
from submodels.axes import Axis, choose_factors, factors, find, fixed, freeze, is_frozen, leaves, segments
from submodels.axismap import AxisMap
from submodels.trace import Trace, Tracer

torch.set_num_threads(1)


@dataclass(frozen=True)
class Index:
    """An operand that holds positions below ``high``."""

    shape: tuple[int, ...]
    high: int


# (name, operation, shapes of the operands, relation). Operations read sizes that may shrink off their operands.
MOVING = [
    ("permute", lambda x: x.permute(2, 0, 1), [(2, 3, 4)], "a b c -> c a b"),
    ("permute from the back", lambda x: x.permute(0, -1, -2), [(2, 3, 4)], "a b c -> a c b"),
    ("transpose", lambda x: x.transpose(-1, 1), [(2, 3, 4)], "a b c -> a c b"),
    ("t", lambda x: x.t(), [(2, 3)], "a b -> b a"),
    ("mT", lambda x: x.mT, [(2, 3, 4)], "a b c -> a c b"),
    ("movedim", lambda x: x.movedim(1, -1), [(2, 3, 4, 5)], "a b c d -> a c d b"),
    ("reshape that merges", lambda x: x.flatten(1), [(2, 3, 4)], "a b c -> a (b c)"),
    ("reshape that splits", lambda x: x.view(x.shape[0], -1, 3), [(2, 12)], "a (b c) -> a b c"),
    ("unflatten", lambda x: x.unflatten(1, (-1, 3)), [(2, 12)], "a (b c) -> a b c"),
    ("reshape that regroups", lambda x: x.reshape(x.shape[0], -1, 4), [(2, 3, 8)], "a b (c d) -> a (b c) d"),
    ("reshape that adds ones", lambda x: x.reshape(1, -1, 1, 1), [(6,)], "a -> . a . ."),
    ("reshape across axes", lambda x: x.reshape(4, 3), [(3, 4)], ". . -> . ."),
    ("unsqueeze", lambda x: x.unsqueeze(-1), [(2, 3)], "a b -> a b ."),
    ("squeeze", lambda x: x.squeeze(-1), [(2, 3, 1)], "a b . -> a b"),
    ("squeeze all", lambda x: x.squeeze(), [(3, 1, 4, 1)], "a . b . -> a b"),
    ("squeeze two", lambda x: x.squeeze((1, 3)), [(2, 1, 3, 1)], "a . b . -> a b"),
    ("squeeze what is not one", lambda x: x.squeeze(0), [(3, 4)], "a b -> a b"),
    ("squeeze in place", lambda x: x.clone().squeeze_(-1), [(2, 3, 1)], "a b . -> a b"),
    ("transpose in place", lambda x: x.clone().transpose_(1, 2), [(2, 3, 4)], "a b c -> a c b"),
    ("unsqueeze in place", lambda x: x.clone().unsqueeze_(1), [(2, 3)], "a b -> a . b"),
    ("expand", lambda x: x.expand(-1, 3, -1), [(2, 1, 4)], "a . b -> a c b"),
    ("expand in front", lambda x: x.expand(5, -1), [(4,)], "a -> b a"),
    ("repeat", lambda x: x.repeat(1, 3), [(2, 4)], "a b -> a (3 b)"),
    ("repeat of a single position", lambda x: x.repeat(5, 1, 1), [(1, 4)], ". a -> b . a"),
    ("repeat interleaved", lambda x: x.repeat_interleave(3, 1), [(2, 4)], "a b -> a (b c)"),
    ("tile", lambda x: torch.tile(x, (2, 3)), [(2, 4)], "a b -> (2 a) (3 b)"),
    ("cat", lambda x, y: torch.cat([x, y], 1), [(2, 3, 5), (2, 4, 5)], "a b c, a d c -> a (b + d) c"),
    ("cat with itself", lambda x: torch.cat([x, x], -1), [(2, 3)], "a b -> a (b + b)"),
    ("stack", lambda x, y: torch.stack([x, y], -1), [(2, 3), (2, 3)], "a b, a b -> a b ."),
    ("split", lambda x, y: x.split([len(y), x.shape[1] - len(y)], 1), [(2, 7), (3,)], "a (b + c), d -> a b, a c"),
    ("chunk", lambda x: x.chunk(2, -1), [(3, 8)], "a (b + c) -> a b, a c"),
    (
        "chunk of a concatenation",
        lambda x, y: torch.cat([x, y], 1).chunk(2, 1),
        [(2, 3), (2, 3)],
        "a b, a c -> a b, a c",
    ),
    ("tensor_split", lambda x: x.tensor_split(2, 1), [(3, 8)], "a (b + c) -> a b, a c"),
    ("unbind", lambda x: x.unbind(1), [(2, 3, 4)], "a . b -> a b, a b, a b"),
    ("slice in front", lambda x, y: x[:, : len(y)], [(2, 7), (3,)], "a (b + c), d -> a b"),
    ("slice at the back", lambda x, y: x[..., -len(y) :], [(2, 7), (3,)], "a (b + c), d -> a c"),
    ("slice in the middle", lambda x, y: x.narrow(1, len(y), len(y)), [(2, 10), (3,)], "a (b + c + d), e -> a c"),
    ("slice of all", lambda x: x[:, :99], [(3, 6)], "a b -> a b"),
    ("slice with a step", lambda x: x[:, ::2], [(3, 6)], "a . -> a ."),
    ("select", lambda x: x[:, 0], [(2, 3, 4)], "a . b -> a b"),
    ("roll", lambda x: x.roll(1, 2), [(2, 3, 4)], "a b . -> a b ."),
    ("roll of everything", lambda x: x.roll(1), [(2, 3)], ". . -> . ."),
    ("flip", lambda x: x.flip(-1), [(2, 3, 4)], "a b . -> a b ."),
    ("rot90", lambda x: x.rot90(1, (1, 2)), [(2, 3, 4)], "a . . -> a . ."),
    ("rot90 twice", lambda x: x.rot90(2, (0, -1)), [(2, 3, 4)], ". a . -> . a ."),
    ("pad", lambda x: F.pad(x, (1, 2)), [(2, 3, 4)], "a b . -> a b ."),
    ("pad that shifts", lambda x: F.pad(x, (1, -1)), [(2, 3, 4)], "a b . -> a b ."),
    ("reflection pad", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), [(2, 3, 4, 5)], "a b . . -> a b . ."),
    ("replication pad", lambda x: F.pad(x, (1, 1), mode="replicate"), [(2, 3, 4)], "a b . -> a b ."),
    (
        "circular pad",
        lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
        [(2, 3, 4, 5)],
        "a b (1 + c + 1) (1 + d + 1) -> a b (1 + 1 + c + 1 + 1) (1 + 1 + d + 1 + 1)",
    ),
    ("strides that are those of the tensor", lambda x: x.as_strided(x.shape, x.stride()), [(2, 3)], "a b -> a b"),
    ("strides that transpose", lambda x: x.as_strided((3, 3), (1, 3)), [(3, 3)], ". . -> . ."),
    ("unfold of an axis", lambda x: x.unfold(2, 2, 1), [(2, 3, 5)], "a b . -> a b . ."),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [(2, 12, 3, 5)], "a (b 4) . . -> a b . ."),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), [(2, 3, 4, 6)], "a b . . -> a (b 4) . ."),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), [(2, 8, 3, 3)], "a (2 b) c d -> a (b 2) c d"),
    ("im2col", lambda x: F.unfold(x, 2), [(2, 3, 4, 5)], "a b . . -> a (b 4) ."),
    ("col2im", lambda x: F.fold(x, (4, 5), 2), [(2, 12, 12)], "a (b 4) . -> a b . ."),
    ("clone", lambda x: x.clone(), [(2, 3)], "a b -> a b"),
    ("contiguous", lambda x: x.transpose(0, 1).contiguous(), [(2, 3)], "a b -> b a"),
]
CONTRACTING = [
    ("mm", lambda x, y: x @ y, [(2, 3), (3, 4)], "a b, b c -> a c"),
    ("matmul of a batch", lambda x, y: x @ y, [(2, 5, 3), (3, 4)], "a b c, c d -> a b d"),
    (
        "deform_conv2d",
        lambda x, w, o, b: torchvision.ops.deform_conv2d(x, o * 0.1, w, b, padding=1),
        [(2, 3, 4, 4), (5, 3, 3, 3), (2, 18, 4, 4), (5,)],
        "a b . ., c b . ., a . . ., c -> a c . .",
    ),
    (
        "deform_conv2d with a mask",
        lambda x, w, o, b, m: torchvision.ops.deform_conv2d(x, o * 0.1, w, b, padding=1, mask=m),
        [(2, 3, 4, 4), (5, 3, 3, 3), (2, 18, 4, 4), (5,), (2, 9, 4, 4)],
        "a b . ., c b . ., a . . ., c, a . . . -> a c . .",
    ),
    ("addmm", torch.addmm, [(4,), (2, 3), (3, 4)], "a, b c, c a -> b a"),
    ("mv", lambda x, y: x @ y, [(2, 3), (3,)], "a b, b -> a"),
    ("dot", lambda x, y: x @ y, [(3,), (3,)], "a, a -> "),
    ("bmm", torch.bmm, [(2, 3, 4), (2, 4, 5)], "a b c, a c d -> a b d"),
    ("cdist", torch.cdist, [(5, 4), (6, 4)], "a b, c b -> a c"),
    ("cdist of a batch", lambda x, y: torch.cdist(x, y, p=1), [(2, 5, 4), (2, 6, 4)], "a b c, a d c -> a b d"),
    ("cdist of many rows", torch.cdist, [(27, 4), (26, 4)], "a b, c b -> a c"),
    ("baddbmm", torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], "a b c, a b d, a d c -> a b c"),
    ("linear", F.linear, [(2, 5, 3), (4, 3), (4,)], "a b c, d c, d -> a b d"),
    ("linear without bias", F.linear, [(2, 3), (4, 3)], "a b, c b -> a c"),
    (
        "einsum",
        lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
        [(2, 3, 5, 4), (2, 3, 7, 4)],
        "a b c d, a b e d -> a b c e",
    ),
    ("einsum that sums", lambda x, y: torch.einsum("nc,kc->k", x, y), [(2, 3), (4, 3)], "a b, c b -> c"),
    ("outer", torch.outer, [(3,), (5,)], "a, b -> a b"),
    (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5),
        [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)],
        "a b c d, a b . d, a b . e -> a b c e",
    ),
    (
        "attention with a mask",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.5),
        [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6), (5, 7)],
        "a b c d, a b . d, a b . e, c . -> a b c e",
    ),
    (
        "attention of grouped queries",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True),
        [(2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)],
        "a (b c) d e, a b . e, a b . f -> a (b c) d f",
    ),
    ("conv1d", F.conv1d, [(2, 3, 8), (4, 3, 3), (4,)], "a b ., c b ., c -> a c ."),
    (
        "conv2d",
        lambda x, w, b: F.conv2d(x, w, b, 2, 1),
        [(2, 3, 8, 8), (4, 3, 3, 3), (4,)],
        "a b . ., c b . ., c -> a c . .",
    ),
    ("conv3d", F.conv3d, [(2, 3, 4, 4, 4), (4, 3, 2, 2, 2)], "a b . . ., c b . . . -> a c . . ."),
    (
        "depthwise conv",
        lambda x, w, b: F.conv2d(x, w, b, groups=len(w)),
        [(2, 6, 5, 5), (6, 1, 3, 3), (6,)],
        "a b . ., b . . ., b -> a b . .",
    ),
    (
        "depthwise conv with a multiplier",
        lambda x, w: F.conv2d(x, w, groups=x.shape[1]),
        [(2, 4, 5, 5), (12, 1, 3, 3)],
        "a b . ., (b c) . . . -> a (b c) . .",
    ),
    (
        "grouped conv",
        lambda x, w, b: F.conv2d(x, w, b, groups=x.shape[1] // w.shape[1]),
        [(2, 12, 5, 5), (8, 3, 3, 3), (8,)],
        "a (b c) . ., (b d) c . ., (b d) -> a (b d) . .",
    ),
    (
        "transposed conv",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2),
        [(2, 3, 5, 5), (3, 4, 2, 2), (4,)],
        "a b . ., b c . ., c -> a c . .",
    ),
    (
        "transposed grouped conv",
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, groups=len(b) // w.shape[1]),
        [(2, 12, 5, 5), (12, 5, 2, 2), (20,)],
        "a (b c) . ., (b c) d . ., (b d) -> a (b d) . .",
    ),
]
REDUCING = [
    (
        "batch_norm",
        lambda x, m, v, w, b: F.batch_norm(x, m, v * v, w, b),
        [(2, 3, 4), (3,), (3,), (3,), (3,)],
        "a~ b c~, b, b, b, b -> a~ b c~",
    ),
    (
        "batch_norm in training",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [(4, 3), (3,), (3,)],
        "a~ b, b, b -> a~ b",
    ),
    ("instance_norm", F.instance_norm, [(2, 3, 4, 5)], "a b c~ d~ -> a b c~ d~"),
    ("layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), [(2, 5, 4), (4,), (4,)], "a b c~, c~, c~ -> a b c~"),
    (
        "layer_norm over two axes",
        lambda x, w: F.layer_norm(x, w.shape, w),
        [(2, 5, 4), (5, 4)],
        "a b~ c~, b~ c~ -> a b~ c~",
    ),
    (
        "group_norm",
        lambda x, w, b: F.group_norm(x, x.shape[1] // 3, w, b),
        [(2, 12, 4, 5), (12,), (12,)],
        "a (b c~) d~ e~, (b c~), (b c~) -> a (b c~) d~ e~",
    ),
    ("rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), [(2, 5, 4), (4,)], "a b c~, c~ -> a b c~"),
    ("softmax", lambda x: x.softmax(1), [(2, 3, 4)], "a . b -> a . b"),
    ("log_softmax", lambda x: x.log_softmax(-1), [(2, 3)], "a . -> a ."),
    ("sum", lambda x: x.sum(1), [(2, 3, 4)], "a b c -> a c"),
    ("sum that keeps its axis", lambda x: x.sum((1, 2), keepdim=True), [(2, 3, 4)], "a b c -> a . ."),
    ("sum of all", lambda x: x.sum(), [(2, 3)], "a b -> "),
    ("norm", lambda x: x.norm(dim=-1), [(2, 3)], "a b -> a"),
    ("mean", lambda x: x.mean((2, 3)), [(2, 3, 4, 5)], "a b c~ d~ -> a b"),
    ("mean that keeps its axis", lambda x: x.mean(-1, keepdim=True), [(2, 3, 4)], "a b c~ -> a b ."),
    ("mean of all", lambda x: x.mean(), [(2, 3)], "a~ b~ -> "),
    ("var", lambda x: x.var(1), [(2, 3, 4)], "a b~ c -> a c"),
    ("std that keeps its axes", lambda x: x.std((1, 2), keepdim=True), [(2, 3, 4)], "a b~ c~ -> a . ."),
    ("var_mean", lambda x: torch.var_mean(x, 1), [(2, 3)], "a b~ -> a, a"),
    ("max", lambda x: x.max(1), [(2, 3, 4)], "a b~ c -> a c, a c"),
    ("max that keeps its axis", lambda x: x.max(-1, keepdim=True)[0], [(2, 3)], "a b~ -> a ."),
    ("max of all", lambda x: x.max(), [(2, 3)], "a~ b~ -> "),
    ("amax", lambda x: x.amax((1, 2)), [(2, 3, 4)], "a b~ c~ -> a"),
    ("argmax", lambda x: x.argmax(0), [(2, 3)], "a~ b -> b"),
    ("logsumexp", lambda x: x.logsumexp(1), [(2, 3)], "a b~ -> a"),
    ("any", lambda x: (x > 0).any(1), [(2, 3)], "a b -> a"),
    ("all", lambda x: (x > 0).all(1), [(2, 3)], "a b~ -> a"),
    ("normalize", lambda x: F.normalize(x, dim=1), [(2, 3, 4)], "a b c -> a b c"),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2), [(2, 3, 4, 6)], "a b . . -> a b . ."),
    ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), [(2, 3, 4)], "a b . -> a b ."),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), [(2, 3, 4, 6)], "a b . . -> a b . ."),
    ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), [(2, 3, 4, 6)], "a b . . -> a b . ."),
    (
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        [(2, 3, 4, 6)],
        "a b . . -> a b . .",
    ),
    ("pooling of one image", lambda x: F.max_pool2d(x, 2), [(3, 4, 6)], "a . . -> a . ."),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2), [(2, 3, 4, 6)], "a b . . -> a b . ."),
    (
        "interpolate bilinearly",
        lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
        [(2, 3, 4, 6)],
        "a b . . -> a b . .",
    ),
    (
        "grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        [(2, 3, 4, 6), (2, 5, 5, 2)],
        "a b . ., a . . . -> a b . .",
    ),
    ("cumsum", lambda x: x.cumsum(1), [(2, 3, 4)], "a . b -> a . b"),
    ("sort", lambda x: x.sort()[0], [(2, 3, 4)], "a b . -> a b ."),
    ("topk", lambda x: x.topk(2, dim=1), [(2, 3, 4)], "a . b -> a . b, a . b"),
    ("topk of the last axis", lambda x: x.topk(1), [(2, 3, 4)], "a b . -> a b ., a b ."),
    ("topk of more than there are axes", lambda x: x.topk(4), [(2, 3, 5)], "a b . -> a b ., a b ."),
    ("fft", lambda x: torch.fft.fft(x, dim=1).real, [(2, 3, 4)], "a . b -> a . b"),
    ("rfft2", lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), [(2, 3, 4, 6)], "a b . . -> a b . ."),
]
INDEXING = [
    ("index", lambda x, i: x[:, i], [(2, 5, 3), Index((4,), 5)], "a . b, . -> a . b"),
    (
        "index with two tensors",
        lambda x, i, j: x[:, i, j],
        [(2, 4, 4, 3), Index((5,), 4), Index((5,), 4)],
        "a . . b, ., . -> a . b",
    ),
    ("index_select", lambda x, i: x.index_select(1, i), [(2, 5, 3), Index((4,), 5)], "a . b, . -> a . b"),
    (
        "roi_align",
        lambda x: torchvision.ops.roi_align(x, torch.tensor([[0, 0.5, 0.5, 3, 3]], dtype=x.dtype), 2),
        [(2, 3, 4, 4)],
        ". a . . -> . a . .",
    ),
    ("bucketize", lambda x: x * torch.bucketize(x, torch.arange(3.0, dtype=x.dtype)), [(2, 3)], "a b -> a b"),
    ("gather", lambda x, i: x.gather(1, i), [(2, 5, 3), Index((2, 4, 3), 5)], "a . b, a . b -> a . b"),
    ("embedding", lambda i, w: F.embedding(i, w), [Index((2, 3), 7), (7, 4)], "a b, . c -> a b c"),
    ("glu", lambda x: F.glu(x, 1), [(2, 6, 3)], "a (b + b) c -> a b c"),
    ("add", torch.add, [(2, 3), (2, 3)], "a b, a b -> a b"),
    ("mul of broadcast operands", torch.mul, [(2, 3, 4), (3, 1)], "a b c, b . -> a b c"),
    ("where", lambda c, x, y: torch.where(c > 0, x, y), [(2, 1, 4), (3, 4), (2, 3, 1)], "a . b, c b, a c . -> a c b"),
    ("masked_fill", lambda x, m: x.masked_fill(m > 0, -1.0), [(2, 3, 4), (3, 1)], "a b c, b . -> a b c"),
    ("prelu", F.prelu, [(2, 3, 4), (3,)], "a b c, b -> a b c"),
    ("maximum", lambda x, y: torch.max(x, y), [(2, 3), (3,)], "a b, b -> a b"),
    ("addcmul", torch.addcmul, [(2, 3), (3,), (2, 1)], "a b, b, a . -> a b"),
    ("lerp", torch.lerp, [(2, 3), (2, 3), (3,)], "a b, a b, b -> a b"),
    ("copy into", lambda x, y: torch.empty_like(x).copy_(y), [(2, 3), (3,)], "a b, b -> a b"),
    (
        "copy into a slice",
        lambda x, y: (z := x.clone())[:, : y.shape[1]].copy_(y) is None or z,
        [(2, 5), (2, 3)],
        "a (b + c), a b -> a (b + c)",
    ),
    ("dropout in training", lambda x: F.dropout(x, 0.0, True), [(2, 3)], "a b -> a b"),
    ("to another type", lambda x: x.float().double(), [(2, 3)], "a b -> a b"),
    ("leaky units that are drawn", lambda x: F.rrelu(x) + F.rrelu(x, 0.2, 0.2, training=True), [(2, 3)], "a b -> a b"),
    ("polar", lambda x: torch.view_as_real(torch.polar(x.abs(), x)), [(2, 3)], "a b -> a b ."),
    ("poisson", lambda x: torch.poisson(x.abs()) * 0 + torch.empty_like(x).cauchy_() * 0, [(2, 3)], "a b -> a b"),
    ("gradient of softplus", lambda x: torch.ops.aten.softplus_backward(x, x, 1, 20), [(2, 3)], "a b -> a b"),
    ("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), [(3, 2)], "a . -> a ."),
]
SCATTERING = [
    ("index_add", lambda x, i, y: x.index_add(0, i, y), [(5, 3), Index((7,), 5), (7, 3)], ". a, ., . a -> . a"),
    (
        "index_copy",
        lambda x, i, y: x.index_copy(1, i, y),
        [(2, 5, 3), Index((1,), 5), (2, 1, 3)],
        "a . b, ., a . b -> a . b",
    ),
    ("index_fill", lambda x, i: x.index_fill(0, i, 0.0), [(5, 3), Index((2,), 5)], ". a, . -> . a"),
    ("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), [(5, 3), Index((7, 3), 5), (7, 3)], ". a, . a, . a -> . a"),
    (
        "scatter_add of an index per row",
        lambda x, i, y: x.scatter_add(0, i[:, None].expand_as(y), y),
        [(5, 3), Index((7,), 5), (7, 3)],
        ". a, ., . a -> . a",
    ),
    (
        "scatter_reduce",
        lambda x, i, y: x.scatter_reduce(0, i, y, "sum"),
        [(5, 3), Index((7, 3), 5), (7, 3)],
        ". a, . a, . a -> . a",
    ),
    (
        "scatter of fewer columns",
        lambda x, i, y: x.scatter_add(0, i, y),
        [(5, 3), Index((7, 2), 5), (7, 2)],
        ". ., . ., . . -> . .",
    ),
    ("index_put", lambda x, i, y: x.index_put((i,), y), [(5, 3), Index((1,), 5), (1, 3)], ". a, ., . a -> . a"),
    (
        "index_put behind an axis",
        lambda x, i, y: (z := x.clone()).__setitem__((slice(None), i), y) or z,
        [(2, 5, 3), Index((1,), 5), (2, 1, 3)],
        "a . b, ., a . b -> a . b",
    ),
    ("embedding_bag", lambda i, w: F.embedding_bag(i, w), [Index((2, 3), 7), (7, 4)], ". ., . a -> . a"),
    ("bilinear", F.bilinear, [(2, 3), (2, 4), (5, 3, 4), (5,)], "a b, a c, d b c, d -> a d"),
]
LOSSES = [
    ("mse_loss", F.mse_loss, [(2, 3), (2, 3)], "a~ b~, a~ b~ -> "),
    ("mse_loss that sums", lambda x, y: F.mse_loss(x, y, reduction="sum"), [(2, 3), (2, 3)], "a b, a b -> "),
    ("mse_loss of each", lambda x, y: F.mse_loss(x, y, reduction="none"), [(2, 3), (2, 3)], "a b, a b -> a b"),
    ("huber_loss", F.huber_loss, [(2, 3), (2, 3)], "a~ b~, a~ b~ -> "),
    ("smooth_l1_loss", F.smooth_l1_loss, [(2, 3), (2, 3)], "a~ b~, a~ b~ -> "),
    (
        "binary_cross_entropy that sums",
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="sum") * 0,
        [(2, 3), (2, 3)],
        "a b, a b -> ",
    ),
    ("cross_entropy", lambda x, i: F.cross_entropy(x, i, reduction="none"), [(2, 4), Index((2,), 4)], "a ., a -> a"),
    (
        "cross_entropy of pixels",
        lambda x, i: F.cross_entropy(x, i) * 0,
        [(2, 4, 3, 3), Index((2, 3, 3), 4)],
        "a . b c, a b c -> ",
    ),
    (
        "weight_norm",
        lambda x, v, g: x @ torch._weight_norm(v, g.abs() + 1, 0).T,
        [(2, 3), (4, 3), (4, 1)],
        "a b, c b, c . -> a c",
    ),
]
TABLE = MOVING + CONTRACTING + REDUCING + INDEXING + SCATTERING + LOSSES


def _shape(operand):
    return operand.shape if isinstance(operand, Index) else operand


def _traced(op, operands):
    """(tracer, axes of the operands, axes of the results) of one run on meta tensors with an axis each of their own."""
    tracer = Tracer()
    inputs = []
    for operand in operands:
        x = torch.empty(
            _shape(operand), dtype=torch.long if isinstance(operand, Index) else torch.double, device="meta"
        )
        tracer[x] = [Axis(n) for n in x.shape]
        inputs.append(x)
    rows = [tracer[x] for x in inputs]
    with tracer, torch.no_grad():
        out = op(*inputs)
    return tracer, rows, [tracer[o] for o in tree_leaves(out)]


def _counts(axis):
    return any(label.startswith(("op:", "norm:")) for label in axis.tags)


def _relation(rows, results):
    names = {}

    def show(axis, alone=True):
        axis = find(axis)
        if is_frozen(axis):
            return "." if alone else str(axis.size)
        if axis.kind == "product":
            return f"({' '.join(show(part, False) for part in factors(axis))})"
        if axis.kind == "sum":
            return f"({' + '.join(show(part, False) for part in segments(axis))})"
        name = names.setdefault(id(axis), "abcdefghijklmn"[len(names)])
        return f"{name}~" if _counts(axis) else name

    left = ", ".join(" ".join(map(show, row)) for row in rows)
    return f"{left} -> {', '.join(' '.join(map(show, row)) for row in results)}"


def _rows(table):
    return [pytest.param(*row[1:], id=row[0]) for row in table]


@pytest.mark.parametrize(("op", "operands", "relation"), _rows(TABLE))
def test_an_operation_relates_its_axes_as_the_table_says(op, operands, relation):
    tracer, rows, results = _traced(op, operands)
    assert _relation(rows, results) == relation
    assert not tracer.unknown or "." in relation


def test_names_in_the_table_are_distinct():
    assert len({row[0] for row in TABLE}) == len(TABLE)


# The same law as `verify`, for one operation: to leave channels out is to set them to zero.


def _positions(row, kept, sizes):
    return [term.index(kept, sizes) for term in row]


def _take(x, index):
    for dim, positions in enumerate(index):
        x = x.index_select(dim, positions)
    return x


def _masked(x, index):
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[torch.meshgrid(*index, indexing="ij") if index else ()] = True
    return x * mask


def _cut_at_random(rows, results, generator):
    """(axis map of the operands and results, the channels kept of every group, in any order)."""
    for leaf in [leaf for row in rows + results for axis in row for leaf in leaves(axis)]:
        if _counts(leaf):
            freeze(leaf, "counts its channels")
    for axis in [axis for row in rows + results for axis in row]:
        choose_factors(axis, "whole")
    named = {f"operand {i}": row for i, row in enumerate(rows)} | {f"result {i}": row for i, row in enumerate(results)}
    axis_map = AxisMap._compiled(nn.Identity(), Trace(named, {}))
    kept = []
    for group in axis_map.groups:
        order = torch.randperm(group.size, generator=generator)
        own = any(name.startswith("operand") for name, _ in group.members)
        kept.append(order[: (group.size + 1) // 2] if own else torch.arange(group.size))
    return axis_map, kept


@pytest.mark.parametrize(("op", "operands", "relation"), _rows(TABLE))
def test_leaving_channels_out_is_setting_them_to_zero(op, operands, relation):
    generator = torch.Generator().manual_seed(0)
    _, rows, results = _traced(op, operands)
    axis_map, kept = _cut_at_random(rows, results, generator)
    shapes = [axis_map.shape(f"operand {i}", [len(k) for k in kept]) for i in range(len(operands))]
    if "a" in relation.replace("a~", ""):  # something can shrink: then the law is tried on operands that did
        assert shapes != [tuple(_shape(operand)) for operand in operands]
    small, whole = [], []
    for i, operand in enumerate(operands):
        index = _positions(axis_map.dims[f"operand {i}"], kept, axis_map.sizes)
        if isinstance(operand, Index):
            x = torch.randint(operand.high, operand.shape, generator=generator)
            whole.append(x)
        else:
            x = torch.randn(operand, dtype=torch.double, generator=generator)
            whole.append(_masked(x, index))
        small.append(_take(x, index))
    ours, theirs = tree_leaves(op(*small)), tree_leaves(op(*whole))
    assert len(ours) == len(theirs) == len(results)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        index = _positions(axis_map.dims[f"result {i}"], kept, axis_map.sizes)
        torch.testing.assert_close(a, _take(b, index), rtol=1e-10, atol=1e-10)


# Kernels that only real tensors meet


@pytest.mark.parametrize("mask", [None, (5, 7), (2, 3, 5, 7)])
def test_fused_attention_relates_its_axes_as_its_parts_do(mask):
    tracer, (q, k, v) = Tracer(), (torch.randn(2, 3, n, 4) for n in (5, 7, 7))
    m = None if mask is None else torch.zeros(mask)
    tensors = [q, k, v] if m is None else [q, k, v, m]
    for x in tensors:
        tracer[x] = [Axis(n) for n in x.shape]
    with tracer, torch.no_grad():
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=m)[0]
    masked = {None: "", (5, 7): ", c .", (2, 3, 5, 7): ", a b c ."}[mask]
    assert _relation([tracer[x] for x in tensors], [tracer[out]]) == f"a b c d, a b . d, a b . e{masked} -> a b c e"


# Operations without a rule


@pytest.mark.parametrize(
    ("name", "op", "shapes"),
    [
        ("linalg_inv_ex", torch.linalg.inv, [(4, 4)]),
        ("renorm", lambda x: x.renorm(2, 0, 1.0), [(3, 4)]),
        ("scatter", lambda x, y: x.scatter(1, torch.zeros(3, 4, dtype=torch.long, device="meta"), y), [(3, 4), (3, 4)]),
    ],
)
def test_an_operation_without_a_rule_freezes_every_axis_it_touches_and_is_counted(name, op, shapes):
    tracer, rows, results = _traced(op, shapes)
    assert all(is_frozen(axis) for row in rows + results for axis in row)
    assert {axis.frozen_by for row in rows for axis in row} == {f"op:{name}"}
    assert tracer.unknown == {name: 1}


def test_an_operation_without_a_rule_does_no_harm_among_frozen_axes():
    tracer, x = Tracer(), torch.empty(4, 4, device="meta")
    tracer[x] = [fixed(4, "kernel"), fixed(4, "kernel")]
    with tracer:
        y = torch.linalg.inv(x)
    assert not tracer.unknown and all(map(is_frozen, tracer[y]))


def test_a_rule_that_cannot_cope_freezes_like_an_operation_without_one():
    # The size of the result depends on the values, so this one runs on real tensors.
    tracer, x, mask = Tracer(), torch.ones(3, 4), torch.tensor([True, False, True])
    tracer[x], tracer[mask] = [Axis(3), Axis(4)], [Axis(3)]
    with tracer:
        y = x[mask]
    assert tracer.unknown == {"index": 1}
    assert all(is_frozen(axis) for tensor in (x, mask, y) for axis in tracer[tensor])


# What a call can be that a rule does not cover: the axes it touches are frozen, and the trace goes on.
REFUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v),
        [(2, 4, 5, 6), (2, 3, 5, 6), (2, 3, 5, 6)],
    ),
    "im2col": (lambda x: F.unfold(x, 2), [(3, 4, 5)]),
    "col2im": (lambda x: F.fold(x, (4, 5), 2), [(12, 12)]),
    "kthvalue": (lambda x: x.kthvalue(2), [(3, 4)]),
    "mode": (lambda x: x.mode(), [(3, 4)]),
    "repeat": (lambda x: x.repeat(2, 3), [(3, 0)]),
    "view": (lambda x: x.view(4, 2, 0, 0), [(4, 0)]),
    "mv": (lambda x, y, z: torch.mv(x, y, out=z), [(3, 4), (4,), (3,)]),  # an overload the rule does not take
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_a_rule_refuses_freezes_every_axis_it_touches_and_is_counted(name):
    op, shapes = REFUSED[name]
    tracer, inputs = Tracer(), [torch.ones(shape) for shape in shapes]
    for x in inputs:
        tracer[x] = [Axis(n) for n in x.shape]
    with tracer, torch.no_grad():
        results = tree_leaves(op(*inputs))
    assert tracer.unknown == {name: 1}
    assert all(is_frozen(axis) for x in [*inputs, *results] for axis in tracer[x])


@pytest.mark.parametrize("op", [lambda x: x.softmax(0), lambda x: x.sum(0), lambda x: x.topk(1), lambda x: x.cumsum(0)])
def test_numbers_have_no_axes_and_need_no_rule(op):
    tracer, x = Tracer(), torch.tensor(2.0)
    with tracer:
        results = tree_leaves(op(x))
    assert not tracer.unknown and [tracer[y] for y in results] == [[] for _ in results]


@pytest.mark.parametrize("mistake", [TypeError, AttributeError, IndexError, AssertionError, ValueError])
def test_a_mistake_in_a_rule_is_an_error_and_does_not_freeze(monkeypatch, mistake):
    def wrong(t, out, x, *_args):
        raise mistake("a typo")

    monkeypatch.setitem(rules.RULES, "permute", wrong)
    with pytest.raises(rules.RuleError, match=r"rule of 'permute' failed on shapes \[\(2, 3\)\]: .*a typo") as caught:
        _traced(lambda x: x.permute(1, 0), [(2, 3)])
    assert type(caught.value.__cause__) is mistake


@pytest.mark.parametrize("training", [False, True])
def test_a_mistake_in_a_rule_is_not_taken_for_one_in_the_model(monkeypatch, training):
    class Flipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.up(x)
            return self.head(x.flip(0) if self.training == training else x)

    monkeypatch.setitem(rules.RULES, "flip", lambda t, out, x, dims: len(None))
    with pytest.raises(rules.RuleError, match="the rule of 'flip' failed"):
        AxisMap.trace(Flipped(), torch.zeros(2, 4))


def test_a_tensor_the_tracer_never_saw_is_a_constant_and_whole():
    tracer, x = Tracer(), torch.empty(3, device="meta")
    tracer[x] = [Axis(3)]
    with tracer:
        y = x * torch.ones(3, device="meta")
    assert is_frozen(tracer[x][0]) and tracer[y][0].frozen_by == "constant"


def test_axes_must_have_the_sizes_of_their_tensor():
    with pytest.raises(AssertionError, match="for shape"):
        Tracer()[torch.empty(3, device="meta")] = [Axis(4)]


class Inverted(nn.Module):
    """A layer whose weight is inverted, between two that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(6, 12), nn.Linear(8, 8), nn.Linear(8, 3)
        self.middle = nn.Linear(12, 8)

    def forward(self, x):
        x = self.middle(torch.relu(self.first(x)))
        return self.last(x @ torch.linalg.inv(self.odd.weight))


def test_an_unknown_operation_is_reported_by_name_and_the_rest_is_cut():
    axis_map = AxisMap.trace(Inverted(), torch.zeros(2, 6))
    assert axis_map.unknown == {"linalg_inv_ex": 1}
    assert axis_map.sizes == (12,)
    assert axis_map.frozen_by["odd.weight", 0] == axis_map.frozen_by["middle.weight", 0] == "op:linalg_inv_ex"
    assert "kept whole (op:linalg_inv_ex): odd.weight[0], odd.weight[1], " in axis_map.describe()
