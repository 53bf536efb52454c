"""torch.optim's elementwise classes as optimizers of flat slices.

A torch optimizer serves as the kernel: it is given one flat run as its only parameter and that run's state,
and asked for one step. So every option, and torch's own first step, behave as in torch.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.base import Optimizer, StateValue, canonical_options

TorchClass = type[torch.optim.Optimizer]

ELEMENTWISE: tuple[TorchClass, ...] = (
    SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop, ASGD,
)  # fmt: skip
_FUSED_ON_CPU = (SGD, Adam, AdamW, Adagrad)
_NOT_ELEMENTWISE = {
    "Adafactor": "it needs the means of whole rows and columns",
    "LBFGS": "it needs scalar products over the whole model and evaluates the loss again",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients only",
}


class TorchOptimizer(Optimizer):
    """One torch.optim class, with its options; `hyper` is its parameter group.

    Args:
        cls: the class; it must be elementwise.
        trusted: False for a class that a user declared elementwise by `register`.
        options: the class's own options, plus `rescale_grad` and `multi_precision`.

    Raises:
        ConfigurationError: the class is not known to be elementwise, or it refuses an option.
    """

    def __init__(self, cls: TorchClass, trusted: bool = True, /, **options: Any) -> None:
        if trusted:
            check_elementwise(cls)
        self.cls = cls
        self.may_raise = not trusted
        self.verified = trusted
        self._take_common(options)
        self._options = canonical_options(options, self._valid_options(), self.registered_name)
        if self._options.get("differentiable"):
            raise ConfigurationError(
                f"{self.registered_name}: differentiable=True needs autograd through the update, which a "
                "store does not record; leave it out"
            )
        self._template = self._build(torch.zeros(1))
        self.hyper = _group_of(self._template)
        # torch wraps step in profiling and in the user's hooks, meant for the user's own optimizers.
        self._step: Callable[[torch.optim.Optimizer], object] = (
            inspect.unwrap(cls.step) if trusted else cls.step
        )

    @classmethod
    def from_instance(cls, instance: torch.optim.Optimizer, trusted: bool = True) -> TorchOptimizer:
        """Take over the class and options of a torch optimizer; of its one group, else its defaults."""
        groups = instance.param_groups
        found = (
            _group_of(instance) if len(groups) == 1 else {k: _number(v) for k, v in instance.defaults.items()}
        )
        accepted = _signature_defaults(type(instance))
        options = {key: value for key, value in found.items() if key in accepted}
        return cls(type(instance), trusted, **options)

    @property
    def registered_name(self) -> str:
        return torch_name(self.cls)

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        """Return what the class creates in its constructor (Adagrad's sum); most create theirs in a step."""
        return {key: v for key, v in self._build(weight).state.get(weight, {}).items() if key != "step"}

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Let torch make one step on the run; see `Optimizer.update`."""
        group = self._group(weight, hyper)
        given: dict[str, Any] = dict(state)
        if state or hyper["step"] > 1:
            given["step"] = given.pop("torch_step", None)
            if given["step"] is None:
                on_device = group.get("fused") or group.get("capturable")
                device = weight.device if on_device else torch.device("cpu")
                given["step"] = torch.scalar_tensor(hyper["step"] - 1, device=device)
        kernel = self.cls.__new__(self.cls)
        kernel.__dict__.update(self._template.__dict__)
        kernel.param_groups = [group]
        kernel.state = defaultdict(dict, {weight: given})
        weight.grad = grad
        self._step(kernel)
        weight.grad = None
        result = kernel.state[weight]
        step = result.pop("step", None)
        state.clear()
        state.update(result)
        if step is not None and not self.verified:
            # A foreign class may count in its own way; for torch's own it is hyper['step'].
            state["torch_step"] = step

    def _group(self, weight: Tensor, hyper: Mapping[str, Any]) -> dict[str, Any]:
        group = {**self._template.defaults, **hyper, "params": [weight]}
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


def check_elementwise(cls: TorchClass) -> None:
    """Raise ConfigurationError unless `cls` is one of torch's own elementwise classes."""
    if cls in ELEMENTWISE:
        return
    valid = ", ".join(known.__name__ for known in ELEMENTWISE)
    if cls.__module__.partition(".")[0] == "torch" and cls.__name__ in _NOT_ELEMENTWISE:
        raise ConfigurationError(
            f"torch.optim.{cls.__name__} cannot run on slices of a model, because "
            f"{_NOT_ELEMENTWISE[cls.__name__]}; use one of {valid}"
        )
    raise ConfigurationError(
        f"{cls.__module__}.{cls.__qualname__} is not known to be elementwise (each element's update needing "
        "only that element's weight, gradient and state); if it is, declare it with "
        f"kvtrainer.optimizer.register({cls.__name__}), else use one of {valid}"
    )


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
