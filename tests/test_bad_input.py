"""Bad input is handled, or refused in one sentence that names what was received and what to do."""

import logging
import math
import re

import modules
import numpy as np
import pytest
import torch
from torch import nn

from submodels import (
    WHOLE,
    AxisMap,
    Budget,
    Importance,
    Random,
    Rolling,
    ScalableModel,
    Static,
    average,
    recalibrate,
    zoo,
)

IMAGES = torch.zeros(modules.IMAGE)


@pytest.fixture(scope="module")
def scalable():
    torch.manual_seed(0)
    return ScalableModel(modules.SqueezeExcite(), IMAGES)


def _refused(kind, act, *fragments):
    """The message of an error of this kind, which is one line and holds the fragments."""
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message, message
    return message


# Width

WRONG_WIDTHS = [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, -math.inf, "0.5", None, True, [0.5]]


@pytest.mark.parametrize("width", WRONG_WIDTHS, ids=repr)
def test_a_width_outside_0_to_1_is_refused_with_the_smallest_there_is(scalable, width):
    sub = scalable.extract(0.5)
    for act in (
        lambda: scalable.extract(width),
        lambda: scalable.index(width, Random()),
        lambda: sub.extract(width),
        lambda: scalable.cost(width),
        lambda: scalable.verify((width,)),
        lambda: scalable.axis_map.share(width),
    ):
        _refused(ValueError, act, f"width {width!r} is outside (0, 1]", "one channel a group (width 0.0312)")


def test_what_takes_many_lines_to_show_is_shown_on_one(scalable):
    many = torch.zeros(9, 9)
    for act in (
        lambda: scalable.extract(many),
        lambda: scalable.verify(many),
        lambda: Budget(train_mb=many),
        lambda: ScalableModel(many, torch.zeros(1)),
        lambda: ScalableModel(nn.Linear(2, 2), torch.zeros(1, 2), examples=many),
        lambda: ScalableModel(nn.Linear(2, 2), torch.zeros(1, 2), heads=many),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            act()
        assert "\n" not in str(caught.value) and "tensor(" in str(caught.value)


@pytest.mark.parametrize("width", [np.float32(0.5), np.float64(0.5), np.float16(0.5)], ids=repr)
def test_a_width_may_be_any_real_number(scalable, width):
    assert scalable.extract(width).sizes == scalable.extract(0.5).sizes


def test_the_smallest_width_it_names_keeps_one_channel_a_group(scalable):
    message = _refused(ValueError, lambda: scalable.extract(0))
    width = float(re.search(r"width (0\.\d+)\)", message).group(1))
    assert scalable.extract(width).sizes == (1, 1, 1)


def test_a_width_next_to_nothing_keeps_one_channel_a_group(scalable):
    assert scalable.extract(1e-300).sizes == (1, 1, 1)


# Extractor


def test_an_extractor_of_an_unknown_name_is_refused_with_the_known_ones(scalable):
    _refused(ValueError, lambda: scalable.extract(0.5, "fancy"), "'fancy'", "static, rolling, random")


@pytest.mark.parametrize("extractor", [Static, Rolling, Random, Importance, None, 3, ("static",)], ids=repr)
def test_what_is_no_extractor_is_refused_with_what_is(scalable, extractor):
    for act in (lambda: scalable.extract(0.5, extractor), lambda: scalable.extract(0.5).extract(0.25, extractor)):
        _refused(TypeError, act, repr(extractor), "Static(), Rolling(), Random(seed) or Importance.of(model)")


# Models


def test_a_model_that_returns_a_tuple_is_handled():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.head, self.value = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, x):
            h = self.up(x).relu()
            return self.head(h), self.value(h)

    scalable = ScalableModel(Pair(), torch.zeros(2, 4))
    assert scalable.verify().exact
    out = scalable.extract(0.25).module(torch.zeros(5, 4))
    assert type(out) is tuple
    assert [tuple(x.shape) for x in out] == [(5, 3), (5, 1)]


def test_a_model_with_two_inputs_is_handled():
    scalable = ScalableModel(modules.TwoInputs(), (IMAGES, torch.tensor([0, 1])), {"gain": 2.0})
    assert scalable.verify().exact
    assert scalable.extract(0.25).sizes == (4,)


