"""PERM: the single loop (Algorithm 3 of the paper) and the two stages (Algorithm A1, then Algorithm 2).

Both take clients of different widths (section 3.3). With clients of one width they are the homogeneous algorithms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.algorithms.base import Algorithm
from hetperm.device.gradients import BatchGradient, FullGradient, ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine.task import Task
from hetperm.mixing import complexity
from hetperm.params import Params, check_finite, num_bytes, project, subtract, unflatten
from hetperm.randomness import generator_for
from hetperm.server.estimate import EARLY, REPORTS, collect_reports, missing, outdated
from hetperm.server.federation import Federation
from hetperm.server.global_model import drawn_widths, gradient_step, local_sgd_round
from hetperm.server.look_ahead import can_look_again, look_ahead
from hetperm.server.shuffle import Round
from hetperm.server.visits import Visiting, mixed_by_alpha, personal_epoch, projected, scheduled
from hetperm.server.weights import visit_rates, weights_among
from hetperm.state import State, Work, tail_begins

WARMUP_ROUNDS = 30  # if neither rounds nor steps are given
BLIND_SHARE = 0.35  # if clients cannot look ahead; with 0.7, some of ten thousand take in strangers by the hundred
LOOK_AHEAD, RATES, TOUR = "look ahead", "rates", "tour"  # keys of State.memory


@dataclass(frozen=True)
class Mixing:
    """Options of the mixing weights. The names are those of the configuration, which explains them."""

    noise_batches: int
    regularization: float | str = "noise"
    share: float | str = mixing.SHARE
    alpha_steps: int | None = None
    sketch: int | None = None
    discrepancy: str = "probe"
    vc_weight: float | str = 0.05
    denoise: bool = False

    @property
    def knows_noise(self) -> bool:
        """Whether distances are held against the noise of gradients that all take at one model."""
        # The paper's lambda is in units of the gradients at one model, and masked gradients are sent as they come.
        return isinstance(self.regularization, str) and self.discrepancy == "probe"


@dataclass(frozen=True)
class Options:
    """Options of PERM. The names are those of the configuration, which explains them."""

    epochs: int
    global_lr: float
    global_batch: int
    visiting: Visiting
    mixing: Mixing
    steps: int = 0
    warmup: str = "static"
    warmup_rounds: int | None = None
    extraction: str = "static"
    schedule: str = "colour"
    server_mix: str = "none"
    first_alpha: str = "estimated"
    early_report: float = 0.0
    alpha_every: int = 1
    report_age: int | None = None
    rate_rule: str = "plain"
    decay: str = "none"
    tail_average: float = 0.5
    projection: float | None = None
    final_lr: float | None = None

    @property
    def num_warmup_rounds(self) -> int:
        """The rounds of the warm-up: those that were asked for, or half of the steps."""
        if self.warmup_rounds is not None:
            return self.warmup_rounds
        return self.steps // (2 * self.visiting.local_steps) if self.steps else WARMUP_ROUNDS

    @property
    def early_round(self) -> int:
        """The rounds of the warm-up after which the model is kept for the early reports; 0: there are none."""
        return int(self.early_report * self.num_warmup_rounds) if self.mixing.knows_noise else 0


def single_loop(federation: Federation, start: Params, options: Options) -> Algorithm:
    """Algorithm 3: every epoch is shuffled visits, then a step of the global model, then new mixing weights."""

    def epoch(state: State) -> State:
        state = visit(federation, state, options)
        estimated = (state.r + 1) % options.alpha_every == 0 and (state.r + 1 < options.epochs or not options.steps)
        if estimated:
            # Rounds of global training are counted through from the warm-up: a rolling window continues its way.
            indices = federation.handed_out(options.extraction, options.num_warmup_rounds + state.r)
            state = gradient_step(
                federation,
                state,
                BatchGradient(options.global_batch, chunk=options.visiting.batch_size),
                indices,
                lr=options.global_lr,
                batch_size=options.visiting.batch_size,
                cap=options.visiting.step_cap,
            )
            state = replace(state, w=_global_in_ball(state.w, state.memory["centre"], options))
        state = end_epoch(federation, state, options)
        # Last, because alpha^{r+1} is computed at w^{r+1}, the global model after its step.
        if estimated:
            return with_weights(federation, outdated(state), options)
        return latecomers(federation, state, options)

    return Algorithm(partial(begin, federation, start, options), epoch, _finish(federation, options))


def two_stage(federation: Federation, start: Params, options: Options) -> Algorithm:
    """Algorithms A1 and 2: mixing weights are computed once, after the warm-up; every epoch is shuffled visits."""

    def epoch(state: State) -> State:
        return latecomers(federation, end_epoch(federation, visit(federation, state, options), options), options)

    return Algorithm(partial(begin, federation, start, options), epoch, _finish(federation, options))


def begin(federation: Federation, start: Params, options: Options) -> State:
    """The state after the warm-up, with the first mixing weights. Personal models begin as static parts of w."""
    sgd = Sgd(options.visiting.local_steps, options.visiting.batch_size, options.global_lr, options.visiting.step_cap)
    updates = [sgd] * len(federation.clients)
    slicer, w, work = federation.slicer, start, Work()
    memory = {}
    for round in range(options.num_warmup_rounds):
        w, more = local_sgd_round(
            federation,
            w,
            updates,
            batch_size=options.visiting.batch_size,
            round=round,
            extraction=options.extraction,
            widths=drawn_widths(federation, round) if options.warmup == "ordered" else None,
        )
        w = _global_in_ball(w, start, options)
        work += more
        if round + 1 == options.early_round:
            memory[EARLY] = slicer.cut(w, slicer.index(min(client.width for client in federation.clients)))
    widths = federation.own_widths(options.visiting.personal_width)
    v = tuple(slicer.cut(w, slicer.index(width)) for width in widths)
    state = State(0, w, v, work=work, memory={"centre": w, **memory})
    if options.first_alpha == "uniform":
        N = len(federation.clients)
        return _on_tour(replace(state, alpha=torch.full((N, N), 1 / N, dtype=torch.float64)), torch.ones(N))
    # The paper starts from uniform weights; here the first epoch already visits only hosts worth visiting.
    return with_weights(federation, state, options)


def latecomers(federation: Federation, state: State, options: Options) -> State:
    """The state with the reports of clients that were away when they were asked at w, which is still the same."""
    if REPORTS not in state.memory or state.r >= options.epochs or not missing(state, len(federation.clients)):
        return state
    return with_weights(federation, state, options, late=True)


def with_weights(federation: Federation, state: State, options: Options, *, late: bool = False) -> State:
    """The state with new mixing weights, from the reports of all clients at w.

    Clients whose report is unknown, or too old, are left out: nobody learns from them, nor they from anybody.

    Args:
        late: whether only clients are asked that were away before; the share stays what it is.
    """
    rule, batch_size = options.mixing, options.visiting.batch_size
    update = ReportGradient(rule.noise_batches, sketch=rule.sketch, chunk=batch_size)
    reports = collect_reports(
        federation,
        state,
        update,
        batch_size=batch_size,
        compare=rule.discrepancy,
        extraction=options.extraction,
        age=options.alpha_every if options.report_age is None else options.report_age,
    )
    if rule.denoise and rule.knows_noise:
        reports = reports.denoised(federation.order)
    sent = any([gradient is not None for gradient in reports.gradients])
    if late and not sent:
        return replace(state, work=state.work + reports.work)
    widths = federation.own_widths(options.visiting.personal_width)
    # Complexity is that of the personal models, because those are what is trained.
    weights = partial(
        weights_among,
        reports,
        regularization=rule.regularization,
        vc=complexity.vc_of_widths(federation.slicer.scalable, widths),
        vc_weight=rule.vc_weight,
        alpha_steps=rule.alpha_steps,
    )
    memory, work = {**state.memory, **reports.memory}, state.work + reports.work
    share = rule.share
    # Anew with every estimate: a share counts in units of noise, and what was right before can merge groups later.
    looks = LOOK_AHEAD not in memory or (not late and can_look_again(options.steps, batch_size))
    looks = looks and rule.regularization == "noise"  # other rules know no share
    if rule.share == "look-ahead" and reports.probe is not None and looks and sent:
        outlook = look_ahead(
            federation,
            reports,
            lambda clients, c: weights(clients, share=c),
            lr=options.global_lr,
            batch_size=batch_size,
            steps=options.steps,
            r=state.r,
        )
        work += outlook.work
        if outlook.losses.numel():  # else nobody was there to answer
            memory[LOOK_AHEAD] = {
                "shares": torch.tensor(outlook.shares, dtype=torch.float64),
                "losses": outlook.losses,
                "partners": outlook.partners,
                "chosen": torch.tensor(outlook.chosen),
            }
    if rule.share == "look-ahead":
        share = chosen_share(memory)
    alpha = weights(share=share)
    rates = torch.ones(len(federation.clients), dtype=torch.float64)
    if options.rate_rule == "partners":
        rates = visit_rates(federation, alpha, reports, batch_size)
    return _on_tour(replace(state, alpha=alpha, work=work, memory=memory), rates)


def _on_tour(state: State, rates: Tensor) -> State:
    """The state with new step sizes, at the start of a new tour of visits, since alpha is new."""
    tour = int(state.memory[TOUR]["at"][0]) + 1 if TOUR in state.memory else 0
    return replace(state, memory={**state.memory, RATES: {"rate": rates}, TOUR: {"at": torch.tensor([tour, 0])}})


def chosen_share(memory: Mapping[str, Params]) -> float:
    """The share that the look ahead chose; a cautious one if nobody could look."""
    if LOOK_AHEAD not in memory:
        return BLIND_SHARE
    table = memory[LOOK_AHEAD]
    return float(table["shares"][int(table["chosen"])])


def visit(federation: Federation, state: State, options: Options) -> State:
    """The state after the visits of an epoch, which the mixing weights decide."""
    rule = faded(options, state.r)
    if not options.steps:
        # A separate stream for each epoch, so that a resumed run draws the same schedule.
        generator = generator_for(federation.seed, "schedule", state.r)
        rounds = scheduled(state.alpha, options.schedule, generator)
        state = personal_epoch(federation, state, rounds, rule, rates=state.memory[RATES]["rate"])
        return _in_ball(federation, state, options)
    N = len(federation.clients)
    # What absent clients missed is gone: the rounds of a run do not become more because somebody was away.
    spent = state.work.client_steps + state.work.missed
    allowed = spent + (N * options.steps - spent) / (options.epochs - state.r)
    tour, t = (int(x) for x in state.memory[TOUR]["at"])
    while True:
        rounds = scheduled(state.alpha, options.schedule, generator_for(federation.seed, "schedule", tour))
        first = t
        t, spent = _affordable(rounds, t, spent, allowed, options.visiting)
        state = personal_epoch(
            federation, state, rounds[first:t], rule, rates=state.memory[RATES]["rate"], tour=tour, first=first
        )
        if t < len(rounds):
            break
        tour, t = tour + 1, 0
    state = replace(state, memory={**state.memory, TOUR: {"at": torch.tensor([tour, t])}})
    return _in_ball(federation, state, options)


def _affordable(rounds: Sequence[Round], t: int, spent: float, allowed: float, rule: Visiting) -> tuple[int, float]:
    """The round before which the steps run out, from round t on, and the steps spent by then."""
    # A model that teaches takes a second gradient a step. Hosts without pupils do not, so this may leave steps unused.
    gradients = rule.local_steps * (2 if rule.inplace_kd else 1)
    costs = [len(pairs) * gradients for pairs in rounds[t:]]
    if rule.visits == "parallel":
        costs = [sum(costs)]  # all hosts of a tour train at once, so only whole tours can be paid for
    for cost in costs:
        if spent + cost > allowed:
            return t, spent
        spent += cost
        t += 1 if rule.visits == "shuffle" else len(rounds)
    return t, spent


def faded(options: Options, r: int) -> Visiting:
    """The options of a visit in epoch r. With decay "linear" the step size falls to 0 over the epochs."""
    if options.decay == "none":
        return options.visiting
    return replace(options.visiting, personal_lr=options.visiting.personal_lr * (1 - (r + 0.5) / options.epochs))


def end_epoch(federation: Federation, state: State, options: Options) -> State:
    """The state at the start of the next epoch: v is added to the tail average and, as an option, mixed by alpha."""
    state = replace(state, r=state.r + 1)
    averaged = state.averaged(tail_begins(options.tail_average, options.epochs), federation.keep)
    # Mixed models need another epoch of training, so those of the last epoch are not mixed.
    if options.server_mix == "none" or state.r >= options.epochs:
        return averaged
    # The tail average takes the models as they were trained, so only v is replaced by the mixed models.
    widths = federation.own_widths(options.visiting.personal_width)
    return replace(averaged, v=mixed_by_alpha(federation, state, widths).v)


def _in_ball(federation: Federation, state: State, options: Options) -> State:
    if options.projection is None:
        return state
    return projected(federation, state, federation.own_widths(options.visiting.personal_width), options.projection)


def _global_in_ball(w: Params, centre: Params, options: Options) -> Params:
    return w if options.projection is None else project(w, centre, options.projection)


def _finish(federation: Federation, options: Options):
    return None if options.final_lr is None else partial(last_step, federation, options)


def last_step(federation: Federation, options: Options, state: State) -> State:
    r"""The paper's last step: :math:`\hat v_i = P_W(v_i - \frac1L \sum_j \alpha_i(j) \nabla f_j(v_i))`.

    A host that is smaller than the model contributes the gradient of the part that it can hold, and zero for the rest.
    """
    clients, slicer = federation.clients, federation.slicer
    widths = federation.own_widths(options.visiting.personal_width)
    v, work = [], Work()
    for i, (params, own, weights) in enumerate(zip(state.deployed, widths, mixing.rows_of(state.alpha), strict=True)):
        # Sorted by key, so that sums do not depend on how the clients are labelled.
        hosts = sorted(weights, key=lambda j: clients[j].key)
        indices = [slicer.index(clients[j].width, within=own) for j in hosts]
        parts = [slicer.cut(params, index) for index in indices]
        tasks = [
            Task(
                FullGradient(options.visiting.batch_size),
                part,
                host=j,
                seed=0,  # a full gradient draws nothing
                width=min(own, clients[j].width),
                label=f"final step: model {i} at host {j}",
            )
            for part, j in zip(parts, hosts, strict=True)
        ]
        mixture = {name: torch.zeros_like(x) for name, x in params.items()}
        outcomes = federation.run(tasks, round=state.work.rounds)
        found = [one for one in zip(hosts, indices, parts, outcomes, strict=True) if one[-1] is not None]
        # The weights of absent hosts go to those that are there.
        total = 1.0 if len(found) == len(hosts) else sum(weights[j] for j, *_ in found)
        for j, index, part, gradient in found:
            for name, g in unflatten(gradient, part).items():
                index.scatter_(name, mixture[name], weights[j] / total * g, accumulate=True)
        v.append(check_finite(subtract(params, mixture, options.final_lr), f"final step: model {i}"))
        moved = sum(num_bytes(part) for _, _, part, _ in found)
        away = len(hosts) - len(found)
        work += Work(visits=len(found), bytes_down=moved, bytes_up=moved, skipped=away)
        work += federation.work_of(tasks, options.visiting.batch_size, outcomes)
    # The step started from the tail average, if there is one, so the result replaces it.
    state = replace(state, v=tuple(v), tail=None, tail_count=0, work=state.work + work)
    return _in_ball(federation, state, options)
