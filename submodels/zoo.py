"""Models by name: logistic, mlp, cnn, har-cnn, char-lstm and a CIFAR ResNet-18 written here, others from timm or
torchvision.

Every model comes untrained and nothing is downloaded. Initial weights come from torch's global generator: seed it,
under `torch.random.fork_rng`, to get the same model twice.
"""

import copy
import difflib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from numbers import Integral

import torch
from torch import Tensor, nn

from submodels.resnet import ResNet
from submodels.skeleton import on_meta
from submodels.texts import shown

ImageSize = int | tuple[int, ...] | None
LARGEST = 2**31 - 1  # of a number of channels, classes or pixels


def build(name: str, *, in_channels: int, num_classes: int, image_size: ImageSize, **options: object) -> nn.Module:
    """A new model in training mode, such as (batch, in_channels, height, width) -> (batch, num_classes).

    Args:
        name: a name of `MODELS`, ``timm:NAME``, ``torchvision:NAME``, or a bare name (see `resolve`).
        in_channels: channels of an image, or the number of features if ``image_size`` is None.
        num_classes: number of outputs.
        image_size: side of the square images, (height, width), or (length,) if inputs are (batch, in_channels, length)
            windows of a signal; None if they are (batch, in_channels) vectors.
        options: for the model's constructor, such as ``bias=False`` for logistic.

    Example:
        >>> build("logistic", in_channels=60, num_classes=2, image_size=None, bias=False)
        Sequential(
          (flatten): Flatten(start_dim=1, end_dim=-1)
          (fc): Linear(in_features=60, out_features=2, bias=False)
        )
    """
    sizes = {"in_channels": (in_channels,), "num_classes": (num_classes,), "image_size": _sides(image_size)}
    for label, values in sizes.items():
        for value in values:
            if not isinstance(value, Integral) or isinstance(value, bool) or value > LARGEST:
                raise TypeError(f"{label} is {shown(value)}; it must be a whole number of at most {LARGEST:,}")
            if value < 1:
                raise ValueError(f"{label} {value} is below 1; models need at least one channel, class and pixel")
    kind, _, short = resolve(name).partition(":")
    return _BUILDERS[kind](short, in_channels=in_channels, num_classes=num_classes, image_size=image_size, **options)


def resolve(name: str) -> str:
    """The full name, ``kind:name``; a bare name is looked up in the zoo, then in timm, then in torchvision.

    Example:
        >>> resolve("mlp")
        'zoo:mlp'
    """
    if not isinstance(name, str):
        raise TypeError(f"the model is {shown(name)}; it must be a name such as 'mlp' or 'timm:resnet18'")
    kind, short = name.split(":", 1) if ":" in name else (None, name)
    if kind is not None and kind not in _NAMES:
        raise ValueError(f"unknown model {shown(name)}; write zoo:NAME, timm:NAME, torchvision:NAME or a bare name")
    kinds = list(_NAMES) if kind is None else [kind]
    for source in kinds:
        if short in _NAMES[source]():
            return f"{source}:{short}"
    names = dict.fromkeys(model for source in kinds for model in _NAMES[source]())
    raise ValueError(f"unknown model {shown(name)}; {_advice(short, names, prefix='' if kind is None else f'{kind}:')}")


def _advice(short: str, names: Iterable[str], *, prefix: str) -> str:
    # timm writes "resnet18.a1_in1k" for a set of weights; there are none here, so the part before the dot is meant.
    close = difflib.get_close_matches(short.lower().partition(".")[0], list(names), n=3)
    if not close:
        return f"write one of {', '.join(MODELS)}, timm:NAME or torchvision:NAME"
    return f"did you mean {' or '.join(repr(prefix + model) for model in close)}?"


def _sides(image_size: ImageSize) -> tuple[int, ...]:
    """(height, width) of images, (length,) of windows, () of vectors."""
    if image_size is None:
        return ()
    if not isinstance(image_size, Integral | tuple | list):
        raise TypeError(
            f"image_size is {shown(image_size)}; it must be a whole number, (height, width), (length,) or None"
        )
    sides = (image_size, image_size) if isinstance(image_size, Integral) else tuple(image_size)
    if len(sides) > 2:
        raise ValueError(
            f"image_size {shown(sides)} has {len(sides)} sides; give (height, width) of images or (length,)"
        )
    return sides


def _height_width(image_size: ImageSize, *, model: str) -> tuple[int, int]:
    return _needed(image_size, 2, f"{model} takes images")


def _needed(image_size: ImageSize, axes: int, claim: str) -> tuple[int, ...]:
    """The sides of an input; an error that begins with `claim` if it does not have that many."""
    sides = _sides(image_size)
    if len(sides) != axes:
        kind = {0: "flat feature vectors", 1: "windows of length {}", 2: "{}x{} images"}[len(sides)].format(*sides)
        also = ("", "har-cnn, ", "cnn, ")[len(sides)]
        raise ValueError(f"{claim} and was given {kind}; use {also}logistic or mlp for those")
    return sides


