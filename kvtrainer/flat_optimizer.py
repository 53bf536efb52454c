"""What makes a Trainer a torch.optim.Optimizer beside its groups: state in torch's form, and in files.

The optimizer's state lies in slices, here or in a store.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim
from torch import Tensor

from kvtrainer.errors import ConfigurationError
from kvtrainer.grouped_optimizer import GroupedOptimizer
from kvtrainer.local_update import JointUpdate
from kvtrainer.memory.memory import Memory
from kvtrainer.one_thread import by_one_thread
from kvtrainer.saving import adopt_numbers, as_state_dict, check_fit, take_out
from kvtrainer.states.entries import State, initial_state
from kvtrainer.states.file import read_state_file, write_state_file
from kvtrainer.states.holder import (
    StateHolder,
    StateView,
    export_state,
    export_states,
    import_state,
    import_states,
    read_state,
    read_states,
)
from kvtrainer.states.saved import SavedStates

_OPTIMIZER = "optimizer"
"""The part of saved states with what an optimizer's own state_dict has beside groups and the state of parameters."""
_BY_PARAMETER = ("params", "param_names")
"""The entries of a group that are lists, with one item for each parameter."""


class FlatOptimizer(GroupedOptimizer):
    """Optimizer state over an arena, in torch's form and in files; subclasses add `step`. Arguments as of the base."""

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The optimizer state by parameter, wherever it is kept, with the entries of `state_dict`.

        A snapshot: it is fetched each time that it is read, and blocks for that; changes of what was read have no
        effect. `state[parameter] = {...}` replaces the state of one parameter; on servers, do it on every worker.
        """
        return StateView(self)

    @state.setter
    def state(self, value: Any) -> None:
        if self._is_built:
            raise ConfigurationError(
                "the optimizer's state does not lie in a dict; give it to load_state_dict, or assign that of single "
                "parameters: trainer.state[parameter] = {...}"
            )

    @by_one_thread
    def state_dict(self) -> dict[str, Any]:
        """Options and optimizer state in torch's form, wherever the state is kept; blocks while it is fetched.

        It has neither schedules nor a loss scale; `save_states` has. Any one worker may call it between its steps.
        Before the first update the entries are there already, with a step count of 0, because
        torch.distributed.checkpoint loads only into what it finds.
        """
        if (joint := self._joint()) is not None:
            return joint.state_dict()
        with self._without_copies():
            return super().state_dict()

    @by_one_thread
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

        self._settle()
        self._follow_instance()
        if self._joint() is not None:
            self._load_jointly(state_dict)
            return
        former = self.param_groups
        # As the last hook it sees what the user's hooks made of the dict, before torch rounds the float32 state of
        # half-precision parameters.
        hook = self.register_load_state_dict_pre_hook(take_states)
        try:
            with self._without_copies():
                super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group, before in zip(self.param_groups, former, strict=True):
            for name in self.defaults.keys() & before.keys():
                group.setdefault(name, before[name])
        self._bind_groups()
        self._take_states(found)

    @by_one_thread
    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save all that another Trainer needs, beside the weights, to go on as if never interrupted, in one file.

        Optimizer state is in it by the name of the parameter, and the options of every group, wherever the optimizer
        runs; blocks while state is fetched. Any one worker may save between its steps: no round ends without it, so
        what it saves belongs to its own last step.

        Raises:
            StateFileError: the file cannot be written; the former one is unchanged.
        """
        write_state_file(fname, self.export_saved_states())

    @by_one_thread
    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Take over what `save_states` saved, here or elsewhere, with any kvstore and any number of servers.

        Call it on every worker, with the same file. The numbers in the file win over those that the Trainer was built
        with; `lr_mult` and `wd_mult` of the parameters stay as they are. The weights are not in the file.

        Raises:
            StateFileError: it cannot be read, or is no file of saved states, or a damaged one.
            StateMismatchError: it belongs to another model or optimizer; names every difference.
            In either case nothing has changed.
        """
        self._settle()  # what is missing here is said before what is wrong with a file
        self.adopt_saved_states(read_state_file(fname))

    def export_saved_states(self) -> SavedStates:
        """What `save_states` saves, as one value; blocks while state is fetched."""
        extra, tensors = self._extra_states()
        if (joint := self._joint()) is not None and any(shared := joint.shared()):
            extra, tensors = {**extra, _OPTIMIZER: shared[0]}, {**tensors, _OPTIMIZER: shared[1]}
        states = self._current_states()
        return take_out(self.param_groups, self._layout, self._optimizer, states, extra, tensors)

    def export_own_states(self) -> SavedStates:
        """Return what of `export_saved_states` is this worker's alone, such as residuals; nothing is fetched."""
        extra, tensors = self._extra_states()
        return SavedStates({}, 0, [], {}, extra, tensors)

    def adopt_saved_states(self, saved: SavedStates) -> None:
        """Take over what `export_saved_states` gave, as `load_states` does; call it on every worker.

        Raises:
            StateMismatchError: it belongs to another model or optimizer, of which nothing has changed; says how.
        """
        self.check_saved_states(saved)
        beside = {**saved.extra.get(_OPTIMIZER, {}), **saved.tensors.get(_OPTIMIZER, {})}
        self.load_state_dict({**as_state_dict(saved, self._layout), **beside})
        adopt_numbers(self._optimizer, saved)
        self._adopt_extra_states(saved)

    def check_saved_states(self, saved: SavedStates) -> None:
        """Raise StateMismatchError unless `adopt_saved_states` can take this."""
        self._settle()
        self._follow_instance()
        is_in_store = self._holder() not in (None, self._local)
        check_fit(
            saved, self.param_groups, self._layout, self._optimizer, is_in_store, self._extra_problems(saved)
        )

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless `load_state_dict` can take this; not if hooks are to change it first."""
        self._settle()
        self._follow_instance()
        if not self._optimizer_load_state_dict_pre_hooks and self._joint() is None:
            read_states(state_dict, self.param_groups, self._layout.plan, self._optimizer)

    @contextmanager
    def _without_copies(self) -> Iterator[None]:
        """While it is open the groups have the first replicas alone, whose state stands for that of all."""
        if not self._layout.has_replicas:
            yield
            return
        kept = [{name: group[name] for name in _BY_PARAMETER if name in group} for group in self.param_groups]
        for group, names in zip(self.param_groups, self._names, strict=True):
            group.update({name: group[name][: len(names)] for name in _BY_PARAMETER if name in group})
        try:
            yield
        finally:
            # Loading puts new groups in the place of these.
            for group, lists in zip(self.param_groups, kept, strict=True):
                group.update(lists)

    def _extra_states(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        """What subclasses save beside options and state: `SavedStates.extra` and `SavedStates.tensors`."""
        return {}, {}

    def _extra_problems(self, saved: SavedStates) -> Sequence[str]:
        """Why a subclass could not take over its part of the states; asked before anything changes."""
        return ()

    def _adopt_extra_states(self, saved: SavedStates) -> None:
        """Take over what `_extra_states` saved."""

    def _parameter_states(self) -> Mapping[Tensor, State]:
        """The states that `state` shows: those of updated keys, and before the first update initial ones."""
        if (joint := self._joint()) is not None:
            return joint.instance.state
        states = self._current_states()
        if not states:
            keys = range(len(self._layout.names))
            states = {key: state for key in keys if (state := self._initial_state(key))}
        return {self._layout.parameters[key]: state for key, state in states.items()}

    def _state_of(self, parameter: Tensor) -> State:
        key = self._key_of(parameter)
        if key is None:
            return {}
        if (joint := self._joint()) is not None:
            return dict(joint.instance.state.get(parameter, {}))
        is_new = self._optimizer.num_update == self._optimizer.begin_num_update
        return self._current_state(key) or (self._initial_state(key) if is_new else {})

    def _key_of(self, parameter: Tensor) -> int | None:
        self._settle()
        self._follow_instance()
        return self._layout.key_of(parameter)

    def _initial_state(self, key: int) -> State:
        if not self._layout.parameters[key].requires_grad:
            return {}
        spec = self._layout.plan.specs[key]
        return initial_state(self._optimizer, self.param_groups[spec.group], spec)

    def _current_state(self, key: int) -> State:
        """The state of one key, empty if it was not updated."""
        holder = self._holder()
        if self._pending is not None:
            return self._pending.get(key, {})
        return {} if holder is None else export_state(self._layout.plan, holder, key)

    def _replace_state(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of one parameter.

        Raises:
            ConfigurationError: it is not a parameter of this Trainer, or the state is not one of its kind.
        """
        key = self._key_of(parameter)
        if key is None:
            raise ConfigurationError("the state of a parameter was assigned that this Trainer does not have")
        if (joint := self._joint()) is not None:
            joint.instance.state[parameter] = dict(state)
            return
        plan, optimizer = self._layout.plan, self._optimizer
        found = read_state(state, self.param_groups[plan.specs[key].group], plan, key, optimizer)
        if not found and not self._current_state(key):
            return
        if self._pending is not None or not self._holders():
            self._pending = {**(self._pending or {}), key: found}
        else:
            for holder, device in self._holders():
                import_state(plan, holder, key, found, optimizer, device)
        self._schedule.restore_one(key, int(float(found.get("step", 0))), len(self._layout.names))

    def _current_states(self) -> Mapping[int, State]:
        """The optimizer state of every key that was updated, by index; blocks while it is fetched."""
        self._settle()
        self._follow_instance()
        if self._pending is not None:
            return self._pending
        holder = self._holder()
        return {} if holder is None else export_states(self._layout.plan, holder)

    @abstractmethod
    def _leave_store(self, former: Memory) -> None:
        """Let a store that knows this former layout get the present one at the next step."""

    @abstractmethod
    def _holder(self) -> StateHolder | None:
        """Where the optimizer state is; None before it has a place, here or in a store."""

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
        if self._instance.state and self._joint() is None:
            states = read_states(
                self._instance.state_dict(), self.param_groups, self._layout.plan, self._optimizer
            )
            self._instance.state.clear()
            self._take_states(states)

    def _joint(self) -> JointUpdate | None:
        """The update of all parameters together, if there is one, which has the state of the optimizer itself."""
        holder = self._holder()
        return holder if isinstance(holder, JointUpdate) else None

    def _load_jointly(self, state_dict: dict[str, Any]) -> None:
        counts: dict[int, int] = {}
        for one in (*self._local_copies, self._local):
            assert isinstance(one, JointUpdate)
            counts = one.load_state_dict(state_dict)
        self._bind_groups()
        self._schedule.restore(counts, len(self._layout.names))

    def _lay_out_again(self, names: list[list[str]]) -> None:
        """Make room for more parameters; state, and what is known of gradients, go along."""
        former = self._layout
        states, holder = self._pending, self._holder()
        if states is None and holder is not None:
            states = export_states(former.plan, holder)
        layout = Memory(self.param_groups, names)
        layout.consume([not is_fresh for is_fresh in former.fresh()])
        former.close()
        self._layout, self._names = layout, names
        self._leave_store(former)
        self._bind_groups()
        if layout.is_settled:
            self._make_local()
        self._take_states(states or {})

    def _take_states(self, states: Mapping[int, State]) -> None:
        """Go on from this optimizer state of every key, and from its update counts."""
        # State as some torch optimizers keep it has no step count.
        updates = {key: int(float(state.get("step", 1))) for key, state in states.items()}
        self._schedule.restore(updates, len(self._layout.names))
        self._pending = dict(states)
        self._hand_over_states()

    def _hand_over_states(self) -> None:
        holders = self._holders()
        if self._pending is not None and holders:
            for holder, device in holders:
                import_states(self._layout.plan, holder, self._pending, self._optimizer, device)
            self._pending = None

    def _holders(self) -> Sequence[tuple[StateHolder, torch.device]]:
        """Where the optimizer state is kept, with the devices for it: in a store, or here for each replica."""
        holder = self._holder()
        if holder is None:
            return []
        if holder is not self._local:
            return [(holder, torch.device("cpu"))]
        layouts = self._layout.devices
        locals = (self._local, *self._local_copies)
        return [(local, layout.arena.device) for local, layout in zip(locals, layouts, strict=True)]
