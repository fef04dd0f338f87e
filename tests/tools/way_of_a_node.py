"""The modules that run for one node: from the handler of the node before it to its own, in most nodes of a chain.

docs/contributing/ways.md lists them for each kind of node, in the order in which to read them; `documented` returns
that list. The same for other ways, such as that of an action, which is repeated as often as the chain has nodes.
"""

from __future__ import annotations

import ast
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from coverage import Coverage

from flowkit.attempt import role_lease
from flowkit.bridge import commands, service
from flowkit.bridge.kafka import consumer
from flowkit.engine import gauges, slot_leaks
from flowkit.server import auth

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from coverage import CoverageData

    from tests.integration.harness import Harness

CHAIN = ("first", "second", "third", "fourth", "fifth", "sixth")
"""The nodes of the chain, in which each depends on the one before it."""

ROOT = Path(__file__).parents[2]
_BEFORE, _BETWEEN, _AFTER = "before", "between", "after"
_WORKER_OF_TESTS = "src/flowkit/testing/external/"
"""The external worker of the tests, which is not on the way: any program can take its place."""

_NODE = "The way of a node"
_LIST = re.compile(r"^\*\*(.+?)\*\*.*?\n\n((?:\d+\. .*\n(?: {3,4}.*\n)*)+)", re.MULTILINE)
_FILE = re.compile(r"^\d+\. `([^`]+)`", re.MULTILINE)
_PASSED = re.compile(r"^\* `([^`]+\.py)`", re.MULTILINE)


_PAUSES = (
    (service, "TICK_SEC"),
    (service, "MEASURE_SEC"),
    (commands, "_OTHERS_SEC"),
    (consumer, "PROBE_SEC"),
    (slot_leaks, "_IDLE_TICK_SEC"),
    (role_lease, "LOST_SEC"),
    (gauges, "EVERY_SEC"),
    (gauges, "_CHECK_SEC"),
    (auth, "CACHE_SEC"),
)
"""The pauses of loops that would run meanwhile, whatever is on the way."""


def leave_undisturbed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of a test do nothing beside what is on the way."""
    harness.settings |= {"sweep_sec": 3600, "lease_ttl_sec": 60}
    monkeypatch.setenv("MONGO_DATABASE", harness.database)
    for module, pause in _PAUSES:
        monkeypatch.setattr(module, pause, 3600)


class Way:
    """Notes which modules of the product run from each handler of a chain to the next. Start it before the engine.

    A module is on the way if it runs for most nodes: what disturbs one node, such as a consumer group that
    rebalances on a busy machine, is not on it.
    """

    def __init__(self) -> None:
        self._coverage = Coverage(data_file=None, config_file=False, source_pkgs=["flowkit"], messages=False)
        self._coverage.set_option("run:disable_warnings", ["module-not-measured", "already-imported"])
        self._node_id = _BEFORE

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Measure the threads that start within the block."""
        self._coverage.start()
        self._coverage.switch_context(_BEFORE)
        try:
            yield
        finally:
            self._coverage.stop()

    def note(self, node_id: str) -> None:
        """End the way to this node of `CHAIN`, and begin the way to the next."""
        self._node_id = _AFTER if node_id == CHAIN[-1] else node_id
        self._coverage.switch_context(self._node_id)

    def end(self, part: str = "") -> None:
        """End the present way. The next one begins later; with a name, what runs before it is a `part` of its own."""
        self._coverage.switch_context(part + self._node_id if part else _BETWEEN)

    def modules(self, part: str = "") -> set[str]:
        """Return the files, relative to the root, of which a function ran on the way, or in the part after it."""
        data, parts = self._coverage.get_data(), {part + node_id for node_id in CHAIN}
        ran = (
            str(Path(name).resolve().relative_to(ROOT))
            for name in data.measured_files()
            if len(_contexts(name, data) & parts) > len(CHAIN) // 2
        )
        return {name for name in ran if not name.startswith(_WORKER_OF_TESTS)}


def _contexts(name: str, data: CoverageData) -> set[str]:
    """Return the ways on which a function of a file ran: by the node with which they begin."""
    contexts = data.contexts_by_lineno(name).items()
    return {context for line, found in contexts if line in _lines_of_functions(name) for context in found}


@cache
def _lines_of_functions(name: str) -> frozenset[int]:
    """Return the lines of a file that run when a function is called, not when the module is imported."""
    nodes = ast.walk(ast.parse(Path(name).read_text(encoding="utf-8")))
    bodies = [node.body for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    statements = (statement for body in bodies for statement in body)
    return frozenset(
        line for each in statements for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    )


@cache
def _section(title: str) -> str:
    page = (ROOT / "docs/contributing/ways.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {title}\n(.*?)(?:^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None, f"docs/contributing/ways.md has no section “{title}”"
    return section[1]


def documented(title: str = _NODE) -> dict[str, list[str]]:
    """Return the files on the ways in a section of the page, by the kind of node or action."""
    return {kind: _FILE.findall(items) for kind, items in _LIST.findall(_section(title))}


def not_listed() -> set[str]:
    """Return the files that the page leaves out of all lists, such as errors and models."""
    return set(_PASSED.findall(_section(_NODE)))
