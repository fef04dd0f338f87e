"""Several writes at the same time, where each costs a round trip and neither needs the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flowkit.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def together(*writes: Awaitable[None]) -> None:
    """Return when all writes have ended. Raises an error of one of them, rather one that no retry heals."""
    ends = await asyncio.gather(*writes, return_exceptions=True)
    errors = [end for end in ends if isinstance(end, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, StoreUnavailable))
