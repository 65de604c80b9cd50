"""The command line as a whole: commands, statuses, help at once, and whole runs."""

import contextlib
import csv
import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from test_report_page import write_sweep

from hetperm.cli import console, examples
from hetperm.cli import main as cli
from hetperm.cli.train import next_steps, parse_train
from hetperm.config import Config
from hetperm.runs import checkpoint, files
from hetperm.runs.reproduce.options import EXPERIMENTS, TUNED

ROOT = Path(__file__).resolve().parent.parent
TINY = "--num-clients 4 --samples-per-client 20 --epochs 1 --local-steps 1 --warmup-rounds 1 --steps 0".split()


def python(*words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=env)


def status(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    return stop.value.code


OWN = """
import sys
from dataclasses import dataclass
import hetperm

def score(outputs, y):
    sys.exit(0)

@dataclass(frozen=True)
class Options:
    mine: int

class Stop(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        return 1

def stops(outputs, y):
    raise Stop("enough")

def by_argparse(outputs, y):
    import argparse
    argparse.ArgumentParser().exit(0)

def mute(outputs, y):
    raise Mute

hetperm.register_metric("ends", score)
hetperm.register_metric("stops", stops)
hetperm.register_metric("by-argparse", by_argparse)
hetperm.register_metric("mute", mute)
hetperm.register_algorithm("bare", lambda federation, start, options: None, Options)
if "{close}":
    sys.stdout.close()
"""


@pytest.mark.parametrize(
    ("close", "flags", "sentence"),
    [
        ("", "--metric ends", "code that is not of hetperm ended the command (SystemExit); let it return"),
        ("", "--metric by-argparse", "code that is not of hetperm ended the command (SystemExit); let it return"),
        ("", "--metric stops", "code that is not of hetperm ended the command (enough); let it raise an Exception"),
        ("", "--metric mute", "(it cannot be shown); "),
        ("", "--baselines bare", "bare: its options have no value"),
        ("yes", "--baselines local", "the output could not be written (Bad file descriptor); all else was done"),
    ],
)
def test_code_of_a_plugin_that_ends_the_command_is_named(tmp_path, close, flags, sentence):
    (tmp_path / "own.py").write_text(OWN.replace("{close}", close))
    words = [*TINY, "--plugins", str(tmp_path / "own.py"), "--out", str(tmp_path / "run"), *flags.split()]
    done = python("-m", "hetperm", "train", *words)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert sentence in done.stderr


# Commands


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        (
            "zzz",
            "unknown command 'zzz'; known are train, reproduce, export, report, compare, join, who, federate",
        ),
        ("-h x", "-h goes with no other words; got 'x'"),
        ("--version 2", "--version goes with no other words; got '2'"),
        ("train --epoch 3", "unknown flag --epoch; did you mean --epochs?"),
        ("reproduce synthetc", f"unknown experiment 'synthetc'; known are {', '.join(EXPERIMENTS)}"),
        ("reproduce tune", f"which experiment?; known are {', '.join(TUNED)}"),
        ("reproduce tune scale", f"unknown experiment 'scale'; known are {', '.join(TUNED)}"),
        ("reproduce hetero --settings mnist", "unknown setting 'mnist'"),
        ("reproduce hetero --budgets flops", "--budgets: unknown 'flops'; known are steps, macs, bytes"),
        ("reproduce all --out x", "--out names the folder of one experiment"),
        ("reproduce page a b c", "page takes two folders, RUNS and DOCS, and got 3"),
        ("report", "report takes one folder and got 0; usage: hetperm report FOLDER"),
        ("bench --clients 0", "--clients is 0; it must be a whole number of at least 1"),
        ("bench resources --batch-size 0", "batch_size is 0; it must be a whole number of at least 1"),
    ],
)
def test_what_no_command_understands_is_one_line_and_status_2(words, sentence, capsys):
    assert status(words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"error: {sentence}")


@pytest.mark.parametrize("words", [["report", ""], ["compare", "", ""], ["who", "", "--client", "1"], ["export", ""]])
def test_an_empty_word_is_not_the_present_folder(words, capsys):
    assert status(words) == 2
    assert capsys.readouterr().err == "error: the path is empty; name a file or folder (. is this folder)\n"


def test_running_out_of_memory_is_one_line_and_status_2(capsys):
    def greedy(args):
        raise MemoryError

    assert cli.guarded(greedy, []) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory; take fewer --workers, smaller batches or --idle-models disk; ")
    assert said.endswith("if it is limited here (see ulimit -d and ulimit -v), raise the limit\n")


