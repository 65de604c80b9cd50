"""Client: what it refuses, and views of a shared pool."""

import dataclasses
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from hetperm.client import Client, View


def pair(n=4, shape=(3,), classes=2):
    return torch.zeros(n, *shape), torch.arange(n) % classes


def test_a_client_counts_its_samples():
    client = Client(pair(5), pair(2), pair(7))
    assert (client.n_train, client.n_val, client.width, client.group, client.key) == (5, 2, 1.0, None, None)


def test_a_client_needs_no_validation_or_test_data():
    client = Client(pair(5))
    assert (client.val, client.test, client.n_val) == (None, None, 0)


def test_a_client_may_have_one_sample_real_targets_or_tokens():
    assert Client((torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2))).n_train == 1


def test_a_client_cannot_be_changed_but_can_be_replaced():
    client = Client(pair(), key=7, group=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        client.width = 0.5
    narrow = dataclasses.replace(client, width=0.5)
    assert (narrow.width, narrow.key, narrow.group) == (0.5, 7, 1)
    assert narrow.train is client.train


NAN = torch.tensor([[0.0], [float("nan")], [float("inf")]])
ZEROS = torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"train": (torch.eye(3).to_sparse(), torch.arange(3))},
            "client 7: train inputs are torch.sparse_coo; .*",
        ),
        ({"train": None}, "client 7: train must be a pair of tensors, inputs and labels, samples first; got NoneType"),
        ({"train": (torch.zeros(3),)}, "client 7: train must be a pair of tensors, .*; got tuple of Tensor"),
        ({"train": ([1.0], [0])}, "client 7: train must be a pair of tensors, .*; got tuple of list, list"),
        ({"train": pair(0)}, "client 7: train is empty; a client needs at least one training sample"),
        ({"test": pair(0)}, "client 7: test is empty; .*None stands for no val or test"),
        ({"train": (torch.zeros(3, 2), ZEROS[:2])}, "client 7: train has 3 inputs and 2 labels"),
        ({"val": (torch.zeros(3, 3), ZEROS.int())}, "client 7: val labels are torch.int32; convert classes with .long"),
        ({"train": (torch.zeros(3, 2).byte(), ZEROS)}, "client 7: train inputs are torch.uint8; convert .* .float"),
        ({"train": (NAN, ZEROS)}, r"client 7: train inputs hold nan \(first in sample 1\); leave such samples out"),
        ({"test": (torch.zeros(3, 3), NAN[:, 0])}, r"client 7: test labels hold nan \(first in sample 1\); leave"),
        ({"test": pair(shape=(4,))}, r"client 7: an input of test has shape \(4,\) and one of train \(3,\)"),
        ({"width": 0}, r"client 7: width 0 is outside \(0, 1\]"),
        ({"width": 1.5}, r"client 7: width 1.5 is outside \(0, 1\]"),
        ({"width": float("nan")}, r"client 7: width nan is outside \(0, 1\]"),
        ({"width": "1"}, r"client 7: width '1' is outside \(0, 1\]"),
        ({"width": True}, r"client 7: width True is outside \(0, 1\]"),
        ({"classes": [True]}, "client 7: classes is list of bool; it must be a tensor of bool"),
        (
            {"classes": torch.zeros(3, dtype=torch.bool)},
            r"client 7: classes has shape \(3,\) and 0 of them are",
        ),
        (
            {"classes": torch.ones(3, 3, dtype=torch.bool)},
            r"client 7: classes has shape \(3, 3\) and 9 of them are",
        ),
        ({"group": [1]}, r"client 7: group is \[1\]; it must be a whole number, or None"),
        ({"group": "north"}, "client 7: group is 'north'; it must be a whole number, or None"),
        ({"group": True}, "client 7: group is True; it must be a whole number, or None"),
        ({"classes": torch.ones(3, dtype=torch.bool, device="meta")}, "client 7: classes is on the meta device"),
        (
            {"classes": torch.ones(3, dtype=torch.bool).to_sparse()},
            "client 7: classes is a sparse tensor; give a",
        ),
        ({"group": float("nan")}, "client 7: group is nan; it must be a whole number, or None"),
        ({"train": (torch.zeros(3, 2, device="meta"), ZEROS)}, "client 7: train inputs are on the meta device"),
        ({"key": True}, "client True: a key is a whole number; got bool"),
        ({"key": "a"}, "client 'a': a key is a whole number; got str"),
        ({"train": pair(0), "key": None}, "a client without a key: train is empty"),
    ],
)
def test_bad_data_are_refused_in_one_sentence_that_names_the_client(fields, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        Client(**{"train": pair(), "key": 7, **fields})
    assert "\n" not in str(caught.value)


def test_numbers_of_other_kinds_are_taken_as_plain_ones():
    client = Client(pair(), width=Fraction(1, 4), key=np.int64(7), group=np.uint8(1))
    assert [f"{client.width:g}", repr(client.key), repr(client.group)] == ["0.25", "7", "1"]


def test_large_finite_inputs_are_not_taken_for_infinite_ones():
    big = torch.full((4, 2), torch.finfo(torch.float32).max)
    assert Client((big, torch.zeros(4))).n_train == 4


def test_a_pool_that_clients_share_is_checked_once_and_again_if_it_changes(monkeypatch):
    looks = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda x: looks.append(x) or torch.zeros(()))
    pool = torch.ones(5, 3), torch.zeros(5)
    clients = [Client(pool, test=pool) for _ in range(4)]
    [dataclasses.replace(client, width=0.5) for client in clients]
    assert len(looks) == 2  # inputs and labels
    pool[0].add_(1)
    Client(pool)
    assert len(looks) == 3


# Views


def test_a_view_reads_like_the_pair_of_its_rows():
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    view = View((x, y), torch.tensor([4, 1, 1]))
    seen_x, seen_y = view
    assert seen_x.tolist() == [[8, 9], [2, 3], [2, 3]]
    assert seen_y.tolist() == [4, 1, 1] == view[1].tolist()
    assert len(view) == 2


def test_a_view_comes_in_batches_that_make_up_the_whole():
    view = View((torch.arange(6.0), torch.arange(6)), torch.tensor([5, 3, 1, 0, 2]))
    batches = list(view.batches(2))
    assert [len(y) for _, y in batches] == [2, 2, 1]
    for k in (0, 1):
        assert torch.equal(torch.cat([batch[k] for batch in batches]), view[k])


def test_clients_score_on_views_and_pools_stay_shared_when_pickled_together():
    pool = torch.randn(100, 3), torch.arange(100)
    clients = [Client(pair(), test=View(pool, torch.arange(i, 100, 2))) for i in range(2)]
    assert clients[0].test.pool[0] is clients[1].test.pool[0]
    one, other = pickle.loads(pickle.dumps(clients))
    assert one.test.pool[0] is other.test.pool[0]
    assert torch.equal(other.test[1], torch.arange(1, 100, 2))


def test_an_empty_view_is_refused():
    with pytest.raises(ValueError, match="client 3: test is empty"):
        Client(pair(), test=View(pair(), torch.tensor([], dtype=torch.long)), key=3)


def test_a_view_of_rows_that_are_not_finite_is_refused_and_others_of_that_pool_are_not():
    pool = torch.tensor([[1.0] * 3, [2.0] * 3, [torch.inf] * 3]), torch.zeros(3)
    assert Client(pair(), test=View(pool, torch.tensor([1, 0]))).test.pool is pool
    with pytest.raises(ValueError, match=r"client 3: test inputs hold inf \(first in sample 1\)"):
        Client(pair(), test=View(pool, torch.tensor([0, 2])), key=3)
