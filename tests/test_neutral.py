"""verify on models that cast, sample, count in scalars, or take inputs of their own kind: right cuts never raise."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from submodels import ScalableModel
from submodels.calls import Call
from submodels.neutral import Journal, neutral
from submodels.verify import Report, _prepared

torch.set_num_threads(1)

X = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A layer, something in between, and a layer."""

    def __init__(self, between, hidden=16):
        super().__init__()
        self.i, self.o, self.hidden = nn.Linear(12, hidden), nn.Linear(hidden, 3), hidden
        self.between = between

    def forward(self, x):
        return self.o(self.between(self, self.i(x)))


def rms(m, x):
    dtype, x = x.dtype, x.to(torch.float32)
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


def layer_norm(m, x):
    mean = x.float().mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5)


BETWEEN = [
    ("a cast to float32", lambda m, x: x.float().tanh()),
    ("an RMS norm in float32", rms),
    ("a softmax in half precision", lambda m, x: x * x.sum(-1, keepdim=True).sigmoid().to(torch.float16)),
    ("a constant of the stored size", lambda m, x: x + torch.zeros(x.size(0), m.hidden)),
    ("a constant of the default type", lambda m, x: torch.cat([x, torch.ones(len(x), 1)], 1)[:, :-1]),
    ("noise", lambda m, x: x + 0.5 * torch.randn_like(x)),
    ("noise drawn in place", lambda m, x: x * torch.empty_like(x).uniform_()),
    ("dropout that never rests", lambda m, x: F.dropout(x, 0.3, training=True)),
    ("a root of the width", lambda m, x: x / math.sqrt(x.size(-1))),
    ("roots by name", lambda m, x: torch.sqrt(input=x.abs()) * (1 - torch.mean(input=x))),
    ("a root of the width in a tensor", lambda m, x: x / torch.sqrt(torch.tensor(x.size(-1)))),
    ("a factor of the width in a tensor", lambda m, x: x * torch.tensor(x.size(-1) ** -0.5, dtype=torch.float32)),
    ("a mean squared error", lambda m, x: x * F.mse_loss(x, x.detach() * 0.5)),
    ("a layer norm by hand", layer_norm),
    ("leaky units that could be drawn", lambda m, x: F.rrelu(x) + F.rrelu(x, training=True)),
    ("a mean by hand", lambda m, x: x - x.sum(-1, keepdim=True) / x.size(-1)),
]


@pytest.mark.parametrize("between", [pytest.param(f, id=name) for name, f in BETWEEN])
def test_a_right_cut_is_found_exact(between):
    report = ScalableModel(Model(between), X).verify()
    assert report.exact
    assert max(c.forward for c in report.comparisons) < 1e-12  # float64 throughout, not just within the tolerance


def test_a_wrong_cut_is_still_found_out():
    # exp(0) is 1: a channel that is left out is not a channel that is zero.
    with pytest.raises(RuntimeError, match="no operation explains it") as caught:
        ScalableModel(Model(lambda m, x: x / x.exp().sum(-1, keepdim=True)), X).verify([0.5])
    assert "come from ," not in str(caught.value)


def test_the_narrowest_sub_model_is_looked_at_by_default():
    widths = [c.width for c in ScalableModel(Model(lambda m, x: x.relu()), X).verify().comparisons]
    assert widths == [1 / 16, 0.25, 0.5, 1.0]


class SingleHead(nn.Module):
    """Attention written by hand, scaled by the root of its own width."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 24), nn.Linear(24, 20)
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x):
        x = self.embed(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        return self.out((q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).softmax(-1) @ v)


class Multihead(nn.Module):
    """torch's attention, in one opaque call."""

    def __init__(self, need_weights):
        super().__init__()
        self.embed, self.out, self.need_weights = nn.Embedding(20, 24), nn.Linear(24, 20), need_weights
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)

    def forward(self, x):
        x = self.embed(x)
        return self.out(self.attention(x, x, x, need_weights=self.need_weights)[0])


