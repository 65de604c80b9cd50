"""Draw the pictures of the concepts page, each by the code that it explains: python docs/concepts/draw.py"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from hetperm import discrepancy, mixing, shuffle
from hetperm.report.pictures import png
from submodels import Random, Rolling, ScalableModel, Static

WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8)
GROUPS = (0, 1, 0, 1, 1, 0, 0, 1)  # of eight clients, which no code below is told


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def sub_models() -> Figure:
    """Which weights of a layer parts of several widths hold, for three ways to choose them."""
    scalable = ScalableModel(model(), torch.zeros(2, 8))
    ways = {"static: the first channels": Static(), "rolling: a window, round 5": Rolling(), "random: a draw": Random()}
    figure = Figure(figsize=(8, 6.6), layout="constrained")
    panels = figure.subplots(len(ways), len(WIDTHS))
    for row, (name, way) in zip(panels, ways.items(), strict=True):
        for axes, width in zip(row, WIDTHS, strict=True):
            part = scalable.extract(width, extractor=way, round=5, client=1)
            axes.imshow(part.index.mask("2.weight").numpy(), cmap="Blues", vmin=0, vmax=1.4)
            size = sum(p.numel() for p in part.module.parameters())
            axes.set(title=f"width {width:g}: {size} weights", xticks=[], yticks=[])
            axes.title.set_fontsize(9)
        row[0].set_ylabel(name, fontsize=9)
    return figure


def shard(group: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a client; the two groups name the classes in opposite order."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (256,), generator=generator)
    x = 3 * F.one_hot(y, 8).float() + torch.randn(256, 8, generator=generator)
    return x, y if group == 0 else 3 - y


WARMUP = 400  # steps


@cache
def gradients(steps: int = WARMUP) -> Tensor:
    """(8, P) the gradient of every client at one common part of the model, after a warm-up by the data of all."""
    probe = ScalableModel(model(), torch.zeros(2, 8)).extract(1 / 4).module  # what the smallest client can hold
    shards = [shard(group, seed=i) for i, group in enumerate(GROUPS)]
    everybody = tuple(torch.cat(parts) for parts in zip(*shards, strict=True))
    for _ in range(steps):
        for p, grad in zip(probe.parameters(), _gradient(probe, everybody), strict=True):
            p.data -= 0.5 * grad
    return torch.stack([torch.cat([grad.flatten() for grad in _gradient(probe, own)]) for own in shards])


def _gradient(module: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    x, y = pair
    return torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))


def probe() -> Figure:
    """How far clients' gradients at the probe are apart, before and after the warm-up."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    order = np.argsort(GROUPS, kind="stable")
    titles = {0: "at a model that knows nothing", WARMUP: "after a warm-up"}
    for axes, (steps, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        image = axes.imshow(discrepancy.pairwise(gradients(steps))[order][:, order].numpy(), cmap="viridis_r", vmin=0)
        axes.set(title=title, xticks=range(8), yticks=range(8))
        axes.set_xticklabels(order.tolist())
        axes.set_yticklabels(order.tolist())
        figure.colorbar(image, label="squared distance of gradients", shrink=0.8)
    return figure


def weights(lam: float) -> Tensor:
    """(8, 8) the mixing weights for a spread term of this weight."""
    return mixing.solve(discrepancy.pairwise(gradients()), n=torch.full((8,), 256.0), lam=lam)


def mixing_weights() -> Figure:
    """Whom clients learn from, the more the spread term weighs: alone, their own kind, everybody."""
    scale = float(discrepancy.pairwise(gradients()).median()) * 256
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    order = np.argsort(GROUPS, kind="stable")
    titles = {0.001: "little: alone", 0.7: "some: their own kind", 1000.0: "much: everybody"}
    for axes, (share, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        axes.imshow(weights(share * scale)[order][:, order].numpy(), cmap="viridis", vmin=0)
        axes.set(title=title, xticks=range(8), yticks=range(8), xlabel="learns from")
        axes.set_xticklabels(order.tolist())
        axes.set_yticklabels(order.tolist())
    return figure


def visits() -> Figure:
    """The visits that the weights of the middle picture ask for, in rounds: no model and no host is in two places."""
    scale = float(discrepancy.pairwise(gradients()).median()) * 256
    rounds = shuffle.schedule(weights(0.7 * scale), torch.Generator().manual_seed(0))
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for at, pairs in enumerate(rounds):
        for i, j in pairs:
            axes.add_patch(_box(at, j, colour="#D55E00" if GROUPS[i] else "#0072B2"))
            axes.text(at, j, f"model {i}", ha="center", va="center", fontsize=8, color="white")
    axes.set(xlim=(-0.5, len(rounds) - 0.5), ylim=(7.5, -0.5), xlabel="round", ylabel="host")
    axes.set_xticks(range(len(rounds)))
    axes.set_yticks(range(8), [f"client {j}" for j in range(8)], fontsize=8)
    return figure


def _box(x: float, y: float, *, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.45, y - 0.4), 0.9, 0.8, color=colour)


PICTURES = {"sub-models": sub_models, "probe": probe, "mixing": mixing_weights, "visits": visits}


def main() -> None:
    """Write every picture beside this file."""
    for name, picture in PICTURES.items():
        (Path(__file__).parent / f"{name}.png").write_bytes(png(picture()))


if __name__ == "__main__":
    main()
