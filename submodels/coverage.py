"""Which models can be cut: one small model of every timm and torchvision family, and a gallery of other kinds.

``python -m submodels.coverage`` traces each, compares the sub-model of half the width with the masked model in float64
and prints one row. Results are kept in ``docs/coverage.jsonl`` as they come, so an interrupted run continues where it
stopped; ``docs/coverage.md`` is the table. The gallery's rows by Hugging Face and torch_geometric are there only where
those are installed; rows kept from elsewhere stay.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

GALLERY = "gallery:"  # before the names of models that are neither timm's nor torchvision's
WIDTH = 0.5
COMPRESSED = 0.6  # the share of the parameters at half the width that counts as compressed
# Words in model names, from small to large: candidates for the smallest member of a family.
_SIZE_WORDS = (
    "zepto atto femto pico nano xxs xx xxsmall 050 x0 005 002 400mf xs xtiny tiny ti s0 b0 a0 m0 t0 t8 lite mini small "
    "s t 18 14 100 11 121 base b"
).split()

# Families without a small member: two of their blocks, all alike, say as much as thirty.
_SHALLOWER = {"deepseek_vit_412m": {"depth": 2}, "gemma4_vit_167m_enc": {"depth": 2}}


@dataclass(frozen=True)
class Row:
    """What one model showed; ``error`` is empty unless something crashed."""

    family: str
    model: str = ""
    groups: int = 0
    share: float = 1.0
    forward: float = math.inf
    gradient: float = math.inf
    round_trip: bool = False
    trace_seconds: float = 0.0
    because: str = ""
    error: str = ""

    @property
    def exact(self) -> bool:
        """True if sub-model and masked model agree, forward and backward, and a round trip loses nothing."""
        return not self.error and self.round_trip and self.forward <= 1e-7 and self.gradient <= 1e-6

    @property
    def covered(self) -> bool:
        """True if the sub-model is exact and small."""
        return self.exact and self.share <= COMPRESSED


def families() -> Iterator[tuple[str, list[str]]]:
    """(family, its models), all of timm and torchvision's classifiers."""
    import timm
    import torchvision

    for family in timm.list_modules():
        names = timm.list_models(module=family)
        if names:
            yield f"timm:{family}", [f"timm:{name}" for name in names]
    by_module: dict[str, list[str]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        module = torchvision.models.get_model_builder(name).__module__
        by_module.setdefault(module.rpartition(".")[2], []).append(f"torchvision:{name}")
    for family, names in sorted(by_module.items()):
        yield f"torchvision:{family}", names
    from submodels.gallery import MODELS

    for name in MODELS:
        yield f"{GALLERY}{name}", [f"{GALLERY}{name}"]


def smallest(names: list[str]) -> str:
    """A small model of a family: the smallest by parameters among those whose names say so."""
    if len(names) == 1:
        return names[0]

    def rank(name: str) -> tuple[int, int]:
        words = name.split(":")[1].split("_")
        words += [word.rstrip("0123456789") for word in words]  # xxs24 is an xxs
        return min((_SIZE_WORDS.index(word) for word in words if word in _SIZE_WORDS), default=len(_SIZE_WORDS)), len(
            name
        )

    plain = [name for name in names if ":test_" not in name] or names
    return min(sorted(plain, key=rank)[:4], key=_num_params)


def _num_params(name: str) -> float:
    try:
        with torch.device("meta"):
            return sum(p.numel() for p in _build(name)[0].parameters())
    except Exception:  # some constructors compute on their weights and cannot be built without memory
        return math.inf


def _build(name: str) -> tuple[torch.nn.Module, int]:
    """(model, the image size it is made for)."""
    kind, name = name.split(":")
    if kind == "timm":
        import timm

        model = timm.create_model(name, num_classes=1000, **_SHALLOWER.get(name, {}))
        return model, model.default_cfg["input_size"][-1]
    import torchvision

    quirks = {"googlenet": {"aux_logits": False, "init_weights": False}}
    quirks["inception_v3"] = quirks["googlenet"]
    return torchvision.models.get_model(name, weights=None, **quirks.get(name, {})), 299 if "inception" in name else 224


def _example(name: str) -> tuple[torch.nn.Module, Any, dict[str, Any]]:
    """(model, example inputs, further options of `ScalableModel`)."""
    if name.startswith(GALLERY):
        from submodels.gallery import MODELS

        case = MODELS[name.removeprefix(GALLERY)]
        return case.build(), case.inputs(), dict(case.options)
    model, size = _build(name)
    return model, torch.randn(2, 3, size, size), {}


def examine(family: str, name: str) -> Row:
    """The row of one model."""
    from submodels.scalable import ScalableModel

    torch.manual_seed(0)
    model, inputs, options = _example(name)
    started = time.process_time()
    scalable = ScalableModel(model, inputs, **options)
    seconds = time.process_time() - started
    report = scalable.verify((WIDTH,))
    got = report.comparisons[0]
    row = Row(
        family,
        name,
        groups=len(scalable.sizes),
        share=round(got.share, 4),
        forward=got.forward,
        gradient=got.gradient,
        round_trip=got.round_trip,
        trace_seconds=round(seconds, 2),
    )
    reasons = []
    if not row.exact:
        reasons.append(f"inexact: {', '.join(report.explained_by)}")
    if row.share > 0.4 or scalable.axis_map.notes:
        reasons += _reasons(scalable)
    return Row(**{**asdict(row), "because": "; ".join(reasons)})


def _reasons(scalable) -> list[str]:
    """The three reasons that keep the most parameters whole."""
    axis_map, weight = scalable.axis_map, {}
    for (name, _), why in axis_map.frozen_by.items():
        if name in axis_map.parameters and why not in ("model input", "model output", "kernel", "spatial"):
            weight[why] = weight.get(why, 0) + math.prod(axis_map.shape(name, axis_map.sizes))
    return [f"whole: {why}" for why in sorted(weight, key=weight.get, reverse=True)[:3]]


def _worker(family: str, members: list[str], connection) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    name = members[0]
    try:
        name = smallest(members)
        row = examine(family, name)
    except Exception as error:
        first = str(error).splitlines()[0][:200] if str(error) else ""
        row = Row(family, name, error=f"{type(error).__name__}: {first}")
    connection.send(row)


def run(todo: list[tuple[str, list[str]]], store: Path, jobs: int, limit: float) -> None:
    """Examine families, each in a process of its own, and append their rows to the store."""
    # Forked, so that timm is imported once, by the parent; where there is no fork every process imports it.
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    waiting, running = list(todo), []
    while waiting or running:
        while waiting and len(running) < jobs:
            family, members = waiting.pop(0)
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(family, members, theirs))
            process.start()
            theirs.close()  # or the end of a dead process would stay open here, and its silence go unnoticed
            running.append((family, process, ours, time.monotonic()))
        for job in list(running):
            family, process, connection, started = job
            if not connection.poll(0.1) and time.monotonic() - started < limit:
                continue
            # A process that dies closes its end of the pipe, which polls as ready and then has nothing to receive.
            try:
                row = connection.recv() if connection.poll(0) else Row(family, error=f"no answer within {limit:.0f} s")
            except EOFError:
                row = Row(family, error="the process died")
            process.kill()
            process.join()
            running.remove(job)
            with store.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            print(line(row), flush=True)


