"""pFedMe: personal models that a quadratic penalty keeps near the global model (Moreau envelopes).

T. Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020.
"""

from dataclasses import dataclass, replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions, apart, begin, in_rounds, or_before
from hetperm.device.rival_updates import Envelope
from hetperm.params import Params, mixed
from hetperm.server.federation import Federation
from hetperm.server.global_model import bytes_of, whole_mean
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options(RivalOptions):
    """Options of pFedMe beyond those of every rival."""

    prox: float
    inner_steps: int
    inner_lr: float
    server_step: float

    def __post_init__(self):
        if self.inner_steps < 1:
            raise ValueError(f"{self.inner_steps} inner_steps: pfedme needs at least 1")


def pfedme(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""pFedMe: FedAvg on the Moreau envelopes of the clients' losses.

    .. math:: F_i(w) = \min_\theta f_i(\theta) + \frac\lambda2 \|\theta - w\|^2, \quad
        w_{i,k+1} = w_{i,k} - \eta \lambda (w_{i,k} - \theta_{i,k}), \quad
        w \leftarrow (1 - \beta) w + \beta \frac1N \sum_i w_{i,K}

    with :math:`\lambda` = `prox`, :math:`\eta` = `lr` and :math:`\beta` = `server_step`. :math:`\theta` is computed by
    `inner_steps` steps of `inner_lr` (see `Envelope`). Personal models: the last :math:`\theta_i` of client i. A
    local step costs `inner_steps` gradients.
    """
    N = len(federation.clients)
    cost = options.local_steps * options.inner_steps
    update = Envelope(
        options.local_steps,
        options.batch_size,
        options.lr,
        options.prox,
        inner_steps=options.inner_steps,
        inner_lr=options.inner_lr,
        cap=options.step_cap,
    )

    def advance(state: State, round: int) -> State:
        outcomes = federation.train_at_home([update] * N, [state.w] * N, round=round)
        local, theta = apart(outcomes, 2)
        mean = whole_mean(federation, state.w, local)
        w = mixed((state.w, 1 - options.server_step), (mean, options.server_step))
        # theta stays at its client, so only w and the local models are sent.
        moved = bytes_of(local)
        work = Work(rounds=1, bytes_down=moved, bytes_up=moved)
        work += federation.work_at_home([update] * N, options.batch_size, outcomes)
        return replace(state, w=w, v=or_before(theta, state.v), work=state.work + work)

    return Algorithm(partial(begin, federation, start), in_rounds(advance, options, cost=cost))
