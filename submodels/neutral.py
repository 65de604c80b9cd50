"""Runs in which nothing but the cut itself can make a sub-model differ from the masked model.

Operations that count their channels are made not to count them, numbers are float64 whatever the model casts to,
scalars that a forward computes from sizes (``1 / math.sqrt(head_dim)``) are those of the masked model, and random draws
are the same for all channels.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from submodels.sizes import arguments

# Losses that are a mean over all positions unless told otherwise.
LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div,
          F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.gaussian_nll_loss, F.poisson_nll_loss)  # fmt: skip
# Operations that the modes below make harmless, by the names their tags have.
NEUTRALISED = frozenset(
    "mean var std batch_norm scaled_dot_product_attention mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "soft_margin_loss".split()
)


@dataclass
class Journal:
    """Numbers that the masked model computed from its sizes, in order, and that the sub-model is given."""

    means: list[int] = field(default_factory=list)
    scalars: dict[str, list[tuple]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def neutral(journal: Journal, *, replay: bool) -> Iterator[None]:
    """A context for one run of the masked model, which writes the journal, or of the sub-model, which follows it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(0)
            stack.enter_context(_Counting(journal, replay))
            stack.enter_context(_Double())
            yield
    finally:
        torch.set_default_dtype(before)


class _Counting(TorchFunctionMode):
    """Operations that count channels do not: norms lose their statistics, means and scalars are the masked model's."""

    def __init__(self, journal: Journal, replay: bool):
        super().__init__()
        self.journal, self.replay = journal, replay
        self._means = iter(list(journal.means))
        self._centres: dict[int, tuple[Tensor, Tensor]] = {}  # means, and what they are means of
        self._scalars = {name: iter(list(row)) for name, row in journal.scalars.items()}

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
        if func in (torch._grouped_mm, F.grouped_mm):  # its kernel knows no float64
            return _product_per_expert(*arguments(args, kwargs, "mat_a", "mat_b", "offs"))
        if func in (F.pairwise_distance, torch.pairwise_distance):  # it adds eps to the difference in every channel
            x, y, p, _, keepdim = arguments(args, kwargs, "x1", "x2", "p", "eps", "keepdim")
            return torch.linalg.vector_norm(x - y, 2.0 if p is None else p, -1, bool(keepdim))
        if func is F.multi_head_attention_forward:
            with self, _seen_through():
                return func(*args, **kwargs)
        if self._centring(func, args):
            return args[0]
        args, kwargs = self._with_scalars(func, args, kwargs)
        out = func(*args, **kwargs)
        if func in (torch.var, torch.Tensor.var, torch.std, torch.Tensor.std):  # a norm written by hand
            return torch.ones_like(out)
        if func in (torch.mean, torch.Tensor.mean) or (func in LOSSES and kwargs.get("reduction", "mean") == "mean"):
            return self._counted(out, arguments(args, kwargs, "input")[0])
        return self._measured(func, args, out)

    def _counted(self, out: Tensor, x: Tensor) -> Tensor:
        count = x.numel() // max(1, out.numel())
        if self.replay:
            out = out * (count / next(self._means, count))
        else:
            self.journal.means.append(count)
        self._centres[id(out)] = (out, x)
        return out

    def _centring(self, func, args: tuple) -> bool:
        """Whether a call takes off a tensor its own mean, as norms by hand do: dropped channels would not stay zero."""
        if getattr(func, "__name__", "").strip("_") not in ("sub", "isub", "subtract") or len(args) < 2:
            return False
        _, centred = self._centres.get(id(args[1]), (None, None))
        if centred is None or not isinstance(args[0], Tensor) or centred.shape != args[0].shape:
            return False
        return torch.equal(centred, args[0])

    def _measured(self, func, args: tuple, out: Any) -> Any:
        """The result, or the masked model's if a size went into it: ``torch.sqrt(torch.tensor(channels))``."""
        name = getattr(func, "__name__", "")
        if not args:
            return out
        made = name in ("tensor", "as_tensor", "scalar_tensor") and type(args[0]) in (int, float)
        rooted = name in ("sqrt", "rsqrt") and not args[0].dim() and not args[0].is_floating_point()
        if not (made or rooted) or not out.is_floating_point():  # whole numbers may be indices
            return out
        if not self.replay:
            self.journal.scalars[name].append((float(out),))
            return out
        return torch.full_like(out, *next(self._scalars.get(name, iter(())), (float(out),)))

    def _with_scalars(self, func, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The call with the masked model's scalars: factors and summands that a forward computes from sizes."""
        name = getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            query = arguments(args, kwargs, "query")[0]
            kwargs = {**kwargs, "scale": kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])}
        places = [i for i, v in enumerate(args) if name.strip("_") in _ARITHMETIC and type(v) in (int, float)]
        options = [key for key, v in kwargs.items() if key in ("scale", "alpha", "beta") and type(v) is float]
        if not places and not options:
            return args, kwargs
        numbers = tuple([args[i] for i in places] + [kwargs[key] for key in options])
        if not self.replay:
            self.journal.scalars[name].append(numbers)
            return args, kwargs
        theirs = next(self._scalars.get(name, iter(())), ())
        if len(theirs) != len(numbers):
            return args, kwargs
        new = dict(zip([*places, *options], theirs, strict=True))
        return tuple(new.get(i, v) for i, v in enumerate(args)), {k: new.get(k, v) for k, v in kwargs.items()}


