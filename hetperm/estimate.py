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
from hetperm.partial import WHOLE, Parts
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
    places: tuple[Tensor, int] | None = None,
    generator: torch.Generator,
) -> Report:
    """The full gradient of the client's mean loss, from micro-batches whose spread tells how certain it is.

    Args:
        places: where the coordinates of the client's model lie in the global one, and how many that has; the gradient
            is zero in all others. None: the client's model is what is compared.
    """
    gradients, sizes = micro_gradients(bench, params, shard, parts=noise_batches, generator=generator)
    shares = (sizes.double() / sizes.sum()).to(gradients)
    mean = (gradients * shares[:, None]).sum(0)
    noise = float(discrepancy.noise(gradients, sizes)) if len(gradients) > 1 else float("nan")
    if places is not None:
        at, d = places
        mean = mean.new_zeros(d).index_copy_(0, at.to(mean.device), mean)
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
    parts: Parts = WHOLE,
    compare: str = "probe",
    extraction: str = "static",
    vc_weight: float | str = 0.0,
) -> tuple[Tensor, Work]:
    """(N, N) alpha from the gradients of all clients, and the work of the exchange.

    Args:
        compare: "probe": all clients take their gradient at one common model, the part of the global model that
            the smallest of them can hold; "masked": each at the part that it holds itself (the paper).
        extraction: which part that is, with "masked".
        vc_weight: of the complexity of the clients' architectures, if they differ (`mixing.weights`).
    """
    zeta, q, n, work = reported(
        w,
        clients,
        engine,
        seed=seed,
        r=r,
        noise_batches=noise_batches,
        sketch=sketch,
        parts=parts,
        compare=compare,
        extraction=extraction,
    )
    widths = [client.width for client in clients]
    alpha = mixing.weights(
        zeta,
        q,
        n,
        regularization=regularization,
        alpha_steps=alpha_steps,
        vc=parts.vc(widths) if len(set(widths)) > 1 else None,
        vc_weight=vc_weight,
    )
    return alpha, work


def reported(
    w: Params,
    clients: Sequence[Client],
    engine,
    *,
    seed: int,
    r: int,
    noise_batches: int,
    sketch: int | None = None,
    parts: Parts = WHOLE,
    compare: str = "probe",
    extraction: str = "static",
) -> tuple[Tensor, Tensor, Tensor, Work]:
    """What clients report, as the server sees it: zeta (N, N), noise q (N,), samples n (N,), and the work of it."""
    if compare == "probe":
        widths = [min(client.width for client in clients)] * len(clients)
        indices = [parts.index(width) for width in widths]
        places = [None] * len(clients)
    elif compare == "masked":
        widths = [client.width for client in clients]
        indices = [parts.index(client.width, extraction, seed=seed, round=r, key=client.key) for client in clients]
        d = sum(x.numel() for x in w.values())
        positions = [parts.positions(w, index) for index in indices]
        places = [None if at is None else (at, d) for at in positions]
    else:
        raise ValueError(f"unknown discrepancy {compare!r}; use 'probe' or 'masked'")
    how = {"noise_batches": noise_batches, "sketch": sketch, "sketch_seed": seed_for(seed, "sketch")}
    held = [parts.cut(w, index) for index in indices]
    tasks = [
        Task(
            partial(report, places=place, **how),
            params,
            host=j,
            seed=seed_for(seed, "report", r, client.key),
            width=width,
        )
        for j, (client, params, place, width) in enumerate(zip(clients, held, places, widths, strict=True))
    ]
    reports = run_all(engine, tasks, [f"epoch {r}: gradient of client {j}" for j in range(len(clients))])
    zeta = discrepancy.pairwise(torch.stack([got.gradient for got in reports]).double())
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    q = discrepancy.fill_noise(torch.tensor([got.noise for got in reports], dtype=torch.float64), n)
    sizes = [sketch or sum(x.numel() for x in params.values()) for params in held]
    up = sum(size * reports[0].gradient.element_size() + 16 for size in sizes)  # and the noise, and n_i
    return zeta, q, n, Work(rounds=1, bytes_down=sum(num_bytes(params) for params in held), bytes_up=up)
