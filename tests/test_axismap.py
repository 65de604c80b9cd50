"""AxisMap: counts, shares and descriptions by hand; why axes stay whole; what integers measure."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import (
    CUTTABLE,
    IMAGE,
    EinopsAttention,
    GroupNorms,
    LiteralView,
    MultiheadAttention,
    SplitByStoredSize,
    SqueezeExcite,
    StackedBranches,
    TwoInputs,
    traced,
)
from torch import nn

from submodels import AxisMap, ScalableModel
from submodels.axismap import ChannelGroup
from submodels.terms import Fixed, Group, Product

torch.set_num_threads(1)


def _mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _map(*sizes, **options):
    return AxisMap.trace(_mlp(*sizes), torch.zeros(2, sizes[0]), **options)


# Widths


@pytest.mark.parametrize(("width", "kept"), [(0.1, 3), (0.5, 15), (1, 30), (1.0, 30), (0.11, 4), (1e-9, 1), (0.034, 2)])
def test_a_group_of_thirty_keeps_as_many_channels_as_the_width_rounded_up(width, kept):
    assert _map(4, 30, 3).counts(width) == (kept,)


def test_the_width_that_names_a_count_gives_that_count():
    for size in range(2, 130):
        axis_map = AxisMap((ChannelGroup(0, size),), {}, {}, {}, frozenset(), (), {})
        assert [axis_map.counts(k / size) for k in range(1, size + 1)] == [(k,) for k in range(1, size + 1)]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(2, 2048), st.floats(1e-3, 1), st.floats(1e-3, 1))
def test_counts_grow_with_the_width_and_never_fall_short_of_it(size, a, b):
    axis_map = AxisMap((ChannelGroup(0, size),), {}, {}, {}, frozenset(), (), {})
    (narrow,), (wide,) = axis_map.counts(min(a, b)), axis_map.counts(max(a, b))
    assert 1 <= narrow <= wide <= size
    assert narrow >= min(a, b) * size - 1e-6 and narrow - 1 < min(a, b) * size


def test_a_sub_model_keeps_no_more_than_it_has():
    axis_map = _map(4, 30, 20, 3)
    assert axis_map.counts(0.5, own=(10, 20)) == (10, 10)
    assert axis_map.counts(1.0, own=(10, 7)) == (10, 7)
    assert axis_map.counts(0.1, own=(10, 7)) == (3, 2)


@pytest.mark.parametrize("width", [0, -1, 1.5, 1.0000001, math.nan, math.inf, True, "0.5", None, 1 + 0j])
def test_a_width_outside_its_range_is_refused_with_the_smallest_there_is(width):
    with pytest.raises(ValueError) as caught:
        _map(4, 16, 8, 3).counts(width)
    assert str(caught.value) == (
        f"width {width!r} is outside (0, 1]; the smallest sub-model of this network keeps one channel a group "
        "(width 0.0625)"
    )


def test_widths_are_those_at_which_something_changes():
    axis_map = _map(4, 4, 6, 3)
    assert axis_map.widths() == [1 / 6, 1 / 4, 2 / 6, 2 / 4, 4 / 6, 3 / 4, 5 / 6, 1]
    counts = [axis_map.counts(width) for width in axis_map.widths()]
    assert len(set(counts)) == len(counts)
    between = [axis_map.counts((a + b) / 2) for a, b in itertools.pairwise(axis_map.widths())]
    assert between == counts[1:]


def test_shapes_parameters_and_share_by_hand():
    axis_map = _map(4, 8, 3)
    assert axis_map.shape("0.weight", (5,)) == (5, 4) and axis_map.shape("2.weight", (5,)) == (3, 5)
    assert axis_map.num_params((8,)) == 4 * 8 + 8 + 8 * 3 + 3
    assert axis_map.num_params((4,)) == 4 * 4 + 4 + 4 * 3 + 3
    assert axis_map.share(0.5) == 35 / 67 and axis_map.share(1.0) == 1


@pytest.mark.parametrize("module", CUTTABLE)
def test_the_share_is_that_of_the_module_that_is_cut(module):
    scalable = traced(module)
    small = scalable.extract(0.3).module
    own, all_ = (sum(p.numel() for p in m.parameters()) for m in (small, scalable.model))
    assert scalable.axis_map.share(0.3) == own / all_


# Groups


def test_groups_say_where_their_channels_are():
    axis_map = _map(4, 8, 6, 3)
    assert [group.size for group in axis_map.groups] == [8, 6]
    assert axis_map.groups[0].members == (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))
    assert axis_map.dims["2.weight"] == (Group(1), Group(0))
    assert axis_map.parameters == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")


def test_groups_are_named_for_what_they_are():
    assert [group.name for group in AxisMap.trace(EinopsAttention(), torch.zeros(IMAGE)).groups] == ["c0", "h1", "h2"]
    assert [group.name for group in AxisMap.trace(GroupNorms(), torch.zeros(IMAGE)).groups] == ["g0", "g1"]


def test_a_group_names_the_operations_that_count_its_channels():
    group = ChannelGroup(0, 8, frozenset({"heads", "op:mean", "op:max", "norm:layer_norm"}))
    assert group.mixed_by == {"mean", "max"}


def test_a_residual_stream_is_one_group():
    axis_map = AxisMap.trace(SqueezeExcite(), torch.zeros(IMAGE))
    (stream,) = [group for group in axis_map.groups if ("stem.weight", 0) in group.members]
    assert {("conv1.weight", 1), ("conv2.weight", 0), ("norm.weight", 0), ("norm.running_var", 0)} <= set(
        stream.members
    )
    assert axis_map.statistics == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_branches_joined_by_a_stack_are_one_group():
    dims = AxisMap.trace(StackedBranches(), torch.zeros(IMAGE)).dims
    assert dims["branches.0.bias"] == dims["branches.1.bias"] == dims["branches.2.bias"] == (Group(1),)
    assert dims["choose.bias"] == (Product((Fixed(3), Group(1))),)


def test_freezing_a_group_renumbers_the_others_and_says_why():
    axis_map = AxisMap.trace(SplitByStoredSize(), torch.zeros(IMAGE))
    less = axis_map.frozen({0}, "because")
    assert less.sizes == axis_map.sizes[1:] and [group.id for group in less.groups] == [0, 1, 2]
    assert less.notes == (*axis_map.notes, "because")
    assert less.dims["stem.bias"][0].show(["x", "y", "z"]) == "(8 + x)"
    assert less.dims["mix.weight"][1] == Fixed(8)
    assert less.frozen_by["mix.weight", 1] == "because"
    assert ("stem.bias", 0) not in less.frozen_by  # half of it still shrinks
    assert less.attributes.keys() == {("", "sizes", 1), ("", "front")}
    assert less.attributes["", "sizes", 1] == Group(0)
    assert all(
        less.dims[name][i] is not None and less.dims[name][i] != Fixed(8) for g in less.groups for name, i in g.members
    )


def test_freezing_keeps_every_tensor_as_large_as_keeping_the_whole_group():
    axis_map = AxisMap.trace(SplitByStoredSize(), torch.zeros(IMAGE))
    for gone in range(4):
        less = axis_map.frozen({gone}, "because")
        counts = axis_map.counts(0.5)
        whole = [size if i == gone else n for i, (n, size) in enumerate(zip(counts, axis_map.sizes, strict=True))]
        assert all(less.shape(name, less.counts(0.5)) == axis_map.shape(name, whole) for name in axis_map.dims)


def test_freezing_everything_leaves_no_group():
    axis_map = AxisMap.trace(SplitByStoredSize(), torch.zeros(IMAGE)).frozen(range(4), "because")
    assert axis_map.groups == () and not axis_map.attributes and axis_map.share(0.1) == 1
    assert axis_map.widths() == [1.0]


# Descriptions


def test_a_description_by_hand():
    assert _map(4, 8, 3).describe() == (
        "1 channel groups, 67 parameters\n"
        "share of the parameters at width 0.5: 0.522\n"
        "share of the parameters at width 0.25: 0.284\n"
        "share of the parameters at width 0.0625: 0.164\n"
        "0.weight  c0 .\n"
        "0.bias    c0\n"
        "2.weight  . c0\n"
        "2.bias    ."
    )


def test_a_description_tells_integers_reasons_and_notes():
    text = AxisMap.trace(EinopsAttention(), torch.zeros(IMAGE)).frozen({0}, "for the test").describe().splitlines()
    assert "qkv.0.weight    (3 h0 8) ." in text
    assert "heads           h0" in text
    assert (
        "kept whole (for the test): embed.0.weight[0], embed.0.bias[0], qkv.0.weight[1], qkv.1.weight[1] and 5 more"
        in text
    )
    assert text[-1] == "for the test"


def test_what_every_model_has_is_not_mentioned():
    text = AxisMap.trace(SqueezeExcite(), torch.zeros(IMAGE)).describe()
    assert "kept whole" not in text


# Why axes stay whole


class Reasons(nn.Module):
    """A tensor for every reason."""

    def __init__(self):
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.tokens, self.unused = nn.Parameter(torch.ones(5)), nn.Linear(6, 6)
        self.table = nn.Embedding(7, 8)
        self.odd = nn.Parameter(torch.eye(8))
        self.register_buffer("order", torch.arange(8))

    def forward(self, x):
        x = self.stem(x).mean((2, 3)) + self.table(torch.tensor([1])) + self.tokens.softmax(0).sum()
        x = x @ torch.linalg.matrix_exp(self.odd)
        return self.last(x[:, self.order])


def test_every_axis_that_stays_whole_says_why():
    why = AxisMap.trace(Reasons(), torch.zeros(IMAGE)).frozen_by
    assert why["stem.weight", 1] == "model input"
    assert why["stem.weight", 2] == "kernel"
    assert why["last.weight", 0] == "model output"
    assert why["tokens", 0] == "op:softmax"
    assert why["unused.weight", 0] == "not used in the traced run"
    assert why["table.weight", 0] == "op:embedding"
    assert why["odd", 0] == "op:linalg_matrix_exp"
    assert why["order", 0] == "integer buffer"
    assert why["last.weight", 1] == "op:index"


def test_a_size_typed_into_a_view_keeps_the_axis_whole():
    axis_map = AxisMap.trace(LiteralView(), torch.zeros(IMAGE))
    assert axis_map.sizes == (16,)
    for place in (("conv.weight", 0), ("conv.bias", 0), ("hidden.weight", 1)):
        assert axis_map.frozen_by[place] == "literal size in the code"
    assert (
        "kept whole (literal size in the code): conv.weight[0], conv.bias[0], hidden.weight[1]" in axis_map.describe()
    )


def test_inner_factors_stay_whole():
    axis_map = AxisMap.trace(GroupNorms(), torch.zeros(IMAGE))
    assert axis_map.frozen_by["grouped.weight", 1] == "inner factor of a product"


def test_an_axis_of_one_position_needs_no_reason():
    axis_map = AxisMap.trace(MultiheadAttention(), torch.zeros(IMAGE))
    assert axis_map.dims["token"][:2] == (Fixed(1), Fixed(1))
    assert ("token", 0) not in axis_map.frozen_by


def test_keyword_arguments_and_several_inputs_are_traced():
    axis_map = AxisMap.trace(TwoInputs(), (torch.zeros(IMAGE), torch.zeros(2, dtype=torch.long)), {"gain": 0.5})
    assert axis_map.dims["embed.weight"] == (Fixed(5), Group(0))
    assert axis_map.dims["stem.weight"][0] == Group(0)


# Heads


class Attention(nn.Module):
    """Fused attention with one matrix for query, key and value."""

    def __init__(self, dim=24, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.head = nn.Linear(48, 3 * dim), nn.Linear(dim, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = x.permute(0, 2, 1, 3).flatten(2)
        q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=self.heads)
        x = rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)")
        return self.head(torch.relu(self.out(x)).mean(1))


def test_heads_are_kept_or_dropped_as_wholes():
    axis_map = AxisMap.trace(Attention(), torch.zeros(IMAGE))
    names = [group.name for group in axis_map.groups]
    assert axis_map.dims["qkv.bias"][0].show(names) == "(3 h0 6)"
    assert axis_map.dims["out.weight"][1].show(names) == "(h0 6)"
    assert axis_map.sizes == (4, 16) and axis_map.attributes[("", "heads")] == Group(0)


def test_heads_may_all_be_kept_and_narrowed_instead():
    axis_map = AxisMap.trace(Attention(), torch.zeros(IMAGE), heads="dim")
    names = [f"c{group.id}" for group in axis_map.groups]
    assert axis_map.dims["qkv.bias"][0].show(names) == "(3 4 c0)"
    assert axis_map.dims["out.weight"][1].show(names) == "(4 c0)"
    assert axis_map.sizes == (6, 16) and not axis_map.attributes
    assert axis_map.groups[0].mixed_by == {"scaled_dot_product_attention"}  # it takes its scale from the head's width


def test_both_ways_run_and_whole_heads_are_exact():
    for heads in ("whole", "dim"):
        scalable = ScalableModel(Attention(), torch.zeros(IMAGE), heads=heads)
        report = scalable.verify([0.5])
        assert report.comparisons[0].round_trip
        assert report.exact == (heads == "whole")
        assert scalable.extract(0.5).module.qkv.weight.shape == (36, 48)


@pytest.mark.parametrize("module", [EinopsAttention, MultiheadAttention])
def test_attention_written_otherwise_obeys_the_same_switch(module):
    whole, dim = (AxisMap.trace(module(), torch.zeros(IMAGE), heads=heads) for heads in ("whole", "dim"))
    assert 4 in whole.sizes and 4 not in dim.sizes
    assert not any(source[1] in ("heads", "num_heads") for source in dim.attributes)


@pytest.mark.parametrize("heads", ["all", None, "WHOLE"])
def test_an_unknown_way_with_heads_is_refused(heads):
    with pytest.raises(ValueError) as caught:
        _map(4, 8, 3, heads=heads)
    assert str(caught.value) == f"heads={heads!r} is unknown; use 'whole' (drop heads) or 'dim' (narrow heads)"


# What integers measure: idioms of forwards, and the groups they leave. Sixteen channels come in.


class Idiom(nn.Module):
    def __init__(self, body, attributes):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.body = body
        self.head = nn.LazyLinear(10)

    def forward(self, x):
        x = self.body(self, torch.relu(self.stem(x)))
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x)


def _assign_front(m, x):
    x = x.clone()
    x[:, :4] = 0.5
    return x


def _assign_stored(m, x):
    x = x.clone()
    x[:, : m.n] = 0.5
    return x


def _joined(parts):
    return torch.cat([part if i else part.tanh() for i, part in enumerate(parts)], 1)


IDIOMS = [  # name, what the forward does, what it has stored, the sizes of the groups
    ("sizes read from the tensor", lambda m, x: x.view(x.size(0), x.shape[1], -1).mean(-1), {}, [16]),
    (
        "arithmetic of sizes",
        lambda m, x: x.view(len(x), 2, x.shape[1] // 2, 8, 8).transpose(1, 2).flatten(1, 2),
        {},
        [8],
    ),
    ("a stored number of groups", lambda m, x: x.reshape(len(x), m.n, -1, 8, 8).mean(2), {"n": 4}, [4]),
    ("a stored quotient", lambda m, x: x.reshape(len(x), m.n, m.c // m.n, 8, 8).sum(1), {"n": 4, "c": 16}, [4]),
    ("a literal number of groups", lambda m, x: x.reshape(len(x), 4, -1, 8, 8).flatten(1, 2), {}, [4]),
    ("a literal number of channels", lambda m, x: x.reshape(len(x), 16, -1).mean(-1), {}, []),
    ("unflatten by a stored size", lambda m, x: x.unflatten(1, (m.n, -1)).sum(2), {"n": 4}, [4]),
    ("unflatten by keyword", lambda m, x: x.unflatten(dim=1, sizes=(m.n, -1)).sum(2), {"n": 4}, [4]),
    ("split by stored sizes", lambda m, x: _joined(x.split(m.parts, 1)), {"parts": (4, 12)}, [4, 12]),
    ("split by literal sizes", lambda m, x: _joined(x.split([4, 12], 1)), {}, []),
    ("split by keyword", lambda m, x: _joined(x.split(split_size=m.n, dim=1)), {"n": 8}, [8, 8]),
    (
        "split of a named tensor",
        lambda m, x: _joined(torch.split(tensor=x, split_size_or_sections=m.n, dim=1)),
        {"n": 8},
        [8, 8],
    ),
    ("chunk", lambda m, x: _joined(x.chunk(2, 1)), {}, [8, 8]),
    ("chunk by keyword", lambda m, x: _joined(torch.chunk(input=x, chunks=2, dim=1)), {}, [8, 8]),
    ("chunks of unequal size", lambda m, x: _joined(x.chunk(3, 1)), {}, []),
    ("tensor_split into equal parts", lambda m, x: _joined(x.tensor_split(2, 1)), {}, [8, 8]),
    ("tensor_split at a literal place", lambda m, x: _joined(x.tensor_split([4], 1)), {}, [12]),
    ("tensor_split at a stored place", lambda m, x: _joined(x.tensor_split([m.n], 1)), {"n": 4}, [4, 12]),
    ("hsplit at a literal place", lambda m, x: _joined(x.hsplit([4])), {}, [12]),
    ("a slice to a stored size", lambda m, x: x[:, : m.n], {"n": 4}, [4, 12]),
    ("a slice to a literal size", lambda m, x: x[:, :4], {}, [12]),
    ("a slice from the back", lambda m, x: _joined([x[:, :-4], x[:, -4:]]), {}, [12]),
    ("a slice between literals", lambda m, x: x[:, 4:8], {}, [8]),
    (
        "a slice after an ellipsis",
        lambda m, x: x.permute(0, 2, 3, 1)[..., : m.n].permute(0, 3, 1, 2),
        {"n": 4},
        [4, 12],
    ),
    ("a slice of half", lambda m, x: x[:, : x.shape[1] // 2] * x[:, x.shape[1] // 2 :], {}, [8]),
    ("narrow", lambda m, x: x.narrow(1, 0, m.n), {"n": 4}, [4, 12]),
    ("narrow by keyword", lambda m, x: x.narrow(dim=1, start=0, length=m.n), {"n": 4}, [4, 12]),
    ("assignment to a literal slice", _assign_front, {}, [12]),
    ("assignment to a stored slice", _assign_stored, {"n": 4}, [4, 12]),
    ("a channel by number", lambda m, x: x[:, 3:4] * x, {}, [12]),
    (
        "zeros of a size that was read",
        lambda m, x: torch.cat([x, torch.zeros(len(x), x.shape[1], 8, 8)], 1),
        {},
        [16, 16],
    ),
    ("ones of a size that was read", lambda m, x: x + x.new_ones(x.shape[1], 1, 1), {}, [16]),
    ("ones of a literal size", lambda m, x: x + torch.ones(16, 1, 1), {}, []),
    (
        "expand to a size that was read",
        lambda m, x: x + m.p.expand(-1, x.shape[1], -1, -1),
        {"p": nn.Parameter(torch.ones(1, 1, 1, 1))},
        [16],
    ),
    (
        "convolution by keyword",
        lambda m, x: F.conv2d(input=x, weight=m.w, groups=m.n),
        {"w": nn.Parameter(torch.ones(8, 4, 1, 1)), "n": 4},
        [4],
    ),
    ("group norm by keyword", lambda m, x: F.group_norm(input=x, num_groups=m.n), {"n": 4}, [4]),
    ("layer norm by keyword", lambda m, x: F.layer_norm(input=x, normalized_shape=x.shape[1:]), {}, [16]),
    (
        "attention without a batch",
        lambda m, x: F.scaled_dot_product_attention(*[x[0].flatten(1).T] * 3).mean(0, keepdim=True),
        {},
        [],
    ),
    ("a check of a stored size", lambda m, x: x if x.shape[1] == m.n else x[99], {"n": 16}, [16]),
    (
        "a check of two shapes",
        lambda m, x: x + m.p.expand(x.shape) if m.p.shape[1] != 1 else x * m.p,
        {"p": nn.Parameter(torch.ones(1, 16, 1, 1))},
        [16],
    ),
    ("attention by keyword", lambda m, x: F.scaled_dot_product_attention(query=x, key=x, value=x), {}, [16]),
]


@pytest.mark.parametrize(("body", "attributes", "sizes"), [pytest.param(*row[1:], id=row[0]) for row in IDIOMS])
def test_what_a_forward_does_with_sizes_is_followed(body, attributes, sizes):
    model, x = Idiom(body, {**attributes, "spare": nn.Linear(5, 5)}), torch.zeros(2, 3, 8, 8)
    with torch.no_grad():
        model(x)  # gives the head its size
    axis_map = AxisMap.trace(model, x)
    assert sorted(axis_map.sizes) == sizes
    if sizes:
        scalable = ScalableModel(model, x)
        assert scalable.sizes == axis_map.sizes  # every cut runs as it was traced
        assert scalable.verify([0.3, 0.5]).exact
