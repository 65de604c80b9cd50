"""Models by name: what is built, how names are found, and what is refused."""

import sys

import pytest
import torch
from torch import nn

from submodels import ScalableModel, zoo

torch.set_num_threads(1)

WINDOWS = ("har-cnn", "char-lstm")  # models for windows and texts; all others of the zoo take images


def _small(name, *, num_classes=2):
    """The model for inputs of one channel and eight values a side."""
    return zoo.build(name, in_channels=1, num_classes=num_classes, image_size=(8,) if name in WINDOWS else 8)


def _count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def _forward(module, *shape):
    return module(torch.randn(2, *shape))


# Names


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_zoo_names_come_first_and_need_no_other_library(name):
    assert zoo.resolve(name) == f"zoo:{name}"
    assert zoo.resolve(f"zoo:{name}") == f"zoo:{name}"


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("resnet18", "timm:resnet18"),  # both have it
        ("torchvision:resnet18", "torchvision:resnet18"),
        ("vit_b_16", "torchvision:vit_b_16"),
        ("timm:vit_tiny_patch16_224", "timm:vit_tiny_patch16_224"),
    ],
)
def test_other_names_are_looked_up_in_timm_then_torchvision(name, full):
    assert zoo.resolve(name) == full
    assert zoo.resolve(full) == full


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet18_cifar", "did you mean 'resnet18-cifar'"),
        ("Resnet-18", "did you mean 'resnet18'"),
        ("timm:resnt18", "did you mean 'timm:resnet18'"),
        ("torchvision:vit_b16", "did you mean 'torchvision:vit_b_16'"),
        ("timm:resnet18.a1_in1k", "did you mean 'timm:resnet18'"),  # a set of weights; none is ever loaded
        (
            "qqqqqqqqq",
            "write one of logistic, mlp, cnn, har-cnn, char-lstm, resnet18-cifar, timm:NAME or torchvision:NAME",
        ),
        ("hf-hub:timm/resnet18", "write zoo:NAME, timm:NAME"),
        ("timm:hf-hub:timm/resnet18", "unknown model 'timm:hf-hub:timm/resnet18'"),
        ("", "unknown model ''"),
    ],
)
def test_an_unknown_name_is_refused_in_one_sentence_with_suggestions(name, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        zoo.build(name, in_channels=3, num_classes=10, image_size=32)
    assert str(caught.value).startswith(f"unknown model {name!r}; ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_building_a_model_of_the_zoo_needs_neither_timm_nor_torchvision(name, monkeypatch):
    for library in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, library, None)  # importing it is an error; test_project.py reads the imports
    _small(name)


# Models written here


def test_logistic_is_one_linear_map_of_the_flattened_image():
    model = zoo.build("logistic", in_channels=1, num_classes=10, image_size=28)
    assert _count(model) == 784 * 10 + 10
    x = torch.randn(2, 1, 28, 28)
    torch.testing.assert_close(model(x), x.flatten(1) @ model.fc.weight.T + model.fc.bias)


def test_logistic_takes_flat_features_and_can_do_without_an_intercept():
    model = zoo.build("logistic", in_channels=60, num_classes=2, image_size=None, bias=False)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(2, 60)]
    assert torch.equal(model(torch.zeros(3, 60)), torch.zeros(3, 2))


def test_mlp_has_two_hidden_layers_of_200():
    model = zoo.build("mlp", in_channels=1, num_classes=10, image_size=8)
    assert _count(model) == (64 * 200 + 200) + (200 * 200 + 200) + (200 * 10 + 10)
    assert _forward(model, 1, 8, 8).shape == (2, 10)
    assert _forward(zoo.build("mlp", in_channels=60, num_classes=2, image_size=None), 60).shape == (2, 2)


def test_cnn_has_two_convolutions_and_a_linear_layer():
    model = zoo.build("cnn", in_channels=1, num_classes=10, image_size=28)
    assert _count(model) == (9 * 32 + 32) + (32 * 9 * 64 + 64) + (64 * 7 * 7 * 10 + 10)
    assert _forward(model, 1, 28, 28).shape == (2, 10)


