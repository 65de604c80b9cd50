"""Mixing weights alpha: how much each client learns from each other, and what they are computed from."""

from hetperm.mixing.denoise import denoised
from hetperm.mixing.near import sparse_weights, spread
from hetperm.mixing.reading import (
    effective_partners,
    nonzero,
    rows_of,
    same_group_mass,
    self_weight,
    sparse,
)
from hetperm.mixing.rule import SHARE, Rule
from hetperm.mixing.solver import (
    SPARSE_FROM,
    descend,
    level,
    noise,
    solve,
    weights,
    weights_by_rows,
    weights_of,
)

__all__ = [
    "SHARE",
    "Rule",
    "SPARSE_FROM",
    "denoised",
    "descend",
    "effective_partners",
    "level",
    "noise",
    "nonzero",
    "rows_of",
    "same_group_mass",
    "self_weight",
    "solve",
    "sparse",
    "sparse_weights",
    "spread",
    "weights",
    "weights_by_rows",
    "weights_of",
]
