"""How well memory is predicted: five models at five widths, each in its own process; docs/resources.md has the table.

Run it with ``python -m hetperm.bench.devices.calibrate``; status 1 if a prediction is further off than `near` allows.
ONEDNN_MAX_CPU_ISA=AVX2, or SSE41, shows what a processor without newer instructions takes.
"""

import statistics
import sys
from collections.abc import Iterator
from functools import partial

from hetperm.bench.devices import benchmark
from hetperm.bench.devices.device import Devices
from hetperm.bench.devices.limits import MB
from hetperm.bench.devices.measure import training, watched
from hetperm.profile import Profile, Tier
from hetperm.report import tables
from hetperm.report.grid import Grid, markdown
from hetperm.runs.placement import one_thread

FIVE = Profile("five", "", tuple(Tier(f"1/{k}", 1, 1 / k) for k in (1, 2, 4, 8, 16)))
BATCH_SIZE = 10
# One of each kind: products, convolutions, shortcuts, depthwise convolutions, attention.
MODELS = {  # model -> shape of the images it is trained on
    "mlp": (3, 32, 32),
    "cnn": (3, 32, 32),
    "resnet18-cifar": (3, 32, 32),
    "timm:mobilenetv3_small_100": (3, 64, 64),
    "timm:vit_tiny_patch16_224": (3, 64, 64),
}


def near(predicted: float, measured: float) -> bool:
    """Whether a prediction in MB is within 15 % of what was measured, or at most 6 MB short or 4 MB long.

    It may be short by more than long: a process holds up to 6 MB beside its tensors, which nobody predicts (compiled
    kernels, and buffers of the libraries that multiply matrices).

    Example:
        >>> near(100, 114), near(100, 130), near(1, 6.5), near(6.5, 1)
        (True, False, True, False)
    """
    short = measured - predicted
    return -max(0.15 * measured, 4) <= short <= max(0.15 * measured, 6)


def measured(devices: Devices) -> Iterator[tuple[str, float, float, float]]:
    """Yield the model, its width, the predicted MB, and the MB measured above the baseline."""
    for name, shape in MODELS.items():
        net = benchmark.network(name, shape, batch_size=BATCH_SIZE, profile=FIVE)
        for width in reversed(FIVE.widths):
            work = training(net.at(width), net.example, batch_size=BATCH_SIZE, steps=1)
            resident = devices.do(partial(watched, work)).resident
            if resident is None:
                raise OSError("this system does not tell how much memory a process uses; run this on Linux")
            label = f"{name} {'x'.join(map(str, shape))}"
            yield label, width, net.cost(width).train_bytes / MB, resident / MB


def main() -> None:
    """Print the table and exit with its status."""
    with Devices() as devices, one_thread():
        found = list(measured(devices))
    rows = [
        [name, tables.width_text(width), f"{a:.2f}", f"{b:.2f}", f"{a - b:+.2f}", f"{100 * (a / b - 1):+.0f} %"]
        for name, width, a, b in found
    ]
    heads = ["model and input", "width", "predicted MB", "measured MB", "difference", "relative"]
    print(markdown(Grid(heads, rows)), end="")
    ratios = sorted(a / b for _, _, a, b in found)
    excess = sorted(a - b for _, _, a, b in found)
    print(
        f"predicted / measured: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}; "
        f"at most {-excess[0]:.2f} MB short, {excess[-1]:.2f} MB long"
    )
    far = [f"{name} at {tables.width_text(width)}" for name, width, a, b in found if not near(a, b)]
    print(f"further off than 15 % and 6 MB short or 4 MB long: {', '.join(far) or 'none'} of {len(found)}")
    sys.exit(1 if far else 0)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
