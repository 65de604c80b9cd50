"""Checks of clients' data before a run: too few samples, labels that cannot be learned or scored, inputs all alike."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import Loss
from hetperm.methods import METHODS
from hetperm.metrics import ACCURACY, METRICS, Metric
from hetperm.shards import Stored, batches_of, first, known_labels, read
from submodels.norms import check_batch, has_batch_norm

log = logging.getLogger(__name__)

IGNORED = -100  # the label that cross-entropy leaves out


def check_samples(clients: Sequence[Client], model: nn.Module, config: Config) -> None:
    """Raise an error if there are too few samples for batch norms or for the noise of gradients."""
    for i, client in enumerate(clients):
        try:
            check_batch(model, client.n_train)
        except ValueError as error:
            raise ValueError(f"client {i}: {error}") from error
    if has_batch_norm(model):
        _check_norms(clients, config)
    # The complexity term is a share of the noise too, unless it is raw or there is only one size.
    by_size = len({client.width for client in clients}) > 1 and config.vc_weight not in (0, "raw")
    needs_noise = METHODS[config.algorithm].mixes and (isinstance(config.regularization, str) or by_size)
    # The noise is the spread of at least two micro-batches, and a batch norm needs two samples in each.
    least = 4 if has_batch_norm(model) else 2
    if needs_noise and max(client.n_train for client in clients) < least:
        raise ValueError(
            f"no client has {least} samples, so the noise of their gradients is unknown; "
            f"give regularization as a number{', and vc_weight 0' if by_size else ''}"
        )


def _check_norms(clients: Sequence[Client], config: Config) -> None:
    """Raise an error if batches are too small for batch norms."""
    if min(config.batch_size, config.global_batch) == 1:
        raise ValueError("batches of 1 sample cannot train BatchNorm; set batch_size and global_batch to at least 2")
    if config.batch_size // config.accumulate < 2:
        raise ValueError(
            f"accumulate {config.accumulate} leaves pieces of 1 sample of a batch of {config.batch_size}, and these "
            f"cannot train BatchNorm; set accumulate to at most {config.batch_size // 2}"
        )
    if config.batch_size < 4 and any([isinstance(client.train, Stored) for client in clients]):
        raise ValueError(
            f"batch_size {config.batch_size} leaves single samples when a Dataset is read in batches, and these cannot "
            "train BatchNorm; set batch_size to at least 4"
        )


def check_images(clients: Sequence[Client], config: Config) -> None:
    """Raise an error if samples are to be mirrored and moved and are no images."""
    if config.augment != "flip-crop":
        return
    x, _ = read(first(clients[0].train, 1))
    if not isinstance(x, Tensor) or x.dim() != 4:
        got = f"of shape {tuple(x.shape[1:])}" if isinstance(x, Tensor) else "several"
        raise ValueError(
            f"augment 'flip-crop' is for images (channels, height, width) and these inputs are {got}; leave it out, or "
            "give fit a function"
        )


def check_tested(clients: Sequence[Client]) -> None:
    """Warn if some clients have test data and some have none."""
    untested = [i for i, client in enumerate(clients) if client.test is None]
    if 0 < len(untested) < len(clients):
        log.warning(
            "%d of %d clients have no test data and are in no score (the first is client %d)",
            len(untested), len(clients), untested[0],
        )  # fmt: skip


def check_masks(clients: Sequence[Client]) -> None:
    """Warn if clients are scored on classes that they mask, which no model of theirs can answer."""
    lost = []
    for i, client in enumerate(clients):
        for shard in (client.val, client.test):
            y = None if shard is None or client.classes is None else known_labels(shard)
            if y is None or y.is_floating_point() or y.dim() != 1:
                continue
            lost += [(i, k) for k in y.unique().tolist() if 0 <= k < len(client.classes) and not client.classes[k]]
    if lost:
        log.warning(
            "client %d is scored on class %d, which its classes leave out, so that it cannot be right (%d clients)",
            *lost[0], len({i for i, _ in lost}),
        )  # fmt: skip


def check_labels(clients: Sequence[Client], loss: Loss, metric: Metric) -> None:
    """Raise an error if a client has no label to learn from; warn if all labels of all clients are one class."""
    scored: set[int] = set()  # classes of test data
    looked: set[tuple[str, int]] = set()  # at labels that several clients share
    for i, client in enumerate(clients):
        for part, shard in (("validation", client.val), ("test", client.test)):
            y = None if shard is None else known_labels(shard)
            if y is None or (part, id(y)) in looked:
                continue
            if isinstance(shard, tuple):  # the labels of a view are made anew, and another's may get their place
                looked.add((part, id(y)))
            _check_scored(f"client {i}: of its {part} labels", y, metric, left_out=loss is F.cross_entropy)
            if part == "test" and not y.is_floating_point():
                scored |= set(y.unique().tolist()) - {IGNORED}
    if loss is not F.cross_entropy:  # what labels mean to another loss is not known here
        return
    classes: set[int] = set()
    for i, client in enumerate(clients):
        y = known_labels(client.train)
        if y is None or y.is_floating_point() or y.dim() != 1:  # reading all samples for their labels may take an hour
            return
        own = set(y.unique().tolist()) - {IGNORED}
        if not own:
            raise ValueError(
                f"client {i}: all its labels are {IGNORED}, which cross-entropy leaves out; give it others"
            )
        classes |= own
    strange = sorted(scored - classes)
    if strange and len(classes) > 1:
        log.warning("test data hold class %d, which no client trains on (%d such classes)", strange[0], len(strange))
    if len(classes) == 1:
        (only,) = classes
        others = "no model learns the others that are tested"
        outcome = others if scored - {only} else "models learn nothing but to give this answer"
        log.warning("all training samples are of class %d: %s", only, outcome)


def _check_scored(whose: str, y: Tensor, metric: Metric, *, left_out: bool) -> None:
    """Raise an error if labels are no classes, so that no model can be scored by them.

    Args:
        left_out: whether the loss leaves them out; without a label even it is no number.
    """
    if y.is_floating_point():
        return
    count = int((y == IGNORED).sum())
    # These would count them as wrong answers, whatever the loss does about them.
    counts_all = metric in (METRICS[ACCURACY], METRICS["dice"])
    if count and (counts_all or (left_out and count == y.numel())):
        raise ValueError(
            f"{whose} {count} of {y.numel()} are {IGNORED}, which cross-entropy leaves out and {metric.name} does not; "
            "leave such samples out, or give a metric that leaves out such labels"
        )


def check_inputs(clients: Sequence[Client]) -> None:
    """Warn if all training samples of all clients are the same; stored samples are not read for that."""
    for client in clients:
        if isinstance(client.train, Stored):
            return
        for x, _ in batches_of(client.train, 64):
            like, _ = read(first(clients[0].train, 1))
            if not isinstance(x, Tensor) or x.shape[1:] != like.shape[1:] or not torch.equal(x, like.expand_as(x)):
                return  # nearly always in the first batch of the first client
    if sum(client.n_train for client in clients) > 1:
        log.warning("all training samples are the same: nothing can be learned from them")
