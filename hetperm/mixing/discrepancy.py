"""How far apart the data of clients are, read from their gradients (section 3.1 of the paper, Algorithm A1)."""

import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.checks import LARGEST_SEED
from hetperm.mixing import borders
from hetperm.randomness import generator_for
from hetperm.texts import shown

COLUMNS = 8192  # coordinates in one product: few enough for float32 to add up without losing digits
ENTRIES = 2**24  # numbers in one chunk of gradients
DENSE_UP_TO = 2000  # clients; the distances of more are computed row by row, when they are needed
BLOCK = 256  # rows that are computed at once


def pairwise(gradients: Tensor | Iterable[Tensor]) -> Tensor:
    r"""Squared distances zeta between the gradients of clients, (N, N).

    .. math:: \zeta_{ij} = \lVert g_i - g_j \rVert^2 = |g_i|^2 + |g_j|^2 - 2 g_i^\top g_j

    The result is symmetric, has a zero diagonal and the dtype of the gradients (at least float32). Gradients are
    centred first: what they have in common would swallow the digits of their differences. Coordinates are multiplied
    chunk by chunk. Relabelling the clients relabels the distances, bit for bit, on any processor: the gradients alone
    decide the order of the sums, and equal gradients share one row of the product.

    Args:
        gradients: (N, d), or chunks (N, d_k) of it one after another, e.g. one per parameter of the model.

    Example:
        >>> pairwise(torch.tensor([[1.0, 0.0], [1.0, 3.0], [4.0, 0.0]]))
        tensor([[ 0.,  9.,  9.],
                [ 9.,  0., 18.],
                [ 9., 18.,  0.]])
    """
    gram = rank = order = None
    dtype = torch.float32
    for chunk in _as_chunks(gradients):
        chunk = _checked(chunk, N=None if gram is None else len(gram))
        if chunk.shape[1] == 0:
            continue
        if gram is None:
            gram = torch.zeros(len(chunk), len(chunk), dtype=torch.float64, device=chunk.device)
            rank = order = torch.zeros(len(chunk), dtype=torch.long, device=chunk.device)
        # Ranks settle once all clients differ. Until then every chunk may split ties, and rows move to new ranks.
        if rank.unique().numel() < len(rank):
            before, rank = rank, _rank(chunk, rank)
            order = rank.argsort(stable=True)
            # Clients that were tied so far have the same past: each starts from the row that they shared.
            gram = gram[before[order][:, None], before[order]]
        dtype = torch.promote_types(dtype, chunk.dtype)
        for x in _centred(chunk, order):
            gram += x @ x.T
        # Checked once a chunk: a sum of squares is finite only if all its terms are.
        if not gram.isfinite().all():
            raise ValueError(_not_finite(chunk))
    if gram is None:
        raise ValueError("there are no gradients to compare")
    square = gram.diagonal()
    # Rounding may leave tiny negative distances, and a diagonal that is not exactly zero.
    zeta = (square[:, None] + square).sub_(gram + gram.T)  # the product need not be symmetric to the last bit
    return zeta.clamp_min_(0).fill_diagonal_(0).to(dtype)[rank[:, None], rank]


