"""Fuzzing: every input works, or ends with status 2 (or a ValueError) and one sentence; none hangs.

A small sample that is the same every time; `make fuzz` tries many more, of flags, files, folders, checkpoints, data and
the library. What it finds goes to fuzz_corpus.toml, or to the test of the module that was wrong.
"""

import json
import shlex
import shutil
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from fuzzing import fuzzed, jsonish, judged, refused_or_fine, scalars, texts, tiny, tomlish
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from summaries import clients, several, single

from hetperm import Client, Config
from hetperm.config import ALGORITHMS, FIELDS, KEYS
from hetperm.profile import KEYS as TIER_KEYS
from hetperm.runs import files

CORPUS = tomllib.loads((Path(__file__).parent / "fuzz_corpus.toml").read_text())["case"]


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory):
    """Runs without --out write to the folder that they are started in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fuzz"))
        yield


@pytest.fixture
def folder():
    """An empty folder; one for every test, emptied by those who use it for several examples."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def train(folder: Path, *words: str) -> tuple[int, str]:
    shutil.rmtree(folder / "run", ignore_errors=True)
    return judged("train", *tiny(), "--out", str(folder / "run"), *words)


# Corpus


@pytest.mark.parametrize("case", CORPUS, ids=[next(iter(case.values()))[:40] for case in CORPUS])
def test_what_was_found_once_is_refused_for_good(case, folder):
    path = folder / "file.toml"
    path.write_text(case.get("config") or case.get("profile") or "")
    words = shlex.split(case.get("flags", ""))
    if "config" in case:
        words = ["--config", str(path)]
    elif "profile" in case:
        words = ["--capacity-profile", str(path)]
    # Flags win over a file, so what the file has must not be among them.
    base = tiny(*tomllib.loads(case.get("config", "")))
    status, said = judged("train", *base, "--out", str(folder / "run"), *words)
    assert status == 2 and case["says"] in said


# The command line

LONG = {"download", "data_dir", "dataset", "help"}  # what would ask the network, or for hours
flags = st.sampled_from([f"--{name.replace('_', '-')}" for name in KEYS if name not in LONG | {"model_options"}])
words = st.one_of(scalars.map(str), texts)


@pytest.mark.slow
@fuzzed(12)
@given(st.lists(st.tuples(flags, words), min_size=1, max_size=2))
def test_flags(given_flags):
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), *(f"{flag}={word}" for flag, word in given_flags))


@fuzzed(40)
@given(st.lists(texts, max_size=4))
def test_words_that_are_no_flags(given_words):
    if given_words and given_words[0] not in ("train", "reproduce", "bench"):
        judged(*given_words)
    judged("train", "--epochs", "0", *given_words)


# Files

settings_tables = st.dictionaries(
    st.one_of(st.sampled_from([name for name in KEYS if name not in LONG]), st.sampled_from(ALGORITHMS), texts),
    tomlish,
    min_size=1,
    max_size=2,
)


def dumped(table: dict) -> bytes:
    """A table as TOML; what has no such form is left out."""
    kept = {}
    for key, value in table.items():
        try:
            tomli_w.dumps({key: value}).encode()
        except (ValueError, TypeError, AttributeError):
            continue
        kept[key] = value
    return tomli_w.dumps(kept).encode()


