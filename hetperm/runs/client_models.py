"""Personal models on disk: each is dense, in two files, and can be loaded without the rest of the run."""

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn

from hetperm import __version__
from hetperm.checks import LARGEST, path
from hetperm.device.bench import logits_of, outputs_of
from hetperm.plugins import load_installed
from hetperm.runs import files
from hetperm.runs.building import named
from hetperm.runs.placement import device_of
from hetperm.shards import Inputs, mapped
from hetperm.texts import shown
from submodels import IndexSet, ScalableModel
from submodels.skeleton import named_tensors
from submodels.template import Template

FORMAT = 1
_NEEDED = ("architecture", "width", "input")
_SIZES = ("in_channels", "num_classes", "image_size")  # of an architecture with a name
_LARGEST = 10**7  # of these sizes; a damaged one would fill the memory before it is found not to fit
ANSWERS = 8  # numbers of an output that a manifest holds
_FILES = ("safetensors", "json")
_ELSEWHERE = ("checkpoint_path",)  # options that name weights elsewhere; the client's weights are in its own file


def save_client(folder: str | Path, i: int, module: nn.Module, manifest: Mapping[str, Any]) -> None:
    """Write a client's model to models/client_007.safetensors, and its manifest to models/client_007.json.

    The first file holds every parameter and buffer, also buffers that a state dict leaves out. Tied tensors are stored
    once, under the first of their names. Format, client, version and checksum are added to the manifest, and
    a few of its answers, by which another model with the same weights is known.

    Args:
        folder: the run folder.
        i: the client.
        module: the plain module of the client's width, on any device.
        manifest: what is needed to load the model. `architecture`: {"name", "in_channels", "num_classes", "image_size",
            "options"} as for `zoo.build`, or {"class": qualified name} for a user's own model. `width`. `input`: the
            shape of one sample, and `input_dtype` (`input_of`). `kept` and, if they are not those of the
            width, `counts`: see `channels`. Other entries are kept as JSON; numbers that are not finite become null.
    """
    i = operator.index(i)
    for key in _NEEDED:
        if key not in manifest:
            raise ValueError(f"the manifest of client {i} lacks {key!r}; it needs {', '.join(_NEEDED)}")
    raw = safetensors.save(_apart(dict(named_tensors(module))), {"format": "pt"})
    ours = {"format": FORMAT, "client": i, "hetperm": __version__, "sha256": hashlib.sha256(raw).hexdigest()}
    answers = _answers(module, manifest)
    ours |= {} if answers is None else {"answers": [float(f"{x:.6g}") for x in answers]}
    # Ours twice: first for the order of the lines, last so that no entry of the manifest overrides it.
    lines = [f"  {json.dumps(key)}: {_line(key, value)}" for key, value in {**ours, **manifest, **ours}.items()]
    folder = files.subfolder(Path(folder), "models")
    # The manifest is written last, because `clients` counts a model as complete if it has one.
    files.write(folder / f"{_stem(i)}.safetensors", raw)
    files.write(folder / f"{_stem(i)}.json", "{\n" + ",\n".join(lines) + "\n}\n")


def channels(index: IndexSet) -> dict[str, Any]:
    """`counts` and `kept` of a manifest: how many channels of every group, and which ones, as ranges [first, end).

    Example:
        >>> scalable = ScalableModel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(1, 4))
        >>> channels(scalable.index(0.5, "rolling", round=6))
        {'counts': [4], 'kept': {'c0': [[6, 8], [0, 2]]}}
    """
    named = zip(index.axis_map.groups, index.kept, strict=True)
    return {"counts": list(index.counts), "kept": {group.name: _runs(kept.tolist()) for group, kept in named}}


def input_of(inputs: Inputs) -> dict[str, Any]:
    """`input` and `input_dtype` of a manifest: the shape of one sample and its type, unless that is a float.

    Of several inputs, `input` is a list or a table of such pairs, each of its own.

    Example:
        >>> input_of(torch.zeros(5, 3)), input_of({"ids": torch.zeros(5, 8, dtype=torch.long)})
        ({'input': [3]}, {'input': {'ids': {'input': [8], 'input_dtype': 'int64'}}})
    """
    if isinstance(inputs, Tensor):
        kind = {} if inputs.is_floating_point() else {"input_dtype": str(inputs.dtype).removeprefix("torch.")}
        return {"input": list(inputs.shape[1:]), **kind}
    if isinstance(inputs, Mapping):
        return {"input": {name: input_of(x) for name, x in inputs.items() if isinstance(x, Tensor)}}
    return {"input": [input_of(x) for x in inputs if isinstance(x, Tensor)]}


