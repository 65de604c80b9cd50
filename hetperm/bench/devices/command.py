"""``hetperm bench resources``: does every tier of a capacity profile bear its share of a model? Imports torch late."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hetperm import profile
from hetperm.bench.devices import limits
from hetperm.bench.devices.limits import MB, MOST_SLACK
from hetperm.cli import main as cli
from hetperm.config import Config
from hetperm.profile import Profile

FAILED = 1  # status if a tier does not fit


@dataclass(frozen=True)
class Flags:
    """Measure what training takes on the devices of a capacity profile, and have the operating system hold them to it.

    Status 1 if a tier does not fit, or if a federated run under limits fails or gives other numbers.
    """

    capacity_profile: str = "mobile"
    """mobile, mobile-ram, iot, edge-cluster, cross-silo, uniform5, homogeneous, or a TOML file."""
    model: str = "resnet18-cifar"
    """logistic, mlp, cnn, resnet18-cifar, timm:NAME or torchvision:NAME."""
    input: str = "3x32x32"
    """Channels, height and width of the images that memory and time are measured with."""
    batch_size: int = 10
    """Samples of a local step."""
    local_steps: int = 5
    """Local steps of a visit."""
    widths_from: Literal["profile", "budget"] = "profile"
    """Width of a tier: as the profile has it, or the largest of its widths whose training fits the tier's budget."""
    enforce: limits.KINDS = "auto"
    """How memory is limited: a cgroup for each process, RLIMIT_DATA, the first of them that there is, or not at all."""
    device_mb: float | None = None
    """MB that a process may take in all, Python and torch included; None: budgets count what comes on top of that."""
    federated: bool = True
    """Also run hetero-PERM under the limits, for two epochs with one client a tier."""
    curves: bool = True
    """Also train PERM and its rivals against the simulated clock."""
    dataset: str = "digits"
    """Data of the federated runs: digits, mnist, fashion-mnist, emnist, cifar10, imagefolder:PATH or leaf:PATH."""
    data_dir: Path | None = None
    """Folder of data sets in torchvision's layout; None: data."""
    image_size: int | None = None
    """Side of the images that curves are trained on; None: as the data has them."""
    num_clients: int = 8
    """Clients of the curves."""
    epochs: int = 4
    """Epochs of the curves."""
    lr: float = 0.05
    """Step size of all methods in the federated runs."""
    seed: int = 0
    """Decides all randomness of the federated runs."""
    out: Path | None = None
    """Folder to write to, which must not exist; None: runs/resources-PROFILE-MODEL, or with -2, ... if it is taken."""
    quiet: bool = False
    """Show no progress."""


def main(args: Sequence[str], *, prog: str = "hetperm bench resources") -> None:
    """Nothing; the benchmark is run, printed and written. The process ends with status 1 if a tier does not fit."""
    flags = cli.parse(Flags, args, prog=prog, default=Flags())
    shape = shape_of(flags.input)
    _check(flags)
    tiers = profile.load(flags.capacity_profile)
    limit, enforcement = limits.choose(flags.enforce)
    from hetperm.runs import files

    name = f"resources-{tiers.name}-{flags.model.rpartition(':')[2].rpartition('/')[2]}"
    folder = files.place(flags.out, name)
    with _progress(flags.quiet) as say:
        result = run(flags, tiers, shape, limit, enforcement, say=say)
    _print(result)
    files.create(folder)
    write(folder, result)
    cli.say(f"written to {folder}: report.html, resources.csv, resources.json, pictures")
    if not passed(result):
        sys.exit(FAILED)


