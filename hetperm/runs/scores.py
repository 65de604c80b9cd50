"""Scores of the models of a run: of each client on its own data, and over clients and tiers."""

import math
from collections.abc import Sequence

from hetperm.client import Client
from hetperm.device.bench import CHUNK, Workbench, masked, outputs_of
from hetperm.params import NotFinite, Params
from hetperm.runs.evaluate import evaluate, summarise
from hetperm.runs.setting import Setting
from hetperm.shards import parts
from submodels.norms import recalibrate

Scores = tuple[tuple[float, ...], tuple[float, ...]]  # accuracies and losses, one per client


def load_for_evaluation(bench: Workbench, params: Params, client: Client) -> None:
    """Load a client's model onto the bench, with the norm statistics of the client's own training data."""
    # Of training data, because statistics of test data would tell the model about what it is scored on.
    bench.load(params)
    # One part at a time, so that a shard larger than memory is never read as a whole.
    inputs = (x for x, _ in parts(client.train, math.ceil(client.n_train / CHUNK)))
    recalibrate(bench.module, inputs, run=lambda x: outputs_of(bench.module, x))


def score(setting: Setting, models: Sequence[Params], widths: Sequence[float], part: str, *, where: str) -> Scores:
    """(accuracies, losses) of every client's model on its own data; nan for a client that has none.

    Args:
        part: "val" or "test".
        where: the moment of the run, for errors, such as "after epoch 3".
    """
    accuracies, losses = [], []
    for i, (client, params, width) in enumerate(zip(setting.clients, models, widths, strict=True)):
        pair = getattr(client, part)
        loss = metric = math.nan
        if pair is not None:
            bench = setting.shop.at(width)
            load_for_evaluation(bench, params, client)
            loss, metric = evaluate(
                bench.module,
                pair,
                loss=lambda out, y, classes=client.classes: setting.shop.loss(masked(out, classes), y),
                metric=lambda out, y, classes=client.classes: setting.metric(masked(out, classes), y),
            )
            if not (math.isfinite(loss) and math.isfinite(metric)):
                figures = f"{part} loss {loss:g}, metric {metric:g} (width {width:g})"
                raise NotFinite(f"{where}: client {i}: {figures}; lower the learning rate (personal_lr, global_lr)")
        accuracies.append(metric)
        losses.append(loss)
    return tuple(accuracies), tuple(losses)


def figures(setting: Setting, accuracies: Sequence[float], losses: Sequence[float]) -> dict[str, dict[str, float]]:
    """The figures of accuracy and loss over the clients that were scored."""
    scored = [i for i, value in enumerate(losses) if not math.isnan(value)]
    n = [setting.clients[i].n_train for i in scored]
    if not scored:
        # The columns of a table must not depend on whether there are test data.
        blank = dict.fromkeys(summarise([0.0], [1]), math.nan)
        return {"accuracy": blank, "loss": blank}
    return {
        "accuracy": summarise([accuracies[i] for i in scored], n),
        "loss": summarise([losses[i] for i in scored], n, largest_is_worst=True),
    }


def by_tier(setting: Setting, values: Sequence[float]) -> dict[str, float]:
    """tier -> the mean over its clients that were scored; nan if none was."""
    means = {}
    for tier in setting.tier_names:
        scored = [
            value for value, name in zip(values, setting.tiers, strict=True) if name == tier and not math.isnan(value)
        ]
        means[tier] = sum(scored) / len(scored) if scored else math.nan
    return means
