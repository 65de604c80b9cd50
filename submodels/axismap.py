"""AxisMap: which positions of which tensors belong to which channels of a model."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from torch import nn

from submodels import norms
from submodels.axes import Axis, choose_factors, factors, find, free_leaves, is_frozen, reason, segments
from submodels.calls import Examples, examples_of, unwrapped
from submodels.decisions import Decision, Formula, Size, grown, relevant, rewritten
from submodels.declare import declare as declare_axes
from submodels.integers import Attribute, Traced
from submodels.skeleton import named_tensors
from submodels.states import States
from submodels.terms import Fixed, Group, Product, Sum, Term, renumber, scales, without
from submodels.texts import shown
from submodels.trace import Declared, Trace, trace

# Reasons that come first in `describe`: every model has them.
_EXPECTED = ("model input", "model output", "kernel", "spatial", "integer buffer")

_SHOWN = (0.5, 0.25, 0.0625)  # widths that `describe` reports on


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are kept or dropped together wherever they appear.

    Attributes:
        size: number of channels.
        tags: what they are (heads, groups) and which operations mix them (``op:mean``, ``norm:layer_norm``).
        members: (tensor name, axis) of every axis they appear in.
    """

    id: int
    size: int
    tags: frozenset[str] = frozenset()
    members: tuple[tuple[str, int], ...] = ()

    @property
    def noun(self) -> str:
        """What its channels are: heads, groups or channels."""
        return "heads" if "heads" in self.tags else "groups" if "groups" in self.tags else "channels"

    @property
    def name(self) -> str:
        """The name `AxisMap.describe` gives it: h for heads, g for groups, c for channels, and its number."""
        return f"{self.noun[0]}{self.id}"

    @property
    def mixed_by(self) -> frozenset[str]:
        """Operations to which a missing channel is not the same as a zero channel."""
        return frozenset(label.removeprefix("op:") for label in self.tags if label.startswith("op:"))


