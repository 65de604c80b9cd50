"""Runs that were stopped, killed or out of disk go on and end as if nothing had happened, byte for byte."""

import errno
import functools
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import (
    METHODS,
    TINY,
    again,
    contents,
    ended_alike,
    refusal,
    tiny,
    touched,
    train,
    without_what_others_test,
)
from torch import nn
from torch.nn import functional as F

from hetperm import Client, fit, run
from hetperm.config import load
from hetperm.engine.sequential import Sequential
from hetperm.runs import checkpoint, experiment, files, functions, training

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def quick():
    with without_what_others_test():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that nothing happened to."""
    return run(tiny(out=tmp_path_factory.mktemp("whole") / "run")).folder


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of it to do things to."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_whole_run_leaves_what_is_compared_here(whole):
    names = set(contents(whole))
    assert {"summary.json", "alpha.npy", "metrics.csv", "clients.csv", "baselines.csv", "config.toml"} <= names
    assert {f"models/client_00{i}.{kind}" for i in range(6) for kind in ("safetensors", "json")} <= names
    assert json.loads((whole / "summary.json").read_text())["baselines"].keys() == {"local", "heterofl-ft"}
    widths = {json.loads((whole / f"models/client_00{i}.json").read_text())["width"] for i in range(6)}
    assert widths == {1.0, 0.5, 0.25, 0.125, 0.0625}


# Stopped


@pytest.mark.slow
def test_a_run_within_a_budget_that_is_stopped_in_the_middle_of_a_tour_ends_alike(tmp_path):
    budget = {"steps": 60, "warmup_rounds": None, "share": "look-ahead", "alpha_every": 2, "epochs": 4}
    whole = run(tiny(**budget, baselines=(), out=tmp_path / "whole"))
    assert 0 < whole.summary["cost"]["client_steps"] / 6 <= 60
    config = tiny(**budget, baselines=(), out=tmp_path / "run", resume=True)
    for k in (1, 2, 1):
        with pytest.raises(KeyboardInterrupt):
            run(config, on_epoch=Stop(k))
    run(config)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("presence", [{"participation": 0.5}, {"trace": "day-night"}], ids=["drawn", "traced"])
def test_a_run_whose_clients_are_not_always_there_ends_alike(presence, tmp_path):
    options = {"steps": 60, "warmup_rounds": None, "share": "look-ahead", "alpha_every": 2, "epochs": 4, **presence}
    whole = run(tiny(**options, baselines=("heterofl-ft",), out=tmp_path / "whole"))
    for method in (whole.summary, whole.summary["baselines"]["heterofl-ft"]):
        assert 0 < method["attendance"]["absent"] < method["attendance"]["asked"]
    assert all([0 <= row["absent"] <= row["asked"] for row in whole.clients])
    assert "heterofl-ft: a client was away" in (whole.folder / "report.html").read_text()
    config = tiny(**options, baselines=("heterofl-ft",), out=tmp_path / "run", resume=True)
    for k in (1, 2, 2):
        with pytest.raises(KeyboardInterrupt):
            run(config, on_epoch=Stop(k))
    run(config)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_trace_that_was_edited_is_refused(tmp_path):
    trace = tmp_path / "trace.toml"
    trace.write_text('clients = ["10", "11"]')
    config = tiny(trace=str(trace), baselines=(), out=tmp_path / "run", resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(config, on_epoch=Stop(1))
    trace.write_text('clients = ["01", "11"]')
    with pytest.raises(ValueError, match=r"another model \(or trace\)"):
        run(config)


class Stop:
    """An on_epoch that acts like Ctrl-C in the k-th call."""

    def __init__(self, k: int):
        self.left = k

    def __call__(self, method, row):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_a_run_stopped_after_every_epoch_does_none_twice_and_ends_alike(whole, tmp_path):
    seen = []

    def stop_at_news(method, row):
        if (method, row["epoch"]) not in seen:
            seen.append((method, row["epoch"]))
            raise KeyboardInterrupt

    config = tiny(out=tmp_path / "run", resume=True)
    for _ in range(9):
        with pytest.raises(KeyboardInterrupt):
            run(config, on_epoch=stop_at_news)
        assert not (tmp_path / "run" / "models").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "states", None)  # nothing is left to be trained
        run(config, on_epoch=stop_at_news)
    assert seen == [(method, r) for method in METHODS for r in (1, 2, 3)]
    ended_alike(tmp_path / "run", whole)


@pytest.mark.parametrize("k", [0, 15, 40])
def test_a_run_stopped_within_an_epoch_ends_alike(k, whole, tmp_path, monkeypatch):
    calls, compute = iter(range(10**6)), Sequential.run

    def stopped(self, tasks):
        if next(calls) == k:
            raise KeyboardInterrupt
        return compute(self, tasks)

    config = tiny(out=tmp_path / "run")
    monkeypatch.setattr(Sequential, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    run(config.override(resume=True))
    ended_alike(tmp_path / "run", whole)


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupted(self, tasks):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sequential, "run", interrupted)
    assert train("--num-clients", 5, "--capacity-profile", "uniform5", "--quiet", "--out", tmp_path / "run") == 130
    said = "stopped; the same command with --resume goes on after the last epoch that was finished\n"
    assert capsys.readouterr().err == said


# Killed

KILLED = """
import json, os, resource, signal, sys
import torch._dynamo
from hetperm import Config, run
from hetperm.runs import files, output

