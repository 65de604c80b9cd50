"""Packets: what travels between the server and a device. A table of plain values and tensors by name; never pickle.

A packet is a safetensors file: the table is JSON in its metadata, and every tensor is stored under the digest of its
content. So a tensor that several tasks share travels once, one that the other side still has does not travel at all,
and a damaged one is noticed.
"""

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from hetperm.device.gradients import Report
from hetperm.device.limits import LARGEST

PROTOCOL = 1  # changes if an older device could not read a packet
TABLE = "hetperm"  # the key of the table in the metadata
LARGEST_TABLE = 16 * 2**20  # bytes
SHELF = 64 * 2**20  # bytes of tensors that a device keeps
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)


class BadPacket(ValueError):
    """A packet that is damaged, too large, or of another version."""


class Missing(LookupError):
    """Tensors that a packet refers to and that are not here any more.

    Attributes:
        digests: those of the tensors.
    """

    def __init__(self, digests: Collection[str]):
        super().__init__(f"{len(digests)} tensors of the packet are not here any more")
        self.digests = sorted(digests)


def digest(tensor: Tensor) -> str:
    """The name of a tensor's content: a hash of its type, its shape and its bytes.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.zeros(2, 1))
        (True, False)
    """
    row = tensor.detach().cpu().contiguous().reshape(-1)
    total = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    # A single number may have any stride, which a view as bytes refuses.
    total.update(row.as_strided(row.shape, (1,)).view(torch.uint8).numpy())
    return total.hexdigest()[:32]


def write(table: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """A packet with a table and tensors by digest.

    Example:
        >>> table, tensors = read(write({"kind": "ping"}))
        >>> table, tensors
        ({'kind': 'ping', 'protocol': 1}, {})
    """
    # In the order given: that of a model's parameters decides how sums over them round.
    plain = json.dumps({**table, "protocol": PROTOCOL})
    held = {name: x.detach().cpu().contiguous() for name, x in (tensors or {}).items()}
    return save(held, metadata={TABLE: plain})


def read(packet: bytes, largest: int = LARGEST) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The table of a packet and its tensors by digest; an error if it is too large, damaged or of another version."""
    if len(packet) > largest:
        raise BadPacket(f"a packet of {len(packet):,} bytes is larger than the {largest:,} that are allowed")
    table = _table(packet)
    if table.get("protocol") != PROTOCOL:
        raise BadPacket(f"a packet of version {table.get('protocol')!r}; this is version {PROTOCOL}: use one release")
    try:
        tensors = load(packet)
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise BadPacket(f"a packet that is damaged ({error})") from None
    for name, x in tensors.items():
        if x.dtype not in DTYPES or digest(x) != name:
            raise BadPacket(f"a packet in which tensor {name[:12]} is damaged: its content has another checksum")
    return table, tensors


def _table(packet: bytes) -> dict[str, Any]:
    # The layout of safetensors: eight bytes with the length of a JSON header, the header, the data.
    length = int.from_bytes(packet[:8], "little")
    if length > min(LARGEST_TABLE, len(packet) - 8):
        raise BadPacket(f"a packet whose header claims {length:,} bytes; it has {max(0, len(packet) - 8):,}")
    try:
        table = json.loads(json.loads(packet[8 : 8 + length])["__metadata__"][TABLE])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadPacket("a packet without a table: it does not come from hetperm") from None
    if not isinstance(table, dict):
        raise BadPacket("a packet whose table is none")
    return table


# Models and other values that hold tensors


def taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value as plain values and digests; its tensors are added to ``tensors`` by digest.

    Example:
        >>> held = {}
        >>> plain = taken_apart(({"weight": torch.ones(2)}, 0.5), held)
        >>> put_together(plain, held)
        ({'weight': tensor([1., 1.])}, 0.5)
    """
    if isinstance(value, Tensor):
        name = digest(value)
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"model": {key: taken_apart(x, tensors)["tensor"] for key, x in value.items()}}
    if isinstance(value, Report):
        return {"report": [taken_apart(value.gradient, tensors), float(value.noise)]}
    if isinstance(value, tuple):
        return {"tuple": [taken_apart(x, tensors) for x in value]}
    if isinstance(value, bool | int | float | str) or value is None:
        return {"value": value}
    raise ValueError(f"a {type(value).__name__} cannot travel; only tensors, models of them, tuples and plain values")


def put_together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `taken_apart` took apart; an error if it is none."""
    match plain:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"model": dict(names)}:
            return {key: tensors[name] for key, name in names.items()}
        case {"report": [{"tensor": str(name)}, int() | float() as noise]}:
            return Report(tensors[name], float(noise))
        case {"tuple": list(parts)}:
            return tuple(put_together(part, tensors) for part in parts)
        case {"value": bool() | int() | float() | str() | None as value}:
            return value
    raise BadPacket("a packet with a value that is neither a tensor, a model, a tuple nor plain")


def digests_of(plain: Any) -> set[str]:
    """The digests that a value taken apart refers to."""
    match plain:
        case {"tensor": str(name)}:
            return {name}
        case {"model": dict(names)}:
            return {name for name in names.values() if isinstance(name, str)}
        case {"report": [{"tensor": str(name)}, _]}:
            return {name}
        case {"tuple": list(parts)}:
            return set().union(*map(digests_of, parts))
    return set()


class Shelf:
    """Tensors by digest, the latest that were used; older ones go when there are too many bytes.

    A device keeps tensors on its shelf, and the server keeps a list of the same length of what each device has. If the
    server is mistaken, as after a restart, the device says which tensors it misses.

    Args:
        holding: False for a list, which remembers digests and sizes but no tensors.
    """

    def __init__(self, largest: int = SHELF, *, holding: bool = True):
        self.largest, self.holding = largest, holding
        self._rows: OrderedDict[str, tuple[int, Tensor | None]] = OrderedDict()  # digest -> (bytes, tensor)
        self._bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors, the last one as the most recent."""
        for name, x in tensors.items():
            if name not in self._rows:
                self._bytes += x.nbytes
                self._rows[name] = (x.nbytes, x if self.holding else None)
            self._rows.move_to_end(name)
        while self._bytes > self.largest:
            _, (size, _) = self._rows.popitem(last=False)
            self._bytes -= size

    def take(self, names: Iterable[str], beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of these digests, from ``beside`` or from the shelf; an error names those that are nowhere."""
        wanted = set(names)
        lost = {name for name in wanted if name not in beside and name not in self._rows}
        if lost:
            raise Missing(lost)
        return {name: beside[name] if name in beside else self._rows[name][1] for name in wanted}

    def clear(self) -> None:
        """Forget everything."""
        self._rows.clear()
        self._bytes = 0


def all_finite(value: Any) -> bool:
    """Whether every number in a value is finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all([all_finite(x) for x in value.values()])
    if isinstance(value, Report):
        return all_finite(value.gradient)  # the noise of a client with one sample is unknown, which is nan
    if isinstance(value, tuple):
        return all([all_finite(x) for x in value])
    return not isinstance(value, float) or math.isfinite(value)
