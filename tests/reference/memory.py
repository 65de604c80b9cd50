"""Peak resident memory of training a zoo model, asked of the kernel in a process of its own (Linux).

    MALLOC_MMAP_THRESHOLD_=65536 python tests/reference/memory.py cnn,3,32,128 timm:resnet18,3,64,4

prints, for each model, the bytes that two steps of SGD with cross entropy took above what the process held before:
weights, batch, activations, gradients. Each is trained in a child of its own, before anything else was trained. Steps
of the same shapes are taken first, so that compiled kernels are part of the before.
The variable keeps glibc from holding on to freed blocks: without it up to twice as much is resident.
"""

import ctypes
import os
import sys

import torch
from torch.nn import functional as F

from submodels import zoo


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status, such as VmRSS, or its peak VmHWM."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def train(name: str, channels: int, side: int, batch_size: int) -> None:
    model = zoo.build(name, in_channels=channels, num_classes=10, image_size=side).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch_size, channels, side, side), torch.randint(10, (batch_size,))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main(*words: str) -> None:
    torch.set_num_threads(1)
    for word in words:
        child = os.fork()
        if not child:
            report(*word.split(","))
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{word} could not be trained")


def report(name: str, *sizes: str) -> None:
    """Print what training a model took."""
    train(name, *map(int, sizes))
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    before = status("VmRSS")
    train(name, *map(int, sizes))
    print(status("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
