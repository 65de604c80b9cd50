"""Cutting sub-models out of ResNet-18 and writing them back, against the way the field does it.

For static, rolling and random extraction: CPU seconds of a round of 100 clients (widths 1, 1/2, 1/4, 1/8, 1/16 in turn,
each cut out and written back), and the ratio to a naive version measured side by side in the same run: deep-copy the
global model, index every tensor with a mesh grid, assign through it. Then the peak memory of 10 and of 100 clients,
each in a process of its own. Ratios are what to read; seconds belong to the machine.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from submodels import Random, Rolling, ScalableModel, Static
from submodels.skeleton import named_tensors
from submodels.zoo import build

WIDTHS = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
EXTRACTORS = {"static": Static(), "rolling": Rolling(), "random": Random()}
ROUND = 100  # of training: the rolling window wraps round in the narrow layers and not in the wide ones
MB = 2**20


def resnet18() -> ScalableModel:
    torch.manual_seed(0)
    return ScalableModel(
        build("resnet18-cifar", in_channels=3, num_classes=10, image_size=32), torch.zeros(2, 3, 32, 32)
    )


def ours(scalable: ScalableModel, extractor, client: int) -> None:
    """Cut one client's sub-model out and write it back."""
    scalable.write(scalable.extract(WIDTHS[client % len(WIDTHS)], extractor, round=ROUND, client=client))


def naive(scalable: ScalableModel, extractor, client: int) -> None:
    """The same as FedRolex and HeteroFL do it: deepcopy, and a mesh grid of indices for every tensor."""
    index = scalable.index(WIDTHS[client % len(WIDTHS)], extractor, round=ROUND, client=client)
    local = copy.deepcopy(scalable.model)
    lines = {name: [t.index(index.kept, index.sizes) for t in row] for name, row in scalable.axis_map.dims.items()}
    grids = {name: torch.meshgrid(*line, indexing="ij") if line else () for name, line in lines.items()}
    for name, x in named_tensors(local):
        x.data = x.data[grids[name]]
    parts = dict(named_tensors(local))
    with torch.no_grad():
        for name, x in named_tensors(scalable.model):
            if x.is_floating_point() and name not in scalable.axis_map.statistics:
                x[grids[name]] = parts[name]


def seconds(work: Callable, scalable: ScalableModel, extractor, clients: range) -> float:
    """CPU seconds: the wall clock of a shared machine says little."""
    started = time.process_time()
    for client in clients:
        work(scalable, extractor, client)
    return time.process_time() - started


def compare(scalable: ScalableModel, extractor, clients: int, rounds: int) -> dict:
    """Ours and naive in turn, a block of clients at a time, so that both see the same machine."""
    blocks = [range(start, min(start + 10, clients)) for start in range(0, clients, 10)]
    for work in (ours, naive):
        seconds(work, scalable, extractor, range(min(5, clients)))  # warm up
    runs = []
    for _ in range(rounds):
        fast = slow = 0.0
        for block in blocks:
            fast += seconds(ours, scalable, extractor, block)
            slow += seconds(naive, scalable, extractor, block)
        runs.append((fast, slow))
    ratios = [slow / fast for fast, slow in runs]
    return {
        "ours_s": statistics.median(fast for fast, _ in runs),
        "naive_s": statistics.median(slow for _, slow in runs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def peak_mb(clients: int) -> float:
    """Peak resident memory of cutting and writing back so many rolling sub-models, in a fresh process."""
    command = [sys.executable, __file__, "--peak-of", str(clients)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return float(answer.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3, help="how often the comparison is repeated")
    parser.add_argument("--out", type=Path, default=Path("bench/extraction.json"), help="where the figures are written")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peak_of:
        seconds(ours, resnet18(), Rolling(), range(options.peak_of))
        import resource  # not on Windows

        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024) / MB)
        return 0
    table = Table("extraction", "ours, s", "naive, s", "ratio", "ratios of single runs")
    results: dict = {"clients": options.clients, "extraction": {}}
    scalable = resnet18()
    for name, extractor in EXTRACTORS.items():
        row = results["extraction"][name] = compare(scalable, extractor, options.clients, options.rounds)
        ratios = " ".join(f"{ratio:.1f}" for ratio in row["ratios"])
        table.add_row(name, f"{row['ours_s']:.2f}", f"{row['naive_s']:.2f}", f"{row['ratio']:.1f}x", ratios)
    results["peak_mb"] = {clients: peak_mb(clients) for clients in sorted({min(10, options.clients), options.clients})}
    console = Console()
    console.print(f"ResNet-18, {options.clients} clients cut out and written back, one thread, CPU seconds")
    console.print(table)
    for clients, peak in results["peak_mb"].items():
        console.print(f"peak memory of the process with {clients} clients: {peak:.0f} MB")
    draft = options.out.with_suffix(".tmp")
    draft.write_text(json.dumps(results, indent=2) + "\n")
    os.replace(draft, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
