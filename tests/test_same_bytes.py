"""Runs give the same bytes as by the code of an earlier commit, on the same machine (`same_bytes.py` compares more)."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
import same_bytes

# The commit that runs are compared with. Who changes a number on purpose moves this on and says why in CHANGELOG.md.
# Its bytes are those of 9fc3524, the commit before the modules were put into rooms, which needs a package of its own.
SAME_SINCE = "c518d4cacf4335501208341f7efbc8ee3c37ff3e"
# Since it everything has a budget of steps, which counts gradients that were not counted, so tables and rivals differ;
# the models of PERM with the settings of the paper must not.
CASES = ("as-before", "as-before-two-stage", "as-before-random")
FILES = "models/*.safetensors"
SMALL = {"num_clients": 6, "epochs": 2, "warmup_rounds": 2, "samples_per_client": 40}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The files of the earlier commit."""
    archive = subprocess.run(["git", "archive", SAME_SINCE], cwd=same_bytes.ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"commit {SAME_SINCE[:7]} is not in this checkout")
    path = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(path, filter="data")
    return path


def of_checkout(path: Path) -> str:
    """The driver, for a process that has imported this checkout: it forgets it, and imports another."""
    return f"""
import os, sys
for name in [name for name in sys.modules if name.partition(".")[0] in ("hetperm", "submodels")]:
    del sys.modules[name]
os.chdir({str(path)!r})
sys.path.insert(0, {str(path)!r})
{same_bytes.DRIVER}
for name, module in sys.modules.items():
    if name.partition(".")[0] in ("hetperm", "submodels"):
        assert module.__spec__.origin.startswith({str(path)!r}), module
"""


@pytest.mark.slow
def test_runs_give_the_same_bytes_as_before(before, tmp_path, warm):
    cases = {name: same_bytes.CASES[name] | SMALL for name in CASES}
    done = warm.run(same_bytes.jobs(cases, tmp_path / "before"), code=of_checkout(before))
    assert done.returncode == 0, done.stderr
    done = warm.run(same_bytes.jobs(cases, tmp_path / "now"), code=same_bytes.DRIVER)
    assert done.returncode == 0, done.stderr
    differing = {
        name: same_bytes.differences(tmp_path / "before" / name, tmp_path / "now" / name, FILES) for name in CASES
    }
    assert differing == {name: [] for name in CASES}
    assert all([len(list((tmp_path / "now" / name).glob(FILES))) == 6 for name in CASES])


def test_a_file_that_differs_or_is_missing_is_named(tmp_path):
    for side, text in (("before", "1"), ("now", "2")):
        (tmp_path / side / "models").mkdir(parents=True)
        (tmp_path / side / "summary.json").write_text(text)
        (tmp_path / side / "timing.json").write_text(text)
    (tmp_path / "now" / "models" / "client_000.json").write_text("{}")
    assert same_bytes.differences(tmp_path / "before", tmp_path / "now") == ["models/client_000.json", "summary.json"]
    assert same_bytes.differences(tmp_path / "before", tmp_path / "now", "models/*") == ["models/client_000.json"]


def test_cases_are_run_by_the_code_of_the_other_checkout_with_the_settings_that_it_knows(tmp_path):
    (tmp_path / "hetperm").mkdir()
    (tmp_path / "hetperm" / "__init__.py").write_text(
        "def run(settings): open(settings.pop('out'), 'w').write(f'{settings}')"
    )
    (tmp_path / "hetperm" / "config.py").write_text(
        "from types import SimpleNamespace\n"
        "FIELDS = ('step_cap', 'steps')\n"
        "load = lambda name: SimpleNamespace(override=lambda **settings: settings | {'name': name})\n"
    )
    same_bytes.run_cases(tmp_path, {"case": {"steps": 3, "unknown": 1}}, tmp_path)
    assert (tmp_path / "case").read_text() == "{'steps': 3, 'quiet': True, 'name': 'digits'}"
    (tmp_path / "hetperm" / "__init__.py").write_text("def run(settings): raise ValueError('broken')")
    with pytest.raises(RuntimeError, match=r"(?s)did not run all cases:.*broken"):
        same_bytes.run_cases(tmp_path, {"case": {}}, tmp_path)
