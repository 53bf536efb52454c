"""The Trainer, and what it is made of: the pipeline of a step, groups, state, joining and saving."""

from kvtrainer.trainer.trainer import Trainer as Trainer