# Names of functions and methods whose plain numbers are operands, without underscores.
_ARITHMETIC = frozenset(
    "mul rmul imul multiply div rdiv truediv rtruediv itruediv true_divide divide add radd iadd sub rsub isub subtract "
    "pow rpow".split()
)


@contextmanager
def _seen_through() -> Iterator[None]:
    """A context in which torch's attention function runs in the open, so that its parts are seen one by one."""
    ask = F.has_torch_function
    F.has_torch_function = lambda _tensors: False
    try:
        yield
    finally:
        F.has_torch_function = ask


def _per_channel(vector: Tensor | None, x: Tensor) -> Tensor | None:
    return None if vector is None else vector.reshape([-1 if i == 1 else 1 for i in range(x.dim())])


def _affine(x: Tensor, _shape: Any, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = torch.asinh(x)  # odd, smooth and unbounded: zero stays zero, large values are tamed, no gradient vanishes
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


def widened(x: Any) -> Any:
    """A tensor or dtype in double precision; anything else as it is."""
    if isinstance(x, torch.dtype):
        return _WIDE.get(x, x)
    return x.to(_WIDE[x.dtype]) if isinstance(x, Tensor) and x.dtype in _WIDE else x


# What an operation is told if it draws nothing but on demand: fused attention and RReLU compute, and may draw besides.
_QUIET = {"dropout_p": 0.0, "dropout": 0.0, "training": False}


def _quiet(func, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The call told to draw nothing, or None if drawing is all the operation does."""
    told = [(i, arg.name) for i, arg in enumerate(func._schema.arguments) if arg.name in _QUIET]
    if not told:
        return None
    named = {name: _QUIET[name] for i, name in told if i >= len(args)}
    values = {i: _QUIET[name] for i, name in told if i < len(args)}
    return tuple(values.get(i, v) for i, v in enumerate(args)), {**kwargs, **named}


class _Double(TorchDispatchMode):
    """Every operation in float64, and random draws that are alike for all channels."""

    def __init__(self):
        super().__init__()
        self.draws = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(widened, (args, dict(kwargs or {})))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn(func, args, kwargs)
        return tree_map(widened, func(*args, **kwargs))

    def _drawn(self, func, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name
        if name == "aten::native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if "rrelu" in name:
            args[1].fill_(1.0)  # the slopes it would have drawn; its gradient reads them
        if quiet := _quiet(func, args, kwargs):
            return tree_map(widened, func(*quiet[0], **quiet[1]))
        out = func(*args, **kwargs)
        self.draws += 1
        # A draw per channel would be another one in the sub-model: one value for all, another one at every call.
        value = 1.0 if "bernoulli" in name else 0.3 + 0.4 * (self.draws * 0.618 % 1)
        return tree_map(lambda x: x.fill_(value) if isinstance(x, Tensor) and x.is_floating_point() else x, out)


def _product_per_expert(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Rows sorted by expert, each times the matrix of its expert; ``offs`` says where the rows of each end."""
    parts = [part @ matrix for part, matrix in zip(rows.tensor_split(offs[:-1].long().cpu()), matrices, strict=True)]
    return torch.cat(parts)
