"""mmengine over a kvstore. Importing this registers a strategy and an optimizer wrapper with mmengine.

    import kvtrainer.integrations.mmengine
    runner = FlexibleRunner(model, strategy=dict(type="MMEngineStrategy", kvstore="dist_sync"), ...)

In a configuration file: custom_imports = dict(imports=["kvtrainer.integrations.mmengine"]). Needs the extra
`kvtrainer[mmengine]`.

`MMEngineStrategy` builds models, optimizers and schedulers from mmengine's registries, and turns its optimizer wrappers
into `TrainerOptimWrapper`, which passes calls on to a Trainer. Checkpoints are read with weights_only: values of hooks
such as HistoryBuffers are encoded as tensors and plain values, and mmengine's own checkpoints are read with a small
list of allowed types. So loading never runs code of a file.
"""

from __future__ import annotations

import copy
import datetime
import inspect
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from kvstore_server import check
from kvtrainer.config import wrapper_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.integrations import guard_import
from kvtrainer.integrations.workers import make_workers_ranks
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.strategy import Agreement, Strategy, environment
from kvtrainer.strategy.base import Callback
from kvtrainer.strategy.checkpoint import OPTIMIZER, pair_checkpoint_schedules, plain_checkpoint_copy
from kvtrainer.strategy.parts import WITHOUT_WRAPPER, ReviseKeys
from kvtrainer.strategy.strategy import Steps
from kvtrainer.trainer.resume import Resumption
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.trainer.trainer_dict import TrainerDict

with guard_import("mmengine"):
    import mmengine
    from mmengine._strategy import BaseStrategy
    from mmengine.dist import infer_launcher
    from mmengine.logging import HistoryBuffer
    from mmengine.model import convert_sync_batchnorm, revert_sync_batchnorm
    from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
    from mmengine.registry import OPTIM_WRAPPERS, STRATEGIES

__all__ = ["KVStoreStrategy", "MMEngineStrategy", "TrainerOptimWrapper"]

_log = logging.getLogger(__name__)

_BASE, _SCALER = "base_param_settings", "loss_scaler"
_AMP = ("loss_scale", "dtype")
_LISTS = ("params", "param_names")
# Key in an optimizer's state for what its wrapper keeps in addition to the Trainer.
_NOTES = "notes"
# Launchers that mmengine does not recognise. Of MPI's it knows Open MPI only.
_UNKNOWN_TO_MMENGINE = ("kvlaunch", "dmlc", "mpi")
# mmengine's pattern for names. Its dot is not escaped, so it would also shorten 'module1.weight'.
_LOOSE_PATTERN = [(r"^module.", "")]
_STATISTICS = ("min", "max", "current", "mean")
# Marks a dict that encodes another kind of value, which the key's value names.
_MARK = "kvtrainer.mmengine"
# Entries of a scheduler's state with its length, which the configuration determines.
_HORIZON = ("end", "total_iters", "total_steps", "T_max", "_schedule_phases")


