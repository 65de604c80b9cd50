"""Local steps as a configuration asks for them: their recipe, their step sizes, and what decides their memory."""

from typing import Any

from torch import nn

from hetperm.config import Config
from hetperm.device.augment import OWN
from hetperm.device.recipe import Recipe

# Step sizes of the global model: of linear layers and convolutions over time, with recurrent layers, and of all others.
RATES = {"linear": 0.5, "recurrent": 2.0, "other": 0.1}
PERSONAL = 0.6  # of it is the step size of the personal models
# What is left of them with another optimizer: directions that add up are longer, and those of adamw are nearly signs.
OF_OPTIMIZER = {"sgd": 1, "momentum": 1 / 3, "adamw": 1 / 50}
# Names of optimizers in `submodels.cost`.
COSTED = {"sgd": "sgd", "momentum": "sgd-momentum", "adamw": "adamw"}


def with_rates(config: Config, model: nn.Module) -> Config:
    """The configuration with step sizes; those that it does not give suit the kind of the model and the optimizer.

    Each by itself: visits of a suitable size make up for much of a warm-up whose steps were too small.
    """
    usual = OF_OPTIMIZER[config.optimizer] * RATES[kind_of(model)]
    return config.override(global_lr=config.global_lr or usual, personal_lr=config.personal_lr or PERSONAL * usual)


def kind_of(model: nn.Module) -> str:
    """The kind of a model, by the layers that it trains: one of `RATES`."""
    trained = [part for part in model.modules() if any(True for _ in part.parameters(recurse=False))]
    # Weights of a convolution over an image act at every pixel, so their gradients are longer.
    if all([isinstance(part, nn.Linear | nn.Conv1d) for part in trained]):
        return "linear"
    # Gates saturate, and a symbol's embedding learns only where the symbol is.
    recurrent = any([isinstance(part, nn.RNNBase) for part in trained])
    known = all([isinstance(part, nn.Linear | nn.Embedding | nn.RNNBase) for part in trained])
    return "recurrent" if recurrent and known else "other"


def recipe_of(config: Config, *, own_augment: bool = False) -> Recipe:
    """How local steps are taken under a configuration.

    Args:
        own_augment: whether samples are changed by a user's own function.
    """
    return Recipe(
        optimizer=config.optimizer,
        momentum=config.momentum if config.optimizer == "momentum" else Recipe.momentum,
        weight_decay=config.weight_decay,
        accumulate=config.accumulate,
        autocast=config.autocast,
        augment=OWN if own_augment else config.augment,
        schedule=config.lr_schedule,
        warmup=config.lr_warmup,
    )


def step_of(config: Config) -> dict[str, Any]:
    """What decides the memory of a local step, as `submodels.cost` takes it."""
    return {
        "batch_size": config.batch_size,
        "optimizer": COSTED[config.optimizer],
        "accumulate": config.accumulate,
    }
