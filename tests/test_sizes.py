"""Sizes: idioms of forwards that read and use sizes, and the channel groups that they leave."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from submodels import AxisMap, ScalableModel
from submodels.literals import VIEW

torch.set_num_threads(1)


@dataclass(frozen=True)
class Frozen:
    n: int


# Sixteen channels come in.


class Idiom(nn.Module):
    def __init__(self, body, attributes):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.body = body
        self.head = nn.LazyLinear(10)

    def forward(self, x):
        x = self.body(self, torch.relu(self.stem(x)))
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x)


def _assign_front(m, x):
    x = x.clone()
    x[:, :4] = 0.5
    return x


def _assign_stored(m, x):
    x = x.clone()
    x[:, : m.n] = 0.5
    return x


def _joined(parts):
    return torch.cat([part if i else part.tanh() for i, part in enumerate(parts)], 1)


IDIOMS = [  # name, what the forward does, what it has stored, the sizes of the groups
    ("sizes read from the tensor", lambda m, x: x.view(x.size(0), x.shape[1], -1).mean(-1), {}, [16]),
    (
        "arithmetic of sizes",
        lambda m, x: x.view(len(x), 2, x.shape[1] // 2, 8, 8).transpose(1, 2).flatten(1, 2),
        {},
        [8],
    ),
    ("a stored number of groups", lambda m, x: x.reshape(len(x), m.n, -1, 8, 8).mean(2), {"n": 4}, [4]),
    ("a stored quotient", lambda m, x: x.reshape(len(x), m.n, m.c // m.n, 8, 8).sum(1), {"n": 4, "c": 16}, [4]),
    ("a literal number of groups", lambda m, x: x.reshape(len(x), 4, -1, 8, 8).flatten(1, 2), {}, [4]),
    ("a literal number of channels", lambda m, x: x.reshape(len(x), 16, -1).mean(-1), {}, [16]),
    (
        "literal channels of an image",
        lambda m, x: m.up(x.mean((2, 3)).view(-1, 4, 2, 2)),
        {"up": nn.Conv2d(4, 6, 1)},
        [4, 6],
    ),
    ("literal heads, and their width", lambda m, x: x.mean((2, 3)).view(-1, 4, 4).tanh().flatten(1), {}, [4]),
    (
        "a literal that a size may shrink to",
        lambda m, x: x.mean((2, 3)).view(-1, 1, 16) + m.wide(x.mean((2, 3))).view(len(x), 1, m.n).mean(2, keepdim=True),
        {"wide": nn.Linear(16, 32), "n": 32},
        [32],
    ),
    ("unflatten by a stored size", lambda m, x: x.unflatten(1, (m.n, -1)).sum(2), {"n": 4}, [4]),
    ("unflatten by keyword", lambda m, x: x.unflatten(dim=1, sizes=(m.n, -1)).sum(2), {"n": 4}, [4]),
    ("split by stored sizes", lambda m, x: _joined(x.split(m.parts, 1)), {"parts": (4, 12)}, [4, 12]),
    ("split by literal sizes", lambda m, x: _joined(x.split([4, 12], 1)), {}, []),
    ("split by keyword", lambda m, x: _joined(x.split(split_size=m.n, dim=1)), {"n": 8}, [8, 8]),
    (
        "split of a named tensor",
        lambda m, x: _joined(torch.split(tensor=x, split_size_or_sections=m.n, dim=1)),
        {"n": 8},
        [8, 8],
    ),
    ("chunk", lambda m, x: _joined(x.chunk(2, 1)), {}, [8, 8]),
    ("chunk by keyword", lambda m, x: _joined(torch.chunk(input=x, chunks=2, dim=1)), {}, [8, 8]),
    ("chunks of unequal size", lambda m, x: _joined(x.chunk(3, 1)), {}, []),
    ("tensor_split into equal parts", lambda m, x: _joined(x.tensor_split(2, 1)), {}, [8, 8]),
    ("tensor_split at a literal place", lambda m, x: _joined(x.tensor_split([4], 1)), {}, [12]),
    ("tensor_split at a stored place", lambda m, x: _joined(x.tensor_split([m.n], 1)), {"n": 4}, [4, 12]),
    ("hsplit at a literal place", lambda m, x: _joined(x.hsplit([4])), {}, [12]),
    ("a slice to a stored size", lambda m, x: x[:, : m.n], {"n": 4}, [4, 12]),
    ("a slice to a literal size", lambda m, x: x[:, :4], {}, [12]),
    ("a slice from the back", lambda m, x: _joined([x[:, :-4], x[:, -4:]]), {}, [12]),
    ("a slice between literals", lambda m, x: x[:, 4:8], {}, [8]),
    (
        "a slice after an ellipsis",
        lambda m, x: x.permute(0, 2, 3, 1)[..., : m.n].permute(0, 3, 1, 2),
        {"n": 4},
        [4, 12],
    ),
    ("a slice of half", lambda m, x: x[:, : x.shape[1] // 2] * x[:, x.shape[1] // 2 :], {}, [8]),
    ("narrow", lambda m, x: x.narrow(1, 0, m.n), {"n": 4}, [4, 12]),
    ("narrow by keyword", lambda m, x: x.narrow(dim=1, start=0, length=m.n), {"n": 4}, [4, 12]),
    ("assignment to a literal slice", _assign_front, {}, [12]),
    ("assignment to a stored slice", _assign_stored, {"n": 4}, [4, 12]),
    ("a channel by number", lambda m, x: x[:, 3:4] * x, {}, [12]),
    (
        "zeros of a size that was read",
        lambda m, x: torch.cat([x, torch.zeros(len(x), x.shape[1], 8, 8)], 1),
        {},
        [16, 16],
    ),
    ("ones of a size that was read", lambda m, x: x + x.new_ones(x.shape[1], 1, 1), {}, [16]),
    ("ones of a literal size", lambda m, x: x + torch.ones(16, 1, 1), {}, []),
    (
        "expand to a size that was read",
        lambda m, x: x + m.p.expand(-1, x.shape[1], -1, -1),
        {"p": nn.Parameter(torch.ones(1, 1, 1, 1))},
        [16],
    ),
    (
        "convolution by keyword",
        lambda m, x: F.conv2d(input=x, weight=m.w, groups=m.n),
        {"w": nn.Parameter(torch.ones(8, 4, 1, 1)), "n": 4},
        [4],
    ),
    ("group norm by keyword", lambda m, x: F.group_norm(input=x, num_groups=m.n), {"n": 4}, [4]),
    ("layer norm by keyword", lambda m, x: F.layer_norm(input=x, normalized_shape=x.shape[1:]), {}, [16]),
    (
        "attention without a batch",
        lambda m, x: F.scaled_dot_product_attention(*[x[0].flatten(1).T] * 3).mean(0, keepdim=True),
        {},
        [],
    ),
    ("a check of a stored size", lambda m, x: x if x.shape[1] == m.n else x[99], {"n": 16}, [16]),
    (
        "a check of two shapes",
        lambda m, x: x + m.p.expand(x.shape) if m.p.shape[1] != 1 else x * m.p,
        {"p": nn.Parameter(torch.ones(1, 16, 1, 1))},
        [16],
    ),
    ("a flat size typed into a view", lambda m, x: x.view(-1, 16 * 8 * 8), {}, [16]),
    ("a flat size typed into a reshape", lambda m, x: torch.reshape(x, (len(x), 1024)), {}, [16]),
    ("rows of a size typed into a view", lambda m, x: x.mean((2, 3)).view(-1, 16), {}, [16]),
    (
        "one number for two sizes that shrink alike",
        lambda m, x: x.mean((2, 3)).view(-1, 16) * x.amax((2, 3)).view(-1, 16),
        {},
        [16],
    ),
    ("one number for two sizes", lambda m, x: x.mean((2, 3)).view(-1, 16) + x.sum(1).view(-1, 64)[:, :1], {}, [16]),
    (
        "one number for a size that stays too",
        lambda m, x: x.mean((2, 3)).view(-1, 16) + m.c.view(-1, 16).mean(),
        {"c": torch.ones(2, 4, 4)},
        [],
    ),
    ("a squeeze of everything that is one", lambda m, x: x.mean((2, 3), keepdim=True).squeeze(), {}, [16]),
    (
        "a stored size in a namespace",
        lambda m, x: x.reshape(len(x), m.cfg.n, -1, 8, 8).mean(2),
        {"cfg": SimpleNamespace(n=4)},
        [4],
    ),
    (
        "a stored size in a frozen dataclass",
        lambda m, x: x.reshape(len(x), m.cfg.n, -1, 8, 8).mean(2),
        {"cfg": Frozen(4)},
        [4],
    ),
    ("a stored size in a dict", lambda m, x: x.reshape(len(x), m.cfg["n"], -1, 8, 8).mean(2), {"cfg": {"n": 4}}, [4]),
    (
        "a stored size in an object in an object",
        lambda m, x: _joined(x.split(m.cfg.inner.parts, 1)),
        {"cfg": SimpleNamespace(inner=SimpleNamespace(parts=[4, 12]))},
        [4, 12],
    ),
    (
        "gates cut by multiples of a stored size",
        lambda m, x: x[:, : m.n] * x[:, m.n : m.n * 2] + x[:, m.n * 2 : 3 * m.n] * x[:, m.n * 3 :],
        {"n": 4},
        [4],
    ),
    ("attention by keyword", lambda m, x: F.scaled_dot_product_attention(query=x, key=x, value=x), {}, [16]),
]


@pytest.mark.parametrize(("body", "attributes", "sizes"), [pytest.param(*row[1:], id=row[0]) for row in IDIOMS])
def test_what_a_forward_does_with_sizes_is_followed(body, attributes, sizes):
    model, x = Idiom(body, {**attributes, "spare": nn.Linear(5, 5)}), torch.zeros(2, 3, 8, 8)
    with torch.no_grad():
        model(x)  # gives the head its size
    axis_map = AxisMap.trace(model, x)
    assert sorted(axis_map.sizes) == sizes
    if sizes:
        scalable = ScalableModel(model, x)
        assert scalable.sizes == axis_map.sizes  # every cut runs as it was traced
        assert scalable.verify([0.3, 0.5]).exact


class Femnist(nn.Module):
    """LEAF's network for FEMNIST, narrower: the flat size is typed into a view."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(1, 8, 5, padding=2), nn.Conv2d(8, 16, 5, padding=2)
        self.f1, self.f2 = nn.Linear(7 * 7 * 16, 64), nn.Linear(64, 62)

    def forward(self, x):
        x = F.max_pool2d(self.c1(x).relu(), 2)
        x = F.max_pool2d(self.c2(x).relu(), 2)
        return self.f2(self.f1(x.view(-1, 7 * 7 * 16)).relu())