def test_two_inputs_may_be_given_as_a_list():
    assert ScalableModel(modules.TwoInputs(), [IMAGES, torch.tensor([0, 1])]).sizes == (16,)


def test_a_literal_split_is_handled_and_reported():
    torch.manual_seed(0)
    scalable = ScalableModel(modules.LiteralSplit(), IMAGES)
    assert scalable.axis_map.frozen_by["conv.weight", 0] == "literal size in the code"
    assert scalable.axis_map.frozen_by["hidden.weight", 1] == "literal size in the code"
    assert "kept whole (literal size in the code): conv.weight[0]" in scalable.axis_map.describe()
    assert scalable.extract(0.5).module.hidden.weight.shape == (8, 8 * 16 * 16)
    assert scalable.verify().exact


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (modules.NothingToCut, "literal size in the code"),
        (lambda: zoo.build("logistic", in_channels=3, num_classes=10, image_size=16), "model output"),
        (nn.Flatten, "no weights"),
    ],
    ids=["literal split", "logistic regression", "no weights"],
)
def test_a_model_with_nothing_to_cut_is_refused_with_reason_and_remedy(build, reason):
    model = build()
    message = _refused(ValueError, lambda: ScalableModel(model, IMAGES), type(model).__name__, reason, "declare=")
    assert message.startswith("nothing in ")


def test_a_model_that_is_frozen_by_requires_grad_is_cut_all_the_same():
    model = modules.SqueezeExcite().requires_grad_(False)
    scalable = ScalableModel(model, IMAGES)
    assert not any(p.requires_grad for p in scalable.extract(0.5).module.parameters())
    assert scalable.verify().exact


def test_a_cut_that_does_not_run_is_not_made_and_says_so(caplog):
    class Stubborn(nn.Module):
        """Insists on the number of its hidden channels in a way no trace can see."""

        def __init__(self):
            super().__init__()
            self.up, self.mid, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            h = self.up(x).relu()
            if str(tuple(h.shape)).count("16") != 1:
                raise RuntimeError("sixteen channels\nor none at all")
            return self.head(self.mid(h).relu())

    with caplog.at_level(logging.WARNING):
        scalable = ScalableModel(Stubborn(), torch.zeros(2, 4))
    assert scalable.sizes == (16,)
    assert scalable.extract(0.25).module.up.weight.shape == (16, 4)
    assert scalable.extract(0.25).module.mid.weight.shape == (4, 16)
    (note,) = scalable.axis_map.notes
    assert "sixteen channels" in note
    assert "\n" not in note
    assert note in caplog.text
    assert scalable.verify().exact


@pytest.mark.parametrize(
    "model", [modules.SqueezeExcite, lambda x: x, None, "resnet18"], ids=["a class", "a function", "None", "a name"]
)
def test_what_is_no_model_is_refused(model):
    _refused(TypeError, lambda: ScalableModel(model, IMAGES), "nn.Module")


# Example inputs

WRONG_INPUTS = {
    "channels": (torch.zeros(2, 4, 16, 16), {}),
    "axes": (torch.zeros(3, 16), {}),
    "whole numbers": (torch.zeros(modules.IMAGE, dtype=torch.long), {}),
    "one too many": ((IMAGES, IMAGES), {}),
    "one too few": ((), {}),
    "none": (None, {}),
    "a word": ("image", {}),
    "an array": (np.zeros(modules.IMAGE), {}),
    "unknown keyword": (IMAGES, {"gain": 2.0}),
}


def test_a_sub_model_that_does_not_fit_is_not_written_in_part():
    scalable = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 4))
    before = {name: x.clone() for name, x in scalable.tensors().items()}

    def larger(sub) -> None:
        sub.module[2] = nn.Linear(4, 5)

    def longer(sub) -> None:
        sub.module.append(nn.Linear(3, 3))

    def hollow(sub) -> None:
        sub.module[2].to("meta")

    for change, word in ((larger, "shape"), (longer, "'3.weight'"), (hollow, "holds no numbers")):
        sub = scalable.extract(0.5)
        with torch.no_grad():
            sub.module[0].weight.zero_()
        change(sub)
        _refused(ValueError, lambda sub=sub: scalable.write(sub), word)
        for name, x in scalable.tensors().items():
            assert torch.equal(x, before[name])


