"""Flags of the device benchmark: what it measures, and how memory is limited. Imports no torch, for --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hetperm.bench.devices import limits
from hetperm.checks import LARGEST_SEED, check_fields, number, whole
from hetperm.config import RATE, WidthsFrom
from hetperm.texts import shown

MOST_PIXELS = 4096  # of a side; inputs of more fit into no device


def image_shape(name: str, value: Any) -> str:
    """A text such as 3x32x32, or an error."""
    sides = value.lower().split("x")
    if len(sides) != 3 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"{name} is {shown(value)}; it must be channels x height x width, such as 3x32x32")
    if max(map(int, sides)) > MOST_PIXELS:
        raise ValueError(f"{name} is {shown(value)}; it must be channels and sides of at most {MOST_PIXELS} pixels")
    return value


@dataclass(frozen=True)
class Options:
    """Measure what training takes on the devices of a capacity profile, and have the operating system hold them to it.

    Status 1 if a tier does not fit, or if a federated run under limits fails or gives other numbers.
    """

    capacity_profile: str = "mobile"
    """mobile, mobile-ram, iot, edge-cluster, cross-silo, uniform5, homogeneous, or a TOML file."""
    model: str = "resnet18-cifar"
    """logistic, mlp, cnn, resnet18-cifar, timm:NAME or torchvision:NAME."""
    input: Annotated[str, image_shape] = "3x32x32"
    """Channels, height and width of the images that memory and time are measured with."""
    batch_size: Annotated[int, whole(1)] = 10
    """Samples of a local step."""
    local_steps: Annotated[int, whole(1)] = 5
    """Local steps of a visit."""
    widths_from: WidthsFrom = "profile"
    """Width of a tier: as the profile has it, or the largest of its widths whose training fits the tier's budget."""
    enforce: limits.KINDS = "auto"
    """How memory is limited: a cgroup for each process, RLIMIT_DATA, the first of them that there is, or not at all."""
    device_mb: Annotated[float | None, number(lambda x: x > 0, "a number above 0")] = None
    """MB that a process may take in all, Python and torch included; None: budgets count what comes on top of that."""
    federated: bool = True
    """Also run hetero-PERM under the limits, for two epochs with one client a tier."""
    curves: bool = True
    """Also train PERM and its rivals against the simulated clock."""
    dataset: str = "digits"
    """Data of the federated runs, images: digits, digit-pairs, mnist, fashion-mnist, emnist, cifar10, imagefolder:PATH,
    leaf:PATH or npz:PATH."""
    data_dir: Path | None = None
    """Folder of data sets in torchvision's layout; None: data."""
    image_size: Annotated[int | None, whole(1, 4096)] = None
    """Side of the images that curves are trained on; None: as the data has them."""
    num_clients: Annotated[int, whole(1, 100_000)] = 8
    """Clients of the curves."""
    epochs: Annotated[int, whole(1, 1_000_000)] = 4
    """Epochs of the curves."""
    lr: Annotated[float, RATE] = 0.05
    """Step size of all methods in the federated runs."""
    seed: Annotated[int, whole(0, LARGEST_SEED)] = 0
    """Decides all randomness of the federated runs."""
    out: Path | None = None
    """Folder to write to, which must not exist; None: runs/resources-PROFILE-MODEL, or with -2, ... if it is taken."""
    quiet: bool = False
    """Show no progress."""

    def __post_init__(self):
        check_fields(self)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input.

        Example:
            >>> Options(input="1x28x28").shape
            (1, 28, 28)
        """
        return tuple(int(side) for side in self.input.lower().split("x"))
