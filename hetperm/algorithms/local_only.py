"""Local training: every client by itself; the rival that no collaboration may lose to."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.budget import RivalOptions, at_home, budgeted
from hetperm.client import Client
from hetperm.device.bench import Params, sgd_update
from hetperm.server.slicer import WHOLE, Parts
from hetperm.state import State, Work


def local_only(
    clients: Sequence[Client], engine, start: Params, options: RivalOptions, parts: Parts = WHOLE
) -> Algorithm:
    r"""Local training: :math:`v_i \leftarrow v_i - \eta \nabla f_i(v_i; \xi)`, and nothing is ever sent.

    A "round" is K steps, with the batches that FedAvg would draw in it: with one client the two are the same.
    Personal models: v_i as it stands, of the size that the client can hold; w stays the start. A step costs one
    gradient.
    """
    update = partial(sgd_update, steps=options.local_steps, batch_size=options.batch_size, lr=options.lr)

    def advance(state: State, t: int) -> State:
        v = at_home(clients, engine, [update] * len(clients), state.v, seed=options.seed, t=t)
        return replace(state, v=tuple(v), work=state.work + Work(client_steps=options.local_steps * len(clients)))

    def start_alone() -> State:
        return State(0, start, tuple(parts.fresh(client.width, start, seed=options.seed) for client in clients))

    epoch = budgeted(advance, options, cost=options.local_steps)
    return Algorithm(start_alone, epoch, finish=lambda state: state)
