"""Checkpoints, to resume an interrupted run: the state of a method in a safetensors file, its history in a file beside
it that only grows. No pickle is used.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetperm.runs.files import subfolder, write, write_at
from hetperm.state import DTYPES, State, Work, is_model, is_whole, strange_count

FORMAT = 3
Refuse = Callable[[Mapping[str, Any]], str | None]
_ENTRY = "hetperm checkpoint"  # the only metadata entry: safetensors does not fix the order of several
_BLANK = b"0" * 64  # stands in the place of the checksum while it is computed
_LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses to read longer headers, though it writes them
# The names in safetensors; a state holds no other types.
_DTYPES = dict(zip(DTYPES, ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL"), strict=True))
_REMEDY = "remove it to train this method from the start with --resume, or start another run with --out"


# What reading a file raises that is not what a run wrote.
_UNREADABLE = (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError)


@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint.

    Attributes:
        state: the state after the last epoch in `history`.
        history: one row of metrics per epoch.
        finished: whether the method is done.
        extra: other values that the run needs to resume.
    """

    state: State
    history: tuple[dict[str, Any], ...] = ()
    finished: bool = False
    extra: dict[str, Any] | None = None


class Writer:
    """Writes the checkpoints of a method, one after the other. A row of the history is written once.

    Args:
        path: the file; its folder is made if it is missing, but not the folder around that.
        history: the rows that are on disk already, if the method is resumed.
    """

    def __init__(self, path: str | Path, history: Sequence[Mapping[str, Any]] = ()):
        self._path = Path(path)
        self._rows, self._bytes, self._checksum = 0, 0, hashlib.sha256()
        self._count(len(history), _lines(history))

    def save(self, saved: Saved) -> None:
        """Write a checkpoint completely or not at all. Equal contents give equal bytes.

        Tensors may be on any device. A tensor or a model that occurs several times in the state is written once.
        `history` begins with the rows of the checkpoint before. It and `extra` may hold numbers (also nan and inf),
        texts, booleans and None; `extra` also lists and tables of them.
        """
        fresh = saved.history[self._rows :]
        lines = _lines(fresh)
        total = self._checksum.copy()
        total.update(lines)
        rows = {"rows": len(saved.history), "bytes": self._bytes + len(lines), "sha256": total.hexdigest()}
        packing = _Packing()
        content = {
            "sha256": _BLANK.decode(),
            "format": FORMAT,
            "finished": saved.finished,
            "state": {one.name: packing.packed(getattr(saved.state, one.name), one.name) for one in fields(State)},
            "tables": packing.tables,
            "history": rows,
            "extra": None if saved.extra is None else dict(saved.extra),
        }
        fill = _filled(self._path, packing.tensors, _json(content))
        subfolder(self._path.parent.parent, self._path.parent.name)
        # The history first: until the checkpoint is in place, the one before it counts only the rows it knows.
        if lines:
            write_at(history_file(self._path), self._bytes, lines)
        write(self._path, fill)
        self._count(len(fresh), lines)

    def _count(self, rows: int, lines: bytes) -> None:
        """Add rows that are on disk."""
        self._rows, self._bytes = self._rows + rows, self._bytes + len(lines)
        self._checksum.update(lines)


def save(path: str | Path, saved: Saved) -> None:
    """Write a single checkpoint; see `Writer` for one after the other."""
    Writer(path).save(saved)


def history_file(path: Path) -> Path:
    """The file that holds the history of a checkpoint, one row of JSON per line."""
    return path.with_suffix(".jsonl")


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(f"{_json(dict(row))}\n" for row in rows).encode()


def _json(content: Any) -> str:
    try:
        return json.dumps(content)
    except TypeError as error:
        raise TypeError(f"checkpoints hold numbers, texts, booleans, None, lists and tables ({error})") from None


def _filled(path: Path, tensors: Mapping[str, Tensor], text: str) -> Callable[[IO[bytes]], None]:
    """A function that writes a checkpoint to a file; its checksum takes the place of zeros in the header."""
    # Tensors with the widest numbers come first, so that each starts at a multiple of its number size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(tensors, {_ENTRY: text})
    if len(header) > _LONGEST_HEADER:
        raise ValueError(f"{path}: the names of {len(tensors)} tensors do not fit in a checkpoint")
    # The checksum is inside the header that it covers, so it is computed with zeros in its place.
    checksum = hashlib.sha256(header)
    for x in tensors.values():
        checksum.update(_raw(x))

    def fill(file: IO[bytes]) -> None:
        file.write(header.replace(_BLANK, checksum.hexdigest().encode(), 1))
        for x in tensors.values():  # one at a time: a second copy of all may not fit in memory
            file.write(_raw(x))

    return fill


