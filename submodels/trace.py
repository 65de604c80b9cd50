"""Read the axes of a model off one run on the meta device.

Two observers watch the run. `Tracer` sees every ATen operation and applies its rule. `Sizes` sees the Python calls
above and follows integers: a size read from a tensor or stored in a module (``num_heads``, a split size, a shape) that
is then used in a ``view`` says which axis that integer measures, so that it can be changed along with the axis. A bare
number in a ``view`` cannot be changed: it freezes the axis.
"""

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from submodels import rules
from submodels.axes import (
    Axis,
    aligned,
    choose_factors,
    concat,
    cut,
    find,
    fixed,
    freeze,
    growth,
    is_frozen,
    product,
    split_factor,
    tag,
    unify,
)
from submodels.skeleton import named_tensors, on_meta, rebuild

Attribute = tuple[str | int, ...]  # (module path, attribute name, position in a tuple, ...)


@dataclass(frozen=True)
class Declared:
    """Axes the user states in advance: of tensors by name, of module attributes by path."""

    tensors: Mapping[str, list[Axis]] = field(default_factory=dict)
    attributes: Mapping[Attribute, Axis] = field(default_factory=dict)


@dataclass
class Trace:
    """What one run showed: the axes of every tensor of the model, and what integers measure."""

    axes: dict[str, list[Axis]]
    attributes: dict[Attribute, Axis]
    unknown: dict[str, int] = field(default_factory=dict)  # operations without a rule -> how often they froze an axis
    notes: list[str] = field(default_factory=list)


class Traced(int):
    """An integer that remembers what it measures: an axis, a module attribute, or a formula of such integers."""

    axis: Axis | None
    source: Attribute | None
    formula: tuple[str, int, int] | None
    owner: object

    def __new__(cls, value: int, *, axis=None, source=None, formula=None, owner=None):
        self = int.__new__(cls, value)
        self.axis, self.source, self.formula, self.owner = axis, source, formula, owner
        return self

    def __reduce__(self):
        return int, (int(self),)


def _arithmetic(name: str, symbol: str, swap: bool):
    compute = getattr(int, name)

    def operation(self, other):
        value = compute(self, other)
        if type(value) is not int:
            return value  # NotImplemented, or a float
        pair = (other, self) if swap else (self, other)
        return Traced(value, formula=(symbol, *pair), owner=self.owner)

    return operation


for _symbol, _name in {"+": "add", "-": "sub", "*": "mul", "//": "floordiv", "%": "mod"}.items():
    setattr(Traced, f"__{_name}__", _arithmetic(f"__{_name}__", _symbol, swap=False))
    setattr(Traced, f"__r{_name}__", _arithmetic(f"__r{_name}__", _symbol, swap=True))
Traced.__neg__ = lambda self: Traced(-int(self), formula=("-", 0, self), owner=self.owner)


class TracedShape(tuple):
    """A shape of traced integers."""

    def numel(self) -> int:
        total = 1
        for size in self:
            total = total * size
        return total


class Tracer(TorchDispatchMode):
    """Applies the rule of every operation; ``tracer[x]`` are the axes of tensor x."""

    def __init__(self):
        super().__init__()
        self._axes: dict[int, list[Axis]] = {}
        self._alive: list[Tensor] = []  # ids are only unique among living objects
        self.seen: set[int] = set()
        self.unknown: dict[str, int] = {}

    def __getitem__(self, x: Tensor) -> list[Axis]:
        if id(x) not in self._axes:
            self[x] = [fixed(n, "constant") for n in x.shape]
        return self._axes[id(x)]

    def __setitem__(self, x: Tensor, axes: list[Axis]) -> None:
        axes = [find(axis) for axis in axes]
        assert tuple(axis.size for axis in axes) == tuple(x.shape), f"axes {axes} for shape {tuple(x.shape)}"
        self._axes[id(x)] = axes
        self._alive.append(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1].rstrip("_")
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not inputs:
            return out
        self.seen.update(map(id, inputs))
        elementwise = torch.Tag.pointwise in func.tags
        if not rules.apply(self, name, elementwise, args, kwargs, out, inputs):
            self.unknown[name] = self.unknown.get(name, 0) + 1
        return out


_SHAPE = torch.Tensor.shape.__get__  # a new wrapper at each access: compare with ==
_RESHAPE = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand, torch.broadcast_to}
_SPLIT = {torch.split, torch.Tensor.split, torch.functional.split, torch.split_with_sizes, torch.unsafe_split}
_CHUNK = {torch.chunk, torch.Tensor.chunk}
_CONV = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_CONSTANT = {torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn}
_NEW_CONSTANT = {torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full}


