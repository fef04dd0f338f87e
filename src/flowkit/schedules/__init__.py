"""Schedules that start tasks at nominal times: `await coordinator.schedules()` returns them."""

from flowkit.schedules.client import Schedules
from flowkit.schedules.plan import ScheduleChange, ScheduleDefinition
from flowkit.schedules.times import ScheduleOptions, ScheduleTimes
from flowkit.schedules.views import NominalStatus, NominalTime, ScheduledRun, ScheduleView

__all__ = [
    "NominalStatus",
    "NominalTime",
    "ScheduleChange",
    "ScheduleDefinition",
    "ScheduleOptions",
    "ScheduleTimes",
    "ScheduleView",
    "ScheduledRun",
    "Schedules",
]