def load(path: str | Path, device: str | torch.device = "cpu", *, refuse: Refuse | None = None) -> Saved:
    """Read a checkpoint: bit for bit, keys in their order. Raise a ValueError if it is damaged.

    Args:
        device: where its tensors are put.
        refuse: (extra values of a checkpoint) -> why it is not the one that is wanted, or None; asked before anything
            but these is read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise OSError(f"{path} is no file; {_REMEDY}")
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; give the file of one")
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()[_ENTRY])
            version, checksum = content["format"], content["sha256"].encode()
    except _UNREADABLE as error:
        raise ValueError(f"{path} is no checkpoint of hetperm, or a damaged one; {_REMEDY}") from error
    # The format before the checksum, which another format may compute differently.
    if version != FORMAT:
        raise ValueError(f"{path} is a checkpoint of format {version!r} and this hetperm reads {FORMAT}; {_REMEDY}")
    if _checksum(path, checksum) != checksum:
        raise ValueError(f"{path} is damaged: its checksum is another; {_REMEDY}")
    extra = content.get("extra")
    reason = refuse(extra if isinstance(extra, dict) else {}) if refuse else None
    if reason:
        raise ValueError(f"{path} is not of this run: {reason}")
    with safe_open(path, framework="pt") as file:
        # Copied out of the mapped file into aligned memory: the last bit of a matrix product depends on alignment.
        tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
    try:
        saved = _restored(content, tensors, _history(path, content["history"]))
        wrong = _wrong(saved)
    except _UNREADABLE as error:
        wrong = str(error) or type(error).__name__
    if wrong:
        raise ValueError(f"{path} is a checkpoint with wrong contents ({wrong}); {_REMEDY}")
    return saved


def told(path: Path) -> dict[str, Any]:
    """The extra values of a checkpoint alone; none if there is no such file, or it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads(file.metadata()[_ENTRY])["extra"])
    except (OSError, *_UNREADABLE):
        return {}


