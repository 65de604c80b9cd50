"""Run folders: which one a run gets, and that every file in it is whole."""

import errno
import json
import math
import os
import signal
import stat
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


def test_a_tilde_is_the_home_of_the_user_and_no_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files.run_folder(Path("~/runs/mine"), "") == tmp_path / "runs" / "mine"
    assert files.run_folder(Path("~nobody-of-that-name/x"), "") == Path("~nobody-of-that-name/x")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make the folder .*file/run \(.+\); name another with --out"):
        files.create(tmp_path / "file" / "run")


def test_a_folder_that_cannot_be_made_is_refused_before_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot make the folder .*run \(Not a directory\); name another with --out"):
        files.run_folder(tmp_path / "file" / "deep" / "run", "")
    assert files.run_folder(tmp_path / "deep" / "run", "") == tmp_path / "deep" / "run"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(OSError, match=r"cannot make the folder .*run \(Permission denied\); name another with --out"):
        files.run_folder(tmp_path / "deep" / "run", "")
    with pytest.raises(OSError, match=rf"^{tmp_path} cannot be written to \(no permission, or read-only\); name"):
        files.check_place(tmp_path)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EFBIG, "; allow larger files (ulimit -f); what"), (errno.EROFS, "; mount it for writing, or name another")],
)
def test_a_file_that_cannot_be_written_comes_with_a_remedy(number, remedy, tmp_path):
    assert remedy in str(files._unwritable(tmp_path / "x", OSError(number, os.strerror(number))))


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


# What is ours


def test_only_files_that_a_run_left_incomplete_are_removed(tmp_path):
    (tmp_path / "models").mkdir()
    ours = [tmp_path / ".summary.json.0123abcd.hetperm-part", tmp_path / "models" / ".x.00000000.hetperm-part"]
    others = [tmp_path / name for name in (".notes.2024", ".x.12345", ".hetperm-part", "x.0123abcd.hetperm-part")]
    for path in (*ours, *others):
        path.write_text("half")
    files.tidy(tmp_path)
    assert [path.exists() for path in (*ours, *others)] == [False] * 2 + [True] * 4


def test_a_folder_with_notes_in_it_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / ".notes.2024").write_text("mine")
    with pytest.raises(FileExistsError, match="exists and holds no run to resume"):
        files.run_folder(tmp_path, "", resume=True)
    assert (tmp_path / ".notes.2024").read_text() == "mine"


def test_what_a_killed_write_leaves_is_known_as_such_and_cannot_be_foreseen(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(os, "replace", lambda fresh, path: names.append(fresh))
    for _ in range(2):
        files.write(tmp_path / "x.json", "{}")
    assert names[0] != names[1]
    for name in names:
        name.write_text("{")
    files.tidy(tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_file_is_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(files.secrets, "token_hex", lambda size: "0" * 8)  # somebody has guessed it
    (tmp_path / "theirs").write_text("old")
    (tmp_path / ".x.00000000.hetperm-part").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=r"cannot write .*x \(File exists\)"):
        files.write(tmp_path / "x", "new")
    (tmp_path / "y").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match=r"cannot write .*y \("):
        files.write_at(tmp_path / "y", 0, b"new")
    assert (tmp_path / "theirs").read_text() == "old"


def test_files_are_readable_as_the_user_has_it(tmp_path):
    before = os.umask(0o022)
    try:
        files.write(tmp_path / "x", "new")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_a_rename_is_on_disk_before_the_next_step(tmp_path, monkeypatch):
    calls, replace, fsync = [], os.replace, os.fsync

    def synced(handle):
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("rename") or replace(*paths))
    files.write(tmp_path / "x", "new")
    assert calls == ["file", "rename", "folder"]


def test_a_system_that_cannot_sync_folders_writes_all_the_same(tmp_path, monkeypatch):
    opened, fsync = os.open, os.fsync

    def no_folders(path, *args):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return opened(path, *args)

    def invalid(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")
        fsync(handle)

    for call, fake in (("open", no_folders), ("fsync", invalid)):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fake)
            files.write(tmp_path / call, "new")
        assert (tmp_path / call).read_text() == "new"


# Numbers of runs


def test_the_latest_run_of_a_name_has_the_highest_number_also_where_others_are_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine-2", "mine-12", "mine-x", "mine-2024", "mine-03", "other-40", "mine-2.old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert files.run_folder(None, "mine", resume=True).as_posix() == "runs/mine-12"
    assert files.run_folder(None, "mine").as_posix() == "runs/mine-13"
    assert files.run_folder(None, "other").as_posix() == "runs/other-41"
    assert files.run_folder(None, "third", resume=True).as_posix() == "runs/third"


