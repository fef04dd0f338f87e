"""A page server beside the real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from flowkit.adapters.tasks.store import TaskStore
from flowkit.client import TaskCatalog, TaskClient
from flowkit.page.process import PageProcess, PageSettings
from flowkit.reading.state import Servers
from tests.page.browser import open_browser, open_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from playwright.async_api import Page

    from tests.integration.harness import Harness


@pytest.fixture
async def servers(harness: Harness) -> Servers:
    """The clients of a page server."""
    client = await harness.client()
    tasks = TaskClient(client, TaskStore(harness.db), queue=harness.queue, any_queue=True)
    return Servers(temporal=client, tasks=tasks, catalog=TaskCatalog(harness.db), db=harness.db)


@pytest.fixture
async def start_page(servers: Servers) -> AsyncIterator[Callable[..., Awaitable[PageProcess]]]:
    """Start page servers, which stop after the test."""
    started: list[PageProcess] = []

    async def start(port: int = 0, **settings: Any) -> PageProcess:
        process = PageProcess(servers, PageSettings(addresses=[("127.0.0.1", port)], **settings))
        await process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        await process.stop()


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    """A page of a headless Chromium."""
    async with open_browser() as browser, open_page(browser) as opened:
        yield opened
