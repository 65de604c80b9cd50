"""Methods that go non-finite: a rival is a line in every table; the algorithm ends its run, but no sweep over seeds."""

import csv
import json
import logging
import math
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from federation import FULL, build, linear, make_clients, make_method
from summaries import several, single
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit, run
from hetperm.cli.main import guarded
from hetperm.cli.train import main as train_command
from hetperm.device.bench import Workshop
from hetperm.params import NotFinite
from hetperm.report import pictures, tables
from hetperm.report.grid import markdown
from hetperm.report.summary import Summary
from hetperm.runs import experiment, output, training
from hetperm.runs.summary import aggregate

TINY = {
    "capacity_profile": "homogeneous",
    "dataset": "synthetic",
    "model": "logistic",
    "num_clients": 4,
    "samples_per_client": 20,
    "epochs": 2,
    "local_steps": 2,
    "warmup_rounds": 1,
    "steps": 60,
    "step_cap": 0.0,
}
ABSURD = {"baselines": ("fedavg", "local"), "rivals": {"fedavg": {"lr": 1e38}}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a rival whose step size is absurd and one that comes after it, and its folder."""
    return run(Config(**TINY | ABSURD | {"out": tmp_path_factory.mktemp("runs") / "run"}))


def rows(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def column(grid, name: str) -> list[str]:
    return [row[grid.columns.index(name)] for row in grid.rows]


# One run


def test_a_rival_that_diverges_is_a_line_of_the_summary_and_those_after_it_run(finished):
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary == finished.summary
    assert list(summary["baselines"]) == ["fedavg", "local"]
    rival, other = summary["baselines"].values()
    assert rival["diverged"] == finished.baselines["fedavg"].diverged == "diverged at epoch 1"
    assert set(rival["accuracy"].values()) == set(rival["loss"].values()) == {None}
    assert rival["tiers"]["full"]["accuracy"] is None and rival["tiers"]["full"]["clients"] == 4
    assert "diverged" not in other and 0.3 < other["accuracy"]["mean"] <= 1
    assert Summary.from_json(summary).to_json() == summary


def test_the_tables_of_the_folder_say_so(finished):
    epochs = rows(finished.folder / "baselines.csv")
    assert [(row["method"], row["epoch"], row["diverged"]) for row in epochs] == [
        ("fedavg", "1", "diverged at epoch 1"),
        ("local", "1", ""),
        ("local", "2", ""),
    ]
    clients = rows(finished.folder / "clients.csv")
    assert {row["accuracy_fedavg"] for row in clients} == {""} and all(row["accuracy_local"] for row in clients)
    for name in ("report.html", "tiers.png", "accuracy.png", "timing.json", "models/client_000.safetensors"):
        assert (finished.folder / name).stat().st_size > 0
    assert "fedavg: diverged at epoch 1." in (finished.folder / "report.html").read_text()


def test_a_warning_names_the_method_the_place_and_the_remedy(caplog):
    with caplog.at_level(logging.WARNING):
        fit(nn.Linear(3, 1), line_clients(), own(), loss=F.mse_loss, metric=error)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("fedavg: after epoch ") and "client 0: " in message and "lower the learning" in message
    assert message.endswith("; the run goes on)")


def line_clients(N: int = 3) -> list[Client]:
    shards = [torch.randn(20, 3, generator=torch.Generator().manual_seed(i)) for i in range(N)]
    return [Client(*[(x, x.sum(1, keepdim=True))] * 3) for x in shards]


def error(outputs, targets):
    return -(outputs - targets).abs().mean()


def own(**changes) -> Config:
    """Steps of least squares that are a little too long: numbers grow by a factor a step."""
    few = {"epochs": 6, "steps": 120, "step_cap": 0.0, "personal_lr": 0.1, "global_lr": 0.1, "warmup_rounds": 1}
    return Config(**few | {"baselines": ("fedavg",), "rivals": {"fedavg": {"lr": 1.5}}} | changes)


def test_what_a_rival_did_before_it_diverged_is_kept():
    result = fit(nn.Linear(3, 1), line_clients(), own(), loss=F.mse_loss, metric=error)
    rival = result.baselines["fedavg"]
    assert 1 <= len(rival.history) < 6
    assert rival.diverged == f"diverged at epoch {len(rival.history) + 1}"
    assert rival.state.r == len(rival.history)
    assert rival.state.work.client_steps == result.summary["baselines"]["fedavg"]["cost"]["client_steps"] > 0
    assert all(map(math.isnan, rival.score))


def test_a_rival_that_has_no_good_epoch_at_all_has_its_line():
    clients = line_clients()
    result = fit(
        nn.Linear(3, 1), clients, own(baselines=("perm-two-stage",), rivals=warm(1e38)), loss=F.mse_loss, metric="mae"
    )
    assert result.summary["baselines"]["perm-two-stage"]["diverged"] == "diverged before epoch 1"
    assert result.baselines["perm-two-stage"].history == ()


def warm(lr: float) -> dict:
    return {"perm-two-stage": {"global_lr": lr}}


def test_an_infinite_loss_of_every_cluster_counts_as_not_finite():
    shop = Workshop(build(linear), lambda outputs, y: outputs.sum() * 0 + math.inf)
    with pytest.raises(NotFinite, match="round 0: client 0: the loss of no cluster is finite; lower the learning rate"):
        make_method("ifca", make_clients(FULL), model=linear, steps=99, setup={"shop": shop, "cut": False}).begin()


def test_the_algorithm_that_diverges_is_an_error_and_what_was_finished_stays(tmp_path):
    few = {"epochs": 6, "algorithm": "fedavg", "baselines": (), "out": tmp_path / "run"}
    with pytest.raises(NotFinite, match=r"^fedavg: after epoch \d: client 0: test loss inf, .*; lower the learning"):
        fit(nn.Linear(3, 1), line_clients(), own(**few), loss=F.mse_loss, metric=error)
    assert len(rows(tmp_path / "run" / "metrics.csv")) >= 1
    assert (tmp_path / "run" / "checkpoint" / "fedavg.safetensors").exists()


# Resumed


def test_a_diverged_rival_is_not_trained_again(finished, monkeypatch):
    monkeypatch.setattr(training, "states", None)  # nothing may be trained
    again = run(Config(**TINY | ABSURD | {"out": finished.folder, "resume": True}))
    assert again.summary == finished.summary
    assert again.baselines["fedavg"].diverged == "diverged at epoch 1"


def test_a_run_that_was_stopped_after_a_rival_diverged_goes_on_after_it(finished, tmp_path):
    def stop(method, row):
        if method == "local":
            raise KeyboardInterrupt

    config = Config(**TINY | ABSURD | {"out": tmp_path / "run"})
    with pytest.raises(KeyboardInterrupt):
        run(config, on_epoch=stop)
    assert "diverged" in json.loads((tmp_path / "run" / "summary.json").read_text())["baselines"]["fedavg"]
    seen = []
    result = run(config.override(resume=True), on_epoch=lambda method, row: seen.append(method))
    assert "fedavg" not in seen
    assert result.summary == finished.summary


# Several seeds


def with_diverged(summary: dict, rival: str, moment: str = "diverged at epoch 3") -> dict:
    """A summary in which a rival diverged."""
    table = summary["baselines"][rival]
    blank = {name: dict.fromkeys(table[name]) for name in ("accuracy", "loss")}
    tiers = {name: tier | {"accuracy": None} for name, tier in table["tiers"].items()}
    return summary | {"baselines": summary["baselines"] | {rival: table | blank | {"tiers": tiers, "diverged": moment}}}


def test_figures_are_those_of_the_seeds_that_a_rival_finished():
    runs = [single(0), with_diverged(single(1), "local"), single(2)]
    summary, plain = aggregate(runs, (0, 1, 2)), aggregate([runs[0], runs[2]], (0, 2))
    table = dict(summary["baselines"]["local"])
    assert table.pop("diverged") == "2 of 3 seeds; 1 diverged at epoch 3"
    assert table == plain["baselines"]["local"]
    assert summary["spread"]["baselines"]["local"] == plain["spread"]["baselines"]["local"]
    paired, others = summary["paired"]["local"], plain["paired"]["local"]
    assert paired["differences"] == [others["differences"][0], None, others["differences"][1]]
    assert (paired["mean"], paired["std"]) == (others["mean"], others["std"])
    assert summary["baselines"]["fedavg-ft"] == several()["baselines"]["fedavg-ft"]


def test_a_rival_that_diverged_with_every_seed_has_no_figures_and_no_gain():
    moments = ["diverged at epoch 3", "diverged at epoch 3", "diverged before epoch 1"]
    runs = [with_diverged(single(seed), "local", moment) for seed, moment in enumerate(moments)]
    summary = aggregate(runs, (0, 1, 2))
    table = summary["baselines"]["local"]
    assert table["diverged"] == "0 of 3 seeds; 2 diverged at epoch 3, 1 diverged before epoch 1"
    assert set(table["accuracy"].values()) == {None} and table["cost"]["rounds"] == 3
    assert summary["paired"]["local"] == {"mean": None, "std": None, "differences": [None] * 3}


@pytest.mark.parametrize("diverged_with", [(1,), (0, 1, 2)])
def test_every_table_and_picture_of_several_seeds_shows_it(diverged_with):
    runs = [with_diverged(single(s), "local") if s in diverged_with else single(s) for s in range(3)]
    summary = Summary.from_json(aggregate(runs, (0, 1, 2)))
    assert Summary.from_json(summary.to_json()) == summary
    every = len(diverged_with) == 3
    note = "local: 0 of 3 seeds; 3 diverged at epoch 3." if every else "local: 2 of 3 seeds; 1 diverged at epoch 3."
    closing, tiers = tables.closing_grid(summary), tables.tier_grid(summary)
    assert closing.note == note and note in tiers.note
    assert (column(closing, "accuracy")[1] == "diverged") == every
    assert (set(column(tiers, "local")) == {"diverged"}) == every
    text = tables.results_markdown(tables.results_rows(summary))
    assert note.removeprefix("local: ").removesuffix(".") in text
    assert tables.results_rows(summary)[1]["diverged"] == summary.baselines["local"].diverged
    assert "seeds positive" in tables.paired_lines(summary)[0]
    assert len(pictures.png(pictures.tiers(summary))) > 1000
    assert markdown(closing).count("\n") == 7


def test_histories_of_different_length_make_one_line():
    short, long = ([{"epoch": r, "client_steps": 4 * r, "accuracy_mean": 0.5} for r in range(1, n)] for n in (3, 5))
    shown = {"figures": [("accuracy_mean", "accuracy")], "against": [("client_steps", "steps", 1)]}
    figure = pictures.curves({"local": [short, long], "fedavg": [(), long]}, **shown)
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [2]


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_goes_on_after_a_rival_that_diverged(tmp_path, monkeypatch):
    train = experiment._train

    def diverge_with_seed_4(setting, name, *args, **options):
        if name == "fedavg" and setting.config.seed == 3:
            setting = _tame(setting)
        return train(setting, name, *args, **options)

    monkeypatch.setattr(experiment, "_train", diverge_with_seed_4)
    summary, results = experiment.sweep(Config(**TINY | ABSURD | {"seeds": (3, 4), "out": tmp_path / "runs"}))
    assert summary["baselines"]["fedavg"]["diverged"] == "1 of 2 seeds; 1 diverged at epoch 1"
    finished = results[0].summary["baselines"]["fedavg"]["accuracy"]["mean"]
    assert summary["baselines"]["fedavg"]["accuracy"]["mean"] == finished
    table = rows(tmp_path / "runs" / "seeds.csv")
    assert [row["fedavg"] for row in table] == [str(finished), "diverged at epoch 1"]
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "fedavg: 1 of 2 seeds; 1 diverged at epoch 1." in page
    assert "<td>diverged at epoch 1</td>" in page


# The algorithm itself, with some seeds


@pytest.fixture
def wild(monkeypatch):
    """A function that lets the algorithm of a sweep diverge with some seeds, in its first epoch."""
    epochs = training.epochs

    def choose(*seeds: int) -> None:
        def wild_with_seeds(setting, name, **options):
            with closing(epochs(setting, name, **options)) as states:
                if name != setting.config.algorithm or setting.config.seed not in seeds:
                    yield from states
                    return
                if options["saved"] is None:
                    yield next(states)  # the beginning
                raise NotFinite(f"{name}: epoch 1: model 0 is not finite; lower the learning rate")

        monkeypatch.setattr(training, "epochs", wild_with_seeds)

    return choose


def over_seeds(out, *seeds: int, **changes) -> Config:
    return Config(**TINY | {"baselines": ("local",), "seeds": seeds, "out": out} | changes)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("lost", [3, 4, 5])
def test_a_seed_with_which_the_algorithm_diverges_does_not_cost_the_others(lost, wild, tmp_path, caplog):
    wild(lost)
    kept = [seed for seed in (3, 4, 5) if seed != lost]
    with caplog.at_level(logging.WARNING):
        summary, results = experiment.sweep(over_seeds(tmp_path / "some", 3, 4, 5))
    assert [result.summary["seed"] for result in results] == kept
    assert f"seed {lost} diverged at epoch 1; the other seeds go on" in caplog.text
    expected = aggregate([result.summary for result in results], kept)
    differences = list(expected["paired"]["local"]["differences"])
    differences.insert((3, 4, 5).index(lost), None)
    paired = {"local": expected["paired"]["local"] | {"differences": differences}}
    moment = {"diverged": "2 of 3 seeds; 1 diverged at epoch 1"}
    assert summary == expected | {"seeds": [3, 4, 5], "paired": paired} | moment
    assert summary == json.loads((tmp_path / "some" / "summary.json").read_text())
    assert Summary.from_json(summary).to_json() == summary
    table = {int(row["seed"]): row for row in rows(tmp_path / "some" / "seeds.csv")}
    assert list(table) == [3, 4, 5]
    assert (table[lost]["perm"], table[lost]["local"]) == ("diverged at epoch 1", "")
    assert all(float(table[seed]["perm"]) > 0 for seed in kept)
    page = (tmp_path / "some" / "report.html").read_text()
    assert "perm: 2 of 3 seeds; 1 diverged at epoch 1." in page and "<td>diverged at epoch 1</td>" in page


@pytest.mark.usefixtures("no_pictures")
def test_a_command_of_which_a_seed_diverged_says_so_and_exits_with_1(wild, tmp_path, capsys):
    wild(4)
    (tmp_path / "c.toml").write_text(over_seeds(None, 3, 4).to_toml())
    words = ["--quiet", "--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "some")]
    for more in ([], ["--resume"]):
        assert guarded(train_command, [*words, *more]) == 1
        said = capsys.readouterr()
        assert "perm: 1 of 2 seeds; 1 diverged at epoch 1." in " ".join(said.out.split())
        assert "written to" in said.out and said.err == ""


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_of_which_every_seed_diverged_is_an_error(wild, tmp_path):
    wild(3, 4)
    with pytest.raises(NotFinite, match=r"no seed is left, as each of \[3, 4\] diverged; the last one: perm: .*lower"):
        experiment.sweep(over_seeds(tmp_path / "none", 3, 4))


def _tame(setting):
    return replace(setting, config=setting.config.override(rivals={}))


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures take most of the time of a tiny run."""
    monkeypatch.setattr(output, "draw", lambda result: None)
