"""States that go in and come out, and answers that need not stay whole."""

import pytest
import torch
from torch import nn

from submodels import ScalableModel

torch.set_num_threads(1)

WORDS = torch.randint(0, 50, (4, 6))
STATE = torch.zeros(1, 4, 32), torch.zeros(1, 4, 32)


class Language(nn.Module):
    """A language model that returns its hidden state."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(50, 16), kind(16, 32, batch_first=True), nn.Linear(32, 50)

    def forward(self, x, hidden=None):
        x, hidden = self.rnn(self.embed(x), hidden)
        return self.out(x), hidden


def logits(out):
    return out[0]


def test_a_hidden_state_that_is_returned_keeps_the_layer_whole_and_says_so():
    axis_map = ScalableModel(Language(), WORDS).axis_map
    assert axis_map.share(0.5) > 0.8
    assert axis_map.frozen_by["rnn.weight_hh_l0", 1] == "model output"
    whole = next(line for line in axis_map.describe().splitlines() if "(model output)" in line)
    assert "rnn.weight_ih_l0[0]" in whole


@pytest.mark.parametrize("inputs", [WORDS, (WORDS, STATE)], ids=["no state goes in", "a state goes in"])
def test_with_outputs_the_hidden_state_is_cut(inputs):
    scalable = ScalableModel(Language(), inputs, outputs=logits)
    assert scalable.axis_map.share(0.5) == pytest.approx(0.329, abs=0.001)
    assert scalable.verify().exact
    sub = scalable.extract(0.25).module
    out, hidden = sub(WORDS)
    assert out.shape == (4, 6, 50) and hidden[0].shape == (1, 4, 8)
    assert sub(WORDS, hidden)[0].shape == (4, 6, 50)  # what comes out can go in again


def test_a_width_is_priced_with_states_of_its_own_size():
    stateless, with_state = (ScalableModel(Language(), x, outputs=logits) for x in (WORDS, (WORDS, STATE)))
    assert with_state.cost(0.5, batch_size=4).macs == stateless.cost(0.5, batch_size=4).macs


def test_a_sub_model_cuts_the_states_it_is_given():
    scalable = ScalableModel(Language(nn.GRU), (WORDS, STATE[0]), outputs=logits)
    sub = scalable.extract(0.5, "rolling", round=3)
    state = torch.randn(1, 4, 32)
    words, cut = sub.cut_inputs(WORDS, state)
    assert words is WORDS
    kept = sub.index.kept[sub.axis_map.dims["rnn.weight_hh_l0"][1].id]
    assert torch.equal(cut, state[:, :, kept])
    assert sub.module(words, cut)[0].shape == (4, 6, 50)


def test_data_that_has_the_shape_of_an_answer_is_not_a_state():
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.score = nn.Linear(12, 32), nn.Linear(32, 12), nn.Linear(32, 2)

        def forward(self, x):
            h = self.down(x).relu()
            return self.score(h), self.up(h)

    scalable = ScalableModel(Denoiser(), torch.zeros(4, 12), outputs=logits)
    assert scalable.axis_map.states == {}
    assert scalable.extract(0.5).module.down.weight.shape == (16, 12)
