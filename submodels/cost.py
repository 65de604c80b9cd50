"""What training a module takes: parameters, multiply-adds, peak memory, bytes on the wire; counted, or measured.

`count` runs one training step on tensors that have shapes but no data, and adds up what is alive at every moment.
`measure` runs real steps on the CPU and asks the allocator. They are two views of the same step; compare them with::

    python -m submodels.cost

The step itself is in step.py. For `count`, meter.py adds up and kernels.py knows what single operators take; for
`measure`, allocator.py reads the account.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from submodels.allocator import peak_bytes, quiet, static_bytes
from submodels.batch import Dims, leading
from submodels.calls import Call
from submodels.meter import Metered, metered
from submodels.norms import statistics
from submodels.skeleton import holds_weights, named_tensors
from submodels.step import (
    Batch,
    fake_batch,
    fake_copy,
    real_batch,
    real_copy,
    real_steps,
    start_autograd,
    take_step,
)
from submodels.texts import shown

MB = 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """What one client pays for one module.

    Attributes:
        params: parameters, tied ones once.
        macs: multiply-adds of the forward pass of one sample, in convolutions and matrix products.
        train_bytes: peak memory of a training step: weights, buffers, the batch, saved activations, gradients,
            optimizer state, and what the backward pass holds for a moment.
        wire_bytes: what travels one way in one visit: parameters and floating buffers, without the running statistics
            of norms.
    """

    params: int
    macs: int
    train_bytes: int
    wire_bytes: int

    def __str__(self) -> str:
        return (
            f"{_metric(self.params, 'params', between=' ')}, {_metric(self.macs, 'MACs')}, "
            f"{_short(self.train_bytes / MB)} MB training, {_short(self.wire_bytes / MB)} MB on the wire"
        )


class _Optimizer(NamedTuple):
    make: Callable[..., torch.optim.Optimizer]
    states: int  # tensors kept for every parameter
    scratch: int  # tensors of a parameter's size that its update needs for a moment


OPTIMIZERS = {
    "sgd": _Optimizer(lambda params: torch.optim.SGD(params, lr=1e-3), states=0, scratch=0),
    "sgd-momentum": _Optimizer(lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9), states=1, scratch=0),
    "adam": _Optimizer(lambda params: torch.optim.Adam(params, lr=1e-3), states=2, scratch=2),
    "adamw": _Optimizer(lambda params: torch.optim.AdamW(params, lr=1e-3), states=2, scratch=2),
}


def count(
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_size: int,
    optimizer: str = "sgd",
    batch_dims: Dims | None = None,
    accumulate: int = 1,
) -> Cost:
    """The cost of training the module, counted: no arithmetic is done and the module is not touched.

    A copy without data takes a forward and a backward pass as the CPU would, in training mode. The memory is the most
    that is alive at once, and includes the input batch, which the first layer saves anyway. The loss is a stand-in for
    cross entropy. Not counted: what Python and torch themselves take, and the kernels torch compiles for new shapes.

    Which kernels run depends on the processor; the memory counted is the most that any of oneDNN's takes on one
    thread. With AVX-512, AVX2 and SSE4.1 alike, tensors take at most 2 % and 0.25 MB more than that, apart from what
    is reserved and not written (see `measure`). They take less where convolutions have fewer than 16 channels, which
    are counted as 16: down to 0.4 times, without AVX-512.

    A module that cannot run without data, because it branches on a value say, is run and measured instead.

    Args:
        module: any module, on any device, the meta device included.
        example_inputs: what its forward takes: a tensor, or a tuple.
        example_kwargs: keyword arguments of its forward, treated alike.
        batch_size: samples of a training step.
        optimizer: one of `OPTIMIZERS`.
        batch_dims: for every tensor of the example the dimension that counts samples, or None (`submodels.batch`);
            unless given, all tensors that have the leading size of the first are taken as batches.
        accumulate: pieces in which a batch is run, one after the other; their gradients are added up.

    Example:
        >>> count(nn.Linear(3, 4), torch.zeros(1, 3), batch_size=2)
        Cost(params=16, macs=12, train_bytes=192, wire_bytes=64)
    """
    _check_module(module)
    rule = _checked(optimizer, batch_size)
    batch = _batch(example_inputs, example_kwargs, _piece(batch_size, accumulate), batch_dims)
    start_autograd()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            step = metered(fake_copy(module), batch, fake_batch)
        train_bytes = _with_update(step, module, rule, accumulate) + (accumulate - 1) * _input_bytes(batch)
    except Exception as error:  # a branch on a value, an operator without a meta kernel: as many ways as modules
        log.debug("%s is run, not counted: %s", type(module).__name__, error)
        with real_steps(module, batch_size):
            step = metered(real_copy(module), batch, real_batch)
        train_bytes = _measured(module, batch, rule, accumulate)
    return Cost(
        params=sum(p.numel() for p in module.parameters()),
        macs=-(-step.macs // batch.samples),
        train_bytes=train_bytes,
        wire_bytes=wire_bytes(module),
    )


def measure(
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_size: int,
    optimizer: str = "sgd",
    batch_dims: Dims | None = None,
    accumulate: int = 1,
) -> int:
    """Peak bytes of really training a copy of the module on the CPU, as torch's allocator reports them.

    Weights and buffers are included, the batch too. Two steps are taken, since optimizers allocate their state at the
    end of the first. Arguments are those of `count`. For a convolution that multiplies matrices (many do, without
    AVX-512) oneDNN reserves room for four more copies of the filter and does not write there: the allocator counts it,
    resident memory and `count` do not. What the operating system sees is more by the kernels that torch compiles for
    new shapes (some MB) and by what glibc keeps of freed memory: up to as much again, unless the process was started
    with MALLOC_MMAP_THRESHOLD_=65536.
    """
    _check_module(module)
    rule = _checked(optimizer, batch_size)
    batch = _batch(example_inputs, example_kwargs, _piece(batch_size, accumulate), batch_dims)
    return _measured(module, batch, rule, accumulate)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"the module is {shown(module)}; it must be an nn.Module (a ScalableModel has cost and fit)")


def check_step(optimizer: str, batch_size: int, accumulate: int) -> None:
    """Raise an error for a training step that cannot be taken."""
    _checked(optimizer, batch_size)
    _piece(batch_size, accumulate)


def _piece(batch_size: int, accumulate: int) -> int:
    """The samples of the largest of so many pieces of a batch."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or not 1 <= accumulate <= batch_size:
        raise ValueError(f"accumulate {shown(accumulate)} is not a whole number from 1 to batch_size {batch_size}")
    return -(-batch_size // accumulate)


def _batch(inputs: Any, kwargs: Mapping[str, Any] | None, size: int, dims: Dims | None) -> Batch:
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"example_kwargs is {shown(kwargs)}; it must be a dict, or None")
    call = Call(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), dict(kwargs or {}))
    return Batch(call, size, leading(call) if dims is None else dims)


