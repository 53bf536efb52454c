"""The update in the trainer's own process: the servers' arithmetic over the trainer's own arenas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.optim
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.norms import Decision, apply_decision
from kvstore_server.optimizer import KeyState, Optimizer, SliceState, update_key, update_rows, update_slice
from kvstore_server.optimizer.half import follow, is_half
from kvstore_server.optimizer.segment_rows import SegmentPlace, takes_rows, update_segment_rows
from kvstore_server.optimizer.torch_family import OWN_COUNT
from kvstore_server.plan import Plan, Slice
from kvstore_server.reduction import RowSet
from kvstore_server.row_payload import split_rows
from kvtrainer.errors import KVStoreError, OptimizerError, StateMismatchError
from kvtrainer.types import Group

UNLIMITED = Decision()


class _Step(NamedTuple):
    """The arguments of `LocalUpdate.apply`."""

    weights: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    scale: float
    present: Sequence[bool]
    hypers: Sequence[Mapping[str, Any]]
    rows: Mapping[int, RowSet]
    decision: Decision

    def ready(self, grad: Tensor) -> Tensor:
        """A gradient as the update uses it: scaled and limited, in the dtype that the update computes in."""
        ready = _scaled(grad, self.scale)
        apply_decision(ready, self.decision)
        return ready


class LocalUpdate:
    """Applies one optimizer to all slices or, if it is not elementwise, keys of a plan, with the bits of a server.

    Args:
        plan: The layout of the arenas.
        optimizer: Its state is kept here, per slice or per key.
    """

    def __init__(self, plan: Plan, optimizer: Optimizer) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.states: dict[int, SliceState] = {piece.index: SliceState.empty(piece) for piece in plan.slices}
        # Only one of the two is in use.
        self.key_states: list[KeyState] = [] if optimizer.elementwise else [KeyState() for _ in plan.specs]

    def apply(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        rows: Mapping[int, RowSet] | None = None,
        decision: Decision = UNLIMITED,
    ) -> None:
        """Update the weights of the keys that are `present` with scale · gradient, limited as `decision` says.

        `grads` is used as scratch.

        Of the keys in `rows` the gradient has only those, and `grads` is zero.

        Raises:
            OptimizerError: a user-defined optimizer raised; weights and state are as before.
            ConfigurationError: the optimizer cannot update a key of this shape; nothing has changed.
        """
        step = _Step(weights, grads, scale, present, hypers, rows or {}, decision)
        if not self.optimizer.may_raise:
            self._apply(step)
            return
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        states = {index: state.copy() for index, state in self.states.items()}
        key_states = [state.copy() for state in self.key_states]
        try:
            self._apply(step)
        except Exception as error:
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            self.states, self.key_states = states, key_states
            raise OptimizerError(
                f"optimizer {self.optimizer.registered_name!r} raised {type(error).__name__}: {error}; "
                "the step was not applied"
            ) from error

    def get_state(self, piece: Slice) -> SliceState:
        return self.states[piece.index]

    def put_state(self, piece: Slice, state: SliceState) -> None:
        self.states[piece.index] = state

    def get_key_state(self, key: int) -> KeyState:
        return self.key_states[key]

    def put_key_state(self, key: int, state: KeyState) -> None:
        self.key_states[key] = state

    @torch.no_grad()
    def _apply(self, step: _Step) -> None:
        if not self.optimizer.elementwise:
            self._apply_to_keys(step)
            return
        rows = self._rows_by_slice(step)
        for piece in self.plan.slices:
            here = [step.present[segment.key] for segment in piece.segments]
            numbers = [step.hypers[segment.key] for segment in piece.segments]
            part = slice(piece.offset, piece.offset + piece.length)
            state, weight = self.states[piece.index], step.weights[piece.dtype][part]
            for position, found in rows.get(piece.index, {}).items():
                here[position] = False
                place = SegmentPlace(piece, position, self.plan.specs[piece.segments[position].key])
                values = step.ready(found.values.clone())
                update_segment_rows(
                    self.optimizer, place, weight, found.ids, values, state, numbers[position]
                )
            if any(here):
                grad = step.ready(step.grads[piece.dtype][part])
                names = self._names(piece) if self.optimizer.positioned else None
                update_slice(self.optimizer, piece, weight, grad, state, numbers, here, names)

    def _rows_by_slice(self, step: _Step) -> dict[int, dict[int, RowSet]]:
        """Slice → position of a segment → its rows; rows that do not count as such go to the dense gradients."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, (ids, values) in step.rows.items():
            if not step.present[key]:
                continue
            spec, begin = self.plan.specs[key], self.plan.key_offsets[key]
            if takes_rows(self.optimizer, step.hypers[key]):
                for index, (position, part) in split_rows(self.plan, key, ids, values).items():
                    found.setdefault(index, {})[position] = part
            else:
                dense = step.grads[spec.dtype][begin : begin + spec.numel].view(-1, values.shape[1])
                dense[ids] = values.to(dense.dtype)
        return found

    def _names(self, piece: Slice) -> list[str]:
        return [self.plan.specs[segment.key].key for segment in piece.segments]

    def _apply_to_keys(self, step: _Step) -> None:
        keys = [key for key, is_present in enumerate(step.present) if is_present]
        specs = self.plan.specs
        for key in keys:
            self.optimizer.check_key(specs[key].key, specs[key].shape, step.hypers[key])
        for key in keys:
            spec, begin = specs[key], self.plan.key_offsets[key]
            part = slice(begin, begin + spec.numel)
            weight = step.weights[spec.dtype][part].view(spec.shape)
            hyper, state = {**step.hypers[key], "key": spec.key}, self.key_states[key]
            if key in step.rows:
                ids, values = step.rows[key]
                update_rows(self.optimizer, weight, ids, step.ready(values.clone()), state, hyper)
            else:
                grad = step.ready(step.grads[spec.dtype][part]).view(spec.shape)
                update_key(self.optimizer, weight, grad, state, hyper)


