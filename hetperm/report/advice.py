"""What went wrong in a run, and what to try: one sentence each, from what its folder holds."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from hetperm.report.summary import ACCURACY, Mixing, Rows, Summary, deployed, is_blank

MARGIN = 0.02  # of a figure on validation data below which two methods are level
FAR = 0.1  # of accuracy by which a tier is clearly behind
SHORT = 50  # steps of a client: a shorter warm-up hardly tells clients apart
FOUND = 0.95  # of the weight within the own group: groups were told apart
LOST = 0.1  # of the way from equal weights to groups told apart: they were not told apart at all
ALONE = 1.5  # effective partners below which a client is as good as alone
RISE = 1.25  # times the lowest loss: it rises
NOTHING = 0.03  # above always answering the most common class: nothing was learned
ENOUGH = 20  # samples of a client that show which class is common
LOCAL = "local"


@dataclass(frozen=True)
class Evidence:
    """One run as its folder holds it, or as it was just trained.

    Attributes:
        histories: method -> its metrics, one row per epoch.
        settings: the keys and values of config.toml.
    """

    summary: Summary
    histories: Mapping[str, Rows]
    clients: Rows
    settings: Mapping[str, Any]

    @property
    def mixing(self) -> Mixing | None:
        """The mixing weights of the algorithm."""
        return self.summary.main.alpha

    @property
    def sizes(self) -> Counter | None:
        """group -> how many clients are in it; None if groups are not known, or there is one."""
        groups = [row.get("group") for row in self.clients]
        known = bool(groups) and None not in groups and len(set(groups)) > 1
        return Counter(groups) if known else None

    @property
    def by_chance(self) -> float | None:
        """The weight within the own group if all weights were equal."""
        sizes = self.sizes
        return None if sizes is None else sum(size**2 for size in sizes.values()) / sum(sizes.values()) ** 2

    @property
    def warmup_steps(self) -> float | None:
        """Steps of a client before its first mixing weights."""
        rounds, steps = self.settings.get("warmup_rounds"), self.settings.get("steps")
        if rounds is not None:
            return rounds * self.settings.get("local_steps", 1)
        return steps / 2 if steps else None

    def on_validation(self, method: str) -> float | None:
        """The mean figure of a method on validation data, which only its last row has."""
        rows = self.histories.get(method)
        return deployed(rows[-1], f"val_{self.summary.metric}_mean") if rows else None


Rule = Callable[[Evidence], Iterator[str]]


def lines(runs: Sequence[Evidence]) -> list[str]:
    """The advice on a run, or on the runs of several seeds: a sentence that several have alike is said once."""
    said: dict[str, list[tuple[int | None, str]]] = {}
    for run in runs:
        for name, sentence in findings(run):
            said.setdefault(name, []).append((run.summary.seed, sentence))
    if len(runs) == 1:
        return [sentence for pairs in said.values() for _, sentence in pairs]
    return [f"{_seeds(pairs, len(runs))}: {pairs[0][1]}" for pairs in said.values()]


def findings(run: Evidence) -> Iterator[tuple[str, str]]:
    """Yield (kind of fault, sentence) for every fault of a run."""
    for name, rule in RULES.items():
        for k, sentence in enumerate(rule(run)):
            yield f"{name} {k}", sentence


def _seeds(pairs: Sequence[tuple[int | None, str]], count: int) -> str:
    seeds = ", ".join(str(seed) for seed, _ in pairs)
    return f"all {count} seeds" if len(pairs) == count else f"seed {seeds}" if len(pairs) == 1 else f"seeds {seeds}"


# The faults


def short_warmup(run: Evidence) -> Iterator[str]:
    """The warm-up was too short to tell clients apart."""
    steps, alpha = run.warmup_steps, run.mixing
    if alpha is None or steps is None or steps >= SHORT:
        return
    mass = alpha.same_group_mass if run.sizes else None
    # Where groups are not known, only that mixing did not help says that clients were not told apart.
    if (not _is_behind(run)) if is_blank(mass) else mass >= FOUND:
        return
    seen = "" if is_blank(mass) else f" ({mass:.2f} of the weight is within clients' own groups)"
    yield (
        f"the warm-up had {steps:.0f} steps per client, too few to tell clients apart{seen}; use --steps 800 (half of "
        f"them for the warm-up) or --warmup-rounds {_rounds(run)}"
    )


def _rounds(run: Evidence) -> int:
    """Rounds of a warm-up of a few hundred steps."""
    return max(1, round(200 / max(1, run.settings.get("local_steps", 5))))


def behind_local(run: Evidence) -> Iterator[str]:
    """Clients would have been better off alone."""
    if not _is_behind(run):
        return
    name = run.summary.algorithm
    ours, alone = run.on_validation(name), run.on_validation(LOCAL)
    yield f"{name} is behind local on validation data ({ours:.3f} against {alone:.3f}): {_share_less(run)}"


def _share_less(run: Evidence) -> str:
    """What to try if clients are better off alone."""
    steps = run.summary.main.cost.client_steps
    if not is_blank(steps) and steps / run.summary.num_clients < 4 * SHORT:
        each = steps / run.summary.num_clients
        return f"{each:.0f} steps per client are too few for models that travel; the default is --steps 800"
    return "let clients share less (--share 0.7, or 0 for alone), or try a smaller --personal-lr"


def _is_behind(run: Evidence) -> bool:
    name = run.summary.algorithm
    ours, alone = run.on_validation(name), run.on_validation(LOCAL)
    if name == LOCAL or is_blank(ours) or is_blank(alone):
        return False
    return (alone - ours if run.summary.better == "higher" else ours - alone) > MARGIN


def tiers_behind_local(run: Evidence) -> Iterator[str]:
    """Some tiers would have been better off alone, though the mean over all clients would not."""
    local = run.summary.baselines.get(LOCAL)
    # How much is far is known of accuracies only.
    if local is None or run.summary.metric != ACCURACY or _is_behind(run):
        return
    pairs = {tier: (run.summary.main.tiers[tier].score, local.tiers.get(tier)) for tier in run.summary.tier_names}
    behind = {
        tier: (ours, alone.score)
        for tier, (ours, alone) in pairs.items()
        if alone is not None and not is_blank(ours) and not is_blank(alone.score) and alone.score - ours > FAR
    }
    if behind:
        ours, alone = (mean(values) for values in zip(*behind.values(), strict=True))
        one = len(behind) == 1
        yield (
            f"{'tier' if one else 'tiers'} {', '.join(behind)} would be better off alone (test accuracy {ours:.3f} "
            f"against {alone:.3f}): {_share_less(run)}"
        )


def everybody_alone(run: Evidence) -> Iterator[str]:
    """Nobody learns from anybody, though groups are known."""
    alpha, sizes = run.mixing, run.sizes
    if alpha is None or sizes is None or is_blank(alpha.effective_partners) or run.settings.get("share") == 0:
        return
    alike = mean(sizes[row["group"]] for row in run.clients)
    if alike >= 2 and alpha.effective_partners < ALONE:
        yield (
            f"every client learns alone ({alpha.effective_partners:.1f} effective partners), though groups of "
            f"{alike:.0f} have the same kind of data; try --share 0.7, or more --steps so that the warm-up can tell "
            "them apart"
        )


def everybody_with_everybody(run: Evidence) -> Iterator[str]:
    """Groups were not told apart."""
    alpha, chance = run.mixing, run.by_chance
    if alpha is None or chance is None or is_blank(alpha.same_group_mass):
        return
    mixed = alpha.same_group_mass - chance < LOST * (1 - chance)
    if mixed and not is_blank(alpha.effective_partners) and alpha.effective_partners >= ALONE:
        yield (
            f"everybody learns from everybody, though the data are of {len(run.sizes)} kinds: "
            f"{alpha.same_group_mass:.2f} of the weight is within clients' own groups, and equal weights would give "
            f"{chance:.2f}; try --share 0.7, or a longer warm-up (--warmup-rounds)"
        )


def rising_loss(run: Evidence) -> Iterator[str]:
    """The loss was lower before."""
    name = run.summary.algorithm
    rows = [row for row in run.histories.get(name, ()) if not is_blank(row.get("loss_mean"))]
    if len(rows) < 3:
        return
    lowest, last = min(rows, key=lambda row: row["loss_mean"]), rows[-1]
    if 0 < RISE * lowest["loss_mean"] < last["loss_mean"]:
        rate = run.settings.get("personal_lr")
        smaller = "a smaller --personal-lr" + ("" if is_blank(rate) else f" (now {rate:g})")
        yield (
            f"the test loss of {name} rises from {lowest['loss_mean']:.3g} after epoch {lowest['epoch']} to "
            f"{last['loss_mean']:.3g}; try {smaller}, --decay linear, or fewer --steps"
        )


def idle_tier(run: Evidence) -> Iterator[str]:
    """A tier is no better than always giving the same answer."""
    idle = {}
    # What a guess would give is known of accuracies only.
    for tier in run.summary.tier_names if run.summary.metric == ACCURACY else ():
        reached, guess = run.summary.main.tiers[tier].score, _guess(run, tier)
        if not is_blank(reached) and guess is not None and guess < 1 - NOTHING and reached < guess + NOTHING:
            idle[tier] = (reached, guess)
    if idle:
        reached, guess = (mean(values) for values in zip(*idle.values(), strict=True))
        yield (
            f"{'tier' if len(idle) == 1 else 'tiers'} {', '.join(idle)} learn{'s' * (len(idle) == 1)} nothing: "
            f"{reached:.3f}, while always answering the most common class gives {guess:.3f}; try more --steps, "
            "another step size (--global-lr, --personal-lr), or a larger width in the profile"
        )


def _guess(run: Evidence, tier: str) -> float | None:
    """What a client of a tier reaches on average by always answering its most common class."""
    rows = [row for row in run.clients if str(row.get("tier")) == tier and not is_blank(row.get("most_common"))]
    # Of few samples some class is always common.
    guesses = [row["most_common"] for row in rows if row.get("n_train", 0) >= ENOUGH]
    return mean(guesses) if guesses else None


RULES: Mapping[str, Rule] = {
    "short warm-up": short_warmup,
    "behind local": behind_local,
    "tiers behind local": tiers_behind_local,
    "alone": everybody_alone,
    "everybody": everybody_with_everybody,
    "rising loss": rising_loss,
    "idle tier": idle_tier,
}


# Other things worth knowing, which are no faults


def notes(run: Evidence) -> list[str]:
    """What a reader of the figures should know: methods that diverged, visits that were skipped."""
    found = [f"{name}: {method.diverged}" for name, method in run.summary.methods.items() if method.diverged]
    skipped = run.summary.main.cost.skipped
    if skipped:
        found.append(f"{skipped:,.0f} visits were skipped, because the host was away or too small")
    return found
