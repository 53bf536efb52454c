"""Train with any kvstore: a single process, replicas, ranks of torch.distributed, parameter servers."""

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
from kvtrainer.strategy.parts import WITHOUT_WRAPPER, ReviseKeys, unwrapped
from kvtrainer.sync.select import traits_of
from kvtrainer.trainer.trainer_dict import check_names

Steps = list[Callable[[], None]]
"""Calls that take a part of a checkpoint over, once all of it is known to fit."""
_RESERVED = (files.WEIGHTS, files.OPTIMIZER, files.SCHEDULERS, files.RANKS)


@uncompiled
class Strategy(BaseStrategy):
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
        env = check.as_mapping(kwargs.get("env_kwargs")) or {}
        self._dist_cfg = dict(check.as_mapping(env.get("dist_cfg")) or {})
        self._made_store: KVStoreBase | None = None
        self._due: list[Callable[[], None]] = []
        """Steps that a new Trainer still needs."""
        super().__init__(**kwargs)

    @property
    def device(self) -> torch.device:
        """Where the model is trained; of several devices the first."""
        return self._devices[0] if self._devices else environment.current_device()

    def _all_devices(self) -> list[torch.device]:
        """Return the devices whose random numbers are saved: that of the model, and those of all parameters."""
        groups = (group for one in self._trainers.values() for group in one.param_groups)
        return list(dict.fromkeys([self.device, *(p.device for group in groups for p in group["params"])]))

    def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
        environment.choose_cuda_device(os.environ)
        if not self._sums_over_ranks():
            return
        if kwargs.get("world_size", 0) > 1 or environment.processes_of_job(os.environ) > 1:
            environment.init_process_group(os.environ, **kwargs)

    def _meet(self) -> Agreement:
        kvstore, over_ranks = self.kvstore, self._sums_over_ranks()
        is_alone = not self._distributed and self._dist_cfg.get("world_size", 1) <= 1
        if self._dist_cfg and over_ranks and is_alone:
            raise ConfigurationError(
                "dist_cfg has no effect: no launcher started this process, so it trains alone. Start the script by "
                "torchrun, or give dist_cfg the rank and world_size"
            )
        traits = traits_of(kvstore) if isinstance(kvstore, str) else None
        if traits is not None and (traits.over_ranks or not traits.is_in_process):
            options = {} if over_ranks else self._dist_cfg
            kvstore = self.kvstore = self._made_store = create(str(kvstore), **options)
        elif self._dist_cfg and not over_ranks:
            raise ConfigurationError(
                f"dist_cfg has no effect: kvstore {kvstore!r} is there already, or keeps to this process; use 'device' "
                "or 'dist_sync'"
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
            raise ConfigurationError("param_scheduler needs an optimizer; give an optim_wrapper, too")
        self.dispatch_kwargs.update(check.as_mapping(dispatch_kwargs) or {})
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

    def _begin_to_count(self) -> None:
        """Tell a Trainer that accumulates how many passes there will be."""
        trainers, run = self._trainers, self.dispatch_kwargs
        counting = [name for name, one in trainers.items() if one.accumulation.counts > 1]
        if not counting:
            return
        if len(trainers) == 1 and run.get("max_iters") is None:
            raise ConfigurationError(
                'accumulation needs "max_iters" in dispatch_kwargs: a last window may be short'
            )
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            self.logger.warning("gradients are accumulated, but BatchNorm layers still see single batches")
        if len(trainers) == 1:
            trainers[counting[0]].set_progress(run.get("cur_iter", 0), run["max_iters"])
            return
        self.logger.warning(
            "gradients of %s are accumulated, and how often each of several Trainers has its turn is not known: "
            "call set_progress() of each, or a last window that is shorter makes no update",
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
        """Load the weights of a checkpoint into the model; collective.

        Args:
            filename: A path, or an https:// address.
            map_location: As of torch.load; 'default' means the current device.
            strict: Raise if the model and the checkpoint differ; otherwise what differs is logged.
            revise_keys: As of `load_model_state_dict`.
            callback: Called with the checkpoint, which it may change, before anything is taken from it.

        Returns:
            What else was in the checkpoint.

        Raises:
            StateFileError: the file cannot be read, was damaged, or is no checkpoint.
            StateMismatchError: `strict`, and something differs.
            RoundAbortedError: another worker failed.
            In each case nothing has changed.
        """
        self._check_prepared("load_checkpoint()")
        self.logger.info("Load checkpoint from %s", filename)
        with self._agreement.all_or_none(f"load {filename!r}"):
            found = files.read_checkpoint(filename, map_location)
            if callback is not None:
                callback(found)
            state_dict = files.require(found, files.WEIGHTS, filename)
        # Not before all workers have read theirs.
        with self._agreement.all_or_none(f"take over the weights of {filename!r}"):
            self.load_model_state_dict(state_dict, strict=strict, revise_keys=revise_keys)
        for trainer in self._trainers.values():
            if trainer.has_begun:  # its store holds other weights already
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
        """Go on from a checkpoint as if never interrupted; collective.

        Weights, the optimizer's state and numbers, schedules, loss scale, what compression has held back, and the
        random numbers of every rank are as they were; the last three only with as many workers as before.

        Args:
            resume_optimizer, resume_param_scheduler: Whether these are resumed.
            map_location, callback: As of `load_checkpoint`.
            missing: What happens where the checkpoint lacks a part, or one does not fit: 'error', or 'warn'; then that
                part stays as it is here, and of the weights those that fit are loaded.

        Returns:
            What else was in the checkpoint: its meta, and what `save_checkpoint` was given.

        Raises:
            CheckpointKeyError: a part is missing. Without schedules here none need be there.
            StateMismatchError: a part does not fit.
            StateFileError, RoundAbortedError: as `load_checkpoint`.
            In each case nothing has changed.
        """
        check.one_of("missing", missing, ("error", "warn"))
        parts = [files.OPTIMIZER] if resume_optimizer else []
        if resume_param_scheduler and self._wrapper() is not None:
            parts.append(files.SCHEDULERS)
        fitting: dict[str, Steps] = {}

        def fit(checkpoint: dict[str, Any]) -> None:
            """Check that its parts can be taken over, before anything is."""
            if callback is not None:
                callback(checkpoint)
            if files.SCHEDULERS in parts and not any(one.schedules for one in self._trainers.values()):
                checkpoint.setdefault(files.SCHEDULERS, self.scheduler_state_dict())  # none, as here
            if resume_optimizer and files.OPTIMIZER in checkpoint:
                self._trainer()
            for part in parts:
                try:
                    fitting[part] = self._fit(part, checkpoint, filename)
                except (CheckpointKeyError, StateMismatchError) as error:
                    if missing == "error":
                        raise
                    self.logger.warning("%r is not resumed, what is here stays as it is: %s", part, error)
            with files.readable("what it says of random numbers and of where the loop is"):
                self._place_in(checkpoint)

        found = self.load_checkpoint(
            filename, map_location=map_location, strict=missing == "error", callback=fit
        )
        with self._agreement.all_or_none(f"resume from {filename!r}"):
            for take_over in (step for part in fitting.values() for step in part):
                take_over()
            self._resume_randomness(found)
        self._resume_counts(self._place_in(found)[1], files.OPTIMIZER in fitting)
        taken = (files.OPTIMIZER, files.SCHEDULERS, files.RANKS)
        return {name: value for name, value in found.items() if name not in taken}

    def save_checkpoint(
        self,
        filename: str,
        *,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        extra_ckpt: dict[str, Any] | None = None,
        callback: Callback | None = None,
    ) -> None:
        """Save all that `resume` needs in one file, which rank 0 writes; collective, between steps; blocks until it is
        on the disk.

        The file is replaced in one stroke. With the optimizer it is then the one that `load_or_resume(resume=True)`
        finds. It holds tensors and plain values only.

        Args:
            extra_ckpt: More to save: tensors, plain values, and dicts and lists of these. Its 'meta' is for numbers
                such as epoch and iter.
            callback: Called on rank 0 with the checkpoint, which it may change, before it is written.

        Raises:
            ConfigurationError: something is to be saved that is no plain value; says where it is.
            StateFileError: the file cannot be written; the former one is unchanged.
            RoundAbortedError: another worker failed.
        """
        self._check_prepared("save_checkpoint()")
        files.path_to_write(filename)
        trainers = self._trainers if save_optimizer else {}
        with self._agreement.all_or_none("save its state"):
            own = {name: files.own_states(one) for name, one in trainers.items()}
            mine = files.pack_tree({"rng": environment.rng_state(self._all_devices()), "trainers": own})
        gathered = self._agreement.gather(mine)
        with self._agreement.all_or_none(f"save {filename!r}"):
            if gathered is not None:
                ranks = [files.unpack_tree(one) for one in gathered]
                found = self._checkpoint(save_optimizer, save_param_scheduler, extra_ckpt, ranks)
                if callback is not None:
                    callback(found)
                files.write_checkpoint(files.plain_copy(found, "checkpoint"), filename)
                if save_optimizer:
                    files.note_last(self.work_dir, filename)

    def _checkpoint(
        self,
        save_optimizer: bool,
        save_param_scheduler: bool,
        extra_ckpt: Mapping[str, Any] | None,
        ranks: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Make a checkpoint of this worker's states and all ranks' own."""
        extra, trainers = dict(extra_ckpt or {}), self._trainers
        if taken := sorted(set(extra) & set(_RESERVED)):
            raise ConfigurationError(
                f"extra_ckpt has {taken}, which a checkpoint has already; use other names"
            )
        found: dict[str, Any] = {files.WEIGHTS: self.model_state_dict()}
        # Where updates count one by one, the store's weights may be newer than the model's.
        held = {p: value for one in trainers.values() for p, value in one.pull_weights().items()}
        named = unwrapped(self.model).named_parameters(remove_duplicate=False)
        found[files.WEIGHTS] |= {name: held[p] for name, p in named if p in held}
        if save_optimizer and trainers:
            states = {name: files.common_states(one) for name, one in trainers.items()}
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
        """Check that a part of a checkpoint can be taken over, and return what does so."""
        content = files.require(checkpoint, part, filename)
        with files.readable(f"its {part!r}"):
            if part == files.OPTIMIZER:
                ranks = checkpoint.get(files.RANKS) or [{}]  # of another number of workers rank 0's counts
                own = ranks[self.rank if len(ranks) == self.world_size else 0]
                return self._fit_optimizer(content, own.get("trainers", {}))
            self.check_scheduler_state_dict(content)
        return [lambda: self.load_scheduler_state_dict(content)]

    def _fit_optimizer(self, states: Any, own: Mapping[str, Any]) -> Steps:
        """Check that all Trainers can take their states over, and return what lets them.

        Args:
            states: Of the Trainer, or of each by name.
            own: What the states of each have of this worker alone, by name.
        """
        trainers = self._trainers
        states = {"": states} if "" in trainers else states
        check_names(states, trainers)
        return [files.fit_states(one, states[name], own.get(name, {})) for name, one in trainers.items()]

    def _place_in(self, found: Mapping[str, Any]) -> tuple[int | None, int | None, Any]:
        """Return a checkpoint's seed, its iteration, and the random numbers of this rank.

        The last are None of another number of workers. Raises an error of any kind if they make no sense.
        """
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
                said("the checkpoint was saved with seed %s, the configuration says %s in vain", seed, given)
            self._set_randomness(**{**self._randomness, "seed": seed})
        if rng is not None:
            environment.set_rng_state(rng, self._all_devices())
        elif num_saved:
            text = "the checkpoint was saved by %d workers and %d go on: random numbers begin with the seed"
            said(text, num_saved, self.world_size)

    def _resume_counts(self, iteration: int | None, is_resumed: bool) -> None:
        """Go on counting where the loop was; a resumed Trainer that accumulates knows its passes itself."""
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
