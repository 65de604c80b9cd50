"""Training of the one global model: rounds of local SGD, and steps on the mean gradient; each client on its part."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.device.bench import Params, Shard, Workbench, sgd_update
from hetperm.engine import Task, run_all
from hetperm.randomness import seed_for
from hetperm.server.slicer import WHOLE, Parts
from hetperm.server.visits import finite
from hetperm.state import Work, mixed, num_bytes
from submodels import IndexSet


def local_sgd_round(
    w: Params,
    clients: Sequence[Client],
    engine,
    *,
    seed: int,
    r: int,
    local_steps: int,
    batch_size: int,
    lr: float,
    parts: Parts = WHOLE,
    extraction: str = "static",
    updates: Sequence[Callable] | None = None,
) -> tuple[Params, Work]:
    """The global model after every client took K steps on its part and the server averaged, and the work of it.

    Args:
        extraction: which part a client is handed, if it cannot hold all: "static", "random" or "rolling".
        updates: what clients do with it, one for each; plain SGD unless given.
    """
    sgd = partial(sgd_update, steps=local_steps, batch_size=batch_size, lr=lr)
    indices = handed_out(clients, parts, extraction, seed=seed, r=r)
    tasks = [
        Task(update, parts.cut(w, index), host=j, seed=seed_for(seed, "global", r, client.key), width=client.width)
        for j, (client, index, update) in enumerate(zip(clients, indices, updates or [sgd] * len(clients), strict=True))
    ]
    places = [f"global round {r}: client {j}" for j in range(len(clients))]
    models = [finite(params, place) for params, place in zip(run_all(engine, tasks, places), places, strict=True)]
    moved = sum(num_bytes(params) for params in models)
    work = Work(rounds=1, client_steps=local_steps * len(clients), bytes_down=moved, bytes_up=moved)
    return covered_mean(w, models, indices, clients, parts), work


def handed_out(clients: Sequence[Client], parts: Parts, extraction: str, *, seed: int, r: int) -> list[IndexSet | None]:
    """(N,) the part of the global model that each client holds in a round."""
    return [parts.index(client.width, extraction, seed=seed, round=r, key=client.key) for client in clients]


def mean_model(models: Sequence[Params], clients: Sequence[Client]) -> Params:
    """The plain average of the clients' models, as the paper has it; relabelling the clients does not change a bit."""
    share = 1 / len(clients)
    return mixed(*((models[j], share) for j in _by_key(clients)))


def covered_mean(
    w: Params, models: Sequence[Params], indices: Sequence[IndexSet | None], clients: Sequence[Client], parts: Parts
) -> Params:
    """Every coordinate averaged over the clients that hold it; those that nobody holds keep their value in ``w``.

    A client that masks classes has no say in the rows of the classifier that belong to them.
    """
    order, rows = _by_key(clients), {}
    if all([client.classes is not None for client in clients]):
        votes = torch.stack([clients[j].classes for j in order])
        rows = {name: votes for name in parts.heads if name in w}  # a classifier that is not trained is not averaged
    if not rows and all([index is None for index in indices]):
        return mean_model(models, clients)
    return parts.mean(w, [models[j] for j in order], [indices[j] for j in order], rows)


def _by_key(clients: Sequence[Client]) -> list[int]:
    """Clients in the order of their keys: sums in it round alike however the clients are labelled."""
    return sorted(range(len(clients)), key=lambda j: clients[j].key)


def batch_gradient(
    bench: Workbench, params: Params, shard: Shard, *, batch_size: int, generator: torch.Generator, most: int = 512
) -> Params:
    """The gradient of one large mini-batch, by name; ``most`` samples are run at once."""
    x, y = shard
    bench.load(params)
    batch = torch.randperm(len(x), generator=generator)[:batch_size]
    return dict(zip(bench.names, bench.mean_gradient(x[batch], y[batch], most), strict=True))


def gradient_step(
    w: Params,
    clients: Sequence[Client],
    engine,
    *,
    seed: int,
    r: int,
    batch_size: int,
    lr: float,
    parts: Parts = WHOLE,
    extraction: str = "static",
    rounds_before: int = 0,
    most: int = 512,
) -> tuple[Params, Work]:
    r"""The global model after a step on the gradient, averaged over the clients that hold a coordinate; the work of it.

    .. math:: w_k \leftarrow w_k - \gamma \operatorname{mean}_{i : k \in m_i} \nabla_k f_i(m_i \odot w; \xi)

    Args:
        rounds_before: of global training before step 0: a rolling extraction goes on where they left it.
        most: samples that a client runs at once.
    """
    update = partial(batch_gradient, batch_size=batch_size, most=most)
    indices = handed_out(clients, parts, extraction, seed=seed, r=rounds_before + r)
    held = [parts.cut(w, index) for index in indices]
    tasks = [
        Task(update, params, host=j, seed=seed_for(seed, "step", r, client.key), width=client.width)
        for j, (client, params) in enumerate(zip(clients, held, strict=True))
    ]
    gradients = run_all(engine, tasks, [f"global step {r}: client {j}" for j in range(len(clients))])
    moved = sum(num_bytes(params) for params in held)
    nothing = {name: torch.zeros_like(x) for name, x in w.items()}
    step = subtract(w, covered_mean(nothing, gradients, indices, clients, parts), lr)
    return finite(step, f"global step {r}"), Work(rounds=1, bytes_down=moved, bytes_up=moved)


def subtract(w: Params, gradient: Params, lr: float) -> Params:
    """The model one step down a gradient."""
    return {name: x - lr * gradient[name] for name, x in w.items()}


def unflatten(flat: Tensor, like: Params) -> Params:
    """A flat vector (d,) as tensors of the names and shapes of a model."""
    pieces = flat.split([x.numel() for x in like.values()])
    return {name: piece.reshape(x.shape) for (name, x), piece in zip(like.items(), pieces, strict=True)}
