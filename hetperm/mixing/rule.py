"""Rule: how mixing weights are computed from the clients' reports."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from hetperm.checks import MOST
from hetperm.mixing import borders
from hetperm.texts import shown

MOST_STEPS = 1_000_000  # of projected descent, as in the configuration
SHARE = 0.7  # how much difference the "noise" rule finds worth sharing, in units of the noise of a gradient


@dataclass(frozen=True)
class Rule:
    """How mixing weights are computed.

    Attributes:
        regularization: the rule ``"noise"`` or ``"level"``, which need no tuning; or a number, the paper's lambda, with
            zeta as cost.
        vc_weight: how much a client of average complexity costs, as a share of the noise of a distance. The complexity
            of client j is h_j / mean(h), with h from `complexity.term`. ``"raw"`` adds h_j as it is (the paper), which
            outweighs distances by orders of magnitude: all weight goes to the clients with the smallest models.
        alpha_steps: take this many steps of projected descent; None solves exactly.
        share: c of the rule ``"noise"``: how much difference is worth sharing, in units of noise. With 0 every client
            is alone; with inf all share alike, by their samples.
    """

    regularization: float | Literal["noise", "level"] = "noise"
    vc_weight: float | Literal["raw"] = 0.0
    alpha_steps: int | None = None
    share: float = SHARE

    def __post_init__(self):
        lam = self.regularization
        if not (_is_number(lam) and lam > 0 if self.by_number else isinstance(lam, str) and lam in ("noise", "level")):
            raise ValueError(
                f"unknown regularization {shown(self.regularization)}; use 'noise', 'level' or a number above zero"
            )
        if self.regularization == "level" and self.alpha_steps is not None:
            raise ValueError(
                "alpha_steps is for a problem that is solved; regularization 'level' reads alpha off directly"
            )
        raw = isinstance(self.vc_weight, str) and self.vc_weight == "raw"
        if not raw and not (_is_number(self.vc_weight) and 0 <= self.vc_weight < math.inf):
            raise ValueError(f"vc_weight is {shown(self.vc_weight)}; it must be a number, zero or more, or 'raw'")
        if self.alpha_steps is not None:
            borders.count("alpha_steps", self.alpha_steps, 0, MOST_STEPS)
        for name in ("regularization", "vc_weight", "share"):
            value = check_share(self.share) if name == "share" else getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, float(value))  # torch takes no whole number above 2^63

    @property
    def by_number(self) -> bool:
        """Whether regularization is a number, the paper's lambda."""
        return isinstance(self.regularization, int | float) and not isinstance(self.regularization, bool)


def rule_of(options: Mapping[str, Any]) -> Rule:
    """The rule with these fields; an error names the first that it does not have."""
    known = [field.name for field in fields(Rule)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {shown(name)} of mixing weights; known are {', '.join(known)}")
    return Rule(**options)


def _is_number(value: object) -> bool:
    """Whether it is a number that a float can hold, or infinite."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return real and (value == math.inf or abs(value) <= sys.float_info.max)


def check_share(share: float) -> float:
    """The share; an error if it is none."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
        raise ValueError(f"share is {shown(share)}; it must be a number of at least 0, or inf")
    if share > MOST and share != math.inf:
        raise ValueError(f"share is {shown(share)}; it must be at most {MOST:g}, or inf, with which all share alike")
    return float(share)
