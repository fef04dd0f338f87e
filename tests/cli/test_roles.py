"""`flowkit roles` shows roles with their versions, where they run, and their types."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.worker_registry import AnnouncedContract, HostedHandler, WorkerRegistry
from flowkit.cli import servers
from flowkit.cli.app import run
from flowkit.core.loops import run as run_loop
from flowkit.testing import memory_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

AT = 1_700_000_000.0
PAGE = {"title": "Page", "type": "object"}
WORDS = {"title": "Words", "type": "object"}


def announced(given: Any, returned: Any) -> AnnouncedContract:
    """Return a contract with these schemas."""
    texts = [json.dumps(each) if each else "" for each in (given, returned)]
    return AnnouncedContract(input=texts[0], output=texts[1], digest="-".join(texts))


async def fill(db: Any) -> None:
    """Register workers of three roles in two queues, and one that is offline."""
    registry = WorkerRegistry(db)
    rows: list[tuple[str, str, str, bool, str, AnnouncedContract | None]] = [
        ("w-1", "count", "1.4", False, "q", announced(PAGE, WORDS)),
        ("w-2", "count", "1.4", False, "q", announced(PAGE, WORDS)),
        ("w-3", "count", "1.5", False, "q", announced(WORDS, WORDS)),
        ("engine-1", "crawl", "2", True, "q", announced(None, PAGE)),
        ("w-4", "count", "1.6", False, "other", None),
        ("w-5", "old", "1", False, "q", announced(PAGE, PAGE)),
    ]
    for worker_id, role, version, engine, queue, contract in rows:
        hosts = [HostedHandler(role=role, version=version, engine=engine, contract=contract)]
        await registry.register(worker_id, [role], "", 1, AT, session="s", queue=queue, handlers=hosts)
    await registry.mark_offline("w-5", AT, session="s")
    await registry.record_announcement("x-1", {"type": "mail", "version": "3"}, AT)


@pytest.fixture(autouse=True)
def db(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The database that the command reads."""
    found = memory_database()
    run_loop(fill(found))

    @asynccontextmanager
    async def database(_: object) -> AsyncIterator[Any]:
        yield found

    monkeypatch.setattr(servers, "database", database)
    return found


def lines(text: str) -> list[list[str]]:
    """Return the cells of a table without blanks around them."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines() if line]


def test_table_has_the_roles_with_a_worker_online(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["roles"]) == 0
    shown = capsys.readouterr()
    assert lines(shown.out) == [
        ["role", "queue", "runs in", "online", "version", "types"],
        ["count", "other", "worker", "1", "1.6"],
        ["count", "q", "worker", "3", "1.4 (2), 1.5 (1)", "Page, Words → Words"],
        ["crawl", "q", "engine", "1", "2", "any → Page"],
        ["mail", "external", "1", "3"],
    ]
    assert shown.err == "1 has no worker online; `--all` shows them\n"


def test_queue_selects_its_roles_and_all_shows_those_without_a_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["roles", "--queue", "q", "--all"]) == 0
    assert lines(capsys.readouterr().out) == [
        ["role", "runs in", "online", "version", "types"],
        ["count", "worker", "3", "1.4 (2), 1.5 (1)", "Page, Words → Words"],
        ["crawl", "engine", "1", "2", "any → Page"],
        ["mail", "external", "1", "3"],
        ["old", "worker", "0", "1", "Page → Page"],
    ]


def test_role_is_shown_with_its_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["roles", "crawl"]) == 0
    table, _, schemas = capsys.readouterr().out.partition("\n\n")
    assert lines(table)[1:] == [["crawl", "engine", "1", "2", "any → Page"]]
    assert schemas == f"output of role crawl:\n{json.dumps(PAGE, indent=2)}\n"
    assert run(["roles", "count", "--queue", "q"]) == 0
    shown = capsys.readouterr().out
    assert "input of role count, version 1.4:\n" in shown
    assert "input of role count, version 1.5:\n" in shown
    assert run(["roles", "mail"]) == 0
    assert capsys.readouterr().err == "role mail announces no types\n"


def test_json_has_the_schemas_of_each_version_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["roles", "--json", "--queue", "q"]) == 0
    count, crawl, mail = json.loads(capsys.readouterr().out)["roles"]
    assert count == {
        "role": "count",
        "queue": "q",
        "runs_in": ["worker"],
        "online": 3,
        "versions": {"1.4": 2, "1.5": 1},
        "input": "Page, Words",
        "output": "Words",
    }
    assert (crawl["input"], mail["output"], mail["queue"]) == (None, None, "")
    assert run(["roles", "count", "--json", "--queue", "q"]) == 0
    [found] = json.loads(capsys.readouterr().out)["roles"]
    assert found["types"] == [
        {"versions": ["1.4"], "input": PAGE, "output": WORDS},
        {"versions": ["1.5"], "input": WORDS, "output": WORDS},
    ]


def test_unknown_role_suggests_a_similar_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["roles", "crawler"]) == 2
    text = "flowkit: no worker of role 'crawler' has ever registered; did you mean 'crawl'?\n"
    assert capsys.readouterr().err == text


def test_database_without_workers_says_how_to_start_one(capsys: pytest.CaptureFixture[str], db: Any) -> None:
    run_loop(db.worker_registry.delete_many({}))
    assert run(["roles"]) == 0
    text = "no workers are online; start one with `flowkit worker module:Handler`\n"
    assert capsys.readouterr().err == text
