"""The parts of a run: loading a model's weights, building Trainers, and scaling their learning rates.

The learning rate is scaled linearly with the batch size, as in Goyal et al.: Accurate, Large Minibatch SGD, 2017,
section 2.1:

    lr ← lr · (workers · batch of one worker · its replicas [· accumulated passes]) / base batch size
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvstore_server import check
from kvtrainer.config import read_wrapper
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, StateMismatchError
from kvtrainer.kvstore.agreement import Agreement
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.options import paramwise
from kvtrainer.parallel import DataParallel
from kvtrainer.strategy.checkpoint import pack_checkpoint_tree, unpack_checkpoint_tree
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.trainer.trainer_dict import TrainerDict

ReviseKeys = Sequence[tuple[str, str]]
WITHOUT_WRAPPER: ReviseKeys = ((r"^module\.", ""),)
"""Removes the prefix that DistributedDataParallel adds to every name."""
_WITHOUT_COMPILED: ReviseKeys = ((r"(?<![^.])_orig_mod\.", ""),)
"""Removes the prefix that torch.compile adds to the names of a module or submodule."""
_INSIDE = ("_orig_mod", "module")
"""Attributes in which wrappers keep the model: those of torch.compile, and of DistributedDataParallel and others."""
_LR_NOTES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


class ScheduledTooEarlyError(ConfigurationError, RuntimeError):
    """The learning rate would be scaled after schedules have started from it."""


class LoadReport(NamedTuple):
    """The names in which a model and a checkpoint differ."""

    missing: list[str]
    """Only in the model; these keep their values."""
    unexpected: list[str]
    """Only in the checkpoint."""
    mismatched: list[str]
    """In both, but with different shapes, or not a tensor in the checkpoint; not loaded. Each entry has the details."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = zip(("missing", "unexpected", "of another shape"), self, strict=True)
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names) or "everything fits"


