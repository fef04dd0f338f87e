"""The first example of the page about admission works as it is shown, on real servers and in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from pymongo import MongoClient
from tests.docs.pages import DOCS, ROOT, SHELL, blocks
from tests.docs.reader import expect
from tests.fork_server import fork_server
from tests.integration.harness import EVENT_TIMEOUT_SEC

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.docs.pages import Block

    from flowkit.local import Stack

PAGE = DOCS / "admission.md"
END = PAGE.read_text(encoding="utf-8").splitlines().index("## Requests")
EXAMPLE = [block for block in blocks(PAGE) if block.line < END]
FILES = {block.marks["file"]: block.text for block in EXAMPLE if "file" in block.marks}
PATIENCE = ('"sec": 10', '"sec": 60')
"""On a busy machine, the tasks of `flood` must not end while a reader types the commands."""

VARIES = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|(?<=waited )\S+|(?<=events of )\d+")
"""What differs between two runs: the id of a request, a time, and the events that are not sent yet."""


def test_the_files_of_the_page_are_those_of_the_repository() -> None:
    files = [path for path in (ROOT / "examples/admission").iterdir() if path.is_file()]
    assert {path.name: path.read_text(encoding="utf-8") for path in files} == FILES


@pytest.fixture
def environment(stack: Stack, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A queue and a database of its own, and the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text.replace(*PATIENCE), encoding="utf-8")
    name = uuid.uuid4().hex[:10]
    own = {"MONGO_DATABASE": f"page_{name}", "FLOWKIT_QUEUE": f"page-{name}", "COLUMNS": "120"}
    yield {**os.environ, **stack.exports, **own}
    with MongoClient[dict[str, object]](stack.mongo_url) as mongo:
        mongo.drop_database(own["MONGO_DATABASE"])


@pytest.mark.slow(25)
@pytest.mark.server
def test_dora_is_served_while_flood_waits(environment: dict[str, str], tmp_path: Path) -> None:
    [_, limits, flood, dora, status] = [block for block in EXAMPLE if block.language in SHELL]
    shown = [
        replace(block, text=VARIES.sub("…", block.text)) for block in EXAMPLE if block.language == "text"
    ]
    expect(shown[0], run(limits, environment, tmp_path))
    parts = (["engine"], ["admission", "run", "--no-http"])
    running = [fork_server().start(part, tmp_path, environment) for part in parts]
    try:
        expect(shown[1], run(flood, environment, tmp_path))
        wait_until_three_are_active(environment, tmp_path)
        expect(shown[2], run(dora, environment, tmp_path))
        expect(shown[3], run(status, environment, tmp_path))
    finally:
        for part in running:
            part.terminate()
        for part in running:
            part.wait(EVENT_TIMEOUT_SEC)


def run(block: Block, environment: dict[str, str], folder: Path) -> str:
    """Run the command of a block. Return what it prints."""
    program, *arguments = shlex.split(block.text)
    module = "flowkit" if program == "flowkit" else arguments.pop(0).removesuffix(".py")
    code, out, err = fork_server().run(arguments, folder, environment, EVENT_TIMEOUT_SEC, module=module)
    assert code == 0, out + err
    return out.replace(environment["FLOWKIT_QUEUE"], "flowkit")


def wait_until_three_are_active(environment: dict[str, str], folder: Path) -> None:
    """A reader has seen that `flowkit up` has started everything, so the first tasks start at once."""
    status = ["admission", "status", "--json"]
    deadline = time.monotonic() + EVENT_TIMEOUT_SEC
    while time.monotonic() < deadline:
        _, out, _ = fork_server().run(status, folder, environment, EVENT_TIMEOUT_SEC)
        if json.loads(out)["active"] == 3:
            return
    raise AssertionError(f"three requests never became active:\n{out}")