def _measured(module: nn.Module, batch: Batch, rule: "_Optimizer", accumulate: int) -> int:
    with real_steps(module, batch.size):
        model = real_copy(module)
        trained = [p for p in model.parameters() if p.requires_grad]
        stepper = rule.make(trained) if trained else None
        with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            for _ in range(2):
                take_step(model, [batch.made(real_batch) for _ in range(accumulate)], stepper)
    return static_bytes(model) + peak_bytes(watched)


def wire_bytes(module: nn.Module) -> int:
    """Bytes that travel one way: parameters and floating buffers, tied ones once, without norms' running statistics."""
    left = statistics(module)
    return sum(x.nbytes for name, x in named_tensors(module) if holds_weights(x) and name not in left)


def _with_update(step: Metered, module: nn.Module, optimizer: _Optimizer, accumulate: int) -> int:
    """Peak bytes of a step whose forward and backward pass were metered, the optimizer's part included."""
    trained = [p.nbytes for p in module.parameters() if p.requires_grad]
    update = step.after + optimizer.scratch * max(trained, default=0)
    # The gradients of earlier pieces stay while the next one is run.
    peak = step.peak + (sum(trained) if accumulate > 1 else 0)
    return max(peak, update) + optimizer.states * sum(trained)


def _input_bytes(batch: Batch) -> int:
    """Bytes of the inputs that samples have each for themselves."""
    sized = [(x, dim) for x, dim in zip(batch.call.tensors(), batch.dims, strict=True) if dim is not None]
    return sum(x.nbytes // x.shape[dim] * batch.size for x, dim in sized)


def _checked(optimizer: str, batch_size: int) -> _Optimizer:
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {shown(optimizer)}; choose one of {', '.join(OPTIMIZERS)}")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or not 1 <= batch_size <= 10**9:
        raise ValueError(f"batch_size {shown(batch_size)} is not a whole number of 1 or more, up to a billion")
    return OPTIMIZERS[optimizer]


def _short(x: float) -> str:
    return f"{x:.3g}" if x < 999.5 else f"{x:.0f}"


def _metric(x: int, unit: str, between: str = "") -> str:
    """Three digits, a prefix and a unit: 701 K params, 35.1 MMACs."""
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if x >= scale:
            return f"{_short(x / scale)} {prefix}{between}{unit}"
    return f"{x} {unit}"


def _main() -> None:
    from submodels import zoo

    torch.set_num_threads(1)
    print(f"{'model':32} {'batch':>5} {'counted MB':>11} {'measured MB':>12} {'ratio':>6}")
    for name, channels, side in _COMPARED:
        module = zoo.build(name, in_channels=channels, num_classes=10, image_size=side)
        for batch_size in (8, 32):
            x = torch.zeros(1, channels, side, side)
            counted = count(module, x, batch_size=batch_size).train_bytes / MB
            measured = measure(module, x, batch_size=batch_size) / MB
            print(f"{name:32} {batch_size:5} {counted:11.2f} {measured:12.2f} {counted / measured:6.3f}", flush=True)


_COMPARED = (
    ("mlp", 1, 28),
    ("cnn", 3, 32),
    ("timm:resnet18", 3, 64),
    ("timm:mobilenetv3_small_050", 3, 64),
    ("timm:vit_tiny_patch16_224", 3, 64),
)

if __name__ == "__main__":
    _main()
