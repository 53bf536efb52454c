"""torch.optim's classes, and foreign subclasses of torch.optim.Optimizer, as optimizers of a store.

A torch optimizer serves as the kernel: for each update a copy of it gets one flat run of elements, or one whole key,
as its only parameter, with the stored state, and makes one step. So all options and torch's own first step behave as
in torch. The copy is made without calling the constructor, from a template.

- torch's own classes: `ELEMENTWISE` ones update runs; `WHOLE` ones, whole keys.
- Foreign classes get whole keys unless a user declares them elementwise, which is right for every class that treats
  its parameters independently. Anything shared between parameters would be lost, so that is checked after each step.

Invariant: an update does what torch's own step does with the same options; tests compare it with torch's unfused
optimizers. The faster path for sparse rows has the same bits.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, optim

from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer.base import (
    Hyper,
    Optimizer,
    StateValue,
    Values,
    canonical_options,
    optimizer_count_dtype,
    plain_option_value,
)
from kvstore_server.optimizer.rows import (
    GradFragments,
    Gradient,
    aligned_fragments,
    append_zeros,
    gather_rows,
    put_rows,
    scatter_rows,
)
from kvstore_server.plan import ALIGNMENT

TorchClass = type[optim.Optimizer]

ELEMENTWISE: tuple[TorchClass, ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
WHOLE: tuple[TorchClass, ...] = (optim.Adafactor, optim.Muon, optim.SparseAdam)
"""torch's classes that need whole keys; SparseAdam only takes sparse gradients."""
UNCOUNTED: tuple[TorchClass, ...] = (optim.SGD, optim.Muon)
"""torch's classes without a step count in their state."""
_SPARSE_CAPABLE = (optim.SGD, optim.Adagrad, optim.SparseAdam)
_FUSED_ON_CPU = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
_SWITCHED = {"max_exp_avg_sq": "amsgrad", "grad_avg": "centered", "momentum_buffer": "momentum"}
"""State entries that torch only creates at a parameter's first step, and the options that need them."""
_FLAGS = ("maximize", "nesterov", "amsgrad")
"""Options that torch's loops test for truth, but whose type must be bool for fused kernels."""
_LISTS = ("params", "param_names")
OWN_COUNT = "torch_step"
"""The name under which a store keeps the 'step' of a foreign class; for torch's own classes that is hyper['step']."""
_OF_UPDATE = ("step", "key", "first")
"""Entries of an update's `hyper` that are not options of the group."""


