"""Config: every setting of a run, from defaults, a TOML file and flags. Imports no torch: help comes at once."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from hetperm.advice import did_you_mean
from hetperm.checks import (
    LARGEST_SEED,
    MOST,
    Names,
    check_fields,
    checked,
    hints_of,
    number,
    several,
    table,
    text,
    whole,
)
from hetperm.checks import path as checked_path
from hetperm.plugins import load_installed, plugin
from hetperm.texts import printable, shown

# The methods by name, listed here because `hetperm.methods` imports torch; a test keeps its METHODS the same.
ALGORITHMS = (
    *("perm", "perm-two-stage", "local", "fedavg", "fedavg-ft", "perfedavg", "pfedme", "apfl", "ifca"),
    *("ditto", "fedrep", "heterofl", "heterofl-ft", "heterofl-clustered", "heterofl-clustered-ft"),
    *("feddropout", "feddropout-ft", "fedrolex", "fedrolex-ft", "fjord", "fjord-ft"),
)
ADDED: set[str] = set()  # names of algorithms that plugins registered
Engine = Literal["auto", "sequential", "batched", "threads", "processes", "ray"]
WidthsFrom = Literal["profile", "budget"]
# The project's configs/: inside an installed package, beside the package in a checkout.
_PACKAGE = Path(__file__).resolve().parent
SHIPPED = next((path for path in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if path.is_dir()), _PACKAGE)


LONGEST_NAME = 200  # bytes of the name of a run; file systems take 255, and a number may follow

# Checks that only a configuration needs; `hetperm.checks` has the general ones


def algorithm_name(name: str, value: Any) -> str:
    """The name of a method."""
    if isinstance(value, str) and value not in known_algorithms():
        load_installed()  # only now: plugins import torch, and help should come at once
    if not isinstance(value, str) or value not in known_algorithms():
        known = known_algorithms()
        advice = did_you_mean(value, known, f"known are {', '.join(known)}; --plugins FILE.py adds others")
        raise ValueError(f"unknown algorithm {shown(value)}; {advice}")
    return value


def known_algorithms() -> tuple[str, ...]:
    """The names of all methods: those that come with hetperm, then those of plugins."""
    return (*ALGORITHMS, *sorted(ADDED))


def folder_name(name: str, value: Any) -> str:
    """The name of a folder, not a path."""
    if text(name, value) in (".", "..") or Path(value).name != value:
        raise ValueError(f"{name} is {shown(value)}; it must be the name of a folder in runs/ (out takes a path)")
    if len(value.encode(errors="replace")) > LONGEST_NAME:
        raise ValueError(f"{name} is {shown(value)}; it must be at most {LONGEST_NAME} characters, as a folder is")
    if not value.isprintable():
        raise ValueError(f"{name} is {shown(value)}; it must not hold control characters")
    return value


def folder_path(name: str, value: Any) -> Path:
    """The path of a folder to write to."""
    found = checked_path(name, value)
    if printable(str(found)) != str(found) or {"\n", "\t"} & set(str(found)):
        raise ValueError(f"{name} is {shown(str(found))}; it must not hold control characters")
    return found


def method_tables(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Method -> its table of options."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}; it must be a table for each method")
    return {algorithm_name(name, method): table(f"[{method}]", options) for method, options in value.items()}


MOMENTUM, EARLY_REPORT = 0.9, 0.15  # the defaults
# A step that is shorter than the last digit of a number changes nothing; one beyond 1e38 is infinite in float32.
RATE = number(lambda x: 1e-12 <= x <= 1e38, "a number from 1e-12 to 1e38")


@dataclass(frozen=True)
class Config:
    """Every setting of a run. A field is a key of the TOML file and, with dashes, a flag."""

    # The first of all: what it registers, the other fields may name.
    plugins: Annotated[Names, several(plugin)] = ()
    """Python files or modules that register your own algorithms, data sets, models or metrics; they are executed."""
    name: Annotated[str | None, folder_name] = None
    """Name of the run, which is written to runs/NAME; None: the data set and the algorithm."""
    out: Annotated[Path | None, folder_path] = None
    """Folder to write to, which must not exist; None: runs/NAME, or runs/NAME-2, ... if that is taken."""
    resume: bool = False
    """Continue the run in that folder (the latest of its name) where it stopped; start a new one if there is none."""

    capacity_profile: str = "mobile"
    """How sizes are spread over clients: mobile, mobile-ram, iot, edge-cluster, cross-silo, uniform5, homogeneous, or a
    TOML file."""
    widths_from: WidthsFrom = "profile"
    """Width of a tier: as the profile has it, or the largest of its widths whose training fits the tier's budget."""
    algorithm: Annotated[str, algorithm_name] = "perm"
    """perm, perm-two-stage, local, fedavg, perfedavg, pfedme, apfl, ifca, ditto, fedrep, heterofl, heterofl-clustered,
    feddropout, fedrolex, fjord or one of a plugin; fedavg-ft and the last five with -ft are fine-tuned at home."""
    baselines: Annotated[Names, several(algorithm_name)] = ("local", "heterofl-ft")
    """Algorithms to compare with at equal client steps (the algorithm itself is left out); an empty string for none."""

    dataset: str = "digits"
    """digits, digit-pairs, synthetic, mnist, fashion-mnist, emnist, cifar10, imagefolder:PATH, leaf:PATH (FEMNIST,
    Shakespeare, or a JSON file {role: text}), or npz:PATH (numpy arrays x, y and perhaps user, split: windows of
    sensors, images or vectors)."""
    data_dir: Path | None = None
    """Folder of data sets in torchvision's layout; None: data."""
    download: bool = False
    """Fetch the data set if it is missing."""
    partition: str = "label-shift:2"
    """How data differ: iid, classes:k, class-groups:k, dirichlet:a, label-shift:g, rotation:g, or natural: every user
    of npz:PATH or leaf:PATH is a client (the last quarter of an npz user's class, or of a text, is for testing)."""
    num_clients: Annotated[int, whole(1, 100_000)] = 20
    """Number of clients, N."""
    samples_per_client: Annotated[int | None, whole(1)] = None
    """Training samples of a client, n_i; None: an equal part of all there are."""
    validation_share: Annotated[float, number(lambda x: 0 <= x < 1, "a number from 0 to below 1")] = 0.15
    """Share of the data outside the test pool that is kept for validation."""
    max_test_samples: Annotated[int | None, whole(1)] = None
    """Largest number of test samples, and of validation samples, that a client is scored on; None: all."""
    image_size: Annotated[int | None, whole(1, 4096)] = None
    """Side that images are resized to; None: as they are."""
    model: str = "mlp"
    """logistic, mlp, cnn, har-cnn (windows), char-lstm (texts), resnet18-cifar, timm:NAME or torchvision:NAME."""
    model_options: Annotated[Mapping[str, Any], table] = field(default_factory=dict)
    """Options of the model's constructor, such as bias = false; in a file, or by --option model.bias=false."""
    metric: Annotated[str | None, text] = None
    """What models are scored by: accuracy, mae, perplexity, dice or one of a plugin; None: that of the data set, which
    is accuracy for all that come with hetperm."""
    label_mask: bool = False
    """Each client trains and predicts only the classes it has; the same for all methods."""

    steps: Annotated[int, whole(0)] = 800
    """Mini-batch gradients that each client computes in the whole run, with any method; computing a loss counts as a
    third of one. With 0, an epoch is a visit to every partner, and rivals get as many steps as PERM took."""
    epochs: Annotated[int, whole(1, 1_000_000)] = 12
    """Epochs of personalised training, R: equal parts of the steps that are left after the warm-up."""
    local_steps: Annotated[int, whole(1, 1_000_000)] = 5
    """SGD steps of a visit, K."""
    batch_size: Annotated[int, whole(1)] = 32
    """Samples of a local step."""
    personal_lr: Annotated[float | None, RATE] = None
    """Step size of the personal models when personalised training starts, eta; None: 0.6 of what suits the warm-up of
    this kind of model, whatever global_lr is. Lower both if training is unstable."""
    global_lr: Annotated[float | None, RATE] = None
    """Step size of the global model, gamma, also in the warm-up; None: 0.5 for linear layers and convolutions over
    time, 2 with recurrent layers, 0.1 for other models; a third of that with optimizer momentum, a fiftieth with
    adamw."""
    decay: Literal["linear", "none"] = "linear"
    """Step size of the personal models over the epochs: it falls to 0, or stays constant (the paper)."""
    rate_rule: Literal["partners", "plain"] = "partners"
    """Step size of a visit: smaller if partners differ more than mini-batches do, or not (plain, the paper)."""
    optimizer: Literal["sgd", "momentum", "adamw"] = "sgd"
    """Optimizer of the local steps, for all methods. Every visit starts it without memory of earlier ones. What it
    keeps counts towards memory budgets."""
    momentum: Annotated[float, number(lambda x: 0 <= x < 1, "a number from 0 to below 1")] = MOMENTUM
    """Share of the last step's direction that the next step keeps, with --optimizer momentum."""
    weight_decay: Annotated[float, number(lambda x: 0 <= x <= 100, "a number from 0 to 100")] = 0.0
    """Weight decay of local steps, as in torch's optimizers: part of the gradient, or decoupled with adamw."""
    accumulate: Annotated[int, whole(1, 1_000_000)] = 1
    """Number of pieces that a mini-batch is run in, one after the other: the same gradient in less memory (but batch
    norms see one piece at a time)."""
    augment: Literal["none", "flip-crop"] = "none"
    """Random changes of training samples: flip-crop mirrors and shifts images; fit also takes your own function."""
    autocast: bool = False
    """Compute local steps in bfloat16 where torch considers it safe; weights keep their precision."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Step sizes of all methods over the run: constant, or falling to 0 (then --decay is ignored). Only
    with --steps."""
    lr_warmup: Annotated[float, number(lambda x: 0 <= x < 1, "a number from 0 to below 1")] = 0.0
    """Share of the run during which step sizes rise to their full size."""
    step_cap: Annotated[float, number(lambda x: x == 0 or x >= 1e-6, "0 or a number of at least 1e-6")] = 0.2
    """Longest step of any method, as a share of the norm of the model; 0: no cap (the paper)."""
    global_batch: Annotated[int, whole(1)] = 256
    """Samples each client uses for a step of the global model."""
    warmup: Literal["ordered", "static"] = "ordered"
    """Part of the global model that a client trains in the warm-up: in each round a random width that it can hold
    (ordered), or all that it can hold (static, the paper)."""
    warmup_rounds: Annotated[int | None, whole(0, 1_000_000)] = None
    """Rounds of federated averaging before mixing weights are estimated; None: half of the steps (30 if steps is 0)."""
    start: Literal["nested", "plain"] = "nested"
    """Initial weights, for all methods: drawn for each width separately, narrow over wide (nested), or parts of one
    wide model (plain). A model given to fit keeps its own."""
    extraction: Literal["static", "random", "rolling"] = "static"
    """Part of the global model that a client trains: the first channels, a random draw, or a moving window."""
    nested: Literal["static", "random", "rolling", "skip"] = "static"
    """Part of a visiting model that a smaller host trains; skip: no such visits."""
    personal_width: Literal["own", "smallest"] = "own"
    """Size of the personal models: what each client can hold, or what the smallest can."""
    server_mix: Literal["none", "alpha"] = "none"
    """Mix the common parts of personal models by alpha after every epoch; not in the paper."""
    inplace_kd: Annotated[float, number(lambda x: 0 <= x <= 1000, "a number from 0 to 1000")] = 0.0
    """Weight of in-place distillation: visiting models teach a narrower part of themselves; not in the paper."""
    step_rule: Literal["max", "paper"] = "max"
    """Step of model i at host j: eta alpha_ij / max_j alpha_ij, or the paper's eta alpha_ij N."""
    visits: Literal["shuffle", "parallel"] = "shuffle"
    """How several hosts train a model: one after the other (shuffle, the paper), or each a copy at the same time, and
    their mean by alpha is kept (parallel)."""
    schedule: Literal["colour", "ring"] = "colour"
    """Visits: only those with weight, in as few rounds as possible (colour), or the paper's ring of N rounds."""
    discrepancy: Literal["probe", "masked"] = "probe"
    """Model at which gradients are compared: one that all clients can hold, or each client's own part (the paper)."""
    vc_weight: Annotated[
        float | Literal["raw"], number(lambda x: x >= 0, "a number of at least 0, or 'raw', the paper's")
    ] = 0.05
    """Weight of the complexity of hosts' models, if they differ, in units of noise; raw: as the paper writes it."""
    regularization: Annotated[
        float | Literal["noise", "level"],
        number(lambda x: x > 0, "'noise', 'level' or a number above 0, the paper's lambda"),
    ] = "noise"
    """How far mixing weights spread: by the noise of gradients (noise, level), or a number: the paper's lambda."""
    share: Annotated[
        float | Literal["look-ahead"], number(lambda x: 0 <= x <= MOST, f"'look-ahead' or a number from 0 to {MOST:g}")
    ] = "look-ahead"
    """How different clients may be and still learn from each other, in units of gradient noise; 0: everybody alone;
    look-ahead: chosen by the loss one step ahead, on validation data or held-out training data (0.35 where nobody can
    look: with --sketch or --discrepancy masked). Only with --regularization noise."""
    noise_batches: Annotated[int, whole(2, 1_000_000)] = 8
    """Micro-batches from which a client estimates the noise of its gradient."""
    alpha_steps: Annotated[int | None, whole(1, 1_000_000)] = None
    """Steps of projected descent on the mixing weights, T_alpha (not with level); None: an exact solution."""
    sketch: Annotated[int | None, whole(16, 2**20)] = None
    """Clients send a sketch of this many numbers instead of the gradient. Distances are then accurate to about 9% with
    256 and 35% with 16; None: the whole gradient."""
    tail_average: Annotated[float, number(lambda x: 0 <= x <= 1, "a number from 0 to 1")] = 0.5
    """Share of the epochs, counted from the end, over which models are averaged; 0: keep the last model."""
    first_alpha: Literal["estimated", "uniform"] = "estimated"
    """Mixing weights of the first epoch: estimated after the warm-up, or all equal (the paper's single loop)."""
    early_report: Annotated[float, number(lambda x: 0 <= x < 1, "a number from 0 to below 1")] = EARLY_REPORT
    """Compare gradients also at the global model after this part of the warm-up, where groups differ most; 0: only at
    the newest one. Only with --regularization noise or level, and --discrepancy probe."""
    denoise: bool = True
    """Free the distances between clients of what is chance in them, as all clients together show it. Only with
    --regularization noise or level, --discrepancy probe and up to 2,000 clients."""
    alpha_every: Annotated[int, whole(1)] = 6
    """Estimate mixing weights every so many epochs, in the single loop (perm); the paper has 1."""
    participation: Annotated[float, number(lambda x: 0 < x <= 1, "a number above 0 and up to 1")] = 1.0
    """Probability that a client takes part in a round, in every phase of every method."""
    trace: Annotated[str | None, text] = None
    """Which clients take part in which round: day-night, or a TOML file; None: chance, by --participation."""
    report_age: Annotated[int | None, whole(0)] = None
    """Number of epochs for which the last report of an absent client still counts; then it gets no mixing weights;
    None: alpha_every."""
    projection: Annotated[float | None, number(lambda x: x >= 1e-6, "a number of at least 1e-6")] = None
    """Radius of the ball around the initial model that personal models are projected onto, P_W; None: no ball."""
    final_lr: Annotated[float | None, RATE] = None
    """Step size of the paper's last full-gradient step, 1/L; needs tail_average 0; None: no such step."""

    eval_every: Annotated[int | None, whole(1)] = None
    """Evaluate every so many epochs, and after the last; None: every epoch, but not where that would cost more than a
    seventh of training (then fewer epochs, and after the last one the deployed models on all test data)."""
    eval_finished: Annotated[int, whole(0)] = 0
    """Also evaluate the fine-tuned models every so many epochs; 0: only at the end."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of models and data."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps; auto takes a GPU if there is one."""
    engine: Engine = "auto"
    """How visits are run: one after the other, many small models at once (batched), on several threads or processes, or
    on the machines of a Ray cluster (pip install 'hetperm[ray]'); auto: batched for chains of linear layers, else by
    the number of workers. On one machine sequential, threads, processes and ray give the same bits with any number of
    workers; batched differs from them by rounding."""
    workers: Annotated[int, whole(1, 256)] = 1
    """Threads, processes or Ray actors that run visits; the results do not depend on it."""
    address: Annotated[str | None, text] = None
    """Ray cluster of engine ray, auto or HOST:PORT; None: Ray is started on this machine, for this machine alone."""
    idle_models: Literal["memory", "disk"] = "memory"
    """Where PERM's personal models wait for their next visit: in memory, or in files of the run's folder if they do not
    fit into memory; the results do not depend on it."""
    seed: Annotated[int, whole(0, LARGEST_SEED)] = 0
    """Decides all randomness of a run."""
    seeds: Annotated[tuple[int, ...], several(whole(0, LARGEST_SEED))] = ()
    """Run once with each of these seeds, each in its own folder, and aggregate; replaces seed."""
    quiet: bool = False
    """Show no progress: no bar on a terminal, and no line a minute elsewhere."""
    log: Literal["none", "tensorboard"] = "none"
    """Where metrics also go while the run goes on: tensorboard writes scalars, accuracies of tiers and clients, and the
    map of mixing weights to tensorboard/ in the run's folder (pip install 'hetperm[tensorboard]')."""
    rivals: Annotated[Mapping[str, Mapping[str, Any]], method_tables] = field(default_factory=dict)
    """Options of single methods, such as [fedavg-ft] lr = 0.5; in a file, or by --option fedavg-ft.lr=0.5."""

    def __post_init__(self):
        check_fields(self)
        # No method is its own rival. Leaving it out here lets one list, such as the default, serve every algorithm.
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
                # `replace` would refuse it too, but without a suggestion.
                raise ValueError(f"unknown field {name!r}{_advice(name, FIELDS)}")
        return replace(self, **changes)

    def to_toml(self) -> str:
        """The resolved configuration as TOML: run again on the same machine, it gives the same numbers.

        It leaves out what changes no number: where the run is written, its workers, and whether it shows progress. With
        a user's own data and model (`fit`) it leaves out what would have described others.

        Example:
            >>> Config(epochs=3).to_toml().splitlines()[:2]
            ['capacity_profile = "mobile"', 'widths_from = "profile"']
        """
        left_out = {*NOT_KEPT, *(NOT_OF_FIT if self.dataset == OWN else ())}
        settings = {name: getattr(self, name) for name in KEYS if name not in left_out}
        # TOML has no None. Every field that can be None has it as default, so leaving it out says the same.
        plain = {name: _plain(value) for name, value in settings.items() if value is not None and value != {}}
        tables = {name: plain.pop(name) for name in list(plain) if isinstance(plain[name], dict)}
        for name in ("seeds", "plugins"):
            if not getattr(self, name):
                del plain[name]
        return tomli_w.dumps({**plain, **tables, **{name: dict(table) for name, table in self.rivals.items()}})


