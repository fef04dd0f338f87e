"""A browser, and page servers with tasks in a database in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from flowkit.page.process import PageProcess, PageSettings
from tests.page.browser import open_browser, open_page
from tests.page.pages import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from playwright.async_api import Browser, Page


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """The browser of this module."""
    async with open_browser() as chromium:
        yield chromium


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """A page of the browser."""
    async with open_page(browser) as opened:
        yield opened


@pytest.fixture
def stage() -> Stage:
    """A database without tasks."""
    return Stage()


@pytest_asyncio.fixture(loop_scope="module")
async def start(stage: Stage) -> AsyncIterator[Callable[..., Awaitable[PageProcess]]]:
    """Start page servers, which stop after the test."""
    started: list[PageProcess] = []

    async def start_one(**settings: Any) -> PageProcess:
        process = PageProcess(stage.servers, PageSettings(addresses=[("127.0.0.1", 0)], **settings))
        await process.start()
        started.append(process)
        return process

    yield start_one
    for process in started:
        await process.stop()
