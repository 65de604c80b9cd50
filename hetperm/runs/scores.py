"""Scores of the models of a run: of each client on its own data, and over clients and tiers."""

import math
from collections.abc import Sequence

from hetperm.client import Client
from hetperm.device.bench import CHUNK, Workbench, Workshop, masked, outputs_of
from hetperm.metrics import Metric
from hetperm.params import NotFinite, Params
from hetperm.runs.evaluate import evaluate, summarise
from hetperm.runs.scoring import LABELS, Wanted, with_fewer
from hetperm.runs.setting import Setting
from hetperm.shards import parts
from hetperm.texts import one_line
from submodels.norms import recalibrate

One = tuple[float, float]  # the loss and the score of a client
Scores = tuple[tuple[float, ...], tuple[float, ...]]  # of the metric and losses, one per client


def load_for_evaluation(bench: Workbench, params: Params, client: Client) -> None:
    """Load a client's model onto the bench, with the norm statistics of the client's own training data."""
    # Of training data, because statistics of test data would tell the model about what it is scored on.
    bench.load(params)
    # One part at a time, so that a shard larger than memory is never read as a whole.
    inputs = (x for x, _ in parts(client.train, math.ceil(client.n_train / CHUNK)))
    recalibrate(bench.module, inputs, run=lambda x: outputs_of(bench.module, x))


def score_one(shop: Workshop, metric: Metric, client: Client, params: Params, width: float, part: str) -> One:
    """(loss, metric) of a client's model on its "train", "val" or "test" data, which it must have."""
    bench = shop.at(width)
    load_for_evaluation(bench, params, client)
    loss, mean = evaluate(
        bench.module,
        getattr(client, part),
        loss=lambda out, y: shop.loss(masked(out, client.classes), y),
        metric=lambda out, y: metric(masked(out, client.classes), y),
    )
    return loss, metric.of_client(mean)


def score(setting: Setting, models: Sequence[Params], widths: Sequence[float], part: str, *, where: str) -> Scores:
    """(scores, losses) of every client's model on its own data; nan for a client that has none, or is absent.

    Args:
        part: "val" or "test".
        where: the moment of the run, for errors, such as "after epoch 3".
    """
    return scores(setting, [(models, Wanted("", LABELS[part]))], widths, where=where)[0]


def scores(
    setting: Setting, wanted: Sequence[tuple[Sequence[Params], Wanted]], widths: Sequence[float], *, where: str
) -> list[Scores]:
    """The scores of several sets of models, each on a part of the data; at nodes all of a client's travel together."""
    clients, shop, metric = setting.clients, setting.shop, setting.metric
    rows = [
        (k, i, models[i], one.part)
        for k, (models, one) in enumerate(wanted)
        for i, client in enumerate(clients)
        if getattr(client, one.part) is not None
    ]
    if setting.nodes is not None:
        found = setting.nodes.score(setting, [(i, params, widths[i], part) for _, i, params, part in rows])
    else:
        scored = [with_fewer(clients, one) for _, one in wanted]
        found = []
        for k, i, params, part in rows:
            try:
                found.append(score_one(shop, metric, scored[k][i], params, widths[i], part))
            # Stored samples are read only now, and models, losses and metrics are a user's code.
            except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
                reason = one_line(str(error)) or type(error).__name__
                raise ValueError(f"{where}: client {i}: {part}: {reason}") from error
    tables = [([math.nan] * len(clients), [math.nan] * len(clients)) for _ in wanted]
    for (k, i, _, part), one in zip(rows, found, strict=True):
        if one is None:
            continue
        loss, value = one
        tables[k][0][i], tables[k][1][i] = value, loss
        if not (math.isfinite(loss) and math.isfinite(value)):
            figures = f"{part} loss {loss:g}, {metric.name} {value:g} (width {widths[i]:g})"
            remedy = "lower the learning rate (personal_lr, global_lr, final_lr)"
            if math.isfinite(loss):  # then the model is sound
                remedy = f"make {metric.name} give a number for such outputs, or choose another --metric"
            raise NotFinite(f"{where}: client {i}: {figures}; {remedy}")
    return [(tuple(values), tuple(losses)) for values, losses in tables]


def figures(setting: Setting, scores: Sequence[float], losses: Sequence[float]) -> dict[str, dict[str, float]]:
    """The figures of the metric, by its name, and of the loss over the clients that were scored."""
    metric = setting.metric
    scored = [i for i, value in enumerate(losses) if not math.isnan(value)]
    n = [setting.clients[i].n_train for i in scored]
    if not scored:
        # The columns of a table must not depend on whether there are test data.
        blank = dict.fromkeys(summarise([0.0], [1]), math.nan)
        return {metric.name: blank, "loss": blank}
    return {
        metric.name: summarise([scores[i] for i in scored], n, largest_is_worst=metric.lower_is_better),
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
