"""Schedules that start tasks at nominal times: `await coordinator.schedules()` returns them."""

from flowkit.schedules.client import Schedules
from flowkit.schedules.history import NominalStatus, NominalTime
from flowkit.schedules.plan import ScheduleChange, ScheduleDefinition
from flowkit.schedules.times import ScheduleOptions, ScheduleTimes
from flowkit.schedules.views import ScheduledRun, ScheduleView

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
