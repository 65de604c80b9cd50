"""Who learns from whom: mixing weights from the gradients that clients report (stage 1 of the paper)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetperm import discrepancy, mixing
from hetperm.client import Client
from hetperm.engine import Task, run_all
from hetperm.local import Params, Shard, Workbench, micro_gradients
from hetperm.randomness import seed_for
from hetperm.state import Work, num_bytes


@dataclass(frozen=True)
class Report:
    """What a client sends: its gradient (d,) or the sketch of it, and the variance of that gradient."""

    gradient: Tensor
    noise: float


def report(
    bench: Workbench,
    params: Params,
    shard: Shard,
    *,
    noise_batches: int,
    sketch: int | None,
    sketch_seed: int,
    generator: torch.Generator,
) -> Report:
    """The full gradient of the client's mean loss, from micro-batches whose spread tells how certain it is."""
    gradients, sizes = micro_gradients(bench, params, shard, parts=noise_batches, generator=generator)
    shares = (sizes.double() / sizes.sum()).to(gradients)
    mean = (gradients * shares[:, None]).sum(0)
    noise = float(discrepancy.noise(gradients, sizes)) if len(gradients) > 1 else float("nan")
    return Report(discrepancy.sketch(mean, sketch, sketch_seed) if sketch else mean, noise)


def mixing_weights(
    w: Params,
    clients: Sequence[Client],
    engine,
    *,
    seed: int,
    r: int,
    regularization: float | str,
    noise_batches: int,
    alpha_steps: int | None = None,
    sketch: int | None = None,
) -> tuple[Tensor, Work]:
    """(N, N) alpha from the gradients of all clients at the global model, and the work of the exchange."""
    update = partial(report, noise_batches=noise_batches, sketch=sketch, sketch_seed=seed_for(seed, "sketch"))
    tasks = [Task(update, w, host=j, seed=seed_for(seed, "report", r, client.key)) for j, client in enumerate(clients)]
    reports = run_all(engine, tasks, [f"epoch {r}: gradient of client {j}" for j in range(len(clients))])
    zeta = discrepancy.pairwise(torch.stack([got.gradient for got in reports]).double())
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    q = discrepancy.fill_noise(torch.tensor([got.noise for got in reports], dtype=torch.float64), n)
    alpha = mixing.weights(zeta, q, n, regularization=regularization, alpha_steps=alpha_steps)
    up = sum(got.gradient.numel() * got.gradient.element_size() + 16 for got in reports)  # and the noise, and n_i
    return alpha, Work(rounds=1, bytes_down=len(clients) * num_bytes(w), bytes_up=up)
