"""One name for every module, imports that point one way, and workflows that see no I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("workflows", "activities", "adapters", "bridge")

PURE = {
    "flowkit.models",
    "flowkit.errors",
    "flowkit.limits",
    "flowkit.arguments",
    "flowkit.storable",
    "flowkit.text",
}
ALLOWED: dict[str, set[str]] = {
    "workflows": PURE | {"flowkit.workflows"},
    "adapters": PURE | {"flowkit.adapters"},
    "activities": PURE | {"flowkit.activities", "flowkit.adapters"},
    "bridge": PURE | {"flowkit.bridge", "flowkit.adapters"},
}
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "activities/batches/puller.py",
        "flowkit.graph.input_adapters",
    ): "the arguments that validation has parsed, for types",
    (
        "adapters/tasks/task_fields.py",
        "flowkit.graph.field_checks",
    ): "edges lead from where to where, by the rule of validation",
    ("activities/tasks.py", "flowkit.graph.validation"): "the engine judges its own limit and functions",
    (
        "activities/batches/batch_sources.py",
        "flowkit.graph.input_adapters",
    ): "a worker parses the same arguments again",
    (
        "activities/batches/batch_sources.py",
        "flowkit.graph.validation",
    ): "a handler's sources obey the rules of a graph's",
}
"""Imports that point the other way, each with its reason; all of pure modules."""

IO = ("motor", "pymongo", "aiokafka", "socket", "subprocess", "requests", "http", "urllib", "pathlib", "os")


def files(folder: str) -> list[Path]:
    """Python files of one of the linked folders."""
    return sorted((ROOT / folder).glob("**/*.py"))


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports; `from flowkit import errors` names `flowkit.errors`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            package = (ROOT / "src" / node.module.replace(".", "/")).is_dir()
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if package else {node.module}
    return found


def within(name: str, modules: set[str]) -> bool:
    """Whether `name` is one of these modules or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("folder", LINKED)
def test_imports_point_one_way(folder: str) -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in files(folder)
        for name in imports(path)
        if within(name, {"flowkit"}) and not within(name, ALLOWED[folder])
    }
    assert sorted(wrong - EXCEPTIONS.keys()) == []


def test_every_exception_to_that_is_still_needed() -> None:
    assert [pair for pair in EXCEPTIONS if pair[1] not in imports(ROOT / pair[0])] == []


@pytest.mark.parametrize("path", files("workflows"), ids=lambda path: path.stem)
def test_workflows_import_no_io(path: Path) -> None:
    assert [name for name in imports(path) if within(name, set(IO))] == []


PURE_RULES = (
    "graph",
    "policy",
    "validation",
    "shapes",
    "cycles",
    "input_args",
    "inputs",
    "details",
    "waiting",
    "budget",
    "reports",
    "sending",
    "slots",
    "state_codec",
)


@pytest.mark.parametrize("name", PURE_RULES)
def test_the_rules_know_nothing_of_temporal(name: str) -> None:
    known = imports(ROOT / "workflows" / f"{name}.py")
    assert [module for module in known if within(module, {"temporalio", "asyncio"})] == []


def test_every_module_has_one_name() -> None:
    assert [name for name in sys.modules if name.partition(".")[0] in LINKED] == []
    homes: dict[Path, set[str]] = {}
    for name, module in list(sys.modules.items()):
        home = getattr(module, "__file__", None)
        if home and Path(home).resolve().is_relative_to(ROOT) and name.partition(".")[0] == "flowkit":
            homes.setdefault(Path(home).resolve(), set()).add(name)
    assert {home: names for home, names in homes.items() if len(names) > 1} == {}


def test_the_four_links_are_links_in_git() -> None:
    paths = [f"src/flowkit/{name}" for name in LINKED]
    listed = subprocess.run(
        ["git", "ls-files", "-s", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == dict.fromkeys(paths, "120000")


@pytest.mark.parametrize("name", LINKED)
def test_the_four_links_lead_to_the_folders_at_the_root(name: str) -> None:
    link = ROOT / "src" / "flowkit" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{name}"


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("flowkit", ["motor", "pymongo", "temporalio", "flowkit.models", "flowkit.config"]),
        ("flowkit.workflows.task", ["motor", "pymongo", "flowkit.adapters", "flowkit.activities"]),
        ("flowkit.workflows.scheduler", ["motor", "pymongo", "temporalio"]),
        ("flowkit.graph.validation", ["motor", "pymongo", "temporalio"]),
    ],
)
def test_importing_it_loads_nothing_that_it_does_not_need(module: str, forbidden: list[str]) -> None:
    program = f"import sys, {module}; print([m for m in {forbidden!r} if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
