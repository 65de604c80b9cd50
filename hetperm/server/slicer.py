"""Slicer: which part of a model a client gets, and how the part is put back (section 3.3 of the paper)."""

from hetperm.params import Params
from hetperm.randomness import seed_for
from submodels import WHOLE, IndexSet, Random, Rolling, ScalableModel, Static, Whole
from submodels.skeleton import named_tensors

EXTRACTIONS = ("static", "random", "rolling")
Index = IndexSet | Whole  # where a part lies; WHOLE if the part is all of the model


class Slicer:
    """Cuts parts out of models of one architecture and puts them back.

    Personal models are static parts of the global model: the first channels of every group, as many as the width of the
    client allows.

    Args:
        scalable: the global model; None if every client holds all of it.
    """

    def __init__(self, scalable: ScalableModel | None = None):
        self.scalable = scalable

    def index(
        self,
        width: float,
        extraction: str = "static",
        *,
        within: float = 1.0,
        seed: int = 0,
        round: int = 0,
        key: tuple[int, ...] = (),
    ) -> Index:
        """The part that a client of this width can train of a model of width ``within``.

        Args:
            extraction: "static", "rolling" (depends on the round) or "random" (depends on seed, round and key).
        """
        if self.scalable is None or width >= within:
            return WHOLE
        # Computed first even for another extraction, because it shows whether this width cuts anything at all.
        sizes = self.scalable.axis_map.counts(within)
        static = self.scalable.index(width, Static(), within=sizes)
        if static.counts == sizes:  # narrower, but by less than one channel in every group
            return WHOLE
        if extraction == "static":
            return static
        self._check(extraction)
        extractor = Rolling() if extraction == "rolling" else Random(seed_for(seed, "part", round, *key))
        return self.scalable.index(width, extractor, round=round, within=sizes)

    def cut(self, params: Params, index: Index) -> Params:
        """The part of a model; the model itself, not a copy, if the part is all of it."""
        return params if index is WHOLE else {name: index.gather(name, x) for name, x in params.items()}

    def put(self, params: Params, index: Index, part: Params) -> Params:
        """The model with one part replaced. The model given is not changed."""
        if index is WHOLE:
            return part
        return {name: index.scatter_(name, x.clone(), part[name]) for name, x in params.items()}

    def _check(self, extraction: str) -> None:
        """Raise an error for an extraction that would need tensors which clients do not have."""
        if extraction not in EXTRACTIONS:
            raise ValueError(f"unknown extraction {extraction!r}; use {', '.join(EXTRACTIONS)}")
        axis_map, model = self.scalable.axis_map, self.scalable.model
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for name, x in named_tensors(model):
            # Only trained parameters travel, and statistics are computed anew: every other tensor stays at the client.
            fixed = name not in trained and name not in axis_map.statistics
            # The smallest width cuts every tensor that any width cuts.
            if fixed and axis_map.shape(name, axis_map.counts(1e-9)) != tuple(x.shape):
                raise ValueError(
                    f"{name} is cut and not trained, so clients hold one part of it; extraction {extraction!r} would "
                    "need another every round: use 'static', or train it"
                )