def test_a_name_that_another_run_took_meanwhile_gets_the_next_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = files.run_folder(None, "mine")
    files.create(first)
    chosen = iter([first, first.with_name("mine-2")])
    monkeypatch.setattr(files, "run_folder", lambda *args, **options: next(chosen))
    assert files.claim(None, "mine").as_posix() == "runs/mine-2"
    monkeypatch.setattr(files, "run_folder", lambda *args, **options: first)
    with pytest.raises(FileExistsError):  # and not for ever
        files.claim(None, "mine")


# Tables that grow


def test_a_table_that_grows_is_the_table_written_at_once(tmp_path, monkeypatch):
    rows = [
        {"epoch": r, **({"accuracy": r / 3} if r % 2 else {}), **({"tail": "é"} if r > 5 else {})} for r in range(9)
    ]
    whole, write = [], files.write
    monkeypatch.setattr(files, "write", lambda *args: whole.append(args) or write(*args))
    table = files.GrowingCsv(tmp_path / "grown.csv")
    for count in range(1, len(rows) + 1):
        table.update(rows[:count])
        files.write_csv(tmp_path / "whole.csv", rows[:count])
        assert (tmp_path / "grown.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert len([path for path, _ in whole if path.name == "grown.csv"]) == 3  # the first row, and those with news
    (tmp_path / "grown.csv").write_text("somebody else")
    table.update([*rows, {"epoch": 9}])
    assert (tmp_path / "grown.csv").read_text().splitlines()[-2:] == ["8,,é", "9,,"]


OF_EVERY_RUN = ("config.toml", "summary.json", "clients.csv", "metrics.csv", "report.html")


def test_a_run_is_whole_if_no_file_of_it_was_changed_lost_or_added(tmp_path):
    (tmp_path / "models").mkdir()
    contents = dict.fromkeys((*OF_EVERY_RUN, "timing.json"), "{}") | {"models/client_000.safetensors": "weights"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    assert not files.is_whole(tmp_path)  # it has no checksums yet
    files.write_checksums(tmp_path)
    assert files.is_whole(tmp_path)
    for name in ("summary.json", "models/client_000.safetensors"):
        (tmp_path / name).write_text("other")
        assert not files.is_whole(tmp_path)
        (tmp_path / name).unlink()
        assert not files.is_whole(tmp_path)
        (tmp_path / name).write_text(contents[name])
        assert files.is_whole(tmp_path)
    (tmp_path / "timing.json").write_text('{"seconds": 2}')  # equal runs may take other times
    (tmp_path / "notes.txt").write_text("of the user")
    assert files.is_whole(tmp_path)
    (tmp_path / "coverage.csv").write_text("epoch")
    assert not files.is_whole(tmp_path)
    (tmp_path / "coverage.csv").unlink()
    for name in OF_EVERY_RUN:
        (tmp_path / name).unlink()
        files.write_checksums(tmp_path)  # which do not name it then
        assert not files.is_whole(tmp_path)
        (tmp_path / name).write_text(contents[name])
        files.write_checksums(tmp_path)
    (tmp_path / "timing.json").write_text("[" * 100_000)
    assert not files.is_whole(tmp_path)
    (tmp_path / "timing.json").unlink()
    assert not files.is_whole(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    for name in OF_EVERY_RUN:
        (tmp_path / name).write_text("")
    files.write_checksums(tmp_path)
    os.mkfifo(tmp_path / "timing.json")
    assert not files.is_whole(tmp_path)


def test_a_folder_inside_that_of_a_run_is_made_only_if_the_runs_own_is_there(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError, match="its folder was removed or moved while it was written to"):
        files.subfolder(run, "models")
    assert not run.exists()
    run.mkdir()
    for _ in range(2):
        assert files.subfolder(run, "models") == run / "models" and (run / "models").is_dir()
    (run / "checkpoint").symlink_to(tmp_path)
    with pytest.raises(OSError, match="is a symbolic link and a run writes only inside its own folder"):
        files.subfolder(run, "checkpoint")


def test_files_synced_together_are_all_on_disk_at_the_end_and_not_before(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    with files.synced_together():
        for name in ("a", "b"):
            files.write(tmp_path / name, name)
        assert synced == [] and (tmp_path / "b").read_text() == "b"
    assert synced == [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path)]
    files.write(tmp_path / "c", "c")
    assert len(synced) == 5
