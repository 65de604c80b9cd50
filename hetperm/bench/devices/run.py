"""The device benchmark: measure every width, judge every tier under its limit, train under limits, write files."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetperm import profile
from hetperm.bench.devices import benchmark, federated, limits, show
from hetperm.bench.devices.benchmark import Enforcement, Measured, Say
from hetperm.bench.devices.device import Devices
from hetperm.bench.devices.limits import LARGEST_SLACK, Limit
from hetperm.bench.devices.options import Options
from hetperm.config import Config
from hetperm.profile import Profile
from hetperm.report import page, pictures
from hetperm.runs import files
from hetperm.runs.building import build
from hetperm.runs.clock import Speed
from hetperm.runs.memory import MB
from hetperm.runs.placement import one_thread
from hetperm.runs.setting import problem_of


@dataclass(frozen=True)
class Machinery:
    """The processes and the limit that simulate devices.

    Attributes:
        devices: processes without caches, for memory.
        timer: processes with the caches that torch has by default, for time.
        limit: how their memory is limited; None: not at all.
        about: a sentence about the limit.
    """

    devices: Devices
    timer: Devices
    limit: Limit | None
    about: str


def run(options: Options, tiers: Profile, machinery: Machinery, *, say: Say) -> dict[str, Any]:
    """Run the benchmark; the result is what resources.json holds.

    Args:
        say: called with a text about what is done next.
    """
    with one_thread():
        _check_data(options)
        net = benchmark.network(
            options.model, options.shape, batch_size=options.batch_size, profile=tiers, seed=options.seed
        )
        if options.widths_from == "budget" and net.scalable is not None:
            tiers = profile.solved(tiers, net.scalable, batch_size=options.batch_size)
        benchmark.check(tiers, net, options.model)
        # Found out first: under a limit that is not enforced, everything would seem to fit.
        unusable = _unusable(machinery)
        measured, rehearsed = benchmark.calibrated(
            net, tiers.widths[::-1], machinery.devices, machinery.timer, machinery.limit, say=say
        )
        enforcement = _enforcement(options, machinery, measured, rehearsed=rehearsed, unusable=unusable)
        verdicts = {}
        for tier in tiers.tiers:
            say(f"tier {tier.name}: width {tier.width:g} under its limit, and the next larger one")
            verdicts[tier.name] = benchmark.judge(tier, tiers, net, enforcement)
        # From the largest width: in small models, overhead hides what a multiply-add takes.
        largest = measured[max(measured)]
        speed = Speed.of_step(largest.seconds, macs=largest.cost.macs, batch_size=options.batch_size)
        samples = options.local_steps * options.batch_size
        result = {
            **_described(options, tiers, machinery, enforcement),
            "seconds_per_mac": speed.per_mac,
            "tiers": list(benchmark.rows(tiers, measured, verdicts, speed, samples=samples)),
        }
        return result | _trained(options, tiers, enforcement, speed, say=say)


def _check_data(options: Options) -> None:
    """Raise an error, before anything is measured, if the federated runs cannot have their data, or not this model."""
    if options.federated or options.curves:
        config = _config(options).override(num_clients=options.num_clients, image_size=options.image_size)
        problem = problem_of(config)
        build(config, {name: getattr(problem, name) for name in ("in_channels", "num_classes", "image_size")})


def _unusable(machinery: Machinery) -> str:
    """Why the limit cannot decide anything here, or an empty text."""
    limit = machinery.limit
    if limit is None or benchmark.holds(machinery.devices, limit):
        return ""
    return f"{limit.name} is not enforced on this system"


def _enforcement(
    options: Options,
    machinery: Machinery,
    measured: Mapping[float, Measured],
    *,
    rehearsed: bool,
    unusable: str,
) -> Enforcement:
    slack = 0 if machinery.limit is None else limits.slack([width.overhead_bytes for width in measured.values()])
    if slack > LARGEST_SLACK and not unusable:
        unusable = (
            f"torch takes up to {slack / MB:.1f} MB beside its tensors, and more than {LARGEST_SLACK / MB:g} MB of "
            "slack would prove nothing"
        )
    return Enforcement(machinery.devices, machinery.limit, slack, rehearsed, options.device_mb, unusable)


def _described(options: Options, tiers: Profile, machinery: Machinery, enforcement: Enforcement) -> dict[str, Any]:
    """What was measured, and under which limits."""
    why_not = enforcement.why_not
    return {
        "capacity_profile": tiers.name,
        "model": options.model,
        "input": list(options.shape),
        "batch_size": options.batch_size,
        "enforcement": f"{machinery.about}; {why_not}" if why_not else machinery.about,
        "limit": _limit(enforcement),
        "baseline_mb": enforcement.devices.baseline / MB,
        "slack_mb": enforcement.slack / MB,
        "rehearsed": enforcement.rehearsed,
    }


def _limit(enforcement: Enforcement) -> str:
    """A sentence about what the limit consists of."""
    kernels = ", kernels compiled for the shapes at hand included" if enforcement.rehearsed else ""
    total = "" if enforcement.device_mb is None else f", and at most {enforcement.device_mb:g} MB in all"
    return (
        f"limit = baseline ({enforcement.devices.baseline / MB:.0f} MB: Python and torch{kernels}) + budget + slack "
        f"({enforcement.slack / MB:g} MB: what training takes beside its tensors, calibrated){total}"
    )


def _trained(options: Options, tiers: Profile, enforcement: Enforcement, speed: Speed, *, say: Say) -> dict[str, Any]:
    """The parts of the result that come from training."""
    result: dict[str, Any] = {}
    config = _config(options)
    limited = any(enforcement.allowed_bytes(tier) is not None for tier in tiers.tiers)
    if options.federated and limited and not enforcement.why_not:
        say("hetero-PERM under the limits")
        # Short: every task is a process, and the question is only whether limits change a number.
        few = {"epochs": 2, "local_steps": 1, "warmup_rounds": 1, "samples_per_client": 4 * options.batch_size}
        small = config.override(image_size=min(options.shape[1:]), **few)
        result["federated"] = asdict(federated.under_limits(small, tiers, enforcement))
    if options.curves:
        length = {"epochs": options.epochs, "local_steps": options.local_steps, "warmup_rounds": 10}
        size = {"num_clients": options.num_clients, "image_size": options.image_size}
        rows = federated.curves(config.override(**length, **size), tiers, speed, say=say)
        # The highest accuracy that every method reaches, so that each has a time to compare.
        best = [max(row["accuracy"] for row in rows if row["method"] == method) for method in federated.COMPARED]
        reached = min(best)
        result["curves"] = rows
        result["to_reach"] = {"accuracy": reached, "methods": federated.to_reach(rows, reached)}
    return result


def _config(options: Options) -> Config:
    """The settings that the federated runs have in common."""
    fine_tuned = [method for method in federated.COMPARED if method.endswith("-ft")]
    return Config(
        dataset=options.dataset,
        data_dir=options.data_dir,
        model=options.model,
        batch_size=options.batch_size,
        steps=0,  # epochs decide how long it trains
        share=0.7,  # nothing to be looked for
        personal_lr=options.lr,
        global_lr=options.lr,
        seed=options.seed,
        device="cpu",
        engine="sequential",
        rivals={method: {"fine_tune_steps": federated.FINE_TUNING} for method in fine_tuned},
    )


def passed(result: Mapping[str, Any]) -> bool:
    """Whether every tier that could be judged fits, and limits changed no number."""
    federated_run = result.get("federated")
    fits = all(row["verdict"] != benchmark.TOO_LARGE for row in result["tiers"])
    return fits and (federated_run is None or (federated_run["completed"] and federated_run["same"]))


# Files


def title(result: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    shape = "x".join(map(str, result["input"]))
    return f"{result['model']} on {result['capacity_profile']}: batches of {result['batch_size']} images {shape}"


def write(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the files of the benchmark into a folder."""
    curves = result.get("curves", [])
    files.write_csv(folder / "resources.csv", result["tiers"])
    files.write_json(folder / "resources.json", {**result, "title": title(result), "lines": show.sentences(result)})
    drawn = show.picture(result["tiers"], curves, title=title(result))
    files.write(folder / "resources.png", pictures.png(drawn))
    if curves:
        files.write_csv(folder / "time_to_accuracy.csv", curves)
        drawn = show.curve_picture(curves, title=f"{result['model']} on {result['capacity_profile']}, simulated clock")
        files.write(folder / "time_to_accuracy.png", pictures.png(drawn))
    files.write(folder / page.NAME, page.render(folder))
