"""`flowkit logs` prints the logs of a `flowkit up`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flowkit.cli.up.logs import LogFile, find_folder, sort_lines
from flowkit.errors import ConfigError
from flowkit.local.data_folder import data_folder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Program

ENGINE = "2026-01-31 12:00:01,5 INFO a\n2026-01-31 12:00:03,5 INFO b\nno time\n"
WORKER = "2026-01-31 12:00:02,5 INFO c\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the logs of three processes."""
    made = tmp_path / "data"
    made.mkdir()
    for name, text in (("engine", ENGINE), ("worker-1", WORKER), ("mongo", "ready\n")):
        (made / f"{name}.log").write_text(text)
    return made


def test_lines_of_all_but_the_servers_are_sorted_by_time(folder: Path, program: Program) -> None:
    printed = program.run("logs", "--data", str(folder))
    assert [(line.split(" | ")[0].strip(), line[-1]) for line in printed.out.splitlines()] == [
        ("engine", "a"),
        ("worker-1", "c"),
        ("engine", "b"),
        ("engine", "e"),
    ]
    only = program.run("logs", "mongo", "--data", str(folder))
    assert only.out == "mongo | ready\n"
    last = program.run("logs", "engine", "--lines", "1", "--data", str(folder))
    assert last.out == "engine | no time\n"


def test_unknown_process_is_reported_with_a_similar_one(folder: Path, program: Program) -> None:
    printed = program.run("logs", "worker", "--data", str(folder))
    assert printed.code == 2
    assert printed.err == f"flowkit: {folder} has no log of 'worker'; did you mean 'worker-1'?\n"


def test_later_reads_return_only_whole_new_lines(folder: Path) -> None:
    log = folder / "worker-1.log"
    reader = LogFile(log, 10)
    assert len(reader.read()) == 1
    with log.open("a") as more:
        more.write("x\ny")
        more.flush()
        assert [line.text for line in sort_lines(reader.read())] == ["x"]
        more.write("z\n")
        more.flush()
        assert [line.text for line in reader.read()] == ["yz"]


def test_folder_of_the_running_up_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="no `flowkit up` is running with a temporary folder, or with"):
        find_folder(None)
    with data_folder(None) as one:
        assert find_folder(None) == one
        with data_folder(None), pytest.raises(ConfigError, match="2 `flowkit up` are running"):
            find_folder(None)
