"""--log tensorboard: metrics as they come, in the files that TensorBoard shows. Needs the extra of that name."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetperm.metrics import METRICS

FOLDER = "tensorboard"
LARGEST_MAP = 1000  # clients up to which their mixing weights are drawn
PIXELS = 200  # at least, of a map
Scalars = Callable[[Sequence[Mapping[str, Any]], Tensor | None], None]  # takes the history so far and mixing weights


def check(log: str, *, has_folder: bool = True) -> None:
    """Raise an error of one sentence if metrics cannot be logged."""
    if log == "none":
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--log tensorboard needs a package that is not installed; pip install 'hetperm[tensorboard]'")
    if not has_folder:
        raise ValueError("log = 'tensorboard' writes to the run's folder and out is None; name a folder with out")


@contextmanager
def opened(folder: Path | None, method: str, *, after: int = 0) -> Iterator[Scalars]:
    """A context with a function that logs the last row of a history; it does nothing if there is no folder.

    Args:
        after: epochs that the method had when it was resumed: what was logged of later ones is dropped.
    """
    if folder is None:
        yield lambda history, alpha: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / FOLDER / method), purge_step=after + 1 if after else None)
    try:
        yield lambda history, alpha: _log(writer, history, alpha)
    finally:
        writer.close()


def _log(writer: Any, history: Sequence[Mapping[str, Any]], alpha: Tensor | None) -> None:
    if not history:
        return
    row, epoch = history[-1], history[-1]["epoch"]
    for key, value in row.items():
        if isinstance(value, list):
            writer.add_histogram(key, torch.tensor(value), epoch)
        elif key != "epoch" and isinstance(value, int | float):
            writer.add_scalar(_tag(key), value, epoch)
    if alpha is not None and len(alpha) <= LARGEST_MAP:
        writer.add_image("mixing weights", _picture(alpha), epoch)
    writer.flush()  # so that it is seen now, and is there after a crash


def _tag(column: str) -> str:
    """The name of a column in groups: those of tiers together, the others by their first word.

    Example:
        >>> _tag("accuracy_tier_mid"), _tag("tail_accuracy_mean"), _tag("visits")
        ('tiers/accuracy mid', 'tail accuracy/mean', 'cost/visits')
    """
    before, tier, name = column.partition("_tier_")
    if tier:
        return f"tiers/{before.replace('_', ' ')} {name}"
    words = column.split("_")
    known = next((k for k, word in enumerate(words) if word in ("loss", *METRICS)), None)
    if known is None:
        return f"cost/{column.replace('_', ' ')}"
    return f"{' '.join(words[: known + 1])}/{' '.join(words[known + 1 :])}"


def _picture(alpha: Tensor) -> Tensor:
    """(1, H, W) the mixing weights, white where they are largest."""
    alpha = alpha.to_dense().detach().float().cpu()
    size = max(1, PIXELS // len(alpha))
    return (alpha / alpha.max().clamp(min=1e-12)).repeat_interleave(size, 0).repeat_interleave(size, 1)[None]
