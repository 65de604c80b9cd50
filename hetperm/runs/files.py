"""The run folder: every file is written under another name and then renamed, so that none is ever incomplete.

Files that grow with a run, its history and its metrics, are written at their end only. What a crash leaves behind that
end is cut off when the run is resumed.
"""

import contextlib
import csv
import errno
import hashlib
import io
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

import numpy as np

from hetperm.report.contents import read_settings
from hetperm.report.summary import is_blank

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

RUNS = Path("runs")
CHECKSUMS = "checksums.txt"
CLOCK = "timing.json"  # depends on the clock, so it has no checksum: equal runs have equal checksums
_OF_EVERY_RUN = {"config.toml", "summary.json", "clients.csv", "metrics.csv", "report.html"}
# Endings of the files in a run's folder.
_RESULTS = {".toml", ".csv", ".json", ".npy", ".npz", ".png", ".html", ".safetensors"}
_PART = ".hetperm-part"  # ends the name of a file until it is complete
# A new file, and no link that somebody else put in its place; Windows has no such links, and needs to be told of bytes.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
_REMEDIES = {
    errno.EISDIR: "remove the folder in its place; ",
    errno.EFBIG: "allow larger files (ulimit -f); ",
    errno.EROFS: "mount it for writing, or name another folder with --out; ",
}
_LATER: ContextVar[list[Path] | None] = ContextVar("files that are written and not yet on disk", default=None)


# The folder


def run_folder(out: Path | None, name: str, *, resume: bool = False) -> Path:
    """The folder of a run: ``out`` if given, else one in runs/.

    The runs of a name are in runs/NAME, runs/NAME-2, ...: a new run takes the number after the highest. With ``resume``
    it is the one of the highest number, or a new one if there is none.
    """
    if out is not None:
        out = Path(os.path.expanduser(out))  # which leaves the ~ of nobody as it is
        if not resume and (out.exists() or out.is_symlink()):
            go_on = ", or go on with that run by --resume" if (out / "config.toml").exists() else ""
            raise FileExistsError(f"{out} exists; name another folder with --out{go_on}")
        if resume and out.exists() and not (out / "config.toml").exists() and not _blank(out):
            raise FileExistsError(f"{out} exists and holds no run to resume; name another folder with --out")
        check_place(out)
        return out
    latest = _highest_number(name)
    number = latest if resume and latest else latest + 1
    return RUNS / (name if number == 1 else f"{name}-{number}")


def check_place(out: Path) -> None:
    """Raise an error if a folder is not there and could not be made: some commands make it after an hour of work."""
    above = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = os.strerror(errno.EACCES if above.is_dir() else errno.ENOTDIR)
        if above == out.absolute() and not above.is_dir():
            raise NotADirectoryError(f"{out} is a file and no folder; name another with --out")
        if above == out.absolute():
            raise OSError(f"{out} cannot be written to (no permission, or read-only); name another with --out")
        raise OSError(f"cannot make the folder {out} ({reason}); name another with --out")


def _highest_number(name: str) -> int:
    """The highest number of the runs of a name; 0 if there are none."""
    # Three digits at most: exp-2024 is a name, and no run of exp.
    pattern = re.compile(rf"{re.escape(name)}(?:-([2-9]|[1-9]\d{{1,2}}))?")
    names = os.listdir(RUNS) if RUNS.is_dir() else []
    return max([int(match[1] or 1) for match in map(pattern.fullmatch, names) if match], default=0)


def claim(out: Path | None, name: str, *, resume: bool = False) -> Path:
    """Make the folder of a run and return it. Without ``out``, runs that begin at once get a folder each."""
    taken = None
    while True:
        folder = run_folder(out, name, resume=resume)
        try:
            return create(folder, resume=resume)
        except FileExistsError:
            if folder == taken or out is not None or resume:
                raise
            taken = folder  # another run was quicker; the next number is free


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


