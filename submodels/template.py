"""Template: the empty sub-model of a size, from which sub-models are filled."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from submodels.axismap import AxisMap
from submodels.integers import replace_integer
from submodels.literals import VIEW, ViewHooks
from submodels.pretrained import resize_config
from submodels.skeleton import Skeleton, named_tensors, rebuild


class Template:
    """A module on the meta device whose shapes and integers are those of a sub-model; it holds no memory."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._skeleton = Skeleton(module)
        self._names = [(name, id(x)) for name, x in named_tensors(module)]

    @classmethod
    def of(cls, model: nn.Module, axis_map: AxisMap, counts: Sequence[int], *, with_config: bool = False) -> "Template":
        """The template that keeps ``counts`` channels of every group.

        Args:
            with_config: also find the config of a pretrained-style model (`submodels.pretrained`); it takes a moment.
        """
        small = {
            id(x): torch.empty(axis_map.shape(name, counts), dtype=x.dtype, device="meta")
            for name, x in named_tensors(model)
        }
        module = rebuild(model, small)
        # Integers the trace followed first; then torch's own layers, whose sizes nobody reads and only repr shows.
        literals = {}
        for (path, key, *places), term in axis_map.attributes.items():
            if key == VIEW:
                literals[places[0]] = term.size(counts)
                continue
            owner = vars(module.get_submodule(path))
            owner[key] = replace_integer(owner[key], places, term.size(counts))
        if any(new != old for (_, _, old), new in literals.items()):
            ViewHooks(literals).install(module)
        for part in module.modules():
            _update_layer(part)
        if with_config:
            resize_config(module, axis_map, counts)
        return cls(module)

    def __reduce__(self):
        return Template, (self.module,)  # a copy has tensors of its own

    def filled(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A fresh module with these tensors in it."""
        return self._skeleton.build({key: tensors[name] for name, key in self._names})


def _linear(weight: Tensor, _layer: nn.Module) -> dict[str, Any]:
    return {"out_features": weight.shape[0], "in_features": weight.shape[1]}


def _conv(weight: Tensor, layer: nn.Module) -> dict[str, Any]:
    return {"out_channels": weight.shape[0], "in_channels": weight.shape[1] * layer.groups}


def _conv_transpose(weight: Tensor, layer: nn.Module) -> dict[str, Any]:
    return {"in_channels": weight.shape[0], "out_channels": weight.shape[1] * layer.groups}


def _layer_norm(weight: Tensor, _layer: nn.Module) -> dict[str, Any]:
    return {"normalized_shape": tuple(weight.shape)}


def _embedding(weight: Tensor, _layer: nn.Module) -> dict[str, Any]:
    return {"num_embeddings": weight.shape[0], "embedding_dim": weight.shape[1]}


# Class of a layer -> the sizes it announces, given its weight and itself; of several classes the most derived one wins.
_SIZES: dict[type, Callable[[Tensor, nn.Module], dict[str, Any]]] = {
    nn.Linear: _linear,
    nn.modules.conv._ConvTransposeNd: _conv_transpose,
    nn.modules.conv._ConvNd: _conv,
    nn.modules.batchnorm._NormBase: lambda weight, _layer: {"num_features": weight.shape[0]},
    nn.GroupNorm: lambda weight, _layer: {"num_channels": weight.shape[0]},
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.PReLU: lambda weight, _layer: {"num_parameters": weight.shape[0]},
}


def _update_layer(layer: nn.Module) -> None:
    """Make the sizes that torch's own layers announce agree with their weights."""
    sizes = next((_SIZES[kind] for kind in type(layer).__mro__ if kind in _SIZES), None)
    weight = getattr(layer, "weight", None)
    if weight is None and isinstance(layer, nn.modules.batchnorm._NormBase):
        weight = layer.running_mean  # a norm without affine parameters still has statistics
    if isinstance(layer, nn.TransformerEncoder) and layer.layers[0].self_attn.num_heads % 2:
        layer.use_nested_tensor = False  # torch's fast path for padded sequences wants an even number of heads
    if sizes is not None and isinstance(weight, Tensor):
        for name, size in sizes(weight, layer).items():
            setattr(layer, name, size)
