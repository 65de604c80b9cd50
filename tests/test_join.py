"""Clients that join a finished run: whom they learn from, what their model is made of, what the folder then holds."""

import csv
import errno
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from tiny_run import tiny, without_what_others_test
from torch import nn
from torch.nn import functional as F

from hetperm import Client, Config, fit, load_client, mixing
from hetperm.cli import join as join_command
from hetperm.cli import who
from hetperm.cli.main import guarded
from hetperm.mixing import complexity, discrepancy
from hetperm.runs import client_models, experiment, files, join, joined, partners, server_file
from hetperm.runs.newcomer import client_of
from hetperm.runs.setting import from_config
from hetperm.server.estimate import EARLY
from hetperm.server.visits import mixed_over
from submodels import Budget, ScalableModel

LEFT_OUT = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(the result of a run of four clients, the two clients that were left out of it)."""
    folder = tmp_path_factory.mktemp("join") / "run"
    with without_what_others_test():
        config = tiny(baselines=(), epochs=2, warmup_rounds=8, local_steps=3, out=folder, share="look-ahead")
        whole = from_config(config)
        few = replace(whole, clients=whole.clients[:-LEFT_OUT], tiers=whole.tiers[:-LEFT_OUT])
        few = replace(few, config=few.config.override(num_clients=len(few.clients)))
        with experiment._opened(few.config) as opened:
            return experiment.execute(few, opened, None), whole.clients[-LEFT_OUT:]


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the run's folder, to be joined."""
    return shutil.copytree(finished[0].folder, tmp_path / "run")


def wide_enough(client, run) -> Client:
    return replace(client, width=max(client.width, min(run.widths)))


def data_file(path: Path, client: Client) -> Path:
    """The data of a client as a file."""
    pairs = [client.train, client.test]
    x, y = (np.concatenate([pair[k].numpy() for pair in pairs]) for k in (0, 1))
    np.savez(path, x=x, y=y, split=np.repeat([0, 1], [len(pair[1]) for pair in pairs]))
    return path


# The row and the model


def test_the_row_is_the_one_that_all_clients_together_would_give(finished):
    """The newcomer's reports and those of the others, at the same two models: the last row of the mixing problem."""
    result, (client, _) = finished
    run = join.read_run(result.folder)
    client = wide_enough(client, run)
    new = join.added(run, client)
    setting = result.setting
    probe = setting.slicer.cut(result.state.w, setting.slicer.index(run.server.width))
    zeta = 0
    for model, unit in zip((probe, result.state.memory[EARLY]), run.server.units.tolist(), strict=True):
        gradients = []
        for each in (*setting.clients, client):
            bench = setting.shop.at(run.server.width)
            bench.load(model)
            gradients.append(torch.cat([g.reshape(-1) for g in bench.gradient(*each.train)]))
        zeta += discrepancy.pairwise(torch.stack(gradients)).double() / unit
    q = torch.tensor([*run.server.noise.tolist(), new.report.noise], dtype=torch.float64)
    n = torch.tensor([*(each.n_train for each in setting.clients), client.n_train])
    vc = complexity.vc_of_widths(setting.shop.scalable, [*result.main.widths, client.width])
    expected = mixing.weights(mixing.denoised(zeta, q, n), q, n, vc=vc, vc_weight=0.05, share=run.server.share)[-1]
    torch.testing.assert_close(new.alpha, expected, rtol=0, atol=1e-5)
    assert float(new.alpha.sum()) == pytest.approx(1) and new.client == 4


def test_the_model_is_made_of_partners_by_their_weight_and_the_loss_on_its_data(finished):
    result, (client, _) = finished
    run, client = join.read_run(result.folder), replace(client, width=1.0)
    alpha = torch.tensor([0.2, 0.0, 0.3, 0.1, 0.4], dtype=torch.float64)
    model, made_of = join.model_for(run, client, alpha, join._report(run, client))
    assert 1 not in made_of and made_of
    slicer, base = result.setting.slicer, {name: 0.5 * x for name, x in result.state.w.items()}

    def mean(partners):
        models, weights = {j: result.state.deployed[j] for j in partners}, {j: float(alpha[j]) for j in partners}
        return mixed_over(slicer, 4, models | {4: base}, [*result.main.widths, 1.0], weights)

    def loss(params):
        bench = result.setting.shop.at(1.0)
        bench.load(params)
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(bench.module(client.train[0]), client.train[1]))

    for name, x in mean(made_of).items():
        torch.testing.assert_close(model[name], x)
    assert loss(model) <= min(loss(mean([j])) for j in (0, 2, 3)) + 1e-6


