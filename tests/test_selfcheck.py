"""A map is tried before it is used: what does not run when cut stays whole, with a note, and the rest is cut."""

import logging
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from modules import IMAGE, NothingToCut
from torch import nn

from submodels import AxisMap, ScalableModel
from submodels.calls import Call, Examples
from submodels.selfcheck import runnable
from submodels.terms import Fixed, Group

torch.set_num_threads(1)

X = torch.zeros(2, 3, 8, 8)


class Net(nn.Module):
    """Three convolutions with something between the first two."""

    def __init__(self, between):
        super().__init__()
        self.stem, self.between = nn.Conv2d(3, 8, 3, padding=1), between
        self.conv, self.last, self.head = nn.Conv2d(8, 12, 3), nn.Conv2d(12, 6, 3), nn.Linear(6, 10)

    def forward(self, x):
        x = self.conv(self.between(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.last(torch.relu(x))).mean((2, 3)))


class AssertsItsChannels(nn.Module):
    def forward(self, x):
        assert x.shape[1] == 8, "eight channels, please"
        return x


class ReadsItsConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(channels="8")  # text: an integer would be followed

    def forward(self, x):
        if str(x.shape[1]) != self.config.channels:
            raise ValueError(f"expected {self.config.channels} channels, got {x.shape[1]}")
        return x


class SplitsByAClosure(nn.Module):
    def __init__(self):
        super().__init__()
        front = 3
        self.parts = lambda x: x.split([front, x.shape[1] - front], 1)

    def forward(self, x):
        a, b = self.parts(x)
        return torch.cat([a.tanh(), b], 1)


class FailsInTraining(nn.Module):
    def forward(self, x):
        if self.training and x.shape[1] < 8:
            raise RuntimeError("too narrow to train")
        return x


class FailsAtHalf(nn.Module):
    """A cut to one channel runs, a cut to four does not."""

    def forward(self, x):
        if bin(x.shape[1]) == "0b100":  # a comparison of numbers would be seen, and four channels avoided
            raise RuntimeError("four is unlucky")
        return x


class RepeatsALiteral(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True).repeat(1, 8, 1, 1)


FAILING = [AssertsItsChannels, ReadsItsConfig, FailsInTraining, FailsAtHalf, RepeatsALiteral]


@pytest.mark.parametrize("between", FAILING)
def test_what_does_not_run_when_cut_stays_whole_and_the_rest_is_cut(between):
    scalable = ScalableModel(Net(between()), X)
    assert {6, 12} <= set(scalable.sizes)
    assert scalable.axis_map.dims["conv.weight"][1] == Fixed(8)
    for width in (0.1, 0.3, 0.5, 0.8):
        module = scalable.extract(width).module
        for training in (False, True):
            assert module.train(training)(torch.randn_like(X)).shape == (2, 10)
    assert scalable.verify([0.25, 0.5]).exact


def test_a_split_by_a_size_in_a_closure_keeps_that_part_whole():
    scalable = ScalableModel(Net(SplitsByAClosure()), X)
    assert scalable.axis_map.dims["stem.bias"][0].show([group.name for group in scalable.axis_map.groups]) == "(3 + c0)"
    assert scalable.axis_map.notes == () and scalable.verify([0.25, 0.5]).exact


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (AssertsItsChannels, "cut does not run in between: AssertionError: eight channels, please"),
        (ReadsItsConfig, "cut does not run in between: ValueError: expected 8 channels, got 1"),
        (FailsInTraining, "cut does not run in between: RuntimeError: too narrow to train"),
        (FailsAtHalf, "cut does not run in between: RuntimeError: four is unlucky"),
    ],
)
def test_a_note_names_the_module_and_repeats_its_error(between, words, caplog):
    with caplog.at_level(logging.WARNING):
        scalable = ScalableModel(Net(between()), X)
    assert scalable.axis_map.notes == (words,)
    assert scalable.axis_map.frozen_by["stem.weight", 0] == words
    assert scalable.sizes == (12, 6)
    assert f"kept whole ({words}): stem.weight[0]" in scalable.axis_map.describe()
    assert [record.getMessage() for record in caplog.records] == [f"Net: {words}"]


