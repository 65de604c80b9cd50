"""Local steps: step sizes that suit the kind of the model."""

import pytest

from hetperm import Config
from hetperm.runs.local_steps import with_rates
from submodels import zoo


@pytest.mark.parametrize(
    ("name", "size", "rate"),
    [("logistic", 8, 0.5), ("mlp", 8, 0.5), ("har-cnn", (32,), 0.5), ("cnn", 8, 0.1), ("resnet18-cifar", 8, 0.1)],
)
def test_step_sizes_suit_the_kind_of_the_model_unless_they_are_given(name, size, rate):
    model = zoo.build(name, in_channels=3, num_classes=4, image_size=size)
    found = with_rates(Config(), model)
    assert (found.global_lr, found.personal_lr) == (rate, pytest.approx(0.6 * rate))
    given = with_rates(Config(global_lr=0.7), model)
    assert (given.global_lr, given.personal_lr) == (0.7, pytest.approx(0.6 * rate))  # each by itself
    assert with_rates(Config(personal_lr=0.01), model).personal_lr == 0.01
