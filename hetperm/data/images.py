"""Labelled images: digits (part of scikit-learn), MNIST and Fashion-MNIST (torchvision), and what is done to them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hetperm.randomness import generator_for

FOLDER = "data"  # where --data-dir points unless it is given
TEST_SHARE = 0.2  # of a set that comes without test images

Images = tuple[Tensor, Tensor]  # uint8 (n, channels, height, width) and int64 (n,)


@dataclass(frozen=True, eq=False)
class Source:
    """A data set as it is stored.

    Attributes:
        images: what is divided into training and validation (and test, if `test` is None).
        peak: the value of a white pixel; mean, std: of pixels divided by it.
    """

    images: Images
    test: Images | None
    num_classes: int
    peak: int
    mean: float
    std: float


def digits(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """1797 handwritten digits, 8x8, that come with scikit-learn; nothing is read from ``data_dir``."""
    from sklearn.datasets import load_digits

    got = load_digits()
    x, y = torch.from_numpy(got.images).to(torch.uint8).unsqueeze(1), torch.from_numpy(got.target).long()
    return Source((x, y), None, num_classes=10, peak=16, mean=0.3053, std=0.3760)


def mnist(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """70,000 handwritten digits, 28x28."""
    images, test = _torchvision("mnist", "MNIST", data_dir, download)
    return Source(images, test, num_classes=10, peak=255, mean=0.1307, std=0.3081)


def fashion_mnist(data_dir: str | Path | None = None, download: bool = False) -> Source:
    """70,000 pictures of clothes, 28x28."""
    images, test = _torchvision("fashion-mnist", "FashionMNIST", data_dir, download)
    return Source(images, test, num_classes=10, peak=255, mean=0.2860, std=0.3530)


def _torchvision(name: str, kind: str, data_dir: str | Path | None, download: bool) -> tuple[Images, Images]:
    """The training and the test images of a torchvision set; an error that says what to do if they are not there."""
    from torchvision import datasets

    root = Path(FOLDER if data_dir is None else data_dir).expanduser()
    load = getattr(datasets, kind)
    files = [root / kind / "raw" / Path(file).stem for file, _ in load.resources]
    if not download and not all([file.is_file() for file in files]):
        raise FileNotFoundError(
            f"{name} is not in {root / kind / 'raw'}; point --data-dir at the folder that holds {kind}, "
            "or let --download fetch it"
        )
    try:
        train, test = (load(str(root), train=part, download=download) for part in (True, False))
    except Exception as error:  # torchvision raises whatever reading or fetching raised
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(
            f"{name} could not be {'fetched into' if download else 'read from'} {root / kind / 'raw'} ({reason}); "
            "remove that folder and let --download fetch it afresh"
        ) from error
    return tuple((part.data.unsqueeze(1), part.targets.long()) for part in (train, test))


def pools(source: Source, *, validation_share: float, seed: int) -> dict[str, Images]:
    """The training, validation and test pools: separated before anything else, so that no client's choice mixes them.

    The test pool is the set's own; where it has none it is the first fifth of a random order. ``validation_share`` is
    taken of the rest.
    """
    x, y = source.images
    order = torch.randperm(len(y), generator=generator_for(seed, "pools"))
    fifth = 0 if source.test is not None else round(TEST_SHARE * len(y))
    cut = fifth + share_of(validation_share, len(y) - fifth)
    test, val, train = ((x[rows], y[rows]) for rows in (order[:fifth], order[fifth:cut], order[cut:]))
    return {"train": train, "val": val, "test": test if source.test is None else source.test}


def share_of(share: float, n: int) -> int:
    """``share`` of n samples, and at least one unless the share is 0."""
    return max(1, round(share * n)) if share else 0


def prepare(x: Tensor, source: Source, *, image_size: int | None = None, degrees: float = 0.0) -> Tensor:
    """float32 images (n, channels, height, width): resized, rotated, then shifted and scaled to mean 0 and variance 1.

    Args:
        x: (n, channels, height, width) as stored.
        image_size: side to resize to; None keeps the size.
        degrees: turned by this much, counter-clockwise.
    """
    x = x.float() / source.peak
    if image_size is not None and tuple(x.shape[-2:]) != (image_size, image_size):
        x = F.interpolate(x, size=(image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
    return ((rotate(x, degrees) - source.mean) / source.std).contiguous()  # a quarter turn only swaps strides


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
