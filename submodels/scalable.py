"""ScalableModel: a model from which narrower models of the same kind are cut, and into which they are written back."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from submodels.axismap import AxisMap, check_counts, check_width
from submodels.batch import Dims, find_batch, stated
from submodels.budget import Budget, largest
from submodels.calls import Call, examples_of, unwrapped
from submodels.cost import Cost, check_step, count
from submodels.extractors import Extractor, Static, as_extractor
from submodels.indexset import IndexSet
from submodels.selfcheck import runnable
from submodels.skeleton import holds_weights, named_tensors, on_meta
from submodels.states import cut_call
from submodels.template import Template
from submodels.texts import plain, shown
from submodels.verify import Report, verify

log = logging.getLogger(__name__)
_MAX_INDICES = 32  # index sets remembered; the clients of a round share a handful


class ScalableModel:
    """Any `nn.Module` as a family of models of every width.

    The model is traced once; it stays the user's and holds the global weights. Attention heads and norm groups are
    kept or dropped as wholes, inputs and outputs are never cut, and what cannot be cut is kept whole and reported
    (`axis_map.frozen_by`, `axis_map.describe()`).

    Args:
        model: the full-width model, unmodified; of one wrapped by `torch.compile`, what was wrapped.
        example_inputs: what its forward takes: a tensor, a tuple of arguments, a dict of keyword arguments, or a list.
        example_kwargs: keyword arguments of its forward.
        declare: axes stated by hand where the trace cannot see them (`submodels.declare`).
        heads: "whole" or "dim" (keep every attention head and narrow it).
        examples: further examples, if one does not run every part of the model (the heads of several tasks): each as
            ``example_inputs``, or a pair (tuple of arguments, dict of keyword arguments).
        outputs: a function from what the model returns to what of it stays whole, such as ``lambda out: out.logits``.
            The rest (hidden states, caches) may shrink, and so do states that go in and come out.

    Example:
        >>> scalable = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
        >>> scalable.extract(width=0.5).module
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        example_kwargs: Mapping[str, Any] | None = None,
        declare: Mapping[str, str] | None = None,
        heads: str = "whole",
        examples: Sequence[Any] | None = None,
        outputs: Callable[[Any], Any] | None = None,
    ):
        for label, value in (("example_kwargs", example_kwargs), ("declare", declare)):
            if not isinstance(value, Mapping | None):
                raise TypeError(f"{label} is a {type(value).__name__}; it must be a dict, or None")
        self.model = model = unwrapped(model)
        self.examples = examples_of(model, example_inputs, example_kwargs, examples, outputs)
        self.axis_map = runnable(model, AxisMap.of(model, self.examples, declare, heads), self.examples)
        for note in self.axis_map.notes:
            log.warning("%s: %s", type(model).__name__, note)
        # Widths, index sets and costs recur from round to round and client to client.
        self._templates: dict[tuple[int, ...], Template] = {}
        self._static: dict[tuple[float, tuple[int, ...]], IndexSet] = {}
        self._indices: dict[IndexSet, IndexSet] = {}
        self._costs: dict[tuple, Cost] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of every group."""
        return self.axis_map.sizes

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the global model."""
        return self.model.named_parameters()

    def index(
        self,
        width: float,
        extractor: Extractor | str = Static(),
        *,
        round: int = 0,
        client: int = 0,
        within: Sequence[int] | None = None,
    ) -> IndexSet:
        """The channels that a sub-model of this width keeps.

        Args:
            within: channels of every group of the sub-model to cut; those of the global model by default. ``width`` is
                a fraction of the global model either way.
        """
        for noun, value in (("round", round), ("client", client)):
            if not isinstance(value, Integral) or isinstance(value, bool) or abs(value) >= 2**64:
                raise TypeError(f"{noun} is {shown(value)}; it must be a whole number below 2^64")
        own = self.sizes if within is None else check_counts("within", within, self.sizes)
        if type(as_extractor(extractor)) is not Static:
            return self._remembered(_index(self.axis_map, own, width, extractor, round=round, client=client))
        check_width(width, self.sizes)  # before the cache is asked: True would find what 1.0 left there
        # The static part depends on nothing but the two sizes, and is asked for at every visit.
        if (width, own) not in self._static:
            self._static[width, own] = _index(self.axis_map, own, width, extractor, round=0, client=0)
        return self._static[width, own]

    def _remembered(self, index: IndexSet) -> IndexSet:
        """The equal index set of an earlier call, if it is still in the cache: its plans for cutting are made."""
        remembered = self._indices.pop(index, index)
        self._indices[remembered] = remembered  # at the end: a dict keeps its order, and the oldest is dropped first
        if len(self._indices) > _MAX_INDICES:
            del self._indices[next(iter(self._indices))]
        return remembered

    def extract(
        self, width: float, extractor: Extractor | str = Static(), *, round: int = 0, client: int = 0
    ) -> "Submodel":
        """A fresh, real, smaller module of the same class with the kept part of the weights.

        Args:
            width: fraction of the channels of every group, in (0, 1]; `ceil(width * size)`, at least one, is kept.
            extractor: Static(), Rolling(), Random(seed), Importance.of(model), or your own (`submodels.extractors`).
            round, client: what a rolling or random extractor depends on.
        """
        index = self.index(width, extractor, round=round, client=client)
        return self._submodel(index, width)

    def cut(self, index: IndexSet, width: float | None = None) -> "Submodel":
        """The sub-model that keeps the channels of an index set; ``width``, if given, must be that of the set."""
        _check_kind(index, IndexSet, "index")
        if width is not None:
            check_width(width, self.sizes)
            counts = self.axis_map.counts(width)
            if index.counts != counts:
                raise ValueError(
                    f"the index keeps {shown(index.counts)} channels and width {float(width):g} is {shown(counts)}; "
                    "leave the width out, or give the one of the index"
                )
        return self._submodel(index, width)

    def _submodel(self, index: IndexSet, width: float | None) -> "Submodel":
        module = _cut(self.model, self.template_of(index.counts), index)
        return Submodel(module=module, index=index, inner=index, scalable=self, width=width)

    def template(self, width: float) -> nn.Module:
        """The empty sub-model of a width, on the meta device: shapes without memory."""
        return on_meta(self.template_of(self.axis_map.counts(width)).module)

    def template_of(self, counts: Sequence[int]) -> Template:
        """The template that keeps so many channels of every group; made once."""
        counts = check_counts("counts", counts, self.sizes, low=1)
        if counts not in self._templates:
            self._templates[counts] = Template.of(self.model, self.axis_map, counts, with_config=True)
        return self._templates[counts]

    def embed(self, tensors: Mapping[str, Tensor], index: IndexSet) -> dict[str, Tensor]:
        """Sub-model tensors in the global shape, zero outside the mask: the adjoint of `extract`."""
        _check_kind(tensors, Mapping, "table of tensors")
        _check_kind(index, IndexSet, "index")
        stranger = next((name for name in tensors if name not in self.axis_map.dims), None)
        if stranger is not None:
            raise ValueError(f"{shown(stranger)} is no tensor of this model; give those of a sub-model, sub.tensors()")
        for name, x in tensors.items():
            _check_kind(x, Tensor, f"value of {shown(name)}")
        shapes = {name: self.axis_map.shape(name, index.sizes) for name in tensors}
        return {name: index.scatter_(name, x.new_zeros(shapes[name]), x) for name, x in tensors.items()}

    def write(self, sub: "Submodel") -> None:
        """Write a trained sub-model back into the global model; batch-norm statistics stay out."""
        _check_kind(sub, Submodel, "sub-model")
        _write(sub, self.model, sub.index)

    def verify(self, widths: Sequence[float] | None = None) -> Report:
        """Proof, in float64, that sub-models compute what the masked global model computes; see `submodels.verify`.

        Args:
            widths: by default one channel a group, 1/4, 1/2 and 1.
        """
        return verify(self, widths)

    @cached_property
    def batch_dims(self) -> Dims:
        """For every tensor of the example the dimension that counts samples, None for those that have none."""
        return find_batch(self.model, self.examples.calls[0])

    def cost(
        self,
        width: float,
        batch_size: int = 32,
        optimizer: str = "sgd",
        batch_dim: int | Dims | None = None,
        accumulate: int = 1,
    ) -> Cost:
        """Parameters, multiply-adds, training memory and bytes on the wire of a width, counted without running it.

        Args:
            batch_dim: the dimension of the inputs that counts samples, or one per tensor; found unless given. A model
                without such a dimension (of a whole graph, say) is priced on its example.
            optimizer, accumulate: one of `submodels.cost.OPTIMIZERS`, and the pieces in which a batch is run.
        """
        check_step(optimizer, batch_size, accumulate)
        call = self.examples.calls[0]
        dims = self.batch_dims if batch_dim is None else stated(batch_dim, call)
        key = (self.axis_map.counts(width), batch_size, optimizer, dims, accumulate)
        if key not in self._costs:
            module, step = self.template_of(key[0]).module, {"batch_size": batch_size, "optimizer": optimizer}
            kept = [torch.arange(counted) for counted in key[0]]
            call = cut_call(call, 0, self.axis_map.states, kept, self.sizes)  # hidden states are as wide as the model
            self._costs[key] = count(module, *call, **step, batch_dims=dims, accumulate=accumulate)
        return self._costs[key]

    def fit(
        self,
        budget: Budget,
        batch_size: int = 32,
        widths: Sequence[float] | None = None,
        optimizer: str = "sgd",
        batch_dim: int | Dims | None = None,
        accumulate: int = 1,
    ) -> float:
        """The largest width that fits a budget: of all, or of a grid of widths; arguments as in `cost`."""
        _check_kind(budget, Budget, "budget")
        if not (widths is None or isinstance(widths, Iterable)) or isinstance(widths, str | Tensor):
            raise TypeError(f"widths is {shown(widths)}; it must be a list of numbers, such as [0.25, 1]")
        grid = self.axis_map.widths() if widths is None else list(widths)
        return largest(lambda width: self.cost(width, batch_size, optimizer, batch_dim, accumulate), budget, grid)

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of every parameter and buffer of the global model, detached."""
        return _tensors(self.model)


@dataclass(frozen=True)
class Submodel:
    """A sub-model and where it lies.

    Attributes:
        module: a plain module: train it, save it, export it.
        index: where its tensors lie in the global model.
        inner: where they lie in the model it was cut from; the same as ``index`` unless that was a sub-model.
        width: the fraction of the global model that was asked for.
    """

    module: nn.Module
    index: IndexSet
    inner: IndexSet
    scalable: ScalableModel
    width: float | None = None

    @property
    def axis_map(self) -> AxisMap:
        """The axis map of the global model; it holds for every sub-model."""
        return self.scalable.axis_map

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of every group in this sub-model."""
        return self.index.counts

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of the sub-model."""
        return self.module.named_parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of every parameter and buffer, detached: what `average` and `embed` take."""
        return _tensors(self.module)

    def extract(
        self, width: float, extractor: Extractor | str = Static(), *, round: int = 0, client: int = 0
    ) -> "Submodel":
        """A sub-model of this sub-model, of its present weights; ``width`` is a fraction of the *global* model."""
        inner = self.scalable.index(width, extractor, round=round, client=client, within=self.sizes)
        module = _cut(self.module, self.scalable.template_of(inner.counts), inner)
        return Submodel(module, self.index.compose(inner), inner, self.scalable, width)

    def cut_inputs(self, *args: Any) -> tuple:
        """Arguments of the whole model with their states (see `ScalableModel`, ``outputs``) cut to this sub-model."""
        return cut_call(Call(args), 0, self.axis_map.states, self.index.kept, self.index.sizes).args

    def write(self, sub: "Submodel") -> None:
        """Write a trained sub-model of this sub-model back into it; batch-norm statistics stay out."""
        _check_kind(sub, Submodel, "sub-model")
        _write(sub, self.module, sub.inner)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in named_tensors(module)}


