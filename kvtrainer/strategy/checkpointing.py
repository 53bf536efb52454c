"""Checkpoints of a run: one file with the weights, the Trainers' states, and every rank's random numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from kvstore_server.version import __version__
from kvtrainer.errors import CheckpointKeyError, ConfigurationError, StateMismatchError
from kvtrainer.strategy import checkpoint as files
from kvtrainer.strategy import environment, weights
from kvtrainer.strategy.base import BaseStrategy, Callback
from kvtrainer.strategy.randomness import Randomness, check_rng_state, rng_state, set_rng_state
from kvtrainer.strategy.trainer_parts import (
    check_states,
    devices_of,
    put_states,
    readable,
    take_states,
    trainers_by_name,
)
from kvtrainer.strategy.trees import pack_tree, plain_copy, unpack_tree
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import check_names

_RESERVED = (files.WEIGHTS, files.OPTIMIZER, files.SCHEDULERS, files.RANKS)
_TIME = "%Y%m%d_%H%M%S"


class CheckpointingStrategy(BaseStrategy):
    """A strategy whose checkpoints are single files, whatever the kvstore. Arguments as of BaseStrategy."""

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return environment.current_device()

    def load_checkpoint(
        self,
        filename: str,
        *,
        map_location: files.MapLocation = "cpu",
        strict: bool = False,
        revise_keys: weights.ReviseKeys = weights.WITHOUT_WRAPPER,
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
        self._check_prepared("load_checkpoint")
        self.logger.info("Load checkpoint from %s", filename)
        with self._agreement.all_or_none(f"load {filename!r}"):
            found = files.read_checkpoint(filename, map_location)
            if callback is not None:
                callback(found)
            state_dict = files.require(found, files.WEIGHTS, filename)
        # Not before all workers have read theirs.
        with self._agreement.all_or_none(f"take over the weights of {filename!r}"):
            self.load_model_state_dict(state_dict, strict=strict, revise_keys=revise_keys)
        self._publish_weights()
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
        if missing not in ("error", "warn"):
            raise ConfigurationError(f"missing must be 'error' or 'warn', got {missing!r}")
        parts = [files.OPTIMIZER] if resume_optimizer else []
        if resume_param_scheduler and self._wrapper() is not None:
            parts.append(files.SCHEDULERS)
        fitting: list[str] = []

        def check(checkpoint: dict[str, Any]) -> None:
            if callback is not None:
                callback(checkpoint)
            if files.SCHEDULERS in parts and not self._has_schedules():
                checkpoint.setdefault(files.SCHEDULERS, self.scheduler_state_dict())  # none, as here
            if resume_optimizer and files.OPTIMIZER in checkpoint:
                self._trainer()
            fitting.extend(one for one in parts if self._fits(checkpoint, one, filename, missing))
            with readable("what it says of random numbers and of where the loop is"):
                self._check_place(checkpoint)

        found = self.load_checkpoint(
            filename, map_location=map_location, strict=missing == "error", callback=check
        )
        with self._agreement.all_or_none(f"resume from {filename!r}"):
            if files.OPTIMIZER in fitting:
                self._put_optimizer(found[files.OPTIMIZER], self._share(found))
            if files.SCHEDULERS in fitting:
                self.load_scheduler_state_dict(found[files.SCHEDULERS])
            self._resume_randomness(found)
        self._resume_counts(dict(found.get(files.META, {})), files.OPTIMIZER in fitting)
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
        self._check_prepared("save_checkpoint")
        files.path_to_write(filename)
        trainers = trainers_by_name(self._wrapper()) if save_optimizer else {}
        with self._agreement.all_or_none("save its state"):
            rng = rng_state([self.device, *devices_of(trainers)])
            mine = pack_tree(
                {"rng": rng, "trainers": {n: take_states(t, False)[1] for n, t in trainers.items()}}
            )
        gathered = self._agreement.gather(mine)
        with self._agreement.all_or_none(f"save {filename!r}"):
            if gathered is not None:
                ranks = [unpack_tree(one) for one in gathered]
                found = self._checkpoint(save_optimizer, save_param_scheduler, extra_ckpt, ranks)
                if callback is not None:
                    callback(found)
                files.write_checkpoint(plain_copy(found, "checkpoint"), filename)
                if save_optimizer:
                    files.note_last(self.work_dir, filename)

    def _checkpoint(
        self,
        save_optimizer: bool,
        save_param_scheduler: bool,
        extra_ckpt: Mapping[str, Any] | None,
        ranks: list[dict[str, Any]],
    ) -> dict[str, Any]:
        extra = dict(extra_ckpt or {})
        taken = sorted(set(extra) & set(_RESERVED))
        if taken:
            raise ConfigurationError(
                f"extra_ckpt has {', '.join(map(repr, taken))}, which a checkpoint has already; use other names, or a "
                "callback to change them"
            )
        found: dict[str, Any] = {files.WEIGHTS: self._present_weights()}
        wrapper = self._wrapper()
        if save_optimizer and wrapper is not None:
            states = {name: take_states(one, True)[0] for name, one in trainers_by_name(wrapper).items()}
            found[files.OPTIMIZER] = states[""] if isinstance(wrapper, Trainer) else states
        if save_param_scheduler and wrapper is not None:
            found[files.SCHEDULERS] = self.scheduler_state_dict()
        meta = {
            **dict(extra.pop(files.META, {})),
            "seed": self.seed,
            "time": time.strftime(_TIME, time.localtime()),
            "experiment_name": self.experiment_name,
            "world_size": self.world_size,
            "kvtrainer": __version__,
            "torch": str(torch.__version__),
        }
        return {**found, files.RANKS: ranks, **extra, files.META: meta}

    def _present_weights(self) -> dict[str, Any]:
        """The weights of the model; where updates count one by one, those that the store has now."""
        found = self.model_state_dict()
        held: dict[torch.Tensor, torch.Tensor] = {}
        for trainer in trainers_by_name(self._wrapper()).values():
            held |= trainer.pull_weights()
        named = weights.unwrapped(self.model).named_parameters(remove_duplicate=False)
        return found | {name: held[p] for name, p in named if p in held}

    def _fits(self, found: Mapping[str, Any], part: str, filename: str, missing: str) -> bool:
        """Whether a part can be taken over; that it cannot is tolerated, if `missing` is 'warn'."""
        try:
            content = files.require(found, part, filename)
            with readable(f"its {part!r}"):
                if part == files.OPTIMIZER:
                    self._check_optimizer(content, self._share(found))
                else:
                    self.check_scheduler_state_dict(content)
        except (CheckpointKeyError, StateMismatchError) as error:
            if missing == "error":
                raise
            self.logger.warning("%r is not resumed, what is here stays as it is: %s", part, error)
            return False
        return True

    def _check_optimizer(self, states: Any, share: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless `_put_optimizer` can take this; nothing changes."""
        for trainer, common, own in self._states_by_trainer(states, share):
            check_states(trainer, common, own)

    def _put_optimizer(self, states: Any, share: Mapping[str, Any]) -> None:
        for trainer, common, own in self._states_by_trainer(states, share):
            put_states(trainer, common, own)

    def _states_by_trainer(self, states: Any, share: Mapping[str, Any]) -> list[tuple[Trainer, Any, Any]]:
        wrapper, own = self._trainer(), share.get("trainers", {})
        if isinstance(wrapper, Trainer):
            return [(wrapper, states, own.get("", {}))]
        check_names(states, wrapper)
        return [(trainer, states[name], own.get(name, {})) for name, trainer in wrapper.items()]

    def _own(self, found: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What a checkpoint has of this rank; None if it was saved by another number of workers."""
        ranks = found.get(files.RANKS) or []
        own: Mapping[str, Any] | None = ranks[self.rank] if len(ranks) == self.world_size else None
        return own

    def _share(self, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """As `_own`; by another number of workers that of rank 0."""
        ranks = found.get(files.RANKS) or [{}]
        return self._own(found) or ranks[0]

    def _check_place(self, found: Mapping[str, Any]) -> None:
        """Raise unless `_resume_randomness` and `_resume_counts` can take this."""
        meta, own = dict(found.get(files.META, {})), self._own(found)
        Randomness(meta.get("seed"))
        int(meta.get("iter", 0))
        if own is not None:
            check_rng_state(own["rng"])

    def _resume_randomness(self, found: Mapping[str, Any]) -> None:
        seed, own = dict(found.get(files.META, {})).get("seed"), self._own(found)
        num_saved = len(found.get(files.RANKS) or [])
        if seed is not None:
            if self._randomness.seed not in (None, seed):
                self.logger.warning(
                    "the checkpoint was saved with seed %s, the configuration says %s: that of the checkpoint counts",
                    seed,
                    self._randomness.seed,
                )
            self._set_randomness(
                Randomness(seed, self._randomness.diff_rank_seed, self._randomness.deterministic)
            )
        if own is not None:
            set_rng_state(own["rng"], [self.device, *devices_of(trainers_by_name(self._wrapper()))])
        elif num_saved:
            self.logger.warning(
                "the checkpoint was saved by %d workers and %d go on: random numbers begin anew with the seed",
                num_saved,
                self.world_size,
            )

    def _resume_counts(self, meta: Mapping[str, Any], is_resumed: bool) -> None:
        """Where the loop is; a Trainer that was resumed knows itself how many passes it made, if it accumulated."""
        if "iter" not in meta:
            return
        self.dispatch_kwargs["cur_iter"] = int(meta["iter"])
        trainers = trainers_by_name(self._wrapper())
        for trainer in trainers.values():
            knows = is_resumed and trainer.accumulation.done > 0
            if trainer.accumulation.counts > 1 and len(trainers) == 1 and not knows:
                trainer.set_progress(int(meta["iter"]), self.dispatch_kwargs.get("max_iters"))

    def _publish_weights(self) -> None:
        """Give weights that were loaded to stores that hold others already; collective."""
        for trainer in trainers_by_name(self._wrapper()).values():
            if trainer.has_begun:
                trainer.set_data()

    def _has_schedules(self) -> bool:
        return any(one.schedules for one in trainers_by_name(self._wrapper()).values())

    def _wrapper(self) -> Any:
        return getattr(self, "optim_wrapper", None)

    def _check_prepared(self, method: str) -> None:
        if not self._prepared:
            raise ConfigurationError(f"{method}() needs a model; call prepare() first")
