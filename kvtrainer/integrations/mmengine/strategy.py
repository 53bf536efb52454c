"""mmengine's strategy over a kvstore: what Strategy does, with mmengine's registries, schedulers, log and hooks."""

from __future__ import annotations

import copy
import datetime
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import mmengine
import torch
import torch.distributed as dist
from mmengine._strategy import BaseStrategy
from mmengine.dist import infer_launcher
from mmengine.model import convert_sync_batchnorm, revert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPERS, STRATEGIES
from torch import nn

from kvtrainer.env import read_servers
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.integrations.mmengine.values import decode_checkpoint, encode_checkpoint, mmengine_globals
from kvtrainer.integrations.mmengine.wrapper import TrainerOptimWrapper
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.strategy import Agreement, Strategy, environment
from kvtrainer.strategy.checkpoint import OPTIMIZER
from kvtrainer.strategy.model import WITHOUT_WRAPPER, ReviseKeys
from kvtrainer.strategy.states import pair_schedules
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import TrainerDict

_NOTES = "notes"
"""The part of an optimizer's state with what its wrapper keeps beside the Trainer."""
_UNKNOWN_TO_MMENGINE = ("kvlaunch", "dmlc", "mpi")
"""Launchers that mmengine takes for none; of MPI's it knows Open MPI's alone."""
_LOOSE_PATTERN = [(r"^module.", "")]
"""What mmengine revises names with, which would also cut 'module1.weight' short."""
_HORIZON = ("end", "total_iters", "total_steps", "T_max", "_schedule_phases")
"""How long a scheduler goes, in its state: the configuration says that."""
Callback = Callable[[dict[str, Any]], object]


