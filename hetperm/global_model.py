"""Training of the one global model: rounds of local SGD, and steps on the mean gradient."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.engine import Task, run_all
from hetperm.local import Params, Shard, Workbench, flat, sgd_update
from hetperm.randomness import seed_for
from hetperm.state import Work, mixed, num_bytes
from hetperm.visits import finite


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
    weighted: bool = False,
) -> tuple[Params, Work]:
    """The global model after every client took K steps from it and the server averaged, and the work of it.

    Args:
        weighted: average by n_i; the paper averages plainly.
    """
    update = partial(sgd_update, steps=local_steps, batch_size=batch_size, lr=lr)
    tasks = [Task(update, w, host=j, seed=seed_for(seed, "global", r, client.key)) for j, client in enumerate(clients)]
    places = [f"global round {r}: client {j}" for j in range(len(clients))]
    models = [finite(params, place) for params, place in zip(run_all(engine, tasks, places), places, strict=True)]
    moved = len(clients) * num_bytes(w)
    work = Work(rounds=1, client_steps=local_steps * len(clients), bytes_down=moved, bytes_up=moved)
    return mean_model(models, clients, weighted=weighted), work


def mean_model(models: Sequence[Params], clients: Sequence[Client], *, weighted: bool = False) -> Params:
    """The average of the clients' models, summed in the order of identities: relabelling does not change a bit."""
    order = sorted(range(len(clients)), key=lambda j: clients[j].key)
    shares = [clients[j].n_train if weighted else 1 for j in order]
    return mixed(*((models[j], share / sum(shares)) for j, share in zip(order, shares, strict=True)))


def batch_gradient(
    bench: Workbench, params: Params, shard: Shard, *, batch_size: int, generator: torch.Generator
) -> Tensor:
    """(d,) the gradient of one large mini-batch."""
    x, y = shard
    bench.load(params)
    batch = torch.randperm(len(x), generator=generator)[:batch_size]
    return flat(bench.gradient(x[batch], y[batch]))


def gradient_step(
    w: Params, clients: Sequence[Client], engine, *, seed: int, r: int, batch_size: int, lr: float
) -> tuple[Params, Work]:
    r"""The global model after :math:`w \leftarrow w - \gamma \frac1N \sum_i \nabla f_i(w; \xi)`, and the work of it."""
    update = partial(batch_gradient, batch_size=batch_size)
    tasks = [Task(update, w, host=j, seed=seed_for(seed, "step", r, client.key)) for j, client in enumerate(clients)]
    gradients = run_all(engine, tasks, [f"global step {r}: client {j}" for j in range(len(clients))])
    moved = len(clients) * num_bytes(w)
    mean = mean_model([{"": g} for g in gradients], clients)[""]
    step = finite(subtract(w, mean, lr), f"global step {r}")
    return step, Work(rounds=1, bytes_down=moved, bytes_up=moved)


def subtract(w: Params, gradient: Tensor, lr: float) -> Params:
    """The model one step down a flat gradient (d,)."""
    pieces = gradient.split([x.numel() for x in w.values()])
    return {name: x - lr * piece.reshape(x.shape) for (name, x), piece in zip(w.items(), pieces, strict=True)}
