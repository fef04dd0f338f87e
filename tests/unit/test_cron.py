"""Cron expressions as calendars, against an independent library and the rules in words."""

from __future__ import annotations

import random
from calendar import monthrange
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cronsim import CronSim
from temporalio.client import ScheduleActionStartWorkflow, ScheduleCalendarSpec, ScheduleRange, ScheduleSpec
from tests.unit.property_examples import examples

from flowkit.schedules import ScheduleTimes
from flowkit.schedules.cron import Calendar, calendars
from flowkit.schedules.times import times_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START, END = date(2024, 1, 1), date(2034, 1, 1)
SATURDAY = 5


def days_of(text: str) -> set[date]:
    """Return the days of ten years on which an expression fires."""
    found = calendars(text)
    each_day = (START + timedelta(days=number) for number in range((END - START).days))
    return {day for day in each_day if any(has_day(calendar, day) for calendar in found)}


def has_day(calendar: Calendar, day: date) -> bool:
    """Return whether a calendar has times on a day."""
    return (
        day.day in calendar.day_of_month
        and day.month in calendar.month
        and day.isoweekday() % 7 in calendar.day_of_week
        and day.year in calendar.year
    )


def library_days(text: str) -> set[date]:
    """Return the days of ten years on which the library says that an expression fires."""
    found: set[date] = set()
    for at in CronSim(text, datetime(2023, 12, 31, 23, 59)):
        if at.date() >= END:
            return found
        found.add(at.date())
    return found


def random_part(chance: random.Random, least: int, most: int) -> str:
    """Return a part of a field: a value, a range, or one with a step."""
    first = chance.randint(least, most - 1)
    last = chance.randint(first + 1, most)  # the library takes 5-5/2 for 5/2
    return chance.choice(
        [
            f"{first}",
            f"{first}-{last}",
            f"*/{chance.randint(1, most)}",
            f"{first}-{last}/{chance.randint(1, 5)}",
            f"{first}/{chance.randint(1, 7)}",
        ]
    )


def random_field(chance: random.Random, least: int, most: int, own: list[str]) -> str:
    """Return a field of one to three parts, of which some are special forms, or `*`."""
    if chance.random() < 0.3:
        return "*"
    parts = [random_part(chance, least, most) for _ in range(chance.randint(1, 3))]
    return ",".join(chance.choice(own) if own and chance.random() < 0.2 else part for part in parts)


def test_random_expressions_fire_on_the_days_that_the_library_says() -> None:
    chance = random.Random(20261128)
    for _ in range(examples(10)):
        day = random_field(chance, 1, 28, ["L", "LW"])
        month = random_field(chance, 1, 12, ["FEB", "nov"])
        weekday = random_field(chance, 0, 7, ["MON", "sun", "FRI#2", "3#5", "0#1", "5L", "7L"])
        text = f"0 4 {day} {month} {weekday}"
        assert days_of(text) == library_days(text), text


@pytest.mark.parametrize(
    ("text", "minutes", "hours"),
    [
        ("*/15 * * * *", {0, 15, 30, 45}, set(range(24))),
        ("5/20 4-6,22 * * *", {5, 25, 45}, {4, 5, 6, 22}),
        ("7-20/5 ? * * *", {7, 12, 17}, set(range(24))),
        ("@hourly", {0}, set(range(24))),
    ],
)
def test_minutes_and_hours_are_those_of_the_fields(text: str, minutes: set[int], hours: set[int]) -> None:
    (found,) = calendars(text)
    assert (set(found.minute), set(found.hour), set(found.second)) == (minutes, hours, {0})


def months() -> Iterator[tuple[int, int, int]]:
    """Yield year, month and number of days of each month of the ten years."""
    for year in range(START.year, END.year):
        for month in range(1, 13):
            yield year, month, monthrange(year, month)[1]


def nearest(year: int, month: int, length: int, number: int) -> date | None:
    """Return the day from Monday to Friday of a month that is nearest to a day of it."""
    if number > length:
        return None
    working = [each for day in range(1, length + 1) if (each := date(year, month, day)).weekday() < SATURDAY]
    return min(working, key=lambda each: abs(each.day - number))


