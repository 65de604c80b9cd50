"""Checkpoints: what is loaded is what was saved, to the bit; what is not whole is refused; an old file survives."""

import errno
import io
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from hetperm.engine.processes import SharedBuffer
from hetperm.runs import checkpoint
from hetperm.runs.checkpoint import Saved, Writer, changed, history_file, load, save
from hetperm.state import State, Work

ROOT = Path(__file__).resolve().parent.parent
REMEDY = "remove it to train this method from the start with --resume, or start another run with --out"


def model(seed=0, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    draw = {"fc.weight": torch.randn(3, width, generator=generator), "fc.bias": torch.randn(3, generator=generator)}
    return {name: x.to(dtype) for name, x in draw.items()}


def small_state():
    w = model()
    return State(
        r=3,
        w=w,
        v=(model(1), model(2, width=2)),
        alpha=torch.tensor([[0.25, 0.75], [0.1, 0.9]], dtype=torch.float64),
        work=Work(visits=5, bytes_up=2**40),
        memory={"centre": w, "choice": {"choice": torch.tensor([1, 0])}},
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "perm.safetensors"
    save(path, Saved(small_state(), ({"epoch": 1, "accuracy": 0.5},)))
    return path


# Equality to the bit, also of nan, of -0.0 and of the order of keys


def bits(value):
    """What tells values apart: bytes, types, and the order of keys."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return [(name, bits(item)) for name, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value), [bits(item) for item in value]
    if isinstance(value, State):
        return [(field.name, bits(getattr(value, field.name))) for field in fields(State)]
    return type(value), repr(value)


NUMBERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.int64: torch.int64}


@st.composite
def tensors(draw, dtypes=tuple(NUMBERS)):
    """A tensor of any bits: nan of every kind, infinities, -0.0; perhaps one that is not contiguous."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    bounds = torch.iinfo(NUMBERS[dtype])
    n = math.prod(shape)
    values = draw(st.lists(st.integers(bounds.min, bounds.max), min_size=n, max_size=n))
    x = torch.tensor(values, dtype=NUMBERS[dtype]).view(dtype).reshape(shape)
    return x.mT if x.dim() > 1 and draw(st.booleans()) else x


@st.composite
def states(draw):
    """A state whose models share tensors, or are each other, as it comes."""
    pool = draw(st.lists(tensors(), min_size=1, max_size=4))
    pool += [x[0] for x in pool if x.dim() and len(x)]  # the memory of another tensor
    names = st.text(max_size=4)
    fresh = st.dictionaries(names, st.sampled_from(pool) | tensors(), max_size=3)
    models = draw(st.lists(fresh, min_size=1, max_size=3))
    any_model = st.sampled_from(models)
    some = st.lists(any_model, max_size=4).map(tuple)
    counts = st.integers(0, 2**60)
    several = st.lists(counts, max_size=3)
    return State(
        r=draw(counts),
        w=draw(any_model),
        v=draw(some),
        alpha=draw(st.none() | tensors(dtypes=(torch.float64,))),
        tail=draw(st.none() | some),
        tail_count=draw(counts),
        work=Work(*(draw(counts) for _ in fields(Work)[:-2]), asked=tuple(draw(several)), absent=tuple(draw(several))),
        memory=draw(st.dictionaries(names, any_model, max_size=2)),
    )


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ROWS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
EXTRA = st.none() | st.dictionaries(st.text(max_size=3), VALUES | st.lists(VALUES, max_size=3) | ROWS, max_size=3)


@settings(max_examples=20)
@given(states(), st.lists(ROWS, max_size=3), st.booleans(), EXTRA)
def test_what_is_loaded_is_what_was_saved(tmp_path_factory, state, history, finished, extra):
    path = tmp_path_factory.mktemp("any") / "x.safetensors"
    save(path, Saved(state, tuple(history), finished, extra))
    back = load(path)
    assert bits(back.state) == bits(state)
    assert bits(back.history) == bits(tuple(history))
    assert (back.finished, bits(back.extra)) == (finished, bits(extra))


def one_number_each() -> dict[str, torch.Tensor]:
    """Tensors that count as contiguous, so that nothing copies them and their strides reach the view as bytes."""
    corner, column = torch.arange(4.0).reshape(2, 2)[1:, 1:], torch.arange(6, dtype=torch.float64)[4::3]
    assert (corner.stride(), column.stride()) == ((2, 1), (3,)) and column.is_contiguous()
    return {"corner": corner, "column": column, "scalar": torch.tensor([5, 7])[1]}


def test_tensors_of_one_number_are_saved_whatever_their_stride(tmp_path):
    w = one_number_each()
    save(tmp_path / "x", Saved(State(0, w, ({"row": torch.ones(3, 1)[1:2, 0]},))))
    state = load(tmp_path / "x").state
    assert bits(state.w) == bits(w)
    assert bits(state.v) == bits(({"row": torch.ones(1)},))


def test_tensors_of_one_number_pass_between_processes_whatever_their_stride():
    buffer, w = SharedBuffer(256), one_number_each()
    assert bits(buffer.read(buffer.write(w))) == bits(w)


def test_a_history_keeps_what_json_has_no_word_for(tmp_path):
    row = {
        "z": math.nan,
        "a": math.inf,
        "b": -math.inf,
        "c": -0.0,
        "d": 0.1 + 0.2,
        "e": None,
        "f": True,
        "g": 1,
        "h": "±",
    }
    save(tmp_path / "x", Saved(small_state(), (row,), finished=True))
    (back,) = load(tmp_path / "x").history
    assert bits(back) == bits(row)


def test_models_that_are_one_come_back_as_one_and_take_the_room_of_one(tmp_path):
    w = model(width=1000)
    save(tmp_path / "one", Saved(State(0, w, ())))
    save(tmp_path / "many", Saved(State(0, w, (w,) * 50, tail=(w,) * 50, memory={"centre": w})))
    assert (tmp_path / "many").stat().st_size < (tmp_path / "one").stat().st_size + 2000
    state = load(tmp_path / "many").state
    assert all(each is state.w for each in (*state.v, *state.tail, state.memory["centre"]))


def test_tensors_in_several_models_are_written_once(tmp_path):
    w = model(width=1000)
    save(tmp_path / "x", Saved(State(0, w, ({name: x.detach() for name, x in w.items()},))))
    state = load(tmp_path / "x").state
    assert state.v[0] is not state.w
    assert state.v[0]["fc.weight"] is state.w["fc.weight"]


def test_equal_contents_give_equal_bytes(tmp_path):
    for name in "ab":
        save(tmp_path / name, Saved(small_state(), ({"x": 1},), extra={"y": [1, 2]}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_models_that_require_gradients_come_back_as_plain_numbers(tmp_path):
    w = {"weight": torch.nn.Parameter(torch.ones(2))}
    save(tmp_path / "x", Saved(State(0, w, (w,))))
    back = load(tmp_path / "x").state.w["weight"]
    assert not back.requires_grad
    assert torch.equal(back, torch.ones(2))


def test_a_loaded_state_does_not_depend_on_its_file(saved):
    state = load(saved).state
    os.truncate(saved, 10)
    assert bits(state) == bits(small_state())
    state.w["fc.bias"].zero_()  # its own memory


def test_tensors_are_loaded_to_the_device_that_was_asked_for(saved):
    state = load(saved, device="meta").state
    assert state.w["fc.weight"].device.type == "meta"
    assert (state.alpha.device.type, state.alpha.dtype) == ("meta", torch.float64)


def test_another_tool_can_read_the_tensors(saved):
    with safe_open(saved, framework="np") as file:
        names = list(file.keys())
        assert file.get_tensor("0 w/fc.weight").shape == (3, 4)
    assert "2 v/0/fc.weight" in names


def test_the_format_names_the_fields_of_a_state():
    """A field that is taken away or changes its meaning makes another format: raise checkpoint.FORMAT."""
    names = ["r", "w", "v", "alpha", "tail", "tail_count", "work", "memory"]
    work = ["visits", "rounds", "client_steps", "bytes_down", "bytes_up", "skipped", "missed", "asked", "absent"]
    assert checkpoint.FORMAT == 3
    assert set(names) <= {field.name for field in fields(State)}
    assert set(work) <= {field.name for field in fields(Work)}


# Files that are not whole, or not ours


def refusal(path) -> str:
    with pytest.raises(ValueError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_number_that_was_changed_in_a_checkpoint_is_noticed(saved):
    raw = saved.read_bytes()
    saved.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert refusal(saved) == f"{saved} is damaged: its checksum is another; {REMEDY}"


def smallest(folder):
    """A checkpoint of few bytes, and these."""
    path = folder / "x"
    save(path, Saved(State(1, {"w": torch.tensor([0.5, -1])}, ()), ({"a": 1},)))
    return path, path.read_bytes()


@pytest.mark.slow
def test_every_byte_counts(tmp_path):
    path, whole = smallest(tmp_path)
    for place, byte in enumerate(whole):
        for other in {byte ^ 0x01, ord("\t")} - {byte}:  # JSON takes a tab for a space
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            sentence = refusal(path)
            assert sentence.startswith(f"{path} is ") and sentence.endswith(REMEDY), place


@pytest.mark.slow
def test_every_truncation_is_refused(tmp_path):
    path, whole = smallest(tmp_path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert refusal(path) == f"{path} is no checkpoint of hetperm, or a damaged one; {REMEDY}"


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"{}", bytes(100), b"\xff" * 100, b"\x02" + bytes(7) + b"{}", b"\x80\x04\x95pickle"],
    ids=["empty", "text", "json", "zeros", "ones", "no tensors", "pickle"],
)
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert refusal(path) == f"{path} is no checkpoint of hetperm, or a damaged one; {REMEDY}"


ENTRIES = ("", "[]", "1", "{}", '{"format": 1}', "[" * 99999)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, *({"hetperm checkpoint": text} for text in ENTRIES)])
def test_foreign_safetensors_are_refused(tmp_path, metadata):
    save_file({"x": torch.ones(2)}, tmp_path / "x", metadata=metadata)
    assert refusal(tmp_path / "x") == f"{tmp_path / 'x'} is no checkpoint of hetperm, or a damaged one; {REMEDY}"


def test_an_unknown_format_is_refused(saved, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 4)
    assert refusal(saved) == f"{saved} is a checkpoint of format 3 and this hetperm reads 4; {REMEDY}"


def test_a_checkpoint_that_is_not_there_is_one_sentence(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(FileNotFoundError) as caught:
        load(path)
    assert str(caught.value) == f"there is no checkpoint {path}; give the file of one"


def test_what_cannot_be_written_is_refused_before_anything_is(saved):
    whole = saved.read_bytes()
    with pytest.raises(TypeError, match=r"^checkpoints hold numbers, .* \(Object of type Tensor is not .*\)$"):
        save(saved, Saved(small_state(), ({"x": torch.ones(1)},)))
    assert saved.read_bytes() == whole


def test_more_tensors_than_a_header_holds_are_refused_before_anything_is_written(saved, monkeypatch):
    whole = saved.read_bytes()
    monkeypatch.setattr(checkpoint, "_LONGEST_HEADER", 100)
    with pytest.raises(ValueError, match=r"the names of 8 tensors do not fit in a checkpoint$"):
        save(saved, Saved(small_state()))
    assert saved.read_bytes() == whole


# Disks that fill up, processes that die


def _full(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _half_full(number, mode):
    """A file that takes a few bytes and no more."""
    file = io.FileIO(number, mode)
    write = file.write
    file.write = lambda content: write(content[:4]) and _full()
    return file


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("rows", [(), ({"epoch": 2},)], ids=["no row", "a row"])
def test_a_full_disk_leaves_the_old_checkpoint(saved, monkeypatch, call, rows):
    before = load(saved)
    writer, news = Writer(saved, before.history), Saved(State(9, model(9), ()), (*before.history, *rows), finished=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, *(("fdopen", _half_full) if call == "write" else (call, _full)))
        with pytest.raises(OSError) as caught:
            writer.save(news)
    full = history_file(saved) if rows and call != "replace" else saved
    assert str(caught.value) == f"cannot write {full} (No space left on device); what was written before is whole"
    assert bits(load(saved).state) == bits(before.state) and load(saved).history == before.history
    assert set(saved.parent.iterdir()) == {saved, history_file(saved)}
    writer.save(news)  # when there is room again
    assert load(saved).history == news.history


# The history


def test_a_row_of_the_history_is_written_once(tmp_path):
    path, sizes = tmp_path / "x.safetensors", []
    writer, rows = Writer(path), tuple({"epoch": r, "accuracy": r / 7} for r in range(1, 200))
    for r in range(len(rows) + 1):
        writer.save(Saved(small_state(), rows[:r]))
        sizes.append(path.stat().st_size)
    assert max(sizes) - min(sizes) < 20  # the state alone, and numbers with more digits
    assert load(path).history == rows
    assert len(history_file(path).read_text().splitlines()) == len(rows)


def test_a_row_whose_checkpoint_was_never_written_does_not_count(saved):
    before = load(saved)
    with open(history_file(saved), "a") as file:
        file.write('{"epoch": 2, "accu')  # of a run that was killed here
    assert load(saved).history == before.history
    Writer(saved, before.history).save(Saved(small_state(), (*before.history, {"epoch": 2})))
    assert load(saved).history == (*before.history, {"epoch": 2})


@pytest.mark.parametrize("damage", ["missing", "short", "another"])
def test_a_history_that_is_not_the_one_that_was_written_is_refused(saved, damage):
    path = history_file(saved)
    raw = path.read_bytes()
    path.unlink() if damage == "missing" else path.write_bytes(
        raw[:-5] if damage == "short" else raw.replace(b"1", b"2")
    )
    what = "cannot be read: No such file or directory" if damage == "missing" else "is another"
    wrong = f"its history perm.jsonl {what}"
    assert refusal(saved) == f"{saved} is a checkpoint with wrong contents ({wrong}); {REMEDY}"


def test_a_folder_or_a_pipe_in_the_place_of_a_checkpoint_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match=f"^{tmp_path / name} is no file; {REMEDY}$"):
            load(tmp_path / name)


def test_a_folder_or_a_pipe_in_the_place_of_a_history_is_refused(saved):
    history_file(saved).unlink()
    history_file(saved).mkdir()
    wrong = "its history perm.jsonl is no file"
    assert refusal(saved) == f"{saved} is a checkpoint with wrong contents ({wrong}); {REMEDY}"


def test_a_history_that_is_cut_while_a_run_is_writing_is_noticed(saved):
    writer = Writer(saved, load(saved).history)
    history_file(saved).unlink()
    with pytest.raises(OSError, match=r"cannot write .*perm\.jsonl \(it has 0 bytes of \d+: it was removed or changed"):
        writer.save(Saved(small_state(), ({"epoch": 1, "accuracy": 0.5}, {"epoch": 2})))


# Contents that no run writes, with the right checksum


def forged(path, **changes):
    """Change fields of the state, or of the checkpoint, and give it the right checksum."""
    saved = load(path)
    own = {key: changes.pop(key) for key in ("finished", "extra") if key in changes}
    save(path, replace(saved, state=replace(saved.state, **changes), **own))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"r": -5}, "counts"), ({"r": "three"}, "counts"), ({"r": 1.5}, "counts"), ({"r": True}, "counts"),
        ({"tail_count": None}, "counts"), ({"tail_count": 0.5}, "counts"), ({"work": Work(visits=1.5)}, "counts"),
        ({"work": {"x": torch.ones(1)}}, ""), ({"w": 3}, "w"), ({"w": ()}, "w"),
        ({"v": None}, "v"), ({"v": ((),)}, "v"), ({"v": ({"a": 1},)}, "v"), ({"tail": "x"}, "tail"),
        ({"alpha": 0.5}, "alpha"), ({"memory": None}, "memory"), ({"memory": {"a": 1}}, "memory"),
        ({"finished": 1}, "finished"), ({"extra": {}}, None),
    ],
)  # fmt: skip
def test_contents_of_a_wrong_kind_are_refused_in_one_sentence(saved, changes, what):
    forged(saved, **changes)
    if what is None:
        load(saved)
    else:
        assert f"is a checkpoint with wrong contents ({what}" in refusal(saved)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from hetperm.runs.checkpoint import Saved, Writer, load, save
