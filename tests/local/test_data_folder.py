"""The data folder of `flowkit up`: the user's folder, or a temporary one that is removed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.local.data_folder import (
    LOCK_NAME,
    PREFIX,
    TEMPORARY,
    data_folder,
    folder_lock,
    running_folders,
    write_private,
)
from flowkit.local.errors import FolderInUse, FolderNotWritable, ServerEnded, ServerNotReady

if TYPE_CHECKING:
    from pathlib import Path


OLD = 100_000.0
"""More than a day, in seconds."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def abandoned_folder(temporary: Path, *, seconds_ago: float) -> Path:
    """Create the folder of a killed `flowkit up`."""
    folder = temporary / f"{PREFIX}killed"
    folder.mkdir()
    for name in (TEMPORARY, LOCK_NAME, "temporal.lock", "temporal.db"):
        (folder / name).touch()
    age(folder, seconds_ago)
    return folder


def age(folder: Path, seconds_ago: float = OLD) -> None:
    """Let all files of a folder look older."""
    for file in folder.iterdir():
        then = file.stat().st_mtime - seconds_ago
        os.utime(file, (then, then))


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with data_folder(tmp_path / "a" / "b") as folder:
        (folder / "temporal.db").touch()
    assert (tmp_path / "a" / "b" / "temporal.db").exists()


def test_a_new_folder_and_its_secret_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with data_folder(tmp_path / "data") as folder:
            (folder / "old").touch()
            for name in ("new", "old"):
                write_private(folder / name, "secret")
                assert (folder / name).read_text() == "secret"
            assert {each.stat().st_mode & 0o777 for each in (folder / "new", folder / "old")} == {0o600}
            assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_temporary_folder_is_removed(temporary: Path) -> None:
    with data_folder(None) as folder:
        assert folder.parent == temporary
        (folder / "temporal.db").touch()
    assert list(temporary.iterdir()) == []


def fail_in_a_folder(kind: type[ServerEnded | ServerNotReady]) -> None:
    """Leave the block of a temporary folder that has data and a log with an error."""
    with data_folder(None) as folder:
        (folder / "mongo").mkdir()
        (folder / "temporal.db").touch()
        (folder / "engine.log").write_text("cause")
        what: dict[str, Any] = {"code": 1} if kind is ServerEnded else {"reason": "was not ready"}
        raise kind(name="engine", log=folder / "engine.log", lines=["cause"], **what)


def test_logs_that_an_error_names_are_kept(temporary: Path) -> None:
    with pytest.raises(ServerNotReady):
        fail_in_a_folder(ServerNotReady)
    assert [path.name for path in temporary.glob("*/*")] == ["engine.log"]


def test_data_are_kept_when_a_process_ends_by_itself(temporary: Path) -> None:
    with pytest.raises(ServerEnded):
        fail_in_a_folder(ServerEnded)
    [folder] = temporary.iterdir()
    assert {"engine.log", "mongo", "temporal.db"} <= {path.name for path in folder.iterdir()}
    age(folder)
    with data_folder(None):
        assert (folder / "temporal.db").exists()


def test_a_temporary_folder_that_is_named_afterwards_is_kept(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=0)
    with data_folder(folder):
        pass
    age(folder)
    with data_folder(None):
        assert folder.exists()


def test_a_folder_can_be_used_by_one_flowkit_up_at_a_time(tmp_path: Path) -> None:
    with (
        data_folder(tmp_path / "data"),
        pytest.raises(FolderInUse, match="data is in use by a running flowkit up; stop it or choose another"),
        data_folder(tmp_path / "data"),
    ):
        pass


def test_folder_in_the_current_folder_is_found_while_it_is_used(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    with data_folder(folder):
        assert running_folders() == [folder]
    assert running_folders() == []


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderNotWritable, match="cannot write to .*file .a file is in the way"),
        data_folder(tmp_path / "file"),
    ):
        pass


def test_the_folder_of_a_killed_process_is_removed(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=OLD)
    with data_folder(None):
        assert not folder.exists()


def test_a_folder_whose_server_still_runs_is_kept(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=OLD)
    with folder_lock(folder / "temporal.lock"), data_folder(None):
        assert folder.exists()


def test_a_new_folder_is_kept(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=0)
    with data_folder(None):
        assert folder.exists()
