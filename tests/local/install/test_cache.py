"""The cache installs each program once, and only completely."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC
from tests.local.processes import stdout_of

from flowkit.local.errors import InstallFailed
from flowkit.local.install import cache_size, find_installed, install_once

INSTALLER = """
import sys, threading
from pathlib import Path
from flowkit.local.install import install_once

who, journal, gate = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])

def build(folder):
    (folder / f"by-{who}").touch()
    with journal.open("a") as log:
        log.write(who)
    print("building", flush=True)
    while not gate.exists():
        threading.Event().wait(0.01)

print("calling", flush=True)
install_once("thing", "1", build)
print("done", flush=True)
"""


@pytest.fixture
def installer(
    tmp_path: Path, cache: Path, python: Callable[..., subprocess.Popen[str]]
) -> Callable[[str], subprocess.Popen[str]]:
    """Starts a process that installs the same program as the others, until the file `gate` exists."""
    return lambda who: python("-c", INSTALLER, who, str(tmp_path / "journal"), str(tmp_path / "gate"))


@pytest.mark.slow
def test_concurrent_callers_install_once(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [stdout_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    second = installer("b")
    assert stdout_of(second).readline() == "calling\n"
    assert not (tmp_path / "cache/thing/1").exists()

    (tmp_path / "gate").touch()

    assert stdout_of(second).read() == "done\n"
    assert stdout_of(first).read() == "done\n"
    assert (tmp_path / "journal").read_text() == "a"


@pytest.mark.slow
def test_a_killed_installation_starts_again(
    tmp_path: Path, installer: Callable[[str], subprocess.Popen[str]]
) -> None:
    first = installer("a")
    assert [stdout_of(first).readline() for _ in range(2)] == ["calling\n", "building\n"]
    first.kill()
    first.wait()
    (tmp_path / "gate").touch()

    second = installer("b")

    assert second.wait(timeout=EVENT_TIMEOUT_SEC) == 0
    assert [path.name for path in (tmp_path / "cache/thing/1").iterdir()] == ["by-b"]


def test_a_failed_installation_leaves_nothing_behind(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise InstallFailed("no network")

    with pytest.raises(InstallFailed):
        install_once("thing", "1", fail)
    assert find_installed("thing", "1") is None
    assert cache_size() == 0
    assert list(install_once("thing", "1", lambda folder: None).iterdir()) == []
