"""What a user runs first: every example, benchmark and table, once, as a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, folder: Path = ROOT) -> str:
    """What a command prints; it must end well."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_that_slices_a_model_cuts_it_to_a_budget_and_proves_it():
    out = run("examples/slice_your_model.py")
    assert "heads kept in block 0: 1 of 3" in out
    assert out.splitlines()[-1].endswith("True")


@pytest.mark.slow
def test_the_example_that_federates_widths_prints_a_table_and_draws_a_picture(tmp_path):
    out = run("examples/federate_widths.py", "--rounds", "1", "--out", str(tmp_path / "widths.png"))
    assert all(name in out for name in ("static", "rolling", "random", "0.0625"))
    assert (tmp_path / "widths.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_example_that_brings_its_own_model_finds_the_homes_that_are_alike():
    out = run("examples/fit_your_own.py")
    errors = {name: float(figure) for name, figure in re.findall(r"^  (\w+) +(0\.\d+)$", out, flags=re.M)}
    assert errors["perm"] < 0.9 * errors["local"] < 0.9 * errors["fedavg"]
    partners = re.findall(r"^home +(\d+) gives .+ learns from (.+)$", out, flags=re.M)
    assert len(partners) == 12
    assert all((int(i) - int(j)) % 2 == 0 for i, others in partners for j in others.split(", "))
    assert "home 11 will need 0." in out.splitlines()[-1]


@pytest.mark.slow
def test_the_extraction_benchmark_prints_ratios_and_writes_them(tmp_path):
    out = run("bench/extraction.py", "--clients", "5", "--rounds", "1", "--out", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["extraction"].keys() == {"static", "rolling", "random"}
    assert all(row["ratio"] > 0 for row in figures["extraction"].values())
    assert "peak memory" in out


@pytest.mark.slow
def test_the_coverage_of_one_model_is_one_exact_row(tmp_path):
    out = run("-m", "submodels.coverage", "torchvision:squeezenet1_1", "--out", str(tmp_path))
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
