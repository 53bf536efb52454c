"""The state of a Trainer's optimizer, wherever it is kept: in this process or in a store, or on its way to either."""

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
from kvstore_server.optimizer.apply import follow, is_half
from kvstore_server.optimizer.torch_family import OWN_COUNT, UNCOUNTED, TorchOptimizer
from kvstore_server.optimizer.trees import cloned, flatten, is_composed, map_tree
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import Decision, apply_decision
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Shard
from kvtrainer.errors import ConfigurationError, KVStoreError, OptimizerError, StateMismatchError
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.states.format import (
    State,
    StateHolder,
    export_states,
    import_states,
    initial_state,
    read_states,
)
from kvtrainer.sync.binding import Binding
from kvtrainer.trainer.groups import ParameterGroups, option_problems
from kvtrainer.types import Group


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
        self._runs: tuple[Mapping[str, Tensor], frozenset[int], list[Run]] | None = None
        """Where gradients lay the last time, the keys that were left out, and how the Shard takes those."""

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
        borrowed: Mapping[int, Tensor],
    ) -> None:
        """Update weights of `present` keys with scale · gradient. `decision` says how that is limited.

        `grads` is used as scratch. Of the keys in `rows` the gradient has only those, and `grads` is zero. Those that
        are `borrowed` lie elsewhere, are used only if nothing is decided, and left as they are.

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
        without = absent | found.keys()
        if self._runs is None or self._runs[0] is not grads or self._runs[1] != without:
            self._runs = grads, without, shard.runs_of(shard.units[0], grads, without)
        given = RankContribution(self._runs[2], scale, absent, found, is_scratch=True, borrowed=borrowed)
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
        self._outside: MutableMapping[Tensor, State] = WeakTensorKeyDictionary()
        """That of parameters which a script took out of the groups."""
        self.make_places()

    def make_places(self) -> None:
        """Make what updates in this process, and hand it pending state. Only if parameters have places."""
        if self._memory.is_settled:
            self.here = [self._update_of(device) for device in self._memory.devices]
            self.hand_over()

    def move(self, memory: Memory, states: Mapping[int, State]) -> None:
        """Go on with other parameters. One that has been here has the state it had.

        Args:
            states: What `current` gave, by the former keys.
        """
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
        self._link.leave(former, places)
        former.release(gone)
        self._memory, self.here, self._pending = memory, [], None
        self.make_places()
        self.take(moved)

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
        """The update of all parameters together, if any. It has the state of the optimizer itself."""
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
        states = self.current() or {key: self._initial(key) for key in keys}
        found = {self._memory.parameters[key]: self._shown(state) for key, state in states.items()}
        return {parameter: state for parameter, state in found.items() if state}

    def shown_of(self, parameter: Tensor) -> State:
        """Fetch the state of one parameter as `shown` has it; empty if there is none."""
        key = self._memory.keys.get(id(parameter))
        if key is None:
            return dict(self._outside.get(parameter, {}))
        if (joint := self.joint) is not None:
            return dict(joint.instance.state.get(parameter, {}))
        optimizer = self._groups.optimizer
        is_new = optimizer.num_update == optimizer.begin_num_update
        return self._shown(self.current([key]).get(key) or (self._initial(key) if is_new else {}))

    def replace(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        """Replace the state of one parameter.

        An empty one removes it, also that of a parameter which was taken out of the groups.

        Raises:
            ConfigurationError: it is not a parameter of this Trainer, or the state is not one of its kind.
        """
        key = self._memory.keys.get(id(parameter))
        if key is None and not state and parameter in self._outside:
            self._outside[parameter] = {}
            return
        if key is None:
            raise ConfigurationError(
                "the state of a parameter was assigned that this Trainer does not have; put it into a group first"
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
            self._give({key: found}, others_stay=True)
        self._groups.counts.restore_one(key, int(float(found.get("step", 0))), len(self._memory.names))

    def follow_instance(self) -> None:
        """Take over the state of a torch instance. It has loaded that, or had it before it came here."""
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
        """Load the state_dict of the optimizer that updates all parameters together.

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

    def _shown(self, state: State) -> State:
        """Leave out the store's count where torch's class keeps none.

        Its checkpoints would have other keys otherwise.
        """
        optimizer = self._groups.optimizer
        is_counted = not isinstance(optimizer, TorchOptimizer) or optimizer.cls not in UNCOUNTED
        return state if is_counted else {name: value for name, value in state.items() if name != "step"}

    def _holders(self) -> Sequence[tuple[StateHolder | JointUpdate, torch.device]]:
        """Say where the state is kept, with the devices for it: in a store, or here for each replica."""
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
        return JointUpdate(device, made, lambda: groups.live, optimizer)


