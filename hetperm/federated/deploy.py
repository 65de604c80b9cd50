"""Deployment: one folder with everything that the machines of a federation need, and a README that says where."""

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from hetperm import config as configuration
from hetperm.config import Config
from hetperm.federated import certificates
from hetperm.federated.options import DeployOptions
from hetperm.federated.places import NODE, RUN, SERVER, check_host, check_one_address, server_place, split_address

APP = """[project]
name = "hetperm-federation"
version = "1.0.0"
description = "The server and the nodes of a hetperm federation."
license = "Apache-2.0"
dependencies = ["flwr>=1.41,<1.42"]

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.flwr.app]
publisher = "hetperm"

[tool.flwr.app.components]
serverapp = "hetperm_app:server"
clientapp = "hetperm_app:client"

[tool.flwr.app.config]
job = ""
"""
APP_CODE = '''"""The Flower app of a hetperm federation: hetperm must be installed where it runs."""

from hetperm.federated.apps import client_app, server_app

server = server_app()
client = client_app()
'''
START = """#!/bin/sh
# Take part in the federation. Flags go to `hetperm node`; see `hetperm node --help`.
command -v hetperm > /dev/null || {
    echo "error: no hetperm on the path; activate the environment that 'hetperm[flower]' is installed in" >&2; exit 2; }
exec hetperm node --folder "$(dirname "$0")" "$@"
"""
README = """A federation of {nodes} nodes and a server at {address}.

On every machine:  pip install 'hetperm[flower]' in an environment of its own.

1. Copy server/ and {run} to the machine of the server, into one folder, and start there
       hetperm serve --folder FOLDER --out RUN
   It listens on {address} and nowhere else. From other machines only registered nodes get in.

2. Copy nodes/K to the machine of node K, by a way that others cannot read (it holds the node's private key),
   and start there
       nodes/K/start.sh --data npz:my-data.npz --device-mb 24
   --data is what the node trains on: npz:PATH, imagefolder:PATH, or module:function for a function that returns a
   hetperm.Client, in a file of the folder that you start in. Without it, the node takes its share of the data set
   in {run} (a demonstration).
   --width or --device-mb is what the device can afford. Put them into node.toml to leave them out.

3. The run is in RUN: report.html, summary.json, federation.json (who took part, what failed, what it cost).
   Every node has its personal model in nodes/K/models.

Nodes may start before the server and may come and go. If the server is stopped:  hetperm serve ... --resume

Keep ca.key where it was made; no machine needs it. The certificate of the server is valid for {days} days;
    hetperm deploy FOLDER --renew
writes a new one (copy server/server.pem and server/server.key). A node is shut out by removing its key from
server/nodes and starting the server again.
"""


def deploy(options: DeployOptions) -> Path:
    """Write the folder of a federation, or only a new certificate into one."""
    config = configuration.load(options.config)
    hosts = [split_address(options.address)[0], *map(check_host, options.names)]
    check_one_address(hosts[0])
    if options.renew:
        return renew(options)
    if options.widths and len(options.widths) != options.nodes:
        raise ValueError(f"there are {len(options.widths)} widths and {options.nodes} nodes; give one for each")
    if options.folder.exists():
        raise ValueError(f"{options.folder} exists; name another folder, or remove it (--renew: a new certificate)")
    # Written beside its place and moved there whole, so that a crash leaves no half of a deployment.
    draft = options.folder.with_name(f".{options.folder.name}.{os.getpid()}")
    try:
        draft.mkdir(parents=True, mode=0o700)
        write(draft, config, options, hosts)
        draft.rename(options.folder)
    except OSError as error:  # which names the draft
        reason = error.strerror or error
        raise OSError(f"cannot make the folder {options.folder} ({reason}); name another folder") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return options.folder


def renew(options: DeployOptions) -> Path:
    """Write a new certificate of the server, for the address of the deployment."""
    place = server_place(options.folder)
    hosts = [split_address(place.address)[0], *options.names]
    if not (options.folder / "ca.key").is_file():
        raise ValueError(f"{options.folder} has no ca.key, which signs certificates; it is where the folder was made")
    certificates.server_certificate(place.folder, options.folder, hosts, options.days)
    return options.folder


def write(folder: Path, config: Config, options: DeployOptions, hosts: Sequence[str]) -> None:
    """Write all files of a deployment into a folder that is empty."""
    server = folder / "server"
    (server / "nodes").mkdir(parents=True)
    (server / "app").mkdir()
    run = config.override(num_clients=options.nodes).to_toml()
    (folder / RUN).write_text(run)
    certificates.authority(folder, options.days)
    certificates.server_certificate(server, folder, hosts, options.days)
    shutil.copy(folder / "ca.crt", server / "ca.crt")
    table = {"address": options.address, "nodes": options.nodes, "widths": list(options.widths)}
    (server / SERVER).write_text(tomli_w.dumps(table))
    (server / "app" / "pyproject.toml").write_text(APP)
    (server / "app" / "hetperm_app.py").write_text(APP_CODE)
    for k in range(options.nodes):
        node = folder / "nodes" / str(k)
        node.mkdir(parents=True, mode=0o700)
        certificates.node_key(node / "node.key", server / "nodes" / f"{k}.pub")
        shutil.copy(folder / "ca.crt", node / "ca.crt")
        (node / RUN).write_text(run)
        table = {"server": options.address, "client": k}
        if options.widths:
            table["width"] = options.widths[k]
        (node / NODE).write_text(tomli_w.dumps(table))
        start = node / "start.sh"
        start.write_text(START)
        start.chmod(start.stat().st_mode | stat.S_IXUSR)
    text = README.format(nodes=options.nodes, address=options.address, run=RUN, days=options.days)
    (folder / "README").write_text(text)
