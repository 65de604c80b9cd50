"""The server process: start a SuperLink, register the nodes, start the run, follow it. Needs the extra `flower`."""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetperm import config as configuration
from hetperm.config import Config
from hetperm.federated.flower_private import REMEDY, unfit
from hetperm.federated.options import ServeOptions
from hetperm.federated.places import (
    RUN,
    ServerPlace,
    check_insecure,
    check_one_address,
    is_loopback,
    server_place,
    split_address,
)
from hetperm.runs import files
from hetperm.texts import one_line

log = logging.getLogger(__name__)

JOB, EVENTS, LOG = "job.json", "events.jsonl", "superlink.log"
STARTING = 120.0  # seconds that a SuperLink has to start
ENDING = 2.0  # seconds that a ServerApp has to end after its SuperLink
LOOK = 0.2  # seconds between two looks at the events
LITTLE = 2**20  # bytes that are free on a disk which is as good as full
OnTold = Callable[[Mapping[str, Any]], None]
# No telemetry, no look for updates, no package of an index: a federation needs no network but its own.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def serve(options: ServeOptions, on_event: OnTold, *, changes: Mapping[str, Any] | None = None) -> Path:
    """Serve a federation from beginning to end; return the folder of the run.

    Args:
        on_event: told of everything that happens.
        changes: settings of the configuration that are given in another way.
    """
    place = server_place(options.folder)
    config = configuration.load(options.config or options.folder / RUN).override(**(changes or {}))
    if options.insecure:
        check_insecure(place.address)
        log.warning("--insecure: without TLS and without keys of nodes, on this machine only")
    out = options.out or options.folder / "run"
    files.run_folder(out, "", resume=options.resume)  # called for its error, before anything is started
    nodes = options.nodes or place.nodes
    os.environ.update(QUIET)
    on_event({"event": "starting", "time": time.time(), "detail": f"starting the server on {place.address}"})
    bound = check_free(*split_address(place.address))
    if not is_loopback(place.address) and is_loopback(f"[{bound}]:1"):
        log.warning("%s is %s on this machine, which others cannot reach; deploy with another", place.address, bound)
    _wait_for_the_last(place)
    begin = _size(place.folder / EVENTS)
    try:
        with superlink(place, insecure=options.insecure):
            job = write_job(place, config, options, out, nodes)
            start_run(place, job, insecure=options.insecure)
            return follow(place, begin, on_event)
    finally:
        _end_the_app(place, begin)


def write_job(place: ServerPlace, config: Config, options: ServeOptions, out: Path, nodes: int) -> Path:
    """Write what the ServerApp is to do."""
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    plain |= {"folder": Path(options.folder), "out": None}
    path = place.folder.resolve() / JOB
    table = {
        "config": config.override(num_clients=nodes).to_toml(),
        "out": str(out.resolve()),
        "resume": options.resume,
        "nodes": nodes,
        "widths": place.widths if len(place.widths) == nodes else [],
        "options": {key: plain[key] for key in ("deadline", "patience", "tries", "quorum", "wait")},
    }
    files.write_json(path, table)
    return path


# The SuperLink


