"""Reports: the gradients that clients send, and how far apart they are (stage 1 of the paper, Algorithm A1)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.device.gradients import POSITIONS, Report, ReportGradient
from hetperm.engine.task import Task
from hetperm.mixing import discrepancy
from hetperm.params import NotFinite, Params, check_finite, num_bytes
from hetperm.server.federation import Federation
from hetperm.server.slicer import Index
from hetperm.state import State, Work
from submodels import WHOLE

REPORTS = "reports"  # the key of State.memory
EARLY, EARLY_REPORTS = "early model", "early reports"  # the same, of a model from early in the warm-up
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
        compared: (zeta, q) that mixing weights are computed from, where these are others: over two models, this one and
            one from early in the warm-up, or freed of chance.
        gradients: (N,) what clients sent, (d,) each; None of those that sent nothing this time.
        probe: the common model at which the gradients were taken; None if there is none.
        width: its width.
        known: the clients that have a report, now or not too long ago; None if all of them sent one now.
        round: the round in which they were collected.
        memory: what is remembered of them, as it goes into State.memory: "gradient" (N, s), the gradient or a sketch of
            it, "noise" (N,) and "epoch" (N,), when it was sent.
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
    memory: Mapping[str, Params] = field(default_factory=dict)
    compared: tuple[Tensor | discrepancy.Distances, Tensor] | None = None

    @property
    def for_weights(self) -> tuple[Tensor | discrepancy.Distances, Tensor | None]:
        """(zeta, q) that mixing weights are computed from."""
        return self.compared or (self.zeta, self.q)

    def denoised(self, order: Sequence[int]) -> "Reports":
        """The same, with distances for mixing weights that all clients together free of chance (`mixing.denoised`).

        Distances of very many clients, which are computed row by row, stay as they are.

        Args:
            order: (N,) in which clients are taken, which must not depend on their labels.
        """
        zeta, q = self.for_weights
        if q is None or isinstance(zeta, discrepancy.Distances) or self.known == ():
            return self
        known = torch.tensor(order if self.known is None else [j for j in order if j in set(self.known)])
        rows = known[:, None]
        freed = zeta.double().clone()
        freed[rows, known] = mixing.denoised(zeta[rows, known], q[known], self.n[known])
        return replace(self, compared=(freed, q))


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
    used if it is not too old. If there is a model from early in the warm-up (``state.memory[EARLY]``), clients also
    report at that, once.

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

    def task(j: int, of: tuple[ReportGradient, Params], *use: object) -> Task:
        seed = federation.seed_for("report", *use, clients[j].key)
        return Task(*of, host=j, seed=seed, width=widths[j], label=f"epoch {r}: gradient of client {j}")

    tasks = [task(j, asked[j], r) for j in missing(state, len(clients))]
    reports, work = _collected(federation, state, tasks, batch_size)
    early: list[Report | None] = []
    if EARLY in state.memory:
        model = state.memory[EARLY]
        tasks = [task(j, (update, model), "early") for j in _without_report(state, EARLY_REPORTS, len(clients))]
        # In the same round: who is there answers both.
        early, more = _collected(federation, state, tasks, batch_size)
        work += more
    common = compare == "probe" and update.sketch is None
    found = _compared(federation, state, reports, early, age=age)
    probe = models[0] if common else None
    return replace(found, work=Work(rounds=1) + work, probe=probe, width=widths[0], round=state.work.rounds)


def _collected(
    federation: Federation, state: State, tasks: Sequence[Task], batch_size: int
) -> tuple[list[Report | None], Work]:
    """(N,) the reports of the clients that were asked and answered, and the work of it."""
    outcomes = federation.run(tasks, round=state.work.rounds)
    reports: list[Report | None] = [None] * len(federation.clients)
    down = up = 0
    for task, report in zip(tasks, outcomes, strict=True):
        if report is None:
            continue
        reports[task.host] = report
        where = f"epoch {state.r}: client {task.host}"
        check_finite({"the gradient": report.gradient}, where, f"; the width was {task.width:g}")
        if math.isinf(report.noise):  # squares overflow before gradients do
            raise NotFinite(
                f"{where}: the spread of its gradients is {report.noise:g}; its inputs or its loss are too large, so "
                "scale them down, or the learning rate or weight decay is (global_lr, weight_decay)"
            )
        # A gradient has the size of its model. A masked one is sent without its zeros, whose places the server knows.
        model = num_bytes({name: x for name, x in task.params.items() if name != POSITIONS})
        down += model
        up += model if task.update.sketch is None else num_bytes({"sketch": report.gradient})
        up += 16  # the noise and n_i, 8 bytes each
    return reports, Work(bytes_down=down, bytes_up=up) + federation.work_of(tasks, batch_size, outcomes)


def missing(state: State, clients: int) -> list[int]:
    """The clients that sent no report at the present global model: all of them, right after it has moved on."""
    return _without_report(state, REPORTS, clients)


def _without_report(state: State, key: str, clients: int) -> list[int]:
    kept = state.memory.get(key)
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


def _compared(
    federation: Federation, state: State, reports: Sequence[Report | None], early: Sequence[Report | None], *, age: int
) -> Reports:
    """Distances, noise and samples from the reports that came and from those that are kept, and what is kept now."""
    clients, r = federation.clients, state.r
    n = torch.tensor([client.n_train for client in clients], dtype=torch.float64)
    gradients = [None if report is None else report.gradient for report in reports]
    came = [j for j, gradient in enumerate(gradients) if gradient is not None]
    kept = _kept(federation, state, REPORTS, reports)
    memory, before = {REPORTS: kept}, None
    if early:
        before = memory[EARLY_REPORTS] = _kept(federation, state, EARLY_REPORTS, early)
    # A report at the present model is never too old, however long the model has not moved.
    fresh = kept["epoch"] >= kept["since"]
    known = fresh | ((kept["epoch"] != NEVER) & (r - kept["epoch"] <= age))
    if before is not None:
        known &= before["epoch"] != NEVER
    known = known.nonzero().flatten()
    q = noise_of(kept, n, known)
    if len(came) == len(known) == len(clients):
        zeta = discrepancy.distances(_chunks(gradients), len(clients))
        compared = before and over_two_models(_chunks(gradients), q, before, n)
        return Reports(zeta, q, n, Work(), gradients, memory=memory, compared=compared)
    if len(clients) > discrepancy.DENSE_UP_TO and kept["gradient"].numel():
        zeta = discrepancy.Distances(kept["gradient"].cpu())  # very many are compared by what is kept of all
    else:
        zeta = _matrix(kept, known, gradients)
    compared = before and len(known) and over_two_models([kept["gradient"]], q, before, n, known)
    return Reports(zeta, q, n, Work(), gradients, known=tuple(known.tolist()), memory=memory, compared=compared or None)


def noise_of(kept: Params, n: Tensor, known: Tensor) -> Tensor | None:
    """(N,) the noise of the reports that are known, 0 of the others; None if nobody can tell."""
    noise = kept["noise"][known]
    if noise.isnan().all():
        return None
    # A client with one sample has no spread. Its noise is estimated from the samples of the others.
    return torch.zeros_like(n).index_copy_(0, known, discrepancy.fill_noise(noise, n[known]))


def over_two_models(
    gradients: Iterable[Tensor], q: Tensor | None, early: Params, n: Tensor, known: Tensor | None = None
) -> tuple[Tensor | discrepancy.Distances, Tensor] | None:
    r"""(zeta, q) over the present and the early model, each in units of the noise there; None without any noise.

    .. math:: \zeta_{ij} = \sum_t \lVert g_i^t - g_j^t \rVert^2 / \bar q_t, \quad q_i = \sum_t q_i^t / \bar q_t,
              \quad \bar q_t = \sum_i n_i q_i^t \Big/ \sum_i n_i

    As the global model learns to serve everybody the gradients of different groups become alike, up to their noise.
    Early in the warm-up they are not; and what tells clients apart only later is seen by the later model.

    Args:
        gradients: (N, d) at the present model, in chunks (N, d_k).
        q: (N,) their noise.
        early: what is kept of the reports at the early model.
        n: (N,) samples of each client.
        known: the clients whose reports are known at both models; None: all. Of the others q is 0 and zeta without
            meaning.
    """
    known = torch.arange(len(n)) if known is None else known
    before = noise_of(early, n, known)
    unit, early_unit = typical(q, n, known), typical(before, n, known)
    if not (unit and early_unit):
        return None
    both = ((gradients, unit), ([early["gradient"]], early_unit))
    chunks = (chunk.cpu() / math.sqrt(unit) for given, unit in both for chunk in given)
    return discrepancy.distances(chunks, len(n)), q / unit + before / early_unit


def together(memory: Mapping[str, Params], n: Tensor, known: Tensor) -> Params:
    """What is kept of the reports at the present and at the early model, one after the other, in units of their noise.

    Args:
        n: (N,) samples of each client.
        known: (N,) whether a client has a report at the present model that counts.

    Returns:
        "gradient" (N, s), "noise" (N,), "known" (N,) and "units" (M,), the noise at each of the M models; if there are
        reports at one model only, they are as they are, and its unit is 1.
    """
    kept, early = memory[REPORTS], memory.get(EARLY_REPORTS)
    if early is not None:
        both = known & (early["epoch"] != NEVER)
        rows = both.nonzero().flatten()
        units = [typical(noise_of(one, n, rows), n, rows) for one in (kept, early)] if len(rows) else [0.0]
        if all(units):
            parts = [(one["gradient"].cpu() / math.sqrt(u), one["noise"] / u) for one, u in zip((kept, early), units)]
            gradients, noises = zip(*parts, strict=True)
            units = torch.tensor(units, dtype=torch.float64)
            return {"gradient": torch.cat(gradients, 1), "noise": sum(noises), "known": both, "units": units}
    units = torch.ones(1, dtype=torch.float64)
    return {"gradient": kept["gradient"], "noise": kept["noise"], "known": known, "units": units}


def typical(q: Tensor | None, n: Tensor, known: Tensor) -> float:
    """The mean noise over samples, of the clients that are known; 0 if nobody can tell."""
    if q is None:
        return 0.0
    # fsum rounds once, so the order of clients cannot matter.
    return math.fsum((n * q)[known].tolist()) / math.fsum(n[known].tolist())


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


def _kept(federation: Federation, state: State, key: str, reports: Sequence[Report | None]) -> Params:
    """What is kept of all reports under a key, from those that came now and those that were kept before."""
    N, before = len(reports), state.memory.get(key)
    came = [j for j, report in enumerate(reports) if report is not None]
    size, seed = max(FEWEST, min(KEPT, TOGETHER // N)), federation.seed_for("sketch")
    rows = {j: kept_row(reports[j].gradient, size, seed) for j in came}
    if before is None:
        like = next(iter(rows.values()), torch.zeros(0))
        before = {
            "gradient": like.new_zeros(N, len(like)),
            "noise": torch.full((N,), math.nan, dtype=torch.float64),
            "epoch": torch.full((N,), NEVER),
            "since": torch.tensor(_since(state) if key == REPORTS else 0),
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