def shape_of(text: str) -> tuple[int, int, int]:
    """Channels, height and width.

    Example:
        >>> shape_of("1x28x28")
        (1, 28, 28)
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise cli.UsageError(f"input is {text!r}; it must be channels x height x width, such as 3x32x32")
    return tuple(map(int, parts))


def _check(flags: Flags) -> None:
    for name in ("batch_size", "local_steps", "num_clients", "epochs"):
        if getattr(flags, name) < 1:
            raise cli.UsageError(f"{name} is {getattr(flags, name)}; it must be a whole number of at least 1")
    if flags.device_mb is not None and not 0 < flags.device_mb < float("inf"):
        raise cli.UsageError(f"device_mb is {flags.device_mb:g}; it must be a number above 0")


def _progress(quiet: bool):
    """A context with a function that shows what is being done, on a terminal."""
    import contextlib

    from rich.console import Console

    console = Console(stderr=True)

    @contextlib.contextmanager
    def shown():
        if quiet or not console.is_terminal:
            yield lambda text: None
        else:
            with console.status("starting") as status:
                yield status.update

    return shown()


# The benchmark


def run(
    flags: Flags, tiers: Profile, shape: Sequence[int], limit: Any, enforcement: str, *, say: Any
) -> dict[str, Any]:
    """What resources.json holds."""
    from hetperm.bench.devices.device import Devices

    say("starting Python and torch")
    with Devices() as devices, Devices(caches=True) as timer:
        # What keeps that process from starting would keep torch from being imported here.
        limits.room(0, 0, baseline=devices.baseline, device_mb=flags.device_mb)
        from hetperm.runs.setting import one_thread

        with one_thread():
            return _run(flags, tiers, shape, limit, enforcement, devices, timer, say)


def _run(flags, tiers: Profile, shape, limit, enforcement: str, devices, timer, say) -> dict[str, Any]:
    from hetperm.bench.devices import benchmark
    from hetperm.bench.devices.clock import Speed

    net = benchmark.network(flags.model, shape, batch_size=flags.batch_size, profile=tiers, seed=flags.seed)
    if flags.widths_from == "budget" and net.scalable is not None:
        tiers = profile.solved(tiers, net.scalable, batch_size=flags.batch_size)
    benchmark.check(tiers, net, flags.model)
    why_not = "" if limit is None or benchmark.holds(devices, limit) else f"{limit.name} is not enforced on this system"
    measured, rehearsed = benchmark.calibrated(net, tiers.widths[::-1], devices, timer, limit, say=say)
    slack = 0 if limit is None else limits.slack([each.beside for each in measured.values()])
    if slack > MOST_SLACK:
        why_not = why_not or (
            f"torch takes up to {slack / MB:.1f} MB beside its tensors, and more than {MOST_SLACK / MB:g} MB of slack "
            "would prove nothing"
        )
    how = benchmark.Enforcement(devices, limit, slack, rehearsed, flags.device_mb, why_not)
    verdicts = {}
    for tier in tiers.tiers:
        say(f"tier {tier.name}: width {tier.width:g} under its limit, and the next larger one")
        verdicts[tier.name] = benchmark.judge(tier, tiers, net, how)
    speed = Speed.of(measured, batch_size=flags.batch_size)
    samples = flags.local_steps * flags.batch_size
    result = {
        "capacity_profile": tiers.name,
        "model": flags.model,
        "input": list(shape),
        "batch_size": flags.batch_size,
        "enforcement": f"{enforcement}; {why_not}" if why_not else enforcement,
        "limit": _limit(how),
        "baseline_mb": devices.baseline / MB,
        "slack_mb": slack / MB,
        "rehearsed": rehearsed,
        "seconds_per_mac": speed.per_mac,
        "tiers": list(benchmark.rows(tiers, measured, verdicts, speed, samples=samples)),
    }
    return result | _federated(flags, tiers, shape, how, speed, say)


def _limit(how: Any) -> str:
    """In a sentence: what the limit is made of."""
    before = ", kernels compiled for the shapes at hand included" * how.rehearsed
    total = "" if how.device_mb is None else f", and at most {how.device_mb:g} MB in all"
    return (
        f"limit = baseline ({how.devices.baseline / MB:.0f} MB: Python and torch{before}) + budget + slack "
        f"({how.slack / MB:g} MB: what training takes beside its tensors, calibrated){total}"
    )


def _federated(flags: Flags, tiers: Profile, shape: Sequence[int], how: Any, speed: Any, say: Any) -> dict[str, Any]:
    """The parts of the result that come from training."""
    from hetperm.bench.devices import federated

    found: dict[str, Any] = {}
    config = Config(
        dataset=flags.dataset,
        data_dir=flags.data_dir,
        model=flags.model,
        batch_size=flags.batch_size,
        personal_lr=flags.lr,
        global_lr=flags.lr,
        seed=flags.seed,
        device="cpu",
        engine="sequential",
        rivals={name: {"fine_tune_steps": federated.FINE_TUNING} for name in federated.METHODS if name.endswith("-ft")},
    )
    if flags.federated and not how.why_not and any(how.room(tier) is not None for tier in tiers.tiers):
        say("hetero-PERM under the limits")
        few = {"epochs": 2, "local_steps": 1, "warmup_rounds": 1, "samples_per_client": 4 * flags.batch_size}
        small = config.override(image_size=min(shape[1:]), **few)
        found["federated"] = asdict(federated.under_limits(small, tiers, how))
    if flags.curves:
        many = {"epochs": flags.epochs, "local_steps": flags.local_steps, "warmup_rounds": 10}
        size = {"num_clients": flags.num_clients, "image_size": flags.image_size}
        found["curves"] = federated.curves(config.override(**many, **size), tiers, speed, say=say)
        best = [max(row["accuracy"] for row in found["curves"] if row["method"] == m) for m in federated.METHODS]
        reached = min(best)  # by all of them
        methods = federated.to_reach(found["curves"], reached)
        found["to_reach"] = {"accuracy": reached, "methods": methods}
    return found


def passed(result: dict[str, Any]) -> bool:
    """Whether nothing was found not to fit, and limits changed no number."""
    ran = result.get("federated")
    fits = all(row["verdict"] != "does not fit" for row in result["tiers"])
    return fits and (ran is None or (ran["completed"] and ran["same"]))


# What is shown and written


def _print(result: dict[str, Any]) -> None:
    from hetperm.bench.devices import show
    from hetperm.report.grid import terminal

    cli.say(terminal(show.grid(result["tiers"], title=title(result))))
    for line in show.sentences(result):
        cli.say(line)


def title(result: dict[str, Any]) -> str:
    """What was measured, in a line."""
    shape = "x".join(map(str, result["input"]))
    return f"{result['model']} on {result['capacity_profile']}: batches of {result['batch_size']} images {shape}"


def write(folder: Path, result: dict[str, Any]) -> None:
    """Nothing; the files of the benchmark are in the folder."""
    from hetperm.bench.devices import show
    from hetperm.report import page, pictures
    from hetperm.runs import files

    curves = result.get("curves", [])
    files.write_csv(folder / "resources.csv", result["tiers"])
    files.write_json(folder / "resources.json", result | {"title": title(result), "lines": show.sentences(result)})
    drawn = show.picture(result["tiers"], curves, title=title(result))
    files.write(folder / "resources.png", pictures.png(drawn))
    if curves:
        files.write_csv(folder / "time_to_accuracy.csv", curves)
        drawn = show.curve_picture(curves, title=f"{result['model']} on {result['capacity_profile']}, simulated clock")
        files.write(folder / "time_to_accuracy.png", pictures.png(drawn))
    files.write(folder / page.NAME, page.render(folder))
