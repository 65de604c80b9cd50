"""Running statistics of batch norms: left alone in training, computed for the width that is deployed.

The mean and variance that a BatchNorm keeps belong to one width on one client's data: half the channels change the
input of every later layer, and its variance with it. So running statistics are never averaged across widths, never
written to a global model and never sent. Clients train with the statistics of the batch (`batch_statistics`), and a
deployed model computes its own from its owner's data (`recalibrate`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from submodels.texts import shown

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def statistics(module: nn.Module) -> frozenset[str]:
    """Names of the running-statistics buffers of every batch (or tracking instance) norm, under all their names.

    Example:
        >>> sorted(statistics(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))))
        ['1.num_batches_tracked', '1.running_mean', '1.running_var']
    """
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, norm in tracking(module, aliases=True)
        for name in _STATISTICS
        if getattr(norm, name, None) is not None
    )


def has_batch_norm(module: nn.Module) -> bool:
    """Whether some layer normalises over the batch, with or without running statistics."""
    return any(True for _ in batch_norms(module))


def batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Every layer that normalises over the batch."""
    return (part for part in module.modules() if isinstance(part, _BatchNorm))


def refuses_one(error: Exception) -> bool:
    """Whether a batch norm raised the error because it got a single sample."""
    return str(error).startswith("Expected more than 1 value per channel")  # torch has no class for it


def check_batch(module: nn.Module, n: int) -> None:
    """Refuse to train the module's batch norms on ``n`` samples if these are too few."""
    if n >= 2 or not has_batch_norm(module):
        return
    layer = next(path for path, part in module.named_modules() if isinstance(part, _BatchNorm))
    raise ValueError(
        f"a client with {n} sample{'s' * (n != 1)} cannot train BatchNorm (layer {layer!r}), which needs the variance "
        "of at least 2; give the client more samples, leave it out, or use a model without BatchNorm"
    )


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[None]:
    """A context in which norms use the statistics of the batch and leave the running ones untouched ("static BN").

    In training mode and in evaluation mode alike, so a gradient can be probed with dropout off. The running
    statistics are hidden only while a norm runs: `train()`, `eval()` and `state_dict()` work inside as ever.
    """
    with ExitStack() as stack:
        for _, norm in tracking(module):
            _hide_while_running(norm, stack)
        yield


@contextmanager
def without_statistics(norms: Sequence[_NormBase]) -> Iterator[None]:
    """A context in which these norms have no running statistics, and so use those of the batch.

    To the bit the same as `batch_statistics`, and faster, for a caller that only runs the module: here it is incomplete
    (`state_dict()`) from the beginning of the context to its end.
    """
    # A norm's dictionaries, as setting attributes of a module is slow enough to be felt in a training step.
    hidden = [(vars(norm), norm._buffers, norm.track_running_stats) for norm in norms]
    hidden = [(*one, one[1]["running_mean"], one[1]["running_var"]) for one in hidden]
    try:
        for attributes, buffers, *_ in hidden:
            attributes["track_running_stats"] = False
            buffers["running_mean"] = buffers["running_var"] = None
        yield
    finally:
        for attributes, buffers, tracking, mean, var in hidden:
            attributes["track_running_stats"], buffers["running_mean"], buffers["running_var"] = tracking, mean, var


