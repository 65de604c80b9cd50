"""Read the axes of a model off one run on the meta device.

Two observers watch the run: `Tracer` sees every ATen operation and applies its rule, `Sizes` sees the Python calls
above and follows integers.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import einops.einops
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from submodels import norms, rules
from submodels.axes import Axis, choose_factors, find, fixed, freeze, leaves, product, tag, unify
from submodels.calls import Call, Examples, NothingKept
from submodels.integers import Attribute
from submodels.recurrence import TwoSteps
from submodels.sizes import Sizes
from submodels.skeleton import holds_weights, loose_tensors, named_tensors, on_meta, rebuild, tensors_in
from submodels.states import StateName, find_states
from submodels.texts import plain

_REMEDY = {"model output": "say with outputs= which of the model's answers must stay whole"}


@dataclass(frozen=True)
class Declared:
    """Axes the user states in advance: of tensors by name, of module attributes by path."""

    tensors: Mapping[str, list[Axis]] = field(default_factory=dict)
    attributes: Mapping[Attribute, Axis] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what was declared to scale and, after the run, does not."""
        for name, axes in self.tensors.items():
            pinned = [leaf for axis in axes for leaf in leaves(axis) if leaf.pinned and leaf.size > 1]
            if pinned and all(leaf.frozen_by for leaf in pinned):
                raise ValueError(
                    f"declare: {name!r} stays whole all the same ({pinned[0].frozen_by}); "
                    f"{_REMEDY.get(pinned[0].frozen_by, 'leave it out, or declare what it is coupled to')}"
                )


@dataclass
class Trace:
    """Result of a run: the axes of every tensor of the model, and what integers measure."""

    axes: dict[str, list[Axis]]
    attributes: dict[Attribute, Axis]
    unknown: dict[str, int] = field(default_factory=dict)  # operation without a rule -> number of calls that froze
    notes: list[str] = field(default_factory=list)
    comparisons: list[tuple[str, int, int, bool]] = field(default_factory=list)  # of sizes, with their answers
    states: dict[StateName, list[Axis]] = field(default_factory=dict)  # of inputs that scale


class Tracer(TorchDispatchMode):
    """Applies the rule of every operation; ``tracer[x]`` are the axes of tensor x."""

    def __init__(self):
        super().__init__()
        self._axes: dict[int, list[Axis]] = {}
        self._alive: list[Tensor] = []  # ids are only unique among living objects
        self.seen: set[int] = set()
        self.read: dict[int, Axis] = {}  # axes of operands whose values were used, not just handed on
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

    def freeze(self, tensors: Iterable[Tensor], why: str, *, force: bool = False) -> None:
        """Keep every axis of some tensors whole."""
        for axis in [axis for x in tensors for axis in self[x]]:
            freeze(axis, why, force=force)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1].rstrip("_")  # in-place operations relate axes as the others do
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not inputs:
            return out
        self.seen.update(map(id, inputs))
        if name not in rules.HANDING_ON:
            self.read.update((id(axis), axis) for x in inputs for axis in self._axes.get(id(x), ()))
        elementwise = torch.Tag.pointwise in func.tags
        if not rules.apply(self, name, elementwise, args, kwargs, out, inputs):
            self.unknown[name] = self.unknown.get(name, 0) + 1
        return out


@torch.random.fork_rng(devices=[])
def trace(model: nn.Module, examples: Examples, declared: Declared, heads: str = "whole") -> Trace:
    """The axes of a model, from one run of every example in evaluation and one in training mode.

    Args:
        declared: axes the user fixed in advance; `heads`: "whole" or "dim", see `choose_factors`.
    """
    try:
        result = _observe(on_meta(model), replace(examples, calls=tuple(examples.on("meta"))), declared, heads)
    except rules.RuleError:
        raise
    except Exception as error:  # whatever a forward may raise
        result = _observe_real(model, examples, declared, heads, error)
    # Formulas are solved last: what their parts measure may only turn up later in the run.
    result.sizes.finish()
    result.trace.attributes.update({source: axes[0] for source, axes in result.sizes.attributes.items()})
    _freeze_constants(result.trace.axes, {name for name, _ in model.named_parameters(remove_duplicate=False)})
    rows = [*result.trace.axes.values(), *result.trace.states.values(), result.trace.attributes.values()]
    axes = [axis for row in rows for axis in row]
    for _ in range(3):  # freezing may change which factor of a product is free, and that which sizes are equal
        for axis in axes:
            choose_factors(axis, heads)
        result.sizes.freeze_unequal()
    result.trace.comparisons = result.sizes.comparisons
    return result.trace