FIELDS = tuple(setting.name for setting in fields(Config))
KEYS = tuple(name for name in FIELDS if name != "rivals")  # of a file, in which each rival has its own table
NOT_KEPT = ("out", "resume", "quiet", "log", "workers", "address", "idle_models")  # they change no number
OWN = "own"  # the data set of `fit`, whose clients, model and widths come from no configuration
NOT_OF_FIT = (
    *("capacity_profile", "widths_from", "data_dir", "download", "partition", "samples_per_client", "validation_share"),
    *("image_size", "max_test_samples", "model_options", "start"),
)


def check_field(name: str, value: Any, label: str | None = None) -> Any:
    """The value of a field in its type; an error calls the field `label`.

    Example:
        >>> check_field("personal_lr", 1)
        1.0
    """
    return checked(hints_of(Config)[name], label or name, value)


# Files


def load(path: str | Path) -> Config:
    """The configuration in a TOML file, given by its path or by the name of a shipped one ("synthetic")."""
    path = find(path)
    return _from_table(read(path), path)


def from_text(text: str, noun: str) -> Config:
    """The configuration in the text of a TOML file; an error calls it ``noun``."""
    try:
        return _from_table(tomllib.loads(text), noun)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{noun}: is not TOML: {error}") from error


def _from_table(settings: dict[str, Any], path: str | Path) -> Config:
    if "plugins" in settings:  # first: the names of methods that they register may be keys
        check_field("plugins", settings["plugins"], f"{path}: plugins")
    # A table named after a method holds its options; every other key must be a field.
    if not settings.keys() <= {*KEYS, *known_algorithms()}:
        load_installed()
    known = known_algorithms()
    tables = {name: settings.pop(name) for name in known if isinstance(settings.get(name), dict)}
    for name, value in settings.items():
        if name in known:
            raise ValueError(f"{path}: {name} is {shown(value)}; it must be a table of options, [{name}]")
        if name not in KEYS:
            kind = "table" if isinstance(value, dict) else "key"
            advice = did_you_mean(name, (*KEYS, *known), "the keys are the flags of hetperm train, with _ for -")
            raise ValueError(f"{path}: unknown {kind} {shown(name)}; {advice}")
    try:
        return Config(**settings, rivals=tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path, *, noun: str = "a configuration") -> dict[str, Any]:
    """The content of a TOML file; a ValueError of one sentence names the file if it cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise ValueError(f"{path}: is no file; {noun} is a TOML file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors mark UTF-8 at the beginning
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text; {noun} is a TOML file") from error
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and tables that are too deep
        raise ValueError(f"{path}: is not TOML: {error}") from error


def find(path: str | Path) -> Path:
    """The file of a path, or of the name of a shipped configuration."""
    file = checked_path("the configuration", path)
    if file.is_file():
        return file
    shipped = SHIPPED / f"{path}.toml"
    if shipped.name == f"{path}.toml" and shipped.is_file():  # a path is not looked for beside the shipped ones
        return shipped
    names = sorted(file.stem for file in SHIPPED.glob("*.toml"))
    advice = did_you_mean(path, names, f"give a TOML file, or one of {', '.join(names)}")
    raise ValueError(f"there is no configuration {str(path)!r}; {advice}")


def _advice(name: str, choices: tuple[str, ...]) -> str:
    question = did_you_mean(name, choices)
    return f"; {question}" if question else ""


def _plain(value: Any) -> Any:
    """The value in a type that TOML has."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Path):
        return str(value)
    return dict(value) if isinstance(value, Mapping) else value


