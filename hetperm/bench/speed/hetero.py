"""W5: a whole epoch of PERM with models of five sizes, against a bare torch loop of the steps that it consists of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hetperm import profile
from hetperm.bench.speed.rounds import described
from hetperm.bench.speed.timing import compare, pinned
from hetperm.bench.speed.workloads import IMAGE, SEED, Workload, bare_steps, build
from hetperm.client import Client
from hetperm.config import Config
from hetperm.engine import choice
from hetperm.engine.sequential import Sequential
from hetperm.engine.task import Task
from hetperm.runs.setting import Setting, from_model
from hetperm.runs.training import algorithm_for

# Sizes of an epoch of a few seconds: as many visits as pairs of clients.
CASES = {
    "W5 cnn": Workload("cnn, 32x32x3, mobile profile", "cnn", IMAGE, 10, 5, 32),
    "W5 resnet18": Workload("resnet18-cifar, mobile profile", "resnet18-cifar", IMAGE, 10, 2, 10),
}


def mobile(workload: Workload) -> Workload:
    """The workload with the widths of the mobile profile, as many of each as its shares say."""
    tiers = profile.load("mobile").tiers
    counts = profile.apportion([tier.share for tier in tiers], workload.num_clients)
    return replace(workload, widths=[tier.width for tier, n in zip(tiers, counts, strict=True) for _ in range(n)])


def against_steps(workload: Workload, *, engine: str, workers: int, runs: int, repeats: int) -> dict[str, Any]:
    """Times of an epoch (all visits, the global step, alpha anew) on ``workers`` cores, and of its steps on one."""
    with pinned(workers):
        setup = build(mobile(workload))
        setting = setting_of(workload, setup.clients, setup.shop.full.module)
        kind = choice.choose(engine, workers, setting.clients, setting.shop)
        steps = steps_of(setting, workload)
        with choice.opened(kind, workers, setting.clients, setting.shop) as chosen:
            algorithm = algorithm_for(setting, "perm", chosen, steps=1)
            start = algorithm.begin()
            # Always from the same state, so that all repetitions do the same work.
            times = compare(
                partial(bare_epoch, steps, workload.lr), partial(algorithm.epoch, start), runs=runs, repeats=repeats
            )
    return {
        **described(setup, kind, workers),
        "tasks": len(steps),
        "steps": sum([len(one.batches) for one in steps]),
        "ratio_to_bare": times.ratio,
        "ratios": times.ratios,
        **times.row("bare", "epoch"),
    }


def setting_of(workload: Workload, clients: Sequence[Client], model: nn.Module) -> Setting:
    """The setting of a run in which every client learns from everybody, so that an epoch has all visits."""
    config = Config(
        num_clients=len(clients),
        local_steps=workload.local_steps,
        batch_size=workload.batch_size,
        steps=0,
        warmup_rounds=1,
        epochs=2,
        alpha_every=1,
        first_alpha="uniform",
        share=0.7,
        tail_average=0.0,
        device="cpu",
        seed=SEED,
    )
    return from_model(model, clients, config, loss=None, metric=None)


@dataclass(frozen=True)
class Steps:
    """The steps of a task as a bare loop takes them: on the module of its width, on batches of its host."""

    module: nn.Module
    batches: Sequence[tuple[Tensor, Tensor]]


class Recording(Sequential):
    """The sequential engine, which also remembers its tasks."""

    def __init__(self, setting: Setting):
        super().__init__(setting.clients, setting.shop)
        self.tasks: list[Task] = []

    def run(self, tasks: Sequence[Task]) -> list[Any]:
        """The outcomes of the tasks."""
        self.tasks += tasks
        return super().run(tasks)


def steps_of(setting: Setting, workload: Workload) -> list[Steps]:
    """The steps of one epoch: for every task as many batches as it has samples for, reports for alpha included."""
    engine = Recording(setting)
    algorithm = algorithm_for(setting, "perm", engine, steps=1)
    start = algorithm.begin()
    engine.tasks.clear()
    algorithm.epoch(start)
    shop, size = setting.shop.copy(), workload.batch_size
    cut = [list(zip(*(part.split(size) for part in client.train), strict=True)) for client in setting.clients]
    # Rounded: the gradient of a report is a step, too, and a loss a third of one.
    counts = [round(task.update.samples(setting.clients[task.host].n_train) / size) for task in engine.tasks]
    return [
        Steps(shop.at(task.width).module, [cut[task.host][k % len(cut[task.host])] for k in range(count)])
        for task, count in zip(engine.tasks, counts, strict=True)
    ]


def bare_epoch(steps: Sequence[Steps], lr: float) -> None:
    """Take all steps as torch alone would."""
    optimizers = {id(one.module): torch.optim.SGD(one.module.parameters(), lr=lr) for one in steps}
    for one in steps:
        bare_steps(one.module, optimizers[id(one.module)], one.batches)
