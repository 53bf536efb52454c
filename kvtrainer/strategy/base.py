"""What every strategy is: surroundings and parts of a training run, and four methods that say how they go together."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from kvtrainer.strategy import weights
from kvtrainer.strategy.checkpoint import MapLocation, find_last
from kvtrainer.strategy.logger import close_logger
from kvtrainer.strategy.parts import Parts

Callback = Callable[[dict[str, Any]], object]
Path = str | os.PathLike[str]


class BaseStrategy(Parts, ABC):
    """Sets a process up for training, and prepares, saves and resumes a model with its Trainers and schedules.

    Making one is collective: every worker makes it, with the same arguments.

    Args:
        work_dir: Where checkpoints and logs go; made if it is missing.
        experiment_name: What the run is called, with the time; None: the time alone.
        env_kwargs: launcher, cudnn_benchmark, mp_cfg, dist_cfg, resource_limit and randomness; see `_setup_env`.
        log_kwargs: of `build_logger`.
        auto_scale_lr: enable, base_batch_size, count_accumulation; see `kvtrainer.strategy.scaling`.
    """

    def __init__(
        self,
        *,
        work_dir: str = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
    ) -> None:
        self._prepared = False
        super().__init__(
            work_dir=work_dir,
            experiment_name=experiment_name,
            env_kwargs=env_kwargs,
            log_kwargs=log_kwargs,
            auto_scale_lr=auto_scale_lr,
        )

    @abstractmethod
    def prepare(
        self,
        model: nn.Module | dict[str, Any],
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: bool | dict[str, Any] = False,
        dispatch_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a model, and what trains it, ready; see `Strategy.prepare`."""

    @abstractmethod
    def load_checkpoint(
        self,
        filename: str,
        *,
        map_location: MapLocation = "cpu",
        strict: bool = False,
        revise_keys: weights.ReviseKeys = weights.WITHOUT_WRAPPER,
        callback: Callback | None = None,
    ) -> dict[str, Any]:
        """Load weights; see `Strategy.load_checkpoint`."""

    @abstractmethod
    def resume(
        self,
        filename: str,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: MapLocation = "default",
        callback: Callback | None = None,
    ) -> dict[str, Any]:
        """Go on from a checkpoint; see `Strategy.resume`."""

    @abstractmethod
    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict[str, Any] | None = None,
        callback: Callback | None = None,
    ) -> None:
        """Save a checkpoint; see `Strategy.save_checkpoint`."""

    def load_or_resume(
        self, *, load_from: Path | None = None, resume: bool | Path = False
    ) -> dict[str, Any] | None:
        """Load weights, or go on from a checkpoint, or neither; collective.

        Args:
            load_from: A checkpoint whose weights are loaded, or that is resumed from if `resume` is True.
            resume: A checkpoint; or True: `load_from`, else the latest one in `work_dir`, if there is any.

        Returns:
            What else was in the checkpoint; None where there was none.
        """
        if isinstance(resume, str | os.PathLike):
            return self.resume(os.fspath(resume))
        if resume:
            latest = None
            with self._agreement.all_or_none("find the latest checkpoint"):
                latest = find_last(self._work_dir) if self.rank == 0 else None
            latest = self._agreement.broadcast((latest or "").encode()).decode()
            source = load_from or latest
            if not source:
                self.logger.info("there is no checkpoint in %s to resume from", self._work_dir)
                return None
            return self.resume(os.fspath(source))
        return None if load_from is None else self.load_checkpoint(os.fspath(load_from))

    def close(self) -> None:
        """Close the Trainers and the log; idempotent."""
        if hasattr(self, "optim_wrapper"):
            self._trainer().close()
        self._agreement.close()
        close_logger(self.logger, self._log_handlers)  # a later strategy may have the same name
