"""A plugin of pytest that runs tests on many mutants: `FLOWKIT_MUTANTS=FILE pytest -p tests.tools.mutant_runs`.

The file describes a `Campaign`. All mutants are part of the modules that are imported, and each is off at first. The
plugin runs the tests once and records which mutants each of them reaches. Then, for each mutant, it runs those that
reach it with the mutant on, until one fails. It does all this in forks of the process that has collected the tests.

The processes that tests start contain no mutants.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SWITCH = "_is_mutant_on"
"""The name of the function that the changed code calls."""

MOST_SEC = 900
"""A mutant that takes longer has been found: it made something wait forever."""

MOST_CPU_SEC = 180
"""How much processor time the tests of a mutant may take."""


@dataclass(frozen=True)
class Change:
    """Code that a mutant replaces in a line of a file, from the byte `start` of the line up to `end`."""

    id: int
    path: str
    line: int
    start: int
    end: int
    code: str


@dataclass(frozen=True)
class Campaign:
    """What a run does."""

    changes: Sequence[Change]
    results: str
    """The file to which it adds a line of JSON for each mutant: its `id`, the test that has `found` it, and how many
    tests `reach` it."""
    processes: int = 2


@dataclass
class Mutants:
    """The mutants in the modules of this process."""

    files: dict[str, list[Change]] = field(default_factory=dict)
    on: int | None = None
    reached: set[int] = field(default_factory=set)

    def is_on(self, id: int) -> bool:
        """Return whether a mutant is on, and record that it was reached."""
        self.reached.add(id)
        return self.on == id

    def changes_of(self, path: str) -> list[Change]:
        """Return the changes of a file, last ones first."""
        found = self.files.get(os.path.realpath(path), []) if path.endswith(".py") else []
        return sorted(found, key=lambda each: (each.line, each.start), reverse=True)

    def install(self) -> None:
        """Let modules that are imported from now on contain the mutants."""
        read, describe = SourceFileLoader.get_data, SourceFileLoader.path_stats

        def get_data(loader: SourceFileLoader, path: str) -> bytes:
            return switched(read(loader, path), self.changes_of(path))

        def path_stats(loader: SourceFileLoader, path: str) -> Any:
            if self.changes_of(path):
                raise OSError  # then the compiled file is neither read nor written
            return describe(loader, path)

        setattr(builtins, SWITCH, self.is_on)
        for replaced in (get_data, path_stats):
            setattr(SourceFileLoader, replaced.__name__, replaced)


def switched(source: bytes, changes: Iterable[Change]) -> bytes:
    """Return the source of a module with both versions of each changed expression."""
    lines = source.splitlines(keepends=True)
    for each in changes:
        line = lines[each.line - 1]
        old = line[each.start : each.end].decode()
        both = f"(({each.code}) if {SWITCH}({each.id}) else ({old}))"
        lines[each.line - 1] = line[: each.start] + both.encode() + line[each.end :]
    return b"".join(lines)


class Outcome:
    """The failure of the test that runs."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the first failure."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class Runs:
    """The runs of the tests."""

    def __init__(self, campaign: Campaign, mutants: Mutants) -> None:
        self.campaign = campaign
        self.mutants = mutants
        self.reaches = Path(f"{campaign.results}.reaches")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all tests once, then those that reach each mutant. The forks share a folder, and servers."""
        if session.config.option.collectonly:
            return None
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if not any(item.get_closest_marker("server") for item in session.items):
            self._run_all(session)
            return True
        from tests.servers import SharedServers

        servers = SharedServers()
        os.environ.update(servers.start("temporal", "mongo", "kafka"))
        try:
            self._run_all(session)
        finally:
            servers.stop(keep_logs=False)
        return True

    def _run_all(self, session: pytest.Session) -> None:
        self.reaches.write_text("", encoding="utf-8")
        size = len(session.items) // (self.campaign.processes * 4) + 1
        parts = [session.items[n : n + size] for n in range(0, len(session.items), size)]
        self._in_forks([partial(self._record, session, part) for part in parts])
        rows = sorted(read_lines(self.reaches), key=lambda row: float(row["sec"]))
        items = {item.nodeid: item for item in session.items}
        good = [(items[row["test"]], row["reached"]) for row in rows if not row["failed"]]
        self._in_forks(
            [
                partial(self._hunt, session, each.id, [item for item, reached in good if each.id in reached])
                for each in self.campaign.changes
            ]
        )

    def _record(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        def note(item: pytest.Item, failed: str | None, sec: float) -> bool:
            reached = sorted(self.mutants.reached)
            add_line(self.reaches, test=item.nodeid, failed=failed, sec=sec, reached=reached)
            return False

        self._run(session, items, note)

    def _hunt(self, session: pytest.Session, id: int, items: Sequence[pytest.Item]) -> None:
        self.mutants.on = id
        start = time.process_time()
        found: list[str] = []

        def note(_: pytest.Item, failed: str | None, __: float) -> bool:
            found.extend([failed] if failed else [])
            return bool(found) or time.process_time() - start > MOST_CPU_SEC

        self._run(session, items, note)
        add_line(Path(self.campaign.results), id=id, found=found[0] if found else None, reach=len(items))

    def _run(
        self,
        session: pytest.Session,
        items: Sequence[pytest.Item],
        note: Callable[[pytest.Item, str | None, float], bool],
    ) -> None:
        """Run tests until `note`, which receives the failure of each and its processor time, returns true."""
        outcome = Outcome()
        session.config.pluginmanager.register(outcome)
        for item, following in zip(items, [*items[1:], None], strict=False):
            outcome.failed, start = None, time.process_time()
            self.mutants.reached.clear()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if note(item, outcome.failed, time.process_time() - start):
                break
        session._setupstate.teardown_exact(None)

    def _in_forks(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run each job in a process of its own, some at a time."""
        waiting, ends = [*jobs], dict[int, float]()
        while waiting or ends:
            while waiting and len(ends) < self.campaign.processes:
                ends[_fork(waiting.pop(0))] = time.monotonic() + MOST_SEC
            pid, _ = os.waitpid(-1, os.WNOHANG)
            ends.pop(pid, None)
            for late in [each for each, end in ends.items() if end < time.monotonic()]:
                os.kill(late, signal.SIGKILL)
            time.sleep(0 if pid else 0.1)


def _fork(job: Callable[[], None]) -> int:
    """Start a job. Its output is lost."""
    if pid := os.fork():
        return pid
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        job()
    finally:
        os._exit(0)


def add_line(path: Path, **fields: Any) -> None:
    """Add a line of JSON to a file to which other processes add some too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Add the mutants before the first module is imported."""
    given = json.loads(Path(os.environ["FLOWKIT_MUTANTS"]).read_text(encoding="utf-8"))
    campaign = Campaign(**{**given, "changes": [Change(**each) for each in given["changes"]]})
    mutants = Mutants()
    for each in campaign.changes:
        mutants.files.setdefault(each.path, []).append(each)
    mutants.install()
    early_config.pluginmanager.register(Runs(campaign, mutants))
