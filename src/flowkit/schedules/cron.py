"""Cron expressions as calendars: sets of minutes, hours, days, months, weekdays and years, which must all match.

Temporal starts a task at each time that one of the calendars of a schedule matches, once. It needs several calendars
for what cron says with one expression: a day or a weekday (`0 4 1,15 * MON`), the last day of a month (`L`), or the
weekday nearest to a day (`15W`). Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowkit.text import printed

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTHANDS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
"""The words that stand for a whole expression."""
YEARS = frozenset(range(2000, 2101))
"""The years in which Temporal matches calendars."""
DAYS = frozenset(range(1, 32))
MONTHS = frozenset(range(1, 13))
WEEKDAYS = frozenset(range(7))
"""Sunday is 0."""

_DAY_NAMES = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_MONTH_NAMES = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_MONDAY, _FRIDAY, _SATURDAY, _SUNDAY = 1, 5, 6, 0
_PLAIN = re.compile(
    r"(?:(?P<all>[*?])|(?P<first>\w{1,9})(?:-(?P<last>\w{1,9}))?)(?:/(?P<step>\d{1,3}))?", re.ASCII
)
_FROM_END = re.compile(r"L(?:-(\d{1,2}))?", re.ASCII)
_NEAREST = re.compile(r"(\d{1,2}|L)W", re.ASCII)
_NTH = re.compile(r"(\w{1,9})#(\d{1,2})", re.ASCII)
_LAST = re.compile(r"(\w{1,9})L", re.ASCII)
_LEAP_YEARS = frozenset(year for year in YEARS if year % 4 == 0 and (year % 100 or year % 400 == 0))
_MONTHS_OF = {
    31: frozenset({1, 3, 5, 7, 8, 10, 12}),
    30: frozenset({4, 6, 9, 11}),
    29: frozenset({2}),
    28: frozenset({2}),
}
"""The months that have so many days, in the years of _YEARS_OF."""
_YEARS_OF = {31: YEARS, 30: YEARS, 29: _LEAP_YEARS, 28: YEARS - _LEAP_YEARS}

_Days = frozenset[tuple[int, int]]
"""Days of a month, each with the weekday on which it must fall."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calendar:
    """The times whose parts are all in these sets, by the names that Temporal has for the parts."""

    second: frozenset[int] = frozenset({0})
    minute: frozenset[int]
    hour: frozenset[int]
    day_of_month: frozenset[int] = DAYS
    month: frozenset[int] = MONTHS
    day_of_week: frozenset[int] = WEEKDAYS
    year: frozenset[int] = YEARS


@dataclass(frozen=True, slots=True)
class _Field:
    """One of the five fields of an expression: what it is called, and its values."""

    name: str
    least: int
    most: int
    names: tuple[str, ...] = ()

    def value(self, text: str) -> int:
        """Return a value from its number, or from its name in English. Raise ValueError, which says what fits."""
        if text in self.names:
            return self.names.index(text) + self.least
        if text.isdecimal() and self.least <= int(text) <= self.most:
            return int(text)
        named = f", or {'/'.join(self.names)}" if self.names else ""
        raise ValueError(f"the {self.name} is {printed(text)}; write {self.least} to {self.most}{named}")

    def plain(self, part: str) -> frozenset[int]:
        """Return the values of `*`, `5`, `1-5`, `*/15` or `5/15`. Raise ValueError, which names the field."""
        found = _PLAIN.fullmatch(part)
        if found is None:
            raise ValueError(f"the {self.name} is {printed(part)}; write *, 5, 1-5, */15 or a list of these")
        first = self.least if found["all"] else self.value(found["first"])
        to_the_end = found["all"] or found["step"]
        last = self.value(found["last"]) if found["last"] else self.most if to_the_end else first
        step = int(found["step"] or 1)
        if last < first:
            raise ValueError(
                f"the {self.name} is {printed(part)}, which ends before it begins; write "
                f"{found['first']}-{self.most},{self.least}-{found['last']}"
            )
        if not 1 <= step <= self.most - self.least + 1:
            raise ValueError(
                f"the {self.name} is {printed(part)}, with a step of {step}; a step is 1 to "
                f"{self.most - self.least + 1}. For other intervals use every"
            )
        return frozenset(range(first, last + 1, step))

    def values(self, text: str) -> frozenset[int]:
        """Return the values of a list."""
        return frozenset().union(*(self.plain(part) for part in text.split(",")))


_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day", 1, 31)
_MONTH = _Field("month", 1, 12, _MONTH_NAMES)
_WEEKDAY = _Field("weekday", 0, 7, _DAY_NAMES)
"""Sunday is 0 and 7."""
FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)


