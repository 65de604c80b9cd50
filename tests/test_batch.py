"""The batch axis: found by following the axes of inputs, and stated by hand."""

import pytest
import torch
from torch import nn

from submodels import Budget, ScalableModel

torch.set_num_threads(1)


class Tagger(nn.Module):
    """An LSTM over words that says something of every word."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(32, 50)
        self.rnn = nn.LSTM(16, 32, batch_first=batch_first)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


class GraphConvolution(nn.Module):
    """A layer over all nodes of one graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 32), nn.Linear(32, 3)

    def forward(self, x, adjacency):
        return self.b((adjacency @ self.a(x)).relu())


class TwoTowers(nn.Module):
    """Two inputs that never meet."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)),
            nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 3)),
        )

    def forward(self, x, y):
        return self.a(x), self.b(y)


class TrainsItself(nn.Module):
    """Returns nothing but its loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.a(x)).pow(2).mean()


class Looks(nn.Module):
    """Looks at its numbers, so that no run without them can say what counts samples."""

    def __init__(self):
        super().__init__()
        self.i, self.o = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.stack([image[:3] / image.max().item() for image in x]) if isinstance(x, list) else x / x.max().item()
        return self.o(self.i(x).mean((2, 3)))


class Detects(Looks):
    """Takes images of three colours, in a list."""

    def forward(self, x):
        assert all(len(image) == 3 for image in x)
        return super().forward(x)


WORDS = torch.randint(0, 50, (4, 6))
CASES = [
    ("batch first", Tagger(True), (WORDS,), (0,)),
    ("sequence first", Tagger(False), (WORDS.t(),), (1,)),
    ("images", nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(4)), (torch.zeros(2, 3, 5, 5),), (0,)),
    ("a graph", GraphConvolution(), (torch.zeros(5, 12), torch.zeros(5, 5)), (None, None)),
    ("two inputs", TwoTowers(), (torch.zeros(3, 5), torch.zeros(3, 7)), (0, 0)),
    ("images that are looked at", Looks(), (torch.ones(2, 3, 5, 5),), (0,)),
    ("a list of images", Detects(), ([torch.ones(3, 5, 5), torch.ones(3, 5, 5)],), (None, None)),
    ("a loss alone", TrainsItself(), (torch.zeros(3, 5),), (0,)),
]


@pytest.mark.parametrize(("model", "inputs", "dims"), [pytest.param(*row[1:], id=row[0]) for row in CASES])
def test_the_axis_that_counts_samples_is_found(model, inputs, dims):
    with torch.no_grad():
        model(*inputs)  # gives lazy layers their size
    assert ScalableModel(model, inputs).batch_dims == dims


def test_a_sequence_first_model_costs_what_the_same_model_costs_batch_first():
    first, second = ScalableModel(Tagger(True), WORDS), ScalableModel(Tagger(False), WORDS.t())
    a, b = first.cost(1.0, batch_size=32), second.cost(1.0, batch_size=32)
    assert a.macs == b.macs == 6 * (4 * 32 * (16 + 32) + 32 * 50)  # six words, four gates, one layer out
    assert b.train_bytes == pytest.approx(a.train_bytes, rel=0.05)
    assert second.cost(1.0, batch_dim=1) == second.cost(1.0)
    assert second.cost(1.0, batch_dim=0).macs < b.macs
    budget = Budget(train_mb=0.5)
    assert second.fit(budget, widths=[0.25, 0.5, 1.0]) == first.fit(budget, widths=[0.25, 0.5, 1.0])


def test_a_graph_is_one_sample():
    cost = ScalableModel(GraphConvolution(), (torch.zeros(5, 12), torch.zeros(5, 5))).cost(1.0, batch_size=32)
    assert cost.macs == 5 * 12 * 32 + 5 * 5 * 32 + 5 * 32 * 3


def test_a_stated_axis_that_is_nowhere_is_refused():
    scalable = ScalableModel(Tagger(True), WORDS)
    with pytest.raises(ValueError, match=r"batch_dim 7 is a dimension of no tensor"):
        scalable.cost(1.0, batch_dim=7)
    with pytest.raises(ValueError, match=r"has 2 entries; the example has 1 tensors"):
        scalable.cost(1.0, batch_dim=(0, 1))
