"""Whole runs of very many clients in groups of ten: time, memory and disk, with a kill -9 in the middle.

python bench/scale.py 1000 10000 --out FOLDER
python bench/scale.py 1000 10000 --alpha

Every size is a run of its own in a process of its own: an MLP with two hidden layers of 64, sketches of 256 numbers, 5
epochs of all visits with weight, 100 samples a client, one core. The process is killed after the first epoch, and
resumed. An epoch is visits, a step of the global model, alpha anew, evaluation and checkpoint. With --alone the run is
done once more without a kill, and both must end alike. With --alpha only what the server does with sketches is timed,
three times.
"""

import argparse
import filecmp
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = (
    "clients", "group mass", "partners", "epoch, s (least to most)", "CPU of it, s", "above imports, MB", "folder, MB",
    "report, MB", "resumed", "as if alone",
)  # fmt: skip


def child(N: int, folder: Path, epochs: int, share: float | str) -> None:
    """Run or resume N clients; print a line of JSON when it begins, after every epoch, and at the end."""
    import torch

    from hetperm import Config, fit, mixing
    from hetperm.runs.memory import MB, peak_bytes
    from hetperm.runs.reproduce.grouped import CLASSES, FEATURES, grouped
    from submodels import zoo

    imports, resumed, times = peak_bytes(), folder.exists(), []
    clients = grouped(N, test=20)
    length = {"steps": 0, "warmup_rounds": 20, "epochs": epochs, "alpha_every": 1, "tail_average": 0.0}
    rule = {"share": share, "sketch": 256, "baselines": ()}
    config = Config(**length, **rule, device="cpu", workers=1, quiet=True, out=folder, resume=resumed)
    torch.manual_seed(0)
    sizes = {"in_channels": FEATURES, "num_classes": CLASSES, "image_size": None}
    model = zoo.build("mlp", **sizes, hidden=[64, 64])

    def told(method: str, row: dict) -> None:
        times.append((time.perf_counter(), time.process_time()))
        print(json.dumps({"epoch": row["epoch"]}), flush=True)

    result = fit(model, clients, config, on_epoch=told)
    pairs, trained = list(itertools.pairwise(times)), result.main.seconds - result.main.seconds_before_resume
    folder_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    alpha = result.alpha
    print(
        json.dumps(
            {
                "mass": mixing.same_group_mass(alpha, [client.group for client in clients]),
                "partners": float(mixing.effective_partners(alpha).mean()),
                # Of a single epoch only the time without its checkpoint is known.
                "seconds": [after[0] - before[0] for before, after in pairs] or [trained],
                "cpu": [after[1] - before[1] for before, after in pairs] or [math.nan],
                "memory": (peak_bytes() - imports) / MB,
                "folder": folder_bytes / MB,
                "report": (folder / "report.html").stat().st_size / MB,
                "sparse": alpha.is_sparse,
            }
        ),
        flush=True,
    )