@dataclass(frozen=True)
class AxisMap:
    """How the tensors of a model are made of channel groups.

    Attributes:
        groups: the channel groups; `dims`: tensor name -> one term per axis, for every parameter and buffer.
        attributes: (module path, attribute, ...) -> the term that integer measures.
        frozen_by: (tensor name, axis) -> why that axis is always whole.
        statistics: names of batch-norm running statistics; they are never averaged or written back.
        unknown: operations without a rule that froze an axis, with their number.
        notes: warnings from making the map, one sentence each.
        decisions: comparisons of sizes in the forward that a cut could change; `counts` sees to it that none does.
        states: the terms of inputs that the model also returns and that are cut with it (`submodels.states`).
    """

    groups: tuple[ChannelGroup, ...]
    dims: Mapping[str, tuple[Term, ...]]
    attributes: Mapping[Attribute, Term]
    frozen_by: Mapping[tuple[str, int], str]
    statistics: frozenset[str]
    parameters: tuple[str, ...]
    unknown: Mapping[str, int]
    notes: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    states: States = field(default_factory=dict)

    @classmethod
    def trace(
        cls,
        model: nn.Module,
        example_inputs: Any = None,
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        declare: Mapping[str, str] | None = None,
        heads: str = "whole",
    ) -> "AxisMap":
        """The map of a model, read off one run on the meta device; the model itself is not touched.

        Args:
            example_inputs: what the model's forward takes (see `submodels.calls`).
            declare: axes stated by hand (see `submodels.declare`); they win over what the run shows.
            heads: "whole" keeps or drops attention heads as wholes, "dim" keeps all and narrows them.
        """
        model = unwrapped(model)
        return cls.of(model, examples_of(model, example_inputs, example_kwargs), declare, heads)

    @classmethod
    def of(
        cls, model: nn.Module, examples: Examples, declare: Mapping[str, str] | None = None, heads: str = "whole"
    ) -> "AxisMap":
        """The map of a model, read off runs of its examples; arguments as in `trace`."""
        if not isinstance(heads, str) or heads not in ("whole", "dim"):
            raise ValueError(f"heads={shown(heads)} is unknown; use 'whole' (drop heads) or 'dim' (narrow heads)")
        declared = declare_axes(model, declare or {})
        run = trace(model, examples, declared, heads)
        declared.check()
        return cls._compiled(model, run)

    @classmethod
    def declared(cls, model: nn.Module, patterns: Mapping[str, str]) -> "AxisMap":
        """The map stated by hand alone, without a run; tensors it does not name stay whole."""
        stated: Declared = declare_axes(model, patterns)
        axes = {
            name: stated.tensors.get(name) or [Axis(n, "not declared") for n in x.shape]
            for name, x in named_tensors(model, aliases=True)
        }
        for axis in [axis for row in axes.values() for axis in row]:
            choose_factors(axis, "whole")
        return cls._compiled(model, Trace(axes, dict(stated.attributes)))

    @classmethod
    def _compiled(cls, model: nn.Module, run: Trace) -> "AxisMap":
        atoms: dict[int, int] = {}
        free: list[Axis] = []

        def compile_axis(axis: Axis) -> Term:
            axis = find(axis)
            if is_frozen(axis):
                return Fixed(axis.size)
            if axis.kind:
                if axis.kind == "product":
                    return Product(tuple(map(compile_axis, factors(axis))))
                return Sum(tuple(map(compile_axis, segments(axis))))
            # Groups are numbered in the order of the tensors they first appear in, so equal runs give equal maps.
            if id(axis) not in atoms:
                atoms[id(axis)] = len(free)
                free.append(axis)
            return Group(atoms[id(axis)])

        dims = {name: tuple(map(compile_axis, row)) for name, row in run.axes.items()}
        attributes = {source: compile_axis(axis) for source, axis in run.attributes.items()}
        frozen_by = {
            (name, i): reason(axis)
            for name, row in run.axes.items()
            for i, axis in enumerate(row)
            if is_frozen(axis) and axis.size > 1
        }
        members: dict[int, list[tuple[str, int]]] = {i: [] for i in range(len(free))}
        for name, row in dims.items():
            for i, term in enumerate(row):
                for group in set(term.groups()):
                    members[group].append((name, i))
        groups = tuple(
            ChannelGroup(i, axis.size, frozenset(axis.tags), tuple(members[i])) for i, axis in enumerate(free)
        )
        scaling = {source: term for source, term in attributes.items() if scales(term)}

        def compile_size(size: int) -> Size:
            if not isinstance(size, Traced):
                return int(size)
            if size.axis is not None:  # an axis in no tensor and no attribute cannot shrink
                return compile_axis(size.axis) if all(id(x) in atoms for x in free_leaves(size.axis)) else int(size)
            if size.formula is None:
                return scaling.get(size.source, int(size))
            symbol, left, right = size.formula
            left, right = compile_size(left), compile_size(right)
            return int(size) if isinstance(left, int) and isinstance(right, int) else Formula(symbol, left, right)

        made = cls(
            groups=groups,
            dims=dims,
            attributes=scaling,
            frozen_by=frozen_by,
            statistics=norms.statistics(model),
            parameters=tuple(name for name, _ in model.named_parameters()),
            unknown=dict(run.unknown),
            notes=tuple(run.notes),
            states={name: tuple(map(compile_axis, row)) for name, row in run.states.items()},
        )
        decisions = [
            Decision(symbol, compile_size(a), compile_size(b), answer) for symbol, a, b, answer in run.comparisons
        ]
        return made._deciding(decisions)

    def _deciding(self, decisions: Sequence[Decision]) -> "AxisMap":
        """The map that keeps those decisions whose answer some width would change."""
        if not any(decision.groups() for decision in decisions):
            return self
        return replace(self, decisions=relevant(decisions, [self.counts(width) for width in self.widths()]))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Channels of every group."""
        return tuple(group.size for group in self.groups)

    def counts(self, width: float, own: Sequence[int] | None = None) -> tuple[int, ...]:
        """Channels kept of every group at a width, which is always a fraction of the global model.

        Args:
            own: channels a sub-model has; it can keep no more than those.

        `kept = min(own, max(1, ceil(width * size)))`, with a guard against ``0.07 * 100 = 7.000000000000001``, and more
        where the forward compares sizes and would get another answer (`submodels.decisions`).
        """
        check_width(width, self.sizes)
        own = own or self.sizes
        counts = tuple(
            min(have, max(1, math.ceil(width * size - 1e-9))) for have, size in zip(own, self.sizes, strict=True)
        )
        return grown(counts, self.decisions, own, self.sizes) if self.decisions else counts

    def widths(self) -> list[float]:
        """Every width at which the sub-model changes, from the narrowest to 1."""
        return sorted({k / size for size in set(self.sizes) for k in range(1, size + 1)} | {1.0})

    def shape(self, name: str, counts: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor when ``counts`` channels of every group are kept."""
        if not isinstance(name, str) or name not in self.dims:
            if isinstance(name, str) and name.removeprefix("_orig_mod.") in self.dims:
                raise ValueError(f"{shown(name)} is of a model that torch.compile made; give the model it was made of")
            raise ValueError(f"this model has no tensor {shown(name)}; it has {', '.join(self.dims)[:200]}")
        check_counts("counts", counts, self.sizes)
        return self._shape(name, counts)

    def _shape(self, name: str, counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(term.size(counts) for term in self.dims[name])

    def num_params(self, counts: Sequence[int]) -> int:
        """Parameters when ``counts`` channels of every group are kept."""
        check_counts("counts", counts, self.sizes)
        return sum(math.prod(self._shape(name, counts)) for name in self.parameters)

    def share(self, width: float) -> float:
        """The fraction of the parameters that a sub-model of this width has."""
        return self.num_params(self.counts(width)) / max(1, self.num_params(self.sizes))

    def frozen(self, groups: Iterable[int], why: str) -> "AxisMap":
        """The map with some groups kept whole, given by their numbers, and the reason in words."""
        gone = self._checked(groups)
        if not isinstance(why, str):
            raise TypeError(f"why is {shown(why)}; it must be a text that says why these groups are kept whole")
        ids = {group.id: i for i, group in enumerate(g for g in self.groups if g.id not in gone)}

        def rewrite(term: Term) -> Term:
            return renumber(without(term, gone, self.sizes), ids)

        dims = {name: tuple(map(rewrite, row)) for name, row in self.dims.items()}
        # An axis made of several groups may still scale by another: only those that became whole get the reason.
        reasons = {
            (name, axis): why for group in self.groups if group.id in gone for name, axis in group.members
            if not scales(dims[name][axis])
        }  # fmt: skip
        return replace(
            self,
            groups=tuple(replace(group, id=ids[group.id]) for group in self.groups if group.id in ids),
            dims=dims,
            attributes={s: rewrite(t) for s, t in self.attributes.items() if scales(without(t, gone, self.sizes))},
            frozen_by={**self.frozen_by, **reasons},
            notes=(*self.notes, why),
            states={name: tuple(map(rewrite, row)) for name, row in self.states.items()},
            decisions=tuple(d for d in (rewritten(d, gone, self.sizes, ids) for d in self.decisions) if d.groups()),
        )

    def _checked(self, groups: Iterable[int]) -> set[int]:
        """The numbers of groups as a set; an error if one is no group of this map."""
        known = {group.id for group in self.groups}
        try:
            listed = list(groups)
        except TypeError as error:
            raise TypeError(f"groups is {shown(groups)}; it must be a set of numbers of channel groups") from error
        for group in listed:
            if not isinstance(group, Integral) or isinstance(group, bool) or group not in known:
                raise ValueError(f"groups holds {shown(group)}; this map has the channel groups {shown(sorted(known))}")
        return {int(group) for group in listed}

    def settled(self) -> "AxisMap":
        """The map with every group kept whole for which only the whole model answers as the forward was answered."""
        axis_map = self
        while decision := next((d for d in axis_map.decisions if d.whole_only), None):
            names = [group.name for group in axis_map.groups]
            axis_map = axis_map.frozen(decision.groups(), f"the code asks whether {decision.question(names)}")
        # A wider sub-model must contain the narrower ones; should growing ever break that, nothing may grow.
        counts = [axis_map.counts(width) for width in axis_map.widths()] if axis_map.decisions else []
        if any(a > b for narrow, wide in itertools.pairwise(counts) for a, b in zip(narrow, wide, strict=True)):
            groups = {group for decision in axis_map.decisions for group in decision.groups()}
            axis_map = axis_map.frozen(groups, "the code compares sizes that come apart with the width")
        return axis_map

    def describe(self) -> str:
        """The map in the language of `declare`, one line per tensor, and what was kept whole and why."""
        names = [group.name for group in self.groups]
        lines = [f"{len(self.groups)} channel groups, {self.num_params(self.sizes):,} parameters"]
        lines += [f"share of the parameters at width {w}: {self.share(w):.3f}" for w in _SHOWN]
        width = max((len(name) for name in self.dims), default=0)
        for name, row in self.dims.items():
            lines.append(f"{name:<{width}}  {' '.join(t.show(names) if scales(t) else '.' for t in row)}".rstrip())
        for source, term in self.attributes.items():
            lines.append(f"{'.'.join(map(str, source)).lstrip('.'):<{width}}  {term.show(names)}")
        for width_ in _SHOWN:
            lines += self.coarse(width_)
        reasons = set(self.frozen_by.values())
        for why in [*(why for why in _EXPECTED if why in reasons), *sorted(reasons.difference(_EXPECTED))]:
            axes = [f"{name}[{i}]" for (name, i), w in self.frozen_by.items() if w == why]
            more = f" and {len(axes) - 4} more" if len(axes) > 4 else ""
            lines.append(f"kept whole ({why}): {', '.join(axes[:4])}{more}")
        return "\n".join([*lines, *self.notes])

    def coarse(self, width: float) -> list[str]:
        """What a width cannot express, one sentence for each number of channels it concerns.

        A group of which a channel is more than twice what the width asks for keeps one: of four heads, a quarter.

        Example:
            >>> import torch
            >>> layers = nn.Conv2d(3, 32, 3), nn.GroupNorm(2, 32), nn.Conv2d(32, 8, 3)
            >>> AxisMap.trace(nn.Sequential(*layers), torch.zeros(2, 3, 8, 8)).coarse(0.125)
            ['width 0.125 keeps 1 of 2 groups (g0): share 0.501']
        """
        lines = []
        kept = dict(zip(self.sizes, self.counts(width), strict=True))
        for word, size in dict.fromkeys((group.noun, group.size) for group in self.groups):
            names = [group.name for group in self.groups if (group.noun, group.size) == (word, size)]
            if 2 * width * size <= 1 and kept[size] < size:
                more = f" and {len(names) - 4} more" if len(names) > 4 else ""
                share = f"share {self.share(width):.3f}"
                keeps = f"width {float(width):g} keeps {kept[size]} of {size} {word}"
                lines.append(f"{keeps} ({', '.join(names[:4])}{more}): {share}")
        return lines


def check_counts(noun: str, counts: Sequence[int], sizes: Sequence[int], low: int = 0) -> tuple[int, ...]:
    """The channels of every group, in a tuple; an error if they are not ``low`` or more of groups of these sizes."""
    if not isinstance(counts, tuple | list):
        raise TypeError(f"{noun} is {shown(counts)}; it must be a list of {len(sizes)} numbers, one for each group")
    fits = [
        isinstance(kept, Integral) and not isinstance(kept, bool) and low <= kept <= size
        for kept, size in zip(counts, sizes)
    ]
    if len(counts) != len(sizes) or not all(fits):
        wanted = f"keep {low} or more of each"
        raise ValueError(f"{noun} {shown(counts)} are not those of groups of {shown(sizes)} channels; {wanted}")
    return tuple(counts)


def check_width(width: float, sizes: Sequence[int]) -> None:
    """Refuse a width outside (0, 1]."""
    if not isinstance(width, Real) or isinstance(width, bool) or not 0 < width <= 1:  # NaN fails too
        narrowest = 1 / max(sizes, default=1)
        raise ValueError(
            f"width {shown(width)} is outside (0, 1]; the smallest sub-model of this network keeps one channel a group "
            f"(width {narrowest:.3g})"
        )