@OPTIM_WRAPPERS.register_module()
class TrainerOptimWrapper(OptimWrapper):  # type: ignore[misc]
    """A wrapper through which mmengine's loops, hooks and schedulers use a Trainer, over any kvstore.

    Accumulation, clipping and loss scaling are the Trainer's, apply to the gradients of all workers, and work on a CPU
    too. `scale_loss` returns a loss unchanged, because `backward` divides it.

    Args:
        optimizer: A Trainer, which has all options already; or a torch optimizer to make one of. Its parameter groups
            with equal options are merged.
        accumulative_counts, clip_grad: As for mmengine's OptimWrapper.
        loss_scale, dtype: As for its AmpOptimWrapper. Without either there is no mixed precision.
        model: Provides the names of the parameters.
        kvstore: The Trainer's kvstore.
        **options: More options of the Trainer, such as compression_params, update_on_kvstore and on_nonfinite.

    Raises:
        ConfigurationError: An option is wrong, or would not reach an existing Trainer.
    """

    def __init__(
        self,
        optimizer: Trainer | torch.optim.Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        loss_scale: Any = None,
        dtype: Any = None,
        model: nn.Module | None = None,
        kvstore: str | KVStoreBase | None = "device",
        **options: Any,
    ) -> None:
        given = {"accumulative_counts": accumulative_counts, "clip_grad": clip_grad}
        given |= {n: v for n, v in zip(_AMP, (loss_scale, dtype), strict=True) if v is not None}
        # Options of an existing Trainer cannot be changed here; a torch optimizer becomes a Trainer with them.
        if isinstance(optimizer, Trainer):
            said = [name for name, value in {**given, **options}.items() if value not in (None, 1)]
            if said:
                raise ConfigurationError(
                    f"{', '.join(said)} would have no effect on an existing Trainer; set it when building the Trainer"
                )
            trainer = optimizer
        elif isinstance(optimizer, torch.optim.Optimizer):
            merge_mmengine_groups(optimizer)
            kind = "AmpOptimWrapper" if any(name in given for name in _AMP) else "OptimWrapper"
            read = wrapper_arguments(model, {**given, "type": kind, "optimizer": optimizer})
            trainer = Trainer(**{**read, "kvstore": kvstore, **options})
        else:
            kind = type(optimizer).__name__
            raise ArgumentTypeError(f"optimizer must be a Trainer or a torch optimizer, got {kind}")
        super().__init__(trainer, accumulative_counts=trainer.accumulation.counts)
        self.optimizer: Trainer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass of the loss, divided and scaled as the options say. Takes no other arguments."""
        if kwargs:
            raise ConfigurationError(
                f"backward() of a Trainer does not take {', '.join(map(repr, kwargs))}; call loss.backward()"
            )
        self.optimizer.backward(loss)
        self._inner_count = self.optimizer.accumulation.done

    def step(self, **kwargs: Any) -> None:
        """Reduce the gradients and update. The norm before clipping is logged as train/grad_norm."""
        self.optimizer.step(**kwargs)
        last = self.optimizer.last
        if last is not None and last.grad_norm is not None:
            self.message_hub.update_scalar("train/grad_norm", float(last.grad_norm))

    def optim_context(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context for the forward pass. Nothing is sent before `step`, so nothing has to be held back."""
        return self.optimizer.context()

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set how many backward passes have been made, and how many there will be."""
        self.optimizer.set_progress(init_counts, max_counts)
        super().initialize_count_status(model, init_counts, max_counts)

    def should_update(self) -> bool:
        return self.optimizer.accumulation.is_boundary

    def should_sync(self) -> bool:
        """Return whether the next backward pass is the last one before an update."""
        count, total = self.optimizer.accumulation.done + 1, self.optimizer.accumulation.total
        return count % self.optimizer.accumulation.counts == 0 or count == total

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged: `backward` divides it."""
        return loss

    @property
    def inner_count(self) -> int:
        return self.optimizer.accumulation.done

    def state_dict(self) -> dict[str, Any]:
        """Return options, optimizer state and loss scale. Blocks while state is fetched from where it is.

        Any single worker may call it between steps. As in torch, parameters that were never updated have no state.
        """
        state: dict[str, Any] = super().state_dict()
        state["state"] = {at: one for at, one in state["state"].items() if float(one.get("step", 1)) > 0}
        if self.optimizer.loss_scaler is not None:
            state[_SCALER] = self.optimizer.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of this class or of mmengine's own wrapper. Call it on every worker.

        The optimizer must be of the same kind and have the same groups.
        """
        given, notes = dict(state_dict), self.notes()
        scale = given.pop(_SCALER, None)
        if scale and self.optimizer.loss_scaler is not None:
            self.optimizer.loss_scaler.load_state_dict(scale)
        super().load_state_dict(given)
        self._keep_marks(notes["groups"])

    def notes(self) -> dict[str, Any]:
        """Return what schedulers keep in addition to a Trainer's options: base settings, and entries of the groups."""
        groups = [{n: v for n, v in g.items() if n not in _LISTS} for g in self.optimizer.param_groups]
        base = None if self.base_param_settings is None else dict(self.base_param_settings)
        return {"groups": groups, _BASE: base}

    def record_messages(self, notes: Mapping[str, Any]) -> None:
        """Restore the result of `notes`, after the Trainer has its options."""
        present = self.base_param_settings
        if present is not None:
            # A checkpoint has lists in place of tuples.
            for name, value in (notes.get(_BASE) or {}).items():
                present[name] = tuple(value) if isinstance(present.get(name), tuple) else value
        self._keep_marks(notes.get("groups", ()))

    def follow_defaults(self) -> None:
        """Reset the base settings to the Trainer's defaults, after its learning rate was scaled."""
        if self.base_param_settings is not None:
            self.base_param_settings.update(self.optimizer.defaults)

    def _keep_marks(self, groups: Any) -> None:
        """Restore entries of the groups that the Trainer does not keep."""
        for group, marks in zip(self.optimizer.param_groups, groups, strict=False):
            for name, value in marks.items():
                group.setdefault(name, value)


