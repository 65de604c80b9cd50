"""Bring your own model, shards, loss and metric: the electricity demand of twelve homes that keep their readings.

Half of the homes heat with electricity; the others cool with it, and charge a car at night. Nobody has written down
which do what. A home has 24 readings, too few to learn from alone, and half of its neighbours would mislead it.
(Simulated, so that the answer is known.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetperm import Client, Config, fit

HOMES, READINGS = 12, 24


class Demand(nn.Module):
    """Temperature and time of day -> demand in kW: any module will do, and it is not changed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


def features(celsius: Tensor, hour: Tensor) -> Tensor:
    """(n, 3) inputs of about unit size; midnight is next to one o'clock."""
    angle = hour * (2 * torch.pi / 24)
    return torch.stack([(celsius - 15) / 10, angle.sin(), angle.cos()], dim=1)


def readings(n: int, *, cools: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs (n, 3) and metered kW (n,) of a home, at random hours of the year."""
    generator = torch.Generator().manual_seed(seed)
    celsius, hour = 15 + 10 * torch.randn(n, generator=generator), 24 * torch.rand(n, generator=generator)
    if cools:
        kw = 0.12 * (celsius - 18).clamp(min=0) + 1.5 * (hour < 6)  # the car is charged until six
    else:
        kw = 0.12 * (18 - celsius).clamp(min=0) + 1.5 * ((hour > 17) & (hour < 22))  # dinner
    return features(celsius, hour), 0.4 + kw + 0.3 * torch.randn(n, generator=generator)


def home(i: int) -> Client:
    """Home i; the last two are new: without test data they are trained and not scored."""
    train, test = readings(READINGS, cools=i % 2 == 1, seed=i), readings(500, cools=i % 2 == 1, seed=1000 + i)
    return Client(train, test=test if i < 10 else None, group=i % 2)  # the group is for reports


def main() -> None:
    torch.manual_seed(0)
    own_step = {"local": {"lr": 0.2}}  # the best of 0.1, 0.2, 0.3 and 0.5 for it
    config = Config(
        epochs=8, warmup_rounds=10, batch_size=16, personal_lr=0.5, baselines=("local", "fedavg"), rivals=own_step
    )
    result = fit(Demand(), [home(i) for i in range(HOMES)], config, loss=F.huber_loss, metric="mae")

    rivals = {name: each["mae"]["mean"] for name, each in result.summary["baselines"].items()}
    print("mean absolute error of a home's model in kW; 0.24 is the noise of the meters")
    for name, score in {"perm": result.score, **rivals}.items():
        print(f"  {name:7} {score:.3f}")

    for i, weights in enumerate(result.alpha.tolist()):
        others = [str(j) for j in range(HOMES) if weights[j] > 0.01 and j != i]
        print(f"home {i:2} gives its own readings {weights[i]:.0%} of the weight and learns from {', '.join(others)}")

    evening_and_night = features(celsius=torch.tensor([-5.0, 30.0]), hour=torch.tensor([20.0, 3.0]))
    for i in (10, 11):
        winter, summer = result.model(i)(evening_and_night).tolist()
        print(f"home {i} will need {winter:.1f} kW on a winter evening and {summer:.1f} kW in a summer night")


if __name__ == "__main__":
    main()