def run(N: int, folder: Path, options: list[str], epochs: int) -> dict:
    """The figures of one size: a run that is killed after its first epoch, and the rest of it."""
    command = command_of(N, folder, options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        for line in first.stdout:
            if json.loads(line).get("epoch") == 1:
                first.send_signal(signal.SIGKILL)
                break
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    told = [line["epoch"] for line in lines[:-1]]
    return lines[-1] | {"resumed": told[0] > 1 and told[-1] == epochs}


def command_of(N: int, folder: Path, options: list[str]) -> list[str]:
    """The command of a run in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    return [sys.executable, __file__, "--child", str(N), "--out", str(folder), *options]


def ends_alike(folder: Path, other: Path) -> bool:
    """Whether two folders hold the same files with the same bytes, and the same models; only clocks may differ."""
    from safetensors.torch import load_file

    names = [sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file()) for one in (folder, other)]
    if names[0] != names[1]:
        return False
    models = [name for name in names[0] if name.suffix == ".safetensors" and name.parent.name == "checkpoint"]
    rest = [str(name) for name in names[0] if name not in models and name.name != "timing.json"]
    for name in models:  # their headers say how long it took
        one, two = load_file(folder / name), load_file(other / name)
        if one.keys() != two.keys() or not all([one[key].equal(two[key]) for key in one]):
            return False
    return filecmp.cmpfiles(folder, other, rest, shallow=False)[0] == rest


def alpha(N: int, times: int = 3) -> list[str]:
    """CPU seconds of alpha from sketches, rates of visits, 100 rows of 11 candidates, and schedule; then partners."""
    import torch

    from hetperm import mixing
    from hetperm.mixing import discrepancy
    from hetperm.randomness import generator_for
    from hetperm.server import shuffle
    from hetperm.server.look_ahead import SHARES

    torch.set_num_threads(1)
    stream, group = generator_for(0, "bench"), torch.arange(N) // 10
    n = torch.randint(50, 150, (N,), generator=stream).double()
    q = 4000 / n
    sketches = torch.randn(N // 10 + 1, 256, generator=stream)[group]
    sketches += torch.randn(N, 256, generator=stream) * (q / 256).sqrt()[:, None]
    asked, rows = list(range(0, N, max(1, N // 100))), []
    for _ in range(times):
        clock = [time.process_time()]
        zeta = discrepancy.distances([sketches], N)
        weights = mixing.sparse_weights(zeta, q, n)
        clock.append(time.process_time())
        mixing.spread(weights, zeta, q)
        clock.append(time.process_time())
        for share in SHARES:
            mixing.weights_of(asked, zeta, q, n, share=share)
        clock.append(time.process_time())
        shuffle.schedule(weights, generator_for(0, "schedule"))
        clock.append(time.process_time())
        rows.append([after - before for before, after in itertools.pairwise(clock)])
    cells = [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in zip(*rows, strict=True)]
    return [str(N), *cells, f"{mixing.same_group_mass(weights, group):.4f}"]


def main() -> None:
    """Print a row for every size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[1000, 10000], help="numbers of clients")
    parser.add_argument("--alpha", action="store_true", help="only what the server does with sketches")
    parser.add_argument("--out", type=Path, help="the folder for the runs; those of before are removed")
    parser.add_argument("--epochs", type=int, default=5, help="at least 2: the first is before the kill")
    parser.add_argument("--share", type=float, help="how much difference is worth sharing; without it, the default")
    parser.add_argument("--alone", action="store_true", help="run once more without a kill, and compare")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    if args.child:
        child(args.child, args.out, args.epochs, "look-ahead" if args.share is None else args.share)
        return
    if args.alpha:
        print("| clients | alpha, s | rates, s | 100 rows x 11 shares, s | schedule, s | group mass |\n|" + "--:|" * 6)
        for N in args.sizes:
            print(f"| {' | '.join(alpha(N))} |", flush=True)
        return
    if args.out is None:
        parser.error("--out FOLDER is missing")
    print(f"| {' | '.join(COLUMNS)} |\n|{'--:|' * len(COLUMNS)}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for N in args.sizes:
        folder, options = args.out / str(N), ["--epochs", str(args.epochs)]
        options += [] if args.share is None else ["--share", str(args.share)]
        row = run(N, folder, options, args.epochs)
        alike = "-"
        if args.alone:
            alone = args.out / f"{N}-alone"
            subprocess.run(command_of(N, alone, options), stdout=subprocess.DEVNULL, check=True)
            alike = "yes" if ends_alike(folder, alone) else "NO"
        least, most = min(row["seconds"]), max(row["seconds"])
        cells = [
            str(N),
            f"{row['mass']:.4f}",
            f"{row['partners']:.1f}",
            f"{statistics.median(row['seconds']):.1f} ({least:.1f} to {most:.1f})",
            f"{statistics.median(row['cpu']):.1f}",
            *(f"{row[key]:.0f}" for key in ("memory", "folder")),
            f"{row['report']:.2f}",
            "yes" if row["resumed"] else "NO",
            alike,
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
