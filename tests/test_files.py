"""Run folders: which one a run gets, and that every file in it is whole."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hetperm.runs import files

ROOT = Path(__file__).resolve().parent.parent


def test_a_folder_that_exists_is_refused_and_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match=r"exists; name another folder with --out$"):
        files.run_folder(tmp_path, "")
    (tmp_path / "config.toml").touch()  # a run's
    with pytest.raises(FileExistsError, match=r"exists; name another folder with --out, or go on with that run by"):
        files.run_folder(tmp_path, "")
    assert files.run_folder(None, "mine").as_posix() == "runs/mine"
    files.create(files.run_folder(None, "mine"))
    assert files.create(files.run_folder(None, "mine")).as_posix() == "runs/mine-2"
    with pytest.raises(FileExistsError, match="runs/mine exists"):
        files.create(files.RUNS / "mine")


def test_a_run_is_resumed_where_it_is_or_begun_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.run_folder(None, "mine", resume=True).as_posix() == "runs/mine"
    for _ in range(2):
        files.create(files.run_folder(None, "mine"))
    assert files.run_folder(None, "mine", resume=True).as_posix() == "runs/mine-2"
    assert files.run_folder(tmp_path / "new", "", resume=True) == tmp_path / "new"
    with pytest.raises(FileExistsError, match="exists and holds no run to resume"):
        files.run_folder(tmp_path, "", resume=True)
    files.write(tmp_path / "config.toml", "")
    assert files.run_folder(tmp_path, "", resume=True) == tmp_path


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make the folder .*file/run \(.+\); name another with --out"):
        files.create(tmp_path / "file" / "run")


def test_a_file_is_there_whole_or_as_it_was(tmp_path):
    path = tmp_path / "x.txt"
    files.write(path, "old")

    def fails(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        OSError, match=r"cannot write .*x\.txt \(No space left on device\); what was written before is whole"
    ):
        files.write(path, fails)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]


def test_json_has_null_where_there_is_no_number(tmp_path):
    files.write_json(tmp_path / "x.json", {"a": math.nan, "b": [math.inf, 1], "c": {"d": None, "e": "±"}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1], "c": {"d": None, "e": "±"}}


def test_csv_has_the_columns_of_all_rows_and_leaves_out_what_is_not_there(tmp_path):
    files.write_csv(tmp_path / "x.csv", [{"a": 1, "b": math.nan}, {"a": 0.1, "c": "x"}])
    assert (tmp_path / "x.csv").read_text() == "a,b,c\n1,,\n0.1,,x\n"


def test_a_sparse_alpha_is_written_sparse(tmp_path):
    from scipy import sparse

    alpha = np.diag([1.0, 0.5, 1.0]) + np.diag([0.0, 0.5], 1)
    files.write_alpha(tmp_path, alpha)
    assert np.array_equal(np.load(tmp_path / "alpha.npy"), alpha)
    files.write_alpha(tmp_path, sparse.csr_array(alpha))
    assert np.array_equal(sparse.load_npz(tmp_path / "alpha.npz").toarray(), alpha)


def test_a_worker_that_outlives_its_run_holds_no_folder(tmp_path):
    program = (
        "import os, sys, time; from pathlib import Path; from hetperm.runs import files\n"
        "with files.locked(Path(sys.argv[1])):\n"
        "    if os.fork() == 0: print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, cwd=ROOT) as run_of_it:
        worker = int(run_of_it.stdout.readline())
        try:
            with pytest.raises(FileExistsError), files.locked(tmp_path):
                pass
            run_of_it.kill()
            run_of_it.wait()
            with files.locked(tmp_path):
                os.kill(worker, 0)  # still there
        finally:
            os.kill(worker, signal.SIGKILL)
