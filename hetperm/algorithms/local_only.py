"""Local training: every client by itself; the rival that no collaboration may lose to."""

from dataclasses import replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions, in_rounds
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.initial import fresh_model
from hetperm.state import State, Work


def local_only(federation: Federation, start: Params, options: RivalOptions) -> Algorithm:
    r"""Local training: :math:`v_i \leftarrow v_i - \eta \nabla f_i(v_i; \xi)`, and nothing is ever sent.

    A "round" is K steps, with the batches that FedAvg would draw in it: with one client the two are the same.
    Personal models: v_i as it stands, of the size that the client can hold; w stays the start. A step costs one
    gradient.
    """
    clients = federation.clients
    N = len(clients)

    def begin() -> State:
        models = [fresh_model(federation.slicer, client.width, start, seed=federation.seed) for client in clients]
        return State(0, start, tuple(models))

    def advance(state: State, round: int) -> State:
        v = federation.train_at_home([options.sgd] * N, state.v, round=round)
        return replace(state, v=tuple(v), work=state.work + Work(client_steps=options.local_steps * N))

    return Algorithm(begin, in_rounds(advance, options, cost=options.local_steps))