ALONE = torch.tensor([0.0] * 4 + [1.0], dtype=torch.float64)


def test_a_client_without_partners_begins_with_a_model_of_others_that_suits_its_data(finished):
    """It is the client that was left out again: nobody is its partner, but the models of its group fit its data."""
    result, (client, _) = finished
    run, client = join.read_run(result.folder), replace(client, width=1.0)
    model, made_of = join.model_for(run, client, ALONE, join._report(run, client))
    part = run.server.w
    assert made_of and not all([torch.equal(model[name], part[name]) for name in part])
    bench, losses = result.setting.shop.at(1.0), []
    for params in (model, part):
        bench.load(params)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(bench.module(client.train[0]), client.train[1])))
    assert losses[0] < losses[1]


def test_a_client_whom_no_model_suits_gets_its_part_of_the_global_model(finished):
    result, (client, _) = finished
    run = join.read_run(result.folder)
    ruined = replace(run, model_of=lambda j: {name: 100 * x for name, x in run.model_of(j).items()})
    client = replace(client, width=1.0)
    model, made_of = join.model_for(ruined, client, ALONE, join._report(run, client))
    assert made_of == [] and all([torch.equal(model[name], run.server.w[name]) for name in run.server.w])


def test_a_client_without_partners_tries_the_nearest_models_only(finished, monkeypatch):
    result, (client, _) = finished
    run = join.read_run(result.folder)
    client = wide_enough(client, run)
    report = join._report(run, client)
    monkeypatch.setattr(join.blend, "MOST", 2)
    known = torch.tensor([True, False, True, True])
    few = replace(run, server=replace(run.server, known=known))
    distance = (run.server.gradient - report.gradient).square().sum(1).tolist()
    assert join.nearest(few, client, report) == sorted([0, 2, 3], key=distance.__getitem__)[:2]


def test_steps_at_home_change_the_model_and_are_repeatable(finished):
    result, (client, _) = finished
    run = join.read_run(result.folder)
    client = wide_enough(client, run)
    models = [join.added(run, client, steps=steps).model.state_dict() for steps in (0, 4, 4)]
    name = next(iter(models[0]))
    assert not torch.equal(models[0][name], models[1][name]) and torch.equal(models[1][name], models[2][name])


def test_a_budget_gives_the_largest_width_of_the_run_that_fits(finished):
    run, client = join.read_run(finished[0].folder), finished[1][0]
    scalable, widths = run.setting.shop.scalable, sorted(set(run.widths))
    assert len(widths) > 1
    for width in widths:
        mmacs = scalable.cost(width, batch_size=32).macs / 1e6
        assert join.width_for(run, client, Budget(mmacs=mmacs)) == width
    with pytest.raises(ValueError, match="mmacs"):
        join.width_for(run, client, Budget(mmacs=1e-9))


def test_who_has_no_report_is_nobodys_partner(finished):
    result, (client, _) = finished
    run = join.read_run(result.folder)
    client = wide_enough(client, run)
    known = torch.tensor([True, False, True, True])
    # With this share all whose report is known are partners, so that a weight in a wrong place is seen.
    new = join.added(replace(run, server=replace(run.server, known=known, share=math.inf)), client)
    assert (new.alpha > 0).tolist() == [True, False, True, True, True]
    assert float(new.alpha.sum()) == pytest.approx(1)


# The folder


