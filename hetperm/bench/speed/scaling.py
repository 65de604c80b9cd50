"""Time and memory of a PERM epoch as clients become more: groups of ten that should find each other."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUP = 10  # clients that have the same kind of data
FEATURES, CLASSES, SAMPLES = 60, 10, 100


def curve(sizes: Sequence[int], *, engine: str) -> list[dict[str, Any]]:
    """Time and peak memory of an epoch for every number of clients, each in a process of its own, on one core."""
    return [_in_child(N, engine) for N in sizes]


def _in_child(N: int, engine: str) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "hetperm.bench.speed.scaling", str(N), engine]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"the epoch of {N} clients ended with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def epoch(N: int, engine: str) -> dict[str, Any]:
    """Time of an epoch of N clients (visits, global step, alpha anew), and the peak memory of this process so far."""
    import torch

    from hetperm.algorithms.perm import single_loop
    from hetperm.bench.speed.timing import pinned, seconds
    from hetperm.config import Config
    from hetperm.engine import choose, engine_for
    from hetperm.methods import options_for
    from hetperm.runs.setting import own
    from hetperm.state import num_bytes
    from submodels import zoo

    config = Config(num_clients=N, warmup_rounds=1, epochs=2, sketch=256, tail_average=0.0, device="cpu")
    before = peak_mb()
    with pinned(1):
        torch.manual_seed(0)
        model = zoo.build("mlp", in_channels=FEATURES, num_classes=CLASSES, image_size=None)
        setting = own(model, grouped(N), config, loss=None, metric=None)
        clients, options, states = setting.clients, options_for("perm", config, steps=1), []
        with engine_for(engine, 1, clients, setting.shop) as chosen:
            begin, advance, _ = single_loop(clients, chosen, setting.start, options, parts=setting.parts)
            start = begin()
            wall, cpu = seconds(lambda: states.append(advance(start)))
    alpha, visits = states[0].alpha, states[0].work.visits - start.work.visits
    return {
        "num_clients": N,
        "engine": choose(engine, 1, clients, setting.shop),
        "partners": visits / N,
        "seconds": wall,
        "cpu_seconds": cpu,
        "alpha": "sparse" if alpha.is_sparse else "dense",
        "peak_mb": peak_mb(),
        "imports_mb": before,
        "models_mb": N * num_bytes(setting.start) / 2**20,
    }


def grouped(N: int) -> list:
    """Clients in groups of ten: a group has its own region of the inputs and its own labelling."""
    import torch

    from hetperm.client import Client
    from hetperm.randomness import generator_for

    clients = []
    for i in range(N):
        group = i // GROUP
        of_group = generator_for(0, "group", group)
        centre, teacher = (torch.randn(*shape, generator=of_group) for shape in ((FEATURES,), (FEATURES, CLASSES)))
        x = centre + torch.randn(SAMPLES, FEATURES, generator=generator_for(0, "client", i))
        clients.append(Client((x, (x @ teacher).argmax(1)), group=group, key=i))
    return clients


def peak_mb() -> float:
    """The peak resident memory of this process."""
    try:  # getrusage would also count what the parent held before this program was loaded
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    print(json.dumps(epoch(int(sys.argv[1]), sys.argv[2])))
