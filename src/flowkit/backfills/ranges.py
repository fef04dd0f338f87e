"""Which nominal times a backfill has. Errors show the right form, and the times around an empty range. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from flowkit import limits
from flowkit.errors import ConfigError
from flowkit.graph.scheduled import format_nominal
from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

PAGE = 1_000
"""The most nominal times that Temporal lists at once."""
_SECOND = timedelta(seconds=1)
_YEARS = range(1970, 2101)
"""The years in which Temporal has nominal times."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_FORM = (
    "write a date such as 2026-11-01, which begins at midnight in the time zone of the schedule, or a time with its "
    "offset, such as 2026-11-01T02:00:00+01:00"
)


def read_bound(value: object, name: str, timezone: str) -> datetime:
    """Return the start or the end of a range, in UTC. A date is its first moment in the time zone of the schedule.

    Nominal times are whole seconds, so the fraction of a second of a bound counts as a whole one, which is the form
    that MongoDB keeps. Raise ConfigError, which shows the right form.
    """
    try:
        found = value if isinstance(value, datetime) else _read_text(value, timezone)
        # In UTC first: arithmetic in a time zone forgets which of two equal hours it is when clocks go back.
        utc = None if found.tzinfo is None else found.astimezone(UTC)
        at = None if utc is None else utc.replace(microsecond=0) + _SECOND * bool(utc.microsecond)
    except (ValueError, OverflowError, LookupError):
        raise ConfigError(f"{name} is {printed(value)}; {_FORM}") from None
    if at is None and isinstance(value, datetime):
        raise ConfigError(f"{name} is {printed(value)}, without a time zone; pass a datetime with tzinfo")
    if at is None:
        raise ConfigError(f"{name} is {printed(value)}, without an offset; {_FORM}")
    if at.year not in _YEARS:
        years = f"{_YEARS[0]} to {_YEARS[-1]}"
        raise ConfigError(f"{name} is {printed(value)}; the years of nominal times are {years}")
    return at


def _read_text(value: object, timezone: str) -> datetime:
    text = value.strip() if isinstance(value, str) else ""
    found = datetime.fromisoformat(text)
    if _DATE.fullmatch(text):
        return found.replace(tzinfo=UTC if timezone == "UTC" else ZoneInfo(timezone))
    return found


def check_range(start: datetime, end: datetime) -> None:
    """Raise ConfigError if a range ends before it begins."""
    if start >= end:
        raise ConfigError(
            f"from is {format_nominal(start)}, which is not before to, {format_nominal(end)}; a backfill has the times "
            "from from to before to"
        )


async def list_times(
    list_page: Callable[[datetime, datetime], Awaitable[Sequence[datetime]]], start: datetime, end: datetime
) -> list[datetime]:
    """Return the nominal times from `start` to before `end`. `list_page` returns the first PAGE of a range.

    Raise ConfigError if there are more than a backfill may have.
    """
    found: list[datetime] = []
    begin = start - timedelta(seconds=1)
    while True:
        page = [
            at for at in await list_page(begin, end) if start <= at < end and (not found or at > found[-1])
        ]
        found += page
        if len(found) > limits.BACKFILL_TIMES:
            first = format_nominal(found[limits.BACKFILL_TIMES])
            raise ConfigError(
                f"from {format_nominal(start)} to {format_nominal(end)} there are more than {limits.BACKFILL_TIMES:,} "
                f"nominal times; create several backfills, the first one with to {first}"
            )
        if not page:
            return found
        begin = found[-1]


def empty_range(
    start: datetime, end: datetime, before: datetime | None, after: datetime | None
) -> ConfigError:
    """Return the error for a range without nominal times, with those before and after it."""
    around = [
        f"{'the one before' if each is before else 'the one after'} is {format_nominal(each)}"
        for each in (before, after)
        if each is not None
    ]
    return ConfigError(
        f"the schedule has no nominal time from {format_nominal(start)} to before {format_nominal(end)}"
        + (f"; {' and '.join(around)}" if around else "")
    )
