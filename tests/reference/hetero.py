"""PERM for clients of different sizes, and partial training, typed out for a network with two hidden layers.

Shares nothing with the package. A model is a list of six float64 tensors, W1 b1 W2 b2 W3 b3, always of full size. What
somebody holds of it are two lists of numbers, the units of the hidden layers: all others are multiplied by zero, so
that their coordinates have no gradient and stay as they are. A personal model is of full size too; what lies outside
its own units means nothing. Whatever is drawn (batches, schedules, presence, random units) is handed in as ``draw``.
"""

import functools
import itertools
import math

import torch
from reference import perm_maths


def first(width, sizes):
    """The units of the static part."""
    return [list(range(max(1, math.ceil(width * size)))) for size in sizes]


def window(width, sizes, t, own=None):
    """The units of the rolling part in round t, of a model that has all units or only its ``own`` first ones."""
    have = [len(units) for units in own] if own else sizes
    kept = [min(a, max(1, math.ceil(width * size))) for a, size in zip(have, sizes, strict=True)]
    return [[(t + k) % a for k in range(m)] for a, m in zip(have, kept, strict=True)]


def holds(units, tensor, place):
    """Whether a coordinate belongs to a part."""
    one, two = units
    return {
        0: lambda row, column: row in one,
        1: lambda row: row in one,
        2: lambda row, column: row in two and column in one,
        3: lambda row: row in two,
        4: lambda row, column: column in two,
        5: lambda row: True,
    }[tensor](*place)


def places(x):
    return itertools.product(*(range(size) for size in x.shape))


def mask(units, model):
    """Six tensors of ones and zeros."""
    return list(_mask(tuple(tuple(held) for held in units), tuple(x.shape for x in model)))


@functools.cache  # a part is looked at in every step; nobody writes into what is returned
def _mask(units, shapes):
    out = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for tensor, x in enumerate(out):
        for place in places(x):
            x[place] = float(holds(units, tensor, place))
    return tuple(out)


def num_params(units, model):
    return int(sum(x.sum() for x in mask(units, model)))


# What a device does


def scores(model, units, x):
    """The logits of the masked full-size network."""
    W1, b1, W2, b2, W3, b3 = model
    here = [torch.tensor([float(k in units[m]) for k in range(len(b))]).double() for m, b in enumerate((b1, b2))]
    a = torch.tanh(x @ W1.T + b1) * here[0]
    a = torch.tanh(a @ W2.T + b2) * here[1]
    return a @ W3.T + b3


def log_chances(out, known):
    """Log-probabilities of the known classes; the others are not in the running."""
    return out[:, known] - torch.logsumexp(out[:, known], 1, keepdim=True)


def loss(model, units, x, y, known):
    chances = log_chances(scores(model, units, x), known)
    return -chances[range(len(y)), [known.index(int(label)) for label in y]].mean()


def slope(value, model):
    """The gradient of ``value(leaves)`` at a model."""
    leaves = [x.clone().requires_grad_() for x in model]
    return list(torch.autograd.grad(value(leaves), leaves))


def gradient(model, units, shard, batch=None):
    """The gradient of the mean loss of a batch, or of all; a shard is (inputs, labels, known classes)."""
    x, y, known = shard
    x, y = (x, y) if batch is None else (x[batch], y[batch])
    return slope(lambda leaves: loss(leaves, units, x, y, known), model)


def moved(model, step, lr):
    return [x - lr * g for x, g in zip(model, step, strict=True)]


def length(model):
    return math.sqrt(sum(float((x**2).sum()) for x in model))


def cut(lr, cap, model, units, step):
    """The step size that takes the part of a model no further than ``cap`` times its length; 0 is no cap."""
    if not cap:
        return lr
    part = [m * x for m, x in zip(mask(units, model), model, strict=True)]
    return min(lr, cap * length(part) / length(step))


def visit(model, units, shard, batches, lr, cap=0.0):
    for batch in batches:
        step = gradient(model, units, shard, batch)
        model = moved(model, step, cut(lr, cap, model, units, step))
    return model


def distil(model, units, shard, batches, lr, pupils, beta):
    """SGD in which the model also teaches a part of itself, ``pupils[k]`` in step k."""
    x, y, known = shard
    for batch, pupil in zip(batches, pupils, strict=True):
        teacher = log_chances(scores(model, units, x[batch]), known)

        def objective(leaves, batch=batch, pupil=pupil, teacher=teacher):
            said = log_chances(scores(leaves, pupil, x[batch]), known)
            lesson = (teacher.exp() * (teacher - said)).sum(1).mean()
            return loss(leaves, units, x[batch], y[batch], known) + beta * lesson

        model = moved(model, slope(objective, model), lr)
    return model