def test_har_cnn_has_two_convolutions_along_the_window_and_a_linear_layer():
    model = zoo.build("har-cnn", in_channels=6, num_classes=5, image_size=(128,))
    assert _count(model) == (6 * 5 * 32 + 32) + (32 * 5 * 64 + 64) + (64 * 5 + 5)
    assert _forward(model, 6, 128).shape == (2, 5)


def test_har_cnn_sees_a_pattern_wherever_in_the_window_it_is():
    model, x = _small("har-cnn").double(), torch.zeros(1, 1, 64, dtype=torch.float64)
    x[..., 20:24] = torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(model(x), model(x.roll(16, dims=-1)))


def test_char_lstm_is_an_embedding_an_lstm_and_a_linear_layer_on_its_last_output():
    model = zoo.build("char-lstm", in_channels=7, num_classes=5, image_size=(9,), embedding=4, hidden=6)
    assert _count(model) == 7 * 4 + 4 * 6 * (4 + 6 + 2) + 6 * 5 + 5
    x = torch.randint(7, (2, 9))
    # Typed out: the gates of torch's LSTM are input, forget, cell and output.
    h = c = torch.zeros(2, 6)
    for symbols in x.T:
        gates = model.embedding.weight[symbols] @ model.lstm.weight_ih_l0.T + model.lstm.bias_ih_l0
        i, f, g, o = (gates + h @ model.lstm.weight_hh_l0.T + model.lstm.bias_hh_l0).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    torch.testing.assert_close(model(x), h @ model.fc.weight.T + model.fc.bias)


def test_char_lstm_is_cut_exactly_and_well():
    model = zoo.build("char-lstm", in_channels=20, num_classes=20, image_size=(5,), layers=2)
    scalable = ScalableModel(model, torch.zeros(1, 5, dtype=torch.long))
    assert scalable.verify(widths=(1 / 16, 1 / 4, 1.0))
    assert scalable.axis_map.share(1 / 16) < 0.02
    cut = scalable.extract(1 / 16).module
    assert (cut.embedding.weight.shape, cut.lstm.hidden_size, cut.fc.weight.shape) == ((20, 4), 8, (20, 8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hidden": 0}, "hidden is 0; it must be a whole number of at least 1"),
        ({"layers": 1.5}, "layers is 1.5; it must be"),
        ({"embedding": "8"}, "embedding is '8'; it must be"),
    ],
)
def test_char_lstm_refuses_sizes_that_are_none(options, sentence):
    with pytest.raises(TypeError, match=sentence):
        zoo.build("char-lstm", in_channels=7, num_classes=5, image_size=(9,), **options)


def test_char_lstm_refuses_what_is_no_text():
    with pytest.raises(ValueError, match=r"^char-lstm takes texts and was given 8x8 images; use cnn, logistic or mlp"):
        zoo.build("char-lstm", in_channels=1, num_classes=5, image_size=8)


@pytest.mark.parametrize("name", ["logistic", "mlp"])
def test_models_of_vectors_take_windows_flattened(name):
    model = zoo.build(name, in_channels=6, num_classes=5, image_size=(128,))
    x = torch.randn(2, 6, 128)
    assert torch.equal(model(x), model(x.flatten(1)))
    assert model(x).shape == (2, 5)


def test_images_need_not_be_square():
    assert _forward(zoo.build("cnn", in_channels=3, num_classes=4, image_size=(9, 14)), 3, 9, 14).shape == (2, 4)
    assert _forward(zoo.build("mlp", in_channels=3, num_classes=4, image_size=(9, 14)), 3, 9, 14).shape == (2, 4)


def test_the_cifar_resnet_is_the_standard_one():
    model = zoo.build("resnet18-cifar", in_channels=3, num_classes=10, image_size=32)
    assert _count(model) == 11_173_962  # the post-activation network: 11.17 M
    assert (model.conv1.kernel_size, model.conv1.stride) == ((3, 3), (1, 1))
    assert sum(isinstance(part, nn.Conv2d) and part.kernel_size == (3, 3) for part in model.modules()) == 17
    with torch.no_grad():
        features = model.stages(model.bn1(model.conv1(torch.randn(2, 3, 32, 32))))
        assert features.shape == (2, 512, 4, 4)
        assert _forward(model, 3, 8, 8).shape == (2, 10)