@pytest.mark.parametrize(("inputs", "kwargs"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_example_inputs_that_the_model_does_not_take_are_refused(inputs, kwargs):
    for act in (ScalableModel, AxisMap.trace):
        _refused(ValueError, lambda act=act: act(modules.SqueezeExcite(), inputs, kwargs), "SqueezeExcite", "example")


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda s, x: ScalableModel(s.model, x, declare=[1]),
            TypeError,
            "declare is a list; it must be a dict, or None",
        ),
        (
            lambda s, x: ScalableModel(s.model, x, "ab"),
            TypeError,
            "example_kwargs is a str; it must be a dict, or None",
        ),
        (lambda s, x: ScalableModel(nn.LazyLinear(3), x), ValueError, "has no size yet; run the model once"),
        (lambda s, x: s.cut(None), TypeError, "the index is a NoneType; it must be a IndexSet"),
        (lambda s, x: s.extract(0.5).write(s), TypeError, "the sub-model is a ScalableModel; it must be a Submodel"),
        (
            lambda s, x: s.embed({"0.weight": 3}, s.index(0.5)),
            TypeError,
            "value of '0.weight' is a int; it must be a T",
        ),
        (lambda s, x: s.template_of([True]), ValueError, "keep 1 or more of each"),
        (lambda s, x: s.verify([]), ValueError, "widths is empty, which would prove nothing"),
        (
            lambda s, x: Importance((torch.tensor([1.0, math.nan]),)),
            ValueError,
            r"a score is nan, which no channel can be ranked by; Importance.of\(model\) measures them",
        ),
        (lambda s, x: Importance([3]), TypeError, r"the scores are \[3\]; Importance.of\(model\) measures them"),
        (lambda s, x: ScalableModel(s.model, x, declare={3: "c ."}), TypeError, "declare: 3 is 'c .'; both must be"),
        (lambda s, x: ScalableModel(s.model, x, declare={"0.weight": 1}), TypeError, "'0.weight' is 1; both must be"),
        (
            lambda s, x: average(s.tensors(), [({"0.weight": None}, s.index(0.5), 1.0)]),
            TypeError,
            "'0.weight' of an update is None; it must be a tensor",
        ),
        (lambda s, x: s.write(s.model), TypeError, "the sub-model is a Sequential; it must be a Submodel"),
        (lambda s, x: s.fit({"train_mb": 1}), TypeError, "the budget is a dict; it must be a Budget"),
        (lambda s, x: s.template_of([99]), ValueError, "keep 1 or more of each"),
        (lambda s, x: s.template_of([0]), ValueError, "keep 1 or more of each"),
        (lambda s, x: s.template_of("a"), TypeError, "counts is .a.; it must be a list of 1 numbers"),
        (lambda s, x: s.template_of([]), ValueError, "keep 1 or more of each"),
        (lambda s, x: s.template_of(8), TypeError, "counts is 8; it must be a list of 1 numbers"),
        (lambda s, x: s.extract(0.5, round=""), TypeError, "round is ''; it must be a whole number"),
        (lambda s, x: s.extract(0.5, Rolling(), client=[]), TypeError, "client is .*; it must be a whole number"),
        (lambda s, x: s.extract(0.5, Random(object())), TypeError, "Random seed <object .* is not a whole number"),
        (lambda s, x: Rolling(None), ValueError, "Rolling step None is neither"),
        (lambda s, x: Importance.of(s.model), TypeError, "give a ScalableModel or a Submodel"),
        (lambda s, x: s.embed(3, s.index(0.5)), TypeError, "the table of tensors is a int; it must be a Mapping"),
        (lambda s, x: s.embed({}, None), TypeError, "the index is a NoneType; it must be a IndexSet"),
        (lambda s, x: s.embed({"3.weight": x}, s.index(0.5)), ValueError, "'3.weight' is no tensor of this model"),
        (lambda s, x: s.cost(0.5, {}), ValueError, "batch_size {} is not a whole number of 1 or more"),
        (lambda s, x: s.cost(0.5, accumulate=[]), ValueError, r"accumulate \[\] is not a whole number from 1"),
        (lambda s, x: s.cost(0.5, optimizer=[]), ValueError, r"unknown optimizer \[\]"),
        (lambda s, x: s.fit(Budget(train_mb=1), widths=0.5), TypeError, "widths is 0.5; it must be a list of numbers"),
        (lambda s, x: ScalableModel(s.model, x, heads=np.zeros(2)), ValueError, "heads=.* is unknown"),
        (lambda s, x: AxisMap.declared(s.model, [1]), TypeError, "declare takes a module and a table of patterns"),
        (lambda s, x: s.index(0.5).mask("3.weight"), ValueError, "no tensor '3.weight'; it has 0.weight, 0.bias,"),
        (lambda s, x: s.index(0.5).gather([], x), ValueError, r"no tensor \[\]"),
        (lambda s, x: s.index(0.5).gather("0.bias", [1]), ValueError, "0.bias is a list; this index set cuts tensors"),
        (lambda s, x: s.index(0.5).scatter_("0.bias", torch.ones(8), 1), ValueError, "0.bias is a int; .* a part of"),
        (
            lambda s, x: s.index(0.5).scatter_("0.bias", torch.ones(8), torch.ones(4), accumulate=torch.ones(4)),
            TypeError,
            r"accumulate is tensor\(.*; it must be true or false",
        ),
        (
            lambda s, x: s.index(0.5).scatter_("0.bias", torch.ones(8), torch.ones(4).cfloat(), accumulate=True),
            ValueError,
            "the part of '0.bias' is torch.complex64, .* on cpu, and goes into torch.float32 .* give plain numbers",
        ),
        (
            lambda s, x: s.index(0.5).scatter_("0.bias", torch.ones(8), torch.ones(4, device="meta"), accumulate=True),
            ValueError,
            "the part of '0.bias' is torch.float32, torch.strided on meta",
        ),
        (
            lambda s, x: WHOLE.scatter_("0.bias", torch.ones(8), torch.ones(8).to_sparse(), accumulate=True),
            ValueError,
            "the part of '0.bias' is torch.float32, torch.sparse_coo on cpu",
        ),
        (lambda s, x: s.axis_map.frozen(0, "why"), TypeError, "groups is 0; it must be a set of numbers of channel"),
        (lambda s, x: s.axis_map.frozen([99], "why"), ValueError, r"groups holds 99; this map has .* groups \[0\]"),
        (lambda s, x: s.axis_map.frozen("a", "why"), ValueError, "groups holds 'a'; this map has the channel groups"),
        (lambda s, x: s.axis_map.frozen({0}, None), TypeError, "why is None; it must be a text that says why"),
        (
            lambda s, x: s.cut(s.index(0.5), 0.9999),
            ValueError,
            r"the index keeps \(4,\) channels and width 0.9999 is \(8,\); leave the width out, or give the one of",
        ),
        (lambda s, x: s.index(0.5).overlap(x), TypeError, "is no index set; give that of a sub-model"),
        (lambda s, x: s.index(0.5).compose(None), TypeError, "None is no index set"),
        (lambda s, x: s.index(0.5).within(None), TypeError, "None is no index set"),
        (lambda s, x: s.index(0.5).compose(s.index(1.0)), ValueError, "compose it with one of its own sub-models"),
        (
            lambda s, x: s.index(0.5).scatter_("0.bias", torch.ones(8, dtype=torch.long), torch.ones(4)),
            ValueError,
            "0.bias is torch.float32 and goes into torch.int64, which would cut off its decimals",
        ),
        (
            lambda s, x: average(s.tensors(), [(s.tensors(), WHOLE, 1e-46)]),
            ValueError,
            "the weight of an update is 1e-46; it must be zero, or a finite number from 1e-30 to 1e30",
        ),
        (
            lambda s, x: average(
                s.tensors(),
                [(s.extract(0.5).tensors(), s.index(0.5), 1.0)],
                rows={"0.weight": torch.ones(8, dtype=torch.bool)},
            ),
            ValueError,
            "rows names '0.weight': an update has 4 of its 8 rows; name what is not cut",
        ),
        (
            lambda s, x: ScalableModel(s.model, x, outputs=lambda out: None),
            ValueError,
            "outputs= gives None, which holds no tensor that could be kept whole",
        ),
        (lambda s, x: average(x, []), TypeError, "w is tensor.*; it must be a table from names to tensors"),
        (lambda s, x: average(s.tensors(), [], rows=[3]), TypeError, r"rows is \[3\]; it must be a table"),
        (lambda s, x: average(s.tensors(), x), TypeError, "updates is tensor.*; it must be a list of"),
        (lambda s, x: average(s.tensors(), [(s.tensors(), None, 1.0)]), TypeError, "an update is .*; it must be"),
        (lambda s, x: average(s.tensors(), [(s.tensors(), WHOLE, None)]), ValueError, "weight of an update is None"),
        (lambda s, x: recalibrate(x, [x]), TypeError, "recalibrate takes a module and got tensor"),
        (lambda s, x: recalibrate(nn.BatchNorm1d(4), 3), TypeError, "recalibrate takes an iterable of batches"),
    ],
)
def test_arguments_of_another_kind_are_refused(call, kind, message):
    x = torch.zeros(1, 4)
    with pytest.raises(kind, match=message):
        call(ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), x), x)


