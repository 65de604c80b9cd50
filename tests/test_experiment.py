"""Runs from beginning to end: data or one's own, the folder, seeds, and what cannot be run."""

import csv
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetperm
from hetperm import Client, Config, fit, run
from hetperm.config import load
from hetperm.methods import METHODS
from hetperm.runs import experiment, output

TINY = {
    "capacity_profile": "homogeneous",
    "dataset": "synthetic",
    "model": "logistic",
    "num_clients": 4,
    "samples_per_client": 20,
    "epochs": 2,
    "local_steps": 2,
    "steps": 0,
    "warmup_rounds": 1,
    "share": 0.7,
    "alpha_every": 1,
    "personal_lr": 1.0,
    "baselines": (),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a rival, and its folder."""
    out = tmp_path_factory.mktemp("runs") / "run"
    return run(Config(**TINY | {"baselines": ("local",), "out": out}))


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take most of the time of a tiny run."""
    monkeypatch.setattr(output, "draw", lambda result: None)


def rows(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# The folder


def test_the_folder_holds_what_the_design_lists(finished):
    pictures = ["accuracy.png", "alpha.png", "tiers.png"]
    tables = ["baselines.csv", "client_metrics.csv", "clients.csv", "metrics.csv", "profile.csv"]
    others = ["alpha.npy", "checksums.txt", "config.toml", "report.html", "server.safetensors"]
    others += ["summary.json", "timing.json"]
    folders = {
        "checkpoint": [f"{name}.{kind}" for name in ("local", "perm") for kind in ("jsonl", "safetensors")],
        "models": [f"client_00{i}.{kind}" for i in range(4) for kind in ("json", "safetensors")],
    }
    folder = finished.folder
    assert sorted(path.name for path in folder.iterdir()) == sorted([*pictures, *tables, *others, *folders])
    for name, files in folders.items():
        assert sorted(path.name for path in (folder / name).iterdir()) == files
    assert all(path.stat().st_size > 0 for path in folder.rglob("*"))
    assert min((folder / name).stat().st_size for name in pictures) > 5000


def test_the_summary_has_the_keys_of_the_design(finished):
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert list(summary) == [
        *("algorithm", "dataset", "partition", "model", "metric", "better"),
        *("num_clients", "seed", "epochs", "capacity_profile"),
        *("accuracy", "loss", "tiers", "alpha", "cost", "baselines"),
    ]
    assert list(summary["accuracy"]) == ["mean", "weighted", "std", "worst", "bottom_decile"]
    assert list(summary["tiers"]["full"]) == ["clients", "width", "params", "accuracy"]
    about_alpha = "effective_partners nonzero self_weight same_tier_mass same_group_mass share"
    assert list(summary["alpha"]) == about_alpha.split()
    assert {"visits", "rounds", "client_steps", "bytes_down", "bytes_up", "macs"} <= summary["cost"].keys()
    assert {"accuracy", "tiers"} <= summary["baselines"]["local"].keys()
    assert summary == finished.summary


def test_the_metrics_have_a_row_for_each_epoch_with_work_and_figures(finished):
    metrics = rows(finished.folder / "metrics.csv")
    assert [row["epoch"] for row in metrics] == ["1", "2"]
    figures = [f"{quantity}_{name}" for quantity in ("accuracy", "loss") for name in finished.summary["accuracy"]]
    for name in [*figures, "accuracy_tier_full", "client_steps", "bytes_up"]:
        assert all(row[name] != "" for row in metrics), name
    for name in figures:  # validation data are for tuning, which reads the last row
        assert [row[f"val_{name}"] != "" for row in metrics] == [False, True], name
    tail = [row["tail_accuracy_mean"] for row in metrics]
    assert tail[0] == "" and tail[1] != ""
    assert float(tail[1]) == finished.accuracy


def test_every_client_has_a_row(finished):
    clients = rows(finished.folder / "clients.csv")
    columns = "client tier width params group n_train n_val most_common accuracy loss effective_partners accuracy_local"
    assert list(clients[0]) == columns.split()
    assert [row["group"] for row in clients] == ["0", "0", "1", "1"]
    assert np.mean([float(row["accuracy"]) for row in clients]) == pytest.approx(finished.accuracy)


def test_alpha_is_written_as_it_was_used(finished):
    alpha = np.load(finished.folder / "alpha.npy")
    assert np.array_equal(alpha, finished.alpha.numpy())
    assert np.allclose(alpha.sum(1), 1)


@pytest.mark.usefixtures("no_pictures")
def test_running_the_written_configuration_again_gives_the_same_bytes(finished, tmp_path):
    again = run(load(finished.folder / "config.toml").override(out=tmp_path / "again"))
    tables = ("metrics.csv", "clients.csv", "baselines.csv", "profile.csv")
    for name in ("summary.json", "alpha.npy", "config.toml", "models/client_003.safetensors", *tables):
        assert (again.folder / name).read_bytes() == (finished.folder / name).read_bytes(), name


@pytest.mark.usefixtures("no_pictures")
def test_the_seed_changes_the_numbers(finished, tmp_path):
    other = run(load(finished.folder / "config.toml").override(out=tmp_path / "other", seed=1))
    assert other.accuracy != finished.accuracy


def test_a_rival_gets_the_steps_that_perm_took(finished):
    taken = finished.summary["cost"]["client_steps"] / 4
    # Rounded up to a whole step, of which a rival takes as many as make whole rounds.
    assert -1 < taken - finished.summary["baselines"]["local"]["cost"]["client_steps"] / 4 < 2


@pytest.mark.usefixtures("no_pictures")
def test_a_run_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run(Config(**TINY | {"out": tmp_path / "run", "epochs": 1}))
    assert torch.equal(torch.rand(3), expected)


# Methods


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("algorithm", [name for name, method in METHODS.items() if method.one_size])
def test_every_method_of_one_size_runs_by_itself(algorithm, tmp_path):
    """The others run in test_hetero_run.py, where clients differ in size."""
    result = run(Config(**TINY | {"algorithm": algorithm, "out": tmp_path / "run", "steps": 40}))
    assert 0.3 < result.accuracy <= 1
    assert result.alpha is None
    assert not (result.folder / "alpha.npy").exists()
    assert len(result.history) == 2


@pytest.mark.parametrize("N", [1, 2])
def test_one_client_and_two_clients_work(N, tmp_path):
    result = run(Config(**TINY | {"num_clients": N, "out": tmp_path / "run", "baselines": ("local", "ifca")}))
    assert result.alpha.shape == (N, N)
    assert (result.folder / "alpha.png").stat().st_size > 1000


@pytest.mark.usefixtures("no_pictures")
def test_the_paper_settings_run(tmp_path):
    paper = {"step_rule": "paper", "schedule": "ring", "tail_average": 0, "final_lr": 0.1}
    rule = {"regularization": 1.0, "share": "look-ahead", "alpha_steps": 20, "sketch": 16}  # a number knows no share
    result = run(Config(**TINY | paper | rule | {"out": tmp_path / "run"}))
    assert result.history[-1]["epoch_rounds"] == 4
    assert "tail_accuracy_mean" not in result.history[-1]


@pytest.mark.usefixtures("no_pictures")
def test_steps_that_pay_for_no_visit_are_said(tmp_path, no_pictures, caplog):
    few = {"steps": 2, "warmup_rounds": None, "share": "look-ahead"}
    run(Config(**TINY | few | {"out": tmp_path / "few"}))
    assert "perm made no visit, so its models are parts of the global one" in caplog.text
    caplog.clear()
    run(Config(**TINY | few | {"steps": 60, "out": tmp_path / "enough"}))
    assert caplog.text == ""


def test_visits_to_absent_hosts_are_reported(tmp_path):
    result = run(Config(**TINY | {"participation": 0.5, "out": tmp_path / "run"}))
    assert result.summary["cost"]["skipped"] > 0


# Several seeds


def test_each_seed_has_a_folder_and_the_top_holds_mean_and_spread(tmp_path):
    summary, results = experiment.sweep(Config(**TINY | {"seeds": (3, 4), "epochs": 1, "out": tmp_path / "runs"}))
    assert [result.folder for result in results] == [tmp_path / "runs" / "seed-3", tmp_path / "runs" / "seed-4"]
    accuracies = [json.loads((result.folder / "summary.json").read_text())["accuracy"]["mean"] for result in results]
    top = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert top == summary
    assert top["seeds"] == [3, 4]
    assert top["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))
    assert top["spread"]["accuracy"]["mean"] == pytest.approx(np.std(accuracies, ddof=1))
    assert load(tmp_path / "runs" / "config.toml").seeds == (3, 4)
    for name in ("report.html", "seeds.csv", "clients.csv"):
        assert (tmp_path / "runs" / name).stat().st_size > 0
    assert (tmp_path / "runs" / "accuracy.png").stat().st_size > 5000


def test_several_seeds_of_what_cannot_be_run_leave_no_folder(tmp_path):
    with pytest.raises(ValueError, match="unknown dataset 'digitz'; did you mean 'digits'"):
        experiment.sweep(Config(dataset="digitz", seeds=(0, 1), out=tmp_path / "runs"))
    assert list(tmp_path.iterdir()) == []


def test_run_and_sweep_say_which_of_them_is_meant():
    with pytest.raises(ValueError, match="call sweep for several"):
        run(Config(**TINY | {"seeds": (0, 1)}))
    with pytest.raises(ValueError, match="call run for one"):
        experiment.sweep(Config(**TINY))


# One's own model, shards, loss and metric


def regression_clients(N: int = 4, n: int = 30) -> list[Client]:
    """Two groups: y = x.sum() and y = -x.sum()."""
    clients = []
    for i in range(N):
        generator = torch.Generator().manual_seed(i)
        sign = 1.0 if i < N // 2 else -1.0
        parts = [torch.randn(n, 3, generator=generator) for _ in range(3)]
        clients.append(Client(*((x, sign * x.sum(1, keepdim=True)) for x in parts), group=int(sign < 0)))
    return clients


def negative_error(outputs, targets):
    return -(outputs - targets).abs().mean()


def own(**changes) -> Config:
    settings = {
        "epochs": 4,
        "personal_lr": 0.1,
        "steps": 0,
        "warmup_rounds": 1,
        "baselines": ("local",),
        "batch_size": 10,
    }
    return Config(**settings | changes)


def test_fit_takes_ones_own_model_loss_and_metric_and_changes_none_of_them():
    model = nn.Linear(3, 1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    clients = regression_clients()
    seen = []
    result = fit(
        model,
        clients,
        own(),
        loss=F.mse_loss,
        metric=negative_error,
        on_epoch=lambda method, row: seen.append((method, row["epoch"])),
    )
    assert result.folder is None
    for nobody in (-1, len(clients), True, "0"):
        with pytest.raises(ValueError, match=f"there is no client {nobody!r}; they are numbered from 0 to"):
            result.model(nobody)
    assert -0.5 < result.accuracy <= 0
    assert mass(result) > 0.9
    assert seen == [(method, r) for method in ("perm", "local") for r in range(1, 5)]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    personal = result.model(0)
    x, y = clients[0].test
    assert float(negative_error(personal(x).detach(), y)) == pytest.approx(
        result.clients[0]["negative-error"], abs=1e-6
    )


def mass(result) -> float:
    return result.summary["alpha"]["same_group_mass"]


@pytest.mark.usefixtures("no_pictures")
def test_fit_writes_a_folder_if_asked(tmp_path):
    result = fit(
        nn.Linear(3, 1), regression_clients(), own(out=tmp_path / "mine"), loss=F.mse_loss, metric=negative_error
    )
    summary = json.loads((result.folder / "summary.json").read_text())
    assert (summary["dataset"], summary["num_clients"]) == ("own", 4)
    assert (summary["metric"], summary["better"], "negative-error" in summary) == ("negative-error", "higher", True)
    # What was used, and not the defaults of a configuration that describes other data and another model.
    page, written = ((result.folder / name).read_text() for name in ("report.html", "config.toml"))
    assert "your own data (120 training samples), 4 clients, model torch.nn.modules.linear.Linear" in page
    for unused in ("mlp", "label-shift", "mobile", "validation_share", "capacity_profile"):
        assert unused not in written and unused not in page
    assert result.score == result.accuracy == summary["negative-error"]["mean"]


def test_double_precision_gives_the_same_but_for_rounding():
    model = nn.Linear(3, 1)
    single, double = (
        fit(model, regression_clients(), own(dtype=dtype, epochs=1), loss=F.mse_loss, metric=negative_error)
        for dtype in ("float32", "float64")
    )
    assert double.state.w["weight"].dtype == torch.float64
    assert single.accuracy == pytest.approx(double.accuracy, abs=1e-4)


def test_clients_without_test_data_are_trained_and_not_scored():
    clients = regression_clients()
    clients[1] = Client(clients[1].train, group=0)
    result = fit(nn.Linear(3, 1), clients, own(epochs=1), loss=F.mse_loss, metric=negative_error)
    scored = [row["negative-error"] for row in result.clients]
    assert np.isnan(scored[1]) and not np.isnan(np.delete(scored, 1)).any()
    assert result.accuracy == pytest.approx(np.delete(scored, 1).mean())


# What cannot be run


def test_what_is_no_model_or_no_client_is_refused():
    x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(TypeError, match=r"the model is a function; fit takes an nn\.Module"):
        fit(negative_error, regression_clients())
    with pytest.raises(TypeError, match=r"a client is a tuple; wrap its shard: hetperm\.Client\(train=\(x, y\)\)"):
        fit(nn.Linear(3, 1), [(x, y)])


def test_a_run_that_cannot_be_set_up_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="model 'logistic' does not take these model_options"):
        run(Config(**TINY | {"model_options": {"depth": 3}, "out": tmp_path / "run"}))
    assert not (tmp_path / "run").exists()


def test_the_package_gives_its_names_when_asked():
    assert hetperm.run is run
    assert hetperm.mixing.solve and hetperm.shuffle.ring and hetperm.discrepancy.pairwise and hetperm.complexity.vc
    assert {"Config", "fit", "Result"} <= set(dir(hetperm))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        hetperm.nope  # noqa: B018
