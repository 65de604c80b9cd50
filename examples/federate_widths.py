"""One model, clients of five sizes: partial training of a CNN on handwritten digits, in the three ways of the field.

Ten clients, two of each width from 1 to 1/16, hold random tenths of scikit-learn's digits. Each round every client gets
a sub-model of its width (static: the first channels, HeteroFL; rolling: a window that moves on, FedRolex; random:
Federated Dropout), trains it, and the server averages every weight over the clients that had it. At the end each width
is sliced out of the global model, its batch-norm statistics are recalibrated, and it is tested.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from submodels import Random, Rolling, ScalableModel, Static, average, recalibrate

WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
EXTRACTORS = {"static": Static(), "rolling": Rolling(), "random": Random()}


def digits() -> tuple[Tensor, Tensor]:
    """(1797, 1, 8, 8) images and their labels, shuffled."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 10)),
    )


def train(module: nn.Module, x: Tensor, y: Tensor, *, steps: int, seed: int) -> None:
    optimizer = torch.optim.SGD(module.train().parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(x), (32,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()


def federate(scalable: ScalableModel, extractor, shards: list, *, rounds: int, label: str) -> None:
    """Partial training, in place: extract, train, average over what was covered."""
    for r in track(range(rounds), description=f"{label:8}"):
        updates = []
        for i, (x, y) in enumerate(shards):
            sub = scalable.extract(WIDTHS[i % len(WIDTHS)], extractor, round=r, client=i)
            train(sub.module, x, y, steps=5, seed=1000 * r + i)
            updates.append((sub.tensors(), sub.index, len(x)))
        scalable.model.load_state_dict(average(scalable.tensors(), updates))


@torch.no_grad()
def accuracy(scalable: ScalableModel, width: float, x: Tensor, y: Tensor, test: tuple[Tensor, Tensor]) -> float:
    """Test accuracy of the static slice of a width, recalibrated on training images."""
    module = scalable.extract(width).module
    recalibrate(module, x.split(128))
    return float((module.eval()(test[0]).argmax(1) == test[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/federate_widths.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y = digits()
    test, (x, y) = (x[1400:], y[1400:]), (x[:1400], y[:1400])
    shards = list(zip(x.chunk(10), y.chunk(10), strict=True))
    scores = {}
    for name, extractor in EXTRACTORS.items():
        scalable = ScalableModel(cnn(), x[:2])
        federate(scalable, extractor, shards, rounds=options.rounds, label=name)
        scores[name] = [accuracy(scalable, width, x, y, test) for width in WIDTHS]
    table = Table("width", "params", "MACs", "train MB", *scores, title="test accuracy of the slices, by extraction")
    for i, width in enumerate(WIDTHS):
        cost = scalable.cost(width, batch_size=32)
        sizes = (f"{cost.params:,}", f"{cost.macs:,}", f"{cost.train_bytes / 2**20:.2f}")
        table.add_row(f"{width:.4g}", *sizes, *(f"{scores[name][i]:.3f}" for name in scores))
    Console().print(table)
    for name, values in scores.items():
        plt.plot(WIDTHS, values, marker="o", label=name)
    plt.xscale("log", base=2)
    plt.xlabel("width of the slice (share of the channels)")
    plt.ylabel("test accuracy")
    plt.title("One global model, trained by clients of five sizes")
    plt.legend(title="extraction")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(options.out, dpi=120, bbox_inches="tight")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