# Settings that exclude each other: a sentence about the conflict, or None


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


def _no_share(config: Config) -> str | None:
    if config.share != "look-ahead" and config.regularization != "noise":
        return (
            f"share {config.share:g} is for regularization 'noise' and regularization is {config.regularization!r}; "
            "leave one of them out"
        )
    return None


def _no_early_report(config: Config) -> str | None:
    if config.early_report in (0, EARLY_REPORT):
        return None
    if config.discrepancy == "masked":
        name, value, needed = "discrepancy", "'masked'", "'probe'"
    elif not isinstance(config.regularization, str):
        name, value, needed = "regularization", f"{config.regularization:g}", "'noise' or 'level'"
    else:
        return None
    return f"early_report {config.early_report:g} is for {name} {needed} and {name} is {value}; leave one of them out"


def _never_estimated(config: Config) -> str | None:
    if config.first_alpha == "uniform" and config.algorithm == "perm-two-stage":
        return "first_alpha 'uniform' would stay uniform, as perm-two-stage estimates alpha once; use algorithm 'perm'"
    return None


def _teaches_alone(config: Config) -> str | None:
    if config.visits == "parallel" and config.inplace_kd:
        return f"inplace_kd {config.inplace_kd:g} is for models that travel; leave it out, or set visits to 'shuffle'"
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


