"""The command line: help at once, one line for what is wrong, and the scripts end to end."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hetperm.cli import main as cli
from hetperm.config import ALGORITHMS, SHIPPED, Config, load
from hetperm.methods import check
from hetperm.runs.reproduce import EXPERIMENTS, combinations, grid

ROOT = Path(__file__).resolve().parent.parent
TINY = "--num-clients 4 --samples-per-client 20 --epochs 2 --local-steps 2 --warmup-rounds 1".split()


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd or ROOT, env=env)


# Flags


def test_flags_are_the_fields_with_dashes():
    words = "--local-steps 3 --baselines local,apfl --seeds 0 1 2 --regularization 0.5 --quiet"
    config = cli.parse_train(words.split())
    changes = {"local_steps": 3, "baselines": ("local", "apfl"), "seeds": (0, 1, 2), "regularization": 0.5}
    assert config == load("digits").override(quiet=True, **changes)


@pytest.mark.parametrize("words", [["--config", "synthetic"], ["--config=synthetic"]])
def test_a_file_is_read_first_and_flags_win(words):
    config = cli.parse_train(["--epochs", "3", *words])
    assert config == load("synthetic").override(epochs=3)


def test_another_model_does_not_get_the_options_of_the_one_in_the_file():
    assert cli.parse_train("--config synthetic --model mlp".split()).model_options == {}
    assert cli.parse_train("--config synthetic --model logistic".split()).model_options == {"bias": False}


def test_an_empty_list_of_baselines_means_none():
    assert cli.parse_train(["--baselines", ""]).baselines == ()


WRONG = [
    ("--epoch 3", "unknown flag --epoch; did you mean --epochs?"),
    ("--zzz", "unknown flag --zzz; see --help"),
    ("--epochs x", "--epochs: 'x' is not a whole number; see --help"),
    ("--personal-lr x", "--personal-lr: 'x' is not a number; see --help"),
    ("--epochs", "--epochs: the value is missing; see --help"),
    ("--epochs 0", "epochs is 0; it must be a whole number of at least 1"),
    ("--schedule rng", "--schedule: 'rng' is not one of 'colour', 'ring'; did you mean 'ring'?"),
    ("--schedule x", "--schedule: 'x' is not one of 'colour', 'ring'; see --help"),
    (
        "--regularization 0",
        "regularization is 0.0; it must be 'noise', 'level' or a number above 0, the paper's lambda",
    ),
    ("--regularization foo", "--regularization: 'foo' is not one of FLOAT|{noise,level}; see --help"),
    ("--seeds 0 a", "--seeds: '0', 'a' cannot be read; see --help"),
    ("--baselines locl", "unknown algorithm 'locl'; did you mean 'local'?"),
    ("--algorithm prem", "unknown algorithm 'prem'; did you mean 'perm'?"),
    (
        "--config nope",
        "there is no configuration 'nope'; give a TOML file, or one of cifar10, digits, mnist, mnist-iid, "
        "mnist-label-shift, paper-faithful, synthetic",
    ),
    ("something", "not understood: something; see --help"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[words for words, _ in WRONG])
def test_a_bad_flag_is_one_line_and_status_2(words, sentence, capsys):
    assert cli.guarded(cli.train, words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"error: {sentence}\n")


def test_running_out_of_memory_is_one_line_and_status_2(capsys):
    def greedy(args):
        raise MemoryError

    assert cli.guarded(greedy, []) == 2
    limits = "if it is limited here (see ulimit -d and ulimit -v), raise the limit"
    assert capsys.readouterr().err == f"error: out of memory; {limits}\n"


def test_an_unknown_command_or_experiment_is_one_line_and_status_2(capsys):
    for words in (["trian"], ["reproduce", "synthetc"], ["reproduce"], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == (2 if words[-1] in ("trian", "synthetc") else 0)
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "error: unknown command 'trian'; did you mean 'train'?",
        f"error: unknown experiment 'synthetc'; known are {', '.join(EXPERIMENTS)}",
    ]


def test_an_experiment_is_named_and_takes_no_other_configuration(capsys):
    assert cli.guarded(cli.reproduce, ["synthetic", "--config", "digits"]) == 2
    said = "error: an experiment has the configuration of its name; leave --config out, flags can change it\n"
    assert capsys.readouterr().err == said


# Progress


def test_a_resumed_run_counts_the_epochs_of_before():
    bar = cli.Bar("perm", total=12)
    for method, epoch in [
        ("perm", 3),
        ("local", 2),
        ("local", 3),
        ("perm", 3),
        ("local", 1),
        ("local", 2),
        ("local", 3),
    ]:
        bar(method, {"epoch": epoch, "accuracy_mean": 0.5})
    (task,) = bar._bar.tasks
    assert (task.completed, task.total, task.description) == (12, 12, "local 0.500")
    bar.stop()


def test_a_bar_appears_only_once_there_is_something_to_show(capsys):
    with cli.progress(["perm"], epochs=3, runs=1, quiet=False):
        pass
    assert capsys.readouterr() == ("", "")


# Whole commands


@pytest.mark.parametrize("script", ["train_hetero.py", "reproduce.py"])
def test_help_comes_at_once(script):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = command(f"scripts/{script}", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5
    assert "hetperm" in done.stdout


def test_help_lists_every_field_that_has_a_flag():
    shown = command("scripts/train_hetero.py", "--help").stdout
    flags = [f"--{name.replace('_', '-')}" for name in vars(Config()) if name not in ("model_options", "rivals")]
    assert [flag for flag in flags if not re.search(rf"{flag}[ ,]", shown)] == []


@pytest.mark.slow
def test_training_writes_a_folder_and_prints_a_table(tmp_path):
    out = tmp_path / "run"
    done = command("scripts/train_hetero.py", *TINY, "--out", str(out), "--baselines", "local")
    assert done.returncode == 0, done.stderr
    for word in ("perm", "local", "same-group mass", "visits in", "rounds an epoch", f"written to {out}"):
        assert word in done.stdout
    for word in ("digits label-shift:2; zoo:mlp with 55,210 parameters", "capacity profile mobile", "accuracy by tier"):
        assert word in done.stdout
    assert "tier flagship of profile mobile has none of the 4 clients" in done.stderr
    assert json.loads((out / "summary.json").read_text())["baselines"].keys() == {"local"}

    again = command("-m", "hetperm", "train", "--config", str(out / "config.toml"), "--out", str(out), "--quiet")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert again.stderr == f"error: {out} exists; name another folder with --out, or go on with that run by --resume\n"

    other = tmp_path / "again"
    again = command("-m", "hetperm", "train", "--config", str(out / "config.toml"), "--out", str(other), "--quiet")
    assert (again.returncode, again.stderr.count("\n")) == (0, 3)  # tiers without clients, and what nobody trains
    names = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    timed = [path for path in names if path.name == "timing.json" or path.parent.name == "checkpoint"]
    assert {"timing.json", "perm.safetensors", "local.safetensors"} == {path.name for path in timed}
    for path in set(names) - set(timed):
        assert (other / path).read_bytes() == (out / path).read_bytes(), path


@pytest.mark.slow
def test_numbers_that_go_non_finite_stop_a_run_with_one_line(tmp_path):
    out = tmp_path / "run"
    profile = ["--capacity-profile", "homogeneous"]
    done = command("scripts/train_hetero.py", *TINY, *profile, "--out", str(out), "--personal-lr", "1e9", "--quiet")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: perm: epoch 0: model ")
    assert "at host" in done.stderr
    assert load(out / "config.toml").personal_lr == 1e9
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint", "config.toml", "profile.csv"]
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["perm.safetensors"]


@pytest.mark.slow
def test_the_paper_experiment_is_reproduced_with_figure_and_tables(tmp_path):
    out = tmp_path / "all"
    done = command("scripts/reproduce.py", "synthetic", *TINY, "--seeds", "0", "1", "--out", str(out), "--quiet")
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").stat().st_size > 10_000
    text = (out / "table.md").read_text()
    assert text.startswith("`python scripts/reproduce.py synthetic --num-clients 4")
    for method in EXPERIMENTS["synthetic"]:
        assert f"| {method} | 0." in text
    assert (out / "table.csv").read_text().startswith("method,accuracy,accuracy_spread,")
    assert (out / "seed-1" / "summary.json").is_file()


def grid_sizes(experiment: str) -> dict[str, int]:
    tables = grid(SHIPPED / "tuning" / f"{experiment}.toml")
    return {method: len(list(combinations(table))) for method, table in tables.items()}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_a_configuration_and_a_grid_that_favours_no_perm(experiment):
    sizes = grid_sizes(experiment)
    assert set(EXPERIMENTS[experiment]) <= set(ALGORITHMS)
    assert set(sizes) == set(EXPERIMENTS[experiment])
    assert max(sizes["perm"], sizes["perm-two-stage"]) == min(sizes.values())
    for method, table in grid(SHIPPED / "tuning" / f"{experiment}.toml").items():
        for choice in combinations(table):
            check(load(experiment).override(rivals={method: choice}))


@pytest.mark.parametrize("experiment", ["synthetic", "digits"])
def test_the_grid_is_as_large_for_every_method(experiment):
    assert len(set(grid_sizes(experiment).values())) == 1


@pytest.mark.slow
def test_tuning_looks_at_validation_data_only_and_writes_what_it_chose(tmp_path):
    out = tmp_path / "tuned"
    words = ["reproduce", "tune", "synthetic", *TINY, "--epochs", "1", "--baselines", "local,ifca", "--out", str(out)]
    done = command("-m", "hetperm", *words, "--quiet")
    assert done.returncode == 0, done.stderr
    chosen = tomllib.loads((out / "chosen.toml").read_text())
    assert chosen.keys() == {"local", "ifca"}
    assert chosen["ifca"].keys() == {"lr", "clusters"}
    rows = (out / "tuning.csv").read_text().splitlines()
    assert len(rows) == 1 + sum(grid_sizes("synthetic")[method] for method in ("perm", "local", "ifca"))
