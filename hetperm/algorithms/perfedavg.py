"""Per-FedAvg: a global model that each client can adapt in one step, by first-order or Hessian-free MAML.

Fallah, Mokhtari and Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", 2020.
"""

from dataclasses import dataclass, replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import FineTuneOptions, begin, fine_tuning, in_rounds
from hetperm.device.rival_updates import Meta
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.global_model import bytes_of, whole_mean
from hetperm.state import State, Work

COST = {"first-order": 2, "hessian-free": 4}  # mini-batch gradients in a local step


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """Options of Per-FedAvg beyond those of every rival."""

    inner_lr: float
    variant: str
    difference: float = 1e-3  # the delta of the Hessian-free variant

    def __post_init__(self):
        if self.variant not in COST:
            raise ValueError(f"unknown variant {self.variant!r} of perfedavg; use {' or '.join(map(repr, COST))}")
        if self.difference <= 0:
            raise ValueError(f"difference {self.difference:g} of perfedavg must be above 0, such as 0.001")


def perfedavg(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""Per-FedAvg: FedAvg on the loss that each client has after one local step.

    .. math:: F_i(w) = f_i(w - \alpha \nabla f_i(w)), \quad
        w_{i,k+1} = w_{i,k} - \beta \tilde\nabla F_i(w_{i,k}), \quad w \leftarrow \frac1N \sum_i w_{i,K}

    with :math:`\alpha` = `inner_lr` and :math:`\beta` = `lr` (see `Meta`). Personal models: w during training. At the
    end each client adapts w, or its tail average, by `fine_tune_steps` steps of `fine_tune_lr`, which are part of the
    budget. (The authors adapt by one step of :math:`\alpha`.) A local step costs 2 gradients, Hessian-free 4.
    """
    N = len(federation.clients)
    cost = COST[options.variant] * options.local_steps
    update = Meta(
        options.local_steps,
        options.batch_size,
        options.lr,
        options.inner_lr,
        difference=options.difference if options.variant == "hessian-free" else None,
        cap=options.step_cap,
    )

    def advance(state: State, round: int) -> State:
        trained = federation.train_at_home([update] * N, [state.w] * N, round=round)
        w = whole_mean(federation, state.w, trained)
        moved = bytes_of(trained)
        work = Work(rounds=1, bytes_down=moved, bytes_up=moved)
        work += federation.work_at_home([update] * N, options.batch_size, trained)
        # Clients adapt only at the end: adapting every round would use up the budget of steps.
        return replace(state, w=w, v=(w,) * N, work=state.work + work)

    epoch = in_rounds(advance, options, cost=cost, spare=options.fine_tune_steps)
    return Algorithm(partial(begin, federation, start), epoch, fine_tuning(federation, options))
