"""Run folders that lost a file, got one of another run, or went away: noticed, said in one sentence, or mended."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import again, ended_alike, refusal, tiny, touched, train, without_what_others_test

import hetperm
from hetperm import run
from hetperm.runs import checkpoint, files, training


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


# Checkpoints of something else


ENDINGS = ("safetensors", "jsonl")


def exchange(folder: Path, source: Path, method: str = "perm", name: str = "perm", endings=ENDINGS) -> None:
    """Put the checkpoint of a method in the place of that of ``name``."""
    for ending in endings:
        shutil.copy(source / "checkpoint" / f"{method}.{ending}", folder / "checkpoint" / f"{name}.{ending}")


@pytest.mark.parametrize("alone", [True, False], ids=["without its history", "with its history"])
def test_the_checkpoint_of_another_method_is_refused(alone, copied, capsys):
    exchange(copied, copied, "local", "perm", endings=("safetensors",) if alone else ENDINGS)
    before = touched(copied)
    assert again(copied) == 2
    path = copied / "checkpoint" / "perm.safetensors"
    remedy = "remove it to train perm from the start with --resume, or put the right file back"
    assert refusal(capsys) == f"{path} is not of this run: it holds 'local' and not 'perm'; {remedy}"
    assert touched(copied) == before


def test_the_checkpoint_of_a_run_with_other_settings_is_refused(copied, tmp_path, capsys):
    exchange(copied, run(tiny(out=tmp_path / "slow", personal_lr=0.001, baselines=())).folder)
    assert again(copied) == 2
    assert "perm.safetensors is not of this run: personal_lr was 0.001 and is now 0.2; set it back" in refusal(capsys)


def test_the_checkpoint_of_another_version_is_refused(copied, monkeypatch, capsys):
    was = hetperm.__version__
    monkeypatch.setattr(hetperm, "__version__", "9.9")
    assert again(copied) == 2
    assert f"is not of this run: hetperm {was} wrote it and this is 9.9; go on with that version" in refusal(capsys)


def test_a_checkpoint_serves_a_run_with_other_rivals(whole, tmp_path, monkeypatch):
    alone = run(tiny(out=tmp_path / "alone", baselines=())).folder
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").mkdir()
    shutil.copy(whole / "config.toml", tmp_path / "run")
    exchange(tmp_path / "run", alone)
    run(tiny(out=tmp_path / "run", resume=True))
    ended_alike(tmp_path / "run", whole)


FORGERIES = {
    "the number of epochs": lambda saved: replace(saved, state=replace(saved.state, r=9)),
    "whether it is finished": lambda saved: replace(saved, finished=False),
    "the time it took": lambda saved: replace(saved, extra=saved.extra | {"seconds": "long"}),
    "the mixing weights": lambda saved: replace(saved, state=replace(saved.state, alpha=torch.eye(5))),
    "the models": lambda saved: replace(saved, state=replace(saved.state, v=())),
    "the global model": lambda saved: replace(saved, state=replace(saved.state, w={})),
    "the history": lambda saved: replace(saved, history=({},) * len(saved.history)),
    "the scores": lambda saved: replace(saved, extra=saved.extra | {"score": [0.5]}),
}


def whole_numbers(saved: checkpoint.Saved) -> checkpoint.Saved:
    v = tuple({name: x.int() for name, x in model.items()} for model in saved.state.v)
    return replace(saved, state=replace(saved.state, v=v))


def no_tail(saved: checkpoint.Saved) -> checkpoint.Saved:
    return replace(saved, state=replace(saved.state, tail=None))


def no_numbers(saved: checkpoint.Saved) -> checkpoint.Saved:
    w = {name: x * torch.nan for name, x in saved.state.w.items()}
    return replace(saved, state=replace(saved.state, w=w))


def words(saved: checkpoint.Saved) -> checkpoint.Saved:
    return replace(saved, history=tuple(row | {"loss_mean": "x"} for row in saved.history))


def row_with(value: object, name: str) -> Callable[[checkpoint.Saved], checkpoint.Saved]:
    return lambda saved: replace(saved, history=(*saved.history[:-1], saved.history[-1] | {name: value}))


def nobody_scored(saved: checkpoint.Saved) -> checkpoint.Saved:
    return replace(saved, extra=saved.extra | {"score": [math.nan] * len(saved.extra["score"])})


def clock_at(value: object) -> Callable[[checkpoint.Saved], checkpoint.Saved]:
    return lambda saved: replace(saved, extra=saved.extra | {"simulated_seconds": value})


def tail_of(count: int) -> Callable[[checkpoint.Saved], checkpoint.Saved]:
    return lambda saved: replace(saved, state=replace(saved.state, tail_count=count))


OTHERS = {
    "time that runs back": ("the time it took", clock_at(-5.0)),
    "time without a number": ("the time it took", clock_at(math.nan)),
    "time in words": ("the time it took", clock_at("noon")),
    "time that runs back in a row": ("the history", row_with(-5.0, "simulated_seconds")),
    "no time in a row": ("the history", row_with(math.nan, "simulated_seconds")),
    "a truth in a row": ("the history", row_with(True, "visits")),
    "a tail of no epoch": ("the models", tail_of(0)),
    "a tail of more epochs than there were": ("the models", tail_of(9)),
    "no score in a row": ("the history", row_with(math.nan, "accuracy_mean")),
    "no count in a row": ("the history", row_with(math.nan, "visits")),
    "an infinite loss in a row": ("the history", row_with(math.inf, "loss_mean")),
    "a table in a row": ("the history", row_with({"a": 1}, "loss_mean")),
    "no scores": ("the scores", nobody_scored),
    "other numbers": ("the models", whole_numbers),
    "no tail average": ("the models", no_tail),
    "no numbers": ("the global model", no_numbers),
    "words": ("the history", words),
}


@pytest.mark.parametrize(("part", "forge"), [*FORGERIES.items(), *OTHERS.values()], ids=[*FORGERIES, *OTHERS])
def test_a_checkpoint_that_does_not_fit_its_run_is_refused(part, forge, copied, capsys):
    path = copied / "checkpoint" / "perm.safetensors"
    checkpoint.save(path, forge(checkpoint.load(path)))
    assert again(copied) == 2
    remedy = "remove it to train perm from the start with --resume"
    assert refusal(capsys) == f"{path} is not of this run (wrong in it: {part}); {remedy}"


def test_what_a_refusal_advises_can_be_done(copied, whole, capsys):
    path = copied / "checkpoint" / "perm.safetensors"
    path.write_text("damaged")
    assert again(copied) == 2
    assert "remove it to train this method from the start with --resume" in refusal(capsys)
    path.unlink()
    assert again(copied) == 0
    ended_alike(copied, whole)


# Finished, and then damaged


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1])


def unlisted(folder: Path, *names: str) -> None:
    """Remove files, and the lines of the checksums that would show it."""
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    files.write_checksums(folder)


MODEL = ("models/client_003.safetensors", "models/client_003.json")
LOSSES = {
    "models and summary": lambda folder: (shutil.rmtree(folder / "models"), (folder / "summary.json").unlink()),
    "a half summary": lambda folder: (folder / "summary.json").write_text("{"),
    "an empty report": lambda folder: (folder / "report.html").write_text(""),
    "one model": lambda folder: (folder / "models" / "client_003.safetensors").unlink(),
    "a half model": lambda folder: shorten(folder / "models" / "client_003.json"),
    "the devices": lambda folder: (folder / "profile.csv").unlink(),
    "half the devices": lambda folder: shorten(folder / "profile.csv"),
    "the time": lambda folder: (folder / "timing.json").unlink(),
    "half the time": lambda folder: shorten(folder / "timing.json"),
    "the checksums": lambda folder: (folder / "checksums.txt").unlink(),
    "summary and its checksum": lambda folder: unlisted(folder, "summary.json"),
    "the report and its checksum": lambda folder: unlisted(folder, "report.html"),
    "models and their checksums": lambda folder: unlisted(folder, "models"),
    "one model and its checksums": lambda folder: unlisted(folder, *MODEL),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_finished_run_that_lost_a_file_gets_it_again(loss, copied, whole, monkeypatch):
    LOSSES[loss](copied)
    monkeypatch.setattr(training, "states", None)  # nothing is trained
    run(tiny(out=copied, resume=True))
    ended_alike(copied, whole)
    assert json.loads((copied / "timing.json").read_text())["seconds"] > 0
    before = touched(copied)
    run(tiny(out=copied, resume=True))
    assert touched(copied) == before


def test_a_file_of_the_user_is_no_matter_of_the_run(copied):
    (copied / "notes.txt").write_text("mine")
    (copied / ".notes.2024").write_text("mine")
    before = touched(copied)
    run(tiny(out=copied, resume=True))
    assert touched(copied) == before


# Gone while it is written to


@pytest.mark.parametrize("how", ["removed", "moved", "emptied"])
def test_a_folder_that_goes_while_a_run_writes_to_it_is_noticed(how, tmp_path, capsys, monkeypatch):
    file, out, epoch = tmp_path / "tiny.toml", tmp_path / "run", training.algorithm_for
    file.write_text(tiny(baselines=()).to_toml())

    def goes(*args, **options):
        if how == "moved":
            out.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(out)
        if how == "emptied":
            out.mkdir()
        return epoch(*args, **options)

    monkeypatch.setattr(training, "algorithm_for", goes)
    assert train("--config", file, "--quiet", "--out", out) == 2
    said = refusal(capsys, begun=True)
    assert ("was emptied while" if how == "emptied" else "its folder was removed or moved while it was written") in said
    assert out.exists() == (how == "emptied")


@pytest.mark.parametrize("name", ["models", "checkpoint"])
def test_nothing_is_written_where_a_link_leads(name, copied, tmp_path, capsys):
    shutil.rmtree(copied / name)
    (tmp_path / "away").mkdir()
    (copied / name).symlink_to(tmp_path / "away")
    assert again(copied) == 2
    said = f"{copied / name} is a symbolic link and a run writes only inside its own folder; remove the link"
    assert refusal(capsys, begun=True) == said
    assert list((tmp_path / "away").iterdir()) == []
