"""The run folder: every file is written under another name and then renamed, so that none is ever incomplete."""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from hetperm.report.contents import is_blank

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUNS = Path("runs")


def run_folder(out: Path | None, name: str, *, resume: bool = False) -> Path:
    """The folder of a run: ``out`` if given, else one in runs/.

    A new run takes the first of runs/NAME, runs/NAME-2, ... that does not exist. With ``resume`` it is the last of
    these that exists, or a new one if there is none.
    """
    if out is not None:
        if not resume and (out.exists() or out.is_symlink()):
            go_on = ", or go on with that run by --resume" if (out / "config.toml").exists() else ""
            raise FileExistsError(f"{out} exists; name another folder with --out{go_on}")
        if resume and out.exists() and not (out / "config.toml").exists() and not _blank(out):
            raise FileExistsError(f"{out} exists and holds no run to resume; name another folder with --out")
        return out
    folder, latest, k = RUNS / name, None, 1
    while folder.exists():
        latest, k = folder, k + 1
        folder = RUNS / f"{name}-{k}"
    return latest if resume and latest else folder


def create(folder: Path, *, resume: bool = False) -> Path:
    """Make the folder; raise an error if it cannot be made or already exists.

    With ``resume`` an empty folder is accepted: the run may have been killed before it wrote anything.
    """
    if resume and _blank(folder):
        tidy(folder)
        return folder
    try:
        # No exist_ok: of two runs that chose the same name, the second must notice.
        folder.mkdir(parents=True)
    except FileExistsError:
        raise FileExistsError(f"{folder} exists; name another folder with --out, or remove it") from None
    except OSError as error:
        raise OSError(f"cannot make the folder {folder} ({error.strerror}); name another with --out") from error
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which no other run can write to the folder; an error if another run already does.

    The lock ends with the process. On a system without such locks other runs are not kept out.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    _OPEN.add(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _close(handle)
        raise FileExistsError(
            f"another run is writing to {folder}; wait until it has ended, or name another folder with --out"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)
        _close(handle)


_OPEN: set[int] = set()  # handles of the folders that this process has locked


def _close(handle: int) -> None:
    _OPEN.discard(handle)
    os.close(handle)


def _close_all() -> None:
    for handle in list(_OPEN):
        _close(handle)


# A forked worker inherits the lock. If its run is killed, the worker must not block the run that resumes it.
if fcntl is not None:
    os.register_at_fork(after_in_child=_close_all)


def tidy(folder: Path) -> None:
    """Remove the incomplete files of a run that was killed."""
    for path in folder.rglob(".*"):
        if _half_written(path):
            path.unlink(missing_ok=True)


def _blank(folder: Path) -> bool:
    return folder.is_dir() and all([_half_written(path) for path in folder.iterdir()])


def _half_written(path: Path) -> bool:
    """Whether a file has the name that `write` gives it until it is complete."""
    return re.fullmatch(r"\..+\.\d+", path.name) is not None and path.is_file()


def write(path: Path, fill: Callable[[IO[bytes]], object] | bytes | str) -> None:
    """Write a file completely, or leave the old one as it was.

    Args:
        path: the file.
        fill: the content, or a function that writes the content to a binary file.
    """
    # In the same folder, because renaming is atomic only within a file system. With the process id, because two
    # processes may write at once.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    content = fill.encode() if isinstance(fill, str) else fill
    try:
        with open(fresh, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())  # on disk before the rename: a power cut must not leave an empty file
        os.replace(fresh, path)
    except OSError as error:
        raise OSError(f"cannot write {path} ({error.strerror}); what was written before is whole") from error
    finally:
        # After the rename the name is gone; after an error this removes the incomplete file.
        fresh.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content as JSON, with null for nan and infinities."""
    write(path, json.dumps(_strict(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per row; the columns are the keys of all rows, empty where a row has no value."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: "" if is_blank(value) else value for key, value in row.items()} for row in rows)
    write(path, text.getvalue())


def write_alpha(folder: Path, alpha: Any) -> None:
    """Write the (N, N) mixing weights: a numpy array to alpha.npy, a sparse array of scipy to alpha.npz."""
    if isinstance(alpha, np.ndarray):
        write(folder / "alpha.npy", lambda file: np.save(file, alpha))
        return
    from scipy import sparse  # slow to import, and rarely needed

    write(folder / "alpha.npz", lambda file: sparse.save_npz(file, alpha))


def _strict(value: Any) -> Any:
    """The value with None in place of numbers that JSON cannot write: nan and infinities."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_strict(item) for item in value]
    return None if is_blank(value) else value
