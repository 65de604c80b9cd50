"""Metrics by name: what clients' models are scored by, and whether more of it is better."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.advice import did_you_mean
from hetperm.texts import one_line, shown

Score = Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> mean over the batch
ACCURACY = "accuracy"  # the metric unless another is named
OWN = "score"  # the name of a function that has none that could head a column
# They name other columns and keys.
TAKEN = (
    *("loss", "tail", "val", "tier", "tiers", "alpha", "cost", "seed", "seeds", "epoch", "epochs", "client", "width"),
    *("group", "metric", "better", "model", "partition", "algorithm", "dataset", "baselines", "attendance"),
    *("clients", "params", "joined", "method", "share", "partners", "mmacs", "macs", "visits", "rounds", "skipped"),
    *("finished", "asked", "absent", "chosen", "block", "times", "never", "mean", "worst", "weighted", "std", "commit"),
)


@dataclass(frozen=True)
class Metric:
    """What a model is scored by.

    Attributes:
        name: heads columns of tables and files; small letters, digits and hyphens.
        score: (outputs, labels) -> mean over the batch.
        better: whether more of it is better ("higher") or less ("lower").
        finish: from the mean over all samples of a client to its score; None if they are the same.

    Example:
        >>> error = Metric("squared-error", F.mse_loss, better="lower")
        >>> error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        tensor(2.)
    """

    name: str
    score: Score
    better: Literal["higher", "lower"] = "higher"
    finish: Callable[[float], float] | None = None

    def __post_init__(self):
        if not (isinstance(self.name, str) and re.fullmatch(r"[a-z][a-z0-9-]{0,99}", self.name)) or self.name in TAKEN:
            raise ValueError(
                f"a metric is named {shown(self.name)}; a name has small letters, digits and hyphens, such as "
                f"'mean-iou', and is none of {', '.join(TAKEN)}"
            )
        if not isinstance(self.better, str) or self.better not in ("higher", "lower"):
            raise ValueError(f"metric {self.name!r}: better is {shown(self.better)}; it must be 'higher' or 'lower'")
        for label, function in (("score", self.score), ("finish", self.finish)):
            if not (callable(function) or (function is None and label == "finish")):
                raise TypeError(f"metric {self.name!r}: {label} is {shown(function)}; it must be a function")

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean over a batch."""
        return self.score(outputs, labels)

    def of_client(self, mean: float) -> float:
        """The score of a client, from the mean over all its samples."""
        if self.finish is None:
            return mean
        try:
            score = self.finish(mean)
        except Exception as error:  # a user's code can raise anything
            reason = one_line(str(error)) or type(error).__name__
            raise ValueError(f"metric {self.name!r}: finish fails on {mean:g} ({reason})") from error
        if isinstance(score, Tensor) and score.numel() == 1:
            score = score.item()
        if not isinstance(score, Real):
            raise ValueError(
                f"metric {self.name!r}: finish gives {shown(score)} for {mean:g}; it must return one number"
            )
        return float(score)

    @property
    def lower_is_better(self) -> bool:
        """Whether less of it is better."""
        return self.better == "lower"


# The metrics that come with hetperm


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of samples whose largest logit is that of their true class.

    Args:
        logits: (n, num_classes), or (n, num_classes, ...) for a class at every place.
        y: (n,) classes, or (n, ...).

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor(0.5000)
    """
    _check_tensors(logits, y, "accuracy")
    if logits.dim() < 2 or y.shape != (len(logits), *logits.shape[2:]):
        raise ValueError(
            f"accuracy is for outputs (n, classes) and labels (n,), and these are {tuple(logits.shape)} and "
            f"{tuple(y.shape)}; name another metric, such as mae, or give a function"
        )
    _check_classes(y, logits.shape[1], "accuracy")
    return (logits.argmax(1) == y).float().mean()


def _check_tensors(outputs: Tensor, y: Tensor, name: str) -> None:
    """Raise an error unless a metric is given tensors, and labels that are numbers."""
    for noun, value in (("outputs", outputs), ("labels", y)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{noun} is a {type(value).__name__}; {name} takes tensors, such as torch.as_tensor(x)")
    if y.is_floating_point() and y.isnan().any():
        raise ValueError(f"labels hold nan, which {name} cannot score; remove such samples")


def _check_classes(y: Tensor, classes: int, name: str) -> None:
    """Raise an error if labels hold what is no class: it would be counted as a wrong answer."""
    if y.is_floating_point() or y.dtype == torch.bool or not y.numel():
        return
    smallest, largest = int(y.min()), int(y.max())
    if smallest < 0 or largest >= classes:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(
            f"labels hold {wrong} and {name} is for classes 0 to {classes - 1}; leave out or rename others"
        )


def absolute_error(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean absolute error of real numbers; (n, 1) outputs serve (n,) labels.

    Example:
        >>> absolute_error(torch.tensor([[1.0], [4.0]]), torch.tensor([1.0, 2.0]))
        tensor(1.)
    """
    _check_tensors(outputs, y, "mae")
    if outputs.numel() != y.numel() or len(outputs) != len(y):  # they would be broadcast to all pairs
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} and labels of {tuple(y.shape)} cannot be compared")
    return (outputs.reshape(y.shape) - y).abs().mean()


