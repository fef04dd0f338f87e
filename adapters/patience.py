"""Waiting out a database that is away (tenacity does the waiting)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential_jitter

from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_logger = logging.getLogger("flowkit.store")


async def durably(call: Callable[[], Awaitable[T]]) -> T:
    """`await call()`, again and again while MongoDB does not answer; ends with the attempt that waits for it."""
    try:
        return await call()
    except StoreUnavailable as error:
        _logger.warning("%s; trying again until it does", error)
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(StoreUnavailable),
        wait=wait_exponential_jitter(multiplier=0.1, max=2.0),
        reraise=True,
    ):
        with attempt:
            return await call()
    raise AssertionError("tenacity gave up without a limit")
