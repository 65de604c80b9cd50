"""digit-pairs: sums of two handwritten digits, made inside pools of single digits that never mix."""

import pytest
import torch

from hetperm.data import images, load, pairs
from hetperm.data.images import Images


def digit_pairs(partition="label-shift:2", num_clients=4, *, seed=0, **options):
    return load("digit-pairs", num_clients=num_clients, partition=partition, seed=seed, **options)


def drawn(n, count, seed=0):
    return pairs.drawn(n, count, generator=torch.Generator().manual_seed(seed))


def rows_of(x):
    return {row.numpy().tobytes() for row in x.flatten(1)}


def test_a_pair_is_two_digits_side_by_side_and_their_sum():
    digit = torch.arange(3, dtype=torch.uint8)
    pool = Images(digit.view(3, 1, 1, 1).expand(3, 1, 8, 8), digit.long() * 4)
    made = pairs.added(pool, 6, generator=torch.Generator().manual_seed(0))
    assert made.x.shape == (6, 1, 8, 16)
    assert (made.x[..., :8] == made.x[..., :1]).all()
    assert (made.x[..., 8:] == made.x[..., 8:9]).all()
    left, right = made.x[:, 0, 0, 0], made.x[:, 0, 0, 8]
    assert sorted(zip(left.tolist(), right.tolist())) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert made.y.tolist() == [4 * int(a + b) for a, b in zip(left, right)]


@pytest.mark.parametrize(
    ("n", "count", "expected"), [(5, 7, 7), (5, 20, 20), (5, 99, 20), (2, 9, 2), (1, 9, 0), (0, 9, 0)]
)
def test_no_pair_comes_twice_and_no_digit_is_paired_with_itself(n, count, expected):
    left, right = drawn(n, count)
    assert len({*zip(left.tolist(), right.tolist())}) == len(left) == expected
    assert (left != right).all()
    assert expected == 0 or max(left.max(), right.max()) < n


def test_every_pair_is_as_likely_as_any_other():
    left, right = (torch.cat(side) for side in zip(*[drawn(4, 3, seed) for seed in range(4000)]))
    counts = torch.bincount(left * 4 + right, minlength=16).view(4, 4)
    assert counts.diagonal().tolist() == [0] * 4
    assert (counts[counts > 0] - 1000).abs().max() < 130  # four deviations


def test_the_set_has_nineteen_sums_and_sixteen_training_pairs_a_digit():
    problem = digit_pairs()
    assert (problem.in_channels, problem.image_size, problem.num_classes) == (1, (8, 16), 19)
    assert sum(client.n_train for client in problem.clients) == 16 * 1222
    assert {client.n_val for client in problem.clients} == {4 * 216}
    assert {len(client.test[1]) for client in problem.clients} == {4 * 359}
    x, y = problem.clients[0].test
    assert set(y.tolist()) == set(range(19))
    assert abs(x.mean()) < 0.02
    assert x.std() == pytest.approx(1, abs=0.02)


def test_no_digit_of_a_test_pair_is_seen_in_training_or_validation():
    problem = digit_pairs("iid")
    seen = {}
    for part in ("train", "val", "test"):
        x = torch.cat([getattr(client, part)[0] for client in problem.clients])
        seen[part] = rows_of(x[..., :8]) | rows_of(x[..., 8:])
    assert not seen["train"] & seen["val"]
    assert not seen["train"] & seen["test"]
    assert not seen["val"] & seen["test"]
    pools = images.pools(images.digits(), validation_share=0.15, seed=0)
    assert {part: len(rows) for part, rows in seen.items()} == {
        part: len(rows_of(pool.x)) for part, pool in pools.items()
    }, "every digit is in some pair"


def test_a_training_pair_belongs_to_one_client():
    problem = digit_pairs("dirichlet:0.3", num_clients=7)
    train = torch.cat([client.train[0] for client in problem.clients])
    assert len(rows_of(train)) == len(train) == 16 * 1222


def test_the_seed_decides_the_pairs_and_the_partition_does_not():
    first, again, other = (digit_pairs(seed=seed).clients[0].test for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0], digit_pairs("iid", num_clients=9).clients[0].test[0])


def test_without_validation_there_are_no_validation_pairs():
    assert {client.val for client in digit_pairs(validation_share=0).clients} == {None}


def test_pairs_are_turned_only_if_they_are_made_square():
    with pytest.raises(ValueError, match=r"^digit-pairs: images of 8x16 change shape when turned; give --image-size$"):
        digit_pairs("rotation:2")
    assert digit_pairs("rotation:2", image_size=16, samples_per_client=10).image_size == 16
