"""Local training: every client trains alone. Collaboration is worth it only if it beats this rival."""

from dataclasses import replace

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.steps import RivalOptions, in_rounds, or_before
from hetperm.params import Params
from hetperm.server.federation import Federation
from hetperm.server.initial import fresh_model
from hetperm.state import State


def local_only(federation: Federation, start: Params, options: RivalOptions) -> Algorithm:
    r"""Local training: :math:`v_i \leftarrow v_i - \eta \nabla f_i(v_i; \xi)`, and nothing is ever sent.

    A round is K steps on the batches that FedAvg would draw: with one client both methods are the same. Personal
    models: v_i, of the client's width. w stays the start. A step costs one gradient.
    """
    clients = federation.clients
    updates = [options.sgd] * len(clients)

    def begin() -> State:
        # Drawn for its own width: weights cut out of a wide layer are too small for a narrow one.
        models = [fresh_model(federation.slicer, client.width, start, seed=federation.seed) for client in clients]
        return State(0, start, tuple(models))

    def advance(state: State, round: int) -> State:
        trained = federation.train_at_home(updates, state.v, round=round)
        work = federation.work_at_home(updates, options.batch_size, trained)
        return replace(state, v=or_before(trained, state.v), work=state.work + work)

    return Algorithm(begin, in_rounds(advance, options, cost=options.local_steps))
