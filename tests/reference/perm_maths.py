"""The mathematics of PERM typed out with lists and loops, in float64; shares nothing with the package.

A vector is a list of floats, a matrix a list of rows.
"""

import itertools
import math

import numpy as np


def project(x):
    """Onto the simplex: lower all coordinates by the same amount, drop the negative ones, again until none is."""
    active = list(range(len(x)))
    while True:
        tau = (math.fsum(x[j] for j in active) - 1) / len(active)
        left = [j for j in active if x[j] > tau]
        if left == active:
            return [max(x[j] - tau, 0.0) if j in active else 0.0 for j in range(len(x))]
        active = left


def gradient(alpha, c, n, lam):
    return [c[j] + 2 * lam * alpha[j] / n[j] for j in range(len(c))]


def objective(alpha, c, n, lam):
    return math.fsum(alpha[j] * c[j] + lam * alpha[j] ** 2 / n[j] for j in range(len(c)))


def descend(c, n, lam, steps):
    """Projected gradient descent with step 1 / L from uniform weights."""
    alpha = [1 / len(c)] * len(c)
    step = min(n) / (2 * lam)
    for _ in range(steps):
        slope = gradient(alpha, c, n, lam)
        alpha = project([alpha[j] - step * slope[j] for j in range(len(c))])
    return alpha


def solve(c, n, lam):
    """alpha_j = n_j (tau - c_j)+ / 2 lam, the level tau found by halving an interval."""
    low, high = min(c), max(c) + 2 * lam / min(n)
    for _ in range(200):
        tau = (low + high) / 2
        if math.fsum(n[j] * max(tau - c[j], 0.0) for j in range(len(c))) < 2 * lam:
            low = tau
        else:
            high = tau
    return [n[j] * max(high - c[j], 0.0) / (2 * lam) for j in range(len(c))]


def kkt_violation(alpha, c, n, lam):
    """How far a point is from a minimiser: feasible, one slope wherever there is weight, no smaller slope elsewhere."""
    slope = gradient(alpha, c, n, lam)
    wet = [slope[j] for j in range(len(c)) if alpha[j] > 0]
    dry = [slope[j] for j in range(len(c)) if alpha[j] == 0]
    out = [abs(math.fsum(alpha) - 1), max(wet) - min(wet), -min(alpha)]
    return max(out + [max(wet) - s for s in dry])


def pairwise(g):
    """Squared distances of the rows."""
    return [[math.fsum((a - b) ** 2 for a, b in zip(g_i, g_j, strict=True)) for g_j in g] for g_i in g]


def noise(micro_gradients):
    """Variance of the mean of m micro-gradients, all from equally many samples."""
    m, d = len(micro_gradients), len(micro_gradients[0])
    g = [math.fsum(row[k] for row in micro_gradients) / m for k in range(d)]
    return math.fsum((row[k] - g[k]) ** 2 for row in micro_gradients for k in range(d)) / (m * (m - 1))


def debias(zeta, q):
    N = len(q)
    return [[0.0 if i == j else max(0.0, zeta[i][j] - q[i] - q[j]) for j in range(N)] for i in range(N)]


def own_noise(zeta, q, n):
    """What client i holds differences against: the mean of its own noise and a typical one, at least a millionth."""
    typical = math.fsum(a * b for a, b in zip(n, q, strict=True)) / math.fsum(n)
    least = 1e-6 * max(max(row) for row in zeta)
    return [max((q_i + typical) / 2, least) or 1.0 for q_i in q]


def denoised(zeta, q, n):
    """Distances between points that are made of those directions alone which are larger than chance makes them."""
    N = len(q)
    if max(q) == 0:
        return zeta
    noise = own_noise(zeta, q, n)
    D = [[0.0 if i == j else zeta[i][j] - q[i] - q[j] for j in range(N)] for i in range(N)]
    weight = [1 / noise[i] / math.fsum(1 / s for s in noise) for i in range(N)]
    # About the weighted mean m of the points: 2 <x_i - m, x_j - m> = |x_i - m|^2 + |x_j - m|^2 - |x_i - x_j|^2.
    spread = math.fsum(weight[a] * weight[b] * D[a][b] for a in range(N) for b in range(N)) / 2
    away = [math.fsum(weight[a] * D[i][a] for a in range(N)) - spread for i in range(N)]
    H = [[(away[i] + away[j] - D[i][j]) / 2 / math.sqrt(noise[i] * noise[j]) for j in range(N)] for i in range(N)]
    values, vectors = np.linalg.eigh(np.array(H))
    edge = 3 * max(0.0, -values[0])
    x = [[math.sqrt(noise[i] * values[k]) * vectors[i, k] for k in range(N) if values[k] > edge] for i in range(N)]
    away = pairwise(x)
    return [[0.0 if i == j else away[i][j] + q[i] + q[j] for j in range(N)] for i in range(N)]


