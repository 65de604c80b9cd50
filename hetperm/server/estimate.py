"""What the server learns about its clients: the gradients that they report, and how far apart these are (stage 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.device.bench import Params, Shard, Workbench, micro_gradients
from hetperm.engine import Task, run_all
from hetperm.mixing import discrepancy
from hetperm.randomness import seed_for
from hetperm.server.global_model import handed_out
from hetperm.server.slicer import WHOLE, Parts
from hetperm.server.visits import finite
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
    most: int = 512,
    generator: torch.Generator,
) -> Report:
    """The full gradient of the client's mean loss, from micro-batches whose spread tells how certain it is.

    Args:
        places: where the coordinates of the client's model lie in the global one, and how many that has; the gradient
            is zero in all others. None: the client's model is what is compared.
        most: samples that are run at once.
    """
    gradients, sizes = micro_gradients(bench, params, shard, parts=noise_batches, generator=generator, most=most)
    mean, noise = discrepancy.mean_and_noise(gradients, sizes)
    if places is not None:
        at, d = places
        mean = mean.new_zeros(d).index_copy_(0, at.to(mean.device), mean)
    sent = mean if sketch is None else discrepancy.sketch(mean, sketch, sketch_seed)
    return Report(sent, noise)


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
    most: int = 512,
) -> tuple[Tensor, Tensor | None, Tensor, Work]:
    """What clients report, as the server sees it: zeta (N, N), noise q (N,), samples n (N,), and the work of it.

    q is None if no client has two samples, and with them a spread.

    Args:
        compare: "probe": all clients take their gradient at one common model, the part of the global model that
            the smallest of them can hold; "masked": each at the part that it holds itself (the paper).
        extraction: which part that is, with "masked".
        most: samples that a client runs at once.
    """
    if compare not in ("probe", "masked"):
        raise ValueError(f"unknown discrepancy {compare!r}; use 'probe' or 'masked'")
    widths = [client.width for client in clients]
    places: list[tuple[Tensor, int] | None] = [None] * len(clients)
    if compare == "probe":
        widths = [min(widths)] * len(clients)
        indices = [parts.index(width) for width in widths]
    else:
        indices = handed_out(clients, parts, extraction, seed=seed, r=r)
        d = sum(x.numel() for x in w.values())
        places = [None if index is None else (parts.positions(w, index), d) for index in indices]
    how = {"noise_batches": noise_batches, "sketch": sketch, "sketch_seed": seed_for(seed, "sketch"), "most": most}
    update = partial(report, **how)
    held = [parts.cut(w, index) for index in indices]
    seeds = [seed_for(seed, "report", r, client.key) for client in clients]
    tasks = [
        Task(partial(update, places=place), params, host=j, seed=own_seed, width=width)
        for j, (place, params, own_seed, width) in enumerate(zip(places, held, seeds, widths, strict=True))
    ]
    reports = run_all(engine, tasks, [f"epoch {r}: gradient of client {j}" for j in range(len(clients))])
    for j, got in enumerate(reports):
        finite({"the gradient": got.gradient}, f"epoch {r}: client {j}")
    zeta = discrepancy.pairwise(_chunks([got.gradient for got in reports])).double()
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    q = torch.tensor([got.noise for got in reports], dtype=torch.float64)
    q = None if q.isnan().all() else discrepancy.fill_noise(q, n)
    down = sum(num_bytes(params) for params in held)
    up = down if sketch is None else sum(num_bytes({"sketch": got.gradient}) for got in reports)
    return zeta, q, n, Work(rounds=1, bytes_down=down, bytes_up=up + 16 * len(clients))  # and the noise, and n_i


def _chunks(gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """(N, columns) of the gradients at a time: never a second copy of all of them."""
    for columns in zip(*(gradient.split(discrepancy.COLUMNS) for gradient in gradients), strict=True):
        yield torch.stack(columns)
