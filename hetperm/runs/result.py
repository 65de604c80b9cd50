"""Result: what a run has found, in memory: scores, models, who learns from whom."""

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.advice import did_you_mean
from hetperm.algorithms.perm import chosen_share
from hetperm.client import Client
from hetperm.report.advice import Evidence, lines
from hetperm.report.summary import Summary
from hetperm.runs import client_models, join
from hetperm.runs.export.export import Exported, export_result
from hetperm.runs.export.options import Options as ExportOptions
from hetperm.runs.join import Joined
from hetperm.runs.placement import one_thread
from hetperm.runs.scores import load_for_evaluation
from hetperm.runs.server_file import Server
from hetperm.runs.setting import Setting
from hetperm.runs.training import Trained
from hetperm.server.estimate import EARLY, NEVER, REPORTS, together
from hetperm.shards import first, read
from hetperm.state import State
from hetperm.texts import shown
from submodels import WHOLE, Budget

_OF_REPORTS = {"gradient", "noise", "epoch", "since"}  # under that name a method of a plugin may remember anything


@dataclass(frozen=True)
class Result:
    """The result of a run. Scores are those of the deployed models on test data.

    Attributes:
        main: the trained algorithm.
        baselines: its rivals by name.
        clients: one row per client.
        summary: the content of summary.json.
        folder: the run folder; None if nothing was written.
    """

    main: Trained
    baselines: Mapping[str, Trained]
    clients: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    folder: Path | None

    @property
    def alpha(self) -> Tensor | None:
        """(N, N) the mixing weights, sparse from a thousand clients on; None if the algorithm has none."""
        return self.state.alpha

    @property
    def score(self) -> float:
        """The mean over clients of the metric of the run; `summary` has its name, and whether more is better."""
        return self.summary[self.summary["metric"]]["mean"]

    @property
    def accuracy(self) -> float:
        """The same as `score`, under the name that most runs have for it."""
        return self.score

    @property
    def tiers(self) -> Mapping[str, Mapping[str, Any]]:
        """tier -> number of clients, width, parameters and the mean of the metric."""
        return self.summary["tiers"]

    @property
    def setting(self) -> Setting:
        """What all methods of the run shared."""
        return self.main.setting

    @property
    def state(self) -> State:
        """The last state of the algorithm."""
        return self.main.state

    @property
    def history(self) -> tuple[Mapping[str, Any], ...]:
        """The metrics of the algorithm, one row per epoch."""
        return self.main.history

    @property
    def advice(self) -> list[str]:
        """What seems to have gone wrong and what to try, one sentence each; empty if nothing did."""
        return lines([self.evidence])

    @property
    def evidence(self) -> Evidence:
        """What advice is given by."""
        trained = {self.main.method: self.main, **self.baselines}
        return Evidence(
            summary=Summary.from_json(self.summary),
            histories={name: one.history for name, one in trained.items()},
            clients=self.clients,
            settings=tomllib.loads(self.setting.config.to_toml()),
        )

    def join(self, client: Client, *, budget: Budget | None = None, steps: int = 0) -> Joined:
        """Let a client join that was not there: it gets a model made of those it learns from, and nobody else is asked.

        If the run has a folder, the client is written as one more of its clients.

        Args:
            client: its data, and its width.
            budget: what its device can afford; its width is then the largest of the run's that fits.
            steps: SGD steps that it takes on its own data at the end.
        """
        if self.folder is not None:
            shop = self.setting.shop
            return join.join(
                self.folder,
                client,
                budget=budget,
                steps=steps,
                model=shop.full.module,
                loss=shop.loss,
                metric=self.setting.metric,
            )
        server = server_of(self)
        if server is None or self.setting.config.discrepancy != "probe":
            raise ValueError(
                "the run has no reports at a common model; perm with discrepancy 'probe' has, if it estimates weights"
            )
        inputs, widths = read(first(self.setting.clients[0].train, 1))[0], self.main.widths
        if not isinstance(inputs, Tensor):
            raise ValueError("the model of the run takes several inputs, and clients join only models that take one")
        sample = inputs.shape[1:]
        run = join.Run(self.setting, server, widths, self.setting.tiers, sample, self.state.deployed.__getitem__)
        return join.added(run, client, budget=budget, steps=steps)

    def model(self, i: int) -> nn.Module:
        """Client i's personal model, a plain module in evaluation mode."""
        clients = len(self.setting.clients)
        if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < clients:
            raise ValueError(f"there is no client {shown(i)}; they are numbered from 0 to {clients - 1}")
        bench = self.setting.shop.at(self.main.widths[i])
        # On one thread, so that the statistics of its norms are those that it was scored with.
        with one_thread():
            load_for_evaluation(bench, self.state.deployed[i], self.setting.clients[i])
        # A copy, because the bench is used again for every model of this width.
        return copy.deepcopy(bench.module).eval()

    def export(self, **options: Any) -> list[Exported]:
        """Write clients' models as files that devices run, each verified on that client's validation data.

        Args:
            options: those of `hetperm.runs.export.options.Options`, such as ``format="onnx", client=7``; all clients
                unless `client` or `tier` names some. Files go to `out`, or to exports/ in the run's folder.
        """
        known = [field.name for field in fields(ExportOptions)]
        for name in options:
            if name not in known:
                advice = did_you_mean(name, known, f"it takes {', '.join(known)}")
                raise TypeError(f"export has no option {name!r}; {advice}")
        return export_result(self, partial(manifest_of, self), ExportOptions(**options))


