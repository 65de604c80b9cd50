"""``hetperm join``: a client that was not there becomes one more client of a finished run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hetperm.checks import check_fields, number, text, whole
from hetperm.cli import who
from hetperm.cli.console import say
from hetperm.cli.flags import UsageError, read_run

LIMIT = number(lambda x: x > 0, "a number above 0")
HOW = "give one of --width, --tier and a budget (--train-mb, --mmacs, --wire-mb)"


@dataclass(frozen=True)
class Options:
    """Add a new client to a finished run (RUN, its folder). One gradient compares it with the others, and its model is
    mixed from the models of those it learns from. It is written to the folder as one more client. No other client is
    needed."""

    data: Path | None = None
    """Its data, an npz file: x (n, ...), normalised like the data of the run, y (n,), and optionally split (n,): 0 for
    training, 1 for testing."""
    width: Annotated[float | None, number(lambda x: 0 < x <= 1, "a number above 0 and up to 1")] = None
    """Its width: the share of the model's channels that it can train."""
    tier: Annotated[str | None, text] = None
    """A tier of the run: the client gets its width."""
    train_mb: Annotated[float | None, LIMIT] = None
    """Its budget: memory of a training step in MB; it gets the largest width of the run that fits."""
    mmacs: Annotated[float | None, LIMIT] = None
    """Its budget: million multiply-adds of the forward pass of a sample."""
    wire_mb: Annotated[float | None, LIMIT] = None
    """Its budget: MB that are sent one way in a visit."""
    steps: Annotated[int, whole(0, 1_000_000)] = 0
    """SGD steps on its own data at the end."""

    def __post_init__(self):
        check_fields(self, label="--{}")


def main(args: Sequence[str]) -> None:
    """Let the client join, and print whom it learns from."""
    folder, options = read_run("hetperm join", Options, args)
    if options.data is None:
        raise UsageError("the data of the client are missing; give --data FILE.npz")
    limits = {name: getattr(options, name) for name in ("train_mb", "mmacs", "wire_mb")}
    ways = [options.width is not None, options.tier is not None, any(limit is not None for limit in limits.values())]
    if sum(ways) != 1:
        raise UsageError(f"the width of the client is {'given twice' if sum(ways) else 'missing'}; {HOW}")
    from hetperm.runs import join
    from hetperm.runs.newcomer import client_of, width_of_tier
    from submodels import Budget

    width = width_of_tier(folder, options.tier) if options.tier is not None else options.width
    client = client_of(options.data, width or 1.0)
    new = join.join(folder, client, budget=Budget(**limits) if ways[2] else None, steps=options.steps)
    who.show(folder, new.client)
    made = ", ".join(map(str, new.made_of))
    say(f"its model begins as {f'the mean of those of {made}' if made else 'its part of the global model'}")
    scored = "it has no test data" if math.isnan(new.score) else f"test {new.metric} {new.score:.3f}"
    say(f"joined {folder} as client {new.client}: {scored}; its model is models/client_{new.client:03d}.safetensors")
