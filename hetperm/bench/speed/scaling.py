"""Time and memory of a PERM epoch for more and more clients, in groups of ten that should find each other."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from hetperm.bench.speed.children import answer_of
from hetperm.runs.memory import MB, peak_bytes
from hetperm.runs.reproduce.grouped import CLASSES, FEATURES, grouped


def curve(sizes: Sequence[int], *, engine: str) -> list[dict[str, Any]]:
    """Time and peak memory of an epoch for every number of clients, each in its own process, on one core."""
    return [_in_child(N, engine) for N in sizes]


def _in_child(N: int, engine: str) -> dict[str, Any]:
    # The peak of a process never falls: in one process, a size would show the peak of the size before it.
    return answer_of(__name__, str(N), engine)


def epoch(N: int, engine: str) -> dict[str, Any]:
    """Time of an epoch of N clients (visits, global step, alpha anew), and the peak memory of this process so far."""
    import torch

    from hetperm.bench.speed.timing import pinned, seconds
    from hetperm.config import Config
    from hetperm.engine import choice
    from hetperm.params import num_bytes
    from hetperm.runs.setting import from_model
    from hetperm.runs.training import algorithm_for
    from submodels import zoo

    length = {"steps": 0, "warmup_rounds": 1, "epochs": 2, "alpha_every": 1}
    config = Config(num_clients=N, **length, sketch=256, tail_average=0.0, engine=engine, device="cpu")
    before = peak_bytes()  # all imports are done: what comes on top belongs to the epoch
    with pinned(1):
        torch.manual_seed(0)
        model = zoo.build("mlp", in_channels=FEATURES, num_classes=CLASSES, image_size=None)
        setting, states = from_model(model, grouped(N), config, loss=None, metric=None), []
        with choice.opened(setting.engine, 1, setting.clients, setting.shop) as chosen:
            algorithm = algorithm_for(setting, "perm", chosen, steps=1)
            start = algorithm.begin()
            wall, cpu = seconds(lambda: states.append(algorithm.epoch(start)))
    alpha, visits = states[0].alpha, states[0].work.visits - start.work.visits
    return {
        "num_clients": N,
        "engine": setting.engine,
        "partners": visits / N,
        "seconds": wall,
        "cpu_seconds": cpu,
        "alpha": "sparse" if alpha.is_sparse else "dense",
        "peak_mb": peak_bytes() / MB,
        "imports_mb": before / MB,
        "models_mb": N * num_bytes(setting.start) / MB,
    }


if __name__ == "__main__":
    print(json.dumps(epoch(int(sys.argv[1]), sys.argv[2])))
