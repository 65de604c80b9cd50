"""Clients' models on disk: what is loaded predicts as what was saved, to the bit, and what does not fit is refused."""

import json
import math
import re
import shutil
from collections import OrderedDict
from pathlib import Path

import modules
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import hetperm
from hetperm import load_client
from hetperm.runs import client_models
from hetperm.runs.client_models import channels, clients, read_manifest, save_client
from submodels import Random, ScalableModel, zoo
from submodels.skeleton import named_tensors, tensors_in

ROOT = Path(__file__).resolve().parent.parent


def lived_in(module, images):
    """The module as training leaves it: nothing has the value it began with, running statistics included."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    module.train()(images)
    return module.eval()


def images_of(shape, dtype=torch.float32):
    return torch.randn(4, *shape, dtype=dtype, generator=torch.Generator().manual_seed(2))


def saved_client(folder, name, width, *, shape=(1, 8, 8), i=7):
    """A client's model by name, saved and given back, with images for it."""
    sizes = {"in_channels": shape[0], "num_classes": 10, "image_size": shape[-1]}
    manifest = {"architecture": {"name": name, **sizes, "options": {}}, "width": width, "input": list(shape)}
    torch.manual_seed(0)
    module, images = zoo.build(name, **sizes), images_of(shape)
    if width < 1:
        sub = ScalableModel(module, images[:1]).extract(width)
        module, manifest = sub.module, {**manifest, **channels(sub.index)}
    save_client(folder, i, lived_in(module, images), manifest)
    return module, images


def same(one, two):
    """Whether all tensors of two modules are equal to the bit."""
    one, two = (dict(named_tensors(module, aliases=True)) for module in (one, two))
    equal = [torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(one.values(), two.values())]
    return list(one) == list(two) and all(equal)


@pytest.fixture
def mlp(tmp_path):
    """The folder of a run with client 7 of width 1/4."""
    saved_client(tmp_path, "mlp", 0.25)
    return tmp_path


# What is loaded


