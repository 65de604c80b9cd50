"""Mixing weights alpha: how much each client learns from each other (section 3.1 of the paper, Algorithm A1).

Everything is computed in float64. Relabelling the clients relabels alpha bit for bit, because the order of every sum
does not depend on labels.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetperm.checks import MOST
from hetperm.mixing import borders, complexity
from hetperm.mixing.discrepancy import Distances
from hetperm.mixing.rule import MOST_STEPS, SHARE, Rule, check_share, rule_of
from hetperm.mixing.simplex import water_fill
from hetperm.texts import shown

ENTRIES = 2**21  # numbers in a block of rows that is solved at once: about ten temporaries of 16 MB
LEVEL = 0.5  # water level of the "level" rule, in units of the noise of a distance
SPARSE_FROM = 1000  # clients; from this number on alpha is stored and written sparse
RESOLUTION = 1e-6  # distances below this share of the largest one are rounding errors
SLACK = 1e-3  # share of the largest distance by which a diagonal may differ from 0, and two halves from each other
TILE = 256  # rows and columns that are compared at once: both fit into the cache


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
    borders.count("steps", steps, 0, MOST_STEPS)

    def walk(c: Tensor, n: Tensor, lam: Tensor) -> Tensor:
        # A step goes to alpha - (c + 2 lam alpha / n) / L, L = 2 lam / n_min; what all steps share is computed once.
        # With a tiny lam the factor would be infinite, and the cheapest cost, which is 0, no number.
        factor = (n.min() / (2 * lam)).clamp_max(torch.finfo(lam.dtype).max)
        slope, stay, ones = c * factor, 1 - n.min() / n, torch.ones_like(n)
        alpha = torch.full_like(c, 1 / len(n))
        for _ in range(steps):
            before, alpha = alpha, water_fill(slope - stay * alpha, ones)  # the projection of stay * alpha - slope
            if torch.equal(alpha, before):  # so will all that follow be
                break
        return alpha

    return _by_rows(walk, c, n, lam)


def _by_rows(rule: Callable[[Tensor, Tensor, Tensor], Tensor], c: Tensor, n: Tensor, lam: float | Tensor) -> Tensor:
    """``rule(c, n, lam)`` of blocks (rows, N) of the costs, each row minus its smallest cost; lam is (rows, 1)."""
    if borders.dense("c", c).dim() == 0 or c.shape[-1] == 0:
        raise ValueError(f"costs of shape {tuple(c.shape)} name no client to learn from")
    shape, N = c.shape, c.shape[-1]
    # Always float64, whatever the dtype of the costs: tau is a difference of sums that nearly cancel.
    n = _samples(n, N, c.device)
    lam = borders.numbers("lam", lam, c.device)
    if not (lam > 0).all():
        wrong = float(lam[~(lam > 0)].flatten()[0])
        raise ValueError(f"lam is {wrong}; the mixing problem needs a regularization above zero")
    if lam.dim() and lam.shape != shape[:-1]:
        raise ValueError(f"lam of shape {tuple(lam.shape)} for costs of shape {tuple(shape)}; give one, or one per row")
    lam = lam.expand(shape[:-1]).reshape(-1, 1)
    c = c.detach().reshape(-1, N)
    out = torch.empty_like(c, dtype=c.dtype if c.is_floating_point() else torch.get_default_dtype())
    for rows in row_slices(len(c), N):
        block = c[rows].double()
        _finite("cost", block, range(rows.start, rows.stop))
        # Adding a constant to a row moves tau but no weight. Without it all digits go into the differences.
        out[rows] = rule(block - block.amin(-1, keepdim=True), n, lam[rows])
    return out.reshape(shape)


# Costs and lam from the distances of noisy gradients


def noise(zeta: Tensor, q: Tensor, n: Tensor, share: float = SHARE) -> tuple[Tensor, Tensor]:
    r"""Costs (N, N) and lam (N,) of the rule ``"noise"``: distances minus what noise explains, and lam from noise.

    .. math:: D_{ij} = (\zeta_{ij} - q_i - q_j)_+, \quad D_{ii} = 0,
              \quad \lambda_i = c \, \bar q_i \sum_{j \in S_i} n_j,
              \quad \bar q_i = \tfrac12 \Big( q_i + \sum_j n_j q_j \Big/ \sum_j n_j \Big)

    where :math:`S_i` is the support of row i of the solution itself. So client j is a partner of i if and only if

    .. math:: D_{ij} < t_i, \quad
              t_i = \sum_{j \in S_i} n_j D_{ij} \Big/ \sum_{j \in S_i} n_j + 2 c \, \bar q_i,
              \quad \alpha_{ij} \propto n_j (t_i - D_{ij})_+

    and the clients outside :math:`S_i` do not matter, however many they are and however many samples they hold. Several
    sets may fulfil this; :math:`S_i` is the smallest, which all others contain. It is found by going through clients in
    order of distance up to the first whose distance is not below the level of those before it: one sort a row.

    The noise counts for at least a millionth of the largest distance, the accuracy of zeta. So clients with equal
    gradients share by their samples even without any noise. If zeta is zero too, any lam will do.

    Args:
        zeta: (N, N) squared distances of the gradients.
        q: (N,) variance of each client's mean gradient.
        n: (N,) samples held by each client.
        share: c, how much difference is worth sharing.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.5, 9.0], [2.5, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> D, lam = noise(zeta, q=torch.ones(3), n=torch.tensor([4, 4, 4]), share=0.5)
        >>> D, lam
        (tensor([[0.0000, 0.5000, 7.0000],
                [0.5000, 0.0000, 7.0000],
                [7.0000, 7.0000, 0.0000]], dtype=torch.float64), tensor([4., 4., 2.], dtype=torch.float64))
    """
    zeta, q, n = estimates(zeta, q, n)
    share = check_share(share)
    if q is None:
        raise ValueError("the noise q of the gradients is missing; give the variance of each client's mean gradient")
    check_symmetric(zeta)
    _finite("zeta", zeta[:], range(len(zeta)))
    D = debias(zeta, q, owners_of(slice(None), n))
    return D, _support(D, n, share, own_noise(zeta, q, n))[1]


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


def weights(zeta: Tensor | Distances, q: Tensor | None, n: Tensor, *, vc: Tensor | None = None, **rule: Any) -> Tensor:
    """Mixing weights alpha, (N, N) in float64: row i says whom client i learns from.

    Args:
        zeta: (N, N) squared distances of the gradients, as a matrix or as `discrepancy.Distances`.
        q: (N,) variance of each client's mean gradient. It may be None if regularization is a number and vc_weight is 0
            or ``"raw"``.
        n: (N,) samples held by each client.
        vc: (N,) VC dimension of each client's architecture; None leaves complexity out.
        rule: the fields of `Rule`, such as ``share=0.5``.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> weights(zeta, torch.ones(3), torch.tensor([10, 30, 30]))
        tensor([[0.2500, 0.7500, 0.0000],
                [0.2500, 0.7500, 0.0000],
                [0.0000, 0.0000, 1.0000]], dtype=torch.float64)
    """
    parts = weights_by_rows(zeta, q, n, vc=vc, **rule)
    alpha = torch.empty(zeta.shape, dtype=torch.float64, device=zeta.device)
    for rows, part in zip(row_slices(*zeta.shape), parts, strict=True):
        alpha[rows] = part
    return alpha


def weights_by_rows(zeta: Tensor | Distances, q: Tensor | None, n: Tensor, **options: Any) -> Iterator[Tensor]:
    """Yield the rows of `weights` in blocks (rows, N), for an alpha that is too large for memory.

    ``sparse(weights_by_rows(...))`` keeps only the non-zero entries. The arguments are those of `weights`.
    """
    given = problem(zeta, q, n, **options)
    check_symmetric(given.zeta)
    return map(given.rows, row_slices(*zeta.shape))


def weights_of(clients: Sequence[int], zeta: Tensor | Distances, q: Tensor | None, n: Tensor, **options: Any) -> Tensor:
    """The rows of `weights` of some clients, (M, N): the other rows are not computed.

    Args:
        clients: (M,) positions of the clients.
        options: as of `weights`.

    Example:
        >>> zeta = torch.tensor([[0.0, 2.0, 9.0], [2.0, 0.0, 9.0], [9.0, 9.0, 0.0]])
        >>> weights_of([2, 0], zeta, torch.ones(3), torch.tensor([10, 30, 30]))
        tensor([[0.0000, 0.0000, 1.0000],
                [0.2500, 0.7500, 0.0000]], dtype=torch.float64)
    """
    given = problem(zeta, q, n, **options)
    rows = _positions(clients, zeta)
    check_symmetric(given.zeta, rows)
    return torch.cat([given.rows(rows[block]) for block in row_slices(len(rows), len(zeta))])


@dataclass(frozen=True)
class Problem:
    """The mixing problem of all clients, checked, from which the weights of any of them can be computed.

    Attributes:
        rule: what decides the weights.
        extra: () or (N,) what every row pays for each host beside the distance.
        noise: (N,) the noise against which the differences of each client are held; None if lambda is a number.
        height: the level of the rule ``"level"``; None for other rules.
    """

    zeta: Tensor | Distances
    q: Tensor | None
    n: Tensor
    rule: Rule
    extra: Tensor | float
    noise: Tensor | None
    height: float | None

    def rows(self, rows: slice | Tensor) -> Tensor:
        """(rows, N) the mixing weights of some clients, given as a slice or as positions."""
        q, n, rule = self.q, self.n, self.rule
        block, owners = self.zeta[rows].double(), owners_of(rows, n)
        check_distances(block, owners)
        c = (block if rule.by_number else debias(block, q, owners)) + self.extra
        if self.height is not None:
            return below(c, n, torch.tensor(self.height, dtype=torch.float64))
        if rule.by_number:
            lam = rule.regularization
            return solve(c, n, lam) if rule.alpha_steps is None else descend(c, n, lam, rule.alpha_steps)
        if rule.share == 0:
            return torch.zeros_like(c).scatter_(1, owners[:, None], 1.0)
        if rule.share == math.inf:
            return (n / _total(n)).expand(len(c), -1)
        height, lam = _support(c, n, rule.share, self.noise[rows])
        return below(c, n, height) if rule.alpha_steps is None else descend(c, n, lam, rule.alpha_steps)


def problem(
    zeta: Tensor | Distances, q: Tensor | None, n: Tensor, *, vc: Tensor | None = None, **options: Any
) -> Problem:
    """The mixing problem; the arguments are those of `weights`. Bad ones raise here, before any row is asked for."""
    zeta, q, n = estimates(zeta, q, n)
    rule = rule_of(options)
    raw = rule.vc_weight == "raw"
    with_vc = vc is not None and (raw or rule.vc_weight > 0)
    if q is None and ((with_vc and not raw) or not rule.by_number):
        raise ValueError("the noise q of the gradients is missing; only a number as regularization does without it")
    # Complexity is a property of the host j, so it adds the same cost to column j of every row.
    h = complexity.term(vc, n) if with_vc else 0.0
    extra = rule.vc_weight * _noise_of_a_distance(zeta, q) * _relative(h) if with_vc and not raw else h
    if with_vc and not bool(extra.isfinite().all()):
        raise ValueError(f"vc_weight {rule.vc_weight:g} makes costs too large for a number; give a smaller one")
    noise = None if rule.by_number else own_noise(zeta, q, n)
    height = LEVEL * _noise_of_a_distance(zeta, q) if rule.regularization == "level" else None
    return Problem(zeta, q, n, rule, extra, noise, height)


def owners_of(rows: slice | Tensor, n: Tensor) -> Tensor:
    """(rows,) the positions of the clients that some rows belong to."""
    return torch.arange(len(n), device=n.device)[rows]


def own_noise(zeta: Tensor, q: Tensor, n: Tensor) -> Tensor:
    """(N,) the noise against which the differences of each client are held: the mean of its own and a typical one."""
    # Weighted by samples, or a few tiny clients, which are very noisy, would decide what everybody shares.
    typical = _total(n * q) / _total(n)
    # Differences below the resolution of zeta are noise too. Without any noise the problem would be undefined.
    noise = (q + typical) / 2
    noise = noise.clamp_min(_resolution(zeta, float(noise.min())))
    return torch.where(noise > 0, noise, 1.0)


def _resolution(zeta: Tensor | Distances, least: float) -> float:
    """The accuracy of zeta, or ``least`` if that is certainly not less. Then no largest distance is looked for."""
    if isinstance(zeta, Distances) and RESOLUTION * zeta.bound <= least:
        return least
    return RESOLUTION * float(zeta.max())


def _support(c: Tensor, n: Tensor, share: float, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The level t (rows, 1), counted from the cheapest of each row, and lam (rows,) of the rule ``"noise"``.

    Args:
        c: (rows, N) costs.
        noise: (rows,) the noise of each row's client.
    """
    c = c - c.amin(-1, keepdim=True)
    # Equal costs are sorted by samples, so that no sum depends on how the clients are labelled.
    by_samples = n.argsort(stable=True)
    cost, order = c[:, by_samples].sort(dim=-1, stable=True)
    return level_of(cost, n[by_samples][order], share, noise)[:2]


def level_of(cost: Tensor, samples: Tensor, share: float, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The level (rows, 1), lam (rows,) and the last (rows, 1) that belongs, of costs (rows, K) in increasing order."""
    # The level that the first k of a row have by themselves. It never falls, because costs are sorted.
    levels = (samples * cost).cumsum(-1) / samples.cumsum(-1) + 2 * share * noise[:, None]
    # The cheapest always belongs. All others must lie below the level of those before them: a client of many samples
    # that counted too would raise the level to its own cost, and be let in at any distance.
    last = (cost[:, 1:] < levels[:, :-1]).cumprod(-1).sum(-1, keepdim=True)
    height = levels.gather(-1, last)
    # Those below the level are the support, whatever rounding did to clients of equal cost.
    inside = (samples * (cost < height)).cumsum(-1)[:, -1]
    return height, share * noise * inside, last


def _noise_of_a_distance(zeta: Tensor, q: Tensor) -> float:
    mean = _total(q) / len(q)
    return 2 * max(mean, _resolution(zeta, mean)) or 1.0


def debias(zeta: Tensor, q: Tensor, owners: Tensor) -> Tensor:
    """D (rows, N) of the rows of some clients."""
    D = (zeta.double() - (q[owners, None] + q)).clamp_min_(0)
    # A client does not differ from itself.
    return D.scatter_(1, owners[:, None], 0.0)


def below(c: Tensor, n: Tensor, height: Tensor) -> Tensor:
    """Weights n_j (height - c_j)+, each row scaled to sum to one. Costs count from the cheapest of the row.

    Args:
        height: () or (rows, 1) the level.
    """
    # The cheapest costs 0 without VC terms; with them, counting from it keeps every row from being empty.
    alpha = n * (height - (c - c.amin(-1, keepdim=True))).clamp_min_(0)
    # A sum over sorted weights is the same for every labelling of the clients; a plain sum is not.
    total = alpha.sort(dim=-1).values.cumsum(-1)[..., -1:]
    if not ((total > 0) & (total < math.inf)).all():
        raise ValueError(
            "the mixing weights are beyond the numbers of float64: zeta, q, n, share or vc_weight is too small or too "
            "large; bring them nearer to 1"
        )
    return alpha / total


def _relative(h: Tensor) -> Tensor:
    return h * (len(h) / (_total(h) or 1.0))


def _total(x: Tensor) -> float:
    return math.fsum(x.tolist())  # rounds once, so the order of clients cannot matter


# Borders


def row_slices(rows: int, N: int) -> list[slice]:
    """Slices of rows with at most ``ENTRIES`` numbers each, but at least one row."""
    step = max(1, ENTRIES // N)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _positions(clients: Sequence[int], zeta: Tensor | Distances) -> Tensor:
    rows = borders.numbers("clients", clients, zeta.device)
    if rows.dim() != 1 or len(rows) == 0 or not ((rows >= 0) & (rows < len(zeta)) & (rows == rows.floor())).all():
        raise ValueError(f"clients is {shown(clients)}; it must be a list of positions from 0 to {len(zeta) - 1}")
    return rows.long()


def _samples(n: Tensor, N: int, device: torch.device) -> Tensor:
    n = borders.numbers("n", n, device)
    if n.shape != (N,):
        raise ValueError(f"n of shape {tuple(n.shape)} for {N} clients; give the samples of each")
    wrong = ~((n >= 1 / MOST) & (n <= MOST))
    if wrong.any():
        j = int(wrong.nonzero()[0])
        if 0 < float(n[j]) < math.inf:
            raise ValueError(f"n[{j}] is {float(n[j])}; the samples of a client are from {1 / MOST:g} to {MOST:g}")
        raise ValueError(f"n[{j}] is {float(n[j])}; every client must hold a sample")
    return n


def estimates(
    zeta: Tensor | Distances, q: Tensor | None, n: Tensor
) -> tuple[Tensor | Distances, Tensor | None, Tensor]:
    """The reports of the clients, checked: zeta in its own dtype, q and n in float64."""
    if not isinstance(zeta, Distances):
        borders.dense("zeta", zeta)
    if len(zeta.shape) != 2 or zeta.shape[0] != zeta.shape[1] or len(zeta) == 0:
        raise ValueError(f"zeta has shape {tuple(zeta.shape)}; it must hold the distance of every two clients")
    N = len(zeta)
    # zeta is large, so it keeps its dtype here: `weights_by_rows` converts it block by block.
    zeta, n = zeta if isinstance(zeta, Distances) else zeta.detach(), _samples(n, N, zeta.device)
    if q is None:
        return zeta, None, n
    q = borders.numbers("q", q, zeta.device)
    if q.shape != (N,):
        raise ValueError(f"q of shape {tuple(q.shape)} for {N} clients; give the noise of each")
    wrong = ~((q >= 0) & (q <= MOST))
    if wrong.any():
        j = int(wrong.nonzero()[0])
        if 0 < float(q[j]) < math.inf:
            raise ValueError(f"q[{j}] is {float(q[j])}; it must be at most {MOST:g}: scale the gradients down")
        raise ValueError(f"q[{j}] is {float(q[j])}; a variance is zero or more (discrepancy.fill_noise replaces nan)")
    return zeta, q, n


def check_distances(block: Tensor, owners: Tensor) -> None:
    """Raise an error if rows (rows, N) of zeta hold what is no squared distance; ``owners`` are their clients."""
    _finite("zeta", block, owners.tolist())
    if (block < 0).any():
        raise ValueError(f"zeta holds {float(block.min())}; a squared distance is zero or more")


def check_symmetric(zeta: Tensor | Distances, rows: Tensor | None = None) -> None:
    """Raise an error if zeta (N, N), or some rows of it, are not of a matrix of distances, but for rounding."""
    if isinstance(zeta, Distances):
        return
    everybody, diagonal = torch.arange(len(zeta), device=zeta.device), zeta.diagonal()
    tiles = [slice(first, first + TILE) for first in range(0, len(zeta), TILE)]
    pairs = itertools.combinations_with_replacement(tiles, 2) if rows is None else [(rows, slice(None))]
    if (diagonal != 0).any():
        j, slack = int(diagonal.abs().argmax()), SLACK * float(zeta.max())
        if float(diagonal[j].abs()) > slack:
            raise ValueError(
                f"zeta[{j}, {j}] is {float(diagonal[j])}; a client does not differ from itself, so that the diagonal "
                "of squared distances is 0 (1 minus a similarity is a distance)"
            )
    for own, others in pairs:
        there, back = zeta[own][:, others], zeta[others][:, own].T
        if torch.equal(there, back):  # always so if this package made them
            continue
        away = (there.double() - back.double()).abs()
        row, column = divmod(int(away.argmax()), away.shape[1])
        if float(away[row, column]) > SLACK * float(zeta.max()):
            i, j = int(everybody[own][row]), int(everybody[others][column])
            raise ValueError(
                f"zeta[{i}, {j}] is {float(zeta[i, j])} and zeta[{j}, {i}] is {float(zeta[j, i])}; a distance is the "
                "same both ways, so give a symmetric matrix"
            )


def _finite(name: str, block: Tensor, owners: Sequence[int]) -> None:
    good = block.double().abs() <= MOST
    if not good.all():
        i, j = (~good).nonzero()[0].tolist()
        value = float(block[i, j])
        must = f"at most {MOST:g}" if math.isfinite(value) else "finite"
        raise ValueError(f"{name}[{owners[i]}, {j}] is {value}; it must be {must}")
