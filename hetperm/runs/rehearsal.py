"""The rehearsal before a run: a user's model, loss, metric and augment are called on two samples."""

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.client import Client, input_shape
from hetperm.device.augment import Augment
from hetperm.device.bench import Loss, outputs_of
from hetperm.metrics import ACCURACY, METRICS, Metric
from hetperm.runs.data_checks import IGNORED
from hetperm.runs.loss_checks import FIT, check_loss, check_real, check_unchanged, harmless, paired, tried
from hetperm.shards import Inputs, Shard, Stored, View, first, known_labels, mapped, read, tensors_of
from hetperm.texts import one_line, shown

log = logging.getLogger(__name__)


def at_model(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs on the device of a model, measurements in its precision."""
    weight = next(model.parameters(), torch.empty(0))
    return mapped(lambda x: x.to(weight.device, weight.dtype if x.is_floating_point() else None), inputs)


def check_weights(model: nn.Module, remedy: str = "give fit a model with other weights") -> None:
    """Raise an error if a user's model has weights that cannot be copied or trained."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is compiled by torch.jit, which cannot be trained here; give the module it was made of"
        )
    if any([hasattr(part, "_orig_mod") for part in model.modules()]):
        raise ValueError("the model, or a part of it, is made by torch.compile; give the module it was made of")
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} of the model has no size yet; call the model once on a batch before fit")
        if p.layout is not torch.strided:
            raise ValueError(f"{name} of the model is a sparse tensor; make it a dense one (to_dense)")
        if p.is_meta:
            raise ValueError(f"{name} of the model is on the meta device, which holds no values; give it real ones")
        if p._backward_hooks:
            log.warning("%s of the model has a hook (register_hook), which clients' copies of it do not have", name)
        if not p.is_floating_point():
            raise ValueError(f"{name} of the model is {p.dtype}; weights must be real numbers, such as float32")
        if not p.isfinite().all():
            raise ValueError(f"{name} of the model is not finite before training; {remedy}")
    for name, buffer in model.named_buffers():
        if buffer.is_meta or buffer.layout is not torch.strided:
            raise ValueError(f"the buffer {name} of the model is sparse or on the meta device; make it a plain tensor")


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

    The model and the data are left as they were, and no random number is drawn from the global generator. What the
    model returned is returned: a tensor, or an object with logits.

    Args:
        remedy: the end of an error's sentence.
    """
    modes = [(part, part.training) for part in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            x, y = at_model(model, _two_samples(0, clients[0]))
            _check_kinds(clients)
            # Scores are taken on samples as they are, without what augment makes of labels.
            plain = y if y.is_floating_point() else y.masked_fill(y == IGNORED, 0)
            if augment is not None:
                x, y = _augmented(augment, x, y)
            raw: list[Any] = []
            outputs = harmless("model", lambda x: outputs_of(_listening(model.eval(), raw), x), (x,), about(x), remedy)
            if not isinstance(outputs, Tensor):
                raise ValueError(
                    f"the model returns a {type(outputs).__name__}; it must return a tensor, or an object with logits"
                )
            _check_training(model, x, takes_tensors=loss is F.cross_entropy)
            _check_rows(outputs)
            _check_single(model, x, outputs)
            _warn_of_batches(model, x, outputs)
            pair = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(y.shape)}, {y.dtype}"
            if loss is F.cross_entropy and outputs.dim() == 2:
                _check_range(clients, outputs.shape[1])
            value = paired("loss", loss, (outputs, y), pair, remedy)
            check_loss(value, loss, outputs, list(model.parameters()))
            if loss is not F.cross_entropy and metric is METRICS[ACCURACY] and outputs.shape[1:2] == (1,):
                raise ValueError(
                    "the model has one output and is scored by accuracy, for which the largest of several is the "
                    "answer; name another metric, such as mae, or give a function"
                )
            if loss is not F.cross_entropy and metric is METRICS[ACCURACY] and outputs.dim() >= 2:
                _check_answers(clients, outputs.shape[1])
            pair = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(plain.shape)}, {plain.dtype}"
            score = paired("metric", metric, (outputs.detach(), plain), pair, remedy)
            tensor = isinstance(score, Tensor)
            if not isinstance(score, Tensor | Real) or (tensor and (score.is_complex() or score.numel() != 1)):
                raise ValueError(f"the metric gives {shown(score)}; it must be one number")
            metric.of_client(float(score))
            for i in _of_other_shapes(clients):
                x, _ = at_model(model, _two_samples(i, clients[i]))
                tried("model", lambda x: outputs_of(model, x), (x,), f"client {i}'s {about(x)}", remedy)
            for i, part in _of_other_arguments(clients):
                x, _ = at_model(model, _two_samples(i, clients[i], part))
                which = "" if part == "train" else f"{part} "
                tried("model", lambda x: outputs_of(model, x), (x,), f"client {i}'s {which}{about(x)}", remedy)
            for i, part in _scored_datasets(clients):
                x, labels = at_model(model, _two_samples(i, clients[i], part))
                tried("model", lambda x: outputs_of(model, x), (x,), f"client {i}'s {part} {about(x)}", remedy)
                if labels.is_floating_point() != plain.is_floating_point():
                    raise ValueError(
                        f"client {i}: its {part} labels are {labels.dtype} and the training labels of client 0 "
                        f"{plain.dtype}; convert classes with .long() and measurements with .float()"
                    )
                if labels.dim() != plain.dim():
                    raise ValueError(
                        f"client {i}: one of its {part} labels has shape {tuple(labels.shape[1:])} and one of the "
                        f"training labels of client 0 {tuple(plain.shape[1:])}; give all as many dimensions"
                    )
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


def _of_other_arguments(clients: Sequence[Client]) -> list[tuple[int, str]]:
    """The first client and part of every kind of arguments that client 0's training data are not; none of Datasets."""
    found: dict[Any, tuple[int, str]] = {}
    for i, client in enumerate(clients):
        for part in ("train", "val", "test"):
            shard = getattr(client, part)
            if shard is not None and not isinstance(shard, Stored):
                found.setdefault(_arguments(shard), (i, part))
    return [where for where in found.values() if where != (0, "train")]


