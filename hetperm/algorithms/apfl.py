"""APFL: a client deploys a mixture of the global model and its own, and may learn the weights of both.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hetperm.algorithms import steps
from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions, apart, in_rounds, or_before
from hetperm.device.rival_updates import OWN, Mixture
from hetperm.params import Params, mixed
from hetperm.server.federation import Federation
from hetperm.server.global_model import bytes_of, whole_mean
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options(RivalOptions):
    """Options of APFL beyond those of every rival."""

    mix: float
    adaptive: bool

    def __post_init__(self):
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix {self.mix} is outside [0, 1]; it is the weight of a client's own model in apfl")


def apfl(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""APFL: FedAvg for w, and for each client a model :math:`u_i` that is trained inside the mixture.

    .. math:: \bar v_i = a_i u_i + (1 - a_i) w_i, \quad
        w_i \leftarrow w_i - \eta \nabla f_i(w_i; \xi), \quad
        u_i \leftarrow u_i - \eta \nabla_u f_i(\bar v_i; \xi) = u_i - \eta a_i \nabla f_i(\bar v_i; \xi)

    (The paper writes :math:`\alpha_i, v_i` for :math:`a_i, u_i`.) The server averages the w_i. u_i and a_i stay at the
    client; here they are in `State.memory` as ``"own i"`` and ``"mix"``. Personal models: :math:`a_i u_i + (1 - a_i) w`
    with the averaged w. A local step costs 2 gradients.
    """
    N = len(federation.clients)
    cost = 2 * options.local_steps

    def begin() -> State:
        mix = torch.full((N,), options.mix, dtype=torch.float64)
        return replace(steps.begin(federation, start), memory=_memory([start] * N, mix))

    def advance(state: State, round: int) -> State:
        weights = state.memory["mix"]["mix"].tolist()
        updates = [
            Mixture(
                options.local_steps,
                options.batch_size,
                options.lr,
                mix=a,
                adaptive=options.adaptive,
                cap=options.step_cap,
            )
            for a in weights
        ]
        # A deployment keeps these models at the clients. They are in the task only because a task carries all it needs.
        models = [state.w | {OWN + name: x for name, x in state.memory[f"own {i}"].items()} for i in range(N)]
        outcomes = federation.train_at_home(updates, models, round=round)
        local, own, mixes = apart(outcomes, 3)
        w = whole_mean(federation, state.w, local)
        own = or_before(own, [state.memory[f"own {i}"] for i in range(N)])
        old = state.memory["mix"]["mix"]
        mix = torch.stack([old[i] if a is None else a["mix"] for i, a in enumerate(mixes)])
        v = tuple(mixed((u, a), (w, 1 - a)) for u, a in zip(own, mix.tolist(), strict=True))
        # So only w counts as sent, in both directions.
        moved = bytes_of(local)
        work = Work(rounds=1, bytes_down=moved, bytes_up=moved)
        work += federation.work_at_home(updates, options.batch_size, outcomes)
        return replace(state, w=w, v=v, work=state.work + work, memory=_memory(own, mix))

    return Algorithm(begin, in_rounds(advance, options, cost=cost))


def _memory(own: Sequence[Params], mix: Tensor) -> dict[str, Params]:
    """What clients keep: their own models, and the weights (N,) of these in the mixture."""
    return {f"own {i}": u for i, u in enumerate(own)} | {"mix": {"mix": mix}}
