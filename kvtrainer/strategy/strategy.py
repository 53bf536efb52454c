"""`Strategy`: trains with any kvstore, from a single process to parameter servers.

Rank and world size come from the kvstore. The constructor decides how workers reach each other: through a store with
workers of its own ("dist_sync" and others), which it creates by name, or through torch.distributed, whose group it
joins if a launcher started the process.

`load_checkpoint`, `resume` and `save_checkpoint` are collective. Each proceeds in stages, and every stage ends in
`all_or_none`: if one worker fails, all raise before anything changes. `resume` first checks every part of the
checkpoint against what exists here (`_fit`), and only then loads the parts. Rank 0 writes a checkpoint; states that
differ between ranks (random numbers, residuals of compression) are gathered from all of them.

`rejoin` lets a worker that was killed continue without a checkpoint: what a step of this rank counts for lies on the
servers (see `Trainer.resume`), together with random numbers, buffers, and what the script gives as `client_state`.

`prepare` may be called again: parts that exist are kept. A part that failed, such as learning-rate scaling, is retried
by the next call (`_due`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kvstore_server import __version__, check
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import CheckpointKeyError, ConfigurationError, StateMismatchError
from kvtrainer.kvstore import KVStoreBase, create
from kvtrainer.kvstore.agreement import Agreement
from kvtrainer.kvstore.verbs import agreement_of
from kvtrainer.parallel import DataParallel
from kvtrainer.strategy import checkpoint as files
from kvtrainer.strategy import environment
from kvtrainer.strategy.base import TIME, BaseStrategy, Callback
from kvtrainer.strategy.parts import (
    WITHOUT_WRAPPER,
    ReviseKeys,
    innermost_module,
    pack_buffers,
    restore_buffers,
)
from kvtrainer.sync.select import store_traits_of
from kvtrainer.trainer.resume import Resumption
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.trainer.trainer_dict import check_names
from kvtrainer.utils import get_random_state, set_random_state

Steps = list[Callable[[], None]]
"""Functions that load a part of a checkpoint, after all parts were checked."""
_MAX_BUFFERS = 24 << 10
"""The most bytes of a model's buffers that travel with each step."""
_RESERVED = (files.WEIGHTS, files.OPTIMIZER, files.SCHEDULERS, files.RANKS)


