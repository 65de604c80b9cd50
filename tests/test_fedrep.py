"""FedRep: against loops over coordinates, by what it reduces to, by what it may spend, and models without a head."""

from types import SimpleNamespace

import pytest
import torch
from federation import (
    FULL,
    HEADS,
    RIVAL,
    WIDTHS,
    equal,
    make_clients,
    make_method,
    part_of,
    run,
    start,
    with_classes,
)
from reference import by_parts
from reference_inputs import Draw, as_list, as_shards, assert_close
from torch import nn

from hetperm import Client, Config, fit
from hetperm.params import num_bytes

K, LR = RIVAL["local_steps"], RIVAL["lr"]
ROUND = 4 + K  # gradients: those of the classifier and those of the body
OPTIONS = {"head_steps": 4, "head_lr": 0.3, "fine_tune_steps": 0}


@pytest.mark.parametrize("masked", [False, True])
def test_fedrep_equals_loops_over_coordinates(masked):
    clients = make_clients()
    if masked:
        clients = with_classes(clients, [(0, 1), (1, 2), (0, 2), (0, 1)])
    state = run(make_method("fedrep", clients, steps=3 * ROUND, **OPTIONS))
    draw = Draw(clients, SimpleNamespace(**RIVAL))
    w, v = by_parts.fedrep(
        as_shards(clients),
        WIDTHS,
        as_list(start()),
        lambda i, t: draw.some(draw.generator("global", t, draw.key(i)), i, ROUND),
        rounds=3,
        lr=LR,
        head_steps=4,
        head_lr=0.3,
    )
    assert_close(state.w, w)
    for params, model, width in zip(state.deployed, v, WIDTHS, strict=True):
        assert_close(params, model, width)


def test_clients_share_the_body_and_keep_their_classifiers():
    state = run(make_method("fedrep", make_clients(FULL), **OPTIONS))
    for name in start():
        alike = [torch.equal(state.v[0][name], v[name]) for v in state.v[1:]]
        assert alike == [name not in HEADS] * 3, name


def test_without_steps_of_the_body_only_classifiers_are_trained():
    state = run(make_method("fedrep", make_clients(), lr=0.0, **OPTIONS))
    for v, width in zip(state.v, WIDTHS, strict=True):
        part = part_of(start(), width)
        assert {name for name in part if torch.equal(part[name], v[name])} == set(part) - set(HEADS)


def test_steps_of_both_kinds_count_and_only_the_body_travels():
    clients = make_clients()
    work = run(make_method("fedrep", clients, steps=24, **OPTIONS)).work
    rounds = 24 // ROUND
    assert (work.rounds, work.client_steps) == (rounds, rounds * ROUND * len(clients))
    bodies = [{n: x for n, x in part_of(start(), width).items() if n not in HEADS} for width in WIDTHS]
    weigh = sum(num_bytes(body) for body in bodies)
    assert (work.bytes_down, work.bytes_up) == (rounds * weigh, rounds * weigh)


def test_fine_tuning_is_part_of_the_budget():
    clients = make_clients()
    work = run(make_method("fedrep", clients, **OPTIONS | {"steps": 2 * ROUND + 6, "fine_tune_steps": 6})).work
    assert work.client_steps == (2 * ROUND + 6) * len(clients)


def test_relabelled_clients_have_relabelled_models():
    clients, order = make_clients(), [2, 0, 3, 1]
    state, other = run(make_method("fedrep", clients)), run(make_method("fedrep", [clients[i] for i in order]))
    assert all(equal(other.v[place], state.v[i]) for place, i in enumerate(order))


# Models of one's own


def own_clients(widths=(1.0, 0.5)):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    pair = (x, (x[:, 0] > 0).long())
    return [Client(pair, pair, pair, width=width) for width in widths]


FEW = {"algorithm": "fedrep", "baselines": (), "epochs": 2, "steps": 40}


def test_the_classifier_of_ones_own_model_is_found():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    result = fit(model, own_clients(), Config(**FEW))
    heads = [v["2.bias"] for v in result.state.v]
    assert not torch.equal(*heads) and torch.equal(*[v["0.bias"][:3] for v in result.state.v])


class NoHead(nn.Module):
    """A model whose outputs no linear layer computes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)

    def forward(self, x):
        return self.body(x)[:, :2]


def test_a_model_without_a_classifier_is_refused_in_a_sentence():
    sentence = "fedrep: fedrep gives each client a classifier of its own, and this model ends in no linear layer"
    with pytest.raises(ValueError, match=sentence):
        fit(NoHead(), own_clients((1.0, 1.0)), Config(**FEW))
