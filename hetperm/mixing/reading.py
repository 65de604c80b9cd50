"""What mixing weights say: who learns from whom, how many partners a client has, how much weight is in its group."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from hetperm.mixing import borders


def sparse(alpha: Tensor | Iterable[Tensor]) -> Tensor:
    """Alpha as a sparse tensor of its non-zero entries.

    Args:
        alpha: (N, N), or blocks of its rows, as `weights_by_rows` yields them.

    Example:
        >>> sparse(torch.tensor([[1.0, 0.0], [0.5, 0.5]])).indices()
        tensor([[0, 1, 1],
                [0, 0, 1]])
    """
    parts = _blocks([alpha] if isinstance(alpha, Tensor) else alpha)
    alpha = torch.cat([_to_sparse(part) for part in parts]).coalesce()
    _check_signs(alpha.values(), alpha.indices()[0])
    return alpha


def _blocks(alpha: Iterable[Tensor]) -> list[Tensor]:
    if not isinstance(alpha, Iterable):
        raise TypeError(f"alpha is a {type(alpha).__name__}; it must be a tensor, or blocks of its rows")
    parts = [borders.tensor("a block of rows of alpha", part) for part in alpha]
    if not parts or any(part.dim() != 2 or 0 in part.shape or part.shape[1] != parts[0].shape[1] for part in parts):
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"the blocks of alpha have the shapes {shapes}; they must be (rows, N)")
    return parts


def _to_sparse(alpha: Tensor) -> Tensor:
    # A user's subclass of Tensor, which torch would keep, cannot be sparse.
    return alpha if alpha.is_sparse else alpha.as_subclass(Tensor).to_sparse()


def rows_of(alpha: Tensor) -> list[dict[int, float]]:
    """The weights of each client's partners: one dict per row, partner -> weight.

    Args:
        alpha: (N, N) mixing weights, dense or sparse.

    Example:
        >>> rows_of(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        [{0: 0.5, 1: 0.5}, {1: 1.0}]
    """
    (i, j), values = _entries(alpha)
    rows: list[dict[int, float]] = [{} for _ in range(len(alpha))]
    for row, column, value in zip(i.tolist(), j.tolist(), values.tolist()):
        rows[row][column] = value
    return rows


def _entries(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The positions (2, entries) and the values of the non-zero entries, row by row."""
    alpha = borders.square("alpha", alpha).detach()
    alpha = _to_sparse(alpha).coalesce()
    # A sparse tensor may store explicit zeros; those are no partners.
    keep = alpha.values() != 0
    (i, j), values = alpha.indices()[:, keep], alpha.values()[keep]
    _check_signs(values, i)
    return (i, j), values


def _check_signs(values: Tensor, rows: Tensor) -> None:
    """Raise an error unless weights, of these rows, are finite and zero or more."""
    wrong = ~(values.isfinite() & (values >= 0))
    if wrong.any():
        k = int(wrong.nonzero()[0])
        raise ValueError(f"row {int(rows[k])} of alpha holds {float(values[k]):g}; a weight is finite, zero or more")


def _weights(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of alpha, whose rows must lie on the simplex."""
    (i, j), values = _entries(alpha)
    total = values.new_zeros(len(alpha), dtype=torch.float64).index_add_(0, i, values.double())
    wrong = ~((total - 1).abs() < 1e-2)  # also of float16; nan is not below anything
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"row {row} of alpha sums to {float(total[row]):g}; a row holds weights >= 0 that sum to 1")
    return (i, j), values


def effective_partners(alpha: Tensor) -> Tensor:
    r"""(N,) effective partners of each client, :math:`1 / \sum_j \alpha_{ij}^2`: k if k partners weigh the same.

    Args:
        alpha: (N, N) mixing weights, dense or sparse.

    Example:
        >>> effective_partners(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([2., 1.])
    """
    (i, _), values = _weights(alpha)
    return 1 / values.new_zeros(len(alpha)).index_add_(0, i, values.square())


def nonzero(alpha: Tensor) -> Tensor:
    """(N,) the number of partners of each client, however small their weights.

    Args:
        alpha: (N, N) mixing weights, dense or sparse.

    Example:
        >>> nonzero(torch.tensor([[0.9, 0.1], [0.0, 1.0]]))
        tensor([2, 1])
    """
    (i, _), _ = _entries(alpha)
    return i.bincount(minlength=len(alpha))


def self_weight(alpha: Tensor) -> float:
    """The weight of a client on itself, averaged over clients.

    Example:
        >>> self_weight(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        0.75
    """
    (i, j), values = _weights(alpha)
    return float(values[i == j].double().sum()) / len(alpha)


def same_group_mass(alpha: Tensor, groups: Sequence | Tensor) -> float:
    """The share of a client's weights that lies in its own group, averaged over clients.

    Read it together with `effective_partners`: a client that learns only from itself has all its weight in its group.

    Args:
        alpha: (N, N) mixing weights.
        groups: (N,) group labels of any hashable kind.

    Example:
        >>> same_group_mass(torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 1.0]]), ["a", "a", "b"])
        0.9166666666666666
    """
    borders.square("alpha", alpha)
    if not isinstance(groups, Tensor | Iterable):
        raise TypeError(f"groups is a {type(groups).__name__}; it must be a list of one label for each client")
    labels = borders.numbers("groups", groups).tolist() if isinstance(groups, Tensor) else list(groups)
    labels = [label.item() if isinstance(label, Tensor) and label.numel() == 1 else label for label in labels]
    if not isinstance(labels, list) or not all(isinstance(label, Hashable) for label in labels):
        raise TypeError("groups must be one label for each client, a number or a text")
    if len(labels) != len(alpha):
        raise ValueError(f"{len(labels)} groups for {len(alpha)} clients; give one for each")
    # Labels of any kind become numbers, which can be compared as tensors.
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    group = torch.tensor([number[label] for label in labels], device=alpha.device)
    (i, j), values = _weights(alpha)
    return float(values[group[i] == group[j]].double().sum()) / len(alpha)
