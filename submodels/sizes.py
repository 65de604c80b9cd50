"""Follow integers through a run: which axis does a size measure?

A size read from a tensor or stored in a module (``num_heads``, a split size, a shape) that is then used in a ``view``
says which axis that integer measures, so that it can be changed along with the axis. A bare number in a ``view`` cannot
be changed: it freezes the axis.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn
from torch.overrides import TorchFunctionMode

from submodels.axes import (
    Axis,
    aligned,
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
from submodels.integers import Attribute, Traced, TracedShape, change_integers
from submodels.literals import VIEW, literals_of, sizes_of

_KIND = {"*": "product", "+": "sum"}


class Sizes(TorchFunctionMode):
    """Follows integers from where they are read to where they shape a tensor."""

    def __init__(self, tracer: Mapping[Tensor, list[Axis]], heads: str):
        super().__init__()
        self.tracer, self.heads = tracer, heads
        self.attributes: dict[Attribute, list[Axis]] = {}  # every axis a stored integer measures
        self._equal: list[list[Axis]] = []  # axes that must have equal sizes at every width
        self._formulas: list[tuple[tuple[str, int, int], Axis, bool]] = []
        self.comparisons: list[tuple[str, int, int, bool]] = []  # what the forward asked, and the answer
        self._views: list[tuple[tuple, list[Axis]]] = []  # sizes given to views, and the axes of the results
        self._depth = 0  # inside one of torch's functions, where sizes are read unseen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._depth += 1
        try:
            out = func(*args, **kwargs)
        finally:
            self._depth -= 1
        handler = _HANDLERS.get(func)
        answer = None if handler is None else handler(self, out, args, kwargs)
        return out if answer is None else answer

    def follow_attributes(self, model: nn.Module) -> None:
        """Replace the integers stored in modules by traced ones that know where they are stored."""

        def traced(value: int, source: Attribute) -> int:
            # 0 and 1 measure no axis that could shrink
            return Traced(value, source=source, owner=self) if value > 1 else value

        change_integers(model, traced)

    # Handlers: (what the call returned, its arguments) -> what the model gets instead, or None for the same.

    def _shape(self, _out, args, _kwargs) -> TracedShape:
        return TracedShape([Traced(axis.size, axis=axis, owner=self) for axis in self.tracer[args[0]]])

    def _size(self, out, args, kwargs) -> TracedShape | Traced:
        _, dim = arguments(args, kwargs, "self", "dim")
        shape = self._shape(out, args, kwargs)
        return shape if dim is None else shape[dim]

    def _numel(self, out, args, kwargs) -> int:
        return self._shape(out, args, kwargs).numel()

    def _expand(self, out, args, kwargs) -> None:
        self._link_all(sizes_of(args[1:], kwargs), out)

    def _reshape(self, out, args, kwargs) -> None:
        sizes = sizes_of(args[1:], kwargs)
        if len(sizes) != out.dim():
            return
        axes = self.tracer[out]
        self._views.append((sizes, axes))  # numbers typed in wait: only the whole run says what else can shrink
        for size, axis in zip(sizes, axes, strict=True):
            if self._follows(size):
                self.link(size, axis)

    def _squeeze(self, _out, args, kwargs) -> None:
        """Without a dimension, an axis that shrinks to one would go too: more than one must be kept."""
        if len(args) == 1 and not kwargs:
            shape = self._shape(None, args, {})
            self.comparisons += [("==", size, 1, False) for size in shape if int(size) > 1]

    def _unflatten(self, out, args, kwargs) -> None:
        x, dim, sizes = arguments(args, kwargs, "input", "dim", "sizes")
        dim = dim % x.dim()
        for size, axis in zip(sizes, self.tracer[out][dim : dim + len(sizes)], strict=True):
            self.link(size, axis)

    def _split(self, out, args, kwargs) -> None:
        self._link_split(out, *args[1:], **kwargs)

    def _chunk(self, out, args, kwargs) -> None:
        self._equal_parts(out, args[2] if len(args) > 2 else kwargs.get("dim", 0))

    def _tensor_split(self, out, args, kwargs) -> None:
        self._link_tensor_split(out, *args, **kwargs)

    def _split_along(self, dim: int, out, args, kwargs) -> None:
        self._link_tensor_split(out, *args, **kwargs, dim=min(dim, args[0].dim() - 1))

    def _narrow(self, out, args, kwargs) -> None:
        x, dim, start, length = arguments(args, kwargs, "input", "dim", "start", "length")
        self._slice(x, dim, start, None)
        self.link(length, self.tracer[out][dim], strict=True)

    def _getitem(self, _out, args, _kwargs) -> None:
        self._index(args[0], args[1])

    def _conv(self, _out, args, kwargs) -> None:
        x, *_, groups = arguments(args, kwargs, "input", *["weight"] * 5, "groups")
        self._factor(x, groups or 1)

    def _group_norm(self, _out, args, kwargs) -> None:
        self._factor(*arguments(args, kwargs, "input", "num_groups"))

    def _layer_norm(self, _out, args, kwargs) -> None:
        x, shape = arguments(args, kwargs, "input", "normalized_shape")
        for size, axis in zip(shape, self.tracer[x][-len(shape) :], strict=True):
            self.link(size, axis)

    def _attention(self, _out, args, kwargs) -> None:
        """Fused attention takes its scale from the head's own width, which therefore does not scale by default."""
        *batch, _, inner = self.tracer[arguments(args, kwargs, "query")[0]]
        for axis in batch[-1:]:
            tag(axis, "heads")
        if self.heads == "whole":
            freeze(inner, "head_dim")
        else:
            tag(inner, "op:scaled_dot_product_attention")

    def _lstm(self, _out, args, _kwargs) -> None:
        """An LSTM projects its output if its two states differ in size: they must not become equal."""
        states = args[1]
        if isinstance(states, tuple | list) and len(states) == 2:
            output, cell = (self._shape(None, (state,), {})[-1] for state in states)
            if int(output) != int(cell):
                self.comparisons.append(("==", output, cell, False))

    def _grouped_mm(self, _out, args, _kwargs) -> None:
        """Its kernel takes rows of whole 16 bytes only: sizes that are multiples of them must remain so."""
        for x in args[:2]:
            step = max(1, 16 // x.element_size())
            sizes = self._shape(None, (x,), {})[1:]
            self.comparisons += [("==", size % step, 0, True) for size in sizes if int(size) % step == 0]

    def _new(self, out, args, kwargs) -> None:
        self._constant(out, sizes_of(args, kwargs))

    def _new_like(self, out, args, kwargs) -> None:
        self._constant(out, sizes_of(args[1:], kwargs))

    # What handlers have in common.

    def _link_all(self, sizes: tuple, out: Tensor) -> None:
        if len(sizes) == out.dim():
            for size, axis in zip(sizes, self.tracer[out], strict=True):
                self.link(size, axis)

    def _link_split(self, out, split_size_or_sections=None, dim=0, *, split_size=None, split_sizes=None) -> None:
        sizes = next(s for s in (split_size_or_sections, split_size, split_sizes) if s is not None)
        if isinstance(sizes, int):
            self._equal_parts(out, dim)
            self.link(sizes, self.tracer[out[0]][dim], strict=True)
        else:
            for size, o in zip(sizes, out, strict=True):
                self.link(size, self.tracer[o][dim], strict=True)

    def _link_tensor_split(self, out, x: Tensor, indices=None, dim: int = 0, **kwargs) -> None:
        indices = next((i for i in (indices, *kwargs.values()) if i is not None), None)
        if isinstance(indices, int):
            self._equal_parts(out, dim)
        else:
            for edge in indices:
                self._slice(x, dim, edge, None)

    def _equal_parts(self, parts, dim: int) -> None:
        """``chunk`` and ``split(n)`` cut by counting: their parts must shrink alike at every width."""
        axes = [self.tracer[part][dim] for part in parts]
        # A last part that is shorter does not stay the shorter one in the same proportion at every width.
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
            number = int(edge or 0)  # a plain integer: a comparison with a traced one would count as the model's
            if number == 0 or abs(number) >= axis.size:
                continue
            front = number % axis.size
            pieces = cut(axis, [front, axis.size - front])
            if pieces is None:
                freeze(axis, "op:slice")
            elif number > 0:
                self.link(edge, pieces[0], strict=True)
            else:
                self.link(-edge, pieces[1], strict=True)

    def _index(self, x: Tensor, key: Any) -> None:
        key = key if isinstance(key, tuple) else (key,)
        if any(isinstance(item, Tensor | list) for item in key):
            return  # the rule of the operation `index` covers these
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
        if int(groups) > 1 and (pair := split_factor(self.tracer[x][1], int(groups))):
            self.link(groups, pair[0])

    def _constant(self, out: Tensor, sizes: tuple) -> None:
        """A constant tensor has an axis of its own wherever its size has a source."""
        if len(sizes) != out.dim():
            return
        self.tracer[out] = [
            Axis(n) if isinstance(size, Traced) else fixed(n, "constant")
            for size, n in zip(sizes, out.shape, strict=True)
        ]
        self._link_all(sizes, out)

    def link(self, size: Any, axis: Axis, *, strict: bool = False) -> None:
        """Record that an integer measures an axis; a number without a source freezes it.

        Args:
            strict: freeze the axis as well if the integer comes from a formula that cannot be solved. A ``view`` of a
                wrong size fails in the self-check; a slice of a wrong size runs and is wrong.
        """
        if not isinstance(size, int) or int(size) < 1 or int(size) != axis.size:
            return
        if not self._follows(size):
            freeze(axis, "literal size in the code")
            return
        if size.axis is not None:
            self._equal.append([size.axis, axis])
        if size.source is not None:
            self.attributes.setdefault(size.source, []).append(axis)
        if size.formula is not None:
            self._formulas.append((size.formula, axis, strict))

    def compared(self, symbol: str, a: int, b: int, answer: bool) -> None:
        """The model compared two sizes: at every width the answer must be the same."""
        if not self._depth:  # a plain integer beside a traced one would be taken for a literal
            self.comparisons.append((symbol, a, b, answer))

    def _follows(self, size: int) -> bool:
        return isinstance(size, Traced) and size.owner is self

    def _measured(self, size: int) -> Axis | None:
        """The axis that an integer measures, None if that is unknown; a plain number measures a fixed one."""
        if not isinstance(size, Traced):
            return fixed(size, "literal size in the code")
        return size.axis or next(iter(self.attributes.get(size.source, ())), None)

    def _solve(self, formula: tuple[str, int, int], axis: Axis, strict: bool) -> None:
        """Say what the integers of a formula measure, given what its value does."""
        symbol, left, right = formula
        sizes = int(left), int(right)
        if symbol == "*" and self._solve_multiple(left, right, axis):
            return
        if symbol in "*+" and min(sizes) > 0 and (parts := aligned(axis, sizes, _KIND[symbol])):
            for size, part in zip((left, right), parts, strict=True):
                self.link(size, part, strict=strict)
            return
        other = self._measured(right)
        if symbol == "//" and int(left) == int(right) * axis.size and other is not None:
            # E // num_heads used as head_dim: E is (num_heads head_dim)
            self.link(left, product([other, axis]), strict=strict)
        elif symbol == "-" and int(right) > 0 and other is not None:
            self.link(left, concat([other, axis]), strict=strict)
        elif strict:
            freeze(axis, "a size computed in a way that cannot be followed")

    def _solve_multiple(self, left: int, right: int, axis: Axis) -> bool:
        """``2 * hidden`` of a concatenation: runs of ``hidden`` one after the other, such as the gates of an LSTM."""
        for size, times in ((left, right), (right, left)):
            if not self._follows(size) or self._follows(times) or int(times) < 2 or find(axis).kind != "sum":
                continue
            runs = cut(axis, [int(size)] * int(times))
            if runs is not None:
                for run in runs:
                    self.link(size, run, strict=True)
                return True
        return False

    def _link_literals(self) -> None:
        """Follow a number typed into a view if nothing else in the view can shrink, and freeze what it measures if not.

        Of several such numbers the first is followed, as whole heads are kept before parts of them.
        """
        followed = {(len(sizes), i): set() for sizes, _ in self._views for i in range(len(sizes))}
        for sizes, _ in self._views:
            for i, size in enumerate(sizes):
                if self._follows(size):
                    followed[len(sizes), i].add(int(size))
        for sizes, axes in self._views:
            typed = {i: (dims, i, number) for dims, i, number in literals_of(sizes) if number == axes[i].size}
            free = [i for i, axis in enumerate(axes) if not is_frozen(axis)]
            for i, place in typed.items():
                # A larger size that is read off a tensor may shrink to the very number, and would be replaced too.
                mistakable = any(size > place[2] for size in followed[len(sizes), i])
                if free[:1] != [i] or set(free) - set(typed) or mistakable:
                    freeze(axes[i], "literal size in the code")
                self.attributes.setdefault(("", VIEW, place), []).append(axes[i])

    def finish(self) -> None:
        """Apply what takes the whole run to know: formulas, and sizes that must stay equal."""
        while self._formulas:
            self._solve(*self._formulas.pop(0))
        self._link_literals()
        for symbol, a, b, answer in self.comparisons:
            if symbol != "==" or not answer or not self._follows(a) or not self._follows(b):
                continue  # that two sizes differ relates no axes
            for axis, size in ((self._measured(a), b), (self._measured(b), a)):
                if axis is not None:
                    self.link(size, axis)
        # Axes that already grow alike stay separate groups: to unify them would couple channels without need.
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


# Calls that read sizes or shape tensors by them. Every access of `Tensor.shape.__get__` makes a new wrapper, but all of
# them are equal and hash alike.
_HANDLERS: dict[Callable, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: Sizes._shape,
    torch.Tensor.size: Sizes._size,
    torch.Tensor.numel: Sizes._numel,
    torch.Tensor.view: Sizes._reshape,
    torch.Tensor.reshape: Sizes._reshape,
    torch.reshape: Sizes._reshape,
    torch.Tensor.expand: Sizes._expand,
    torch.broadcast_to: Sizes._expand,
    torch.squeeze: Sizes._squeeze,
    torch.Tensor.squeeze: Sizes._squeeze,
    torch.Tensor.unflatten: Sizes._unflatten,
    torch.unflatten: Sizes._unflatten,
    torch.split: Sizes._split,
    torch.Tensor.split: Sizes._split,
    torch.functional.split: Sizes._split,
    torch.split_with_sizes: Sizes._split,
    torch.Tensor.split_with_sizes: Sizes._split,
    torch.unsafe_split: Sizes._split,
    torch.chunk: Sizes._chunk,
    torch.Tensor.chunk: Sizes._chunk,
    torch.tensor_split: Sizes._tensor_split,
    torch.Tensor.tensor_split: Sizes._tensor_split,
    torch.vsplit: lambda self, *call: self._split_along(0, *call),
    torch.Tensor.vsplit: lambda self, *call: self._split_along(0, *call),
    torch.hsplit: lambda self, *call: self._split_along(1, *call),
    torch.Tensor.hsplit: lambda self, *call: self._split_along(1, *call),
    torch.dsplit: lambda self, *call: self._split_along(2, *call),
    torch.Tensor.narrow: Sizes._narrow,
    torch.narrow: Sizes._narrow,
    torch.Tensor.__getitem__: Sizes._getitem,
    torch.Tensor.__setitem__: Sizes._getitem,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), Sizes._conv),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), Sizes._conv),
    **dict.fromkeys((F.group_norm, torch.group_norm), Sizes._group_norm),
    **dict.fromkeys((F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm), Sizes._layer_norm),
    F.scaled_dot_product_attention: Sizes._attention,
    **dict.fromkeys((torch._grouped_mm, F.grouped_mm), Sizes._grouped_mm),
    _VF.lstm: Sizes._lstm,
    **dict.fromkeys((torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.randn), Sizes._new),
    **dict.fromkeys((torch.Tensor.new_zeros, torch.Tensor.new_ones), Sizes._new_like),
    **dict.fromkeys((torch.Tensor.new_empty, torch.Tensor.new_full), Sizes._new_like),
}


def arguments(args: tuple, kwargs: Mapping[str, Any], *names: str) -> list[Any]:
    """The values of a call's leading parameters, given by position or by name; None where left out."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