def test_a_model_that_runs_has_no_notes(caplog):
    with caplog.at_level(logging.WARNING):
        scalable = ScalableModel(Net(nn.ReLU()), X)
    assert scalable.sizes == (8, 12, 6) and scalable.axis_map.notes == () and not caplog.records


def test_two_modules_that_do_not_run_are_both_mended():
    model = Net(AssertsItsChannels())
    model.last = nn.Sequential(model.last, ReadsItsConfig())
    model.last[1].config.channels = "6"
    scalable = ScalableModel(model, X)
    assert scalable.sizes == (12,) and len(scalable.axis_map.notes) == 2
    assert scalable.verify([0.5]).exact


class CountsInItsOutput(nn.Module):
    """Returns a number per channel that no tensor of the model has."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.conv(x)).mean((2, 3))), torch.arange(x.shape[1])


def test_an_output_that_would_change_its_shape_stays_as_it_is():
    scalable = ScalableModel(CountsInItsOutput(), X)
    assert scalable.sizes == (6,)
    assert "the output has shapes" in scalable.axis_map.notes[0]
    assert scalable.extract(0.2).module(X)[1].shape == (8,)


class Named(NamedTuple):
    logits: torch.Tensor


@dataclass
class Data:
    logits: torch.Tensor


@dataclass(slots=True)
class Slots:
    logits: torch.Tensor


class Nested:
    def __init__(self, logits):
        self.inner = {"first": [Data(logits)]}

    @property
    def logits(self):
        return self.inner["first"][0].logits


class Wraps(nn.Module):
    """Returns its output in a container."""

    def __init__(self, container):
        super().__init__()
        self.first, self.last, self.container = nn.Linear(6, 8), nn.Linear(8, 4), container

    def forward(self, x):
        return self.container(self.last(torch.relu(self.first(x))))


@pytest.mark.parametrize("container", [Named, Data, Slots, Nested])
def test_an_output_stays_whole_whatever_it_is_returned_in(container):
    scalable = ScalableModel(Wraps(container), torch.zeros(2, 6))
    assert scalable.sizes == (8,)
    assert scalable.extract(0.5).module(torch.zeros(2, 6)).logits.shape == (2, 4)
    assert scalable.verify([0.5]).exact


def test_a_model_that_cannot_train_on_its_example_is_checked_in_evaluation():
    class Several(nn.Linear):
        def forward(self, x):
            if self.training and len(x) < 2:
                raise ValueError("one sample is too few")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 8), Several(8, 8), nn.ReLU(), nn.Linear(8, 3))
    scalable = ScalableModel(model, torch.zeros(1, 4))
    assert scalable.sizes == (8, 8)
    assert scalable.axis_map.notes == ("not traced in training mode: ValueError: one sample is too few",)


def test_batch_norms_that_refuse_one_sample_leave_the_rest_to_be_traced_in_training(caplog):
    class Auxiliary(nn.Module):
        """Adds the answer of a second head in training."""

        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
            self.head, self.second = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            x = self.norm(self.stem(x)).relu()
            return self.head(x) + self.second(x) if self.training else self.head(x)

    one, several = (ScalableModel(Auxiliary(), torch.zeros(samples, 4)) for samples in (1, 2))
    assert one.axis_map == several.axis_map and one.axis_map.notes == ()
    assert one.axis_map.dims["second.weight"] == (Fixed(3), Group(0))
    assert not caplog.records


def test_batch_norms_that_take_no_single_sample_at_all_are_refused_with_the_remedy():
    def model(tracking):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=tracking), nn.Linear(8, 3))

    with pytest.raises(ValueError, match=r"does not run on the example inputs .*; give an example of two samples or m"):
        ScalableModel(model(False), torch.zeros(1, 4))
    assert ScalableModel(model(False), torch.zeros(2, 4)).sizes == (8,)
    assert ScalableModel(model(True), torch.zeros(1, 4)).sizes == (8,)


# Maps that are wrong


def test_a_map_that_is_wrong_is_mended_where_it_is_wrong():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    wrong = AxisMap.declared(model, {"0.weight": "a .", "2.weight": "b .", "2.bias": "b", "4.weight": ". b"})
    assert wrong.sizes == (8, 6)
    mended = runnable(model, wrong, Examples((Call((torch.zeros(2, 4),)),)))
    assert mended.sizes == (6,) and mended.dims["2.bias"] == (Group(0),)
    assert mended.notes[0].startswith("cut does not run in 0: ")


def test_a_map_that_is_right_comes_back_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    axis_map = AxisMap.trace(model, torch.zeros(2, 4))
    assert runnable(model, axis_map, Examples((Call((torch.zeros(2, 4),)),))) is axis_map


def test_a_wrong_declaration_that_does_not_run_is_mended_too():
    scalable = ScalableModel(Net(nn.Softmax(1)), X, declare={"stem.weight": "c . . .", "stem.bias": "c"})
    assert {12, 6} <= set(scalable.sizes)
    scalable.extract(0.5).module(X)


# Nothing to cut


@pytest.mark.parametrize(
    ("model", "x", "why"),
    [
        (NothingToCut(), torch.zeros(IMAGE), "literal size in the code; model output"),
        (nn.Linear(8, 3), torch.zeros(2, 8), "model output"),
        (nn.Sequential(nn.ReLU()), torch.zeros(2, 8), "no weights"),
    ],
)
def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_remedy(model, x, why):
    with pytest.raises(ValueError) as caught:
        ScalableModel(model, x)
    assert str(caught.value) == (
        f"nothing in {type(model).__name__} can be cut: every axis is kept whole ({why}); replace literal sizes in its "
        "forward by sizes read from tensors or attributes, or state its axes with declare="
    )


def test_a_model_whose_every_cut_fails_is_refused_too():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), AssertsItsChannels(), nn.Flatten(), nn.Linear(8 * 36, 3))
    with pytest.raises(ValueError, match=r"nothing in Sequential can be cut.*eight channels, please.*declare="):
        ScalableModel(model, X)


# Models that do not run on the meta device


class ReadsAValue(nn.Module):
    """A forward that looks at a number; with a plain tensor beside it."""

    def __init__(self, plain):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3), nn.Linear(6, 10)
        self.plain = torch.ones(6, 6) if plain else 1.0

    def forward(self, x):
        x = torch.relu(self.stem(x)) * self.plain
        return self.head(torch.relu(self.conv(x)).mean((2, 3)) * (2 if x.max().item() > 1e9 else 1))


@pytest.mark.parametrize("plain", [False, True])
def test_a_model_that_reads_values_is_traced_on_real_tensors(plain):
    scalable = ScalableModel(ReadsAValue(plain), X)
    assert scalable.sizes == (8, 6)
    assert "traced on real tensors" in scalable.axis_map.notes[0]
    assert scalable.verify([0.5]).exact


def test_an_example_that_does_not_fit_is_reported_in_the_models_own_words():
    with pytest.raises(ValueError, match=r"example inputs .*channels"):
        ScalableModel(Net(nn.ReLU()), torch.zeros(2, 4, 8, 8))


# Layers of torch that announce their sizes


@pytest.mark.parametrize("affine", [False, True])
def test_an_instance_norm_is_cut_without_complaint(affine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalable = ScalableModel(Net(nn.InstanceNorm2d(8, affine=affine)), X)
        assert scalable.sizes == (8, 12, 6)
        scalable.extract(0.5).module(torch.randn_like(X))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_comes_into_a_recurrent_layer_is_cut(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.rnn, self.head = nn.Linear(5, 8), kind(8, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.rnn(torch.relu(self.stem(x)))[0][:, -1])

    scalable = ScalableModel(Model(), torch.zeros(2, 4, 5))
    assert sorted(scalable.sizes) == [6, 8] and not scalable.axis_map.notes
    assert scalable.extract(0.5).module.rnn.input_size == 4
    assert scalable.verify([0.5]).exact
