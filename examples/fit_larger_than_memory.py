"""Shards twenty times as large as the memory that training may take: images are decoded when they are read.

Four clients have scans in a folder, as torchvision's ImageFolder reads it: small files that take 1 MB each once they
are decoded. The operating system allows this process 64 MB more than torch has taken by itself (RLIMIT_DATA). Of what
was decoded, 2 MB a client are kept (`Cached`). Gradient accumulation keeps the activations small as well.
"""

import argparse
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder

from hetperm import Cached, Client, Config, fit

SIDE, CLIENTS, MB = 512, 4, 2**20  # a scan of this side takes 1 MB as float32
CLASSES = ("thick", "thin")


def draw(folder: Path, count: int) -> None:
    """Write scans with bars of some distance, which cover three quarters of it or one, as small files."""
    generator = torch.Generator().manual_seed(0)
    for k in range(count):
        kind = CLASSES[k % 2]
        period = int(torch.randint(24, 64, (), generator=generator))
        bars = torch.arange(SIDE) % period < period * (0.75 if kind == "thick" else 0.25)
        pixels = (bars * 255).to(torch.uint8).expand(SIDE, SIDE)
        (folder / kind).mkdir(exist_ok=True)
        Image.fromarray(pixels.contiguous().numpy()).save(folder / kind / f"{k:04}.png", compress_level=1)


def decode(path: str) -> Tensor:
    with Image.open(path) as image:
        pixels = torch.frombuffer(bytearray(image.convert("L").tobytes()), dtype=torch.uint8)
    return pixels.reshape(1, SIDE, SIDE).float() / 255 - 0.5


@contextmanager
def allowed(mb: int) -> Iterator[None]:
    """A context in which the process may take so much more memory than it has now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + mb * MB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 8, stride=8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * 16, len(CLASSES))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mb", type=int, default=64, help="memory that training may take")
    options = parser.parse_args()
    count = 20 * options.mb
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), count)
        scans = ImageFolder(folder, loader=decode)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        shards = [Cached(Subset(scans, rows.tolist()), mb=2) for rows in order.chunk(CLIENTS)]
        clients = [
            Client(
                Subset(shard, range(len(shard) - 10)),
                test=Subset(shard, range(len(shard) - 10, len(shard))),
                width=width,
            )
            for shard, width in zip(shards, (1.0, 0.5) * 2, strict=True)
        ]
        config = Config(
            steps=160, epochs=2, batch_size=4, accumulate=2, share=0.7, alpha_every=2, warmup_rounds=8, baselines=()
        )
        # A first run loads the code and the kernels of torch, which are no data: the limit counts from there.
        few = [Client(Subset(scans, range(k, count, count // 4)), width=width) for k, width in enumerate((1.0, 0.5))]
        fit(model(), few, config.override(steps=40, epochs=1, alpha_every=1, warmup_rounds=2))
        with allowed(options.mb):
            result = fit(model(), clients, config)
    print(f"{count} scans of 1 MB are {count} MB, and training was allowed {options.mb} MB")
    print(f"kept in memory: {sum(shard.mb_kept for shard in shards):.0f} MB")
    print(f"accuracy {result.accuracy:.2f}")


if __name__ == "__main__":
    main()