class Distances:
    """The squared distances of `pairwise` between very many clients, of which only those asked for are in memory.

    It is read like the matrix (N, N): ``distances[rows]`` are the distances of some clients to all. They are computed
    in blocks of clients whose order the gradients alone decide, so that relabelling the clients relabels the distances
    bit for bit. One copy of the gradients is kept: with many clients, let them send sketches.

    Args:
        gradients: (N, d), or chunks (N, d_k) of it.

    Example:
        >>> Distances(torch.tensor([[1.0, 0.0], [1.0, 3.0], [4.0, 0.0]]))[1:]
        tensor([[ 9.,  0., 18.],
                [ 9., 18.,  0.]], dtype=torch.float64)
    """

    def __init__(self, gradients: Tensor | Iterable[Tensor]):
        chunks = [_checked(chunk, None) for chunk in _as_chunks(gradients)]
        chunks = [_checked(chunk, len(chunks[0])) for chunk in chunks if chunk.shape[-1]]
        if not chunks:
            raise ValueError("there are no gradients to compare")
        if sum(chunk.shape[1] for chunk in chunks) <= _columns(len(chunks[0])):
            chunks = [torch.cat(chunks, 1)]  # one product, which needs no sum in float64
        rank = torch.zeros(len(chunks[0]), dtype=torch.long, device=chunks[0].device)
        for chunk in chunks:
            rank = _rank(chunk, rank)
        order = rank.argsort(stable=True)
        self._rank = rank  # clients with equal gradients have one rank, and read one row
        self._pieces = [piece for chunk in chunks for piece in _centred(chunk, order)]
        self._square = sum(piece.double().square().sum(1) for piece in self._pieces)  # in the order of ranks
        # No product of two gradients is larger than the largest square, so no distance overflows if that does not.
        largest = float(self._square.max())
        if not largest <= min(torch.finfo(piece.dtype).max for piece in self._pieces) / 8:
            infinite = (chunk for chunk in chunks if not chunk.isfinite().all())
            raise ValueError(_not_finite(next(infinite, max(chunks, key=lambda chunk: float(chunk.abs().max())))))
        self.bound = 4.01 * largest  # no distance is larger: |a - b|^2 <= 2 |a|^2 + 2 |b|^2, and some rounding
        self.shape, self.device = torch.Size((len(rank), len(rank))), rank.device
        self._largest: float | None = None
        self._asked: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """(rows, N) the distances of some clients to all, in float64."""
        wanted = self._rank[rows if isinstance(rows, slice) else borders.order("rows", rows, len(self))]
        # The same clients are asked for again and again while candidates are compared.
        if self._asked is not None and torch.equal(self._asked[0], wanted):
            return self._asked[1].clone()
        out = torch.empty(len(wanted), len(self), dtype=torch.float64, device=self.device)
        for block in (wanted // BLOCK).unique().tolist():
            here = wanted // BLOCK == block
            out[here] = self._block(block)[wanted[here] - block * BLOCK][:, self._rank]
        self._asked = (wanted, out.clone()) if len(wanted) <= BLOCK else None
        return out

    def max(self) -> float:
        """The largest distance."""
        if self._largest is None:
            blocks = range(math.ceil(len(self._square) / BLOCK))
            self._largest = max(float(self._block(block).max()) for block in blocks)
        return self._largest

    def together(self) -> list[Tensor]:
        """All clients, as lists (R,) of those whose rows are computed at once; labels do not decide the order."""
        order = self._rank.argsort(stable=True)
        return [rows for rows in order.split((self._rank // BLOCK).bincount().tolist()) if len(rows)]

    def blocks(self) -> Iterator["Products"]:
        """Yield all rows, each once."""
        columns = self._rank.argsort(stable=True)
        ranks = self._rank[columns]
        tied = not torch.equal(ranks, torch.arange(len(self._square), device=self.device))
        for rows in self.together():
            own = self._rank[rows]
            first = int(own[0]) // BLOCK * BLOCK
            gram = self._products(first)
            if tied:  # clients with equal gradients read one row and one column
                gram = gram[own - first][:, ranks]
            yield Products(rows, columns, gram, own, ranks, self._square)

    def _products(self, first: int) -> Tensor:
        """(BLOCK, N) the products of the gradients of some ranks with all, in the order of ranks."""
        rows = slice(first, first + BLOCK)
        if len(self._pieces) == 1:
            return self._pieces[0][rows] @ self._pieces[0].T
        return sum((piece[rows] @ piece.T).double() for piece in self._pieces)

    def _block(self, block: int) -> Tensor:
        """(BLOCK, N) the distances of the clients of some ranks, in the order of ranks."""
        ranks = slice(block * BLOCK, (block + 1) * BLOCK)
        zeta = (self._square[ranks, None] + self._square).sub_(self._products(ranks.start).double(), alpha=2)
        zeta.clamp_min_(0).diagonal(ranks.start).zero_()
        return zeta


@dataclass(frozen=True)
class Products:
    """The products of the gradients of some clients with those of all, from which any distance can be read.

    Attributes:
        rows: (R,) the clients.
        columns: (N,) all clients.
        gram: (R, N) the products.
        own: (R,) the ranks of the rows.
        ranks: (N,) those of the columns.
        square: (N,) the squared length of the gradient of each rank.
    """

    rows: Tensor
    columns: Tensor
    gram: Tensor
    own: Tensor
    ranks: Tensor
    square: Tensor

    def at(self, row: Tensor, column: Tensor) -> Tensor:
        """(K,) the distances at K positions, equal to the bit to those in `Distances`."""
        one, other = self.own[row], self.ranks[column]
        zeta = (self.square[one] + self.square[other]).sub_(self.gram[row, column].double(), alpha=2)
        return zeta.clamp_min_(0).masked_fill_(one == other, 0.0)

    def near(self, rows: Tensor, limit: Tensor, allowance: Tensor) -> tuple[Tensor, Tensor]:
        """Where zeta_ij <= limit_i + allowance_j, and perhaps some places more: (K,) in ``rows`` and in the columns.

        Args:
            rows: (M,) positions of the rows that are wanted.
            limit: (M,) for these rows.
            allowance: (N,) for the columns.
        """
        gram = self.gram if len(rows) == len(self.gram) else self.gram[rows]
        # |a|^2 + |b|^2 - 2ab <= limit + allowance, in the precision of the products: this is most of the work.
        eps = torch.finfo(gram.dtype).eps
        ground = (self.square[self.ranks] - allowance) / 2
        least = (self.square[self.own[rows]] - limit) / 2
        least -= eps * (least.abs() + 8 * (ground.abs().max() + self.square.max()))
        return (gram - ground.to(gram.dtype) >= least.to(gram.dtype)[:, None]).nonzero(as_tuple=True)


def reordered(zeta: "Tensor | Distances", order: Tensor) -> "Tensor | Distances":
    """Distances with the clients in another order: row k and column k belong to client ``order[k]``."""
    if not isinstance(zeta, Distances):
        borders.dense("zeta", borders.square("zeta", zeta))
    borders.order("order", order, len(zeta))
    if isinstance(zeta, Tensor):
        return zeta[order][:, order]
    other = copy.copy(zeta)
    other._rank, other._asked = zeta._rank[order], None
    other.shape = torch.Size((len(order), len(order)))
    return other


def _centred(chunk: Tensor, order: Tensor) -> Iterator[Tensor]:
    """Yield pieces (N, columns) of a chunk, sorted, minus their mean: what gradients share would swallow digits."""
    for x in chunk.split(_columns(len(chunk)), dim=1):
        x = x.to(torch.promote_types(x.dtype, torch.float32))[order]
        yield x.sub_(x.mean(0))  # in place: x is a copy, made by the indexing


def _columns(N: int) -> int:
    """How many coordinates of N clients are multiplied at once."""
    return max(1, min(COLUMNS, ENTRIES // N))


def distances(gradients: Iterable[Tensor], N: int) -> "Tensor | Distances":
    """The squared distances between the gradients of N clients: as a matrix, or row by row if there are very many."""
    zeta = pairwise(gradients).double() if borders.count("N", N, 1) <= DENSE_UP_TO else Distances(gradients)
    if len(zeta) != N:
        raise ValueError(f"there are gradients of {len(zeta)} clients and N is {N}; give one for each client")
    return zeta


def _as_chunks(gradients: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    if not isinstance(gradients, Tensor | Iterable):
        raise TypeError(f"gradients is a {type(gradients).__name__}; it must be a tensor (N, d), or chunks of it")
    return [gradients] if isinstance(gradients, Tensor) else gradients


def _checked(chunk: Tensor, N: int | None) -> Tensor:
    if borders.dense("a chunk of gradients", chunk).dim() != 2 or len(chunk) == 0 or N not in (None, len(chunk)):
        clients = f"{N} clients" if N else "clients"
        raise ValueError(f"gradients of shape {tuple(chunk.shape)}; every chunk must be ({clients}, coordinates)")
    return chunk.detach()


def _rank(gradients: Tensor, before: Tensor) -> Tensor:
    """(N,) how many clients come before each one, sorted by `before` and then by the bytes of their gradients.

    Sums in this order round alike however the clients are labelled. Clients with one rank have had equal gradients so
    far. They all read the row of the first of them, because on some processors the rounding of a row depends on where
    it lies in the product.
    """
    width = COLUMNS
    while True:  # usually the first coordinates already tell all clients apart
        rows = [row.view(torch.uint8).cpu().numpy().tobytes() for row in gradients[:, :width].contiguous()]
        keys = list(zip(before.tolist(), rows))
        if len(set(keys)) == len(keys) or width >= gradients.shape[1]:
            break
        width *= 8
    first: dict[tuple[int, bytes], int] = {}
    for place, key in enumerate(sorted(keys)):
        first.setdefault(key, place)
    return torch.tensor([first[key] for key in keys], device=gradients.device)


def _not_finite(gradients: Tensor) -> str:
    bad = (~gradients.isfinite().all(1)).nonzero().flatten().tolist()
    if bad:
        return f"the gradient of client {bad[0]} is not finite" + (f" (nor are {len(bad) - 1} others)" * (len(bad) > 1))
    return f"gradients of up to {float(gradients.abs().max()):.1e} are too large to compare in {gradients.dtype}"


def sketch(gradient: Tensor, size: int = 256, seed: int = 0) -> Tensor:
    r"""A count-sketch of a gradient: every coordinate is added, with a random sign, to a random one of ``size`` sums.

    A sketch is linear. Averaged over seeds, the squared distance of two sketches is that of the gradients; its relative
    error is about :math:`\sqrt{2 / \mathrm{size}}`. Only sketches of the same size and seed can be compared.

    Args:
        gradient: (..., d).
        size: how many numbers are sent.
        seed: decides signs and places; it must be the same for all clients.

    Example:
        >>> sketch(torch.tensor([1.0, 2.0, 4.0]), size=4)
        tensor([-4., -1.,  0., -2.])
    """
    borders.count("size", size, 1, 2**30)
    borders.count("seed", seed, 0, LARGEST_SEED)
    if borders.dense("gradient", gradient).dim() == 0 or not gradient.is_floating_point():
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype}; it must be (..., d) floats"
        )
    d = gradient.shape[-1]
    if d == 0:
        raise ValueError(f"a gradient of shape {tuple(gradient.shape)} has no coordinates; there is nothing to sketch")
    # Summed in float64: thousands of coordinates fall into one sum, and clients must agree on it.
    place, sign = (x.to(gradient.device) for x in _places(d, size, seed))
    rows = gradient.detach().reshape(-1, d)
    sums = [place.bincount(weights=row.double() * sign, minlength=size) for row in rows]
    out = torch.stack(sums) if sums else rows.new_zeros(0, size)
    return out.to(gradient.dtype).reshape(*gradient.shape[:-1], size)


@functools.lru_cache(maxsize=2)
def _places(d: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The place and the sign of d coordinates in a sketch; cached, because all clients of a round share them."""
    generator = generator_for(seed, "sketch")
    place = torch.randint(size, (d,), generator=generator)
    return place, torch.randint(2, (d,), generator=generator).mul_(2).sub_(1)


def noise(micro_gradients: Tensor, sizes: Tensor | None = None) -> float:
    r"""The variance q of a client's mean gradient, estimated from the gradients of m micro-batches.

    .. math:: q = \frac{1}{m - 1} \sum_b p_b \lVert g_b - g \rVert^2, \quad g = \sum_b p_b g_b,
              \quad p_b = s_b \Big/ \sum_c s_c

    With micro-batches of one size this is :math:`\sum_b |g_b - g|^2 / (m (m - 1))`. The variance of g_b falls as
    1 / s_b, so the estimate is unbiased for any sizes s_b. One micro-batch has no spread: the result is nan, which
    `fill_noise` replaces.

    Args:
        micro_gradients: (m, d) gradient of the mean loss of each micro-batch.
        sizes: (m,) samples in each micro-batch; equal if left out.

    Example:
        >>> noise(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
        1.0
        >>> noise(torch.tensor([[0.0], [4.0]]), sizes=torch.tensor([3, 1]))
        3.0
    """
    m = len(micro_gradients) if borders.dense("micro_gradients", micro_gradients).dim() else 0
    if micro_gradients.dim() != 2 or m == 0:
        raise ValueError(
            f"micro-gradients of shape {tuple(micro_gradients.shape)}; the noise needs (batches, coordinates)"
        )
    if m == 1:
        return math.nan
    s = torch.ones(m) if sizes is None else borders.numbers("sizes", sizes)
    if s.shape != (m,) or not ((s > 0) & s.isfinite()).all():
        raise ValueError(f"micro-batches of sizes {s.tolist()}; each of the {m} must hold a sample")
    q = mean_and_noise(micro_gradients.detach(), s.tolist())[1]
    if not math.isfinite(q):  # nan would say that it is unknown
        raise ValueError(f"the noise of these micro-gradients is {q}; their numbers must be finite, and not as large")
    return q


def mean_and_noise(gradients: Iterable[Tensor], sizes: Sequence[float]) -> tuple[Tensor, float]:
    """The mean gradient g (d,) of micro-batches and its variance q (see `noise`), from one gradient at a time.

    Two vectors are in memory at a time, instead of one for each micro-batch: a device may have no room for more. This
    is West's weighted mean. Of gradients that are not finite neither are the mean and q, and q is nan of one gradient.

    Args:
        gradients: (d,) the gradient of each micro-batch.
        sizes: samples in each micro-batch.

    Example:
        >>> mean_and_noise([torch.tensor([0.0]), torch.tensor([4.0])], [3, 1])
        (tensor([1.]), 3.0)
    """
    scalar = isinstance(gradients, Tensor) and gradients.dim() == 0
    if scalar or not isinstance(gradients, Iterable) or not isinstance(sizes, Sequence):
        raise TypeError(f"gradients is {shown(gradients)} and sizes {shown(sizes)}; give a list of each")
    samples = borders.numbers("sizes", sizes)
    if samples.dim() != 1 or len(samples) == 0 or not ((samples > 0) & samples.isfinite()).all():
        raise ValueError(f"sizes is {shown(sizes)}; it must hold the samples, above 0, of each micro-batch")
    mean, total, spread = None, 0.0, 0.0
    # Not a strict zip: gradients may come one by one, and its error would say nothing of micro-batches.
    for gradient, size in itertools.zip_longest(gradients, samples.tolist()):
        if gradient is None or size is None:
            raise ValueError(
                f"{len(sizes)} sizes for {'fewer' if gradient is None else 'more'} gradients; give one each"
            )
        if borders.dense("a gradient", gradient).dim() != 1 or not gradient.is_floating_point():
            shape = tuple(gradient.shape)
            raise ValueError(f"a gradient of shape {shape} and {gradient.dtype}; it must be a vector of floats")
        if mean is not None and gradient.shape != mean.shape:
            raise ValueError(f"a gradient of {len(gradient)} numbers after one of {len(mean)}; all must have as many")
        total += size
        if mean is None:
            mean = gradient.clone()
            continue
        away = gradient - mean
        # The mean moves by the share of the newcomer. (1 - share) turns its distance from the old mean into its part
        # of the sum of squares about the new one.
        mean.add_(away, alpha=size / total)
        spread += size * (1 - size / total) * float(away.dot(away))
    return mean, math.nan if len(sizes) == 1 else spread / total / (len(sizes) - 1)


def fill_noise(q: Tensor, n: Tensor) -> Tensor:
    r"""The variances q, with unknown ones (nan) filled in from the other clients.

    A client with one sample has no spread. It gets the mean variance of one sample, divided by its own n_i.

    .. math:: q_i = \frac{1}{n_i} \operatorname{mean}_j (n_j q_j)

    Args:
        q: (N,) variance of each client's mean gradient, or nan.
        n: (N,) samples held by each client.

    Example:
        >>> fill_noise(torch.tensor([2.0, float("nan")]), torch.tensor([8, 1]))
        tensor([ 2., 16.])
    """
    if borders.dense("q", q).dim() != 1 or len(q) == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; give the noise of each client")
    wrong = (q < 0) | q.isinf()
    if wrong.any():
        j = int(wrong.nonzero()[0])
        raise ValueError(f"q[{j}] is {float(q[j])}; a variance is zero or more, or nan where it is unknown")
    n = borders.numbers("n", n, q.device)
    if n.shape != q.shape or not (n.isfinite() & (n > 0)).all():
        raise ValueError(
            f"q of shape {tuple(q.shape)} and n of shape {tuple(n.shape)}; give the noise and the samples, above 0, of "
            "each client"
        )
    unknown = q.isnan()
    if not unknown.any():
        return q
    if unknown.all():
        raise ValueError(
            "no client has two samples, so the noise of their gradients is unknown; give regularization as a number"
        )
    known = (n * q)[~unknown].tolist()
    # fsum rounds once, so the order of clients cannot matter; where a plain sum overflows, it raises an error.
    one_sample = math.fsum(known) / len(known) if math.isfinite(sum(known)) else math.inf
    filled = torch.where(unknown, one_sample / n, q.double()).to(q.dtype)
    if not filled.isfinite().all():
        j = int((~filled.isfinite()).nonzero()[0])
        raise ValueError(
            f"the noise of client {j} with n[{j}] = {float(n[j])} is too large for {q.dtype}; n holds the samples of "
            "each client, 1 or more, and gradients may be scaled down"
        )
    return filled