HEADER = "| model | groups | share at 0.5 | forward error | gradient error | scatter exact | trace s | remarks |"


def line(row: Row) -> str:
    """One row of the table."""
    if row.error:
        return f"| {_name(row)} | | | | | | | **failed**: {row.error} |"
    return (
        f"| {row.model} | {row.groups} | {row.share:.3f} | {row.forward:.0e} | {row.gradient:.0e} | "
        f"{'yes' if row.round_trip else 'NO'} | {row.trace_seconds:.2f} | {row.because} |"
    )


def summary(rows: list[Row], what: str = "families") -> str:
    """The figures that matter, in one paragraph."""
    ran = sum(not row.error for row in rows)
    exact, covered = sum(row.exact for row in rows), sum(row.covered for row in rows)
    return (
        f"{len(rows)} {what}: {ran} run, {exact} exact ({exact / len(rows):.1%}), {covered} exact and compressed "
        f"to at most {COMPRESSED} of the parameters at half the width ({covered / len(rows):.1%})."
    )


def _table(rows: list[Row]) -> list[str]:
    return [HEADER, "|---|---|---|---|---|---|---|---|", *(line(row) for row in sorted(rows, key=_name)), ""]


def _name(row: Row) -> str:
    return row.model or row.family


def write_table(rows: list[Row], path: Path) -> None:
    """Write the table that is kept in the repository."""
    import timm
    import torchvision

    classifiers = [row for row in rows if not row.family.startswith(GALLERY)]
    others = [row for row in rows if row.family.startswith(GALLERY)]
    text = [
        "# Coverage: what `submodels` can cut",
        "",
        "Made by `python -m submodels.coverage`: one small model of every timm and torchvision family, width 0.5,",
        "random channels, float64, random weights, 1000 classes, the image size each is made for. *Forward error*:",
        "extracted against masked model, relative, operations that count channels neutralised (`submodels/verify.py`).",
        "*Exact*: at most 1e-7 forward and 1e-6 in every gradient.",
        f"torch {torch.__version__}, timm {timm.__version__}, torchvision {torchvision.__version__}.",
        "",
        f"**{summary(classifiers)}**",
        "",
        *_table(classifiers),
        "## Other kinds of models",
        "",
        "Small models of `submodels/gallery/`: recurrent ones, transformers (by hand, and Hugging Face's architectures",
        "with random weights), segmentation, video, graphs, audio, and idioms that are hard to cut. Small vocabularies",
        "and heads of few classes keep their rows whole, which shows in shares that are larger than at full size.",
        "",
        f"**{summary(others, 'models')}**",
        "",
        *_table(others),
    ]
    draft = path.with_suffix(".tmp")
    draft.write_text("\n".join(text))
    os.replace(draft, path)


