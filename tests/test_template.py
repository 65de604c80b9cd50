"""Template: the empty sub-model of a size."""

import torch
from torch import nn

from submodels import AxisMap
from submodels.template import Template


def test_a_template_has_the_shapes_and_integers_of_its_sub_model():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.PReLU(8),
        nn.ConvTranspose2d(8, 6, 2), nn.Flatten(2), nn.LayerNorm(169, elementwise_affine=False), nn.Flatten(),
        nn.Linear(6 * 169, 5),
    )  # fmt: skip
    axis_map = AxisMap.trace(model, torch.zeros(2, 3, 16, 16))
    names = [group.name for group in axis_map.groups]
    assert axis_map.dims["0.bias"][0].show(names) == "(g0 2)"
    small = Template.of(model, axis_map, axis_map.counts(0.5)).module
    assert (small[0].in_channels, small[0].out_channels) == (3, 4)
    assert (small[1].num_groups, small[1].num_channels) == (2, 4)
    assert (small[2].in_channels, small[2].out_channels, small[2].groups) == (4, 4, 4)
    assert small[3].num_features == small[4].num_parameters == 4
    assert (small[5].in_channels, small[5].out_channels) == (4, 3)
    assert (small[9].in_features, small[9].out_features) == (3 * 169, 5)
    assert small[0].weight.shape == (4, 3, 3, 3) and small[0].weight.is_meta
    assert model[0].out_channels == 8 and model[1].num_groups == 4