def load_client(
    folder: str | Path,
    i: int,
    model: nn.Module | ScalableModel | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Client i's personal model as a plain module in evaluation mode. Only that client's two files are read.

    Args:
        folder: the run folder, its models/ folder, or a folder that the two files were copied to.
        i: the client.
        model: the model at full width; its weights do not matter and do not change. Only a user's own model must be
            given; others are built by name. To load many clients faster, pass one `ScalableModel` for all of them.
        device: where the tensors are put.
    """
    if not isinstance(model, nn.Module | ScalableModel | None):
        raise TypeError(f"{shown(model)} is not a model; give an nn.Module at full width")
    device = device_of(device, hollow=True)
    file, manifest = _file(folder, i, "safetensors"), read_manifest(folder, i)
    raw = file.read_bytes()
    if hashlib.sha256(raw).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{file} is not the file that its manifest describes (sha256); copy both again from the run")
    try:
        stored = safetensors.load(raw)
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file ({error}); copy it again from the run") from error
    # Copied into memory that torch aligns: the last bit of a matrix product depends on alignment.
    tensors = {name: x.to(device, copy=True) for name, x in stored.items()}
    template = _template(_built(manifest) if model is None else model, manifest, given=model is not None)
    _check(template, tensors, manifest, given=model is not None)
    _check_numbers(template, stored, file)
    module = template.filled(tensors).eval()
    if model is not None:
        _check_answers(module, manifest)
    return module


def load_clients(folder: str | Path, numbers: Iterable[int]) -> Iterator[tuple[int, nn.Module]]:
    """Yield (i, client i's model) one after the other; models of one architecture are built and traced once."""
    built: dict[str, ScalableModel] = {}
    for i in numbers:
        manifest = read_manifest(folder, i)
        key = json.dumps([manifest["architecture"], manifest["input"], manifest.get("input_dtype")])
        if key not in built and "name" in manifest["architecture"] and manifest["width"] < 1:
            whole = _built(manifest)
            built[key] = ScalableModel(whole, _example(manifest, whole))
        yield i, load_client(folder, i, built.get(key))


def read_manifest(folder: str | Path, i: int) -> dict[str, Any]:
    """The manifest of client i's model: architecture, width, channels, mixing weights, accuracy and more."""
    path = _file(folder, i, "json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format"]
        missing = [key for key in ("client", "hetperm", "sha256", *_NEEDED) if key not in manifest]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no manifest of a client's model, or a damaged one; copy it again") from error
    if version != FORMAT or isinstance(version, bool):
        wrote = manifest.get("hetperm", "another version")
        raise ValueError(f"{path} has format {version!r} and this hetperm reads {FORMAT}; load it with hetperm {wrote}")
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; copy it again from the run")
    if manifest["client"] != i:
        raise ValueError(f"{path} is of client {manifest['client']!r} and not of {i}; copy both files of that client")
    return _usable(manifest, path)


def clients(folder: str | Path) -> list[int]:
    """The clients whose models are in a run folder or in its models/ folder."""
    names = [path.name for parent in _candidates(folder) if parent.is_dir() for path in parent.iterdir()]
    return sorted({int(match[1]) for name in names if (match := re.fullmatch(r"client_(\d{3,})\.json", name))})


def remove(folder: Path, i: int) -> None:
    """Remove a client's model from a run folder, as far as it is there."""
    for ending in _FILES:
        with suppress(OSError):  # what made the folder unwritable is said already
            (folder / "models" / f"{_stem(i)}.{ending}").unlink(missing_ok=True)


# Files


def _stem(i: int) -> str:
    return f"client_{i:03d}"


def _candidates(folder: str | Path) -> tuple[Path, Path]:
    """Where a client's files may be: in models/ of a run folder, or in the folder itself."""
    folder = path("the folder", folder)
    return folder / "models", folder


def _file(folder: str | Path, i: int, kind: str) -> Path:
    """One of the two files of client i; an error if either is missing."""
    if isinstance(i, bool) or not isinstance(i, Integral) or abs(i) > LARGEST:
        raise TypeError(f"the client is {shown(i)}; it must be a whole number, its position in the run")
    for parent in _candidates(folder):
        paths = {ending: parent / f"{_stem(i)}.{ending}" for ending in _FILES}
        missing = [ending for ending, path in paths.items() if not path.is_file()]
        if not missing:
            return paths[kind]
        if len(missing) == 1:
            (lost,) = missing
            raise FileNotFoundError(f"{parent} has no {_stem(i)}.{lost}; a model is two files, .json and .safetensors")
    numbers = clients(folder)
    if not numbers:
        raise FileNotFoundError(f"there are no clients' models in {folder}; give the folder of a run, or its models/")
    has = f"clients {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"client {numbers[0]}"
    raise ValueError(f"there is no client {i} in {folder}; it holds {len(numbers)} of them: {has}")


def _line(key: str, value: Any) -> str:
    try:
        return json.dumps(None if files.is_blank(value) else value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{key} of a manifest must be finite numbers, texts, lists or tables ({error})") from None


def _runs(numbers: list[int]) -> list[list[int]]:
    """The numbers as ranges [first, end) of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


# From a manifest to a module


def _usable(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the manifest; raise an error that names the first entry from which no module can be built."""
    architecture, width = manifest["architecture"], manifest["width"]
    dtype, counts = manifest.get("input_dtype", "float32"), manifest.get("counts")
    right = {
        "hetperm": isinstance(manifest["hetperm"], str),
        "architecture": isinstance(architecture, dict) and _is_architecture(architecture),
        "width": isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= 1,
        "input": _is_input({"input": manifest["input"]}),
        "input_dtype": _is_dtype(dtype),
        "counts": counts is None or _are_sizes(counts),
        "dataset": isinstance(manifest.get("dataset", ""), str),
    }
    for key, fine in right.items():
        if not fine:
            raise ValueError(f"{path}: {key} is {manifest.get(key)!r}, which no run writes; copy it again from the run")
    return manifest


def _is_architecture(table: Mapping[str, Any]) -> bool:
    if "name" in table and not (isinstance(table["name"], str) and all([key in table for key in _SIZES])):
        return False
    sides = table.get("image_size")
    sizes = [table.get("in_channels", 1), table.get("num_classes", 1)]
    sizes += sides if isinstance(sides, list) else [] if sides is None else [sides]
    return _are_sizes(sizes) and max(sizes) <= _LARGEST and isinstance(table.get("options", {}), dict)


def _is_input(table: Any) -> bool:
    """Whether a table describes inputs as `input_of` does."""
    if not isinstance(table, dict) or "input" not in table:
        return False
    value = table["input"]
    several = list(value.values()) if isinstance(value, dict) else value
    if isinstance(several, list) and several and all([isinstance(one, dict) for one in several]):
        return all([_is_input(one) for one in several])
    return _are_sizes(value) and _is_dtype(table.get("input_dtype", "float32"))


def _is_dtype(name: Any) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all([type(size) is int and size > 0 for size in value])


def _built(manifest: Mapping[str, Any]) -> nn.Module:
    """The full-width model that a manifest names, built without touching the global random state."""
    architecture, i = manifest["architecture"], manifest["client"]
    if "name" not in architecture:
        raise ValueError(
            f"the model of client {i} is a {architecture.get('class')}, which has no name in the zoo; "
            f"give one at full width: load_client(folder, {i}, model=...)"
        )
    sizes = {key: architecture[key] for key in _SIZES}
    options = {key: value for key, value in architecture.get("options", {}).items() if key not in _ELSEWHERE}
    load_installed()
    with torch.random.fork_rng(devices=[]):  # the weights drawn here are replaced by those of the file
        return named(architecture["name"], sizes, options)


def _template(model: nn.Module | ScalableModel, manifest: Mapping[str, Any], *, given: bool) -> Template:
    """An empty module of the client's width."""
    if manifest["width"] == 1:  # no tracing, so that a model that cannot be cut can still be loaded
        return Template(model.model if isinstance(model, ScalableModel) else model)
    if not isinstance(model, ScalableModel):
        try:
            example = _example(manifest, model)
            model = ScalableModel(model, example, outputs=None if isinstance(example, Tensor) else logits_of)
        except ValueError as error:
            raise _misfit(str(error), manifest, given=given) from error
    counts = manifest.get("counts") or model.axis_map.counts(manifest["width"])
    if len(counts) != len(model.sizes) or not all([0 < kept <= size for kept, size in zip(counts, model.sizes)]):
        what = f"it has channel groups of {list(model.sizes)}, of which the client keeps {list(counts)}"
        raise _misfit(what, manifest, given=given)
    return model.template_of(counts)


def _example(manifest: Mapping[str, Any], model: nn.Module) -> Inputs:
    """A batch of one sample, in the precision of the model."""
    weight = next(model.parameters(), torch.empty(0))

    def made(table: Mapping[str, Any]) -> Inputs:
        several = table["input"]
        if isinstance(several, dict):
            return {name: made(one) for name, one in several.items()}
        if several and isinstance(several[0], dict):
            return tuple(made(one) for one in several)
        dtype = getattr(torch, table.get("input_dtype", "float32"))
        return torch.zeros(1, *several, dtype=weight.dtype if dtype.is_floating_point else dtype)

    return made(manifest)


def _check(template: Template, tensors: Mapping[str, Tensor], manifest: Mapping[str, Any], *, given: bool) -> None:
    """Raise an error if the template and the file do not hold tensors of the same names and shapes."""
    for name, p in template.module.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise _misfit(f"{name} has no size yet until the model is called on a batch", manifest, given=given)
    wanted = {name: tuple(x.shape) for name, x in named_tensors(template.module)}
    stored = {name: tuple(x.shape) for name, x in tensors.items()}
    for name in {**wanted, **stored}:
        if wanted.get(name) != stored.get(name):
            here, there = (shapes.get(name, "missing") for shapes in (wanted, stored))
            raise _misfit(f"{name} is {here} in it and {there} in the file", manifest, given=given)


def _answers(module: nn.Module, manifest: Mapping[str, Any]) -> list[float] | None:
    """What a model makes of inputs that are all zero, and all one: another model with its weights answers otherwise.

    None if it takes no such inputs, or answers by chance.
    """
    was_training = [part for part in module.modules() if part.training]
    found = []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            example = _example(manifest, module.eval())
            device = next((x.device for _, x in named_tensors(module)), torch.device("cpu"))
            # Drawn alike whenever this is called, and from several seeds, by which models that draw show.
            for value, seed in ((0, 0), (1, 0), (1, 1), (1, 2), (1, 3)):
                torch.manual_seed(seed)
                inputs = mapped(lambda x, value=value: torch.full_like(x, value, device=device), example)
                found.append(outputs_of(module, inputs).double().flatten().cpu()[:ANSWERS].tolist())
    except Exception:  # a user's code can raise anything: indices of one, masks, shapes that depend on the data
        return None
    finally:
        for part in was_training:
            part.training = True
    zeros, ones, *again = found
    draws = any([other != ones for other in again])
    return None if draws or not all(map(math.isfinite, zeros + ones)) else zeros + ones


def _check_answers(module: nn.Module, manifest: Mapping[str, Any]) -> None:
    """Raise an error if a model that was given computes something else than the one that the manifest is of."""
    then, now = manifest.get("answers"), _answers(module, manifest)
    if not isinstance(then, list) or now is None:  # earlier manifests do not say
        return
    scale = max([1e-3, *(abs(x) for x in then if isinstance(x, float))])
    near = len(then) == len(now) and all(
        [isinstance(a, float) and abs(a - b) <= 1e-2 * scale for a, b in zip(then, now)]
    )
    if not near:
        raise _misfit("with the client's weights it computes something else", manifest, given=True)


def _check_numbers(template: Template, stored: Mapping[str, Tensor], path: Path) -> None:
    """Raise an error for numbers that no trained model has. A buffer, such as a mask, may hold infinities."""
    trained = {name for name, _ in template.module.named_parameters()}
    for name, x in stored.items():
        if x.isnan().any() or (name in trained and not x.isfinite().all()):
            raise ValueError(f"{path}: {name} holds numbers that are not finite; train that client's model again")


def _misfit(what: str, manifest: Mapping[str, Any], *, given: bool) -> ValueError:
    who = "the model given" if given else f"{manifest['architecture']['name']} as it is built here"
    remedy = "give the one it was cut from" if given else f"load it with hetperm {manifest['hetperm']}"
    return ValueError(f"{who} does not fit client {manifest['client']}: {what}; {remedy}")


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors needs them: on the CPU, contiguous, no two in the same memory."""
    separate, taken = {}, set()
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        memory = x.untyped_storage().data_ptr()
        separate[name] = x.clone() if memory in taken else x  # safetensors refuses tensors that share memory
        taken.add(memory)
    return separate
