"""Pretrained-style models: a sub-model's config says its own sizes, so that it can be saved and loaded."""

import copy
import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from submodels import ScalableModel

torch.set_num_threads(1)


class Config:
    """Sizes of a small language model; its integers are found by what they do."""

    def __init__(self, **sizes):
        self.hidden_size, self.num_heads, self.num_layers = 32, 4, 4  # as many layers as heads: a wrong guess to undo
        self.inner, self.vocab_size, self.kernels = 48, 32, [16, 8]  # as many words as features: another one
        vars(self).update(sizes)


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv, self.out = (
            nn.Linear(config.hidden_size, 3 * config.hidden_size),
            nn.Linear(config.hidden_size, config.hidden_size),
        )
        self.up, self.down = nn.Linear(config.hidden_size, config.inner), nn.Linear(config.inner, config.hidden_size)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Pretrained(nn.Module):
    """A model that is saved as a config and its weights."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed, self.head = (
            nn.Embedding(config.vocab_size, config.hidden_size),
            nn.Linear(config.hidden_size, config.vocab_size),
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.extra = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(config.kernels, config.kernels[1:])))
        self.first = nn.Linear(config.hidden_size, config.kernels[0])
        self.last = nn.Linear(config.kernels[-1], 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), self.last(self.extra(self.first(x)))

    def save_pretrained(self, folder):
        (folder / "config.json").write_text(json.dumps(vars(self.config)))
        torch.save(self.state_dict(), folder / "weights.pt")

    @classmethod
    def from_pretrained(cls, folder):
        model = cls(Config(**json.loads((folder / "config.json").read_text())))
        model.load_state_dict(torch.load(folder / "weights.pt"))
        return model


WORDS = torch.randint(0, 32, (2, 5))


@pytest.fixture(scope="module")
def scalable():
    return ScalableModel(Pretrained(Config()), WORDS)


@pytest.mark.parametrize("width", [0.25, 0.5])
def test_a_sub_model_is_saved_and_loaded_by_its_own_config(scalable, width, tmp_path):
    sub = scalable.extract(width).module
    sizes = int(32 * width), int(4 * width), int(48 * width)
    assert (sub.config.hidden_size, sub.config.num_heads, sub.config.inner) == sizes
    assert (sub.config.num_layers, sub.config.vocab_size, sub.config.kernels) == (
        4,
        32,
        [int(16 * width), int(8 * width)],
    )
    sub.save_pretrained(tmp_path)
    for ours, again in zip(sub(WORDS), Pretrained.from_pretrained(tmp_path)(WORDS), strict=True):
        assert torch.equal(ours, again)


def test_the_config_of_the_whole_model_is_not_touched(scalable):
    before = copy.deepcopy(vars(scalable.model.config))
    scalable.extract(0.5)
    assert vars(scalable.model.config) == before
    assert vars(scalable.extract(1.0).module.config) == before


def test_sizes_that_no_config_can_say_are_said_to_be_so(scalable, caplog):
    with caplog.at_level(logging.WARNING):
        sub = scalable.extract(0.3).module  # 10 features are not two heads of 8
    assert "no config of Pretrained has the sizes of this sub-model; save its state_dict()" in caplog.text
    assert sub.config.hidden_size == 32 and sub(WORDS)[0].shape == (2, 5, 32)
