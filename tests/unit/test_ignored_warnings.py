"""Destructors of libraries do not fail a run, whatever test they run in."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import warnings
from typing import TYPE_CHECKING

import pytest
from aiokafka.conn import AIOKafkaConnection
from tests.unit.event_loop import let_other_tasks_run

if TYPE_CHECKING:
    from collections.abc import Iterator


class Connection(AIOKafkaConnection):  # type: ignore[misc]
    """A connection to a server that says nothing."""

    async def _do_version_lookup(self) -> None:
        pass


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The errors that destructors raise during the test."""
    texts: list[str] = []
    gc.collect()
    gc.freeze()  # The test then collects only its own garbage, in milliseconds.
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: texts.append(str(raised.exc_value)))
    yield texts


async def opened(port: int) -> Connection:
    """Return an open connection."""
    connection = Connection("127.0.0.1", port)
    await connection.connect()
    return connection


@pytest.mark.parametrize("closes", [False, True], ids=["open loop", "closed loop"])
def test_connection_that_aiokafka_drops_raises_no_error_when_it_is_collected(
    unraisable: list[str], closes: bool
) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = loop.run_until_complete(opened(server.getsockname()[1]))
        if closes:
            loop.close()
        del connection
        gc.collect()
        if not closes:
            loop.run_until_complete(let_other_tasks_run())
            loop.close()
    gc.collect()
    assert unraisable == []


def test_other_leaks_are_errors() -> None:
    for text in (
        "Unclosed AIOKafkaProducer <",
        "unclosed <socket.socket fd=1, family=1, type=1, proto=0",
        "unclosed file",
    ):
        with pytest.raises(ResourceWarning):
            warnings.warn(text, ResourceWarning, stacklevel=1)