@pytest.mark.parametrize(
    ("name", "width", "shape"),
    [
        ("logistic", 1, (1, 8, 8)),
        ("mlp", 1, (1, 8, 8)),
        ("mlp", 1.0, (1, 8, 8)),
        ("mlp", 0.25, (1, 8, 8)),
        ("zoo:mlp", 0.07, (3, 4, 4)),
        ("cnn", 0.5, (1, 8, 8)),
        ("cnn", 0.0625, (3, 12, 12)),
        pytest.param("resnet18-cifar", 1, (3, 8, 8), marks=pytest.mark.slow),
        pytest.param("resnet18-cifar", 0.125, (3, 8, 8), marks=pytest.mark.slow),
    ],
)
def test_a_loaded_model_predicts_what_the_saved_one_did(tmp_path, name, width, shape):
    module, images = saved_client(tmp_path, name, width, shape=shape)
    before = torch.get_rng_state()
    back = load_client(tmp_path, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(part.training for part in back.modules())
    assert type(back) is type(module)
    assert repr(back) == repr(module)
    assert same(back, module)
    with torch.no_grad():
        assert torch.equal(back(images), module(images))


def test_vectors_options_and_double_precision_come_back(tmp_path):
    torch.manual_seed(0)
    sizes = {"in_channels": 6, "num_classes": 3, "image_size": None}
    full = zoo.build("mlp", **sizes, hidden=(12, 8)).double()
    sub = ScalableModel(full, torch.zeros(1, 6, dtype=torch.float64)).extract(0.5)
    manifest = {"architecture": {"name": "mlp", **sizes, "options": {"hidden": (12, 8)}}, "width": 0.5, "input": [6]}
    save_client(tmp_path, 0, sub.module, manifest)
    back = load_client(tmp_path, 0)
    assert (back.fc1.weight.shape, back.fc1.weight.dtype) == ((6, 6), torch.float64)
    x = images_of((6,), torch.float64)
    assert torch.equal(back(x), sub.module(x))


@pytest.mark.parametrize("build", modules.CUTTABLE)
@pytest.mark.parametrize("width", [1, 0.5])
@pytest.mark.slow
def test_a_users_own_model_is_loaded_into_one_that_is_given(tmp_path, build, width):
    torch.manual_seed(0)
    images = torch.randn(modules.IMAGE)
    sub = ScalableModel(build(), images).extract(width)
    module = lived_in(sub.module, images)
    own = {"architecture": {"class": f"mine.{build.__name__}"}, "width": width, "input": list(images.shape[1:])}
    save_client(tmp_path, 3, module, own)

    given = build().train()
    before = {name: x.detach().clone() for name, x in named_tensors(given)}
    back = load_client(tmp_path, 3, model=given)
    assert same(back, module)
    for a, b in zip(tensors_in(back(images)), tensors_in(module(images)), strict=True):
        assert torch.equal(a, b)
    assert given.training and not back.training
    assert all([torch.equal(x, before[name]) for name, x in named_tensors(given)])


def test_one_scalable_model_serves_many_clients(tmp_path):
    models = [saved_client(tmp_path, "mlp", width, i=i)[0] for i, width in enumerate((1, 0.5, 0.25))]
    full = zoo.build("mlp", in_channels=1, num_classes=10, image_size=8)
    scalable = ScalableModel(full, torch.zeros(1, 1, 8, 8))
    assert all([same(load_client(tmp_path, i, model=scalable), module) for i, module in enumerate(models)])


class Tied(nn.Module):
    """A weight under two names, another two that lie in the same memory, and a buffer that state dicts leave out."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight
        self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.b.data = self.a.data
        self.register_buffer("scale", torch.randn(6), persistent=False)

    def forward(self, x):
        return self.embed(x) * self.a + self.out(x) * self.b * self.scale


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path):
    module = Tied().eval()
    save_client(tmp_path, 0, module, {"architecture": {"class": "Tied"}, "width": 1, "input": [4]})
    assert set(load_file(tmp_path / "models/client_000.safetensors")) == {"embed.weight", "a", "b", "scale"}
    back, x = load_client(tmp_path, 0, model=Tied()), images_of((4,))
    assert back.out.weight is back.embed.weight
    assert torch.equal(back(x), module(x))


def test_the_tensors_are_those_of_plain_safetensors(mlp):
    layers = [nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)]
    plain = nn.Sequential(OrderedDict(zip("flatten fc1 relu1 fc2 relu2 fc3".split(), layers)))
    load_model(plain, mlp / "models" / "client_007.safetensors")
    assert same(plain, load_client(mlp, 7))


def test_models_are_loaded_to_the_device_that_was_asked_for(mlp):
    assert {x.device.type for _, x in named_tensors(load_client(mlp, 7, device="meta"))} == {"meta"}


def test_load_client_is_part_of_hetperm():
    assert hetperm.load_client is client_models.load_client
    assert "load_client" in hetperm.__all__


@pytest.mark.parametrize("copied", ["models", "elsewhere"])
def test_the_two_files_are_enough_wherever_they_are(mlp, copied):
    place = mlp / copied
    place.mkdir(exist_ok=True)
    for kind in ("json", "safetensors"):
        if copied != "models":
            shutil.copy(mlp / "models" / f"client_007.{kind}", place)
    assert same(load_client(str(place), 7), load_client(mlp, 7))


@pytest.mark.slow
def test_another_process_needs_nothing_but_the_two_files(tmp_path, warm):
    (tmp_path / "run").mkdir()
    module, images = saved_client(tmp_path / "run", "cnn", 0.125, shape=(3, 8, 8))
    for kind in ("json", "safetensors"):
        shutil.copy(tmp_path / "run" / "models" / f"client_007.{kind}", tmp_path)
    shutil.rmtree(tmp_path / "run")
    code = (
        "import sys, torch; from hetperm import load_client; torch.set_num_threads(1); "
        "x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)); "
        "print(load_client(sys.argv[1], 7)(x).detach().numpy().tobytes().hex())"
    )
    done = warm.run(str(tmp_path), code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == module(images).detach().numpy().tobytes().hex()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((None, 0), "the folder is None; it must be a path"),
        (("here", "0"), "the client is '0'; it must be a whole number, its position in the run"),
        (("here", True), "the client is True; it must be a whole number"),
    ],
)
def test_what_is_no_folder_or_no_number_is_refused(args, message):
    with pytest.raises((TypeError, ValueError), match=message):
        load_client(*args)


# The manifest


def test_a_manifest_says_what_it_was_told_and_a_little_more(tmp_path):
    told = {
        "architecture": {"name": "mlp", "in_channels": 1, "num_classes": 10, "image_size": (8, 8), "options": {}},
        "width": 0.25,
        "input": (1, 8, 8),
        "alpha": [0.5, 0.0, 0.5],
        "accuracy": math.nan,
        "tier": "größer",
    }
    module, _ = saved_client(tmp_path, "mlp", 0.25, i=1000)
    save_client(tmp_path, 1000, module, told)
    text = (tmp_path / "models" / "client_1000.json").read_text(encoding="utf-8")
    assert '  "alpha": [0.5, 0.0, 0.5],\n  "accuracy": null,\n  "tier": "größer"\n}\n' in text
    manifest = read_manifest(tmp_path, 1000)
    assert manifest == json.loads(text)
    assert list(manifest) == ["format", "client", "hetperm", "sha256", "answers", *told]
    assert (manifest["format"], manifest["client"], manifest["hetperm"]) == (1, 1000, hetperm.__version__)
    assert same(load_client(tmp_path, 1000), module)  # without counts they are those of the width


def test_a_manifest_that_was_read_can_be_written_again(mlp):
    module, manifest = load_client(mlp, 7), read_manifest(mlp, 7)
    save_client(mlp, 8, module, manifest)
    assert read_manifest(mlp, 8) == manifest | {"client": 8}


def test_kept_channels_are_written_as_runs():
    full = zoo.build("mlp", in_channels=1, num_classes=10, image_size=8, hidden=(10, 6))
    scalable = ScalableModel(full, torch.zeros(1, 1, 8, 8))
    assert channels(scalable.index(0.5)) == {"counts": [5, 3], "kept": {"c0": [[0, 5]], "c1": [[0, 3]]}}
    assert channels(scalable.index(0.5, "rolling", round=8))["kept"] == {"c0": [[8, 10], [0, 3]], "c1": [[2, 5]]}
    index = scalable.index(0.5, Random(3))
    for runs, kept in zip(channels(index)["kept"].values(), index.kept, strict=True):
        assert [number for first, end in runs for number in range(first, end)] == kept.tolist()


@pytest.mark.parametrize("lacking", ["architecture", "width", "input"])
def test_a_manifest_without_what_loading_needs_is_refused(tmp_path, lacking):
    manifest = {"architecture": {"class": "X"}, "width": 1, "input": [4]}
    del manifest[lacking]
    with pytest.raises(ValueError) as caught:
        save_client(tmp_path, 2, nn.Linear(4, 2), manifest)
    assert str(caught.value) == f"the manifest of client 2 lacks {lacking!r}; it needs architecture, width, input"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [nn.ReLU, {"x": math.nan}, torch.ones(2)])
def test_a_manifest_that_json_cannot_hold_is_refused(tmp_path, value):
    manifest = {"architecture": {"class": "X"}, "width": 1, "input": [4], "options": value}
    with pytest.raises(TypeError, match=r"^options of a manifest must be finite numbers, .* or tables \(.+\)$"):
        save_client(tmp_path, 2, nn.Linear(4, 2), manifest)
    assert not list(tmp_path.iterdir())


# What cannot be loaded


def refusal(*args, error=ValueError, **kwargs) -> str:
    with pytest.raises(error) as caught:
        load_client(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_clients_that_are_not_there_are_told_from_those_that_are(mlp):
    assert refusal(mlp, 9) == f"there is no client 9 in {mlp}; it holds 1 of them: client 7"
    saved_client(mlp, "mlp", 0.25, i=1234)
    assert clients(mlp) == clients(mlp / "models") == [7, 1234]
    assert refusal(mlp, -1) == f"there is no client -1 in {mlp}; it holds 2 of them: clients 7 to 1234"
    for place in (mlp / "nowhere", mlp.parent):
        sentence = f"there are no clients' models in {place}; give the folder of a run, or its models/"
        assert refusal(place, 0, error=FileNotFoundError) == sentence


@pytest.mark.parametrize("lost", ["json", "safetensors"])
def test_one_file_alone_is_refused(mlp, lost):
    (mlp / "models" / f"client_007.{lost}").unlink()
    sentence = f"{mlp / 'models'} has no client_007.{lost}; a model is two files, .json and .safetensors"
    assert refusal(mlp, 7, error=FileNotFoundError) == sentence


def test_tensors_that_are_not_those_of_the_manifest_are_refused(mlp):
    path = mlp / "models" / "client_007.safetensors"
    whole = path.read_bytes()
    sentence = f"{path} is not the file that its manifest describes (sha256); copy both again from the run"
    for other in (b"", whole[:-1], whole[:500] + b"x" + whole[501:], whole + b"x"):
        path.write_bytes(other)
        assert refusal(mlp, 7) == sentence


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "{}", "\xff", "[" * 99999])
def test_a_manifest_that_is_none_is_refused(mlp, text):
    path = mlp / "models" / "client_007.json"
    path.write_bytes(text.encode("latin-1"))
    assert refusal(mlp, 7) == f"{path} is no manifest of a client's model, or a damaged one; copy it again"


def rewrite(folder, **changes):
    path = folder / "models" / "client_007.json"
    manifest = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))
    return path


def test_an_unknown_format_is_refused(mlp):
    path = rewrite(mlp, format=2, hetperm="9.0")
    assert refusal(mlp, 7) == f"{path} has format 2 and this hetperm reads 1; load it with hetperm 9.0"


def test_a_manifest_that_lost_a_key_is_refused(mlp):
    path = rewrite(mlp, width=None)
    assert refusal(mlp, 7) == f"{path} lacks width; copy it again from the run"


@pytest.mark.parametrize(
    "change",
    [
        {"width": "x"}, {"width": 0}, {"width": 5}, {"width": True}, {"architecture": "mlp"}, {"architecture": []},
        {"architecture": {"name": "mlp"}}, {"architecture": {"name": 3}}, {"input": 64}, {"input": ["8"]},
        {"input_dtype": "hub"}, {"input_dtype": 3}, {"counts": "all"}, {"counts": [0, 1]},
    ],
)  # fmt: skip
def test_an_entry_that_no_run_writes_is_refused(mlp, change):
    path = rewrite(mlp, **change)
    ((key, value),) = change.items()
    assert refusal(mlp, 7) == f"{path}: {key} is {value!r}, which no run writes; copy it again from the run"


@pytest.mark.parametrize("options", [{"hidden": "x"}, {"nope": 1}])
def test_options_that_the_model_does_not_take_are_refused(mlp, options):
    architecture = json.loads((mlp / "models" / "client_007.json").read_text())["architecture"]
    rewrite(mlp, architecture={**architecture, "options": options})
    assert re.search(r"model '.*mlp' does not take these model_options \(.*\)(; it takes hidden)?$", refusal(mlp, 7))


def test_options_that_are_no_table_are_refused(mlp):
    rewrite(mlp, architecture=read_manifest(mlp, 7)["architecture"] | {"options": "hidden"})
    assert ": architecture is {" in refusal(mlp, 7)


def test_the_files_of_another_client_are_refused(mlp):
    for kind in ("json", "safetensors"):
        shutil.copy(mlp / "models" / f"client_007.{kind}", mlp / "models" / f"client_008.{kind}")
    path = mlp / "models" / "client_008.json"
    assert refusal(mlp, 8) == f"{path} is of client 7 and not of 8; copy both files of that client"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, number):
    module = nn.Sequential(nn.Linear(4, 2))
    with torch.no_grad():
        module[0].bias[1] = number
    save_client(tmp_path, 0, module, {"architecture": {"class": "X"}, "width": 1, "input": [4]})
    sentence = refusal(tmp_path, 0, model=nn.Sequential(nn.Linear(4, 2)))
    assert "client_000.safetensors: 0.bias holds numbers that are not finite" in sentence


def test_a_mask_of_infinities_is_no_weight(tmp_path):
    module = nn.Sequential(nn.Linear(4, 2))
    module.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    save_client(tmp_path, 0, module, {"architecture": {"class": "X"}, "width": 1, "input": [4]})
    assert load_client(tmp_path, 0, model=module).mask[1] == -math.inf


def test_a_model_without_sizes_is_refused(tmp_path):
    save_client(tmp_path, 0, nn.Linear(4, 2), {"architecture": {"class": "X"}, "width": 1, "input": [4]})
    assert refusal(tmp_path, 0, model=nn.LazyLinear(2)) == (
        "the model given does not fit client 0: weight has no size yet until the model is called on a batch; give the "
        "one it was cut from"
    )


def test_a_users_own_model_must_be_given(mlp):
    rewrite(mlp, architecture={"class": "mine.Net"})
    assert refusal(mlp, 7) == (
        "the model of client 7 is a mine.Net, which has no name in the zoo; "
        "give one at full width: load_client(folder, 7, model=...)"
    )


def test_what_is_no_model_is_refused(mlp):
    assert refusal(mlp, 7, model=nn.ReLU, error=TypeError).endswith("is not a model; give an nn.Module at full width")


def given(hidden=(200, 200), classes=10, side=8):
    return zoo.build("mlp", in_channels=1, num_classes=classes, image_size=side, hidden=hidden)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (given(classes=9), "fc3.weight is (9, 50) in it and (10, 50) in the file"),
        (given(hidden=(50, 40)), "it has channel groups of [50, 40], of which the client keeps [50, 50]"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "nothing in Sequential can be cut"),
        (given(side=7), "Sequential does not run on the example inputs"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(mlp, model, what):
    sentence = refusal(mlp, 7, model=model)
    assert sentence.startswith(f"the model given does not fit client 7: {what}")
    assert sentence.endswith("; give the one it was cut from")


def test_a_full_width_model_that_does_not_fit_is_refused(tmp_path):
    saved_client(tmp_path, "mlp", 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert refusal(tmp_path, 7, model=model) == (
        "the model given does not fit client 7: 1.weight is (10, 64) in it and missing in the file; "
        "give the one it was cut from"
    )


def test_a_name_that_means_another_model_here_is_refused(mlp):
    architecture = read_manifest(mlp, 7)["architecture"]
    rewrite(mlp, architecture=architecture | {"num_classes": 9}, hetperm="0.0.1")
    assert refusal(mlp, 7) == (
        "mlp as it is built here does not fit client 7: fc3.weight is (9, 50) in it and (10, 50) in the file; "
        "load it with hetperm 0.0.1"
    )
    rewrite(mlp, architecture=architecture | {"name": "mpl"})
    assert refusal(mlp, 7).startswith("unknown model 'mpl'; did you mean")


def test_other_weights_that_options_name_are_not_read(mlp):
    architecture = read_manifest(mlp, 7)["architecture"]
    before = load_client(mlp, 7)
    rewrite(mlp, architecture=architecture | {"options": {"checkpoint_path": "nowhere.pth"}})
    assert same(load_client(mlp, 7), before)