def innermost_module(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers; of replicas, the first."""
    *_, inner = paramwise.walk_wrappers(model, _INSIDE)
    return inner


def load_weights(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = False,
    revise_keys: ReviseKeys = WITHOUT_WRAPPER,
) -> LoadReport:
    """Load the weights that fit into a model, and report the rest; with `strict`, raise StateMismatchError instead.

    `revise_keys` are pairs of a regular expression and its replacement, applied to every name in order. The default
    removes the prefix "module." if more names of the model are found that way (a submodule may have this name), and
    ignores whether the model, the saved one, or their submodules are compiled.
    """
    # 1. Match the names.
    inner = innermost_module(model)
    own = inner.state_dict()
    if revise_keys is WITHOUT_WRAPPER:
        called = dict(zip(_rename_weight_keys(own, _WITHOUT_COMPILED), own, strict=True))
        state_dict = _rename_weight_keys(state_dict, _WITHOUT_COMPILED)
        as_they_are = sum([name in called for name in state_dict])
        without = sum([str(name).removeprefix("module.") in called for name in state_dict])
        is_bare = 0 < as_they_are >= without
        given = _rename_weight_keys(state_dict, () if is_bare else revise_keys)
        given = {called.get(name, name): value for name, value in given.items()}
    else:
        given = _rename_weight_keys(state_dict, revise_keys)
    # 2. Compare shapes. A lazy parameter takes any shape.
    mismatched = {
        name: f"{name} ({_describe_weight_shape(value)} in the checkpoint, "
        f"{_describe_weight_shape(own[name])} in the model)"
        for name, value in given.items()
        if isinstance(own.get(name), Tensor)
        and not (
            isinstance(value, Tensor) and (nn.parameter.is_lazy(own[name]) or own[name].shape == value.shape)
        )
    }
    report = LoadReport(
        [name for name in own if name not in given],
        [name for name in given if name not in own],
        list(mismatched.values()),
    )
    if strict and report:
        raise StateMismatchError(f"the checkpoint does not fit: {report}; strict=False loads what fits")
    # 3. Load what fits, and copy it to other replicas.
    inner.load_state_dict({name: v for name, v in given.items() if name not in mismatched}, strict=False)
    for wrapper in paramwise.walk_wrappers(model, _INSIDE):
        if isinstance(wrapper, DataParallel):
            wrapper.broadcast()
    return report


@torch.no_grad()
def share_weights(model: nn.Module, agreement: Agreement) -> None:
    """Copy rank 0's weights and buffers to all workers, if they differ. Collective."""
    if agreement.size == 1:
        return
    state = innermost_module(model).state_dict()
    # Lazy parameters get rank 0's values in the first step.
    mine = pack_checkpoint_tree(
        {n: v for n, v in state.items() if isinstance(v, Tensor) and not nn.parameter.is_lazy(v)}
    )
    # Weights initialized with the same seed are equal already: compare digests before sending them.
    if len(set(agreement.all_gather(hashlib.sha256(mine).digest()))) == 1:
        return
    found = unpack_checkpoint_tree(agreement.broadcast(mine))
    with agreement.all_or_none("take over the weights of rank 0"):
        if agreement.rank != 0:
            load_weights(model, {**state, **found}, strict=True, revise_keys=())


def pack_buffers(model: nn.Module) -> bytes:
    """Return the values of a model's buffers, such as those of BatchNorm, one after another."""
    return b"".join(
        [_bytes_of_buffer(buffer).numpy().tobytes() for buffer in innermost_module(model).buffers()]
    )


def restore_buffers(model: nn.Module, packed: bytes) -> None:
    """Write what `pack_buffers` returned to the same model. Raises StateMismatchError if it is for another one."""
    buffers = list(innermost_module(model).buffers())
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    if sum(sizes) != len(packed):
        raise StateMismatchError(
            f"an earlier process of this rank had buffers of {len(packed)} bytes, the model here has {sum(sizes)}; "
            "start it with the same model"
        )
    starts = itertools.accumulate(sizes, initial=0)
    with torch.no_grad():
        for buffer, start, size in zip(buffers, starts, sizes, strict=False):
            if size:
                own = torch.frombuffer(bytearray(packed[start : start + size]), dtype=buffer.dtype)
                buffer.copy_(own.view(buffer.shape))


def _bytes_of_buffer(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _describe_weight_shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "no shape yet" if nn.parameter.is_lazy(value) else str(list(value.shape))


def _rename_weight_keys(state_dict: Mapping[str, Any], revise_keys: ReviseKeys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in state_dict.items():
        revised = name
        try:
            for pattern, replacement in revise_keys:
                revised = re.sub(pattern, replacement, revised)
        except (re.error, TypeError, ValueError) as error:
            text = f"revise_keys must be pairs of a pattern and a replacement, got {revise_keys!r:.200} ({error})"
            raise ConfigurationError(text) from error
        if revised in found:
            raise ConfigurationError(
                f"revise_keys makes {revised!r} of both {origin[revised]!r} and {name!r}; give other patterns"
            )
        found[revised], origin[revised] = value, name
    return found


def build_trainers(
    cfg: Any, model: nn.Module | None, kvstore: str | KVStoreBase | None
) -> Trainer | TrainerDict:
    """Build a Trainer over a store, or several by name.

    `cfg` is a Trainer or TrainerDict, which is returned; a torch optimizer; a dict with `optimizer` (a torch optimizer,
    or a dict with `type`) or `constructor`, and options of the Trainer, where `paramwise_cfg`, `accumulative_counts`
    and, with type='AmpOptimWrapper', `loss_scale` and `dtype` are mmengine's names; or a dict of these by name. Each
    dict in the latter is for the part of the model with its name.
    """
    # 1. Trainers and optimizers that were built already.
    if isinstance(cfg, Trainer | TrainerDict):
        return cfg
    if isinstance(cfg, torch.optim.Optimizer):
        return build_trainers({"optimizer": cfg}, model, kvstore)
    cfg = check.as_mapping(cfg)
    if not isinstance(cfg, Mapping):
        raise ArgumentTypeError(f"optim_wrapper must be a Trainer, an optimizer or a dict, got {cfg!r:.200}")
    # 2. Several configurations, by the names of the model's parts.
    if cfg.get("optimizer") is None and "constructor" not in cfg:
        return TrainerDict(**{str(name): _build_part(name, cfg[name], model, kvstore) for name in cfg})
    if model is None and isinstance(cfg.get("optimizer") or {}, Mapping):
        raise ConfigurationError("an optimizer that is described by a dict needs the model that it trains")
    # 3. One configuration. Its constructor may still make several optimizers.
    given = {**cfg, "type": None} if cfg.get("type") is Trainer else cfg
    kind, each = read_wrapper(paramwise.unwrap_model(model, _INSIDE), given)

    def make(arguments: dict[str, Any]) -> Trainer:
        built = arguments["optimizer"]
        if isinstance(built, Trainer) and built is not cfg.get("optimizer"):  # built by a constructor
            return built
        return (kind or Trainer)(**{"kvstore": kvstore, **arguments})

    made = {name: make(arguments) for name, arguments in each.items()}
    return made[""] if "" in made else TrainerDict(**made)


def _build_part(name: str, cfg: Any, model: nn.Module | None, kvstore: str | KVStoreBase | None) -> Trainer:
    """Build one of several Trainers. A dict describes the optimizer of the submodule with its name."""
    cfg = check.as_mapping(cfg)
    if isinstance(cfg, Mapping) and cfg.get("optimizer") is not None:
        parts = {} if model is None else innermost_module(model)._modules
        if model is not None and parts.get(name) is None:
            raise ConfigurationError(
                f"there is an optimizer for {name!r}, but the model has no part of that name, only "
                f"{', '.join(parts) or 'none'}; give optimizers the names of parts, or a constructor"
            )
        model = parts.get(name)
    elif not isinstance(cfg, torch.optim.Optimizer):
        raise ConfigurationError(
            "each of several optimizers must be torch's or dict(optimizer=…), and a single one dict(optimizer=dict("
            f"type='SGD', lr=0.1)); got {name}={cfg!r:.200}"
        )
    built = build_trainers(cfg, model, kvstore)
    if not isinstance(built, Trainer):
        raise ConfigurationError(
            f"the constructor of the optimizer {name!r} must return one optimizer, but returned several"
        )
    return built


def scale_learning_rates(
    cfg: Mapping[str, Any] | None,
    trainers: Mapping[str, Trainer],
    micro_batch: int | None,
    num_workers: int,
    log: logging.Logger,
) -> float:
    """Scale the learning rates of all groups, and the values derived from them. Return the factor.

    `cfg` has `enable` (False), `base_batch_size`, and `count_accumulation` (False): whether accumulated passes count as
    well. `micro_batch` is the number of samples per batch of one worker, or of one device if it has replicas.
    """
    # 1. Options, and no schedule may have started yet.
    check.known("auto_scale_lr", cfg or {}, ("enable", "base_batch_size", "count_accumulation"))
    if not cfg or not cfg.get("enable", False):
        return 1.0
    base = check.integer("base_batch_size of auto_scale_lr", cfg.get("base_batch_size"), 1)
    needed = "train_micro_batch_size_per_gpu of dispatch_kwargs, which auto_scale_lr needs,"
    micro = check.integer(needed, micro_batch, 1)
    if any(trainer.schedules for trainer in trainers.values()):
        raise ScheduledTooEarlyError(
            "schedules have started from the learning rate before it was scaled; let prepare() build them afterwards"
        )
    factor, scaled = 1.0, set[int]()
    for name, trainer in trainers.items():
        # 2. The real batch size, and the factor.
        replicas = trainer.num_replicas
        passes = trainer.accumulation.counts if cfg.get("count_accumulation", False) else 1
        real = num_workers * micro * replicas * passes
        factor = real / base
        parts = f"{num_workers} workers · {micro}" + (f" · {replicas} replicas" if replicas > 1 else "")
        parts += f" · {passes} accumulated" if passes > 1 else ""
        of = name and f" of {name}"
        log.info("learning rate%s · %g: batch size %s = %d, base %d", of, factor, parts, real, base)
        # 3. Scale the rates in groups and defaults, and of Gluon's scheduler.
        for options in (*trainer.param_groups, trainer.defaults):
            for note in _LR_NOTES:
                if isinstance(options.get(note), int | float | Tensor):
                    options[note] = options[note] * factor
        scheduler: Any = trainer.optimizer.lr_scheduler
        if hasattr(scheduler, "base_lr") and id(scheduler) not in scaled:  # Trainers may share one
            scaled.add(id(scheduler))
            scheduler.base_lr *= factor  # raises for a scheduler that is a plain function
    return factor
