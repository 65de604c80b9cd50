"""Checks before a run: samples, labels and weights that cannot be trained, and a rehearsal of a user's functions."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.client import Client, input_shape
from hetperm.config import Config
from hetperm.device.augment import Augment
from hetperm.device.bench import Loss, outputs_of
from hetperm.methods import METHODS
from hetperm.metrics import Metric
from hetperm.shards import Inputs, Shard, Stored, View, batches_of, first, known_labels, mapped, read
from hetperm.texts import one_line, shown
from submodels.norms import check_batch, has_batch_norm

log = logging.getLogger(__name__)

FIT = "give fit one that takes them"


def at_model(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs on the device of a model, measurements in its precision."""
    weight = next(model.parameters(), torch.empty(0))
    return mapped(lambda x: x.to(weight.device, weight.dtype if x.is_floating_point() else None), inputs)


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


IGNORED = -100  # the label that cross-entropy leaves out


def check_labels(clients: Sequence[Client], loss: Loss) -> None:
    """Raise an error if a client has no label to learn from; warn if all labels of all clients are one class."""
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
    if len(classes) == 1:
        (only,) = classes
        tested = [known_labels(client.test) for client in clients if client.test is not None]
        others = any([y is not None and bool(((y != only) & (y != IGNORED)).any()) for y in tested])
        outcome = (
            "no model learns the others that are tested" if others else "every model is right, and nothing is learned"
        )
        log.warning("all training samples are of class %d: %s", only, outcome)


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


def check_weights(model: nn.Module) -> None:
    """Raise an error if a user's model has weights that cannot be copied or trained."""
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} of the model has no size yet; call the model once on a batch before fit")
        if not p.is_floating_point():
            raise ValueError(f"{name} of the model is {p.dtype}; weights must be real numbers, such as float32")
        if not p.is_meta and not p.isfinite().all():
            raise ValueError(f"{name} of the model is not finite before training; give fit a model with other weights")


def rehearse(
    model: nn.Module,
    clients: Sequence[Client],
    loss: Loss,
    metric: Metric,
    augment: Augment | None = None,
    *,
    remedy: str = FIT,
) -> Any:
    """Call a model, loss and metric on two samples, so that what does not fit fails before training.

    The model is left as it was, and no random number is drawn from the global generator. What the model returned is
    returned: a tensor, or an object with logits.

    Args:
        remedy: the end of an error's sentence.
    """
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            x, y = at_model(model, _two_samples(0, clients[0]))
            _check_kinds(clients)
            if augment is not None:
                x, y = _augmented(augment, x, y)
            raw: list[Any] = []
            outputs = tried("model", lambda x: outputs_of(_listening(model.eval(), raw), x), (x,), about(x), remedy)
            if not isinstance(outputs, Tensor):
                raise ValueError(
                    f"the model returns a {type(outputs).__name__}; it must return a tensor, or an object with logits"
                )
            pair = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(y.shape)}, {y.dtype}"
            if loss is F.cross_entropy and outputs.dim() == 2:
                _check_range(clients, outputs.shape[1])
            value = paired("loss", loss, (outputs, y), pair, remedy)
            learns = any(p.requires_grad for p in model.parameters())
            if not isinstance(value, Tensor) or value.numel() != 1 or (learns and not value.requires_grad):
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
                raise ValueError(f"the loss gives {got}; it must be one number, a tensor made from the model's outputs")
            score = paired("metric", metric, (outputs.detach(), y), pair, remedy)
            tensor = isinstance(score, Tensor)
            if not isinstance(score, Tensor | int | float) or (tensor and (score.is_complex() or score.numel() != 1)):
                raise ValueError(f"the metric gives {shown(score)}; it must be one number")
            metric.of_client(float(score))
            for i in _of_other_shapes(clients):
                x, _ = at_model(model, _two_samples(i, clients[i]))
                tried("model", lambda x: outputs_of(model, x), (x,), f"client {i}'s {about(x)}", remedy)
    finally:
        for part, training in modes:
            part.training = training
    return raw[0]


def _check_kinds(clients: Sequence[Client]) -> None:
    """Raise an error if inputs or labels are of one kind here and of another there; Datasets are not read."""
    like = _in_memory(clients[0].train)
    for i, client in enumerate(clients):
        for part, shard in (("training", client.train), ("validation", client.val), ("test", client.test)):
            for noun, x in _in_memory(shard).items():
                if noun not in like:
                    continue
                if x.is_floating_point() != like[noun].is_floating_point():
                    raise ValueError(
                        f"client {i}: its {part} {noun} are {x.dtype} and the training {noun} of client 0 "
                        f"{like[noun].dtype}; convert classes with .long() and measurements with .float()"
                    )
                if x.dim() != like[noun].dim():
                    shapes = tuple(x.shape[1:]), tuple(like[noun].shape[1:])
                    raise ValueError(
                        f"client {i}: one of its {part} {noun} has shape {shapes[0]} and one of the training {noun} of "
                        f"client 0 {shapes[1]}; give all as many dimensions"
                    )


