"""Distances freed of what is chance in them, as all clients together show it and no two alone can."""

import torch
from torch import Tensor

from hetperm.mixing import borders
from hetperm.mixing.solver import check_distances, check_symmetric, estimates, own_noise, owners_of
from hetperm.texts import shown

EDGE = 3.0  # how many times as large as what chance makes below zero a direction must be to count as no chance


def denoised(zeta: Tensor, q: Tensor, n: Tensor, order: Tensor | None = None) -> Tensor:
    r"""Squared distances (N, N) of which only the directions are left in which clients differ by more than chance.

    .. math:: H = -\tfrac12 S^{-1/2} J D J^\top S^{-1/2} = U \Lambda U^\top, \quad J = I - 1 w^\top,
              \quad w_i = s_i^{-1} \Big/ \sum_j s_j^{-1}

    with :math:`D_{ij} = \zeta_{ij} - q_i - q_j` the distances minus what noise adds to them on average, and
    :math:`s_i = \bar q_i` the noise of `mixing.noise`, so that a noisy client does not drown the others. H holds the
    products of all gradients in units of their noise. Exact gradients have no eigenvalue below zero, so those that are
    show how large chance makes them, above zero too. What is larger than three times as much is kept,

    .. math:: x = S^{1/2} U_+ \Lambda_+^{1/2}, \quad \Lambda_+ = \{ \lambda > 3 |\lambda_{\min}| \},
              \quad \zeta'_{ij} = \lVert x_i - x_j \rVert^2 + q_i + q_j

    so that `mixing.weights` finds the costs :math:`\lVert x_i - x_j \rVert^2`. Many clients that differ a little from
    many others make one large eigenvalue, though no two of them differ by more than their noise.

    Args:
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient.
        n: (N,) samples held by each client.
        order: (N,) in which clients are taken, so that relabelling them relabels the result to the last bit.

    Example:
        >>> D = torch.tensor([[0.0, 1.0, 9.0, 9.0], [1.0, 0.0, 9.0, 9.0], [9.0, 9.0, 0.0, -1.0], [9.0, 9.0, -1.0, 0.0]])
        >>> zeta = (D + 2).fill_diagonal_(0)  # noise of 1 a client
        >>> denoised(zeta, torch.ones(4), torch.ones(4))[0]
        tensor([ 0.,  2., 11., 11.], dtype=torch.float64)
    """
    zeta, q, n = estimates(zeta, q, n)
    borders.dense("zeta", zeta)
    if q is None:
        raise ValueError("the noise q of the gradients is missing; give the variance of each client's mean gradient")
    everybody = owners_of(slice(None), n)
    check_distances(zeta, everybody)
    check_symmetric(zeta)
    if not (q > 0).any():
        return zeta.double()  # exact gradients: nothing is chance
    order = everybody if order is None else borders.order("order", order, len(zeta)).to(zeta.device)
    if not torch.equal(order.sort().values, everybody):
        raise ValueError(f"order is {shown(order.tolist())}; it must name every client once")
    noise = own_noise(zeta, q, n)[order]
    D = (zeta.double() - (q[:, None] + q)).fill_diagonal_(0)[order][:, order]
    products = D / -2
    w = 1 / noise / (1 / noise).sum()
    products = products - products @ w[:, None]
    products = products - w @ products
    scale = noise.sqrt()
    values, vectors = torch.linalg.eigh((products + products.T) / 2 / scale[:, None] / scale)
    kept = values > EDGE * values[0].clamp_max(0).abs()
    x = scale[:, None] * vectors[:, kept] * values[kept].sqrt()
    square = x.square().sum(1)
    costs = (square[:, None] + square).sub_(x @ x.T, alpha=2).clamp_min_(0)
    costs = (costs + costs.T) / 2  # a product need not be symmetric to the last bit
    back = order.argsort()
    return (costs[back][:, back] + (q[:, None] + q)).fill_diagonal_(0)
