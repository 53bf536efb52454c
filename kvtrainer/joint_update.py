"""The update of all parameters together, by one torch optimizer of which nothing is known."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.optim
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.norms import Decision, apply_decision
from kvstore_server.optimizer.apply import follow, is_half
from kvstore_server.optimizer.torch_family import OWN_COUNT
from kvtrainer.errors import KVStoreError, OptimizerError, StateMismatchError
from kvtrainer.memory.memory import DeviceMemory
from kvtrainer.states.convert import State
from kvtrainer.types import Group


class JointUpdate:
    """Updates all parameters by one torch optimizer, as torch runs it: for classes of which nothing is known.

    Such a class may keep anything in its groups, its attributes and its state. What torch would let it do it may do
    here too, on the parameters themselves with the reduced gradients in their place.

    Args:
        device: The parameters, whose data lie in its arena.
        instance: The optimizer, over these parameters.
        groups: The groups whose options count.
        multi_precision: Whether half-precision parameters have float32 copies, which are what the optimizer sees.
    """

    def __init__(
        self,
        device: DeviceMemory,
        instance: torch.optim.Optimizer,
        groups: Callable[[], Sequence[Group]],
        multi_precision: bool = False,
    ) -> None:
        self.instance = instance
        self._device = device
        self._parameters = device.parameters
        self._groups = groups
        self._multi_precision = multi_precision
        self._counts = [0] * len(device.parameters)
        self.was_undone = False
        """Whether the last `apply` has broken off, and all is as it was before."""
        self._masters: dict[int, Tensor] = {}
        self._wide: dict[int, Parameter] = {}
        """During a step, by key: what stands in for parameters of half precision."""
        self._first = {
            key: _cloned(instance.state[p]) for key, p in enumerate(self._parameters) if p in instance.state
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
        """Update the weights of the keys that are `present` with scale · gradient, limited as `decision` says.

        What raises leaves weights, state and groups as they were. The gathered gradients are used as scratch.

        Args:
            hypers: The numbers of each key.
            again: Evaluates the loss again; None if the script gave no closure for that.

        Raises:
            OptimizerError: the optimizer raised.
        """
        weights = self._device.arena.weights
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        taken, masters = _Snapshot(self.instance), _cloned(self._masters)
        self.was_undone = False
        try:
            with self._lent(scale, present, decision), self._grouped(hypers):
                if again is None:
                    self.instance.step()
                else:
                    self.instance.step(again)
        except (
            BaseException
        ) as error:  # an interrupt, too: the next step would apply the same gradients once more
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            self._masters = masters
            taken.restore()
            self.was_undone = True
            if isinstance(error, KVStoreError) or not isinstance(error, Exception):
                raise
            raise OptimizerError(
                f"optimizer {type(self.instance).__name__} raised {type(error).__name__}: {error}; the step was not "
                "applied"
            ) from error
        for key, was_in in enumerate(present):
            self._counts[key] += was_in

    def state_dict(self) -> dict[str, Any]:
        """Copy what the optimizer itself says, with the options that count."""
        for own, live in zip(self.instance.param_groups, self._groups(), strict=True):
            own.update({name: value for name, value in live.items() if name not in _LISTS})
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
            if is_half(self._parameters[key]):
                self._restore_float32(self.instance.state.get(self._parameters[key], {}), own.get(at, {}))
        self._masters = {key: masters[at] for key, at in enumerate(order) if at in masters}
        for live, loaded in zip(self._groups(), self.instance.param_groups, strict=True):
            live.update({name: value for name, value in loaded.items() if name not in _LISTS})
        return dict(enumerate(self._counts))

    @staticmethod
    def _restore_float32(kept: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Take over what torch has rounded to the half precision of a parameter, while the class saw float32."""
        for name, value in kept.items():
            exact = given.get(name)
            if isinstance(value, Tensor) and isinstance(exact, Tensor) and is_half(value):
                kept[name] = exact.to(value.device, copy=True)

    def shared(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Split what its state_dict has beside groups and the state of parameters: plain values, and tensors."""
        found = {n: v for n, v in self.instance.state_dict().items() if n not in ("state", "param_groups")}
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return {name: value for name, value in found.items() if name not in tensors}, tensors

    def states(self) -> dict[int, State]:
        """Copy the state of the keys that were updated."""
        found: dict[int, State] = {}
        for key, parameter in enumerate(self._parameters):
            if count := self._counts[key]:
                kept = _cloned(self.instance.state.get(parameter, {}))
                entries = {OWN_COUNT if name == "step" else name: value for name, value in kept.items()}
                if key in self._masters:
                    entries["master"] = self._masters[key].clone()
                found[key] = {"step": torch.tensor(float(count)), **entries}
        return found

    def put(self, states: Mapping[int, State]) -> None:
        """Replace the state of every key by what `states` returned; one without an entry starts afresh."""
        for key, parameter in enumerate(self._parameters):
            given, device = _cloned(dict(states.get(key, {}))), self._device.arena.device
            self._counts[key] = count = int(given.pop("step", 0))
            entries = {n: v.to(device) if isinstance(v, Tensor) and v.dim() else v for n, v in given.items()}
            self._masters.pop(key, None)
            if "master" in entries:
                self._masters[key] = entries.pop("master").to(device)
            kept = {"step" if name == OWN_COUNT else name: value for name, value in entries.items()}
            kept = kept if count else _cloned(self._first.get(key, {}))
            if kept:
                self.instance.state[parameter] = kept
            else:
                self.instance.state.pop(parameter, None)

    @contextmanager
    def _lent(self, scale: float, present: Sequence[bool], decision: Decision) -> Iterator[None]:
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
            for parameter, place, own_grad in zip(self._parameters, places, own_grads, strict=True):
                if parameter.data_ptr() != place.data_ptr():  # the class has replaced the data
                    place.copy_(parameter.data)
                    parameter.data = place
                parameter.grad = own_grad

    def _stand_in(self, key: int, place: Tensor) -> Parameter:
        """Make what the optimizer sees of a parameter: itself, or float32 weights of one of half precision."""
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
        for key, spec in enumerate(self._device.plan.specs):
            members[spec.group].setdefault(id(hypers[key]), []).append(key)
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
    """Make a copy that shares no tensor."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    return [_cloned(item) for item in value] if type(value) is list else copy.copy(value)


def _as_torchs(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give state the class's own count of steps again, where a store has put its own in that place."""
    if OWN_COUNT not in state:
        return dict(state)
    entries = {name: value for name, value in state.items() if name not in (OWN_COUNT, "step")}
    return entries if state[OWN_COUNT] is None else {**entries, "step": state[OWN_COUNT]}


def _count(step: Any) -> int:
    return (
        int(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else 1
    )