@contextlib.contextmanager
def superlink(place: ServerPlace, *, insecure: bool = False) -> Iterator[subprocess.Popen]:
    """A context with a running SuperLink, which ends with it."""
    host, port = split_address(place.address)
    check_free(host, port)
    if not is_loopback(place.address):
        log.warning("the server listens on %s, for other machines; only registered nodes get in", place.address)
    command = [sys.executable, "-m", "hetperm.federated.superlink", "--host", host, "--port", str(port)]
    # Its state is in memory: runs are resumed by hetperm, and keys are registered at every start.
    command += ["--disable-runtime-dependency-installation"]
    folder = place.folder.resolve()
    if insecure:
        command += ["--insecure"]
    else:
        for name in ("ca.crt", "server.pem", "server.key"):
            if not (folder / name).is_file():
                raise ValueError(f"{place.folder} has no {name}; copy the folder server/ as `hetperm deploy` wrote it")
        command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.pem")]
        command += ["--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth"]
    home = folder / "flower"
    home.mkdir(exist_ok=True)
    with (folder / LOG).open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "FLWR_HOME": str(home)}
        )
        try:
            _wait_until_up(process, place, insecure=insecure)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def check_free(host: str, port: int, advice: str = "is one running already?") -> str:
    """The IP address of a host on which a server can listen; an error if it cannot, or if it stands for all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as tried:
            bound = tried.getsockname()[0]
    except OSError as error:
        reason = str(error.strerror).partition(" (while ")[0]  # without what is said here too
        raise ValueError(f"the server cannot listen on {host}:{port} ({reason}); {advice}") from None
    check_one_address(bound)  # a name may stand for all, too
    return bound


def _wait_until_up(process: subprocess.Popen, place: ServerPlace, *, insecure: bool) -> None:
    host, port = split_address(place.address)
    context = None if insecure else ssl.create_default_context(cafile=str(place.folder / "ca.crt"))
    until = time.monotonic() + STARTING
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the SuperLink ended with status {process.returncode}{_reason(place)}")
        try:
            with socket.create_connection((host, port), timeout=2) as connection:
                if context:
                    context.wrap_socket(connection, server_hostname=host).close()
                return
        except ssl.SSLCertVerificationError as error:
            reason = "has expired" if "expired" in str(error) else f"is not valid ({one_line(error.verify_message)})"
            raise RuntimeError(f"the certificate of the server {reason}; `hetperm deploy --renew` writes one") from None
        except OSError:
            time.sleep(LOOK)
    raise RuntimeError(f"the SuperLink did not start within {STARTING:g} s{_reason(place)}")


# The run


def start_run(place: ServerPlace, job: Path, *, insecure: bool = False) -> int:
    """Register the nodes whose keys were deployed, and start the app; return the number of the run."""
    import httpx
    from cryptography.hazmat.primitives import serialization

    from hetperm.federated import flower_private as flower

    client = flower.ControlHttpClient.from_server_address(
        place.address,
        insecure,
        None if insecure else str(place.folder / "ca.crt"),
        interceptors=[flower.RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        for path in sorted((place.folder / "nodes").glob("*.pub")) if not insecure else ():
            key = flower.public_key_to_bytes(serialization.load_ssh_public_key(path.read_bytes()))
            try:
                client.RegisterNode(flower.RegisterNodeRequest(public_key=key))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.CONFLICT and "already" not in error.response.text.lower():
                    raise
        content = flower.build_fab_from_disk(place.folder / "app")
        fab = flower.Fab(hashlib.sha256(content).hexdigest(), content, {})
        started = client.StartRun(
            flower.StartRunRequest(
                fab=flower.fab_to_proto(fab), override_config=flower.user_config_to_proto({"job": str(job)})
            )
        )
    except httpx.HTTPStatusError as error:
        known = flower.FlowerError.from_json(error.response.text)
        raise RuntimeError(f"the SuperLink refused: {known.message if known else error.response.text[:200]}") from None
    finally:
        client.close()
    return started.run_id


def follow(place: ServerPlace, begin: int, on_event: OnTold) -> Path:
    """Tell of everything that happens until the run ends; return its folder. Raise an error if it failed."""
    path, process = place.folder / EVENTS, None
    waited = time.monotonic()
    while True:
        for event in events(path, begin):
            begin = event.pop("end")
            on_event(event)
            match event:
                case {"event": "started", "pid": int(pid)}:
                    process = pid
                case {"event": "finished", "folder": str(folder)}:
                    return Path(folder)
                case {"event": "error", "detail": str(detail)}:
                    raise RuntimeError(detail)
        if process is not None and not alive(process):
            if _size(path) > begin:
                continue  # its last words
            raise RuntimeError(f"the ServerApp ended without a word{_reason(place)}, and go on with --resume")
        if process is None and time.monotonic() - waited > STARTING:
            raise RuntimeError(f"the ServerApp did not start within {STARTING:g} s{_reason(place)}")
        time.sleep(LOOK)


def events(path: Path, begin: int) -> Iterator[dict[str, Any]]:
    """Yield the events in a file from a byte on, each with the byte after it; a line that is not whole yet waits."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(begin)
        for line in file:
            if not line.endswith(b"\n"):
                return
            begin += len(line)
            with contextlib.suppress(ValueError):
                yield {**json.loads(line), "end": begin}


def alive(pid: int) -> bool:
    """Whether a ServerApp runs under this number."""
    try:
        os.kill(pid, 0)
        # Where the system tells what a process is: another one may have got the number.
        command = Path(f"/proc/{pid}/cmdline")
        return not command.exists() or b"serverapp" in command.read_bytes()
    except OSError:
        return False


def _wait_for_the_last(place: ServerPlace) -> None:
    """Wait for the ServerApp of a server that was killed: it notices by itself, but holds the run folder until then."""
    last = [event["pid"] for event in events(place.folder / EVENTS, 0) if event.get("event") == "started"]
    until = time.monotonic() + 30
    while last and alive(last[-1]) and time.monotonic() < until:
        time.sleep(LOOK)


def _end_the_app(place: ServerPlace, begin: int) -> None:
    """End the ServerApp that began after a byte of the events; it notices by itself, but not at once."""
    for pid in [event["pid"] for event in events(place.folder / EVENTS, begin) if event.get("event") == "started"]:
        until = time.monotonic() + ENDING
        while alive(pid) and time.monotonic() < until:
            time.sleep(LOOK)
        if alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its work is done, or --resume goes on with it


def _reason(place: ServerPlace) -> str:
    """Why a process did not do what it should, or where to look for it."""
    if shutil.disk_usage(place.folder).free < LITTLE:
        return f", as the disk of {place.folder} is full; free some space"
    return f"; see {place.folder / LOG}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def missing_flower() -> str | None:
    """A sentence if Flower is not installed, or another version than hetperm was made for; else None."""
    if importlib.util.find_spec("flwr") is not None and shutil.which("flower-superexec", path=_path()) is None:
        return f"Flower is installed without its programs (flower-superexec); {REMEDY}"
    return unfit()


def _path() -> str:
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
