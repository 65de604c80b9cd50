"""Who hosts which model in which round of an epoch (Algorithm 2 of the paper, Shuffling Local SGD)."""

import torch
from torch import Tensor

from hetperm.mixing import borders

MOST = 100_000  # clients of a ring, which has N^2 entries
Round = list[tuple[int, int]]


def ring(N: int, generator: torch.Generator) -> Tensor:
    r"""(N, N) the paper's visits of an epoch: the host of model i in round j.

    .. math:: \mathrm{ring}[i, j] = \sigma((i + j) \bmod N)

    Every row and every column is a permutation of the clients: each model visits each host once, and in each round
    every host has one model.

    Args:
        N: the number of clients.
        generator: draws the permutation sigma.

    Example:
        >>> ring(3, torch.Generator().manual_seed(0))
        tensor([[2, 0, 1],
                [0, 1, 2],
                [1, 2, 0]])
    """
    borders.count("N", N, 1, MOST)
    _check_generator(generator)
    sigma = torch.randperm(N, generator=generator)
    return sigma[(torch.arange(N)[:, None] + torch.arange(N)) % N]


def rounds_of(ring: Tensor) -> list[Round]:
    """The rounds of a ring as lists of (model i, host j), in the form that `schedule` returns.

    Args:
        ring: (N, N) host of model i in each round.

    Example:
        >>> rounds_of(torch.tensor([[1, 0], [0, 1]]))
        [[(0, 1), (1, 0)], [(0, 0), (1, 1)]]
    """
    hosts = borders.dense("ring", borders.square("ring", ring))
    if hosts.is_floating_point() or int(hosts.min()) < 0 or int(hosts.max()) >= len(hosts):
        raise ValueError(f"a ring of {hosts.dtype}; it must hold the number of a host, 0 to N - 1, for each round")
    everybody = torch.arange(len(hosts), device=hosts.device)
    if (hosts.sort(0).values != everybody[:, None]).any() or (hosts.sort(1).values != everybody).any():
        raise ValueError(
            "a ring with a host twice in a row or a column; in each round a host has one model, and each model visits "
            "each host once"
        )
    return [list(enumerate(hosts)) for hosts in hosts.T.tolist()]


def schedule(alpha: Tensor, generator: torch.Generator) -> list[Round]:
    """Rounds of visits (model i, host j) that hold each non-zero pair of ``alpha`` exactly once.

    In a round no model and no host appears twice. The number of rounds is the largest number of non-zero entries in a
    row or a column, and no schedule has fewer. This is an edge colouring of the bipartite graph of models and hosts,
    which exists by Koenig's theorem. A full alpha gives N rounds of N visits, like the ring.

    Args:
        alpha: (N, N) mixing weights, rows on the simplex, dense or sparse.
        generator: shuffles the order in which visits are placed, and the rounds.

    Example:
        >>> alpha = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
        >>> schedule(alpha, torch.Generator().manual_seed(0))
        [[(0, 1), (1, 0)], [(0, 0), (1, 1), (2, 2)]]
    """
    _check_generator(generator)
    i, j = _visits(alpha)
    N = len(alpha)
    num_rounds = int(max(i.bincount().max(), j.bincount().max()))
    # The colouring is greedy: without a shuffle, clients with low numbers would meet in the same rounds every epoch.
    shuffled = torch.randperm(len(i), generator=generator)
    hosts = _colour(i[shuffled].tolist(), j[shuffled].tolist(), N, num_rounds)
    order = torch.randperm(num_rounds, generator=generator).tolist()
    return [sorted(hosts[c].items()) for c in order]


def _visits(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The models and the hosts of the non-zero entries, row by row."""
    if borders.tensor("alpha", alpha).dim() != 2 or alpha.shape[0] != alpha.shape[1]:
        raise ValueError(f"alpha has shape {tuple(alpha.shape)}; a schedule needs one row and one column per client")
    alpha = alpha.detach().cpu()
    if alpha.is_sparse:
        alpha = alpha.coalesce()
        (i, j), values = alpha.indices(), alpha.values()
    else:
        i, j = alpha.nonzero(as_tuple=True)
        values = alpha[i, j]
    wrong = ~(values.isfinite() & (values >= 0))
    if wrong.any():
        k = int(wrong.nonzero()[0])
        raise ValueError(f"alpha[{int(i[k])}, {int(j[k])}] is {float(values[k])}; rows of alpha lie on the simplex")
    i, j = i[values > 0], j[values > 0]
    degree = i.bincount(minlength=len(alpha))
    if len(alpha) == 0 or degree.min() == 0:
        row = int(degree.argmin()) if len(alpha) else 0
        raise ValueError(f"row {row} of alpha is all zero or missing; rows of alpha lie on the simplex")
    return i, j


def _check_generator(generator: torch.Generator) -> None:
    if not isinstance(generator, torch.Generator):
        kind = type(generator).__name__
        raise TypeError(f"the generator is a {kind}; give a torch.Generator, such as torch.Generator().manual_seed(0)")


def _colour(models: list[int], hosts: list[int], N: int, num_rounds: int) -> list[dict[int, int]]:
    """``host[c][i]``: the host of model i in round c. Visits are placed one by one, in the given order.

    A visit goes into the first round in which both its model and its host are free. If there is none, take a round a
    in which the model is free and a round b in which the host is free. Start with the visit that the host has in a.
    Move visits from a to b and, where that collides, from b to a. This path must end, and then both are free in a. It
    cannot come back to the model, because it would have to arrive by a visit in a.
    """
    # host[c][i], model[c][j]: who meets whom in round c. Tables of all clients would hold N^2 entries where one host is
    # visited by everybody; these hold an entry for each visit.
    host: list[dict[int, int]] = [{} for _ in range(num_rounds)]
    model: list[dict[int, int]] = [{} for _ in range(num_rounds)]
    # Sets of rounds are bits of one integer, so that a round free for both is found by a single `and`.
    free_model = [(1 << num_rounds) - 1] * N  # bit c: free in round c
    free_host = list(free_model)
    for i, j in zip(models, hosts):
        common = free_model[i] & free_host[j]
        if common:
            bit = common & -common  # the lowest bit that is set: the first round in which both are free
            c = bit.bit_length() - 1
            host[c][i], model[c][j] = j, i
            free_model[i] ^= bit
            free_host[j] ^= bit
            continue
        # No round is free for both: swap rounds a and b along the path that starts at the host (a Kempe chain).
        # Each of the two has a free round, because neither has more visits than there are rounds.
        bit_a, bit_b = free_model[i] & -free_model[i], free_host[j] & -free_host[j]
        a, b = bit_a.bit_length() - 1, bit_b.bit_length() - 1
        host_a, host_b, model_a, model_b = host[a], host[b], model[a], model[b]
        free_model[i] ^= bit_a
        free_host[j] ^= bit_b
        moved, at = model_a[j], j
        host_a[i], model_a[j] = j, i
        while True:  # move the visit of model `moved` at host `at` from round a to round b, where the host is free
            pushed = host_b.get(moved)
            host_b[moved], model_b[at] = at, moved
            if pushed is None:
                del host_a[moved]
                free_model[moved] ^= bit_a | bit_b
                break
            # The visit that this model had in round b makes room and moves to round a.
            host_a[moved] = pushed
            after = model_a.get(pushed)
            model_a[pushed] = moved
            if after is None:
                del model_b[pushed]
                free_host[pushed] ^= bit_a | bit_b
                break
            moved, at = after, pushed
    return host
