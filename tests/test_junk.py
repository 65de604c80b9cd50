"""What makes no sense is refused in one sentence by the functions that load data, capacity profiles and models."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hetperm import data, profile, trace
from submodels import ScalableModel, zoo

MOBILE = profile.load("mobile")
SCALABLE = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4))
JUNK = (
    *(True, b"b", -1.5, math.nan, math.inf, 1j, ["a"], ("a", "b", "c"), {"a": 1}, object(), int, len),
    *(np.array([0.5, 7.0]), np.float64("nan"), torch.zeros(2, 3), torch.tensor(1.0), [None], [math.nan], [[1]]),
)
DIGITS = {"name": "digits", "num_clients": 2, "partition": "iid", "seed": 0, "samples_per_client": 8}
# Function -> arguments that are right; each of them is replaced by junk in turn.
CALLS = {
    "data.load": (data.load, {**DIGITS, "validation_share": 0.2, "image_size": 8, "max_test_samples": 9}),
    "profile.load": (profile.load, {"name": "mobile"}),
    "profile.apportion": (profile.apportion, {"shares": [1, 2], "N": 5}),
    "profile.assign": (profile.assign, {"profile": MOBILE, "num_clients": 2, "seed": 0}),
    "profile.empty_tiers": (profile.empty_tiers, {"profile": MOBILE, "assigned": [0, 1]}),
    "profile.solved": (profile.solved, {"profile": MOBILE, "scalable": SCALABLE, "batch_size": 4}),
    "profile.table": (
        profile.table,
        {"profile": MOBILE, "assigned": [0], "scalable": SCALABLE, "batch_size": 4, "whole": None},
    ),
    "profile.uncovered": (profile.uncovered, {"widths": [0.5, 0.25], "extraction": "static"}),
    "Profile": (profile.Profile, {"name": "a", "about": "", "tiers": MOBILE.tiers}),
    "Tier": (profile.Tier, {"name": "a", "share": 1, "width": 0.5, "train_mb": 1.0}),
    "trace.load": (trace.load, {"name": "day-night"}),
    "zoo.build": (zoo.build, {"name": "cnn", "in_channels": 1, "num_classes": 3, "image_size": 16}),
    "zoo.classifier": (zoo.classifier, {"model": SCALABLE.model, "num_classes": 3}),
}


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, good) in CALLS.items() for name in good])
def test_junk_is_refused_in_one_sentence(call, name):
    function, good = CALLS[call]
    for junk in JUNK:
        with pytest.raises((TypeError, ValueError)) as refused:
            function(**good | {name: junk})
        said = str(refused.value)
        place = refused.traceback[-1].path
        # By a sentence of ours: what Python says when it trips over a value names neither the argument nor the remedy.
        assert {"hetperm", "submodels"} & set(Path(place).parts), (junk, said)
        assert 20 < len(said) < 400 and "\n" not in said, (junk, said)
        assert str(refused.traceback[-1].statement).lstrip().startswith("raise"), (junk, said)


@pytest.mark.parametrize("call", CALLS)
def test_what_is_right_is_taken(call):
    function, good = CALLS[call]
    assert function(**good) is not None


@pytest.mark.parametrize("groups", [True, 1.5, torch.tensor(1.0), [[1], [2]], ["a"]])
def test_groups_are_a_label_for_every_client(groups):
    with pytest.raises((TypeError, ValueError), match=r"^groups "):
        profile.assign(MOBILE, 2, groups=groups, seed=0)


@pytest.mark.parametrize("assigned", [[-1], [5], [0.0], [True, 9]])
def test_a_position_is_that_of_a_tier(assigned):
    for function in (profile.empty_tiers, lambda *args: profile.table(*args, None, batch_size=4)):
        with pytest.raises(TypeError, match=r"it must hold the position of a tier, 0 to 4, for every client$"):
            function(MOBILE, assigned)
