"""The state of a Trainer's optimizer, wherever it is kept: in this process or in a store, or on its way to either."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvstore_server.norms import Decision
from kvstore_server.optimizer import Optimizer, States
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvstore_server.plan import Plan, Slice
from kvstore_server.reduction import Contribution
from kvstore_server.rows import RowSet
from kvstore_server.shard import Shard
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.groups import ParameterGroups, option_problems
from kvtrainer.joint_update import JointUpdate
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.states.convert import (
    State,
    StateHolder,
    export_states,
    import_states,
    initial_state,
    read_states,
)
from kvtrainer.sync.binding import Binding


class ShardUpdate:
    """Updates parameters where they lie, by a Shard whose memory they are: with the bits of a server.

    Args:
        plan: The layout of the arenas.
        optimizer: Its state is kept here.
        weights: dtype → the arena.
    """

    def __init__(self, plan: Plan, optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self._weights = weights

    @cached_property
    def shard(self) -> Shard:
        """Made when it is first used: a Trainer whose store updates the weights needs none."""
        shard = Shard()
        shard.add(self.plan, 0, self._weights)
        return shard

    def apply(
        self,
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        rows: Mapping[int, RowSet],
        decision: Decision,
        lent: Mapping[int, Tensor],
    ) -> None:
        """Update the weights of the keys that are `present` with scale · gradient, limited as `decision` says.

        `grads` is used as scratch. Of the keys in `rows` the gradient has only those, and `grads` is zero. Those that
        are `lent` lie elsewhere, are used only if nothing is decided, and left as they are.

        Raises:
            OptimizerError: a user-defined optimizer raised; weights and state are as before.
            ConfigurationError: the optimizer cannot update a key of this shape; nothing has changed.
        """
        shard, absent = self.shard, frozenset[int]()
        if not all(present):
            absent = frozenset([key for key, is_in in enumerate(present) if not is_in])
        if not self.optimizer.elementwise:
            for key, spec in enumerate(self.plan.specs):
                if present[key]:
                    self.optimizer.check_key(spec.key, spec.shape, hypers[key])
        found = {key: some for key, some in rows.items() if present[key]}
        runs = shard.runs_of(shard.units[0], grads, absent | found.keys())
        given = Contribution(runs, scale, absent, found, is_scratch=True, lent=lent)
        shard.update([given], self.optimizer, [hypers], decision=decision)

    def get_state(self, piece: Slice) -> States:
        return self.shard.get_state(self.shard.units[0], piece.index)

    def put_state(self, piece: Slice, state: States) -> None:
        self.shard.put_state(self.shard.units[0], piece.index, state)


class OptimizerStates:
    """The optimizer's state by key, and what updates with it in this process."""

    def __init__(self, groups: ParameterGroups, memory: Memory, link: Binding) -> None:
        self._groups, self._memory, self._link = groups, memory, link
        self.here: list[ShardUpdate | JointUpdate] = []
        """What updates the parameters on each device in this process; there once they have places."""
        self._pending: dict[int, State] | None = None
        """State that has not reached its holder yet."""
        self.make_places()

    def make_places(self) -> None:
        """Make what updates in this process, and hand pending state over to it, if the parameters have places."""
        if self._memory.is_settled:
            self.here = [self._update_of(device) for device in self._memory.devices]
            self.hand_over()

    def move(self, memory: Memory) -> None:
        """Go on with other parameters, of which the first ones are those that there were; state goes along."""
        states = self.current()
        self._link.leave(self._memory)
        self._memory, self.here = memory, []
        self.make_places()
        self.take(states)

    @property
    def holder(self) -> StateHolder | JointUpdate | None:
        """Where the state is, of replicas the first one's; None before it has a place, here or in a store."""
        if self._link.updates_weights:
            return self._link.holder
        return self.here[0] if self.here else None

    @property
    def _plan(self) -> Plan:
        """How the slices lie where the state is."""
        store = self._link.holder if self._link.updates_weights else None
        return self._memory.plan if store is None else store.plan

    @property
    def is_in_store(self) -> bool:
        """Whether a store has been told of the optimizer already."""
        return self._link.updates_weights and self._link.holder is not None

    @property
    def joint(self) -> JointUpdate | None:
        """The update of all parameters together, if there is one, which has the state of the optimizer itself."""
        holder = self.holder
        return holder if isinstance(holder, JointUpdate) else None

    def current(self, keys: Sequence[int] | None = None) -> Mapping[int, State]:
        """Fetch the state of those of the keys (None: of all) that were updated; blocks."""
        if self._pending is not None:
            return {key: state for key, state in self._pending.items() if keys is None or key in keys}
        holder = self.holder
        if isinstance(holder, JointUpdate):
            return holder.states()
        return {} if holder is None else export_states(self._plan, holder, keys)

    def shown(self) -> Mapping[Tensor, State]:
        """Fetch the state of updated parameters, before the first update initial ones; blocks."""
        if (joint := self.joint) is not None:
            return joint.instance.state
        keys = range(len(self._memory.names))
        states = self.current() or {key: state for key in keys if (state := self._initial(key))}
        return {self._memory.parameters[key]: state for key, state in states.items()}

    def shown_of(self, parameter: Tensor) -> State:
        """Fetch the state of one parameter as `shown` has it; empty if there is none."""
        key = self._memory.keys.get(id(parameter))
        if key is None:
            return {}
        if (joint := self.joint) is not None:
            return dict(joint.instance.state.get(parameter, {}))
        optimizer = self._groups.optimizer
        is_new = optimizer.num_update == optimizer.begin_num_update
        return self.current([key]).get(key) or (self._initial(key) if is_new else {})

    def replace(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of one parameter.

        Raises:
            ConfigurationError: it is not a parameter of this Trainer, or the state is not one of its kind.
        """
        key = self._memory.keys.get(id(parameter))
        if key is None:
            raise ConfigurationError("the state of a parameter was assigned that this Trainer does not have")
        if (joint := self.joint) is not None:
            joint.instance.state[parameter] = dict(state)
            return
        plan = self._plan
        options = {key: self._groups.live[plan.specs[key].group]}
        found = read_states({key: state}, options, plan, self._groups.optimizer).get(key, {})
        if not found and not self.current([key]).get(key):
            return
        if self._pending is not None or not self._holders():
            self._pending = {**(self._pending or {}), key: found}
        else:
            self._give({key: found}, others_stay=True)
        self._groups.counts.restore_one(key, int(float(found.get("step", 0))), len(self._memory.names))

    def follow_instance(self) -> None:
        """Take over the state that a torch instance has got, by its own load_state_dict or before it came here."""
        instance = self._groups.instance
        if instance is not None and instance.state and self.joint is None:
            states = self.read(instance.state_dict())
            instance.state.clear()
            self.take(states)

    def read(self, state_dict: Mapping[str, Any]) -> dict[int, State]:
        """Take state by key out of a torch state_dict.

        Raises:
            StateMismatchError: it belongs to another model or to another kind of optimizer, or is no such dict.
        """
        if not {"param_groups", "state"} <= state_dict.keys():
            raise StateMismatchError(
                f"the state must have 'param_groups' and 'state', but has {list(state_dict)!r:.200}; give what "
                "state_dict() of a Trainer or of a torch optimizer has returned"
            )
        saved, states = state_dict["param_groups"], state_dict["state"]
        _check_form(saved, states)
        mine, theirs = ([len(group["params"]) for group in given] for given in (self._groups.live, saved))
        if mine != theirs:
            raise StateMismatchError(
                f"the state has {len(theirs)} parameter groups of {theirs} parameters, this Trainer has {len(mine)} of "
                f"{mine}; load the states of the same model with the same groups"
            )
        if problems := list(option_problems(saved, self._groups.optimizer)):
            raise StateMismatchError(
                f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}"
            )
        rows = enumerate((group, at) for group in saved for at in group["params"])
        given, options = {}, {}
        for key, (group, at) in rows:
            given[key], options[key] = states.get(at, {}), group
        return read_states(given, options, self._memory.plan, self._groups.optimizer)

    def take(self, states: Mapping[int, State]) -> None:
        """Go on from this state of every key, and from its update counts."""
        # State as some torch optimizers keep it has no step count.
        updates = {key: int(float(state.get("step", 1))) for key, state in states.items()}
        self._groups.counts.restore(updates, len(self._memory.names))
        self._pending = dict(states)
        self.hand_over()

    def take_jointly(self, state_dict: Mapping[str, Any]) -> None:
        """Let the optimizer that updates all parameters together take over its own state_dict.

        Raises:
            StateMismatchError: it does not take it.
        """
        counts: dict[int, int] = {}
        for one in reversed(self.here):
            assert isinstance(one, JointUpdate)
            counts = one.load_state_dict(state_dict)
        self._groups.bind(self._groups.live)
        self._groups.counts.restore(counts, len(self._memory.names))

    def hand_over(self) -> None:
        """Let pending state reach its holder, if that is there."""
        if self._pending is not None and self._holders():
            self._give(self._pending)
            self._pending = None

    def _give(self, states: Mapping[int, State], others_stay: bool = False) -> None:
        """Replace the state where it is kept; see `import_states`."""
        for holder, device in self._holders():
            if isinstance(holder, JointUpdate):
                holder.put(states)
            else:
                optimizer = self._groups.optimizer
                import_states(self._plan, holder, states, optimizer, device, others_stay=others_stay)

    def _initial(self, key: int) -> State:
        if not self._memory.parameters[key].requires_grad:
            return {}
        spec = self._memory.plan.specs[key]
        return initial_state(self._groups.optimizer, self._groups.live[spec.group], spec)

    def _holders(self) -> Sequence[tuple[StateHolder | JointUpdate, torch.device]]:
        """Where the state is kept, with the devices for it: in a store, or here for each replica."""
        if self._link.updates_weights:
            return [] if self._link.holder is None else [(self._link.holder, torch.device("cpu"))]
        return [
            (one, device.arena.device) for one, device in zip(self.here, self._memory.devices, strict=False)
        ]

    def _update_of(self, device: DeviceMemory) -> ShardUpdate | JointUpdate:
        """Make what updates the parameters of one device in this process."""
        groups, optimizer, has_replicas = self._groups, self._groups.optimizer, self._memory.has_replicas
        # Without a store each replica goes its own way, so nothing can be kept for all of them.
        can_join = not self._link.updates_weights and not (has_replicas and self._link.is_alone)
        if not isinstance(optimizer, TorchOptimizer) or not optimizer.is_joint or not can_join:
            return ShardUpdate(device.plan, optimizer, device.arena.weights)
        made = groups.instance or groups.made
        if made is None or has_replicas:
            made = optimizer.instance_of(groups.over(device))
        if not has_replicas:
            groups.made = made
            for live, own in zip(groups.live, made.param_groups, strict=True):
                for name, value in own.items():
                    live.setdefault(name, value)
            made.param_groups = groups.live
        return JointUpdate(device, made, lambda: groups.live, optimizer.multi_precision)


def _check_form(groups: Any, states: Any) -> None:
    """Raise StateMismatchError unless both have the form of a torch state_dict, whatever is in them."""
    is_fit = isinstance(groups, list | tuple) and isinstance(states, Mapping)
    for group in groups if is_fit else ():
        members = group.get("params") if isinstance(group, Mapping) else None
        is_fit = (
            is_fit and isinstance(members, list | tuple) and all(isinstance(at, int | str) for at in members)
        )
    if not is_fit:
        raise StateMismatchError(
            "the state must be a list of 'param_groups', each with a list of numbers or names as its 'params', and a "
            f"'state' by those, but has {groups!r:.120} and {type(states).__name__}; nothing has changed. Give what "
            "state_dict() of a Trainer or of a torch optimizer has returned"
        )


class StateView(Mapping[Tensor, State]):
    """The optimizer state as torch's optimizers show it, by parameter: fetched when it is read, as copies.

    A parameter without state has an empty one. To assign one replaces that parameter's, on a server too: do it on every
    worker. So does `del`, after which the parameter starts afresh, and `clear`, of all of them. It counts as true:
    torch.distributed.checkpoint would otherwise make some by a step of zeros.

    Args:
        states: gives the states of the Trainer as they are now.
    """

    def __init__(self, states: Callable[[], OptimizerStates]) -> None:
        self._states = states

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, parameter: Tensor) -> State:
        return self._states().shown_of(parameter)

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        self._states().replace(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self[parameter] = {}

    def clear(self) -> None:
        for parameter in list(self):
            del self[parameter]

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and bool(self[parameter])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._states().shown())

    def __len__(self) -> int:
        return len(self._states().shown())

    def items(self) -> ItemsView[Tensor, State]:
        return self._states().shown().items()

    def values(self) -> ValuesView[State]:
        return self._states().shown().values()

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        return self[parameter] or default

    def __repr__(self) -> str:
        return repr(dict(self.items()))
