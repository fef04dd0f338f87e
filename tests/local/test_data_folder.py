"""The folder of one `flowkit up`: the user's for good, or a temporary one of which nothing remains."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from flowkit.local.data_folder import LOCK_NAME, PREFIX, data_folder
from flowkit.local.errors import FolderInUse, FolderNotWritable, ServerEnded
from flowkit.local.folder_lock import folder_lock

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def left_behind(temporary: Path, *, seconds_ago: float) -> Path:
    """The folder of one that was killed."""
    folder = temporary / f"{PREFIX}killed"
    folder.mkdir()
    for name in (LOCK_NAME, "temporal.lock", "temporal.db"):
        (folder / name).touch()
    then = (folder / LOCK_NAME).stat().st_mtime - seconds_ago
    os.utime(folder / LOCK_NAME, (then, then))
    return folder


def test_a_folder_of_the_users_stays(tmp_path: Path) -> None:
    with data_folder(tmp_path / "a" / "b") as folder:
        (folder / "temporal.db").touch()
    assert (tmp_path / "a" / "b" / "temporal.db").exists()


def test_a_temporary_folder_is_removed(temporary: Path) -> None:
    with data_folder(None) as folder:
        assert folder.parent == temporary
        (folder / "temporal.db").touch()
    assert list(temporary.iterdir()) == []


def test_the_logs_that_an_error_names_stay(temporary: Path) -> None:
    def end() -> None:
        with data_folder(None) as folder:
            (folder / "mongo").mkdir()
            (folder / "temporal.db").touch()
            (folder / "engine.log").write_text("why")
            raise ServerEnded(name="engine", code=1, log=folder / "engine.log", lines=["why"])

    with pytest.raises(ServerEnded):
        end()
    assert [path.name for path in temporary.glob("*/*")] == ["engine.log"]


def test_a_folder_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    with (
        data_folder(tmp_path / "data"),
        pytest.raises(FolderInUse, match="data is in use by a running flowkit up; stop it or choose another"),
        data_folder(tmp_path / "data"),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderNotWritable, match="cannot write to .*file .a file is in the way"),
        data_folder(tmp_path / "file"),
    ):
        pass


def test_what_a_killed_one_left_behind_is_removed(temporary: Path) -> None:
    folder = left_behind(temporary, seconds_ago=100)
    with data_folder(None):
        assert not folder.exists()


def test_what_still_saves_its_data_is_left_alone(temporary: Path) -> None:
    folder = left_behind(temporary, seconds_ago=100)
    with folder_lock(folder / "temporal.lock"), data_folder(None):
        assert folder.exists()


def test_what_is_just_being_made_is_left_alone(temporary: Path) -> None:
    folder = left_behind(temporary, seconds_ago=0)
    with data_folder(None):
        assert folder.exists()
