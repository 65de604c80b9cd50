"""Reports: the gradients that clients send, and how far apart they are (stage 1 of the paper, Algorithm A1)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm.device.gradients import POSITIONS, Report, ReportGradient
from hetperm.engine.task import Task
from hetperm.mixing import discrepancy
from hetperm.params import Params, check_finite, num_bytes
from hetperm.server.federation import Federation
from hetperm.server.slicer import Index
from hetperm.state import State, Work
from submodels import WHOLE

REPORTS = "reports"  # the key of State.memory
KEPT = 4096  # numbers of a gradient that are kept for later; of a longer one a sketch is, right to about 2%
FEWEST = 256  # the same, of very many clients, ...
TOGETHER = 2**23  # ... which keep no more than this together: 32 MB
NEVER = -1  # the epoch of a report that was never sent


@dataclass(frozen=True)
class Reports:
    """The reports of all clients, as the mixing problem needs them.

    Attributes:
        zeta: (N, N) squared distances of the gradients, of very many clients row by row; without meaning
            where one is not known.
        q: (N,) variance of each client's mean gradient, 0 where it is not known; None if no client has enough samples
            to estimate it.
        n: (N,) samples of each client.
        work: the work of collecting the reports.
        gradients: (N,) what clients sent, (d,) each; None of those that sent nothing this time.
        probe: the common model at which the gradients were taken; None if there is none.
        width: its width.
        known: the clients that have a report, now or not too long ago; None if all of them sent one now.
        round: the round in which they were collected.
        kept: what is remembered of them: "gradient" (N, s), the gradient or a sketch of it, "noise" (N,) and "epoch"
            (N,), when it was sent.
    """

    zeta: Tensor | discrepancy.Distances
    q: Tensor | None
    n: Tensor
    work: Work
    gradients: Sequence[Tensor | None] = ()
    probe: Params | None = None
    width: float = 1.0
    known: tuple[int, ...] | None = None
    round: int = 0
    kept: Params | None = None


def collect_reports(
    federation: Federation,
    state: State,
    update: ReportGradient,
    *,
    batch_size: int,
    compare: str = "probe",
    extraction: str = "static",
    age: int = 0,
) -> Reports:
    """Ask clients for their gradient at the global model; return the distances and the noise of the gradients.

    All are asked whose report is not of this global model (`missing`). Of those that are absent, the last report is
    used if it is not too old.

    Args:
        compare: "probe": all clients take their gradient at one common part of the global model, the one that the
            smallest of them can hold. "masked": each client at the part that it holds itself (the paper).
        extraction: which part a client holds, for "masked".
        batch_size: samples of a step, in which the work is counted.
        age: epochs for which the report of an absent client is used.
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
        indices = federation.handed_out(extraction, _since(state))
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
            seed=federation.seed_for("report", r, clients[j].key),
            width=widths[j],
            label=f"epoch {r}: gradient of client {j}",
        )
        for j in missing(state, len(clients))
    ]
    outcomes = federation.run(tasks, round=state.work.rounds)
    reports: list[Report | None] = [None] * len(clients)
    for task, report in zip(tasks, outcomes, strict=True):
        reports[task.host] = report
    for j, report in enumerate(reports):
        if report is not None:
            check_finite({"the gradient": report.gradient}, f"epoch {r}: client {j}", f"; the width was {widths[j]:g}")
    # A gradient has the size of its model. A masked one is sent without its zeros, whose places the server knows.
    came = [j for j, report in enumerate(reports) if report is not None]
    down = sum(num_bytes(models[j]) for j in came)
    up = down if update.sketch is None else sum(num_bytes({"sketch": reports[j].gradient}) for j in came)
    up += 16 * len(came)  # the noise and n_i, 8 bytes each
    work = Work(rounds=1, bytes_down=down, bytes_up=up) + federation.work_of(tasks, batch_size, outcomes)
    common = compare == "probe" and update.sketch is None
    found = _compared(federation, state, reports, age=age)
    probe = models[0] if common else None
    return replace(found, work=work, probe=probe, width=widths[0], round=state.work.rounds)


def missing(state: State, clients: int) -> list[int]:
    """The clients that sent no report at the present global model: all of them, right after it has moved on."""
    kept = state.memory.get(REPORTS)
    if kept is None:
        return list(range(clients))
    return (kept["epoch"] < kept["since"]).nonzero().flatten().tolist()


