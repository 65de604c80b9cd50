"""A tiny run that tests of run folders share, what of its folder is compared, and how it is resumed."""

import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetperm import Config
from hetperm.cli.main import guarded
from hetperm.cli.train import main
from hetperm.runs import output
from submodels import ScalableModel

TINY = {
    "num_clients": 6,
    "capacity_profile": "uniform5",
    "samples_per_client": 30,
    "model_options": {"hidden": [16, 16]},
    "epochs": 3,
    "local_steps": 1,
    "steps": 0,
    "warmup_rounds": 1,
    "share": 0.7,
    "personal_lr": 0.2,
    "global_lr": 0.4,
    "alpha_every": 1,
    "quiet": True,
}
METHODS = ("perm", "local", "heterofl-ft")


def tiny(**changes) -> Config:
    return Config(**TINY | changes)


@contextmanager
def without_what_others_test():
    """A context without pictures, and with each width priced once: they take most of the time of a tiny run."""
    prices, cost = {}, ScalableModel.cost

    def cost_once(scalable, width, *args, **options):
        key = (repr(scalable.model), scalable.sizes, width, args, tuple(options.items()))
        if key not in prices:
            prices[key] = cost(scalable, width, *args, **options)
        return prices[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "draw", lambda result: None)
        patch.setattr(output.pictures, "png", lambda figure: b"a picture")
        patch.setattr(ScalableModel, "cost", cost_once)
        yield


def contents(folder: Path) -> dict[str, bytes]:
    """Path -> bytes of every file, leftovers too, but for those that depend on the clock."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    clock = re.compile(r"(.*/)?(timing\.json|checkpoint/[^/]*\.safetensors)")
    return {name: raw for name, raw in files.items() if not clock.fullmatch(name)}


def touched(folder: Path) -> dict[str, tuple]:
    """Path -> when it was written, of every file and folder."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in [folder, *folder.rglob("*")]}


def ended_alike(folder: Path, whole: Path) -> None:
    """Assert that two folders hold the same, and no file that a killed run left half-written."""
    written, expected = contents(folder), contents(whole)
    assert sorted(written) == sorted(expected)
    assert [name for name in expected if written[name] != expected[name]] == []
    checkpoints = [sorted(path.name for path in (run / "checkpoint").iterdir()) for run in (folder, whole)]
    expected = sorted(f"{method}.{ending}" for method in METHODS for ending in ("safetensors", "jsonl"))
    assert checkpoints[0] == checkpoints[1] == expected


def train(*words: object) -> int:
    """The exit status of hetperm train."""
    return guarded(main, [*map(str, words)])


def again(folder: Path) -> int:
    """The exit status of the same run with --resume."""
    return train("--config", folder / "config.toml", "--resume", "--quiet", "--out", folder)


def refusal(capsys, *, begun: bool = False) -> str:
    """What was said on stderr: one line, and nothing on stdout unless the run had begun."""
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert begun or said.out == ""
    return said.err.removeprefix("error: ").rstrip("\n")
