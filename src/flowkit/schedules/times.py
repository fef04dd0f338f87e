"""When a schedule starts tasks, and what it does when it cannot. Errors show the right form and its next times."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict, cast
from zoneinfo import ZoneInfo

from temporalio.api.schedule.v1 import message_pb2 as schedule_pb
from temporalio.client import (
    Schedule,
    ScheduleCalendarSpec,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleRange,
    ScheduleSpec,
    ScheduleState,
)

from flowkit.core.time import time_zones
from flowkit.errors import ConfigError
from flowkit.schedules import cron
from flowkit.text import did_you_mean, names, printed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from temporalio.api.enums.v1 import ScheduleOverlapPolicy as OverlapPolicy
    from temporalio.client import ScheduleActionStartWorkflow

OVERLAPS = {
    "skip": ScheduleOverlapPolicy.SKIP,
    "buffer-one": ScheduleOverlapPolicy.BUFFER_ONE,
    "buffer-all": ScheduleOverlapPolicy.BUFFER_ALL,
    "cancel": ScheduleOverlapPolicy.CANCEL_OTHER,
    "allow": ScheduleOverlapPolicy.ALLOW_ALL,
}
"""What happens at a nominal time while the task of an earlier one still runs, by the name of the option."""

_UNWATCHED = "allow"
"""The overlap with which Temporal does not learn whether a task fails."""
_OVERLAP_NAMES = {policy: name for name, policy in OVERLAPS.items()}
_LEAST_CATCHUP = timedelta(seconds=10)
"""Temporal treats a shorter one as this."""
_LONGEST = timedelta(days=366)
_PARTS = tuple(each.name for each in fields(cron.Calendar))
_DURATION = re.compile(r"(\d{1,9})\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_SHOWN = 3
_EXAMPLE_HOUR = 2
_EXAMPLE_EVERY = timedelta(minutes=15)
_FORMAT = "%Y-%m-%d %H:%M"


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule. Durations are timedeltas, or texts such as `30s`, `15m`, `2h` and `1d`."""

    cron: str | Sequence[str] | None
    """One or more cron expressions with five fields: minute, hour, day, month, weekday."""
    every: str | timedelta | None
    """The interval between nominal times, instead of `cron`. It counts from 1970-01-01 00:00 UTC."""
    timezone: str | None
    """The time zone of `cron`, such as `Europe/Berlin`. Default: UTC."""
    overlap: str | None
    """What happens while an earlier task runs: skip (default), buffer-one, buffer-all, cancel or allow."""
    catchup: str | timedelta | None
    """How late a task may start after an outage of Temporal. Default: 365 days; at least 10 seconds."""
    jitter: str | timedelta | None
    """The longest random delay of a start, which does not change the nominal time. Default: none."""
    pause_on_failure: bool | None
    """Whether the schedule pauses when a task fails. Not together with the overlap `allow`."""