@pytest.mark.parametrize("number", [1, 2, 15, 28, 29, 30, 31])
def test_w_is_the_nearest_day_from_monday_to_friday_of_the_same_month(number: int) -> None:
    wanted = {nearest(*each, number) for each in months()} - {None}
    assert days_of(f"0 4 {number}W * *") == wanted


@pytest.mark.parametrize(
    ("day", "wanted"),
    [
        ("L-2", lambda year, month, length: [date(year, month, length - 2)]),
        ("l", lambda year, month, length: [date(year, month, length)]),
        ("1,L", lambda year, month, length: [date(year, month, 1), date(year, month, length)]),
        ("LW", lambda year, month, length: [nearest(year, month, length, length)]),
        ("L-29", lambda year, month, length: [date(year, month, length - 29)] if length > 29 else []),
    ],
)
def test_l_counts_from_the_last_day(day: str, wanted: Callable[[int, int, int], list[date]]) -> None:
    assert days_of(f"0 4 {day} * *") == {each for month in months() for each in wanted(*month)}


def test_with_a_day_and_a_weekday_either_fits_and_a_star_restricts() -> None:
    assert date(2026, 12, 15) in days_of("0 4 1,15 * MON")  # a Tuesday
    assert date(2026, 12, 7) in days_of("0 4 1,15 * MON")  # a Monday
    assert all(day.isoweekday() == 1 and day.day % 2 for day in days_of("0 4 */2 * MON"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("60 4 * * *", "the minute is '60'; write 0 to 59"),
        ("0 24 * * *", "the hour is '24'; write 0 to 23"),
        ("0 4 0 * *", "the day is '0'; write 1 to 31"),
        ("0 4 * JANUARY *", "the month is 'JANUARY'; write 1 to 12, or JAN/FEB"),
        ("0 4 * * 8", "the weekday is '8'; write 0 to 7, or SUN/MON"),
        ("0 4 * * MON#6", "the weekday is 'MON#6'; write #1 to #5 after it"),
        pytest.param("9" * 5_000 + " 4 * * *", "; write *, 5, 1-5", id="long"),
        ("0 22-2 * * *", "the hour is '22-2', which ends before it begins; write 22-23,0-2"),
        (
            "*/90 * * * *",
            "the minute is '*/90', with a step of 90; a step is 1 to 60. For other intervals use every",
        ),
        ("0 4 , * *", "the day is ''; write *, 5, 1-5, */15 or a list of these"),
        ("0 4 L-31 * *", "the day is 'L-31'; write L, or L-1 to L-30"),
        ("0 4 31 2 *", "no such day ever comes"),
        ("0 4 30W FEB *", "no such day ever comes"),
        ("H 4 * * *", "the minute is 'H'; write 0 to 59"),
        ("", "it has 0 fields instead of five"),
    ],
)
def test_an_invalid_field_is_named_with_its_value_and_what_fits(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        calendars(text)
    assert problem in str(caught.value)


def stored(times: ScheduleTimes) -> ScheduleSpec:
    """Return the calendars and intervals that are sent to Temporal."""
    return times.schedule(ScheduleActionStartWorkflow("Task", id="x", task_queue="q")).spec


def test_the_calendars_of_an_expression_are_read_back_as_one() -> None:
    crons = ["0 4 1,15 * MON", "0 4 L * *", "@daily", "0 5 15W FEB-MAR fri#2"]
    times = ScheduleTimes.read({"cron": [*crons, "@daily"]})
    spec = stored(times)
    assert len(spec.calendars) > len(crons)
    assert times_of(spec) == times
    assert times.text == "0 4 1,15 * MON, 0 4 L * *, @daily, 0 5 15W FEB-MAR fri#2 UTC"


def test_calendars_that_were_edited_in_temporal_are_shown_as_edited() -> None:
    spec = stored(ScheduleTimes.read({"cron": ["0 4 1,15 * MON", "@daily"]}))
    spec.calendars = [
        ScheduleCalendarSpec(hour=[ScheduleRange(5)], comment=each.comment)
        if each.comment != "@daily"
        else each
        for each in spec.calendars
    ]
    found = times_of(spec)
    assert (found.cron, found.edited, found.text) == (
        ("@daily",),
        True,
        "@daily UTC, times edited in Temporal",
    )
    assert found.changed({"catchup": "1h"}).edited
    assert not found.changed({"cron": "@hourly"}).edited
    assert not found.changed({"every": "1h"}).edited
