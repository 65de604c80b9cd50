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
from hetperm.device.gradients import DIRECTIONS, FORWARD, OWN_SHARE, StepLosses
from hetperm.engine.task import Task
from hetperm.params import num_bytes
from hetperm.server.estimate import Reports
from hetperm.server.federation import Federation
from hetperm.state import Work

EVERYBODY = 1e6  # a share with which all clients learn from all, by their samples
SHARES = (0.0, 0.7, 1.4, 2.8, 5.6, 11.0, 22.0, 45.0, EVERYBODY)  # the candidates, c
RATES = (0.25, 1.0)  # the step sizes that are tried, times that of the global model
SAMPLES = 16, 128  # on which a loss is taken: at least, if there are as many, and at most
PART = 0.03  # of all steps of a run may go into losses, unless there are too few for the smallest number of samples
CLIENTS = 100  # that are asked, at the most: the answer is one number for all


@dataclass(frozen=True)
class Outlook:
    """What the look ahead found.

    Attributes:
        shares: (C,) the candidates.
        losses: (C, M) the loss of each client that was asked after its best step, for every candidate.
        chosen: the position of the candidate that was chosen.
        work: the work of the clients.
    """

    shares: tuple[float, ...]
    losses: Tensor
    chosen: int
    work: Work


def look_ahead(
    federation: Federation,
    reports: Reports,
    weights: Callable[[float], Tensor],
    *,
    lr: float,
    batch_size: int,
    steps: int = 0,
    shares: Sequence[float] = SHARES,
) -> Outlook:
    r"""Try every candidate c by one step of every client's model, and choose the one after which losses are smallest.

    .. math:: L_i(c) = \min_\eta f_i \Big( w_p - \eta \sum_j \alpha_{ij}(c) g_j \Big), \quad
              c^* = \arg\min_c \operatorname{mean}_i L_i(c)

    where :math:`f_i` is the loss on validation data.

    Args:
        reports: of all clients at the probe, with their gradients.
        weights: c -> alpha (N, N).
        lr: the step size of the global model; multiples of it are tried.
        batch_size: samples of a step, in which the work is counted.
        steps: the steps of the whole run, which bound the samples; 0 is no bound.
    """
    clients = federation.clients
    asked, order = _asked(federation), federation.order
    # In the order of keys, so that sums do not depend on how the clients are labelled.
    gradients = torch.stack([reports.gradients[j] for j in order])
    rows = [weights(share)[asked] for share in shares]  # each (M, N), dense
    etas = tuple(lr * rate for rate in RATES)
    losses_per_sample = len(shares) * len(etas) * FORWARD
    most = int(PART * steps * batch_size / losses_per_sample) if steps else SAMPLES[1]
    most = min(max(most, SAMPLES[0]), SAMPLES[1])
    tasks = []
    for k, i in enumerate(asked):
        alpha = torch.stack([row[k] for row in rows])
        has_val = clients[i].val is not None
        tasks.append(
            Task(
                StepLosses(etas, min(most, _samples(clients[i])), len(shares), halves=not has_val),
                {**reports.probe, DIRECTIONS: alpha[:, order].to(gradients) @ gradients, OWN_SHARE: alpha[:, i]},
                host=i,
                seed=federation.seed_for("look ahead", clients[i].key),
                width=reports.width,
                label=f"look ahead: client {i}",
                part="val" if has_val else "train",
            )
        )
    losses = torch.stack([table.amin(1) for table in federation.run(tasks)], 1)
    moved = len(asked) * (num_bytes(reports.probe) + len(shares) * gradients[0].numel() * gradients.element_size())
    work = Work(rounds=1, bytes_down=moved, bytes_up=8 * losses.numel() * len(etas))
    return Outlook(tuple(shares), losses, _best(losses), work + federation.work_of(tasks, batch_size))


def _best(losses: Tensor) -> int:
    """The candidate with the smallest mean loss; of equal ones the first, which shares least."""
    return int(losses.nan_to_num(nan=math.inf).mean(1).argmin())


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
