"""Configurations as dicts, in the forms of MMCV and mmengine, and what they stand for."""

from kvtrainer.config.dicts import merge_config
from kvtrainer.config.optimizers import DefaultOptimizerConstructor, optimizer_arguments, wrapper_arguments
from kvtrainer.config.sections import SECTIONS, check_overrides, trainer_arguments

__all__ = [
    "SECTIONS",
    "DefaultOptimizerConstructor",
    "check_overrides",
    "merge_config",
    "optimizer_arguments",
    "trainer_arguments",
    "wrapper_arguments",
]
