"""A UNet with the Dice loss, at two widths, and an augmentation that turns images and masks together.

Six clinics outline what they look for in pictures that hold a disc and a square: half of them outline discs, the
others squares. Labels are masks, the metric is Dice, and BatchNorm statistics are each clinic's own. (The pictures are
drawn at random.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetperm import Client, Config, fit

SIDE = 16


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels down and up again, with the skip connections that give it its name."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.first, self.second, self.bottom = (
            block(1, channels),
            block(channels, 2 * channels),
            block(2 * channels, 4 * channels),
        )
        self.up, self.last = block(6 * channels, 2 * channels), block(3 * channels, channels)
        self.out = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        middle = self.second(F.max_pool2d(fine, 2))
        coarse = self.bottom(F.max_pool2d(middle, 2))
        x = self.up(torch.cat([F.interpolate(coarse, scale_factor=2), middle], dim=1))
        return self.out(self.last(torch.cat([F.interpolate(x, scale_factor=2), fine], dim=1))).squeeze(1)


def pictures(n: int, *, discs: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, SIDE, SIDE) of a disc and a square, and masks (n, SIDE, SIDE) of one of them."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.arange(SIDE)
    # Their centres lie in different halves of the picture, so that they do not cover each other.
    row = torch.randint(3, SIDE - 3, (2, n, 1, 1), generator=generator)
    column = torch.randint(3, SIDE // 2 - 3, (2, n, 1, 1), generator=generator)
    swapped = torch.rand(n, 1, 1, generator=generator) < 0.5
    left, right = column[0], column[1] + SIDE // 2
    at = torch.where(swapped, right, left), torch.where(swapped, left, right)
    disc = (grid[:, None] - row[0]) ** 2 + (grid - at[0]) ** 2 <= 8
    square = torch.maximum((grid[:, None] - row[1]).abs(), (grid - at[1]).abs()) <= 2
    image = (disc | square).float() + 0.2 * torch.randn(n, SIDE, SIDE, generator=generator)
    return image[:, None], (disc if discs else square).float()


def dice(outputs: Tensor, mask: Tensor) -> Tensor:
    """The mean Dice coefficient of hard answers, larger is better."""
    return overlap((outputs > 0).to(mask.dtype), mask)


def overlap(p: Tensor, mask: Tensor) -> Tensor:
    return ((2 * (p * mask).sum((1, 2)) + 1) / (p.sum((1, 2)) + mask.sum((1, 2)) + 1)).mean()


def dice_loss(outputs: Tensor, mask: Tensor) -> Tensor:
    return 1 - overlap(outputs.sigmoid(), mask) + F.binary_cross_entropy_with_logits(outputs, mask)


def mirrored(x: Tensor, mask: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Some pictures mirrored, and their masks with them."""
    flips = torch.rand(len(x), 1, 1, generator=generator) < 0.5
    return torch.where(flips[:, None], x.flip(3), x), torch.where(flips, mask.flip(2), mask)


def clinic(i: int) -> Client:
    parts = [pictures(n, discs=i % 2 == 0, seed=3 * i + k) for k, n in enumerate((12, 6, 30))]
    return Client(*parts, width=(1.0, 0.5)[i // 2 % 2], group=i % 2)


def main() -> None:
    torch.manual_seed(0)
    config = Config(steps=80, epochs=2, batch_size=6, optimizer="momentum", global_lr=0.1, baselines=("fedavg",))
    clinics = [clinic(i) for i in range(6)]
    result = fit(UNet(), clinics, config, loss=dice_loss, metric=dice, augment=mirrored)
    rival = result.summary["baselines"]["fedavg"][result.summary["metric"]]["mean"]
    print(f"Dice: perm {result.score:.3f}, fedavg {rival:.3f}")
    for tier, row in result.tiers.items():
        score = row[result.summary["metric"]]
        print(f"width {tier:>3}: {row['clients']} clinics, {row['params']:,} parameters, Dice {score:.3f}")
    print(f"weight on clinics that outline the same: {result.summary['alpha']['same_group_mass']:.2f}")


if __name__ == "__main__":
    main()