class Encoder(nn.Module):
    """torch's own encoder."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.embed, self.encoder = nn.Embedding(20, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(24, 20)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x)))


@pytest.mark.parametrize(
    "build",
    [SingleHead, lambda: Multihead(True), lambda: Multihead(False), Encoder],
    ids=["single", "w", "o", "encoder"],
)
@pytest.mark.parametrize("heads", ["whole", "dim"])
def test_attention_is_proved_whichever_way_its_heads_are_cut(build, heads):
    assert ScalableModel(build(), WORDS, heads=heads).verify().exact


class ConvAttention(nn.Module):
    """Attention over pixels: with one head its tensors lie otherwise in memory, and torch takes its fused kernel."""

    def __init__(self, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Conv2d(3, 24 * heads, 1), nn.Conv2d(8 * heads, 5, 1)

    def forward(self, x):
        n, _, h, w = x.shape
        q, k, v = self.qkv(x).reshape(n, self.heads, -1, h * w).transpose(2, 3).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(n, -1, h, w))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fused_attention_is_the_same_computation_in_every_layout(layout):
    image = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(memory_format=layout)
    assert ScalableModel(ConvAttention(), image).verify().exact
    with neutral(Journal(), replay=False):
        q, k, v = (torch.arange(80.0 * i, 80 * i + 80).sin().reshape(2, 1, 5, 8) for i in range(3))
        by_hand = (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v), by_hand)


class FusedAttention(nn.Module):
    """Attention by torch's fused kernel."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(20, 24), nn.Linear(24, 72), nn.Linear(24, 20)
        self.heads = 4

    def forward(self, x):
        q, k, v = self.qkv(self.embed(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_wrong_cut_in_front_of_fused_attention_is_found_out():
    scalable = ScalableModel(FusedAttention(), WORDS)
    assert scalable.verify().exact
    rows, columns = scalable.axis_map.dims["qkv.weight"]
    three, *others = rows.parts
    dims = {**scalable.axis_map.dims, "qkv.weight": (replace(rows, parts=(*others, three)), columns)}
    scalable.axis_map = replace(scalable.axis_map, dims=dims)
    with pytest.raises(RuntimeError, match="no operation explains it"):
        scalable.verify()


class Siamese(nn.Module):
    """Compares two inputs."""

    def __init__(self):
        super().__init__()
        self.f, self.o = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 1)

    def forward(self, a, b):
        a, b = self.f(a), self.f(b)
        return self.o((a - b).abs()), F.cosine_similarity(a, b)


def test_two_inputs_that_are_the_same_are_told_apart():
    for pair in ((X, X), (torch.zeros(4, 12), torch.zeros(4, 12))):
        a, b = _prepared(Siamese().double(), Call(pair)).args
        assert not torch.equal(a, b) and a.dtype == b.dtype == torch.float64
    assert ScalableModel(Siamese(), (X, X)).verify().exact


def test_a_distance_that_adds_eps_in_every_channel_is_no_difference():
    class Triplet(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))

        def forward(self, a, b):
            return F.pairwise_distance(F.normalize(self.f(a)), F.normalize(self.f(b)))

    # Of one channel two directions are often the same, and eps is all that is left of their distance.
    assert ScalableModel(Triplet(), (X, X.flip(0))).verify().exact


def test_experts_whose_kernel_wants_whole_16_bytes_are_cut_in_steps_of_them():
    class Experts(nn.Module):
        """Half of the rows to each of two experts, as Hugging Face's mixtures do it."""

        def __init__(self):
            super().__init__()
            self.i, self.o = nn.Linear(12, 16), nn.Linear(16, 3)
            self.up, self.down = nn.Parameter(torch.randn(2, 24, 16)), nn.Parameter(torch.randn(2, 16, 24))

        def forward(self, x):
            ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
            x = torch._grouped_mm(self.i(x), self.up.transpose(1, 2), offs=ends).relu()
            return self.o(torch._grouped_mm(x, self.down.transpose(1, 2), offs=ends))

    scalable = ScalableModel(Experts(), X)
    assert set(scalable.extract(0.3).sizes) == {8} and set(scalable.extract(0.01).sizes) == {4}
    assert scalable.verify().exact
    assert scalable.extract(0.01).module(X).shape == (len(X), 3)