def _scaled(grad: Tensor, scale: float) -> Tensor:
    """In the dtype that the update computes in; `grad` itself where it has that."""
    grad = grad.float() if grad.dtype.itemsize < 4 else grad
    return grad.mul_(scale) if scale != 1.0 else grad


class JointUpdate:
    """Updates all parameters by one torch optimizer, as torch runs it: for classes of which nothing is known.

    Such a class may keep anything in its groups, its attributes and its state. What torch would let it do it may do
    here too, on the parameters themselves with the reduced gradients in their place.

    Args:
        plan: The layout of the arenas.
        instance: The optimizer, over `parameters`.
        parameters: By key; their data lie in the arena.
        groups: The groups whose options count.
        multi_precision: Whether half-precision parameters have float32 copies, which are what the optimizer sees.
    """

    def __init__(
        self,
        plan: Plan,
        instance: torch.optim.Optimizer,
        parameters: Sequence[Parameter],
        groups: Callable[[], Sequence[Group]],
        multi_precision: bool = False,
    ) -> None:
        self.plan = plan
        self.instance = instance
        self._parameters = parameters
        self._groups = groups
        self._multi_precision = multi_precision
        self.closure: Callable[[], Any] | None = None
        """What the optimizer is given to evaluate the loss again, while a step is made."""
        self._counts = [0] * len(parameters)
        self._masters: dict[int, Tensor] = {}
        self._wide: dict[int, Parameter] = {}
        """During a step, by key: what stands in for parameters of half precision."""
        self._first = {
            key: _cloned(instance.state[p]) for key, p in enumerate(parameters) if p in instance.state
        }
        """What the class made in its constructor."""

    def apply(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        rows: Mapping[int, RowSet] | None = None,
        decision: Decision = UNLIMITED,
    ) -> None:
        """Update as `LocalUpdate.apply`; what raises leaves weights, state and groups as they were.

        Raises:
            OptimizerError: the optimizer raised.
        """
        step = _Step(weights, grads, scale, present, hypers, rows or {}, decision)
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        taken = _Snapshot(self.instance)
        try:
            with self._lent(step), self._grouped(hypers):
                if self.closure is None:
                    self.instance.step()
                else:
                    self.instance.step(self.closure)
        except Exception as error:
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            taken.restore()
            if isinstance(error, KVStoreError):
                raise
            raise OptimizerError(
                f"optimizer {type(self.instance).__name__} raised {type(error).__name__}: {error}; the step was not "
                "applied"
            ) from error
        for key, was_in in enumerate(present):
            self._counts[key] += was_in

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer itself says, with the options that count."""
        self._show_options()
        state: dict[str, Any] = _cloned(self.instance.state_dict())
        return state

    def load_state_dict(self, given: Mapping[str, Any]) -> dict[int, int]:
        """Let the optimizer itself take over its state; return how many updates each key has had.

        Raises:
            StateMismatchError: it does not take it.
        """
        states, taken = dict(given.get("state", {})), _Snapshot(self.instance)
        order = [at for group in given.get("param_groups", ()) for at in group["params"]]
        own = {at: _as_torchs(state) if at in order else state for at, state in states.items()}
        masters = {at: own[at].pop("master") for at in order if at in own and "master" in own[at]}
        first = {at: _cloned(self._first[key]) for key, at in enumerate(order) if key in self._first}
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
        self._masters = {key: masters[at] for key, at in enumerate(order) if at in masters}
        for live, loaded in zip(self._groups(), self.instance.param_groups, strict=True):
            live.update({name: value for name, value in loaded.items() if name not in _LISTS})
        return dict(enumerate(self._counts))

    def shared(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What its state_dict has beside groups and the state of parameters: plain values, and tensors."""
        found = {n: v for n, v in self.instance.state_dict().items() if n not in ("state", "param_groups")}
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return {name: value for name, value in found.items() if name not in tensors}, tensors

    def get_state(self, piece: Slice) -> SliceState:
        raise AssertionError("this update keeps its state by key")

    def put_state(self, piece: Slice, state: SliceState) -> None:
        raise AssertionError("this update keeps its state by key")

    def get_key_state(self, key: int) -> KeyState:
        state = _cloned(self.instance.state.get(self._parameters[key], {}))
        values = {OWN_COUNT if name == "step" else name: value for name, value in state.items()}
        return KeyState(values, self._counts[key], self._masters.get(key))

    def put_key_state(self, key: int, state: KeyState) -> None:
        parameter, self._counts[key] = self._parameters[key], state.step
        values = {"step" if name == OWN_COUNT else name: value for name, value in state.values.items()}
        if not state.step:
            values = _cloned(self._first.get(key, {}))
        if values:
            self.instance.state[parameter] = values
        else:
            self.instance.state.pop(parameter, None)
        self._masters.pop(key, None)
        if state.master is not None:
            self._masters[key] = state.master

    @contextmanager
    def _lent(self, step: _Step) -> Iterator[None]:
        """While it is open the parameters have the reduced gradients; float32 ones stand in for half precision."""
        own_grads = [p.grad for p in self._parameters]
        places = [p.data for p in self._parameters]
        try:
            for key, parameter in enumerate(self._parameters):
                parameter.grad = None
                if step.present[key] and parameter.numel():
                    wide = self._stand_in(key, places[key])
                    wide.grad = self._grad(key, step)
            yield
        finally:
            for key, wide in self._wide.items():
                places[key].copy_(wide.detach())
                if wide in self.instance.state:
                    self.instance.state[self._parameters[key]] = self.instance.state.pop(wide)
            self._wide.clear()
            for parameter, place, grad in zip(self._parameters, places, own_grads, strict=True):
                if parameter.data_ptr() != place.data_ptr():  # the class has replaced the data
                    place.copy_(parameter.data)
                    parameter.data = place
                parameter.grad = grad

    def _grad(self, key: int, step: _Step) -> Tensor:
        spec, begin = self.plan.specs[key], self.plan.key_offsets[key]
        grad = step.grads[spec.dtype][begin : begin + spec.numel].view(spec.shape)
        if key in step.rows:
            ids, values = step.rows[key]
            grad.view(-1, values.shape[1])[ids] = values.to(grad.dtype)
        return step.ready(grad)

    def _stand_in(self, key: int, place: Tensor) -> Parameter:
        """What the optimizer sees of a parameter: itself, or float32 weights of one of half precision."""
        parameter = self._parameters[key]
        if not is_half(place):
            return parameter
        weights = place.float()
        if self._multi_precision:
            held = self._masters.get(key)
            weights = self._masters[key] = weights if held is None else follow(held, place)
        self._wide[key] = wide = Parameter(weights)
        if parameter in self.instance.state:
            self.instance.state[wide] = self.instance.state.pop(parameter)
        return wide

    @contextmanager
    def _grouped(self, hypers: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """While it is open the optimizer's groups have the numbers of this step, multipliers included."""
        live, former = self._groups(), self.instance.param_groups
        members: list[dict[int, list[int]]] = [{} for _ in live]
        for key, spec in enumerate(self.plan.specs):
            members[spec.group].setdefault(id(hypers[key]), []).append(key)
        if (
            former is live
            and not self._wide
            and all(
                len(by_row) < 2 and all(_agree(group, hypers[keys[0]]) for keys in by_row.values())
                for group, by_row in zip(live, members, strict=True)
            )
        ):
            yield
            return
        used: list[tuple[Group, Group, Group]] = []
        for group, by_row in zip(live, members, strict=True):
            for keys in by_row.values():
                numbers = {name: hypers[keys[0]][name] for name in group if name in hypers[keys[0]]}
                given = {
                    **group,
                    **numbers,
                    "params": [self._wide.get(key, self._parameters[key]) for key in keys],
                }
                used.append((group, given, dict(given)))
        self.instance.param_groups = [now for _, now, _ in used]
        try:
            yield
            for group, now, before in used:
                for name in now.keys() - set(_LISTS):
                    if name not in before or now[name] is not before[name]:
                        group[name] = now[name]
        finally:
            self.instance.param_groups = former

    def _show_options(self) -> None:
        for own, live in zip(self.instance.param_groups, self._groups(), strict=True):
            own.update({name: value for name, value in live.items() if name not in _LISTS})


_LISTS = ("params", "param_names")


class _Snapshot:
    """All that a torch optimizer keeps, to go back to."""

    def __init__(self, instance: torch.optim.Optimizer) -> None:
        self._instance = instance
        self._attributes = dict(vars(instance))
        self._state = {key: _cloned(value) for key, value in instance.state.items()}
        self._groups = [(group, dict(group)) for group in instance.param_groups]

    def restore(self) -> None:
        vars(self._instance).clear()
        vars(self._instance).update(self._attributes)
        self._instance.state.clear()
        self._instance.state.update(self._state)
        for group, entries in self._groups:
            group.clear()
            group.update(entries)


def _cloned(value: Any) -> Any:
    """A copy that shares no tensor."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    return [_cloned(item) for item in value] if type(value) is list else copy.copy(value)


def _as_torchs(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter with the class's own count of steps, where a store has put its own in that place."""
    if OWN_COUNT not in state:
        return dict(state)
    entries = {name: value for name, value in state.items() if name not in (OWN_COUNT, "step")}
    return entries if state[OWN_COUNT] is None else {**entries, "step": state[OWN_COUNT]}


def _count(step: Any) -> int:
    return (
        int(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else 1
    )


def _agree(group: Mapping[str, Any], numbers: Mapping[str, Any]) -> bool:
    """Whether a group has the numbers of a step; what is no number is the group's own."""
    pairs = ((group[name], numbers[name]) for name in group if name in numbers and name not in _LISTS)
    return all(
        a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs
    )
