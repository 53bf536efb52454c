"""What makes a Trainer a torch.optim.Optimizer: groups that say the truth, and state in torch's form.

The parameters lie in an arena and the optimizer's state in slices, here or in a store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Real
from typing import Any, NoReturn

import torch
import torch.optim

from kvstore_server.optimizer import Optimizer
from kvtrainer.errors import ConfigurationError, KVStoreError
from kvtrainer.groups import check_options, make_groups, option_names, read_options
from kvtrainer.layout import lay_out
from kvtrainer.local_update import LocalUpdate
from kvtrainer.parameters import Group
from kvtrainer.states import State, StateElsewhere, StateHolder, export_states, import_states, read_states


class FlatOptimizer(torch.optim.Optimizer, ABC):
    """Parameter groups and optimizer state over an arena; subclasses add `step`.

    Args:
        groups: As `make_groups` returns them.
        optimizer: Its numbers are the defaults of the groups.
        instance: The torch optimizer that shares its groups with this one, if there is one.

    Raises:
        ConfigurationError: a parameter cannot be stored; nothing has been changed then.
    """

    _is_built = False

    def __init__(
        self, groups: list[Group], optimizer: Optimizer, instance: torch.optim.Optimizer | None
    ) -> None:
        self._optimizer = optimizer
        self._instance = instance
        self._option_names = option_names(optimizer)
        self._names = [list(group["param_names"]) for group in groups]
        super().__init__(groups, dict(optimizer.hyper))
        self.state = StateElsewhere(dict)
        if instance is not None:
            # One list of groups for both, so that schedulers bound to the instance reach this optimizer.
            self.param_groups = instance.param_groups
        self._layout = lay_out(self.param_groups, self._names)
        self._local = LocalUpdate(self._layout.plan, optimizer)
        self._last_options: dict[str, Any] = {}
        """Those that were checked last."""
        self._pending: dict[int, State] | None = None
        """State that has not reached its holder yet."""
        self._bind_groups()
        self._is_built = True

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's kind and numbers; with one parameter group, that group's numbers, live."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group, before `lr_mult`."""
        return float(self.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on, wherever the optimizer runs."""
        if isinstance(lr, bool) or not isinstance(lr, Real) or not math.isfinite(lr):
            raise ConfigurationError(f"the learning rate must be a finite number, got {lr!r}")
        for group in self.param_groups:
            group["lr"] = float(lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; where there is a store, before the first step.

        Raises:
            ConfigurationError: the parameters are in a store already, or an argument is wrong; nothing has changed.
        """
        if not self._is_built:
            super().add_param_group(param_group)
            return
        if not self._can_grow():
            raise ConfigurationError(
                "the parameters are in the kvstore already; add parameter groups before the first step"
            )
        self._follow_instance()
        [group] = make_groups([param_group], self._optimizer, None, first=len(self._layout.names))
        names = group["param_names"]
        here = {id(p) for p in self._layout.parameters}
        twice = [name for name, p in zip(names, group["params"], strict=True) if id(p) in here]
        if twice:
            raise ConfigurationError(
                f"{', '.join(twice)}: in a parameter group already; add each parameter once"
            )
        if "param_names" not in self.param_groups[0]:
            del group["param_names"]
        super().add_param_group(group)
        try:
            self._lay_out_again([*self._names, names])
        except KVStoreError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Options and optimizer state in torch's form, wherever the state is kept; blocks while it is fetched.

        Any one worker may call it between its steps.
        """
        self._follow_instance()
        states: Mapping[int, State] = self._pending or {}
        if self._pending is None and (holder := self._holder()) is not None:
            states = export_states(self._layout.plan, holder)
        self.state.update({self._layout.parameters[key]: state for key, state in states.items()})
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and optimizer state, of this class or of the torch optimizer of the same kind.

        Call it on every worker, after building the Trainer. State for a store is handed over when the store is
        there: now, or at the first step.

        Raises:
            ConfigurationError: the state belongs to another model or optimizer; nothing has changed then.
        """
        found: dict[int, State] = {}

        def take_states(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            found.update(read_states(given, self.param_groups, self._layout.plan, self._optimizer))
            return {**given, "state": {}}

        self._follow_instance()
        former = self.param_groups
        # As the last hook it sees what the user's hooks made of the dict, before torch rounds the float32 state of
        # half-precision parameters.
        hook = self.register_load_state_dict_pre_hook(take_states)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
            self.state = StateElsewhere(dict)
        for group, before in zip(self.param_groups, former, strict=True):
            for name in self._option_names:
                group.setdefault(name, before[name])
        self._bind_groups()
        self._pending = found
        self._hand_over_states()

    def __getstate__(self) -> NoReturn:
        raise ConfigurationError(
            f"a {type(self).__name__} cannot be copied or pickled, because its parameters belong to a running model; "
            "save its state_dict() and load that into a new one"
        )

    @abstractmethod
    def _holder(self) -> StateHolder | None:
        """Where the optimizer state is; None before the store is there."""

    @abstractmethod
    def _can_grow(self) -> bool:
        """Whether parameters may still be added."""

    def _checked_options(self) -> dict[str, Any]:
        """The numbers that hold now; those that changed are checked, before anything uses them.

        Raises:
            ConfigurationError: a number is not one that the optimizer takes.
        """
        options = read_options(self.param_groups, self._option_names, self._layout)
        if options != self._last_options:
            for group in options["groups"]:
                check_options(self._optimizer, group)
            self._last_options = options
        return options

    def _follow_instance(self) -> None:
        """Take over what the user did to the torch instance: its load_state_dict replaces groups and state."""
        if self._instance is None:
            return
        if self._instance.param_groups is not self.param_groups:
            self.param_groups = self._instance.param_groups
            self._bind_groups()
        if [len(group["params"]) for group in self.param_groups] != [len(names) for names in self._names]:
            raise ConfigurationError(
                f"parameters were added to the {type(self._instance).__name__} instance behind the Trainer's back; "
                "use trainer.add_param_group"
            )
        if self._instance.state:
            self._pending = read_states(
                self._instance.state_dict(), self.param_groups, self._layout.plan, self._optimizer
            )
            self._instance.state.clear()
            self._hand_over_states()

    def _lay_out_again(self, names: list[list[str]]) -> None:
        """Make room for a new group; state, and what is known of gradients, go along."""
        former = self._layout
        states = self._pending
        if states is None:
            states = export_states(former.plan, self._local)
        layout = lay_out(self.param_groups, names)
        layout.tracker.consume(i for i in range(len(former.names)) if not former.tracker.is_fresh(i))
        former.tracker.close()
        self._layout, self._names = layout, names
        self._local = LocalUpdate(layout.plan, self._optimizer)
        self._pending = states
        self._bind_groups()
        self._hand_over_states()

    def _bind_groups(self) -> None:
        if self._instance is not None:
            self._instance.param_groups = self.param_groups
        # With several groups the optimizer shows the defaults.
        self._optimizer.hyper = self.param_groups[0] if len(self.param_groups) == 1 else dict(self.defaults)

    def _hand_over_states(self) -> None:
        holder = self._holder()
        if self._pending is not None and holder is not None:
            device = self._layout.arena.device if holder is self._local else torch.device("cpu")
            import_states(self._layout.plan, holder, self._pending, self._optimizer, device)
            self._pending = None
