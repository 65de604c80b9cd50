"""Training of the global model: rounds of local SGD and steps on the mean gradient, each client on its part."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hetperm.client import Client
from hetperm.device.gradients import BatchGradient
from hetperm.device.updates import Update
from hetperm.engine.task import Task
from hetperm.params import Params, check_finite, mixed, num_bytes, step_size, subtract
from hetperm.randomness import generator_for
from hetperm.server.federation import Federation
from hetperm.server.slicer import Index
from hetperm.state import State, Work
from submodels import WHOLE, average


def local_sgd_round(
    federation: Federation,
    w: Params,
    updates: Sequence[Update],
    *,
    batch_size: int,
    round: int,
    extraction: str = "static",
    widths: Sequence[float] | None = None,
) -> tuple[Params, Work]:
    """The global model after a round in which every client takes K steps on its part and the server averages; the work.

    Args:
        updates: (N,) what each client does with its part.
        batch_size: samples of a step, in which the work is counted.
        extraction: which part a client gets if it cannot hold all: "static", "random" or "rolling".
        widths: (N,) the width of every client's part; as much as it can hold unless given.
    """
    widths = [client.width for client in federation.clients] if widths is None else widths
    indices = federation.handed_out(extraction, round, widths)
    # The seeds of `Federation.train_at_home`: all methods draw the same batches in a round.
    tasks = [
        Task(
            update,
            federation.slicer.cut(w, index),
            host=j,
            seed=federation.seed_for("global", round, client.key),
            width=widths[j],
            label=f"global round {round}: client {j}",
        )
        for j, (client, index, update) in enumerate(zip(federation.clients, indices, updates, strict=True))
    ]
    models = federation.train(tasks, round=round)
    moved = bytes_of(models)
    work = Work(rounds=1, bytes_down=moved, bytes_up=moved) + federation.work_of(tasks, batch_size, models)
    return covered_mean(federation, w, models, indices), work


def drawn_widths(federation: Federation, round: int) -> list[float]:
    """(N,) the width that each client trains in a round of ordered training: one of those in use that it can hold."""
    in_use = sorted({client.width for client in federation.clients})
    return [drawn_width(federation, client, round, in_use) for client in federation.clients]


def drawn_width(federation: Federation, client: Client, round: int, in_use: Sequence[float] | None = None) -> float:
    """The width that one client draws; see `drawn_widths`."""
    in_use = sorted({other.width for other in federation.clients}) if in_use is None else in_use
    fitting = [width for width in in_use if width <= client.width]
    generator = generator_for(federation.seed, "width", round, client.key)
    return fitting[int(torch.randint(len(fitting), (), generator=generator))]


def gradient_step(
    federation: Federation,
    state: State,
    update: BatchGradient,
    indices: Sequence[Index],
    *,
    lr: float,
    batch_size: int,
    cap: float = 0.0,
) -> State:
    r"""The state after a step of w on the mean gradient, each coordinate averaged over the clients that hold it.

    .. math:: w_k \leftarrow w_k - \gamma \operatorname{mean}_{i : k \in m_i} \nabla_k f_i(m_i \odot w; \xi)

    Args:
        indices: (N,) the part of w that each client holds.
        lr: gamma.
        batch_size: samples of a step, in which the work is counted.
        cap: the step is at most this share of the length of w; 0 is no cap.
    """
    r, w = state.r, state.w
    parts = [federation.slicer.cut(w, index) for index in indices]
    tasks = [
        Task(
            update,
            params,
            host=j,
            seed=federation.seed_for("step", r, client.key),
            width=client.width,
            label=f"global step {r}: client {j}",
        )
        for j, (client, params) in enumerate(zip(federation.clients, parts, strict=True))
    ]
    gradients = federation.run(tasks, round=state.work.rounds)
    moved = bytes_of(gradients)  # of the size of the parts
    zero = {name: torch.zeros_like(x) for name, x in w.items()}  # the gradient of coordinates that nobody holds
    mean = covered_mean(federation, zero, gradients, indices)
    w = subtract(w, mean, step_size(lr, cap, list(w.values()), list(mean.values())))
    work = Work(rounds=1, bytes_down=moved, bytes_up=moved) + federation.work_of(tasks, batch_size, gradients)
    return replace(state, w=check_finite(w, f"global step {r}", f"; this step's was {lr:g}"), work=state.work + work)


def bytes_of(models: Iterable[Params | None]) -> int:
    """The bytes of the models of all clients that were there."""
    return sum(num_bytes(params) for params in models if params is not None)


def mean_model(models: Sequence[Params], clients: Sequence[Client]) -> Params:
    """The unweighted average of the clients' models, as in the paper. Relabelling the clients does not change a bit."""
    share = 1 / len(clients)
    order = sorted(range(len(clients)), key=lambda j: clients[j].key)
    return mixed(*((models[j], share) for j in order))


def whole_mean(federation: Federation, w: Params, models: Sequence[Params | None]) -> Params:
    """The average of models of one size, of the same rows of the classifier as in `covered_mean`."""
    return covered_mean(federation, w, models, [WHOLE] * len(models))


def covered_mean(
    federation: Federation, w: Params, models: Sequence[Params | None], indices: Sequence[Index]
) -> Params:
    """Every coordinate averaged over the clients that hold it. Coordinates that nobody holds keep their value in ``w``.

    A client that masks a class does not count in the rows of the classifier for that class.

    Args:
        models: (N,) what each client sent; None of those that were absent.
    """
    order = [j for j in federation.order if models[j] is not None]
    if not order:
        return w
    # A masked class gets no gradient: its rows come back unchanged and would only dilute the others' training.
    clients, rows = federation.clients, {}
    if all([client.classes is not None for client in clients]):
        votes = torch.stack([clients[j].classes for j in order])
        rows = {name: votes for name in federation.heads if name in w}  # only what is trained is averaged
    # If every client holds the whole model, the plain mean is the same and faster.
    if not rows and all([index is WHOLE for index in indices]):
        return mean_model([models[j] for j in order], [clients[j] for j in order])
    return average(w, [(models[j], indices[j], 1.0) for j in order], rows=rows)
