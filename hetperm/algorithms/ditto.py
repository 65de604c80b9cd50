"""Ditto: a global model, and for each client a model of its own that is pulled towards it.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", 2021.
"""

from dataclasses import dataclass, replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.partial_training import own_parts
from hetperm.algorithms.steps import RivalOptions, apart, in_rounds, or_before
from hetperm.device.rival_updates import OWN, Proximal
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.global_model import bytes_of, covered_mean
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options(RivalOptions):
    """Options of Ditto beyond those of every rival."""

    prox: float


def ditto(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""Ditto: FedAvg by parts for w, and for each client a model :math:`v_i` near its part of w.

    .. math:: w_k &\leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot w)_{i,K,k} \\
        v_i &\leftarrow v_i - \eta \big( \nabla f_i(v_i; \xi) + \lambda (v_i - m_i \odot w) \big)

    with :math:`\lambda` = `prox` and w as the client received it. In a round both models take K steps on the same
    batches. The parts are static (HeteroFL's), so that the own model and the part have the same coordinates; if all
    clients hold the whole model this is the paper's Ditto. (There every round samples some clients; here all take
    part.) Personal models: v_i, which stays at its client and begins at its part of the start. A local step costs 2
    gradients.
    """
    clients = federation.clients
    update = Proximal(options.local_steps, options.batch_size, options.lr, options.prox, options.step_cap)
    updates = [update] * len(clients)
    indices = federation.handed_out("static", round=0)

    def begin() -> State:
        return State(0, start, own_parts(federation, start))

    def advance(state: State, round: int) -> State:
        parts = own_parts(federation, state.w)
        # A deployment keeps v_i at its client. It is in the task only because a task carries all it needs.
        models = [part | {OWN + name: x for name, x in v.items()} for part, v in zip(parts, state.v, strict=True)]
        outcomes = federation.train_at_home(updates, models, round=round)
        local, own = apart(outcomes, 2)
        w = covered_mean(federation, state.w, local, indices)
        moved = bytes_of(local)
        work = Work(rounds=1, bytes_down=moved, bytes_up=moved)
        work += federation.work_at_home(updates, options.batch_size, outcomes)
        return replace(state, w=w, v=or_before(own, state.v), work=state.work + work)

    return Algorithm(begin, in_rounds(advance, options, cost=2 * options.local_steps))
