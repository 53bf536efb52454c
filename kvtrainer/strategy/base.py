"""`BaseStrategy`: sets a process up for training, and builds the parts of a run.

A strategy has three phases. Its constructor sets up the environment (launcher, limits, torch.distributed, random
seeds), agrees with the other workers on the run's name, and creates the log. `prepare`, which subclasses define, builds
model, Trainers and schedules through the `build_…` methods. After that, state dicts are exchanged with the parts, and
checkpoints are read and written by the subclass.

Each step is a method that a subclass may override; the names and signatures are mmengine's, so that code for its
strategies works. What can be done without a strategy lies in `environment.py`, `parts.py` and `checkpoint.py`.

Construction is collective: workers agree through `Agreement`, which a subclass creates in `_meet`. What rank 0 decides
(timestamp, seed, latest checkpoint) is broadcast, never computed by each worker.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvstore_server import check
from kvtrainer.common.registry_class import MODELS
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.config import check_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, file_error
from kvtrainer.kvstore.agreement import Agreement
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.schedules.config import build_param_schedules, schedules_by_optimizer
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.strategy import environment, parts
from kvtrainer.strategy.checkpoint import find_last_checkpoint, pair_checkpoint_schedules
from kvtrainer.strategy.parts import WITHOUT_WRAPPER, LoadReport, ReviseKeys
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.trainer.trainer_dict import TrainerDict

Callback = Callable[[dict[str, Any]], object]
Path = str | os.PathLike[str]
Schedules = list[BoundSchedule] | dict[str, list[BoundSchedule]]
TIME = "%Y%m%d_%H%M%S"
_LINE = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"
_RUN = ("epoch_length", "max_epochs", "max_iters")


@uncompiled
class BaseStrategy(ABC):
    """Base of strategies: sets a process up, and prepares, saves and resumes a model with its Trainers and schedules.

    Construction is collective: every worker does it, with the same arguments.

    Args:
        work_dir: The folder for checkpoints and logs; created if missing.
        experiment_name: The name of the run, to which the time is added; None for the time alone.
        env_kwargs: launcher, cudnn_benchmark, mp_cfg, dist_cfg, resource_limit and randomness; see `_setup_env`.
        log_kwargs: Arguments of `build_logger`.
        auto_scale_lr: enable, base_batch_size, count_accumulation; see `parts.scale_learning_rates`.
    """

    # These exist once `prepare` has created them.
    model: nn.Module
    optim_wrapper: Trainer | TrainerDict
    param_schedulers: Schedules
    kvstore: str | KVStoreBase | None = "device"
    """A store for all Trainers, or the name of one that each Trainer creates if it needs it."""

    def __init__(
        self,
        *,
        work_dir: str = "work_dirs",
        experiment_name: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
    ) -> None:
        # 1. Check all arguments before anything is set up.
        env, log = (dict(check.as_mapping(one) or {}) for one in (env_kwargs, log_kwargs))
        check_arguments("env_kwargs", self._setup_env, env)
        check_arguments("mp_cfg", environment.set_multi_processing, env.get("mp_cfg") or {})
        check_arguments("log_kwargs", self.build_logger, log)
        self._prepared = False
        self._auto_scale_lr = None if auto_scale_lr is None else dict(check.as_mapping(auto_scale_lr))
        self.dispatch_kwargs: dict[str, Any] = {}
        """Facts about the training loop, as passed to `prepare`."""
        # 2. Set the process up, and agree with the other workers.
        self._work_dir = os.path.abspath(work_dir)
        os.makedirs(self._work_dir, exist_ok=True)
        self._agreement = Agreement()
        self._rank, self._world_size = 0, 1
        self._env_kwargs = env
        self._setup_env(**env)
        # 3. Name the run, and create its log.
        name = f"{experiment_name}_{self._timestamp}" if experiment_name is not None else self._timestamp
        self._experiment_name = self._agreement.broadcast(name.encode()).decode()
        self._log_dir = os.path.join(self._work_dir, self._timestamp)
        os.makedirs(self._log_dir, exist_ok=True)
        self.logger = self.build_logger(**log)
        self._log_handlers = list(self.logger.handlers)

    @property
    def work_dir(self) -> str:
        return self._work_dir

    @property
    def log_dir(self) -> str:
        """The folder of this run in `work_dir`, named after the time."""
        return self._log_dir

    @property
    def experiment_name(self) -> str:
        return self._experiment_name

    @property
    def launcher(self) -> str:
        """The program that started the job: 'none', 'kvlaunch', 'dmlc', 'pytorch', 'slurm' or 'mpi'."""
        return self._launcher

    @property
    def distributed(self) -> bool:
        """Whether there may be other workers: a launcher started this one, or the store has several."""
        return self._distributed

    @property
    def seed(self) -> int:
        """The seed of this rank's random number generators."""
        return self._seed

    @property
    def rank(self) -> int:
        """This worker's rank in the kvstore."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers in the kvstore."""
        return self._world_size

    @property
    def timestamp(self) -> str:
        """When the run began, on rank 0."""
        return self._timestamp

    @property
    def randomness(self) -> dict[str, Any]:
        """How the generators were seeded: seed (None if none was given), diff_rank_seed, deterministic."""
        return dict(self._randomness)

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
            launcher: One of `environment.LAUNCHERS`; None to infer it from the environment.
            cudnn_benchmark: Whether cuDNN searches for the fastest algorithms.
            mp_cfg: mp_start_method and opencv_num_threads; None changes neither processes nor threads.
            dist_cfg: Arguments of `_setup_distributed`.
            resource_limit: The minimum number of files that may be open.
            randomness: seed (None: rank 0 draws one for all), diff_rank_seed (False) and deterministic (False).
        """
        # 1. This process: launcher, checks, threads, limits.
        self._launcher = environment.infer_launcher(os.environ) if launcher is None else launcher
        check.one_of("launcher", self._launcher, environment.LAUNCHERS)
        randomness, mp_cfg = check.as_mapping(randomness), check.as_mapping(mp_cfg)
        check_arguments("randomness", self._set_randomness, randomness or {})
        environment.check_seed((randomness or {}).get("seed"))
        torch.backends.cudnn.benchmark = bool(cudnn_benchmark)
        if mp_cfg is not None:
            environment.set_multi_processing(**mp_cfg, is_distributed=self._launcher != environment.NONE)
        environment.raise_file_limit(resource_limit)
        # 2. The other processes, unless the script has joined them already.
        self._distributed = self._launcher != environment.NONE
        options = dict(check.as_mapping(dist_cfg) or {})
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        if (self._distributed or options.get("world_size", 1) > 1) and not has_group:
            self._setup_distributed(**options)
        self._agreement = self._meet()
        self._rank, self._world_size = self._agreement.rank, self._agreement.size
        self._distributed = self._distributed or self.world_size > 1
        # 3. What all workers must have in common: the time, and the seed.
        now = time.strftime(TIME, time.localtime())
        self._timestamp = self._agreement.broadcast(now.encode()).decode()
        self._set_randomness(**(randomness or {}))

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        """Join the processes of a launched job, or of dist_cfg's world_size, if there is no process group yet."""
        return None

    def _meet(self) -> Agreement:
        """Return how the workers of the job agree. Called once, after `_setup_distributed`."""
        return self._agreement

    def _set_randomness(
        self, seed: int | None = None, diff_rank_seed: bool = False, deterministic: bool = False
    ) -> None:
        """Seed the random number generators.

        Args:
            seed: From 0 to 2^32 - 1; None: rank 0 draws one.
            diff_rank_seed: Whether every rank adds its number to the seed, for example for different noise.
            deterministic: As in `environment.begin_randomness`.
        """
        shared = environment.check_seed(seed)
        self._randomness: dict[str, Any] = {"seed": shared, "diff_rank_seed": diff_rank_seed}
        self._randomness["deterministic"] = deterministic
        if shared is None:
            shared = int(self._agreement.broadcast(str(secrets.randbelow(1 << 31)).encode()))
        self._seed = (shared + self.rank) % environment.SEEDS if diff_rank_seed else shared
        environment.begin_randomness(self._seed, deterministic)

    def build_logger(
        self,
        log_level: int | str = "INFO",
        log_file: str | None = None,
        *,
        name: str | None = None,
        logger_name: str | None = None,
        file_mode: str = "a",
        distributed: bool = False,
        file_handler_cfg: Mapping[str, Any] | None = None,
    ) -> logging.Logger:
        """Create the run's logger, which writes to the terminal and a file. A former logger of the same name is closed.

        Rank 0 logs from `log_level` on; the others log errors to the terminal only. The arguments are those of
        mmengine's MMLogger.

        Args:
            log_file: Path of the file; None: in `log_dir`, named after the time.
            name: The name of the logger; None: the experiment's.
            logger_name: Overrides `name`.
            distributed: Whether every rank has a file, with its rank in the name; otherwise only rank 0.
            file_handler_cfg: The `type` of the file's handler, a name in logging or logging.handlers such as
                'RotatingFileHandler', and its options, such as maxBytes.

        Raises:
            ConfigurationError: The level or the handler is unknown, or the file cannot be written.
        """
        # 1. Check the level, and close what a former run left.
        make_handler = environment.file_handler(file_handler_cfg, file_mode)
        level = log_level if isinstance(log_level, int) else logging.getLevelName(log_level.upper())
        if not isinstance(level, int):
            raise ConfigurationError(f"log_level must be one of logging's, such as 'INFO', got {log_level!r}")
        logger = logging.getLogger(logger_name or name or self._experiment_name)
        environment.close_logger(logger)
        logger.setLevel(level)
        logger.propagate = False
        # 2. The terminal, and a file for rank 0 or for every rank.
        handlers: list[logging.Handler] = [logging.StreamHandler()]
        handlers[0].setLevel(level if self.rank == 0 else max(level, logging.ERROR))
        if self.rank == 0 or distributed:
            base, ending = os.path.splitext(log_file or os.path.join(self._log_dir, f"{self._timestamp}.log"))
            path = f"{base}_rank{self.rank}{ending}" if self.rank else base + ending
            try:
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                # torch.compile closes handlers when it sets up logging; in mode 'a' they reopen without loss.
                handlers.append(make_handler(path))
            except (OSError, TypeError, ValueError) as error:
                text = f"cannot write the log to {path!r}: {error}"
                raise file_error(ConfigurationError, text, error, path) from error
        # 3. Attach the handlers, once none of them can fail.
        for handler in handlers:
            handler.setFormatter(logging.Formatter(_LINE, "%Y/%m/%d %H:%M:%S"))
            logger.addHandler(handler)
        return logger

    def collect_env(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a description of the system, and one of how the process was set up."""
        given = {name: value for name, value in self._env_kwargs.items() if name != "randomness"}
        job = {"Distributed launcher": self.launcher, "Distributed training": self.distributed}
        job["GPU number"] = self.world_size
        return environment.describe_system(), {**given, **self.randomness, "seed": self.seed, **job}

    def build_model(self, model: nn.Module | Mapping[str, Any]) -> nn.Module:
        """Return the model, or build it from a dict with the `type` of a registered one.

        Raises:
            ArgumentTypeError: It is neither.
            UnregisteredNameError: There is no such model.
        """
        built = model if isinstance(model, nn.Module) else check.as_mapping(model)
        built = MODELS.build(built) if isinstance(built, Mapping) else built
        if not isinstance(built, nn.Module):
            raise ArgumentTypeError(f"model is a Module or a dict, got {type(built).__name__}: {built!r:.80}")
        return built

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        """Call the model's `init_weights`, if it has one, and copy weights and buffers of rank 0 to all workers.

        Skipped with init_weights_for_test_or_val=False in dispatch_kwargs, for a model that is loaded next.
        """
        if self.dispatch_kwargs.get("init_weights_for_test_or_val", True):
            init = getattr(model, "init_weights", None)
            if callable(init):
                init()
            parts.share_weights(model, self._agreement)
        return model

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        """Move the model to where it is trained. The base class leaves it where it is."""
        return model

    def compile_model(self, model: nn.Module, compile: bool | Mapping[str, Any] | None = False) -> nn.Module:
        """Compile a method of the model with torch.compile, in place. The names of its weights do not change.

        Args:
            compile: False, None or disable=True leaves the model unchanged. A dict has `target`, the method (by default
                'forward'), and options of torch.compile.

        Raises:
            ConfigurationError: The model has no such method, or `compile` is something else.
        """
        compile = check.as_mapping(compile)
        if not isinstance(compile, bool | Mapping | None):
            raise ArgumentTypeError(f"compile must be a bool or a dict, got {compile!r:.80}")
        options: dict[str, Any] = dict(compile) if isinstance(compile, Mapping) else {"disable": not compile}
        target = options.pop("target", "forward")
        if options.get("disable", False):
            return model
        if not callable(getattr(model, target, None)):
            raise ConfigurationError(f"{type(model).__name__} has no method {target!r} to compile")
        if target == "forward":
            model.compile(**options)
        else:
            setattr(model, target, torch.compile(getattr(model, target), **options))
        self.logger.info("%s of the model will be compiled: the first iterations are slow", target)
        return model

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> Trainer | TrainerDict:
        """Build a Trainer over the strategy's kvstore, or several; see `parts.build_trainers`."""
        return parts.build_trainers(optim_wrapper, model, self.kvstore)

    def _scale_lr(self) -> None:
        self._trainer()
        micro = self.dispatch_kwargs.get("train_micro_batch_size_per_gpu")
        parts.scale_learning_rates(self._auto_scale_lr, self._trainers, micro, self.world_size, self.logger)

    def build_param_scheduler(
        self,
        scheduler: Any,
        optim_wrapper: Trainer | TrainerDict,
        default_args: Mapping[str, Any] | None = None,
    ) -> Schedules:
        """Build schedules, which the Trainer (or each of several) then advances.

        Args:
            scheduler: A schedule or a list, as in a Trainer's `schedules`. With several Trainers also a dict by their
                names.
            default_args: max_epochs, max_iters and epoch_length, for schedules without an end; not changed. None takes
                those of dispatch_kwargs, which count backward passes; since schedules by step count updates, they are
                divided by the passes that one Trainer accumulates.

        Returns:
            The schedules of the Trainer, or of each by name.
        """
        if not isinstance(optim_wrapper, Trainer | TrainerDict):
            kind = type(optim_wrapper).__name__
            raise ArgumentTypeError(f"schedules need the Trainer whose values they change, got {kind}")
        # 1. The length of the run, in updates.
        if default_args is None:
            run = {name: self.dispatch_kwargs[name] for name in _RUN if name in self.dispatch_kwargs}
            passes = optim_wrapper.accumulation.counts if isinstance(optim_wrapper, Trainer) else 1
            if passes > 1 and isinstance(run.get("max_iters"), int):
                run["max_iters"] = -(
                    -run["max_iters"] // passes
                )  # rounded up: a short last window is an update, too
            if passes > 1 and isinstance(run.get("epoch_length"), int):
                whole, rest = divmod(run["epoch_length"], passes)
                run["epoch_length"] = whole if not rest else None  # None: epochs do not end with an update
            default_args = run
        # 2. Build all of them before any Trainer gets one.
        build = partial(self._build_param_scheduler, default_args=default_args)
        made: Schedules = {}
        if isinstance(optim_wrapper, Trainer):
            made = build(scheduler, optim_wrapper)
        else:
            given = schedules_by_optimizer(scheduler, optim_wrapper)
            made = {name: build(one, optim_wrapper[name]) for name, one in given.items()}
        self.logger.debug("schedules without an end of their own use %s", dict(default_args))
        if isinstance(optim_wrapper, Trainer):
            optim_wrapper.configure(schedules=made)
        elif isinstance(made, dict):
            for name, its in made.items():
                optim_wrapper[name].configure(schedules=its)
        return made

    def _build_param_scheduler(
        self, scheduler: Any, optim_wrapper: Trainer, default_args: Mapping[str, Any]
    ) -> list[BoundSchedule]:
        made = build_param_schedules(scheduler, optim_wrapper, default_args)
        assert isinstance(made, list)
        return made

    def model_state_dict(self) -> dict[str, Any]:
        """Return the model's weights and buffers on the CPU, under the names of the unwrapped model."""
        state = parts.innermost_module(self.model).state_dict()
        return {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in state.items()}

    def optim_state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the Trainer, or of each by name. Blocks while state is fetched from servers.

        Raises:
            ArgumentTypeError: There is no Trainer.
        """
        return self._trainer().state_dict()

    def scheduler_state_dict(self) -> list[dict[str, Any]] | dict[str, list[dict[str, Any]]]:
        """Return the states of a Trainer's schedules, or of several Trainers' by name."""
        self._trainer()
        states = {name: [one.state_dict() for one in t.schedules] for name, t in self._trainers.items()}
        return states.get("", states)

    def load_model_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        strict: bool = False,
        revise_keys: ReviseKeys = WITHOUT_WRAPPER,
    ) -> LoadReport:
        """Load weights into the model. What does not fit is logged and returned. See `parts.load_weights`."""
        report = parts.load_weights(self.model, state_dict, strict, revise_keys)
        if report:
            self.logger.warning("the model and the checkpoint do not match: %s", report)
        return report

    def load_optim_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `optim_state_dict`; call it on every worker."""
        self._trainer().load_state_dict(dict(state_dict))

    def load_scheduler_state_dict(self, state_dict: Any) -> None:
        """Load the result of `scheduler_state_dict`.

        Raises:
            StateMismatchError: As in `check_scheduler_state_dict`; nothing has changed then.
        """
        for schedule, state in self._scheduled(state_dict):
            schedule.load_state_dict(state)

    def check_scheduler_state_dict(self, state_dict: Any) -> None:
        """Raise StateMismatchError unless `load_scheduler_state_dict` can load this. Subclasses override both.

        It does not fit if it is for other Trainers, or for another number or kind of schedules.
        """
        self._scheduled(state_dict)

    def _scheduled(self, state_dict: Any) -> list[tuple[Any, Mapping[str, Any]]]:
        self._trainer()
        schedules = {name: list(one.schedules) for name, one in self._trainers.items()}
        rows = pair_checkpoint_schedules(schedules.get("", schedules), state_dict)
        for schedule, state in rows:
            schedule.check_state_dict(state)
        return rows

    def _wrapper(self) -> Trainer | TrainerDict | None:
        return getattr(self, "optim_wrapper", None)

    def _trainer(self) -> Trainer | TrainerDict:
        wrapper = self._wrapper()
        if wrapper is None:
            raise ArgumentTypeError("this strategy has no Trainer; give prepare() an optim_wrapper")
        return wrapper

    @property
    def _trainers(self) -> Mapping[str, Trainer]:
        """All Trainers by name; the name of a single one is ''."""
        wrapper = self._wrapper()
        return {} if wrapper is None else {"": wrapper} if isinstance(wrapper, Trainer) else wrapper

    def _prepared_components(self) -> Any:
        """Return the result of `prepare`: the model, or a list of the parts that exist."""
        names = ("model", "optim_wrapper", "param_schedulers")
        there = [getattr(self, name) for name in names if hasattr(self, name)]
        return there[0] if len(there) == 1 else there

    @abstractmethod
    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model and what trains it; see `Strategy.prepare`."""

    @abstractmethod
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load weights; see `Strategy.load_checkpoint`."""

    @abstractmethod
    def resume(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Continue from a checkpoint; see `Strategy.resume`."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint; see `Strategy.save_checkpoint`."""

    def load_or_resume(
        self, *, load_from: Path | None = None, resume: bool | Path = False
    ) -> dict[str, Any] | None:
        """Load weights, or continue from a checkpoint, or do neither. Collective.

        Args:
            load_from: A checkpoint whose weights are loaded, or from which to resume if `resume` is True.
            resume: A checkpoint; or True for `load_from`, else the latest one in `work_dir`, if there is any.

        Returns:
            The other contents of the checkpoint; None if none was loaded.
        """
        if isinstance(resume, str | os.PathLike):
            return self.resume(os.fspath(resume))
        if resume:
            latest = None
            with self._agreement.all_or_none("find the latest checkpoint"):
                latest = find_last_checkpoint(self._work_dir) if self.rank == 0 else None
            latest = self._agreement.broadcast((latest or "").encode()).decode()
            source = load_from or latest
            if not source:
                self.logger.info("there is no checkpoint in %s to resume from", self._work_dir)
                return None
            return self.resume(os.fspath(source))
        return None if load_from is None else self.load_checkpoint(os.fspath(load_from))

    def close(self) -> None:
        """Close the Trainers and the log, even if one of them raises. Idempotent."""
        with ExitStack() as stack:
            # A later strategy may have a log of the same name.
            stack.callback(environment.close_logger, self.logger, self._log_handlers)
            stack.callback(self._agreement.close)
            if self._wrapper() is not None:
                stack.callback(self._trainer().close)
