"""The groups of a Trainer, which say the truth, and the places of its parameters.

Both are there before any update: options and the learning rate are read from the groups at every step, and parameters
lie in an arena as soon as they all have shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, NoReturn

import torch.optim

from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvtrainer.errors import ConfigurationError, KVStoreError
from kvtrainer.groups import check_options, make_groups, option_names, read_options
from kvtrainer.local_update import JointUpdate, ShardUpdate
from kvtrainer.lr_scheduler import UpdateCounter
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.parallel.policy import COPIES, devices_of, spread
from kvtrainer.states.entries import State
from kvtrainer.types import Group


class GroupedOptimizer(torch.optim.Optimizer, ABC):
    """Parameter groups over an arena; subclasses add optimizer state and `step`.

    Args:
        groups: As `make_groups` returns them.
        optimizer: Its numbers are the defaults of the groups.
        instance: The torch optimizer that shares its groups with this one, if there is one.

    Raises:
        ConfigurationError: a parameter cannot be stored; nothing has been changed then.

    Parameters of lazy modules may get their shapes later; `_settle` is called before anything needs them.
    """

    _is_built = False
    _local: ShardUpdate | JointUpdate
    """The state of an update in this process; there once `_settle` has succeeded."""
    _local_copies: list[ShardUpdate | JointUpdate]
    """The same for the replicas on each further device, which only updates without a store use."""

    def __init__(
        self, groups: list[Group], optimizer: Optimizer, instance: torch.optim.Optimizer | None
    ) -> None:
        self._optimizer = optimizer
        self._instance = instance
        self._made: torch.optim.Optimizer | None = None
        """The torch optimizer that was made for an update of all parameters together."""
        self._option_names = option_names(optimizer)
        self._names = [list(group["param_names"]) for group in groups]
        super().__init__([spread(group) for group in groups], dict(optimizer.hyper))
        if instance is not None:
            # One list of groups for both, so that schedulers bound to the instance reach this optimizer.
            self.param_groups = instance.param_groups
        self._layout = Memory(self.param_groups, self._names)
        self._schedule = UpdateCounter(optimizer)
        self._last_options: dict[str, Any] = {}
        """Those that were checked last."""
        self._pending: dict[int, State] | None = None
        """State that has not reached its holder yet."""
        self._bind_groups()
        if self._layout.is_settled:
            self._make_local()
        self._is_built = True

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's kind and numbers; with one parameter group, that group's numbers, live."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group, before `lr_mult`; that of the last update, if there is a
        lr_scheduler."""
        if self._optimizer.lr_scheduler is not None:
            return self._optimizer.learning_rate
        if "lr" not in self.param_groups[0]:
            return self._optimizer.learning_rate
        return float(self.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on, wherever the optimizer runs.

        Raises:
            SchedulerInUseError: the optimizer has a lr_scheduler.
            ConfigurationError: `lr` is not a finite number.
        """
        if self._optimizer.lr_scheduler is not None:
            self._optimizer.set_learning_rate(lr)
        if isinstance(lr, bool) or not isinstance(lr, Real) or not math.isfinite(lr):
            raise ConfigurationError(f"the learning rate must be a finite number, got {lr!r}")
        self.learning_rate  # noqa: B018  (an optimizer may have none, which this says)
        for group in self.param_groups:
            group["lr"] = float(lr)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; optimizer state and update counts of the others stay.

        Where there is a store, do it on every worker between the same steps: the store gets the new parameters, with
        rank 0's values, at the next step, which otherwise fails on all workers. State on servers is fetched for that,
        and the servers keep the memory of the former table. Without synchronous rounds, with row-sparse parameters, and
        in a third-party store, it is possible before the first step only.

        Raises:
            ConfigurationError: the store does not allow it any more, or an argument is wrong; nothing has changed.
            WeightsWrittenError: the loop has written weights that the store would replace; nothing has changed.
        """
        if not self._is_built:
            super().add_param_group(param_group)
            return
        if not self._can_grow():
            raise ConfigurationError(
                "the parameters are in the kvstore already, and with row-sparse ones, without synchronous rounds and "
                "in a third-party store no others can follow; add parameter groups before the first step"
            )
        if not isinstance(param_group, dict):
            raise ConfigurationError(f"a parameter group is a dict, got {type(param_group).__name__}")
        self._follow_instance()
        [group] = make_groups([param_group], self._optimizer, None, first=len(self._layout.names))
        names = group["param_names"]
        self._check_devices(group)
        here = {id(p) for layout in self._layout.devices for p in layout.parameters}
        of_devices = [group["params"], *group.get(COPIES, ())]
        twice = [name for of in of_devices for name, p in zip(names, of, strict=True) if id(p) in here]
        group = spread(group)
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

    def __getstate__(self) -> NoReturn:
        raise ConfigurationError(
            f"a {type(self).__name__} cannot be copied or pickled, because its parameters belong to a running model; "
            "save its state_dict() and load that into a new one"
        )

    @abstractmethod
    def _can_grow(self) -> bool:
        """Whether parameters may still be added."""

    @abstractmethod
    def _follow_instance(self) -> None:
        """Take over what the user did to the torch instance that shares its groups."""

    @abstractmethod
    def _lay_out_again(self, names: list[list[str]]) -> None:
        """Make room for more parameters; state goes along."""

    @abstractmethod
    def _hand_over_states(self) -> None:
        """Let pending state reach its holder, if that is there."""

    def _checked_options(self) -> dict[str, Any]:
        """The numbers that hold now; those that changed are checked, before anything uses them.

        Raises:
            ConfigurationError: a number is not one that the optimizer takes.
        """
        options = read_options(self.param_groups, self._optimizer, self._layout)
        if options != self._last_options:
            for group in options["groups"]:
                check_options(self._optimizer, group)
            self._last_options = options
        return options

    def _settle(self) -> None:
        """Move the parameters into the arena, if they are not all there.

        Raises:
            NotInitializedError: one that takes part has no shape yet; names all of them.
            ConfigurationError: one got its shape too late for the store.
        """
        if not self._layout.is_settled:
            self._layout.settle()
            self._make_local()
            self._hand_over_states()
        elif late := self._layout.latecomers():
            if not self._can_grow():
                raise ConfigurationError(
                    f"{', '.join(late)}: took no part and had no shape when the other parameters went into the "
                    "kvstore; run a forward pass through the whole model before the first step"
                )
            self._lay_out_again(self._names)

    def _make_local(self) -> None:
        layouts = self._layout.devices
        self._local, *self._local_copies = [self._update_of(layout) for layout in layouts]

    def _update_of(self, layout: DeviceMemory) -> ShardUpdate | JointUpdate:
        """What updates the parameters of one device in this process."""
        optimizer = self._optimizer
        if not isinstance(optimizer, TorchOptimizer) or not optimizer.is_joint or not self._updates_jointly():
            return ShardUpdate(layout.plan, optimizer, layout.arena.weights)
        made = self._instance or self._made
        if made is None or self._layout.has_replicas:
            made = optimizer.instance_of(self._groups_over(layout))
        if not self._layout.has_replicas:
            self._made = made
            for live, own in zip(self.param_groups, made.param_groups, strict=True):
                for name, value in own.items():
                    live.setdefault(name, value)
            made.param_groups = self.param_groups
        return JointUpdate(
            layout.plan,
            layout.arena.weights,
            made,
            layout.parameters,
            lambda: self.param_groups,
            optimizer.multi_precision,
        )

    def _groups_over(self, layout: DeviceMemory) -> list[Group]:
        """The groups with the parameters of one device alone."""
        members: list[list[Any]] = [[] for _ in self.param_groups]
        for spec, parameter in zip(layout.plan.specs, layout.parameters, strict=True):
            members[spec.group].append(parameter)
        own = ("params", "param_names")
        return [
            {**{name: value for name, value in group.items() if name not in own}, "params": its}
            for group, its in zip(self.param_groups, members, strict=True)
        ]

    @abstractmethod
    def _updates_jointly(self) -> bool:
        """Whether one update in this process is that of all parameters."""

    def _check_devices(self, group: Group) -> None:
        """Raise ConfigurationError unless the replicas of a new group are where those of the other groups are."""
        if not self._layout.has_replicas and COPIES not in group:
            return
        here = [layout.parameters[0].device for layout in self._layout.devices]
        if here != devices_of([group]):
            mine, theirs = (", ".join(map(str, devices)) for devices in (here, devices_of([group])))
            raise ConfigurationError(
                f"all parameters must be on the same list of devices, but those of the new group are on [{theirs}] "
                f"while the others are on [{mine}]"
            )

    def _named_groups(self) -> list[Group]:
        """The groups with the names of their parameters, which those of an instance lack."""
        return [
            {"param_names": names, **group}
            for group, names in zip(self.param_groups, self._names, strict=True)
        ]

    def _bind_groups(self) -> None:
        for shown in (self._instance, self._made):
            if shown is not None:
                shown.param_groups = self.param_groups
        # With several groups the optimizer shows the defaults.
        self._optimizer.hyper = self.param_groups[0] if len(self.param_groups) == 1 else dict(self.defaults)
