"""Local training: every client by itself; the rival that no collaboration may lose to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from hetperm.algorithms.base import Algorithm
from hetperm.algorithms.fedavg import at_home, begin, budgeted
from hetperm.client import Client
from hetperm.local import Params, sgd_update
from hetperm.state import State, Work


@dataclass(frozen=True)
class Options:
    """What local training needs to know; the names are those of the configuration, which explains them."""

    seed: int
    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int
    tail_average: float


def local_only(clients: Sequence[Client], engine, start: Params, options: Options) -> Algorithm:
    r"""Local training: :math:`v_i \leftarrow v_i - \eta \nabla f_i(v_i; \xi)`, and nothing is ever sent.

    A "round" is K steps, with the batches that FedAvg would draw in it: with one client the two are the same.
    Personal models: v_i as it stands; w stays the start. A step costs one gradient.
    """
    update = partial(sgd_update, steps=options.local_steps, batch_size=options.batch_size, lr=options.lr)

    def advance(state: State, t: int) -> State:
        v = at_home(clients, engine, [update] * len(clients), state.v, seed=options.seed, t=t)
        return replace(state, v=tuple(v), work=state.work + Work(client_steps=options.local_steps * len(clients)))

    epoch = budgeted(
        advance,
        epochs=options.epochs,
        steps=options.steps,
        cost=options.local_steps,
        tail_average=options.tail_average,
    )
    return Algorithm(partial(begin, clients, start), epoch, finish=lambda state: state)
