"""The one strategy: for a single process, replicas, ranks of torch.distributed and parameter servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase, create
from kvtrainer.parallel import DataParallel
from kvtrainer.strategy import environment
from kvtrainer.strategy.agreement import Agreement, agreement_of
from kvtrainer.strategy.checkpointing import CheckpointingStrategy
from kvtrainer.strategy.trainer_parts import trainers_by_name
from kvtrainer.sync.select import traits_of


class Strategy(CheckpointingStrategy):
    """Trains with any kvstore: which one is the only difference between one device and a job of many workers.

        strategy = Strategy(kvstore="dist_sync", work_dir="run", env_kwargs=dict(randomness=dict(seed=0)))
        model, trainer = strategy.prepare(net, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
        strategy.load_or_resume(resume=True)
        ...
        strategy.save_checkpoint("run/epoch_1.pt", extra_ckpt=dict(meta=dict(epoch=1, iter=100)))

    Rank and world size are the kvstore's. In a job that a launcher started, 'device' and 'nccl' join its processes in a
    torch.distributed group, unless there is one; dist_cfg in env_kwargs has the options of init_process_group. A store
    that is made by name is given dist_cfg as its options, such as rank, num_workers and servers.
    All methods but the state dicts' are collective: every worker calls them, in the same order.

    Args:
        kvstore: As of a Trainer: a name, a store, or None. Trainers that the strategy builds share it.
        device: Where the model is trained; None: on the current CUDA device, or the CPU where there is none. A list of
            several makes it a DataParallel, with a replica on each.
        **kwargs: of BaseStrategy.
    """

    def __init__(
        self,
        kvstore: str | KVStoreBase | None = "device",
        *,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        if kvstore is not None:
            traits_of(kvstore)
        self.kvstore = kvstore
        places = [device] if isinstance(device, str | torch.device) else device or []
        self._devices = [torch.device(one) for one in places]
        self._dist_cfg = dict((kwargs.get("env_kwargs") or {}).get("dist_cfg") or {})
        self._made_store: KVStoreBase | None = None
        self._due: list[Callable[[], None]] = []
        """What a new Trainer still needs."""
        super().__init__(**kwargs)

    @property
    def device(self) -> torch.device:
        """Where the model is trained; of several devices the first."""
        return self._devices[0] if self._devices else environment.current_device()

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        environment.choose_cuda_device(os.environ)
        if not self._sums_over_ranks():
            return
        if kwargs.get("world_size", 0) > 1 or environment.processes_of_job(os.environ) > 1:
            environment.init_process_group(os.environ, **kwargs)

    def _meet(self) -> Agreement:
        kvstore = self.kvstore
        is_alone = not self._distributed and self._dist_cfg.get("world_size", 1) <= 1
        if self._dist_cfg and self._sums_over_ranks() and is_alone:
            raise ConfigurationError(
                "dist_cfg has no effect: no launcher started this process, so it trains alone. Leave it out, start the "
                "script by torchrun, or give dist_cfg the rank and world_size"
            )
        if isinstance(kvstore, str):
            traits = traits_of(kvstore)
            is_alone = traits.is_in_process and not traits.over_ranks
            if not is_alone:
                options = {} if self._sums_over_ranks() else self._dist_cfg
                kvstore = self.kvstore = self._made_store = create(kvstore, **options)
            elif self._dist_cfg and not self._sums_over_ranks():
                raise ConfigurationError(
                    f"kvstore {kvstore!r} keeps to this process, so dist_cfg has no effect; use 'device' or 'dist_sync'"
                )
        elif self._dist_cfg and not self._sums_over_ranks():
            raise ConfigurationError(
                "dist_cfg has no effect beside a store that is there, or none; leave it out"
            )
        return agreement_of(kvstore if isinstance(kvstore, KVStoreBase) else None)

    def _sums_over_ranks(self) -> bool:
        return self.kvstore is not None and traits_of(self.kvstore).takes_ranks

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, DataParallel) for module in model.modules()):
            return model  # its replicas are where they belong
        if len(self._devices) > 1:
            return DataParallel(model.to(self._devices[0]), self._devices)
        return model.to(self.device)

    def prepare(
        self,
        model: nn.Module | dict[str, Any],
        *,
        optim_wrapper: Any = None,
        param_scheduler: Any = None,
        compile: bool | dict[str, Any] = False,
        dispatch_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make the model ready, then its Trainers and their schedules.

        The model is built, its weights initialised and made rank 0's everywhere, moved to its device and compiled;
        then Trainers are built, their learning rates scaled, and schedules begin with what that gave. What is there
        already is not made again: a second call returns the same.

        Args:
            model: A Module, or a dict with the type of a registered one.
            optim_wrapper: As `build_optim_wrapper` takes it.
            param_scheduler: As `build_param_scheduler` takes it. The Trainer advances them.
            compile: As `compile_model` takes it.
            dispatch_kwargs: What the loop knows of itself: epoch_length, max_epochs, max_iters (needed with
                accumulation), train_micro_batch_size_per_gpu (needed by auto_scale_lr), init_weights_for_test_or_val.

        Returns:
            The model; or [model, Trainer or TrainerDict, schedules], without what was not asked for.

        Raises:
            ConfigurationError: there are schedules, but there is no optimizer; nothing has changed then.
        """
        if param_scheduler is not None and optim_wrapper is None and not hasattr(self, "optim_wrapper"):
            raise ConfigurationError(
                "param_scheduler was given, but there is no optimizer whose values it could change; give prepare an "
                "optim_wrapper as well"
            )
        self.dispatch_kwargs.update(dispatch_kwargs or {})
        if not hasattr(self, "model"):
            built = self._init_model_weights(self.build_model(model))
            self.model = self.compile_model(self._wrap_model(built), compile)
        if optim_wrapper is not None and not hasattr(self, "optim_wrapper"):
            self.optim_wrapper = self.build_optim_wrapper(optim_wrapper, self.model)
            self._due = [self._scale_lr, self._begin_to_count]
        while self._due:  # one that raises is due in the next call
            self._due[0]()
            del self._due[0]
        if param_scheduler is not None and not hasattr(self, "param_schedulers"):
            self.param_schedulers = self.build_param_scheduler(param_scheduler, self._trainer())
        self._prepared = True
        return self._prepared_components()

    def _prepared_components(self) -> Any:
        names = ("model", "optim_wrapper", "param_schedulers")
        parts = [getattr(self, name) for name in names if hasattr(self, name)]
        return parts[0] if len(parts) == 1 else parts

    def _begin_to_count(self) -> None:
        """Tell Trainers that accumulate how many passes there will be."""
        trainers = trainers_by_name(self._trainer())
        counting = {n: t for n, t in trainers.items() if t.accumulation.counts > 1}
        if not counting:
            return
        if len(trainers) == 1 and self.dispatch_kwargs.get("max_iters") is None:
            raise ConfigurationError(
                '"max_iters" must be specified in dispatch_kwargs when gradients are accumulated, because the last '
                "window may be shorter"
            )
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            self.logger.warning(
                "gradients are accumulated, but the model has BatchNorm layers, which still see single batches"
            )
        if len(trainers) > 1:
            self.logger.warning(
                "gradients of %s are accumulated, and how often each of several Trainers has its turn is not known: "
                "call set_progress() of each, or a last window that is shorter makes no update",
                ", ".join(counting),
            )
            return
        for trainer in counting.values():
            trainer.set_progress(self.dispatch_kwargs.get("cur_iter", 0), self.dispatch_kwargs["max_iters"])

    def close(self) -> None:
        super().close()
        if self._made_store is not None:
            self._made_store.close()