def _history(path: Path, stated: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The rows that a checkpoint counts; what follows them in their file is of an epoch that was not finished."""
    if not stated["rows"]:
        return ()
    file = history_file(path)
    if file.exists() and not file.is_file():  # a pipe would wait for ever
        raise ValueError(f"its history {file.name} is no file")
    try:
        with open(file, "rb") as lines:
            raw = lines.read(stated["bytes"])
    except OSError as error:
        raise ValueError(f"its history {file.name} cannot be read: {error.strerror}") from error
    if hashlib.sha256(raw).hexdigest() != stated["sha256"]:
        raise ValueError(f"its history {file.name} is another")
    return tuple(json.loads(line) for line in raw.splitlines())


def _restored(content: Mapping[str, Any], tensors: Mapping[str, Tensor], history: tuple[dict, ...]) -> Saved:
    tables: list[dict[str, Any]] = []  # inner tables come first, so a table finds those it refers to
    for table in content["tables"]:
        tables.append({name: _unpacked(value, tensors, tables) for name, value in table.items()})
    state = {name: _unpacked(value, tensors, tables) for name, value in content["state"].items()}
    return Saved(State(**state), history, content["finished"], content["extra"])


def _wrong(saved: Saved) -> str | None:
    """What is of the wrong kind in a checkpoint, in words; None if all is as a run writes it."""
    state = saved.state
    kinds = {
        "counts": is_whole(state.r) and is_whole(state.tail_count) and strange_count(state.work) is None,
        "w": is_model(state.w),
        "v": isinstance(state.v, tuple) and all([is_model(model) for model in state.v]),
        "tail": state.tail is None or (isinstance(state.tail, tuple) and all([is_model(one) for one in state.tail])),
        "alpha": isinstance(state.alpha, Tensor | None),
        "memory": isinstance(state.memory, dict) and all([is_model(model) for model in state.memory.values()]),
        "history": all([isinstance(row, dict) for row in saved.history]),
        "finished": isinstance(saved.finished, bool),
        "extra": isinstance(saved.extra, dict | None),
    }
    return next((name for name, right in kinds.items() if not right), None)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The header of a safetensors file: its length, then the names, types, shapes and offsets of the tensors."""
    content: dict[str, Any] = {"__metadata__": metadata}
    first = 0
    for name, x in tensors.items():
        last = first + x.numel() * x.element_size()
        content[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [first, last]}
        first = last
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    return len(text).to_bytes(8, "little") + text


def _raw(x: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    row = x.detach().cpu().contiguous().reshape(-1)
    # A tensor of one number counts as contiguous with any stride, but only stride 1 can be viewed as bytes.
    return memoryview(row.as_strided(row.shape, (1,)).view(torch.uint8).numpy())


def _checksum(path: Path, stated: bytes) -> bytes:
    """The checksum of a file, computed with its ``stated`` checksum blanked out."""
    with open(path, "rb") as file:
        size = file.read(8)
        header = file.read(int.from_bytes(size, "little"))
        total = hashlib.sha256(size + header.replace(stated, _BLANK, 1))
        while chunk := file.read(2**20):
            total.update(chunk)
    return total.hexdigest().encode()


class _Packing:
    """Turns values into JSON. Tensors and tables are stored apart, once, however often they occur."""

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.tables: list[dict[str, Any]] = []  # inner tables before those that hold them
        self._names: dict[tuple, str] = {}
        self._numbers: dict[int, int] = {}

    def packed(self, value: Any, path: str) -> Any:
        """A value as JSON; ``path`` says where it is in the state."""
        if isinstance(value, Tensor) and value.is_sparse:
            value = value.coalesce()
            parts = {"indices": value.indices(), "values": value.values()}
            packed = {name: self.packed(part, f"{path}/{name}") for name, part in parts.items()}
            return {"sparse": packed | {"shape": list(value.shape)}}
        if isinstance(value, Tensor):
            memory = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            # The number keeps names apart, because keys with slashes can spell the same path.
            name = self._names.setdefault(memory, f"{len(self.tensors)} {path}")
            self.tensors.setdefault(name, value)
            return {"tensor": name}
        if isinstance(value, Mapping):
            # Clients may share one model, such as the start: it is written once, and shared again when loaded.
            if id(value) not in self._numbers:
                table = {name: self.packed(item, f"{path}/{name}") for name, item in value.items()}
                self._numbers[id(value)] = len(self.tables)
                self.tables.append(table)
            return {"table": self._numbers[id(value)]}
        if isinstance(value, tuple):
            return [self.packed(item, f"{path}/{k}") for k, item in enumerate(value)]
        return {"work": vars(value)} if isinstance(value, Work) else value


def _unpacked(value: Any, tensors: Mapping[str, Tensor], tables: Sequence[Mapping[str, Any]]) -> Any:
    match value:
        case {"tensor": name}:
            return tensors[name]
        case {"table": number}:
            return tables[number]
        case {"sparse": {"shape": shape, **parts}}:
            indices, values = (_unpacked(parts[name], tensors, tables) for name in ("indices", "values"))
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
        case {"work": counts}:
            if counts.keys() != {one.name for one in fields(Work)}:
                raise ValueError("counts of the work")
            return Work(**{name: tuple(x) if isinstance(x, list) else x for name, x in counts.items()})
        case [*items]:
            return tuple(_unpacked(item, tensors, tables) for item in items)
    return value


# Settings that must not change when a run is resumed


def changed(before: Mapping[str, Any], now: Mapping[str, Any], ignore: Iterable[str] = ()) -> str | None:
    """A sentence that names the first setting in which two configurations differ; None if they agree.

    Args:
        before: the configuration of the run so far, as read from TOML.
        now: the configuration to resume with.
        ignore: keys or whole tables that may differ; a key inside a table is "table.key".

    Example:
        >>> changed({"epochs": 12, "ifca": {"clusters": 2}}, {"epochs": 12, "ifca": {"clusters": 3}})
        'ifca.clusters was 2 and is now 3; set it back to go on with that run, or start another with --out'
    """
    old, new = dict(_settings(before)), dict(_settings(now))
    ignored = [tuple(key.split(".")) for key in ignore]
    for key in {**old, **new}:
        if any(key[: len(prefix)] == prefix for prefix in ignored):
            continue
        if key not in old or key not in new or not _equal(old[key], new[key]):
            was, is_now = (repr(settings[key]) if key in settings else "not set" for settings in (old, new))
            remedy = "set it back to go on with that run, or start another with --out"
            return f"{'.'.join(key)} was {was} and is now {is_now}; {remedy}"
    return None


def _settings(table: Mapping[str, Any], within: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path of the key, value) of every setting."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, (*within, key))
        else:
            yield (*within, key), value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) != isinstance(b, bool):
        return False  # true is not 1
    return a == b or all(isinstance(x, float) and math.isnan(x) for x in (a, b))
