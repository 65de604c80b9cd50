"""AxisMap: counts, shares and descriptions by hand; why axes stay whole."""

import itertools
import math
from fractions import Fraction

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
    LiteralSplit,
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


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
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
        "2.bias    .\n"
        "width 0.0625 keeps 1 of 8 channels (c0): share 0.164\n"
        "kept whole (model input): 0.weight[1]\n"
        "kept whole (model output): 2.weight[0], 2.bias[0]"
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


def test_every_axis_that_is_kept_whole_has_its_reason_in_the_description():
    axis_map = AxisMap.trace(SqueezeExcite(), torch.zeros(IMAGE))
    lines = [line for line in axis_map.describe().splitlines() if line.startswith("kept whole")]
    assert lines == [
        "kept whole (model input): stem.weight[1]",
        "kept whole (model output): head.weight[0], head.bias[0]",
        "kept whole (kernel): stem.weight[2], stem.weight[3]",
    ]
    assert all(any(f"({why})" in line for line in lines) for why in axis_map.frozen_by.values())


class TwoGroups(nn.Module):
    """A norm of two groups: of their channels no width keeps less than half."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 32, 3), nn.GroupNorm(2, 32), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


def test_what_a_width_cannot_express_is_said():
    axis_map = AxisMap.trace(TwoGroups(), torch.zeros(IMAGE))
    assert axis_map.coarse(0.5) == []
    assert axis_map.coarse(0.25) == [f"width 0.25 keeps 1 of 2 groups (g0): share {axis_map.share(0.5):.3f}"]
    assert axis_map.coarse(0.25)[0] in axis_map.describe().splitlines()
    assert axis_map.coarse(Fraction(1, 4)) == axis_map.coarse(0.25)


def test_heads_that_a_width_cannot_express_are_said_by_their_name():
    axis_map = AxisMap.trace(EinopsAttention(), torch.zeros(IMAGE))
    share = f"share {axis_map.share(1 / 16):.3f}"
    assert axis_map.coarse(1 / 16) == [f"width 0.0625 keeps 1 of 4 heads (h1, h2): {share}"]
    assert axis_map.coarse(0.25) == []


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


def test_a_tensor_that_is_no_buffer_is_named_as_the_reason_with_the_remedy():
    class Positions(nn.Module):
        """Adds positions that it forgot to register."""

        def __init__(self, *, registered):
            super().__init__()
            self.embed, self.up, self.out = nn.Embedding(9, 16), nn.Linear(16, 32), nn.Linear(32, 3)
            table = torch.zeros(1, 20, 16)
            self.register_buffer("table", table) if registered else setattr(self, "table", table)
            self.tables = [self.table]  # a second way to the same tensor changes nothing

        def forward(self, x):
            return self.out(self.up(self.embed(x) + self.table[:, : x.shape[1]]).relu())

    words = torch.zeros(2, 5, dtype=torch.long)
    whole = AxisMap.trace(Positions(registered=False), words)
    assert whole.sizes == (32,)
    assert whole.frozen_by["embed.weight", 1] == "a tensor that is no buffer; register_buffer makes it one"
    assert AxisMap.trace(Positions(registered=True), words).sizes == (16, 32)


class Convolved(nn.Module):
    """A graph convolution by a sparse matrix, then an energy, of which the forward returns the gradient."""

    def __init__(self):
        super().__init__()
        self.up, self.mid, self.out = nn.Linear(6, 16), nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x, graph):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.out(F.softplus(self.mid(torch.sparse.mm(graph, F.softplus(self.up(x))))))
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def test_forces_on_a_sparse_graph_are_cut_exactly():
    scalable = ScalableModel(Convolved(), (torch.randn(5, 6), torch.eye(5).roll(1, 0).to_sparse()))
    assert scalable.sizes == (16, 32) and scalable.verify().exact


class Filterbank(nn.Module):
    """Frequencies by a fixed matrix, summed up by another: no parameter has them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.randn(12, 40))
        self.register_buffer("bands", torch.rand(40, 8))
        self.up, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.up((x @ self.waves).cosh() @ self.bands).relu())


def test_what_only_buffers_have_stays_whole():
    scalable = ScalableModel(Filterbank(), torch.zeros(2, 12))
    assert scalable.sizes == (16, 8) and scalable.axis_map.frozen_by["waves", 1] == "in no parameter"
    assert scalable.verify().exact


class Tables(nn.Module):
    """Positions from three tables, of which a sentence reads the beginning: learned, of sines, and rotations."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.out = nn.Embedding(9, 16), nn.Linear(16, 32), nn.Linear(32, 3)
        self.learned = nn.Parameter(torch.randn(1, 20, 16))
        self.register_buffer("sines", torch.randn(20, 1, 16))
        self.register_buffer("cosines", torch.randn(20, 16), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        x = self.embed(x) + self.learned.to(torch.float32)[:, :n]
        x = x + self.sines[:n].transpose(0, 1)
        return self.out(self.up(x * self.cosines[None, :n]).relu())


def test_tables_of_positions_keep_those_that_the_example_is_too_short_for():
    scalable = ScalableModel(Tables(), torch.zeros(2, 5, dtype=torch.long))
    assert scalable.sizes == (16, 32)
    sub = scalable.extract(0.25).module
    assert sub.learned.shape == (1, 20, 4) and sub.sines.shape == (20, 1, 4)
    assert sub(torch.zeros(2, 20, dtype=torch.long)).shape == (2, 20, 3)


def test_a_size_typed_into_a_split_keeps_the_axis_whole():
    axis_map = AxisMap.trace(LiteralSplit(), torch.zeros(IMAGE))
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


def test_both_ways_run_and_are_exact():
    for heads in ("whole", "dim"):
        scalable = ScalableModel(Attention(), torch.zeros(IMAGE), heads=heads)
        assert scalable.verify([0.5]).exact
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