settings, out, moments = json.loads(sys.argv[1])
output.draw = lambda result: None

def child(name, *, after=None):
    pid = os.fork()
    if not pid:
        if after is not None:
            signal.setitimer(signal.ITIMER_PROF, after)  # the system ends the process there and then
        try:
            run(Config(**settings, out=f"{out}/{name}"))
        finally:
            os._exit(0)
    _, status, used = os.wait4(pid, 0)
    print(name, os.WTERMSIG(status))
    return used.ru_utime + used.ru_stime

seconds = child("whole")
for k, moment in enumerate(moments):
    child(f"moment-{k}", after=moment * seconds)
"""
MOMENTS = (0.2, 0.5, 0.8)  # of the seconds that a run takes


@pytest.fixture(scope="module")
def killed(tmp_path_factory, warm) -> tuple[Path, dict[str, int]]:
    """Runs that were killed after some seconds of computing, and by what signal.

    All of them are children of one process, which pays once for importing torch.
    """
    out = tmp_path_factory.mktemp("killed")
    arguments = json.dumps([TINY, str(out), MOMENTS])
    done = warm.run(arguments, code=KILLED)
    assert done.returncode == 0, done.stderr
    return out, {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"moment-{k}" for k in range(len(MOMENTS))])
def test_a_killed_run_ends_alike(name, killed, whole):
    run(tiny(out=killed[0] / name, resume=True))
    ended_alike(killed[0] / name, whole)


@pytest.mark.slow
def test_a_run_in_another_process_ends_alike(killed, whole):
    ended_alike(killed[0] / "whole", whole)
    assert killed[1]["whole"] == 0
    assert signal.SIGPROF in killed[1].values()  # a child that was quicker than the first may have got through


# Resumed with nothing to do, or nothing to resume


def test_a_finished_run_is_not_touched_and_says_the_same_again(copied, monkeypatch):
    before, rows = touched(copied), []
    for name in ("states", "scores"):
        monkeypatch.setattr(training, name, None)
    again = run(tiny(out=copied, resume=True), on_epoch=lambda method, row: rows.append((method, row["epoch"])))
    assert touched(copied) == before
    assert rows == [(method, 3) for method in METHODS]
    assert again.summary == json.loads((copied / "summary.json").read_text())


def test_seconds_before_and_after_the_interruption_add_up(tmp_path):
    config, timing = tiny(out=tmp_path / "run"), tmp_path / "run" / "timing.json"
    with pytest.raises(KeyboardInterrupt):
        run(config, on_epoch=Stop(3))
    first = training.checkpoint.load(tmp_path / "run" / "checkpoint" / "perm.safetensors").extra["seconds"]
    run(config.override(resume=True))
    taken = json.loads(timing.read_text())
    assert taken["seconds_by_method"]["perm"] == first > 0
    assert taken["seconds"] > sum(taken["seconds_by_method"].values())


def test_a_folder_that_a_run_was_killed_in_before_it_wrote_anything_is_taken(whole, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.0123abcd.hetperm-part").write_text("epo")
    run(tiny(out=tmp_path / "run", resume=True))
    ended_alike(tmp_path / "run", whole)


def test_a_folder_of_something_else_is_not_taken(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("done")
    before = touched(tmp_path)
    assert train("--resume", "--out", tmp_path / "mine") == 2
    said = f"{tmp_path / 'mine'} exists and holds no run to resume; name another folder with --out"
    assert (refusal(capsys), touched(tmp_path)) == (said, before)


def test_without_a_folder_the_latest_run_of_the_name_is_resumed_or_a_new_one_begun(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(tiny(resume=True), on_epoch=None).folder == Path("runs/digits-perm")
    ended_alike(tmp_path / "runs" / "digits-perm", whole)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), on_epoch=Stop(2))
    assert run(tiny(resume=True)).folder == Path("runs/digits-perm-2")
    ended_alike(tmp_path / "runs" / "digits-perm-2", whole)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-perm", "digits-perm-2"]


def test_a_new_run_does_not_go_on_with_one_that_was_begun_meanwhile(whole, tmp_path, monkeypatch):
    from_config = experiment.from_config

    def slowly(config):
        shutil.copytree(whole, tmp_path / "run")
        (tmp_path / "run" / "summary.json").unlink()
        return from_config(config)

    monkeypatch.setattr(experiment, "from_config", slowly)
    with pytest.raises(FileExistsError, match="exists; name another folder with --out"):
        run(tiny(out=tmp_path / "run"))
    assert not (tmp_path / "run" / "summary.json").exists()


# Changed meanwhile

CHANGES = [
    ({"epochs": 4}, "epochs was 3 and is now 4"),
    ({"seed": 1}, "seed was 0 and is now 1"),
    ({"seeds": (0, 1)}, "seeds was not set and is now [0, 1]"),
    ({"personal_lr": 0.1}, "personal_lr was 0.2 and is now 0.1"),
    ({"capacity_profile": "mobile"}, "capacity_profile was 'uniform5' and is now 'mobile'"),
    ({"baselines": ("local",)}, "baselines was ['local', 'heterofl-ft'] and is now ['local']"),
    ({"model_options": {"hidden": [16, 8]}}, "model_options.hidden was [16, 16] and is now [16, 8]"),
    ({"rivals": {"local": {"lr": 0.1}}}, "local.lr was not set and is now 0.1"),
]


@pytest.mark.parametrize(("change", "sentence"), CHANGES, ids=[next(iter(change)) for change, _ in CHANGES])
def test_a_changed_configuration_is_refused_with_the_key(change, sentence, copied, tmp_path, capsys):
    before, file = touched(copied), tmp_path / "changed.toml"
    file.write_text(tiny(**change).to_toml())
    assert train("--config", file, "--resume", "--quiet", "--out", copied) == 2
    remedy = "set it back to go on with that run, or start another with --out"
    assert refusal(capsys) == f"{copied} cannot be resumed: {sentence}; {remedy}"
    assert touched(copied) == before


def test_where_to_how_loudly_and_on_how_many_workers_are_no_changes(whole, tmp_path, capsys):
    file = tmp_path / "tiny.toml"
    file.write_text(tiny().to_toml())
    with pytest.raises(KeyboardInterrupt):
        run(tiny(out=tmp_path / "here"), on_epoch=Stop(4))
    (tmp_path / "here").rename(tmp_path / "there")
    words = ["--config", file, "--resume", "--workers", 2, "--download", "--device", "cpu", "--out"]
    assert train(*words, tmp_path / "there") == 0
    assert f"written to {tmp_path / 'there'}" in capsys.readouterr().out
    ended_alike(tmp_path / "there", whole)


def test_a_profile_that_was_edited_is_refused(tmp_path):
    file, config = tmp_path / "two.toml", tiny(capacity_profile=str(tmp_path / "two.toml"), out=tmp_path / "run")
    file.write_text("[tiers.large]\nshare = 1\nwidth = 1.0\n[tiers.small]\nshare = 1\nwidth = 0.5\n")
    with pytest.raises(KeyboardInterrupt):
        run(config, on_epoch=Stop(2))
    file.write_text(file.read_text().replace("0.5", "0.25"))
    before = touched(tmp_path / "run")
    with pytest.raises(ValueError, match=r"perm\.safetensors is not of this run: it has other clients, labels or"):
        run(config.override(resume=True))
    assert touched(tmp_path / "run") == before


def test_fit_goes_on_with_the_same_clients_and_model_only(tmp_path):
    def clients(labels: int) -> list[Client]:
        x, y = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % labels
        return [Client((x[i], y), test=(x[i], y), width=width) for i, width in enumerate((1.0, 0.5, 0.5))]

    def model(hidden: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    config = tiny(baselines=(), model_options={}, out=tmp_path / "run", resume=True)
    expected = fit(model(8), clients(3), config.override(out=None))
    with pytest.raises(KeyboardInterrupt):
        fit(model(8), clients(3), config, on_epoch=Stop(2))
    for wrong in ((model(6), clients(3)), (model(8), clients(2)), (model(8), clients(3)[:2])):
        with pytest.raises(ValueError, match=r"other clients, labels or another model|num_clients was 3 and is now 2"):
            fit(*wrong, config)
    result = fit(model(8), clients(3), config)
    assert result.summary == expected.summary
    assert all(torch.equal(a, b) for a, b in zip(result.model(1).parameters(), expected.model(1).parameters()))


def weighted(by: float):
    return lambda outputs, y: by * F.cross_entropy(outputs, y)


SMOOTH = functools.partial(F.cross_entropy, label_smoothing=0.1)


@pytest.mark.parametrize(
    ("first", "same", "other"),
    [
        (
            lambda out, y: F.cross_entropy(out, y),
            lambda o, t: F.cross_entropy(o, t),
            lambda o, y: 2 * F.cross_entropy(o, y),
        ),
        (weighted(0.5), weighted(0.5), weighted(0.25)),
        (SMOOTH, functools.partial(F.cross_entropy, label_smoothing=0.1), functools.partial(F.cross_entropy)),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.2)),
    ],
    ids=["lambda", "closure", "partial", "module"],
)
def test_another_function_without_a_name_of_its_own_is_another(first, same, other, tmp_path):
    x, y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    clients, model = [Client((x, y), test=(x, y)) for _ in range(2)], nn.Linear(4, 3)
    config = tiny(baselines=(), model_options={}, out=tmp_path / "run", resume=True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, clients, config, loss=first, on_epoch=Stop(2))
    with pytest.raises(ValueError, match="it has another loss, metric or augment; bring those back"):
        fit(model, clients, config, loss=other)
    fit(model, clients, config, loss=same)


def test_a_counter_around_a_function_does_not_make_it_another():
    def counted():
        calls, seen = 0, []

        def loss(outputs, y):
            nonlocal calls
            calls += 1
            seen.append(len(y))
            return F.cross_entropy(outputs, y)

        return loss

    loss = counted()
    before = functions.known_by(loss)
    loss(torch.zeros(2, 3), torch.tensor([0, 1]))
    assert functions.known_by(loss) == before
    # Of another Python only the name is known to be the same.
    assert functions.are_same([[before[0], "0" * 16, "3.0"]], [before])
    assert not functions.are_same([["another", "0" * 16, "3.0"]], [before])


# Damaged

DAMAGES = {
    "truncated": lambda raw: raw[:-100],
    "cut to its header": lambda raw: raw[:50],
    "empty": lambda raw: b"",
    "flipped": lambda raw: raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:],
    "something else": lambda raw: b"PK\x03\x04 not a checkpoint",
}


@pytest.mark.parametrize(
    ("damage", "method"), [*((damage, "perm") for damage in DAMAGES), *(("truncated", rival) for rival in METHODS[1:])]
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence_and_nothing_is_touched(damage, method, copied, capsys):
    path = copied / "checkpoint" / f"{method}.safetensors"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    before = touched(copied)
    assert train("--config", copied / "config.toml", "--resume", "--quiet", "--out", copied) == 2
    said = refusal(capsys)
    assert said.startswith(f"{path} is ")
    assert said.endswith("remove it to train this method from the start with --resume, or start another run with --out")
    assert touched(copied) == before


def test_a_checkpoint_that_was_removed_is_made_again(copied, whole):
    (copied / "checkpoint" / "local.safetensors").unlink()
    run(tiny(out=copied, resume=True))
    ended_alike(copied, whole)


@pytest.mark.parametrize("raw", [b"epochs = ", b"\xff\xfe"])
def test_a_damaged_configuration_is_refused_in_one_sentence(raw, copied, tmp_path, capsys):
    (tmp_path / "good.toml").write_bytes((copied / "config.toml").read_bytes())
    (copied / "config.toml").write_bytes(raw)
    before = touched(copied)
    assert train("--config", tmp_path / "good.toml", "--resume", "--quiet", "--out", copied) == 2
    assert refusal(capsys).startswith(f"{copied / 'config.toml'}: is not ")
    assert touched(copied) == before


# Somebody else is writing


def test_runs_without_a_folder_that_begin_at_once_get_one_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from_config, others = experiment.from_config, iter((1, 2, 0))

    def slowly(config):
        """While this run reads its data, others begin and end."""
        setting, more = from_config(config), next(others)
        for _ in range(more):
            run(tiny(baselines=(), epochs=1))
        return setting

    monkeypatch.setattr(
        experiment, "from_config", lambda config: slowly(config) if config.epochs == 2 else from_config(config)
    )
    folders = [run(tiny(baselines=(), epochs=2)).folder.name for _ in range(3)]
    assert folders == ["digits-perm-2", "digits-perm-5", "digits-perm-6"]
    assert not [path for path in (tmp_path / "runs").iterdir() if not files.is_whole(path)]


def test_a_folder_that_a_run_is_writing_to_is_refused_and_left_alone(copied, whole, capsys):
    half = copied / ".summary.json.0123abcd.hetperm-part"  # what the other run is about to rename
    half.write_text("{")
    before = touched(copied)
    with files.locked(copied):
        assert again(copied) == 2
    assert refusal(capsys) == (
        f"another run is writing to {copied}; wait until it has ended, or name another folder with --out"
    )
    assert touched(copied) == before
    assert again(copied) == 0
    ended_alike(copied, whole)


# Checkpoints with a right checksum and a wrong content


def begun(folder: Path) -> Path:
    """The checkpoint of PERM after its first epoch, in a run that was stopped there."""
    with pytest.raises(KeyboardInterrupt):
        run(tiny(out=folder), on_epoch=Stop(1))
    return folder / "checkpoint" / "perm.safetensors"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: replace(state, alpha=state.alpha.long()), "wrong in it: the mixing weights"),
        (lambda state: replace(state, alpha=state.alpha * torch.nan), "wrong in it: the mixing weights"),
        (lambda state: replace(state, w={k: x[None] for k, x in state.w.items()}), "wrong in it: the global model"),
        (
            lambda state: replace(state, v=tuple({k: x * torch.nan for k, x in v.items()} for v in state.v)),
            "wrong in it: the models",
        ),
        (lambda state: replace(state, memory={}), "its checkpoint cannot be resumed from"),
    ],
)
def test_a_checkpoint_that_no_run_writes_is_refused_in_one_sentence(change, said, tmp_path, capsys):
    path = begun(tmp_path / "run")
    saved = checkpoint.load(path)
    path.unlink()
    checkpoint.save(path, replace(saved, state=change(saved.state)))
    capsys.readouterr()
    assert again(tmp_path / "run") == 2
    answer = refusal(capsys, begun=True)
    assert said in answer and "remove it to train perm from the start with --resume" in answer


# Nowhere to write


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "states", None)
    (tmp_path / "file").write_text("no folder")
    for resume in ([], ["--resume"]):
        assert train("--num-clients", 5, "--quiet", "--out", tmp_path / "file" / "run", *resume) == 2
        said = f"cannot make the folder {tmp_path / 'file' / 'run'} (Not a directory); name another with --out"
        assert refusal(capsys) == said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_without_permission_is_refused(copied, tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert train("--num-clients", 5, "--quiet", "--out", tmp_path / "locked" / "run") == 2
    assert "Permission denied" in refusal(capsys)


class Full:
    """An os.fsync for a disk on which there is no room for the k-th file and those after it."""

    def __init__(self, k: int):
        self.k, self.calls = k, 0

    def __call__(self, number):
        self.calls += 1
        if self.calls > self.k:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("k", [0, 1, 2, 41, 90])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(k, whole, tmp_path, capsys, monkeypatch):
    file, out = tmp_path / "tiny.toml", tmp_path / "run"
    file.write_text(tiny().to_toml())
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", Full(k))
        assert train("--config", file, "--quiet", "--out", out) == 2
    said = refusal(capsys, begun=k > 1)
    assert said.startswith(f"cannot write {out}")
    remedy = "free some space, or name a folder on another disk"
    assert said.endswith(f"(No space left on device); what was written before is whole; {remedy}")
    assert out.exists() == (k > 1)  # the first two are for config.toml and its name
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []
    assert train("--config", file, "--quiet", "--out", out, "--resume") == 0
    ended_alike(out, whole)


# Engines


def test_the_number_of_workers_changes_nothing(whole, tmp_path):
    run(tiny(out=tmp_path / "run", workers=3))
    ended_alike(tmp_path / "run", whole)


def test_engines_other_than_the_batched_one_change_nothing_but_their_name(tmp_path):
    engines = ({"engine": "sequential"}, {"engine": "threads", "workers": 3}, {"engine": "processes", "workers": 2})
    reference, *others = (contents(run(tiny(out=tmp_path / name["engine"], **name)).folder) for name in engines)
    for other in others:
        assert {name for name in reference if reference[name] != other[name]} == {
            "config.toml",
            "report.html",
            "checksums.txt",
        }


def test_a_run_is_not_resumed_on_an_engine_that_rounds_otherwise(copied):
    with pytest.raises(ValueError, match="engine was 'auto' and is now 'sequential'; set it back"):
        run(tiny(out=copied, resume=True, engine="sequential"))


# Several seeds


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> Path:
    """The folder of two seeds that nothing happened to."""
    folder = tmp_path_factory.mktemp("seeds") / "runs"
    experiment.sweep(tiny(seeds=(0, 1), out=folder, epochs=2))
    return folder


@pytest.mark.parametrize("k", [1, 8])
def test_several_seeds_stopped_in_any_of_them_end_alike(k, seeds, tmp_path, capsys):
    config = tiny(seeds=(0, 1), out=tmp_path / "runs", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        experiment.sweep(config, on_epoch=Stop(k))
    file = tmp_path / "seeds.toml"
    file.write_text(config.to_toml())
    assert train("--config", file, "--quiet", "--resume", "--out", tmp_path / "runs") == 0
    assert contents(tmp_path / "runs") == contents(seeds)
    assert load(tmp_path / "runs" / "config.toml").seeds == (0, 1)


def test_other_seeds_are_a_change(seeds, tmp_path):
    folder = Path(shutil.copytree(seeds, tmp_path / "runs"))
    before = touched(folder)
    with pytest.raises(ValueError, match=r"seeds was \[0, 1\] and is now \[0, 1, 2\]"):
        experiment.sweep(tiny(seeds=(0, 1, 2), out=folder, epochs=2, resume=True))
    with pytest.raises(ValueError, match=r"seeds was \[0, 1\] and is now not set"):
        run(tiny(out=folder, epochs=2, resume=True))
    assert touched(folder) == before
