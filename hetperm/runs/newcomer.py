"""The data of a client that joins: read from an npz file, and held against the model of the run."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.client import Client
from hetperm.data.images import LARGEST_VALUE
from hetperm.data.npz import arrays_of
from hetperm.report.contents import read_summary
from hetperm.runs.building import num_outputs
from hetperm.runs.data_checks import IGNORED, check_inputs
from hetperm.runs.loss_checks import tried
from hetperm.runs.rehearsal import about, rehearse
from hetperm.runs.setting import Setting
from hetperm.shards import Stored
from submodels.norms import check_batch

log = logging.getLogger(__name__)

NORMALISED = ("digits", "digit-pairs", "mnist", "cifar10", "imagefolder", "npz")  # data sets
UNUSUAL = 5.0  # a mean or deviation of inputs that were normalised to 0 and 1
_KEYS = ("x", "y", "split", "user")
_REMEDY = "give join the model, the loss and the metric of the run, and data like its own"


def client_of(path: Path, width: float) -> Client:
    """A client with the samples of a file: x as the model takes it, y, and perhaps split (0 training, 1 testing)."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; --data takes an npz file with x and y")
    arrays = arrays_of(path, _KEYS)
    x, y = arrays["x"], arrays["y"]
    if not x.ndim:
        raise ValueError(f"{path}: x is one number; it must hold a row for each sample, (n, ...)")
    if x.dtype.kind != "f":
        raise ValueError(f"{path}: x is {x.dtype}; join takes inputs as the run's model takes them: normalised floats")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ValueError(f"{path}: y is {y.dtype} of shape {y.shape}; it must be classes, whole numbers (n,)")
    if len(x) != len(y):
        raise ValueError(f"{path}: x has {len(x)} samples and y has {len(y)}")
    if len(y) and int(y.max()) > np.iinfo(np.int64).max:  # it would become a negative label
        raise ValueError(f"{path}: y holds {y.max()}, which is no class; number classes from 0")
    with np.errstate(over="ignore"):
        single = x.astype(np.float32)
    beyond = x[(abs(single) > LARGEST_VALUE) & np.isfinite(x)]
    if len(beyond):
        raise ValueError(
            f"{path}: x holds {beyond[0]:g}, beyond {LARGEST_VALUE:g}; normalise it like the data of the run"
        )
    users = len(np.unique(arrays["user"])) if "user" in arrays else 1
    if users > 1:
        log.warning("%s: user has %d values, and all samples become those of one client; keep one user's", path, users)
    data = torch.from_numpy(single), torch.from_numpy(y.astype(np.int64))
    split = arrays.get("split", np.zeros(y.shape, int))
    if split.shape != y.shape or not np.isin(split, (0, 1)).all() or (len(y) and split.all()):
        raise ValueError(f"{path}: split must have 0 (training) or 1 (testing) for each sample, and some of them 0")
    is_test = torch.from_numpy(split.astype(bool))
    test = _rows(data, is_test) if bool(is_test.any()) else None
    try:
        return Client(train=_rows(data, ~is_test), test=test, width=width)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('a client without a key: ')}") from error


def _rows(pair: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0][rows], pair[1][rows]


def width_of_tier(folder: Path, tier: str) -> float:
    """The width of a tier of the run."""
    tiers = read_summary(folder).main.tiers
    if tier not in tiers:
        raise ValueError(f"there is no tier {tier!r} in {folder}; it has {', '.join(tiers)}")
    return float(tiers[tier].width)


def check(client: Client, setting: Setting, sample: Sequence[int]) -> None:
    """Raise an error if the data of a client that joins a run do not fit the model of the run.

    Args:
        sample: the shape of one input of the run.
    """
    if isinstance(client.train, Stored) or not isinstance(client.train[0], Tensor):
        raise ValueError("the client that joins has a Dataset or several inputs; it needs a pair of tensors, (x, y)")
    model, x = setting.shop.full.module, client.train[0]
    if tuple(x.shape[1:]) != tuple(sample):
        raise ValueError(
            f"an input of the client that joins has shape {tuple(x.shape[1:])} and the run's model takes "
            f"{tuple(sample)}; prepare its data as those of the run were"
        )
    if setting.config.dataset.partition(":")[0] in NORMALISED and x.is_floating_point():
        _warn_of_scale(x.double())
    check_batch(model, client.n_train)
    if client.n_train == 1:
        log.warning(
            "the client that joins has one training sample, and chance decides whom it learns from: the noise of its "
            "gradient is taken from the others"
        )
    check_inputs([client])
    if setting.shop.loss is F.cross_entropy:
        outputs = tried("model", lambda x: num_outputs(model, client), (x,), about(x), _REMEDY)
        _check_labels(client, outputs)
    rehearse(model, [client], setting.shop.loss, setting.metric, remedy=_REMEDY)


def _warn_of_scale(x: Tensor) -> None:
    mean, std = float(x.mean()), float(x.std(correction=0))
    if abs(mean) > UNUSUAL or std > UNUSUAL:
        log.warning(
            "inputs of the client that joins have a mean of %.3g and a deviation of %.3g, and those of the run were "
            "normalised to about 0 and 1; prepare them alike",
            mean, std,
        )  # fmt: skip


def _check_labels(client: Client, outputs: int) -> None:
    """Raise an error if the labels of a client that joins are not classes of the run, one for each output."""
    for part in ("train", "val", "test"):
        pair = getattr(client, part)
        labels = torch.zeros(1, dtype=torch.long) if pair is None else pair[1]
        if labels.is_floating_point() or labels.dim() != 1:
            raise ValueError(
                f"the labels of {part} are {labels.dtype} of shape {tuple(labels.shape)}; the run has classes: give "
                "whole numbers, (n,)"
            )
        wrong = [label for label in labels.unique().tolist() if label != IGNORED and not 0 <= label < outputs]
        if wrong:
            raise ValueError(f"the labels of {part} hold {wrong[0]} and the run has classes 0 to {outputs - 1}")
        if part == "train" and bool((labels == IGNORED).all()):
            raise ValueError(f"all labels of train are {IGNORED}, which cross-entropy leaves out; give it others")
