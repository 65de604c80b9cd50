"""What distances see: data or capacity? Probe against the paper's masks, and where the VC term sends the weight.

    python bench/capacity.py --dataset mnist --data-dir DATA --num-clients 50 --samples-per-client 200

prints, for clients of five sizes, the AUC of ranking pairs of the same capacity (on iid data: 0.5 is blind) and pairs
of the same data (on grouped data: 1 is right) by their distance, the mass of alpha on one's own tier, and the mass on
hosts of each tier with the complexity term left out, normalised and raw.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetperm import mixing
from hetperm.cli.console import say
from hetperm.cli.flags import parse
from hetperm.cli.main import script
from hetperm.config import Config
from hetperm.device.gradients import ReportGradient
from hetperm.device.updates import Sgd
from hetperm.engine.sequential import Sequential
from hetperm.mixing import complexity
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import Setting, from_config
from hetperm.server.estimate import collect_reports
from hetperm.server.federation import Federation
from hetperm.server.global_model import local_sgd_round
from hetperm.state import State


@dataclass(frozen=True)
class Flags:
    """What is compared."""

    dataset: str = "digits"
    """A data set, as in hetperm train."""
    data_dir: Path | None = None
    """Its folder."""
    num_clients: int = 20
    samples_per_client: int | None = None
    partitions: tuple[str, ...] = ("iid", "label-shift:2")
    seeds: tuple[int, ...] = (0, 1)
    rounds: int = 10
    """Rounds of global training before the second comparison; the first is before any."""


def auc(distances: Tensor, same: Tensor) -> float:
    """The probability that a pair of the same kind is nearer than one of different kinds; ties count half.

    Args:
        distances: (N, N), symmetric.
        same: (N, N) bool.
    """
    i, j = torch.triu_indices(len(distances), len(distances), offset=1)
    near, far = (distances[i, j][kind] for kind in (same[i, j], ~same[i, j]))
    order = torch.cat([near, far]).argsort(stable=True).argsort().double() + 1
    return 1 - float((order[: len(near)].sum() / len(near) - (len(near) + 1) / 2) / len(far))


def same(labels) -> Tensor:
    """(N, N) whether two clients have the same label."""
    number = torch.tensor([sorted(set(labels)).index(label) for label in labels])
    return number[:, None] == number


def compare(setting: Setting, rounds: int) -> None:
    """Print the figures of one setting."""
    config, clients, w = setting.config, setting.clients, setting.start
    federation = Federation(clients, Sequential(clients, setting.shop), setting.slicer, config.seed)
    vc = complexity.vc_of_widths(setting.shop.scalable, [client.width for client in clients])
    updates = [Sgd(steps=5, batch_size=32, lr=config.global_lr)] * len(clients)
    for done in (0, rounds):
        for round in range(done):
            w, _ = local_sgd_round(federation, w, updates, batch_size=32, round=round)
        for kind in ("probe", "masked"):
            update = ReportGradient(batches=8)
            reports = collect_reports(federation, State(0, w, ()), update, batch_size=32, compare=kind)
            zeta, q, n = reports.zeta, reports.q, reports.n
            alpha = mixing.weights(zeta, q, n)
            line = f"seed {config.seed} {config.partition:14} round {done:2} {kind:6}"
            line += f"  capacity AUC {auc(zeta, same(setting.tiers)):.3f}"
            if setting.groups and len(set(setting.groups)) > 1:
                line += f"  data AUC {auc(zeta, same(setting.groups)):.3f}"
                line += f"  same-group mass {mixing.same_group_mass(alpha, setting.groups):.3f}"
            line += f"  same-tier mass {mixing.same_group_mass(alpha, setting.tiers):.3f}"
            say(line + f"  partners {float(mixing.effective_partners(alpha).mean()):.1f}")
            if kind == "probe" and done:
                for weight in (0.0, config.vc_weight, "raw"):
                    alpha = mixing.weights(zeta, q, n, vc=vc, vc_weight=weight)
                    say(f"    VC weight {weight}: mass on hosts of {_by_tier(setting, alpha)}")


def _by_tier(setting: Setting, alpha: Tensor) -> str:
    mass = alpha.mean(0).tolist()
    total = {tier: sum(m for m, own in zip(mass, setting.tiers) if own == tier) for tier in setting.tier_names}
    return ", ".join(f"{tier} {share:.3f}" for tier, share in total.items())


def main(args) -> None:
    """Compare every partition and seed."""
    flags = parse(Flags, args, prog="bench/capacity.py")
    with one_thread():
        for partition in flags.partitions:
            for seed in flags.seeds:
                compare(
                    from_config(
                        Config(
                            dataset=flags.dataset,
                            data_dir=flags.data_dir,
                            num_clients=flags.num_clients,
                            samples_per_client=flags.samples_per_client,
                            capacity_profile="uniform5",
                            partition=partition,
                            seed=seed,
                        )
                    ),
                    flags.rounds,
                )


if __name__ == "__main__":
    script(main)
