"""Runs give the same bytes as by the code of an earlier commit, on the same machine (`same_bytes.py` compares more)."""

import io
import subprocess
import tarfile

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


@pytest.mark.slow
def test_runs_give_the_same_bytes_as_before(before, tmp_path, warm):
    cases = {name: same_bytes.CASES[name] | SMALL for name in CASES}
    same_bytes.run_cases(before, cases, tmp_path / "before")
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