def _nobody_to_address(config: Config) -> str | None:
    if config.address is not None and config.engine != "ray":
        return (
            f"address {shown(config.address)} is for engine 'ray', and engine is {config.engine!r}; set engine to 'ray'"
        )
    return None


def _spent_before_visits(config: Config) -> str | None:
    mixes = {config.algorithm, *config.baselines} & {"perm", "perm-two-stage"}  # the methods with such a warm-up
    warmup = (config.warmup_rounds or 0) * config.local_steps
    if mixes and config.steps and warmup >= config.steps:
        return (
            f"warmup_rounds {config.warmup_rounds} of {config.local_steps} local_steps each take {warmup} steps, and "
            f"steps is {config.steps}; lower warmup_rounds, leave it out (half of the steps), or raise steps"
        )
    return None


def _epochs_without_steps(config: Config) -> str | None:
    # Those of the default cost little, so that few steps need no second flag.
    if config.steps and config.epochs > max(config.steps, Config.epochs):
        return (
            f"epochs {config.epochs} are equal parts of the steps and steps is {config.steps}, so that most would have "
            f"none; lower epochs to at most {config.steps}, or raise steps"
        )
    return None


def _nobody_comes(config: Config) -> str | None:
    expected = config.participation * config.num_clients * config.epochs
    if expected < 1:
        return (
            f"participation {config.participation:g} lets {expected:.2g} of {config.num_clients} clients take part in "
            f"{config.epochs} epochs together; raise it to at least {1 / config.num_clients:.2g}, a client an epoch"
        )
    return None