def test_the_cifar_resnet_computes_what_torchvision_computes_with_the_same_weights():
    from torchvision.models import resnet18

    ours = zoo.build("resnet18-cifar", in_channels=3, num_classes=10, image_size=8).double().eval()
    theirs = resnet18(weights=None, num_classes=10)
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs.double().eval()
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(zoo.MODELS))
def test_the_same_seed_gives_the_same_model(name):
    def seeded():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return _small(name, num_classes=3).state_dict()

    a, b = seeded(), seeded()
    assert all(torch.equal(a[key], b[key]) for key in a)


# Models of timm and torchvision


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("timm:resnet18", 1, 8),
        ("timm:mobilenetv3_small_050", 3, (32, 48)),
        ("timm:vit_tiny_patch16_224", 1, 32),
        ("timm:vit_tiny_patch16_224", 3, (32, 48)),
        ("timm:efficientvit_m0", 3, 32),  # wants img_size as one number
        ("torchvision:resnet18", 1, 8),
        ("torchvision:mobilenet_v3_small", 4, (32, 48)),
        ("torchvision:squeezenet1_1", 1, 28),
        ("torchvision:googlenet", 1, 32),
    ],
)
def test_library_models_take_the_channels_classes_and_size_of_the_data(name, channels, size):
    model = zoo.build(name, in_channels=channels, num_classes=7, image_size=size)
    assert model.training
    height, width = size if isinstance(size, tuple) else (size, size)
    output = _forward(model, channels, height, width)
    assert output.shape == (2, 7)
    assert output.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("timm:swin_tiny_patch4_window7_224", 3, 32),  # takes img_size
        ("timm:levit_128s", 3, 224),  # has a size of its own
        ("torchvision:vit_b_16", 1, 32),  # takes image_size
        ("torchvision:maxvit_t", 1, 224),  # takes input_size
        ("torchvision:inception_v3", 1, 96),  # has auxiliary heads
        ("torchvision:convnext_tiny", 1, 32),  # its first convolution has a bias
    ],
)
def test_more_library_models_take_the_channels_classes_and_size_of_the_data(name, channels, size):
    test_library_models_take_the_channels_classes_and_size_of_the_data(name, channels, size)


@pytest.mark.parametrize(
    ("name", "channels", "size", "works"),
    [
        ("timm:vit_tiny_patch16_224", 3, 8, "3-channel 224x224"),  # patches larger than the image
        ("timm:swinv2_tiny_window8_256", 3, 32, "3-channel 256x256"),  # runs, but a buffer holds NaN
        ("timm:csatv2", 1, 224, "3-channel 512x512"),  # cannot change its channels
        ("torchvision:inception_v3", 3, 32, "3-channel 75x75"),
        ("torchvision:squeezenet1_1", 1, 8, "3-channel 17x17"),
        ("torchvision:maxvit_t", 3, 32, "3-channel 224x224"),
    ],
)
def test_images_a_model_cannot_take_are_refused_in_one_sentence_that_names_the_remedy(name, channels, size, works):
    with pytest.raises(ValueError, match=f"^{name} does not run on {channels}-channel {size}x{size} images") as caught:
        zoo.build(name, in_channels=channels, num_classes=10, image_size=size)
    assert str(caught.value).endswith(f"choose another --image-size or --model ({works} images work)")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "option"),
    [("timm:resnet10t", {"foo": 1}), ("torchvision:resnet18", {"weights": "DEFAULT"})],
)
def test_options_that_a_library_model_does_not_take_are_named_and_not_the_image_alone(name, option):
    (key,) = option
    with pytest.raises(
        ValueError, match=f"^{name} with {key} does not run on 3-channel 32x32 images .*{key}"
    ) as caught:
        zoo.build(name, in_channels=3, num_classes=10, image_size=32, **option)
    assert "; choose other model_options, another --image-size or --model (" in str(caught.value)


