"""Axes stated by hand: the language, its errors, and that it says what a run shows."""

import pytest
import timm
import torch
from modules import CUTTABLE, TiedWeights, traced
from torch import nn

from submodels import AxisMap, ScalableModel
from submodels.axes import factors, find, is_frozen, segments
from submodels.declare import declare
from submodels.terms import Fixed, Group, Product, Sum

torch.set_num_threads(1)


class Odd(nn.Module):
    """Tensors and integers of every kind, and a forward that must not be needed."""

    def __init__(self):
        super().__init__()
        self.heads, self.parts, self._secret, self.flag = 3, (2, 4), 7, True
        self.qkv, self.mlp = nn.Linear(8, 36), nn.Linear(8, 10)
        self.layers = nn.ModuleList(nn.Linear(4 + i, 6) for i in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        raise AssertionError("a declaration alone needs no run")


# The language


def test_a_name_is_one_axis_wherever_it_stands():
    stated = declare(Odd(), {"qkv.weight": "a e", "mlp.weight": "b e", "mean": "e"}).tensors
    assert stated["qkv.weight"][1] is stated["mlp.weight"][1] is stated["mean"][0]
    assert stated["qkv.weight"][0] is not stated["mlp.weight"][0]
    assert [axis.size for axis in stated["qkv.weight"]] == [36, 8]


def test_declared_axes_resist_what_the_run_shows():
    (axis,) = declare(Odd(), {"mean": "e"}).tensors["mean"]
    assert axis.pinned and not is_frozen(axis)


def test_a_dot_or_a_number_keeps_an_axis_whole():
    dot, number = declare(Odd(), {"qkv.weight": ". 8"}).tensors["qkv.weight"]
    assert is_frozen(dot) and dot.size == 36 and dot.frozen_by == "declared whole"
    assert is_frozen(number) and number.size == 8


def test_a_product_tells_the_one_size_it_does_not_know():
    rows, _ = declare(Odd(), {"qkv.weight": "(3 h 4) e"}).tensors["qkv.weight"]
    assert [factor.size for factor in factors(rows)] == [3, 3, 4]
    assert [is_frozen(factor) for factor in factors(rows)] == [True, False, True]


def test_a_sum_tells_the_one_size_it_does_not_know():
    rows, _ = declare(Odd(), {"mlp.weight": "(4 + a) e"}).tensors["mlp.weight"]
    assert [segment.size for segment in segments(rows)] == [4, 6]


def test_sizes_are_solved_from_one_another_in_any_order():
    patterns = {"mlp.weight": "(b + c) e", "qkv.weight": "(c d) e", "layers.0.weight": "c b"}
    stated = declare(Odd(), patterns).tensors
    assert [segment.size for segment in segments(stated["mlp.weight"][0])] == [4, 6]
    assert [factor.size for factor in factors(stated["qkv.weight"][0])] == [6, 6]


def test_parentheses_nest():
    rows, _ = declare(Odd(), {"qkv.weight": "((a + 2) 3) e"}).tensors["qkv.weight"]
    both, three = factors(rows)
    assert [segment.size for segment in segments(both)] == [10, 2] and three.size == 3


def test_spaces_do_not_matter():
    tight = declare(Odd(), {"mlp.weight": "(4+a)  e"}).tensors["mlp.weight"]
    assert [segment.size for segment in segments(tight[0])] == [4, 6]


def test_a_star_stands_for_one_part_of_a_path_and_names_it():
    stated = declare(Odd(), {"layers.*.weight": "out in{0}", "layers.*.bias": "out"}).tensors
    assert set(stated) == {"layers.0.weight", "layers.1.weight", "layers.0.bias", "layers.1.bias"}
    assert stated["layers.0.weight"][0] is stated["layers.1.bias"][0]
    assert [axis.size for axis in stated["layers.1.weight"]] == [6, 5]
    assert set(declare(Odd(), {"*.weight": "out{0} e"}).tensors) == {"qkv.weight", "mlp.weight"}


def test_two_stars_are_used_by_number():
    stated = declare(Odd(), {"*.*.weight": "{1}out{0} i{1}"}).tensors
    assert set(stated) == {"layers.0.weight", "layers.1.weight"}
    assert stated["layers.0.weight"][0] is not stated["layers.1.weight"][0]


def test_a_dot_in_a_name_is_a_dot():
    with pytest.raises(ValueError, match="names no parameter"):
        declare(Odd(), {"qkvXweight": "a b"})


def test_an_integer_of_a_module_measures_an_axis():
    stated = declare(Odd(), {"qkv.weight": "(3 h 4) e", "heads": "h", "qkv.in_features": "e"})
    assert stated.attributes["", "heads"] is factors(stated.tensors["qkv.weight"][0])[1]
    assert stated.attributes["qkv", "in_features"] is stated.tensors["qkv.weight"][1]


def test_a_scalar_has_an_empty_pattern():
    assert declare(Odd(), {"scale": ""}).tensors == {"scale": []}


# Errors: one sentence that names the tensor and what is wrong with its pattern


@pytest.mark.parametrize(
    ("patterns", "sentence"),
    [
        ({"nope.weight": "a b"}, "'nope.weight' names no parameter, buffer or integer attribute of this model"),
        ({"_secret": "a"}, "'_secret' names no parameter"),
        ({"flag": "a"}, "'flag' names no parameter"),
        ({"mean": "e{0}"}, "pattern 'e{0}' of 'mean' uses a placeholder that no '*' fills"),
        ({"layers.*.bias": "a{1}"}, "pattern 'a{1}' of 'layers.*.bias' uses a placeholder that no '*' fills"),
        ({"mean": "e{x}"}, "pattern 'e{x}' of 'mean' uses a placeholder that no '*' fills"),
        ({"qkv.weight": "a) e"}, "pattern 'a) e' of 'qkv.weight' closes a parenthesis it did not open"),
        ({"qkv.weight": "(a e"}, "pattern '(a e' of 'qkv.weight' lacks a closing parenthesis"),
        ({"qkv.weight": "a"}, "'qkv.weight' has 2 axes but its pattern has 1"),
        ({"mean": "a b"}, "'mean' has 1 axes but its pattern has 2"),
        ({"mean": "a", "qkv.bias": "a"}, "axis 'a' of 'qkv.bias' has 36 positions here and 8 there"),
        ({"mean": "7"}, "an axis of 'mean' has 8 positions but its pattern has 7"),
        ({"mean": "(3 a)"}, "an axis of 'mean' has 8 positions but its pattern has 6"),
        ({"mean": "(9 a)"}, "an axis of 'mean' has 8 positions, fewer than (9 a) needs"),
    ],
)
def test_a_wrong_pattern_is_refused_in_one_sentence_with_the_name(patterns, sentence):
    with pytest.raises(ValueError) as caught:
        declare(Odd(), patterns)
    assert str(caught.value).startswith(f"declare: {sentence}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", ["(a b)", "(a + b)", "(2 .)"])
def test_sizes_that_nothing_determines_are_refused_with_the_pattern_as_it_was_written(pattern):
    with pytest.raises(ValueError, match=r"'mean'.*not determined") as caught:
        declare(Odd(), {"mean": pattern})
    assert pattern in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a b + 2)",  # a product or a sum?
        "(+ 4 a)",
        "((4 +) a)",
        "()",
        "(0 a)",  # not a size
        "e{",  # a brace that str.format cannot read
    ],
)
def test_a_pattern_that_means_nothing_is_refused_with_its_name(pattern):
    with pytest.raises(ValueError, match="'mean'"):
        declare(Odd(), {"mean": pattern, "qkv.weight": "(9 b) ."})