def merge_mmengine_groups(optimizer: torch.optim.Optimizer) -> None:
    """Merge groups with equal options in place, in the order of their first parameters.

    mmengine makes one group per parameter, and updating many small groups takes several times as long. An optimizer
    that already has state is left as it is.
    """
    if optimizer.state or any("param_names" in group for group in optimizer.param_groups):
        return
    merged: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        for one in merged:
            if {**one, "params": None} == {**group, "params": None}:
                one["params"] = [*one["params"], *group["params"]]
                break
        else:
            merged.append(group)
    optimizer.param_groups[:] = merged


@STRATEGIES.register_module(name=["MMEngineStrategy", "KVStoreStrategy"])
class MMEngineStrategy(Strategy, BaseStrategy):  # type: ignore[misc]
    """Lets mmengine's FlexibleRunner train over a kvstore.

        runner = FlexibleRunner(model, strategy=dict(type="MMEngineStrategy", kvstore="dist_sync"), ...)

    Models, optimizers, constructors and schedulers are those of mmengine's registries, with its rules for
    `paramwise_cfg`. OptimWrapper and AmpOptimWrapper become TrainerOptimWrapper, which is also the default. Workers of
    parameter servers also join a torch.distributed group, so that samplers, hooks and metrics know their ranks. All
    workers save and load together, and rank 0 writes.

    Args:
        kvstore, device: As for kvtrainer.strategy.Strategy. The model is on one device.
        sync_bn: With several workers, 'torch' or 'mmcv' converts BatchNorm layers to SyncBatchNorm.
        **kwargs: As for mmengine's BaseStrategy. `dist_cfg` in env_kwargs has options of
            torch.distributed.init_process_group, with the timeout in seconds. The backend 'nccl', mmengine's default,
            means gloo, plus NCCL for CUDA tensors if there is CUDA.

    Raises:
        ConfigurationError: The job has several processes that the store does not connect.
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
        self._group_options = _mmengine_group_options(env.pop("dist_cfg", None) or {})
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
        processes = 1 if self._launcher == environment.NONE else environment.processes_of_job(os.environ)
        make_workers_ranks(agreement, self.kvstore, processes, self._group_options)
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
            optim_wrapper: As for mmengine, also with options of TrainerOptimWrapper; or a torch optimizer.

        Raises:
            ArgumentTypeError: A wrapper is of another kind.
        """
        if isinstance(optim_wrapper, torch.optim.Optimizer) and not isinstance(optim_wrapper, Trainer):
            optim_wrapper = {"optimizer": optim_wrapper}
        optim_wrapper = check.as_mapping(optim_wrapper)
        if isinstance(optim_wrapper, Mapping):
            optim_wrapper = self._wrap_trainers(optim_wrapper, model)
        built = BaseStrategy.build_optim_wrapper(self, optim_wrapper, model)
        for name, one in _mmengine_wrappers_by_name(built).items():
            if not isinstance(one, TrainerOptimWrapper):
                raise ArgumentTypeError(
                    f"the optimizer wrapper {name!r} is of type {type(one).__name__}, which cannot use a kvstore; give "
                    "its configuration as a dict of type OptimWrapper, AmpOptimWrapper or TrainerOptimWrapper"
                )
        return built

    def _wrap_trainers(self, cfg: Mapping[str, Any], model: nn.Module | None) -> Any:
        """Change the configuration of one or several wrappers so that they build Trainers."""
        changed: Any = copy.copy(cfg)
        if "optimizer" not in cfg:
            for name, one in cfg.items():
                if isinstance(one, Mapping) and "optimizer" in one:
                    changed[name] = self._wrap_trainers(one, model)
            return changed
        kind = cfg.get("type") or OptimWrapper
        kind = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
        if kind is AmpOptimWrapper and not {"loss_scale", "dtype"} & set(cfg):
            changed["loss_scale"] = "dynamic"
        if kind in (OptimWrapper, AmpOptimWrapper):
            kind = TrainerOptimWrapper
        if inspect.isclass(kind) and issubclass(kind, TrainerOptimWrapper):
            # mmengine deep-copies configurations, which would copy the store. A function is not copied.
            def build(**options: Any) -> Any:
                return kind(**{"model": model, "kvstore": self.kvstore, **options})

            changed["type"] = build
        return changed

    def build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: Any = None) -> Any:
        """Build mmengine's schedulers, which its hook advances; by name for several optimizers."""
        wrapper = self.optim_wrapper if isinstance(optim_wrapper, Trainer | TrainerDict) else optim_wrapper
        return BaseStrategy.build_param_scheduler(self, scheduler, wrapper, default_args)

    def _build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: Any) -> Any:
        # mmengine removes entries from what it is given, and the next optimizer needs them too.
        return BaseStrategy._build_param_scheduler(self, scheduler, optim_wrapper, dict(default_args))

    def _scale_lr(self) -> None:
        super()._scale_lr()
        for wrapper in self._optim_wrappers.values():
            wrapper.follow_defaults()

    def scheduler_state_dict(self) -> Any:
        """Return the state of every scheduler without functions; by name for several optimizers."""
        schedulers = getattr(self, "param_schedulers", [])
        by_name = schedulers if isinstance(schedulers, Mapping) else {"": schedulers}
        states = {
            name: [{n: v for n, v in one.state_dict().items() if not callable(v)} for one in its]
            for name, its in by_name.items()
        }
        return states.get("", states)

    def load_scheduler_state_dict(self, state_dict: Any) -> None:
        """Restore the result of `scheduler_state_dict`. Schedulers may have a later end now.

        One that was past its end, and now has a later one, catches up on the steps that it has missed.

        Raises:
            StateMismatchError: As for `check_scheduler_state_dict`. Nothing has changed.
        """
        for scheduler, state in pair_checkpoint_schedules(getattr(self, "param_schedulers", []), state_dict):
            scheduler.load_state_dict({name: value for name, value in state.items() if name not in _HORIZON})
            ended, passed = state.get("end", scheduler.end), scheduler._global_step
            if ended < scheduler.end and passed >= ended and not getattr(scheduler, "need_val_args", False):
                scheduler._global_step = ended - 1
                for _ in range(ended, passed + 1):
                    scheduler.step()

    def check_scheduler_state_dict(self, state_dict: Any) -> None:
        """Raise StateMismatchError unless `load_scheduler_state_dict` can restore this."""
        pair_checkpoint_schedules(getattr(self, "param_schedulers", []), state_dict)

    def load_checkpoint(
        self,
        filename: str,
        *,
        revise_keys: ReviseKeys = WITHOUT_WRAPPER,
        callback: Callback | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Load as Strategy does. Also reads mmengine's own checkpoints, without running their code."""

        def decoded(checkpoint: dict[str, Any]) -> None:
            checkpoint.update(decode_mmengine_value(checkpoint))
            if callback is not None:
                callback(checkpoint)

        revise = WITHOUT_WRAPPER if list(revise_keys) == _LOOSE_PATTERN else revise_keys
        with mmengine_globals():
            return super().load_checkpoint(filename, revise_keys=revise, callback=decoded, **options)

    def resume(self, filename: str, *, resume_param_scheduler: bool = True, **options: Any) -> dict[str, Any]:
        """Resume as Strategy does. Schedulers are resumed if there are any."""
        is_due = resume_param_scheduler and hasattr(self, "param_schedulers")
        return super().resume(filename, resume_param_scheduler=is_due, **options)

    def rejoin(self) -> Resumption:
        """Not possible with several workers: they are also ranks of a torch.distributed group, which takes in no other
        process when one has died. Resume from checkpoints.

        Raises:
            ConfigurationError: There are several workers.
        """
        if self.world_size > 1:
            raise ConfigurationError(
                "rejoin() is not possible in mmengine's runners: its hooks reduce over a torch.distributed group, "
                "which takes in no other process when a worker has died. Resume from checkpoints, or use "
                "kvtrainer.Strategy in a loop of your own"
            )
        return super().rejoin()

    def save_checkpoint(self, filename: str, *, callback: Callback | None = None, **options: Any) -> None:
        """Save as Strategy does, without values of hooks that a checkpoint cannot hold."""

        def encode(checkpoint: dict[str, Any]) -> None:
            checkpoint["meta"]["mmengine"] = mmengine.__version__
            if OPTIMIZER in checkpoint:
                for name, wrapper in self._optim_wrappers.items():
                    _states_of_mmengine_wrapper(checkpoint[OPTIMIZER], name)[_NOTES] = wrapper.notes()
            if callback is not None:
                callback(checkpoint)
            encode_mmengine_checkpoint(checkpoint)

        super().save_checkpoint(filename, callback=encode, **options)

    def _fit_optimizer(self, states: Any, own: Mapping[str, Any]) -> Steps:
        parts = [
            (wrapper, _states_of_mmengine_wrapper(states, name))
            for name, wrapper in self._optim_wrappers.items()
        ]
        if not any("param_groups" in part for _, part in parts):
            notes = [partial(wrapper.record_messages, part.get(_NOTES, {})) for wrapper, part in parts]
            return [*super()._fit_optimizer(states, own), *notes]
        # States that mmengine's own wrappers saved.
        for wrapper, part in parts:
            wrapper.optimizer.check_state_dict(part)
        return [lambda: self.optim_wrapper.load_state_dict(dict(states))]

    @property
    def _optim_wrappers(self) -> dict[str, TrainerOptimWrapper]:
        return _mmengine_wrappers_by_name(getattr(self, "optim_wrapper", None))

    def _wrapper(self) -> Any:
        trainers = {name: one.optimizer for name, one in self._optim_wrappers.items()}
        return trainers.get("") or (TrainerDict(**trainers) if trainers else None)

    def close(self) -> None:
        """Close the Trainers, the store, the process group and the log. Idempotent."""
        try:
            super().close()
        finally:
            if self._made_group and dist.is_initialized():
                dist.destroy_process_group()


KVStoreStrategy = MMEngineStrategy
"""The former name of `MMEngineStrategy`; `type="KVStoreStrategy"` names it, too."""


def _mmengine_wrappers_by_name(built: Any) -> dict[str, Any]:
    """Return all wrappers by name; a single one has the name ''."""
    if built is None:
        return {}
    return dict(built.items()) if isinstance(built, OptimWrapperDict) else {"": built}


def _states_of_mmengine_wrapper(states: Any, name: str) -> Any:
    """Return one wrapper's part of states, or all of it for a single one, which is named ''."""
    return states.get(name, {}) if name else states


def _mmengine_group_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in cfg.items() if name != "init_backend"}
    if options.get("backend") == "nccl":
        del options["backend"]
    if isinstance(options.get("timeout"), int | float):
        options["timeout"] = datetime.timedelta(seconds=options["timeout"])
    return options


