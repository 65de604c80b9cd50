"""The rivals typed out with loops for softmax regression, in numpy; shares nothing with the package.

A model is an array (classes, features + 1), the last column its bias; a shard is (inputs, labels). ``draw(t, i)`` gives
the batches of round t at client i, as lists of sample numbers. All return the models that clients deploy.
"""

import math

import numpy as np


def loss(model, inputs, labels):
    """The mean cross-entropy."""
    total = 0.0
    for x, label in zip(inputs, labels, strict=True):
        scores = [sum(w * a for w, a in zip(row[:-1], x, strict=True)) + row[-1] for row in model]
        total += math.log(sum(math.exp(s) for s in scores)) - scores[label]
    return total / len(labels)


def gradient(model, inputs, labels):
    """Its gradient, sample by sample: (p - e_label) x^T."""
    out = np.zeros_like(model)
    for x, label in zip(inputs, labels, strict=True):
        scores = [sum(w * a for w, a in zip(row[:-1], x, strict=True)) + row[-1] for row in model]
        total = sum(math.exp(s) for s in scores)
        for c, score in enumerate(scores):
            error = math.exp(score) / total - (c == label)
            for k, a in enumerate([*x, 1.0]):
                out[c, k] += error * a / len(labels)
    return out


def on(shard, batch):
    """The samples of a batch."""
    inputs, labels = shard
    return [inputs[s] for s in batch], [labels[s] for s in batch]


def train(model, shard, batches, lr):
    """Plain SGD."""
    for batch in batches:
        model = model - lr * gradient(model, *on(shard, batch))
    return model


def mean(models):
    """The plain average."""
    return sum(models) / len(models)


def local(shards, start, draw, *, rounds, lr):
    v = [start for _ in shards]
    for t in range(rounds):
        for i, shard in enumerate(shards):
            v[i] = train(v[i], shard, draw(t, i), lr)
    return v


def fedavg(shards, start, draw, *, rounds, lr):
    w = start
    for t in range(rounds):
        w = mean([train(w, shard, draw(t, i), lr) for i, shard in enumerate(shards)])
    return [w for _ in shards]


def fedavg_ft(shards, start, draw, *, rounds, lr, tune, tune_lr):
    models = fedavg(shards, start, draw, rounds=rounds, lr=lr)
    return [train(w, shard, tune(i), tune_lr) for i, (w, shard) in enumerate(zip(models, shards, strict=True))]


def perfedavg(shards, start, draw, *, rounds, lr, inner_lr, delta, tune, tune_lr):
    """``delta`` None: first-order, batches come in pairs; else Hessian-free, and they come in threes."""
    w = start
    for t in range(rounds):
        local_models = []
        for i, shard in enumerate(shards):
            model = w
            batches = list(draw(t, i))
            while batches:
                adapted = model - inner_lr * gradient(model, *on(shard, batches.pop(0)))
                step = gradient(adapted, *on(shard, batches.pop(0)))
                if delta is not None:
                    third = on(shard, batches.pop(0))
                    ahead = gradient(model + delta * step, *third)
                    behind = gradient(model - delta * step, *third)
                    step = step - inner_lr * (ahead - behind) / (2 * delta)
                model = model - lr * step
            local_models.append(model)
        w = mean(local_models)
    return [train(w, shard, tune(i), tune_lr) for i, shard in enumerate(shards)]


def pfedme(shards, start, draw, *, rounds, lr, lam, inner_steps, inner_lr, beta):
    w = start
    for t in range(rounds):
        local_models, personal = [], []
        for i, shard in enumerate(shards):
            model = theta = w
            for batch in draw(t, i):
                for _ in range(inner_steps):
                    theta = theta - inner_lr * (gradient(theta, *on(shard, batch)) + lam * (theta - model))
                model = model - lr * lam * (model - theta)
            local_models.append(model)
            personal.append(theta)
        w = (1 - beta) * w + beta * mean(local_models)
    return personal


def apfl(shards, start, draw, *, rounds, lr, mix, adaptive):
    w, own, alpha = start, [start for _ in shards], [mix for _ in shards]
    for t in range(rounds):
        local_models = []
        for i, shard in enumerate(shards):
            model = w
            for k, batch in enumerate(draw(t, i)):
                at = on(shard, batch)
                slope = gradient(alpha[i] * own[i] + (1 - alpha[i]) * model, *at)
                new_model = model - lr * gradient(model, *at)
                new_own = own[i] - lr * alpha[i] * slope
                if adaptive and k == 0:
                    alpha[i] = min(1.0, max(0.0, alpha[i] - lr * float(((own[i] - model) * slope).sum())))
                model, own[i] = new_model, new_own
            local_models.append(model)
        w = mean(local_models)
    return [a * u + (1 - a) * w for a, u in zip(alpha, own, strict=True)]


def ifca(shards, starts, draw, *, rounds, lr):
    models = list(starts)

    def choices():
        return [min(range(len(models)), key=lambda c: loss(models[c], *shard)) for shard in shards]

    for t in range(rounds):
        chosen = choices()
        trained = [train(models[chosen[i]], shard, draw(t, i), lr) for i, shard in enumerate(shards)]
        for c in range(len(models)):
            members = [trained[i] for i in range(len(shards)) if chosen[i] == c]
            if members:
                models[c] = mean(members)
    return [models[c] for c in choices()]


def ditto(shards, start, draw, *, rounds, lr, lam):
    w, own = start, [start for _ in shards]
    for t in range(rounds):
        local_models = []
        for i, shard in enumerate(shards):
            local_models.append(train(w, shard, draw(t, i), lr))
            for batch in draw(t, i):
                own[i] = own[i] - lr * (gradient(own[i], *on(shard, batch)) + lam * (own[i] - w))
        w = mean(local_models)
    return own


def fedrep(shards, start, draw, *, rounds, lr, head_steps):
    """Of a model that is nothing but a classifier: each client trains it alone, in the first steps of a round."""
    own = [start for _ in shards]
    for t in range(rounds):
        own = [train(own[i], shard, draw(t, i)[:head_steps], lr) for i, shard in enumerate(shards)]
    return own