def test_a_sum_outside_parentheses_is_refused():
    model = nn.Sequential(nn.Conv1d(2, 4, 3))
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        declare(model, {"0.weight": "a + b"})  # else '+' would be the name of the second of three axes


def test_a_sum_longer_than_its_axis_is_refused():
    with pytest.raises(ValueError, match=r"'mlp\.weight'"):
        declare(Odd(), {"qkv.weight": "a .", "mlp.weight": "(a + b) ."})  # b would have -26 positions


# Declarations alone


def test_a_declared_map_by_hand():
    patterns = {"qkv.weight": "(3 h 4) e", "qkv.bias": "(3 h 4)", "mean": "e", "mlp.weight": "(4 + m) e", "heads": "h"}
    axis_map = AxisMap.declared(Odd(), patterns)
    h, e, m = (axis_map.dims[name][i] for name, i in (("qkv.bias", 0), ("mean", 0), ("mlp.weight", 0)))
    assert isinstance(h, Product) and h.parts[0] == Fixed(3) and h.parts[2] == Fixed(4)
    assert axis_map.dims["qkv.weight"] == (h, e) and isinstance(e, Group)
    assert isinstance(m, Sum) and m.parts[0] == Fixed(4)
    assert axis_map.attributes == {("", "heads"): h.parts[1]}
    assert axis_map.sizes == (3, 8, 6)
    assert axis_map.shape("qkv.weight", axis_map.counts(0.5)) == (3 * 2 * 4, 4)


def test_what_is_not_declared_stays_whole_and_says_so():
    axis_map = AxisMap.declared(Odd(), {"mean": "e"})
    assert axis_map.dims["qkv.weight"] == (Fixed(36), Fixed(8))
    assert axis_map.frozen_by["qkv.weight", 0] == "not declared"
    assert axis_map.dims["scale"] == ()


def test_of_two_declared_factors_the_leading_one_scales():
    patterns = {"qkv.weight": "(3 h d) e", "layers.0.weight": ". d", "heads": "h"}
    assert AxisMap.declared(Odd(), patterns).dims["qkv.weight"][0].show(["h"]) == "(3 h 4)"


def test_every_name_of_a_tied_weight_may_be_declared():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    model[2].weight = model[0].weight
    for name in ("0.weight", "2.weight"):
        axis_map = AxisMap.declared(model, {name: "a ."})
        assert axis_map.dims["0.weight"] == axis_map.dims["2.weight"] == (Group(0), Fixed(6)), name


# What is printed can be declared


