r"""The paper's synthetic set (section Experiments): two halves of clients that label their data in opposite ways.

.. math:: x \sim \mathcal N(\pm 0.2, \Sigma), \quad \Sigma_{kk} = k^{-1.2}, \quad
          y = \operatorname{sign}(\pm w^\top x), \quad w \sim \mathcal N(0.1, I)

The paper gives the means, the dimension (60), the clients (50) and their samples (500). It leaves open the covariance
of w (here I), the intercept (none) and the test data (here 1000 fresh samples a client).
"""

import torch
from torch import Tensor

from hetperm.client import Client
from hetperm.randomness import generator_for

DIMENSION = 60
SAMPLES = 500
TEST_SAMPLES = 1000

_MEAN = 0.2  # of the first half; the second half has its negative
_TEACHER_MEAN = 0.1


def clients(
    num_clients: int,
    *,
    seed: int,
    samples: int = SAMPLES,
    validation: int = 0,
    test: int = TEST_SAMPLES,
    d: int = DIMENSION,
) -> tuple[Client, ...]:
    """Clients 1 to N/2 (group 0) and the rest (group 1), numbered as in the paper; class 1 stands for y = +1.

    The training samples of a client depend on the seed, its key, its group and their number, and on nothing else. The
    same holds for its validation and its test samples.
    """
    w = teacher(seed, d=d)

    def client(i: int) -> Client:
        # The paper counts clients from 1.
        group = int(2 * (i + 1) > num_clients)
        sizes = {"train": samples, "val": validation, "test": test}
        pairs = {part: _draw(w, n, group=group, seed=seed, key=(i, part)) for part, n in sizes.items() if n}
        return Client(pairs["train"], pairs.get("val"), pairs.get("test"), group=group, key=i)

    return tuple(client(i) for i in range(num_clients))


def num_bytes(samples: int, *, d: int = DIMENSION) -> int:
    """The memory that so many samples take: inputs in float32, labels in int64."""
    return samples * (4 * d + 8)


def teacher(seed: int, *, d: int = DIMENSION) -> Tensor:
    """(d,) the w of the labelling: group 0 answers sign(w.x), group 1 sign(-w.x)."""
    return _TEACHER_MEAN + torch.randn(d, generator=generator_for(seed, "synthetic", "teacher"), dtype=torch.float64)


def _draw(w: Tensor, n: int, *, group: int, seed: int, key: tuple) -> tuple[Tensor, Tensor]:
    sign = 1 - 2 * group
    # The square root of the variances, k^-1.2.
    deviation = torch.arange(1, len(w) + 1, dtype=torch.float64) ** -0.6
    noise = torch.randn(n, len(w), generator=generator_for(seed, "synthetic", *key), dtype=torch.float64)
    # Rounded before it is labelled: the label belongs to the x that a model sees.
    x = (sign * _MEAN + noise * deviation).float()
    return x, (sign * (x.double() @ w) > 0).long()