from hetperm.runs.files import tidy
from hetperm.state import State

path, random = Path(sys.argv[1]), random.Random(0)
torch.set_num_threads(1)  # threads do not survive a fork

def at(r):
    return State(r, {"w": torch.full((r % 7 + 1, 20_000), float(r))}, ())

def rows(r):
    return tuple({"r": k} for k in range(r + 1))

began = time.perf_counter()
for _ in range(5):
    save(path, Saved(at(0), rows(0)))
five = time.perf_counter() - began

reached, halves = [], 0
# Where a kill falls is chance, and a busy machine makes it rarer that one interrupts a save: then there are more kills.
while len(reached) < 40 or (min(len(set(reached)), halves) <= 5 and len(reached) < 400):
    begin = load(path).state.r
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        writer = Writer(path, load(path).history)
        os.write(tell, b"!")  # the clock begins with the first save, however long the start took
        for r in range(begin + 1, 10**9):
            writer.save(Saved(at(r), rows(r)))
    os.read(ready, 1)
    os.close(ready), os.close(tell)
    time.sleep(random.uniform(0, five))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saved = load(path)
    r = saved.state.r
    assert r >= begin and torch.equal(saved.state.w["w"], at(r).w["w"]) and saved.history == rows(r)
    reached.append(r)
    # A file without its last name, or a row whose checkpoint is not there yet.
    lines = path.with_suffix(".jsonl").read_bytes().count(b"\\n")
    halves += lines > r + 1 or any(name.name.startswith(".") for name in path.parent.iterdir())
    tidy(path.parent)
