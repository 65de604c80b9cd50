"""Comparisons of sizes in a forward: a cut never changes their answers."""

import pytest
import torch
from torch import nn

from submodels import ScalableModel
from submodels.decisions import Decision, Formula, grown
from submodels.terms import Group

torch.set_num_threads(1)

X = torch.zeros(4, 8)


class Compares(nn.Module):
    """Two layers of which the second adds the first where ``when(first, second)`` says so."""

    def __init__(self, first: int, second: int, when):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, first), nn.Linear(first, second), nn.Linear(second, 3)
        self.when = when

    def forward(self, x):
        x = self.a(x).relu()
        y = self.b(x)
        return self.o(torch.sin(y) if self.when(x, y) else y)


class AddsWhereShapesAgree(nn.Module):
    """A shortcut that is there only if the shapes agree."""

    def __init__(self, first: int):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(8, first), nn.Linear(first, 16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.a(x).relu()
        y = self.b(x)
        if y.shape == x.shape:
            y = y + x
        return self.o(y)


@pytest.mark.parametrize(
    ("first", "width", "counts"), [(12, 1 / 16, (1, 2)), (12, 0.5, (6, 8)), (15, 0.5, (8, 9)), (15, 1.0, (15, 16))]
)
def test_sizes_that_differ_in_the_whole_model_differ_at_every_width(first, width, counts):
    scalable = ScalableModel(AddsWhereShapesAgree(first), X)
    assert scalable.axis_map.counts(width) == counts
    assert scalable.verify([width]).exact


def test_a_sub_model_of_a_sub_model_keeps_the_answer_too():
    sub = ScalableModel(AddsWhereShapesAgree(15), X).extract(0.5)
    assert sub.extract(1 / 16).sizes == (1, 2) and sub.extract(1.0).sizes == (8, 9)


ASKED = [  # what the forward asks of 8 and 16 channels, and the counts at width 1/4
    ("a literal that is met on the way", lambda x, y: y.shape[1] == 4, (2, 5)),
    ("more than a literal", lambda x, y: y.shape[1] > 5, (2, 6)),
    ("at least the other", lambda x, y: y.shape[1] >= 2 * x.shape[1], (2, 4)),
    ("a remainder", lambda x, y: y.shape[1] % 8 == 0, (2, 8)),
    ("less than a literal", lambda x, y: y.shape[1] < 20, (2, 4)),
]


@pytest.mark.parametrize(("when", "counts"), [pytest.param(*row[1:], id=row[0]) for row in ASKED])
def test_as_many_channels_are_kept_as_the_answer_needs(when, counts):
    scalable = ScalableModel(Compares(8, 16, when), X)
    assert scalable.axis_map.counts(0.25) == counts
    assert scalable.verify([1 / 16, 0.25, 0.5]).exact


def test_what_only_the_whole_model_answers_stays_whole_and_is_named():
    scalable = ScalableModel(Compares(8, 16, lambda x, y: y.shape[1] == 16), X)
    assert scalable.sizes == (8,)
    assert scalable.axis_map.frozen_by["b.weight", 0] == "the code asks whether c1 == 16"
    assert "kept whole (the code asks whether c1 == 16): b.weight[0]" in scalable.axis_map.describe()
    assert scalable.verify([0.25]).exact


def test_a_comparison_that_no_width_changes_costs_nothing():
    scalable = ScalableModel(Compares(8, 16, lambda x, y: y.shape[0] == 4 and x.shape[1] < y.shape[1] + 8), X)
    assert scalable.axis_map.decisions == ()


def test_groups_of_one_size_grow_together():
    # c0 and c1 have 8 channels; the code wants at least 3 of c1.
    decision = Decision("<", 2, Formula("+", Group(1), 0), answer=True)
    assert grown((2, 2, 1), [decision], own=(8, 8, 4), sizes=(8, 8, 4)) == (3, 3, 1)


def test_no_more_than_there_is_can_be_kept():
    decision = Decision("==", Group(0), 8, answer=True)
    assert grown((2,), [decision], own=(4,), sizes=(8,)) == (4,)
