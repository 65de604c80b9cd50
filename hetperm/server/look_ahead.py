"""Look ahead: how much difference is worth sharing, judged by the first step that it leads to.

The server has the gradient of every client at one common model. So for every candidate it knows where each personal
model would go first, and only losses at these places are asked of the clients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.device.gradients import DIRECTIONS, FORWARD, OWN_SHARE, StepLosses, num_losses
from hetperm.engine.task import Task
from hetperm.mixing import SHARE
from hetperm.params import num_bytes
from hetperm.server.estimate import Reports
from hetperm.server.federation import Federation
from hetperm.state import Work

EVERYBODY = 1e6  # a share with which all clients learn from all, by their samples
SHARES = (0.0, 0.1, 0.2, 0.35, SHARE, 1.4, 2.8, 4.0, 5.6, 8.0, 11.0, 16.0, 22.0, EVERYBODY)  # the candidates, c
RATES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # the step sizes that are tried, times that of the global model
TOLERANCE = 0.5  # standard errors within which a mean loss is as good as the smallest
SURE = 2  # standard errors by which being alone must win where clients are all alike, and by which a dip shows
NEGLIGIBLE = 0.005  # of the smallest mean loss: a difference that does not matter, however sure it is
SAMPLES = 16, 128  # on which a loss is taken: at least, if there are as many, and at most
PART = 0.03  # of all steps of a run may go into one look, unless that is too little for the fewest samples
CLIENTS = 100  # that are asked, at the most: the answer is one number for all
NEARLY_ALONE, WIDELY = 2, 4  # effective partners: fewer than the first, and at least the second
WORTH = 0.04  # of the loss one step ahead: what sharing widely may cost clients that would be nearly alone


@dataclass(frozen=True)
class Outlook:
    """What the look ahead found.

    Attributes:
        shares: (C,) the candidates.
        losses: (C, M) the loss of each client that answered after one step, for every candidate at its best step size.
        partners: (C,) the effective partners of those that were asked, for every candidate.
        chosen: the position of the candidate that was chosen.
        work: the work of the clients.
    """

    shares: tuple[float, ...]
    losses: Tensor
    partners: Tensor
    chosen: int
    work: Work


def look_ahead(
    federation: Federation,
    reports: Reports,
    weights: Callable[[Sequence[int], float], Tensor],
    *,
    lr: float,
    batch_size: int,
    steps: int = 0,
    r: int = 0,
) -> Outlook:
    r"""Try every candidate c by one step of every client's model, and choose the one after which losses are smallest.

    .. math:: L(c) = \min_\eta \operatorname{mean}_i f_i \Big( w_p - \eta \sum_j \alpha_{ij}(c) g_j \Big), \quad
              c^* = \arg\min_c L(c)

    where :math:`f_i` is the loss on validation data. All clients take one step size: the smallest of several noisy
    losses, taken client by client, would flatter directions that are noisy themselves, which are those of clients that
    are alone. One of the step sizes is 0: of a model that no step improves all candidates are equally good. Candidates
    that are as good as the best, or widely shared, are told apart by `best_candidate`.

    Args:
        reports: of all clients at the probe, with their gradients. Who sent none is neither asked nor in a step.
        weights: (M clients, c) -> their rows of alpha, (M, N).
        lr: the step size of the global model; multiples of it are tried.
        batch_size: samples of a step, in which the work is counted.
        steps: the steps of the whole run, which bound the samples; 0 is no bound.
        r: the epoch, so that another look is judged by other samples.
    """
    clients, sent = federation.clients, [gradient is not None for gradient in reports.gradients]
    asked = [i for i in _asked(federation) if sent[i]]
    # In the order of keys, so that sums do not depend on how the clients are labelled.
    order = [j for j in federation.order if sent[j]]
    gradients = torch.stack([reports.gradients[j] for j in order])
    rows = [_over(weights(asked, share), order) for share in SHARES]  # each (M, N), dense
    etas = tuple(lr * rate for rate in RATES)
    most = min(max(_paid_for(steps, batch_size), SAMPLES[0]), SAMPLES[1])
    tasks = []
    for k, i in enumerate(asked):
        alpha = torch.stack([row[k] for row in rows])
        has_val = clients[i].val is not None
        tasks.append(
            Task(
                StepLosses(etas, min(most, _samples(clients[i])), len(SHARES), halves=not has_val),
                {**reports.probe, DIRECTIONS: alpha[:, order].to(gradients) @ gradients, OWN_SHARE: alpha[:, i]},
                host=i,
                seed=federation.seed_for("look ahead", r, clients[i].key),
                width=reports.width,
                label=f"look ahead: client {i}",
                part="val" if has_val else "train",
            )
        )
    tables = federation.run(tasks, round=reports.round + 1)
    work = federation.work_of(tasks, batch_size, tables)
    answers = [table for table in tables if table is not None]
    partners = torch.stack([1 / row[:, order].square().sum(1).mean() for row in rows])
    if not answers:
        return Outlook(SHARES, torch.empty(len(SHARES), 0), partners, 0, Work(rounds=1) + work)
    losses = at_best_rate(torch.stack(answers, 2))
    moved = len(answers) * (num_bytes(reports.probe) + len(SHARES) * gradients[0].numel() * gradients.element_size())
    work = Work(rounds=1, bytes_down=moved, bytes_up=8 * losses.numel() * len(etas)) + work
    return Outlook(SHARES, losses, partners, best_candidate(losses, partners), work)


def _over(alpha: Tensor, order: Sequence[int]) -> Tensor:
    """(M, N) weights that sum to one over the clients in ``order``, whose gradients are here."""
    if len(order) == alpha.shape[1]:
        return alpha
    return alpha / alpha[:, order].sum(1, keepdim=True).clamp_min(1e-300)


def can_look_again(steps: int, batch_size: int) -> bool:
    """Whether the steps of a run pay for more than one look: its part must buy as many samples as a look needs."""
    return _paid_for(steps, batch_size) >= SAMPLES[0]


def _paid_for(steps: int, batch_size: int) -> int:
    """The samples on which a client can take all losses of a look for its part of the steps."""
    gradients_per_sample = num_losses(len(SHARES), RATES) * FORWARD
    return int(PART * steps * batch_size / gradients_per_sample) if steps else SAMPLES[1]


def at_best_rate(table: Tensor) -> Tensor:
    """(C, M) the losses of clients at the step size that is best for their mean, which each candidate has for itself.

    Args:
        table: (C, E, M) of every candidate, step size and client.

    Example:
        >>> at_best_rate(torch.tensor([[[1.0, 9.0], [4.0, 4.0]], [[2.0, 2.0], [1.0, 4.0]]]))
        tensor([[4., 4.],
                [2., 2.]])
    """
    best = table.nan_to_num(nan=math.inf, posinf=math.inf).mean(2).argmin(1)
    return table[torch.arange(len(table)), best]


def best_candidate(losses: Tensor, partners: Tensor, shares: tuple[float, ...] = SHARES) -> int:
    r"""The candidate with the smallest mean loss, or one as good that is nearer to the share of groups.

    One step says nothing of the noise of later steps, which partners lower, nor of what a model learns by heart that
    is trained on few samples. So if the choice leaves clients nearly alone, the best of the candidates with which they
    share widely takes its place, unless it is worse by more than chance, with the same tolerance, or by much.

    Args:
        losses: (C, M) of each candidate and client.
        partners: (C,) the effective partners that clients have with each candidate, :math:`1 / \operatorname{mean}_i
            \sum_j \alpha_{ij}^2`.
        shares: (C,) the candidates, in increasing order; the first is to be alone.

    Example:
        >>> losses, shares = torch.tensor([[1.00, 1.00], [1.02, 1.06], [0.90, 1.12]]), (0.0, 0.7, 1.4)
        >>> best_candidate(losses, torch.tensor([1.0, 1.1, 1.2]), shares)
        0
        >>> best_candidate(losses, torch.tensor([1.0, 1.1, 9.0]), shares)
        2
    """
    losses = losses.nan_to_num(nan=math.inf, posinf=math.inf)
    means, everything = losses.mean(1), torch.ones(len(losses), dtype=torch.bool)
    best = _without_dip(_supported_minimum(means), losses, shares)
    chosen = _towards_groups(best, losses, everything, shares)
    wide = partners >= WIDELY
    if partners[chosen] >= NEARLY_ALONE or not wide.any():
        return chosen
    best = _supported_minimum(means, wide)
    lost, error = _compared_with(losses, chosen)
    # Where all ways to share lead to one loss clients are alike: then to be alone must win for sure.
    sharing = means[1:]
    alike = sharing.max() - sharing.min() <= NEGLIGIBLE * sharing.min()
    worse = lost[best] > (SURE if alike else TOLERANCE) * error[best]
    if worse or _supported(means)[best] > (1 + WORTH) * means[chosen]:
        return chosen
    return _towards_groups(best, losses, wide, shares)


def _towards_groups(best: int, losses: Tensor, allowed: Tensor, shares: tuple[float, ...]) -> int:
    r"""The last candidate on the way from the best to the share that fits clients in groups, `mixing.SHARE`.

    The way goes on while candidates are as good as the best: clients lose too little by them to tell, with d the
    differences of their losses :math:`\operatorname{mean}(d) \le \tau \operatorname{std}(d) / \sqrt M`, or too
    little to matter. Where many candidates lead to the same partners chance decides which is best. One that is as good
    by chance alone, with worse ones on the way to it, is not reached.

    Args:
        allowed: (C,) the candidates that the way may lead over.
    """
    groups = min(range(len(shares)), key=lambda c: abs(shares[c] - SHARE))
    lost, error = _compared_with(losses, best)
    # A model that is nearly done has nothing to gain by any step, and chance alone would decide.
    negligible = lost <= NEGLIGIBLE * losses[best].mean()
    # Where clients are as well off alone, sharing must show that it pays, unless it makes no difference at all.
    if negligible[0] and not negligible.all():
        negligible = torch.zeros_like(negligible)
    as_good = allowed & ((lost <= TOLERANCE * error) | negligible)
    way = range(best + 1, groups + 1) if best < groups else range(best - 1, groups - 1, -1)
    chosen = best
    for c in way:
        if not as_good[c]:
            break
        chosen = c
    return chosen


def _without_dip(best: int, losses: Tensor, shares: tuple[float, ...]) -> int:
    """The best candidate, or the better one beside it if the best is a dip above the share that fits groups.

    A dip is surely better than both candidates beside it, by more than a little, and nothing on the way from smaller
    shares leads down to it. There two groups fit into one by chance, which helps one step ahead and not in the end.
    """
    if shares[best] <= SHARE or best < 2 or best + 1 == len(shares) or losses.shape[1] < 2:
        return best
    lost, error = _compared_with(losses, best)
    little, beside = NEGLIGIBLE * losses[best].mean(), (best - 1, best + 1)
    is_flat = lost[best - 2] - lost[best - 1] <= little
    is_dip = is_flat and all([lost[c] > max(SURE * error[c], little) for c in beside])
    return min(beside, key=lambda c: float(lost[c])) if is_dip else best


def _compared_with(losses: Tensor, best: int) -> tuple[Tensor, Tensor]:
    """(C,) by how much the mean loss of each candidate exceeds that of the best, and the standard error of it."""
    differences = losses - losses[best]
    # Of one client, and of infinite losses, no error is known: then only the smallest mean itself is good.
    if losses.shape[1] < 2:
        return differences.mean(1), torch.zeros_like(differences.mean(1))
    return differences.mean(1), differences.std(1) / math.sqrt(losses.shape[1])


def _supported_minimum(means: Tensor, allowed: Tensor | None = None) -> int:
    """The candidate with the smallest supported mean; with ``allowed`` (C,), of these.

    Example:
        >>> _supported_minimum(torch.tensor([0.537, 0.540, 0.543, 0.527, 0.569]))
        0
    """
    supported = _supported(means)
    candidates = [c for c in range(len(means)) if allowed is None or allowed[c]]
    return min(candidates, key=lambda c: (float(supported[c]), float(means[c])))


def _supported(means: Tensor) -> Tensor:
    """(C,) of each mean and the better one beside it the larger: a dip of one candidate between worse ones is chance.

    Neighbouring shares lead to similar partners, so that their losses are similar. The first, to be alone, is like no
    other and needs no support.
    """
    outside = means.new_full((1,), math.inf)
    neighbour = torch.minimum(torch.cat([means[1:], outside]), torch.cat([outside, means[:-1]]))
    supported = torch.maximum(means, neighbour)
    supported[0] = means[0]
    return supported


def _samples(client: Client) -> int:
    """The samples on which a client can take a loss. Of validation data no more count than it has to train on."""
    return min(client.n_train, client.n_val or client.n_train)


def _asked(federation: Federation) -> list[int]:
    """The clients that are asked: all, or as many as suffice, drawn by key so that relabelling does not matter."""
    order = federation.order
    if len(order) <= CLIENTS:
        return order
    generator = torch.Generator().manual_seed(federation.seed_for("asked"))
    drawn = torch.randperm(len(order), generator=generator)[:CLIENTS]
    return [order[k] for k in sorted(drawn.tolist())]
