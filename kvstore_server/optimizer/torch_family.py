"""torch.optim's classes, and foreign ones like them, as optimizers of a store.

A torch optimizer serves as the kernel: it is given one flat run of elements, or one whole key, as its only
parameter with the state of it, and asked for one step. So every option, and torch's own first step, behave as in
torch. A class that is not known to be elementwise gets whole keys, which is right for every class that treats
its parameters one by one.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from kvstore_server.errors import ConfigurationError, OptimizerError
from kvstore_server.optimizer.base import Optimizer, StateValue, canonical_options

TorchClass = type[torch.optim.Optimizer]

ELEMENTWISE: tuple[TorchClass, ...] = (
    SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD,
)  # fmt: skip
WHOLE: tuple[TorchClass, ...] = (Adafactor, Muon, SparseAdam)
"""torch's classes that need whole keys; SparseAdam takes sparse gradients only."""
_SPARSE_CAPABLE = (SGD, Adagrad, SparseAdam)
_FUSED_ON_CPU = (SGD, Adam, AdamW, Adagrad)


class TorchOptimizer(Optimizer):
    """One torch.optim class, with its options; `hyper` is its parameter group.

    Args:
        cls: the class.
        declared: whether a user declared by `register` that the class, which we do not know, is elementwise.
        options: the class's own options, plus `rescale_grad` and `multi_precision`.

    Raises:
        ConfigurationError: the class cannot update one parameter at a time, or it refuses an option.
    """

    def __init__(self, cls: TorchClass, declared: bool = False, /, **options: Any) -> None:
        check_supported(cls)
        own = is_torchs_own(cls)
        self.elementwise = declared or cls in ELEMENTWISE
        self.cls = cls
        self.may_raise = not own or cls is SparseAdam
        self.verified = cls in ELEMENTWISE
        self._own = own
        self._fitting: set[tuple[int, ...]] = set()
        self._take_common(options)
        self._options = canonical_options(options, self._valid_options(), self.registered_name)
        if self._options.get("differentiable"):
            raise ConfigurationError(
                f"{self.registered_name}: differentiable=True needs autograd through the update, which a "
                "store does not record; leave it out"
            )
        self._template = self._build(torch.zeros(1 if self.elementwise else (1, 1)))
        self.hyper = _group_of(self._template)
        # torch wraps step in profiling and in the user's hooks, meant for the user's own optimizers.
        self._step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(cls.step) if own else cls.step

    @classmethod
    def from_instance(cls, instance: torch.optim.Optimizer, declared: bool = False) -> TorchOptimizer:
        """Take over the class and options of a torch optimizer; of its one group, else its defaults."""
        groups = instance.param_groups
        found = (
            _group_of(instance) if len(groups) == 1 else {k: _number(v) for k, v in instance.defaults.items()}
        )
        accepted = _signature_defaults(type(instance))
        options = {key: value for key, value in found.items() if key in accepted}
        return cls(type(instance), declared, **options)

    @property
    def registered_name(self) -> str:
        return torch_name(self.cls)

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        """Return what the class creates in its constructor (Adagrad's sum); most create theirs in a step."""
        return {key: v for key, v in self._build(weight).state.get(weight, {}).items() if key != "step"}

    def takes_sparse(self, hyper: Mapping[str, Any]) -> bool:
        """Whether torch's class takes sparse gradients, which SGD and Adagrad do without weight decay."""
        return self.cls in _SPARSE_CAPABLE and not hyper.get("weight_decay")

    def check_key(self, key: str, shape: Sequence[int], hyper: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if the class refuses a parameter of that shape, as Muon does all but matrices."""
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

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Let torch make one step on the run or the key; see `Optimizer.update`. `grad` may be sparse."""
        if self.cls is SparseAdam and not grad.is_sparse:
            raise ConfigurationError(
                f"torch:SparseAdam takes sparse gradients only, and that of {hyper.get('key', 'a key')!r} is dense; "
                "use torch:Adam for it"
            )
        group = self._group(weight, grad, hyper)
        kernel = self.cls.__new__(self.cls)
        kernel.__dict__.update(self._template.__dict__)
        kernel.param_groups = [dict(group)]
        kernel.state = defaultdict(dict, {weight: self._given(weight, grad, state, group, hyper["step"])})
        weight.grad = grad
        try:
            # Adagrad makes sparse tensors without saying whether to check them, of which torch warns; ours are valid.
            checks: Any = torch.sparse.check_sparse_tensor_invariants
            with checks(False) if grad.is_sparse else nullcontext():
                self._step(kernel)
        finally:
            weight.grad = None
        result = kernel.state.pop(weight, {})
        if not self._own:
            self._check_nothing_shared(kernel, group)
        step = result.pop("step", None)
        state.clear()
        state.update(
            {k: v.to_dense() if isinstance(v, Tensor) and v.is_sparse else v for k, v in result.items()}
        )
        if step is not None and not self._own:
            # A foreign class may count in its own way; for torch's own it is hyper['step'].
            state["torch_step"] = step

    def _given(
        self,
        weight: Tensor,
        grad: Tensor,
        state: Mapping[str, StateValue],
        group: Mapping[str, Any],
        number: int,
    ) -> dict[str, Any]:
        """The state as torch keeps it before update `number`: with its own step count, where it has any state."""
        given: dict[str, Any] = dict(state)
        if self.cls is SGD and grad.is_sparse and isinstance(state.get("momentum_buffer"), Tensor):
            # torch keeps the buffer of sparse gradients sparse, and cannot add a dense one to them.
            given["momentum_buffer"] = given["momentum_buffer"].to_sparse(1)
        if state or (self._own and number > 1):
            step = given.pop("torch_step", None)
            if step is None and self.cls is SparseAdam:
                step = number - 1
            elif step is None:
                on_device = group.get("fused") or group.get("capturable")
                step = torch.scalar_tensor(number - 1, device=weight.device if on_device else "cpu")
            given["step"] = step
        return given

    def _check_nothing_shared(self, kernel: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        """Raise OptimizerError if a foreign class keeps anything elsewhere than in the state of its parameter."""
        former = {**self._template.__dict__, "param_groups": kernel.param_groups, "state": kernel.state}
        changed = [
            *(f"attribute {name!r}" for name, v in kernel.__dict__.items() if _differs(v, former.get(name))),
            *(
                f"group entry {name!r}"
                for name, v in kernel.param_groups[0].items()
                if _differs(v, group.get(name))
            ),
            *(f"state {name!r}" for name in kernel.state),
        ]
        if changed:
            raise OptimizerError(
                f"{self.registered_name} changes its {', '.join(changed)}, which all parameters share; a store updates "
                "each key on its own, so it runs only optimizers that keep everything in the state of a parameter"
            )

    def _group(self, weight: Tensor, grad: Tensor, hyper: Mapping[str, Any]) -> dict[str, Any]:
        group = {key: hyper.get(key, value) for key, value in self._template.param_groups[0].items()}
        group["params"] = [weight]
        if grad.is_sparse:
            group |= {key: False for key in ("fused", "foreach") if key in group}
            return group
        if weight.device.type != "cpu":
            return group
        if "capturable" in group:
            group["capturable"] = False  # nothing is captured on a CPU, where torch refuses it
        if self.cls in _FUSED_ON_CPU and group["fused"] is not False and not group["foreach"]:
            group["fused"], group["foreach"] = True, False
        return group

    def _build(self, weight: Tensor) -> torch.optim.Optimizer:
        try:
            return self.cls([weight], **self._options)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            given = ", ".join(f"{key}={value!r}" for key, value in self._options.items())
            raise ConfigurationError(
                f"{self.registered_name} refused its options ({given}): {error}; its options are "
                f"{', '.join(self._valid_options())}"
            ) from error

    def _valid_options(self) -> dict[str, Any]:
        return _signature_defaults(self.cls)


def torch_name(cls: TorchClass) -> str:
    """The name under which a torch class is known to a store."""
    return f"torch:{cls.__name__}"


def is_torchs_own(cls: TorchClass) -> bool:
    """Whether `cls` is a class of torch's that we know, not a foreign one or a subclass."""
    return cls in ELEMENTWISE or cls in WHOLE


def check_supported(cls: TorchClass) -> None:
    """Raise ConfigurationError for a class that cannot update one parameter at a time: LBFGS."""
    if issubclass(cls, LBFGS):
        raise ConfigurationError(
            f"{cls.__module__}.{cls.__qualname__} cannot run on a store, because it needs scalar products over the "
            "whole model and evaluates the loss again; use one of "
            f"{', '.join(known.__name__ for known in ELEMENTWISE + WHOLE)}"
        )


def _differs(value: Any, former: Any) -> bool:
    """Whether an entry was replaced by another value; tensors count as other ones by identity."""
    return value is not former and (isinstance(value, Tensor) or bool(value != former))


def _group_of(instance: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: _number(value) for key, value in instance.param_groups[0].items() if key != "params"}


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(item) for item in value)
    return value.item() if isinstance(value, Tensor) else value


def _signature_defaults(cls: TorchClass) -> dict[str, Any]:
    """The options of a torch class with their defaults, from its constructor."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