def rows(folder) -> list[dict]:
    with open(folder / "clients.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_newcomer_is_one_more_client_of_the_folder(finished, folder):
    before, summary = rows(folder), (folder / "summary.json").read_bytes()
    run = join.read_run(folder)
    first, second = (join.join(folder, wide_enough(client, run)) for client in finished[1])
    assert (first.client, second.client) == (4, 5) and len(second.alpha) == 6
    assert [{key: row[key] for key in before[0]} for row in rows(folder)[:4]] == before
    assert [row["joined"] for row in rows(folder)] == ["", "", "", "", "1", "1"]
    alpha = np.load(folder / "alpha.npy")
    assert alpha.shape == (6, 6) and not alpha[:4, 4:].any() and alpha[4, 5] == 0
    assert alpha[5].tolist() == second.alpha.tolist()
    assert (folder / "summary.json").read_bytes() == summary
    assert files.is_whole(folder)
    assert subprocess.run(["sha256sum", "-c", "checksums.txt"], cwd=folder, capture_output=True).returncode == 0
    client = replace(finished[1][1], width=second.width)
    with torch.no_grad():
        said = load_client(folder, 5)(client.test[0]).argmax(1)
    assert float((said == client.test[1]).float().mean()) == pytest.approx(second.accuracy, abs=1e-6)
    manifest = json.loads((folder / "models" / "client_005.json").read_text())
    assert manifest["joined"] is True and manifest["alpha"] == second.alpha.tolist()
    assert manifest["made_of"] == second.made_of and set(second.made_of) <= set(range(5))
    assert "<td>1</td>" in (folder / "report.html").read_text()


def test_a_joined_run_that_lost_a_file_gets_it_again_with_the_newcomer(finished, folder):
    result, (client, _) = finished
    join.join(folder, wide_enough(client, join.read_run(folder)))
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".csv", ".npy", ".html")}
    (folder / "clients.csv").unlink()
    (folder / "alpha.npy").unlink()
    with without_what_others_test(), experiment._opened(result.setting.config.override(out=folder, resume=True)):
        experiment.execute(result.setting, folder, None)
    assert files.is_whole(folder)
    for name, content in whole.items():
        assert (folder / name).read_bytes() == content, name


def test_a_result_without_a_folder_can_be_joined(finished):
    result, (client, _) = finished
    run = join.read_run(result.folder)
    client = wide_enough(client, run)
    new = replace(result, folder=None).join(client)
    other = join.added(run, client)
    torch.testing.assert_close(new.alpha, other.alpha)
    assert new.accuracy == pytest.approx(other.accuracy, abs=1e-6)


# The commands


