"""FedRep: all clients train one body, and each has a classifier of its own on top of it.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
2021.
"""

from dataclasses import dataclass, replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.partial_training import own_parts
from hetperm.algorithms.steps import FineTuneOptions, fine_tuning, in_rounds, or_before
from hetperm.device.rival_updates import HeadThenBody
from hetperm.params import Params, num_bytes
from hetperm.server.federation import Federation
from hetperm.server.global_model import covered_mean
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """Options of FedRep beyond those of every rival.

    Attributes:
        head_steps: steps of the classifier in a round, before the K steps of the body.
        head_lr: their step size.
    """

    head_steps: int
    head_lr: float


def fedrep(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""FedRep by parts: in a round each client trains its classifier, then its part of the body; the server averages.

    .. math:: h_i \leftarrow h_i - \eta_h \nabla_h f_i(m_i \odot \phi, h_i; \xi), \quad
        \phi_k \leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot \phi)_{i,K,k}

    The classifier :math:`h_i` takes `head_steps` steps with the body fixed, then the body :math:`\phi` takes K with the
    classifier fixed. The classifier is the last linear layer with a row for every output; it has the width of its
    client, stays there and begins at its part of the start. (The authors draw it at random, and some clients a round.)
    If all clients hold the whole model this is the paper's FedRep. Personal models: the client's part of the averaged
    body and its own classifier; with `fine_tune_steps` both are fine-tuned at the end. In w the classifier is an
    average of all, which nobody uses. A step costs one gradient, also one of the classifier alone, though a device
    could do that for less.
    """
    if not federation.heads:
        raise ValueError(
            "fedrep gives each client a classifier of its own, and this model ends in no linear layer with one row for "
            "each output; use ditto instead"
        )
    clients, heads = federation.clients, set(federation.heads)
    update = HeadThenBody(
        options.local_steps,
        options.batch_size,
        options.lr,
        heads=tuple(federation.heads),
        head_steps=options.head_steps,
        head_lr=options.head_lr,
        cap=options.step_cap,
    )
    updates = [update] * len(clients)
    indices = federation.handed_out("static", round=0)

    def begin() -> State:
        return State(0, start, own_parts(federation, start))

    def advance(state: State, round: int) -> State:
        trained = federation.train_at_home(updates, state.v, round=round)
        w = covered_mean(federation, state.w, trained, indices)
        parts = own_parts(federation, w)
        v = tuple(
            {name: own[name] if name in heads else x for name, x in part.items()}
            for part, own in zip(parts, or_before(trained, state.v), strict=True)
        )
        here = [part for part, own in zip(parts, trained, strict=True) if own is not None]
        moved = sum(num_bytes({name: x for name, x in part.items() if name not in heads}) for part in here)
        work = Work(rounds=1, bytes_down=moved, bytes_up=moved)
        work += federation.work_at_home(updates, options.batch_size, trained)
        return replace(state, w=w, v=v, work=state.work + work)

    cost = options.head_steps + options.local_steps
    epoch = in_rounds(advance, options, cost=cost, spare=options.fine_tune_steps)
    return Algorithm(begin, epoch, fine_tuning(federation, options))
