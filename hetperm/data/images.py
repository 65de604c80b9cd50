"""Labelled images: the sets of scikit-learn and torchvision, their division into pools, and their preparation.

Windows of sensors and vectors (see `npz`) take the same way; what holds for images alone is left out for them.
"""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from hetperm.randomness import generator_for

FOLDER = "data"  # where --data-dir points unless it is given
TEST_SHARE = 0.2  # of a set that comes without test images
MEASURED = 500  # training images on which mean and deviation are measured, if none are published
AT_ONCE = 2**19  # pixels that are measured together, of images that are not in memory
LARGEST_VALUE = 1e30  # of an input: what is computed from it must stay within float32, which ends at 3.4e38
MOST_CLASSES = 100_000  # a larger label is no class but a measurement or a mistake
TEN = tuple("0123456789")
CLOTHES = (*"T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag".split(), "Ankle boot")
BALANCED = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")  # small letters like their capitals are left out
THINGS = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
DIGITS = 7  # of the mean and deviation of measurements: as many as a float32 has


class Undecoded(Protocol):
    """Images that are not in memory yet; ``shape`` is (n, channels, height, width), or (n, length) of texts."""

    shape: tuple[int, ...]

    def __getitem__(self, rows: Tensor) -> "Undecoded": ...

    def decode(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Images:
    """Images, windows, vectors or texts, and their classes.

    Attributes:
        x: (n, channels, height, width), as stored; windows are (n, channels, length), vectors (n, features) and texts
            (n, length).
        y: (n,) int64 classes.
        writer: (n,) int64, whom each of them comes from; None if the set does not say.
    """

    x: Tensor | Undecoded
    y: Tensor
    writer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: Tensor) -> "Images":
        """The images of some rows; nothing is decoded."""
        return Images(self.x[rows], self.y[rows], None if self.writer is None else self.writer[rows])

    def pixels(self) -> Tensor:
        """The images as a tensor, decoded if they were not."""
        return self.x if isinstance(self.x, Tensor) else self.x.decode()


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as it is stored.

    Attributes:
        images: the images to divide into training, validation and test images.
        test: its own test images; None if they are to be taken from `images`.
        peak: the value of a white pixel.
        mean, std: of pixels divided by `peak`, for all channels or (channels, 1, 1); None if they are to be measured.
        val: its own validation images; None if they are to be taken from `images`.
        strata: (n,) a label for each of `images`: validation and test images are taken from every label in proportion;
            None if they are taken from the whole.
        test_share: of `images` that becomes the test pool if `test` is None.
        names: the name of every class; empty if the set has none.
        symbols: of texts, the number of different characters, which inputs count from 0; None if inputs are measured.
    """

    images: Images
    test: Images | None
    num_classes: int
    peak: int
    mean: float | Tensor | None
    std: float | Tensor | None
    val: Images | None = None
    strata: Tensor | None = None
    test_share: float = TEST_SHARE
    names: tuple[str, ...] = ()
    symbols: int | None = None


@dataclass(frozen=True, eq=False)
class Preparation:
    """How stored values become inputs of a model: ``(x / peak - mean) / std``.

    Attributes:
        peak: the value of a white pixel.
        mean, std: of values divided by `peak`, for all channels or (channels, 1, ...).
    """

    peak: int
    mean: float | Tensor
    std: float | Tensor

    def undone(self, x: Tensor) -> Tensor:
        """Values (n, channels, ...) as they are stored, from inputs of a model.

        Example:
            >>> Preparation(peak=16, mean=0.25, std=0.5).undone(torch.tensor([[-0.5, 1.5]]))
            tensor([[ 0., 16.]])
        """
        return ((x.double() * self.std + self.mean) * self.peak).float()


def digits(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """1797 handwritten digits, 8x8, that come with scikit-learn; nothing is read from ``data_dir``."""
    # The file itself: to import scikit-learn takes longer than to train a small model.
    (package,) = find_spec("sklearn").submodule_search_locations
    file = Path(package, "datasets", "data", "digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    x, y = rows[:, :-1].reshape(-1, 1, 8, 8).contiguous(), rows[:, -1].long()
    return Source(Images(x, y), None, num_classes=10, peak=16, mean=0.3053, std=0.3760, names=TEN)


def mnist(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """70,000 handwritten digits, 28x28."""
    files = _idx("MNIST/raw", "train", "t10k")
    images, test = _torchvision("mnist", "MNIST", data_dir, download, files=files, axes="n h w -> n 1 h w")
    return Source(images, test, num_classes=10, peak=255, mean=0.1307, std=0.3081, names=TEN)


def fashion_mnist(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """70,000 pictures of clothes, 28x28."""
    files = _idx("FashionMNIST/raw", "train", "t10k")
    images, test = _torchvision(
        "fashion-mnist", "FashionMNIST", data_dir, download, files=files, axes="n h w -> n 1 h w"
    )
    return Source(images, test, num_classes=10, peak=255, mean=0.2860, std=0.3530, names=CLOTHES)


def emnist(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """131,600 handwritten digits and letters, 28x28, in 47 classes of equal size: the balanced split of EMNIST."""
    files = _idx("EMNIST/raw", "emnist-balanced-train", "emnist-balanced-test")
    # The files hold every image column by column.
    images, test = _torchvision(
        "emnist", "EMNIST", data_dir, download, files=files, axes="n w h -> n 1 h w", split="balanced"
    )
    return Source(images, test, num_classes=47, peak=255, mean=0.1751, std=0.3332, names=BALANCED)


def cifar10(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """60,000 photographs of animals and vehicles, 32x32, in colour."""
    batches = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta"]
    files = [Path("cifar-10-batches-py", batch) for batch in batches]
    images, test = _torchvision("cifar10", "CIFAR10", data_dir, download, files=files, axes="n h w c -> n c h w")
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    mean, std = _per_channel(mean), _per_channel(std)
    return Source(images, test, num_classes=10, peak=255, mean=mean, std=std, names=THINGS)


def _idx(folder: str, *parts: str) -> list[Path]:
    """The idx files of a set, relative to ``data_dir``."""
    return [Path(folder, f"{part}-{kind}-ubyte") for part in parts for kind in ("images-idx3", "labels-idx1")]


def _torchvision(
    name: str, kind: str, data_dir: str | Path | None, download: bool, *, files: list[Path], axes: str, **options: str
) -> tuple[Images, Images]:
    """The training and the test images of a torchvision set; if they are missing, an error says what to do.

    Args:
        kind: name of the class in torchvision.datasets; ``options`` are for it.
        files: the files it needs, relative to ``data_dir``, all in one folder.
        axes: einops pattern from torchvision's layout of the images to (n, channels, height, width).
    """
    from torchvision import datasets

    root = Path(FOLDER if data_dir is None else data_dir).expanduser()
    folder = files[0].parent
    if not download and not all([(root / file).is_file() for file in files]):
        raise FileNotFoundError(
            f"{name} is not in {root / folder}; point --data-dir at the folder that holds {folder.parts[0]}, "
            "or let `hetperm train --download` fetch it"
        )
    load = getattr(datasets, kind)
    try:
        train, test = (load(str(root), train=part, download=download, **options) for part in (True, False))
    except Exception as error:  # torchvision raises whatever reading or fetching raised
        reason = " ".join(str(error).split()) or type(error).__name__
        remedy = "remove that folder and let `hetperm train --download` fetch it afresh"
        if download and not all([(root / file).is_file() for file in files]):
            remedy = f"is there a network? Files fetched elsewhere go to {root / folder}, and need no --download"
        raise OSError(
            f"{name} could not be {'fetched into' if download else 'read from'} {root / folder} ({reason}); {remedy}"
        ) from error
    parts = tuple(
        Images(rearrange(torch.as_tensor(part.data), axes).contiguous(), torch.as_tensor(part.targets).long())
        for part in (train, test)
    )
    for part in parts:
        _check_whole(part, len(train.classes), f"{name} in {root / folder}")
    return parts


def _check_whole(part: Images, num_classes: int, where: str) -> None:
    """Raise an error if images and labels are not of each other; torchvision reads them from two files."""
    fetch = "remove that folder and let `hetperm train --download` fetch it afresh"
    if not len(part.x) == len(part.y) > 0:
        raise ValueError(f"{where} has {len(part.x)} images and {len(part.y)} labels; {fetch}")
    if part.y.min() < 0 or part.y.max() >= num_classes:
        labels = f"labels from {part.y.min()} to {part.y.max()}"
        raise ValueError(f"{where} has {labels} and {num_classes} classes, numbered from 0; {fetch}")


def pools(source: Source, *, validation_share: float, seed: int) -> dict[str, Images]:
    """The training, validation and test pools: separated before anything else, so that no client's choice mixes them.

    A set without test images gives the first part of a random order to the test pool (``test_share``). The share
    ``validation_share`` is taken from the rest, unless the set has its own validation images. A set with strata is
    divided stratum by stratum, and every stratum keeps a training image.
    """
    n = len(source.images)
    order = torch.randperm(n, generator=generator_for(seed, "pools"))
    pool = torch.zeros(n, dtype=torch.int8)  # 0: training, 1: validation, 2: test
    for rows in [order] if source.strata is None else order_by(source.strata, order):
        test = 0 if source.test is not None else _some(source.test_share, len(rows))
        cut = test + (0 if source.val is not None else _some(validation_share, len(rows) - test))
        pool[rows[:cut]] = 1
        pool[rows[:test]] = 2  # the first of those rows, so that a larger validation share moves no test image
    # In random order even with strata, so that the first images of a pool (see `measured`) are of all classes.
    train, val, test = (source.images.take(order[pool[order] == k]) for k in range(3))
    return {
        "train": train,
        "val": val if source.val is None else source.val,
        "test": test if source.test is None else source.test,
    }


def order_by(strata: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """The rows of ``order`` split by stratum; each part keeps their order.

    Example:
        >>> order_by(torch.tensor([7, 5, 7]), torch.tensor([2, 1, 0]))
        (tensor([1]), tensor([2, 0]))
    """
    # `unique` sorts the strata as argsort does, and a stable sort keeps the order within each of them.
    sizes = strata.unique(return_counts=True)[1]
    return order[strata[order].argsort(stable=True)].split(sizes.tolist())


def _some(share: float, n: int) -> int:
    # Never all: a stratum keeps an image for training.
    return min(share_of(share, n), max(0, n - 1))


def share_of(share: float, n: int) -> int:
    """``share`` of n samples, and at least one unless the share is 0."""
    return max(1, round(share * n)) if share else 0


def measured(source: Source, train: Images) -> Source:
    """The source with a mean and a deviation for each channel: its own, or those of ``train``.

    Some images are enough, because each has many pixels. Of windows and vectors, all are measured.
    """
    if source.mean is not None or source.symbols is not None:
        return source
    shape = train.x.shape
    images = len(shape) == 4
    some = train.take(torch.arange(min(MEASURED if images else len(train), len(train))))
    if isinstance(some.x, Tensor) or len(some) * math.prod(shape[1:]) <= AT_ONCE:
        x = some.pixels().double() / source.peak
        std, mean = torch.std_mean(x, dim=(0, *range(2, len(shape))), correction=0)
    else:
        std, mean = _measured_in_parts(some, source.peak)
    # Four digits, as published values have them: the order in which threads add cannot change them.
    mean, std = ([_rounded(value, images=images) for value in figure.tolist()] for figure in (mean, std))
    # The deviation of a constant channel is 0, or as good as 0, which nothing can be divided by.
    std = [value if value > abs(centre) * 10.0**-DIGITS else 1.0 for value, centre in zip(std, mean)]
    return replace(source, mean=_per_channel(mean, len(shape)), std=_per_channel(std, len(shape)))


def _measured_in_parts(some: Images, peak: int) -> tuple[Tensor, Tensor]:
    """Deviation and mean of every channel of images that are too large to be decoded together."""
    sums = []
    for rows in torch.arange(len(some)).split(max(1, AT_ONCE // math.prod(some.x.shape[1:]))):
        x = some.take(rows).pixels().double().div_(peak)
        total = x.sum((0, 2, 3))
        sums.append(torch.stack([total, x.square_().sum((0, 2, 3))]))
    mean, square = torch.stack(sums).sum(0) / (len(some) * math.prod(some.x.shape[2:]))
    return (square - mean.square()).clamp(min=0).sqrt(), mean


def _rounded(value: float, *, images: bool) -> float:
    # Pixels are at most 1. Measurements have any unit, so it is their leading digits that count.
    return round(value, 4) if images else float(f"{value:.{DIGITS}g}")


def _per_channel(values: list[float] | tuple[float, ...], axes: int = 4) -> Tensor:
    """One value for each channel, to be combined with samples of so many axes."""
    return torch.tensor(values).view(-1, *[1] * (axes - 2))


def prepare(x: Tensor, source: Source, *, image_size: int | None = None, degrees: float = 0.0) -> Tensor:
    """float32 inputs of a model: images resized and rotated, then all shifted and scaled to mean 0 and variance 1.

    Characters of texts stay the whole numbers that they are.

    Args:
        x: (n, channels, ...) as stored.
        image_size: side to resize to; None keeps the size.
        degrees: turned by this much, counter-clockwise.
    """
    if source.symbols is not None:
        return x
    x = x.float() / source.peak
    if image_size is not None and tuple(x.shape[-2:]) != (image_size, image_size):
        x = F.interpolate(x, size=(image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
    # Rotated before the shift: the corners are filled with 0, which is black only here.
    x = rotate(x, degrees) if degrees else x
    return ((x - source.mean) / source.std).contiguous()  # a quarter turn only swaps strides


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Images (n, channels, height, width) turned counter-clockwise: exact for quarter turns, else bilinear on black.

    Example:
        >>> rotate(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90).flatten()
        tensor([2., 4., 1., 3.])
    """
    quarters, rest = divmod(degrees % 360, 90)
    if rest == 0:
        if quarters % 2 and x.shape[-2] != x.shape[-1]:
            raise ValueError(f"images of {x.shape[-2]}x{x.shape[-1]} change shape when turned; give --image-size")
        return torch.rot90(x, int(quarters), dims=(-2, -1))
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import rotate as turn

    return turn(x, degrees, interpolation=InterpolationMode.BILINEAR)
