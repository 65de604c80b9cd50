"""Partitions: names, what clients' data look like, and the dealing of images."""

import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetperm.data.partition import divide, parse

LABELS = torch.arange(1200) % 10

EVERY = ["iid", "classes:1", "classes:2", "classes:10", "class-groups:2", "class-groups:3", "dirichlet:0.001"]
EVERY += ["dirichlet:0.5", "dirichlet:1000", "label-shift:1", "label-shift:2", "label-shift:10", "rotation:2"]
EVERY += ["rotation:4", "rotation:7"]


def shares_of(partition, num_clients, *, labels=LABELS, samples=None, seed=0, num_classes=10):
    return divide(
        partition,
        labels,
        num_classes=num_classes,
        num_clients=num_clients,
        samples_per_client=samples,
        seed=seed,
    )


def facts(shares):
    return [(share.rows.tolist(), share.classes, share.group, share.labels, share.degrees) for share in shares]


# Laws of every partition


@pytest.mark.parametrize("partition", EVERY)
def test_a_training_image_belongs_to_one_client_at_most_and_every_client_has_some(partition):
    for num_clients, samples in product((1, 2, 7, 25, 120), (None, 3)):
        shares = shares_of(partition, num_clients, samples=samples)
        assert len(shares) == num_clients
        dealt = torch.cat([share.rows for share in shares])
        assert dealt.dtype == torch.long
        assert len(dealt.unique()) == len(dealt)
        assert dealt.min() >= 0
        assert dealt.max() < len(LABELS)
        for share in shares:
            assert len(share.rows) == samples if samples else len(share.rows) >= 2
            assert set(LABELS[share.rows].tolist()) <= set(share.classes)
            assert sorted(share.labels) == list(range(10))


@pytest.mark.parametrize("partition", EVERY)
def test_one_seed_decides_everything_and_another_seed_decides_otherwise(partition):
    assert facts(shares_of(partition, 20)) == facts(shares_of(partition, 20))
    assert facts(shares_of(partition, 20)) != facts(shares_of(partition, 20, seed=1))