print(len(set(reached)), halves)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path, warm):
    done = warm.run(str(tmp_path / "x.safetensors"), code=f"import warnings\nwarnings.simplefilter('error')\n{KILLED}")
    assert done.returncode == 0, done.stderr
    advanced, interrupted = map(int, done.stdout.split())
    assert min(advanced, interrupted) > 5


# A configuration that changed

RUN = {"epochs": 12, "algorithm": "perm", "download": False, "ifca": {"clusters": 2, "lr": 0.1}}
BACK = "set it back to go on with that run, or start another with --out"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"epochs": 12.0}, None),
        ({"epochs": 20}, "epochs was 12 and is now 20"),
        ({"algorithm": "local", "epochs": 13}, "epochs was 12 and is now 13"),
        ({"algorithm": "local"}, "algorithm was 'perm' and is now 'local'"),
        ({"download": 0}, "download was False and is now 0"),
        ({"steps": 5}, "steps was not set and is now 5"),
        ({"ifca": {"clusters": 2}}, "ifca.lr was 0.1 and is now not set"),
        ({"ifca": {"lr": 0.1, "clusters": 3}}, "ifca.clusters was 2 and is now 3"),
        ({"ifca": 1}, "ifca.clusters was 2 and is now not set"),
        ({"apfl": {}}, None),
    ],
)
def test_the_first_setting_that_changed_is_named(change, sentence):
    assert changed(RUN, RUN | change) == (sentence and f"{sentence}; {BACK}")


def test_keys_and_tables_that_may_differ_are_passed_over():
    now = RUN | {"epochs": 20, "ifca": {"clusters": 3, "lr": 0.2}}
    assert changed(RUN, now, ignore=["epochs", "ifca"]) is None
    assert changed(RUN, now, ignore=["epochs", "ifca.clusters"]).startswith("ifca.lr was 0.1")
    assert changed(RUN, now, ignore=["epoch", "ifc"]).startswith("epochs was 12")


def test_settings_that_are_no_number_are_equal_to_themselves():
    assert changed({"x": math.nan}, {"x": math.nan}) is None
    assert changed({"x": math.nan}, {"x": 1.0}) == f"x was nan and is now 1.0; {BACK}"


def test_a_key_with_a_dot_is_not_a_table():
    assert changed({"a.b": 1}, {"a": {"b": 1}}) is not None


TABLES = st.dictionaries(st.text(max_size=3), VALUES | st.dictionaries(st.text(max_size=3), VALUES, max_size=3))


@given(TABLES)
def test_a_configuration_is_equal_to_its_copy(table):
    assert changed(table, json.loads(json.dumps(table))) is None