def ordered(model, shard, batches, lr, drawn):
    """SGD in which step k trains the part ``drawn[k]``."""
    for batch, units in zip(batches, drawn, strict=True):
        model = moved(model, gradient(model, units, shard, batch), lr)
    return model


# What the server does


def covered_mean(old, models, units, votes=None):
    """Coordinate by coordinate over those that hold it; ``votes[i]``: the classes whose rows client i has a say in."""
    out = [x.clone() for x in old]
    for tensor, x in enumerate(out):
        for place in places(x):
            voices = [
                model[tensor][place]
                for i, (model, held) in enumerate(zip(models, units, strict=True))
                if holds(held, tensor, place) and (votes is None or tensor < 4 or place[0] in votes[i])
            ]
            if voices:
                x[place] = sum(voices) / len(voices)
    return out


def weighted_mean(old, made):
    """Coordinate by coordinate over those that hold it, by weight; ``made``: (model, units, weight)."""
    out = [x.clone() for x in old]
    for tensor, x in enumerate(out):
        for place in places(x):
            by = [(model[tensor][place], weight) for model, units, weight in made if holds(units, tensor, place)]
            if by:
                x[place] = sum(value * weight for value, weight in by) / sum(weight for _, weight in by)
    return out


def mixed(i, v, own, weights):
    """Client i's model mixed with others over what they have in common."""
    out = [x.clone() for x in v[i]]
    for tensor, x in enumerate(out):
        for place in places(x):
            by = [j for j in range(len(v)) if weights[j] > 0 and holds(own[j], tensor, place)]
            if holds(own[i], tensor, place) and by:
                x[place] = sum(weights[j] * v[j][tensor][place] for j in by) / sum(weights[j] for j in by)
    return out


def projected(model, centre, units, radius):
    """The nearest point of the ball about the part of ``centre``."""
    inside = mask(units, model)
    away = math.sqrt(sum(float(((m * (a - b)) ** 2).sum()) for a, b, m in zip(model, centre, inside, strict=True)))
    if away <= radius:
        return model
    return [b + m * (a - b) * radius / away for a, b, m in zip(model, centre, inside, strict=True)]


def noise(w, units, shard, pieces):
    """The variance of the mean gradient, from micro-batches."""
    n = len(shard[1])
    found = [gradient(w, units, shard, piece) for piece in pieces]
    mean = [sum(len(piece) / n * g[k] for piece, g in zip(pieces, found, strict=True)) for k in range(6)]
    squares = [sum(float(((a - b) ** 2).sum()) for a, b in zip(g, mean, strict=True)) for g in found]
    return sum(len(piece) / n * s for piece, s in zip(pieces, squares, strict=True)) / (len(pieces) - 1)


def distances(gradients):
    return [[sum(float(((x - y) ** 2).sum()) for x, y in zip(a, b, strict=True)) for b in gradients] for a in gradients]


def weights(zeta, q, n, vc, options):
    """(N, N) alpha from the paper's objective; ``vc`` None if all architectures are the same."""
    N, rule = len(n), options.regularization
    by_number = not isinstance(rule, str)
    cost = zeta if by_number else perm_maths.debias(zeta, q)
    extra = [0.0] * N
    if vc is not None and options.vc_weight == "raw":
        extra = [math.sqrt(vc[j] / n[j]) for j in range(N)]
    elif vc is not None:
        extra = perm_maths.complexity_cost(vc, n, q, options.vc_weight)
    cost = [[c + e for c, e in zip(row, extra, strict=True)] for row in cost]
    if rule == "level":
        height = sum(q) / N  # half the noise of a distance, above the cheapest
        rows = [[n[j] * max(height + min(row) - row[j], 0.0) for j in range(N)] for row in cost]
        return [[a / sum(row) for a in row] for row in rows]
    lam = [rule] * N if by_number else perm_maths.noise_lam(zeta, q, n, options.share, cost)
    if options.alpha_steps is not None:
        return [perm_maths.descend(row, n, lam_i, options.alpha_steps) for row, lam_i in zip(cost, lam, strict=True)]
    return [perm_maths.solve(row, n, lam_i) for row, lam_i in zip(cost, lam, strict=True)]


# Algorithms