def _there_twice(config: Config) -> str | None:
    if config.trace is not None and config.participation < 1:
        return (
            f"trace {config.trace!r} says who is there and participation {config.participation:g} draws it; "
            "leave one of them out"
        )
    return None


def _no_pieces(config: Config) -> str | None:
    if config.accumulate > config.batch_size:
        return (
            f"accumulate {config.accumulate} divides mini-batches of batch_size {config.batch_size} into more pieces "
            "than they have samples; lower accumulate"
        )
    return None


def _nothing_kept(config: Config) -> str | None:
    if config.optimizer != "momentum" and config.momentum != MOMENTUM:
        return (
            f"momentum {config.momentum:g} is for optimizer 'momentum' and optimizer is {config.optimizer!r}; set "
            "optimizer to 'momentum', or leave momentum out"
        )
    return None


def _unknown_end(config: Config) -> str | None:
    changes = f"lr_schedule {config.lr_schedule!r}" if config.lr_schedule != "constant" else "lr_warmup"
    if not config.steps and (config.lr_schedule != "constant" or config.lr_warmup):
        return (
            f"{changes} follows the steps of a run, and with steps 0 nobody knows how many there will be; give "
            f"steps, or leave {changes.split()[0]} out"
        )
    return None


def _cast_from_double(config: Config) -> str | None:
    if config.autocast and config.dtype == "float64":
        return "autocast computes float32 in bfloat16 and dtype is 'float64'; leave one of them out"
    return None


CONTRADICTIONS = (
    _no_pieces,
    _nothing_kept,
    _unknown_end,
    _cast_from_double,
    _epochs_without_steps,
    _nobody_comes,
    _there_twice,
    _spent_before_visits,
    _two_returned_models,
    _nothing_to_descend,
    _no_share,
    _no_early_report,
    _never_estimated,
    _teaches_alone,
    _mixes_other_parts,
    _one_worker,
    _nobody_to_address,
)
