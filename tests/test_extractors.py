"""Extractors: which channels they keep, by hand and against the published rules."""

from collections import Counter

import modules
import pytest
import torch
from reference import slicing_loops as loops
from torch import nn

from submodels import ChannelGroup, Importance, Random, Rolling, ScalableModel, Static


def _kept(extractor, size, kept, *, round=0, client=0, group=0):
    return extractor(ChannelGroup(id=group, size=size), kept, round=round, client=client).tolist()


def _mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.fixture
def scalable():
    torch.manual_seed(0)
    return ScalableModel(_mlp(), torch.zeros(2, 4).double())


def _group(model, name, axis=0):
    return next(group.id for group in model.axis_map.groups if (name, axis) in group.members)


# One table every extractor must pass.

EXTRACTORS = {"static": Static(), "rolling": Rolling(), "rolling by shares": Rolling(0.3), "random": Random(7)}


@pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS)
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_an_extractor_keeps_so_many_distinct_channels_of_the_group(extractor, size):
    for kept in range(1, size + 1):
        for round in (0, 1, 5, 1000):
            got = extractor(ChannelGroup(id=2, size=size), kept, round=round, client=3)
            assert got.dtype == torch.long
            assert got.shape == (kept,)
            assert len(set(got.tolist())) == kept
            assert set(got.tolist()) <= set(range(size))