# Values of hooks as tensors and plain values, so that checkpoints are read without running code.


def encode_mmengine_value(value: Any) -> Any:
    """Replace HistoryBuffers, arrays, tuples and Counters by plain dicts. Other values stay as they are."""
    if isinstance(value, HistoryBuffer):
        log, counts = (torch.from_numpy(np.array(one, dtype=np.float64)) for one in value.data)
        return {_MARK: "history", "log": log, "counts": counts, "max_length": value.max_length}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_MARK: "array", "values": torch.from_numpy(np.array(value)), "dtype": value.dtype.name}
    if isinstance(value, Counter):
        return {_MARK: "counter", "values": dict(value)}
    if isinstance(value, Mapping):
        return {key: encode_mmengine_value(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return {_MARK: "tuple", "values": [encode_mmengine_value(one) for one in value]}
    return [encode_mmengine_value(one) for one in value] if isinstance(value, list) else value


def decode_mmengine_value(value: Any) -> Any:
    """Inverse of `encode_mmengine_value`: rebuilds histories, arrays, counters and tuples in a nested value."""
    if isinstance(value, list):
        return [decode_mmengine_value(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_MARK)
    if kind == "history":
        return HistoryBuffer(value["log"].numpy(), value["counts"].numpy(), value["max_length"])
    if kind == "array":
        return value["values"].numpy().astype(value["dtype"], copy=False)
    if kind == "counter":
        return Counter(value["values"])
    if kind == "tuple":
        return tuple(decode_mmengine_value(one) for one in value["values"])
    return {key: decode_mmengine_value(one) for key, one in value.items()}


def encode_mmengine_entries(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Encode the entries of a dict. Those that a checkpoint cannot hold are left out with a warning."""
    found = {}
    for key, one in value.items():
        encoded = encode_mmengine_value(one)
        try:
            plain_checkpoint_copy({key: encoded}, where)
        except ConfigurationError as error:
            _log.warning("left out of the checkpoint: %s", error)
        else:
            found[key] = encoded
    return found


def encode_mmengine_checkpoint(checkpoint: dict[str, Any]) -> None:
    """Encode what mmengine's runner and hooks put into a checkpoint, in place."""
    hub = checkpoint.get("message_hub")
    if isinstance(hub, Mapping):
        parts = {name: encode_mmengine_entries(part, f"message_hub[{name!r}]") for name, part in hub.items()}
        kept = set().union(*(parts.get(name, {}) for name in ("log_scalars", "runtime_info")))
        marks = {name: mark for name, mark in parts.get("resumed_keys", {}).items() if name in kept}
        checkpoint["message_hub"] = {**parts, "resumed_keys": marks}
    if isinstance(checkpoint.get("meta"), Mapping):
        checkpoint["meta"] = encode_mmengine_entries(checkpoint["meta"], "meta")
    checkpoint.update(
        {
            name: encode_mmengine_value(one)
            for name, one in checkpoint.items()
            if name not in ("message_hub", "meta")
        }
    )


def mmengine_globals() -> AbstractContextManager[Any]:
    """Allow torch.load(weights_only=True) to read mmengine's checkpoints within a context.

    HistoryBuffer and the numpy types in it are allowed, which only hold numbers. A HistoryBuffer's statistics are
    pickled as attributes of its class, so `getattr` is allowed for these alone.
    """
    multiarray: Any = (getattr(np, "_core", None) or np.core).multiarray
    numbers = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")]
    types = [HistoryBuffer, np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *numbers]
    return torch.serialization.safe_globals([*types, (_mmengine_statistic, "builtins.getattr")])


def _mmengine_statistic(owner: Any, name: str) -> Any:
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise UnpicklingError(f"the file asks for {name!r:.80} of {owner!r:.80}")
    return getattr(HistoryBuffer, name)