def _in_memory(shard: Shard | None) -> dict[str, Tensor]:
    """The inputs, if they are one tensor, and the labels, of the pool that a view is of; none of a Dataset."""
    if shard is None or isinstance(shard, Stored):
        return {}
    pair = shard.pool if isinstance(shard, View) else shard
    return {noun: x for noun, x in zip(("inputs", "labels"), pair, strict=True) if isinstance(x, Tensor)}


def _of_other_shapes(clients: Sequence[Client]) -> list[int]:
    """The first client of every shape of inputs that client 0 does not have; those of Datasets are not known."""
    shapes = [input_shape(client.train) for client in clients]
    return [shapes.index(shape) for shape in dict.fromkeys(shapes) if shape not in (None, shapes[0])]


def _listening(model: nn.Module, heard: list[Any]) -> Callable[..., Any]:
    """The model, noting what it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        heard.append(model(*args, **kwargs))
        return heard[-1]

    return run


def _two_samples(i: int, client: Client) -> tuple[Inputs, Tensor]:
    """The first samples of client i, read as they will be in training."""
    try:
        return read(first(client.train, 2))
    except Exception as error:  # a Dataset and its collate are a user's code
        if not isinstance(client.train, Stored):
            raise
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"the Dataset of client {i} cannot be read ({reason})") from error


def _augmented(augment: Augment, x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    answer = tried("augment", augment, (x, y, torch.Generator().manual_seed(0)), about(x))
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[1], Tensor)):
        raise ValueError(f"augment gives {shown(answer)}; it must return a pair, inputs and labels")
    return answer[0], answer[1]


def about(x: Inputs) -> str:
    """Inputs for errors."""
    if isinstance(x, Tensor):
        return f"inputs of shape {tuple(x.shape)} and type {x.dtype}"
    if isinstance(x, Mapping):
        return f"inputs {', '.join(f'{name} {tuple(one.shape)}' for name, one in x.items() if isinstance(one, Tensor))}"
    return f"{len(x)} inputs of shapes {', '.join(str(tuple(one.shape)) for one in x if isinstance(one, Tensor))}"


def tried(noun: str, function: Callable[..., Any], args: tuple[Any, ...], what: str, remedy: str = FIT) -> Any:
    """What a user's function returns; an error says on what it failed."""
    try:
        return function(*args)
    except Exception as error:  # a user's code can raise anything
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"the {noun} fails on {what} ({reason}); {remedy}") from error


def paired(noun: str, function: Callable[..., Any], args: tuple[Tensor, Tensor], what: str, remedy: str = FIT) -> Any:
    """What a loss or metric returns; an error also if it compares every output with every label."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        value = tried(noun, function, args, what, remedy)
        of_all_pairs = _compares_all_pairs(function, *args)
    if of_all_pairs or any(["target size" in str(one.message) for one in heard]):
        raise ValueError(
            f"the {noun} compares every output with every label ({what}); give labels of shape "
            f"{tuple(args[0].shape)}, or the model outputs of another"
        )
    for one in heard:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return value


def _compares_all_pairs(function: Callable[..., Any], outputs: Tensor, labels: Tensor) -> bool:
    """Whether (n, 1) outputs are broadcast against (n,) labels, as by ``(outputs - labels) ** 2``: no warning says so.

    Then the same outputs as (n,) give another value. Numbers between 0 and 1 suit most functions.
    """
    if outputs.shape[1:] != (1,) or labels.dim() != 1:
        return False
    column, y, values = outputs.detach().new_tensor([[0.2], [0.7]]), labels.new_tensor([1, 0]), []
    for x in (column, column.flatten()):
        torch.manual_seed(0)
        try:
            values.append(float(function(x, y)))
        except Exception:  # a user's code can raise anything, and need not take both shapes
            return False
    return not math.isclose(*values, rel_tol=1e-3)


def _check_range(clients: Sequence[Client], outputs: int) -> None:
    """Raise an error if a client has a label that is no output of the model, or trains on one that it masks."""
    for i, client in enumerate(clients):
        for part, shard in (("", client.train), ("validation ", client.val), ("test ", client.test)):
            y = torch.empty(0) if shard is None else _labels_at_hand(i, client, shard)
            if y.is_floating_point() or y.dim() != 1:
                continue
            wrong = [label for label in y.unique().tolist() if label != IGNORED and not 0 <= label < outputs]
            if wrong:
                raise ValueError(
                    f"client {i}: its {part}labels hold {wrong[0]} and the model has {outputs} outputs; number classes "
                    f"from 0 to {outputs - 1}, or give the model more outputs"
                )
        if client.classes is None:
            continue
        if len(client.classes) != outputs:
            raise ValueError(
                f"client {i}: classes has {len(client.classes)} values and the model has {outputs} outputs; one each"
            )
        y = _labels_at_hand(i, client, client.train)
        masked = [] if y.is_floating_point() else [k for k in y.unique().tolist() if k >= 0 and not client.classes[k]]
        if masked:
            raise ValueError(
                f"client {i}: it trains on label {masked[0]}, which its classes leave out; set that to True"
            )


def _labels_at_hand(i: int, client: Client, shard: Shard) -> Tensor:
    """The labels of a shard, or those of two samples: to read a Dataset for its labels may take an hour."""
    known = known_labels(shard)
    if known is not None:
        return known
    return _two_samples(i, client)[1] if shard is client.train else read(first(shard, 2))[1]