@pytest.mark.parametrize("extractor", EXTRACTORS.values(), ids=EXTRACTORS)
def test_an_extractor_answers_the_same_twice_and_uses_no_global_randomness(extractor):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = _kept(extractor, 64, 16, round=3, client=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert _kept(extractor, 64, 16, round=3, client=2) == first


# Static


def test_static_keeps_the_first_channels_in_every_round_and_for_every_client():
    assert _kept(Static(), 8, 3) == [0, 1, 2]
    assert _kept(Static(), 8, 3, round=9, client=4, group=5) == [0, 1, 2]


def test_static_sub_models_nest(scalable):
    narrow, wide = scalable.index(0.25), scalable.index(0.75)
    for name in scalable.tensors():
        assert (narrow.mask(name) <= wide.mask(name)).all()


# Rolling


def test_rolling_starts_at_the_round_and_wraps_round():
    assert _kept(Rolling(), 6, 3, round=0) == [0, 1, 2]
    assert _kept(Rolling(), 6, 3, round=1) == [1, 2, 3]
    assert _kept(Rolling(), 6, 3, round=4) == [4, 5, 0]
    assert _kept(Rolling(), 6, 3, round=6) == [0, 1, 2]
    assert _kept(Rolling(), 6, 3, round=6_000_003) == [3, 4, 5]


def test_rolling_is_fedrolex_run_in_the_other_direction():
    size, kept = 64, 16

    def fedrolex(round):  # as published: torch.roll shifts to the right, so the window moves backwards
        return torch.roll(torch.arange(size), round % size)[:kept].tolist()

    assert fedrolex(7)[0] == 57
    for round in range(3 * size):
        assert _kept(Rolling(), size, kept, round=round) == fedrolex(-round)
    ours = {tuple(_kept(Rolling(), size, kept, round=round)) for round in range(size)}
    assert ours == {tuple(fedrolex(round)) for round in range(size)}


@pytest.mark.parametrize(("size", "kept"), [(8, 3), (64, 4), (7, 7), (5, 1), (1, 1)])
@pytest.mark.parametrize("start", [0, 13])
def test_rolling_covers_every_channel_equally_over_size_rounds(size, kept, start):
    counts = Counter(c for r in range(start, start + size) for c in _kept(Rolling(), size, kept, round=r))
    assert counts == dict.fromkeys(range(size), kept)


def test_a_rolling_step_of_several_channels_covers_them_equally_too():
    counts = Counter(c for r in range(4) for c in _kept(Rolling(step=2), 8, 2, round=r))
    assert counts == dict.fromkeys(range(8), 1)
    assert _kept(Rolling(step=5), 8, 3, round=2) == [2, 3, 4]


def test_a_rolling_step_below_one_is_a_share_of_the_group():
    assert [_kept(Rolling(0.25), 8, 1, round=r)[0] for r in range(6)] == [0, 2, 4, 6, 0, 2]
    assert [_kept(Rolling(0.25), 64, 1, round=r)[0] for r in range(6)] == [0, 16, 32, 48, 0, 16]
    assert [_kept(Rolling(0.1), 5, 1, round=r)[0] for r in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(("share", "size", "step"), [(0.29, 100, 29), (0.07, 100, 7), (0.1, 30, 3), (0.57, 100, 57)])
def test_a_share_that_is_a_whole_number_of_channels_advances_by_exactly_that(share, size, step):
    for round in range(200):
        assert _kept(Rolling(share), size, 1, round=round) == [round * step % size]


@pytest.mark.parametrize("step", [0, -1, 1.5, float("nan"), float("inf"), -0.5])
def test_a_rolling_step_that_is_no_step_is_refused(step):
    with pytest.raises(ValueError, match="Rolling step") as caught:
        Rolling(step)
    assert "\n" not in str(caught.value)


def test_all_clients_and_all_groups_of_a_size_share_the_rolling_window():
    windows = {tuple(_kept(Rolling(), 8, 3, round=5, client=c, group=g)) for c in range(4) for g in range(4)}
    assert windows == {(5, 6, 7)}


# Random


def test_a_random_draw_depends_on_seed_round_client_and_group_alone():
    draw = _kept(Random(1), 64, 16, round=2, client=3, group=4)
    assert draw == _kept(Random(1), 64, 16, round=2, client=3, group=4)
    others = [
        _kept(Random(2), 64, 16, round=2, client=3, group=4),
        _kept(Random(1), 64, 16, round=3, client=3, group=4),
        _kept(Random(1), 64, 16, round=2, client=4, group=4),
        _kept(Random(1), 64, 16, round=2, client=3, group=5),
        _kept(Random(1), 64, 16, round=3, client=2, group=4),  # round and client must not trade places
        _kept(Random(3), 64, 16, round=2, client=1, group=4),
        _kept(Random(1), 64, 16, round=23, client=4, group=4),
    ]
    assert draw not in others
    assert len({tuple(other) for other in others}) == len(others)


def test_numbers_written_one_after_the_other_are_not_mistaken_for_others():
    assert _kept(Random(0), 64, 16, round=1, client=11) != _kept(Random(0), 64, 16, round=11, client=1)
    assert _kept(Random(1), 64, 16, round=2, client=3) != _kept(Random(12), 64, 16, round=0, client=3)


def test_a_random_draw_is_in_ascending_order():
    for client in range(20):
        draw = _kept(Random(), 64, 16, client=client)
        assert draw == sorted(draw)


def test_random_draws_favour_no_channel():
    draws = 2000
    counts = Counter(c for client in range(draws) for c in _kept(Random(), 8, 2, client=client))
    spread = (draws * 0.25 * 0.75) ** 0.5
    assert all(abs(counts[c] - draws * 0.25) < 4 * spread for c in range(8))


def test_random_draws_are_the_same_in_every_process():
    # Written down, as every run of the tests is a process of its own, with another seed of hash().
    draws = [_kept(Random(1), 64, 6, round=2, client=3, group=g) for g in range(3)]
    assert draws == [[7, 11, 16, 34, 56, 62], [9, 18, 22, 49, 53, 62], [11, 12, 22, 32, 51, 60]]


# Importance


def test_importance_keeps_the_channels_with_the_largest_summed_squared_weight(scalable):
    with torch.no_grad():
        for parameter in scalable.model.parameters():
            parameter.zero_()
        first, second, last = scalable.model[0], scalable.model[2], scalable.model[4]
        first.bias.copy_(torch.tensor([0.0, 3, 0, 1, 0, 2, 0, 0]))  # a row's bias counts, 9 + 1 + 4
        first.weight[6] = 2.0  # 4 inputs: 16
        second.weight[:, 4] = -1.0  # 6 outputs: 6, and 1 for each of them
        last.weight[:, 2] = 5.0  # 3 outputs: 75
    scores = Importance.of(scalable).scores
    assert scores[_group(scalable, "0.weight")].tolist() == [0, 9, 0, 1, 6, 4, 16, 0]
    assert scores[_group(scalable, "2.weight")].tolist() == [1, 1, 76, 1, 1, 1]
    index = scalable.index(0.5, Importance.of(scalable))
    assert index.kept[_group(scalable, "0.weight")].tolist() == [1, 4, 5, 6]
    assert index.kept[_group(scalable, "2.weight")].tolist() == [0, 1, 2]  # ties go to the lower channel


@pytest.mark.parametrize("build", [modules.DenselyConnected, modules.EinopsAttention], ids=["concat", "heads"])
def test_importance_agrees_with_loops_over_single_weights(build):
    torch.manual_seed(3)
    scalable = ScalableModel(build().double(), torch.zeros(modules.IMAGE).double())
    tensors = scalable.tensors()
    if build is modules.DenselyConnected:
        group, size = _group(scalable, "convs.0.weight"), 4
        # The 4 channels of the first convolution are its rows, and places 8 to 11 of everything after it.
        none, own = [None] * 8, [0, 1, 2, 3]
        channel_of = {
            "convs.0.weight": [own, none, [None] * 3, [None] * 3],
            "convs.0.bias": [own],
            "norms.1.weight": [none + own],
            "norms.1.bias": [none + own],
            "norms.2.weight": [none + own + [None] * 4],
            "norms.2.bias": [none + own + [None] * 4],
            "convs.1.weight": [[None] * 4, none + own, [None] * 3, [None] * 3],
            "convs.2.weight": [[None] * 4, none + own + [None] * 4, [None] * 3, [None] * 3],
            "head.weight": [[None] * 10, none + own + [None] * 8],
        }
    else:
        group, size = _group(scalable, "qkv.1.weight"), 4
        # Head h owns rows 8h to 8h + 7 of each of query, key and value, and the same columns of the output.
        heads = [place // 8 % 4 for place in range(96)]
        channel_of = {
            "qkv.1.weight": [heads, [None] * 32],
            "out.1.weight": [[None] * 32, heads[:32]],
        }
    expected = loops.importance(tensors, channel_of, size)
    got = Importance.of(scalable)
    torch.testing.assert_close(got.scores[group], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    best = sorted(sorted(range(size), key=lambda c: -expected[c])[:2])
    assert scalable.index(0.5, got).kept[group].tolist() == best


def test_importance_of_a_sub_model_is_of_its_own_present_weights(scalable):
    sub = scalable.extract(0.75, Random(1))
    with torch.no_grad():
        for parameter in sub.module.parameters():
            parameter.zero_()
        sub.module[0].weight[4] = 1.0
        sub.module[0].weight[1] = 2.0
    inner = sub.extract(0.25, Importance.of(sub))
    group = _group(scalable, "0.weight")
    assert inner.inner.kept[group].tolist() == [1, 4]
    assert inner.index.kept[group].tolist() == sub.index.kept[group][[1, 4]].tolist()


def test_importance_of_the_whole_model_is_refused_on_a_sub_model(scalable):
    sub, scores = scalable.extract(0.5), Importance.of(scalable)
    with pytest.raises(ValueError, match=r"measured on 8 channels .* has 4 here; use Importance\.of") as caught:
        sub.extract(0.25, scores)
    assert "\n" not in str(caught.value)


def test_importance_is_a_snapshot(scalable):
    scores = Importance.of(scalable)
    before = [x.clone() for x in scores.scores]
    with torch.no_grad():
        for parameter in scalable.model.parameters():
            parameter.mul_(-3)
    assert all(torch.equal(a, b) for a, b in zip(before, scores.scores, strict=True))


def test_importance_reads_frozen_and_half_precision_weights(scalable):
    expected = Importance.of(scalable).scores
    scalable.model.requires_grad_(False).to(torch.bfloat16)
    for a, b in zip(Importance.of(scalable).scores, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0)


def test_two_importances_can_be_compared(scalable):
    one, other = Importance.of(scalable), Importance.of(scalable)
    assert isinstance(one == other, bool)


# Your own


def test_a_user_written_function_is_an_extractor(scalable):
    calls = []

    def last(group, kept, *, round, client):
        calls.append((group.name, group.size, kept, round, client))
        return torch.arange(group.size - kept, group.size).flip(0)

    sub = scalable.extract(0.5, last, round=3, client=9)
    assert sub.index.kept[_group(scalable, "0.weight")].tolist() == [7, 6, 5, 4]
    assert sub.index.kept[_group(scalable, "2.weight")].tolist() == [5, 4, 3]
    assert sorted(calls) == sorted((g.name, g.size, -(-g.size // 2), 3, 9) for g in scalable.axis_map.groups)
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(sub.module(x), loops.masked(scalable.model, sub.index)(x), rtol=1e-12, atol=1e-12)


def test_an_extractor_sees_what_a_group_is():
    scalable = ScalableModel(modules.EinopsAttention(), torch.zeros(modules.IMAGE))

    def keep_heads(group, kept, *, round, client):
        return torch.arange(kept) + (group.size - kept if "heads" in group.tags else 0)

    index = scalable.index(0.5, keep_heads)
    assert index.kept[_group(scalable, "qkv.0.weight")].tolist() == [2, 3]
    assert index.kept[_group(scalable, "embed.0.weight")].tolist() == list(range(16))


def test_a_list_will_do_as_an_answer(scalable):
    assert scalable.index(0.5, lambda group, kept, **_: list(range(kept))) == scalable.index(0.5)


def test_a_kept_index_set_does_not_follow_the_extractors_memory(scalable):
    order = {8: torch.arange(8), 6: torch.arange(6)}
    index = scalable.index(0.5, lambda group, kept, **_: order[group.size][:kept])
    for line in order.values():
        line.add_(1)
    assert index.kept[_group(scalable, "0.weight")].tolist() == [0, 1, 2, 3]


def test_an_extractor_is_found_by_its_name(scalable):
    assert scalable.index(0.5, "static", round=2) == scalable.index(0.5, Static(), round=2)
    assert scalable.index(0.5, "rolling", round=2) == scalable.index(0.5, Rolling(), round=2)
    assert scalable.index(0.5, "random", round=2) == scalable.index(0.5, Random(), round=2)


ANSWERS = {
    "one twice": lambda group, kept, **_: torch.zeros(kept, dtype=torch.long),
    "one too high": lambda group, kept, **_: torch.arange(kept) + group.size - kept + 1,
    "one below zero": lambda group, kept, **_: torch.arange(kept) - 1,
    "too few": lambda group, kept, **_: torch.arange(kept - 1),
    "too many": lambda group, kept, **_: torch.arange(kept + 1),
    "floats": lambda group, kept, **_: torch.arange(kept).float(),
    "a mask": lambda group, kept, **_: torch.arange(group.size) < kept,
    "a column": lambda group, kept, **_: torch.arange(kept)[:, None],
    "one number": lambda group, kept, **_: torch.tensor(1),
    "nothing": lambda group, kept, **_: None,
    "a word": lambda group, kept, **_: "first",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_wrong_answer_of_an_extractor_is_refused_in_one_sentence(scalable, answer):
    with pytest.raises(ValueError, match=f"group {scalable.axis_map.groups[0].name}") as caught:
        scalable.extract(0.5, answer)
    assert "\n" not in str(caught.value)