@STRATEGIES.register_module()
class KVStoreStrategy(Strategy, BaseStrategy):  # type: ignore[misc]
    """Lets mmengine's FlexibleRunner train over a kvstore.

        runner = FlexibleRunner(model, strategy=dict(type="KVStoreStrategy", kvstore="dist_sync"), ...)

    Models, optimizers, constructors and schedulers are those of mmengine's registries, with mmengine's rules for
    `paramwise_cfg`. Wrappers of type OptimWrapper, AmpOptimWrapper or none become TrainerOptimWrappers. Workers of
    parameter servers are put into a torch.distributed group too, so that samplers, hooks and metrics know their ranks.
    All workers save and load together; rank 0 writes.

    Args:
        kvstore, device: as of kvtrainer.strategy.Strategy; the model is on one device.
        sync_bn: With several workers: 'torch' or 'mmcv' makes BatchNorm layers SyncBatchNorm ones.
        **kwargs: as of mmengine's BaseStrategy. `dist_cfg` in env_kwargs has options of
            torch.distributed.init_process_group, its timeout in seconds; the backend 'nccl', mmengine's default, means
            gloo, and NCCL for CUDA tensors where there is CUDA.

    Raises:
        ConfigurationError: the job has several processes, and the store does not connect them.
    """

    def __init__(
        self,
        kvstore: str | KVStoreBase | None = "device",
        *,
        device: str | torch.device | None = None,
        sync_bn: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.sync_bn = sync_bn
        env = dict(env_kwargs or {})
        self._group_options = _group_options(env.pop("dist_cfg", None) or {})
        self._made_group = False
        super().__init__(kvstore, device=device, env_kwargs=env, **kwargs)

    build_model = BaseStrategy.build_model
    build_logger = BaseStrategy.build_logger

    def _setup_env(self, *, launcher: str | None = None, **options: Any) -> None:
        if launcher in (None, environment.NONE) and infer_launcher() == environment.NONE:
            found = environment.infer_launcher(os.environ)
            launcher = found if found in _UNKNOWN_TO_MMENGINE else environment.NONE
        had_group = dist.is_initialized()
        super()._setup_env(launcher=launcher, dist_cfg=self._group_options, **options)
        self._made_group = dist.is_initialized() and not had_group

    def _meet(self) -> Agreement:
        agreement = super()._meet()
        if agreement.size > 1 and not dist.is_initialized():
            join_workers(agreement, self._group_options)
        place, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if (place, count) != (agreement.rank, agreement.size):
            raise ConfigurationError(
                f"this process is rank {place} of {count} in torch.distributed, which mmengine asks, and worker "
                f"{agreement.rank} of {agreement.size} of kvstore {self.kvstore!r}; start both in the same way"
            )
        processes = 1 if self._launcher == environment.NONE else environment.processes_of_job(os.environ)
        if agreement.size == 1 and processes > 1:
            raise ConfigurationError(
                f"the job has {processes} processes, but kvstore {self.kvstore!r} keeps to this one, so all would "
                "write the same files; use 'device' or 'dist_sync', or launcher='none'"
            )
        return agreement

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if self.world_size == 1:
            model = revert_sync_batchnorm(model)
        elif self.sync_bn is not None:
            model = convert_sync_batchnorm(model, self.sync_bn)
        return super()._wrap_model(model)

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> Any:
        """Build a TrainerOptimWrapper over the strategy's kvstore, or an OptimWrapperDict of several.

        Args:
            optim_wrapper: As mmengine takes it, options of TrainerOptimWrapper included; or a torch optimizer.

        Raises:
            ArgumentTypeError: it is, or has, a wrapper of another kind.
        """
        if isinstance(optim_wrapper, torch.optim.Optimizer) and not isinstance(optim_wrapper, Trainer):
            optim_wrapper = {"optimizer": optim_wrapper}
        if isinstance(optim_wrapper, Mapping):
            optim_wrapper = self._over_trainers(optim_wrapper, model)
        built = BaseStrategy.build_optim_wrapper(self, optim_wrapper, model)
        for name, one in _by_name(built).items():
            if not isinstance(one, TrainerOptimWrapper):
                raise ArgumentTypeError(
                    f"the optimizer wrapper {name!r} is of type {type(one).__name__}, which knows no kvstore; give its "
                    "configuration as a dict of type OptimWrapper, AmpOptimWrapper or TrainerOptimWrapper"
                )
        return built

    def _over_trainers(self, cfg: Mapping[str, Any], model: nn.Module | None) -> Any:
        """Change the configuration of a wrapper, or of several, so that mmengine's building it makes a Trainer."""
        changed: Any = copy.copy(cfg)
        if "optimizer" not in cfg:
            for name, one in cfg.items():
                if isinstance(one, Mapping) and "optimizer" in one:
                    changed[name] = self._over_trainers(one, model)
            return changed
        kind = cfg.get("type") or OptimWrapper
        kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
        if kind is AmpOptimWrapper and not {"loss_scale", "dtype"} & set(cfg):
            changed["loss_scale"] = "dynamic"
        if kind in (OptimWrapper, AmpOptimWrapper):
            kind = TrainerOptimWrapper
        if inspect.isclass(kind) and issubclass(kind, TrainerOptimWrapper):
            # Configurations are copied deeply on their way, which leaves functions as they are.
            def build(**options: Any) -> Any:
                return kind(**{"model": model, "kvstore": self.kvstore, **options})

            changed["type"] = build
        return changed

    def build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: Any = None) -> Any:
        """mmengine's schedulers, which its hook advances; those of several optimizers by their names."""
        wrapper = self.optim_wrapper if isinstance(optim_wrapper, Trainer | TrainerDict) else optim_wrapper
        return BaseStrategy.build_param_scheduler(self, scheduler, wrapper, default_args)

    def _build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: Any) -> Any:
        # mmengine takes entries out of what it was given, which then lack for the next optimizer.
        return BaseStrategy._build_param_scheduler(self, scheduler, optim_wrapper, dict(default_args))

    def _scale_lr(self) -> None:
        super()._scale_lr()
        for wrapper in self._optim_wrappers.values():
            wrapper.follow_defaults()

    def scheduler_state_dict(self) -> Any:
        """Return the state of every scheduler, or by name of each of several optimizers; without functions."""
        schedulers = getattr(self, "param_schedulers", [])
        by_name = schedulers if isinstance(schedulers, Mapping) else {"": schedulers}
        states = {
            name: [{n: v for n, v in one.state_dict().items() if not callable(v)} for one in its]
            for name, its in by_name.items()
        }
        return states.get("", states)

    def load_scheduler_state_dict(self, state_dict: Any) -> None:
        """Take over what `scheduler_state_dict` gave, with schedulers that may go on for longer.

        One that was past its end, and now has a later one, makes up for the steps that it has missed.

        Raises:
            StateMismatchError: as `check_scheduler_state_dict`; nothing has changed then.
        """
        for scheduler, state in pair_schedules(getattr(self, "param_schedulers", []), state_dict):
            scheduler.load_state_dict({name: value for name, value in state.items() if name not in _HORIZON})
            ended, passed = state.get("end", scheduler.end), scheduler._global_step
            if ended < scheduler.end and passed >= ended and not getattr(scheduler, "need_val_args", False):
                scheduler._global_step = ended - 1
                for _ in range(ended, passed + 1):
                    scheduler.step()

    def check_scheduler_state_dict(self, state_dict: Any) -> None:
        """Raise StateMismatchError unless `load_scheduler_state_dict` can take this."""
        pair_schedules(getattr(self, "param_schedulers", []), state_dict)

    def load_checkpoint(
        self,
        filename: str,
        *,
        revise_keys: ReviseKeys = WITHOUT_WRAPPER,
        callback: Callback | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Load as Strategy does; also what mmengine itself wrote, without running code of theirs."""

        def decode(checkpoint: dict[str, Any]) -> None:
            decode_checkpoint(checkpoint)
            if callback is not None:
                callback(checkpoint)

        revise = WITHOUT_WRAPPER if list(revise_keys) == _LOOSE_PATTERN else revise_keys
        with mmengine_globals():
            return super().load_checkpoint(filename, revise_keys=revise, callback=decode, **options)

    def resume(self, filename: str, *, resume_param_scheduler: bool = True, **options: Any) -> dict[str, Any]:
        """Resume as Strategy does; schedulers where there are any."""
        is_due = resume_param_scheduler and hasattr(self, "param_schedulers")
        return super().resume(filename, resume_param_scheduler=is_due, **options)

    def save_checkpoint(self, filename: str, *, callback: Callback | None = None, **options: Any) -> None:
        """Save as Strategy does; what hooks remarked and is no plain value is left out."""

        def encode(checkpoint: dict[str, Any]) -> None:
            checkpoint["meta"]["mmengine"] = mmengine.__version__
            if OPTIMIZER in checkpoint:
                for name, wrapper in self._optim_wrappers.items():
                    _part(checkpoint[OPTIMIZER], name)[_NOTES] = wrapper.notes()
            if callback is not None:
                callback(checkpoint)
            encode_checkpoint(checkpoint)

        super().save_checkpoint(filename, callback=encode, **options)

    def _fit_optimizer(self, states: Any, own: Mapping[str, Any]) -> Callable[[], None]:
        wrappers = self._optim_wrappers
        if not any("param_groups" in _part(states, name) for name in wrappers):
            take_over = super()._fit_optimizer(states, own)

            def take_all() -> None:
                take_over()
                for name, wrapper in wrappers.items():
                    wrapper.take_notes(_part(states, name).get(_NOTES, {}))

            return take_all
        for name, wrapper in wrappers.items():  # the states of mmengine's own wrappers
            wrapper.optimizer.check_state_dict(_part(states, name))
        return lambda: self.optim_wrapper.load_state_dict(dict(states))

    @property
    def _optim_wrappers(self) -> dict[str, TrainerOptimWrapper]:
        return _by_name(getattr(self, "optim_wrapper", None))

    def _wrapper(self) -> Any:
        trainers = {name: one.optimizer for name, one in self._optim_wrappers.items()}
        return trainers.get("") or (TrainerDict(**trainers) if trainers else None)

    def close(self) -> None:
        """Close the Trainers, the store, the group of workers and the log; idempotent."""
        super().close()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()


def _by_name(built: Any) -> dict[str, Any]:
    """Return all wrappers; a single one has the name ''."""
    if built is None:
        return {}
    return dict(built.items()) if isinstance(built, OptimWrapperDict) else {"": built}


def _part(states: Any, name: str) -> Any:
    """Return one wrapper's part of states; those of a single one, named '', are not divided."""
    return states.get(name, {}) if name else states


def _group_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """mmengine's dist_cfg as options of init_process_group."""
    options = {name: value for name, value in cfg.items() if name != "init_backend"}
    if options.get("backend") == "nccl":
        del options["backend"]
    if isinstance(options.get("timeout"), int | float):
        options["timeout"] = datetime.timedelta(seconds=options["timeout"])
    return options


def join_workers(agreement: Agreement, options: Mapping[str, Any]) -> None:
    """Put the workers of a store into a torch.distributed group, with the same ranks; collective, blocks.

    Where rank 0 listens is agreed on over the store, at an address that the servers are reached from.

    Args:
        options: of torch.distributed.init_process_group.
    """
    listener, told = None, b""
    if agreement.rank == 0:
        host = own_address(os.environ)
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        told = f"{host} {listener.getsockname()[1]}".encode()
    host, port = agreement.broadcast(told).decode().split()
    timeout = options.get("timeout", datetime.timedelta(minutes=5))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        agreement.size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    environment.init_process_group(
        os.environ, **{**options, "store": store, "rank": agreement.rank, "world_size": agreement.size}
    )


def own_address(environ: Mapping[str, str]) -> str:
    """Return this host's address on the way to the first server: the loopback's where the servers are here."""
    servers = read_servers(environ) or ("tcp://127.0.0.1:1",)
    host, _, port = servers[0].removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