def _printed(axis_map):
    """The lines of `describe` that are patterns, as a declaration."""
    lines = axis_map.describe().splitlines()[4 : 4 + len(axis_map.dims) + len(axis_map.attributes)]
    return {name: pattern.strip() for name, _, pattern in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("module", CUTTABLE)
def test_what_is_printed_declares_the_map_it_was_printed_from(module):
    model, axis_map = traced(module).model, traced(module).axis_map
    printed = _printed(axis_map)
    declared = AxisMap.declared(model, {name: printed[name] for name in axis_map.dims})
    assert declared.dims == axis_map.dims
    assert declared.sizes == axis_map.sizes
    assert AxisMap.declared(model, printed).attributes == axis_map.attributes


# A declaration beside the run


def test_a_dot_keeps_whole_what_the_run_could_cut():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    axis_map = AxisMap.trace(model, torch.zeros(2, 4), declare={"0.bias": "."})
    assert axis_map.sizes == (6,)
    assert axis_map.frozen_by["2.weight", 1] == "declared whole"


def test_a_declaration_without_an_effect_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"'2\.bias' stays whole all the same \(model output\); say with outputs="):
        AxisMap.trace(model, torch.zeros(2, 4), declare={"2.bias": "c"})
    assert AxisMap.trace(model, torch.zeros(2, 4), declare={"2.bias": ".", "0.bias": "c"}).sizes == (8,)


def test_a_hidden_state_that_is_returned_overrules_a_declaration_and_says_so():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.f = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 5)

        def forward(self, x):
            x, hidden = self.r(x)
            return self.f(x), hidden

    declare = {"r.weight_hh_l0": "(4 h) h"}
    with pytest.raises(ValueError, match=r"'r\.weight_hh_l0' stays whole all the same \(model output\)"):
        ScalableModel(Language(), torch.zeros(2, 3, 16), declare=declare)
    scalable = ScalableModel(Language(), torch.zeros(2, 3, 16), declare=declare, outputs=lambda out: out[0])
    assert scalable.sizes == (32,)


class Bounded(nn.Module):
    """Feature maps bounded by an operation without a rule, which leaves channels where they are."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(torch.relu(self.conv(torch.relu(self.stem(x)).renorm(2, 0, 1.0))).mean((2, 3)))


def test_a_declaration_frees_what_an_unknown_operation_froze():
    model, x = Bounded(), torch.zeros(2, 3, 8, 8)
    alone = ScalableModel(model, x)
    assert alone.sizes == (6,)
    assert alone.axis_map.frozen_by["stem.weight", 0] == "op:renorm"
    stated = ScalableModel(model, x, declare={"stem.weight": "c . . .", "stem.bias": "c", "conv.weight": "d c . ."})
    assert sorted(stated.sizes) == [6, 8]
    assert stated.axis_map.share(0.5) < 0.5 < alone.axis_map.share(0.5)
    assert stated.verify([0.5, 0.75]).exact
    assert stated.extract(0.5).module.stem.weight.shape == (4, 3, 3, 3)


VIT = {
    "cls_token": ". . e",
    "pos_embed": ". . e",
    "patch_embed.proj.weight": "e . . .",
    "patch_embed.proj.bias": "e",
    "blocks.*.norm1.*": "e",
    "blocks.*.norm2.*": "e",
    "blocks.*.attn.qkv.weight": "(3 h{0} 64) e",
    "blocks.*.attn.qkv.bias": "(3 h{0} 64)",
    "blocks.*.attn.num_heads": "h{0}",
    "blocks.*.attn.attn_dim": "(h{0} 64)",
    "blocks.*.attn.proj.weight": "e (h{0} 64)",
    "blocks.*.attn.proj.bias": "e",
    "blocks.*.mlp.fc1.weight": "m{0} e",
    "blocks.*.mlp.fc1.bias": "m{0}",
    "blocks.*.mlp.fc2.weight": "e m{0}",
    "blocks.*.mlp.fc2.bias": "e",
    "norm.*": "e",
    "head.weight": ". e",
}


def _vit(depth):
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=depth)


def test_a_vision_transformer_declared_by_hand_is_the_one_that_was_traced():
    model = _vit(depth=3)
    declared, traced = AxisMap.declared(model, VIT), AxisMap.trace(model, torch.zeros(1, 3, 32, 32))
    assert declared.dims == traced.dims
    assert [declared.share(w) for w in (0.1, 0.5, 0.7)] == [traced.share(w) for w in (0.1, 0.5, 0.7)]


def test_a_vision_transformer_declared_by_hand_is_cut_exactly():
    scalable = ScalableModel(_vit(depth=1), torch.zeros(1, 3, 32, 32), declare=VIT)
    assert sorted(scalable.sizes) == [3, 192, 768]
    assert scalable.verify([0.5]).exact


def test_a_declaration_does_not_touch_the_model():
    model = TiedWeights()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    AxisMap.declared(model, {"loop.weight": "a a", "loop.bias": "a"})
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert find(declare(model, {"loop.bias": "a"}).tensors["loop.bias"][0]).size == 24
