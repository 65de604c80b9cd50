"""Template: the empty sub-model of a size, from which sub-models are filled."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from submodels.axismap import AxisMap
from submodels.skeleton import Skeleton, named_tensors, rebuild


class Template:
    """A module on the meta device whose shapes and integers are those of a sub-model; it holds no memory."""

    def __init__(self, module: nn.Module):
        self.module = module
        self._skeleton = Skeleton(module)
        self._names = [(name, id(x)) for name, x in named_tensors(module)]

    @classmethod
    def of(cls, model: nn.Module, axis_map: AxisMap, counts: Sequence[int]) -> "Template":
        """The template that keeps ``counts`` channels of every group."""
        small = {
            id(x): torch.empty(axis_map.shape(name, counts), dtype=x.dtype, device="meta")
            for name, x in named_tensors(model)
        }
        module = rebuild(model, small)
        for (path, key, *places), term in axis_map.attributes.items():
            owner = vars(module.get_submodule(path))
            owner[key] = _replaced(owner[key], places, term.size(counts))
        for part in module.modules():
            _update_layer(part)
        return cls(module)

    def __reduce__(self):
        return Template, (self.module,)  # a copy has tensors of its own

    def filled(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """A fresh module with these tensors in it."""
        return self._skeleton.build({key: tensors[name] for name, key in self._names})


def _replaced(value: Any, places: Sequence[int], new: int) -> Any:
    if not places:
        return new
    first, *rest = places
    return type(value)(_replaced(item, rest, new) if i == first else item for i, item in enumerate(value))


def _update_layer(layer: nn.Module) -> None:
    """Make the sizes that torch's own layers announce agree with their weights."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.modules.batchnorm._NormBase) and weight is None:
        weight = layer.running_mean  # without a scale of its own
    if not isinstance(weight, Tensor):
        return
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, nn.modules.conv._ConvTransposeNd):
        layer.in_channels, layer.out_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.modules.conv._ConvNd):
        layer.out_channels, layer.in_channels = weight.shape[0], weight.shape[1] * layer.groups
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        layer.num_features = weight.shape[0]
    elif isinstance(layer, nn.GroupNorm):
        layer.num_channels = weight.shape[0]
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.embedding_dim = weight.shape
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = weight.shape[0]
