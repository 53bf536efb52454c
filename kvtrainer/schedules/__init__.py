"""Schedules of learning rates, momentum and other numbers of parameter groups."""

from kvtrainer.schedules.binding import bind_schedules, build_param_schedules
from kvtrainer.schedules.config import (
    detectron_schedule,
    schedule_from_lr_config,
    schedule_from_momentum_config,
)
from kvtrainer.schedules.param_schedule import BoundSchedule, ParamSchedule, ScheduleSpec

__all__ = [
    "BoundSchedule",
    "ParamSchedule",
    "ScheduleSpec",
    "bind_schedules",
    "build_param_schedules",
    "detectron_schedule",
    "schedule_from_lr_config",
    "schedule_from_momentum_config",
]
