"""Average of sub-models: every coordinate over the sub-models that cover it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from submodels.indexset import IndexSet, Whole
from submodels.skeleton import holds_weights
from submodels.texts import shown

_LARGEST = 1e30  # of a weight: the sum of many such fits single precision
Update = tuple[Mapping[str, Tensor], IndexSet | Whole, float]


def average(
    w: Mapping[str, Tensor], updates: Iterable[Update], rows: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    r"""The coverage-weighted mean of sub-models; coordinates nobody covers keep their value.

    .. math:: w_k \leftarrow \sum_{i : k \in m_i} p_i u_{ik} \Big/ \sum_{i : k \in m_i} p_i

    Args:
        w: name -> global tensor. Batch-norm statistics and integer buffers come back as they are.
        updates: (name -> sub-model tensor, its index set or WHOLE, its weight p_i >= 0), one per client.
        rows: name -> which rows of that tensor each client may vote on, e.g. the classes it holds: bool, (clients,
            rows), or (rows,) for the same rows everywhere.

    Example:
        Two clients that hold 0 and 1 average to 0.5, whatever was there before; see ``tests/test_averaging.py``.
    """
    for noun, table in (("w", w), ("rows", {} if rows is None else rows)):
        if not isinstance(table, Mapping):
            raise TypeError(f"{noun} is {shown(table)}; it must be a table from names to tensors")
    strange = next((name for name, x in w.items() if not isinstance(x, Tensor)), None)
    if strange is not None:
        raise TypeError(f"{shown(strange)} of w is {shown(w[strange])}; it must be a tensor")
    updates = _checked(updates, w)
    stranger = next((name for name in rows or () if name not in w), None)
    if stranger is not None:
        raise ValueError(f"rows names {stranger!r}, which the global model does not have")
    votes = {name: _votes(name, mask, len(updates), w[name]) for name, mask in (rows or {}).items()}
    out = dict(w)
    for name, old in w.items():
        voters = [i for i, (tensors, _, weight) in enumerate(updates) if name in tensors and weight > 0]
        if voters and holds_weights(old) and name not in updates[voters[0]][1].statistics:
            out[name] = _mean(name, old, [updates[i] for i in voters], votes[name][voters] if name in votes else None)
    return out


def _checked(updates: Iterable[Update], w: Mapping[str, Tensor]) -> list[Update]:
    """The updates in a list; an error names what is wrong with one."""
    if not isinstance(updates, Iterable) or isinstance(updates, Tensor):
        raise TypeError(f"updates is {shown(updates)}; it must be a list of (tensors, index set, weight)")
    updates = list(updates)
    for update in updates:
        fits = isinstance(update, tuple | list) and len(update) == 3
        if not fits or not isinstance(update[0], Mapping) or not isinstance(update[1], IndexSet | Whole):
            raise TypeError(f"an update is {shown(update)}; it must be (tensors, an index set or WHOLE, a weight)")
        tensors, _, weight = update
        number = isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.dim() == 0 and weight.isreal())
        if not number or isinstance(weight, bool) or not (weight == 0 or 1 / _LARGEST <= weight <= _LARGEST):
            raise ValueError(
                f"the weight of an update is {shown(weight)}; it must be zero, or a finite number from 1e-30 to 1e30"
            )
        unknown = next((name for name in tensors if name not in w), None)
        if unknown is not None:
            raise ValueError(f"an update holds {unknown!r}, which the global model does not have")
        strange = next((name for name, x in tensors.items() if not isinstance(x, Tensor)), None)
        if strange is not None:
            raise TypeError(f"{strange!r} of an update is {shown(tensors[strange])}; it must be a tensor")
        for name, x in tensors.items():
            if x.layout != torch.strided or x.is_meta != w[name].is_meta or x.is_complex() > w[name].is_complex():
                kind = f"{x.dtype}, {x.layout} on {x.device}"
                raise ValueError(f"{name!r} of an update is {kind}; it must be a plain tensor as that of w is")
    return [(tensors, index, float(weight)) for tensors, index, weight in updates]


def _votes(name: str, mask: Tensor, clients: int, x: Tensor) -> Tensor:
    """(clients, rows) which rows of a tensor each client votes on."""
    try:
        votes = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError):
        votes = torch.empty(0)
    many = x.shape[:1]
    if votes.dtype != torch.bool or votes.is_meta or not many or votes.shape not in (many, (clients, *many)):
        raise ValueError(
            f"rows[{name!r}] is {shown(mask)}; it must be a tensor of bool, {tuple(many)} or {(clients, *many)}"
        )
    return votes.expand(clients, -1)


def _mean(name: str, old: Tensor, updates: Sequence[Update], votes: Tensor | None) -> Tensor:
    # Sums run in single precision at least: in bfloat16 a sum of ones stops at 256.
    total = torch.empty_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
    real = total.dtype.to_real()  # weights are real numbers, also those of complex tensors
    groups: dict[IndexSet | Whole, list[int]] = {}
    for i, (_, index, _) in enumerate(updates):
        groups.setdefault(index, []).append(i)

    def terms(members: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        return (_term(name, updates[i], None if votes is None else votes[i], total) for i in members)

    whole = next((index for index in groups if votes is None and index.covers(name, old)), None)
    if whole is None:
        total.zero_()
        weights = torch.zeros_like(total, dtype=real)
    else:  # some clients cover the whole tensor: no coordinate is left out, and nothing need be zeroed first
        members = groups.pop(whole)
        for k, (part, _) in enumerate(terms(members)):
            whole.scatter_(name, total, part, accumulate=k > 0)
        weights = torch.full_like(total, sum(updates[i][2] for i in members), dtype=real)
    for index, members in groups.items():
        # Clients with equal index sets are added up while small and scattered once.
        part, weight = _sum(terms(members))
        index.scatter_(name, total, part, accumulate=True)
        index.scatter_(name, weights, weight.expand_as(part), accumulate=True)
    if whole is None:
        return torch.where(weights > 0, total / weights, old).to(old.dtype)
    return total.div_(weights).to(old.dtype)


def _term(name: str, update: Update, vote: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """(tensor times weight, weight) of an update."""
    tensors, _, weight = update
    p, part = like.new_tensor(weight, dtype=like.dtype.to_real()), tensors[name].detach().to(like)
    part = part if weight == 1 else part * p
    if vote is None:
        return part, p
    if len(vote) != len(part):
        raise ValueError(
            f"rows names {name!r}: an update has {len(part)} of its {len(vote)} rows; name what is not cut"
        )
    vote = vote.to(like.device).reshape(-1, *[1] * (like.dim() - 1))
    return torch.where(vote, part, 0), torch.where(vote, p, 0)  # not a product: a masked value may be NaN


def _sum(terms: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(sum of tensors, sum of weights); the first tensor may belong to a client and is not changed in place."""
    total, weight = next(terms)
    for k, (part, p) in enumerate(terms):
        total = total + part if k == 0 else total.add_(part)
        weight = weight + p
    return total, weight
