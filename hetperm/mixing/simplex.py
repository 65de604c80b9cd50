"""The simplex: weights that are not negative and sum to one (the space of a row of alpha, section 3 of the paper)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.mixing import borders


def project(x: Tensor) -> Tensor:
    r"""The point of the simplex nearest to each row.

    .. math:: \arg\min_{p \in \Delta_N} \lVert p - x \rVert^2

    Exact, by one sort. Computed in float64; the result has the dtype of ``x``.

    Args:
        x: (..., N) the rows.

    Example:
        >>> project(torch.tensor([[0.5, 1.5, -1.0], [0.2, 0.3, 0.5]]))
        tensor([[0.0000, 1.0000, 0.0000],
                [0.2000, 0.3000, 0.5000]])
    """
    if borders.dense("x", x).dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no row to project onto the simplex")
    if not x.isfinite().all():
        raise ValueError("a row with nan or inf in it has no nearest point on the simplex")
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x = x.double()
    # The projection is (x_j - tau)+ with a sum of one: water of breadth 1 over ground at height -x_j.
    return water_fill(-x, x.new_ones(x.shape[-1])).to(dtype)


def water_fill(x: Tensor, n: Tensor) -> Tensor:
    r"""Weights :math:`n_j (t - x_j)_+`, one level t for each row, such that the row sums to one.

    Picture one unit of water poured over columns: column j is n_j broad and its ground lies at height x_j. The weight
    of a column is the water in it. Columns above the level stay exactly dry. Relabelling the columns relabels the
    weights, bit for bit.

    Args:
        x: (..., N) heights, float64, no nan.
        n: (N,) breadths, positive, float64.

    Example:
        >>> water_fill(torch.tensor([0.0, 0.1, 3.0]).double(), n=torch.tensor([1.0, 4.0, 1.0]).double())
        tensor([0.2800, 0.7200, 0.0000], dtype=torch.float64)
    """
    # The level is never above 1 / n_min. Columns above that stay dry, so clamping them avoids an overflow for free.
    x = (x - x.amin(-1, keepdim=True)).clamp_(max=2 / float(n.min()))
    # Columns of equal height are sorted by breadth, so that no sum depends on how the columns are labelled.
    by_breadth = n.argsort(stable=True)
    ground, order = x[..., by_breadth].sort(dim=-1, stable=True)
    order = by_breadth[order]
    breadth = n[order]
    area = breadth.cumsum(-1)
    # volume[k] is the water it takes to reach the ground of column k. It never falls, so the wet columns are a prefix.
    volume = F.pad((area[..., :-1] * ground.diff(dim=-1)).cumsum(-1), (1, 0))
    last = (volume < 1).sum(-1, keepdim=True) - 1
    level = ground.gather(-1, last) + (1 - volume.gather(-1, last)) / area.gather(-1, last)
    water = breadth * (level - ground).clamp_min_(0)
    # The level was rounded: dividing by the total makes the row sum to one again.
    water /= water.cumsum(-1)[..., -1:]  # cumsum adds in the order of the row; sum() may not
    return torch.empty_like(x).scatter_(-1, order, water)
