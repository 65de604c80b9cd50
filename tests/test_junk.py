"""What makes no sense is refused in one sentence by the functions of data, capacity profiles, models and sub-models."""

import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hetperm import Cached, Client, complexity, data, load_client, profile, register_algorithm, register_dataset, trace
from hetperm.runs.client_models import channels, clients, save_client
from submodels import WHOLE, Budget, Importance, IndexSet, Random, Rolling, ScalableModel, average, recalibrate, zoo

MOBILE = profile.load("mobile")
SCALABLE = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 4))
SUB = SCALABLE.extract(0.5)
W, PART, INDEX = SCALABLE.tensors(), SUB.tensors(), SUB.index
NORMED = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
PAIR = torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
LAST, MAP = "2.weight", SCALABLE.axis_map


def load_saved(**arguments):
    """`load_client` of a folder with one client."""
    folder = Path(tempfile.mkdtemp())
    try:
        manifest = {"architecture": {"class": "Sequential"}, "width": 0.5, "input": [4], **channels(INDEX)}
        save_client(folder, 0, SUB.module, manifest)
        return load_client(**{"folder": folder, "i": 0, "model": SCALABLE} | arguments)
    finally:
        shutil.rmtree(folder)


JUNK = (
    *(True, b"b", -1.5, math.nan, math.inf, 1j, ["a"], ("a", "b", "c"), {"a": 1}, object(), int, len),
    *(np.array([0.5, 7.0]), np.float64("nan"), torch.zeros(2, 3), torch.tensor(1.0), [None], [math.nan], [[1]]),
    *(
        10**400,
        10**5000,
        torch.zeros(3, 3, device="meta"),
        torch.eye(3).to_sparse(),
        np.array([None, "x"], dtype=object),
    ),
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
    "load_client": (load_saved, {"i": 0, "model": SCALABLE, "device": "cpu"}),
    "clients": (clients, {"folder": "."}),
    "vc": (complexity.vc, {"num_params": 9, "num_layers": 2}),
    "average": (average, {"w": W, "updates": [(PART, INDEX, 1.0)]}),
    "a tensor of w": (lambda x: average({**W, LAST: x}, [(PART, INDEX, 1.0)]), {"x": W[LAST]}),
    "a tensor of an update": (lambda x: average(W, [({**PART, LAST: x}, INDEX, 1.0)]), {"x": PART[LAST]}),
    "a whole tensor": (lambda x: average(W, [({LAST: x}, WHOLE, 1.0)]), {"x": W[LAST]}),
    "rows": (lambda x: average(W, [(PART, INDEX, 1.0)], rows={LAST: x}), {"x": torch.ones(3, dtype=torch.bool)}),
    "WHOLE.scatter_": (
        lambda **tensors: WHOLE.scatter_(LAST, **tensors),
        {"into": torch.zeros(3, 8), "tensor": torch.zeros(3, 8)},
    ),
    "IndexSet": (IndexSet, {"axis_map": MAP, "kept": INDEX.kept, "sizes": INDEX.sizes}),
    "channels": (lambda kept: IndexSet(MAP, (kept,), (8,)), {"kept": torch.arange(3)}),
    "shape": (MAP.shape, {"name": LAST, "counts": (4,)}),
    "num_params": (MAP.num_params, {"counts": (4,)}),
    "index": (SCALABLE.index, {"width": 0.5, "extractor": "rolling", "round": 1, "client": 2, "within": [8]}),
    "cut": (SCALABLE.cut, {"index": INDEX, "width": 0.5}),
    "template_of": (SCALABLE.template_of, {"counts": [4]}),
    "cost": (SCALABLE.cost, {"width": 0.5, "batch_size": 2, "optimizer": "sgd", "accumulate": 1}),
    "Random": (Random, {"seed": 0}),
    "Rolling": (Rolling, {"step": 1}),
    "Importance": (lambda scores: SCALABLE.extract(0.5, Importance((scores,))), {"scores": torch.ones(8)}),
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


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda: average(W, [(PART, INDEX, 10**400)]), "the weight of an update is 1000"),
        (
            lambda: average(W, [(PART, INDEX, True)]),
            "the weight of an update is True; it must be zero, or a finite number",
        ),
        (lambda: load_saved(device=0), "the device is 0; it must be a name such as 'cpu'"),
        (lambda: load_saved(device="nowhere"), "device 'nowhere' is not there; use 'auto' or 'cpu'"),
        (lambda: load_client("a" * 10**4, 0), "no name in a path may be longer than 255 bytes"),
        (lambda: SCALABLE.index(0.5, round=True), "round is True; it must be a whole number below 2^64"),
        (lambda: SCALABLE.index(0.5, len), "cannot be called as extractor(group, kept, round=..., client=...)"),
        (lambda: SCALABLE.extract(0.5, nn.Linear(2, 2)), "(Linear.forward() takes no argument 'round')"),
        (lambda: SCALABLE.cost(0.5, batch_dim=1.0), "batch_dim is 1.0; it must be a whole number, or one for each"),
        (lambda: SCALABLE.cost(0.5, batch_dim=[7]), "batch_dim [7] holds 7; give dimensions of the tensors, or None"),
        (lambda: recalibrate(NORMED, [torch.zeros(2, 9)]), "cannot be run on a batch of shape (2, 9), torch.float32"),
        (lambda: recalibrate(NORMED, [torch.tensor(1.0)]), "a batch to recalibrate from holds no samples"),
        (lambda: Budget(train_mb=1).fits(SCALABLE), "it must be that of a width, as ScalableModel.cost gives it"),
        (lambda: SCALABLE.extract(0.5, Importance(())), "Importance was measured on 0 channels of group"),
        (lambda: Importance.of(INDEX), "has no channels to compare; give a ScalableModel or a Submodel"),
        (lambda: Cached(7, mb=1), "the dataset is 7; it must be a map-style Dataset"),
        (lambda: Cached([0], mb=True), "a cache of True MB holds nothing; give a number above 0"),
        (lambda: Client(PAIR, key=2**70), "key is 1180591620717411303424; it must be below 2^63"),
        (lambda: register_algorithm("mine", len, one_size=1), "one_size is 1; it must be true or false"),
        (lambda: register_dataset("mine", len, takes_path=None), "takes_path is None; it must be true or false"),
        (lambda: register_dataset("a" * 101, len), "a name has small letters, digits, hyphens and underscores"),
        (lambda: data.load(**DIGITS | {"seed": 2**70}), "seed is 1180591620717411303424; it must be below 2^64"),
        (lambda: profile.load("a" * 10**5), "no name in a path may be longer than 255 bytes"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(act, sentence):
    with pytest.raises((TypeError, ValueError)) as refused:
        act()
    assert sentence in str(refused.value) and len(str(refused.value)) < 400


def test_a_rolling_window_goes_round_in_any_round():
    kept = SCALABLE.index(0.5, "rolling", round=8 * 10**18 + 3).kept[0]
    assert kept.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("groups", [True, 1.5, torch.tensor(1.0), [[1], [2]], ["a"]])
def test_groups_are_a_label_for_every_client(groups):
    with pytest.raises((TypeError, ValueError), match=r"^groups "):
        profile.assign(MOBILE, 2, groups=groups, seed=0)


@pytest.mark.parametrize("assigned", [[-1], [5], [0.0], [True, 9]])
def test_a_position_is_that_of_a_tier(assigned):
    for function in (profile.empty_tiers, lambda *args: profile.table(*args, None, batch_size=4)):
        with pytest.raises(TypeError, match=r"it must hold the position of a tier, 0 to 4, for every client$"):
            function(MOBILE, assigned)
