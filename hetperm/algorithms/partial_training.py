"""FedAvg, HeteroFL, FjORD, Federated Dropout, FedRolex: one global model; each client trains the part it can hold.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017 (FedAvg: every part is
the whole); Diao, Ding and Tarokh, "HeteroFL", 2021; Horvath et al., "FjORD", 2021; Caldas et al., "Expanding the Reach
of Federated Learning by Reducing Client Resource Requirements", 2018; Alam et al., "FedRolex", 2022.
"""

from dataclasses import dataclass, replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import FineTuneOptions, fine_tuning, in_rounds, num_rounds
from hetperm.client import Client
from hetperm.device.updates import Ordered, Update
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.global_model import local_sgd_round
from hetperm.state import State


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """What partial training needs to know beyond what every rival does; `extraction` and `ordered` tell methods apart.

    Without fine-tuning, `fine_tune_steps` is 0.
    """

    extraction: str = "static"
    ordered: bool = False

    @property
    def rounds(self) -> int:
        """Rounds of global training in the whole run."""
        return num_rounds(self.steps - self.fine_tune_steps, self.local_steps)


def partial_training(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""Every client takes K steps on its part of w, and the server averages each coordinate over those that hold it.

    .. math:: w_k \leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot w)_{i,K,k}

    Parts are the first channels ("static": HeteroFL), a window that moves on ("rolling": FedRolex) or drawn anew
    ("random": Federated Dropout); coordinates that nobody held keep their value. With ``ordered`` a client draws, for
    every step, one of the widths that it can hold (FjORD). If all clients hold the whole model this is FedAvg; the
    average is plain, as in the warm-up of PERM: clients count alike, as they do in the accuracy that is reported.

    Personal models: the static part of w that the client can hold. FedRolex and Federated Dropout train no such parts:
    what they are made for is the whole w. At the end every client trains its part on its own data, if the options have
    steps for that: :math:`v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi)`, from the tail average where there is
    one. A step costs one gradient.
    """
    updates = [update_of(client, federation, options) for client in federation.clients]

    def begin() -> State:
        return State(0, start, own_parts(federation, start))

    def advance(state: State, round: int) -> State:
        w, work = local_sgd_round(federation, state.w, updates, round=round, extraction=options.extraction)
        return replace(state, w=w, v=own_parts(federation, w), work=state.work + work)

    epoch = in_rounds(advance, options, cost=options.local_steps, spare=options.fine_tune_steps)
    return Algorithm(begin, epoch, fine_tuning(federation, options))


def update_of(client: Client, federation: Federation, options: Options) -> Update:
    """What a client does in a round: plain SGD, or with ``ordered`` SGD on parts of the widths in use that fit it."""
    if not options.ordered:
        return options.sgd
    widths = sorted({other.width for other in federation.clients if other.width <= client.width})
    return Ordered(options.local_steps, options.batch_size, options.lr, tuple(widths))


def own_parts(federation: Federation, w: Params) -> tuple[Params, ...]:
    """Every client's static part of w; clients of one width share it."""
    slicer, clients = federation.slicer, federation.clients
    parts = {width: slicer.cut(w, slicer.index(width)) for width in {client.width for client in clients}}
    return tuple(parts[client.width] for client in clients)
