"""Partial training: which part of a model a client is handed, and how it comes back (section 3.3 of the paper).

A part is named by an `IndexSet`; None stands for the whole model, which then passes through untouched.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hetperm.client import Client
from hetperm.device.bench import Params
from hetperm.mixing import complexity
from hetperm.randomness import seed_for
from hetperm.server import store
from hetperm.server.store import Keep
from submodels import IndexSet, Random, Rolling, ScalableModel, Static, average
from submodels.skeleton import named_tensors

EXTRACTIONS = ("static", "random", "rolling")
NESTED = (*EXTRACTIONS, "skip")  # what a host that is smaller than the visiting model does


class Parts:
    """The parts of one architecture: of the global model, and of the clients' own models, which are parts of it.

    Own models are static: client i's model has the first channels of every group, as many as its width allows.

    Args:
        scalable: the global model; None if nobody holds less than all of it.
        heads: names of the parameters that have a row for every class.
        keep: where a model that was put together waits for its next visit.
    """

    def __init__(self, scalable: ScalableModel | None = None, heads: Sequence[str] = (), keep: Keep = store.in_memory):
        self.scalable, self.heads, self.keep = scalable, tuple(heads), keep
        self._static: dict[tuple[float, float], IndexSet | None] = {}

    def index(
        self, width: float, extraction: str = "static", *, seed: int = 0, round: int = 0, key: int = 0
    ) -> IndexSet | None:
        """The part of the global model that a client of this width is handed in a round of global training."""
        return self.nested(1.0, width, extraction, seed=seed, round=round, key=(key,))

    def nested(
        self,
        own: float,
        host: float,
        extraction: str = "static",
        *,
        seed: int = 0,
        round: int = 0,
        key: Sequence[int] = (),
    ) -> IndexSet | None:
        """The part of a model of width ``own`` that a host of width ``host`` can train; None: all of it.

        Args:
            extraction: "static", "rolling" (depends on the round) or "random" (depends on seed, round and key).
        """
        if self.scalable is None or host >= own:
            return None
        if (own, host) not in self._static:
            self._static[own, host] = self._cut(own, host, Static(), round=0)
        static = self._static[own, host]
        if static is None or extraction == "static":
            return static
        self._check(extraction)
        extractor = Rolling() if extraction == "rolling" else Random(seed_for(seed, "part", round, *key))
        return self._cut(own, host, extractor, round=round)

    def _cut(self, own: float, host: float, extractor: Callable[..., Tensor], *, round: int) -> IndexSet | None:
        sizes = self.scalable.axis_map.counts(own)
        index = self.scalable.index(host, extractor, round=round, within=sizes)
        return None if index.counts == sizes else index

    def cut(self, params: Params, index: IndexSet | None) -> Params:
        """The part of a model; the model itself if the part is all of it."""
        return params if index is None else {name: index.gather(name, x) for name, x in params.items()}

    def put(self, params: Params, index: IndexSet | None, part: Params) -> Params:
        """The model with a part of it replaced."""
        if index is None:
            return self.keep(part)
        return self.keep({name: index.scatter_(name, x.clone(), part[name]) for name, x in params.items()})

    def add(self, params: Params, index: IndexSet | None, part: Params, weight: float) -> Params:
        """The model with ``weight`` times a part added to it, such as a step of those who hold only the part."""
        if index is None:
            return {name: x + weight * part[name] for name, x in params.items()}
        return {
            name: index.scatter_(name, x.clone(), weight * part[name], accumulate=True) for name, x in params.items()
        }

    def mean(
        self,
        w: Params,
        models: Sequence[Params],
        indices: Sequence[IndexSet | None],
        rows: Mapping[str, Tensor] | None = None,
    ) -> Params:
        """Every coordinate averaged over the parts that cover it; those that nobody covers keep their value.

        Args:
            rows: name -> (models, rows) bool, the rows of that tensor that each model has a say in.
        """
        if self.scalable is None:
            return {name: _mean(x, [model[name] for model in models], (rows or {}).get(name)) for name, x in w.items()}
        whole = self.scalable.index(1.0)
        updates = [(model, index or whole, 1.0) for model, index in zip(models, indices, strict=True)]
        return average(w, updates, rows=rows)

    def mixed(
        self,
        i: int,
        models: Sequence[Params],
        widths: Sequence[float],
        weights: Mapping[int, float],
        order: Sequence[int],
    ) -> Params:
        r"""Client i's model, mixed with the parts that it has in common with the models of others.

        .. math:: v_{ik} \leftarrow \sum_{j : k \in W_j} \alpha_j v_{jk} \Big/ \sum_{j : k \in W_j} \alpha_j

        Coordinates that no weight falls on keep their value.

        Args:
            models, widths: of all clients; `weights`: of those that i learns from.
            order: the clients in the order to sum in.
        """
        total = {name: torch.zeros_like(x) for name, x in models[i].items()}
        weight = {name: torch.zeros_like(x) for name, x in models[i].items()}
        for width in sorted(set(widths)):
            members = [j for j in order if widths[j] == width and j in weights]
            if not members:
                continue
            share = sum(weights[j] for j in members)
            common = self.nested(widths[i], width)  # where the narrower of the two lies in i's model ...
            inside = self.nested(width, widths[i])  # ... and in theirs
            for name in total:
                part = sum(models[j][name] * weights[j] for j in members)
                part = part if inside is None else inside.gather(name, part)
                if common is None:
                    total[name] += part
                    weight[name] += share
                else:
                    common.scatter_(name, total[name], part, accumulate=True)
                    common.scatter_(name, weight[name], torch.full_like(part, share), accumulate=True)
        return {name: torch.where(weight[name] > 0, total[name] / weight[name], x) for name, x in models[i].items()}

    def fresh(self, width: float, start: Params, *, seed: int) -> Params:
        """A new model of a width for somebody who trains alone: ``start`` itself if that is all of it.

        Layers that can be reset draw weights that suit their own size, as those of a wide layer are too small for a
        narrow one; what cannot be reset is cut out of ``start``.
        """
        index = self.index(width)
        if index is None:
            return start
        module = self.scalable.cut(index).module
        module.load_state_dict(self.cut(start, index), strict=False)  # what lies in the global module is anybody's
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(seed, "fresh", *self.scalable.axis_map.counts(width)))
            for part in module.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
        return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}

    def num_params(self, width: float, module: nn.Module) -> int:
        """Parameters of a model of this width."""
        if self.scalable is None or width >= 1:
            return sum(p.numel() for p in module.parameters())
        return self.scalable.axis_map.num_params(self.scalable.axis_map.counts(width))

    def vc(self, widths: Sequence[float]) -> Tensor | None:
        """(N,) the VC dimension of the architecture of each width; None if they are all the same."""
        if self.scalable is None:
            return None
        layers = complexity.num_layers(self.scalable.model)
        sizes = [self.num_params(width, self.scalable.model) for width in widths]
        if len(set(sizes)) == 1:
            return None
        return torch.tensor([complexity.vc(size, layers) for size in sizes], dtype=torch.float64)

    def positions(self, params: Params, index: IndexSet | None) -> Tensor | None:
        """(d_i,) where the coordinates of a part lie in the flat global model (d,); None if it is all of it."""
        if index is None:
            return None
        places, first = [], 0
        for name, x in params.items():
            whole = torch.arange(first, first + x.numel()).reshape(x.shape)
            places.append(index.gather(name, whole).flatten())
            first += x.numel()
        return torch.cat(places)

    def _check(self, extraction: str) -> None:
        if extraction not in EXTRACTIONS:
            raise ValueError(f"unknown extraction {extraction!r}; use {', '.join(EXTRACTIONS)}")
        axis_map, model = self.scalable.axis_map, self.scalable.model
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        for name, x in named_tensors(model):
            fixed = name not in trained and name not in axis_map.statistics
            if fixed and axis_map.shape(name, axis_map.counts(1e-9)) != tuple(x.shape):
                raise ValueError(
                    f"{name} is cut and not trained, so clients hold one part of it; extraction {extraction!r} would "
                    "need another every round: use 'static', or train it"
                )


WHOLE = Parts()


def _mean(old: Tensor, tensors: Sequence[Tensor], votes: Tensor | None) -> Tensor:
    """The mean of tensors, row by row over those with a say in it."""
    if votes is None:
        votes = torch.ones(len(tensors), 1, dtype=torch.bool)
    weights = votes.to(old).reshape(*votes.shape, *[1] * (old.dim() - 1))
    total = sum(weight * x for weight, x in zip(weights, tensors, strict=True))
    count = weights.sum(0)
    return torch.where(count > 0, total / count.clamp_min(1), old)


def classifier(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the parameters of the last linear layer with an output for every class."""
    last = [path for path, part in model.named_modules() if isinstance(part, nn.Linear)]
    last = [path for path in last if model.get_submodule(path).out_features == num_classes][-1:]
    return [f"{path}.{name}" for path in last for name, _ in model.get_submodule(path).named_parameters()]


