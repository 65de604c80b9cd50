"""Config: every setting of a run, from defaults, a TOML file and flags. Imports no torch: help comes at once."""

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from tyro.conf import Suppress
from tyro.constructors import PrimitiveConstructorSpec

# The methods by name; methods.ALGORITHMS has the same keys, and a test says so.
ALGORITHMS = (
    *("perm", "perm-two-stage", "local", "fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"),
    *("heterofl", "heterofl-ft", "feddropout", "feddropout-ft", "fedrolex", "fedrolex-ft", "fjord", "fjord-ft"),
)
SHIPPED = Path(__file__).resolve().parent / "configs"  # the project's configs/, also in the wheel

Names = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME,...",
        instance_from_str=lambda args: _split(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda names: [",".join(names)],
    ),
]


@dataclass(frozen=True)
class Config:
    """Every setting of a run. A field is a key of the TOML file and, with dashes, a flag."""

    name: str | None = None
    """Name of the run; it is written to runs/NAME; None: the data set and the algorithm."""
    out: Path | None = None
    """Folder to write to, which must not exist; None: runs/NAME, or runs/NAME-2, ... if that is taken."""
    resume: bool = False
    """Go on with the run in that folder (the latest of its name) where it stopped; starts afresh if there is none."""

    capacity_profile: str = "mobile"
    """How sizes are spread over clients: mobile, mobile-ram, iot, edge-cluster, cross-silo, uniform5, homogeneous, or a
    TOML file."""
    widths_from: Literal["profile", "budget"] = "profile"
    """Width of a tier: as the profile has it, or the largest of its widths whose training fits the tier's budget."""
    algorithm: str = "perm"
    """perm, perm-two-stage, local, fedavg, perfedavg, pfedme, apfl, ifca, heterofl, feddropout, fedrolex or fjord; with
    -ft fedavg and the last four are fine-tuned at home."""
    baselines: Names = ("local", "heterofl-ft")
    """Algorithms to compare with at equal client steps (the algorithm itself is left out); an empty string for none."""

    dataset: str = "digits"
    """digits, synthetic, mnist, fashion-mnist, emnist, cifar10, imagefolder:PATH or leaf:PATH."""
    data_dir: Path | None = None
    """Folder of data sets in torchvision's layout; None: data."""
    download: bool = False
    """Fetch a data set that is not there."""
    partition: str = "label-shift:2"
    """How data differ: iid, classes:k, class-groups:k, dirichlet:a, label-shift:g, rotation:g or writer."""
    num_clients: int = 20
    """Number of clients, N."""
    samples_per_client: int | None = None
    """Training samples of a client, n_i; None: all there are, divided."""
    validation_share: float = 0.15
    """Share of the data outside the test pool that is kept for validation."""
    image_size: int | None = None
    """Side to resize images to; None: as they are."""
    model: str = "mlp"
    """logistic, mlp, cnn, resnet18-cifar, timm:NAME or torchvision:NAME."""
    model_options: Suppress[Mapping[str, Any]] = field(default_factory=dict)
    """Options of the model's constructor, such as bias = false; only in a file."""
    label_mask: bool = False
    """Clients train and predict the classes they have and no others; for all methods alike."""

    epochs: int = 12
    """Epochs of personalised training, R."""
    local_steps: int = 5
    """SGD steps of a visit, K."""
    batch_size: int = 32
    """Samples of a local step."""
    personal_lr: float = 0.2
    """Step size of the personal models, eta."""
    global_lr: float = 0.2
    """Step size of the global model, gamma, also in the warm-up."""
    global_batch: int = 256
    """Samples each client uses for a step of the global model."""
    warmup_rounds: int = 30
    """Rounds of plain federated averaging before mixing weights are estimated."""
    extraction: Literal["static", "random", "rolling"] = "static"
    """Part of the global model that a client trains: the first channels, a fresh draw, or a window that moves on."""
    nested: Literal["static", "random", "rolling", "skip"] = "static"
    """Part of a visiting model that a host too small for it trains; skip: no such visits."""
    personal_width: Literal["own", "smallest"] = "own"
    """Size of the personal models: as much as each client can hold, or as much as all can."""
    server_mix: Literal["none", "alpha"] = "none"
    """Mix personal models by alpha at the end of an epoch, over what they have in common; ours, not in the paper."""
    inplace_kd: float = 0.0
    """Weight of in-place distillation: visiting models teach a narrower part of themselves; ours, not in the paper."""
    step_rule: Literal["max", "paper"] = "max"
    """Step of model i at host j: eta alpha_ij / max_j alpha_ij, or the paper's eta alpha_ij N."""
    schedule: Literal["colour", "ring"] = "colour"
    """Visits: those with weight in as few rounds as can be, or the paper's ring of N rounds."""
    discrepancy: Literal["probe", "masked"] = "probe"
    """Model at which clients compare gradients: one that all can hold, or each its own part (the paper)."""
    vc_weight: float | Literal["raw"] = 0.05
    """Weight of the complexity of hosts' models, if they differ, in units of noise; raw: as the paper writes it."""
    regularization: float | Literal["noise", "level"] = "noise"
    """How far mixing weights spread: from the noise of gradients (noise, level), or the paper's lambda, a number."""
    noise_batches: int = 8
    """Micro-batches from which a client estimates the noise of its gradient."""
    alpha_steps: int | None = None
    """Steps of projected descent on the mixing weights, T_alpha, not with level; None: solved exactly."""
    sketch: int | None = None
    """Numbers of a gradient sketch that clients send instead of the gradient, such as 256; None: the gradient."""
    tail_average: float = 0.5
    """Share of the last epochs whose models are averaged; 0 returns the last model."""
    participation: float = 1.0
    """Probability that a client is there in an epoch; visits to absent hosts are skipped."""
    projection: float | None = None
    """Radius of the ball about the start that personal models are projected onto, P_W; None: no ball."""
    final_lr: float | None = None
    """Step size of the paper's last full-gradient step, 1/L; needs tail_average 0; None: no such step."""
    steps: int | None = None
    """Client steps of methods other than PERM, each client; None: as many as PERM took in the same run."""

    eval_every: int = 1
    """Epochs from one evaluation to the next; the last epoch is always evaluated."""
    eval_finished: int = 0
    """Epochs from one evaluation of what a method would return then, fine-tuned, to the next; 0: only at the end."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of models and data."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes a GPU if there is one."""
    engine: Literal["auto", "sequential", "batched", "threads", "processes"] = "auto"
    """How visits are run: one after the other, many small models at once (the same numbers up to rounding), or on
    several threads or processes; auto: batched for chains of linear layers, else by the number of workers."""
    workers: int = 1
    """Threads or processes that run visits; decides no number."""
    idle_models: Literal["memory", "disk"] = "memory"
    """Where PERM's personal models wait for their next visit: in memory, or in mapped files on the disk of the run's
    folder, for more of them than fit; decides no number."""
    seed: int = 0
    """Decides all randomness of a run."""
    seeds: tuple[int, ...] = ()
    """Run once with each of these seeds instead, each in a folder of its own, and aggregate."""
    quiet: bool = False
    """No progress bar."""
    rivals: Suppress[Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Options of single methods, such as [fedavg-ft] lr = 0.5; in a file, as tables."""

    def __post_init__(self):
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        object.__setattr__(self, "baselines", tuple(name for name in self.baselines if name != self.algorithm))
        for contradiction in CONTRADICTIONS:
            sentence = contradiction(self)
            if sentence:
                raise ValueError(sentence)

    def override(self, **changes: Any) -> "Config":
        """The configuration with some fields changed.

        Example:
            >>> Config().override(epochs=3).epochs
            3
        """
        for name in changes:
            if name not in FIELDS:
                raise ValueError(f"unknown field {name!r}{_advice(name, FIELDS)}")
        return replace(self, **changes)

    def to_toml(self) -> str:
        """The resolved configuration as TOML: running it again gives the same numbers.

        Where a run is written to, how it is computed and how much it says are not part of it.

        Example:
            >>> Config(epochs=3).to_toml().splitlines()[:2]
            ['capacity_profile = "mobile"', 'widths_from = "profile"']
        """
        settings = {name: getattr(self, name) for name in FIELDS if name not in (*NOT_KEPT, "rivals")}
        plain = {name: _plain(value) for name, value in settings.items() if value is not None and value != {}}
        tables = {name: plain.pop(name) for name in list(plain) if isinstance(plain[name], dict)}
        if not self.seeds:
            del plain["seeds"]
        return tomli_w.dumps({**plain, **tables, **{name: dict(table) for name, table in self.rivals.items()}})


FIELDS = tuple(each.name for each in fields(Config))
NOT_KEPT = ("out", "resume", "quiet", "workers", "idle_models")  # what decides no number


def load(path: str | Path) -> Config:
    """The configuration of a TOML file, or of one that comes with hetperm, by its name ("synthetic")."""
    path = find(path)
    settings = read(path)
    tables = {name: settings.pop(name) for name in ALGORITHMS if isinstance(settings.get(name), dict)}
    for name, value in settings.items():
        known = FIELDS[:-1]  # rivals are written as tables of their own
        if name not in known:
            if name in ALGORITHMS:
                raise ValueError(f"{path}: {name} is {value!r}; it must be a table of options, [{name}]")
            kind = "table" if isinstance(value, dict) else "key"
            raise ValueError(f"{path}: unknown {kind} {name!r}{_advice(name, (*known, *ALGORITHMS))}")
    try:
        return Config(**settings, rivals=tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path) -> dict[str, Any]:
    """What a TOML file says; an error of one sentence, with its name, if it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text; a configuration is a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: is not TOML: {error}") from error


def find(path: str | Path) -> Path:
    """The file a path or a shipped configuration's name stands for."""
    if Path(path).is_file():
        return Path(path)
    shipped = SHIPPED / f"{path}.toml"
    if shipped.is_file():
        return shipped
    names = sorted(each.stem for each in SHIPPED.glob("*.toml"))
    advice = _advice(path, names) or f"; give a TOML file, or one of {', '.join(names)}"
    raise ValueError(f"there is no configuration {str(path)!r}{advice}")


def _advice(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _split(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else dict(value) if isinstance(value, Mapping) else value


# Checks: (name, value) -> the value in its type, or an error that says what was wrong with it and what is right

Check = Callable[[str, Any], Any]


def _whole(low: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        return value

    return check


def _number(good: Callable[[float], bool], range: str) -> Check:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and good(value)):
            raise ValueError(f"{name} is {value!r}; it must be a number {range}")
        return float(value)

    return check


def _maybe(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _one_of(*choices: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            advice = _advice(value, choices) or f"; write {' or '.join(map(repr, choices))}"
            raise ValueError(f"unknown {name} {value!r}{advice}")
        return value

    return check


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; it must be a name, in quotes")
    return value


def _file_name(name: str, value: Any) -> str:
    if _text(name, value) in (".", "..") or Path(value).name != value:
        raise ValueError(f"{name} is {value!r}; it must be the name of a folder in runs/ (out takes a path)")
    return value


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"{name} is {value!r}; it must be a path, in quotes")
    return Path(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def _several(check: Check) -> Check:
    def checked(name: str, values: Any) -> tuple:
        values = _split(values) if isinstance(values, str) else values
        if not isinstance(values, tuple | list):
            raise ValueError(f"{name} is {values!r}; it must be a list, empty for none")
        for value in values:
            check(name, value)
            if list(values).count(value) > 1:
                raise ValueError(f"{name} names {value!r} twice; once is enough")
        return tuple(values)

    return checked


def _algorithm(name: str, value: Any) -> str:
    if value not in ALGORITHMS:
        advice = _advice(value, ALGORITHMS) or f"; known are {', '.join(ALGORITHMS)}"
        raise ValueError(f"unknown algorithm {value!r}{advice}")
    return value


def _regularization(name: str, value: Any) -> float | str:
    if value in ("noise", "level"):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be 'noise', 'level' or a number above 0, the paper's lambda")
    return float(value)


def _vc_weight(name: str, value: Any) -> float | str:
    if value == "raw":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number of at least 0, or 'raw', the paper's")
    return float(value)


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be a table of options")
    for key, item in value.items():
        if isinstance(item, Mapping) or (isinstance(item, float) and not math.isfinite(item)):
            raise ValueError(f"{name}: {key} is {item!r}; it must be a finite number, a text, true, false or a list")
    return dict(value)


def _tables(name: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; it must be a table for each method")
    return {_algorithm(name, method): _table(f"[{method}]", table) for method, table in value.items()}


_positive = _number(lambda x: x > 0, "above 0")

CHECKS: dict[str, Check] = {
    "name": _maybe(_file_name),
    "out": _maybe(_path),
    "resume": _flag,
    "capacity_profile": _text,
    "widths_from": _one_of("profile", "budget"),
    "algorithm": _algorithm,
    "baselines": _several(_algorithm),
    "dataset": _text,
    "data_dir": _maybe(_path),
    "download": _flag,
    "partition": _text,
    "num_clients": _whole(1),
    "samples_per_client": _maybe(_whole(1)),
    "validation_share": _number(lambda x: 0 <= x < 1, "from 0 to below 1"),
    "image_size": _maybe(_whole(1)),
    "model": _text,
    "model_options": _table,
    "label_mask": _flag,
    "epochs": _whole(1),
    "local_steps": _whole(1),
    "batch_size": _whole(1),
    "personal_lr": _positive,
    "global_lr": _positive,
    "global_batch": _whole(1),
    "warmup_rounds": _whole(0),
    "extraction": _one_of("static", "random", "rolling"),
    "nested": _one_of("static", "random", "rolling", "skip"),
    "personal_width": _one_of("own", "smallest"),
    "server_mix": _one_of("none", "alpha"),
    "inplace_kd": _number(lambda x: x >= 0, "of at least 0"),
    "step_rule": _one_of("max", "paper"),
    "schedule": _one_of("colour", "ring"),
    "discrepancy": _one_of("probe", "masked"),
    "vc_weight": _vc_weight,
    "regularization": _regularization,
    "noise_batches": _whole(2),
    "alpha_steps": _maybe(_whole(1)),
    "sketch": _maybe(_whole(1)),
    "tail_average": _number(lambda x: 0 <= x <= 1, "from 0 to 1"),
    "participation": _number(lambda x: 0 < x <= 1, "above 0 and up to 1"),
    "projection": _maybe(_positive),
    "final_lr": _maybe(_positive),
    "steps": _maybe(_whole(1)),
    "eval_every": _whole(1),
    "eval_finished": _whole(0),
    "dtype": _one_of("float32", "float64"),
    "device": _text,
    "engine": _one_of("auto", "sequential", "batched", "threads", "processes"),
    "workers": _whole(1),
    "idle_models": _one_of("memory", "disk"),
    "seed": _whole(0),
    "seeds": _several(_whole(0)),
    "quiet": _flag,
    "rivals": _tables,
}


# Settings that exclude each other


def _two_returned_models(config: Config) -> str | None:
    if config.final_lr is not None and config.tail_average > 0:
        return (
            f"final_lr {config.final_lr:g} is a step from the last model and tail_average {config.tail_average:g} "
            "returns an average of models; set tail_average to 0 or leave final_lr out"
        )
    return None


def _nothing_to_descend(config: Config) -> str | None:
    if config.alpha_steps is not None and config.regularization == "level":
        return (
            f"alpha_steps {config.alpha_steps} descends on an objective and regularization 'level' reads the weights "
            "off without one; leave alpha_steps out, or set regularization to 'noise' or a number"
        )
    return None


def _mixes_other_parts(config: Config) -> str | None:
    if config.server_mix == "alpha" and config.nested in ("random", "rolling"):
        return (
            f"server_mix 'alpha' mixes models over shared channels, and nested {config.nested!r} trains others; "
            "set nested to 'static' or 'skip', or server_mix to 'none'"
        )
    return None


def _one_worker(config: Config) -> str | None:
    if config.engine == "sequential" and config.workers > 1:
        return f"engine 'sequential' has one worker and workers is {config.workers}; use engine 'threads' or 'auto'"
    return None


CONTRADICTIONS = (_two_returned_models, _nothing_to_descend, _mixes_other_parts, _one_worker)