# Models written here. Sizes are flattened, never spelled out in a view, so that every hidden width can be scaled.


def logistic(*, in_channels: int, num_classes: int, image_size: ImageSize, bias: bool = True) -> nn.Module:
    """Multinomial logistic regression on the flattened input."""
    if not isinstance(bias, bool):
        raise TypeError(f"bias is {bias!r}; it must be true or false")
    features = in_channels * math.prod(_sides(image_size))
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(features, num_classes, bias=bias)))


def mlp(
    *, in_channels: int, num_classes: int, image_size: ImageSize, hidden: tuple[int, int] = (200, 200)
) -> nn.Module:
    """Two hidden layers with ReLU on the flattened input."""
    sizes = list(hidden) if isinstance(hidden, list | tuple) else []
    if len(sizes) != 2 or not all([type(size) is int and size > 0 for size in sizes]):
        raise TypeError(f"hidden is {hidden!r}; it must be two whole numbers of at least 1")
    features = in_channels * math.prod(_sides(image_size))
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, hidden[0]),
            relu1=nn.ReLU(),
            fc2=nn.Linear(hidden[0], hidden[1]),
            relu2=nn.ReLU(),
            fc3=nn.Linear(hidden[1], num_classes),
        )
    )


def cnn(*, in_channels: int, num_classes: int, image_size: ImageSize) -> nn.Module:
    """Two 3x3 convolutions of 32 and 64 channels, each with ReLU and 2x2 max pooling, and a linear layer."""
    height, width = _height_width(image_size, model="cnn")
    if min(height, width) < 4:
        raise ValueError(f"cnn halves images twice and {height}x{width} is too small; give --image-size 4 or more")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(64 * (height // 4) * (width // 4), num_classes),
        )
    )


def har_cnn(*, in_channels: int, num_classes: int, image_size: ImageSize) -> nn.Module:
    """Two convolutions of 32 and 64 channels along a window, leaky ReLU and pooling after each, and a linear layer.

    For windows of sensors, as in human activity recognition (HAR). Leaky, because with ReLU some channels begin silent
    and stay so: of the narrowest model's two and four channels that is up to half.
    """
    (length,) = _needed(image_size, 1, "har-cnn takes windows of a signal")
    if length < 2:
        raise ValueError(f"har-cnn halves windows once and length {length} is too short; give windows of 2 or more")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(in_channels, 32, 5, padding=2),
            leaky1=nn.LeakyReLU(0.1),
            pool1=nn.MaxPool1d(2),
            conv2=nn.Conv1d(32, 64, 5, padding=2),
            leaky2=nn.LeakyReLU(0.1),
            pool2=nn.AdaptiveAvgPool1d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(64, num_classes),
        )
    )