def _observe_real(model: nn.Module, examples: Examples, declared: Declared, heads: str, meta: Exception):
    """The run on real tensors, for models that do not run on the meta device."""
    real = rebuild(model, {id(x): x.detach().clone() for _, x in named_tensors(model)})
    try:
        result = _observe(real, examples, declared, heads)
    except NothingKept:
        raise
    except Exception as error:
        remedy = "give example_inputs and example_kwargs as its forward takes them"
        if norms.refuses_one(error):
            remedy = "give an example of two samples or more, or make its batch norms with track_running_stats=True"
        raise ValueError(
            f"{type(model).__name__} does not run on the example inputs ({_first_line(error)}); {remedy}"
        ) from error
    result.trace.notes.append(f"does not run on the meta device ({_first_line(meta)}); traced on real tensors")
    return result


@dataclass
class _Observation:
    trace: Trace
    sizes: Sizes


def _observe(model: nn.Module, examples: Examples, declared: Declared, heads: str) -> _Observation:
    tracer = Tracer()
    sizes = Sizes(tracer, heads)
    sizes.attributes.update({source: [axis] for source, axis in declared.attributes.items()})
    for name, x in named_tensors(model):
        own = declared.tensors.get(name)
        tracer[x] = own or [Axis(n, None if holds_weights(x) else "integer buffer") for n in x.shape]
    known = {id(x) for _, x in named_tensors(model)}
    for x in (x for x in loose_tensors(model) if id(x) not in known):
        tracer[x] = [fixed(n, "a tensor that is no buffer; register_buffer makes it one") for n in x.shape]
    matches = find_states(model, examples)
    for i, call in enumerate(examples.calls):
        for k, x in enumerate(call.tensors()):
            tracer[x] = [Axis(n) if (i, k) in matches else fixed(n, "model input") for n in x.shape]
    states = {(i, k): tracer[examples.calls[i].tensors()[k]] for i, k in matches}
    # Taken before the run: a forward may replace its buffers, and tied tensors need their axes under every name.
    named = {name: tracer[x] for name, x in named_tensors(model, aliases=True)}
    # `model` is a copy: its integers can be replaced by traced ones without touching the user's.
    sizes.follow_attributes(model)
    _tie_attention_modules(model, tracer, sizes)
    notes = []
    device = next((x.device for _, x in named_tensors(model)), torch.device("cpu"))
    observers = (torch.device(device), sizes, tracer)

    def observe(call: Call, number: int) -> None:
        out = _run(model, call, observers)
        tracer.freeze(examples.whole(out), "model output", force=True)
        rest = examples.rest(out)
        for (i, k), position in matches.items():  # what comes out is what goes in the next time
            if i == number:
                for a, b in zip(states[i, k], tracer[rest[position]], strict=True):
                    unify(a, b)

    def observe_training(call: Call, number: int) -> None:
        try:
            observe(call, number)
        except ValueError as error:
            if not norms.refuses_one(error):
                raise
            # Their running statistics do instead, and all else is seen as it trains.
            for norm in norms.batch_norms(model):
                norm.eval()
            observe(call, number)

    for number, call in enumerate(examples.calls):
        model.eval()
        observe(call, number)
        model.train()
        try:
            observe_training(call, number)
        except rules.RuleError:
            raise
        except Exception as error:  # a model that cannot train on this example can still be cut
            notes.append(f"not traced in training mode: {_first_line(error)}")
    unused = [name for name, x in named_tensors(model) if id(x) not in tracer.seen]
    tracer.freeze([x for name, x in named_tensors(model) if name in unused], "not used in the traced run")
    notes += _not_run([name for name, _ in model.named_parameters() if name in unused])
    _freeze_unread(tracer, named)
    _freeze_beyond(states, named)
    return _Observation(Trace(named, {}, tracer.unknown, notes, states=states), sizes)


