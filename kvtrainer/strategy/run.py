"""A process of a training run, set up: who started it, which worker it is, names, random numbers, log."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from kvtrainer.config.dicts import check_arguments
from kvtrainer.strategy import environment
from kvtrainer.strategy.agreement import Agreement, Alone
from kvtrainer.strategy.logger import make_logger
from kvtrainer.strategy.randomness import Randomness, draw_seed, set_randomness

_TIME = "%Y%m%d_%H%M%S"


class Run:
    """The surroundings of a training loop. Arguments as of BaseStrategy."""

    def __init__(
        self,
        *,
        work_dir: str = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments("env_kwargs", self._setup_env, env_kwargs or {})
        check_arguments("mp_cfg", environment.set_multi_processing, (env_kwargs or {}).get("mp_cfg") or {})
        check_arguments("log_kwargs", self.build_logger, log_kwargs or {})
        self._work_dir = os.path.abspath(work_dir)
        os.makedirs(self._work_dir, exist_ok=True)
        self._agreement: Agreement = Alone()
        self._env_kwargs = dict(env_kwargs or {})
        self._setup_env(**self._env_kwargs)
        name = f"{experiment_name}_{self._timestamp}" if experiment_name is not None else self._timestamp
        self._experiment_name = self._agreement.broadcast(name.encode()).decode()
        self._log_dir = os.path.join(self._work_dir, self._timestamp)
        os.makedirs(self._log_dir, exist_ok=True)
        self.logger = self.build_logger(**dict(log_kwargs or {}))
        self._log_handlers = list(self.logger.handlers)

    @property
    def work_dir(self) -> str:
        return self._work_dir

    @property
    def log_dir(self) -> str:
        """The directory of this run in `work_dir`; its name is the time."""
        return self._log_dir

    @property
    def experiment_name(self) -> str:
        return self._experiment_name

    @property
    def launcher(self) -> str:
        """What started the job: 'none', 'kvlaunch', 'dmlc', 'pytorch', 'slurm' or 'mpi'."""
        return self._launcher

    @property
    def distributed(self) -> bool:
        """Whether there may be other workers: a launcher started this one, or the store knows several."""
        return self._distributed

    @property
    def seed(self) -> int:
        """The seed of this rank's random numbers."""
        return self._seed

    @property
    def rank(self) -> int:
        """This worker's number, as the kvstore has it."""
        return self._agreement.rank

    @property
    def world_size(self) -> int:
        """How many workers the kvstore has."""
        return self._agreement.size

    @property
    def timestamp(self) -> str:
        """When the run began, on rank 0."""
        return self._timestamp

    @property
    def randomness(self) -> dict[str, Any]:
        """How random numbers began: seed (None if none was given), diff_rank_seed, deterministic."""
        return self._randomness.as_dict()

    def _setup_env(
        self,
        *,
        launcher: str | None = None,
        cudnn_benchmark: bool = False,
        mp_cfg: Mapping[str, Any] | None = None,
        dist_cfg: Mapping[str, Any] | None = None,
        resource_limit: int = 4096,
        randomness: Mapping[str, Any] | None = None,
    ) -> None:
        """Set the process up.

        Args:
            launcher: One of `environment.LAUNCHERS`; None: what the environment says.
            cudnn_benchmark: Whether cuDNN tries which algorithm is fastest.
            mp_cfg: mp_start_method and opencv_num_threads; None leaves multiprocessing and threads alone.
            dist_cfg: for `_setup_distributed`.
            resource_limit: How many files may be open at least.
            randomness: seed (None: one for all ranks), diff_rank_seed (False) and deterministic (False).
        """
        self._launcher = environment.infer_launcher(os.environ) if launcher is None else launcher
        environment.check_launcher(self._launcher)
        read = Randomness.read(randomness)
        torch.backends.cudnn.benchmark = bool(cudnn_benchmark)
        if mp_cfg is not None:
            environment.set_multi_processing(**mp_cfg, is_distributed=self._launcher != environment.NONE)
        environment.raise_file_limit(resource_limit)
        self._distributed = self._launcher != environment.NONE
        options = dict(dist_cfg or {})
        if (self._distributed or options.get("world_size", 1) > 1) and not _has_group():
            self._setup_distributed(**options)
        self._agreement = self._meet()
        self._distributed = self._distributed or self.world_size > 1
        now = time.strftime(_TIME, time.localtime())
        self._timestamp = self._agreement.broadcast(now.encode()).decode()
        self._set_randomness(read)

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        """Called where a launcher started the job, or dist_cfg has a world_size, unless there is a process group.

        Does nothing here.
        """

    def _meet(self) -> Agreement:
        """How the workers of the job come to agree; called once, after `_setup_distributed`."""
        return Alone()

    def _set_randomness(self, randomness: Randomness) -> None:
        shared = draw_seed() if randomness.seed is None else randomness.seed
        if randomness.seed is None:
            shared = int(self._agreement.broadcast(str(shared).encode()))
        self._randomness = randomness
        self._seed = set_randomness(randomness, shared, self.rank)

    def build_logger(
        self,
        log_level: int | str = "INFO",
        log_file: str | None = None,
        *,
        name: str | None = None,
        file_mode: str = "a",
        distributed: bool = False,
    ) -> logging.Logger:
        """The logger of the run: to the terminal, and to a file.

        Args:
            log_file: None: in `log_dir`, named after the time.
            name: of the logger; None: the experiment's.
            distributed: Whether every rank has a file; else rank 0 alone.
        """
        path = os.path.join(self._log_dir, f"{self._timestamp}.log") if log_file is None else log_file
        return make_logger(name or self._experiment_name, path, log_level, file_mode, self.rank, distributed)

    def collect_env(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the process runs on, and how it was set up."""
        runtime = {**self._env_kwargs, **self.randomness, "seed": self.seed}
        runtime.pop("randomness", None)
        runtime |= {
            "Distributed launcher": self.launcher,
            "Distributed training": self.distributed,
            "GPU number": self.world_size,
        }
        return environment.describe_system(), runtime


def _has_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
