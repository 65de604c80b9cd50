"""Proof by computation: an extracted sub-model equals the global model with everything else set to zero.

Channels that are left out must make the same difference as channels that are zero. That holds exactly, forward and
backward, for everything but operations that count their channels. For the comparison these are made not to count:
norms over channels (layer, group, RMS norm, a variance, weight standardisation) are replaced by a squashing function
and their affine part, and means and scalars computed from sizes are those of the masked model (`submodels.neutral`).
What is left (a maximum over channels) is named in the report, and a difference that no such operation explains is an
error in the map.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from submodels.batch import repeatable
from submodels.calls import Call, Examples
from submodels.extractors import Extractor, Random
from submodels.neutral import NEUTRALISED, Journal, neutral, widened
from submodels.skeleton import holds_weights, loose_tensors, named_tensors, rebuild
from submodels.states import cut_call, mask_call
from submodels.template import Template
from submodels.texts import shown

TOLERANCE = 1e-7
_TINY = 1e-30  # what stands for zero where a model divides by what was masked


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
        if not self.exact and self.explained_by:
            lines.append(f"the differences come from {', '.join(self.explained_by)}, which count their channels")
        return "\n".join(lines)


def verify(scalable, widths: Sequence[float] | None = None, extractor: Extractor = Random()) -> Report:
    """Compare extracted and masked models in float64 at random weights; the model itself is not touched.

    Args:
        widths: by default one channel a group, 1/4, 1/2 and 1.
        extractor: draws the channels. A window would be the same for all groups of a size, coupled or not, and hide
            that they are not; random draws differ from group to group.

    Raises:
        RuntimeError: on wrong shapes, values that are not finite, or a difference that no listed operation explains.
    """
    if not (widths is None or isinstance(widths, Sequence)):
        raise TypeError(f"widths is {shown(widths)}; it must be a list of numbers, such as [0.25, 1]")
    if widths is not None and not len(widths):
        raise ValueError("widths is empty, which would prove nothing; give some, such as [0.25, 1]")
    if widths is None:
        widths = sorted({1 / max(scalable.sizes), 0.25, 0.5, 1.0})
    model = _randomised(scalable.model)
    examples = Examples(
        tuple(_prepared(model, call) for call in scalable.examples.calls), outputs=scalable.examples.outputs
    )
    explained = sorted({op for group in scalable.axis_map.groups for op in group.mixed_by} - NEUTRALISED)
    comparisons = [_compare(model, scalable.index(width, extractor), width, examples) for width in widths]
    report = Report(tuple(comparisons), tuple(explained))
    if not report.exact and not explained:
        raise RuntimeError(
            f"sub-models of {type(scalable.model).__name__} differ from the masked model and no operation explains it; "
            f"keep the axes concerned whole with declare=\n{report}"
        )
    return report


def _compare(model: nn.Module, index, width: float, examples: Examples) -> Comparison:
    whole = {name: x.detach() for name, x in named_tensors(model)}
    part = {name: index.gather(name, x) for name, x in whole.items()}
    sub = Template.of(model, index.axis_map, index.counts).filled(part)
    forward = gradient = 0.0
    for number in range(len(examples.calls)):
        errors = _errors(model, sub, index, f"width {width}", (examples, number))
        forward, gradient = max(forward, errors[0]), max(gradient, errors[1])
    round_trip = all(_round_trips(name, x, part[name], index) for name, x in whole.items())
    share = sum(p.numel() for p in sub.parameters()) / max(1, sum(p.numel() for p in model.parameters()))
    return Comparison(width, forward, gradient, share, round_trip)


def _errors(model: nn.Module, sub: nn.Module, index, what: str, example: tuple[Examples, int]) -> tuple[float, float]:
    """Relative errors of outputs and of gradients on one example."""
    examples, number = example
    call, journal, states = examples.calls[number], Journal(), (index.axis_map.states, index.kept, index.sizes)
    inputs = mask_call(call, number, *states)
    # The masked model runs first and says which numbers it computed from its sizes; the sub-model is given them.
    masked = _masked(model, index, 0.0)
    theirs = _run(masked, inputs, examples, journal, replay=False)
    if not _finite(theirs):  # it divides by a weight: what is masked goes to zero instead of being zero
        journal, masked = Journal(), _masked(model, index, _TINY)
        theirs = _run(masked, inputs, examples, journal, replay=False)
    ours = _run(sub, cut_call(call, number, *states), examples, journal, replay=True)
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        raise RuntimeError(f"{what}: outputs have shapes {[tuple(x.shape) for x in ours]}")
    errors = [_relative(a, b, _largest([b]), f"{what}: output") for a, b in zip(ours, theirs, strict=True)]
    return max(errors, default=0.0), _gradient_error(sub, masked, index, (ours, theirs), what)


def _masked(model: nn.Module, index, rest: float) -> nn.Module:
    """The model with everything but the kept part set to zero, or with ``rest`` made that small and buffers kept."""
    # Running statistics stay: the affine part after them is masked, and a variance of zero would only blow values up.
    tensors, buffers = {}, {id(x) for x in model.buffers()}
    for name, x in named_tensors(model):
        value = x.detach().clone()
        if holds_weights(x) and name not in index.axis_map.statistics and not (rest and id(x) in buffers):
            value = torch.where(index.mask(name), value, value * rest)
        tensors[id(x)] = value
    return rebuild(model, tensors)


def _finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def _gradient_error(sub, masked, index, outputs: tuple[list[Tensor], list[Tensor]], what: str) -> float:
    ours, theirs = outputs
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
        _relative(g, e, _largest([e]) + floor, f"{what}: gradient of {name}")
        for name, g, e in zip(names, got, expected, strict=True)
    ]
    return max(errors, default=0.0)


def _gradients(outputs: list[Tensor], parameters: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    scalar = sum((out * c).sum().real for out, c in zip(outputs, cotangents, strict=True) if out.requires_grad)
    if not isinstance(scalar, Tensor):
        return [torch.zeros_like(p) for p in parameters]
    grads = torch.autograd.grad(scalar, parameters, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]  # of an embedding with sparse=True
    return [torch.zeros_like(p) if g is None else g for g, p in zip(dense, parameters, strict=True)]


def _round_trips(name: str, whole: Tensor, part: Tensor, index) -> bool:
    """Writing something new into the kept part changes the kept part, and nothing else."""
    # A new value, as writing back the old one would look right wherever it went.
    new = part + 1 if holds_weights(part) else part
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


def _run(module: nn.Module, call: Call, examples: Examples, journal: Journal, *, replay: bool) -> list[Tensor]:
    with neutral(journal, replay=replay):
        out = module.eval()(*call.args, **call.kwargs)
    return [x for x in examples.whole(out) if holds_weights(x)]


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
            statistics[id(x)] = widened(x.detach().cpu().clone())
    weights = {}
    for name, x in model.named_parameters():
        dtype = torch.complex128 if x.is_complex() else torch.float64
        noise = torch.randn(x.shape, dtype=dtype, generator=generator)
        fan_in = math.prod(x.shape[1:])
        # Outputs of layers keep their scale, and norm weights stay near 1, so that no depth over- or underflows.
        weights[id(x)] = noise / math.sqrt(max(1, fan_in)) if x.dim() > 1 else 0.3 * noise + name.endswith("weight")
    loose = {id(x): widened(x.detach().cpu()) for x in loose_tensors(model) if holds_weights(x)}
    return rebuild(model, loose | weights | statistics).eval()


def _prepared(model: nn.Module, call: Call) -> Call:
    """The call in float64 on the CPU, with two samples at least; inputs that say nothing are drawn at random.

    Whole numbers are left alone, as they may be indices or lengths, and so are values that vary: they are the user's.
    """
    call = Call(*tree_map(lambda x: widened(x.detach().cpu()) if isinstance(x, Tensor) else x, tuple(call)))
    dims = iter(repeatable(model, call))
    call = Call(*tree_map(lambda x: _twice(x, next(dims)) if isinstance(x, Tensor) else x, tuple(call)))
    seen: list[Tensor] = []
    drawn = Call(*tree_map(lambda x: _telling(x, seen) if isinstance(x, Tensor) else x, tuple(call)))
    try:
        with neutral(Journal(), replay=False), torch.no_grad():
            model(*drawn.args, **drawn.kwargs)
    except Exception:  # whatever a forward may raise on values that are not those of its example
        return call
    return drawn


def _twice(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else torch.cat([x, x], dim)


def _telling(x: Tensor, seen: list[Tensor]) -> Tensor:
    """The tensor, or one of random numbers if it is constant or the same as one before: such inputs hide errors."""
    if not holds_weights(x) or not x.numel() or x.layout is not torch.strided:
        return x
    generator = torch.Generator().manual_seed(2 + len(seen))
    noise = torch.randn(x.shape, dtype=x.dtype, generator=generator)
    constant = bool((x == x.flatten()[0]).all())
    repeated = any(x.shape == other.shape and torch.equal(x, other) for other in seen)
    samples_alike = x.dim() > 1 and len(x) > 1 and bool((x == x[:1]).all())
    seen.append(x)
    if constant:
        return noise
    whole_numbers = not x.is_complex() and bool((x == x.round()).all())
    return x * (1 + 0.1 * noise) if (repeated or samples_alike) and not whole_numbers else x
