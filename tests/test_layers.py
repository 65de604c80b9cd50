"""Who may import whom: every arrow between the rooms of hetperm, imports inside functions included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room (a folder of hetperm, or a module at its top) -> what it may import of hetperm, beside itself.
# A room stands for all its modules; "engine.task" is one module of a room.
MAY_IMPORT = {
    "advice": "",
    "texts": "",
    "memory": "",
    "checks": "advice texts",
    "shards": "texts",
    "client": "shards texts",
    "randomness": "checks texts",
    "params": "",
    "state": "params",
    "plugins": "texts",
    "config": "advice checks plugins texts",
    "profile": "advice checks config randomness texts",
    "trace": "advice checks config texts",
    "mixing": "checks randomness texts",
    "device": "mixing params client shards",
    "engine": "device params client shards memory",
    # Rounds and algorithms hand out tasks; which engine runs them is not theirs to know.
    "server": "engine.task device mixing params state client shards randomness",
    "algorithms": "server engine.task device mixing params state client randomness",
    "methods": "algorithms server.federation params config advice texts",
    "metrics": "advice texts",
    "data": "client shards randomness advice checks memory texts",
    "report": "texts",  # reads the files of a run and nothing else
    "runs": "report data metrics methods algorithms server engine device mixing params state client shards randomness "
    "profile trace config plugins checks advice texts memory",
    "federated": "runs data metrics methods server engine device params client shards config plugins checks texts "
    "trace",
    "bench": "runs report data methods algorithms server engine device mixing params state client shards randomness "
    "profile config checks advice texts",
    "cli": "federated bench runs report data methods algorithms server engine device mixing params state client "
    "randomness profile config checks advice texts",
    # What others register, in every room that has names; nothing of ours imports it but by a public name of hetperm.
    "registry": "methods metrics data algorithms server.federation mixing state params config advice checks texts",
    "__init__": "",  # names its modules as texts, and imports them when asked
    "__main__": "cli",
}


def modules() -> dict[str, Path]:
    """Dotted name inside hetperm -> file; a package is its __init__."""
    paths = sorted((ROOT / "hetperm").rglob("*.py"))
    names = [path.relative_to(ROOT / "hetperm").with_suffix("").parts for path in paths]
    return {".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts): path
            for parts, path in zip(names, paths, strict=True)}  # fmt: skip


MODULES = modules()


def imported(source: str) -> set[str]:
    """Modules of hetperm that a source imports, at the top or inside functions; public names of hetperm left out."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here, so that they can be read"
            # `from hetperm.mixing import complexity` imports a module, `... import solve` a name of one.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("hetperm.") for name in found if name.startswith("hetperm.")}
    return {_module(name) for name in inside} - {None}


def _module(name: str) -> str | None:
    """The module that a dotted name lies in; None for a public name of hetperm itself."""
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def room(module: str) -> str:
    """The room of a module."""
    return module.partition(".")[0]


def broken(module: str, source: str) -> list[str]:
    """What a module imports and may not."""
    allowed = set(MAY_IMPORT[room(module)].split())
    return sorted(name for name in imported(source) if room(name) != room(module) and not {name, room(name)} & allowed)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module):
    assert broken(module, MODULES[module].read_text()) == []


def test_every_room_has_its_arrows():
    assert {room(module) for module in MODULES} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("device.bench", "from hetperm.server import visits", ["server.visits"]),
        ("server.visits", "def f():\n    from hetperm.engine.batched import Batched", ["engine.batched"]),
        ("report.page", "import hetperm.runs.files", ["runs.files"]),
        ("algorithms.perm", "from hetperm.config import Config\nfrom hetperm import data", ["config", "data"]),
        ("runs.training", "from hetperm.cli.console import say", ["cli.console"]),
        ("server.visits", "from hetperm import mixing\nfrom hetperm.mixing import solver\nimport torch", []),
    ],
)
def test_a_broken_arrow_is_found_also_inside_a_function(module, source, wrong):
    assert broken(module, source) == wrong


def test_no_module_imports_itself_by_way_of_others():
    graph = {module: imported(path.read_text()) - {module} for module, path in MODULES.items()}
    # A package and its modules are one import: `from hetperm.mixing import x` runs mixing/__init__.
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"import cycle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for other in graph[module]:
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())