@pytest.mark.slow
@fuzzed(12)
@given(st.one_of(settings_tables.map(dumped), st.binary(max_size=40)))
def test_configurations(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(content)
        # Flags for what would take long; all other keys of the file count.
        few = tiny("batch-size", "model", "capacity-profile", "baselines")
        judged("train", "--config", str(path), *few, "--out", f"{folder}/run")


tiers = st.dictionaries(
    texts, st.one_of(tomlish, st.dictionaries(st.sampled_from(TIER_KEYS), scalars, max_size=3)), max_size=2
)


@fuzzed(25)
@given(
    st.one_of(tiers.map(lambda table: dumped({"tiers": table})), settings_tables.map(dumped), st.binary(max_size=40))
)
def test_capacity_profiles(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "devices.toml"
        path.write_bytes(content)
        train(Path(folder), "--capacity-profile", str(path))


# Folders of runs


def places(value, path=()):
    """The ways to all values of a nested table."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))


def replaced(value, path, new):
    """The nested table with another value at a place."""
    if not path:
        return new
    return {**value, path[0]: replaced(value[path[0]], path[1:], new)}


RUN, SWEEP = single(), several()
damaged = st.one_of(
    *(
        st.tuples(st.sampled_from(list(places(table))), jsonish).map(lambda pair, table=table: replaced(table, *pair))
        for table in (RUN, SWEEP)
    )
)


@fuzzed(60)
@given(summary=damaged, cut=st.integers(0, 200), table=st.sampled_from(["clients.csv", "metrics.csv"]), cell=texts)
def test_run_folders(summary, cut, table, cell):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "summary.json").write_text(json.dumps(summary))
        files.write_csv(folder / "clients.csv", clients())
        content = (folder / "clients.csv").read_text()
        (folder / table).write_text(content[:cut] + cell.encode(errors="replace").decode() + content[cut + 1 :])
        judged("report", name)


@fuzzed(20)
@given(
    name=st.sampled_from(["summary.json", "resources.json", "config.toml", "seeds.csv", "a.png"]), content=st.binary()
)
def test_files_of_run_folders(name, content):
    with tempfile.TemporaryDirectory() as path:
        files.write_json(Path(path) / "summary.json", RUN)
        (Path(path) / name).write_bytes(content)
        judged("report", path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two epochs whose checkpoint says that it is not finished."""
    out = tmp_path_factory.mktemp("checkpoint") / "run"
    assert judged("train", *tiny(), "--out", str(out)) == (0, "")
    return out


@pytest.mark.slow
@fuzzed(6)
@given(data=st.data())
def test_checkpoints(finished, data):
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        shutil.copytree(finished, out)
        (out / "report.html").unlink()
        path = out / "checkpoint" / "perm.safetensors"
        content = path.read_bytes()
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "other"]))
        other = data.draw(st.binary(max_size=30))
        flipped = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        path.write_bytes({"flip": flipped, "cut": content[:at], "other": other}[kind])
        judged("train", *tiny(), "--out", str(out), "--resume")


# Data


@pytest.mark.slow
@fuzzed(15)
@given(x=jsonish, y=jsonish, whole=st.booleans())
def test_leaf_files(x, y, whole):
    with tempfile.TemporaryDirectory() as folder:
        good = {"x": [[0.5] * 4] * 8, "y": [0, 1] * 4}
        users = {"a": good, "b": {**good, "x": x} if whole else {**good, "y": y}}
        content = {"users": list(users), "num_samples": [8, 8], "user_data": users}
        Path(folder, "all.json").write_text(json.dumps(content))
        train(Path(folder), "--dataset", f"leaf:{folder}", "--partition", "iid")


arrays = st.sampled_from(
    [
        np.zeros((8, 3)),
        np.full((8, 3), np.nan),
        np.zeros((0, 3)),
        np.zeros(8),
        np.zeros((8, 2, 2, 2, 2)),
        np.arange(8) % 2,
        np.full(8, -1),
        np.full(8, 10**12),
        np.array(["a"] * 8),
        np.array(3),
        np.ones((8, 3), dtype=complex),
        np.full((8, 3), 1e308),
    ]
)


@pytest.mark.slow
@fuzzed(15)
@given(st.dictionaries(st.sampled_from(["x", "y", "user", "split", "classes"]), arrays, max_size=4))
def test_npz_files(content):
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "some.npz", **{"x": np.random.rand(8, 3), "y": np.arange(8) % 2} | content)
        train(Path(folder), "--dataset", f"npz:{folder}/some.npz", "--partition", "iid")


@pytest.mark.slow
@fuzzed(8)
@given(content=st.binary(max_size=60), size=st.sampled_from([(4, 4), (1, 1), (4, 5)]), name=texts)
def test_image_folders(content, size, name):
    with tempfile.TemporaryDirectory() as folder:
        for label in ("a", "b"):
            Path(folder, "data", label).mkdir(parents=True)
            for k in range(6):
                Image.new("RGB", (4, 4), (k, 0, 0)).save(Path(folder, "data", label, f"{k}.png"))
        Image.new("L", size).save(Path(folder, "data", "a", "z.png"))
        safe = "".join(letter for letter in name if letter.isalnum())[:20]
        Path(folder, "data", "b", f"{safe}.jpg").write_bytes(content)
        train(Path(folder), "--dataset", f"imagefolder:{folder}/data", "--partition", "iid")


# The library

objects = st.one_of(jsonish, st.just(torch.zeros(4, 3)), st.just(torch.zeros(4, dtype=torch.long)), st.just(object()))


@fuzzed(60)
@given(st.dictionaries(st.sampled_from(FIELDS), objects, min_size=1, max_size=2))
def test_configurations_in_python(fields):
    refused_or_fine(lambda: Config(**fields))


GOOD = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


@fuzzed(40)
@given(
    st.dictionaries(
        st.sampled_from(["train", "val", "test", "width", "key", "classes"]),
        st.one_of(objects, st.tuples(objects, objects)),
        max_size=2,
    )
)
def test_clients_in_python(fields):
    refused_or_fine(lambda: Client(**{"train": GOOD, **fields}))
