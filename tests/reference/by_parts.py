"""Rivals that train parts of global models, typed out for a network with two hidden layers.

Shares nothing with the package. Models, parts and shards are those of `reference.hetero`: a model is always of full
size, and what somebody does not hold of it is multiplied by zero. Whatever is drawn is handed in as ``draw``.
"""

import torch
from reference.hetero import covered_mean, distil, first, gradient, loss, moved, slope, visit

HEAD = (4, 5)  # the tensors of the classifier


def _sizes(w):
    return [len(w[1]), len(w[3])]


def _classes(shards):
    return [known for _, _, known in shards]


def ditto(shards, widths, w, draw, *, rounds, lr, prox):
    """(w, what clients deploy)."""
    units = [first(width, _sizes(w)) for width in widths]
    v = [w for _ in shards]
    for t in range(rounds):
        trained = []
        for i, shard in enumerate(shards):
            batches = draw.global_batches(i, t)
            trained.append(visit(w, units[i], shard, batches, lr))
            for batch in batches:
                pull = [
                    g + prox * (a - b) for g, a, b in zip(gradient(v[i], units[i], shard, batch), v[i], w, strict=True)
                ]
                v[i] = moved(v[i], pull, lr)
        w = covered_mean(w, trained, units, _classes(shards))
    return w, v


def fedrep(shards, widths, w, draw, *, rounds, lr, head_steps, head_lr):
    """(w, what clients deploy); ``draw(i, t)`` gives the batches of the classifier and then of the body."""
    units = [first(width, _sizes(w)) for width in widths]
    heads = [[w[k] for k in HEAD] for _ in shards]
    for t in range(rounds):
        trained = []
        for i, shard in enumerate(shards):
            model = [*w[:4], *heads[i]]
            for k, batch in enumerate(draw(i, t)):
                step = gradient(model, units[i], shard, batch)
                if k < head_steps:
                    model = [*model[:4], *(model[p] - head_lr * step[p] for p in HEAD)]
                else:
                    model = [*(model[p] - lr * step[p] for p in range(4)), *model[4:]]
            heads[i] = model[4:]
            trained.append(model)
        w = covered_mean(w, trained, units, _classes(shards))
    return w, [[*w[:4], *head] for head in heads]


def clustered(shards, widths, starts, draw, *, rounds, lr, tune_lr=None, first_round=0):
    """(cluster models, choices, what clients deploy)."""
    units = [first(width, _sizes(starts[0])) for width in widths]
    models, everybody = list(starts), range(len(shards))

    def choices():
        tables = [[float(loss(model, units[i], *shards[i])) for model in models] for i in everybody]
        return [table.index(min(table)) for table in tables]

    for t in range(first_round, first_round + rounds):
        chosen = choices()
        trained = [visit(models[chosen[i]], units[i], shards[i], draw.global_batches(i, t), lr) for i in everybody]
        for c in set(chosen):
            members = [i for i in everybody if chosen[i] == c]
            votes = [shards[i][2] for i in members]
            models[c] = covered_mean(models[c], [trained[i] for i in members], [units[i] for i in members], votes)
    chosen = choices()
    v = [models[c] for c in chosen]
    if tune_lr is not None:
        v = [visit(v[i], units[i], shards[i], draw.tune_batches(i), tune_lr) for i in everybody]
    return models, chosen, v


def fjord_by_rounds(shards, widths, w, draw, *, rounds, lr):
    """w; ``draw.widths(i, t)`` is the width of client i in round t."""
    for t in range(rounds):
        units = [first(draw.widths(i, t), _sizes(w)) for i in range(len(shards))]
        trained = [visit(w, units[i], shards[i], draw.global_batches(i, t), lr) for i in range(len(shards))]
        w = covered_mean(w, trained, units, _classes(shards))
    return w


def fjord_distilled(shards, widths, w, draw, *, rounds, lr, beta):
    """w; a client of the smallest width has nobody to teach."""
    sizes = _sizes(w)
    units = [first(width, sizes) for width in widths]
    for t in range(rounds):
        trained = []
        for i, shard in enumerate(shards):
            smaller = sorted({width for width in widths if width < widths[i]})
            batches = draw.global_batches(i, t)
            if smaller:
                pupils = [first(smaller[k], sizes) for k in draw.global_choices(i, t, len(smaller))]
                trained.append(distil(w, units[i], shard, batches, lr, pupils, beta))
            else:
                trained.append(visit(w, units[i], shard, batches, lr))
        w = covered_mean(w, trained, units, _classes(shards))
    return w


def scaled_scores(model, units, x, width):
    """The logits of the masked network in which what a hidden layer computes is divided by the width."""
    W1, b1, W2, b2, W3, b3 = model
    here = [torch.tensor([float(k in units[m]) for k in range(len(b))]).double() for m, b in enumerate((b1, b2))]
    a = torch.tanh((x @ W1.T + b1) / width) * here[0]
    a = torch.tanh((a @ W2.T + b2) / width) * here[1]
    return a @ W3.T + b3


def heterofl_scaled(shards, widths, w, draw, *, rounds, lr):
    """w."""
    units = [first(width, _sizes(w)) for width in widths]
    for t in range(rounds):
        trained = []
        for i, (x, y, _) in enumerate(shards):
            model = w
            for batch in draw.global_batches(i, t):

                def objective(leaves, i=i, x=x[batch], y=y[batch]):
                    out = scaled_scores(leaves, units[i], x, widths[i])
                    return -out.log_softmax(1)[range(len(y)), y].mean()

                model = moved(model, slope(objective, model), lr)
            trained.append(model)
        w = covered_mean(w, trained, units, _classes(shards))
    return w