def dice(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean overlap of predicted and true regions, 2 |A and B| / (|A| + |B|), image by image.

    An image with several classes has the mean over those but 0, the background, that it shows or is said to show; with
    none of them it has 1.

    Args:
        outputs: (n, 1, ...) logits of the foreground, positive for yes, or (n, num_classes, ...) logits.
        y: (n, ...) classes, of two as 0 and 1; with one output also (n, 1, ...).

    Example:
        >>> dice(torch.tensor([[[3.0, 2.0, -1.0, -1.0]]]), torch.tensor([[1, 0, 0, 0]]))  # 2 * 1 / (2 + 1)
        tensor(0.6667)
    """
    _check_tensors(outputs, y, "dice")
    two = outputs.shape[1] == 1
    said = (outputs > 0).long().squeeze(1) if two else outputs.argmax(1)
    true = (y.squeeze(1) if two and y.dim() == outputs.dim() else y).long()
    if said.shape != true.shape:
        raise ValueError(f"outputs of shape {tuple(outputs.shape)} and labels of {tuple(y.shape)} cannot be compared")
    kinds = torch.arange(1, 2 if two else outputs.shape[1], device=outputs.device).view(-1, *[1] * said.dim())
    classes = 2 if two else outputs.shape[1]
    _check_classes(true, classes, "dice")
    # (classes, n, ...): where each class is said to be, and where it is.
    said, true = ((regions == kinds).flatten(2).float() for regions in (said, true))
    sizes = said.sum(2) + true.sum(2)
    overlaps = 2 * (said * true).sum(2) / sizes.clamp(min=1)
    shown_ = (sizes > 0).float()
    per_image = (overlaps * shown_).sum(0) / shown_.sum(0).clamp(min=1)
    return torch.where(shown_.sum(0) > 0, per_image, torch.ones_like(per_image)).mean()


def _exp(mean: float) -> float:
    return math.exp(mean) if mean < 700 else math.inf  # beyond the largest float


METRICS: dict[str, Metric] = {
    "accuracy": Metric("accuracy", accuracy),
    "mae": Metric("mae", absolute_error, better="lower"),
    "perplexity": Metric("perplexity", F.cross_entropy, better="lower", finish=_exp),
    "dice": Metric("dice", dice),
}


def metric_of(value: Any) -> Metric:
    """The metric that a name or a function stands for. Of a function more is better, and its name heads the tables.

    Example:
        >>> metric_of("mae").better, metric_of(lambda outputs, y: y.sum()).name
        ('lower', 'score')
    """
    if isinstance(value, Metric):
        return value
    if isinstance(value, str):
        if value not in METRICS:
            advice = did_you_mean(value, METRICS, f"known are {', '.join(METRICS)}")
            raise ValueError(f"unknown metric {shown(value)}; {advice}")
        return METRICS[value]
    if not callable(value):
        raise TypeError(f"metric is a {type(value).__name__}; it must be a name, a function or a hetperm.Metric")
    name = getattr(value, "__name__", OWN).strip("_").replace("_", "-").lower()
    fits = re.fullmatch(r"[a-z][a-z0-9-]{0,99}", name) and name not in TAKEN
    return Metric(name if fits else OWN, value)
