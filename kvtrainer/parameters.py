"""What a Trainer trains: parameters and their names, out of any of the forms in which they are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedTensorMixin

from kvtrainer.errors import ConfigurationError

Named = list[tuple[str | None, Tensor]]


def collect(params: Any) -> list[dict[str, Any]]:
    """Bring parameters into torch's form: a list of groups with named parameters and options.

    Takes a Module, a dict of parameters (in sorted order of its keys), `named_parameters()`, a list of
    parameters, or a list of torch parameter groups whose "params" is any of those. A parameter that appears more
    than once counts once, where it appears first.

    Raises:
        ConfigurationError: anything else, nothing at all, or a name that stands for two parameters.
    """
    groups = _groups(params)
    seen: set[int] = set()
    names: dict[str, int] = {}
    for group in groups:
        kept = []
        for name, parameter in group["params"]:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            _check(name, parameter)
            label = name if name is not None else str(len(seen) - 1)
            if label in names:
                raise ConfigurationError(f"two parameters are called {label!r}; give each a name of its own")
            names[label] = id(parameter)
            kept.append((label, parameter))
        group["params"] = kept
    if not seen:
        raise ConfigurationError("there are no parameters to train; got an empty list")
    return groups


def _groups(params: Any) -> list[dict[str, Any]]:
    if isinstance(params, Tensor):
        raise ConfigurationError("parameters must come in a list or a dict; got a single tensor, put it in a list")
    if isinstance(params, Mapping | Module):
        return [{"params": _named(params)}]
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise ConfigurationError(_expected(params))
    items = list(params)
    if items and all(isinstance(item, dict) for item in items):
        return [_group(item) for item in items]
    return [{"params": _named(items)}]


def _group(given: dict[str, Any]) -> dict[str, Any]:
    if "params" not in given:
        raise ConfigurationError(f"a parameter group needs 'params'; got only {', '.join(map(str, given)) or 'nothing'}")
    inner = given["params"]
    return {**given, "params": _named([inner] if isinstance(inner, Tensor) else inner)}


def _named(params: Any) -> Named:
    if isinstance(params, Module):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return [(str(key), params[key]) for key in sorted(params, key=str)]
    if not isinstance(params, Iterable):
        raise ConfigurationError(_expected(params))
    named: Named = []
    for item in params:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            named.append(item)
        else:
            named.append((None, item))
    return named


def _check(name: str | None, parameter: Any) -> None:
    what = "a parameter" if name is None else f"{name!r}"
    if not isinstance(parameter, Tensor):
        raise ConfigurationError(f"{_expected(parameter)} for {what}")
    if isinstance(parameter, UninitializedTensorMixin):
        raise ConfigurationError(
            f"{what} has no shape yet (it belongs to a lazy module); run one forward pass before building the Trainer"
        )
    if not parameter.is_leaf:
        raise ConfigurationError(f"{what} is the result of a computation; only leaf tensors can be trained")


def _expected(got: Any) -> str:
    return f"expected a Module, or a list or dict of parameters, got {type(got).__name__}"
