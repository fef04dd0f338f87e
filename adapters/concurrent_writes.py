"""Concurrent execution of independent writes, which saves round trips to the database."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def together(*writes: Awaitable[None]) -> None:
    """Return when all writes have ended. If some failed, raise one of their errors, preferably a permanent one."""
    results = await asyncio.gather(*writes, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, StoreUnavailable))
