"""The parts of a training run: the model, the Trainers and the schedules; made, and their states taken and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from kvtrainer.errors import ArgumentTypeError, StateMismatchError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.strategy import building, weights
from kvtrainer.strategy.run import Run
from kvtrainer.strategy.scaling import scale_learning_rates
from kvtrainer.strategy.trainer_parts import in_updates, trainers_by_name
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import TrainerDict, check_names

_RUN = ("epoch_length", "max_epochs", "max_iters")


class Parts(Run):
    """Makes the parts of a run, each by a method that a subclass may override. Arguments as of BaseStrategy."""

    model: nn.Module
    """There after `prepare`."""
    optim_wrapper: Trainer | TrainerDict
    """The Trainer, or several; there once `prepare` has built it."""
    param_schedulers: building.Schedules
    """The schedules that `prepare` has built."""
    kvstore: str | KVStoreBase | None = "device"
    """What Trainers are given: a store, or the name of one that each makes for itself where it needs it."""

    def __init__(self, *, auto_scale_lr: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.auto_scale_lr = None if auto_scale_lr is None else dict(auto_scale_lr)
        self.dispatch_kwargs: dict[str, Any] = {}
        """What the loop has told `prepare` of itself."""
        super().__init__(**kwargs)

    def build_model(self, model: nn.Module | dict[str, Any]) -> nn.Module:
        """See `building.build_model`."""
        return building.build_model(model)

    def _init_model_weights(self, model: nn.Module) -> nn.Module:
        """Let the model initialise its weights, where it can, and give every worker rank 0's, with its buffers.

        Not with init_weights_for_test_or_val=False in dispatch_kwargs, for a model that is loaded next.
        """
        if self.dispatch_kwargs.get("init_weights_for_test_or_val", True):
            init = getattr(model, "init_weights", None)
            if callable(init):
                init()
            weights.share_weights(model, self._agreement)
        return model

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        """Bring the model to where it is trained; the base leaves it where it is."""
        return model

    def compile_model(self, model: nn.Module, compile: bool | Mapping[str, Any] = False) -> nn.Module:
        """See `building.compile_model`."""
        return building.compile_model(model, compile, self.logger)

    def build_optim_wrapper(
        self, optim_wrapper: Any, model: nn.Module | None = None
    ) -> Trainer | TrainerDict:
        """A Trainer over the strategy's kvstore, or several; see `building.build_trainers`."""
        return building.build_trainers(optim_wrapper, model, self.kvstore)

    def build_param_scheduler(
        self,
        scheduler: Any,
        optim_wrapper: Trainer | TrainerDict,
        default_args: Mapping[str, Any] | None = None,
    ) -> building.Schedules:
        """Schedules that the Trainer advances; see `building.build_schedules`.

        Args:
            default_args: None: epoch_length, max_epochs and max_iters, as far as dispatch_kwargs has them. There they
                count backward passes; schedules by step count updates, so they are divided by the passes that one
                Trainer accumulates.
        """
        if default_args is None:
            run = {name: self.dispatch_kwargs[name] for name in _RUN if name in self.dispatch_kwargs}
            passes = optim_wrapper.accumulation.counts if isinstance(optim_wrapper, Trainer) else 1
            default_args = in_updates(run, passes)
        return building.build_schedules(scheduler, optim_wrapper, default_args, self.logger)

    def _scale_lr(self) -> None:
        """Scale learning rates as `auto_scale_lr` says."""
        micro = self.dispatch_kwargs.get("train_micro_batch_size_per_gpu")
        trainers = trainers_by_name(self._trainer())
        scale_learning_rates(self.auto_scale_lr, trainers, micro, self.world_size, self.logger)

    def model_state_dict(self) -> dict[str, Any]:
        """The weights and buffers of the model, on the CPU, without the names of wrappers."""
        return weights.take_weights(self.model)

    def optim_state_dict(self) -> dict[str, Any]:
        """The state_dict of the Trainer, or of each by name; blocks while state is fetched.

        Raises:
            ArgumentTypeError: there is no Trainer.
        """
        return self._trainer().state_dict()

    def scheduler_state_dict(self) -> list[dict[str, Any]] | dict[str, list[dict[str, Any]]]:
        """The state of every schedule of the Trainer, or by name of each of several."""
        wrapper = self._trainer()
        if isinstance(wrapper, Trainer):
            return [one.state_dict() for one in wrapper.schedules]
        return {name: [one.state_dict() for one in t.schedules] for name, t in wrapper.items()}

    def load_model_state_dict(
        self,
        state_dict: Mapping[str, Any],
        *,
        strict: bool = False,
        revise_keys: weights.ReviseKeys = weights.WITHOUT_WRAPPER,
    ) -> weights.LoadReport:
        """Load weights into the model; what does not fit is logged, and returned. See `weights.load_weights`."""
        report = weights.load_weights(self.model, state_dict, strict, revise_keys)
        if report:
            self.logger.warning("the model and the checkpoint do not match: %s", report)
        return report

    def load_optim_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `optim_state_dict` gave; call it on every worker."""
        self._trainer().load_state_dict(dict(state_dict))

    def load_scheduler_state_dict(self, state_dict: Any) -> None:
        """Take over what `scheduler_state_dict` gave.

        Raises:
            StateMismatchError: as `check_scheduler_state_dict`; nothing has changed then.
        """
        for schedule, state in self._scheduled(state_dict):
            schedule.load_state_dict(state)

    def check_scheduler_state_dict(self, state_dict: Any) -> None:
        """Raise StateMismatchError unless `load_scheduler_state_dict` can take this; override both.

        It is of other Trainers then, or of another number or kind of schedules.
        """
        self._scheduled(state_dict)

    def _scheduled(self, state_dict: Any) -> list[tuple[BoundSchedule, dict[str, Any]]]:
        """Every schedule with its state, which fits."""
        wrapper = self._trainer()
        if isinstance(wrapper, TrainerDict):
            if not isinstance(state_dict, Mapping):
                raise StateMismatchError(
                    f"the states of schedules of several Trainers are a dict by their names, got {state_dict!r:.80}"
                )
            check_names(state_dict, wrapper)
        elif isinstance(state_dict, Mapping) or not isinstance(state_dict, list | tuple):
            raise StateMismatchError(
                f"the states of a Trainer's schedules are a list, got {state_dict!r:.80}"
            )
        pairs = [
            (name, one.schedules, list(state_dict[name] if name else state_dict))
            for name, one in trainers_by_name(wrapper).items()
        ]
        for name, mine, given in pairs:
            if len(mine) != len(given):
                raise StateMismatchError(
                    f"there are {len(given)} states for {len(mine)} schedules{name and f' of {name}'}; build the same "
                    "schedules, or resume without them"
                )
        rows = [row for _, mine, given in pairs for row in zip(mine, given, strict=True)]
        for schedule, state in rows:
            schedule.check_state_dict(state)
        return rows

    def _trainer(self) -> Trainer | TrainerDict:
        if not hasattr(self, "optim_wrapper"):
            raise ArgumentTypeError(
                "this strategy has no Trainer, so there is no state of an optimizer; give prepare() an optim_wrapper"
            )
        return self.optim_wrapper
