"""Whole runs under recipes: every engine gives the same numbers, and a run that was stopped ends as if it were not."""

import functools

import pytest
import torch
from test_resume import Stop
from tiny_run import contents, tiny, without_what_others_test
from torch import nn

from hetperm import Client, Config, run
from hetperm.runs import training
from hetperm.runs.setting import from_model

RECIPES = {
    "momentum": {"optimizer": "momentum", "global_lr": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.05},
    "pieces": {"accumulate": 3},
    "bfloat16": {"autocast": True, "dtype": "float32"},
    "schedule": {"lr_schedule": "cosine", "lr_warmup": 0.2},
    "all": {"optimizer": "adamw", "accumulate": 2, "lr_schedule": "linear", "lr_warmup": 0.1, "weight_decay": 0.01},
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
CASES = [*(("perm", recipe) for recipe in RECIPES), ("heterofl-ft", "all"), ("fjord-ft", "all"), ("ditto", "all")]


@functools.cache
def trained(recipe: str | None, method: str, engine: str):
    """The last state of a method with three clients of two widths."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    shards = [(torch.randn(n, 5, generator=generator), torch.arange(n) % 3) for n in (14, 17, 20)]
    clients = [Client(shard, width=width) for shard, width in zip(shards, (1.0, 0.5, 1.0), strict=True)]
    options = {"steps": 24, "epochs": 2, "batch_size": 6, "share": 0.7, "dtype": "float64", "engine": engine}
    config = Config(**options | {"workers": 1 if engine == "sequential" else 2} | RECIPES.get(recipe, {}))
    setting = from_model(model, clients, config, loss=None, metric=None)
    *_, last = training.epochs(setting, method, steps=config.steps)
    return last.state


def apart(ours, theirs) -> float:
    """The largest difference of two lists of models."""
    pairs = [(a[name], b[name]) for a, b in zip(ours.v, theirs.v, strict=True) for name in a]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("method", "recipe"), CASES)
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_threads_and_processes_take_the_steps_of_the_sequential_engine(engine, method, recipe):
    ours, theirs = trained(recipe, method, engine), trained(recipe, method, "sequential")
    assert apart(ours, theirs) == 0 and ours.work == theirs.work


@every_recipe
def test_the_batched_engine_takes_them_too_up_to_rounding(recipe):
    ours, theirs = trained(recipe, "perm", "batched"), trained(recipe, "perm", "sequential")
    assert apart(ours, theirs) <= (1e-3 if recipe == "bfloat16" else 1e-9) and ours.work == theirs.work


@every_recipe
def test_a_recipe_makes_a_difference(recipe):
    difference = apart(trained(recipe, "perm", "sequential"), trained(None, "perm", "sequential"))
    # Pieces of a mini-batch add up to the same gradient.
    assert difference < 1e-12 if recipe == "pieces" else difference > 1e-4


@pytest.mark.slow
def test_a_run_under_a_schedule_that_is_stopped_ends_alike(tmp_path):
    recipe = {"optimizer": "momentum", "global_lr": 0.1, "lr_schedule": "cosine", "lr_warmup": 0.2, "accumulate": 2}
    budget = {"steps": 60, "warmup_rounds": None, "alpha_every": 2, "epochs": 4, "baselines": ("heterofl-ft",)}
    with without_what_others_test():
        run(tiny(**recipe, **budget, out=tmp_path / "whole"))
        config = tiny(**recipe, **budget, out=tmp_path / "run", resume=True)
        for k in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                run(config, on_epoch=Stop(k))
        run(config)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
