"""Every command of the README works in a fresh checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from typing import TYPE_CHECKING

import pytest
from pymongo import MongoClient
from tests.cli.up.up_process import free_port_base
from tests.docs.pages import ROOT, blocks
from tests.docs.reader import Reader, expect
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flowkit.local import Stack


@pytest.fixture
def reader(tmp_path: Path, stack: Stack, folder: str) -> Iterator[Reader]:
    """A reader in a fresh checkout, whose demo indexes a small source tree."""
    name = uuid.uuid4().hex[:10]
    own = {"MONGO_DATABASE": f"readme_{name}", "FLOWKIT_QUEUE": f"readme-{name}", "SOURCE": str(ROOT / "src")}
    if folder == ".":  # The external worker of the other one finds Kafka at the default port.
        own["FLOWKIT_PORT_BASE"] = str(free_port_base())
    with Reader(tmp_path, {**os.environ, **stack.exports, **own}) as page_reader:
        check_out(page_reader.folder)
        yield page_reader
    with MongoClient[dict[str, object]](stack.mongo_url) as mongo:
        mongo.drop_database(own["MONGO_DATABASE"])


def check_out(folder: Path) -> None:
    """Copy the files of this checkout, with the virtual environment that `make setup` then reuses."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not os.path.lexists(ROOT / name):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    os.utime(folder / "pyproject.toml", (0, 0))


@pytest.mark.server
@pytest.mark.nightly
@pytest.mark.skipif(not (ROOT / ".venv/.installed").exists(), reason="the environment was not made by make")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("folder", [".", "examples/second_hour"])
def test_a_readme_can_be_followed(folder: str, reader: Reader) -> None:
    reader.follow(ROOT / folder / "README.md")


def test_the_first_example_is_short_typed_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    page = blocks(ROOT / "README.md")
    program = next(block for block in page if block.marks.get("file") == "words.py")
    assert len(program.text.splitlines()) <= 40
    (tmp_path / "words.py").write_text(program.text, encoding="utf-8")
    code, out, err = fork_server().run([], tmp_path, os.environ, EVENT_TIMEOUT_SEC, module="words")
    assert code == 0, err
    expect(next(block for block in page if block.language == "text"), out)


def test_the_readme_fits_two_screens_and_shows_one_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert text.count("![") == 1
