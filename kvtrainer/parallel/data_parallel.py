"""`DataParallel`: one model on several devices of this process, trained through one Trainer.

Unlike torch.nn.DataParallel, the replicas persist: each device keeps a full copy of the model. `forward_losses` splits
a batch, runs every replica on its part, and weights each loss with its part's share, so that the sum of the gradients
is that of the mean loss. The Trainer then sums the gradients over replicas (`replicas.py`), updates once, and copies
the weights to all of them.

Invariants:

- Parameters and buffers have the names of the plain model; `state_dict`, `named_parameters` and `parameters` are those
  of replica 0. The replicas are kept outside of torch's registry of submodules for that reason.
- Every parameter of a replica knows its DataParallel (`ReplicaInfo`), so a Trainer notices if it gets only one replica.
- Replicas stay on their devices; `to()` may change the dtype only.
- Running statistics differ between replicas; those of replica 0 are saved.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import parallel_apply
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.parallel.batch import (
    PerReplica,
    ReplicaLosses,
    move_batch_to_device,
    scatter_batch,
    total_loss_of_batch,
)
from kvtrainer.parallel.replicas import (
    AUTO,
    MEMBERSHIP,
    ReplicaInfo,
    ReplicaPolicy,
    are_distinct_cuda_replicas,
    check_replica_reducer,
    make_replica_reducer,
)

Device = torch.device | str | int


class DataParallel(Module):
    """Trains a model on several devices at once. A Trainer treats parameter i of all replicas as one parameter.

        model = kvtrainer.DataParallel(net, ["cuda:0", "cuda:1"])
        trainer = kvtrainer.Trainer(model, "sgd", {"learning_rate": 0.1})
        losses = model.forward_losses((x, y), lambda replica, part: loss_fn(replica(part[0]), part[1]))
        trainer.update_params(losses)

    Every replica normalises with its own running statistics; those of replica 0 are saved. `named_parameters`,
    `state_dict` and the Trainer use the names of the plain model, without a prefix.

    Args:
        module: The model, which becomes replica 0 and is copied for the others; or a function without arguments that
            builds it, called once per device. All replicas start with the weights of replica 0.
        devices: The devices of the replicas, in order. One may occur several times.
        target: The position in `devices` of the replica used for evaluation.
        mode: "train"; "forward" or "test" build only the target's replica and compute no gradients, "test" in
            evaluation mode.
        loss_scale_by_replicas: Whether each replica's loss is multiplied by its share of the batch (1/n for equal
            parts). The sum of the gradients is then that of the mean loss, and `trainer.step()` divides by the number
            of workers only. Otherwise losses are just summed.
        reducer: How the Trainer sums gradients over replicas; as for the kvstore 'device'.
        batch_axis: The axis along which batches are split.

    Raises:
        ConfigurationError: An argument is wrong, or the replicas that were built differ.
    """

    module: Module
    """Replica 0."""

    def __init__(
        self,
        module: Module | Callable[[], Module],
        devices: Sequence[Device],
        *,
        target: int = 0,
        mode: str = "train",
        loss_scale_by_replicas: bool = True,
        reducer: str = AUTO,
        batch_axis: int = 0,
    ) -> None:
        super().__init__()
        # 1. Check the arguments.
        places = _checked_parallel_devices(devices, target)
        self.mode = check.one_of("the mode", mode, ("train", "forward", "test"))
        self.devices = places if mode == "train" else [places[target]]
        self.target = target if mode == "train" else 0
        if check_replica_reducer(reducer) != AUTO and len(self.devices) == 1:
            raise ConfigurationError(f"reducer={reducer!r} would have no effect on one replica; leave it out")
        make_replica_reducer(reducer, self.devices)
        self._policy = ReplicaPolicy(reducer, loss_scale_by_replicas, may_lack=True, must_agree=True)
        self.batch_axis = batch_axis
        # 2. Build the replicas.
        built = _build_data_parallel_replicas(module, self.devices)
        # Set through __dict__, not as submodules, so that parameters and buffers are those of replica 0 only.
        self.__dict__["replicas"] = tuple(built)
        self.module = built[0]
        # 3. Make them equal, and mark their parameters.
        self.broadcast()
        self._enter()
        if mode == "test":
            self.eval()

    replicas: tuple[Module, ...]

    @property
    def loss_scale(self) -> float:
        """The factor of each replica's loss if all parts are equally long."""
        return 1.0 / len(self.replicas) if self._policy.are_scaled else 1.0

    @property
    def params(self) -> list[list[Parameter]]:
        """For every parameter its replicas, in the order of devices."""
        return [replicas for _, replicas in self.named_replicas()]

    def named_replicas(self) -> Iterator[tuple[str, list[Parameter]]]:
        """Yield the name of every parameter, and its replicas in the order of devices."""
        for rows in zip(*(replica.named_parameters() for replica in self.replicas), strict=True):
            yield rows[0][0], [parameter for _, parameter in rows]

    def with_replicas(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Turn groups of replica 0's parameters into groups for a Trainer, with a list of replicas per parameter."""
        rows = {id(replicas[0]): (name, replicas) for name, replicas in self.named_replicas()}
        found = []
        for group in groups:
            if any(id(p) not in rows for p in group["params"]):
                raise ConfigurationError("a group has a parameter that does not belong to replica 0")
            options = {name: value for name, value in group.items() if name != "param_names"}
            found.append({**options, "params": [rows[id(p)] for p in group["params"]]})
        return found

    def scatter(self, batch: Any) -> PerReplica:
        """Split a batch into a part for each replica, on its device; see `kvtrainer.parallel.batch.scatter_batch`."""
        return scatter_batch(batch, self.devices, self.batch_axis)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In training, return the list of outputs of the replicas that got a part of the batch.

        In evaluation mode, or if built without gradients, return the output of the target's replica for the whole
        batch.
        """
        if self.mode != "train" or not self.training:
            args, kwargs = move_batch_to_device((args, kwargs), self.devices[self.target])
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode == "train"):
                return self.replicas[self.target](*args, **kwargs)
        parts = self.scatter((args, kwargs))
        return self._call(parts, lambda replica, part: replica(*part[0], **part[1]))

    def forward_losses(
        self, batch: Any, loss_fn: Callable[[Module, Any], Any] | None = None
    ) -> ReplicaLosses:
        """Compute the loss of every replica for its part of the batch, times its share.

        Args:
            batch: It is scattered. A PerReplica already has a part for each replica; without `shares` they count
                equally.
            loss_fn: Called with a replica and its part; returns a scalar, or a dict or list of scalars to add. By
                default the replica itself is called with its part.

        Raises:
            ConfigurationError: This was built without gradients; the batch cannot be split; or there is no loss.
        """
        if self.mode != "train":
            raise ConfigurationError(
                f"the DataParallel was built with mode={self.mode!r}, without gradients; build one with 'train'"
            )
        # 1. A part for each replica; some may get none.
        parts = batch if isinstance(batch, PerReplica) else self.scatter(batch)
        if len(parts) != len(self.replicas) or all(part is None for part in parts):
            wanted = f"a part, or None, for each of {len(self.replicas)} replicas, and one part at least"
            raise ConfigurationError(f"a PerReplica needs {wanted}; got {len(parts)}")
        # 2. Run the replicas, and weight each loss with its share.
        here = [at for at, part in enumerate(parts) if part is not None]
        outputs = self._call(parts, loss_fn or _call_in_parallel)
        losses = [total_loss_of_batch(output, at) for at, output in zip(here, outputs, strict=True)]
        if self._policy.are_scaled:
            shares = parts.shares or [1 / len(here)] * len(parts)
            losses = [loss * shares[at] for at, loss in zip(here, losses, strict=True)]
        return ReplicaLosses(losses, outputs)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy the parameters and buffers of replica 0 to all replicas; needed after a write to those of replica 0."""
        for replica in self.replicas[1:]:
            for source, target in zip(
                _tensors_of_parallel_module(self.module), _tensors_of_parallel_module(replica), strict=True
            ):
                target.copy_(source)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of replica 0, under the names of the plain model."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into all replicas. If a store has the weights, call the Trainer's `set_data()` afterwards."""
        if assign:
            raise ConfigurationError(
                "assign=True would give replica 0 parameters that no Trainer knows; leave it out"
            )
        try:
            return self.module.load_state_dict(state_dict, strict=strict)
        finally:
            self.broadcast()  # even after an error, since torch has loaded the parts of the state that fit

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yield those of replica 0."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield those of replica 0."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> DataParallel:
        """Set the mode of all replicas."""
        if mode and self.mode == "test":
            raise ConfigurationError("the DataParallel was built with mode='test'; build one with 'train'")
        self.training = mode
        for replica in self.replicas:
            replica.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> DataParallel:
        """Set it for all replicas."""
        for replica in self.replicas:
            replica.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero or drop the gradients of all replicas."""
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def apply(self, fn: Callable[[Module], None]) -> DataParallel:
        """Apply a function to replica 0 as torch does, and copy the result to the others."""
        self.module.apply(fn)
        self.broadcast()
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DataParallel:
        # Try the function on empty tensors first, so that a refused move changes nothing.
        before = [p.device for replica in self.replicas for p in _tensors_of_parallel_module(replica)]
        trial = [fn(torch.empty(0, device=device)).device for device in dict.fromkeys(before)]
        if trial != list(dict.fromkeys(before)):
            raise ConfigurationError(
                f"replicas of a DataParallel stay on {', '.join(map(str, self.devices))}"
            )
        for replica in self.replicas:
            replica._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._enter()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def _call(self, parts: PerReplica, call: Callable[[Module, Any], Any]) -> list[Any]:
        """Call the replicas that have a part: in threads on distinct CUDA devices, otherwise one after another."""
        rows = zip(self.replicas, parts, self.devices, strict=True)
        here = [(replica, part, device) for replica, part, device in rows if part is not None]
        devices = [device for _, _, device in here]
        if len(here) < 2 or not are_distinct_cuda_replicas(devices):
            return [call(replica, part) for replica, part, _ in here]
        is_on, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

        def with_autocast(replica: Module, part: Any) -> Any:
            # parallel_apply's threads inherit whether autocast is enabled, but not its dtype.
            with torch.autocast("cuda", dtype, enabled=is_on):
                return call(replica, part)

        threaded: Any = [partial(with_autocast, replica, part) for replica, part, _ in here]
        return parallel_apply(threaded, [()] * len(here), devices=devices)

    def _enter(self) -> None:
        if len(self.replicas) > 1:
            membership = ReplicaInfo(self, self._policy)
            for replica in self.replicas:
                for parameter in replica.parameters():
                    setattr(parameter, MEMBERSHIP, membership)


def build_data_parallel_model(
    model: Module | Callable[[], Module],
    devices: Sequence[Device] | None = None,
    num_gpus: int | None = None,
    target_gpu_id: int = 0,
    only_build_forward_pass: bool = False,
    train: bool = True,
    **options: Any,
) -> DataParallel:
    """Build a DataParallel as Detectron does, on given devices or on the first CUDA devices.

    Args:
        model: The model, or a function that builds it for one device.
        devices: By default the first `num_gpus` CUDA devices; without that all CUDA devices, or else the CPU.
        target_gpu_id: The position in the list of devices of the only one that is used without training.
        only_build_forward_pass: Build one replica that computes no gradients.
        train: If false, build one replica in evaluation mode.
        **options: Other arguments of DataParallel.

    Raises:
        ConfigurationError: As in DataParallel; or there are fewer CUDA devices.
        ArgumentTypeError: An option does not exist.
    """
    own = [*inspect.signature(build_data_parallel_model).parameters][:-1]
    said = ("module", "devices", "target", "mode")
    more = [name for name in inspect.signature(DataParallel).parameters if name not in said]
    check.known("build_data_parallel_model", options, [*own, *more], error=ArgumentTypeError)
    mode = "forward" if only_build_forward_pass else "train" if train else "test"
    return DataParallel(
        model, _default_parallel_devices(devices, num_gpus), target=target_gpu_id, mode=mode, **options
    )


def _build_data_parallel_replicas(
    module: Module | Callable[[], Module], devices: Sequence[torch.device]
) -> list[Module]:
    """Return a module for each device. A given module becomes the first, and is copied for the others."""
    # 1. Build or copy.
    if isinstance(module, Module):
        built = [module, *(copy.deepcopy(module) for _ in devices[1:])]
    elif callable(module):
        built = []
        for device in devices:
            with torch.device(device):
                built.append(module())
    else:
        built = [module]
    # 2. They must be initialized, of the same architecture, and share no parameters.
    if wrong := [type(one).__name__ for one in built if not isinstance(one, Module)]:
        raise ConfigurationError(
            f"a DataParallel needs a Module or a function that builds one, got {wrong[0]}"
        )
    if any(is_lazy(tensor) for replica in built for tensor in replica.parameters()):
        raise ConfigurationError("a DataParallel needs parameters with shapes; run a forward pass")
    for at, replica in enumerate(built[1:], 1):
        _check_same_parallel_model(built[0], replica, f"replica {at} on {devices[at]}")
    all_of_them = [id(parameter) for replica in built for parameter in replica.parameters()]
    if len(set(all_of_them)) < len(all_of_them):
        raise ConfigurationError("the function gave two devices the same parameters; it must build new ones")
    return [replica.to(device) for replica, device in zip(built, devices, strict=True)]


def _tensors_of_parallel_module(module: Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _checked_parallel_devices(devices: Sequence[Device], target: int) -> list[torch.device]:
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence) or not devices:
        raise ConfigurationError(f"devices must be a list of at least one device, got {devices!r}")
    check.integer(f"the target, a position in {len(devices)} devices,", target, 0, len(devices) - 1)
    found = []
    for given in devices:
        device = torch.device(given)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError(f"device {given!r} cannot be used: torch finds no CUDA device here")
        is_current = device.type == "cuda" and device.index is None
        found.append(torch.device("cuda", torch.cuda.current_device()) if is_current else device)
    return found


def _default_parallel_devices(devices: Sequence[Device] | None, num_gpus: int | None) -> Sequence[Device]:
    if devices is not None and num_gpus is not None:
        raise ConfigurationError(f"give devices or num_gpus, not both; got {devices!r} and {num_gpus!r}")
    if devices is not None:
        return devices
    there = torch.cuda.device_count()
    if num_gpus is None:
        return [torch.device("cuda", at) for at in range(there)] or [torch.device("cpu")]
    if not check.is_integer(num_gpus, 1, there):
        raise ConfigurationError(
            f"num_gpus must be between 1 and the {there} CUDA devices that torch finds, got {num_gpus!r}; or give "
            "devices=['cpu', 'cpu']"
        )
    return [torch.device("cuda", at) for at in range(num_gpus)]


def _check_same_parallel_model(first: Module, other: Module, what: str) -> None:
    for kind, tensors in (("parameters", Module.named_parameters), ("buffers", Module.named_buffers)):
        ours, theirs = (
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors(one)} for one in (first, other)
        )
        if list(ours.items()) == list(theirs.items()):
            continue
        names = dict.fromkeys([*ours, *theirs])
        differing = [name for name in names if ours.get(name) != theirs.get(name)] or list(names)
        counts = f"{what} has {len(theirs)} {kind} and replica 0 has {len(ours)}"
        raise ConfigurationError(f"{counts}; these differ, or their order: {', '.join(differing[:10])}")


def _call_in_parallel(replica: Module, part: Any) -> Any:
    """Call a replica with its part: a tuple or list gives positional arguments, a dict keyword arguments."""
    if isinstance(part, dict):
        return replica(**part)
    return replica(*part) if isinstance(part, tuple | list) else replica(part)
