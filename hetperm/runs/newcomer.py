"""The data of a client that joins, from an npz file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.report.contents import read_summary
from hetperm.texts import one_line

_KEYS = ("x", "y", "split")


def client_of(path: Path, width: float) -> Client:
    """A client with the samples of a file: x as the model takes it, y, and perhaps split (0 training, 1 testing)."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; --data takes an npz file with x and y")
    try:
        # Never unpickled: a pickle can run anything. Opened here, because numpy leaves a broken file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in _KEYS if key in file.files}
    except Exception as error:  # a broken file can raise nearly anything, and one array (.npy) is no context
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"{path} cannot be read as an npz file of plain arrays ({reason})") from error
    for key in ("x", "y"):
        if key not in arrays:
            raise ValueError(f"{path} has no {key!r} and holds {', '.join(arrays) or 'nothing'}; save x and y in it")
    x, y = arrays["x"], arrays["y"]
    if x.dtype.kind != "f":
        raise ValueError(f"{path}: x is {x.dtype}; join takes inputs as the run's model takes them: normalised floats")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ValueError(f"{path}: y is {y.dtype} of shape {y.shape}; it must be classes, whole numbers (n,)")
    if len(x) != len(y):
        raise ValueError(f"{path}: x has {len(x)} samples and y has {len(y)}")
    data = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))
    if "split" not in arrays:
        return Client(train=data, width=width)
    split = arrays["split"]
    if split.shape != y.shape or not np.isin(split, (0, 1)).all() or not (split == 0).any():
        raise ValueError(f"{path}: split must have 0 (training) or 1 (testing) for each sample, and some of them 0")
    is_test = torch.from_numpy(split.astype(bool))
    test = _rows(data, is_test) if bool(is_test.any()) else None
    return Client(train=_rows(data, ~is_test), test=test, width=width)


def _rows(pair: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][rows]


def width_of_tier(folder: Path, tier: str) -> float:
    """The width of a tier of the run."""
    tiers = read_summary(folder).main.tiers
    if tier not in tiers:
        raise ValueError(f"there is no tier {tier!r} in {folder}; it has {', '.join(tiers)}")
    return float(tiers[tier].width)