def _since(state: State) -> int:
    """The epoch since which the global model is what it is."""
    return int(state.memory[REPORTS]["since"]) if REPORTS in state.memory else state.r


def outdated(state: State) -> State:
    """The state in which all reports are of an earlier global model, because it has moved on."""
    kept = state.memory.get(REPORTS)
    if kept is None:
        return state
    return replace(state, memory={**state.memory, REPORTS: {**kept, "since": torch.tensor(state.r)}})


def _compared(federation: Federation, state: State, reports: Sequence[Report | None], *, age: int) -> Reports:
    """Distances, noise and samples from the reports that came and from those that are kept, and what is kept now."""
    clients, r = federation.clients, state.r
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    gradients = [None if report is None else report.gradient for report in reports]
    came = [j for j, gradient in enumerate(gradients) if gradient is not None]
    kept = _kept(federation, state, reports)
    if len(came) == len(clients):
        zeta = discrepancy.distances(_chunks(gradients), len(clients))
        # A client with one sample has no spread. Its noise is estimated from the samples of the others.
        q = None if kept["noise"].isnan().all() else discrepancy.fill_noise(kept["noise"], n)
        return Reports(zeta, q, n, Work(), gradients, kept=kept)
    # A report at the present model is never too old, however long the model has not moved.
    fresh = kept["epoch"] >= kept["since"]
    known = (fresh | ((kept["epoch"] != NEVER) & (r - kept["epoch"] <= age))).nonzero().flatten()
    noise, q = kept["noise"][known], torch.zeros_like(n)
    q = None if noise.isnan().all() else q.index_copy_(0, known, discrepancy.fill_noise(noise, n[known]))
    if len(clients) > discrepancy.DENSE_UP_TO and kept["gradient"].numel():
        zeta = discrepancy.Distances(kept["gradient"].cpu())  # very many are compared by what is kept of all
    else:
        zeta = _matrix(kept, known, gradients)
    return Reports(zeta, q, n, Work(), gradients, known=tuple(known.tolist()), kept=kept)


def _matrix(kept: Params, known: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
    """(N, N) the distances between clients that are known; of those that came, by what they sent."""
    zeta = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    if len(known):
        zeta[known[:, None], known] = discrepancy.pairwise(kept["gradient"][known]).double().cpu()
    came = [j for j, gradient in enumerate(gradients) if gradient is not None]
    if len(came):  # also if only a sketch of it is kept
        rows = torch.tensor(came)
        zeta[rows[:, None], rows] = discrepancy.pairwise(_chunks([gradients[j] for j in came])).double().cpu()
    return zeta


def _kept(federation: Federation, state: State, reports: Sequence[Report | None]) -> Params:
    """What is kept of all reports, from those that came now and those that were kept before."""
    N, before = len(reports), state.memory.get(REPORTS)
    came = [j for j, report in enumerate(reports) if report is not None]
    size, seed = max(FEWEST, min(KEPT, TOGETHER // N)), federation.seed_for("sketch")
    rows = {j: kept_row(reports[j].gradient, size, seed) for j in came}
    if before is None:
        like = next(iter(rows.values()), torch.zeros(0))
        before = {
            "gradient": like.new_zeros(N, len(like)),
            "noise": torch.full((N,), math.nan, dtype=torch.float64),
            "epoch": torch.full((N,), NEVER),
            "since": torch.tensor(_since(state)),
        }
    size = max([len(row) for row in rows.values()], default=before["gradient"].shape[1])
    gradient = before["gradient"] if before["gradient"].shape[1] == size else rows[came[0]].new_zeros(N, size)
    gradient, noise, epoch = gradient.clone(), before["noise"].clone(), before["epoch"].clone()
    for j, row in rows.items():
        gradient[j], noise[j], epoch[j] = row, reports[j].noise, state.r
    return {"gradient": gradient, "noise": noise, "epoch": epoch, "since": before["since"]}


def kept_row(gradient: Tensor, size: int, seed: int) -> Tensor:
    """(s,) the gradient (d,) itself, or a sketch of one that is too long to be kept.

    Args:
        size: the numbers that are kept.
        seed: of the sketch, the same for all clients of a run.
    """
    return gradient if len(gradient) <= size else discrepancy.sketch(gradient, size, seed)


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