def test_a_flat_size_in_a_view_is_replaced_in_sub_models():
    x = torch.randn(2, 1, 28, 28)
    scalable = ScalableModel(Femnist(), x)
    assert sorted(scalable.sizes) == [8, 16, 64] and scalable.axis_map.share(0.5) < 0.27
    assert ("", VIEW, (2, 1, 7 * 7 * 16)) in scalable.axis_map.attributes
    sub = scalable.extract(0.5)
    expected = sub.module(x)
    assert expected.shape == (2, 62) and sub.extract(0.25).module(x).shape == (2, 62)
    for other in (copy.deepcopy(sub.module), pickle.loads(pickle.dumps(sub.module))):
        assert torch.equal(other(x), expected)
    assert scalable.verify().exact


def test_the_whole_model_and_what_runs_after_a_sub_model_see_their_own_numbers():
    x = torch.randn(2, 1, 28, 28)
    scalable = ScalableModel(Femnist(), x)
    module = scalable.extract(0.5).module
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 3, 28, 28))  # fails inside; its numbers must not stay behind
    assert torch.zeros(4, 7 * 7 * 16).view(-1, 7 * 7 * 16).shape == (4, 784)
    assert not scalable.extract(1.0).module._forward_pre_hooks


def test_a_number_that_two_views_use_for_sizes_that_come_apart_stays():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.o = nn.Linear(5, 16), nn.Linear(5, 8), nn.Linear(32, 3)

        def forward(self, x):
            a, b = self.a(x).view(-1, 16), torch.cat([self.b(x), torch.ones(len(x), 8)], 1).view(-1, 16)
            return self.o(torch.cat([a, b], 1))

    scalable = ScalableModel(Two(), torch.zeros(2, 5))
    assert scalable.verify().exact


def test_the_config_of_the_users_model_stays_as_it_is():
    config = SimpleNamespace(n=4)
    model = Idiom(lambda m, x: x.reshape(len(x), m.cfg.n, -1, 8, 8).mean(2), {"cfg": config})
    with torch.no_grad():
        model(torch.zeros(2, 3, 8, 8))
    scalable = ScalableModel(model, torch.zeros(2, 3, 8, 8))
    assert scalable.extract(0.5).module.cfg.n == 2
    assert type(config.n) is int and config.n == 4 and scalable.model.cfg is config