def _check_form(groups: Any, states: Any) -> None:
    """Raise StateMismatchError unless both have the form of a torch state_dict. It looks at no content."""
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


class JointUpdate:
    """Updates all parameters by one torch optimizer, as torch runs it: for classes of which nothing is known.

    Such a class may keep anything in its groups, its attributes and its state. What torch would let it do it may do
    here too, on the parameters themselves with the reduced gradients in their place.

    Args:
        device: The parameters, whose data lie in its arena.
        instance: The optimizer, over these parameters.
        groups: The groups whose options count.
        optimizer: Describes the class. Where it has `multi_precision`, half-precision parameters have float32 copies,
            which are what the class sees.
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
        """Whether the last `apply` has broken off, and all is as it was before."""
        self._masters: dict[int, Tensor] = {}
        self._wide: dict[int, Parameter] = {}
        """During a step, by key: what stands in for parameters of half precision."""
        self._first = {
            key: cloned(instance.state[p]) for key, p in enumerate(self._parameters) if p in instance.state
        }
        """What the class made in its constructor."""

    def apply(
        self,
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        decision: Decision,
        again: Callable[[], Any] | None,
    ) -> None:
        """Update weights of `present` keys with scale · gradient. `decision` says how that is limited.

        What raises leaves weights, state and groups as they were. The gathered gradients are used as scratch.

        Args:
            hypers: The numbers of each key.
            again: Evaluates the loss again; None if the script gave no closure for that.

        Raises:
            OptimizerError: the optimizer raised.
        """
        with (
            self._undone("the step was not applied"),
            self._borrowed(scale, present, decision),
            self._grouped(hypers),
        ):
            if again is None:
                self.instance.step()
            else:
                self.instance.step(again)
        for key, was_in in enumerate(present):
            self._counts[key] += was_in

    def set_mode(self, mode: str) -> None:
        """Call the optimizer's own `train` or `eval`. What raises leaves all as it was.

        Raises:
            OptimizerError: the optimizer raised.
        """
        nothing, live = [False] * len(self._parameters), self._groups()
        with self._undone(f"{mode}() has changed nothing"), self._borrowed(1.0, nothing, Decision()):
            for key, parameter in enumerate(self._parameters):
                self._stand_in(key, parameter.data)
            with self._grouped([live[spec.group] for spec in self._device.plan.specs]):
                getattr(self.instance, mode)()

    @contextmanager
    def _undone(self, consequence: str) -> Iterator[None]:
        """Take back what was done while it was open, if that raises; the error of the optimizer says so."""
        weights = self._device.arena.weights
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        taken, masters = _Snapshot(self.instance), cloned(self._masters)
        self.was_undone = False
        try:
            yield
        except (
            BaseException
        ) as error:  # an interrupt, too: the next step would apply the same gradients again
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
        """Copy what the optimizer itself says, with the options that count; before its first step with a `_room`."""
        for own, live in zip(self.instance.param_groups, self._groups(), strict=True):
            own.update({name: value for name, value in live.items() if name not in _LISTS})
        state: dict[str, Any] = cloned(self.instance.state_dict())
        if not self.instance.state and state.get("state") == {}:
            state["state"] = self._room()
        return {**state, "param_groups": [self._optimizer.with_tensors(one) for one in state["param_groups"]]}

    def _room(self) -> dict[int, State]:
        """Find what the first step will keep, by number of the parameter, as room to load into; nothing changes.

        It has a count of 0, or where the class keeps none negative zeros, by which loading knows that it is no state.
        Empty if the class does not take a step of zeros.
        """
        taken = _Snapshot(self.instance)
        groups = [self._optimizer.with_tensors(group) for group in self.instance.param_groups]
        for group in groups:
            members = [
                torch.zeros_like(p, dtype=torch.float32 if is_half(p) else p.dtype) for p in group["params"]
            ]
            rows = zip(members, group["params"], strict=True)
            group["params"] = [Parameter(zeros, p.requires_grad) for zeros, p in rows]
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            self.instance.param_groups = groups
            with torch.random.fork_rng(devices=[]):
                self.instance.step()
            states = cloned(self.instance.state_dict()["state"])
        except Exception:  # as `trial_state`
            return {}
        finally:
            taken.restore()
        return {at: _emptied(state) for at, state in states.items() if state}

    def load_state_dict(self, given: Mapping[str, Any]) -> dict[int, int]:
        """Let the optimizer itself take over its state; return how many updates each key has had.

        Raises:
            StateMismatchError: it does not take it.
        """
        # Copied, because torch goes on in the memory of what it is given.
        states, taken = cloned(dict(given.get("state", {}))), _Snapshot(self.instance)
        order = [at for group in given.get("param_groups", ()) for at in group["params"]]
        made_first = {at for key, at in enumerate(order) if key in self._first}
        states = {at: one for at, one in states.items() if at in made_first or not _is_room(one)}
        own = {at: _as_torchs(state) if at in order else state for at, state in states.items()}
        masters = {at: own[at].pop("master") for at in order if at in own and "master" in own[at]}
        first = {at: cloned(self._first[key]) for key, at in enumerate(order) if key in self._first}
        # Where the count of the store was all that there is, the class has kept nothing.
        own = {
            **first,
            **{at: state for at, state in own.items() if at not in order or state or not states[at]},
        }
        try:
            self.instance.load_state_dict({**given, "state": own})
        except Exception as error:
            taken.restore()
            raise StateMismatchError(
                f"{type(self.instance).__name__} does not take this state, which is another model's or another "
                f"optimizer's: {type(error).__name__}: {error}"
            ) from error
        for key, at in enumerate(order):
            self._counts[key] = _count(states[at].get("step", 1)) if states.get(at) else 0
            kept = self.instance.state.get(self._parameters[key])
            if isinstance(kept, dict) and at in own:
                # Of its count torch knows in which form kernels want that.
                kept.update(
                    {name: _as_given(kept[name], own[at].get(name)) for name in kept if name != "step"}
                )
        self._masters = {key: masters[at] for key, at in enumerate(order) if at in masters}
        for live, loaded in zip(self._groups(), self.instance.param_groups, strict=True):
            live.update({name: value for name, value in loaded.items() if name not in _LISTS})
        return dict(enumerate(self._counts))

    def shared(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Split what its state_dict has beside groups and the state of parameters: what is no tensor, and tensors.

        Trees are as `flatten` has them.
        """
        rest = {n: v for n, v in self.instance.state_dict().items() if n not in ("state", "param_groups")}
        found = flatten(rest)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return {name: value for name, value in found.items() if name not in tensors}, tensors

    def states(self) -> dict[int, State]:
        """Copy the state of the keys that were updated."""
        found: dict[int, State] = {}
        for key, parameter in enumerate(self._parameters):
            if count := self._counts[key]:
                kept = cloned(self.instance.state.get(parameter, {}))
                entries = {OWN_COUNT if name == "step" else name: value for name, value in kept.items()}
                if key in self._masters:
                    entries["master"] = self._masters[key].clone()
                found[key] = {"step": torch.tensor(float(count), device="cpu"), **entries}
        return found

    def put(self, states: Mapping[int, State]) -> None:
        """Replace the state of every key by what `states` returned; one without an entry starts afresh."""
        device = self._device.arena.device

        def to_device(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf

        groups = {p: group for group in self.instance.param_groups for p in group["params"]}
        for key, parameter in enumerate(self._parameters):
            given, group = cloned(dict(states.get(key, {}))), groups.get(parameter, {})
            self._counts[key] = count = int(given.pop("step", 0))
            # As torch does it: what may be of one element, too, and its count where kernels read that.
            is_moved = group.get("capturable") or group.get("fused")
            entries = {
                name: value if name == OWN_COUNT and not is_moved else map_tree(to_device, value)
                for name, value in given.items()
            }
            self._masters.pop(key, None)
            if "master" in entries:
                self._masters[key] = entries.pop("master").to(device)
            kept = {"step" if name == OWN_COUNT else name: value for name, value in entries.items()}
            kept = kept if count else cloned(self._first.get(key, {}))
            if kept:
                self.instance.state[parameter] = kept
            else:
                self.instance.state.pop(parameter, None)

    @contextmanager
    def _borrowed(self, scale: float, present: Sequence[bool], decision: Decision) -> Iterator[None]:
        """While it is open the parameters have the reduced gradients; float32 ones stand in for half precision."""
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
            for key, wide in self._wide.items():
                places[key].copy_(wide.detach())
                if wide in self.instance.state:
                    self.instance.state[self._parameters[key]] = self.instance.state.pop(wide)
            self._wide.clear()
            rows = zip(self._parameters, self._device.plan.numels, places, own_grads, strict=True)
            for parameter, numel, place, own_grad in rows:
                if numel and parameter.data_ptr() != place.data_ptr():  # the class has replaced the data
                    place.copy_(parameter.data)
                    parameter.data = place
                parameter.grad = own_grad

    def _stand_in(self, key: int, place: Tensor) -> Parameter:
        """Make what the optimizer sees of a parameter: itself, or float32 weights of one of half precision."""
        parameter = self._parameters[key]
        if not is_half(place):
            return parameter
        weights = place.float()
        if self._optimizer.multi_precision:
            held = self._masters.get(key)
            weights = self._masters[key] = weights if held is None else follow(held, place)
        self._wide[key] = wide = Parameter(weights)
        if parameter in self.instance.state:
            self.instance.state[wide] = self.instance.state.pop(parameter)
        return wide

    @contextmanager
    def _grouped(self, hypers: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Give the optimizer's groups the numbers of this step while it is open. Multipliers are included."""
        live, former = self._groups(), self.instance.param_groups
        members: list[dict[int, list[int]]] = [{} for _ in live]
        for key, spec in enumerate(self._device.plan.specs):
            members[spec.group].setdefault(id(hypers[key]), []).append(key)
        used: list[tuple[Group, Group, Group]] = []
        made: list[dict[str, Tensor]] = []
        for group, by_row in zip(live, members, strict=True):
            for keys in by_row.values():
                numbers = {name: hypers[keys[0]][name] for name in group if name in hypers[keys[0]]}
                given = self._optimizer.with_tensors({**group, **numbers})
                given["params"] = [self._wide.get(key, self._parameters[key]) for key in keys]
                used.append((group, given, dict(given)))
                made.append({n: given[n].clone() for n in numbers if isinstance(given[n], Tensor)})
        self.instance.param_groups = [now for _, now, _ in used]
        try:
            yield
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


class _Snapshot:
    """All that a torch optimizer keeps, to go back to."""

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self._instance = instance
        self._attributes = dict(vars(instance))
        self._state = {key: cloned(value) for key, value in instance.state.items()}
        self._groups = [(group, dict(group)) for group in instance.param_groups]

    def restore(self) -> None:
        vars(self._instance).clear()
        vars(self._instance).update(self._attributes)
        self._instance.state.clear()
        self._instance.state.update(self._state)
        for group, entries in self._groups:
            group.clear()
            group.update(entries)


def _as_torchs(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give state the class's own count of steps again. A store has put its own in that place."""
    if OWN_COUNT not in state:
        return dict(state)
    entries = {name: value for name, value in state.items() if name not in (OWN_COUNT, "step")}
    return entries if state[OWN_COUNT] is None else {**entries, "step": state[OWN_COUNT]}


def _emptied(state: State) -> State:
    """Return entries without what makes them a state; see `_is_room`."""
    if "step" in state:
        step = state["step"]
        return {**state, "step": torch.zeros_like(step) if isinstance(step, Tensor) else 0}

    def emptied(one: Any) -> Any:
        is_filled = isinstance(one, Tensor) and one.is_floating_point() and not is_composed(one)
        return torch.full_like(one, -0.0) if is_filled else one

    made: State = map_tree(emptied, state)
    return made


def _is_room(state: Any) -> bool:
    """Return whether entries are of no step: their count is 0, or there is none and all numbers are negative zeros."""
    if not isinstance(state, Mapping):
        return False
    if "step" in state:
        return _count(state["step"]) == 0
    numbers = [one for one in flatten(state).values() if isinstance(one, Tensor) and not is_composed(one)]
    return bool(numbers) and all(bool((one.signbit() & (one == 0)).all()) for one in numbers)


def _as_given(kept: Any, given: Any) -> Any:
    """Undo what torch's loader does to a state beside copying it to a device.

    It makes everything iterable anew from its items, text too, and gives every tensor the dtype of the parameter.
    """
    if isinstance(kept, Tensor) and isinstance(given, Tensor):
        # A model of the other full precision has made the optimizer keep that.
        is_wider = {kept.dtype, given.dtype} == {torch.float32, torch.float64}
        is_cast = kept.dtype != given.dtype and kept.shape == given.shape
        return given.detach().to(kept.device, copy=True) if is_cast and not is_wider else kept
    if isinstance(kept, str) and isinstance(given, str):
        return given if kept.startswith("<generator object") else kept
    if isinstance(kept, dict) and isinstance(given, Mapping):
        made = {name: _as_given(one, given[name]) if name in given else one for name, one in kept.items()}
        return OrderedDict(made) if type(given) is OrderedDict else made
    if type(kept) in (list, tuple) and type(kept) is type(given) and len(kept) == len(given):
        return type(kept)(map(_as_given, kept, given))
    return kept


def _count(step: Any) -> int:
    return (
        int(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else 1
    )
