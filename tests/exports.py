"""Small models and data that tests of exported files share."""

import torch
from torch import nn

from hetperm.data.images import Preparation
from hetperm.metrics import METRICS
from hetperm.runs.export.package import Subject

PIXELS = Preparation(peak=255, mean=torch.tensor([0.3, 0.4]).view(2, 1, 1), std=torch.tensor([0.2, 0.5]).view(2, 1, 1))


class Branches(nn.Module):
    """A small network with the layers that phones know: convolutions, a norm, a pooling, a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.own = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8, bias=False)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.last((self.own(x) + x[..., ::2, ::2]).mean(dim=(2, 3)))


def small_subject(module: nn.Module | None = None, **changes) -> Subject:
    """A client of 40 images, 2x6x6, with labels that its model mostly predicts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Branches().eval() if module is None else module.eval()
        stored = torch.randint(0, 256, (40, 2, 6, 6)).float()
        x = (stored / PIXELS.peak - PIXELS.mean) / PIXELS.std
    with torch.no_grad():
        y = module(x).argmax(1)
    y[::10] = (y[::10] + 1) % 4
    model = {"width": 0.25, "tier": "low", "accuracy": 0.9}
    given = {
        "client": 7,
        "module": module,
        "model": model,
        "x": x,
        "y": y,
        "part": "val",
        "metric": METRICS["accuracy"],
    }
    return Subject(**given | {"preparation": PIXELS, "class_names": tuple("abcd")} | changes)
