"""Run folders: which one a run gets, and that every file in it is whole."""

import json
import math

import numpy as np
import pytest

from hetperm.runs import files


def test_a_folder_that_exists_is_refused_and_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match=r"exists; name another folder with --out$"):
        files.place(tmp_path, "")
    (tmp_path / "config.toml").touch()  # a run's
    with pytest.raises(FileExistsError, match=r"exists; name another folder with --out, or go on with that run by"):
        files.place(tmp_path, "")
    assert files.place(None, "mine").as_posix() == "runs/mine"
    files.create(files.place(None, "mine"))
    assert files.create(files.place(None, "mine")).as_posix() == "runs/mine-2"
    with pytest.raises(FileExistsError, match="runs/mine exists"):
        files.create(files.RUNS / "mine")


def test_a_run_is_resumed_where_it_is_or_begun_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert files.place(None, "mine", resume=True).as_posix() == "runs/mine"
    for _ in range(2):
        files.create(files.place(None, "mine"))
    assert files.place(None, "mine", resume=True).as_posix() == "runs/mine-2"
    assert files.place(tmp_path / "new", "", resume=True) == tmp_path / "new"
    with pytest.raises(FileExistsError, match="exists and holds no run to resume"):
        files.place(tmp_path, "", resume=True)
    files.write(tmp_path / "config.toml", "")
    assert files.place(tmp_path, "", resume=True) == tmp_path


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


def test_mean_and_spread_of_summaries_by_hand():
    runs = [{"x": {"y": 1.0}, "n": 5, "s": "a", "none": None}, {"x": {"y": 2.0}, "n": 5, "s": "b", "none": None}]
    mean, spread = files.mean_and_spread(runs)
    assert mean == {"x": {"y": 1.5}, "n": 5, "s": None, "none": None}
    assert spread == {"x": {"y": pytest.approx(math.sqrt(0.5))}, "n": 0.0}
    assert files.mean_and_spread(runs[:1]) == (runs[0], {"x": {}})