def test_three_channels_leave_the_first_convolution_of_torchvision_as_it_is():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    ours = zoo.build("torchvision:resnet18", in_channels=3, num_classes=5, image_size=32).state_dict()
    torch.manual_seed(0)
    theirs = resnet18(weights=None, num_classes=5).state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_a_replaced_first_convolution_keeps_its_settings_and_the_scale_of_its_outputs():
    torch.manual_seed(0)
    old = zoo.build("torchvision:resnet18", in_channels=3, num_classes=5, image_size=32).conv1
    new = zoo.build("torchvision:resnet18", in_channels=12, num_classes=5, image_size=32).conv1
    assert (new.in_channels, new.stride, new.padding, new.bias) == (12, old.stride, old.padding, None)
    assert new.weight.shape == (64, 12, 7, 7)
    assert new.weight.requires_grad
    ratio = new(torch.randn(4, 12, 32, 32)).std() / old(torch.randn(4, 3, 32, 32)).std()
    assert 0.9 < ratio < 1.1


def test_checking_a_model_draws_no_random_numbers_and_leaves_it_as_created():
    import timm

    name = "mobilenetv3_small_050"  # has dropout and batch norm
    torch.manual_seed(0)
    ours, state = zoo.build(name, in_channels=3, num_classes=5, image_size=32), torch.get_rng_state()
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())


def test_a_model_that_looks_at_values_is_checked_with_real_ones():
    class Looking(nn.Linear):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x.flatten(1))) if x.sum().item() == 0 else None

    model = Looking(12, 5)
    state = torch.get_rng_state()
    assert zoo._checked(lambda: model, "x", shape=(3, 2, 2), num_classes=5, works=(3, 2, 2), given=()) is model
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [((torch.zeros(2, 5),), "its output is a tuple"), (torch.zeros(2, 6), r"shape \(2, 6\), not \(2, 5\)")],
)
def test_an_output_that_is_not_one_row_of_scores_per_image_is_refused(output, sentence):
    class Odd(nn.Module):
        def forward(self, x):
            return output

    with pytest.raises(ValueError, match=sentence):
        zoo._checked(Odd, "x", shape=(3, 2, 2), num_classes=5, works=(3, 2, 2), given=())


# Bad sizes


@pytest.mark.parametrize("name", ["cnn", "resnet18-cifar", "timm:resnet18", "torchvision:resnet18"])
def test_flat_features_are_refused_where_images_are_needed(name):
    with pytest.raises(ValueError, match=f"{name} takes images .* use logistic or mlp"):
        zoo.build(name, in_channels=60, num_classes=2, image_size=None)


@pytest.mark.parametrize("name", ["cnn", "resnet18-cifar", "timm:resnet18", "torchvision:resnet18"])
def test_windows_are_refused_where_images_are_needed(name):
    with pytest.raises(ValueError, match=f"^{name} takes images and was given windows of length 128; use har-cnn, "):
        zoo.build(name, in_channels=6, num_classes=2, image_size=(128,))


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (32, "was given 32x32 images; use cnn, logistic or mlp for those"),
        ((8, 16), "was given 8x16 images; use cnn, logistic or mlp for those"),
        (None, "was given flat feature vectors; use logistic or mlp for those"),
        ((1,), "length 1 is too short; give windows of 2 or more"),
    ],
)
def test_har_cnn_refuses_what_is_no_window(size, sentence):
    with pytest.raises(ValueError, match=f"^har-cnn .* {sentence}$"):
        zoo.build("har-cnn", in_channels=3, num_classes=2, image_size=size)


def test_inputs_of_three_sides_are_refused():
    with pytest.raises(ValueError, match=r"^image_size \(8, 8, 8\) has 3 sides; give \(height, width\) of images"):
        zoo.build("mlp", in_channels=1, num_classes=2, image_size=(8, 8, 8))


def test_an_image_too_small_for_the_cnn_is_refused_with_the_smallest_size():
    with pytest.raises(ValueError, match="3x3 is too small; give --image-size 4 or more"):
        zoo.build("cnn", in_channels=1, num_classes=2, image_size=3)
    assert _forward(zoo.build("cnn", in_channels=1, num_classes=2, image_size=4), 1, 4, 4).shape == (2, 2)


@pytest.mark.parametrize(
    "sizes", [{"in_channels": 0}, {"num_classes": 0}, {"image_size": 0}, {"image_size": (8, -1)}, {"image_size": (0,)}]
)
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} .* is below 1"):
        zoo.build("mlp", **{"in_channels": 1, "num_classes": 2, "image_size": 8, **sizes})
