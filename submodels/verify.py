"""Proof by computation: an extracted sub-model equals the global model with everything else set to zero.

Channels that are left out must make the same difference as channels that are zero. That holds exactly, forward and
backward, for everything but operations that count their channels. For the comparison these are made not to count:
norms over channels (layer, group, RMS norm, a variance, weight standardisation) are replaced by a squashing function
and their affine part, and a mean divides by as many values in the sub-model as in the masked one. What is left (a
maximum over channels) is named in the report, and a difference that no such operation explains is an error in the map.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from submodels.extractors import Extractor, Random
from submodels.sizes import arguments
from submodels.skeleton import loose_tensors, named_tensors, rebuild, tensors_in
from submodels.template import Template

TOLERANCE = 1e-7
NEUTRALISED = frozenset({"mean", "var", "std", "batch_norm"})  # see `_NeutralNorms`


@dataclass(frozen=True)
class Comparison:
    """One width: relative errors of output and gradient, share of the parameters, and the scatter round trip."""

    width: float
    forward: float
    gradient: float
    share: float
    round_trip: bool

    @property
    def exact(self) -> bool:
        """True if the errors are within the tolerance, ten times as much for gradients, which add up more terms."""
        return max(self.forward, self.gradient / 10) <= TOLERANCE and self.round_trip


@dataclass(frozen=True)
class Report:
    """What `verify` found: a comparison per width, and the operations that explain differences."""

    comparisons: tuple[Comparison, ...]
    explained_by: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """True if every sub-model computes what the masked model computes, to 1e-7."""
        return all(comparison.exact for comparison in self.comparisons)

    def __str__(self) -> str:
        lines = ["width  share  forward error  gradient error  round trip"]
        for c in self.comparisons:
            lines.append(f"{c.width:<5.3g}  {c.share:.3f}  {c.forward:<13.1e}  {c.gradient:<14.1e}  {c.round_trip}")
        if not self.exact:
            lines.append(f"the differences come from {', '.join(self.explained_by)}, which count their channels")
        return "\n".join(lines)


def verify(scalable, widths: Sequence[float], extractor: Extractor = Random()) -> Report:
    """Compare extracted and masked models in float64 at random weights; the model itself is not touched.

    Args:
        extractor: draws the channels. A window would be the same for all groups of a size, coupled or not, and hide
            that they are not; random draws differ from group to group.

    Raises:
        RuntimeError: on wrong shapes, values that are not finite, or a difference that no listed operation explains.
    """
    model = _randomised(scalable.model)
    inputs, kwargs = _prepared(scalable.example_inputs), _prepared(scalable.example_kwargs)
    explained = sorted({op for group in scalable.axis_map.groups for op in group.mixed_by} - NEUTRALISED)
    comparisons = []
    for width in widths:
        index = scalable.index(width, extractor)
        comparisons.append(_compare(model, index, width, inputs, kwargs))
    report = Report(tuple(comparisons), tuple(explained))
    if not report.exact and not explained:
        raise RuntimeError(
            f"sub-models of {type(scalable.model).__name__} differ from the masked model and no operation explains it; "
            f"keep the axes concerned whole with declare=\n{report}"
        )
    return report


def _compare(model: nn.Module, index, width: float, inputs: tuple, kwargs: dict) -> Comparison:
    axis_map = index.axis_map
    whole = {name: x.detach() for name, x in named_tensors(model)}
    part = {name: index.gather(name, x) for name, x in whole.items()}
    sub = Template.of(model, axis_map, index.counts).filled(part)
    # Running statistics stay: the affine part after them is masked, and a variance of zero would only blow values up.
    masked = rebuild(
        model,
        {
            id(x): x.detach() * index.mask(name)
            if x.is_floating_point() and name not in axis_map.statistics
            else x.detach().clone()
            for name, x in named_tensors(model)
        },
    )
    # The masked model runs first and says how many values each of its means is over; the sub-model repeats them.
    counts: list[int] = []
    theirs = _run(masked, inputs, kwargs, _NeutralNorms(record=counts))
    ours = _run(sub, inputs, kwargs, _NeutralNorms(replay=counts))
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        raise RuntimeError(f"width {width}: outputs have shapes {[tuple(x.shape) for x in ours]}")
    forward = max(_relative(a, b, _largest([b]), f"width {width}: output") for a, b in zip(ours, theirs, strict=True))
    gradient = _gradient_error(sub, masked, index, ours, theirs, width)
    round_trip = all(_round_trips(name, x, part[name], index) for name, x in whole.items())
    share = sum(p.numel() for p in sub.parameters()) / max(1, sum(p.numel() for p in model.parameters()))
    return Comparison(width, forward, gradient, share, round_trip)


def _gradient_error(sub, masked, index, ours: list[Tensor], theirs: list[Tensor], width: float) -> float:
    generator = torch.Generator().manual_seed(1)
    # Random cotangents weigh every output differently: a plain sum would hide errors that cancel.
    cotangents = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in ours]
    names = [name for name, p in sub.named_parameters() if p.requires_grad]
    wide = dict(masked.named_parameters())
    got = _gradients(ours, [p for p in sub.parameters() if p.requires_grad], cotangents)
    whole = _gradients(theirs, [wide[name] for name in names], cotangents)
    expected = [index.gather(name, g) for name, g in zip(names, whole, strict=True)]  # elsewhere it may be anything
    floor = 1e-6 * _largest(expected)  # a gradient that is zero in theory (a key's bias) is rounding noise
    errors = [
        _relative(g, e, _largest([e]) + floor, f"width {width}: gradient of {name}")
        for name, g, e in zip(names, got, expected, strict=True)
    ]
    return max(errors, default=0.0)


def _gradients(outputs: list[Tensor], parameters: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    scalar = sum((out * c).sum() for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad)
    if not isinstance(scalar, Tensor):
        return [torch.zeros_like(p) for p in parameters]
    grads = torch.autograd.grad(scalar, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters, strict=True)]


def _round_trips(name: str, whole: Tensor, part: Tensor, index) -> bool:
    """Writing something new into the kept part changes the kept part, and nothing else."""
    # A new value, as writing back the old one would look right wherever it went.
    new = part + 1 if part.is_floating_point() else part
    written = index.scatter_(name, whole.clone(), new)
    mask = index.mask(name)
    return bool(
        torch.equal(index.gather(name, written), new)
        and torch.equal(written[~mask], whole[~mask])
        and int(mask.sum()) == part.numel()
    )


def _relative(a: Tensor, b: Tensor, scale: float, what: str) -> float:
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise RuntimeError(f"{what} is not finite")
    return float((a - b).detach().abs().max()) / (scale + 1e-30) if a.numel() else 0.0


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((float(x.detach().abs().max()) for x in tensors if x.numel()), default=0.0)


def _run(module: nn.Module, inputs: tuple, kwargs: dict, neutral: "_NeutralNorms") -> list[Tensor]:
    with neutral:
        out = module.eval()(*inputs, **kwargs)
    return [x for x in tensors_in(out) if x.is_floating_point()]


def _randomised(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU whose weights let every channel matter; zero-initialised ones would hide errors."""
    generator = torch.Generator().manual_seed(0)
    statistics = {}
    for name, x in model.named_buffers():
        noise = torch.rand(x.shape, dtype=torch.float64, generator=generator)
        if name.endswith("running_var"):
            statistics[id(x)] = noise + 0.5
        elif name.endswith("running_mean"):
            statistics[id(x)] = noise * 0.2 - 0.1
        else:
            statistics[id(x)] = x.detach().cpu().double() if x.is_floating_point() else x.detach().cpu().clone()
    weights = {}
    for name, x in model.named_parameters():
        noise = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        fan_in = math.prod(x.shape[1:])
        # Outputs of layers keep their scale, and norm weights stay near 1, so that no depth over- or underflows.
        weights[id(x)] = noise / math.sqrt(max(1, fan_in)) if x.dim() > 1 else 0.3 * noise + name.endswith("weight")
    loose = {id(x): x.detach().cpu().double() for x in loose_tensors(model) if x.is_floating_point()}
    return rebuild(model, loose | weights | statistics).eval()


