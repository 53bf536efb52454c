"""One model on several devices of this process: replicas, their losses, and which one is saved and evaluated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.parallel.build import Device, build, check_devices, default_devices, tensors_of
from kvtrainer.parallel.calls import call_all, call_with
from kvtrainer.parallel.losses import ReplicaLosses, total_of
from kvtrainer.parallel.policy import Membership, ReplicaPolicy, enter
from kvtrainer.parallel.reducers import AUTO, check_reducer, make_reducer
from kvtrainer.parallel.scatter import PerReplica, scatter, to_device

MODES = ("train", "forward", "test")


class DataParallel(Module):
    """A model that is trained on several devices at once. Given to a Trainer, parameter i of all replicas is one.

        model = kvtrainer.DataParallel(net, ["cuda:0", "cuda:1"])
        trainer = kvtrainer.Trainer(model, "sgd", {"learning_rate": 0.1})
        losses = model.forward_losses((x, y), lambda replica, part: loss_fn(replica(part[0]), part[1]))
        trainer.update_params(losses)

    Every replica normalises with, and keeps, its own running statistics; those of replica 0 are saved. Parameters are
    called as in the model itself, without a prefix, by `named_parameters`, `state_dict` and the Trainer.

    Args:
        module: the model, which becomes replica 0 and of which the others are copies; or a function without arguments
            that builds one, called once for each device. Replica 0's weights count.
        devices: of the replicas, in order. One may occur several times.
        target: position in `devices` of the replica that evaluates.
        mode: "train"; or "forward" and "test", which build only the target's replica and compute no gradients, "test"
            in evaluation mode.
        loss_scale_by_replicas: whether each replica's loss is multiplied by its share of the batch, 1/n where the parts
            are equally long, so that the sum of the gradients is that of the mean loss, and `trainer.step()` divides
            by the number of workers alone. Without, the sum is one of sums.
        reducer: how the Trainer sums gradients over replicas; as of the kvstore 'device'.
        batch_axis: along which batches are split.

    Raises:
        ConfigurationError: an argument is wrong, or replicas that were built differ.
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
        places = check_devices(devices, target)
        if mode not in MODES:
            raise ConfigurationError(f"the mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
        self.mode = mode
        self.devices = places if mode == "train" else [places[target]]
        self.target = target if mode == "train" else 0
        if check_reducer(reducer) != AUTO and len(self.devices) == 1:
            raise ConfigurationError(
                f"reducer={reducer!r} would have no effect: it sums replicas, and there is one only; leave it out"
            )
        make_reducer(reducer, self.devices)
        self._policy = ReplicaPolicy(reducer, loss_scale_by_replicas, may_lack=True, must_agree=True)
        self.batch_axis = batch_axis
        built = build(module, self.devices)
        # Outside of torch's registry of submodules: parameters and statistics are those of replica 0.
        self.__dict__["replicas"] = tuple(built)
        self.module = built[0]
        self.broadcast()
        self._enter()
        if mode == "test":
            self.eval()

    replicas: tuple[Module, ...]

    @property
    def loss_scale(self) -> float:
        """What each replica's loss is multiplied by where all have equally long parts."""
        return 1.0 / len(self.replicas) if self._policy.are_scaled else 1.0

    @property
    def params(self) -> list[list[Parameter]]:
        """For every parameter its replicas, in the order of devices."""
        return [replicas for _, replicas in self.named_replicas()]

    def named_replicas(self) -> Iterator[tuple[str, list[Parameter]]]:
        """The name of every parameter, and its replicas in the order of devices."""
        for rows in zip(*(replica.named_parameters() for replica in self.replicas), strict=True):
            yield rows[0][0], [parameter for _, parameter in rows]

    def with_replicas(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups for a Trainer out of groups of replica 0's parameters: each becomes a list of replicas."""
        rows = {id(replicas[0]): (name, replicas) for name, replicas in self.named_replicas()}
        found = []
        for group in groups:
            if any(id(p) not in rows for p in group["params"]):
                raise ConfigurationError("a group has a parameter that is none of replica 0's")
            options = {name: value for name, value in group.items() if name != "param_names"}
            found.append({**options, "params": [rows[id(p)] for p in group["params"]]})
        return found

    def scatter(self, batch: Any) -> PerReplica:
        """A part of the batch for each replica, on its device; see `kvtrainer.parallel.scatter.scatter`."""
        return scatter(batch, self.devices, self.batch_axis)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """While training: the outputs of the replicas that got a part of the batch, as a list.

        In evaluation mode, and where no gradients are computed: the output of the target's replica for all of it.
        """
        if self.mode != "train" or not self.training:
            args, kwargs = to_device((args, kwargs), self.devices[self.target])
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.mode == "train"):
                return self.replicas[self.target](*args, **kwargs)
        parts = self.scatter((args, kwargs))
        return self._call(parts, lambda replica, part: replica(*part[0], **part[1]))

    def forward_losses(
        self, batch: Any, loss_fn: Callable[[Module, Any], Any] | None = None
    ) -> ReplicaLosses:
        """The loss of every replica for its part of the batch, times its share.

        Args:
            batch: is scattered; a PerReplica has a part for each replica already, and then the shares are equal.
            loss_fn: called with a replica and its part; returns a scalar, or a dict or list of scalars, which are
                added. None: the replica itself, called with what is in the part.

        Raises:
            ConfigurationError: this was built without gradients; the batch cannot be split; or there is no loss.
        """
        if self.mode != "train":
            raise ConfigurationError(
                f"this DataParallel was built with mode={self.mode!r}, without gradients; build one with mode='train'"
            )
        parts = batch if isinstance(batch, PerReplica) else self.scatter(batch)
        if len(parts) != len(self.replicas) or all(part is None for part in parts):
            raise ConfigurationError(
                f"a PerReplica needs a part, or None, for each of {len(self.replicas)} replicas, and one part at "
                f"least; got {len(parts)}"
            )
        here = [at for at, part in enumerate(parts) if part is not None]
        outputs = self._call(parts, loss_fn or call_with)
        losses = [total_of(output, at) for at, output in zip(here, outputs, strict=True)]
        if self._policy.are_scaled:
            shares = parts.shares or [1 / len(here)] * len(parts)
            losses = [loss * shares[at] for at, loss in zip(here, losses, strict=True)]
        return ReplicaLosses(losses, outputs)

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give all replicas the parameters and statistics of replica 0; needed after writing to those."""
        for replica in self.replicas[1:]:
            for source, target in zip(tensors_of(self.module), tensors_of(replica), strict=True):
                target.copy_(source)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Replica 0's, under the names in the model itself."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into all replicas, as torch's. A Trainer whose weights are in a store then needs `set_data()`."""
        if assign:
            raise ConfigurationError(
                "assign=True would give replica 0 new parameters, which no Trainer knows; leave it out"
            )
        try:
            return self.module.load_state_dict(state_dict, strict=strict)
        finally:
            self.broadcast()  # also of a state that fits in parts only, because torch has loaded those

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Replica 0's."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Replica 0's."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> DataParallel:
        """As torch's, for all replicas."""
        if mode and self.mode == "test":
            raise ConfigurationError(
                "this DataParallel was built with mode='test'; build one with mode='train'"
            )
        self.training = mode
        for replica in self.replicas:
            replica.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> DataParallel:
        """As torch's, for all replicas."""
        for replica in self.replicas:
            replica.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for all replicas."""
        for replica in self.replicas:
            replica.zero_grad(set_to_none)

    def apply(self, fn: Callable[[Module], None]) -> DataParallel:
        """As torch's: initialises replica 0, which the others then equal."""
        self.module.apply(fn)
        self.broadcast()
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DataParallel:
        before = [p.device for replica in self.replicas for p in tensors_of(replica)]
        trial = [fn(torch.empty(0, device=device)).device for device in dict.fromkeys(before)]
        if trial != list(dict.fromkeys(before)):
            raise ConfigurationError(
                f"the replicas of a DataParallel stay on {', '.join(map(str, self.devices))}; name other devices when "
                "building it"
            )
        for replica in self.replicas:
            replica._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._enter()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enter()

    def _call(self, parts: PerReplica, call: Callable[[Module, Any], Any]) -> list[Any]:
        rows = zip(self.replicas, parts, self.devices, strict=True)
        given = [(replica, part, device) for replica, part, device in rows if part is not None]
        return call_all(call, given)

    def _enter(self) -> None:
        """Let the parameters say where they belong."""
        if len(self.replicas) > 1:
            membership = Membership(self, self._policy)
            for replica in self.replicas:
                for parameter in replica.parameters():
                    enter(parameter, membership)


_SAID = ("module", "devices", "target", "mode")
"""The arguments of a DataParallel that `build_data_parallel_model` has under names of its own."""


def build_data_parallel_model(
    model: Module | Callable[[], Module],
    devices: Sequence[Device] | None = None,
    num_gpus: int | None = None,
    target_gpu_id: int = 0,
    only_build_forward_pass: bool = False,
    train: bool = True,
    **options: Any,
) -> DataParallel:
    """A DataParallel as Detectron builds its models, on devices or on the first `num_gpus` CUDA devices.

    Args:
        model: or a function that builds it for one device.
        devices: by default those of `num_gpus`; without that all CUDA devices, or else the CPU.
        target_gpu_id: position in the list of devices of the one that alone is used where there is no training.
        only_build_forward_pass: build one replica that computes no gradients.
        train: otherwise build one replica in evaluation mode.
        **options: as of DataParallel.

    Raises:
        ConfigurationError: as of DataParallel; or there are fewer CUDA devices.
        ArgumentTypeError: nothing takes an option.
    """
    own = inspect.signature(build_data_parallel_model).parameters
    known = [name for name in own if name != "options"]
    known += [name for name in inspect.signature(DataParallel).parameters if name not in (*_SAID, *known)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ArgumentTypeError(
            f"build_data_parallel_model has no {', '.join(map(repr, unknown))}; it takes {', '.join(known)}"
            f"{did_you_mean(unknown, known)}"
        )
    mode = "forward" if only_build_forward_pass else "train" if train else "test"
    return DataParallel(model, default_devices(devices, num_gpus), target=target_gpu_id, mode=mode, **options)
