"""Schedules of learning rates, momentum and other values of parameter groups."""

from kvtrainer.schedules.config import bind_schedules as bind_schedules
from kvtrainer.schedules.config import build_param_schedules as build_param_schedules
from kvtrainer.schedules.config import detectron_schedule as detectron_schedule
from kvtrainer.schedules.config import schedule_from_lr_config as schedule_from_lr_config
from kvtrainer.schedules.config import schedule_from_momentum_config as schedule_from_momentum_config
from kvtrainer.schedules.param_schedule import BoundSchedule as BoundSchedule
from kvtrainer.schedules.param_schedule import ParamSchedule as ParamSchedule
from kvtrainer.schedules.param_schedule import ScheduleSpec as ScheduleSpec
