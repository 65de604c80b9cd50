"""A user's loss and metric before a run: what they take, whether they change it, and what they make of two samples."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm.device.bench import Loss
from hetperm.shards import tensors_of
from hetperm.texts import reason_of, shown

log = logging.getLogger(__name__)

FIT = "give fit one that takes them"


def check_loss(value: Any, loss: Loss, outputs: Tensor, parameters: Sequence[Tensor]) -> None:
    """Raise an error if what a loss gave is none; warn if nothing can be learnt from it, or only nonsense.

    Args:
        value: what it made of the outputs.
        parameters: of the model.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not isinstance(value, Tensor) or value.numel() != 1 or (trained and not value.requires_grad):
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        if isinstance(value, Tensor) and value.numel() == 1:
            got = "a number without a gradient (detached, or with gradients switched off)"
        raise ValueError(f"the loss gives {got}; it must be one number, a tensor made from the model's outputs")
    if value.is_complex():
        raise ValueError(f"the loss gives {shown(value.item())}; it must be a real number, such as loss.abs()")
    plain = outputs.detach()
    if plain.isnan().any():
        raise ValueError("the model's outputs are nan before training; check its layers, and its inputs for extremes")
    if value.isnan():
        raise ValueError("the loss is nan before training, of outputs that are not; check it, and weights given to it")
    takes_logs = isinstance(loss, nn.NLLLoss) or loss is F.nll_loss
    takes_logits = isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy
    if takes_logs and plain.dim() >= 2 and not _are_shares(plain.exp()):
        log.warning(
            "the loss is that of log-probabilities, and the model's outputs are none; end the model with log_softmax, "
            "or leave the loss out: cross-entropy takes outputs as they are"
        )
    elif takes_logits and plain.dim() >= 2 and plain.shape[1] > 1 and _are_shares(plain):
        log.warning(
            "the model's outputs are probabilities, and cross-entropy takes them for logits, which trains slowly; "
            "leave the softmax out of the model"
        )
    elif float(value.detach()) < 0:
        log.warning(
            "the loss is %.3g on two samples before training; unless it may fall below zero, as a likelihood does, it "
            "rewards the wrong answers",
            float(value.detach()),
        )
    if trained and not _moves(value, trained):
        log.warning(
            "the loss has a gradient of zero for all weights on two samples before training; if it has everywhere, no "
            "client learns"
        )


def _are_shares(x: Tensor) -> bool:
    """Whether the classes of every sample sum to one, none of them below zero."""
    return bool((x >= 0).all()) and torch.allclose(x.sum(1), torch.ones_like(x.sum(1)), atol=1e-3)


def _moves(value: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether a loss changes with some weight; also if nobody can tell, as after an operation without a gradient."""
    try:
        gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    except Exception:  # a hook of the user's, or an operation without a gradient; training says so with the place
        return True
    return any([g is not None and bool((g != 0).any()) for g in gradients])


def tried(noun: str, function: Callable[..., Any], args: tuple[Any, ...], what: str, remedy: str = FIT) -> Any:
    """What a user's function returns; an error says on what it failed."""
    try:
        return function(*args)
    except Exception as error:  # a user's code can raise anything
        raise ValueError(f"the {noun} fails on {what} ({reason_of(error)}); {remedy}") from error


def harmless(noun: str, function: Callable[..., Any], args: tuple[Any, ...], what: str, remedy: str = FIT) -> Any:
    """What a user's function returns, as `tried` does; an error also if it changes the last of its arguments in place.

    That is the inputs of a model and the labels of a loss or metric. Outputs are nobody's: they may be changed.
    """
    given = tensors_of(args[-1])
    before = [(x._version, x.detach().clone()) for x in given]
    value = tried(noun, function, args, what, remedy)
    # In scores and reports these are a client's own samples: a change would stay, and add up.
    check_unchanged(noun, given, before)
    return value


def check_unchanged(noun: str, given: Sequence[Tensor], before: Sequence[tuple[int, Tensor]]) -> None:
    """Raise an error if tensors are not what they were before, given by their versions and copies."""
    if any([x._version != version or _differ(x, old) for x, (version, old) in zip(given, before, strict=True)]):
        raise ValueError(
            f"the {noun} changes in place what it is given, which are the samples of a client; let it work on a copy, "
            "such as x.clone()"
        )


def _differ(x: Tensor, old: Tensor) -> bool:
    return x.shape != old.shape or bool(((x != old) & (old == old)).any())


def paired(noun: str, function: Callable[..., Any], args: tuple[Tensor, Tensor], what: str, remedy: str = FIT) -> Any:
    """What a loss or metric returns; an error also if it compares every output with every label."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        value = harmless(noun, function, (args[0].clone(), args[1]), what, remedy)
        of_all_pairs = _compares_all_pairs(function, *args)
        _warn_of_sums(noun, function, args)
    if of_all_pairs or any(["target size" in str(one.message) for one in heard]):
        raise ValueError(
            f"the {noun} compares every output with every label ({what}); give labels of shape "
            f"{tuple(args[0].shape)}, or the model outputs of another"
        )
    check_real(noun, value)
    for one in heard:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return value


def check_real(noun: str, value: Any) -> None:
    """Raise an error if what a user's function gives is a tensor without values."""
    if isinstance(value, Tensor) and value.is_meta:
        raise ValueError(f"the {noun} gives a tensor on the meta device, which holds no values; keep it where it was")


def _warn_of_sums(noun: str, function: Callable[..., Any], args: tuple[Tensor, Tensor]) -> None:
    """Warn if a function gives twice as much for every sample twice: a mean over the batch would not."""
    outputs, y = args[0].detach(), args[1]
    # A count of right answers may be 0 on a few samples, so labels that are all right are tried too.
    right = outputs.argmax(1) if outputs.dim() == 2 and y.dim() == 1 and not y.is_floating_point() else y
    values = []
    try:
        for labels in (y, right):
            for times in (1, 2):
                torch.manual_seed(0)
                values.append(float(function(torch.cat([outputs] * times), torch.cat([labels] * times))))
    except Exception:  # a user's code can raise anything, and the batch is none of a client
        return
    if any([once and math.isclose(twice, 2 * once, rel_tol=1e-3) for once, twice in (values[:2], values[2:])]):
        log.warning(
            "the %s is twice as large for a batch of every sample twice; it must be the mean over samples, or steps "
            "and figures depend on the size of batches",
            noun,
        )


def _fails(function: Callable[..., Any], outputs: Tensor, labels: Tensor) -> bool:
    """Whether a function cannot take them because their shapes do not go together."""
    try:
        function(outputs.detach(), labels)
    except RuntimeError as error:
        return "must match the size of tensor" in str(error)
    except Exception:  # a user's code can raise anything, and the batch is none of a client
        return False
    return False


def _compares_all_pairs(function: Callable[..., Any], outputs: Tensor, labels: Tensor) -> bool:
    """Whether (n, 1) outputs are broadcast against (n,) labels, as by ``(outputs - labels) ** 2``: no warning says so.

    Then the same outputs as (n,) give another value. Numbers between 0 and 1 suit most functions.
    """
    if outputs.dim() == 2 and outputs.shape[0] == outputs.shape[1] > 1 and labels.dim() == 1:
        # Two samples of two classes fit by chance; of three no such function can make anything.
        return _fails(function, torch.cat([outputs, outputs[:1]]), torch.cat([labels, labels[:1]]))
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
