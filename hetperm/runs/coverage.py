"""Coverage: how often each block of the global model was trained, and by which tier."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from hetperm.algorithms.partial_training import Options, update_of
from hetperm.client import Client
from hetperm.methods import METHODS, options_for
from hetperm.randomness import generator_for
from hetperm.runs.setting import Setting
from hetperm.runs.training import Trained, default_steps
from hetperm.server.federation import Federation
from hetperm.server.global_model import drawn_width
from submodels import WHOLE

Drawn = Callable[[Client, int], Sequence[float]]  # (client, round) -> the width that it trains in each step


def coverage_of(main: Trained) -> list[Mapping[str, object]] | None:
    """The rows of coverage.csv, one for each parameter tensor and tier; None if no client trained a part of w."""
    setting, method, config = main.setting, METHODS[main.method], main.setting.config
    options = options_for(main.method, config, steps=default_steps(config))
    if setting.shop.scalable is None or method.one_size or not hasattr(options, "extraction"):
        return None
    if not method.mixes:
        # With distillation every step trains all that a client can hold.
        drawn = partial(_drawn, setting, options) if options.ordered and not options.distil else None
        return list(coverage(setting, options.extraction, rounds=options.rounds, drawn=drawn))
    # Two-stage PERM trains the global model only in the warm-up, the single loop also before each estimate of alpha.
    # Within a budget nothing is estimated after the last epoch.
    last = config.epochs - 1 if config.steps else config.epochs
    steps = last // config.alpha_every if main.method == "perm" else 0
    drawn = partial(_drawn_in_warmup, setting, options.num_warmup_rounds) if options.warmup == "ordered" else None
    return list(coverage(setting, options.extraction, rounds=options.num_warmup_rounds + steps, drawn=drawn))


def _drawn_in_warmup(setting: Setting, warmup_rounds: int, client: Client, round: int) -> list[float]:
    """The width that a client trains in a round of the warm-up, or in a later step of the global model."""
    if round >= warmup_rounds:
        return [client.width]
    return [drawn_width(Federation(setting.clients, engine=None, seed=setting.config.seed), client, round)]


def _drawn(setting: Setting, options: Options, client: Client, round: int) -> list[float]:
    """The width of each step of a client in a round of ordered dropout."""
    # Drawn again from the seed of the task, so that training need not record it.
    federation = Federation(setting.clients, engine=None, seed=setting.config.seed)
    if options.draws == "round":
        return [drawn_width(federation, client, round)]
    generator = generator_for(federation.seed, "global", round, client.key)
    return [width for _, width in update_of(client, federation, options).draws(client.n_train, generator)]


def coverage(
    setting: Setting, extraction: str, *, rounds: int, drawn: Drawn | None = None
) -> Iterator[Mapping[str, object]]:
    """How often each block of the global model was trained, by tier: one row for each parameter tensor and tier.

    ``times`` is how many clients trained a coordinate in a step, averaged over the coordinates of the tensor. ``never``
    is the share of coordinates that no client of the tier ever trained. The tier "all" counts all clients.

    Args:
        drawn: the width of every step of a client; if left out, all steps have the client's width.
    """
    w, seed = setting.start, setting.config.seed
    counts = {tier: {name: torch.zeros(x.shape) for name, x in w.items()} for tier in dict.fromkeys(setting.tiers)}
    # If every round trains the same parts, one round stands for all of them.
    is_same_every_round = extraction == "static" and drawn is None
    repeats = min(1, rounds) if is_same_every_round else rounds
    for round in range(repeats):
        for client, tier in zip(setting.clients, setting.tiers, strict=True):
            widths = drawn(client, round) if drawn else [client.width]
            for width, times in Counter(widths).items():
                index = setting.slicer.index(width, extraction, seed=seed, round=round, key=(client.key,))
                for name, count in counts[tier].items():
                    shape = count.shape if index is WHOLE else index.shape(name)
                    index.scatter_(name, count, torch.full(shape, times / len(widths)), accumulate=True)
    everybody = {name: sum(table[name] for table in counts.values()) for name in w}
    for tier, table in (*counts.items(), ("all", everybody)):
        for name, count in table.items():
            yield {
                "block": name,
                "tier": tier,
                "times": float(count.mean()) / max(1, repeats),
                "never": float((count == 0).float().mean()),
                "rounds": rounds,
            }
