"""A client: its private shard, the data it is scored on, and how much of the model it can hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hetperm.texts import shown


# eq=False, here and below: comparing tensors gives tensors, so a generated == could not answer yes or no.
@dataclass(frozen=True, eq=False)
class View(Sequence):
    """Some rows of a pool that many clients share. It reads like the pair (x, y), and copies rows only when read.

    Attributes:
        pool: inputs (n, ...) and labels (n,), shared.
        rows: (m,) the rows of the pool, in this order.

    Example:
        >>> x, y = View((torch.eye(3), torch.tensor([7, 8, 9])), torch.tensor([2, 0]))
        >>> y
        tensor([9, 7])
    """

    pool: tuple[Tensor, Tensor]
    rows: Tensor

    def __len__(self) -> int:
        return 2  # it is a pair

    def __getitem__(self, item: int) -> Tensor:
        return self.pool[item][self.rows]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) of at most ``size`` rows at a time, so that no more than these are copied."""
        for rows in self.rows.split(size):
            yield self.pool[0][rows], self.pool[1][rows]


Pair = tuple[Tensor, Tensor] | View  # inputs (n, ...) and labels (n, ...)


def rows_of(pair: Pair, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Some rows of a pair; of a view only these are copied."""
    if isinstance(pair, View):
        return pair.pool[0][pair.rows[rows]], pair.pool[1][pair.rows[rows]]
    return pair[0][rows], pair[1][rows]


@dataclass(frozen=True, eq=False)
class Client:
    """One participant: what it trains on, what it is scored on, and how large a model it can hold.

    Attributes:
        train: inputs (n, ...) and labels (n, ...) of the private shard; labels are int64 classes or real numbers.
        val: data to tune on; None where nothing is tuned.
        test: data to score on; None for a client that is not scored.
        width: the largest fraction of the global model's channels it can train, in (0, 1].
        group: the group its data come from, if known; for reports only, no algorithm sees it.
        key: the number its randomness is derived from, so that the order of clients in a list changes no result; None:
            its position in the list of a run.
        classes: (num_classes,) bool, True for the classes it trains and predicts; None: all.

    Example:
        >>> Client(train=(torch.zeros(8, 60), torch.zeros(8, dtype=torch.long)), width=0.25).n_train
        8
    """

    train: Pair
    val: Pair | None = None
    test: Pair | None = None
    width: float = 1.0
    group: int | None = None
    key: int | None = None
    classes: Tensor | None = None

    def __post_init__(self):
        for part, pair in (("train", self.train), ("val", self.val), ("test", self.test)):
            if pair is not None or part == "train":
                fault = _fault(pair)
                if fault:
                    raise ValueError(f"{self._name}: {part} {fault}")
        for part, pair in (("val", self.val), ("test", self.test)):
            if pair is not None and _shape(pair) != _shape(self.train):
                raise ValueError(
                    f"{self._name}: an input of {part} has shape {_shape(pair)} and one of train {_shape(self.train)}"
                )
        if not isinstance(self.width, Real) or isinstance(self.width, bool) or not 0 < self.width <= 1:
            raise ValueError(f"{self._name}: width {shown(self.width)} is outside (0, 1]")
        if not (self.key is None or (isinstance(self.key, int) and not isinstance(self.key, bool))):
            raise ValueError(f"{self._name}: a key is a whole number; got {type(self.key).__name__}")
        if not (self.group is None or isinstance(self.group, int | str)):
            raise ValueError(f"{self._name}: group is {shown(self.group)}; it must be a whole number, or None")
        if not (self.classes is None or (isinstance(self.classes, Tensor) and self.classes.dtype == torch.bool)):
            raise ValueError(f"{self._name}: classes is {_kind(self.classes)}; it must be a tensor of bool, or None")
        if self.classes is not None and not (self.classes.dim() == 1 and self.classes.any()):
            raise ValueError(
                f"{self._name}: classes has shape {tuple(self.classes.shape)} and {int(self.classes.sum())} of them "
                "are True; it must be one value a class, True for at least one"
            )

    def data(self, part: str) -> "Pair":
        """Its shard ("train") or its validation data ("val")."""
        return self.train if part == "train" else self.val

    @property
    def n_train(self) -> int:
        """Training samples, the n_i of the paper."""
        return len(self.train[1])

    @property
    def n_val(self) -> int:
        """Validation samples."""
        return 0 if self.val is None else len(self.val[1])

    @property
    def _name(self) -> str:
        return "a client without a key" if self.key is None else f"client {shown(self.key)}"


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)


def _fault(pair: object) -> str | None:
    """What is wrong with a pair of inputs and labels, or None."""
    tensors = pair.pool if isinstance(pair, View) else pair  # reading a view would copy its rows
    if not (isinstance(tensors, tuple | list) and len(tensors) == 2 and all([_is_batch(t) for t in tensors])):
        return f"must be a pair of tensors, inputs and labels, samples first; got {_kind(pair)}"
    x, y = tensors
    for label, tensor in (("inputs", x), ("labels", y)):
        if tensor.is_meta:
            return f"{label} are on the meta device, which holds no numbers; give them on a real one"
    if len(x) != len(y):
        return f"has {len(x)} inputs and {len(y)} labels"
    for label, tensor in (("inputs", x), ("labels", y)):
        if tensor.dtype not in _DTYPES:
            return f"{label} are {tensor.dtype}; convert classes with .long() and measurements with .float()"
        if tensor.layout != torch.strided:
            return f"{label} are {tensor.layout}; convert them with .to_dense()"
    # Read through the pair: a view may be empty although its pool is not.
    if len(pair[1]) == 0:
        return "is empty; a client needs at least one training sample, and None stands for no val or test"
    # The pool of a view is checked once where it is made; checking it here would repeat that for every client.
    for label, tensor in (("inputs", x), ("labels", y)) if not isinstance(pair, View) else ():
        if not _finite(tensor):
            row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
            return f"{label} are not finite (first in sample {row})"
    return None


def _is_batch(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and value.dim() > 0


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join([type(item).__name__ for item in value]) or 'nothing'}"
    return type(value).__name__


_FINITE = WeakIdKeyDictionary()  # tensor -> its version when it was last found finite


def _finite(tensor: Tensor) -> bool:
    # Remembered: many clients share a test pool, and every `replace` of a client checks it anew.
    if not tensor.is_floating_point() or _FINITE.get(tensor) == tensor._version:
        return True
    # A finite sum settles it ten times faster; a sum may also overflow, hence the second look.
    finite = bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
    if finite:
        _FINITE[tensor] = tensor._version
    return finite


def _shape(pair: Pair) -> tuple[int, ...]:
    """The shape of one input, read without copying a view."""
    x = pair.pool[0] if isinstance(pair, View) else pair[0]
    return tuple(x.shape[1:])