class CharLSTM(nn.Module):
    """The next symbol of a text from those before it: an embedding, an LSTM and a linear layer on its last output."""

    def __init__(self, symbols: int, classes: int, *, embedding: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length) symbols, numbered from 0, to (batch, classes) logits."""
        outputs, _ = self.lstm(self.embedding(x))
        return self.fc(outputs[:, -1])


def char_lstm(
    *,
    in_channels: int,
    num_classes: int,
    image_size: ImageSize,
    embedding: int = 64,
    hidden: int = 128,
    layers: int = 1,
) -> nn.Module:
    """A recurrent model of text; ``in_channels`` is the number of symbols, ``image_size`` the length that is read.

    The embedding is wide enough that a sixteenth of it still tells symbols apart. LEAF's stacked model of Shakespeare
    is ``embedding = 8, hidden = 256, layers = 2``.
    """
    _needed(image_size, 1, "char-lstm takes texts")
    for label, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        if type(value) is not int or value < 1:
            raise TypeError(f"{label} is {value!r}; it must be a whole number of at least 1")
    return CharLSTM(in_channels, num_classes, embedding=embedding, hidden=hidden, layers=layers)


def resnet18_cifar(*, in_channels: int, num_classes: int, image_size: ImageSize) -> nn.Module:
    """ResNet-18 for small images (He et al. 2016): a 3x3 stem of stride 1, no max pooling."""
    _height_width(image_size, model="resnet18-cifar")
    return ResNet(in_channels, num_classes, channels=(64, 128, 256, 512), blocks=2)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "har-cnn": har_cnn,
    "char-lstm": char_lstm,
    "resnet18-cifar": resnet18_cifar,
}


# Models of timm and torchvision, which are imported only when asked for: they take seconds.


def _zoo_model(name: str, **sizes: object) -> nn.Module:
    return MODELS[name](**sizes)


def _timm_model(
    name: str, *, in_channels: int, num_classes: int, image_size: ImageSize, **options: object
) -> nn.Module:
    import timm

    given, (height, width) = tuple(options), _height_width(image_size, model=f"timm:{name}")
    config = timm.get_pretrained_cfg(name)
    if config and config.fixed_input_size:  # such a model sizes its layers by the image; others take no such argument
        options = {"img_size": height if height == width else (height, width), **options}
    return _checked(
        lambda: timm.create_model(name, pretrained=False, in_chans=in_channels, num_classes=num_classes, **options),
        f"timm:{name}",
        shape=(in_channels, height, width),
        num_classes=num_classes,
        works=config.input_size if config else (3, 224, 224),
        given=given,
    )


def _torchvision_model(
    name: str, *, in_channels: int, num_classes: int, image_size: ImageSize, **options: object
) -> nn.Module:
    from torchvision import models

    given, (height, width) = tuple(options), _height_width(image_size, model=f"torchvision:{name}")
    family = models.get_model_builder(name).__module__.rpartition(".")[2]
    options = {**_torchvision_options(family, height, width), **options}

    def create() -> nn.Module:
        model = models.get_model(name, weights=None, num_classes=num_classes, **options)
        return model if in_channels == 3 else _with_channels(model, in_channels)

    return _checked(
        create,
        f"torchvision:{name}",
        shape=(in_channels, height, width),
        num_classes=num_classes,
        works=(3, *models.get_model_weights(name).DEFAULT.meta["min_size"]),
        given=given,
    )


def _torchvision_options(family: str, height: int, width: int) -> dict[str, object]:
    if family == "vision_transformer":
        return {"image_size": height}
    if family == "maxvit":
        return {"input_size": (height, width)}
    if family in ("googlenet", "inception"):
        # Auxiliary heads make the output a tuple in training; a choice of initialisation left open is a warning.
        return {"aux_logits": False, "init_weights": False}
    return {}


def _with_channels(model: nn.Module, in_channels: int) -> nn.Module:
    """The model, its first convolution of three channels replaced; outputs keep their scale at the start."""
    path, old = next((path, m) for path, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.in_channels == 3)
    new = copy.deepcopy(old)
    new.in_channels = in_channels
    with torch.no_grad():
        weight = old.weight.new_empty(old.out_channels, in_channels, *old.kernel_size).normal_()
        new.weight = nn.Parameter(weight * (old.weight.std() * math.sqrt(3 / in_channels)))
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)
    return model


def _checked(
    create: Callable[[], nn.Module],
    name: str,
    *,
    shape: tuple[int, int, int],
    num_classes: int,
    works: tuple[int, int, int],
    given: tuple[str, ...],
) -> nn.Module:
    """The created model, after a check that it runs on images of this shape; `given` are the options of the user."""
    try:
        model = create()
        _check_runs(model, shape, num_classes)
    except Exception as error:  # an image too small for a model fails in as many ways as there are models
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        options, other = (f" with {', '.join(given)}", "other model_options, ") if given else ("", "")
        raise ValueError(
            f"{name}{options} does not run on {_described(shape)} ({reason}); "
            f"choose {other}another --image-size or --model ({_described(works)} work)"
        ) from error
    return model


def _described(shape: tuple[int, int, int]) -> str:
    channels, height, width = shape
    return f"{channels}-channel {height}x{width} images"


@torch.no_grad()
def _check_runs(model: nn.Module, shape: tuple[int, int, int], num_classes: int) -> None:
    try:
        output = on_meta(model)(torch.empty(2, *shape, device="meta"))
    except Exception:
        # Some models look at values, which meta tensors lack: let real ones decide, in a copy that may change.
        with torch.random.fork_rng(devices=[]):
            output = copy.deepcopy(model)(torch.zeros(2, *shape))
    if not isinstance(output, Tensor):
        raise TypeError(f"its output is a {type(output).__name__}, not one tensor")
    if output.shape != (2, num_classes):
        raise ValueError(f"its output for 2 images has shape {tuple(output.shape)}, not (2, {num_classes})")
    for path, buffer in model.named_buffers():  # Swin V2 divides by the window size less one
        if not buffer.is_meta and buffer.isnan().any():
            raise ValueError(f"its buffer {path} holds NaN")


def _timm_names() -> list[str]:
    import timm

    return timm.list_models()


def _torchvision_names() -> list[str]:
    from torchvision import models

    return models.list_models(module=models)


# In the order in which a bare name is looked up.
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "zoo": lambda: MODELS,
    "timm": _timm_names,
    "torchvision": _torchvision_names,
}
_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "zoo": _zoo_model,
    "timm": _timm_model,
    "torchvision": _torchvision_model,
}


def classifier(model: nn.Module, num_classes: int) -> list[str]:
    """Names of the parameters of the last linear layer with an output for every class.

    Example:
        >>> classifier(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), num_classes=3)
        ['2.weight', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {shown(model)}; it must be an nn.Module")
    if not isinstance(num_classes, Integral) or isinstance(num_classes, bool) or not 0 <= num_classes <= 10**9:
        raise TypeError(f"num_classes is {shown(num_classes)}; it must be a whole number, up to a billion")
    paths = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    last = [path for path in paths if model.get_submodule(path).out_features == num_classes][-1:]
    layers = [(path, model.get_submodule(path)) for path in last]
    # A model that is nothing but that layer has the path "".
    return [f"{path}.{name}".lstrip(".") for path, layer in layers for name, _ in layer.named_parameters()]
