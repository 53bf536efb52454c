"""Makes replicas of a model: copies of one, or one built for each device, which must be alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from kvtrainer.errors import ConfigurationError

Device = torch.device | str | int


def build(module: Module | Callable[[], Module], devices: Sequence[torch.device]) -> list[Module]:
    """One module on each device. A given module is the first of them, and the others are its copies.

    Raises:
        ConfigurationError: it is neither a module nor a function that builds one; it has no shapes yet; or replicas
            that were built have different parameters or buffers.
    """
    if isinstance(module, Module):
        built = [module, *(copy.deepcopy(module) for _ in devices[1:])]
    elif callable(module):
        built = [_built(module, device) for device in devices]
    else:
        raise ConfigurationError(
            f"a DataParallel needs a Module, or a function that builds one, got {type(module).__name__}"
        )
    if any(is_lazy(tensor) for replica in built for tensor in replica.parameters()):
        raise ConfigurationError(
            "a DataParallel needs a module whose parameters have shapes; run a forward pass through it first"
        )
    for at, replica in enumerate(built[1:], 1):
        _check_alike(built[0], replica, f"replica {at} on {devices[at]}")
    if len({id(one) for replica in built for one in replica.parameters()}) < sum(
        len(list(replica.parameters())) for replica in built
    ):
        raise ConfigurationError("the function gave two devices the same parameters; it must build new ones")
    return [replica.to(device) for replica, device in zip(built, devices, strict=True)]


def tensors_of(module: Module) -> Iterator[Tensor]:
    """Its parameters and buffers, in order."""
    yield from module.parameters()
    yield from module.buffers()


def check_devices(devices: Sequence[Device], target: int) -> list[torch.device]:
    """The devices, CUDA's with their numbers.

    Raises:
        ConfigurationError: there is none, or none at position `target`.
    """
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence) or not devices:
        raise ConfigurationError(f"devices must be a list of at least one device, got {devices!r}")
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < len(devices):
        raise ConfigurationError(f"the target must be a position in {len(devices)} devices, got {target!r}")
    found = []
    for given in devices:
        device = torch.device(given)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError(f"device {given!r} cannot be used: torch finds no CUDA device here")
        is_current = device.type == "cuda" and device.index is None
        found.append(torch.device("cuda", torch.cuda.current_device()) if is_current else device)
    return found


def default_devices(devices: Sequence[Device] | None, num_gpus: int | None) -> Sequence[Device]:
    """The devices that are meant by a list, by a number of CUDA devices, or by neither. Raises ConfigurationError."""
    if devices is not None and num_gpus is not None:
        raise ConfigurationError(f"give devices or num_gpus, not both; got {devices!r} and {num_gpus!r}")
    if devices is not None:
        return devices
    there = torch.cuda.device_count()
    if num_gpus is None:
        return [torch.device("cuda", at) for at in range(there)] or [torch.device("cpu")]
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 1 <= num_gpus <= there:
        raise ConfigurationError(
            f"num_gpus must be between 1 and the {there} CUDA devices that torch finds, got {num_gpus!r}; on a machine "
            "without them give devices=['cpu', 'cpu'] or the like"
        )
    return [torch.device("cuda", at) for at in range(num_gpus)]


def _built(function: Callable[[], Module], device: torch.device) -> Module:
    with torch.device(device):
        built = function()
    if not isinstance(built, Module):
        raise ConfigurationError(
            f"the function that builds the model returned {type(built).__name__}, not a Module"
        )
    return built


def _check_alike(first: Module, other: Module, what: str) -> None:
    for kind, lists in (
        ("parameters", [list(one.named_parameters()) for one in (first, other)]),
        ("buffers", [list(one.named_buffers()) for one in (first, other)]),
    ):
        forms = [{name: (tensor.dtype, list(tensor.shape)) for name, tensor in rows} for rows in lists]
        if forms[0] == forms[1] and list(forms[0]) == list(forms[1]):
            continue
        names = dict.fromkeys([*forms[0], *forms[1]])
        differing = [name for name in names if forms[0].get(name) != forms[1].get(name)] or list(names)
        raise ConfigurationError(
            f"{what} has {len(forms[1])} {kind} and replica 0 has {len(forms[0])}; they must be the same in the same "
            f"order, but these differ: {', '.join(differing[:10])}"
        )
