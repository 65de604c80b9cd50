"""Mixing weights of very many clients, from the few that are near each: what `solver` computes, without the far ones.

A row of alpha depends on nothing but the costs below its level. So only costs below a bound are looked at, and the
bound is raised for rows whose level turns out to lie above it. Sums are taken over the same numbers in the same order
as in `solver.weights`, which makes the results equal to the bit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetperm.mixing import borders
from hetperm.mixing.discrepancy import Distances, Products
from hetperm.mixing.solver import (
    ENTRIES,
    Problem,
    below,
    check_distances,
    check_symmetric,
    debias,
    estimates,
    level_of,
    owners_of,
    problem,
    row_slices,
)

MARGIN = 1.25  # how far above the level, as far as it is known, costs are looked at; any number above 1 gives the same
WIDE = 32  # products of sparse and dense rows are taken where pairs of partners are not this many times fewer


@dataclass(frozen=True)
class Rows:
    """Some rows of a matrix of distances, read like `discrepancy.Products`."""

    rows: Tensor
    columns: Tensor
    zeta: Tensor

    def at(self, row: Tensor, column: Tensor) -> Tensor:
        """(K,) the distances at K positions."""
        return self.zeta[row, column]

    def near(self, rows: Tensor, limit: Tensor, allowance: Tensor) -> tuple[Tensor, Tensor]:
        """Where zeta_ij <= limit_i + allowance_j: (K,) in ``rows`` and in the columns."""
        return (self.zeta[rows] <= limit[:, None] + allowance).nonzero(as_tuple=True)


def sparse_weights(zeta: Tensor | Distances, q: Tensor | None, n: Tensor, **options: Any) -> Tensor:
    """The mixing weights of `weights`, to the bit, as a sparse tensor. The dense one is never held.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> sparse_weights(zeta, torch.ones(3), torch.tensor([10, 30, 30])).values()
        tensor([0.2500, 0.7500, 0.2500, 0.7500, 1.0000], dtype=torch.float64)
    """
    given = problem(zeta, q, n, **options)
    check_symmetric(given.zeta)
    rule = given.rule
    if not rule.by_number and rule.alpha_steps is None and 0 < rule.share < math.inf:
        parts = [part for block in _blocks(given.zeta) for part in _solved(given, block)]
    else:
        parts = [_all_columns(given, rows) for rows in _together(given.zeta)]
    (i, j), values = torch.cat([index for index, _ in parts], 1), torch.cat([values for _, values in parts])
    shape = (len(given.n), len(given.n))
    return torch.sparse_coo_tensor(torch.stack([i, j]), values, shape, check_invariants=False).coalesce()


def _together(zeta: Tensor | Distances) -> list[Tensor]:
    """All clients, as lists (R,) of those whose rows are best read at once."""
    if isinstance(zeta, Distances):
        return zeta.together()
    everybody = torch.arange(len(zeta), device=zeta.device)
    return [everybody[rows] for rows in row_slices(*zeta.shape)]


def _blocks(zeta: Tensor | Distances) -> Iterator[Products | Rows]:
    """All rows, in blocks."""
    if isinstance(zeta, Distances):
        yield from zeta.blocks()
        return
    for rows in _together(zeta):
        block = zeta[rows].double()
        check_distances(block, rows)
        # A client does not differ from itself, whatever the diagonal says (as in `debias`): it is always in reach.
        block.scatter_(1, rows[:, None], 0.0)
        yield Rows(rows, torch.arange(len(zeta), device=zeta.device), block)


Part = tuple[Tensor, Tensor]  # (2, K) who learns from whom, and (K,) the weights


def _all_columns(given: Problem, rows: Tensor) -> Part:
    """The weights of some clients by a rule that must see all costs."""
    alpha = given.rows(rows)
    row, column = alpha.nonzero(as_tuple=True)
    return torch.stack([rows[row], column]), alpha[row, column]


def _solved(given: Problem, block: Products | Rows) -> Iterator[Part]:
    """Yield the weights of the clients of a block, first of those for whom the first bound was enough."""
    waiting = torch.arange(len(block.rows), device=given.n.device)
    if given.height is not None:
        reach = torch.full_like(waiting, given.height, dtype=torch.float64)
    else:
        reach = MARGIN * 2 * given.rule.share * given.noise[block.rows]  # the level of a client that is alone
    while len(waiting):
        owners = block.rows[waiting]
        row, j, c, bound = _in_reach(given, block, waiting, reach)
        counts = row.bincount(minlength=len(waiting))
        cost, host = _table(c, row, counts, math.inf), _table(j, row, counts, 0)
        if given.height is not None:
            height, settled = torch.full_like(cost[:, :1], given.height), torch.ones_like(owners, dtype=torch.bool)
        else:
            least = cost.amin(1, keepdim=True)
            cost, order = (cost - least).sort(dim=-1, stable=True)
            host = host.gather(1, order)
            height, _, last = level_of(cost, given.n[host], given.rule.share, given.noise[owners])
            # Either one in reach is not below the level, or whoever is out of reach is not: it costs at least that.
            out_of_reach = torch.where(counts == len(given.n), math.inf, bound - least[:, 0])
            settled = (last[:, 0] + 1 < counts) | (height[:, 0] <= out_of_reach)
            reach[waiting] = MARGIN * torch.maximum(reach[waiting], height[:, 0])
        alpha = below(cost, given.n[host], height)
        row, column = (alpha * settled[:, None]).nonzero(as_tuple=True)
        yield torch.stack([owners[row], host[row, column]]), alpha[row, column]
        waiting = waiting[~settled]


def _in_reach(given: Problem, block: Products | Rows, wanted: Tensor, reach: Tensor) -> tuple[Tensor, ...]:
    """All costs of the ``wanted`` rows up to a bound: (K,) rows, hosts and costs, and the bounds.

    They are sorted by row and then by samples, as `solver.noise` sorts equal costs.
    """
    q, n, owners = given.q, given.n, block.rows[wanted]
    extra = torch.zeros_like(n) + given.extra
    # The cheapest of a row costs no more than the client itself does.
    bound = extra[owners] + reach[wanted]
    rounding = 1e-12 * (bound.abs() + q[owners] + q.max() + extra.abs().max())
    row, column = block.near(wanted, bound + q[owners] + rounding, (q - extra)[block.columns])
    i, j = owners[row], block.columns[column]
    c = (block.at(wanted[row], column) - (q[i] + q[j])).clamp_min_(0).masked_fill_(i == j, 0.0) + extra[j]
    near = c <= bound[row]
    row, j, c = row[near], j[near], c[near]
    by_samples = n.argsort(stable=True).argsort()
    order = (row * len(n) + by_samples[j]).argsort()
    return row[order], j[order], c[order], bound


def _table(values: Tensor, row: Tensor, counts: Tensor, blank: float) -> Tensor:
    """(rows, K) values that are sorted by row, as a table whose rows end in blanks."""
    first = counts.cumsum(0) - counts
    out = values.new_full((len(counts), int(counts.max())), blank)
    out[row, torch.arange(len(row), device=row.device) - first[row]] = values
    return out


# How far apart partners are


def spread(alpha: Tensor, zeta: Tensor | Distances, q: Tensor) -> Tensor:
    r"""(N,) the variance of the partners' gradients about their mean, which a model feels as it goes from host to host.

    .. math:: V_i = \tfrac12 \sum_{jk} \alpha_{ij} \alpha_{ik} D_{jk}

    with D, the distances minus what noise explains, as in `noise`.

    Args:
        alpha: (N, N) mixing weights, dense or sparse.
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient.

    Example:
        >>> zeta = torch.tensor([[0.0, 6.0], [6.0, 0.0]])
        >>> spread(torch.tensor([[0.5, 0.5], [0.0, 1.0]]), zeta, q=torch.ones(2))
        tensor([1., 0.], dtype=torch.float64)
    """
    alpha = borders.square("alpha", alpha).detach().double()
    zeta, q, _ = estimates(zeta, q, torch.ones(len(alpha)))
    check_symmetric(zeta)
    if q is None:
        raise ValueError("the noise q of the gradients is missing; give the variance of each client's mean gradient")
    entries = alpha.coalesce().values() if alpha.is_sparse else alpha
    if not (entries.isfinite() & (entries >= 0)).all():
        raise ValueError("alpha holds a weight that is negative or not finite; rows of alpha lie on the simplex")
    if not isinstance(zeta, Distances):
        check_distances(zeta, owners_of(slice(None), q))
    if not alpha.is_sparse:
        D = debias(zeta[:], q, owners_of(slice(None), q))
        return ((alpha @ D) * alpha).sum(1) / 2
    alpha = alpha.coalesce()
    i, values = alpha.indices()[0], alpha.values()
    partners = i.bincount(minlength=len(alpha))
    few = WIDE * int(partners.square().sum()) <= len(values) * len(alpha)
    products = (_over_pairs if few else _over_rows)(alpha, zeta, q)
    return values.new_zeros(len(alpha)).index_add_(0, i, products * values) / 2


def _over_pairs(alpha: Tensor, zeta: Tensor | Distances, q: Tensor) -> Tensor:
    """(K,) sum_k alpha_ik D_jk for every entry (i, j) of alpha, from the distances of partners of one client alone."""
    (i, j), values = alpha.indices(), alpha.values()
    partners = i.bincount(minlength=len(alpha))
    first = partners.cumsum(0) - partners  # of each client's entries
    products, local = torch.empty_like(values), torch.empty_like(partners)
    for block in _blocks(zeta):
        place = torch.empty_like(partners).index_copy_(0, block.columns, torch.arange(len(alpha), device=q.device))
        local.fill_(-1).index_copy_(0, block.rows, torch.arange(len(block.rows), device=q.device))
        for here in (local[j] >= 0).nonzero().flatten().split(max(1, ENTRIES // max(1, int(partners.max())))):
            many = partners[i[here]]
            entry = torch.arange(len(here), device=q.device).repeat_interleave(many)
            inner = torch.arange(len(entry), device=q.device) + (first[i[here]] - many.cumsum(0) + many)[entry]
            one, other = j[here][entry], j[inner]
            D = block.at(local[one], place[other]).sub_(q[one] + q[other]).clamp_min_(0).masked_fill_(one == other, 0.0)
            products[here] = torch.zeros_like(values[here]).index_add_(0, entry, D.mul_(values[inner]))
    return products


def _over_rows(alpha: Tensor, zeta: Tensor | Distances, q: Tensor) -> Tensor:
    """The same by products of whole rows, for clients with many partners."""
    (i, j), products = alpha.indices(), torch.empty_like(alpha.values())
    for hosts in _together(zeta):  # rows of D, which is symmetric
        D = debias(zeta[hosts], q, hosts)
        local = torch.full_like(q, -1, dtype=torch.long).index_copy_(
            0, hosts, torch.arange(len(hosts), device=q.device)
        )
        here = local[j] >= 0
        products[here] = torch.sparse.mm(alpha, D.T)[i[here], local[j[here]]]
    return products