def recalibrate(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    device: torch.device | None = None,
    run: Callable[[Any], Any] | None = None,
) -> None:
    """Replace the running statistics by those of the given batches, all samples weighing the same.

    Only norms use batch statistics meanwhile: dropout and the like stay off. A norm fed by the data itself ends with
    the mean and the unbiased variance of all samples, however they were batched. Parameters, momenta and training
    flags stay as they were, and so do the statistics if anything goes wrong. A module that tracks no statistics is
    left alone and the batches are not touched.

    Args:
        module: a model of the width that will be deployed.
        batches: input tensors of two or more samples, or tuples that begin with one, such as (input, label).
        device: where batches are sent; the device of the statistics unless given.
        run: how the module is run on a batch, for batches that are no tensors, such as keyword arguments. It sends them
            to the device itself.

    Example:
        >>> norm = nn.BatchNorm1d(1)
        >>> recalibrate(norm, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
        >>> norm.running_mean, norm.running_var  # 3, and (9 + 1 + 1 + 9) / 3
        (tensor([3.]), tensor([6.6667]))
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"recalibrate takes a module and got {shown(module)}")
    norms = dict(tracking(module))
    if not norms:
        return
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError("recalibrate takes an iterable of batches; for a single one write recalibrate(module, [x])")
    if run is not None and not callable(run):
        raise TypeError(f"run is {shown(run)}; it must be a function of a batch, such as run=lambda x: module(**x)")
    device = _device(device) if device is not None else next(iter(norms.values())).running_mean.device
    with _only_training(module, norms.values()), torch.no_grad(), _pooling(norms) as pooled:
        empty = True
        for batch in batches:
            if run is None:
                x = _input(batch)
                try:
                    module(x.to(device))
                except (RuntimeError, TypeError) as error:
                    reason = " ".join(str(error).split())[:200]
                    what = f"a batch of shape {tuple(x.shape)}, {x.dtype}"
                    raise ValueError(f"the module cannot be run on {what} ({reason}); give what it takes") from error
            else:
                run(batch)
            empty = False
    if empty:
        raise ValueError("no batches to recalibrate from; give at least one batch of 2 or more samples")
    # All are checked before any is stored: an error leaves every statistic as it was.
    _check_finite(pooled)
    for path, moments in pooled.items():
        _store(norms[path], moments)


def _device(name: Any) -> torch.device:
    try:
        return torch.device(name)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"device is {shown(name)}; it must be a torch.device, or its name such as 'cpu'") from error


class _Moments(NamedTuple):
    """What a norm has seen so far; ``count`` values in each channel, in ``calls`` batches."""

    count: int
    mean: Tensor
    var: Tensor
    calls: int = 1


def _merged(a: _Moments, b: _Moments, *, between: bool) -> _Moments:
    r"""Mean and unbiased variance of two samples together (Chan, Golub and LeVeque 1979).

    .. math:: (n-1) s^2 = (n_a-1) s_a^2 + (n_b-1) s_b^2 + \frac{n_a n_b}{n} (\mu_b - \mu_a)^2

    An instance norm keeps the mean of its instances' variances, to which their distance does not add:
    ``between=False``.
    """
    count, delta = a.count + b.count, b.mean - a.mean
    mean = a.mean + delta * (b.count / count)
    if between:
        squares = (a.count - 1) * a.var + (b.count - 1) * b.var + delta.square() * (a.count * b.count / count)
        var = squares / (count - 1)
    else:
        var = a.var + (b.var - a.var) * (b.count / count)
    return _Moments(count, mean, var, a.calls + b.calls)


def tracking(module: nn.Module, *, aliases: bool = False) -> Iterator[tuple[str, _NormBase]]:
    """(path, norm) of every norm that keeps running statistics; a shared one once, or with ``aliases`` every time."""
    for path, part in module.named_modules(remove_duplicate=not aliases):
        if isinstance(part, _NormBase) and part.track_running_stats and part.running_mean is not None:
            yield path, part


def _hide_while_running(norm: _NormBase, stack: ExitStack) -> None:
    # Without buffers a norm falls back on the batch in either mode; without tracking it does not count the call.
    # Hiding in hooks, not for the whole context, keeps the module complete for whoever looks at it in between.
    # A norm's dictionaries, as setting attributes of a module is slow enough to be felt in a training step.
    attributes, buffers = vars(norm), norm._buffers
    hidden: list[tuple[bool, Tensor | None, Tensor | None]] = []

    def assign(tracking: bool, mean: Tensor | None, var: Tensor | None) -> None:
        attributes["track_running_stats"], buffers["running_mean"], buffers["running_var"] = tracking, mean, var

    def hide(*_: object) -> None:
        hidden.append((norm.track_running_stats, norm.running_mean, norm.running_var))
        assign(False, None, None)

    def restore(*_: object) -> None:
        if hidden:
            assign(*hidden.pop())

    stack.callback(restore)  # an interrupt may have come between the two hooks
    stack.callback(norm.register_forward_pre_hook(hide).remove)
    # always_call: also when the norm refuses its input. prepend: contexts inside one another undo in reverse order.
    stack.callback(norm.register_forward_hook(restore, prepend=True, always_call=True).remove)


@contextmanager
def _only_training(module: nn.Module, norms: Iterable[nn.Module]) -> Iterator[None]:
    flags = {part: part.training for part in module.modules()}
    try:
        for part in flags:
            part.training = False
        for norm in norms:
            norm.training = True
        yield
    finally:
        for part, flag in flags.items():
            if flag and type(part).train is not nn.Module.train:
                part.train()  # LeViT and its kin drop here what they cached while evaluating
        for part, flag in flags.items():
            part.training = flag


@contextmanager
def _pooling(norms: dict[str, _NormBase]) -> Iterator[dict[str, _Moments]]:
    """A context that fills a dict, path -> moments of all inputs of that norm; the norms' own buffers are put aside."""
    pooled: dict[str, _Moments] = {}
    with ExitStack() as stack:
        for path, norm in norms.items():
            stack.callback(_set, norm, {name: getattr(norm, name) for name in ("momentum", *_STATISTICS)})
            # With momentum 1 the running statistics of a call are those of its batch, as the norm itself computes them.
            _set(norm, {name: torch.zeros_like(getattr(norm, name)) for name in _STATISTICS} | {"momentum": 1.0})
            _pool_calls(path, norm, pooled, stack)
        yield pooled


