"""What a run releases at its end: clean-ups in reverse order, files, and processes with their whole process group."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.integration.harness import EVENT_TIMEOUT_SEC as TIMEOUT_SEC
from tests.integration.harness import eventually, wait_seconds

from flowkit.activities.context import Resources, Subprocess

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IGNORES_SIGTERM = 'trap "" TERM; sh -c \'trap "" TERM; echo $$ > "$0"; while :; do sleep 1; done\' "$0"'
"""A shell and its child, both of which ignore SIGTERM; the child writes its id into the file named as $0."""


@pytest.fixture
def resources() -> Resources:
    return Resources()


async def release(resources: Resources) -> None:
    """Release everything, within a time limit."""
    await asyncio.wait_for(resources.release(), TIMEOUT_SEC)


def is_gone(pid: int) -> bool:
    """Return whether no process with this id runs; a zombie counts as gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until_gone(pid: int) -> None:
    """Wait until a process has ended."""

    async def look() -> bool:
        return is_gone(pid)

    await eventually(look, TIMEOUT_SEC)


async def pid_in(path: Path) -> int:
    """Wait for the process id in a file."""

    async def look() -> int | None:
        return number_in(path)

    return await eventually(look, TIMEOUT_SEC)


def number_in(path: Path) -> int | None:
    """Return the number in a file; None while there is none."""
    return int(path.read_text()) if path.exists() and path.read_text().strip() else None


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


# --- clean-ups --------------------------------------------------------------------------------------------------


async def test_resources_are_released_in_reverse_order(resources: Resources) -> None:
    order: list[str] = []

    def plain(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    async def coroutine() -> None:
        order.append("coroutine")

    resources.add(plain("first"))
    resources.add(coroutine)
    resources.add(plain("last"))
    await release(resources)
    assert order == ["last", "coroutine", "first"]


async def cancelled_work() -> None:
    """Raise CancelledError, as a wait for a cancelled task does."""
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


def fails() -> None:
    """Fail in a plain clean-up."""
    raise OSError("the disk is gone")


async def fails_later() -> None:
    """Fail in an async clean-up."""
    await wait_seconds(0)
    raise ValueError("no")


@pytest.mark.parametrize("broken", [fails, fails_later, cancelled_work])
async def test_failing_clean_up_does_not_prevent_the_others(
    resources: Resources, broken: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []
    resources.add(lambda: done.append("first"))
    resources.add(broken)
    resources.add(lambda: done.append("last"))
    with caplog.at_level(logging.ERROR, logger="flowkit.worker"):
        await release(resources)
    assert done == ["last", "first"]
    assert "a cleanup callback failed" in caplog.text


async def test_clean_up_can_register_another_one(resources: Resources) -> None:
    done: list[str] = []
    resources.add(lambda: resources.add(lambda: done.append("inner")))
    await release(resources)
    assert done == ["inner"]


async def test_everything_is_released_once(resources: Resources) -> None:
    done: list[int] = []
    resources.add(lambda: done.append(1))
    await release(resources)
    await release(resources)
    assert done == [1]


# --- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_text", [True, False])
async def test_files_and_folders_are_removed(resources: Resources, tmp_path: Path, as_text: bool) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("x")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_text("x")
    for path in (file, folder):
        resources.add_path(str(path) if as_text else path)
    await release(resources)
    assert names_in(tmp_path) == []


async def test_missing_path_is_not_an_error(
    resources: Resources, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resources.add_path(tmp_path / "never" / "was")
    await release(resources)
    assert caplog.text == ""


async def test_symbolic_link_is_removed_and_its_target_kept(resources: Resources, tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.mkdir()
    link.symlink_to(kept)
    resources.add_path(link)
    await release(resources)
    assert names_in(tmp_path) == ["kept"]


# --- processes started by the handler ------------------------------------------------------------------------------


@pytest.mark.parametrize("own_group", [True, False])
async def test_registered_process_is_killed(resources: Resources, own_group: bool) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=own_group)
    resources.add_process(process)
    await release(resources)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_SEC) == -signal.SIGKILL


def sleeper() -> subprocess.Popen[bytes]:
    """Start a process outside of asyncio."""
    return subprocess.Popen(["sleep", "600"])


async def test_registered_process_of_the_subprocess_module_is_killed(resources: Resources) -> None:
    with sleeper() as process:
        resources.add_process(process)
        await release(resources)
    assert process.returncode == -signal.SIGKILL


async def test_children_of_a_registered_group_leader_are_killed(resources: Resources, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", IGNORES_SIGTERM, str(tmp_path / "pid"), start_new_session=True
    )
    child = await pid_in(tmp_path / "pid")
    resources.add_process(process)
    await release(resources)
    await process.wait()
    await until_gone(child)


async def test_registered_process_that_has_exited_is_not_an_error(
    resources: Resources, caplog: pytest.LogCaptureFixture
) -> None:
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    resources.add_process(process)
    await release(resources)
    assert caplog.text == ""


# --- subprocesses of the run context -------------------------------------------------------------------------------


async def run(*command: str) -> int:
    """Return the exit code of a command."""
    process = await Subprocess.start(*command)
    try:
        return await asyncio.wait_for(process.wait(), TIMEOUT_SEC)
    finally:
        await process.end(1)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)]
)
async def test_exit_code_is_returned(script: str, code: int) -> None:
    assert await run("sh", "-c", script) == code


async def test_missing_command_raises_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        await run("no-such-command-anywhere")


async def test_megabytes_of_output_do_not_block_the_command() -> None:
    script = "head -c 5000000 /dev/zero; head -c 5000000 /dev/zero >&2"
    assert await run("sh", "-c", script) == 0


async def test_last_output_of_a_failed_command_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    script = "head -c 100000 /dev/zero | tr '\\0' x; echo; echo the last words >&2; exit 3"
    with caplog.at_level(logging.WARNING, logger="flowkit.worker"):
        assert await run("sh", "-c", script) == 3
    assert "exited with code 3" in caplog.text
    assert "the last words" in caplog.text
    assert len(caplog.text) < 2_000


async def test_command_does_not_wait_for_its_background_processes(tmp_path: Path) -> None:
    assert await run("sh", "-c", 'sleep 600 & echo $! > "$0"', str(tmp_path / "pid")) == 0
    await until_gone(await pid_in(tmp_path / "pid"))


async def test_command_that_handles_sigterm_is_not_killed() -> None:
    process = await Subprocess.start("sleep", "600")
    await process.end(TIMEOUT_SEC)
    assert await process.wait() == -signal.SIGTERM


async def test_process_group_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    process = await Subprocess.start("sh", "-c", IGNORES_SIGTERM, str(tmp_path / "pid"))
    child = await pid_in(tmp_path / "pid")
    began = time.monotonic()
    await asyncio.wait_for(process.end(0.2), TIMEOUT_SEC)
    assert time.monotonic() - began >= 0.2, "SIGTERM comes first, and the grace is given"
    assert await process.wait() == -signal.SIGKILL
    await until_gone(child)


async def test_command_has_its_own_process_group() -> None:
    process = await Subprocess.start("sleep", "600")
    pid: int = process._process.pid
    assert os.getpgid(pid) == pid != os.getpgid(0)
    await process.end(TIMEOUT_SEC)
