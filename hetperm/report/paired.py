"""A figure of a method seed by seed, and the difference of two methods on the same seeds, with its interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev

from hetperm.report.summary import is_blank

LEVEL = 0.95  # of intervals


@dataclass(frozen=True)
class Sample:
    """One figure of a method, by seed; None for a seed in which the method diverged."""

    by_seed: Mapping[int, float | None]

    @property
    def values(self) -> list[float]:
        """The figures of the seeds that ended well."""
        return [value for value in self.by_seed.values() if not is_blank(value)]

    @property
    def diverged(self) -> int:
        """The number of seeds that did not."""
        return len(self.by_seed) - len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None if there is no seed, or one diverged: the mean of the others would flatter."""
        return mean(self.values) if self.values and not self.diverged else None

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds; None if there is one seed."""
        return stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        """The mean and the spread as they are shown.

        Example:
            >>> str(Sample({0: 0.90, 1: 0.92})), str(Sample({0: 0.9, 1: None})), str(Sample({}))
            ('0.910 ± 0.014', 'diverged (1 of 2)', '-')
        """
        if self.diverged:
            return f"diverged ({self.diverged} of {len(self.by_seed)})"
        if not self.by_seed:
            return "-"
        return f"{self.mean:.3f}" + ("" if self.spread is None else f" ± {self.spread:.3f}")


@dataclass(frozen=True)
class Difference:
    """A difference, seed by seed, with its 95% t interval over seeds; no `low` and `high` if there is one seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def __str__(self) -> str:
        """The difference and its interval as they are shown.

        Example:
            >>> str(Difference(0.0061, 0.0042, 0.008, seeds=5)), str(Difference(-0.01, None, None, seeds=1))
            ('+0.006 [+0.004, +0.008]', '-0.010 (one seed)')
        """
        return f"{self.mean:+.3f} " + ("(one seed)" if self.low is None else f"[{self.low:+.3f}, {self.high:+.3f}]")

    @property
    def verdict(self) -> str:
        """Ahead or behind if the interval leaves no doubt, else level."""
        if self.low is None:
            return "one seed"
        return "ahead" if self.low > 0 else "behind" if self.high < 0 else "level"


def paired(ours: Sample, theirs: Sample) -> Difference | None:
    """Ours minus theirs on the seeds that both have; None if there is none, or either diverged."""
    seeds = [seed for seed in ours.by_seed if seed in theirs.by_seed]
    if not seeds or ours.diverged or theirs.diverged:
        return None
    differences = [ours.by_seed[seed] - theirs.by_seed[seed] for seed in seeds]
    centre = mean(differences)
    if len(seeds) == 1:
        return Difference(centre, None, None, 1)
    from scipy.special import stdtrit  # scipy.stats, which has it as t.ppf, takes half a second to import

    half = float(stdtrit(len(seeds) - 1, (1 + LEVEL) / 2)) * stdev(differences) / math.sqrt(len(seeds))
    return Difference(centre, centre - half, centre + half, len(seeds))
