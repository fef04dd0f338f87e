"""Following a page word for word works, on real servers and in an empty folder."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import pytest
from pymongo import MongoClient
from tests.cli.up.up_process import free_port_base
from tests.docs.pages import DOCS
from tests.docs.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flowkit.local import Stack

FOLLOWED = [
    DOCS / "tutorial.md",
    *(pytest.param(page, marks=pytest.mark.nightly) for page in sorted((DOCS / "howto").glob("*.md"))),
]
"""The pages. Tests of the command line prove in `make test` what the guides show."""
PATIENCE = {'"deadline_sec": 30': '"deadline_sec": 60', "(10))  # stands for": "(20))  # stands for"}
"""What a reader on a busy machine, whose commands take longer than the page expects, would change in the files."""


@pytest.fixture
def reader(tmp_path: Path, stack: Stack) -> Iterator[Reader]:
    """A reader with the servers of the tests, and with its own queue and database."""
    name = uuid.uuid4().hex[:10]
    own = {**stack.exports, "MONGO_DATABASE": f"page_{name}", "FLOWKIT_QUEUE": f"page-{name}"}
    own["FLOWKIT_PORT_BASE"] = str(free_port_base())
    with Reader(tmp_path, {**os.environ, **own}, PATIENCE) as page_reader:
        yield page_reader
    with MongoClient[dict[str, object]](stack.mongo_url) as mongo:
        mongo.drop_database(own["MONGO_DATABASE"])


@pytest.mark.server
@pytest.mark.slow(80)
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, reader: Reader) -> None:
    reader.follow(page)
