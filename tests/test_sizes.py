"""Sizes: idioms of forwards that read and use sizes, and the channel groups that they leave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from submodels import AxisMap, ScalableModel

torch.set_num_threads(1)

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
    ("a literal number of channels", lambda m, x: x.reshape(len(x), 16, -1).mean(-1), {}, []),
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