def test_the_command_joins_and_says_whom_the_client_learns_from(finished, folder, tmp_path, capsys):
    path, tier = data_file(tmp_path / "new.npz", finished[1][0]), finished[0].clients[0]["tier"]
    assert guarded(join_command.main, [str(folder), "--data", str(path), "--tier", tier, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        "client 4 (" in out
        and "joined" in out
        and "test accuracy" in out
        and "its model begins as " in out
        and "models/client_004" in out
    )
    assert guarded(who.main, [str(folder), "--client", "4"]) == 0
    assert "beyond noise" in capsys.readouterr().out


def test_who_shows_every_client_with_its_weight_distance_and_noise(finished):
    result, _ = finished
    found, server = partners.of(result.folder, 1), server_file.load(result.folder)
    assert sorted(row["client"] for row in found.rows) == [0, 1, 2, 3]
    weights = [row["weight"] for row in found.rows]
    assert weights == sorted(weights, reverse=True) and sum(weights) == pytest.approx(1)
    for row in found.rows:
        j = row["client"]
        zeta = float((server.gradient[1] - server.gradient[j]).double().square().sum())
        assert row["weight"] == pytest.approx(float(result.alpha[1, j]))
        assert row["distance"] == pytest.approx(zeta)
        assert row["noise"] == pytest.approx(float(server.noise[1] + server.noise[j]))
        assert row["tier"] == result.clients[j]["tier"]


BAD = [
    ("nowhere --data d.npz --width 0.5", "there is no folder nowhere"),
    ("RUN --width 0.5", "the data of the client are missing; give --data FILE.npz"),
    ("RUN --data d.npz", "the width of the client is missing; give one of --width, --tier and a budget"),
    ("RUN --data d.npz --width 1 --mmacs 3", "the width of the client is given twice"),
    ("RUN --data d.npz --width 2", "--width is 2.0; it must be a number above 0 and up to 1"),
    ("RUN --data none.npz --width 1", "there is no file none.npz"),
    ("RUN --data d.npz --tier giant", "there is no tier 'giant' in "),
    ("RUN --data d.npz --width 0.001", "width 0.001 is below "),
    ("RUN --data d.npz --mmacs 1e-9", "mmacs"),
    ("RUN --data shape.npz --width 1", "has shape (3,) and the run's model takes (1, 8, 8)"),
    ("RUN --data label.npz --width 1", "the labels of train hold 10 and the run has classes 0 to 9"),
    ("RUN --data bytes.npz --width 1", "x is uint8; join takes inputs as the run's model takes them"),
    ("RUN --data text.npz --width 1", "text.npz is no npz file (a zip archive of arrays)"),
    ("RUN --data nan.npz --width 1", "nan.npz: train inputs hold nan (first in sample 0)"),
    ("RUN --data none-of-it.npz --width 1", "none-of-it.npz: train is empty"),
    (
        "RUN --data ignored.npz --width 1",
        "all labels of train are -100, which cross-entropy leaves out",
    ),
    ("RUN --data number.npz --width 1", "number.npz: x is one number; it must hold a row for each sample"),
    ("RUN --data large.npz --width 1", "large.npz: x holds 1e+300, beyond 1e+30; normalise it like the data of the"),
    ("RUN --data huge.npz --width 1", "huge.npz: y holds 18446744073709551615, which is no class"),
    ("--data d.npz", "which run?"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_one_sentence_and_writes_nothing(words, sentence, finished, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data_file(tmp_path / "d.npz", finished[1][0])
    np.savez(tmp_path / "shape.npz", x=np.zeros((4, 3), np.float32), y=np.zeros(4, int))
    np.savez(tmp_path / "label.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.full(4, 10))
    np.savez(tmp_path / "bytes.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.zeros(4, int))
    np.savez(tmp_path / "nan.npz", x=np.full((4, 1, 8, 8), np.nan, np.float32), y=np.zeros(4, int))
    np.savez(tmp_path / "none-of-it.npz", x=np.zeros((0, 1, 8, 8), np.float32), y=np.zeros(0, int))
    images = np.zeros((4, 1, 8, 8), np.float32)
    np.savez(tmp_path / "ignored.npz", x=images, y=np.full(4, -100))
    np.savez(tmp_path / "number.npz", x=np.float32(3), y=np.zeros(4, int))
    np.savez(tmp_path / "large.npz", x=np.full((4, 1, 8, 8), 1e300), y=np.zeros(4, int))
    np.savez(tmp_path / "huge.npz", x=images, y=np.full(4, 2**64 - 1, np.uint64))
    (tmp_path / "text.npz").write_text("no arrays")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert guarded(join_command.main, words.replace("RUN", "run").split()) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("n", "extra", "sentence"),
    [
        (1, {}, "the client that joins has one training sample, and chance decides whom it learns from"),
        (4, {}, "all training samples are the same: nothing can be learned from them"),
        (4, {"user": np.arange(4) // 2}, "user has 2 values, and all samples become those of one client; keep one"),
    ],
)
def test_data_that_say_little_of_a_client_are_named(n, extra, sentence, finished, tmp_path, caplog):
    run = join.read_run(finished[0].folder)
    np.savez(tmp_path / "few.npz", x=np.zeros((n, 1, 8, 8), np.float32), y=np.arange(n) % 2, **extra)
    join.added(run, client_of(tmp_path / "few.npz", 1.0))
    assert sentence in caplog.text


def drop(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def other_format(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'format\\": 2', b'format\\": 1'))


def without_weights(path: Path) -> None:
    """Leave out a part of the global model, and renew the checksums."""
    server = server_file.load(path.parent)
    lost = next(iter(server.w))
    w, early = ({name: x for name, x in part.items() if name != lost} for part in (server.w, server.early))
    server_file.save(path.parent, replace(server, w=w, early=early))
    files.write_checksums(path.parent)


def scalar_table(path: Path) -> None:
    server = server_file.load(path.parent)
    server_file.save(path.parent, replace(server, known=torch.tensor(True)))


def edited(**entries) -> Callable[[Path], None]:
    """Change entries of a client's manifest, leave those out that are None, and renew the checksums."""

    def edit(path: Path) -> None:
        manifest = json.loads(path.read_text()) | entries
        path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))
        files.write_checksums(path.parent.parent)

    return edit


def other_version(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'0.1.0\\"', b'9.9.9\\"'))


RUINED = [
    ("models", drop, "has no clients' models in models/"),
    ("server.safetensors", drop, "has no server.safetensors, which holds the reports of its clients"),
    ("server.safetensors", folder_instead, "server.safetensors is no file; put the run's own in its place"),
    ("server.safetensors", spoil, "server.safetensors is damaged"),
    ("server.safetensors", other_version, "hetperm 9.9.9 wrote"),
    ("server.safetensors", other_format, "has format 1 and this hetperm reads 2; train the run again"),
    ("server.safetensors", without_weights, "in the model and missing in the run; copy server.safetensors again from"),
    ("server.safetensors", scalar_table, "known is not what a run writes; copy it again from the run"),
    ("models/client_001.json", edited(width=-2), "client_001.json: width is -2, which no run writes; copy it again"),
    ("models/client_000.json", edited(input="3"), "client_000.json: input is '3', which no run writes; copy it again"),
    ("models/client_000.json", edited(dataset=None), "the manifest of client 0 lacks 'dataset'; copy it again"),
    ("config.toml", drop, "holds no config.toml"),
    ("summary.json", spoil, "is no finished run, or a file of it was changed"),
    ("checksums.txt", drop, "is no finished run, or a file of it was changed"),
]


@pytest.mark.parametrize(
    ("name", "ruin", "sentence"),
    RUINED,
    ids=[f"{name} {ruin.__name__} {k}" for k, (name, ruin, _) in enumerate(RUINED)],
)
def test_a_ruined_run_is_refused_in_one_sentence(name, ruin, sentence, finished, folder, tmp_path, capsys):
    path = data_file(tmp_path / "d.npz", finished[1][0])
    ruin(folder / name)
    assert guarded(join_command.main, [str(folder), "--data", str(path), "--width", "1"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not joined.read(folder) and not (folder / "models" / "client_004.json").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("RUN --client 9", "there is no client 9 in "),
        ("RUN", "which client? give --client 7"),
        ("nowhere --client 0", "nowhere holds no clients.csv"),
    ],
)
def test_who_refuses_what_it_cannot_answer(words, sentence, folder, capsys):
    assert guarded(who.main, words.replace("RUN", str(folder)).split()) == 2
    assert sentence in capsys.readouterr().err


def empty(path: Path) -> None:
    path.write_text("")


def saved(alpha: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, alpha)


def as_npz(ruin: Callable[[Path], None]) -> Callable[[Path], None]:
    """A way to ruin the file that a run of many clients has instead of alpha.npy."""

    def change(path: Path) -> None:
        files.write_alpha(path.parent, sparse.csr_array(np.load(path)))
        path.unlink()
        ruin(path.with_suffix(".npz"))

    return change


def of_clients(count: int) -> Callable[[Path], None]:
    """A way to put the file of a run of so many clients in the place of this one."""

    def change(path: Path) -> None:
        server = server_file.load(path.parent)
        rows = torch.arange(count) % len(server.known)
        tables = {name: getattr(server, name)[rows] for name in ("gradient", "noise", "samples", "known")}
        server_file.save(path.parent, replace(server, **tables))

    return change


@pytest.mark.parametrize(
    ("name", "ruin", "sentence"),
    [
        ("alpha.npy", spoil, "alpha.npy is damaged ("),
        ("alpha.npy", drop, "has no mixing weights (alpha.npy)"),
        (
            "alpha.npy",
            lambda path: np.save(path, np.load(path)[:2]),
            "alpha.npy holds no mixing weights: float64 of shape (2, 4); copy it again from the run",
        ),
        ("alpha.npy", saved(np.full((4, 4), np.nan)), "no mixing weights: some are negative or not finite; copy it"),
        ("alpha.npy", saved(-np.eye(4)), "no mixing weights: some are negative or not finite; copy it"),
        ("alpha.npy", saved(10 * np.eye(4)), "no mixing weights: those of client 0 have the sum 10 and not 1; copy it"),
        ("alpha.npy", saved(np.zeros((4, 4))), "no mixing weights: those of client 0 have the sum 0 and not 1"),
        ("alpha.npy", saved(np.full((4, 4), 1e-320)), "no mixing weights: those of client 0 have the sum "),
        ("alpha.npy", saved(np.eye(4, dtype=complex)), "no mixing weights: complex128 of shape (4, 4)"),
        ("alpha.npy", saved(np.full((4, 4), "a")), "no mixing weights: <U1 of shape (4, 4)"),
        ("alpha.npy", saved(np.eye(3)), "there are mixing weights of 3 clients and clients.csv has 4; copy both again"),
        (
            "alpha.npy",
            as_npz(spoil),
            "alpha.npz is damaged (it is no zip archive of arrays); copy it again from the run",
        ),
        (
            "alpha.npy",
            as_npz(empty),
            "alpha.npz is damaged (it is no zip archive of arrays); copy it again from the run",
        ),
        ("alpha.npy", as_npz(lambda path: np.savez(path, x=3)), "alpha.npz is damaged ("),
        ("clients.csv", empty, "clients.csv has no column 'client'; copy it again from the run"),
        ("server.safetensors", spoil, "server.safetensors is damaged"),
        (
            "server.safetensors",
            of_clients(3),
            "clients.csv has 4 clients and server.safetensors 3; copy them again from",
        ),
        (
            "server.safetensors",
            of_clients(5),
            "clients.csv has 4 clients and server.safetensors 5; copy them again from",
        ),
    ],
)
def test_who_refuses_a_ruined_run_in_one_sentence(name, ruin, sentence, folder, capsys):
    ruin(folder / name)
    assert guarded(who.main, [str(folder), "--client", "0"]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_run_of_which_no_page_can_be_written_is_not_joined(finished, folder, tmp_path, capsys):
    path = data_file(tmp_path / "d.npz", finished[1][0])
    (folder / "warnings.txt").write_bytes(b"\xff")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert guarded(join_command.main, [str(folder), "--data", str(path), "--width", "1"]) == 2
    assert "warnings.txt cannot be read" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fails", range(1, 8))
def test_a_join_that_cannot_be_written_leaves_nothing_or_says_how_it_is_completed(fails, finished, folder, monkeypatch):
    result, (client, _) = finished
    client, before, count = wide_enough(client, join.read_run(folder)), contents(folder), itertools.count(1)
    renamed = os.replace

    def replace_but_once(*args):
        if next(count) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return renamed(*args)

    monkeypatch.setattr(os, "replace", replace_but_once)
    with pytest.raises(OSError, match="No space left on device") as caught:
        join.join(folder, client)
    if fails <= 3:  # the model's two files, and joined.safetensors
        assert contents(folder) == before
        return
    assert str(caught.value).startswith(f"client 4 has joined {folder}, and not all files that show it could be")
    assert f"`hetperm train --resume --out {folder}` with its settings completes them" in str(caught.value)
    with without_what_others_test(), experiment._opened(result.setting.config.override(out=folder, resume=True)):
        experiment.execute(result.setting, folder, None)
    assert files.is_whole(folder) and client_models.clients(folder) == [0, 1, 2, 3, 4]


def test_the_model_of_a_join_that_was_killed_does_not_stay(finished, folder):
    for ending in ("json", "safetensors"):
        shutil.copy(folder / "models" / f"client_000.{ending}", folder / "models" / f"client_004.{ending}")
    with without_what_others_test(), experiment._opened(finished[0].setting.config.override(out=folder, resume=True)):
        experiment.execute(finished[0].setting, folder, None)
    assert files.is_whole(folder) and client_models.clients(folder) == [0, 1, 2, 3]


def test_a_folder_in_the_place_of_those_that_joined_is_refused_before_anything_is_written(finished, folder):
    (folder / joined.NAME).mkdir()
    before = contents(folder)
    with pytest.raises(ValueError, match=r"joined\.safetensors is no file; remove it$"):
        join.join(folder, finished[1][0])
    assert contents(folder) == before


def test_who_reads_the_weights_of_a_run_of_many_clients(folder):
    dense = partners.of(folder, 0)
    as_npz(lambda path: None)(folder / "alpha.npy")
    assert partners.of(folder, 0) == dense


def test_a_ruined_file_of_clients_that_joined_is_removed_and_the_run_mended(finished, folder, capsys):
    result, (client, _) = finished
    client = wide_enough(client, join.read_run(folder))
    join.join(folder, client)
    spoil(folder / joined.NAME)
    assert guarded(who.main, [str(folder), "--client", "4"]) == 2
    remedy = f"remove it, mend the run by `hetperm train --resume --out {folder}` with its settings, and let those"
    assert remedy in capsys.readouterr().err
    drop(folder / joined.NAME)
    assert guarded(who.main, [str(folder), "--client", "4"]) == 2
    assert "there are mixing weights" not in (error := capsys.readouterr().err) and "mend it by `hetperm train" in error
    with without_what_others_test(), experiment._opened(result.setting.config.override(out=folder, resume=True)):
        experiment.execute(result.setting, folder, None)
    assert join.join(folder, client).client == 4 and files.is_whole(folder)


def test_a_row_of_a_client_that_joined_without_its_samples_is_refused(finished, folder):
    join.join(folder, wide_enough(finished[1][0], join.read_run(folder)))
    (record,) = joined.read(folder)
    joined.write(folder, [replace(record, row={"client": 4, "n_train": "many"})])
    with pytest.raises(ValueError, match=r"joined.safetensors is damaged \(a row has no whole numbers"):
        partners.of(folder, 4)


def test_who_says_that_a_file_is_not_as_the_run_wrote_it(folder, capsys, caplog):
    assert guarded(who.main, [str(folder), "--client", "0"]) == 0 and not caplog.records
    np.save(folder / "alpha.npy", np.full((4, 4), 0.25))  # that of another run, say
    assert guarded(who.main, [str(folder), "--client", "0"]) == 0
    assert "not as the run wrote it, going by checksums.txt: alpha.npy" in caplog.text


def test_a_run_that_does_not_mix_cannot_be_joined(tmp_path, finished, capsys):
    with without_what_others_test():
        result = experiment.run(tiny(algorithm="local", baselines=(), epochs=1, steps=4, out=tmp_path / "local"))
    path = data_file(tmp_path / "d.npz", finished[1][0])
    assert guarded(join_command.main, [str(result.folder), "--data", str(path), "--width", "1"]) == 2
    assert "has no server.safetensors" in capsys.readouterr().err
    with pytest.raises(TypeError, match=r"^the client is 3; wrap its shard: hetperm.Client"):
        join.added(join.read_run(finished[0].folder), 3)
    with pytest.raises(ValueError, match="has no reports at a common model"):
        replace(result, folder=None).join(finished[1][0])


@pytest.fixture(scope="module")
def of_fit(tmp_path_factory) -> tuple[Path, nn.Module]:
    """(the folder of a run of fit whose clients all hold the whole model, that model)."""
    folder, model = tmp_path_factory.mktemp("fit") / "run", nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    clients = [Client((x + k, y), test=(x, y)) for k in range(3)]
    with without_what_others_test():
        fit(model, clients, Config(epochs=1, warmup_rounds=1, steps=0, share=0.7, out=folder, quiet=True))
    return folder, model


def newcomer(rows: int = 6, **changes) -> Client:
    return Client((torch.randn(rows, 3), torch.arange(rows) % 2), **changes)


def test_a_budget_is_held_where_all_clients_have_the_whole_model_too(of_fit):
    folder, model = of_fit
    run = join.read_run(folder, model=model)
    assert run.setting.shop.scalable is None and join.width_for(run, newcomer(), Budget(train_mb=1)) == 1
    with pytest.raises(ValueError, match=r"^no width fits train_mb=1e-09: .* raise train_mb to "):
        join.join(folder, newcomer(), model=model, budget=Budget(train_mb=1e-9))
    with pytest.raises(TypeError, match=r"^the budget is 'x'; give a submodels.Budget, or None"):
        join.join(folder, newcomer(), model=model, budget="x")


def test_a_traced_model_serves_as_the_model_of_the_run(of_fit, tmp_path):
    folder, model = shutil.copytree(of_fit[0], tmp_path / "run"), of_fit[1]
    new = join.join(folder, newcomer(), model=ScalableModel(model, torch.zeros(1, 3)))
    assert new.client == 3 and new.width == 1


def accuracy(outputs, y):
    """A function of the run's name, which fails."""
    return outputs.argmax(7)


REFUSED = [
    ({"model": "mlp"}, TypeError, "the model is 'mlp'; it must be an nn.Module at full width"),
    (
        {"model": nn.Sequential(nn.Linear(5, 4))},
        ValueError,
        "0.weight is (4, 5) in the model and (4, 3) in the run; give",
    ),
    ({"model": nn.Linear(3, 2)}, ValueError, "weight is (2, 3) in the model and missing in the run; give the one that"),
    ({"loss": F.mse_loss}, ValueError, "the loss fails on outputs of shape (2, 3) and labels of shape (2,)"),
    ({"loss": "mse"}, TypeError, "loss is 'mse'; it must be a function, or None"),
    ({"loss": 0}, TypeError, "loss is 0; it must be a function, or None"),
    ({"metric": accuracy}, ValueError, "the metric fails on outputs of shape (2, 3)"),
    ({"metric": []}, TypeError, "metric is a list; it must be a name, a function or a hetperm.Metric"),
    ({"steps": torch.zeros(9, 9)}, ValueError, "steps is tensor([[0., 0., 0."),
]


@pytest.mark.parametrize(("changes", "kind", "sentence"), REFUSED, ids=[sentence for *_, sentence in REFUSED])
@pytest.mark.filterwarnings("ignore:Using a target size")  # what torch says before mse_loss fails
def test_what_join_cannot_use_is_refused_in_one_sentence(changes, kind, sentence, of_fit):
    folder, model = of_fit
    with pytest.raises(kind, match=f"^{re.escape(sentence)}") as caught:
        join.join(folder, newcomer(), **{"model": model} | changes)
    assert "\n" not in str(caught.value) and not joined.read(folder)


def test_another_metric_than_that_of_the_run_is_refused(of_fit):
    folder, model = of_fit
    with pytest.raises(ValueError, match=r"was scored by 'accuracy' and metric is 'perplexity'; give the run's$"):
        join.join(folder, newcomer(), model=model, metric="perplexity")
    with pytest.raises(ValueError, match=r"was scored by 'accuracy' and metric is 'score'; give the run's$"):
        join.join(folder, newcomer(), model=model, metric=lambda outputs, y: 0.5)
    assert not joined.read(folder)


def test_inputs_of_another_kind_than_those_of_the_run_are_refused(of_fit):
    folder, model = of_fit
    whole = Client((torch.ones(6, 3, dtype=torch.long), torch.arange(6) % 2))
    with pytest.raises(ValueError, match=r"^the model fails on inputs of shape \(6, 3\) and type torch.int64 \("):
        join.join(folder, whole, model=model)


def test_what_is_no_folder_or_no_client_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^the folder is 'aaa.*no name in a path may be longer than 255 bytes"):
        join.join(Path("a" * 3000), newcomer())
    with pytest.raises(TypeError, match=r"^the client is 3; wrap its shard: hetperm.Client"):
        join.join(tmp_path, 3)
    with pytest.raises(TypeError, match=r"^the folder is b'x'; it must be a path$"):
        join.join(b"x", None)
