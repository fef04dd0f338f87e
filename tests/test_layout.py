"""Every module has one name, and importing one loads only what it needs.

`make lint` checks the layers of imports: their contracts are in pyproject.toml.
"""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.sources import LINKED, ROOT


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("flowkit", cache_dir=None)
    try:
        TopologicalSorter(
            {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
        ).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


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
    "flowkit": [
        *("motor", "pymongo", "temporalio", "cel_expr_python"),
        *("flowkit.models", "flowkit.config", "flowkit.products"),
    ],
    "flowkit.workflows.scheduling.scheduler": ["motor", "pymongo", "temporalio"],
    "flowkit.graph.validation": ["motor", "pymongo", "temporalio"],
    "flowkit.graph.conditions": ["motor", "pymongo", "temporalio", "cel_expr_python"],
    "flowkit.workflows.task": [
        *("motor", "pymongo", "cel_expr_python"),
        *("flowkit.adapters", "flowkit.activities"),
    ],
    "flowkit.flow": ["motor", "pymongo", "cel_expr_python"],
    "flowkit.cli.app": ["flowkit.admission", "flowkit.gateway", "flowkit.server"],
    "flowkit.cli.up.processes": ["aiokafka"],
    "flowkit.cli.doctor.checks": ["aiokafka"],
}
"""Modules in an order in which one process can import them, and what none of those up to each may have loaded."""


@pytest.mark.slow(2)
def test_importing_a_module_loads_only_what_it_needs() -> None:
    program = "import sys\n" + "\n".join(
        f"import {module}; print({module!r}, [m for m in {forbidden!r} if m in sys.modules])"
        for module, forbidden in LOADED.items()
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [f"{module} []" for module in LOADED]


HANDLERS = """
import sys

from flowkit import Flow, cel
from flowkit.worker import Batch, BatchResult, RoleHandler, RunContext, role

@role("count")
async def count(text: str, ctx: RunContext) -> int:
    return len(text)

flow = Flow("texts")
flow.node("count", count).maps("params.texts")
print([m for m in ("aiokafka", "cel_expr_python", "google", "motor", "pymongo", "temporalio") if m in sys.modules])
"""


@pytest.mark.slow(2)
def test_a_module_of_handlers_and_flows_loads_no_client_of_a_server() -> None:
    ended = subprocess.run([sys.executable, "-c", HANDLERS], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
