"""What the rivals of PERM share: a number of steps that their epochs divide among rounds, and fine-tuning."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetperm.device.updates import Sgd
from hetperm.engine.task import Task
from hetperm.params import Params, num_bytes
from hetperm.server.federation import Federation
from hetperm.state import State, Work, tail_begins


@dataclass(frozen=True)
class RivalOptions:
    """What every rival needs to know; the names are those of the configuration, which explains them."""

    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int  # mini-batch gradients that a client may compute in the whole run
    tail_average: float

    @property
    def sgd(self) -> Sgd:
        """K steps of SGD, the work of a client in a round."""
        return Sgd(self.local_steps, self.batch_size, self.lr)


@dataclass(frozen=True)
class FineTuneOptions(RivalOptions):
    """The same for rivals whose clients train on at the end; those steps are part of `steps`."""

    fine_tune_steps: int
    fine_tune_lr: float


def begin(federation: Federation, start: Params) -> State:
    """The state before the first round: every model is the start."""
    return State(0, start, (start,) * len(federation.clients))


def num_rounds(steps: int, cost: int) -> int:
    """Rounds that a number of steps pays for, if a round takes ``cost`` gradients of every client."""
    if cost < 1:
        raise ValueError("a round without steps teaches nothing; local_steps must be at least 1")
    if cost > steps:
        raise ValueError(f"a budget of {steps} steps a client pays for no round, which takes {cost}; raise steps")
    return steps // cost


def in_rounds(
    advance: Callable[[State, int], State], options: RivalOptions, *, cost: int, spare: int = 0
) -> Callable[[State], State]:
    """An epoch that runs its share of the rounds that the steps pay for, and takes v into the tail average.

    Rounds are dealt out evenly: epochs differ by one round at most, and what is left at the end pays for none.

    Args:
        advance: (state, round) -> the state after that round, counted from the first of the run.
        cost: mini-batch gradients that a client computes in a round.
        spare: those that are kept for after the last epoch.
    """
    epochs, total = options.epochs, num_rounds(options.steps - spare, cost)
    begins = tail_begins(options.tail_average, epochs)

    def epoch(state: State) -> State:
        # Epoch r runs rounds floor(r T / R) to floor((r + 1) T / R): T in all, whatever R is.
        first, end = (min(r, epochs) * total // epochs for r in (state.r, state.r + 1))
        for round in range(first, end):
            state = advance(state, round)
        return replace(state, r=state.r + 1).averaged(begins, keep=lambda params: params)

    return epoch


def fine_tuning(federation: Federation, options: FineTuneOptions) -> Callable[[State], State] | None:
    """How every client trains the model it would deploy on its own data at the end; None without such steps."""
    if options.fine_tune_steps == 0:
        return None
    update = Sgd(options.fine_tune_steps, options.batch_size, options.fine_tune_lr)

    def finish(state: State) -> State:
        clients = federation.clients
        tasks = [
            Task(
                update,
                params,
                host=i,
                seed=federation.seed_for("fine-tune", client.key),
                width=client.width,
                label=f"fine-tuning: client {i}",
            )
            for i, (client, params) in enumerate(zip(clients, state.deployed, strict=True))
        ]
        v = tuple(federation.train(tasks))
        # Models are sent down and stay: nothing is averaged any more, so the tail ends here.
        work = Work(rounds=1, client_steps=update.steps * len(v), bytes_down=sum(num_bytes(params) for params in v))
        return replace(state, v=v, tail=None, tail_count=0, work=state.work + work)

    return finish
