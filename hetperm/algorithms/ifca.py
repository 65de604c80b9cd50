"""IFCA: a few global models. In every round each client joins the one that fits its data best.

Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated Learning", 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm.algorithms import steps
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions, in_rounds
from hetperm.device.gradients import MeanLoss
from hetperm.engine.task import Task
from hetperm.params import NotFinite, Params, num_bytes
from hetperm.randomness import generator_for
from hetperm.server.federation import Federation
from hetperm.server.global_model import mean_model
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options(RivalOptions):
    """Options of IFCA beyond those of every rival."""

    clusters: int

    def __post_init__(self):
        if self.clusters < 1:
            raise ValueError(f"{self.clusters} clusters: ifca needs at least 1")


def ifca(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""IFCA with model averaging: clients choose the cluster of lowest loss and train its model; the server averages.

    .. math:: c_i = \arg\min_c f_i(\theta_c), \quad
        \theta_c \leftarrow \frac{1}{|\{i : c_i = c\}|} \sum_{i : c_i = c} \theta_{c,i,K}

    where :math:`\theta_{c,i,K}` is :math:`\theta_c` after K steps at client i. A cluster that nobody chose keeps its
    model. Clients choose on their whole shard, right after the server has averaged. The choice decides the model of the
    next round and the one to deploy. Personal models: :math:`\theta_{c_i}`; w is the average over all clients. Cluster
    models are in `State.memory` as ``"cluster c"``, the choices as ``"choice"``. The first cluster begins at the start,
    the others at random models. A step costs one gradient. The losses for the choice cost a third of a gradient
    each, and the models sent for it count as bytes.
    """
    clients = federation.clients
    N = len(clients)

    def begin() -> State:
        others = [_redrawn(start, generator_for(federation.seed, "cluster", c)) for c in range(1, options.clusters)]
        return choose(steps.begin(federation, start), [start, *others], round=0)

    def advance(state: State, round: int) -> State:
        choice = state.memory["choice"]["choice"].tolist()
        models = [state.memory[f"cluster {c}"] for c in range(options.clusters)]
        trained = federation.train_at_home([options.sgd] * N, [models[c] for c in choice], round=round)
        # Only the chosen clusters: one that nobody chose keeps its model and may be chosen again.
        for c in set(choice):
            members = [i for i in range(N) if choice[i] == c]
            models[c] = mean_model([trained[i] for i in members], [clients[i] for i in members])
        w = mean_model(trained, clients)
        up = N * (num_bytes(w) + 8)  # the trained model, and the number of its cluster
        work = Work(rounds=1, bytes_up=up) + federation.work_at_home([options.sgd] * N, options.batch_size)
        return choose(replace(state, w=w, work=state.work + work), models, round=round + 1)

    def choose(state: State, models: Sequence[Params], *, round: int) -> State:
        """The state in which every client has the cluster whose model has the lowest loss on its data."""
        seeds = [federation.seed_for("choice", round, client.key) for client in clients]
        tasks = [
            Task(MeanLoss(), model, host=i, seed=seeds[i], label=f"round {round}: cluster {c} at client {i}")
            for i in range(N)
            for c, model in enumerate(models)
        ]
        # A cluster whose loss is not finite is never chosen; it is an error only if a client is left without any.
        losses = torch.stack(federation.run(tasks)).reshape(N, len(models))
        losses = losses.where(losses.isfinite(), math.inf)
        for i in range(N):
            if not losses[i].isfinite().any():
                raise NotFinite(
                    f"round {round}: client {i}: the loss of no cluster is finite; lower the learning rate (lr)"
                )
        choice = losses.argmin(dim=1).cpu()
        memory = {f"cluster {c}": params for c, params in enumerate(models)} | {"choice": {"choice": choice}}
        # Every client gets all models to choose from, so none is sent again for training.
        work = Work(bytes_down=N * sum(num_bytes(params) for params in models))
        work += federation.work_of(tasks, options.batch_size)
        v = tuple(models[c] for c in choice.tolist())
        return replace(state, v=v, memory=memory, work=state.work + work)

    return Algorithm(begin, in_rounds(advance, options, cost=options.local_steps))


def _redrawn(start: Params, generator: torch.Generator) -> Params:
    """Another start: weights drawn anew with the same root mean square; biases and the scales of norms stay.

    Clusters with equal starts would stay equal for ever. Weights that are all zero get the size of a new layer's.
    """
    return {name: x.clone() if x.dim() < 2 else _like(x, generator) for name, x in start.items()}


def _like(x: Tensor, generator: torch.Generator) -> Tensor:
    # 1 / sqrt(3 fan_in) is the standard deviation of the weights that torch draws for a new layer.
    size = float(x.square().mean().sqrt()) or (3 * x[0].numel()) ** -0.5
    return size * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
