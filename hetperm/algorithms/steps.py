"""What the rivals of PERM share: a budget of steps, divided into rounds and epochs, and fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetperm.device.updates import Sgd
from hetperm.engine.task import Task
from hetperm.params import Params, num_bytes
from hetperm.server.federation import Federation
from hetperm.state import State, Work, tail_begins


@dataclass(frozen=True)
class RivalOptions:
    """Options of every rival. The names are those of the configuration, which explains them."""

    epochs: int
    local_steps: int
    batch_size: int
    lr: float
    steps: int  # mini-batch gradients that a client may compute in the whole run
    tail_average: float
    step_cap: float = field(default=0.0, kw_only=True)

    @property
    def sgd(self) -> Sgd:
        """K steps of SGD: the update of a client in a round."""
        return Sgd(self.local_steps, self.batch_size, self.lr, self.step_cap)


@dataclass(frozen=True)
class FineTuneOptions(RivalOptions):
    """Options of rivals that fine-tune at the end. Those steps are part of `steps`."""

    fine_tune_steps: int
    fine_tune_lr: float


def begin(federation: Federation, start: Params) -> State:
    """The state before the first round: every model is the start."""
    return State(0, start, (start,) * len(federation.clients))


def or_before(models: Sequence[Params | None], before: Sequence[Params]) -> tuple[Params, ...]:
    """(N,) the new model of each client; of one that was absent, the model it had before."""
    return tuple(old if new is None else new for new, old in zip(models, before, strict=True))


def apart(outcomes: Sequence[tuple | None], count: int) -> list[list[Any]]:
    """``count`` lists (N,), one for each thing that a client sends; None of clients that were absent."""
    return [[None if outcome is None else outcome[k] for outcome in outcomes] for k in range(count)]


def num_rounds(steps: float, cost: float) -> int:
    """The number of rounds in a budget of steps, if a round takes ``cost`` gradients of every client."""
    if cost <= 0:
        raise ValueError("a round without steps teaches nothing; local_steps must be at least 1")
    # A loss is a third of a gradient, and sums of thirds round: a hair less than a whole round is a round.
    rounds = int(steps / cost + 1e-9)
    if rounds < 1:
        left = max(0.0, steps)
        raise ValueError(f"a budget of {left:g} steps a client pays for no round, which takes {cost:g}; raise steps")
    return rounds


def in_rounds(
    advance: Callable[[State, int], State], options: RivalOptions, *, cost: float, spare: float = 0
) -> Callable[[State], State]:
    """The function of an epoch: it runs its share of the rounds of the budget and adds v to the tail average.

    Rounds are divided evenly: epochs differ by at most one round. Steps that are too few for a round are not used.

    Args:
        advance: (state, round) -> the state after that round; rounds are counted from the start of the run.
        cost: mini-batch gradients that a client computes in a round; a loss counts as a third of one.
        spare: mini-batch gradients that are not for rounds: those of the start and of fine-tuning.
    """
    epochs, total = options.epochs, num_rounds(options.steps - spare, cost)
    begins = tail_begins(options.tail_average, epochs)

    def epoch(state: State) -> State:
        # Epoch r runs the rounds from floor(r T / R) up to floor((r + 1) T / R), which makes T in all for any R.
        first, end = (min(r, epochs) * total // epochs for r in (state.r, state.r + 1))
        for round in range(first, end):
            state = advance(state, round)
        # In memory, since only PERM can store its models on disk.
        return replace(state, r=state.r + 1).averaged(begins, keep=lambda params: params)

    return epoch


def fine_tuning(federation: Federation, options: FineTuneOptions) -> Callable[[State], State] | None:
    """The function that fine-tunes every client's deployed model on its own data; None if there are no steps for it."""
    if options.fine_tune_steps == 0:
        return None
    update = Sgd(options.fine_tune_steps, options.batch_size, options.fine_tune_lr, options.step_cap)
    # Clients that may be away are given their steps in rounds, as in training: who misses one misses K steps.
    K, whole = options.local_steps, options.fine_tune_steps
    pieces = [whole] if federation.presence.is_certain else [min(K, whole - done) for done in range(0, whole, K)]

    def finish(state: State) -> State:
        clients, v, work, tuned = federation.clients, state.deployed, Work(), [False] * len(federation.clients)
        for t, steps in enumerate(pieces):
            tasks = [
                Task(
                    replace(update, steps=steps),
                    params,
                    host=i,
                    seed=federation.seed_for("fine-tune", client.key, *([t] if t else ())),
                    width=client.width,
                    label=f"fine-tuning: client {i}",
                )
                for i, (client, params) in enumerate(zip(clients, v, strict=True))
            ]
            trained = federation.train(tasks, round=state.work.rounds + t)
            work += federation.work_of(tasks, options.batch_size, trained)
            v = or_before(trained, v)
            tuned = [before or now is not None for before, now in zip(tuned, trained, strict=True)]
        # Models are sent down once and stay there, so no bytes go up. The tail average was the start of this training.
        down = sum(num_bytes(params) for params, came in zip(v, tuned, strict=True) if came)
        work += Work(rounds=len(pieces), bytes_down=down)
        return replace(state, v=v, tail=None, tail_count=0, work=state.work + work)

    return finish