def level_of(inside, cost, n, room):
    """The level of a set of clients: the mean of their costs by samples, and what noise explains above it."""
    return math.fsum(n[j] * cost[j] for j in inside) / math.fsum(n[j] for j in inside) + room


def partners(cost, n, room):
    """The partners of a client: beginning with the cheapest, whoever is below the level joins, until nobody does."""
    inside = [j for j in range(len(n)) if cost[j] == min(cost)]
    while True:
        below = [j for j in range(len(n)) if cost[j] < level_of(inside, cost, n, room)]
        if below == inside:
            return inside
        inside = below


def consistent_sets(cost, n, room):
    """Every set of clients that is the set of those below its own level, by trying all."""
    sets = []
    for size in range(1, len(n) + 1):
        for inside in itertools.combinations(range(len(n)), size):
            height = level_of(inside, cost, n, room)
            if all((cost[j] < height) == (j in inside) for j in range(len(n))):
                sets.append(set(inside))
    return sets


def noise_row(cost, n, room):
    """A row of alpha by the rule "noise"."""
    inside = partners(cost, n, room)
    height = level_of(inside, cost, n, room)
    row = [n[j] * (height - cost[j]) if j in inside else 0.0 for j in range(len(n))]
    return [a / math.fsum(row) for a in row]


def noise_lam(zeta, q, n, share, cost=None):
    """(N,) the lam with which each row of the rule "noise" is the minimiser."""
    cost, noise = cost or debias(zeta, q), own_noise(zeta, q, n)
    sets = [partners(row, n, 2 * share * noise_i) for row, noise_i in zip(cost, noise, strict=True)]
    return [share * noise_i * math.fsum(n[j] for j in inside) for noise_i, inside in zip(noise, sets, strict=True)]


def complexity_cost(vc, n, q, vc_weight):
    N = len(q)
    h = [math.sqrt(vc[j] / n[j]) for j in range(N)]
    return [vc_weight * 2 * (sum(q) / N) * h[j] / (sum(h) / N) for j in range(N)]


def weights(zeta, q, n, vc, vc_weight, share):
    """The rule "noise" with the complexity term."""
    extra, noise = complexity_cost(vc, n, q, vc_weight), own_noise(zeta, q, n)
    cost = [[D_ij + e for D_ij, e in zip(row, extra, strict=True)] for row in debias(zeta, q)]
    return [noise_row(row, n, 2 * share * noise_i) for row, noise_i in zip(cost, noise, strict=True)]


def visit_rates(alpha, zeta, q, n, batch_size):
    """By how much the steps of model i shrink: the noise of a mini-batch, over it and the spread of its partners."""
    N, D, rates = len(n), debias(zeta, q), []
    for i in range(N):
        batch = q[i] * n[i] / min(batch_size, n[i])
        spread = sum(alpha[i][j] * alpha[i][k] * D[j][k] for j in range(N) for k in range(N)) / 2
        rates.append(batch / (batch + spread))
    return rates


def level(zeta, q, n):
    N = len(q)
    height = 0.5 * 2 * sum(q) / N
    rows = [[n[j] * max(height - D_ij, 0.0) for j, D_ij in enumerate(row)] for row in debias(zeta, q)]
    return [[a / sum(row) for a in row] for row in rows]


def ring(sigma):
    N = len(sigma)
    return [[sigma[(i + j) % N] for j in range(N)] for i in range(N)]


def schedule_faults(rounds, pairs):
    """What is wrong with a schedule of the given pairs: an empty list if nothing is."""
    faults, seen = [], []
    for k, visits in enumerate(rounds):
        models, hosts = [i for i, _ in visits], [j for _, j in visits]
        if len(set(models)) < len(models):
            faults.append(f"round {k} moves a model twice")
        if len(set(hosts)) < len(hosts):
            faults.append(f"round {k} uses a host twice")
        seen += visits
    if sorted(seen) != sorted(pairs):
        faults.append("the visits are not the pairs, each once")
    row, column = {}, {}
    for i, j in pairs:
        row[i] = row.get(i, 0) + 1
        column[j] = column.get(j, 0) + 1
    if len(rounds) != max(*row.values(), *column.values()):
        faults.append(f"{len(rounds)} rounds")
    return faults
