"""What training a module takes: parameters, multiply-adds, peak memory, bytes on the wire; counted, or measured.

`count` runs one training step on tensors that have shapes but no data, and adds up what is alive at every moment.
`measure` runs real steps on the CPU and asks the allocator. They are two views of the same step; compare them with::

    python -m submodels.cost
"""

import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from submodels.norms import statistics
from submodels.skeleton import loose_tensors, named_tensors, rebuild

MB = 2**20

log = logging.getLogger(__name__)
aten = torch.ops.aten


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
}


def count(
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_size: int,
    optimizer: str = "sgd",
) -> Cost:
    """The cost of training the module, counted: no arithmetic is done and the module is not touched.

    A copy without data takes a forward and a backward pass as the CPU would, in training mode. The memory is the most
    that is alive at once, and includes the input batch, which the first layer saves anyway. The loss is a stand-in for
    cross entropy. Not counted: what Python and torch themselves take, and the kernels torch compiles for new shapes.

    Which kernels run depends on the processor; the memory counted is the most that any of oneDNN's writes on one
    thread. With AVX-512, AVX2 and SSE4.1 alike, a step writes at most 2 % and 0.25 MB more than that. It writes less
    where convolutions have fewer than 16 channels, which are counted as 16: down to 0.4 times, without AVX-512.

    A module that cannot run without data, because it branches on a value say, is run and measured instead.

    Args:
        module: any module, on any device, the meta device included.
        example_inputs: what its forward takes: a tensor, or a tuple. Those that have the leading size of the first
            tensor are taken as batches and resized.
        example_kwargs: keyword arguments of its forward, treated alike.
        batch_size: samples of a training step.
        optimizer: one of `OPTIMIZERS`.

    Example:
        >>> count(nn.Linear(3, 4), torch.zeros(1, 3), batch_size=2)
        Cost(params=16, macs=12, train_bytes=192, wire_bytes=64)
    """
    rule = _checked(optimizer, batch_size)
    arguments = _arguments(example_inputs, example_kwargs)
    _start_autograd()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            step = _metered(_fake_copy(module), arguments, batch_size, _fake_batch)
        train_bytes = _with_update(step, module, rule)
    except Exception as error:  # a branch on a value, an operator without a meta kernel: as many ways as modules
        log.debug("%s is run, not counted: %s", type(module).__name__, error)
        with _stepping(module, batch_size):
            step = _metered(_real_copy(module), arguments, batch_size, _real_batch)
        train_bytes = measure(module, *arguments, batch_size=batch_size, optimizer=optimizer)
    return Cost(
        params=sum(p.numel() for p in module.parameters()),
        macs=-(-step.macs // batch_size),
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
) -> int:
    """Peak bytes of really training a copy of the module on the CPU, as torch's allocator reports them.

    Weights and buffers are included, the batch too. Two steps are taken, since optimizers allocate their state at the
    end of the first. Arguments are those of `count`. For a convolution that multiplies matrices (many do, without
    AVX-512) oneDNN reserves room for four more copies of the filter and does not write there: the allocator counts it,
    resident memory and `count` do not. What the operating system sees is more by the kernels that torch
    compiles for new shapes (some MB) and by what glibc keeps of freed memory: up to as much again, unless the process
    was started with MALLOC_MMAP_THRESHOLD_=65536.
    """
    rule = _checked(optimizer, batch_size)
    arguments = _arguments(example_inputs, example_kwargs)
    with _stepping(module, batch_size):
        model = _real_copy(module)
        trained = [p for p in model.parameters() if p.requires_grad]
        stepper = rule.make(trained) if trained else None
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            for _ in range(2):
                _step(model, _batched(arguments, batch_size, _real_batch), stepper)
    return _static_bytes(model) + _peak(watched)


def wire_bytes(module: nn.Module) -> int:
    """Bytes that travel one way: parameters and floating buffers, tied ones once, without norms' running statistics."""
    left = statistics(module)
    return sum(_nbytes(x) for name, x in named_tensors(module) if x.is_floating_point() and name not in left)


# One training step.


def _start_autograd() -> None:
    """Have autograd look which devices there are, so that it starts no threads for those that are only played.

    A first backward pass without data would, and no process that was forked later could take another.
    """
    with torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        torch.autograd.grad(x * x, x)


def _loss(output: Any) -> Tensor | None:
    """A scalar that takes the memory of a cross entropy, or None if nothing in the output can be trained."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad and y.is_floating_point()]
    losses = [F.log_softmax(y, dim=-1).mean() if y.dim() else y for y in outputs]
    return reduce(torch.add, losses) if losses else None


def _step(module: nn.Module, batch: tuple[tuple, dict], optimizer: torch.optim.Optimizer | None) -> None:
    args, kwargs = batch
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    loss = _loss(module(*args, **kwargs))
    if loss is not None:
        loss.backward()
    if optimizer is not None:
        optimizer.step()


class _Metered(NamedTuple):
    peak: int
    after: int  # bytes alive when the optimizer's turn comes
    macs: int  # of the forward pass of the whole batch


def _metered(module: nn.Module, arguments: tuple[tuple, dict], batch_size: int, make: Callable) -> _Metered:
    meter = _Meter()
    for _, x in named_tensors(module):
        meter.add(x)
    with torch.inference_mode(False), torch.enable_grad(), meter:
        args, kwargs = _batched(arguments, batch_size, make)
        loss = _loss(module(*args, **kwargs))
        macs = meter.macs
        if loss is not None:
            loss.backward()
    return _Metered(meter.peak, meter.current, macs)


def _with_update(step: _Metered, module: nn.Module, optimizer: _Optimizer) -> int:
    """Peak bytes of a step whose forward and backward pass were metered, the optimizer's part included."""
    trained = [_nbytes(p) for p in module.parameters() if p.requires_grad]
    update = step.after + optimizer.scratch * max(trained, default=0)
    return max(step.peak, update) + optimizer.states * sum(trained)


class _Meter(TorchDispatchMode):
    """Adds up the storages that are alive, and the multiply-adds, of every operator that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = self.macs = 0
        self._alive: dict[int, weakref.ref] = {}

    def add(self, x: Tensor) -> None:
        """Count the storage of a tensor, from now until it is freed."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def freed(_: weakref.ref) -> None:
            del self._alive[key]
            self.current -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.current += size
        self.peak = max(self.peak, self.current)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operator, before = func.overloadpacket, self.current
        if operator is aten.mkldnn_rnn_layer and isinstance(args[0], FakeTensor):
            raise NotImplementedError("how much an LSTM saves for its backward pass is known only when it runs")
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.add(x)
        if operator in _MACS:
            self.macs += _MACS[operator](out, *args)
        if operator in _INSIDE:
            self.peak = max(self.peak, before + _INSIDE[operator](out, *args))
        return out


# Bytes that a convolution holds at its peak, its outputs included. Which kernel runs depends on the processor, so this
# is the most that any kernel of oneDNN writes. Most of them work on copies of the operands in which channels lie in
# blocks of 16 (of 8 without AVX-512, which takes less): the copies of x, y and the weight are alive together, then the
# result beside its copy. The others unfold one image at a time into columns and multiply matrices. oneDNN leaves
# float64 to torch, which unfolds the whole batch.


def _inside_convolution(y: Tensor, x: Tensor, weight: Tensor, *_: Any) -> int:
    if x.dtype is torch.float64:
        return _nbytes(y) + _columns(y, weight)
    copies = _blocked_input(x, weight) + _nbytes(weight) + _blocked(y)
    return max(copies, _blocked(y) + _nbytes(y), _nbytes(y) + _columns(y[:1], weight))


def _inside_convolution_backward(
    out: tuple, grad_y: Tensor, x: Tensor, weight: Tensor, bias_sizes, stride, *_: Any
) -> int:
    grad_x, grad_weight, _ = (0 if g is None else _nbytes(g) for g in out)
    if x.dtype is torch.float64:
        return grad_x + grad_weight + _columns(grad_y, weight)
    for_weight = max(
        _blocked_input(x, weight) + _nbytes(weight) + _blocked(grad_y),
        2 * grad_weight,
        grad_weight + _columns(grad_y[:1], weight),
    )
    if out[0] is None:
        return for_weight
    for_x = _blocked(x) + _blocked_weight(weight, x) + _blocked(grad_y)
    copied_once_more = 3 * grad_x if max(stride) > 1 else 0
    return max(for_x, copied_once_more, grad_x + for_weight)  # grad_x comes first and stays


def _blocked(x: Tensor) -> int:
    return _nbytes(x[:, :1]) * -(-x.shape[1] // 16) * 16


def _blocked_input(x: Tensor, weight: Tensor) -> int:
    thin = x.shape[1] < 16 and weight.shape[1] == x.shape[1] and _taps(weight) > 1
    return 0 if thin else _blocked(x)  # thin inputs, of the first layer mostly, are read as they are


def _blocked_weight(weight: Tensor, x: Tensor) -> int:
    if weight.shape[1] != x.shape[1]:  # grouped
        return _nbytes(weight)
    return _nbytes(weight[:1, :1]) * math.prod(-(-n // 16) * 16 for n in weight.shape[:2])


def _columns(y: Tensor, weight: Tensor) -> int:
    return _nbytes(y[:, :1]) * weight.shape[1] * _taps(weight) if _taps(weight) > 1 else 0


def _taps(weight: Tensor) -> int:
    return math.prod(weight.shape[2:])


_INSIDE: dict[Any, Callable[..., int]] = {
    aten.convolution: _inside_convolution,
    aten.convolution_backward: _inside_convolution_backward,
}


def _product(out: Tensor, a: Tensor, *_: Any) -> int:
    return out.numel() * a.shape[-1]


def _added_product(out: Tensor, _: Tensor, a: Tensor, *rest: Any) -> int:
    return out.numel() * a.shape[-1]


def _convolution(
    out: Tensor, x: Tensor, weight: Tensor, bias, stride, padding, dilation, transposed: bool, *_: Any
) -> int:
    # Every output element reads one filter; transposed, every input element is spread by one.
    return (x if transposed else out).numel() * math.prod(weight.shape[1:])


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    return q[..., 0].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _lstm(out: Any, x: Tensor, w_input: Tensor, w_hidden: Tensor, *_: Any) -> int:
    return x[..., 0].numel() * (w_input.numel() + w_hidden.numel())


# Multiply-adds of an operator, from its output and its arguments; others count as none.
_MACS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.mv: _product,
    aten.dot: _product,
    aten.addmm: _added_product,
    aten.addmv: _added_product,
    aten.baddbmm: _added_product,
    aten.convolution: _convolution,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _lstm,
}


# Copies of the module and batches for it; the module itself is only read.


def _fake_copy(module: nn.Module) -> nn.Module:
    hollow = [x for x in loose_tensors(module) if x.is_meta]  # the others keep their values, which may be needed
    tensors = [*(x for _, x in named_tensors(module)), *hollow]
    return rebuild(module, {id(x): torch.empty_like(x, device="cpu") for x in tensors}).train()


def _real_copy(module: nn.Module) -> nn.Module:
    tensors = [*(x for _, x in named_tensors(module)), *loose_tensors(module)]
    return rebuild(module, {id(x): _real(x.detach()) for x in tensors}).train()


def _real(x: Tensor) -> Tensor:
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.to("cpu", copy=True)


def _arguments(example_inputs: Any, example_kwargs: Mapping[str, Any] | None) -> tuple[tuple, dict]:
    inputs = tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)
    return inputs, dict(example_kwargs or {})


def _batched(arguments: tuple[tuple, dict], batch_size: int, make: Callable[[Tensor, int], Tensor]) -> tuple:
    leading = next((x.shape[0] for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.dim()), None)

    def resized(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return make(x, batch_size if x.dim() and x.shape[0] == leading else None)

    return tree_map(resized, arguments)


def _fake_batch(x: Tensor, size: int | None) -> Tensor:
    shape = x.shape if size is None else (size, *x.shape[1:])
    return torch.empty(shape, dtype=x.dtype, device="cpu")


def _real_batch(x: Tensor, size: int | None) -> Tensor:
    x = _real(x.detach())
    return x if size is None else x[torch.arange(size) % len(x)]


def _checked(optimizer: str, batch_size: int) -> _Optimizer:
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size {batch_size!r} is not a whole number of 1 or more")
    return OPTIMIZERS[optimizer]


@contextmanager
def _stepping(module: nn.Module, batch_size: int) -> Iterator[None]:
    """A context for real training steps: the caller's random numbers are kept, failures are explained."""
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
            yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{type(module).__name__} takes no training step on the example inputs at batch_size {batch_size} "
            f"({reason}); check the inputs, or raise batch_size"
        ) from error


# The allocator's account.


def _peak(watched: profile) -> int:
    """The most bytes at once among those that were allocated under the profiler."""
    events = [e for e in watched.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which the profiler does not write to the terminal; it reads the level from the environment."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def _static_bytes(module: nn.Module) -> int:
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for _, x in named_tensors(module)}
    return sum(storages.values())


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


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