def server_of(result: Result) -> Server | None:
    """What a client needs that joins later; None if the method collects no reports."""
    state, config = result.state, result.setting.config
    kept = state.memory.get(REPORTS)
    if kept is None or not kept.keys() >= _OF_REPORTS:
        return None
    age = config.alpha_every if config.report_age is None else config.report_age
    epoch, since = kept["epoch"], kept["since"]
    known = (epoch != NEVER) & ((epoch >= since) | (since - epoch <= age))
    samples = torch.tensor([client.n_train for client in result.setting.clients])
    table = together(state.memory, samples.double(), known)
    return Server(
        state.w,
        table["gradient"],
        table["noise"],
        samples,
        table["known"],
        table["units"],
        state.memory[EARLY] if len(table["units"]) > 1 else {},
        min(client.width for client in result.setting.clients),
        chosen_share(state.memory) if config.share == "look-ahead" else float(config.share),
        result.main.method,
    )


def manifest_of(result: Result, i: int) -> dict[str, Any]:
    """The manifest of client i's model."""
    setting, row = result.setting, result.clients[i]
    client, width = setting.clients[i], result.main.widths[i]
    index = setting.slicer.index(width)
    manifest: dict[str, Any] = {"architecture": setting.architecture, "width": width}
    if index is not WHOLE:
        manifest |= client_models.channels(index)
    manifest |= client_models.input_of(read(first(client.train, 1))[0])
    if client.classes is not None:
        manifest["classes"] = client.classes.nonzero().flatten().tolist()
    return manifest | {
        "alpha": None if result.alpha is None else _row_of(result.alpha, i),
        "algorithm": result.main.method,
        "dataset": setting.dataset,
        "seed": setting.config.seed,
        **{key: row[key] for key in ("tier", "group", "n_train", setting.metric.name)},
    }


def _row_of(alpha: Tensor, i: int) -> list[float] | dict[str, float]:
    """Client i's row of the mixing weights; of very many clients partner -> weight, without the zeros."""
    if not alpha.is_sparse:
        return alpha[i].tolist()
    alpha = alpha.coalesce()
    (owner, host), values = alpha.indices(), alpha.values()
    here = slice(*torch.searchsorted(owner, torch.tensor([i, i + 1], device=owner.device)).tolist())
    return {str(j): weight for j, weight in zip(host[here].tolist(), values[here].tolist(), strict=True)}