class Sizes(TorchFunctionMode):
    """Follows integers from where they are read to where they shape a tensor."""

    def __init__(self, tracer: Tracer, heads: str):
        super().__init__()
        self.tracer, self.heads = tracer, heads
        self.attributes: dict[Attribute, list[Axis]] = {}  # every axis a stored integer measures
        self._equal: list[list[Axis]] = []  # axes that must have equal sizes at every width
        self._formulas: list[tuple[tuple[str, int, int], Axis]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func == _SHAPE:
            return self._shape(args[0])
        if func is torch.Tensor.size:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return self._shape(args[0]) if dim is None else self._shape(args[0])[dim]
        if func is torch.Tensor.numel:
            return self._shape(args[0]).numel()
        if func in _RESHAPE:
            self._link_all(_sizes(args[1:], kwargs), out)
        elif func is torch.Tensor.unflatten or func is torch.unflatten:
            dim, sizes = args[1] % args[0].dim(), args[2]
            for size, axis in zip(sizes, self.tracer[out][dim : dim + len(sizes)], strict=True):
                self.link(size, axis)
        elif func in _SPLIT or func is torch.Tensor.split_with_sizes:
            self._split(out, *args[1:], **kwargs)
        elif func in _CHUNK:
            self._equal_parts(out, args[2] if len(args) > 2 else kwargs.get("dim", 0))
        elif func is torch.Tensor.narrow or func is torch.narrow:
            dim, start, length = args[1:]
            self._slice(args[0], dim, start, start + length)
        elif func is torch.Tensor.__getitem__:
            self._getitem(args[0], args[1])
        elif func in _CONV:
            self._factor(args[0], args[6] if len(args) > 6 else kwargs.get("groups", 1))
        elif func in (F.group_norm, torch.group_norm):
            self._factor(args[0], args[1] if len(args) > 1 else kwargs["num_groups"])
        elif func in (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm):
            shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
            for size, axis in zip(shape, self.tracer[args[0]][-len(shape) :], strict=True):
                self.link(size, axis)
        elif func is F.scaled_dot_product_attention:
            self._attention(args[0] if args else kwargs["query"])
        elif func in _CONSTANT:
            self._constant(out, _sizes(args, kwargs))
        elif func in _NEW_CONSTANT:
            self._constant(out, _sizes(args[1:], kwargs))
        return out

    def _shape(self, x: Tensor) -> TracedShape:
        sizes = [Traced(axis.size, axis=axis, owner=self) for axis in self.tracer[x]]
        return TracedShape(sizes)

    def _link_all(self, sizes: tuple, out: Tensor) -> None:
        if len(sizes) == out.dim():
            for size, axis in zip(sizes, self.tracer[out], strict=True):
                self.link(size, axis)

    def _split(self, out, split_size_or_sections=None, dim=0, *, split_size=None, split_sizes=None) -> None:
        sizes = next(s for s in (split_size_or_sections, split_size, split_sizes) if s is not None)
        if isinstance(sizes, int):
            self._equal_parts(out, dim)
            self.link(sizes, self.tracer[out[0]][dim])
        else:
            for size, o in zip(sizes, out, strict=True):
                self.link(size, self.tracer[o][dim])

    def _equal_parts(self, parts, dim: int) -> None:
        """``chunk`` and ``split(n)`` cut by counting: their parts must shrink alike at every width."""
        axes = [self.tracer[part][dim] for part in parts]
        if len({axis.size for axis in axes}) > 1:
            for axis in axes:
                freeze(axis, "op:chunk of unequal parts")
        self._equal.append(axes)

    def _slice(self, x: Tensor, dim: int, start: Any, stop: Any) -> None:
        """The boundaries of a slice measure runs of the axis; literal boundaries freeze it."""
        axis = self.tracer[x][dim]
        if is_frozen(axis):
            return
        for edge in (start, stop):
            if edge is None or edge == 0 or edge >= axis.size or -edge >= axis.size:
                continue
            place = edge % axis.size
            pieces = cut(axis, [place, axis.size - place])
            if pieces is None:
                freeze(axis, "op:slice")
            elif edge > 0:
                self.link(edge, pieces[0])
            else:
                self.link(-edge, pieces[1])

    def _getitem(self, x: Tensor, key: Any) -> None:
        key = key if isinstance(key, tuple) else (key,)
        if any(isinstance(item, Tensor | list) for item in key):
            return
        used = sum(item is not None and item is not Ellipsis for item in key)
        dim = 0
        for item in key:
            if item is Ellipsis:
                dim += x.dim() - used
            elif item is not None:
                if isinstance(item, slice) and item.step in (None, 1):
                    self._slice(x, dim, item.start, item.stop)
                dim += 1

    def _factor(self, x: Tensor, groups: int) -> None:
        """``groups`` counts the leading factor of the channels."""
        if groups > 1 and (pair := split_factor(self.tracer[x][1], int(groups))):
            self.link(groups, pair[0])

    def _attention(self, query: Tensor) -> None:
        """Fused attention takes its scale from the head's own width, which therefore does not scale by default."""
        heads, inner = self.tracer[query][-3], self.tracer[query][-1]
        tag(heads, "heads")
        if self.heads == "whole":
            freeze(inner, "head_dim")
        else:
            tag(inner, "op:scaled_dot_product_attention")

    def _constant(self, out: Tensor, sizes: tuple) -> None:
        """A constant tensor has an axis of its own wherever its size has a source."""
        if len(sizes) != out.dim():
            return
        self.tracer[out] = [
            Axis(n) if isinstance(size, Traced) else fixed(n, "constant")
            for size, n in zip(sizes, out.shape, strict=True)
        ]
        self._link_all(sizes, out)

    def link(self, size: Any, axis: Axis) -> None:
        """Record that an integer measures an axis; a number without a source freezes it."""
        if not isinstance(size, int) or size <= 1 or size != axis.size:
            return
        if not isinstance(size, Traced) or size.owner is not self:
            freeze(axis, "literal size in the code")
            return
        if size.axis is not None:
            self._equal.append([size.axis, axis])
        if size.source is not None:
            self.attributes.setdefault(size.source, []).append(axis)
        if size.formula is not None:
            self._formulas.append((size.formula, axis))

    def _measured(self, size: int) -> Axis | None:
        """The axis an integer is known to measure; a plain number measures a fixed one."""
        if not isinstance(size, Traced):
            return fixed(size, "literal size in the code")
        return size.axis or next(iter(self.attributes.get(size.source, ())), None)

    def _solve(self, formula: tuple[str, int, int], axis: Axis) -> None:
        """Say what the integers of a formula measure, given what its value does."""
        symbol, left, right = formula
        if symbol in "*+" and min(left, right) > 0:
            for size, part in zip((left, right), aligned(axis, [left, right], _KIND[symbol]) or (), strict=False):
                self.link(size, part)
        other = self._measured(right)
        if symbol == "//" and left == right * axis.size and other is not None:
            self.link(left, product([other, axis]))  # E // num_heads used as head_dim: E is (num_heads head_dim)
        if symbol == "-" and right > 0 and other is not None:
            self.link(left, concat([other, axis]))

    def finish(self) -> None:
        """Use what only the whole run can tell: formulas, and sizes that must stay equal."""
        while self._formulas:
            self._solve(*self._formulas.pop(0))
        for axes in self._alike():
            for axis in axes[1:]:
                if axis.size == axes[0].size and growth(axis) != growth(axes[0]):
                    unify(axes[0], axis)

    def freeze_unequal(self) -> None:
        """The last resort for sizes that would still come apart at some width."""
        for axes in self._alike():
            if any(growth(axis) != growth(axes[0]) for axis in axes[1:]):
                for axis in axes:
                    freeze(axis, "sizes that would come apart", force=True)

    def _alike(self) -> list[list[Axis]]:
        return self._equal + list(self.attributes.values())


_KIND = {"*": "product", "+": "sum"}


def _sizes(args: tuple, kwargs: Mapping) -> tuple:
    if not args:
        args = (kwargs.get("shape", kwargs.get("size", ())),)
    if isinstance(args[0], tuple | list):
        args = tuple(args[0])
    return tuple(args)


def trace(
    model: nn.Module, inputs: tuple, kwargs: Mapping[str, Any], declared: Declared, heads: str = "whole"
) -> Trace:
    """The axes of a model, from one run in evaluation and one in training mode.

    Args:
        declared: axes the user fixed in advance; `heads`: "whole" or "dim", see `choose_factors`.
    """
    try:
        result = _observe(on_meta(model), _to_meta(inputs), _to_meta(kwargs), declared, heads)
    except (NotImplementedError, RuntimeError) as error:
        note = f"does not run on the meta device ({_first_line(error)}); traced on real tensors"
        real = rebuild(model, {id(x): x.detach().clone() for _, x in named_tensors(model)})
        result = _observe(real, inputs, kwargs, declared, heads)
        result.trace.notes.append(note)
    result.sizes.finish()
    result.trace.attributes.update({source: axes[0] for source, axes in result.sizes.attributes.items()})
    axes = [axis for row in result.trace.axes.values() for axis in row] + list(result.trace.attributes.values())
    for _ in range(3):  # freezing may change which factor of a product is free, and that which sizes are equal
        for axis in axes:
            choose_factors(axis, heads)
        result.sizes.freeze_unequal()
    return result.trace


@dataclass
class _Observation:
    trace: Trace
    sizes: Sizes


def _observe(model: nn.Module, inputs: tuple, kwargs: Mapping, declared: Declared, heads: str) -> _Observation:
    tracer = Tracer()
    sizes = Sizes(tracer, heads)
    sizes.attributes.update({source: [axis] for source, axis in declared.attributes.items()})
    for name, x in named_tensors(model):
        own = declared.tensors.get(name)
        tracer[x] = own or [Axis(n, None if x.is_floating_point() else "integer buffer") for n in x.shape]
    for x in tree_flatten((inputs, kwargs))[0]:
        if isinstance(x, Tensor):
            tracer[x] = [fixed(n, "model input") for n in x.shape]
    named = {name: tracer[x] for name, x in named_tensors(model, aliases=True)}
    _source_attributes(model, sizes)
    _tie_attention_modules(model, tracer, sizes)
    notes = []
    device = next((x.device for _, x in named_tensors(model)), torch.device("cpu"))
    with _quiet_caches(), torch.no_grad():
        for training in (False, True):
            model.train(training)
            try:
                with ExitStack() as stack:
                    for observer in (torch.device(device), sizes, tracer):
                        stack.enter_context(observer)
                    out = model(*inputs, **kwargs)
            except Exception as error:
                if not training:
                    raise
                notes.append(f"not traced in training mode: {_first_line(error)}")
                continue
            for x in tree_flatten(out)[0]:
                if isinstance(x, Tensor):
                    for axis in tracer[x]:
                        freeze(axis, "model output", force=True)
    for _, x in named_tensors(model):
        if id(x) not in tracer.seen:
            for axis in tracer[x]:
                freeze(axis, "not used in the traced run")
    return _Observation(Trace(named, {}, tracer.unknown, notes), sizes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def _to_meta(tree: Any) -> Any:
    return tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, tree)


def _source_attributes(model: nn.Module, sizes: Sizes) -> None:
    """Replace the integers stored in modules by traced ones that know where they are stored."""

    def sourced(value: Any, source: Attribute) -> Any:
        if type(value) is int and value > 1:
            return Traced(value, source=source, owner=sizes)
        if type(value) in (tuple, list):
            return type(value)(sourced(item, (*source, i)) for i, item in enumerate(value))
        return value

    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_"):
                vars(module)[key] = sourced(value, (path, key))


def _tie_attention_modules(model: nn.Module, tracer: Tracer, sizes: Sizes) -> None:
    """nn.MultiheadAttention computes in one opaque call and checks embed_dim == num_heads * head_dim: say so."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        heads, inner = Axis(module.num_heads), Axis(module.head_dim)
        tag(heads, "heads")
        embed = product([heads, inner])
        if module.in_proj_weight is not None:
            unify(tracer[module.in_proj_weight][0], product([fixed(3, "query, key, value"), heads, inner]))
            unify(tracer[module.in_proj_weight][1], embed)
        else:
            unify(tracer[module.q_proj_weight][1], embed)
            for weight in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
                unify(tracer[weight][0], embed)
        for axis in tracer[module.out_proj.weight]:
            unify(axis, embed)
        sources = {"num_heads": heads, "embed_dim": embed}
        if module.in_proj_weight is not None:
            sources |= {"kdim": embed, "vdim": embed}
        else:
            sources |= {"kdim": tracer[module.k_proj_weight][1], "vdim": tracer[module.v_proj_weight][1]}
        sizes.attributes.update({(path, name): [axis] for name, axis in sources.items()})


@contextmanager
def _quiet_caches():
    """Switch off what would hide a run from its observers: fused attention and the shape cache of einops."""
    import einops.einops as engine

    fast = torch.backends.mha.get_fastpath_enabled()
    cached = engine._reconstruct_from_shape
    torch.backends.mha.set_fastpath_enabled(False)
    engine._reconstruct_from_shape = engine._reconstruct_from_shape_uncached
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        engine._reconstruct_from_shape = cached