def _arguments(shard: Shard) -> Any:
    """What the inputs of a shard are to a model: one tensor, several, or keywords."""
    inputs = (shard.pool if isinstance(shard, View) else shard)[0]
    if isinstance(inputs, Tensor):
        return "tensor"
    return frozenset(inputs) if isinstance(inputs, Mapping) else len(inputs)


def _of_other_shapes(clients: Sequence[Client]) -> list[int]:
    """The first client of every shape of inputs that client 0 does not have; those of Datasets are not known."""
    shapes = [input_shape(client.train) for client in clients]
    return [shapes.index(shape) for shape in dict.fromkeys(shapes) if shape not in (None, shapes[0])]


def _scored_datasets(clients: Sequence[Client]) -> list[tuple[int, str]]:
    """(client, "val" or "test") of all that are Datasets, which nothing else reads before they are scored."""
    parts = [(i, part) for i in range(len(clients)) for part in ("val", "test")]
    return [(i, part) for i, part in parts if isinstance(getattr(clients[i], part), Stored)]


def _listening(model: nn.Module, heard: list[Any]) -> Callable[..., Any]:
    """The model, noting what it returns."""

    def run(*args: Any, **kwargs: Any) -> Any:
        heard.append(model(*args, **kwargs))
        return heard[-1]

    return run


def _check_training(model: nn.Module, x: Inputs, *, takes_tensors: bool) -> None:
    """Raise an error if the model changes its inputs in training, as dropout in place does. It is left as it was.

    Args:
        takes_tensors: whether the loss takes a tensor, so that what the model returns in training must be one.
    """
    given, buffers = tensors_of(x), [(buffer, buffer.clone()) for buffer in model.buffers()]
    before = [(one._version, one.detach().clone()) for one in given]
    outputs = torch.empty(0)
    try:
        with torch.no_grad():
            outputs = outputs_of(model.train(), x)
    except Exception:  # a user's code can raise anything; what fails here fails in training too, and says where
        pass
    finally:
        model.eval()
        for buffer, old in buffers:
            buffer.data.copy_(old)
    check_unchanged("model", given, before)
    if takes_tensors and not isinstance(outputs, Tensor):
        raise ValueError(
            f"in training mode the model returns a {type(outputs).__name__}, and cross-entropy takes a tensor; let it "
            "return one, or give a loss that takes what it returns"
        )


def _check_rows(outputs: Tensor) -> None:
    """Raise an error if outputs are not a plain tensor with an axis for the samples of a batch."""
    check_real("model", outputs)
    if outputs.is_nested or outputs.layout is not torch.strided:
        raise ValueError("the model returns a sparse or nested tensor; return a dense one (to_dense, to_padded_tensor)")
    if outputs.dim() == 0:
        raise ValueError("the model returns a single number for a batch of two samples; it must return one row each")


def _check_single(model: nn.Module, x: Inputs, outputs: Tensor) -> None:
    """Raise an error if the outputs for one sample are not shaped as those for two: the last batch may have one."""
    one = mapped(lambda one: one[:1], x)
    try:
        alone = outputs_of(model, one)
    except Exception:  # a user's code can raise anything, and some models take no single sample
        return
    if isinstance(alone, Tensor) and len(outputs) == 2 and alone.shape != (1, *outputs.shape[1:]):
        raise ValueError(
            f"the model gives outputs of shape {tuple(alone.shape)} for one sample and {tuple(outputs.shape)} for two; "
            f"they must have shape {(1, *outputs.shape[1:])}, so squeeze no axis but those that are meant"
        )


