"""The Trainer and its parts: the pipeline of a step, parameter groups, optimizer state, joining and saving."""

from kvtrainer.trainer.trainer import Trainer as Trainer
