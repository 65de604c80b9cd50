"""Losses, metrics and models that teach nothing, or nonsense, are named before training."""

import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetperm
from hetperm import Client, Config, fit, load_client
from hetperm.runs.rehearsal import rehearse

QUICK = {"steps": 20, "epochs": 1, "batch_size": 4, "baselines": (), "quiet": True}


def clients(count=2):
    generator = torch.Generator().manual_seed(0)
    return [
        Client(
            (torch.randn(12, 4, generator=generator), torch.arange(12) % 3),
            test=(torch.randn(6, 4), torch.arange(6) % 3),
        )
        for _ in range(count)
    ]


def net(middle=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), middle or nn.ReLU(), nn.Linear(8, 3))


class Wrapped(nn.Module):
    """A model whose outputs go through a function."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = net(), function

    def forward(self, x):
        return self.function(self.inner(x))


def said(caplog, model, loss=F.cross_entropy, augment=None):
    """What a rehearsal warns of."""
    with caplog.at_level(logging.WARNING, logger="hetperm"):
        rehearse(model, clients(), loss, hetperm.metrics.METRICS["accuracy"], augment)
    return [record.getMessage() for record in caplog.records]


# What teaches nothing


@pytest.mark.parametrize(
    ("model", "loss", "sentence"),
    [
        (net(), nn.NLLLoss(), "the loss is that of log-probabilities, and the model's outputs are none"),
        (net(), F.nll_loss, "end the model with log_softmax, or leave the loss out"),
        (Wrapped(lambda out: out.softmax(1)), F.cross_entropy, "cross-entropy takes them for logits"),
        (Wrapped(lambda out: out.softmax(1)), nn.CrossEntropyLoss(), "leave the softmax out of the model"),
        (net(), lambda out, y: -F.cross_entropy(out, y), "it rewards the wrong answers"),
        (net(), lambda out, y: (out * 0).sum() + 1, "the loss has a gradient of zero for all weights"),
        (
            Wrapped(lambda out: out - out.mean(0)),
            F.cross_entropy,
            "depend on the other samples of its batch, or on chance",
        ),
        (Wrapped(lambda out: out + torch.randn_like(out)), F.cross_entropy, "in evaluation too"),
        (
            net(nn.BatchNorm1d(8, track_running_stats=False)),
            F.cross_entropy,
            "depend on the other samples of its batch",
        ),
    ],
)
def test_a_model_and_loss_that_teach_nonsense_are_warned_about(caplog, model, loss, sentence):
    lines = said(caplog, model, loss)
    assert len(lines) == 1 and sentence in lines[0]


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (net(), F.cross_entropy),
        (net(), nn.CrossEntropyLoss(label_smoothing=0.1)),
        (Wrapped(lambda out: out.log_softmax(1)), nn.NLLLoss()),
        (Wrapped(lambda out: out.log_softmax(1)), F.nll_loss),
        (Wrapped(lambda out: out.softmax(1)), lambda out, y: F.nll_loss(out.log(), y)),
        (net(nn.BatchNorm1d(8)), F.cross_entropy),
        (net(nn.Dropout(0.5)), F.cross_entropy),
    ],
)
def test_those_that_are_well_are_not(caplog, model, loss):
    assert said(caplog, model, loss) == []


# What cannot be trained


@pytest.mark.parametrize(
    ("model", "loss", "augment", "sentence"),
    [
        (net(), lambda out, y: out.sum() * 1j, None, "it must be a real number"),
        (Wrapped(lambda out: out * torch.nan), F.cross_entropy, None, "the model's outputs are nan before training"),
        (net(), F.cross_entropy, lambda x, y, g: (torch.cat([x, x]), y), "augment makes 2 samples of 2"),
        (
            net(),
            F.cross_entropy,
            lambda x, y, g: (x[:1], y[:1]),
            "augment makes 1 samples of 2; it must return as many",
        ),
        (net(), F.cross_entropy, lambda x, y, g: (x * torch.nan, y), "augment makes inputs that are nan"),
    ],
)
def test_what_cannot_be_trained_is_refused_before(caplog, model, loss, augment, sentence):
    with pytest.raises(ValueError, match=sentence):
        said(caplog, model, loss, augment)


def test_a_model_of_torch_jit_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have it gone
        scripted = torch.jit.script(net())
    with pytest.raises(ValueError, match=r"compiled by torch\.jit"):
        fit(scripted, clients(), Config(**QUICK))


# A model that looks like another


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of an own model, in whose layers a ReLU lies."""
    out = tmp_path_factory.mktemp("runs") / "run"
    fit(net(), clients(), Config(**QUICK, out=out))
    return out


def test_a_model_that_computes_something_else_with_the_same_weights_is_refused(folder):
    for use in (
        lambda model: load_client(folder, 0, model),
        lambda model: hetperm.join(folder, clients()[0], model=model),
    ):
        with pytest.raises(
            ValueError, match="does not fit client 0: with the client's weights it computes something else"
        ):
            use(net(nn.Sigmoid()))
    assert not (folder / "models" / "client_002.json").exists()
    assert load_client(folder, np.int64(1), net())(torch.zeros(1, 4)).shape == (1, 3)


@pytest.mark.parametrize(
    "draw", [lambda out: torch.dropout(out, 0.5, True), lambda out: out * (2.0 - torch.rand(1).round())]
)
def test_a_model_that_answers_by_chance_is_taken_as_it_is(tmp_path, draw):
    fit(Wrapped(draw), clients(3), Config(**QUICK, out=tmp_path / "run"))
    for i in range(3):
        assert load_client(tmp_path / "run", i, Wrapped(draw))(torch.zeros(1, 4)).shape == (1, 3)


class Two(nn.Module):
    """A model of two inputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, a, b):
        return self.inner(torch.cat([a, b], 1))


def test_nobody_joins_a_run_whose_model_takes_several_inputs(tmp_path):
    several = [Client(((one.train[0], one.train[0]), one.train[1])) for one in clients()]
    fit(Two(), several, Config(**QUICK, out=tmp_path / "run"))
    assert load_client(tmp_path / "run", 1, Two())(torch.zeros(1, 4), torch.ones(1, 4)).shape == (1, 3)
    with pytest.raises(ValueError, match="the run's model takes several inputs, and clients join only runs"):
        hetperm.join(tmp_path / "run", clients()[0], model=Two())


# Numbers of numpy


def test_numbers_of_numpy_are_numbers():
    config = Config(epochs=np.int64(3), seed=np.uint8(1), personal_lr=np.float32(0.25), seeds=range(2))
    assert (config.epochs, config.seed, config.personal_lr, config.seeds) == (3, 1, 0.25, (0, 1))
    assert [type(x) for x in (config.epochs, config.seed, config.personal_lr)] == [int, int, float]
    assert Config(seeds=[np.int64(4)]).to_toml() == Config(seeds=[4]).to_toml()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": np.float64(3)}, "epochs is .*3.0.*; it must be a whole number"),
        ({"seed": np.bool_(True)}, "it must be a whole number"),
        ({"seeds": range(10**9)}, "seeds lists 1,000,000,000 values; it must be at most 100,000"),
        ({"seeds": [1, np.int64(1)]}, "seeds names .*1.* twice"),
        ({"steps": 0, "lr_schedule": "linear"}, "lr_schedule 'linear' follows the steps of a run"),
        ({"steps": 0, "lr_warmup": 0.5}, "give steps, or leave lr_warmup out"),
    ],
)
def test_settings_that_are_none_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**settings)