class TorchOptimizer(Optimizer):
    """One torch.optim class with its options; `hyper` is its parameter group.

    Args:
        cls: The class.
        declared: Whether a user has declared by `register` that a foreign class is elementwise.
        options: The class's own options, plus `rescale_grad` and `multi_precision`.

    Raises:
        ConfigurationError: The class cannot update one parameter at a time, or refuses an option.
    """

    _instance: optim.Optimizer | None = None
    """The instance of a foreign class, if it was given instead of the class; only its groups are known."""

    def __init__(self, cls: TorchClass, declared: bool = False, /, **options: Any) -> None:
        self._take_class(cls, declared)
        self._take_common(options)
        if (accepted := _torch_signature_defaults(cls)) is not None:
            # If the constructor passes **kwargs on, only the class it passes them to knows them.
            options = canonical_options(options, accepted, self.registered_name)
        if not self.is_foreign:  # a foreign class may need its tensors as tensors
            options = {name: _read_torch_number(value) for name, value in options.items()}
        self._arguments = options
        if self._options.get("differentiable"):
            raise ConfigurationError(
                f"{self.registered_name}: differentiable=True needs autograd through the update, which a "
                "store does not record; leave it out"
            )
        self._template = self.instance_of([torch.zeros(1 if self.elementwise else (1, 1), device="cpu")])
        self.hyper = _torch_group_of(self._template)
        self._tensor_options = _torch_tensor_options(self._template)
        # Torch's other loops are faster in blocks that stay in the cache; see `apply_update`.
        self.takes_pieces = self.one_pass and self.hyper["fused"] is not False and not self.hyper["foreach"]

    def _take_class(self, cls: TorchClass, declared: bool) -> None:
        self.is_foreign = not is_torchs_own(cls)
        """Whether the class is not torch's own, so that only its constructor knows its options, and groups may have
        more.
        """
        self.elementwise = declared or cls in ELEMENTWISE
        self.cls = cls
        self.may_raise = self.is_foreign or cls is optim.SparseAdam
        self.verified = cls in ELEMENTWISE
        self.one_pass = cls in _FUSED_ON_CPU
        self._fitting: set[tuple[int, ...]] = set()
        self._step: Callable[[optim.Optimizer], object] = cls.step
        if not self.is_foreign:
            # Without torch's wrapper for profiling and hooks, which are meant for users' optimizers.
            self._step = inspect.unwrap(cls.step)

    @classmethod
    def from_instance(cls, instance: optim.Optimizer, declared: bool = False) -> TorchOptimizer:
        """Return an optimizer like a torch instance, with the options of its one group or else its defaults."""
        kind, groups = type(instance), instance.param_groups
        found = (
            _torch_group_of(instance)
            if len(groups) == 1
            else {k: _read_torch_number(v) for k, v in instance.defaults.items()}
        )
        if is_torchs_own(kind):
            accepted = _torch_signature_defaults(kind) or {}
            return cls(kind, declared, **{key: value for key, value in found.items() if key in accepted})
        made = cls.__new__(cls)
        made._take_class(kind, declared)
        made._take_common({})
        # A foreign class may need arguments that its instance does not reveal, so the instance itself serves as the
        # template.
        template = kind.__new__(kind)
        template.__dict__.update(instance.__dict__)
        template.param_groups, template.state = [{"params": [], **found}], defaultdict(dict)
        made._template, made._instance, made.hyper = template, instance, _torch_group_of(template)
        made._tensor_options = _torch_tensor_options(instance)
        return made

    @cached_property
    def _recovery(self) -> tuple[dict[str, Any], str]:
        if self._instance is None:
            return self._arguments, ""
        found = {n: v for n, v in self._template.param_groups[0].items() if n not in _LISTS}
        return _recover_torch_options(self._instance, found)

    @property
    def _options(self) -> dict[str, Any]:
        return self._recovery[0]

    @property
    def unbuildable(self) -> str:
        """Why a store could not build the optimizer from its options; empty if it can."""
        if self._recovery[1]:
            return self._recovery[1]
        odd = [name for name, value in self._options.items() if not is_plain_torch_option(value)]
        return (
            f"its {', '.join(odd)} cannot be sent, because that is not a number, text or tuple" if odd else ""
        )

    @property
    def registered_name(self) -> str:
        return torch_name(self.cls)

    @property
    def learning_rate(self) -> float:
        """The group's 'lr'. Raises ConfigurationError if the class has none."""
        if "lr" not in self.hyper:
            raise ConfigurationError(
                f"{self.registered_name} has no learning rate; it has {', '.join(self.hyper)}"
            )
        return float(self.hyper["lr"])

    @property
    def is_joint(self) -> bool:
        """Whether the class may share state between parameters; foreign ones may, unless elementwise."""
        return self.is_foreign and not self.elementwise

    def spec(self) -> dict[str, Any]:
        if not self.is_foreign:
            return super().spec()
        present = {name: value for name, value in self.plain_hyper().items() if name in self._options}
        return {**super().spec(), "hyper": {**self._options, **present}}

    def with_tensors(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with new tensors for those options that a foreign class itself keeps as tensors."""
        found = dict(group)
        for name, like in self._tensor_options.items() if self.is_foreign else ():
            if isinstance(found.get(name), int | float):
                found[name] = torch.full_like(like, found[name])
        return found

    def check_foreign(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if a foreign constructor refuses a group's options."""
        if self._instance is None:
            accepted = _torch_signature_defaults(self.cls) or self._arguments
            asked = {name: value for name, value in options.items() if name in accepted}
            TorchOptimizer(self.cls, self.elementwise, **{**self._arguments, **asked})

    def plain_hyper(self) -> dict[str, Any]:
        if not self.is_foreign:
            return super().plain_hyper()
        return {
            name: plain_option_value(value)
            for name, value in self.hyper.items()
            if is_plain_torch_option(value) and name not in _LISTS
        }

    def create_state(self, weight: Tensor) -> Values:
        """Return the state that the class creates in its constructor (Adagrad's sum); most create theirs in a step."""
        if self._instance is not None and self.unbuildable:
            return {}
        made = dict(self.instance_of([weight]).state.get(weight, {}))
        step = made.pop("step", None)
        return made if not self.is_foreign or step is None else {**made, OWN_COUNT: step}

    def takes_sparse(self, hyper: Hyper) -> bool:
        """Return whether torch's class takes sparse gradients. SGD and Adagrad do without weight decay."""
        return self.cls in _SPARSE_CAPABLE and not hyper.get("weight_decay")

    def refuses_sparse(self, hyper: Hyper) -> bool:
        """Return whether torch's class raises for a sparse gradient; unknown, so False, for a foreign class."""
        return not self.is_foreign and not self.takes_sparse(hyper)

    def check_key(self, key: str, shape: Sequence[int], hyper: Hyper) -> None:
        """Raise ConfigurationError if the class refuses that shape. Muon only takes matrices."""
        if self.elementwise or tuple(shape) in self._fitting:
            return
        try:
            self.cls([torch.empty(tuple(shape), device="meta")], **self._options)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"{self.registered_name} cannot update key {key!r} of shape {tuple(shape)}: {error}; give it to "
                "another optimizer"
            ) from error
        self._fitting.add(tuple(shape))

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        """Let torch make one step on the range or key; see `Optimizer.update`. `grad` may be sparse."""
        if isinstance(grad, GradFragments):
            self._update_fragments(weight, grad, state, hyper)
            return
        if self.cls is optim.SparseAdam and not grad.is_sparse:
            raise ConfigurationError(
                f"torch:SparseAdam only takes sparse gradients, and that of {hyper.get('key', 'a key')!r} is dense; "
                "use torch:Adam for it"
            )
        # 1. Rows of SGD and Adagrad have a faster path with the same bits.
        group = self._group(weight, grad.is_sparse, hyper)
        if grad.is_sparse and self._changes_rows_alone(group):
            self._update_rows(weight, grad, state, group, hyper["step"])
            return
        # 2. A copy of the optimizer with this range as its only parameter makes one step. Adagrad creates sparse
        # tensors without setting check_invariants, which torch warns about; they are valid.
        given = self._given(weight, grad.is_sparse, state, group, hyper["step"])
        checks: Any = torch.sparse.check_sparse_tensor_invariants
        with checks(False) if grad.is_sparse else nullcontext():
            kernel = self._stepped(group, [weight], [grad], [given])
        # 3. Take its state back, and make sure that it stored nothing elsewhere.
        result = kernel.state.pop(weight, {})
        if self.is_foreign:
            self._check_nothing_shared(kernel, group)
        step = result.pop("step", None)
        state.clear()
        state.update(
            {k: v.to_dense() if isinstance(v, Tensor) and v.is_sparse else v for k, v in result.items()}
        )
        if step is not None and self.is_foreign:
            state[OWN_COUNT] = step

    def _update_fragments(self, weight: Tensor, grad: GradFragments, state: Values, hyper: Hyper) -> None:
        """Let torch make one step with each fragment of a range as a parameter; the gradient is not copied."""
        group = self._group(weight, False, hyper)
        given = self._given(weight, False, state, group, hyper["step"])
        flat = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.dim()}
        others = {name: value for name, value in given.items() if name not in flat and name != "step"}
        made: dict[str, list[Tensor]] = {}
        for grads, (weights, *parts) in aligned_fragments(grad, weight, *flat.values()):
            of_each = [dict(zip(flat, own, strict=True)) for own in zip(*parts, strict=True)] or [
                {} for _ in weights
            ]
            if "step" in given:  # torch counts in place, for each parameter
                of_each = [{**own, "step": given["step"].clone()} for own in of_each]
            kernel = self._stepped(group, weights, grads, of_each)
            for one in weights:
                for name, value in kernel.state[one].items():
                    if name not in given and name != "step":
                        made.setdefault(name, []).append(value)
        state.clear()
        state.update({**others, **flat, **{name: torch.cat(values) for name, values in made.items()}})

    def _stepped(
        self,
        group: Mapping[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
    ) -> optim.Optimizer:
        """Return a copy of the optimizer that has made one step with these parameters."""
        kernel = self.cls.__new__(self.cls)
        kernel.__dict__.update(self._template.__dict__)
        kernel.param_groups = [{**group, "params": list(params)}]
        kernel.state = defaultdict(dict, zip(params, states, strict=True))
        try:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            self._step(kernel)
        finally:
            for param in params:
                param.grad = None
        return kernel

    def _changes_rows_alone(self, group: Mapping[str, Any]) -> bool:
        """Return whether a sparse gradient changes only its own rows of weights and state."""
        plain = self.cls is optim.Adagrad or (self.cls is optim.SGD and not group["momentum"])
        return plain and not group["maximize"] and not isinstance(group["lr"], Tensor)

    def _update_rows(
        self, weight: Tensor, grad: Tensor, state: Values, group: Mapping[str, Any], number: int
    ) -> None:
        """Make the step of torch's SGD or Adagrad, with the same bits, without sparse tensors."""
        ids, rows, rate = grad._indices()[0], grad._values(), group["lr"]
        if not rows.numel():
            return
        if self.cls is optim.Adagrad:
            kept = state["sum"]
            assert isinstance(kept, Tensor)
            rate /= 1 + (number - 1) * group["lr_decay"]
            total = kept.index_select(0, ids).add_(rows * rows)
            scatter_rows(kept, ids, total)
            rows = rows / total.sqrt_().add_(group["eps"])
        # In full vectors torch uses multiply-add, in the remainder it does not; so pad to full vectors.
        count, unit = rows.numel(), ALIGNMENT // rows.element_size()
        length = -(-count // unit) * unit
        given = append_zeros(rows.reshape(-1), length - count)
        put_rows(weight, ids, gather_rows(weight, ids, length).add_(given, alpha=-rate))

    def _given(
        self,
        weight: Tensor,
        is_sparse: bool,
        state: Mapping[str, StateValue],
        group: Mapping[str, Any],
        number: int,
    ) -> dict[str, Any]:
        """Return the state as torch has it before update `number`, with its own step count if it has one."""
        given: dict[str, Any] = dict(state)
        if self.cls is optim.SGD and is_sparse and isinstance(state.get("momentum_buffer"), Tensor):
            # torch keeps the buffer of sparse gradients sparse, and cannot add a dense buffer to it.
            given["momentum_buffer"] = given["momentum_buffer"].to_sparse(1)
        if self.cls not in UNCOUNTED and (state or (not self.is_foreign and number > 1)):
            step = given.pop(OWN_COUNT, None)
            # torch's own classes count in `hyper['step']`; foreign ones have stored their count in the state.
            if step is None and self.is_foreign:
                return given  # it has no count
            if step is None and self.cls is optim.SparseAdam:
                step = number - 1
            elif step is None:
                on_device = group.get("fused") or group.get("capturable")
                device = weight.device if on_device else "cpu"
                step = torch.scalar_tensor(number - 1, device=device, dtype=optimizer_count_dtype())
            given["step"] = step
        if given and not self.is_foreign and self.cls is not optim.SGD:
            # torch would raise midway in an update if an option is switched on during training.
            for name in [
                name for name, option in _SWITCHED.items() if group.get(option) and name not in given
            ]:
                given[name] = torch.zeros_like(weight)
        return given

    def _check_nothing_shared(self, kernel: optim.Optimizer, group: Mapping[str, Any]) -> None:
        """Raise OptimizerError if a foreign class stores anything outside of parameters' state."""
        former = {**self._template.__dict__, "param_groups": kernel.param_groups, "state": kernel.state}
        changed = [
            *(
                f"attribute {name!r}"
                for name, v in kernel.__dict__.items()
                if _is_torch_entry_replaced(v, former.get(name))
            ),
            *(
                f"group entry {name!r}"
                for name, v in kernel.param_groups[0].items()
                if _is_torch_entry_replaced(v, group.get(name))
            ),
            *(f"state {name!r}" for name in kernel.state),
        ]
        if changed:
            raise OptimizerError(
                f"{self.registered_name} changes its {', '.join(changed)}, which all parameters share; a store updates "
                "each key on its own, so it can only run optimizers that keep everything in the state of a parameter; "
                "give the Trainer update_on_kvstore=False, which updates all parameters together"
            )

    def _group(self, weight: Tensor, is_sparse: bool, hyper: Hyper) -> dict[str, Any]:
        group = {key: hyper.get(key, value) for key, value in self._template.param_groups[0].items()}
        if self.is_foreign:
            group |= {key: value for key, value in hyper.items() if key not in _OF_UPDATE}
            group = self.with_tensors(group)
        group["params"] = [weight]
        # torch's fused and foreach kernels do not take sparse gradients.
        if is_sparse:
            group |= {key: False for key in ("fused", "foreach") if key in group}
            return group
        if weight.device.type != "cpu":
            return group
        if "capturable" in group:
            group["capturable"] = False  # torch refuses it on a CPU
        # Prefer the fused kernel unless the user chose otherwise. It only takes flags that are bools.
        if self.cls in _FUSED_ON_CPU and group["fused"] is not False and not group["foreach"]:
            group["fused"], group["foreach"] = True, False
            group |= {name: bool(group[name]) for name in _FLAGS if name in group}
        return group

    def instance_of(self, params: list[Any]) -> optim.Optimizer:
        """Construct the optimizer over parameters or groups. Raises ConfigurationError if the class refuses them."""
        try:
            return _construct_torch_optimizer(self.cls, params, self._options)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            given = ", ".join(f"{key}={value!r}" for key, value in self._options.items())
            takes = ", ".join(_torch_signature_defaults(self.cls) or self._options)
            raise ConfigurationError(
                f"{self.registered_name} refused its options ({given}): {error}; its options are {takes}"
            ) from error

    def _valid_options(self) -> dict[str, Any]:
        return _torch_signature_defaults(self.cls) or {}


def torch_name(cls: TorchClass) -> str:
    return f"torch:{cls.__name__}"


def is_torchs_own(cls: TorchClass) -> bool:
    """Return whether `cls` is one of torch's own classes that we know, not foreign or a subclass."""
    return cls in ELEMENTWISE or cls in WHOLE


def check_torch_class_supported(cls: TorchClass) -> None:
    """Raise ConfigurationError for a class that cannot update one parameter at a time: LBFGS."""
    if issubclass(cls, optim.LBFGS):
        raise ConfigurationError(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a store, because it needs dot products over the "
            "whole model and evaluates the loss again; use update_on_kvstore=False and step(closure), or one of "
            f"{', '.join(known.__name__ for known in ELEMENTWISE + WHOLE)}"
        )


def _is_torch_entry_replaced(value: Any, former: Any, by_value: bool = False) -> bool:
    """Return whether an entry was replaced by another value; tensors by identity, or by contents if `by_value`."""
    if value is former:
        return False
    if isinstance(value, Tensor) and isinstance(former, Tensor):
        is_like = (value.shape, value.dtype, value.device) == (former.shape, former.dtype, former.device)
        return not (by_value and is_like and torch.equal(value, former))
    if isinstance(value, Mapping) and isinstance(former, Mapping):
        return value.keys() != former.keys() or any(
            _is_torch_entry_replaced(value[n], former[n], by_value) for n in value
        )
    if isinstance(value, list | tuple) and type(value) is type(former):
        return len(value) != len(former) or any(
            map(_is_torch_entry_replaced, value, former, [by_value] * len(value))
        )
    try:
        return bool(value != former)
    except Exception:  # arrays have no single truth value, and comparing unknown objects may raise anything
        return True


def _torch_group_of(instance: optim.Optimizer) -> dict[str, Any]:
    return {
        key: _read_torch_number(value) for key, value in instance.param_groups[0].items() if key != "params"
    }


def _torch_tensor_options(instance: optim.Optimizer) -> dict[str, Tensor]:
    """Return the options of the first group that are one-element tensors, such as torchao's learning rate."""
    group = instance.param_groups[0]
    return {
        name: value.detach().clone()
        for name, value in group.items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def _read_torch_number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_read_torch_number(item) for item in value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ConfigurationError(f"an option of a torch optimizer must be one number, got {value!r:.80}")
    is_numpys = hasattr(value, "item") and not getattr(value, "shape", ())
    return value.item() if is_numpys or isinstance(value, Tensor) else value


def _construct_torch_optimizer(
    cls: TorchClass, params: list[Any], options: Mapping[str, Any]
) -> optim.Optimizer:
    if "params" in inspect.signature(cls).parameters:
        return cls(params=params, **options)
    return cls(params, **options)


def is_plain_torch_option(value: Any) -> bool:
    """Return whether a group's entry can be sent: a number, a text, None, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(is_plain_torch_option, value))
    return value is None or isinstance(value, bool | int | float | str)


def _torch_signature_defaults(cls: TorchClass) -> dict[str, Any] | None:
    """Return a torch class's options and defaults from its constructor; None if that takes any."""
    parameters = list(inspect.signature(cls).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    names = [p.name for p in parameters]
    own = "params" if "params" in names else names[0] if names else ""
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name != own}


def _recover_torch_options(instance: optim.Optimizer, found: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the constructor's arguments, found in groups and attributes; and why those are not the ones, if so."""
    cls, kept = type(instance), {**vars(instance), **found}
    accepted = _torch_signature_defaults(cls)
    options = {name: kept[name] for name in (found if accepted is None else accepted) if name in kept}
    try:
        built = _construct_torch_optimizer(cls, [torch.zeros(1, 1, device="cpu")], options)
    except Exception as error:
        return (
            options,
            f"its constructor takes more than its groups contain ({type(error).__name__}: {error})",
        )
    # Attributes of every torch optimizer do not count; all others must be equal.
    torchs = {*vars(optim.SGD([torch.zeros(1, device="cpu")])), "step", "_opt_called"}
    unlike = [
        name
        for name, value in vars(instance).items()
        if name not in torchs
        if type(vars(built).get(name)) is not type(value)
        or _is_torch_entry_replaced(value, vars(built)[name], by_value=True)
    ]
    own = built.param_groups[0]
    unlike += [
        n for n, v in found.items() if is_plain_torch_option(v) and _is_torch_entry_replaced(own.get(n, v), v)
    ]
    if unlike:
        return options, f"one built from what its groups contain differs in {', '.join(map(repr, unlike))}"
    return options, ""