def _not_run(parameters: list[str]) -> list[str]:
    """A warning if no example ran some parameters: they would no longer fit what is cut around them."""
    if not parameters:
        return []
    more = f" and {len(parameters) - 4} more" if len(parameters) > 4 else ""
    names = ", ".join(parameters[:4])
    return [
        f"no example runs {names}{more}: they stay whole; add an example that runs them (examples=) to cut them too"
    ]


def _freeze_unread(tracer: Tracer, named: Mapping[str, list[Axis]]) -> None:
    """Keep whole what of a weight was sliced off and never read: positions beyond the example's length."""
    # Other inputs may read it, and it shrinks with no channel of the model.
    read = {id(leaf) for axis in tracer.read.values() for leaf in leaves(axis)}
    for leaf in [leaf for row in named.values() for axis in row for leaf in leaves(axis)]:
        if id(leaf) not in read:
            freeze(leaf, "not read in the traced run")


def _freeze_constants(named: Mapping[str, list[Axis]], parameters: set[str]) -> None:
    """Keep whole what only buffers have, such as frequencies or random features: cutting it saves no parameter."""
    learned = {id(leaf) for name in parameters for axis in named[name] for leaf in leaves(axis)}
    for leaf in [leaf for row in named.values() for axis in row for leaf in leaves(axis)]:
        if id(leaf) not in learned:
            freeze(leaf, "in no parameter")


def _freeze_beyond(states: Mapping[StateName, list[Axis]], named: Mapping[str, list[Axis]]) -> None:
    """Keep whole what of a state no weight shares: layers, positions."""
    shared = {id(leaf) for row in named.values() for axis in row for leaf in leaves(axis)}
    for leaf in [leaf for row in states.values() for axis in row for leaf in leaves(axis)]:
        if id(leaf) not in shared:
            freeze(leaf, "a state's own axis")


def observed_axes(model: nn.Module, call: Call) -> tuple[list[list[Axis]], list[Axis], list[Axis]]:
    """(axes of every input tensor, axes of the weights, axes of the outputs) of a run in which inputs may shrink too.

    Args:
        model: a copy on the meta device; its integers are replaced.
    """
    tracer = Tracer()
    sizes = Sizes(tracer, "whole")
    for _, x in named_tensors(model):
        tracer[x] = [Axis(n) for n in x.shape]
    weights = [axis for _, x in named_tensors(model) for axis in tracer[x]]
    tensors = call.tensors()
    for x in tensors:
        tracer[x] = [Axis(n) for n in x.shape]
    rows = [tracer[x] for x in tensors]
    sizes.follow_attributes(model)
    out = _run(model.eval(), call, (torch.device("meta"), sizes, tracer))
    sizes.finish()
    return rows, weights, [axis for x in tensors_in(out) for axis in tracer[x]]


def _run(model: nn.Module, call: Call, observers: Iterable) -> Any:
    """What a model returns when it runs under the eyes of all observers, the last one innermost."""
    with _quiet_caches(), torch.no_grad(), TwoSteps(), ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer)
        return model(*call.args, **call.kwargs)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {plain(str(error)).splitlines()[0][:120] if str(error) else ''}"


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
    # einops caches recipes by shape, and traced integers of equal value are equal: a second layer of the same sizes
    # would be handed the integers of the first.
    engine = einops.einops
    fast = torch.backends.mha.get_fastpath_enabled()
    cached = engine._reconstruct_from_shape
    torch.backends.mha.set_fastpath_enabled(False)
    engine._reconstruct_from_shape = engine._reconstruct_from_shape_uncached
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        engine._reconstruct_from_shape = cached