OPTIONS = tuple(ScheduleOptions.__annotations__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleTimes:
    """When a schedule starts tasks: the valid form of ScheduleOptions."""

    cron: tuple[str, ...] = ()
    every: timedelta | None = None
    timezone: str = "UTC"
    overlap: str = "skip"
    catchup: timedelta = timedelta(days=365)
    jitter: timedelta = timedelta(0)
    pause_on_failure: bool = False
    edited: bool = False
    """Whether Temporal has times that neither `cron` nor `every` describes, such as a calendar changed in its Web UI.

    They stay until `cron` or `every` is changed.
    """

    def changed(self, options: ScheduleOptions) -> ScheduleTimes:
        """Return the times with these options; an option that is None or absent stays.

        `cron` replaces `every`, and the other way round. Raise ConfigError, which shows the right form, if one is
        invalid.
        """
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if unknown := given.keys() - set(OPTIONS):
            name = min(unknown)
            hint = did_you_mean(name, OPTIONS, otherwise=f"the options are {', '.join(OPTIONS)}")
            raise ConfigError(f"{printed(name)} is no option of a schedule; {hint}")
        kept: dict[str, Any] = {}
        zone = _read_zone(given["timezone"]) if "timezone" in given else _zone(self.timezone)
        if "cron" in given and given.get("every") is not None:
            raise ConfigError(f"cron and every exclude each other; leave one of them out. {_example(zone)}")
        if "cron" in given:
            crons = given["cron"] if isinstance(given["cron"], (list, tuple)) else [given["cron"]]
            given["cron"], kept = (
                tuple(dict.fromkeys(_read_cron(each, zone) for each in crons)),
                {"every": None, "edited": False},
            )
        elif "every" in given:
            given["every"], kept = _read_every(given["every"]), {"cron": (), "edited": False}
        for name in ("catchup", "jitter"):
            if name in given:
                given[name] = read_duration(given[name], name)
        _check_rest(given)
        changed = replace(self, **{**kept, **given})
        names_either = not {"pause_on_failure", "overlap"}.isdisjoint(given)
        if names_either and changed.pause_on_failure and changed.overlap == _UNWATCHED:
            raise ConfigError(
                "pause_on_failure has no effect with overlap allow, for which Temporal does not wait for the tasks; "
                "use overlap buffer-all, or leave pause_on_failure out"
            )
        return changed

    @classmethod
    def read(cls, options: ScheduleOptions) -> ScheduleTimes:
        """Return the times of a new schedule. Raise ConfigError, which shows the right form, if one is invalid."""
        times = cls().changed(options)
        if not times.cron and times.every is None:
            raise ConfigError(f"a schedule needs cron or every. {_example(_zone(times.timezone))}")
        return times

    def as_json(self) -> dict[str, Any]:
        """Return the options as texts, without those that have their default."""
        texts = {
            name: duration_text(value) if isinstance(value, timedelta) else value
            for name, value in asdict(self).items()
            if value != getattr(ScheduleTimes(), name)
        }
        return {**texts, **({"cron": list(self.cron)} if self.cron else {})}

    @property
    def text(self) -> str:
        """When the schedule starts tasks, for people: `0 2 * * * Europe/Berlin`, or `every 15m`."""
        every = [] if self.every is None else [f"every {duration_text(self.every)}"]
        crons = [f"{', '.join(self.cron)} {self.timezone}"] if self.cron else []
        return ", ".join([*every, *crons, *(["times edited in Temporal"] if self.edited else [])])

    def schedule(self, action: ScheduleActionStartWorkflow) -> Schedule:
        """Return Temporal's schedule."""
        return Schedule(
            action=action,
            spec=self.spec(),
            policy=SchedulePolicy(
                overlap=OVERLAPS.get(self.overlap, ScheduleOverlapPolicy.SKIP),
                catchup_window=self.catchup,
                pause_on_failure=self.pause_on_failure,
            ),
            state=ScheduleState(),
        )

    def spec(self) -> ScheduleSpec:
        """Return Temporal's form of the times. The comments of its calendars hold the cron expressions."""
        return ScheduleSpec(
            calendars=self._calendars(),
            intervals=[] if self.every is None else [ScheduleIntervalSpec(every=self.every)],
            jitter=self.jitter or None,
            time_zone_name=self.timezone,
        )

    def _calendars(self) -> list[ScheduleCalendarSpec]:
        """Return Temporal's calendars of each cron expression, which is their comment."""
        return [
            ScheduleCalendarSpec(
                comment=comment,
                **{name: [ScheduleRange(*each) for each in ranges] for name, ranges in parts.items()},
            )
            for comment, parts in self._parts()
        ]

    def _parts(self) -> Iterator[tuple[str, dict[str, list[tuple[int, int, int]]]]]:
        """Yield the comment and the ranges of each calendar, by the names that Temporal has for its parts."""
        for text in self.cron:
            for each in cron.calendars(text):
                yield text, {name: _ranges(getattr(each, name)) for name in _PARTS}

    def write_into(self, schedule: schedule_pb.Schedule, before: ScheduleTimes) -> None:
        """Change the options that differ from `before`, and keep the rest of a schedule, such as its end."""
        spec, policies = schedule.spec, schedule.policies
        if (self.cron, self.every, self.edited) != (before.cron, before.every, before.edited):
            self._replace_times(spec)
        if self.timezone != before.timezone:
            spec.timezone_name = self.timezone
            spec.ClearField("timezone_data")
        if self.jitter != before.jitter:
            spec.jitter.FromTimedelta(self.jitter)
        if self.overlap != before.overlap:
            policies.overlap_policy = cast("OverlapPolicy.ValueType", OVERLAPS[self.overlap])
        if self.catchup != before.catchup:
            policies.catchup_window.FromTimedelta(self.catchup)
        policies.pause_on_failure = self.pause_on_failure

    def _replace_times(self, spec: schedule_pb.ScheduleSpec) -> None:
        for field in ("structured_calendar", "calendar", "cron_string", "interval"):
            spec.ClearField(field)
        for comment, parts in self._parts():
            ranges: dict[str, Any] = {
                name: [schedule_pb.Range(start=start, end=end, step=step) for start, end, step in each]
                for name, each in parts.items()
            }
            spec.structured_calendar.add(comment=comment, **ranges)
        if self.every is not None:
            spec.interval.add().interval.FromTimedelta(self.every)


def times_of(spec: ScheduleSpec, policy: SchedulePolicy | None = None) -> ScheduleTimes:
    """Return the times of a schedule as Temporal describes it.

    The comments of calendars are the cron expressions from which they were made. Calendars and intervals that are not
    those of a cron expression or of `every` were changed in Temporal, or were made by an earlier FlowKit.
    """
    policy = policy or SchedulePolicy()
    stored: dict[str, frozenset[cron.Calendar]] = defaultdict(frozenset)
    for each in spec.calendars:
        stored[each.comment or ""] |= {_calendar(each)}
    crons = tuple(text for text, found in stored.items() if found == _calendars_of(text))
    every = spec.intervals[0] if len(spec.intervals) == 1 and not spec.intervals[0].offset else None
    return ScheduleTimes(
        cron=crons,
        every=every.every if every else None,
        timezone=spec.time_zone_name or "UTC",
        overlap=_OVERLAP_NAMES.get(policy.overlap, policy.overlap.name.lower()),
        catchup=policy.catchup_window or ScheduleTimes().catchup,
        jitter=spec.jitter or timedelta(0),
        pause_on_failure=policy.pause_on_failure,
        edited=len(crons) < len(stored) or bool(spec.intervals and every is None),
    )


def _calendars_of(text: str) -> frozenset[cron.Calendar] | None:
    """Return the calendars of the comment of a calendar; None if it is no cron expression."""
    try:
        return cron.calendars(text)
    except ValueError:
        return None


def _calendar(spec: ScheduleCalendarSpec) -> cron.Calendar:
    """Return a calendar of Temporal by its values. Without years, all of them fit."""
    sets = {name: _values(getattr(spec, name)) for name in _PARTS}
    return cron.Calendar(**{**sets, "year": sets["year"] or cron.YEARS})


def _values(ranges: Sequence[ScheduleRange]) -> frozenset[int]:
    """Return the values of ranges. The end of a range is its start, unless it is greater; a step is at least 1."""
    return frozenset().union(
        *(range(each.start, max(each.start, each.end) + 1, max(1, each.step)) for each in ranges)
    )


def _ranges(values: frozenset[int]) -> list[tuple[int, int, int]]:
    """Return values as ranges of start, end and step: one if all have the same distance, else those without gaps."""
    ordered = sorted(values)
    steps = {after - before for before, after in pairwise(ordered)}
    if len(steps) == 1:
        return [(ordered[0], ordered[-1], steps.pop())]
    starts = [each for each in ordered if each - 1 not in values]
    ends = [each for each in ordered if each + 1 not in values]
    return [(start, end, 1) for start, end in zip(starts, ends, strict=True)]


def spec_error(times: ScheduleTimes, problem: str) -> ConfigError:
    """Return the error for times that Temporal has refused with `problem`."""
    what = f"cron is {names([printed(each) for each in times.cron])}" if times.cron else f"{times.text}"
    return ConfigError(f"{what}: {problem}. {_example(_zone(times.timezone))}")


def show_times(times: Sequence[datetime], timezone: str) -> str:
    """Return times for people, in their time zone."""
    zone = _zone(timezone)
    shown = names([at.astimezone(zone).strftime(_FORMAT) for at in times])
    return f"{shown} {zone}"


def duration_text(value: timedelta) -> str:
    """Return a duration as `read_duration` reads it, in its largest whole unit: `90s`, `15m`, `365d`."""
    if value.microseconds:  # Only Temporal has such ones.
        return f"{value.total_seconds():f}".rstrip("0") + "s"
    seconds = round(value.total_seconds())
    sizes = {"d": 86_400, "h": 3_600, "m": 60}
    unit = next((unit for unit, size in sizes.items() if seconds and seconds % size == 0), "s")
    return f"{seconds // sizes.get(unit, 1)}{unit}"


def read_duration(value: object, name: str) -> timedelta:
    """Return a duration from a timedelta or from a text such as `15m`. Raise ConfigError if it is invalid."""
    found = value if isinstance(value, timedelta) else None
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        found = timedelta(**{_UNITS[match[2]]: int(match[1])})
    if found is not None and timedelta(0) <= found <= _LONGEST and not found.microseconds:
        return found
    raise ConfigError(
        f"{name} is {printed(value)}; write a whole number and s, m, h or d, at most 366d: 30s, 15m, 2h or 1d"
    )


def _read_every(value: object) -> timedelta:
    try:
        found = read_duration(value, "every")
        if found:
            return found
        problem = f"every is {printed(value)}; the shortest interval is 1s"
    except ConfigError as error:
        problem = str(error)
    raise ConfigError(f"{problem}. every 15m fires at {_example_every()}")


def _example_every() -> str:
    epoch, now = datetime(1970, 1, 1, tzinfo=UTC), datetime.now(UTC)
    first = (now - epoch) // _EXAMPLE_EVERY + 1
    return show_times([epoch + (first + each) * _EXAMPLE_EVERY for each in range(_SHOWN)], "UTC")


def _read_cron(text: object, zone: ZoneInfo | timezone) -> str:
    """Return a valid cron expression. Raise ConfigError, which names the field and shows the right form."""
    problem = "it is not a text"
    if isinstance(text, str):
        text = " ".join(text.split())
        try:
            cron.calendars(text)
        except ValueError as error:
            problem = str(error)
        else:
            return text
    raise ConfigError(f"cron is {printed(text)}: {problem}. {_example(zone)}")


def _example(zone: ZoneInfo | timezone) -> str:
    """Return the right form of a cron expression, with its next three times."""
    now = datetime.now(zone)
    first = now.replace(hour=_EXAMPLE_HOUR, minute=0, second=0, microsecond=0)
    days = range(int(first <= now), int(first <= now) + _SHOWN)
    times = [(first.replace(tzinfo=None) + timedelta(days=each)).replace(tzinfo=zone) for each in days]
    shown = show_times(times, str(zone))
    return f"The five fields are minute, hour, day, month, weekday: '0 2 * * *' fires at {shown}"


def _zone(name: str) -> ZoneInfo | timezone:
    """Return a time zone; UTC if this machine does not know it."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        return UTC


def _read_zone(name: object) -> ZoneInfo | timezone:
    """Return the time zone of a valid name. Without zones on this machine, Temporal checks the name."""
    known = time_zones()
    if isinstance(name, str) and (name == "UTC" or name in known or not known):
        return _zone(name)
    hint = did_you_mean(name, known, otherwise="use a name of the IANA database, such as Europe/Berlin")
    end = "" if hint.endswith("?") else "."
    raise ConfigError(f"timezone is {printed(name)}; {hint}{end} {_example(_zone('Europe/Berlin'))}")


def _check_rest(given: Mapping[str, Any]) -> None:
    overlap = given.get("overlap", "skip")
    if not isinstance(overlap, str) or overlap not in OVERLAPS:
        hint = did_you_mean(overlap, OVERLAPS, otherwise=f"use {', '.join(OVERLAPS)}")
        raise ConfigError(f"overlap is {printed(overlap)}; {hint}")
    if given.get("catchup", _LEAST_CATCHUP) < _LEAST_CATCHUP:
        raise ConfigError("catchup is less than 10 s, the shortest that Temporal has; write 10s or more")
    if not isinstance(given.get("pause_on_failure", False), bool):
        raise ConfigError(f"pause_on_failure is {printed(given['pause_on_failure'])}; write true or false")
