"""Mixing weights alpha: how much each client learns from each other (section 3.1 of the paper, Algorithm A1).

Everything is computed in float64. Relabelling the clients relabels alpha bit for bit, because the order of every sum
does not depend on labels.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from hetperm.mixing import complexity
from hetperm.mixing.reading import sparse
from hetperm.mixing.simplex import water_fill

ENTRIES = 2**21  # numbers in a block of rows that is solved at once: about ten temporaries of 16 MB
NOISE = 0.2  # lam of the "noise" rule, in units of N times the variance of one sample
LEVEL = 0.5  # water level of the "level" rule, in units of the noise of a distance
SPARSE_FROM = 1000  # clients; from this number on alpha is stored and written sparse
RESOLUTION = 1e-6  # distances below this share of the largest one are rounding errors


# The mixing problem


def solve(c: Tensor, n: Tensor, lam: float | Tensor) -> Tensor:
    r"""Mixing weights: the exact minimiser of g_i over the simplex, one row per client.

    .. math:: \min_{\alpha \in \Delta_N} \sum_j \alpha_j c_j + \lambda \sum_j \alpha_j^2 / n_j

    Clients that are not worth their cost get a weight of exactly zero. Rows are solved in blocks, to bound the memory.

    Args:
        c: (..., N) cost of learning from each client; its dtype is that of the result.
        n: (N,) samples held by each client.
        lam: weight of the spread term, or (...,) one for each row; as it grows, alpha tends to n / n.sum().

    Example:
        >>> solve(torch.tensor([0.0, 0.0, 9.0]), n=torch.ones(3), lam=1.0)
        tensor([0.5000, 0.5000, 0.0000])
        >>> solve(torch.tensor([0.0, 0.1, 9.0]), n=torch.tensor([1, 4, 1]), lam=0.5)
        tensor([0.2800, 0.7200, 0.0000])
    """
    # Stationarity gives alpha_j = n_j (tau - c_j)+ / 2 lam; tau is fixed by the sum being one.
    return _by_rows(lambda c, n, lam: water_fill(c / (2 * lam), n), c, n, lam)


def descend(c: Tensor, n: Tensor, lam: float | Tensor, steps: int) -> Tensor:
    r"""Mixing weights after the paper's T_alpha steps of projected gradient descent, starting from uniform weights.

    .. math:: \alpha \leftarrow P_\Delta \Big( \alpha - \tfrac{1}{L} (c + 2 \lambda \alpha / n) \Big),
              \quad L = 2 \lambda / n_{\min}

    With equal n the problem is itself a projection onto the simplex, and one step is exact. With unequal n the
    projection is still Euclidean, but the curvature of coordinate j is 2 lam / n_j: each further digit takes up to
    2.3 n_max / n_min steps. `solve` is exact without steps.

    Args:
        c: (..., N) cost of learning from each client; its dtype is that of the result.
        n: (N,) samples held by each client.
        lam: weight of the spread term, or (...,) one for each row.
        steps: T_alpha.

    Example:
        >>> descend(torch.tensor([0.0, 0.0, 9.0]), n=torch.ones(3), lam=1.0, steps=1)
        tensor([0.5000, 0.5000, 0.0000])
    """
    if steps < 0:
        raise ValueError(f"alpha cannot take {steps} steps; use 0 or more")

    def walk(c: Tensor, n: Tensor, lam: Tensor) -> Tensor:
        # A step goes to alpha - (c + 2 lam alpha / n) / L, L = 2 lam / n_min; what all steps share is computed once.
        slope, stay, ones = c * (n.min() / (2 * lam)), 1 - n.min() / n, torch.ones_like(n)
        alpha = torch.full_like(c, 1 / len(n))
        for _ in range(steps):
            alpha = water_fill(slope - stay * alpha, ones)  # the projection of stay * alpha - slope
        return alpha

    return _by_rows(walk, c, n, lam)


def _by_rows(rule: Callable[[Tensor, Tensor, Tensor], Tensor], c: Tensor, n: Tensor, lam: float | Tensor) -> Tensor:
    """``rule(c, n, lam)`` of blocks (rows, N) of the costs, each row minus its smallest cost; lam is (rows, 1)."""
    if c.dim() == 0 or c.shape[-1] == 0:
        raise ValueError(f"costs of shape {tuple(c.shape)} name no client to learn from")
    shape, N = c.shape, c.shape[-1]
    # Always float64, whatever the dtype of the costs: tau is a difference of sums that nearly cancel.
    n = _samples(n, N, c.device)
    lam = torch.as_tensor(lam, dtype=torch.float64, device=c.device)
    if not (lam > 0).all():
        wrong = float(lam[~(lam > 0)].flatten()[0])
        raise ValueError(f"lam is {wrong}; the mixing problem needs a regularization above zero")
    if lam.dim() and lam.shape != shape[:-1]:
        raise ValueError(f"lam of shape {tuple(lam.shape)} for costs of shape {tuple(shape)}; give one, or one per row")
    lam = lam.expand(shape[:-1]).reshape(-1, 1)
    c = c.detach().reshape(-1, N)
    out = torch.empty_like(c, dtype=c.dtype if c.is_floating_point() else torch.get_default_dtype())
    for rows in _row_slices(len(c), N):
        block = c[rows].double()
        _finite("cost", block, rows.start)
        # Adding a constant to a row moves tau but no weight. Without it all digits go into the differences.
        out[rows] = rule(block - block.amin(-1, keepdim=True), n, lam[rows])
    return out.reshape(shape)


# Costs and lam from the distances of noisy gradients


def noise(zeta: Tensor, q: Tensor, n: Tensor) -> tuple[Tensor, float]:
    r"""Costs (N, N) and lam of the rule ``"noise"``: distances minus what noise explains, and lam from noise.

    .. math:: D_{ij} = (\zeta_{ij} - q_i - q_j)_+, \quad D_{ii} = 0,
              \quad \lambda = 0.2 \, N \operatorname{mean}_i(n_i q_i)

    In lam, noise counts for at least a millionth of the largest distance, the accuracy of zeta. So clients with equal
    gradients share by their samples even without any noise. If zeta is zero too, any lam will do: it is 1.

    Args:
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient.
        n: (N,) samples held by each client.

    Example:
        >>> D, lam = noise(torch.tensor([[0.0, 3.0], [3.0, 0.0]]), q=torch.tensor([0.5, 1.0]), n=torch.tensor([4, 2]))
        >>> D, round(lam, 6)
        (tensor([[0.0000, 1.5000],
                [1.5000, 0.0000]], dtype=torch.float64), 0.8)
    """
    zeta, q, n = _estimates(zeta, q, n)
    return _debias(zeta, q, 0), _lam(zeta, q, n)


def level(zeta: Tensor, q: Tensor, n: Tensor) -> Tensor:
    r"""Mixing weights (N, N) of the rule ``"level"``: all clients nearer than half the noise of a distance.

    .. math:: \alpha_{ij} \propto n_j (0.5 \, N_z - D_{ij})_+, \quad N_z = 2 \operatorname{mean}_i q_i

    This solves the mixing problem with a different lam for each client, and needs no sort. D and the lower bound on the
    noise are those of `noise`.

    Args:
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient.
        n: (N,) samples held by each client.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.5, 9.0], [2.5, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> level(zeta, q=torch.ones(3), n=torch.ones(3))
        tensor([[0.6667, 0.3333, 0.0000],
                [0.3333, 0.6667, 0.0000],
                [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    return weights(zeta, q, n, regularization="level")


def weights(
    zeta: Tensor,
    q: Tensor | None,
    n: Tensor,
    *,
    regularization: float | Literal["noise", "level"] = "noise",
    vc: Tensor | None = None,
    vc_weight: float | Literal["raw"] = 0.0,
    alpha_steps: int | None = None,
) -> Tensor:
    """Mixing weights alpha, (N, N) in float64: row i says whom client i learns from.

    Args:
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient. It may be None if regularization is a number and vc_weight is 0
            or ``"raw"``.
        n: (N,) samples held by each client.
        regularization: the rule ``"noise"`` or ``"level"``, which need no tuning; or a number, the paper's lambda, with
            zeta as cost.
        vc: (N,) VC dimension of each client's architecture; None leaves complexity out.
        vc_weight: how much a client of average complexity costs, as a share of the noise of a distance. The complexity
            of client j is h_j / mean(h), with h from `complexity.term`. ``"raw"`` adds h_j as it is (the paper), which
            outweighs distances by orders of magnitude: all weight goes to the clients with the smallest models.
        alpha_steps: take this many steps of projected descent; None solves exactly.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> weights(zeta, torch.ones(3), torch.tensor([10, 30, 30]))
        tensor([[0.2500, 0.7500, 0.0000],
                [0.2500, 0.7500, 0.0000],
                [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    parts = weights_by_rows(
        zeta, q, n, regularization=regularization, vc=vc, vc_weight=vc_weight, alpha_steps=alpha_steps
    )
    alpha = torch.empty(zeta.shape, dtype=torch.float64, device=zeta.device)
    for rows, part in zip(_row_slices(*zeta.shape), parts, strict=True):
        alpha[rows] = part
    return alpha


def weights_by_rows(
    zeta: Tensor,
    q: Tensor | None,
    n: Tensor,
    *,
    regularization: float | Literal["noise", "level"] = "noise",
    vc: Tensor | None = None,
    vc_weight: float | Literal["raw"] = 0.0,
    alpha_steps: int | None = None,
) -> Iterator[Tensor]:
    """Yield the rows of `weights` in blocks (rows, N), for an alpha that is too large for memory.

    ``sparse(weights_by_rows(...))`` keeps only the non-zero entries. The arguments are those of `weights`.
    """
    zeta, q, n = _estimates(zeta, q, n)
    if isinstance(regularization, str) and regularization not in ("noise", "level"):
        raise ValueError(f"unknown regularization {regularization!r}; use 'noise', 'level' or a number above zero")
    if regularization == "level" and alpha_steps is not None:
        raise ValueError("alpha_steps is for a problem that is solved; regularization 'level' reads alpha off directly")
    # Bad arguments raise here, at the call: the blocks are computed later, when somebody iterates.
    raw = vc_weight == "raw"
    if not (raw or (not isinstance(vc_weight, str) and vc_weight >= 0)):
        raise ValueError(f"vc_weight is {vc_weight!r}; it must be a number, zero or more, or 'raw'")
    by_number = not isinstance(regularization, str)
    with_vc = vc is not None and (raw or vc_weight > 0)
    if q is None and ((with_vc and not raw) or not by_number):
        raise ValueError("the noise q of the gradients is missing; only a number as regularization does without it")
    lam = regularization if by_number else _lam(zeta, q, n)
    # Complexity is a property of the host j, so it adds the same cost to column j of every row.
    h = complexity.term(vc, n) if with_vc else 0.0
    extra = vc_weight * _noise_of_a_distance(zeta, q) * _relative(h) if with_vc and not raw else h

    def part(rows: slice) -> Tensor:
        block = zeta[rows].double()
        _finite("zeta", block, rows.start)
        c = (block if by_number else _debias(block, q, rows.start)) + extra
        if regularization == "level":
            return _below(c, n, LEVEL * _noise_of_a_distance(zeta, q))
        return solve(c, n, lam) if alpha_steps is None else descend(c, n, lam, alpha_steps)

    return map(part, _row_slices(*zeta.shape))


def _lam(zeta: Tensor, q: Tensor, n: Tensor) -> float:
    # Without noise lam would be 0 and the problem undefined. Differences below the resolution of zeta are noise too.
    smallest = RESOLUTION * float(zeta.max()) * _total(n)
    return NOISE * max(_total(n * q), smallest) or 1.0


def _noise_of_a_distance(zeta: Tensor, q: Tensor) -> float:
    return 2 * max(_total(q) / len(q), RESOLUTION * float(zeta.max())) or 1.0


def _debias(zeta: Tensor, q: Tensor, first: int) -> Tensor:
    """D of a block of rows that starts at row ``first``."""
    D = (zeta.double() - (q[first : first + len(zeta), None] + q)).clamp_min_(0)
    # A client does not differ from itself. The diagonal of alpha starts at column ``first`` of this block.
    D.diagonal(first).zero_()
    return D


def _below(c: Tensor, n: Tensor, height: float) -> Tensor:
    """Weights n_j (height - c_j)+, each row scaled to sum to one. Costs count from the cheapest of the row."""
    # The cheapest costs 0 without VC terms; with them, counting from it keeps every row from being empty.
    alpha = n * (height - (c - c.amin(-1, keepdim=True))).clamp_min_(0)
    # A sum over sorted weights is the same for every labelling of the clients; a plain sum is not.
    return alpha / alpha.sort(dim=-1).values.cumsum(-1)[..., -1:]


def _relative(h: Tensor) -> Tensor:
    return h * (len(h) / (_total(h) or 1.0))


def _total(x: Tensor) -> float:
    return math.fsum(x.tolist())  # rounds once, so the order of clients cannot matter


def sparse_weights(zeta: Tensor, q: Tensor | None, n: Tensor, **options: Any) -> Tensor:
    """The mixing weights of `weights` as a sparse tensor, built without ever holding the dense one."""
    return sparse(weights_by_rows(zeta, q, n, **options))


# Borders


def _row_slices(rows: int, N: int) -> list[slice]:
    """Slices of rows with at most ``ENTRIES`` numbers each, but at least one row."""
    step = max(1, ENTRIES // N)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _samples(n: Tensor, N: int, device: torch.device) -> Tensor:
    n = torch.as_tensor(n, dtype=torch.float64, device=device)
    if n.shape != (N,):
        raise ValueError(f"n of shape {tuple(n.shape)} for {N} clients; give the samples of each")
    wrong = ~(n.isfinite() & (n > 0))
    if wrong.any():
        j = int(wrong.nonzero()[0])
        raise ValueError(f"n[{j}] is {float(n[j])}; every client must hold a sample")
    return n


def _estimates(zeta: Tensor, q: Tensor | None, n: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """The reports of the clients, checked: zeta in its own dtype, q and n in float64."""
    if zeta.dim() != 2 or zeta.shape[0] != zeta.shape[1] or len(zeta) == 0:
        raise ValueError(f"zeta has shape {tuple(zeta.shape)}; it must hold the distance of every two clients")
    N = len(zeta)
    # zeta is large, so it keeps its dtype here: `weights_by_rows` converts it block by block.
    zeta, n = zeta.detach(), _samples(n, N, zeta.device)
    if q is None:
        return zeta, None, n
    q = torch.as_tensor(q, dtype=torch.float64, device=zeta.device)
    if q.shape != (N,):
        raise ValueError(f"q of shape {tuple(q.shape)} for {N} clients; give the noise of each")
    wrong = ~(q.isfinite() & (q >= 0))
    if wrong.any():
        j = int(wrong.nonzero()[0])
        raise ValueError(f"q[{j}] is {float(q[j])}; a variance is zero or more (discrepancy.fill_noise replaces nan)")
    return zeta, q, n


def _finite(name: str, block: Tensor, first: int) -> None:
    if not block.isfinite().all():
        i, j = (~block.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}[{first + i}, {j}] is {float(block[i, j])}; it must be finite")
