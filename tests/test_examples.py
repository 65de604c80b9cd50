"""What a user runs first: every example, benchmark and table, once."""

import functools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import timm
import torch

import hetperm
import submodels
from hetperm import Config
from submodels import Budget

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch, capsys):
    """(script, words) -> what it prints; it must end well. In this process: it has imported torch already.

    Settings take the place of those in the script, so that it trains for less long.
    """

    def run(script: str, *words: str, **shorter: int) -> str:
        monkeypatch.setattr(sys, "argv", [script, *words])
        monkeypatch.setattr(hetperm, "Config", lambda **options: Config(**options | shorter))
        monkeypatch.chdir(ROOT)
        with torch.random.fork_rng(devices=[]):
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as end:
                assert not end.code
        plt.close("all")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_example_that_slices_a_model_cuts_it_to_a_budget_and_proves_it(run, monkeypatch):
    """With a quarter of the blocks, and of the memory that they take."""
    monkeypatch.setattr(timm, "create_model", functools.partial(timm.create_model, depth=3))
    monkeypatch.setattr(submodels, "Budget", lambda train_mb: Budget(train_mb=train_mb / 4))
    out = run("examples/slice_your_model.py")
    assert "heads kept in block 0: 1 of 3" in out
    assert out.splitlines()[-1].endswith("True")


@pytest.mark.slow
def test_the_example_that_federates_widths_prints_a_table_and_draws_a_picture(run, tmp_path):
    out = run("examples/federate_widths.py", "--rounds", "1", "--out", str(tmp_path / "widths.png"))
    assert all(name in out for name in ("static", "rolling", "random", "0.0625"))
    assert (tmp_path / "widths.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_example_that_brings_its_own_model_finds_the_homes_that_are_alike(run):
    out = run("examples/fit_your_own.py", steps=200)
    errors = {name: float(figure) for name, figure in re.findall(r"^  (\w+) +(0\.\d+)$", out, flags=re.M)}
    assert errors["perm"] < 0.9 * errors["local"] < 0.9 * errors["fedavg"]
    partners = re.findall(r"^home +(\d+) gives .+ learns from (.+)$", out, flags=re.M)
    assert len(partners) == 12
    assert all((int(i) - int(j)) % 2 == 0 for i, others in partners for j in others.split(", "))
    assert "home 11 will need 0." in out.splitlines()[-1]


@pytest.mark.slow
def test_the_example_with_dict_batches_trains_a_transformer_at_three_widths(run):
    out = run("examples/fit_text.py", steps=150)
    perm, _ = map(float, re.search(r"^accuracy: perm (\S+), local (\S+)$", out, flags=re.M).groups())
    assert perm > 0.5
    sizes = [int(n.replace(",", "")) for n in re.findall(r"^width .* ([\d,]+) parameters", out, flags=re.M)]
    assert len(sizes) == 3 and sizes[0] > 2 * sizes[1] > 4 * sizes[2]


@pytest.mark.slow
def test_the_example_that_outlines_shapes_trains_a_unet_with_dice(run):
    out = run("examples/fit_shapes.py")
    perm, fedavg = map(float, re.search(r"^Dice: perm (\S+), fedavg (\S+)$", out, flags=re.M).groups())
    assert perm > 0.5 and perm > fedavg
    assert len(re.findall(r"^width ", out, flags=re.M)) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is read from /proc")
def test_the_example_with_shards_twenty_times_the_memory_allowed_trains(run):
    out = run("examples/fit_larger_than_memory.py", "--mb", "40", steps=100)
    assert "800 scans of 1 MB are 800 MB, and training was allowed 40 MB" in out
    assert float(re.search(r"kept in memory: (\d+) MB", out)[1]) <= 8
    assert float(re.search(r"accuracy (\S+)", out)[1]) > 0.9


@pytest.mark.slow
def test_the_extraction_benchmark_prints_ratios_and_writes_them(run, tmp_path, warm, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: warm.run(*command[1:]))
    out = run("bench/extraction.py", "--clients", "2", "--rounds", "1", "--out", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["extraction"].keys() == {"static", "rolling", "random"}
    assert all(row["ratio"] > 0 for row in figures["extraction"].values())
    assert "peak memory of the process with 2 clients" in out


def test_the_benchmark_of_weights_and_schedules_prints_what_they_take(run):
    out = run("bench/mixing.py", "--clients", "20", "--partners", "5", "--runs", "1")
    assert "100 visits, 5 rounds" in out  # four groups of five
    assert "400 visits, 20 rounds" in out


def test_the_benchmark_of_capacity_compares_probe_and_masks(run):
    words = ["--num-clients", "5", "--partitions", "label-shift:2", "--seeds", "3", "--rounds", "1"]
    lines = run("bench/capacity.py", *words).splitlines()
    assert [line.split()[:6] for line in lines if "AUC" in line] == [
        ["seed", "3", "label-shift:2", "round", done, kind] for done in "01" for kind in ("probe", "masked")
    ]
    assert sum("VC weight" in line for line in lines) == 3


@pytest.mark.slow
def test_the_coverage_of_one_model_is_one_exact_row(run, tmp_path):
    out = run("submodels/coverage.py", "torchvision:squeezenet1_1", "--out", str(tmp_path))
    (row,) = [line for line in out.splitlines() if "squeezenet1_1" in line]
    assert "failed" not in row
    assert "| yes |" in row
    assert not list(tmp_path.iterdir())  # single models are looked at, not recorded


def test_coverage_goes_on_where_it_stopped(tmp_path):
    from submodels import coverage

    good = coverage.Row("timm:a", "timm:x", share=0.3, forward=0.0, gradient=0.0, round_trip=True)
    lines = [json.dumps(vars(good)), json.dumps(vars(coverage.Row("timm:b", error="boom"))), '{"family": "tim']
    store = tmp_path / "coverage.jsonl"
    store.write_text("\n".join(lines))
    assert coverage.load(store) == {"timm:a": good}  # the one that crashed and the torn line are tried again
    assert good.covered