def calendars(text: str) -> frozenset[Calendar]:
    """Return the calendars of a cron expression of five fields or of a word such as `@daily`.

    A field is a list of `*`, `5`, `1-5`, `*/15` and `5/15`; months and weekdays also have names. Days may be `L` (the
    last one), `L-2` (two days before it), `15W` (the weekday nearest to the 15th, in the same month) and `LW`; weekdays
    `MON#2` (the second Monday) and `FRIL` or `5L` (the last Friday). If both day and weekday are given, either of them
    fits; if one of them begins with `*`, both must fit. Raise ValueError, which names the field, its value and what
    fits, if the expression is invalid or never fires.
    """
    if text.startswith("@") and text not in SHORTHANDS:
        raise ValueError(f"the words are {', '.join(sorted(SHORTHANDS))}; for an interval use every")
    parts = SHORTHANDS.get(text, text).upper().split()
    if parts and "TZ=" in parts[0]:
        raise ValueError("a cron expression names no time zone; use the option timezone")
    if len(parts) != len(FIELDS):
        raise ValueError(f"it has {len(parts)} fields instead of five; for an interval of seconds use every")
    minute, hour, day, month, weekday = parts
    minutes, hours = _MINUTE.values(minute), _HOUR.values(hour)
    found = frozenset(
        Calendar(
            minute=minutes, hour=hours, day_of_month=days, month=months, day_of_week=weekdays, year=years
        )
        for months, years, pairs in _by_length(day, weekday, _MONTH.values(month))
        for weekdays, days in _rectangles(pairs)
    )
    if not found:
        raise ValueError("no such day ever comes")
    return found


def _by_length(
    day: str, weekday: str, months: frozenset[int]
) -> Iterator[tuple[frozenset[int], frozenset[int], _Days]]:
    """Yield months, years and the days that fit in them: once for all, or once for each length of a month.

    A day that a month does not have, such as 30 February, never comes; it needs no calendar of its own.
    """
    by_length = {length: _fitting(day, weekday, length) for length, own in _MONTHS_OF.items() if own & months}
    longest = by_length[max(by_length)]
    if all(
        pairs == {(number, on) for number, on in longest if number <= length}
        for length, pairs in by_length.items()
    ):
        yield months, YEARS, longest
        return
    for length, pairs in by_length.items():
        yield _MONTHS_OF[length] & months, _YEARS_OF[length], pairs


def _fitting(day: str, weekday: str, length: int) -> _Days:
    """Return the days of a month with `length` days that fit. A field that begins with `*` or `?` only restricts."""
    by_day = frozenset[tuple[int, int]]().union(*(_days(part, length) for part in day.split(",")))
    by_weekday = frozenset[tuple[int, int]]().union(*(_weekdays(part, length) for part in weekday.split(",")))
    return by_day & by_weekday if {day[0], weekday[0]} & {"*", "?"} else by_day | by_weekday


def _days(part: str, length: int) -> _Days:
    """Return the days that a part of the day field means."""
    if found := _FROM_END.fullmatch(part):
        if int(found[1] or 0) >= _DAY.most:
            raise ValueError(f"the day is {printed(part)}; write L, or L-1 to L-{_DAY.most - 1}")
        return _on_any({length - int(found[1] or 0)} & DAYS)
    if found := _NEAREST.fullmatch(part):
        return _nearest(length if found[1] == "L" else _DAY.value(found[1]), length)
    return _on_any({each for each in _DAY.plain(part) if each <= length})


def _on_any(days: frozenset[int] | set[int]) -> _Days:
    return frozenset((day, weekday) for day in days for weekday in WEEKDAYS)


def _nearest(day: int, length: int) -> _Days:
    """Return the day, or the Friday or Monday nearest to it that is in the same month."""
    if day > length:
        return frozenset()
    of_saturday = (day - 1, _FRIDAY) if day > 1 else (day + 2, _MONDAY)
    of_sunday = (day + 1, _MONDAY) if day < length else (day - 2, _FRIDAY)
    return frozenset({*((day, each) for each in range(_MONDAY, _SATURDAY)), of_saturday, of_sunday})


def _weekdays(part: str, length: int) -> _Days:
    """Return the days that a part of the weekday field means."""
    if found := _NTH.fullmatch(part):
        number = int(found[2])
        if not 1 <= number <= 5:
            raise ValueError(f"the weekday is {printed(part)}; write #1 to #5 after it")
        days = range(7 * number - 6, min(7 * number, length) + 1)
        return frozenset((day, _WEEKDAY.value(found[1]) % 7) for day in days)
    if found := _LAST.fullmatch(part):
        return frozenset((day, _WEEKDAY.value(found[1]) % 7) for day in range(length - 6, length + 1))
    weekdays = {each % 7 for each in _WEEKDAY.plain(part)}
    return frozenset((day, weekday) for day in range(1, length + 1) for weekday in weekdays)


def _rectangles(pairs: _Days) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Yield sets of weekdays and days: the days that fit on the same weekdays stand together."""
    weekdays_of = defaultdict(set)
    for day, weekday in pairs:
        weekdays_of[day].add(weekday)
    days_on = defaultdict(set)
    for day, weekdays in weekdays_of.items():
        days_on[frozenset(weekdays)].add(day)
    for on, days in days_on.items():
        yield on, frozenset(days)
