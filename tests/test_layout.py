"""Every module has one name, imports follow the layers, and workflows import no modules for I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection

ROOT = Path(__file__).parents[1]
LINKED = ("workflows", "activities", "adapters", "bridge")

BASE = frozenset(
    f"flowkit.{name}"
    for name in (
        *("models", "limits", "errors", "text", "validation"),
        "reason_codes",
        *("protocol", "graph", "actions", "core", "config", "admission.rules"),
    )
)
LAYERS: tuple[frozenset[str], ...] = (
    BASE,
    frozenset({"flowkit.adapters"}),
    frozenset({"flowkit.attempt"}),
    frozenset({"flowkit.activities", "flowkit.bridge"}),
    frozenset({"flowkit.engine", "flowkit.worker", "flowkit.connection"} | {"flowkit.payload_converter"}),
)
"""Each layer can import those before it. Above them is the public API: client, coordinator, plugin, command line."""

SIBLINGS = frozenset({"flowkit.activities", "flowkit.bridge", "flowkit.engine", "flowkit.worker"})
"""Packages that do not import another one of their own layer."""

IO = ("motor", "pymongo", "aiokafka", "socket", "subprocess", "requests", "http", "urllib", "pathlib", "os")


def files(folder: str) -> list[Path]:
    """Return the Python files of one of the linked folders."""
    return sorted((ROOT / folder).glob("**/*.py"))


def imports(path: Path) -> set[str]:
    """Return the full names of the modules that a file imports; `from flowkit import errors` is `flowkit.errors`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = (ROOT / "src" / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package else {node.module}
    return found


def within(name: str, modules: Collection[str]) -> bool:
    """Return whether `name` is one of these modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def sources() -> dict[str, Path]:
    """Return every module of the package by its name."""
    found: dict[str, Path] = {}
    for folder in (ROOT / "src" / "flowkit", *(ROOT / name for name in LINKED)):
        base = ROOT / "src" if folder.parent.name == "src" else ROOT
        for path in folder.rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                parts = path.relative_to(base).with_suffix("").parts
                parts = parts if parts[0] == "flowkit" else ("flowkit", *parts)
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


def layer_of(module: str) -> int | None:
    """Return the index of a module's layer; None for the public API and the workflows."""
    return next((place for place, layer in enumerate(LAYERS) if within(module, layer)), None)


def allowed(module: str) -> frozenset[str]:
    """Return what a module can import from the package."""
    if within(module, {"flowkit.workflows"}):
        return BASE | {"flowkit.workflows"}
    place = layer_of(module)
    if place is None:
        return frozenset({"flowkit"})
    below = frozenset().union(*LAYERS[:place])
    own = next(name for name in LAYERS[place] if within(module, {name}))
    beside = {own} if own in SIBLINGS else LAYERS[place]
    engine_only = {"flowkit.workflows"} if own == "flowkit.engine" else set()
    shared = LAYERS[place] - SIBLINGS
    return below | beside | shared | engine_only


def test_imports_point_to_lower_layers() -> None:
    wrong = {
        (module, name)
        for module, path in sources().items()
        for name in imports(path)
        if within(name, {"flowkit"}) and not within(name, allowed(module))
    }
    assert sorted(wrong) == []


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    modules = sources()
    graph = {module: {name for name in imports(path) if name in modules} for module, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", files("workflows"), ids=lambda path: path.stem)
def test_workflows_import_no_io(path: Path) -> None:
    assert [name for name in imports(path) if within(name, set(IO))] == []


PURE = (
    "retry",
    "payloads",
    "state_codec",
    "display/details",
    "display/summaries",
)


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / "workflows" / f"{name}.py" for name in PURE),
        *files("workflows/scheduling"),
        *files("src/flowkit/graph"),
        *files("src/flowkit/actions"),
        *files("bridge/rules"),
    ],
    ids=str,
)
def test_pure_modules_import_neither_temporalio_nor_asyncio(path: Path) -> None:
    known = imports(path)
    assert [module for module in known if within(module, {"temporalio", "asyncio", *IO})] == []


def test_every_module_has_one_import_name() -> None:
    assert [name for name in sys.modules if name.partition(".")[0] in LINKED] == []
    homes: dict[Path, set[str]] = {}
    for name, module in list(sys.modules.items()):
        home = getattr(module, "__file__", None)
        if home and Path(home).resolve().is_relative_to(ROOT) and name.partition(".")[0] == "flowkit":
            homes.setdefault(Path(home).resolve(), set()).add(name)
    assert {home: names for home, names in homes.items() if len(names) > 1} == {}


def test_git_stores_the_four_links_as_links() -> None:
    paths = [f"src/flowkit/{name}" for name in LINKED]
    listed = subprocess.run(
        ["git", "ls-files", "-s", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(paths, "120000")


@pytest.mark.parametrize("name", LINKED)
def test_the_four_links_point_to_the_folders_at_the_root(name: str) -> None:
    link = ROOT / "src" / "flowkit" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{name}"


LOADED: dict[str, list[str]] = {
    "flowkit": ["motor", "pymongo", "temporalio", "cel_expr_python", "flowkit.models", "flowkit.config"],
    "flowkit.workflows.scheduling.scheduler": ["motor", "pymongo", "temporalio"],
    "flowkit.graph.validation": ["motor", "pymongo", "temporalio"],
    "flowkit.graph.conditions": ["motor", "pymongo", "temporalio", "cel_expr_python"],
    "flowkit.workflows.task": [
        *("motor", "pymongo", "cel_expr_python"),
        *("flowkit.adapters", "flowkit.activities"),
    ],
    "flowkit.cli.app": ["starlette", "uvicorn", "pjrpc", "websockets", "prometheus_client"],
    "flowkit.cli.up.processes": ["aiokafka"],
    "flowkit.cli.doctor.checks": ["aiokafka"],
}
"""Modules in an order in which one process can import them, and what none of those up to each may have loaded."""


def test_importing_a_module_loads_only_what_it_needs() -> None:
    program = "import sys\n" + "\n".join(
        f"import {module}; print({module!r}, [m for m in {forbidden!r} if m in sys.modules])"
        for module, forbidden in LOADED.items()
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [f"{module} []" for module in LOADED]