def own_widths(clients: Sequence[Client], personal_width: str = "own") -> list[float]:
    """(N,) the width of every client's own model: as much as it can hold, or what the smallest client can."""
    if personal_width == "own":
        return [client.width for client in clients]
    return [min(client.width for client in clients)] * len(clients)


def coverage(
    parts: Parts,
    w: Params,
    clients: Sequence[Client],
    tiers: Sequence[str],
    extraction: str,
    *,
    seed: int,
    rounds: int,
    drawn: Callable[[Client, int], Sequence[float]] | None = None,
) -> Iterator[Mapping[str, object]]:
    """How often each block of the global model was trained, by tier: one row for each parameter tensor and tier.

    ``times`` is the mean over the tensor's coordinates of how many clients trained it in a step, ``never`` the share
    of them that no client of the tier ever trained; the tier "all" counts everybody.

    Args:
        drawn: the widths that a client trains in the steps of a round; in all of them what it can hold if left out.
    """
    counts = {tier: {name: torch.zeros(x.shape) for name, x in w.items()} for tier in dict.fromkeys(tiers)}
    same = extraction == "static" and drawn is None  # in every round
    repeats = min(1, rounds) if same else rounds
    for r in range(repeats):
        for client, tier in zip(clients, tiers, strict=True):
            widths = drawn(client, r) if drawn else [client.width]
            for width, times in Counter(widths).items():
                index = parts.index(width, extraction, seed=seed, round=r, key=client.key)
                for name, into in counts[tier].items():
                    share = torch.full(into.shape if index is None else index.shape(name), times / len(widths))
                    if index is None:
                        into += share
                    else:
                        index.scatter_(name, into, share, accumulate=True)
    everybody = {name: sum(each[name] for each in counts.values()) for name in w}
    for tier, each in (*counts.items(), ("all", everybody)):
        for name, count in each.items():
            yield {
                "block": name,
                "tier": tier,
                "times": float(count.mean()) / max(1, repeats),
                "never": float((count == 0).float().mean()),
                "rounds": rounds,
            }
