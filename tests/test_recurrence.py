"""Recurrent layers: traced on two steps, projected, masked."""

import time

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from submodels import AxisMap, ScalableModel
from submodels.recurrence import TwoSteps

torch.set_num_threads(1)


class Recurrent(nn.Module):
    """A recurrent layer over a sequence."""

    def __init__(self, kind, size=32, **options):
        super().__init__()
        self.stem, self.rnn = nn.Linear(5, 16), kind(16, 32, **options)
        self.head = nn.Linear(size, 3)

    def forward(self, x):
        return self.head(self.rnn(self.stem(x))[0])


CASES = [
    ("lstm", nn.LSTM, 32, {"batch_first": True}),
    ("lstm, time first", nn.LSTM, 32, {}),
    ("two layers, both ways", nn.LSTM, 64, {"num_layers": 2, "bidirectional": True}),
    ("gru", nn.GRU, 32, {"batch_first": True}),
    ("rnn", nn.RNN, 32, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize(("kind", "size", "options"), [pytest.param(*row[1:], id=row[0]) for row in CASES])
def test_two_steps_say_as_much_as_a_hundred(kind, size, options):
    short, long = (AxisMap.trace(Recurrent(kind, size, **options), torch.zeros(shape)) for shape in
                   ([(2, 2, 5), (2, 100, 5)] if options.get("batch_first") else [(2, 2, 5), (100, 2, 5)]))  # fmt: skip
    assert short.dims == long.dims and short.attributes == long.attributes and short.sizes == long.sizes


def test_a_long_sequence_is_traced_in_the_time_of_a_short_one():
    model = Recurrent(nn.LSTM, batch_first=True)
    started = time.process_time()
    scalable = ScalableModel(model, torch.zeros(2, 300, 5))
    assert time.process_time() - started < 3  # step by step it took more than ten seconds
    assert scalable.extract(0.5).module(torch.zeros(2, 300, 5)).shape == (2, 300, 3)


def test_a_flattened_sequence_is_cut_by_its_features_not_by_its_steps():
    class Flat(Recurrent):
        def forward(self, x):
            return self.head(self.rnn(self.stem(x))[0].flatten(1))

    scalable = ScalableModel(Flat(nn.GRU, 32 * 6, batch_first=True), torch.zeros(2, 6, 5))
    assert scalable.extract(0.5).module.head.weight.shape == (3, 6 * 16)
    assert scalable.verify([0.5]).exact


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_projected_lstm_is_cut_and_its_projection_stays_one():
    # torch projects where the two states differ in size: cut to one channel each, they would not.
    scalable = ScalableModel(Recurrent(nn.LSTM, 12, proj_size=12), torch.zeros(4, 2, 5))
    assert sorted(scalable.sizes) == [12, 16, 32] and scalable.axis_map.share(0.5) < 0.3
    assert scalable.verify().exact
    assert scalable.extract(1e-6).module(torch.zeros(4, 2, 5)).shape == (4, 2, 3)


class Padded(nn.Module):
    """An encoder over padded sequences."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.embed, self.encoder, self.head = nn.Embedding(20, 24), nn.TransformerEncoder(layer, 1), nn.Linear(24, 3)

    def forward(self, x, padding):
        return self.head(self.encoder(self.embed(x), src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("width", [0.25, 0.5])
def test_an_encoder_cut_to_an_odd_number_of_heads_evaluates_padded_sequences(width):
    words, padding = torch.zeros(2, 5, dtype=torch.long), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    module = ScalableModel(Padded(), (words, padding)).extract(width).module.eval()
    assert module.encoder.use_nested_tensor == (width == 0.5)
    with torch.no_grad():
        assert module(words, padding).shape == (2, 5, 3)


class Packed(nn.Module):
    """Sequences of several lengths, packed for the layer and padded after it."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(out.mean(1))


def test_packed_sequences_are_cut_by_their_features():
    scalable = ScalableModel(Packed(), (torch.randint(0, 50, (3, 6)), torch.tensor([6, 3, 5])))
    assert sorted(scalable.sizes) == [16, 32] and scalable.verify([0.5]).exact


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("total", [None, 7])
def test_padding_in_a_trace_is_torchs_padding(batch_first, total):
    packed = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 2, 3]), enforce_sorted=False)
    expected = pad_packed_sequence(packed, batch_first, -1.0, total)
    with TwoSteps():
        ours = pad_packed_sequence(packed, batch_first, -1.0, total)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
