"""Capacity profiles: what files may say, who gets which tier, and what it costs."""

import math
from collections import Counter
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hetperm import profile as profiles
from hetperm.profile import Profile, Tier, apportion, assign, empty_tiers, load, names, solved, table, uncovered
from hetperm.report import tables
from hetperm.report.contents import read_csv
from hetperm.runs import files
from submodels import ScalableModel, zoo
from submodels.cost import MB, count

MOBILE = (6, 10, 11, 18, 55)


def written(folder: Path, text: str) -> Path:
    path = folder / "lab.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    """What is said about a file, without the name of the file, which must come first."""
    path = written(folder, text)
    with pytest.raises(ValueError) as refused:
        load(path)
    start, _, rest = str(refused.value).partition(f"{path}: ")
    assert start == ""
    return rest


def profile_of(*shares: float, **same) -> Profile:
    return Profile("test", "", tuple(Tier(f"t{t}", share, 0.5**t, **same) for t, share in enumerate(shares)))


@pytest.fixture(scope="module")
def small() -> ScalableModel:
    """4 inputs, 8 hidden channels, 2 outputs: 4 h + h + 2 h + 2 parameters at h channels, 6 h multiply-adds."""
    return ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))


# Files


def test_the_profiles_of_the_design_are_shipped():
    assert names() == ["cross-silo", "edge-cluster", "homogeneous", "iot", "mobile", "mobile-ram", "uniform5"]


@pytest.mark.parametrize("name", names())
def test_every_shipped_profile_says_what_it_is_and_lists_the_largest_tier_first(name):
    profile = load(name)
    assert profile.name == name
    assert profile.about
    widths = [tier.width for tier in profile.tiers]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("name", names())
def test_what_is_not_published_is_marked_as_our_assumption(name):
    text = (profiles.SHIPPED / f"{name}.toml").read_text(encoding="utf-8")
    assert "our assumption" in text or name == "homogeneous"


def test_the_mobile_profile_is_the_published_mix():
    tiers = load("mobile").tiers
    assert tuple(tier.share for tier in tiers) == MOBILE
    assert [tier.width for tier in tiers] == [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert tiers[0] == Tier("flagship", 6, 1.0, train_mb=128, down_mbps=166, up_mbps=21, slow=1)


def test_a_file_is_read_with_every_key_and_named_after_itself(tmp_path):
    path = written(
        tmp_path,
        """
        about = "  two machines "
        [tiers.big]
        share = 1
        width = 1
        train_mb = 64
        mmacs = 100
        wire_mb = 8
        down_mbps = 50
        up_mbps = 10
        slow = 1.5
        [tiers.also-big]
        share = 2.5
        width = 1
        """,
    )
    big = Tier("big", 1, 1, train_mb=64, mmacs=100, wire_mb=8, down_mbps=50, up_mbps=10, slow=1.5)
    assert load(path) == Profile("lab", "two machines", (big, Tier("also-big", 2.5, 1)))
    assert load(str(path)).widths == (1,)


def test_every_field_of_a_tier_but_its_name_is_a_key_of_its_table():
    assert ("name", *profiles.KEYS) == tuple(field.name for field in fields(Tier))


def test_a_profile_and_its_tiers_cannot_be_changed():
    profile = load("iot")
    with pytest.raises(FrozenInstanceError):
        profile.name = "x"
    with pytest.raises(FrozenInstanceError):
        profile.tiers[0].width = 1


def test_an_unknown_name_is_refused_with_the_known_ones_and_a_guess():
    known = ", ".join(names())
    with pytest.raises(ValueError) as refused:
        load("mobil")
    assert str(refused.value) == (
        f"there is no capacity profile 'mobil' (did you mean 'mobile'?); give a TOML file, or one of {known}"
    )
    for name in ("zzz.toml", "../profiles/iot"):  # which is no path from here
        with pytest.raises(ValueError) as refused:
            load(name)
        assert str(refused.value) == f"there is no capacity profile {name!r}; give a TOML file, or one of {known}"


@pytest.mark.parametrize("name", ["=cmd|'/C calc'!A0", "+1", "-1", "@sum", "a\x1b]0;b\x07", "a\nb", "\u202ea"])
def test_a_name_that_a_spreadsheet_or_a_terminal_would_obey_is_refused(name):
    with pytest.raises(ValueError, match=r"begins with none of = \+ - @ and holds no control characters") as refused:
        profiles.Tier(name, share=1, width=1)
    assert str(refused.value).isprintable()


ABOVE_0 = "it must be a number above 0"
UP_TO_1 = "it must be a number above 0 and up to 1, such as 0.25 for a quarter"


@pytest.mark.parametrize("value", ("0", "-1", "inf", "nan", "true", '"6"', "[6]", "1" + "0" * 400))
def test_a_share_that_is_no_positive_number_is_refused_by_tier_and_value(tmp_path, value):
    said = refusal(tmp_path, f"[tiers.mid]\nwidth = 1\nshare = {value}")
    assert said.startswith("tier 'mid': share is ")
    assert said.endswith(f"; {ABOVE_0}; leave out a tier that nobody is in")


@pytest.mark.parametrize(("value", "shown"), [("0", "0"), ("-0.5", "-0.5"), ("1.5", "1.5"), ("nan", "nan")])
def test_a_width_outside_the_unit_interval_is_refused_by_tier_and_value(tmp_path, value, shown):
    said = refusal(tmp_path, f"[tiers.mid]\nshare = 1\nwidth = {value}")
    assert said == f"tier 'mid': width is {shown}; {UP_TO_1}"


@pytest.mark.parametrize("key", profiles.OPTIONAL)
@pytest.mark.parametrize("value", ("0", "-3", "inf", "false"))
def test_a_limit_or_speed_that_is_not_positive_is_refused(tmp_path, key, value):
    said = refusal(tmp_path, f"[tiers.mid]\nshare = 1\nwidth = 1\n{key} = {value}")
    assert said.startswith(f"tier 'mid': {key} is {value.title() if value == 'false' else value}; {ABOVE_0}; leave it")


@pytest.mark.parametrize("key", profiles.SPEEDS)
@pytest.mark.parametrize("value", ("1e-320", "9e-7", "1.1e+09"))
def test_a_speed_at_which_a_clock_means_nothing_is_refused(tmp_path, key, value):
    said = refusal(tmp_path, f"[tiers.mid]\nshare = 1\nwidth = 1\n{key} = {value}")
    assert said.startswith(f"tier 'mid': {key} is ")
    assert said.endswith("; it must be from 1e-06 to 1e+09; leave it out if it is not known")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no tiers; write a table [tiers.NAME] with share and width for each"),
        ("[tiers]", "there are no tiers; write a table [tiers.NAME] with share and width for each"),
        ("[[tiers]]\nshare = 1", "tiers is not a table of tiers; write a table [tiers.NAME] for each"),
        ("tiers.a = 3", "tier 'a' is 3; it must be a table [tiers.a] with share and width"),
        ("[tiers.a]\nshare = 1", "tier 'a' has no width; write width = 0.25 for a quarter"),
        ("[tiers.a]\nwidth = 1", "tier 'a' has no share; write share = 1, a relative weight"),
        ("[tiers.a]\nshare = 1\nwidht = 1", "tier 'a': unknown key 'widht'; did you mean 'width'?"),
        ("[tiers.a]\nname = 'b'", f"tier 'a': unknown key 'name'; known are {', '.join(profiles.KEYS)}"),
        ("[tier.a]\nshare = 1", "unknown key 'tier'; did you mean 'tiers'?"),
        ("about = 3", "about is 3; it must be a text, in quotes"),
        ("[tiers.'']\nshare = 1\nwidth = 1", "a tier is named ''; give it a name, in quotes"),
    ],
)
def test_what_else_is_wrong_with_a_file_is_said_in_one_sentence(tmp_path, text, said):
    assert refusal(tmp_path, text) == said


def test_more_tiers_than_a_table_can_show_are_refused(tmp_path):
    text = "\n".join(f"[tiers.t{k}]\nshare = 1\nwidth = 1" for k in range(101))
    assert refusal(tmp_path, text) == "there are 101 tiers; at most 100 can be told apart, merge some"


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    assert refusal(tmp_path, "share 6").startswith("is not TOML: ")
    path = tmp_path / "picture.toml"
    path.write_bytes(b"\xff\xd8")
    with pytest.raises(ValueError, match=r"picture\.toml: is not UTF-8 text"):
        load(path)


def test_profiles_made_by_hand_are_checked_as_well():
    with pytest.raises(ValueError, match="tier 'a': width is 2"):
        Tier("a", 1, 2)
    with pytest.raises(ValueError, match="2 tiers are named 'a'; give each a name of its own"):
        Profile("x", "", (Tier("a", 1, 1), Tier("b", 1, 1), Tier("a", 1, 0.5)))
    with pytest.raises(ValueError, match="there are no tiers"):
        Profile("x", "", ())


@pytest.mark.parametrize("width", [np.float32(0.5), np.float16(0.5), Fraction(1, 2)])
def test_numbers_of_other_kinds_are_widths(width):
    assert Tier("a", 1, width).width == 0.5


# Apportionment

SHARES = st.lists(st.integers(1, 1000), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("N", "counts"),
    [
        (0, (0, 0, 0, 0, 0)),
        (1, (0, 0, 0, 0, 1)),
        (3, (0, 0, 0, 1, 2)),  # .18 .3 .33 .54 1.65: one is sure, two go to .65 and .54
        (20, (1, 2, 2, 4, 11)),  # 1.2 2 2.2 3.6 11
        (50, (3, 5, 6, 9, 27)),  # 3 5 5.5 9 27.5: a tie, which the earlier one wins
        (100, MOBILE),
    ],
)
def test_the_mobile_mix_is_apportioned_as_by_hand(N, counts):
    assert apportion(MOBILE, N) == counts


def test_ties_go_to_the_earlier_share():
    assert apportion([1, 1, 1], 4) == (2, 1, 1)
    assert apportion([1, 1, 1], 2) == (1, 1, 0)


def test_shares_written_as_fractions_of_one_tie_like_percentages():
    assert apportion([0.06, 0.10, 0.11, 0.18, 0.55], 50) == apportion(MOBILE, 50)


@given(SHARES, st.integers(0, 500))
def test_counts_sum_to_the_number_of_clients_and_stay_within_one_of_the_quota(shares, N):
    counts = apportion(shares, N)
    assert sum(counts) == N
    for share, number in zip(shares, counts, strict=True):
        assert abs(number - Fraction(N * share, sum(shares))) < 1


@given(SHARES, st.integers(0, 500), st.fractions(Fraction(1, 1000), 1000))
def test_only_the_ratio_of_shares_matters(shares, N, scale):
    assert apportion([share * scale for share in shares], N) == apportion(shares, N)


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=8), st.integers(0, 500))
def test_any_finite_shares_are_apportioned(shares, N):
    assert sum(apportion(shares, N)) == N


@pytest.mark.parametrize("N", (-1, 2.5, True))
def test_a_number_of_clients_that_is_no_number_is_refused(N):
    with pytest.raises(ValueError, match=f"{N} clients cannot be apportioned; give a whole number"):
        apportion([1], N)


@pytest.mark.parametrize("share", (0, -1, math.nan, math.inf))
def test_a_share_that_is_no_weight_is_refused(share):
    with pytest.raises(ValueError, match=f"share {share} is no weight"):
        apportion([1, share], 3)


def test_clients_without_shares_are_refused():
    with pytest.raises(ValueError, match="there are no shares to apportion 3 clients to"):
        apportion([], 3)


# Assignment


def counts_of(tiers, k: int) -> tuple[int, ...]:
    return tuple(Counter(tiers)[t] for t in range(k))


@pytest.mark.parametrize("N", (0, 1, 3, 20, 50))
def test_tiers_get_as_many_clients_as_apportioned(N):
    assert counts_of(assign(load("mobile"), N, seed=0), 5) == apportion(MOBILE, N)


def test_the_seed_decides_who_and_nothing_else_does():
    mobile = load("mobile")
    assert assign(mobile, 50, seed=0) == assign(mobile, 50, seed=0)
    assert len({assign(mobile, 50, seed=seed) for seed in range(5)}) == 5


def test_who_is_in_which_tier_is_the_same_on_every_machine():
    assert assign(load("mobile"), 12, groups=[0, 1] * 6, seed=3) == (4, 4, 3, 4, 0, 3, 4, 1, 4, 4, 4, 2)


def test_every_client_meets_every_tier_over_the_seeds():
    uniform = load("uniform5")
    seen = [assign(uniform, 5, seed=seed) for seed in range(100)]
    assert all(len(set(column)) == 5 for column in zip(*seen, strict=True))


def test_group_and_tier_are_crossed_exactly_where_numbers_allow():
    # tiers of 10, 20 and 70, and two groups of 50: half of every tier in each
    groups = [i % 2 for i in range(100)]
    tiers = assign(profile_of(10, 20, 70), 100, groups=groups, seed=0)
    assert Counter(zip(groups, tiers)) == {(0, 0): 5, (0, 1): 10, (0, 2): 35, (1, 0): 5, (1, 1): 10, (1, 2): 35}


def test_groups_of_unequal_size_get_their_part_of_every_tier():
    # 30 and 10 clients; tiers of 8, 12, 20: three quarters of each are 6, 9, 15
    groups = ["big"] * 30 + ["small"] * 10
    tiers = assign(profile_of(2, 3, 5), 40, groups=groups, seed=1)
    assert counts_of(tiers[:30], 3) == (6, 9, 15)
    assert counts_of(tiers[30:], 3) == (2, 3, 5)


def test_fewer_clients_than_tiers_in_groups_leave_tiers_empty():
    mobile = load("mobile")
    tiers = assign(mobile, 3, groups=[0, 0, 1], seed=0)
    assert counts_of(tiers, 5) == (0, 0, 0, 1, 2)
    assert empty_tiers(mobile, tiers) == ["flagship", "high", "mid"]
    assert empty_tiers(mobile, assign(mobile, 50, seed=0)) == []


@given(SHARES, st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 2**31))
def test_every_group_has_its_part_of_every_tier_to_within_one(shares, sizes, seed):
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    N, k = len(groups), len(shares)
    tiers = assign(profile_of(*shares), N, groups=groups, seed=seed)
    totals = apportion(shares, N)
    assert counts_of(tiers, k) == totals
    for g, size in enumerate(sizes):
        inside = counts_of([t for t, group in zip(tiers, groups, strict=True) if group == g], k)
        for number, total in zip(inside, totals, strict=True):
            assert abs(number - Fraction(size * total, N)) < 1


def test_many_small_groups_are_crossed_too():
    tiers = assign(load("mobile"), 1000, groups=[i // 2 for i in range(1000)], seed=0)
    assert counts_of(tiers, 5) == tuple(10 * share for share in MOBILE)


def test_one_group_is_no_group():
    mobile = load("mobile")
    assert assign(mobile, 20, groups=[None] * 20, seed=4) == assign(mobile, 20, seed=4)


def test_groups_may_be_a_tensor():
    labels = [0] * 5 + [1] * 5
    found = assign(load("uniform5"), 10, groups=torch.tensor(labels), seed=0)
    assert found == assign(load("uniform5"), 10, groups=labels, seed=0)


def test_groups_of_another_number_of_clients_are_refused():
    with pytest.raises(ValueError, match="groups has 3 labels for 4 clients; give one for each client"):
        assign(load("mobile"), 4, groups=[0, 1, 0], seed=0)


# Budgets


def test_widths_are_solved_from_budgets_over_the_widths_of_the_profile(small):
    # 6 h multiply-adds: 48 at 8 channels, 24 at 4, 12 at 2. A tier may end up wider or narrower than listed.
    tiers = (Tier("a", 1, 1, mmacs=30e-6), Tier("b", 1, 0.5, mmacs=48e-6), Tier("c", 1, 0.25, mmacs=12e-6))
    listed = Profile("x", "", tiers)
    found = solved(listed, small, batch_size=2)
    assert [tier.width for tier in found.tiers] == [0.5, 1, 0.25]
    assert [replace(tier, width=1) for tier in found.tiers] == [replace(tier, width=1) for tier in tiers]


def test_the_narrowest_limit_of_a_tier_decides(small):
    tiers = (Tier("a", 1, 1, mmacs=1, wire_mb=30 * 4 / MB), Tier("b", 1, 0.5, mmacs=1))
    # 7 h + 2 parameters of 4 bytes: 58 at 8 channels, 30 at 4
    assert [tier.width for tier in solved(Profile("x", "", tiers), small, batch_size=2).tiers] == [0.5, 1]


def test_the_batch_size_and_the_optimizer_count(small):
    need = small.cost(1, 4, "sgd").train_bytes / MB
    listed = Profile("x", "", (Tier("a", 1, 1, train_mb=need), Tier("b", 1, 0.5, train_mb=need)))
    assert solved(listed, small, batch_size=4).tiers[0].width == 1
    assert solved(listed, small, batch_size=5).tiers[0].width == 0.5
    assert solved(listed, small, batch_size=4, optimizer="adam").tiers[0].width == 0.5


def test_a_tier_without_a_budget_cannot_be_solved(small):
    with pytest.raises(ValueError) as refused:
        solved(load("edge-cluster"), small, batch_size=2)
    assert str(refused.value) == (
        "profile 'edge-cluster': tier 'agx-orin' has no budget to solve its width from; give it one of "
        "train_mb, mmacs, wire_mb, or use the widths that are listed"
    )


def test_a_budget_that_nothing_fits_is_refused_with_the_tier_and_the_smallest_need(small):
    listed = Profile("x", "", (Tier("a", 1, 1, mmacs=1), Tier("b", 1, 0.5, mmacs=1e-5)))
    with pytest.raises(ValueError) as refused:
        solved(listed, small, batch_size=2)
    assert str(refused.value) == (
        "profile 'x': tier 'b': no width fits mmacs=1e-05: the smallest sub-model (width 0.5) needs 2.4e-05 million "
        "multiply-adds a sample; raise mmacs to 2.4e-05"
    )


@pytest.mark.slow
def test_shipped_budgets_give_back_the_listed_widths_of_the_model_they_are_for():
    model = zoo.build("resnet18-cifar", in_channels=3, num_classes=10, image_size=32)
    scalable = ScalableModel(model, torch.zeros(1, 3, 32, 32))
    budgeted = [profile for profile in map(load, names()) if any(tier.limits() for tier in profile.tiers)]
    assert [profile.name for profile in budgeted] == ["iot", "mobile", "mobile-ram", "uniform5"]
    for profile in budgeted:
        assert solved(profile, scalable, batch_size=10) == profile


# The table


def test_the_table_prices_the_tiers_that_have_clients(small):
    profile = Profile("x", "", (Tier("a", 1, 1), Tier("b", 1, 0.5, train_mb=3), Tier("c", 1, 0.25)))
    priced = []

    class Watched:
        axis_map = small.axis_map

        def cost(self, width, *rest, **step):
            priced.append(width)
            return small.cost(width, *rest, **step)

    rows = table(profile, (0, 1, 1), Watched(), batch_size=2)
    assert priced == [1, 0.5]
    assert rows[1] == {
        "tier": "b",
        "clients": 2,
        "width": 0.5,
        "params": 30,
        "mmacs": 24e-6,
        "train_mb": small.cost(0.5, 2).train_bytes / MB,
        "wire_mb_per_visit": 2 * 30 * 4 / MB,
        "budget_train_mb": 3,
    }
    assert (rows[0]["params"], rows[0]["budget_train_mb"]) == (58, None)
    nothing = dict.fromkeys(("params", "mmacs", "train_mb", "wire_mb_per_visit", "budget_train_mb"))
    assert rows[2] == {"tier": "c", "clients": 0, "width": 0.25, **nothing}


def test_a_profile_without_budgets_has_no_budget_columns(small):
    (row,) = table(load("homogeneous"), (0, 0), small, batch_size=2)
    assert list(row) == ["tier", "clients", "width", "params", "mmacs", "train_mb", "wire_mb_per_visit"]


def test_a_model_that_cannot_be_cut_is_priced_as_a_whole():
    whole = count(nn.Linear(4, 2), torch.zeros(1, 4), batch_size=2)
    (row,) = table(load("homogeneous"), (0, 0), None, batch_size=2, whole=whole)
    assert (row["params"], row["mmacs"], row["wire_mb_per_visit"]) == (10, 8e-6, 2 * 10 * 4 / MB)
    (row,) = table(load("homogeneous"), (0, 0), None, batch_size=2)
    assert (row["clients"], row["params"]) == (2, None)


def test_a_model_that_cannot_be_cut_needs_full_width_from_all_who_take_part():
    profile = Profile("x", "", (Tier("a", 1, 1), Tier("b", 1, 0.5)))
    assert table(profile, (0, 0), None, batch_size=2)[1]["clients"] == 0
    with pytest.raises(ValueError, match=r"tier 'b' has width 0\.5 and this model cannot be cut; use the profile"):
        table(profile, (0, 1), None, batch_size=2)


def test_a_width_or_a_budget_that_is_a_fraction_is_written_as_a_decimal(small):
    half, tiny = Fraction(1, 2), Fraction(1, 10**6)
    assert uncovered([half], "static") == uncovered([0.5], "static")
    profile = Profile("x", "", (Tier("a", 1, half, train_mb=tiny),))
    with pytest.raises(ValueError, match=r"tier 'a' has width 0\.5 and this model cannot be cut"):
        table(profile, [0], None, batch_size=2)
    (warning,) = profiles.over_budget(table(profile, [0], small, batch_size=2))
    assert " of 1e-06 at width 0.5; " in warning


# What nobody trains


def test_static_extraction_without_a_full_client_is_warned_about():
    assert uncovered([0.25, 0.125], "static") == (
        "the largest width of a client is 0.25 and static extraction always keeps the first channels: 75% of the "
        "channels of every layer, about 93.8% of the parameters, stay untrained; use rolling or random extraction, "
        "or give a client width 1"
    )


@pytest.mark.parametrize(
    ("widths", "extraction"), [([1, 0.25], "static"), ([0.5], "rolling"), ([0.5], "random"), ([], "static")]
)
def test_there_is_no_warning_where_everything_is_reached(widths, extraction):
    assert uncovered(widths, extraction) is None


def test_the_table_says_what_a_width_cannot_express(tmp_path):
    layers = nn.Conv2d(3, 32, 3), nn.GroupNorm(2, 32), nn.Conv2d(32, 8, 3)
    scalable = ScalableModel(nn.Sequential(*layers), torch.zeros(2, 3, 8, 8))
    profile = Profile("mine", "", (Tier("large", 1, 1.0), Tier("small", 1, 0.125), Tier("nobody", 1, 0.0625)))
    rows = table(profile, (0, 1), scalable, batch_size=2)
    sentence = "width 0.125 keeps 1 of 2 groups (g0): share 0.501"
    assert [row["note"] for row in rows] == ["", sentence, ""]
    # Saved as a column, and printed below the table, where there is room for a sentence.
    files.write_csv(tmp_path / "profile.csv", rows)
    saved = read_csv(tmp_path / "profile.csv")
    grid = tables.row_grid(saved)
    assert grid.note == sentence and "note" not in grid.columns
    plain = ScalableModel(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 2)), torch.zeros(2, 4))
    assert all(["note" not in row for row in table(profile, (0, 1), plain, batch_size=2)])