def test_what_cannot_even_be_shown_is_named_by_its_kind():
    class Shy:
        def __repr__(self):
            raise RuntimeError("not me")

    _refused(ValueError, lambda: Rolling(Shy()), "Rolling step a Shy is neither")


def test_a_model_that_fails_by_itself_is_refused_with_its_own_words():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 16)

        def forward(self, x):
            raise ZeroDivisionError("no such luck")

    _refused(ValueError, lambda: ScalableModel(Broken(), torch.zeros(2, 4)), "Broken", "no such luck")


def test_heads_are_whole_or_dim():
    _refused(ValueError, lambda: ScalableModel(modules.EinopsAttention(), IMAGES, heads="half"), "'half'", "'whole'")


def test_a_declaration_of_a_tensor_that_does_not_exist_is_refused():
    _refused(
        ValueError, lambda: ScalableModel(modules.SqueezeExcite(), IMAGES, declare={"fc.weight": ". c"}), "'fc.weight'"
    )


# Budget


def test_a_budget_nothing_fits_is_refused_with_the_smallest_need(scalable):
    message = _refused(
        ValueError, lambda: scalable.fit(Budget(train_mb=0.001), batch_size=4), "train_mb=0.001", "width 0.03125"
    )
    enough = float(re.search(r"raise train_mb to ([\d.]+)", message).group(1))
    assert scalable.fit(Budget(train_mb=enough), batch_size=4) >= 1 / 32  # the remedy works