def perm(shards, widths, w, options, draw, *, two_stages):
    """Yields (w, alpha, v, tail) after the warm-up, after every epoch, and at last what is returned.

    With ``steps`` 0 an epoch is a tour: every visit that has weight, once. If not, as many rounds of visits are made,
    tour after tour, as fit into an equal part of the steps that all clients together have left.

    Who is not there in a round (``draw.here(client, clock)``) does nothing in it; its steps are lost. A client that
    missed the last call for reports is asked again after every epoch. Reports at an earlier global model count as long
    as they are not older than ``report_age``; a client without a report is alone.
    """
    N, K, sizes = len(shards), options.local_steps, [len(w[1]), len(w[3])]
    everybody, cap, steps = range(N), options.step_cap, options.steps * len(shards)
    own_width = widths if options.personal_width == "own" else [min(widths)] * N
    own = [first(width, sizes) for width in own_width]
    n = [len(y) for _, y, _ in shards]
    batch = [min(options.batch_size, each) for each in n]
    warmup_rounds = options.steps // (2 * K) if options.warmup_rounds is None else options.warmup_rounds
    spent, tour, t, clock = 0.0, 0, 0, 0
    reports, asked_in = {}, 0  # client -> (epoch, gradient, noise); the epoch in which all were last asked
    early_round, early_w, early = math.floor(options.early_report * warmup_rounds), None, {}
    if options.discrepancy != "probe" or not isinstance(options.regularization, str):
        early_round = 0
    age = options.alpha_every if options.report_age is None else options.report_age

    def held(i, t, width=None):
        """The part of the global model that client i holds in round t."""
        width = widths[i] if width is None else width
        if options.extraction == "random" and width < 1:
            return draw.units(i, t, width)
        return first(width, sizes) if options.extraction == "static" else window(width, sizes, t)

    def nested(i, j, t):
        """The part of model i that host j trains in round t; None: it does not."""
        static = [units[: len(kept)] for units, kept in zip(own[i], first(widths[j], sizes), strict=True)]
        if static == own[i] or options.nested == "static":
            return static
        if options.nested == "skip":
            return None
        return window(widths[j], sizes, t, own[i]) if options.nested == "rolling" else draw.nested_units(i, j, t)

    def collect(w, r):
        """Ask those who have not reported at w; (whether anybody came, the steps that it takes)."""
        asked = [i for i in everybody if i not in reports or reports[i][0] < asked_in]
        for i in asked:
            if draw.here(i, clock):
                units = first(min(widths), sizes) if options.discrepancy == "probe" else held(i, asked_in)
                found = gradient(w, units, shards[i]), noise(w, units, shards[i], draw.pieces(i, r))
                reports[i] = (r, *found)
        came = [i for i in asked if i in reports and reports[i][0] == r]
        taken = sum(n[i] / batch[i] for i in asked)
        if early_w is not None:  # also at the early model, once
            units = first(min(widths), sizes)
            for i in [i for i in everybody if i not in early]:
                taken += n[i] / batch[i]
                if draw.here(i, clock):
                    pieces = draw.pieces(i, "early")
                    early[i] = gradient(early_w, units, shards[i]), noise(early_w, units, shards[i], pieces)
        return bool(came), taken

    def alpha_at(r):
        known = [i for i in everybody if i in reports and (reports[i][0] >= asked_in or r - reports[i][0] <= age)]
        if early_w is not None:
            known = [i for i in known if i in early]
        zeta, q, some = distances([reports[i][1] for i in known]), [reports[i][2] for i in known], [n[i] for i in known]
        compared, compared_q = zeta, q
        if early_w is not None and known:
            unit = sum(n[i] * reports[i][2] for i in known) / sum(some)
            early_unit = sum(n[i] * early[i][1] for i in known) / sum(some)
            other = distances([early[i][0] for i in known])
            compared = [[a / unit + b / early_unit for a, b in zip(*rows, strict=True)] for rows in zip(zeta, other)]
            compared_q = [reports[i][2] / unit + early[i][1] / early_unit for i in known]
        if options.denoise and options.discrepancy == "probe" and isinstance(options.regularization, str) and known:
            compared = perm_maths.denoised(compared, compared_q, some)
        W = [num_params(units, w) for units in own]
        vc = None if len(set(W)) == 1 else [W[i] * 3 * math.log2(W[i]) for i in known]
        among = weights(compared, compared_q, some, vc, options) if known else []
        slower = perm_maths.visit_rates(among, zeta, q, some, options.batch_size) if known else []
        alpha, rates = [[float(i == j) for j in everybody] for i in everybody], [1.0] * N
        for a, i in enumerate(known):
            alpha[i][i] = 0.0
            for b, j in enumerate(known):
                alpha[i][j] = among[a][b]
            rates[i] = slower[a] if options.rate_rule != "plain" else 1.0
        return alpha, rates

    def travel(visits, r, tour, t):
        """Round t of a tour, in epoch r; the steps it takes."""
        taken = 0
        for i, j in visits:
            units = nested(i, j, tour * N + t)
            if alpha[i][j] == 0 or units is None:
                continue
            taken += K
            if not draw.here(j, clock):
                continue
            scale = alpha[i][j] * N if options.step_rule == "paper" else alpha[i][j] / max(alpha[i])
            left = 1 - (r + 0.5) / options.epochs if options.decay == "linear" else 1.0
            lr, batches = options.personal_lr * left * scale * rates[i], draw.visit_batches(i, j, tour)
            narrower = [first(width, sizes) for width in sorted(set(widths)) if width < own_width[i]]
            if options.inplace_kd and units == own[i] and narrower:
                pupils = [narrower[k] for k in draw.visit_choices(i, j, tour, len(narrower))]
                v[i] = distil(v[i], units, shards[j], batches, lr, pupils, options.inplace_kd)
            else:
                v[i] = visit(v[i], units, shards[j], batches, lr, cap)
        return taken

    def at_once(rounds, r, tour):
        """All visits of a tour, each of a copy of the model, which becomes their mean by alpha; the steps it takes."""
        made, taken = [[] for _ in everybody], 0
        for i, j in [pair for visits in rounds for pair in visits]:
            units = nested(i, j, tour * N)
            if alpha[i][j] == 0 or units is None:
                continue
            taken += K
            if not draw.here(j, clock):
                continue
            left = 1 - (r + 0.5) / options.epochs if options.decay == "linear" else 1.0
            lr = options.personal_lr * left * rates[i]
            made[i].append((visit(v[i], units, shards[j], draw.visit_batches(i, j, tour), lr, cap), units, alpha[i][j]))
        for i in everybody:
            v[i] = weighted_mean(v[i], made[i])
        return taken

    start = w
    for r in range(warmup_rounds):
        handed = widths
        if options.warmup == "ordered":
            smaller = [sorted({width for width in widths if width <= own}) for own in widths]
            handed = [smaller[i][draw.width_choice(i, r, len(smaller[i]))] for i in everybody]
        units = [held(i, r, handed[i]) for i in everybody]
        here = [i for i in everybody if draw.here(i, clock)]
        trained = [visit(w, units[i], shards[i], draw.global_batches(i, r), options.global_lr, cap) for i in here]
        w = covered_mean(w, trained, [units[i] for i in here], [shards[i][2] for i in here]) if here else w
        clock += 1
        if options.projection is not None:
            w = projected(w, start, first(1, sizes), options.projection)
        early_w = w if r + 1 == early_round else early_w
        spent += N * K
    centre, v, tail = w, [w] * N, []
    if options.first_alpha == "uniform":
        alpha, rates = [[1 / N] * N for _ in everybody], [1.0] * N
    else:
        spent += collect(w, 0)[1]
        clock += 1
        alpha, rates = alpha_at(0)
    yield w, alpha, v, None
    for r in range(options.epochs):
        if not options.steps and options.visits == "parallel":
            at_once(draw.rounds(r, alpha), r, r)
            clock += 1
        elif not options.steps:
            for k, visits in enumerate(draw.rounds(r, alpha)):
                travel(visits, r, r, k)
                clock += 1
        elif options.visits == "parallel":
            planned, allowed = spent, spent + (steps - spent) / (options.epochs - r)
            rounds = draw.rounds(tour, alpha)
            while planned + K * sum(len(visits) for visits in rounds) <= allowed:
                planned += K * sum(len(visits) for visits in rounds)
                spent += at_once(rounds, r, tour)
                clock += 1
                tour += 1
                rounds = draw.rounds(tour, alpha)
        else:
            planned, allowed = spent, spent + (steps - spent) / (options.epochs - r)
            rounds = draw.rounds(tour, alpha)
            while planned + K * len(rounds[t]) <= allowed:
                planned += K * len(rounds[t])
                spent += travel(rounds[t], r, tour, t)
                clock += 1
                t += 1
                if t == len(rounds):
                    tour, t = tour + 1, 0
                    rounds = draw.rounds(tour, alpha)
        if options.projection is not None:
            v = [projected(v[i], centre, own[i], options.projection) for i in everybody]
        if options.tail_average and r >= options.epochs - math.ceil(options.tail_average * options.epochs):
            tail.append(v)
            v = list(v)
        if options.server_mix == "alpha" and r < options.epochs - 1:
            v = [mixed(i, v, own, alpha[i]) for i in everybody]
        last = options.steps and r + 1 == options.epochs  # weights that nobody would use are not estimated
        if not two_stages and (r + 1) % options.alpha_every == 0 and not last:
            units = [held(i, warmup_rounds + r) for i in everybody]
            here = [i for i in everybody if draw.here(i, clock)]
            found = [gradient(w, units[i], shards[i], draw.large_batch(i, r)) for i in here]
            nothing = [torch.zeros_like(x) for x in w]
            units, votes = [units[i] for i in here], [shards[i][2] for i in here]
            step = covered_mean(nothing, found, units, votes) if here else nothing
            clock += 1
            w = moved(w, step, cut(options.global_lr, cap, w, first(1, sizes), step))
            if options.projection is not None:
                w = projected(w, centre, first(1, sizes), options.projection)
            asked_in = r + 1
            spent += collect(w, r + 1)[1] + sum(min(options.global_batch, n[i]) / batch[i] for i in everybody)
            clock += 1
            alpha, rates = alpha_at(r + 1)
            tour, t = tour + 1, 0
        elif r + 1 < options.epochs and any(i not in reports or reports[i][0] < asked_in for i in everybody):
            came, taken = collect(w, r + 1) if options.first_alpha != "uniform" else (False, 0)
            spent += taken
            clock += 1
            if came:
                alpha, rates = alpha_at(r + 1)
                tour, t = tour + 1, 0
        mean = [[sum(each[i][k] for each in tail) / len(tail) for k in range(6)] for i in everybody] if tail else None
        yield w, alpha, list(v), mean
    if options.final_lr is not None:
        v = mean or v
        for i in everybody:
            total = [torch.zeros_like(x) for x in w]
            here = [j for j in everybody if alpha[i][j] > 0 and draw.here(j, clock)]
            for j in here:
                static = [units[: len(kept)] for units, kept in zip(own[i], first(widths[j], sizes), strict=True)]
                share = alpha[i][j] / sum(alpha[i][k] for k in here)
                total = moved(total, gradient(v[i], static, shards[j]), -share)
            v[i] = moved(v[i], total, options.final_lr)
            if options.projection is not None:
                v[i] = projected(v[i], centre, own[i], options.projection)
        mean = None
    yield w, alpha, v, mean


