"""The options of schedules: their forms, their defaults, and errors that show the right form."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from temporalio.client import ScheduleCalendarSpec, ScheduleIntervalSpec, ScheduleSpec

from flowkit.cli.errors import describe_error
from flowkit.cli.schedules.operations import read_definitions
from flowkit.errors import ConfigError, GraphError
from flowkit.schedules import ScheduleDefinition, ScheduleTimes
from flowkit.schedules.plan import plan_changes
from flowkit.schedules.times import duration_text, read_duration, times_of

if TYPE_CHECKING:
    from pathlib import Path


HOUR = timedelta(hours=1)


def read(**options: Any) -> ScheduleTimes:
    """Return the times of a new schedule."""
    return ScheduleTimes.read(cast("Any", options))


@pytest.mark.parametrize("text", ["1s", "90s", "15m", "2h", "1d", "365d"])
def test_durations_are_written_as_they_are_read(text: str) -> None:
    assert duration_text(read_duration(text, "every")) == text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "a schedule needs cron or every. The five fields are"),
        ({"every": "1h", "overlap": "allow", "pause_on_failure": True}, "has no effect with overlap allow"),
        (
            {"cron": "@daily", "every": "1h"},
            "cron and every exclude each other; leave one of them out. The five",
        ),
        (
            {"cron": "0 2 * *"},
            "cron is '0 2 * *': it has 4 fields instead of five; for an interval of seconds use",
        ),
        ({"cron": "* * * * * *"}, "it has 6 fields instead of five"),
        (
            {"cron": "CRON_TZ=Europe/Berlin 0 2 * * *"},
            "a cron expression names no time zone; use the option timezone",
        ),
        ({"cron": "@every 5m"}, "the words are @annually, @daily"),
        (
            {"cron": "0 2 * * 1#9"},
            "cron is '0 2 * * 1#9': the weekday is '1#9'; write #1 to #5 after it. The five",
        ),
        ({"cron": 5}, "cron is 5: it is not a text"),
        ({"every": "15"}, "every is '15'; write a whole number and s, m, h or d"),
        ({"every": "0s"}, "every is '0s'; the shortest interval is 1s. every 15m fires at"),
        ({"every": timedelta(milliseconds=500)}, "write a whole number and s, m, h or d"),
        ({"cron": "@daily", "timezone": "Europe/Berln"}, "did you mean 'Europe/Berlin'? The five fields are"),
        ({"cron": "@daily", "overlap": "buffer_one"}, "overlap is 'buffer_one'; did you mean 'buffer-one'?"),
        ({"cron": "@daily", "catchup": "1s"}, "catchup is less than 10 s"),
        ({"cron": "@daily", "jitter": "x"}, "jitter is 'x'; write a whole number"),
        ({"cron": "@daily", "pause_on_failure": 1}, "pause_on_failure is 1; write true or false"),
        (
            {"cron": "@daily", "time_zone": "UTC"},
            "'time_zone' is no option of a schedule; did you mean 'timezone'?",
        ),
    ],
)
def test_an_invalid_option_is_named_with_its_value_and_the_right_form(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**options)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_change_keeps_what_it_does_not_name_and_cron_replaces_every() -> None:
    times = read(every="15m", timezone="Europe/Berlin", overlap="buffer-all", pause_on_failure=True)
    changed = times.changed({"cron": "0  2 * * *", "catchup": "1h"})
    assert changed.as_json() == {
        "cron": ["0 2 * * *"],
        "timezone": "Europe/Berlin",
        "overlap": "buffer-all",
        "catchup": "1h",
        "pause_on_failure": True,
    }
    assert changed.changed({"every": "1h"}).text == "every 1h"
    assert times.changed({"pause_on_failure": False}).pause_on_failure is False


def test_times_for_which_there_is_no_option_are_shown_as_edited() -> None:
    for spec in (
        ScheduleSpec(calendars=[ScheduleCalendarSpec()]),
        ScheduleSpec(intervals=[ScheduleIntervalSpec(every=HOUR, offset=timedelta(minutes=20))]),
        ScheduleSpec(intervals=[ScheduleIntervalSpec(every=HOUR), ScheduleIntervalSpec(every=2 * HOUR)]),
    ):
        assert (times_of(spec).text, times_of(spec).edited) == ("times edited in Temporal", True)


def test_a_change_checks_what_it_names_and_not_what_was_edited_in_temporal() -> None:
    edited = replace(read(cron="@daily"), overlap="allow", pause_on_failure=True, timezone="Europe/Unknown")
    assert edited.changed({"jitter": "5s"}) == replace(edited, jitter=timedelta(seconds=5))
    for given in ({"pause_on_failure": True}, {"overlap": "allow"}):
        with pytest.raises(ConfigError, match="pause_on_failure has no effect with overlap allow"):
            edited.changed(cast("Any", given))


def test_parts_of_a_second_that_were_edited_in_temporal_are_a_difference() -> None:
    edited = replace(read(every="2s"), every=timedelta(seconds=1.5), jitter=timedelta(seconds=0.4))
    before, after = (
        ScheduleDefinition(graph={"nodes": []}, params={}, times=each) for each in (edited, read(every="2s"))
    )
    (change,) = plan_changes({"x": after}, {"x": before}, prune=False)
    assert change.differences == ('every: "1.5s" → "2s"', 'jitter: "0.4s" → (default)')
    assert duration_text(timedelta(seconds=1_000_000.5)) == "1000000.5s"


def test_a_difference_of_type_is_a_difference() -> None:
    for old, new in ((1, True), (0, False), (1, 1.0), ([1], [True]), ({"a": 0}, {"a": False})):
        before, after = (
            ScheduleDefinition(graph={"nodes": []}, params={"flag": each}, times=read(cron="@daily"))
            for each in (old, new)
        )
        (change,) = plan_changes({"x": after}, {"x": before}, prune=False)
        assert change.differences == (f"params.flag: {json.dumps(old)} → {json.dumps(new)}",)
        assert not before.starts_same(after)


def test_a_file_replaces_times_that_were_edited_and_says_so() -> None:
    edited = times_of(ScheduleSpec(calendars=[ScheduleCalendarSpec(comment="0 4 1,15 * MON")]))
    before, after = (
        ScheduleDefinition(graph={"nodes": []}, params={}, times=each)
        for each in (edited, read(cron="0 4 1,15 * MON"))
    )
    (change,) = plan_changes({"x": after}, {"x": before}, prune=False)
    assert change.differences[0].endswith("or every; they become 0 4 1,15 * MON UTC")


def test_only_prune_deletes_schedules_that_are_not_wanted() -> None:
    definition = ScheduleDefinition(graph={"nodes": []}, params={}, times=read(cron="@daily"))
    for prune, step in ((False, "unlisted"), (True, "delete")):
        changes = plan_changes({}, {"old": definition}, prune=prune)
        assert [(each.name, each.step) for each in changes] == [("old", step)]


@pytest.mark.parametrize(
    "given",
    [
        {"graph": "absent.json", "every": "1h"},
        {"graph": {"nodes": [{"node_id": "a", "type": "x"}]}, "every": "1h", "params": []},
        {
            "graph": {"nodes": [{"node_id": "a", "type": "x"}]},
            "every": "1h",
            "params": {"a": {"$cel": "vars.x"}},
        },
    ],
    ids=["file", "params", "expression"],
)
def test_an_invalid_schedule_of_a_file_is_named(given: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "schedules.json"
    file.write_text(json.dumps({"schedules": {"nightly": given}}))
    with pytest.raises((ConfigError, GraphError)) as caught:
        read_definitions(str(file))
    assert describe_error(caught.value).lines[-1].endswith("this is schedule 'nightly'")
