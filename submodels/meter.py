"""Memory that is alive, and multiply-adds, while a module takes a step: counted operator by operator."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from submodels.kernels import INSIDE, MACS
from submodels.skeleton import named_tensors
from submodels.step import Batch, loss_of

aten = torch.ops.aten


class Metered(NamedTuple):
    """Bytes and multiply-adds of one forward and backward pass."""

    peak: int
    after: int  # bytes alive when the optimizer's turn comes
    macs: int  # of the forward pass of the whole batch


def metered(module: nn.Module, batch: Batch, make: Callable) -> Metered:
    """Run a forward and a backward pass of the module under a meter; `make` as in `Batch.made`."""
    meter = Meter()
    for _, x in named_tensors(module):
        meter.add(x)
    with torch.inference_mode(False), torch.enable_grad(), meter:
        args, kwargs = batch.made(make)
        loss = loss_of(module(*args, **kwargs))
        macs = meter.macs
        if loss is not None:
            loss.backward()
    return Metered(meter.peak, meter.current, macs)


class Meter(TorchDispatchMode):
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
        if operator in MACS:
            self.macs += MACS[operator](out, *args)
        if operator in INSIDE:
            self.peak = max(self.peak, before + INSIDE[operator](out, *args))
        return out