def load(store: Path) -> dict[str, Row]:
    """The rows of the families that ran, by family; a line cut short by a crash is left out."""
    rows = {}
    for text in store.read_text().splitlines() if store.exists() else ():
        try:
            row = Row(**json.loads(text))
        except ValueError:
            continue
        if not row.error:  # what crashed is tried again
            rows[row.family] = row
    return rows


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m submodels.coverage", description=__doc__.split("\n\n")[0])
    parser.add_argument("models", nargs="*", help="examine just these, e.g. timm:resnet18, and keep nothing")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models examined at once")
    parser.add_argument("--limit", type=float, default=900, help="seconds allowed for one model")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of coverage.jsonl and coverage.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.models:
        store, todo = Path(os.devnull), [(name, [name]) for name in options.models]
        print(HEADER)
        run(todo, store, options.jobs, options.limit)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    store = options.out / "coverage.jsonl"
    if options.fresh:
        store.unlink(missing_ok=True)
    everything, done = dict(families()), load(store)
    print(HEADER)
    run([item for item in everything.items() if item[0] not in done], store, options.jobs, options.limit)
    kept = load(store)
    names = dict.fromkeys([*everything, *(family for family in kept if family.startswith(GALLERY))])
    rows = [kept.get(family, Row(family, error="crashed; run again to see why")) for family in names]
    write_table(rows, options.out / "coverage.md")
    for part, what in ((False, "families"), (True, "other models")):
        print(summary([row for row in rows if row.family.startswith(GALLERY) == part], what))
    return 1 if any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
