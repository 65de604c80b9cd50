"""IndexSet: gather, scatter and mask against loops over coordinates, and the algebra of index sets."""

import pickle

import modules
import pytest
import torch
from reference import slicing_loops as loops
from torch import nn

from submodels import IndexSet, Random, Rolling, ScalableModel, Static

IMAGE = torch.zeros(modules.IMAGE)


def _group(axis_map, name, axis):
    """The number of the group that a tensor's axis is made of."""
    return next(group.id for group in axis_map.groups if (name, axis) in group.members)


# Models small enough for loops, and by hand: how some of their tensors lie in the whole ones. `kept(name, axis)` are
# the kept channels of the group that first appears there.


def _mlp():
    return nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 3))


def _mlp_positions(kept):
    first, second = kept("0.weight", 0), kept("2.weight", 0)
    return {
        "0.weight": [first, range(5)],
        "0.bias": [first],
        "2.weight": [second, first],
        "2.bias": [second],
        "4.weight": [range(3), second],
        "4.bias": [range(3)],
    }


class _Flatten(modules.ConvFlattenLinear):
    """Fewer channels: the loops visit every coordinate."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 10, 3, padding=1)
        self.fc1, self.fc2 = nn.Linear(10 * 4 * 4, 12), nn.Linear(12, 10)


def _flatten_positions(kept):
    second = kept("conv2.weight", 0)
    return {
        "conv2.weight": [second, kept("conv1.weight", 0), range(3), range(3)],
        "fc1.weight": [kept("fc1.weight", 0), [16 * c + pixel for c in second for pixel in range(16)]],
    }


def _concat_positions(kept):
    stem, convs = kept("stem.weight", 0), [kept(f"convs.{i}.weight", 0) for i in range(3)]
    seen = [*stem, *(8 + c for c in convs[0]), *(12 + c for c in convs[1])]
    return {
        "norms.2.weight": [seen],
        "norms.2.running_var": [seen],
        "norms.2.num_batches_tracked": [],
        "convs.2.weight": [convs[2], seen, range(3), range(3)],
        "head.weight": [range(10), [*seen, *(16 + c for c in convs[2])]],
    }


def _heads_positions(kept):
    stream, heads = kept("embed.0.weight", 0), kept("qkv.1.weight", 0)
    return {
        "qkv.1.weight": [[32 * t + 8 * h + d for t in range(3) for h in heads for d in range(8)], stream],
        "out.1.weight": [stream, [8 * h + d for h in heads for d in range(8)]],
    }


def _shuffle_positions(kept):
    left, right = kept("conv.weight", 0), kept("conv.weight", 1)  # what was worked on is paired with what passed by
    return {
        "stem.weight": [[*left, *(8 + c for c in right)], range(3), range(3), range(3)],
        "conv.weight": [left, right, range(3), range(3)],
        "head.weight": [range(10), [2 * c + side for c in left for side in range(2)]],
    }


MODELS = {
    "mlp": (_mlp, torch.zeros(2, 5), _mlp_positions),
    "conv, flatten, linear": (_Flatten, IMAGE, _flatten_positions),
    "concatenation": (modules.DenselyConnected, IMAGE, _concat_positions),
    "heads": (modules.EinopsAttention, IMAGE, _heads_positions),
    "channel shuffle": (modules.ChannelShuffle, IMAGE, _shuffle_positions),
}
CUTS = {
    "static": (0.5, Static(), 0),
    "rolling": (0.4, Rolling(), 3),
    "rolling, wrapped": (0.75, Rolling(), 7),
    "random": (0.5, Random(1), 2),
    "one channel": (1e-6, Random(1), 2),
    "full, rolled": (1.0, Rolling(), 5),
}


@pytest.fixture(scope="module", params=MODELS)
def table(request):
    """(scalable, positions by hand) of one model."""
    build, example, positions = MODELS[request.param]
    torch.manual_seed(0)
    return ScalableModel(build().double(), example.double()), positions


@pytest.fixture(scope="module")
def cases(table):
    """(index set, whole tensors, name -> positions by hand) of one model and every cut."""
    scalable, positions = table

    def case(width, extractor, round):
        index = scalable.index(width, extractor, round=round)

        def kept(name, axis):
            return index.kept[_group(scalable.axis_map, name, axis)].tolist()

        return index, scalable.tensors(), {name: [list(axis) for axis in x] for name, x in positions(kept).items()}

    return [case(*cut) for cut in CUTS.values()]


def _tensors(cases):
    """(index set, name, whole tensor, positions by hand) of every tensor of every cut."""
    return [(index, name, whole[name], positions) for index, whole, hand in cases for name, positions in hand.items()]


def test_gather_takes_what_loops_over_coordinates_take(cases):
    for index, name, whole, positions in _tensors(cases):
        got = index.gather(name, whole)
        assert torch.equal(got, loops.gather(whole, positions)), (index.counts, name)
        assert got.shape == index.shape(name)


def test_scatter_writes_what_loops_over_coordinates_write(cases):
    for index, name, whole, positions in _tensors(cases):
        into = torch.zeros_like(whole) - 1
        part = torch.rand(index.shape(name)).to(into.dtype)
        expected = loops.scatter(into, part, positions)
        assert index.scatter_(name, into, part) is into
        assert torch.equal(into, expected), (index.counts, name)


def test_scatter_can_add_to_what_is_there(cases):
    for index, name, whole, positions in _tensors(cases):
        into = whole.clone()
        part = torch.rand(index.shape(name), dtype=torch.float64).to(into.dtype) + 1
        expected = loops.scatter(into, part, positions, add=True)
        assert torch.equal(index.scatter_(name, into, part, accumulate=True), expected), (index.counts, name)


def test_mask_is_true_exactly_where_loops_find_a_coordinate(cases):
    for index, name, whole, positions in _tensors(cases):
        got = index.mask(name)
        assert got.dtype == torch.bool
        assert torch.equal(got, loops.mask(whole.shape, positions)), (index.counts, name)


@pytest.mark.parametrize("build", modules.CUTTABLE)
def test_every_parameter_and_buffer_has_a_mask_of_its_shape(build):
    scalable = modules.traced(build)
    index = scalable.index(0.5, Random())
    tensors = {**scalable.model.state_dict(), **dict(scalable.model.named_buffers())}
    for name, x in tensors.items():  # tied ones under all their names
        mask = index.mask(name)
        assert mask.shape == x.shape, name
        assert mask.sum() == index.gather(name, x).numel(), name


def test_gather_hands_out_memory_of_its_own(cases):
    for index, name, x in [(index, name, x) for index, whole, _ in cases for name, x in whole.items()]:
        part = index.gather(name, x)
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name
        assert part.is_contiguous(), name


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_flow_through_gather_to_the_kept_coordinates_alone(cut):
    width, extractor, round = CUTS[cut]
    scalable = ScalableModel(_mlp().double(), torch.zeros(2, 5).double())
    index = scalable.index(width, extractor, round=round)
    weight = torch.randn(40, 48, dtype=torch.float64, requires_grad=True)
    part = index.gather("2.weight", weight)
    cotangent = torch.randn_like(part)
    (gradient,) = torch.autograd.grad((part * cotangent).sum(), weight)
    assert torch.equal(gradient, index.scatter_("2.weight", torch.zeros_like(gradient), cotangent))
    assert part.numel() == int((gradient != 0).sum())


# The algebra, on an MLP with groups of 8 and 6 channels.


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    return ScalableModel(model.double(), torch.zeros(2, 4).double())


def _set(scalable, *kept, sizes=None):
    """An index set from plain lists, in the order of the layers of `small`."""
    order = [_group(scalable.axis_map, "0.weight", 0), _group(scalable.axis_map, "2.weight", 0)]
    lists = dict(zip(order, kept, strict=True))
    tensors = tuple(torch.tensor(lists[i], dtype=torch.long) for i in range(2))
    own = dict(zip(order, sizes or (8, 6), strict=True))
    return IndexSet(scalable.axis_map, tensors, tuple(own[i] for i in range(2)))


def _lists(scalable, index):
    order = [_group(scalable.axis_map, "0.weight", 0), _group(scalable.axis_map, "2.weight", 0)]
    return [index.kept[i].tolist() for i in order]


def test_overlap_keeps_what_both_keep_in_the_order_of_the_first(small):
    a, b = _set(small, [7, 0, 1, 2], [4, 5, 0]), _set(small, [0, 2, 4, 7], [0, 4])
    assert _lists(small, a.overlap(b)) == [[7, 0, 2], [4, 0]]
    assert _lists(small, b.overlap(a)) == [[0, 2, 7], [0, 4]]


def test_the_mask_of_an_overlap_is_the_overlap_of_the_masks(small):
    a, b = small.index(0.75, Random(0)), small.index(0.6, Random(1))
    for name in small.tensors():
        assert torch.equal(a.overlap(b).mask(name), a.mask(name) & b.mask(name))


def test_an_empty_overlap_holds_nothing_and_changes_nothing(small):
    nothing = _set(small, [0, 1], [0, 1]).overlap(_set(small, [2, 3], [2, 3]))
    weight = small.tensors()["2.weight"]
    assert nothing.counts == (0, 0)
    assert nothing.gather("2.weight", weight).shape == (0, 0)
    assert torch.equal(nothing.scatter_("2.weight", weight.clone(), weight[:0, :0]), weight)
    assert not nothing.mask("2.weight").any()


def test_index_sets_of_different_models_have_no_overlap(small):
    inner = _set(small, [0, 1], [0, 1], sizes=(4, 3))
    with pytest.raises(ValueError, match="compose"):
        small.index(0.5).overlap(inner)


def test_compose_looks_up_the_inner_channels_in_the_outer_ones(small):
    outer = _set(small, [7, 3, 5, 1], [5, 0, 2])
    inner = _set(small, [2, 0], [1, 2], sizes=(4, 3))
    composed = outer.compose(inner)
    assert _lists(small, composed) == [[5, 7], [0, 2]]
    assert composed.sizes == outer.sizes


def test_cutting_twice_is_cutting_by_the_composed_index_set(small):
    outer, inner = small.index(0.8, Random(0)), None
    for seed in range(5):
        inner = small.cut(outer).extract(0.4, Random(seed)).inner
        for name, x in small.tensors().items():
            twice = inner.gather(name, outer.gather(name, x))
            assert torch.equal(twice, outer.compose(inner).gather(name, x))


def test_within_finds_the_places_inside_the_outer_sub_model(small):
    outer, index = _set(small, [7, 3, 5, 1], [5, 0, 2]), _set(small, [5, 7], [0, 2])
    inner = index.within(outer)
    assert _lists(small, inner) == [[2, 0], [1, 2]]
    assert inner.sizes == outer.counts


def test_compose_undoes_within_and_within_undoes_compose(small):
    for seed in range(5):
        outer = small.index(0.7, Random(seed))
        inner = small.cut(outer).extract(0.4, Random(seed + 10)).inner
        composed = outer.compose(inner)
        assert composed.within(outer) == inner
        assert outer.compose(composed.within(outer)) == composed


def test_within_refuses_channels_the_outer_sub_model_lacks(small):
    with pytest.raises(ValueError, match="does not have"):
        _set(small, [0, 1], [0]).within(_set(small, [1, 2, 3], [0, 1]))


def test_index_sets_are_equal_when_they_keep_the_same_channels_in_the_same_order(small):
    a, b = _set(small, [1, 2], [0]), _set(small, [1, 2], [0])
    assert a is not b
    assert a == b
    assert hash(a) == hash(b)
    assert a.key == b.key
    assert {a: "held"}[b] == "held"


@pytest.mark.parametrize(
    "other",
    [([2, 1], [0], None), ([1, 3], [0], None), ([1, 2], [1], None), ([1, 2, 3], [0], None), ([1, 2], [0], (4, 3))],
    ids=["order", "channel", "other group", "count", "another whole"],
)
def test_index_sets_differ_in_order_channels_and_space(small, other):
    first, second, sizes = other
    assert _set(small, [1, 2], [0]) != _set(small, first, second, sizes=sizes)


def test_an_index_set_is_no_other_thing(small):
    assert small.index(0.5) != "index"


def test_an_index_set_survives_pickling(small):
    index = small.index(0.5, Random(4))
    index.gather("0.weight", small.tensors()["0.weight"])
    again = pickle.loads(pickle.dumps(index))
    assert again == index
    for name, x in small.tensors().items():
        assert torch.equal(again.gather(name, x), index.gather(name, x))


@pytest.mark.parametrize("shape", [(8, 5), (4, 4), (8, 4, 1), (4,)])
def test_a_whole_tensor_of_another_shape_is_refused(small, shape):
    index = small.index(0.5)
    for act in (index.gather, lambda name, x: index.scatter_(name, x, torch.zeros(4, 4))):
        with pytest.raises(ValueError, match=r"0\.weight has shape .* \(8, 4\)"):
            act("0.weight", torch.zeros(shape))


# Rectangles move static, rolling and few channels, indices many scattered ones: `wide` needs them at random.


@pytest.fixture(scope="module")
def wide():
    return ScalableModel(_mlp(), torch.zeros(2, 5))


@pytest.mark.parametrize("extractor", [Static(), Rolling(), Random()])
@pytest.mark.parametrize("shape", [(40, 48), (21, 24), (1, 1), (1, 24), (24,), ()], ids=str)
def test_a_part_of_another_shape_is_refused_rather_than_stretched_or_cut(wide, extractor, shape):
    index, into = wide.index(0.5, extractor, round=30), torch.zeros(40, 48)
    for accumulate in (False, True):
        with pytest.raises(ValueError, match=r"2\.weight"):
            index.scatter_("2.weight", into, torch.ones(shape), accumulate=accumulate)
    assert not into.any()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("extractor", [Static(), Rolling(), Random()])
def test_a_part_is_written_in_the_precision_of_the_whole(wide, extractor, accumulate):
    index, into = wide.index(0.5, extractor, round=30), torch.zeros(40, 48)
    index.scatter_("2.weight", into, torch.ones(20, 24, dtype=torch.bfloat16), accumulate=accumulate)
    assert into.dtype == torch.float32
    assert into.sum() == 20 * 24


@pytest.mark.parametrize("kept", [[0, 0], [0, 8], [-1, 0], [0.0, 1.0], [True, False], [[0], [1]]], ids=repr)
def test_channels_must_be_distinct_whole_numbers_within_the_group(small, kept):
    order = _group(small.axis_map, "0.weight", 0)
    lists = [torch.arange(3), torch.arange(3)]
    lists[order] = torch.tensor(kept)
    with pytest.raises(ValueError, match="distinct whole numbers below 8") as caught:
        IndexSet(small.axis_map, tuple(lists), small.sizes)
    assert "\n" not in str(caught.value)