def partial_training(shards, widths, w, draw, *, rounds, lr, extraction, by_steps=False, tune_lr=None):
    """(w, what clients deploy): HeteroFL, FedRolex, Federated Dropout; with ``by_steps`` FjORD."""
    sizes, everybody = [len(w[1]), len(w[3])], range(len(shards))
    for t in range(rounds):
        units, trained = [], []
        for i in everybody:
            parts = {
                "static": lambda i, t: first(widths[i], sizes),
                "rolling": lambda i, t: window(widths[i], sizes, t),
                "random": lambda i, t: draw.units(i, t) if widths[i] < 1 else first(1, sizes),
            }
            units.append(parts[extraction](i, t))
            batches = draw.global_batches(i, t)
            if by_steps:
                smaller = sorted({width for width in widths if width <= widths[i]})
                drawn = [first(smaller[k], sizes) for k in draw.global_choices(i, t, len(smaller))]
                trained.append(ordered(w, shards[i], batches, lr, drawn))
            else:
                trained.append(visit(w, units[i], shards[i], batches, lr))
        w = covered_mean(w, trained, units, [known for _, _, known in shards])
    if tune_lr is None:
        return w, [w] * len(shards)
    own = [first(width, sizes) for width in widths]
    return w, [visit(w, own[i], shards[i], draw.tune_batches(i), tune_lr) for i in everybody]


def coverage(model, units_of_round, rounds, tiers):
    """(tensor, tier) -> (mean number of clients that train a coordinate in a round, share that is never trained)."""
    out = {}
    for tensor, x in enumerate(model):
        for tier in {*tiers, "all"}:
            times = []
            for place in places(x):
                count = 0
                for t in range(rounds):
                    for i, name in enumerate(tiers):
                        count += tier in (name, "all") and holds(units_of_round(i, t), tensor, place)
                times.append(count)
            out[tensor, tier] = sum(times) / len(times) / rounds, times.count(0) / len(times)
    return out