def _pool_calls(path: str, norm: _NormBase, pooled: dict[str, _Moments], stack: ExitStack) -> None:
    between = not isinstance(norm, _InstanceNorm)

    def count(args: tuple, kwargs: dict) -> int:
        return (args or tuple(kwargs.values()))[0].numel() // norm.num_features

    def check(norm: _NormBase, args: tuple, kwargs: dict) -> None:
        if norm.running_mean is None:
            raise ValueError("recalibrate cannot fill running statistics that batch_statistics hides; call it outside")
        if between and count(args, kwargs) < 2:
            raise ValueError(
                f"BatchNorm {path!r} was given one value per channel, which has no variance; "
                "recalibrate with batches of at least 2 samples (merge or drop a last batch of one)"
            )

    def pool(norm: _NormBase, args: tuple, kwargs: dict, output: Tensor) -> None:
        batch = _Moments(count(args, kwargs), norm.running_mean.clone(), norm.running_var.clone())
        pooled[path] = _merged(pooled[path], batch, between=between) if path in pooled else batch

    stack.callback(norm.register_forward_pre_hook(check, with_kwargs=True).remove)
    stack.callback(norm.register_forward_hook(pool, with_kwargs=True).remove)


def _set(norm: _NormBase, values: dict) -> None:
    for name, value in values.items():
        setattr(norm, name, value)


def _input(batch: Tensor | Sequence) -> Tensor:
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(x, Tensor):
        raise TypeError(f"a batch is a tensor or a tuple that begins with one, not {type(x).__name__}")
    if x.dim() == 0 or not len(x):
        raise ValueError("a batch to recalibrate from holds no samples; leave empty batches out")
    return x


def _check_finite(pooled: dict[str, _Moments]) -> None:
    for path, moments in pooled.items():
        if not (moments.mean.isfinite().all() and moments.var.isfinite().all()):
            raise ValueError(
                f"the input of norm {path!r} is not finite, so its statistics are kept as they were; "
                "look for NaN or infinity in the data and the weights before it"
            )


def _store(norm: _NormBase, moments: _Moments) -> None:
    norm.running_mean.copy_(moments.mean)
    norm.running_var.copy_(moments.var)
    norm.num_batches_tracked.fill_(moments.calls)
