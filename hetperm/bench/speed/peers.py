"""The same rounds by other frameworks, if installed: pfl in this process, Flower in a process without a network."""

import asyncio
import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetperm.bench.speed.timing import LEAST, median, pinned, seconds
from hetperm.bench.speed.workloads import Setup, Workload, bare_loop, build

PEERS = {"pfl": "apple pfl", "flwr": "Flower with Ray"}
PEER_WORKLOADS = ("W1", "W2")
ISOLATED = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')  # Ray listens on every interface
PATIENCE = 600  # seconds for Flower to start and to do its rounds


def missing(name: str) -> str | None:
    """Why a peer cannot be timed, or None if it can; nothing is downloaded."""
    needed = {"pfl": ["pfl"], "flwr": ["flwr", "ray"]}[name]
    if any([importlib.util.find_spec(module) is None for module in needed]):
        return "not installed (pip install 'hetperm[bench]')"
    if name == "flwr" and not _can_isolate():
        return "not run: Ray opens ports, and this system gives no network namespace to hide them in (unshare -rn)"
    return None


def _can_isolate() -> bool:
    if not all([shutil.which(tool) for tool in ("unshare", "ip")]):
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True).returncode == 0


def against_bare(name: str, workload: Workload, *, repeats: int) -> dict[str, Any]:
    """Times of a peer's round and of the bare loop, on one core."""
    return {"pfl": _pfl, "flwr": _flower}[name](workload, repeats)


def _row(bare: list, peer: list) -> dict[str, Any]:
    (bare_wall, bare_cpu), (wall, cpu) = median(bare), median(peer)
    # Each round against the median of the bare loop: Flower's are not timed in turn with it, so there are no pairs.
    return {
        "ratio_to_bare": bare_wall / wall,
        "ratios": [bare_wall / wall for wall, _ in peer],
        "bare_seconds": bare_wall,
        "bare_cpu_seconds": bare_cpu,
        "round_seconds": wall,
        "round_cpu_seconds": cpu,
    }


# pfl: it gets the batches of the bare loop in the same order, so that its model should be that of our round


def _pfl(workload: Workload, repeats: int) -> dict[str, Any]:
    with pinned(1):
        setup = build(workload)
        advance, _ = pfl_rounds(setup)
        advance(), bare_loop(setup)  # the first round of pfl also evaluates
        times = [(seconds(lambda: bare_loop(setup), LEAST), seconds(advance, LEAST)) for _ in range(repeats)]
    return _row(*map(list, zip(*times)))


def pfl_rounds(setup: Setup) -> tuple[Callable[[], None], Any]:
    """A function that does one more round of pfl's FedAvg, without evaluation, and the module that it trains."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch.nn import functional as F

    workload, module = setup.workload, copy.deepcopy(setup.shop.full.module)
    module.loss = lambda x, y: F.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {"samples": Weighted(len(y), 1)}
    # The optimizer of the server: a step of 1 along the mean change is plain averaging.
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    shards = {j: [torch.cat(part) for part in zip(*pairs)] for j, pairs in enumerate(setup.batches)}
    data = FederatedDataset.from_slices(shards, get_user_sampler("minimize_reuse", list(shards)))
    backend, algorithm = SimulatedBackend(data, data), FederatedAveraging()
    train = NNTrainHyperParams(
        local_batch_size=workload.batch_size, local_num_epochs=1, local_learning_rate=workload.lr
    )
    asyncio.set_event_loop(asyncio.new_event_loop())
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1  # the total, not one more: pfl continues from its current round
        rounds = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=len(shards), val_cohort_size=0
        )
        algorithm.run(rounds, backend, model, train, model_eval_params=train, send_metrics_to_platform=False)

    return advance, module


# Flower: in a separate process, which times the bare loop as well


def _flower(workload: Workload, repeats: int) -> dict[str, Any]:
    root = str(Path(__file__).resolve().parents[2])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # The process has no network, so telemetry and update checks could only fail.
    env = {**os.environ, **quiet, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    asked = json.dumps({"workload": vars(workload), "repeats": repeats})
    command = [*ISOLATED, sys.executable, "-m", "hetperm.bench.speed.flower", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"skipped": f"Flower was not done after {PATIENCE} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = done.stderr.strip().rpartition("\n")[2]  # what comes before names files of this machine
        return {"skipped": f"Flower ended with status {done.returncode}: {last[-300:]}"}
    return _row(**json.loads(lines[-1]))
