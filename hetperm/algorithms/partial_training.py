"""HeteroFL, FjORD, Federated Dropout and FedRolex: one global model, of which each client trains what it can hold.

Diao, Ding and Tarokh, "HeteroFL", 2021; Horvath et al., "FjORD", 2021; Caldas et al., "Expanding the Reach of Federated
Learning by Reducing Client Resource Requirements", 2018; Alam et al., "FedRolex", 2022.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions, budgeted, fine_tune
from hetperm.client import Client
from hetperm.device.bench import Params, batches_and_widths, ordered_update
from hetperm.randomness import generator_for
from hetperm.server.global_model import local_sgd_round
from hetperm.server.slicer import WHOLE, Parts
from hetperm.state import State


def partial_training(
    clients: Sequence[Client],
    engine,
    start: Params,
    options: RivalOptions,
    parts: Parts = WHOLE,
    *,
    extraction: str,
    ordered: bool = False,
) -> Algorithm:
    r"""Every client takes K steps on its part of w, and the server averages each coordinate over those that hold it.

    .. math:: w_k \leftarrow \operatorname{mean}_{i : k \in m_i} (m_i \odot w)_{i,K,k}

    Parts are the first channels ("static": HeteroFL), a window that moves on ("rolling": FedRolex) or drawn anew
    ("random": Federated Dropout); coordinates that nobody held keep their value. With ``ordered`` a client draws, for
    every step, one of the widths that it can hold (FjORD). Personal models: the static part of w that the client can
    hold. FedRolex and Federated Dropout train no such parts: what they are made for is the whole w. A step costs one
    gradient.
    """
    return Algorithm(
        partial(_begin, clients, start, parts),
        _epoch(clients, engine, options, parts, extraction=extraction, ordered=ordered),
        finish=lambda state: state,
    )


def partial_training_ft(
    clients: Sequence[Client],
    engine,
    start: Params,
    options: FineTuneOptions,
    parts: Parts = WHOLE,
    *,
    extraction: str,
    ordered: bool = False,
) -> Algorithm:
    """The same, and at the end every client trains its part of the global model on its own data."""
    spare = options.fine_tune_steps
    return Algorithm(
        partial(_begin, clients, start, parts),
        _epoch(clients, engine, options, parts, extraction=extraction, ordered=ordered, spare=spare),
        partial(fine_tune, clients, engine, options),
    )


def _begin(clients: Sequence[Client], start: Params, parts: Parts) -> State:
    return State(0, start, _own(start, clients, parts))


def _own(w: Params, clients: Sequence[Client], parts: Parts) -> tuple[Params, ...]:
    """Every client's static part of w; clients of one width share it."""
    cut = {width: parts.cut(w, parts.index(width)) for width in {client.width for client in clients}}
    return tuple(cut[client.width] for client in clients)


def _epoch(
    clients: Sequence[Client],
    engine,
    options: RivalOptions,
    parts: Parts,
    *,
    extraction: str,
    ordered: bool,
    spare: int = 0,
) -> Callable[[State], State]:
    updates = [_ordered(client, clients, options) for client in clients] if ordered else None

    def advance(state: State, t: int) -> State:
        w, work = local_sgd_round(
            state.w,
            clients,
            engine,
            seed=options.seed,
            r=t,
            local_steps=options.local_steps,
            batch_size=options.batch_size,
            lr=options.lr,
            parts=parts,
            extraction=extraction,
            updates=updates,
        )
        return replace(state, w=w, v=_own(w, clients, parts), work=state.work + work)

    return budgeted(advance, options, cost=options.local_steps, spare=spare)


def _ordered(client: Client, clients: Sequence[Client], options: RivalOptions) -> Callable:
    return partial(
        ordered_update,
        steps=options.local_steps,
        batch_size=options.batch_size,
        lr=options.lr,
        widths=_affordable(client, clients),
    )


def _affordable(client: Client, clients: Sequence[Client]) -> list[float]:
    """The widths that are about and that a client can hold."""
    return sorted({other.width for other in clients if other.width <= client.width})


def drawn_widths(client: Client, r: int, *, clients: Sequence[Client], options: RivalOptions) -> list[float]:
    """The widths that a client draws for the steps of round r, with ``ordered``."""
    generator = generator_for(options.seed, "global", r, client.key)
    steps = batches_and_widths(
        client.n_train, options.batch_size, options.local_steps, _affordable(client, clients), generator
    )
    return [width for _, width in steps]
