"""joined.safetensors: the clients that joined a finished run, and how its tables are extended by them."""

import json
import logging
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from hetperm.report.contents import read_csv
from hetperm.runs import client_models, files, server_file
from hetperm.runs.server_file import Server
from hetperm.texts import one_line

NAME = "joined.safetensors"
FORMAT = 1
_ENTRY = "hetperm joined"
_ROUNDED = 1e-3  # by which the weights of a client may miss the sum of 1
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A client that joined.

    Attributes:
        row: its line of clients.csv.
        alpha: (n + 1,) its mixing weights, n being the clients before it; the last is its weight on itself.
        gradient: (s,) of its report; `noise`: its variance.
    """

    row: Mapping[str, Any]
    alpha: Tensor
    gradient: Tensor
    noise: float


def read(folder: Path) -> list[Record]:
    """The clients that joined a run, in the order in which they came."""
    path = folder / NAME
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file; remove it")
    if not path.exists():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            content = json.loads(file.metadata()[_ENTRY])
            if not all([type(row["n_train"]) is type(row["client"]) is int for row in content["rows"]]):
                raise ValueError("a row has no whole numbers of its client and samples")
            return [
                Record(row, file.get_tensor(f"alpha {k}").clone(), file.get_tensor(f"gradient {k}").clone(), noise)
                for k, (row, noise) in enumerate(zip(content["rows"], map(float, content["noise"]), strict=True))
            ]
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({one_line(str(error))}); remove it, mend the run by {mending(folder)}, and let those "
            "clients join again"
        ) from error


def mending(folder: Path) -> str:
    """The command that writes the files of a run again."""
    return f"`hetperm train --resume --out {folder}` with its settings"


def write(folder: Path, records: Sequence[Record]) -> None:
    """Write the file completely, or leave the old one as it was."""
    tensors = {}
    for k, record in enumerate(records):
        tensors[f"alpha {k}"] = record.alpha.clone()
        tensors[f"gradient {k}"] = record.gradient.detach().cpu().clone()
    content = {"format": FORMAT, "rows": [dict(one.row) for one in records], "noise": [one.noise for one in records]}
    files.write(folder / NAME, safetensors.save(tensors, {_ENTRY: json.dumps(content)}))


def server_of(folder: Path, clients: int) -> Server:
    """What the server of a run knows, of clients that joined too; an error if it is not of these clients.

    Args:
        clients: the number of clients in clients.csv.
    """
    server, records = server_file.load(folder), read(folder)
    if len(server.known) + len(records) != clients:
        also = f" and {NAME} {len(records)}" if records else ""
        raise ValueError(
            f"{folder}: clients.csv has {clients} clients and {server_file.NAME} {len(server.known)}{also}; copy them "
            f"again from the run, or mend it by {mending(folder)}"
        )
    if any([record.gradient.shape != server.gradient.shape[1:] for record in records]):
        raise ValueError(f"{folder / NAME} is not of this run; put the right file back")
    return with_reports(server, records)


def with_reports(server: Server, records: Sequence[Record]) -> Server:
    """What the server knows, with the reports of clients that joined before."""
    if not records:
        return server
    return replace(
        server,
        gradient=torch.cat([server.gradient, *[record.gradient[None].to(server.gradient) for record in records]]),
        noise=torch.cat([server.noise, torch.tensor([record.noise for record in records], dtype=torch.float64)]),
        samples=torch.cat([server.samples, torch.tensor([record.row["n_train"] for record in records])]),
        known=torch.cat([server.known, torch.ones(len(records), dtype=torch.bool)]),
    )


def remove_strays(folder: Path, trained: int) -> None:
    """Remove models of clients that nobody knows: they were about to join when the process ended.

    Args:
        trained: the number of clients that the run was trained with.
    """
    known = {record.row["client"] for record in read(folder)}
    for i in client_models.clients(folder):
        if i >= trained and i not in known:
            client_models.remove(folder, i)


def extend_tables(folder: Path, trained: int) -> None:
    """Make clients.csv and the mixing weights of a run hold the clients that joined.

    Args:
        trained: the number of clients that the run was trained with; what the tables hold beyond them is replaced.
    """
    records = read(folder)
    if not records:
        return
    models = set(client_models.clients(folder))
    for record in records:
        if record.row["client"] not in models:
            log.warning("the model of client %d, which joined, is gone; let it join again", record.row["client"])
    # All is read before anything is written.
    rows, alpha = read_csv(folder / "clients.csv")[:trained], read_alpha(folder)[:trained, :trained]
    files.write_csv(folder / "clients.csv", [*rows, *(record.row for record in records)])
    files.write_alpha(folder, extended(alpha, [record.alpha for record in records]))


def read_alpha(folder: Path) -> Any:
    """The mixing weights of a run: a numpy array, or a sparse array of scipy."""
    dense, sparse = folder / "alpha.npy", folder / "alpha.npz"
    path = dense if dense.is_file() else sparse
    if not path.is_file():
        raise ValueError(f"{folder} has no mixing weights (alpha.npy); name the folder of a run of perm")
    try:
        alpha = _dense(path) if path is dense else _sparse(path)
    except (ValueError, TypeError, LookupError, EOFError, OSError, MemoryError, zipfile.BadZipFile) as error:
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"{path} is damaged ({reason}); copy it again from the run") from error
    wrong = _wrong(alpha)
    if wrong:
        raise ValueError(f"{path} holds no mixing weights: {wrong}; copy it again from the run")
    return alpha


def _dense(path: Path) -> np.ndarray:
    with path.open("rb") as file:  # np.load takes any other file for a pickle, and says how to trust it
        return np.lib.format.read_array(file, allow_pickle=False)


def _sparse(path: Path) -> Any:
    from scipy import sparse

    if not zipfile.is_zipfile(path):  # likewise
        raise ValueError("it is no zip archive of arrays")
    alpha = sparse.csr_array(sparse.load_npz(path))
    alpha.check_format()
    return alpha


def _wrong(alpha: Any) -> str | None:
    """Why an array cannot be mixing weights; None if it can."""
    if alpha.ndim != 2 or alpha.shape[0] != alpha.shape[1] or alpha.dtype.kind != "f":
        return f"{alpha.dtype} of shape {alpha.shape}"
    values = alpha if isinstance(alpha, np.ndarray) else alpha.data
    if not np.isfinite(values).all() or (values < 0).any():
        return "some are negative or not finite"
    with np.errstate(over="ignore"):
        total = np.asarray(alpha.sum(1)).ravel()
    wrong = np.flatnonzero(abs(total - 1) > _ROUNDED)
    return f"those of client {wrong[0]} have the sum {total[wrong[0]]:g} and not 1" if len(wrong) else None


def extended(alpha: Any, rows: Sequence[Tensor]) -> Any:
    """The mixing weights with a row for each newcomer. Nobody learns from a newcomer but those who came after it.

    Example:
        >>> import torch
        >>> extended(np.eye(1), [torch.tensor([0.75, 0.25])]).tolist()
        [[1.0, 0.0], [0.75, 0.25]]
    """
    old, total = alpha.shape[0], alpha.shape[0] + len(rows)
    if isinstance(alpha, np.ndarray):
        out = np.zeros((total, total), alpha.dtype)
        out[:old, :old] = alpha
        for k, row in enumerate(rows):
            out[old + k, : len(row)] = row.numpy()
        return out
    from scipy import sparse

    out = sparse.lil_array((total, total), dtype=alpha.dtype)
    out[:old, :old] = alpha
    for k, row in enumerate(rows):
        for j in row.nonzero().flatten().tolist():
            out[old + k, j] = float(row[j])
    return sparse.csr_array(out)
