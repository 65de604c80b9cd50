"""APFL: a client deploys a mixture of the global model and one of its own, and may learn how much of each.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import RivalOptions, at_home, begin, budgeted
from hetperm.client import Client
from hetperm.device.bench import Params, Shard, Workbench, batches
from hetperm.server.global_model import mean_model
from hetperm.state import State, Work, mixed, num_bytes


@dataclass(frozen=True)
class Options(RivalOptions):
    """What APFL needs to know beyond what every rival does."""

    mix: float
    adaptive: bool

    def __post_init__(self):
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix {self.mix} is outside [0, 1]; it is the weight of a client's own model in apfl")


def apfl(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    r"""APFL: FedAvg for w, and beside it a model :math:`u_i` of each client's own, trained as part of the mixture.

    .. math:: \bar v_i = a_i u_i + (1 - a_i) w_i, \quad
        w_i \leftarrow w_i - \eta \nabla f_i(w_i; \xi), \quad
        u_i \leftarrow u_i - \eta \nabla_u f_i(\bar v_i; \xi) = u_i - \eta a_i \nabla f_i(\bar v_i; \xi)

    (The paper writes :math:`\alpha_i, v_i` for :math:`a_i, u_i`.) The server averages the w_i; u_i and a_i stay at
    home, in `State.memory` as ``"own i"`` and ``"mix"``. Personal models: :math:`a_i u_i + (1 - a_i) w`, with
    the averaged w. A local step costs 2 gradients.
    """
    N = len(clients)
    cost = 2 * options.local_steps

    def start_apart() -> State:
        mix = torch.full((N,), options.mix, dtype=torch.float64)
        return replace(begin(clients, start), memory=_memory([start] * N, mix))

    def advance(state: State, t: int) -> State:
        updates = [
            partial(
                mixture_update,
                own=state.memory[f"own {i}"],
                mix=float(state.memory["mix"]["mix"][i]),
                steps=options.local_steps,
                batch_size=options.batch_size,
                lr=options.lr,
                adaptive=options.adaptive,
            )
            for i in range(N)
        ]
        outcomes = at_home(clients, engine, updates, [state.w] * N, seed=options.seed, t=t)
        w = mean_model([local for local, _, _ in outcomes], clients)
        own = [own for _, own, _ in outcomes]
        mix = torch.stack([mix["mix"] for _, _, mix in outcomes])
        v = tuple(mixed((u, a), (w, 1 - a)) for u, a in zip(own, mix.tolist(), strict=True))
        moved = N * num_bytes(w)
        work = Work(rounds=1, client_steps=cost * N, bytes_down=moved, bytes_up=moved)
        return replace(state, w=w, v=v, work=state.work + work, memory=_memory(own, mix))

    epoch = budgeted(advance, options, cost=cost)
    return Algorithm(start_apart, epoch, finish=lambda state: state)


def _memory(own: Sequence[Params], mix: Tensor) -> dict[str, Params]:
    """What clients keep: their own models, and (N,) the weights of these."""
    return {f"own {i}": u for i, u in enumerate(own)} | {"mix": {"mix": mix}}


def mixture_update(
    bench: Workbench,
    params: Mapping[str, Tensor],
    shard: Shard,
    *,
    own: Params,
    mix: float,
    steps: int,
    batch_size: int,
    lr: float,
    adaptive: bool,
    generator: torch.Generator,
) -> tuple[Params, Params, Params]:
    r"""The local copy of w, the client's own model u and the weight a of it after K steps, all on the same batches.

    If ``adaptive``, a takes one step a round, with the gradient of the first batch, and stays in [0, 1]:
    :math:`a \leftarrow a - \eta \langle u - w, \nabla f_i(\bar v; \xi) \rangle`.
    """
    x, y = shard
    w, u, a = params, own, mix
    for k, D in enumerate(batches(len(x), batch_size, steps, generator)):
        bench.load(mixed((u, a), (w, 1 - a)))
        g = bench.gradient(x[D], y[D])
        slope = sum(((u[name] - w[name]) * part).sum() for name, part in zip(bench.names, g, strict=True))
        bench.load(u)
        bench.descend(g, lr * a)
        u = bench.take()
        bench.load(w)
        bench.descend(bench.gradient(x[D], y[D]), lr)
        w = bench.take()
        if adaptive and k == 0:
            a = min(max(a - lr * float(slope), 0.0), 1.0)
    return w, u, {"mix": torch.tensor(a, dtype=torch.float64)}
