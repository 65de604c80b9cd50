"""Whole runs with clients of different sizes: what they leave behind, every method and option."""

import copy
import csv
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit, load_client, run
from hetperm.config import ALGORITHMS
from hetperm.engine.sequential import Sequential
from hetperm.methods import METHODS
from hetperm.runs import client_models, experiment, output, setting
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import from_config
from submodels import zoo

TINY = {
    "num_clients": 6,
    "capacity_profile": "uniform5",
    "samples_per_client": 30,
    "model_options": {"hidden": [16, 16]},
    "epochs": 2,
    "local_steps": 1,
    "steps": 0,
    "warmup_rounds": 1,
    "share": 0.7,
    "alpha_every": 1,
    "baselines": (),
}
WIDTHS = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}
# digits have 64 pixels and 10 classes; of the 16 hidden channels a width keeps that share
PARAMS = {tier: 64 * h + h + h * h + h + 10 * h + 10 for tier, h in zip(WIDTHS, (16, 8, 4, 2, 1))}


def tiny(**changes) -> Config:
    return Config(**TINY | changes)


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take most of the time of a tiny run."""
    monkeypatch.setattr(output, "draw", lambda result: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of clients of five sizes with rivals of their own sizes and of the smallest."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return run(tiny(baselines=("local", "heterofl-ft", "fedavg-ft"), out=out, epochs=3))


def rows(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def num_params(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def one_a_tier(result) -> list[int]:
    """The first client of every tier, the largest first."""
    return [result.setting.tiers.index(tier) for tier in result.setting.tier_names]


def same_models(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


# What a run leaves behind


def test_the_summary_has_every_tier_with_its_size_for_every_method(finished):
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary["capacity_profile"] == "uniform5"
    assert {"same_tier_mass", "same_group_mass"} <= summary["alpha"].keys()
    assert {"local", "heterofl-ft", "fedavg-ft"} == summary["baselines"].keys()
    for name, method in {"perm": summary, **summary["baselines"]}.items():
        tiers = method["tiers"]
        assert list(tiers) == list(WIDTHS)  # the largest first
        assert sum(tier["clients"] for tier in tiers.values()) == summary["num_clients"] == 6
        assert {tier: row["width"] for tier, row in tiers.items()} == WIDTHS
        sizes = PARAMS if name != "fedavg-ft" else dict.fromkeys(PARAMS, PARAMS["e"])
        assert {tier: row["params"] for tier, row in tiers.items()} == sizes


def test_every_client_has_a_row_and_tiers_are_means_over_them(finished):
    clients = rows(finished.folder / "clients.csv")
    assert [row["client"] for row in clients] == list("012345")
    assert list(clients[0])[-3:] == ["accuracy_local", "accuracy_heterofl-ft", "accuracy_fedavg-ft"]
    for row in clients:
        assert float(row["width"]) == WIDTHS[row["tier"]]
        assert int(row["params"]) == PARAMS[row["tier"]]
    rivals = {f"accuracy_{name}": rival for name, rival in finished.summary["baselines"].items()}
    for column, method in {"accuracy": finished.summary, **rivals}.items():
        for name, tier in method["tiers"].items():
            members = [float(row[column]) for row in clients if row["tier"] == name]
            assert len(members) == tier["clients"]
            assert np.mean(members) == pytest.approx(tier["accuracy"])
        assert np.mean([float(row[column]) for row in clients]) == pytest.approx(method["accuracy"]["mean"])


def test_the_metrics_of_every_method_have_a_column_for_each_tier(finished):
    for name in ("metrics.csv", "baselines.csv"):
        table = rows(finished.folder / name)
        columns = [column for column in table[0] if column.startswith("accuracy_tier_")]
        assert columns == [f"accuracy_tier_{tier}" for tier in WIDTHS]
        assert all(row[column] != "" for row in table for column in columns)


def test_profile_and_coverage_are_written(finished):
    profile = rows(finished.folder / "profile.csv")
    assert [row["tier"] for row in profile] == list(WIDTHS)
    assert [int(row["params"]) for row in profile] == list(PARAMS.values())
    assert sum(int(row["clients"]) for row in profile) == 6
    columns = "tier clients width params mmacs train_mb wire_mb_per_visit budget_train_mb"
    assert list(profile[0]) == columns.split()
    coverage = rows(finished.folder / "coverage.csv")
    assert {row["rounds"] for row in coverage} == {"4"}  # the warm-up and a step of each epoch
    blocks = [name for name, _ in finished.setting.shop.full.module.named_parameters()]
    assert [row["block"] for row in coverage] == blocks * 6  # five tiers, and all
    assert {row["tier"] for row in coverage if float(row["never"]) == 0} >= {"a", "all"}
    # Of a 16 x 16 matrix the tier "b" holds 8 x 8.
    assert [float(row["never"]) for row in coverage if (row["block"], row["tier"]) == ("fc2.weight", "b")] == [0.75]


def test_pictures_and_a_page_that_needs_no_other_file_are_written(finished):
    for name in ("alpha.png", "accuracy.png", "tiers.png"):
        assert (finished.folder / name).stat().st_size > 5000
    page = (finished.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 3
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert not any(f'src="{name}' in page for name in ("http", "alpha", "accuracy", "tiers"))


def test_saved_models_are_the_clients_own_bit_for_bit(finished):
    for i in one_a_tier(finished):
        row, loaded, own = finished.clients[i], load_client(finished.folder, i), finished.model(i)
        assert type(loaded) is type(own) is nn.Sequential
        assert not loaded.training
        assert same_models(loaded, own)
        assert num_params(loaded) == row["params"] == PARAMS[row["tier"]]
        x, y = finished.setting.clients[i].test
        with torch.no_grad(), one_thread():
            said = loaded(x)
            assert torch.equal(said, own(x))
        assert float((said.argmax(1) == y).float().mean()) == pytest.approx(row["accuracy"], abs=1e-6)


def test_a_manifest_says_whose_model_it_is(finished):
    for i, row in enumerate(finished.clients):
        manifest = client_models.read_manifest(finished.folder, i)
        for key in ("tier", "width", "group", "n_train", "accuracy"):
            assert manifest[key] == row[key]
        assert manifest["alpha"] == finished.alpha[i].tolist()
        assert (manifest["algorithm"], manifest["dataset"], manifest["seed"]) == ("perm", "digits", 0)
        kept = dict(zip(WIDTHS, (None, 8, 4, 2, 1)))[row["tier"]]
        assert manifest.get("counts") == (None if kept is None else [kept, kept])


# Options


@pytest.mark.usefixtures("no_pictures")
def test_personal_models_of_the_smallest_size_are_that_for_everybody_and_rivals_keep_theirs(tmp_path):
    result = run(tiny(personal_width="smallest", baselines=("local",), out=tmp_path / "run"))
    assert {tier: row["width"] for tier, row in result.tiers.items()} == WIDTHS
    assert {row["params"] for row in result.tiers.values()} == {PARAMS["e"]}
    assert {tier: row["params"] for tier, row in result.summary["baselines"]["local"]["tiers"].items()} == PARAMS
    for i in (0, 5):
        loaded = load_client(result.folder, i)
        assert num_params(loaded) == PARAMS["e"] == result.clients[i]["params"]
        assert same_models(loaded, result.model(i))


@pytest.mark.usefixtures("no_pictures")
def test_a_label_mask_keeps_every_method_to_the_classes_of_its_client(tmp_path):
    settings = {"partition": "class-groups:2", "num_clients": 5, "baselines": ("local", "heterofl-ft", "fedavg-ft")}
    result = run(tiny(**settings, label_mask=True, out=tmp_path / "masked"))
    for i, client in enumerate(result.setting.clients):
        classes, (x, y) = client.train[1].unique().tolist(), client.test
        assert (
            classes
            == client.classes.nonzero().flatten().tolist()
            == client_models.read_manifest(result.folder, i)["classes"]
        )
        for method in (result.main, *result.baselines.values()):
            bench = result.setting.shop.at(method.widths[i])
            bench.load(method.state.deployed[i])
            with torch.no_grad():
                said = torch.tensor(classes)[bench.module(x)[:, classes].argmax(1)]
            assert float((said == y).float().mean()) == pytest.approx(method.score[i], abs=1e-6)
    assert same_models(load_client(result.folder, 0), result.model(0))


OPTIONS = [
    {"extraction": "random"},
    {"extraction": "rolling", "algorithm": "perm-two-stage", "warmup_rounds": 2},
    {"nested": "random"},
    {"nested": "rolling"},
    {"nested": "skip"},
    {"discrepancy": "masked", "vc_weight": "raw"},
    {"server_mix": "alpha", "inplace_kd": 0.5},
    {"participation": 0.5, "sketch": 16, "projection": 1.0},
    {"tail_average": 0, "final_lr": 0.05, "step_rule": "paper", "schedule": "ring", "personal_lr": 0.01},
    {"dtype": "float64", "engine": "threads", "workers": 2},
]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(f"{k}={v}" for k, v in options.items()))
def test_every_option_runs_and_its_models_can_be_loaded(options, tmp_path):
    result = run(tiny(**options, out=tmp_path / "run"))
    assert {tier: row["params"] for tier, row in result.tiers.items()} == PARAMS
    assert torch.allclose(result.alpha.sum(1), torch.ones(6, dtype=torch.float64))
    i, scalable = result.setting.tiers.index("e"), result.setting.shop.scalable
    assert same_models(load_client(result.folder, i, model=scalable), result.model(i))
    if options.get("extraction", "static") != "static":
        never = [float(row["never"]) for row in rows(result.folder / "coverage.csv") if row["tier"] == "e"]
        assert max(never) < 1 - (1 / 16) ** 2  # other parts in other rounds


# Methods

LOADED = ("perm", "heterofl-ft", "fedavg")  # one of each kind: mixing, parts of one model, one size


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs_on_mixed_sizes_and_saves_models_of_them(algorithm, tmp_path):
    result = run(tiny(algorithm=algorithm, steps=10, out=tmp_path / "run"))
    assert 0 < result.accuracy <= 1
    assert {tier: row["width"] for tier, row in result.tiers.items()} == WIDTHS
    one_size = METHODS[algorithm].one_size
    sizes = dict.fromkeys(PARAMS, PARAMS["e"]) if one_size else PARAMS
    assert {tier: row["params"] for tier, row in result.tiers.items()} == sizes
    for i, row in enumerate(result.clients):
        assert (row["width"], row["params"]) == (WIDTHS[row["tier"]], sizes[row["tier"]])
        assert client_models.read_manifest(result.folder, i)["width"] == (0.0625 if one_size else row["width"])
    if algorithm in LOADED:
        for i in one_a_tier(result):
            loaded = load_client(result.folder, i)
            assert num_params(loaded) == result.clients[i]["params"]
            assert same_models(loaded, result.model(i))
    trained = algorithm.removesuffix("-ft").removesuffix("-two-stage") in (
        "perm", "heterofl", "feddropout", "fedrolex", "fjord",
    )  # fmt: skip
    assert (result.folder / "coverage.csv").exists() == trained


def test_no_host_is_handed_more_than_its_tier_allows_in_a_whole_run(tmp_path, monkeypatch):
    handed: dict[int, set[tuple[int, float]]] = {}
    compute = Sequential.run

    def watched(self, tasks):
        for task in tasks:
            size = sum(x.numel() for x in task.params.values())
            handed.setdefault(task.host, set()).add((size, task.width))
        return compute(self, tasks)

    monkeypatch.setattr(Sequential, "run", watched)
    result = fit_digits(tiny(baselines=("heterofl-ft", "fedrolex", "fedavg", "fjord"), inplace_kd=0.5))
    scalable = result.setting.shop.scalable
    for i, client in enumerate(result.setting.clients):
        allowed = scalable.cost(client.width, batch_size=32)
        assert max(size for size, _ in handed[i]) <= allowed.params
        widths = {width for size, width in handed[i] if size != result.setting.num_params(0.0625) or width != 1.0}
        assert max(scalable.cost(width, batch_size=32).train_bytes for width in widths) <= allowed.train_bytes


def fit_digits(config: Config):
    """The result of a run that is not written."""
    return experiment.execute(from_config(config), None, None)


# Models

RESNET = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16], "stem_type": "deep", "stem_width": 4}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("model", "options"),
    [("cnn", {}), pytest.param("timm:resnet18", RESNET, marks=pytest.mark.slow)],
    ids=["cnn", "a library's with batch norms and shortcuts"],
)
def test_convolutional_models_run_through_perm_and_are_loaded_by_name(model, options, tmp_path):
    narrow = tmp_path / "narrow.toml"
    narrow.write_text("[tiers.more]\nshare = 1\nwidth = 0.34\n[tiers.less]\nshare = 1\nwidth = 0.1\n")
    settings = {"model": model, "model_options": options, "capacity_profile": str(narrow)}
    limits = {"num_clients": 4, "samples_per_client": 8, "validation_share": 0.02, "batch_size": 4, "noise_batches": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting.data, "load", few(setting.data.load))
        result = run(tiny(**settings, **limits, personal_lr=0.02, global_lr=0.02, out=tmp_path / "run"))
    assert [row["epoch"] for row in result.history] == [1, 2]
    sizes = [result.tiers[tier]["params"] for tier in ("more", "less")]
    whole = num_params(zoo.build(model, in_channels=1, num_classes=10, image_size=8, **options))
    assert whole > sizes[0] > sizes[1]
    i = result.setting.tiers.index("less")
    loaded, (x, _) = load_client(result.folder, i), result.setting.clients[i].test
    assert num_params(loaded) == sizes[1]
    with torch.no_grad(), one_thread():
        assert torch.equal(loaded(x), result.model(i)(x))


def few(load):
    """Data of which clients are scored on 20 samples only: large models take long on a whole pool."""

    def loaded(*args, **settings):
        problem = load(*args, **settings)
        pools = {name: tuple(x[:20] for x in getattr(problem.clients[0], name)) for name in ("val", "test")}
        clients = tuple(copy.copy(client) for client in problem.clients)
        for client in clients:
            for name, pair in pools.items():
                object.__setattr__(client, name, pair)
        return problem.__class__(**vars(problem) | {"clients": clients})

    return loaded


# One's own model and clients


def regression_clients(widths, n: int = 30) -> list[Client]:
    """Two groups: y = x.sum() and y = -x.sum()."""
    clients = []
    for i, width in enumerate(widths):
        x = torch.randn(2, n, 3, generator=torch.Generator().manual_seed(i))
        train, test = ((part, (-1) ** i * part.sum(1, keepdim=True)) for part in x)
        clients.append(Client(train, test=test, width=width, group=i % 2))
    return clients


@pytest.mark.usefixtures("no_pictures")
def test_fit_takes_clients_of_different_widths(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    before = copy.deepcopy(model)
    clients = regression_clients((1.0, 0.5, 0.25, 1.0, 0.5, 0.25))
    result = fit(
        model,
        clients,
        Config(
            epochs=4,
            steps=0,
            warmup_rounds=2,
            share=0.3,
            baselines=("local", "heterofl-ft"),
            batch_size=10,
            out=tmp_path / "mine",
        ),
        loss=F.mse_loss,
        metric=lambda outputs, y: -(outputs - y).abs().mean(),
    )
    assert same_models(model, before)
    assert {tier: row["clients"] for tier, row in result.tiers.items()} == {"1": 2, "0.5": 2, "0.25": 2}
    assert [result.model(i)[0].out_features for i in range(6)] == [8, 4, 2, 8, 4, 2]
    assert result.summary["capacity_profile"] is None
    assert result.summary["alpha"]["same_group_mass"] > 0.7
    for i, client in enumerate(clients[:3]):
        loaded = load_client(result.folder, i, model=model)
        with torch.no_grad(), one_thread():
            assert torch.equal(loaded(client.test[0]), result.model(i)(client.test[0]))
    with pytest.raises(ValueError, match=r"give one at full width: load_client\(folder, 0, model=...\)"):
        load_client(result.folder, 0)


@pytest.mark.usefixtures("no_pictures")
def test_models_of_words_can_be_loaded(tmp_path):
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(5 * 8, 16), nn.ReLU(), nn.Linear(16, 2))
    words = torch.arange(200).reshape(40, 5) % 9
    clients = [Client((words, words.sum(1) % 2), width=width) for width in (1.0, 0.5)]
    result = fit(model, clients, Config(epochs=1, steps=0, warmup_rounds=0, baselines=(), out=tmp_path / "run"))
    for i in range(2):
        assert same_models(load_client(result.folder, i, model=model), result.model(i))
