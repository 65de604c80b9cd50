"""The main job (`make train`) from start to end, by phase, each time in a process of its own."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetperm.bench.speed.children import answer_of

JOB = {"capacity_profile": "mobile"}  # what `make train` changes in the configuration of digits
PHASES = ("imports", "set-up", "training", "evaluation", "pictures", "others")


def main_job(*, runs: int, job: Mapping[str, Any] = JOB) -> dict[str, Any]:
    """Wall seconds of every phase of the job, of each run and the median, and the largest peak of memory."""
    single = [_once(job) for _ in range(runs)]
    return {
        "about": f"digits, {', '.join(f'{name} = {value}' for name, value in job.items())}",
        "phases": {name: statistics.median(one[name] for one in single) for name in (*PHASES, "total")},
        "single": single,
        "peak_mb": max(one["peak_mb"] for one in single),
    }


def _once(job: Mapping[str, Any]) -> dict[str, float]:
    # This clock is the same in all processes of a machine, so that the start of the interpreter counts, too.
    return answer_of(__name__, str(time.perf_counter()), json.dumps(job))


def timed(began: float, job: Mapping[str, Any]) -> dict[str, float]:
    """Run the job in this process, which was started at ``began``; the seconds of its phases."""
    from hetperm.config import load
    from hetperm.runs import experiment
    from hetperm.runs.memory import MB, peak_bytes
    from hetperm.runs.setting import from_config

    seconds = {"imports": time.perf_counter() - began}

    def settle(config: Any) -> Any:
        start = time.perf_counter()
        setting = from_config(config)
        seconds["set-up"] = time.perf_counter() - start
        return setting

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        experiment.run(load("digits").override(**job, quiet=True, out=folder), settle=settle)
        clock = json.loads((folder / "timing.json").read_text())
        total = time.perf_counter() - began
    seconds["evaluation"] = sum(clock["evaluation_seconds_by_method"].values())
    seconds["training"] = sum(clock["seconds_by_method"].values()) - seconds["evaluation"]
    seconds["pictures"] = clock["picture_seconds"]
    return {**seconds, "others": total - sum(seconds.values()), "total": total, "peak_mb": peak_bytes() / MB}


if __name__ == "__main__":
    print(json.dumps(timed(float(sys.argv[1]), json.loads(sys.argv[2]))))
