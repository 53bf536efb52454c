"""The state of a Trainer's optimizer, wherever it is: in this process, in a store, or on its way to either.

`OptimizerStates` is the Trainer's view of it, by key. The state has one holder per device:

- a store, if that updates the weights: on servers, in slices, fetched and replaced through `OptimizerStateHolder`;
- a `ShardUpdate` in this process, which updates slices of the arenas exactly as a server does, to the bit;
- a `JointOptimizerUpdate`, for torch classes of unknown structure: it runs the torch optimizer itself on all
parameters.

State may arrive (from a file, or a torch instance) before its holder exists. It is then kept in `_pending`, and handed
over when the holder is created (`hand_over`). State of parameters that a script took out of the groups is kept in
`_outside`, and returns with them.

An update that raises a KVStoreError leaves weights and state as they were: `Shard` guarantees it for slices;
`JointOptimizerUpdate` takes a snapshot before each step and restores it. `OptimizerStateView` shows the state as
torch's optimizers do, in `trainer.state`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.optim
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from kvstore_server.optimizer import Optimizer, States
from kvstore_server.optimizer.apply import is_half, refresh_master
from kvstore_server.optimizer.torch_family import OWN_COUNT, UNCOUNTED, TorchOptimizer
from kvstore_server.optimizer.trees import clone_tree, flatten_trees, is_composed_tensor, map_tree
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import Decision, apply_decision
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Shard
from kvtrainer.errors import ConfigurationError, KVStoreError, OptimizerError, StateMismatchError
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.states.delta import select_pending_states
from kvtrainer.states.format import (
    OptimizerStateHolder,
    State,
    TableMark,
    export_states,
    import_states,
    initial_state,
    read_states,
)
from kvtrainer.sync.binding import Binding
from kvtrainer.trainer.groups import ParameterGroups, group_option_problems
from kvtrainer.types import Group


class ShardUpdate:
    """Updates parameters in place through a Shard over their memory (`weights`), with the same bits as on a server."""

    def __init__(self, plan: Plan, optimizer: Optimizer, weights: Mapping[str, Tensor]) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self._weights = weights
        self._runs: tuple[Mapping[str, Tensor], frozenset[int], list[Run]] | None = None
        """The gradients' memory in the last step, the keys left out, and the Shard's plan for these."""

    @cached_property
    def shard(self) -> Shard:
        """Created on first use: a Trainer whose store updates the weights needs none."""
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
        borrowed: Mapping[int, Tensor],
    ) -> None:
        """Update weights of `present` keys with scale · gradient, clipped according to `decision`.

        `grads` is used as scratch memory. Keys in `rows` have gradients only for those rows, and zeros in `grads`.
        Gradients in `borrowed` are stored elsewhere; they are only used if `decision` changes nothing, and are not
        modified.
        """
        # 1. Which keys take part, and whether the optimizer can update their shapes.
        shard, absent = self.shard, frozenset[int]()
        if not all(present):
            absent = frozenset([key for key, is_in in enumerate(present) if not is_in])
        if not self.optimizer.elementwise:
            for key, spec in enumerate(self.plan.specs):
                if present[key]:
                    self.optimizer.check_key(spec.key, spec.shape, hypers[key])
        # 2. Reuse the plan for the gradients if memory and keys are those of the last step.
        found = {key: some for key, some in rows.items() if present[key]}
        without = absent | found.keys()
        if self._runs is None or self._runs[0] is not grads or self._runs[1] != without:
            self._runs = grads, without, shard.runs_of(shard.units[0], grads, without)
        given = RankContribution(self._runs[2], scale, absent, found, is_scratch=True, borrowed=borrowed)
        shard.update([given], self.optimizer, [hypers], decision=decision)

    def get_states(self, slices: Sequence[Slice], since: Sequence[int]) -> Iterator[States]:
        unit = self.shard.units[0]
        for slice_, step in zip(slices, since, strict=True):
            found = self.shard.get_state(unit, slice_.index, since=step)
            found.history = self.shard.history(unit, slice_.index)
            yield found

    def put_state(self, slice_: Slice, state: States) -> None:
        self.shard.put_state(self.shard.units[0], slice_.index, state, state.history)


class OptimizerStates:
    def __init__(self, groups: ParameterGroups, memory: Memory, binding: Binding) -> None:
        self._groups, self._memory, self._binding = groups, memory, binding
        self.here: list[ShardUpdate | JointOptimizerUpdate] = []
        """What updates the parameters of each device in this process; empty until they are laid out."""
        self._pending: dict[int, State] | None = None
        """State that its holder has not received yet."""
        self._outside: MutableMapping[Tensor, State] = WeakTensorKeyDictionary()
        """State of parameters that a script took out of the groups."""
        self.make_places()

    def make_places(self) -> None:
        """Create what updates in this process, and pass it pending state, once parameters are laid out."""
        if self._memory.is_settled:
            self.here = [self._update_of(device) for device in self._memory.devices]
            self.hand_over()

    def move(self, memory: Memory, states: Mapping[int, State]) -> None:
        """Continue with other parameters. Those that remain keep their `states`, given by the former keys."""
        # 1. Which parameters remain, return, or are gone.
        former, joint = self._memory, self.joint
        places = {key: memory.keys[id(p)] for key, p in enumerate(former.parameters) if id(p) in memory.keys}
        gone = [key for key in range(len(former.parameters)) if key not in places]
        moved = {places[key]: state for key, state in states.items() if key in places}
        for key, parameter in enumerate(memory.parameters):
            if self._outside and (kept := self._outside.pop(parameter, None)):
                moved[key] = kept
        for key in gone:
            self._outside[former.parameters[key]] = states.get(key, {})
            if joint is not None:
                joint.instance.state.pop(former.parameters[key], None)
        # 2. Replace the memory, and give the new holders the state.
        self._binding.leave(former, places)
        former.release(gone)
        self._memory, self.here, self._pending = memory, [], None
        self.make_places()
        self.take(moved)

    @property
    def holder(self) -> OptimizerStateHolder | JointOptimizerUpdate | None:
        """Where the state is; for replicas, the first one's. None before it has a place, here or in a store."""
        if self._binding.updates_weights:
            return self._binding.holder
        return self.here[0] if self.here else None

    @property
    def _plan(self) -> Plan:
        store = self._binding.holder if self._binding.updates_weights else None
        return self._memory.plan if store is None else store.plan

    @property
    def is_in_store(self) -> bool:
        return self._binding.updates_weights and self._binding.holder is not None

    @property
    def joint(self) -> JointOptimizerUpdate | None:
        """The joint update of all parameters, if any, which has the state of the torch optimizer itself."""
        holder = self.holder
        return holder if isinstance(holder, JointOptimizerUpdate) else None

    def current(
        self,
        keys: Sequence[int] | None = None,
        since: Mapping[int, int] | None = None,
        marks: dict[int, TableMark] | None = None,
    ) -> Mapping[int, State]:
        """Fetch the state of those keys (None: all) that were updated, as `export_states` does. Blocks."""
        if self._pending is not None:
            found = {key: state for key, state in self._pending.items() if keys is None or key in keys}
            return select_pending_states(found, since, marks)
        holder = self.holder
        if isinstance(holder, JointOptimizerUpdate):
            return holder.states()
        return {} if holder is None else export_states(self._plan, holder, keys, since, marks)

    def shown(self) -> Mapping[Tensor, State]:
        """Fetch the state of updated parameters; before the first update, initial state. Blocks."""
        if (joint := self.joint) is not None:
            return joint.instance.state
        keys = range(len(self._memory.names))
        states = self.current() or {key: self._initial_state(key) for key in keys}
        found = {
            self._memory.parameters[key]: self._without_store_count(state) for key, state in states.items()
        }
        return {parameter: state for parameter, state in found.items() if state}

    def shown_of(self, parameter: Tensor) -> State:
        """Fetch the state of one parameter, in the form of `shown`; empty if it has none."""
        key = self._memory.keys.get(id(parameter))
        if key is None:
            return dict(self._outside.get(parameter, {}))
        if (joint := self.joint) is not None:
            return dict(joint.instance.state.get(parameter, {}))
        optimizer = self._groups.optimizer
        is_new = optimizer.num_update == optimizer.begin_num_update
        return self._without_store_count(
            self.current([key]).get(key) or (self._initial_state(key) if is_new else {})
        )

    def replace(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of one parameter. An empty one removes it, also for a parameter taken out of the groups."""
        key = self._memory.keys.get(id(parameter))
        if key is None and not state and parameter in self._outside:
            self._outside[parameter] = {}
            return
        if key is None:
            raise ConfigurationError(
                "state was assigned to a parameter that this Trainer does not have; add it to a group first"
            )
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
            self._import_states({key: found}, others_stay=True)
        self._groups.counts.restore_one(key, int(float(found.get("step", 0))), len(self._memory.names))

    def follow_instance(self) -> None:
        """Adopt the state of a torch instance, which it had before or has loaded since."""
        instance = self._groups.instance
        if instance is not None and instance.state and self.joint is None:
            states = self.read(instance.state_dict())
            instance.state.clear()
            self.take(states)

    def read(self, state_dict: Mapping[str, Any]) -> dict[int, State]:
        """Return the state by key from a torch state_dict."""
        # 1. The form: a state_dict, of groups with as many parameters as here.
        if not {"param_groups", "state"} <= state_dict.keys():
            raise StateMismatchError(
                f"the state must have 'param_groups' and 'state', but has {list(state_dict)!r:.200}; pass what "
                "state_dict() of a Trainer or of a torch optimizer has returned"
            )
        saved, states = state_dict["param_groups"], state_dict["state"]
        _check_form_of_states(saved, states)
        states = states_with_number_keys(states)
        mine, theirs = ([len(group["params"]) for group in given] for given in (self._groups.live, saved))
        if mine != theirs:
            raise StateMismatchError(
                f"the state has {len(theirs)} parameter groups of {theirs} parameters, this Trainer has {len(mine)} of "
                f"{mine}; load the states of the same model with the same groups"
            )
        # 2. The options must be valid, even if they are adopted later.
        if problems := list(group_option_problems(saved, self._groups.optimizer)):
            raise StateMismatchError(
                f"the state does not fit this Trainer, which is unchanged: {'; '.join(problems)}"
            )
        # 3. Number the states by key, in the order of the groups.
        rows = enumerate((group, at) for group in saved for at in group["params"])
        given, options = {}, {}
        for key, (group, at) in rows:
            given[key], options[key] = states.get(at, {}), group
        return read_states(given, options, self._memory.plan, self._groups.optimizer)

    def take(self, states: Mapping[int, State]) -> None:
        # The state of some torch optimizers has no step count.
        updates = {key: int(float(state.get("step", 1))) for key, state in states.items()}
        self._groups.counts.restore(updates, len(self._memory.names))
        self._pending = dict(states)
        self.hand_over()

    def take_jointly(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state_dict of the optimizer that updates all parameters jointly."""
        counts: dict[int, int] = {}
        for one in reversed(self.here):
            assert isinstance(one, JointOptimizerUpdate)
            counts = one.load_state_dict(state_dict)
        self._groups.bind(self._groups.live)
        self._groups.counts.restore(counts, len(self._memory.names))

    def hand_over(self) -> None:
        """Pass pending state to its holder, if that exists."""
        if self._pending is not None and self._holders():
            self._import_states(self._pending)
            self._pending = None

    def _import_states(self, states: Mapping[int, State], others_stay: bool = False) -> None:
        for holder, device in self._holders():
            if isinstance(holder, JointOptimizerUpdate):
                holder.put(states)
            else:
                optimizer = self._groups.optimizer
                import_states(self._plan, holder, states, optimizer, device, others_stay=others_stay)

    def _initial_state(self, key: int) -> State:
        if not self._memory.parameters[key].requires_grad:
            return {}
        spec = self._memory.plan.specs[key]
        if spec.hash_table is not None:
            return {}  # it has no rows yet
        return initial_state(self._groups.optimizer, self._groups.live[spec.group], spec)

    def _without_store_count(self, state: State) -> State:
        """Leave out the store's step count if torch's class keeps none, so that checkpoints have torch's keys."""
        optimizer = self._groups.optimizer
        is_counted = not isinstance(optimizer, TorchOptimizer) or optimizer.cls not in UNCOUNTED
        return state if is_counted else {name: value for name, value in state.items() if name != "step"}

    def _holders(self) -> Sequence[tuple[OptimizerStateHolder | JointOptimizerUpdate, torch.device]]:
        if self._binding.updates_weights:
            return [] if self._binding.holder is None else [(self._binding.holder, torch.device("cpu"))]
        return [
            (one, device.arena.device) for one, device in zip(self.here, self._memory.devices, strict=False)
        ]

    def _update_of(self, device: DeviceMemory) -> ShardUpdate | JointOptimizerUpdate:
        groups, optimizer, has_replicas = self._groups, self._groups.optimizer, self._memory.has_replicas
        # Replicas without a store are updated separately, so there is no state common to all.
        can_join = not self._binding.updates_weights and not (has_replicas and self._binding.is_alone)
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
        return JointOptimizerUpdate(device, made, lambda: groups.live, optimizer)


def states_with_number_keys(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge the entries under "0", "1", … into those under 0, 1, …

    torch.distributed.checkpoint loads an entry that is not a tensor under the text of its parameter's number. Under
    the number itself the old value of the Trainer that loads stays, and torch ignores the text without a warning.
    """
    found = dict(states)
    for at in [at for at in states if isinstance(at, str) and at.isdecimal() and int(at) in states]:
        found[int(at)] = {**found[int(at)], **found.pop(at)}
    return found


def _check_form_of_states(groups: Any, states: Any) -> None:
    """Raise StateMismatchError unless both have the form of a torch state_dict. Contents are not checked."""
    is_fit = isinstance(groups, list | tuple) and isinstance(states, Mapping)
    for group in groups if is_fit else ():
        members = group.get("params") if isinstance(group, Mapping) else None
        is_fit = (
            is_fit and isinstance(members, list | tuple) and all(isinstance(at, int | str) for at in members)
        )
    if not is_fit:
        raise StateMismatchError(
            "the state must be a list of 'param_groups', each with a list of numbers or names as its 'params', and a "
            f"'state' by those, but has {groups!r:.120} and {type(states).__name__}; nothing has changed. Pass what "
            "state_dict() of a Trainer or of a torch optimizer has returned"
        )


class OptimizerStateView(Mapping[Tensor, State]):
    """The optimizer state by parameter, as torch's optimizers show it: copies, fetched when it is read.

    A parameter without state has an empty one. Assignment replaces a parameter's state, on a server too: do it on every
    worker. The same holds for `del`, after which the parameter starts afresh, and `clear`. The view is always
    true, because torch.distributed.checkpoint would otherwise create state by a step with zero gradients.

    Args:
        states: Returns the Trainer's present states.
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


class JointOptimizerUpdate:
    """Updates all parameters with one torch optimizer, as torch runs it, for classes of unknown structure.

    Such a class may keep anything in its groups, attributes and state. It runs on the parameters themselves, with the
    reduced gradients as their `.grad`. With `multi_precision` it sees float32 copies of half-precision parameters.
    """

    def __init__(
        self,
        device: DeviceMemory,
        instance: torch.optim.Optimizer,
        groups: Callable[[], Sequence[Group]],
        optimizer: TorchOptimizer,
    ) -> None:
        self.instance = instance
        self._device = device
        self._parameters = device.parameters
        self._groups = groups
        self._optimizer = optimizer
        self._counts = [0] * len(device.parameters)
        self.was_undone = False
        """Whether the last `apply` raised and everything was restored."""
        self._masters: dict[int, Tensor] = {}
        self._wide: dict[int, Parameter] = {}
        """During a step, by key: float32 stand-ins for half-precision parameters."""
        self._first = {
            key: clone_tree(instance.state[p])
            for key, p in enumerate(self._parameters)
            if p in instance.state
        }
        """State that the class created in its constructor."""

    def apply(
        self,
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        decision: Decision,
        again: Callable[[], Any] | None,
    ) -> None:
        """Update weights of `present` keys with scale · gradient, clipped according to `decision`.

        `hypers` has the hyper-parameters of each key. `again` evaluates the loss again; None without a closure. If it
        raises (OptimizerError), weights, state and groups are restored. The gathered gradients are used as scratch
        memory.
        """
        with (
            self._restore_on_error("the step was not applied"),
            self._lend_gradients(scale, present, decision),
            self._apply_hypers(hypers),
        ):
            if again is None:
                self.instance.step()
            else:
                self.instance.step(again)
        for key, was_in in enumerate(present):
            self._counts[key] += was_in

    def set_mode(self, mode: str) -> None:
        """Call the optimizer's own `train` or `eval`. If it raises, everything is restored."""
        nothing, live = [False] * len(self._parameters), self._groups()
        with (
            self._restore_on_error(f"{mode}() has changed nothing"),
            self._lend_gradients(1.0, nothing, Decision()),
        ):
            for key, parameter in enumerate(self._parameters):
                self._stand_in(key, parameter.data)
            with self._apply_hypers([live[spec.group] for spec in self._device.plan.specs]):
                getattr(self.instance, mode)()

    @contextmanager
    def _restore_on_error(self, consequence: str) -> Iterator[None]:
        """Restore weights, state and groups if the block raises. The optimizer's error says so."""
        weights = self._device.arena.weights
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        taken, masters = _OptimizerSnapshot(self.instance), clone_tree(self._masters)
        self.was_undone = False
        try:
            yield
        except BaseException as error:  # also an interrupt: the next step applies the same gradients again
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            self._masters = masters
            taken.restore()
            self.was_undone = True
            if isinstance(error, KVStoreError) or not isinstance(error, Exception):
                raise
            raise OptimizerError(
                f"optimizer {type(self.instance).__name__} raised {type(error).__name__}: {error}; {consequence}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        """Copy the optimizer's own state_dict, with the present options; before its first step with placeholders."""
        for own, live in zip(self.instance.param_groups, self._groups(), strict=True):
            own.update({name: value for name, value in live.items() if name not in _LISTS})
        state: dict[str, Any] = clone_tree(self.instance.state_dict())
        if not self.instance.state and state.get("state") == {}:
            state["state"] = self._placeholder_state()
        return {**state, "param_groups": [self._optimizer.with_tensors(one) for one in state["param_groups"]]}

    def _placeholder_state(self) -> dict[int, State]:
        """Return the entries that the first step will create, by number of the parameter, to load state into.

        Nothing changes. The entries have a count of 0, or negative zeros if the class keeps no count; this tells
        loading that they are no real state. Empty if the class cannot take a step with zero gradients.
        """
        # 1. Replace the parameters by zeros with zero gradients.
        taken = _OptimizerSnapshot(self.instance)
        groups = [self._optimizer.with_tensors(group) for group in self.instance.param_groups]
        for group in groups:
            members = [
                torch.zeros_like(p, dtype=torch.float32 if is_half(p) else p.dtype) for p in group["params"]
            ]
            rows = zip(members, group["params"], strict=True)
            group["params"] = [Parameter(zeros, p.requires_grad) for zeros, p in rows]
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        # 2. Take a trial step, and restore everything.
        try:
            self.instance.param_groups = groups
            with torch.random.fork_rng(devices=[]):
                self.instance.step()
            states = clone_tree(self.instance.state_dict()["state"])
        except Exception:  # the class may need real gradients; `trial_state` does the same
            return {}
        finally:
            taken.restore()
        return {at: _as_placeholder_state(state) for at, state in states.items() if state}

    def load_state_dict(self, given: Mapping[str, Any]) -> dict[int, int]:
        """Let the optimizer load its state. Return the number of updates of each key."""
        # 1. Split the state: the class's own entries, float32 copies, and what its constructor had created. It is
        # copied first, because torch continues in the memory that it is given.
        states, taken = (
            clone_tree(states_with_number_keys(given.get("state", {}))),
            _OptimizerSnapshot(self.instance),
        )
        order = [at for group in given.get("param_groups", ()) for at in group["params"]]
        made_first = {at for key, at in enumerate(order) if key in self._first}
        states = {at: one for at, one in states.items() if at in made_first or not _is_placeholder_state(one)}
        own = {at: _as_torch_optimizer_state(state) if at in order else state for at, state in states.items()}
        masters = {at: own[at].pop("master") for at in order if at in own and "master" in own[at]}
        first = {at: clone_tree(self._first[key]) for key, at in enumerate(order) if key in self._first}
        # If there was only the store's count, the class keeps no state for this parameter.
        own = {
            **first,
            **{at: state for at, state in own.items() if at not in order or state or not states[at]},
        }
        # 2. Load it through the class, which may refuse it.
        try:
            self.instance.load_state_dict({**given, "state": own})
        except Exception as error:
            taken.restore()
            raise StateMismatchError(
                f"{type(self.instance).__name__} does not take this state, which is another model's or another "
                f"optimizer's: {type(error).__name__}: {error}"
            ) from error
        # 3. Undo torch's conversions, and adopt counts, copies and options.
        for key, at in enumerate(order):
            self._counts[key] = _optimizer_step_count(states[at].get("step", 1)) if states.get(at) else 0
            kept = self.instance.state.get(self._parameters[key])
            if isinstance(kept, dict) and at in own:
                # "step" stays as torch has converted it, since its kernels require that form.
                kept.update(
                    {
                        name: _state_like_given(kept[name], own[at].get(name))
                        for name in kept
                        if name != "step"
                    }
                )
        self._masters = {key: masters[at] for key, at in enumerate(order) if at in masters}
        for live, loaded in zip(self._groups(), self.instance.param_groups, strict=True):
            live.update({name: value for name, value in loaded.items() if name not in _LISTS})
        return dict(enumerate(self._counts))

    def shared(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return plain values and tensors in its state_dict beside groups and parameters' state, flattened."""
        rest = {n: v for n, v in self.instance.state_dict().items() if n not in ("state", "param_groups")}
        found = flatten_trees(rest)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return {name: value for name, value in found.items() if name not in tensors}, tensors

    def states(self) -> dict[int, State]:
        found: dict[int, State] = {}
        for key, parameter in enumerate(self._parameters):
            if count := self._counts[key]:
                kept = clone_tree(self.instance.state.get(parameter, {}))
                entries = {OWN_COUNT if name == "step" else name: value for name, value in kept.items()}
                if key in self._masters:
                    entries["master"] = self._masters[key].clone()
                found[key] = {"step": torch.tensor(float(count), device="cpu"), **entries}
        return found

    def put(self, states: Mapping[int, State]) -> None:
        """Replace the state of every key by the result of `states`; one without an entry starts afresh."""
        device = self._device.arena.device

        def to_device(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        groups = {p: group for group in self.instance.param_groups for p in group["params"]}
        for key, parameter in enumerate(self._parameters):
            given, group = clone_tree(dict(states.get(key, {}))), groups.get(parameter, {})
            self._counts[key] = count = int(given.pop("step", 0))
            # As torch does: everything moves to the device, the count only if kernels read it there.
            is_moved = group.get("capturable") or group.get("fused")
            entries = {
                name: value if name == OWN_COUNT and not is_moved else map_tree(to_device, value)
                for name, value in given.items()
            }
            self._masters.pop(key, None)
            if "master" in entries:
                self._masters[key] = entries.pop("master").to(device)
            kept = {"step" if name == OWN_COUNT else name: value for name, value in entries.items()}
            kept = kept if count else clone_tree(self._first.get(key, {}))
            if kept:
                self.instance.state[parameter] = kept
            else:
                self.instance.state.pop(parameter, None)

    @contextmanager
    def _lend_gradients(self, scale: float, present: Sequence[bool], decision: Decision) -> Iterator[None]:
        """Within the block, parameters have the reduced gradients, and half-precision ones float32 stand-ins."""
        own_grads = [p.grad for p in self._parameters]
        places = [p.data for p in self._parameters]
        try:
            for key, parameter in enumerate(self._parameters):
                parameter.grad = None
                if present[key] and parameter.numel():
                    wide = self._stand_in(key, places[key])
                    grad = self._device.densified(key).view(parameter.shape)
                    grad = grad.float() if grad.dtype.itemsize < 4 else grad
                    if scale != 1.0:
                        grad.mul_(scale)
                    apply_decision(grad, decision)
                    wide.grad = grad
            yield
        finally:
            # Copy results back, and restore `.grad` and the places of the parameters' data.
            for key, wide in self._wide.items():
                places[key].copy_(wide.detach())
                if wide in self.instance.state:
                    self.instance.state[self._parameters[key]] = self.instance.state.pop(wide)
            self._wide.clear()
            rows = zip(self._parameters, self._device.plan.numels, places, own_grads, strict=True)
            for parameter, numel, place, own_grad in rows:
                if numel and parameter.data_ptr() != place.data_ptr():  # the class replaced the data
                    place.copy_(parameter.data)
                    parameter.data = place
                parameter.grad = own_grad

    def _stand_in(self, key: int, place: Tensor) -> Parameter:
        """Return what the optimizer sees of a parameter: itself, or float32 weights for half precision."""
        parameter = self._parameters[key]
        if not is_half(place):
            return parameter
        weights = place.float()
        if self._optimizer.multi_precision:
            held = self._masters.get(key)
            weights = self._masters[key] = weights if held is None else refresh_master(held, place)
        self._wide[key] = wide = Parameter(weights)
        if parameter in self.instance.state:
            self.instance.state[wide] = self.instance.state.pop(parameter)
        return wide

    @contextmanager
    def _apply_hypers(self, hypers: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Within the block, the optimizer's groups have the hyper-parameters of this step, with multipliers."""
        # 1. Keys of a group with different multipliers need groups of their own.
        live, former = self._groups(), self.instance.param_groups
        members: list[dict[int, list[int]]] = [{} for _ in live]
        for key, spec in enumerate(self._device.plan.specs):
            members[spec.group].setdefault(id(hypers[key]), []).append(key)
        used: list[tuple[Group, Group, Group]] = []
        made: list[dict[str, Tensor]] = []
        for group, by_row in zip(live, members, strict=True):
            for keys in by_row.values():
                own_hypers = {name: hypers[keys[0]][name] for name in group if name in hypers[keys[0]]}
                given = self._optimizer.with_tensors({**group, **own_hypers})
                given["params"] = [self._wide.get(key, self._parameters[key]) for key in keys]
                used.append((group, given, dict(given)))
                made.append({n: given[n].clone() for n in own_hypers if isinstance(given[n], Tensor)})
        self.instance.param_groups = [now for _, now, _ in used]
        try:
            yield
            # 2. Adopt options that the optimizer has changed itself.
            for (group, now, before), tensors in zip(used, made, strict=True):
                for name in now.keys() - set(_LISTS):
                    if name not in before or now[name] is not before[name]:
                        group[name] = now[name]
                    elif name in tensors and not torch.equal(now[name], tensors[name]):  # changed in place
                        group[name] = now[name].item()
                for name in before.keys() - now.keys():
                    group.pop(name, None)
        finally:
            self.instance.param_groups = former


_LISTS = ("params", "param_names")


class _OptimizerSnapshot:
    """Everything that a torch optimizer keeps, so that it can be restored."""

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self._instance = instance
        self._attributes = dict(vars(instance))
        self._state = {key: clone_tree(value) for key, value in instance.state.items()}
        self._groups = [(group, dict(group)) for group in instance.param_groups]

    def restore(self) -> None:
        vars(self._instance).clear()
        vars(self._instance).update(self._attributes)
        self._instance.state.clear()
        self._instance.state.update(self._state)
        for group, entries in self._groups:
            group.clear()
            group.update(entries)


def _as_torch_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the class's own step count, which the store's count had replaced."""
    if OWN_COUNT not in state:
        return dict(state)
    entries = {name: value for name, value in state.items() if name not in (OWN_COUNT, "step")}
    return entries if state[OWN_COUNT] is None else {**entries, "step": state[OWN_COUNT]}


def _as_placeholder_state(state: State) -> State:
    """Return the entries marked as no real state; see `_is_placeholder_state`."""
    if "step" in state:
        step = state["step"]
        return {**state, "step": torch.zeros_like(step) if isinstance(step, Tensor) else 0}

    def placeholder(one: Any) -> Any:
        is_filled = isinstance(one, Tensor) and one.is_floating_point() and not is_composed_tensor(one)
        return torch.full_like(one, -0.0) if is_filled else one

    made: State = map_tree(placeholder, state)
    return made


def _is_placeholder_state(state: Any) -> bool:
    """Return whether entries were made by `_placeholder_state`: their count is 0, or all numbers are negative zeros."""
    if not isinstance(state, Mapping):
        return False
    if "step" in state:
        return _optimizer_step_count(state["step"]) == 0
    tensors = [
        one
        for one in flatten_trees(state).values()
        if isinstance(one, Tensor) and not is_composed_tensor(one)
    ]
    return bool(tensors) and all(bool((one.signbit() & (one == 0)).all()) for one in tensors)


def _state_like_given(kept: Any, given: Any) -> Any:
    """Undo what torch's load_state_dict does to a state beside copying it to a device.

    It rebuilds every iterable from its items, even text, and converts every tensor to the dtype of the parameter.
    """
    if isinstance(kept, Tensor) and isinstance(given, Tensor):
        # Between float32 and float64 the conversion is right: the model has another precision now.
        is_wider = {kept.dtype, given.dtype} == {torch.float32, torch.float64}
        is_cast = kept.dtype != given.dtype and kept.shape == given.shape
        return given.detach().to(kept.device, copy=True) if is_cast and not is_wider else kept
    if isinstance(kept, str) and isinstance(given, str):
        return given if kept.startswith("<generator object") else kept
    if isinstance(kept, dict) and isinstance(given, Mapping):
        made = {
            name: _state_like_given(one, given[name]) if name in given else one for name, one in kept.items()
        }
        return OrderedDict(made) if type(given) is OrderedDict else made
    if type(kept) in (list, tuple) and type(kept) is type(given) and len(kept) == len(given):
        return type(kept)(map(_state_like_given, kept, given))
    return kept


def _optimizer_step_count(step: Any) -> int:
    return (
        int(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else 1
    )
