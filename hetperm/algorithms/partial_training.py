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
    """Options of partial training. `extraction` and `ordered` distinguish its methods.

    Without fine-tuning, `fine_tune_steps` is 0.
    """

    extraction: str = "static"
    ordered: bool = False

    @property
    def rounds(self) -> int:
        """The number of rounds of global training in the whole run."""
        return num_rounds(self.steps - self.fine_tune_steps, self.local_steps)


def partial_training(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""Every client takes K steps on its part of w; the server averages each coordinate over the clients that hold it.

    .. math:: w_k \leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot w)_{i,K,k}

    A part is the first channels ("static": HeteroFL), a moving window ("rolling": FedRolex) or a fresh draw ("random":
    Federated Dropout). Coordinates that nobody held keep their value. With ``ordered`` a client draws one of the widths
    that it can hold for every step (FjORD). If all clients hold the whole model, this is FedAvg. The average is not
    weighted by samples, as in the warm-up of PERM: all clients count alike, as they do in the reported accuracy.

    Personal models: the static part of w that the client can hold. FedRolex and Federated Dropout do not train such
    parts: they are made for the whole w. If the options have steps for it, every client fine-tunes its part on its own
    data at the end: :math:`v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi)`, starting from the tail average if
    there is one. A step costs one gradient.
    """
    updates = [update_of(client, federation, options) for client in federation.clients]

    def begin() -> State:
        return State(0, start, own_parts(federation, start))

    def advance(state: State, round: int) -> State:
        w, work = local_sgd_round(
            federation,
            state.w,
            updates,
            batch_size=options.batch_size,
            round=round,
            extraction=options.extraction,
        )
        return replace(state, w=w, v=own_parts(federation, w), work=state.work + work)

    # Steps for fine-tuning come out of the same budget, so that all rivals take equally many.
    epoch = in_rounds(advance, options, cost=options.local_steps, spare=options.fine_tune_steps)
    return Algorithm(begin, epoch, fine_tuning(federation, options))


def update_of(client: Client, federation: Federation, options: Options) -> Update:
    """The update of a client in a round: SGD, or with ``ordered`` SGD on parts of the widths in use that fit it."""
    if not options.ordered:
        return options.sgd
    widths = sorted({other.width for other in federation.clients if other.width <= client.width})
    return Ordered(options.local_steps, options.batch_size, options.lr, tuple(widths), options.step_cap)


def own_parts(federation: Federation, w: Params) -> tuple[Params, ...]:
    """(N,) the static part of w for every client. Clients of one width share the same tensors."""
    slicer, clients = federation.slicer, federation.clients
    parts = {width: slicer.cut(w, slicer.index(width)) for width in {client.width for client in clients}}
    return tuple(parts[client.width] for client in clients)