def test_every_limit_that_is_broken_is_named(scalable):
    message = _refused(ValueError, lambda: scalable.fit(Budget(train_mb=1e-5, mmacs=1e-6, wire_mb=1e-6), batch_size=4))
    assert all(f"{name} to" in message for name in ("train_mb", "mmacs", "wire_mb"))


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, "24", True], ids=repr)
def test_a_limit_that_is_no_limit_is_refused(limit):
    _refused(ValueError, lambda: Budget(train_mb=limit), f"train_mb {limit!r}")


def test_a_budget_without_a_limit_is_refused():
    _refused(ValueError, Budget, "train_mb, mmacs, wire_mb")


def test_an_empty_grid_of_widths_is_refused_rather_than_replaced(scalable):
    _refused(ValueError, lambda: scalable.fit(Budget(train_mb=100), widths=[]), "no widths")


def test_a_grid_of_widths_may_be_an_array(scalable):
    assert scalable.fit(Budget(train_mb=100), widths=np.array([0.25, 0.5])) == 0.5


@pytest.mark.parametrize("width", [0, 1.5, math.nan], ids=repr)
def test_a_grid_with_a_wrong_width_is_refused(scalable, width):
    _refused(ValueError, lambda: scalable.fit(Budget(train_mb=100), widths=[0.5, width]), f"width {width!r}")


# Sub-models and models that do not belong together


def test_a_sub_model_of_another_model_is_not_written(scalable):
    other = ScalableModel(modules.DenselyConnected(), IMAGES).extract(0.5)
    before = {name: x.clone() for name, x in scalable.tensors().items()}
    with pytest.raises((ValueError, KeyError)):
        scalable.write(other)
    assert all(torch.equal(x, before[name]) for name, x in scalable.tensors().items())


def test_a_sub_model_of_the_global_model_is_not_written_into_a_sub_model(scalable):
    outer, other = scalable.extract(0.75), scalable.extract(0.5)
    before = {name: x.clone() for name, x in outer.tensors().items()}
    _refused(ValueError, lambda: outer.write(other), "shape")
    assert all(torch.equal(x, before[name]) for name, x in outer.tensors().items())