def _prepared(tree: Any) -> Any:
    """Inputs in float64 on the CPU, at least two samples of them, all different."""

    def prepare(x):
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        x = x.repeat(2, *[1] * (x.dim() - 1)) if x.dim() and len(x) == 1 else x
        generator = torch.Generator().manual_seed(2)
        return torch.randn(x.shape, dtype=torch.float64, generator=generator) if x.is_floating_point() else x

    return tree_map(prepare, tree)


class _NeutralNorms(TorchFunctionMode):
    """Make operations that count channels not count them.

    Args:
        record: receives the number of values of every mean, in order.
        replay: numbers that means divide by instead of their own.
    """

    def __init__(self, record: list[int] | None = None, replay: Sequence[int] = ()):
        super().__init__()
        self.record, self.replay = record, iter(replay)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm):
            return _affine(*arguments(args, kwargs, "input", "normalized_shape", "weight", "bias"))
        if func in (F.group_norm, torch.group_norm):
            x, _, weight, bias = arguments(args, kwargs, "input", "num_groups", "weight", "bias")
            return _affine(x, None, *(_per_channel(v, x) for v in (weight, bias)))
        if func is F.batch_norm and (args[1] if len(args) > 1 else kwargs.get("running_mean")) is None:
            x, _, _, weight, bias = arguments(args, kwargs, "input", "running_mean", "running_var", "weight", "bias")
            return _affine(x, None, *(_per_channel(v, x) for v in (weight, bias)))
        out = func(*args, **kwargs)
        if func in (torch.var, torch.Tensor.var, torch.std, torch.Tensor.std):  # a norm written by hand
            return torch.ones_like(out)
        if func in (torch.mean, torch.Tensor.mean):
            count = args[0].numel() // max(1, out.numel())
            if self.record is None:
                return out * (count / next(self.replay, count))
            self.record.append(count)
        return out


def _per_channel(vector: Tensor | None, x: Tensor) -> Tensor | None:
    return None if vector is None else vector.reshape([-1 if i == 1 else 1 for i in range(x.dim())])


def _affine(x: Tensor, _shape: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = torch.asinh(x)  # odd, smooth and unbounded: zero stays zero, large values are tamed, no gradient vanishes
    x = x if weight is None else x * weight
    return x if bias is None else x + bias
