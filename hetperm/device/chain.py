"""Chains of linear layers and activations: gradients by hand, and many models of one shape trained at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from hetperm.device.bench import Loss, Workbench, masked
from hetperm.params import Params
from hetperm.shards import Shard, read

FLATTEN = (nn.Flatten, torch.flatten, "flatten")
NOTHING = (nn.Identity,)
ACTIVATIONS = {
    "relu": (nn.ReLU, torch.relu, F.relu, "relu"),
    "tanh": (nn.Tanh, torch.tanh, F.tanh, "tanh"),
    "sigmoid": (nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid"),
}
CERTAIN = 0.9  # of the cap: steps that are bounded by less are not measured
ENTRIES = 2**23  # numbers in the batches of a stack that are gathered at once: 32 MB in float32


@dataclass(frozen=True)
class Layer:
    """A linear layer of a chain: the names of its parameters and the activation after it, if any."""

    weight: str
    bias: str | None
    activation: str | None = None


def layers_of(module: nn.Module, *, flat: bool = False) -> list[Layer] | None:
    """The linear layers of a module that is a plain chain of them on vectors; None for any other module.

    No other thread may run a module during the call: tracing patches all modules.

    Args:
        flat: whether the inputs are vectors already; if not, the module must flatten them first.

    Example:
        >>> layers_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False)))
        [Layer(weight='1.weight', bias='1.bias', activation='relu'),
         Layer(weight='3.weight', bias=None, activation=None)]
        >>> layers_of(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten())) is None
        True
    """
    try:
        graph = fx.symbolic_trace(module).graph
    except Exception:  # the user's code cannot be traced, so it is no plain chain
        return None
    # A chain is a straight line: one input, every node fed by the one before it, the last one returned.
    *nodes, output = graph.nodes
    if not nodes or nodes[0].op != "placeholder" or output.args != (nodes[-1],):
        return None
    chain: list[Layer] = []
    for before, node in pairwise(nodes):
        part = module.get_submodule(node.target) if node.op == "call_module" else None
        kind = node.target if part is None else type(part)
        # A hook may do anything, so a chain with one is left to autograd.
        if node.all_input_nodes != [before] or (part is not None and (part._forward_hooks or part._forward_pre_hooks)):
            return None
        activation = next((name for name, kinds in ACTIVATIONS.items() if kind in kinds), None)
        if kind in FLATTEN and not chain and _flattens(node, part):
            flat = True
        elif kind is nn.Linear and flat:
            chain.append(Layer(f"{node.target}.weight", None if part.bias is None else f"{node.target}.bias"))
        elif activation and chain and chain[-1].activation is None:
            chain[-1] = replace(chain[-1], activation=activation)
        elif kind not in NOTHING:
            return None
    return chain if _is_whole(chain, module) else None


def _flattens(node: fx.Node, part: nn.Module | None) -> bool:
    """Whether all axes but the first are merged into one."""
    if part is not None:
        return (part.start_dim, part.end_dim) == (1, -1)
    return (node.args[1:], node.kwargs) in (((1,), {}), ((), {"start_dim": 1}))


def _is_whole(chain: Sequence[Layer], module: nn.Module) -> bool:
    """Whether the chain ends in logits, uses each parameter of the module exactly once, and all of them are trained."""
    names = [name for layer in chain for name in (layer.weight, layer.bias) if name]
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    whole = sorted(names) == sorted(trained) and len(trained) == len(list(module.parameters()))
    return bool(chain) and chain[-1].activation is None and whole


class Chain(Workbench):
    """A workbench for a chain trained with cross-entropy. Its gradients are written out by hand, which is faster."""

    def __init__(self, module: nn.Module, loss: Loss, *, layers: Sequence[Layer], **where: Any):
        super().__init__(module, loss, **where)
        self.layers = layers

    def gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter."""
        return tuple(g[0] for g in self._gradients(x[None], y[None]))

    def gradients(self, shard: Shard, pieces: Sequence[Tensor], chunk: int) -> Iterator[Tensor]:
        """Yield the gradient (d,) on each piece of the data. Pieces of one size are computed together."""
        x, y = shard
        of_size: dict[int, list[int]] = {}
        for k, piece in enumerate(pieces):
            of_size.setdefault(len(piece), []).append(k)
        order = [k for members in of_size.values() for k in members]
        out, first = x.new_empty(len(pieces), sum(p.numel() for p in self.slots), dtype=self.slots[0].dtype), 0
        for members in of_size.values():
            rows = torch.stack([pieces[k] for k in members])
            stack = [g.flatten(1) for g in self._gradients(x[rows], y[rows])]
            torch.cat(stack, dim=1, out=out[first : first + len(members)])
            first += len(members)
        # Grouping by size may have changed the order of the pieces; this undoes it.
        return iter(out if order == sorted(order) else out[torch.tensor(order).argsort()])

    def mean_gradient(self, shard: Shard, chunk: int) -> tuple[Tensor, ...]:
        """The gradient of the mean loss, parameter by parameter. All samples are run at once, whatever the chunk."""
        return self.gradient(*read(shard))

    def _gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The gradients of the model on m batches (m, b, ...), parameter by parameter, each (m, ...)."""
        m = len(x)
        # One model on all m batches: expanding repeats it without a copy.
        params = {name: p.data.expand(m, *p.shape) for name, p in zip(self.names, self.slots, strict=True)}
        classes = None if self.classes is None else self.classes.expand(m, -1)
        gradient = {}
        for layer, below, error in backward(self.layers, params, x.flatten(2).mT, y, classes, scale=1 / x.shape[1]):
            gradient[layer.weight] = error @ below.mT
            if layer.bias:
                gradient[layer.bias] = error.sum(2)
        return [gradient[name] for name in self.names]


def backward(
    layers: Sequence[Layer],
    params: Params,
    x: Tensor,
    y: Tensor,
    classes: Tensor | None,
    *,
    scale: float | Tensor,
) -> Iterator[tuple[Layer, Tensor, Tensor]]:
    r"""Yield (layer, its input (m, in, b), the error of its output (m, out, b)), from the last layer to the first.

    .. math:: \delta_L = s \, (\mathrm{softmax}(a_L) - \mathrm{onehot}(y)), \quad
              \delta_l = (W_{l+1}^\top \delta_{l+1}) \odot \phi_l'(a_l)

    The gradient of a weight is :math:`\delta_l h_{l-1}^\top` and that of a bias is the sum of :math:`\delta_l`, both
    for s times the summed loss. Samples are columns, so that a softmax runs over many at a time. The caller may change
    the weights of a layer as soon as the layer has been yielded.

    Args:
        params: name -> (m, ...), one model for each of the m batches.
        x, y: (m, d, b) inputs and (m, b) classes.
        classes: (m, num_classes) bool, the classes of each host; None means all.
        scale: s, a number or (m, 1, 1).
    """
    inputs = [x]  # the input of every layer, and last the logits
    for layer in layers:
        weight, below = params[layer.weight], inputs[-1]
        if layer.bias is None:
            above = torch.bmm(weight, below)
        else:
            above = torch.baddbmm(params[layer.bias][..., None], weight, below)
        inputs.append(_activated(above, layer.activation))
    logits = inputs.pop()
    if classes is not None:
        logits = masked(logits, classes[..., None])
    # The gradient of cross-entropy is softmax minus one-hot; subtracting in place avoids building the one-hot.
    error = logits.softmax(1)
    error.scatter_(1, y[:, None], -1.0, reduce="add").mul_(scale)
    for k in reversed(range(len(layers))):
        lower = None
        # The error is passed down before the layer is yielded, because the caller may change its weights at once.
        if k > 0:
            lower = torch.bmm(params[layers[k].weight].mT, error)
            lower = _through(lower, inputs[k], layers[k - 1].activation)
        yield layers[k], inputs[k], error
        error = lower


def _activated(x: Tensor, activation: str | None) -> Tensor:
    """phi(x), computed in place."""
    return x if activation is None else getattr(torch, f"{activation}_")(x)


def _through(error: Tensor, h: Tensor, activation: str | None) -> Tensor:
    """The error of an activation's input from the error of its output h: times phi', in place."""
    # All three derivatives follow from the output h, so that the inputs of activations need not be kept.
    match activation:
        case None:
            return error
        case "relu":
            return torch.ops.aten.threshold_backward.grad_input(error, h, 0, grad_input=error)  # in one pass
        case "tanh":
            return error.mul_(1 - h * h)
        case "sigmoid":
            return error.mul_(h * (1 - h))


def descend(
    layers: Sequence[Layer],
    params: Params,
    shards: Sequence[tuple[Tensor, Tensor]],
    rows: Sequence[Tensor],
    lr: Sequence[float],
    classes: Sequence[Tensor | None],
    cap: float = 0.0,
) -> None:
    """Train C models of one shape, each for K steps of SGD at its host, all at once and in place.

    Args:
        params: name -> (C, ...) the models, stacked.
        shards: (C,) the hosts' inputs and labels.
        rows: (C,) tensors (K, b), the samples of every step.
        lr: (C,) step sizes.
        classes: (C,) the classes of each host; None means all.
        cap: no step is longer than this share of its model's length; 0 is no cap.
    """
    steps, size = rows[0].shape
    x = shards[0][0]
    # The step size is part of the error, so that a step is one product added to the weights.
    lr = torch.tensor(lr, dtype=torch.float64).to(x)[:, None, None]
    scale = 1 / size if cap else lr / size
    limit = _Cap(lr, cap)
    masks = None if any(mask is None for mask in classes) else torch.stack(list(classes)).to(x.device)
    # The batches of several steps are gathered at once: a gather for every step would cost as much as the step.
    at_once = max(1, ENTRIES // (len(shards) * size * x[0].numel()))
    for first in range(0, steps, at_once):
        # Drawn on the CPU, so that every device sees the same samples.
        taken = [drawn[first : first + at_once].flatten().to(x.device) for drawn in rows]
        data = x.new_empty(len(shards), len(taken[0]), x[0].numel())
        labels = torch.stack([y.index_select(0, row) for (_, y), row in zip(shards, taken, strict=True)])
        for (inputs, _), row, into in zip(shards, taken, data, strict=True):
            torch.index_select(inputs.flatten(1), 0, row, out=into)
        for batch, y in zip(data.mT.split(size, 2), labels.split(size, 1), strict=True):
            parts = backward(layers, params, batch, y, masks, scale=scale)
            for layer, below, error in limit.of(params, list(parts)) if cap else parts:
                if layer.bias:
                    params[layer.bias].sub_(error.sum(2))
                params[layer.weight].baddbmm_(error, below.mT, alpha=-1)


class _Cap:
    """The step cap of a stack of models: what `params.step_size` defines, for each of them.

    Most steps are far below the cap. Then a bound on the lengths of the gradients, which is cheap, and one on those of
    the models, from the steps before, show that nothing is shortened, and neither length is computed.
    """

    def __init__(self, lr: Tensor, cap: float):
        self.lr, self.cap = lr, cap  # lr: (m, 1, 1) the step sizes without a cap
        self._least: Tensor | None = None  # (m,) no model is shorter than this; None before the first step

    def of(
        self, params: Params, parts: Sequence[tuple[Layer, Tensor, Tensor]]
    ) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """Yield the parts, which `backward` yields, with errors times the step size of each model, in place."""
        lr, layers = self.lr.flatten().double(), [layer for layer, _, _ in parts]
        fresh = self._least is None
        least = _length(params, layers) if fresh else self._least
        longest = lr * _steepest(parts)
        # What is below the cap by a tenth is below it after rounding too. A bound that is not finite is not below.
        if (longest <= CERTAIN * self.cap * least).all():
            self._least = least - longest
            yield from ((layer, below, error.mul_(self.lr)) for layer, below, error in parts)
            return
        slope, length = _slope(parts), least if fresh else _length(params, layers)
        if not slope.isfinite().all():  # in float32 squares overflow long before gradients do
            slope = _slope([(layer, below.double(), error.double()) for layer, below, error in parts])
        fits = (slope * lr <= self.cap * length) | (length == 0)
        rate = torch.where(fits, lr, self.cap * length / slope)
        self._least = length - slope * rate
        slope, rate = slope[:, None, None].to(self.lr.dtype), rate[:, None, None].to(self.lr.dtype)
        finite = slope.isfinite()
        for layer, below, error in parts:
            if not finite.all():  # no step: not even 0 times what is not finite
                below, error = (torch.where(finite, x, 0.0) for x in (below, error))
            yield layer, below, error.mul_(torch.where(finite, rate, 0.0))


def _steepest(parts: Sequence[tuple[Layer, Tensor, Tensor]]) -> Tensor:
    r"""(m,) in float64, no gradient is longer: :math:`|E B^\top| \le \sum_s |e_s| |b_s|`. A bias is an input of 1."""
    total = 0.0
    for layer, below, error in parts:
        inputs = below.square().sum(1).double() + (layer.bias is not None)
        total = total + (error.square().sum(1).double() * inputs).sqrt().sum(1).square()
    return total.sqrt()


def _slope(parts: Sequence[tuple[Layer, Tensor, Tensor]]) -> Tensor:
    """(m,) the lengths of the gradients, in float64."""
    total = 0.0
    for layer, below, error in parts:
        # |E B^T|^2 is the sum of (E^T E) * (B^T B), which needs no matrix of the size of the weight.
        total = total + (torch.bmm(error.mT, error) * torch.bmm(below.mT, below)).sum((1, 2), dtype=torch.float64)
        if layer.bias:
            total = total + error.sum(2).square().sum(1, dtype=torch.float64)
    return total.clamp_min(0).sqrt()  # rounding may leave less than zero


def _length(params: Params, layers: Sequence[Layer]) -> Tensor:
    """(m,) the lengths of the models, in float64."""
    stacks = [params[name].flatten(1) for layer in layers for name in (layer.weight, layer.bias) if name]
    return torch.stack([torch.linalg.vector_norm(stack, dim=1) for stack in stacks]).double().norm(dim=0)
