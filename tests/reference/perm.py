"""PERM typed out for softmax regression, in float64, with loops: Algorithms A1, 2 and 3 of the paper.

Shares nothing with the package: batches, permutations and participation are handed in as plain lists. A model is a
(classes, features) tensor without intercept.
"""

import math

import torch


def gradient(model, x, y):
    """Gradient of the mean cross entropy, sample by sample."""
    total = torch.zeros_like(model)
    for features, label in zip(x, y, strict=True):
        scores = [float(row @ features) for row in model]
        largest = max(scores)
        exponentials = [math.exp(score - largest) for score in scores]
        for c in range(len(model)):
            probability = exponentials[c] / sum(exponentials)
            total[c] += (probability - (1.0 if c == int(label) else 0.0)) * features
    return total / len(x)


def visit(model, shard, batches, lr):
    """K steps of SGD at one host."""
    x, y = shard
    for batch in batches:
        model = model - lr * gradient(model, x[batch], y[batch])
    return model


def local_sgd(w, shards, batches, lr):
    """One round of local SGD: every client starts from w; the server averages plainly."""
    total = torch.zeros_like(w)
    for shard, own in zip(shards, batches, strict=True):
        total += visit(w, shard, own, lr)
    return total / len(shards)


def full_gradients(w, shards):
    return [gradient(w, x, y) for x, y in shards]


def discrepancies(gradients):
    """zeta[i][j] = || g_i - g_j ||^2."""
    return [[float(((a - b) ** 2).sum()) for b in gradients] for a in gradients]


def noise(w, shard, pieces):
    """Variance of the mean gradient from micro-batches of any sizes."""
    x, y = shard
    n = len(x)
    gradients = [gradient(w, x[piece], y[piece]) for piece in pieces]
    shares = [len(piece) / n for piece in pieces]
    mean = sum(share * g for share, g in zip(shares, gradients, strict=True))
    squares = [float(((g - mean) ** 2).sum()) for g in gradients]
    return sum(share * square for share, square in zip(shares, squares, strict=True)) / (len(pieces) - 1)


def mixing(zeta, q, n, share):
    """Noise-aware weights: alpha_ij proportional to n_j (t_i - D_ij)+; whoever is below the level t_i raises it."""
    N, alpha = len(n), torch.zeros(len(n), len(n), dtype=torch.float64)
    typical = sum(a * b for a, b in zip(n, q, strict=True)) / sum(n)
    for i in range(N):
        cost = [0.0 if i == j else max(0.0, zeta[i][j] - q[i] - q[j]) for j in range(N)]
        room, level, before = share * (q[i] + typical), 0.0, None
        while level != before:
            before, inside = level, [j for j in range(N) if cost[j] < level] or [i]
            level = sum(n[j] * cost[j] for j in inside) / sum(n[j] for j in inside) + room
        total = sum(n[j] * max(0.0, level - cost[j]) for j in range(N))
        for j in range(N):
            alpha[i, j] = n[j] * max(0.0, level - cost[j]) / total
    return alpha


def shuffled_epoch(v, alpha, shards, rounds, batches, eta, rule):
    """Algorithm 2: v_i visits the hosts of the epoch; a visit of weight zero changes nothing."""
    N = len(v)
    v = list(v)
    for visits in rounds:
        for i, j in visits:
            weight = float(alpha[i, j])
            if weight == 0:
                continue
            scale = weight * N if rule == "paper" else weight / float(alpha[i].max())
            v[i] = visit(v[i], shards[j], batches[i, j], eta * scale)
    return v


def global_step(w, shards, batches, gamma):
    """Algorithm 3: one step on the average of the clients' large mini-batch gradients."""
    total = torch.zeros_like(w)
    for (x, y), batch in zip(shards, batches, strict=True):
        total += gradient(w, x[batch], y[batch])
    return w - gamma * total / len(shards)


def final_step(v, alpha, shards, step):
    """The output of Algorithms 2 and 3: one full-gradient step on the mixture."""
    out = []
    for i, model in enumerate(v):
        total = torch.zeros_like(model)
        for j, (x, y) in enumerate(shards):
            total += float(alpha[i, j]) * gradient(model, x, y)
        out.append(model - step * total)
    return out