def _index(
    axis_map: AxisMap, own: tuple[int, ...], width: float, extractor: Extractor | str, *, round: int, client: int
) -> IndexSet:
    extractor = as_extractor(extractor)
    kept = []
    for group, size, wanted in zip(axis_map.groups, own, axis_map.counts(width, own), strict=True):
        try:
            answer = extractor(replace(group, size=size), wanted, round=round, client=client)
        except TypeError as error:
            call = "extractor(group, kept, round=..., client=...)"
            raise TypeError(
                f"{shown(extractor)} cannot be called as {call} ({plain(str(error))}); see submodels.extractors"
            ) from error
        try:
            chosen = torch.as_tensor(answer).clone()  # an extractor may use its memory again
        except (TypeError, RuntimeError):
            chosen = torch.empty(0)
        if chosen.shape != (wanted,):
            said = " ".join(repr(answer).split())[:60]
            raise ValueError(f"{extractor!r} was asked for {wanted} channels of group {group.name} and answered {said}")
        kept.append(chosen)
    return IndexSet(axis_map, tuple(kept), own)


def _check_kind(value: Any, kind: type, noun: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"the {noun} is a {type(value).__name__}; it must be a {kind.__name__}")


def _cut(model: nn.Module, template: Template, index: IndexSet) -> nn.Module:
    """A fresh module with the kept part of a model's tensors; flags are as in the model now."""
    tensors = {}
    for name, x in named_tensors(model):
        part = index.gather(name, x.detach())
        tensors[name] = nn.Parameter(part, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else part
    module = template.filled(tensors)
    for new, old in zip(module.modules(), model.modules(), strict=True):
        new.training = old.training
    return module


@torch.no_grad()
def _write(sub: Submodel, into: nn.Module, index: IndexSet) -> None:
    targets = dict(named_tensors(into))
    written = [(name, x) for name, x in named_tensors(sub.module) if name not in sub.axis_map.statistics]
    written = [(name, x) for name, x in written if holds_weights(x)]
    # All are held against the model first, so that it is written to whole or not at all.
    for name, x in written:
        if name not in targets or x.is_meta:
            wrong = "holds no numbers" if x.is_meta else "is not in the model"
            raise ValueError(f"{name!r} of the sub-model {wrong}; write back what `extract` returned, trained")
        index.check_part(name, targets[name], x)
    for name, x in written:
        index.scatter_(name, targets[name], x)