def _warn_of_batches(model: nn.Module, x: Inputs, outputs: Tensor) -> None:
    """Warn if outputs for two samples change with a third one in their batch, or by chance."""
    try:
        # The first again: a mean over the batch is then another one.
        others = outputs_of(model, mapped(lambda one: torch.cat([one, one[:1]]), x))
        away = float((others[:2] - outputs).detach().abs().max())
    except Exception:  # a user's code can raise anything; steps and scores take other batches than this
        return
    if away > 1e-2 * float(outputs.detach().abs().max()):
        log.warning(
            "the model's outputs for a sample depend on the other samples of its batch, or on chance, in "
            "evaluation too; its scores then depend on how samples are divided into batches"
        )


def _two_samples(i: int, client: Client, part: str = "train") -> tuple[Inputs, Tensor]:
    """Copies of the first samples of client i, read as they will be in training, or of its "val" or "test" data."""
    shard = getattr(client, part)
    try:
        x, y = read(first(shard, 2))
        return mapped(torch.clone, x), y.clone()
    except Exception as error:  # a Dataset and its collate are a user's code
        if not isinstance(shard, Stored):
            raise
        which = "" if part == "train" else f"{part} "
        reason = one_line(str(error)) or type(error).__name__
        raise ValueError(f"the {which}Dataset of client {i} cannot be read ({reason})") from error


def _augmented(augment: Augment, x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    answer = tried("augment", augment, (x, y, torch.Generator().manual_seed(0)), about(x))
    if not (isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[1], Tensor)):
        raise ValueError(f"augment gives {shown(answer)}; it must return a pair, inputs and labels")
    inputs, labels = answer
    for one in (*tensors_of(inputs), labels):
        check_real("augment", one)
    counts = {len(one) for one in (*tensors_of(inputs), labels) if one.dim()}
    if counts != {len(y)}:
        raise ValueError(
            f"augment makes {min(counts, default=0)} samples of {len(y)}; it must return as many as it gets"
        )
    was_finite = all([bool(one.isfinite().all()) for one in tensors_of(x) if one.is_floating_point()])
    if was_finite and any([bool(one.isnan().any()) for one in tensors_of(inputs) if one.is_floating_point()]):
        raise ValueError("augment makes inputs that are nan of some that are not; mend it, or leave it out")
    return inputs, labels


def about(x: Inputs) -> str:
    """Inputs for errors."""
    if isinstance(x, Tensor):
        return f"inputs of shape {tuple(x.shape)} and type {x.dtype}"
    if isinstance(x, Mapping):
        return f"inputs {', '.join(f'{name} {tuple(one.shape)}' for name, one in x.items() if isinstance(one, Tensor))}"
    return f"{len(x)} inputs of shapes {', '.join(str(tuple(one.shape)) for one in x if isinstance(one, Tensor))}"


def _check_range(clients: Sequence[Client], outputs: int) -> None:
    """Raise an error if a client has a label that is no output of the model, or trains on one that it masks."""
    if outputs == 0:
        raise ValueError("the model has no outputs; give it one for every class")
    for i, client in enumerate(clients):
        for part, name in (("", "train"), ("validation ", "val"), ("test ", "test")):
            y = torch.empty(0) if getattr(client, name) is None else _labels_at_hand(i, client, name)
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
        y = _labels_at_hand(i, client, "train")
        masked = [] if y.is_floating_point() else [k for k in y.unique().tolist() if k >= 0 and not client.classes[k]]
        if masked:
            raise ValueError(
                f"client {i}: it trains on label {masked[0]}, which its classes leave out; set that to True"
            )


def _check_answers(clients: Sequence[Client], outputs: int) -> None:
    """Raise an error if clients are scored on a label that is no output: a loss may leave it out, accuracy does not."""
    for i, client in enumerate(clients):
        for part, shard in (("validation", client.val), ("test", client.test)):
            y = None if shard is None else known_labels(shard)
            if y is None or y.is_floating_point() or y.dtype == torch.bool or not y.numel():
                continue
            for label in (int(y.min()), int(y.max())):
                if not 0 <= label < outputs:
                    raise ValueError(
                        f"client {i}: its {part} labels hold {label} and the model has {outputs} outputs; leave such "
                        "samples out, or give a metric that leaves out such labels"
                    )


def _labels_at_hand(i: int, client: Client, part: str) -> Tensor:
    """The labels of a shard, or those of two samples: to read a Dataset for its labels may take an hour."""
    known = known_labels(getattr(client, part))
    return _two_samples(i, client, part)[1] if known is None else known
