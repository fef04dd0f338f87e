"""The data folder of `flowkit up`: the user's folder, or a temporary one that is removed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flowkit.local.data_folder import LOCK_NAME, PREFIX, data_folder, folder_lock
from flowkit.local.errors import FolderInUse, FolderNotWritable, ServerEnded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def abandoned_folder(temporary: Path, *, seconds_ago: float) -> Path:
    """Create the folder of a killed `flowkit up`."""
    folder = temporary / f"{PREFIX}killed"
    folder.mkdir()
    for name in (LOCK_NAME, "temporal.lock", "temporal.db"):
        (folder / name).touch()
    then = (folder / LOCK_NAME).stat().st_mtime - seconds_ago
    os.utime(folder / LOCK_NAME, (then, then))
    return folder


def test_a_given_folder_is_kept(tmp_path: Path) -> None:
    with data_folder(tmp_path / "a" / "b") as folder:
        (folder / "temporal.db").touch()
    assert (tmp_path / "a" / "b" / "temporal.db").exists()


def test_a_temporary_folder_is_removed(temporary: Path) -> None:
    with data_folder(None) as folder:
        assert folder.parent == temporary
        (folder / "temporal.db").touch()
    assert list(temporary.iterdir()) == []


def test_logs_that_an_error_names_are_kept(temporary: Path) -> None:
    def fail() -> None:
        with data_folder(None) as folder:
            (folder / "mongo").mkdir()
            (folder / "temporal.db").touch()
            (folder / "engine.log").write_text("cause")
            raise ServerEnded(name="engine", code=1, log=folder / "engine.log", lines=["cause"])

    with pytest.raises(ServerEnded):
        fail()
    assert [path.name for path in temporary.glob("*/*")] == ["engine.log"]


def test_a_folder_can_be_used_by_one_flowkit_up_at_a_time(tmp_path: Path) -> None:
    with (
        data_folder(tmp_path / "data"),
        pytest.raises(FolderInUse, match="data is in use by a running flowkit up; stop it or choose another"),
        data_folder(tmp_path / "data"),
    ):
        pass


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderNotWritable, match="cannot write to .*file .a file is in the way"),
        data_folder(tmp_path / "file"),
    ):
        pass


def test_the_folder_of_a_killed_process_is_removed(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=100)
    with data_folder(None):
        assert not folder.exists()


def test_a_folder_whose_server_still_runs_is_kept(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=100)
    with folder_lock(folder / "temporal.lock"), data_folder(None):
        assert folder.exists()


def test_a_new_folder_is_kept(temporary: Path) -> None:
    folder = abandoned_folder(temporary, seconds_ago=0)
    with data_folder(None):
        assert folder.exists()
