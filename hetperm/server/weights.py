"""From reports to mixing weights, and to the step sizes that suit the hosts which these weights choose."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.mixing import discrepancy
from hetperm.server.estimate import Reports
from hetperm.server.federation import Federation


def weights_among(reports: Reports, clients: Sequence[int] | None = None, *, vc: Tensor | None, **rule: Any) -> Tensor:
    """(N, N) mixing weights of the clients whose reports are known; every other client is alone.

    Args:
        clients: (M,) those whose rows (M, N) are wanted; None: all, sparse if there are many.
        vc: (N,) see `mixing.weights`, which takes the ``rule`` too.
    """
    many = len(reports.n) >= mixing.SPARSE_FROM
    zeta, q = reports.for_weights
    if reports.known is None:
        problem = zeta, q, reports.n
        if clients is not None:
            return mixing.weights_of(clients, *problem, vc=vc, **rule)
        return (mixing.sparse_weights if many else mixing.weights)(*problem, vc=vc, **rule)
    known = torch.tensor(reports.known, dtype=torch.long)
    noise_counts = isinstance(rule["regularization"], str) or (vc is not None and rule["vc_weight"] not in (0, "raw"))
    # Those that came may all have too few samples to know any noise.
    known = known if q is not None or not noise_counts else known[:0]
    alpha = _alone_but(known, len(reports.n))
    if len(known):
        zeta, q = discrepancy.reordered(zeta, known), None if q is None else q[known]
        among = mixing.sparse_weights(zeta, q, reports.n[known], vc=None if vc is None else vc[known], **rule)
        alpha += torch.sparse_coo_tensor(known[among.indices()], among.values(), alpha.shape, check_invariants=False)
    alpha = alpha.coalesce()
    if clients is not None:
        return alpha.index_select(0, torch.tensor(clients)).to_dense()
    return alpha if many else alpha.to_dense()


def _alone_but(known: Tensor, N: int) -> Tensor:
    """(N, N) sparse: every client has itself, but for those that are known, who have nobody yet."""
    alone = torch.ones(N, dtype=torch.bool).index_fill_(0, known, False).nonzero().flatten()
    ones = torch.ones(len(alone), dtype=torch.float64)
    return torch.sparse_coo_tensor(torch.stack([alone, alone]), ones, (N, N), check_invariants=False)


def visit_rates(federation: Federation, alpha: Tensor, reports: Reports, batch_size: int) -> Tensor:
    r"""(N,) by how much the step size of each model shrinks because its hosts differ from one another.

    .. math:: \rho_i = \frac{s_i}{s_i + V_i}, \quad s_i = q_i n_i / \min(B, n_i)

    where s is the variance of a mini-batch gradient and V the variance between hosts (`mixing.spread`). Both are noise
    to a model that goes from host to host, and this keeps the noise of a step at what mini-batches alone would cause.
    """
    if reports.q is None:
        return torch.ones(len(federation.clients), dtype=torch.float64)
    # In the order of keys, so that sums do not depend on how the clients are labelled.
    order = torch.tensor(federation.order)
    zeta, q, n = discrepancy.reordered(reports.zeta, order), reports.q[order], reports.n[order]
    alpha = alpha.to_dense() if len(order) < mixing.SPARSE_FROM else alpha
    alpha = alpha.index_select(0, order).index_select(1, order)
    noise = q * n / n.clamp_max(batch_size)
    between = mixing.spread(alpha, zeta, q)
    # Without any noise a gradient is exact, and only what hosts have in common is left to learn slowly.
    rates = torch.where(noise + between > 0, noise / (noise + between), 1.0)
    return torch.empty_like(rates).index_copy_(0, order, rates)
