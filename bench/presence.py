"""What it costs that clients are away: each method with all of them there, with half of them, and by day and night.

python bench/presence.py --baselines heterofl-ft,fjord-ft,fedavg-ft --seeds 0
"""

import sys

from hetperm.cli.main import script
from hetperm.cli.train import parse_train
from hetperm.runs import experiment
from hetperm.runs.setting import from_config

CASES = {"1.0": {}, "0.5": {"participation": 0.5}, "day-night": {"trace": "day-night"}}


def main(args: list[str]) -> None:
    """Print a line for every seed, case and method."""
    config = parse_train(args, prog="bench/presence.py")
    print("seed presence   method       accuracy  worst  steps     MB  rounds  away  missed steps", flush=True)
    for seed in config.seeds or (config.seed,):
        # Only the end is scored: that changes no number of it.
        setting = from_config(config.override(seed=seed, seeds=(), eval_every=config.epochs))
        for case, changes in CASES.items():
            result = experiment._execute(setting.with_config(setting.config.override(**changes)), None, None)
            summary = result.summary
            for name, method in {summary["algorithm"]: summary, **summary["baselines"]}.items():
                cost, there = method["cost"], method.get("attendance")
                away = "-" if there is None else f"{there['absent'] / there['asked']:.2f}"
                missed = "-" if there is None else f"{there['missed_steps']:.0f}"
                megabytes = (cost["bytes_down"] + cost["bytes_up"]) / 2**20
                mean, worst = (method["accuracy"][key] for key in ("mean", "worst"))
                print(
                    f"{seed:4} {case:10} {name:12} {mean:8.3f}  {worst:.3f}  "
                    f"{cost['client_steps'] / summary['num_clients']:5.0f}  {megabytes:5.1f}  {cost['rounds']:6}  "
                    f"{away:>4}  {missed:>12}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(script(main))
