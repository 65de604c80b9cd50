"""FedAvg: one global model for all; localized FedAvg: the same, then trained on by each client at home.

Partial training in which every part is the whole.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
"""

from collections.abc import Sequence

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import FineTuneOptions, RivalOptions
from hetperm.algorithms.partial_training import partial_training, partial_training_ft
from hetperm.client import Client
from hetperm.device.bench import Params


def fedavg(clients: Sequence[Client], engine, start: Params, options: RivalOptions) -> Algorithm:
    r"""FedAvg: every client takes K steps from w, and the server averages.

    .. math:: w_{i,0} = w, \quad w_{i,k+1} = w_{i,k} - \eta \nabla f_i(w_{i,k}; \xi), \quad
        w \leftarrow \frac1N \sum_i w_{i,K}

    The average is plain, as in the warm-up of PERM: clients count alike, as they do in the accuracy that is reported.
    Personal models: w, for everybody. A step costs one gradient.
    """
    return partial_training(clients, engine, start, options, extraction="static")


def fedavg_ft(clients: Sequence[Client], engine, start: Params, options: FineTuneOptions) -> Algorithm:
    r"""Localized FedAvg: FedAvg, and at the end every client trains the global model on its own data.

    .. math:: v_i \leftarrow v_i - \eta_{ft} \nabla f_i(v_i; \xi), \quad v_i = w \text{ at first}

    Personal models: w until `finish`, which fine-tunes the tail average of w where there is one.
    """
    return partial_training_ft(clients, engine, start, options, extraction="static")
