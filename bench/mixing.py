"""Who learns from whom, and when, among a thousand clients: the solver of alpha and the schedule of the visits.

Prints CPU seconds, the best of a few runs, beside what they are allowed to take. Seconds belong to the machine.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from hetperm import mixing
from hetperm.mixing import discrepancy
from hetperm.randomness import generator_for
from hetperm.server import shuffle


def reports(N: int, groups: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """zeta (N, N), q (N,) and n (N,) of clients of unequal size in equal groups, from sketches of their gradients."""
    generator = generator_for(seed, "bench")
    n = torch.randint(50, 1000, (N,), generator=generator)
    q = 100.0 / n
    centres = torch.randn(groups, 256, generator=generator)
    own = torch.randn(N, 256, generator=generator) * (q / 256).sqrt()[:, None]
    return discrepancy.pairwise(centres[torch.arange(N) % groups] + own), q, n


def random_partners(N: int, partners: int, seed: int = 0) -> torch.Tensor:
    """Alpha (N, N) with so many partners for each client, drawn at random: some hosts are visited more than others."""
    generator = generator_for(seed, "partners")
    return torch.zeros(N, N).scatter_(1, torch.rand(N, N, generator=generator).topk(partners).indices, 1 / partners)


def seconds(work: Callable[[], object], runs: int) -> float:
    """CPU seconds: the wall clock of a shared machine says little."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--partners", type=int, default=50, help="of each client; divides the number of clients")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    N, partners = options.clients, options.partners
    if N < 1 or partners < 1 or N % partners:
        parser.error(f"--clients {N} are not groups of --partners {partners}")
    torch.set_num_threads(1)
    zeta, q, n = reports(N, N // partners)
    D, lam = mixing.noise(zeta, q, n)
    groups = torch.block_diag(*[torch.full((partners, partners), 1 / partners)] * (N // partners))
    supports = {
        f"groups of {partners}": groups,
        f"{partners} random partners each": random_partners(N, partners),
        "everybody": torch.full((N, N), 1 / N),
    }
    table = Table("what", "allowed, s", "CPU, s", "result")
    alpha = mixing.solve(D, n, lam)
    table.add_row(
        f"mixing.solve, {N} clients, unequal n",
        "1.0",
        f"{seconds(lambda: mixing.solve(D, n, lam), options.runs):.3f}",
        f"{mixing.effective_partners(alpha).mean():.1f} effective partners, "
        f"rows off by {float((alpha.sum(1) - 1).abs().max()):.0e}",
    )
    for name, support in supports.items():
        rounds = shuffle.schedule(support, generator_for(0, "bench"))
        took = seconds(lambda support=support: shuffle.schedule(support, generator_for(0, "bench")), options.runs)
        allowed = "-" if name == "everybody" else "5.0"
        table.add_row(
            f"shuffle.schedule, {name}", allowed, f"{took:.3f}", f"{sum(map(len, rounds))} visits, {len(rounds)} rounds"
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