def test_a_command_that_is_stopped_says_how_to_go_on_and_is_status_130(capsys, monkeypatch):
    def stopped(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "RESUMED", (stopped,))
    assert cli.guarded(stopped, []) == 130
    assert "--resume" in capsys.readouterr().err


def test_a_stop_that_a_half_imported_package_made_another_error_of_is_still_a_stop(capsys, monkeypatch):
    monkeypatch.setattr(cli, "_asked_to_stop", [])
    before = signal.getsignal(signal.SIGINT)

    def half_imported(args):
        try:
            cli._interrupt(signal.SIGINT, None)
        except KeyboardInterrupt as stop:
            raise AttributeError("module 'numpy' has no attribute 'matrix'") from stop

    try:
        assert cli.guarded(half_imported, []) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped\n"


def test_only_what_can_be_resumed_says_so_when_it_is_stopped(capsys, monkeypatch):
    def stopped(args):
        raise KeyboardInterrupt

    for name, (command, _) in cli.COMMANDS.items():
        cli.guarded(command, ["--help"])
        assert ("--resume" in capsys.readouterr().out) == (command in cli.RESUMED), name
    monkeypatch.setitem(cli.COMMANDS, "compare", (stopped, ""))
    assert status(["compare", "a", "b"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_an_error_of_several_lines_is_said_in_one_and_never_in_none(capsys):
    def fails(args):
        raise RuntimeError(*args)

    assert [cli.guarded(fails, ["a\n  b"]), cli.guarded(fails, [])] == [2, 2]
    assert capsys.readouterr().err == "error: a b\nerror: RuntimeError\n"


def test_an_error_that_quotes_pages_keeps_its_beginning_and_its_end(capsys):
    assert cli.guarded(cli._dispatch, ["train", f"--epochs={'9' * 10**5}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --epochs: '999") and said.endswith("999' is not a whole number; see --help\n")
    assert len(said) < 1100


def test_a_traceback_is_shown_to_those_who_ask_for_it(monkeypatch):
    def fails(args):
        raise ValueError("no")

    monkeypatch.setenv("HETPERM_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no"):
        cli.guarded(fails, [])
    for off in ("0", ""):
        monkeypatch.setenv("HETPERM_TRACEBACK", off)
        assert cli.guarded(fails, []) == 2


def test_a_current_folder_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.guarded(lambda args: None, []) == 2
    said = "error: the current folder is gone (No such file or directory); change to one that exists\n"
    assert capsys.readouterr().err == said


# Help

ASKED = [  # how it is started, and a word of what it prints
    ("hetperm", "hetperm bench resources"),
    ("hetperm --help", "hetperm COMMAND --help"),
    ("hetperm --version", "hetperm 0."),
    ("hetperm train --help", "--local-steps INT"),
    ("hetperm train --config synthetic --help", "Number of clients, N. (default: 50)"),
    ("hetperm reproduce --help", "hetperm reproduce tune EXPERIMENT"),
    ("hetperm reproduce", "usage: hetperm reproduce"),
    ("hetperm reproduce synthetic --help", "--cifar10 PATH"),
    ("hetperm report --help", "usage: hetperm report"),
    ("hetperm join --help", "hetperm join RUN [FLAGS]"),
    ("hetperm who --help", "--client INT"),
    ("hetperm bench --help", "--workloads NAME,NAME,..."),
    ("hetperm bench resources --help", "--enforce {auto,cgroup,rlimit,none}"),
    ("scripts/train_hetero.py --help", "--local-steps INT"),
    ("scripts/reproduce.py --help", "usage: hetperm reproduce"),
    ("scripts/benchmark_resources.py --help", "--device-mb FLOAT"),
]
ASK = """
import contextlib, io, json, os, runpy, sys
import hetperm, hetperm.profile
hetperm.Config()
hetperm.profile.load("mobile")
answers = []
for words in json.loads(sys.argv[1]):
    program, *sys.argv[1:] = words.split()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            if program == "hetperm":
                runpy.run_module("hetperm", run_name="__main__")
            else:
                runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        heavy = sorted({"torch", "numpy", "matplotlib"} & set(sys.modules))
        answers.append((stop.code, heavy, printed.getvalue()))
print(json.dumps(answers))
"""


def test_help_of_every_command_and_script_comes_at_once_and_needs_no_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-c", ASK, json.dumps([words for words, _ in ASKED]))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    for (words, part), (code, heavy, printed) in zip(ASKED, json.loads(done.stdout), strict=True):
        assert (code, heavy) == (0, []), words
        assert part in " ".join(printed.split()), words
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.5  # of all of them together


# Whole runs


def folder_files(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_training_writes_a_folder_and_prints_a_table_and_its_configuration_gives_the_same_files(tmp_path, capsys, warm):
    out = tmp_path / "run"
    done = warm.run(
        str(ROOT / "scripts" / "train_hetero.py"), *TINY, "--out", str(out), "--baselines", "local", COLUMNS="100"
    )
    assert done.returncode == 0, done.stderr
    for word in ("perm", "local", "same-group mass", "visits an epoch", "rounds (all pairs", f"written to {out}"):
        assert word in done.stdout
    for word in ("digits label-shift:2; zoo:mlp with 8,970 parameters", "capacity profile mobile", "accuracy by tier"):
        assert word in done.stdout
    assert "tier flagship of profile mobile has none of the 4 clients" in done.stderr
    assert done.stderr.count("\n") == 3  # tiers without clients, and what nobody trains
    assert json.loads((out / "summary.json").read_text())["baselines"].keys() == {"local"}

    again = ["train", "--config", str(out / "config.toml"), "--quiet", "--out"]
    assert status([*again, str(out)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {out} exists; name another folder with --out, or go on with that run by --resume\n"

    other = tmp_path / "again"
    assert status([*again, str(other)]) == 0
    names = folder_files(out)
    assert names == folder_files(other)
    timed = [path for path in names if path.name == "timing.json" or path.match("checkpoint/*.safetensors")]
    assert {"timing.json", "perm.safetensors", "local.safetensors"} == {path.name for path in timed}
    for path in set(names) - set(timed):
        assert (other / path).read_bytes() == (out / path).read_bytes(), path


def test_a_report_is_written_anew(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(Config().to_toml())
    summary = {"algorithm": "perm", "dataset": "digits", "num_clients": 2, "accuracy": {"mean": 0.5, "worst": 0.4}}
    cost = {"visits": 1, "rounds": 1, "client_steps": 1, "bytes_down": 1, "bytes_up": 1}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "cost": cost}))
    assert status(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").is_file()


def test_a_report_of_files_that_were_changed_says_which(tmp_path, caplog):
    (tmp_path / "config.toml").write_text(Config().to_toml())
    cost = {"visits": 1, "rounds": 1, "client_steps": 1, "bytes_down": 1, "bytes_up": 1}
    summary = {"algorithm": "perm", "dataset": "digits", "num_clients": 2, "accuracy": {"mean": 0.5, "worst": 0.4}}
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "cost": cost}))
    (tmp_path / "profile.csv").write_text("tier\n")
    (tmp_path / "report.html").write_text("of another version")
    files.write_checksums(tmp_path)
    assert status(["report", str(tmp_path)]) == 0
    assert not caplog.records
    (tmp_path / "clients.csv").write_text("client\n0\n1\n")
    (tmp_path / "profile.csv").unlink()
    assert status(["report", str(tmp_path)]) == 0
    said = "not as the run wrote it, going by checksums.txt: clients.csv, profile.csv (missing)"
    assert caplog.messages == [f"{tmp_path}: {said}"]
    caplog.clear()
    files.write_checksums(tmp_path)
    with (tmp_path / "checksums.txt").open("a") as listing:
        listing.write("of nothing\n")
    assert status(["report", str(tmp_path)]) == 0
    assert caplog.messages == [f"{tmp_path}: not as the run wrote it, going by checksums.txt: checksums.txt"]
    caplog.clear()
    files.write_checksums(tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert status(["report", str(tmp_path)]) == 2  # what was changed is said before what that led to
    assert caplog.messages == [f"{tmp_path}: not as the run wrote it, going by checksums.txt: summary.json"]


@pytest.mark.parametrize("loss", [Path.unlink, Path.mkdir, Path.touch], ids=["gone", "a folder", "empty"])
def test_a_report_of_files_that_cannot_be_checked_says_so(loss, tmp_path, caplog):
    sweep = write_sweep(tmp_path / "sweep")
    for folder in (sweep, *sweep.glob("seed-*")):
        files.write_checksums(folder)
    assert status(["report", str(sweep)]) == 0
    assert not caplog.records
    listing = sweep / "seed-1" / "checksums.txt"
    listing.unlink()
    if loss is not Path.unlink:
        loss(listing)
    assert status(["report", str(sweep)]) == 0
    assert caplog.messages == [
        f"{sweep / 'seed-1'}: its files cannot be checked, as there is nothing in checksums.txt: the run was not "
        "finished, or it was removed"
    ]


def test_a_seed_whose_folder_is_gone_is_named(tmp_path, caplog):
    sweep = write_sweep(tmp_path / "sweep")
    files.write(sweep / "config.toml", "seeds = [0, 1, 2]\n")
    for folder in (sweep, *sweep.glob("seed-*")):
        files.write_checksums(folder)
    shutil.rmtree(sweep / "seed-1")
    assert status(["report", str(sweep)]) == 0
    assert caplog.messages == [f"{sweep}: not as the run wrote it, going by checksums.txt: seed-1 (missing)"]


@pytest.mark.parametrize("words", [["train", "--dataset", "npz:LONG"], ["train", "--dataset", "LONG"]])
@pytest.mark.parametrize("more", [["train", "--config", "LONG"], ["report", "LONG"]])
def test_a_name_that_no_file_can_have_is_refused_in_a_sentence(words, more, capsys):
    for command in (words, more):
        assert status([word.replace("LONG", "a" * 300) for word in command]) == 2
        said = capsys.readouterr().err
        assert "no name in a path may be longer than 255 bytes" in said or "unknown dataset" in said


# Output that cannot be written, and signals


@pytest.fixture(params=["a closed pipe", "a full disk"])
def no_output(request):
    """A descriptor that cannot be written to, and whether that is a fault: who reads a pipe may have seen enough."""
    if request.param == "a full disk":
        if not Path("/dev/full").exists():
            pytest.skip("needs a device that is always full")
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor, request.param == "a full disk"
    os.close(descriptor)


LOST = "error: the output could not be written (No space left on device); all else was done"


@pytest.mark.slow
def test_training_goes_on_without_an_output(no_output, tmp_path, capsys):
    descriptor, is_fault = no_output
    with contextlib.suppress(OSError), open(os.dup(descriptor), "w") as output, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        code = status(["train", *TINY, "--baselines", "", "--out", str(tmp_path / "run")])
    assert (code, LOST in capsys.readouterr().err) == ((2, True) if is_fault else (0, False))
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_process_without_an_output_ends_without_a_traceback(no_output):
    """Python itself writes what is left when it ends."""
    descriptor, is_fault = no_output
    command = [sys.executable, "-m", "hetperm", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=descriptor, stderr=subprocess.PIPE, text=True, env=env)
    assert (done.returncode, done.stderr.splitlines()) == ((2, [LOST]) if is_fault else (0, []))


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "0.5 +- 0.1 ?"), ("latin-1", "0.5 \xb1 0.1 ?")])
def test_an_output_without_some_letters_shows_others(encoding, shown, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert cli.guarded(lambda args: console.say("0.5 ± 0.1 \u2265"), []) == 0
    assert raw.getvalue().decode(encoding) == f"{shown}\n"


def test_escape_sequences_are_written_out(capsys):
    def fails(args):
        console.say("\x1b]0;mine\x07")
        raise ValueError("tier '\x1b[2J\u202e'")

    assert cli.guarded(fails, []) == 2
    assert capsys.readouterr() == ("\\x1b]0;mine\\x07\n", "error: tier '\\x1b[2J\\u202e'\n")


def test_a_process_that_is_asked_to_end_says_how_to_go_on(capsys, monkeypatch):
    def stopped(args):
        raise cli.Terminated

    monkeypatch.setattr(cli, "RESUMED", (stopped,))
    assert cli.guarded(stopped, []) == 143
    assert "--resume" in capsys.readouterr().err


SIGINT_SOON = """
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process would ignore it

def soon(event, args, done=[]):
    # When the command's own first import begins: what Python does before that is not ours.
    if event == "import" and args[0] == "hetperm.cli.main" and not done:
        done.append(True)
        delay = float(sys.argv.pop(1))
        signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, delay) if delay else os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(soon)
runpy.run_module("hetperm", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 0.005, 0.02, 0.05])
def test_ctrl_c_in_the_first_moment_shows_no_traceback(delay, tmp_path):
    words = ["train", *TINY, "--quiet", "--baselines", "", "--out", str(tmp_path / "run")]
    done = python("-c", SIGINT_SOON, str(delay), *words)
    assert done.returncode in (-signal.SIGINT, 130), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_second_ctrl_c_shows_no_traceback_and_the_run_can_be_resumed(tmp_path):
    out = tmp_path / "run"
    words = [
        "train",
        *TINY,
        "--quiet",
        "--epochs",
        "100000",
        "--engine",
        "processes",
        "--workers",
        "2",
        "--out",
        str(out),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "hetperm", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,  # as a terminal does it: Ctrl-C reaches the workers too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background process would ignore it
    )
    try:
        while process.poll() is None and not (out / "checkpoint" / "perm.safetensors").exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (-signal.SIGINT, 130), said
    assert "Traceback" not in said and "Exception ignored" not in said
    assert checkpoint.load(out / "checkpoint" / "perm.safetensors").state.r >= 0


# Errors of the machine


@pytest.mark.parametrize("kind", [TypeError, KeyError, IndexError, AttributeError, csv.Error, RecursionError])
def test_what_nobody_foresaw_is_one_line_that_names_the_command_and_how_to_see_more(kind, capsys):
    def fails(args):
        raise kind("odd")

    assert cli.guarded(fails, ["report", "some folder"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: report 'some folder': unexpected {kind.__name__} (")
    assert said.endswith("; HETPERM_TRACEBACK=1 shows where it comes from\n") and said.count("\n") == 1


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")
FAULTS = [
    (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b: Permission denied; name a folder that you may"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), "x: No space left on device; free some space"),
    (caused(OSError("cannot write x"), FULL), "cannot write x; free some space, or name a folder on another disk"),
    (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files (ulimit -n)"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable; take fewer"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory; take fewer --workers"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out of memory; take fewer --workers"),
    (ModuleNotFoundError("No module named 'torch'"), "No module named 'torch'; `make setup`"),
]


@pytest.mark.parametrize(("error", "sentence"), FAULTS, ids=[sentence[:24] for _, sentence in FAULTS])
def test_a_fault_of_the_machine_comes_with_a_remedy(error, sentence):
    assert cli.explained(error, []).startswith(sentence)


def test_an_old_torch_is_named(monkeypatch, capsys):
    def fails(args):
        raise AttributeError("module 'torch' has no attribute 'new'")

    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.1+cpu")
    assert cli.guarded(fails, []) == 2
    assert capsys.readouterr().err.startswith("error: torch 2.5.1+cpu is installed and hetperm needs 2.6 or newer; ")


def test_the_oldest_torch_is_that_of_the_package():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={'.'.join(map(str, cli.TORCH))}" in wanted


# The first minute


def test_without_arguments_five_things_to_do_are_shown_and_each_is_a_command(capsys):
    assert cli.guarded(cli._dispatch, []) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  hetperm ")]
    assert len(lines) == 5
    commands = [" ".join(words[1:3]) if " ".join(words[1:3]) in cli.COMMANDS else words[1] for words in lines]
    assert set(commands) <= set(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_every_command_fits_80_columns_and_ends_with_examples(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.guarded(cli._dispatch, [*name.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    shown = lines[lines.index("examples:") + 1 :]
    assert shown == examples.text(name).splitlines()[1:]
    for line in shown[::2]:
        words = line.split()
        assert words[1 : 1 + len(name.split())] == name.split()
        if name == "train":
            parse_train(words[2:])


def test_the_list_of_commands_fits_80_columns(capsys):
    for words in ([], ["--help"]):
        assert cli.guarded(cli._dispatch, words) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_run_ends_with_where_its_report_is_and_what_to_try_next():
    report, after = next_steps(Config(), Path("runs") / "digits-perm")
    assert report == f"report: open {Path('runs') / 'digits-perm' / 'report.html'} in a browser"
    assert after.startswith("next: add --seeds 0 1 2 for the spread over seeds; ")
    assert "hetperm compare runs/digits-perm OTHER" in after
    assert "--seeds" not in next_steps(Config(seeds=(0, 1)), Path("x"))[1]


@pytest.mark.parametrize("words", [["train", "--out", "o\udce9"], ["train", "--capacity-profile", "p\udce9.toml"]])
def test_names_that_are_not_utf_8_are_refused_before_anything_is_written(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.guarded(cli._dispatch, words) == 2
    assert capsys.readouterr().err.endswith("is not UTF-8; rename the file, or choose another name\n")
    assert not list(tmp_path.iterdir())
