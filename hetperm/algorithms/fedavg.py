"""FedAvg: one global model for all; localized FedAvg: the same, then trained on by each client at home.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions, begin, budgeted, fine_tune
from hetperm.client import Client
from hetperm.global_model import local_sgd_round
from hetperm.local import Params
from hetperm.state import State


def fedavg(clients: Sequence[Client], engine, start: Params, options: RivalOptions) -> Algorithm:
    r"""FedAvg: every client takes K steps from w, and the server averages.

    .. math:: w_{i,0} = w, \quad w_{i,k+1} = w_{i,k} - \eta \nabla f_i(w_{i,k}; \xi), \quad
        w \leftarrow \frac1N \sum_i w_{i,K}

    The average is plain, as in the warm-up of PERM: clients count alike, as they do in the accuracy that is reported.
    Personal models: w, for everybody. A step costs one gradient.
    """
    return Algorithm(partial(begin, clients, start), _epoch(clients, engine, options), finish=lambda state: state)


def fedavg_ft(clients: Sequence[Client], engine, start: Params, options: FineTuneOptions) -> Algorithm:
    r"""Localized FedAvg: FedAvg, and at the end every client trains the global model on its own data.

    .. math:: v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi), \quad v_i = w \text{ at first}

    Personal models: w until `finish`, which fine-tunes the tail average of w where there is one.
    """
    return Algorithm(
        partial(begin, clients, start),
        _epoch(clients, engine, options, spare=options.fine_tune_steps),
        partial(fine_tune, clients, engine, options),
    )


def _epoch(clients: Sequence[Client], engine, options: RivalOptions, *, spare: int = 0) -> Callable[[State], State]:
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
        )
        return replace(state, w=w, v=(w,) * len(clients), work=state.work + work)

    return budgeted(advance, options, cost=options.local_steps, spare=spare)
