"""FedAvg, HeteroFL, FjORD, Federated Dropout, FedRolex: one global model; each client trains the part it can hold.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017 (FedAvg: every part is
the whole); Diao, Ding and Tarokh, "HeteroFL", 2021; Horvath et al., "FjORD", 2021; Caldas et al., "Expanding the Reach
of Federated Learning by Reducing Client Resource Requirements", 2018; Alam et al., "FedRolex", 2022.
"""

from dataclasses import dataclass, replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import FineTuneOptions, fine_tuning, in_rounds, num_rounds
from hetperm.client import Client
from hetperm.device.rival_updates import Scaled, hidden_layers, scaled
from hetperm.device.updates import Distil, Ordered, Update
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.global_model import drawn_widths, local_sgd_round
from hetperm.state import State
from submodels import WHOLE


@dataclass(frozen=True)
class Options(FineTuneOptions):
    """Options of partial training. `extraction` and `ordered` distinguish its methods.

    Without fine-tuning, `fine_tune_steps` is 0.

    Attributes:
        ordered: whether clients also train parts narrower than they can hold (FjORD).
        draws: how often such a width is drawn: for every "step", or once for all steps of a "round".
        distil: the weight of FjORD's self-distillation; 0 is none.
        scaler: whether hidden layers are divided by the width (HeteroFL).
        masked_loss: whether a client trains and predicts only the classes that it has, under this method only; the run
            sees to it (HeteroFL).
    """

    extraction: str = "static"
    ordered: bool = False
    draws: str = "step"
    distil: float = 0.0
    scaler: bool = False
    masked_loss: bool = False

    def __post_init__(self):
        if self.draws not in ("step", "round"):
            raise ValueError(f"unknown draws {self.draws!r} of fjord; use 'step' or 'round'")
        if self.distil and self.draws == "round":
            raise ValueError(
                f"distil {self.distil:g} teaches a width drawn for every step and draws is 'round'; "
                "set draws to 'step' or distil to 0"
            )

    @property
    def cost(self) -> int:
        """Mini-batch gradients of a round. Distillation takes a second one in every step."""
        return self.local_steps * (2 if self.distil else 1)

    @property
    def rounds(self) -> int:
        """The number of rounds of global training in the whole run."""
        return num_rounds(self.steps - self.fine_tune_steps, self.cost)


def partial_training(federation: Federation, start: Params, options: Options) -> Algorithm:
    r"""Every client takes K steps on its part of w; the server averages each coordinate over the clients that hold it.

    .. math:: w_k \leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot w)_{i,K,k}

    A part is the first channels ("static": HeteroFL), a moving window ("rolling": FedRolex) or a fresh draw ("random":
    Federated Dropout). Coordinates that nobody held keep their value. With ``ordered`` a client draws one of the widths
    that it can hold for every step, or for every round (FjORD). If all clients hold the whole model, this is FedAvg.
    The average is not weighted by samples, as in the warm-up of PERM: all clients count alike, as they do in the
    reported accuracy.

    With ``distil`` a client of FjORD trains in every step the widest part it can hold, which teaches a narrower one
    (`Distil`; the paper's :math:`\alpha = T = 1` is a weight of 1). The paper draws the widest part too; here a pupil
    is always narrower, and clients of the smallest width have none.

    With ``scaler`` hidden layers of a part of width p are divided by p (`Scaled`). Where a norm follows, it cancels
    this. HeteroFL leaves the division out in tests, where it has the whole model; a part is deployed here, so the
    division is kept in the weights of the personal models.

    Personal models: the static part of w that the client can hold. FedRolex and Federated Dropout do not train such
    parts: they are made for the whole w. If the options have steps for it, every client fine-tunes its part on its own
    data at the end: :math:`v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi)`, starting from the tail average if
    there is one. A step costs one gradient, with distillation two.
    """
    if options.scaler and not federation.heads:
        raise ValueError(
            "scaler divides all layers but the classifier, and this model ends in no linear layer with one row for "
            "each output; leave scaler out"
        )
    updates = [update_of(client, federation, options) for client in federation.clients]

    def begin() -> State:
        return State(0, start, personal(start))

    def personal(w: Params) -> tuple[Params, ...]:
        return own_parts(federation, w, scaler=options.scaler)

    def advance(state: State, round: int) -> State:
        w, work = local_sgd_round(
            federation,
            state.w,
            updates,
            batch_size=options.batch_size,
            round=round,
            extraction=options.extraction,
            widths=drawn_widths(federation, round) if options.ordered and options.draws == "round" else None,
        )
        return replace(state, w=w, v=personal(w), work=state.work + work)

    # Steps for fine-tuning come out of the same budget, so that all rivals take equally many.
    epoch = in_rounds(advance, options, cost=options.cost, spare=options.fine_tune_steps)
    return Algorithm(begin, epoch, fine_tuning(federation, options))


def update_of(client: Client, federation: Federation, options: Options) -> Update:
    """The update of a client in a round: SGD, or with ``ordered`` SGD on parts of the widths in use that fit it."""
    common = {"steps": options.local_steps, "batch_size": options.batch_size, "lr": options.lr, "cap": options.step_cap}
    scale = scale_of(client.width, federation) if options.scaler else 1.0
    if scale != 1:
        return Scaled(**common, scale=scale, heads=federation.heads)
    if not options.ordered or options.draws == "round":
        return options.sgd
    *narrower, own = sorted({other.width for other in federation.clients if other.width <= client.width})
    if not options.distil:
        return Ordered(**common, widths=(*narrower, own))
    return Distil(**common, widths=tuple(narrower), weight=options.distil) if narrower else options.sgd


def scale_of(width: float, federation: Federation) -> float:
    """What hidden layers of a part are multiplied by: 1 / width, or 1 if the width cuts nothing."""
    return 1.0 if federation.slicer.index(width) is WHOLE else 1 / width


def own_parts(federation: Federation, w: Params, *, scaler: bool = False) -> tuple[Params, ...]:
    """(N,) the static part of w for every client. Clients of one width share the same tensors.

    Args:
        scaler: whether hidden layers are divided by the width.
    """
    slicer, clients = federation.slicer, federation.clients
    parts = {width: slicer.cut(w, slicer.index(width)) for width in {client.width for client in clients}}
    if scaler:
        hidden = hidden_layers(w, federation.heads)
        parts = {width: scaled(part, hidden, scale_of(width, federation)) for width, part in parts.items()}
    return tuple(parts[client.width] for client in clients)