@settings(max_examples=60)
@given(
    partition=st.sampled_from([name for name in EVERY if name.startswith(("iid", "dirichlet", "label", "rotation"))]),
    counts=st.lists(st.integers(0, 30), min_size=10, max_size=10).filter(lambda counts: sum(counts) >= 2),
    num_clients=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_any_pool_is_dealt_out_whole_if_there_are_two_images_a_client(partition, counts, num_clients, seed):
    labels = torch.repeat_interleave(torch.arange(10), torch.tensor(counts))
    num_clients = min(num_clients, len(labels) // 2)
    shares = shares_of(partition, num_clients, labels=labels, seed=seed)
    assert sorted(torch.cat([share.rows for share in shares]).tolist()) == list(range(len(labels)))
    assert min(len(share.rows) for share in shares) >= 2
    samples = len(labels) // num_clients
    exact = shares_of(partition, num_clients, labels=labels, samples=samples, seed=seed)
    assert [len(share.rows) for share in exact] == [samples] * num_clients


# What clients' data look like


def test_iid_clients_have_equal_parts_and_no_group():
    shares = shares_of("iid", 7)
    assert sorted(len(share.rows) for share in shares) == [171] * 4 + [172] * 3
    assert {(share.classes, share.group, share.degrees) for share in shares} == {(tuple(range(10)), None, 0.0)}
    assert {share.labels for share in shares} == {tuple(range(10))}


@pytest.mark.parametrize("partition", ["iid", "label-shift:2", "classes:10", "dirichlet:1e9"])
@pytest.mark.parametrize("samples", [None, 40])
def test_class_counts_vary_as_independent_draws_do(partition, samples):
    # 4000 images, 40 clients: a class has 10 (4 for samples=40) images a client, with a binomial variance; images that
    # are dealt without replacement take a part of it away. Balanced shards would have a variance near 0.
    labels = torch.arange(4000) % 10
    shares = shares_of(partition, 40, labels=labels, samples=samples)
    counts = np.array([np.bincount(labels[share.rows], minlength=10) for share in shares])
    binomial = counts.mean() * 0.9
    assert 0.75 * binomial < counts.var(axis=0).mean() < 1.3 * binomial


@pytest.mark.parametrize(("k", "num_clients"), [(1, 50), (2, 50), (2, 7), (3, 11), (9, 4), (10, 3)])
def test_clients_hold_k_classes_and_classes_have_equally_many_holders(k, num_clients):
    shares = shares_of(f"classes:{k}", num_clients, labels=torch.arange(4000) % 10)
    assert {len(share.classes) for share in shares} == {k}
    holders = Counter(c for share in shares for c in share.classes)
    assert max(holders.values()) - min(holders[c] for c in range(10)) <= 1


def test_clients_with_the_same_classes_are_one_group():
    shares = shares_of("classes:2", 50, labels=torch.arange(20000) % 10)
    pairs = {share.group: share.classes for share in shares}
    assert all(pairs[share.group] == share.classes for share in shares)
    assert len(pairs) == len(set(pairs.values()))
    assert len(pairs) > 20, "pairs are drawn, not fixed"


def test_one_class_a_client_gives_ten_groups_of_five():
    shares = shares_of("classes:1", 50)
    assert sorted(Counter(share.group for share in shares).values()) == [5] * 10


@pytest.mark.parametrize(("k", "groups"), [(1, 10), (2, 5), (3, 3), (4, 2), (5, 2), (10, 1)])
def test_class_groups_are_disjoint_and_of_k_classes(k, groups):
    shares = shares_of(f"class-groups:{k}", 20)
    held = {share.group: share.classes for share in shares}
    assert all(held[share.group] == share.classes for share in shares)
    assert sorted(held) == list(range(groups))
    flat = [c for classes in held.values() for c in classes]
    assert len(flat) == len(set(flat)) == groups * k


def test_which_classes_go_together_is_drawn():
    first, second = ({share.classes for share in shares_of("class-groups:2", 5, seed=seed)} for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("samples", [None, 5])
def test_a_small_dirichlet_number_gives_nearly_one_class_and_a_large_one_the_mix_of_the_pool(samples):
    small = shares_of("dirichlet:0.001", 50, samples=samples)
    purity = [np.bincount(LABELS[share.rows]).max() / len(share.rows) for share in small]
    assert np.mean(purity) > 0.95
    large = shares_of("dirichlet:1000", 20, samples=None if samples is None else 60)
    counts = np.array([np.bincount(LABELS[share.rows], minlength=10) / len(share.rows) for share in large])
    assert np.abs(counts - 0.1).mean() < 0.04


def test_the_shares_of_classes_have_the_mean_and_the_variance_of_a_dirichlet_draw():
    rule, a = parse("dirichlet:0.5", 10)
    mix = np.exp(rule(a, 20000, 10, np.random.default_rng(0)).mix)
    assert mix.sum(1) == pytest.approx(1)
    assert mix.mean() == pytest.approx(0.1)
    assert mix.var(axis=0).mean() == pytest.approx(0.1 * 0.9 / (10 * 0.5 + 1), rel=0.02)


@pytest.mark.parametrize("a", ["1e-320", "1e-9", "0.001", "1000", "1e300"])
def test_any_positive_dirichlet_number_terminates_with_two_images_a_client(a):
    for samples in (None, 6):
        sizes = [len(share.rows) for share in shares_of(f"dirichlet:{a}", 200, samples=samples)]
        assert min(sizes) >= 2
        assert sum(sizes) == 1200


@pytest.mark.parametrize("g", [1, 2, 3, 10])
def test_label_maps_are_permutations_that_agree_nowhere_and_group_0_keeps_the_labels(g):
    shares = shares_of(f"label-shift:{g}", 20)
    maps = {share.group: share.labels for share in shares}
    assert sorted(maps) == list(range(g))
    assert all(share.labels == maps[share.group] for share in shares)
    assert maps[0] == tuple(range(10))
    for c in range(10):
        assert len({labels[c] for labels in maps.values()}) == g


@pytest.mark.parametrize("g", [1, 2, 4, 7])
def test_groups_are_turned_by_their_own_multiple_of_a_turn(g):
    shares = shares_of(f"rotation:{g}", 20)
    assert {share.group: share.degrees for share in shares} == {c: c * 360 / g for c in range(g)}


@pytest.mark.parametrize(
    ("partition", "number"), [("label-shift:4", 4), ("rotation:4", 4), ("class-groups:2", 5), ("classes:1", 10)]
)
def test_groups_are_as_even_as_the_number_of_clients_allows(partition, number):
    for num_clients in (1, 2, 5, 10, 23):
        groups = Counter(share.group for share in shares_of(partition, num_clients))
        assert len(groups) == min(number, num_clients)
        assert max(groups.values()) - min(groups.values()) <= 1


def test_group_membership_is_drawn_and_not_a_pattern_of_positions():
    groups = [tuple(share.group for share in shares_of("label-shift:2", 20, seed=seed)) for seed in range(5)]
    assert len(set(groups)) == 5


@pytest.mark.parametrize("partition", ["classes:3", "class-groups:3"])
def test_a_chosen_class_is_a_clients_own_even_if_it_drew_no_image_of_it(partition):
    for share in shares_of(partition, 20, samples=1):
        assert len(share.classes) == 3
        assert LABELS[share.rows].item() in share.classes


def test_a_dirichlet_client_is_scored_on_the_classes_it_holds():
    for share in shares_of("dirichlet:0.3", 20):
        assert share.classes == tuple(LABELS[share.rows].unique().tolist())


# Dealing


def test_images_of_classes_nobody_holds_are_left_out():
    (only,) = shares_of("classes:2", 1)
    assert len(only.rows) == 240
    assert set(LABELS[only.rows].tolist()) == set(only.classes)


def test_a_client_whose_class_ran_out_takes_more_of_its_other_classes():
    labels = torch.tensor([0] * 2 + [1] * 98)
    (only,) = shares_of("classes:2", 1, labels=labels, samples=60, num_classes=2)
    assert np.bincount(labels[only.rows]).tolist() == [2, 58]


def test_five_images_of_a_class_serve_five_clients():
    labels = torch.arange(50) % 10
    for seed in range(5):
        assert {len(share.rows) for share in shares_of("classes:1", 50, labels=labels, seed=seed)} == {1}


# Names and errors


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("classes:0", "partition 'classes:0': the k of classes:k must be a whole number from 1 to 10 (there are 10 c"),
        ("classes:11", "partition 'classes:11': the k of classes:k must be a whole number from 1 to 10"),
        ("classes:2.5", "partition 'classes:2.5': the k of classes:k must be a whole number"),
        ("classes", "partition 'classes': the k of classes:k must be a whole number from 1 to 10"),
        ("class-groups:12", "partition 'class-groups:12': the k of class-groups:k must be"),
        ("dirichlet:-1", "partition 'dirichlet:-1': the a of dirichlet:a must be a positive number"),
        ("dirichlet:0", "partition 'dirichlet:0': the a of dirichlet:a must be a positive number"),
        ("dirichlet:nan", "partition 'dirichlet:nan': the a of dirichlet:a must be a positive number"),
        ("dirichlet:inf", "partition 'dirichlet:inf': the a of dirichlet:a must be a positive number"),
        ("label-shift:x", "partition 'label-shift:x': the g of label-shift:g must be a whole number from 1 to 10"),
        ("label-shift:11", "partition 'label-shift:11': the g of label-shift:g must be a whole number from 1 to 10"),
        ("rotation:0", "partition 'rotation:0': the g of rotation:g must be a whole number from 1 to 360"),
        (
            "rotation:99999999",
            "partition 'rotation:99999999': the g of rotation:g must be a whole number from 1 to 360",
        ),
        ("iid:3", "partition 'iid:3': iid takes no number; write 'iid'"),
        ("clases:2", "unknown partition 'clases:2'; did you mean 'classes:2'?"),
        ("labelshift:2", "unknown partition 'labelshift:2'; did you mean 'label-shift:2'?"),
        ("", "unknown partition ''; write one of iid, classes:k, class-groups:k, dirichlet:a, label-shift:g, rotation"),
    ],
)
def test_a_bad_name_is_refused_in_one_sentence(partition, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        parse(partition, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("partition", "num_clients", "samples", "message"),
    [
        ("iid", 20, 61, "20 clients of 61 samples need 1220 training samples and the training pool holds 1200; lower"),
        ("dirichlet:1", 1201, None, "1201 clients cannot share the 1200 training samples there are"),
        (
            "classes:1",
            2,
            121,
            "classes:1: client . finds 120 of its 121 samples; the training pool holds 120 images of",
        ),
    ],
)
def test_a_pool_that_is_too_small_is_named_with_its_size(partition, num_clients, samples, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        shares_of(partition, num_clients, samples=samples)


def test_a_class_too_small_for_its_holders_names_the_client_that_would_get_nothing():
    labels = torch.tensor([0] * 3 + [1] * 97)
    with pytest.raises(
        ValueError, match=r"^classes:1: 8 clients are too many for 100 training samples: client \d would"
    ):
        shares_of("classes:1", 8, labels=labels, num_classes=2)