def made(folder: Path) -> Path:
    """Make a folder, if it is not there, and return it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder} ({error.strerror}); name another with --out") from error
    return folder


def subfolder(folder: Path, name: str) -> Path:
    """Make a folder inside that of a run, if it is not there; an error if the run's own is gone, or if it is a link."""
    path = folder / name
    if path.is_symlink():
        raise OSError(f"{path} is a symbolic link and a run writes only inside its own folder; remove the link")
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


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
    for path in folder.rglob(f".*{_PART}"):
        if _half_written(path):
            path.unlink(missing_ok=True)


def _blank(folder: Path) -> bool:
    return folder.is_dir() and all([_half_written(path) for path in folder.iterdir()])


def _half_written(path: Path) -> bool:
    """Whether a file has the name that `write` gives it until it is complete."""
    return re.fullmatch(rf"\..+\.[0-9a-f]{{8}}{_PART}", path.name) is not None and path.is_file()


# Files


def write(path: Path, fill: Callable[[IO[bytes]], object] | bytes | str) -> None:
    """Write a file completely, or leave the old one as it was.

    Args:
        path: the file.
        fill: the content, or a function that writes the content to a binary file.
    """
    # In the same folder, because renaming is atomic only within a file system. Drawn, so that nobody else has the name.
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    content = fill.encode() if isinstance(fill, str) else fill
    try:
        with os.fdopen(os.open(fresh, _NEW, 0o666), "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            if _LATER.get() is None:
                os.fsync(file.fileno())  # on disk before the rename: a power cut must not leave an empty file
        os.replace(fresh, path)
        if _LATER.get() is None:
            _sync_folder(path.parent)
        else:
            _LATER.get().append(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        # After the rename the name is gone; after an error this removes the incomplete file.
        with contextlib.suppress(OSError):
            fresh.unlink()


@contextmanager
def synced_together() -> Iterator[None]:
    """A context in which files that are written are on disk at its end, and not one after the other.

    After a power cut inside it any of them may be empty. It is for files of which nothing is believed before a later
    one says that they are whole, as checksums.txt does.
    """
    token = _LATER.set([])
    try:
        yield
        if hasattr(os, "sync"):
            os.sync()  # all at once; one by one each would wait for the disk. After it the others wait for nothing
        for path in _LATER.get():
            try:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise _unwritable(path, error) from error
        for path in {path.parent: path for path in _LATER.get()}.values():
            try:
                _sync_folder(path.parent)
            except OSError as error:
                raise _unwritable(path, error) from error
    finally:
        _LATER.reset(token)


def write_at(path: Path, end: int, content: bytes) -> None:
    """Write to a file behind its first ``end`` bytes, which stay as they are; what followed them is cut off.

    When it returns, the content is on disk. A crash meanwhile leaves the first bytes whole and anything behind them.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666), "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size < end:
                raise OSError(errno.EIO, f"it has {size} bytes of {end}: it was removed or changed meanwhile")
            file.seek(end)
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if not end:
            _sync_folder(path.parent)  # the file is new, and so is its name
    except OSError as error:
        raise _unwritable(path, error) from error


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk: without that a power cut can undo a rename."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do this for folders
            raise
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError) -> OSError:
    """The error that says why a file of a run could not be written."""
    if not path.parent.is_dir():
        return FileNotFoundError(
            f"cannot write {path}: its folder was removed or moved while it was written to; "
            "put it back and go on with --resume, or start another run with --out"
        )
    remedy = _REMEDIES.get(error.errno, "")
    return OSError(f"cannot write {path} ({error.strerror or error}); {remedy}what was written before is whole")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content as JSON, with null for nan and infinities."""
    write(path, json.dumps(_strict(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one line per row; the columns are the keys of all rows, empty where a row has no value."""
    write(path, _csv(rows, _columns(rows), header=True))


class GrowingCsv:
    """A CSV file that is kept up to date while rows are added. Only new rows are written, unless they bring columns."""

    def __init__(self, path: Path):
        self._path, self._columns, self._end, self._rows = path, [], 0, 0

    def update(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the file hold these rows, of which the first are those of the call before."""
        fresh = rows[self._rows :]
        columns = _columns([dict.fromkeys(self._columns), *fresh])
        if columns == self._columns and self._path.is_file() and self._path.stat().st_size == self._end:
            text = _csv(fresh, columns, header=False).encode()
            write_at(self._path, self._end, text)
        else:
            text = _csv(rows, columns, header=True).encode()
            write(self._path, text)
            self._end = 0
        self._columns, self._end, self._rows = columns, self._end + len(text), len(rows)


def _columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({key: "" if is_blank(value) else value for key, value in row.items()} for row in rows)
    return text.getvalue()


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


# Is everything there?


def write_checksums(folder: Path) -> None:
    """Write the checksums of a run's files, in the format of sha256sum. It is the last file of a run."""
    write(folder / CHECKSUMS, _checksums(folder))


def is_whole(folder: Path) -> bool:
    """Whether a run has written all its files, and all are as it wrote them.

    What a list of checksums does not name, whoever shortened it, is asked for only where every run has it.
    """
    path = folder / CHECKSUMS
    if not path.is_file() or not all((folder / name).is_file() for name in _OF_EVERY_RUN):
        return False
    return path.read_bytes() == _checksums(folder).encode() and _is_json(folder / CLOCK)


def altered(folder: Path) -> list[str]:
    """The files that are not as the run wrote them, or are gone, those of its seeds too; none if it was not finished.

    Reports do not count: they are written again from the other files.
    """
    names = []
    if (folder / CHECKSUMS).is_file():  # of several seeds: those that should be there
        seeds = read_settings(folder).get("seeds", [])
        homes = [f"seed-{seed}" for seed in seeds] if isinstance(seeds, list) else []
        names = [home for home in homes if not (folder / home).is_dir()]
    for run in _with_seeds(folder):
        if _has_checksums(run):
            stated = (run / CHECKSUMS).read_text(errors="replace").splitlines()
            now = _checksums(run).splitlines()
            # A line that names no file is a fault of the list itself.
            found = sorted({line.partition("  ")[2] or CHECKSUMS for line in {*stated} ^ {*now}} - {"report.html"})
            names += [(run / name).relative_to(folder).as_posix() for name in found]
    return names


def _with_seeds(folder: Path) -> list[Path]:
    """The folder, and those of its seeds."""
    return [folder, *sorted(path for path in folder.glob("seed-*") if path.is_dir())]


def _has_checksums(run: Path) -> bool:
    path = run / CHECKSUMS
    return path.is_file() and path.stat().st_size > 0


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """A context that reads run folders. Files that are not as the run wrote them are named at its end.

    If it fails they are named before the error, because they may be its cause.
    """
    try:
        yield
    except Exception:
        for folder in folders:
            with suppress(ValueError, OSError):  # the error that is there says more
                _name_altered(folder)
        raise
    for folder in folders:
        warn_of_altered(folder)


def _name_altered(folder: Path) -> None:
    names = [name if (folder / name).exists() else f"{name} (missing)" for name in altered(folder)]
    if names:
        log.warning("%s: not as the run wrote it, going by %s: %s", folder, CHECKSUMS, ", ".join(names))


def warn_of_altered(folder: Path) -> None:
    """Warn of files that are missing or not as the run wrote them: figures are left out, or of something else."""
    _name_altered(folder)
    unchecked = [run for run in _with_seeds(folder) if not _has_checksums(run)]
    if unchecked:
        log.warning(
            "%s: its files cannot be checked, as there is nothing in %s: the run was not finished, or it was removed",
            unchecked[0], CHECKSUMS,
        )  # fmt: skip


def _is_json(path: Path) -> bool:
    if not path.is_file():  # a pipe would wait for ever, and a device has no end
        return False
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _checksums(folder: Path) -> str:
    paths = [path for path in folder.iterdir() if path.suffix in _RESULTS and path.name != CLOCK]
    models = folder / "models"
    paths += models.iterdir() if models.is_dir() else []
    paths = sorted(path for path in paths if path.is_file() and not path.name.startswith("."))
    return "".join(f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
