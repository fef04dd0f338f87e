"""Servers for the tests: started once a run, on free ports, when a test needs them, and stopped at its end."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from flowkit.local import Stack, ports
from flowkit.text import clean
from tests import mongo_table
from tests.fork_server import TEST_PROCESS, ForkServer, fork_server
from tests.kafka_server import kafka
from tests.run_order import arranged
from tests.servers import SharedServers, started_by
from tests.unit.property_examples import THOROUGH

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.servers import Start

__all__ = ["kafka"]

settings.register_profile("flowkit", deadline=None, derandomize=not THOROUGH, print_blob=True)
settings.load_profile("flowkit")

COLLECTED = pytest.StashKey[ForkServer]()
OWNED = pytest.StashKey[SharedServers]()
URL = "flowkit_servers"
TEARDOWN_SEC = 300


def pytest_configure(config: pytest.Config) -> None:
    """Use programs, even where a container engine runs, unless FLOWKIT_SERVERS is set.

    Without garbage collection, the collection of the tests takes a tenth less time.
    """
    os.environ.setdefault("FLOWKIT_SERVERS", "path,cache,download")
    _choose_own_ports()
    if not config.option.collectonly:
        mongo_table.start_collecting()
    config.stash[OWNED] = SharedServers()
    gc.disable()


def _choose_own_ports() -> None:
    """Let the test processes of pytest-xdist choose from different ports.

    While a test restarts a server, its port is free for a moment, in which a server of another process could take it.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports.CANDIDATES = ports.CANDIDATES[number::processes]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests for the test processes of pytest-xdist, of which each orders them in the same way."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1:
        items[:] = arranged(items, processes)


def pytest_collection_finish() -> None:
    """Take what lives until the end of the run out of the garbage collection, which otherwise passes it all
    the time.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let pytest-xdist start its test processes as forks of one that has collected the tests.

    Not for `--cov`, which would miss the lines that run in imports.
    """
    os.environ.update(fork_server().variables)
    if not config.getoption("cov_source", None):
        config.stash[COLLECTED] = ForkServer(tests=config.args)
        for spec in specs:
            spec.python = config.stash[COLLECTED].command(TEST_PROCESS)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a test process of pytest-xdist the URL where it can start the servers."""
    node.workerinput[URL] = node.config.stash[OWNED].listen()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the servers after all test processes; after failures, keep the logs of the servers in .logs/.

    Then compare what the product has sent to MongoDB with docs/mongodb.md.
    """
    session.config.stash[OWNED].stop(keep_logs=bool(session.testsfailed))
    mongo_table.compare(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what docs/mongodb.md lacks."""
    mongo_table.report(terminalreporter, config)


@pytest.fixture(scope="session")
def start_servers(pytestconfig: pytest.Config) -> Start:
    """A function that starts the run's servers with the given names and returns the variables with the addresses."""
    shared: dict[str, str] = getattr(pytestconfig, "workerinput", {})
    return started_by(shared[URL]) if URL in shared else pytestconfig.stash[OWNED].start


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, start_servers: Start) -> Stack:
    """The run's Temporal and MongoDB, whose addresses are set."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in start_servers("temporal", "mongo").items():
            patch.setenv(name, value)
        external = Stack(tmp_path_factory.getbasetemp())
    return external


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Some tests log lone surrogates, which reports cannot carry from one test process to another."""
    report = yield
    report.sections = [(name, clean(text)) for name, text in report.sections]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Collect what a failed test has left open before the next test, which the warnings of destructors would fail."""
    failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed > failed:
        collect_leftovers()
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """End a test process whose teardown hangs, with the stacks of its threads: pytest-timeout fails a test only once,
    which may have been before. pytest-xdist reports the test, and starts another process.
    """
    faulthandler.dump_traceback_later(
        TEARDOWN_SEC, file=item.config.stash[fault_handler_stderr_fd_key], exit=True
    )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def collect_leftovers() -> None:
    """Free what only the latest failure refers to, for example clients of a test that timed out.

    Ignore its warnings.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "unraisablehook", lambda _: None)
        gc.collect()


@pytest.fixture(autouse=True)
def _addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that use the servers, and the processes they start, find them through the environment."""
    if "stack" in request.fixturenames:
        assert request.node.get_closest_marker("server"), (
            "a test that uses the servers needs the mark `server`"
        )
        running: Stack = request.getfixturevalue("stack")
        for name, value in running.exports.items():
            monkeypatch.setenv(name, value)