@uncompiled
class Strategy(BaseStrategy):
    """Trains with any kvstore: a single device and a job of many workers differ only in its name.

        strategy = Strategy(kvstore="dist_sync", work_dir="run", env_kwargs=dict(randomness=dict(seed=0)))
        model, trainer = strategy.prepare(net, optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)))
        strategy.load_or_resume(resume=True)
        ...
        strategy.save_checkpoint("run/epoch_1.pt", extra_ckpt=dict(meta=dict(epoch=1, iter=100)))

    Rank and world size are the kvstore's. In a job that a launcher started, 'device' and 'nccl' join its processes in a
    torch.distributed group, unless there is one; dist_cfg in env_kwargs has the options of init_process_group. A store
    created by name gets dist_cfg as its options, such as rank, num_workers and servers. All methods except those for
    state dicts are collective: every worker calls them, in the same order.

    Args:
        kvstore: As in a Trainer: a name, a store, or None. Trainers that the strategy builds share it.
        device: Where the model is trained; None: the current CUDA device, or the CPU without CUDA. A list of several
            devices makes the model a DataParallel with a replica on each.
        **kwargs: Arguments of BaseStrategy.
    """

    def __init__(
        self,
        kvstore: str | KVStoreBase | None = "device",
        *,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        **kwargs: Any,
    ) -> None:
        if kvstore is not None:
            store_traits_of(kvstore)
        self.kvstore = kvstore
        places = [device] if isinstance(device, str | torch.device) else device or []
        self._devices = [torch.device(one) for one in places]
        env = check.as_mapping(kwargs.get("env_kwargs")) or {}
        self._dist_cfg = dict(check.as_mapping(env.get("dist_cfg")) or {})
        self._made_store: KVStoreBase | None = None
        self.client_state: Any = None
        """What the script needs to continue after its next step, in plain values; see `rejoin`."""
        self._due: list[Callable[[], None]] = []
        """Steps that a new Trainer still needs."""
        super().__init__(**kwargs)

    @property
    def device(self) -> torch.device:
        """Where the model is trained; with several devices, the first."""
        return self._devices[0] if self._devices else environment.current_device()

    def _all_devices(self) -> list[torch.device]:
        """Return the devices whose random states are saved: the model's, and those of all parameters."""
        groups = (group for one in self._trainers.values() for group in one.param_groups)
        return list(dict.fromkeys([self.device, *(p.device for group in groups for p in group["params"])]))

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        environment.choose_cuda_device(os.environ)
        if not self._sums_over_ranks():
            return
        if kwargs.get("world_size", 0) > 1 or environment.processes_of_job(os.environ) > 1:
            environment.init_process_group(os.environ, **kwargs)

    def _meet(self) -> Agreement:
        # 1. dist_cfg is for a process group, or for a store created below; otherwise it is an error.
        kvstore, over_ranks = self.kvstore, self._sums_over_ranks()
        is_alone = not self._distributed and self._dist_cfg.get("world_size", 1) <= 1
        if self._dist_cfg and over_ranks and is_alone:
            raise ConfigurationError(
                "dist_cfg has no effect: no launcher started this process, so it trains alone. Start the script with "
                "torchrun, or put rank and world_size into dist_cfg"
            )
        # 2. A store with workers of its own is created now, because it has the ranks.
        traits = store_traits_of(kvstore) if isinstance(kvstore, str) else None
        if traits is not None and (traits.over_ranks or not traits.is_in_process):
            options = {} if over_ranks else self._dist_cfg
            kvstore = self.kvstore = self._made_store = create(str(kvstore), **options)
        elif self._dist_cfg and not over_ranks:
            raise ConfigurationError(
                f"dist_cfg has no effect: kvstore {kvstore!r} already exists, or has only this process; use 'device' "
                "or 'dist_sync'"
            )
        return agreement_of(kvstore if isinstance(kvstore, KVStoreBase) else None)

    def _sums_over_ranks(self) -> bool:
        return self.kvstore is not None and store_traits_of(self.kvstore).takes_ranks

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if any(isinstance(module, DataParallel) for module in model.modules()):
            return model  # its replicas are already on their devices
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
        """Prepare the model, then its Trainers and their schedules.

        The model is built, initialized, given rank 0's weights on all workers, moved to its device, and compiled. Then
        Trainers are built, learning rates scaled, and schedules built on these. Parts that exist are kept: a second
        call returns the same ones.

        Args:
            model: A Module, or a dict with the type of a registered one.
            optim_wrapper: As in `build_optim_wrapper`.
            param_scheduler: As in `build_param_scheduler`. The Trainer advances the schedules.
            compile: As in `compile_model`.
            dispatch_kwargs: Facts about the loop: epoch_length, max_epochs, max_iters (needed for accumulation),
                train_micro_batch_size_per_gpu (needed for auto_scale_lr), init_weights_for_test_or_val.

        Returns:
            The model; or [model, Trainer or TrainerDict, schedules], without what was not asked for.

        Raises:
            ConfigurationError: There are schedules but no optimizer; nothing has changed then.
        """
        if param_scheduler is not None and optim_wrapper is None and not hasattr(self, "optim_wrapper"):
            raise ConfigurationError("param_scheduler needs an optimizer; give an optim_wrapper, too")
        self.dispatch_kwargs.update(check.as_mapping(dispatch_kwargs) or {})
        if not hasattr(self, "model"):
            built = self._init_model_weights(self.build_model(model))
            self.model = self.compile_model(self._wrap_model(built), compile)
        if optim_wrapper is not None and not hasattr(self, "optim_wrapper"):
            self.optim_wrapper = self.build_optim_wrapper(optim_wrapper, self.model)
            self._due = [self._scale_lr, self._begin_to_count]
        while self._due:  # a step that raises is repeated by the next call
            self._due[0]()
            del self._due[0]
        if param_scheduler is not None and not hasattr(self, "param_schedulers"):
            self.param_schedulers = self.build_param_scheduler(param_scheduler, self._trainer())
        self._prepared = True
        return self._prepared_components()

    def _begin_to_count(self) -> None:
        """Tell a Trainer that accumulates gradients how many backward passes there will be."""
        trainers, run = self._trainers, self.dispatch_kwargs
        counting = [name for name, one in trainers.items() if one.accumulation.counts > 1]
        if not counting:
            return
        if len(trainers) == 1 and run.get("max_iters") is None:
            raise ConfigurationError(
                'accumulation needs "max_iters" in dispatch_kwargs: a last window may be short'
            )
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            self.logger.warning(
                "gradients are accumulated, but BatchNorm layers use statistics of single batches"
            )
        if len(trainers) == 1:
            trainers[counting[0]].set_progress(run.get("cur_iter", 0), run["max_iters"])
            return
        self.logger.warning(
            "gradients of %s are accumulated, but it is not known how often each of several Trainers is used: call "
            "set_progress() of each, or a shorter last window will not cause an update",
            ", ".join(counting),
        )

    def load_checkpoint(
        self,
        filename: str,
        *,
        map_location: files.MapLocation = "cpu",
        strict: bool = False,
        revise_keys: ReviseKeys = WITHOUT_WRAPPER,
        callback: Callback | None = None,
    ) -> dict[str, Any]:
        """Load the weights of a checkpoint into the model. Collective.

        Args:
            filename: A path, or an https:// address.
            map_location: As in torch.load; 'default' means the current device.
            strict: Raise if the model and the checkpoint differ; otherwise differences are logged.
            revise_keys: As in `load_model_state_dict`.
            callback: Called with the checkpoint, which it may change, before anything is loaded.

        Returns:
            The other contents of the checkpoint.

        Raises:
            StateFileError: The file cannot be read, was damaged, or is not a checkpoint.
            StateMismatchError: `strict`, and something differs.
            RoundAbortedError: Another worker failed.
            In each case nothing has changed.
        """
        self._check_prepared("load_checkpoint()")
        self.logger.info("Load checkpoint from %s", filename)
        with self._agreement.all_or_none(f"load {filename!r}"):
            found = files.read_checkpoint(filename, map_location)
            if callback is not None:
                callback(found)
            state_dict = files.require_checkpoint_part(found, files.WEIGHTS, filename)
        # All workers have read the file, so none fails after others have changed their weights.
        with self._agreement.all_or_none(f"take over the weights of {filename!r}"):
            self.load_model_state_dict(state_dict, strict=strict, revise_keys=revise_keys)
        for trainer in self._trainers.values():
            if trainer.has_begun:  # its store has the former weights
                trainer.set_data()
        return {name: value for name, value in found.items() if name != files.WEIGHTS}

    def resume(
        self,
        filename: str,
        *,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: files.MapLocation = "default",
        callback: Callback | None = None,
        missing: str = "error",
    ) -> dict[str, Any]:
        """Continue from a checkpoint as if never interrupted. Collective.

        Weights, the optimizer's state and hyper-parameters, schedules, loss scale, residuals of compression, and the
        random states of every rank are restored; residuals and random states only with the same number of workers.

        Args:
            resume_optimizer, resume_param_scheduler: Whether these are restored.
            map_location, callback: As in `load_checkpoint`.
            missing: What to do if the checkpoint lacks a part, or one does not fit: 'error'; or 'warn', which keeps
                that part as it is, and loads the weights that fit.

        Returns:
            The other contents of the checkpoint: its meta, and the `extra_ckpt` of `save_checkpoint`.

        Raises:
            CheckpointKeyError: A part is missing. Schedules may be missing if there are none here.
            StateMismatchError: A part does not fit.
            StateFileError, RoundAbortedError: As in `load_checkpoint`.
            In each case nothing has changed.
        """
        # 1. Which parts to restore.
        check.one_of("missing", missing, ("error", "warn"))
        parts = [files.OPTIMIZER] if resume_optimizer else []
        if resume_param_scheduler and self._wrapper() is not None:
            parts.append(files.SCHEDULERS)
        fitting: dict[str, Steps] = {}

        def fit(checkpoint: dict[str, Any]) -> None:
            """Check that all parts can be loaded, before any is."""
            if callback is not None:
                callback(checkpoint)
            if files.SCHEDULERS in parts and not any(one.schedules for one in self._trainers.values()):
                checkpoint.setdefault(
                    files.SCHEDULERS, self.scheduler_state_dict()
                )  # no schedules on either side
            if resume_optimizer and files.OPTIMIZER in checkpoint:
                self._trainer()
            for part in parts:
                try:
                    fitting[part] = self._fit(part, checkpoint, filename)
                except (CheckpointKeyError, StateMismatchError) as error:
                    if missing == "error":
                        raise
                    self.logger.warning("%r is not resumed and keeps its present state: %s", part, error)
            with files.refuse_unreadable_checkpoint(
                "what it says of random numbers and of where the loop is"
            ):
                self._place_in(checkpoint)

        # 2. Read the file, check every part, and load the weights.
        found = self.load_checkpoint(
            filename, map_location=map_location, strict=missing == "error", callback=fit
        )
        # 3. Load the other parts, which are known to fit.
        with self._agreement.all_or_none(f"resume from {filename!r}"):
            for take_over in (step for part in fitting.values() for step in part):
                take_over()
            self._resume_randomness(found)
        self._resume_counts(self._place_in(found)[1], files.OPTIMIZER in fitting)
        taken = (files.OPTIMIZER, files.SCHEDULERS, files.RANKS)
        return {name: value for name, value in found.items() if name not in taken}

    def rejoin(self) -> Resumption:
        """Continue where an earlier process of this rank has ended; on a first start, begin. Blocks.

        Call it once on every worker, after `prepare` and before the first step. From then on each step stores on the
        servers what another process of this rank needs: `client_state`, the states of the random generators, the
        model's buffers, and what `Trainer.resume` stores. The script of a worker that was started again repeats its
        calls up to here, and this one restores all of that; no checkpoint is needed. On a first start a checkpoint may
        be loaded after it.

            batches = ResumableBatches(loader)
            start = strategy.rejoin()
            if start.client_state is not None:
                batches.load_state_dict(start.client_state)
            for epoch in range(batches.epoch, num_epochs):
                for x, y in batches:
                    ...
                    strategy.client_state = batches.state_dict()
                    trainer.step(batch_size)

        Raises:
            ConfigurationError: There are several Trainers; or random states, buffers and `client_state` are longer than
                what travels with a step, which a step may also raise; or as in `Trainer.resume`.
            WorkerLostError, KVStoreError: As in `Trainer.resume`.
        """
        self._check_prepared("rejoin()")
        trainer = self._trainer()
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(
                f"rejoin() is possible with one Trainer; this strategy has {len(self._trainers)}, and a worker may end "
                "between their steps. Resume from a checkpoint instead"
            )
        if (nbytes := len(pack_buffers(self.model))) > _MAX_BUFFERS:
            raise ConfigurationError(
                f"the model has buffers of {nbytes} bytes, such as those of BatchNorm; up to {_MAX_BUFFERS} travel "
                "with each step for a worker that comes back. Resume from checkpoints, or use layers without buffers"
            )
        start = trainer.resume()
        trainer.register_step_pre_hook(lambda *_: self._describe(trainer))
        if start.client_state is None:
            self._describe(trainer)
            return start
        found = start.client_state
        restore_buffers(self.model, found["buffers"])
        set_random_state(found["random"])
        self.client_state = found["loop"]
        return Resumption(start.round, self.client_state)

    def _describe(self, trainer: Trainer) -> None:
        """Let the coming step store what the successor of this process needs."""
        random, buffers = get_random_state(), pack_buffers(self.model)
        trainer.client_state = {"loop": self.client_state, "random": random, "buffers": buffers}

    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict[str, Any] | None = None,
        callback: Callback | None = None,
    ) -> None:
        """Save everything that `resume` needs in one file. Collective; call it between steps.

        Rank 0 writes the file, replacing an existing one atomically, and blocks until it is on the disk. With the
        optimizer it becomes the file that `load_or_resume(resume=True)` finds. It contains tensors and plain values
        only.

        Args:
            extra_ckpt: More to save: tensors, plain values, and dicts and lists of these. Its 'meta' is for values such
                as epoch and iter.
            callback: Called on rank 0 with the checkpoint, which it may change, before it is written.

        Raises:
            ConfigurationError: Something to save is not a plain value; the message says where.
            StateFileError: The file cannot be written; the former one is unchanged.
            RoundAbortedError: Another worker failed.
        """
        self._check_prepared("save_checkpoint()")
        files.checkpoint_path(filename)
        # 1. Every rank contributes what only it has.
        trainers = self._trainers if save_optimizer else {}
        with self._agreement.all_or_none("save its state"):
            own = {name: files.own_checkpoint_states(one) for name, one in trainers.items()}
            mine = files.pack_checkpoint_tree(
                {"rng": environment.rng_state(self._all_devices()), "trainers": own}
            )
        # 2. Rank 0 writes everything; the others wait for its result.
        gathered = self._agreement.gather(mine)
        with self._agreement.all_or_none(f"save {filename!r}"):
            if gathered is not None:
                ranks = [files.unpack_checkpoint_tree(one) for one in gathered]
                found = self._checkpoint(save_optimizer, save_param_scheduler, extra_ckpt, ranks)
                if callback is not None:
                    callback(found)
                files.write_checkpoint(files.plain_checkpoint_copy(found, "checkpoint"), filename)
                if save_optimizer:
                    files.record_last_checkpoint(self.work_dir, filename)

    def _checkpoint(
        self,
        save_optimizer: bool,
        save_param_scheduler: bool,
        extra_ckpt: Mapping[str, Any] | None,
        ranks: list[dict[str, Any]],
    ) -> dict[str, Any]:
        # 1. Names of ours must stay free.
        extra, trainers = dict(extra_ckpt or {}), self._trainers
        if taken := sorted(set(extra) & set(_RESERVED)):
            raise ConfigurationError(
                f"extra_ckpt has {taken}, which a checkpoint has already; use other names"
            )
        # 2. The weights.
        found: dict[str, Any] = {files.WEIGHTS: self.model_state_dict()}
        # With asynchronous updates, the store's weights may be newer than the model's.
        held = {p: value for one in trainers.values() for p, value in one.pull_weights().items()}
        named = innermost_module(self.model).named_parameters(remove_duplicate=False)
        found[files.WEIGHTS] |= {name: held[p] for name, p in named if p in held}
        # 3. Optimizers, schedules, and facts about the run.
        if save_optimizer and trainers:
            states = {name: files.common_checkpoint_states(one) for name, one in trainers.items()}
            found[files.OPTIMIZER] = states.get("", states)
        if save_param_scheduler and trainers:
            found[files.SCHEDULERS] = self.scheduler_state_dict()
        meta = {
            **dict(extra.pop(files.META, {})),
            "seed": self.seed,
            "time": time.strftime(TIME, time.localtime()),
            "experiment_name": self.experiment_name,
            "world_size": self.world_size,
            "kvtrainer": __version__,
            "torch": str(torch.__version__),
        }
        return {**found, files.RANKS: ranks, **extra, files.META: meta}

    def _fit(self, part: str, checkpoint: Mapping[str, Any], filename: str) -> Steps:
        """Check that a part of a checkpoint can be loaded. Return the functions that load it."""
        content = files.require_checkpoint_part(checkpoint, part, filename)
        with files.refuse_unreadable_checkpoint(f"its {part!r}"):
            if part == files.OPTIMIZER:
                ranks = checkpoint.get(files.RANKS) or [{}]  # rank 0's, if the number of workers has changed
                own = ranks[self.rank if len(ranks) == self.world_size else 0]
                return self._fit_optimizer(content, own.get("trainers", {}))
            self.check_scheduler_state_dict(content)
        return [lambda: self.load_scheduler_state_dict(content)]

    def _fit_optimizer(self, states: Any, own: Mapping[str, Any]) -> Steps:
        """As `_fit`, for all Trainers: `states` is a Trainer's, or by name; `own` has this worker's parts, by name."""
        trainers = self._trainers
        states = {"": states} if "" in trainers else states
        check_names(states, trainers)
        return [
            files.fit_checkpoint_states(one, states[name], own.get(name, {}))
            for name, one in trainers.items()
        ]

    def _place_in(self, found: Mapping[str, Any]) -> tuple[int | None, int | None, Any]:
        """Return a checkpoint's seed, iteration, and this rank's random states (None with other workers)."""
        meta, ranks = dict(found.get(files.META, {})), found.get(files.RANKS) or []
        rng = ranks[self.rank]["rng"] if len(ranks) == self.world_size else None
        if rng is not None:
            environment.check_rng_state(rng)
        return environment.check_seed(meta.get("seed")), int(meta["iter"]) if "iter" in meta else None, rng

    def _resume_randomness(self, found: Mapping[str, Any]) -> None:
        seed, _, rng = self._place_in(found)
        num_saved, said = len(found.get(files.RANKS) or []), self.logger.warning
        if seed is not None:
            if (given := self._randomness["seed"]) not in (None, seed):
                said(
                    "the checkpoint was saved with seed %s, which replaces %s of the configuration",
                    seed,
                    given,
                )
            self._set_randomness(**{**self._randomness, "seed": seed})
        if rng is not None:
            environment.set_rng_state(rng, self._all_devices())
        elif num_saved:
            text = (
                "the checkpoint was saved by %d workers, but there are %d now: generators start from the seed"
            )
            said(text, num_saved, self.world_size)

    def _resume_counts(self, iteration: int | None, is_resumed: bool) -> None:
        """Set the loop's iteration. A resumed Trainer that accumulates gradients has its own count."""
        if iteration is None:
            return
        self.dispatch_kwargs["cur_iter"] = iteration
        for trainer in self._trainers.values() if len(self._trainers) == 1 else ():
            knows = is_resumed and trainer.accumulation.done > 0
            if trainer.accumulation.counts > 1 and not knows:
                trainer.set_progress(iteration, self.dispatch_kwargs.get("max_iters"))

    def _check_prepared(self, method: str) -> None:
        if not self._prepared:
            raise ConfigurationError(f"{method} needs a model; call prepare() first")

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._made_store is not None:
                self._made_store.close()
