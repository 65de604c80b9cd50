"""The model of a run: built from its configuration, traced so that it can be cut, and measured."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hetperm.advice import did_you_mean
from hetperm.client import Client
from hetperm.config import Config
from hetperm.device.bench import outputs_of
from hetperm.randomness import seed_for
from hetperm.runs.rehearsal import at_model
from hetperm.shards import Inputs, first, read
from hetperm.texts import reason_of
from submodels import ScalableModel, zoo
from submodels.cost import Cost, count


def build(config: Config, sizes: Mapping[str, Any]) -> nn.Module:
    """Build the model of a run. The seed decides its weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "model"))
        return named(config.model, sizes, config.model_options)


def named(name: str, sizes: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    """Build a model by its name; an error says that it does not take the options."""
    try:
        return zoo.build(name, **sizes, **options)
    # Constructors of libraries check little: bad options show as whatever went wrong with them.
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        given = next((option for option in options if option in sizes), None)
        if given is not None:
            raise ValueError(f"model_options holds {given}, which the data decide; leave it out") from error
        known = _known_instead(name, options)
        raise ValueError(f"model {name!r} does not take these model_options ({reason_of(error)}){known}") from error


def _known_instead(name: str, options: Mapping[str, Any]) -> str:
    """The options that a model of the zoo has, if one is given that it has not; of libraries' models nobody lists them.

    Example:
        >>> _known_instead("mlp", {"hiden": [3, 3]})
        "; did you mean 'hidden'?"
    """
    kind, _, short = zoo.resolve(name).partition(":")
    if kind != "zoo":
        return ""
    parameters = inspect.signature(zoo.MODELS[short]).parameters
    known = [option for option in parameters if option not in ("in_channels", "num_classes", "image_size")]
    strange = next((option for option in options if option not in known), None)
    if strange is None:
        return ""
    return "; " + did_you_mean(strange, known, f"it takes {', '.join(known) or 'none'}")


def scalable_of(
    model: nn.Module, client: Client, remedy: str, outputs: Callable[[Any], Any] | None = None
) -> ScalableModel:
    """The model, traced so that it can be cut; an error says what to do about one that cannot be."""
    try:
        return ScalableModel(model, example_of(model, client), outputs=outputs)
    except ValueError as error:
        raise ValueError(f"{error}; a model that cannot be cut needs {remedy}") from error


def example_of(model: nn.Module, client: Client) -> Inputs:
    """A batch of one sample, on the device and in the precision of the model; a single tensor is all zeros."""
    inputs, _ = read(first(client.train, 1))
    # Of several inputs the values may matter: a mask of zeros hides everything.
    return at_model(model, torch.zeros_like(inputs) if isinstance(inputs, Tensor) else inputs)


def cost_of_step(model: nn.Module, client: Client, **step: Any) -> Cost:
    """The cost of a step of a model that is not cut."""
    example = example_of(model, client)
    args, kwargs = ((), example) if isinstance(example, Mapping) else (example, {})
    return count(model, args, kwargs, **step)


def num_outputs(module: nn.Module, client: Client) -> int:
    """The number of outputs of a module for a sample; 0 if it returns no tensor."""
    # A copy, so that its mode and statistics stay.
    with torch.no_grad():
        outputs = outputs_of(copy.deepcopy(module).eval(), at_model(module, read(first(client.train, 1))[0]))
    return outputs.shape[-1] if isinstance(outputs, Tensor) and outputs.dim() else 0