def test_gradients_of_sparse_embeddings_are_compared_and_priced():
    class Skipgram(nn.Module):
        def __init__(self):
            super().__init__()
            self.u, self.v = nn.Embedding(20, 8, sparse=True), nn.Embedding(20, 8, sparse=True)

        def forward(self, word, context):
            return (self.u(word) * self.v(context)).sum(-1)

    scalable = ScalableModel(Skipgram(), (torch.arange(6), torch.arange(6, 12)))
    assert scalable.verify().exact
    assert scalable.cost(1.0).train_bytes > scalable.cost(0.5).train_bytes > 0
    assert scalable.extract(0.5).module.u.sparse


def test_inputs_that_carry_numbers_or_shapes_are_left_alone():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(20, 16), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, words, state, box):
            assert (box[:, 2:] > box[:, :2]).all()
            return self.out(self.rnn(self.embed(words.long()), state)[0]) * box[:, :1, None]

    box = torch.tensor([[0.1, 0.2, 0.5, 0.9], [0.3, 0.1, 0.4, 0.8]])
    inputs = WORDS.float(), torch.zeros(1, 2, 8), box
    words, state, prepared = _prepared(Reads().double(), Call(inputs)).args
    assert torch.equal(words, WORDS.double()) and state.shape == (1, 2, 8) and torch.equal(prepared, box.double())
    assert ScalableModel(Reads(), inputs).verify([0.5]).exact


def test_inputs_that_a_model_refuses_are_given_as_they_were():
    class Strict(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(20, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.embed(x.long()).mean(1))

    assert ScalableModel(Strict(), torch.zeros(2, 5)).verify([0.5]).exact  # words coded as floats, all the first one


def test_a_batch_of_one_is_made_two():
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    (x,) = _prepared(model, Call((X[:1],))).args
    assert x.shape == (2, 12) and not torch.equal(x[0], x[1])


class WeightNorm(nn.Module):
    """A weight divided by its own length: masked to zero it is nothing by nothing."""

    def __init__(self):
        super().__init__()
        self.v, self.g, self.o = nn.Parameter(torch.randn(16, 12)), nn.Parameter(torch.ones(16, 1)), nn.Linear(16, 3)

    def forward(self, x):
        return self.o(x @ (self.g * self.v / self.v.norm(dim=1, keepdim=True)).T)


class Grid(nn.Module):
    """Divides by the steps of a buffer, as spline networks do."""

    def __init__(self):
        super().__init__()
        self.i, self.o, self.w = nn.Linear(12, 16), nn.Linear(16, 3), nn.Parameter(torch.randn(16))
        self.register_buffer("grid", torch.linspace(0, 1, 4).repeat(16, 1))

    def forward(self, x):
        x = self.i(x)[..., None]
        steps = (x - self.grid[:, :-1]) / (self.grid[:, 1:] - self.grid[:, :-1])
        return self.o(steps.tanh().sum(-1) * self.w)


@pytest.mark.parametrize("build", [WeightNorm, Grid])
def test_a_division_by_what_is_masked_is_no_reason_to_give_up(build):
    scalable = ScalableModel(build(), X)
    assert scalable.sizes == (16,) and scalable.verify().exact


def test_a_neutral_run_leaves_torch_as_it_was():
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError), neutral(Journal(), replay=False):
        assert torch.zeros(2).dtype == torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        raise ZeroDivisionError
    assert torch.get_default_dtype() is dtype and torch.equal(torch.get_rng_state(), state)


def test_a_report_without_an_explanation_makes_none_up():
    assert "come from" not in str(Report((), ())) and "come from" not in str(Report(_inexact(), ()))
    assert "come from amax" in str(Report(_inexact(), ("amax",)))


def _inexact():
    from submodels.verify import Comparison

    return (Comparison(0.5, 1.0, 1.0, 0.3, True),)
