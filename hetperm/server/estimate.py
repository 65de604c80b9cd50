"""Reports: the gradients that clients send, and how far apart they are (stage 1 of the paper, Algorithm A1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm.device.gradients import POSITIONS, ReportGradient
from hetperm.engine.task import Task
from hetperm.mixing import discrepancy
from hetperm.params import Params, check_finite, num_bytes
from hetperm.server.federation import Federation
from hetperm.server.slicer import Index
from hetperm.state import State, Work
from submodels import WHOLE


@dataclass(frozen=True)
class Reports:
    """The reports of all clients, as the mixing problem needs them.

    Attributes:
        zeta: (N, N) squared distances of the gradients, of very many clients row by row.
        q: (N,) variance of each client's mean gradient; None if no client has enough samples to estimate it.
        n: (N,) samples of each client.
        work: the work of collecting the reports.
        gradients: (N,) what clients sent, (d,) each.
        probe: the common model at which the gradients were taken; None if there is none.
        width: its width.
    """

    zeta: Tensor | discrepancy.Distances
    q: Tensor | None
    n: Tensor
    work: Work
    gradients: Sequence[Tensor] = ()
    probe: Params | None = None
    width: float = 1.0


def collect_reports(
    federation: Federation,
    state: State,
    update: ReportGradient,
    *,
    batch_size: int,
    compare: str = "probe",
    extraction: str = "static",
) -> Reports:
    """Ask all clients for their gradient at the global model; return the distances and the noise of the gradients.

    Args:
        compare: "probe": all clients take their gradient at one common part of the global model, the one that the
            smallest of them can hold. "masked": each client at the part that it holds itself (the paper).
        extraction: which part a client holds, for "masked".
        batch_size: samples of a step, in which the work is counted.
    """
    if compare not in ("probe", "masked"):
        raise ValueError(f"unknown discrepancy {compare!r}; use 'probe' or 'masked'")
    clients, slicer, w, r = federation.clients, federation.slicer, state.w, state.r
    widths = [client.width for client in clients]
    # Gradients masked by different parts differ even if the data are alike; at one common part only data count.
    if compare == "probe":
        widths = [min(widths)] * len(clients)
        indices = [slicer.index(width) for width in widths]
    else:
        indices = federation.handed_out(extraction, r)
    # One seed for all clients: only sketches made with the same signs and places can be compared.
    update = replace(update, sketch_seed=federation.seed_for("sketch"))
    models = [slicer.cut(w, index) for index in indices]
    asked = [(update, model) for model in models]
    if compare == "masked":
        asked = [_in_whole_space(update, model, w, index) for model, index in zip(models, indices, strict=True)]
    tasks = [
        Task(
            *asked[j],
            host=j,
            seed=federation.seed_for("report", r, client.key),
            width=widths[j],
            label=f"epoch {r}: gradient of client {j}",
        )
        for j, client in enumerate(clients)
    ]
    reports = federation.run(tasks)
    for j, report in enumerate(reports):
        check_finite({"the gradient": report.gradient}, f"epoch {r}: client {j}", f"; the width was {widths[j]:g}")
    zeta = discrepancy.distances(_chunks([report.gradient for report in reports]), len(clients))
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    q = torch.tensor([report.noise for report in reports], dtype=torch.float64)
    # A client with one sample has no spread. Its noise is estimated from the samples of the others.
    q = None if q.isnan().all() else discrepancy.fill_noise(q, n)
    # A gradient has the size of its model. A masked one is sent without its zeros, whose places the server knows.
    down = sum(num_bytes(params) for params in models)
    up = down if update.sketch is None else sum(num_bytes({"sketch": report.gradient}) for report in reports)
    up += 16 * len(clients)  # the noise and n_i, 8 bytes each
    work = Work(rounds=1, bytes_down=down, bytes_up=up) + federation.work_of(tasks, batch_size)
    common = compare == "probe" and update.sketch is None
    gradients = [report.gradient for report in reports]
    return Reports(zeta, q, n, work, gradients, models[0] if common else None, widths[0])


def _in_whole_space(update: ReportGradient, part: Params, w: Params, index: Index) -> tuple[ReportGradient, Params]:
    """The update and tensors for a client whose gradient is compared in the space of the whole model, zero outside."""
    if index is WHOLE:
        return update, part
    size = sum(x.numel() for x in w.values())
    return replace(update, whole_size=size), part | {POSITIONS: positions(w, index)}


def positions(params: Params, index: Index) -> Tensor:
    """(d_i,) where the coordinates of a part lie in the flat global model (d,)."""
    pieces, first = [], 0
    for name, x in params.items():
        # Cutting a tensor of positions gives the position of every coordinate that is kept.
        whole = torch.arange(first, first + x.numel()).reshape(x.shape)
        pieces.append(index.gather(name, whole).flatten())
        first += x.numel()
    return torch.cat(pieces)


def _chunks(gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the gradients as chunks (N, columns), so that there is never a second copy of all of them."""
    for columns in zip(*(gradient.split(discrepancy.COLUMNS) for gradient in gradients), strict=True):
        yield torch.stack(columns)
