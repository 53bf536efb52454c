"""The Trainer: what a training script builds, and what it may ask of it beside a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.optim
from torch import Tensor
from torch.nn.parameter import is_lazy

from kvstore_server.optimizer import Optimizer, spec_for_store
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.groups import make_groups
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.row_sparse import RowSparseParameter, claimable, is_row_sparse
from kvtrainer.one_thread import by_one_thread
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.parallel.policy import devices_of, policy_of
from kvtrainer.param_rules import ParamReport, rows_of
from kvtrainer.parameters import collect, refuse_ddp, refuse_parameters_of_ddp
from kvtrainer.paramwise import apply_paramwise
from kvtrainer.profiler import Profiler
from kvtrainer.scaling import scaler_of
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.states.saved import SavedStates
from kvtrainer.steps.accumulation import Accumulation
from kvtrainer.steps.extra_states import (
    extra_problems,
    extra_states,
    saved_passes,
    saved_residuals,
    saved_scaler,
    saved_scaler_state,
    saved_schedules,
)
from kvtrainer.steps.loss_pipeline import LossPipeline
from kvtrainer.steps.options import StageOptions
from kvtrainer.sync.binding import BUCKETS
from kvtrainer.sync.select import select_store

__all__ = ["Trainer"]


class Trainer(LossPipeline):
    """Trains parameters with an optimizer over a kvstore; Gluon's Trainer and a torch.optim.Optimizer in one.

    Args:
        params: A Module, a DataParallel, `named_parameters()`, a dict (taken in sorted order of its keys), a list of
            parameters, or torch parameter groups. Shared parameters count once. All workers must give the same. Those
            of lazy modules may get their shapes later, in a forward pass before the first step. In place of a parameter
            there may be a list of its replicas, one for each device, in the same order everywhere.
        optimizer: A name ("sgd", "adam", …: Gluon's numbers), a torch.optim class or instance, "torch:Adam", or
            what `kvtrainer.optimizer.create` returns. A torch instance shares its groups, so schedulers bound to it
            reach the Trainer, and hands its state over at the first use.
        optimizer_params: Options of the optimizer, under Gluon's or torch's names; None beside an instance. With a
            `lr_scheduler` that alone decides the learning rate of all groups.
        kvstore: A name for `kvtrainer.kvstore.create`, a store object, or None. The store is made at the first
            step. For one device of a single process a name without "dist" makes none: the update runs in place.
            "device" and "nccl" sum over the ranks of the torch.distributed group, if there is one.
        compression_params: How gradients are compressed on their way to a store, such as {"type": "2bit",
            "threshold": 0.5}; for "dist_sync" and "device". Without a store it has no effect.
        update_on_kvstore: Whether the optimizer runs in the store: on the servers of "dist_sync", each holding a
            part of the weights and of the optimizer's state. The store's weights then count; see `set_data`. None
            means: where the store can, unless the environment's MXNET_UPDATE_ON_KVSTORE is 0.
        paramwise: Options that depend on the parameter: a dict as MMCV's paramwise_cfg, a list of
            `kvtrainer.Rule`, or a function of the model that returns parameter groups.
        clip_grad: Limits the norm of the reduced gradient, dict(max_norm=35, norm_type=2), or every element of it,
            dict(type="value", clip_value=0.1). It is the gradient of the step: unscaled, divided by the batch size,
            summed over workers and replicas; without synchronous rounds that of every single contribution.
        amp: Mixed precision for `context` and `backward`: "dynamic", a loss scale, or a dict of `dtype`, `loss_scale`
            and the arguments of torch.amp.GradScaler.
        accumulate: How many calls of `backward` make one update; their losses are averaged.
        schedules: What advances with the updates, or with `end_epoch`: ParamSchedules, dicts that describe some,
            torch's learning rate schedulers, or functions that make one for an optimizer.
        detect_anomalous_params: Whether `backward` reports parameters that do not contribute to the loss: True or
            "log" logs them as errors, "raise" raises.
        on_nonfinite: What happens when the loss or the reduced gradient is infinite or not a number: "raise", "skip"
            the step on every worker, or "ignore". None: "skip" where clip_grad or amp look at the gradient anyway.

    The data of the parameters move into flat buffers; move the model to its device and dtype before. While the
    optimizer runs in the store, the weights live there: what the loop writes into a parameter after the first step
    must be published by `set_data`. The next step raises WeightsWrittenError if it was not, also of writes through
    `p.data` or NumPy; of more than 8 MiB those that are small may be found some steps later, or not if they are single.
    Several Trainers may have the same dense parameters. Not thread-safe. As a context manager it closes its store.

    Raises:
        ConfigurationError: an argument is wrong; nothing has been changed then.

        trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
        loss_fn(net(x), y).backward()
        trainer.step(batch_size)
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | type | Optimizer | torch.optim.Optimizer,
        optimizer_params: dict[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        paramwise: Any = None,
        clip_grad: Mapping[str, Any] | None = None,
        amp: Any = None,
        accumulate: int = 1,
        schedules: Sequence[Any] = (),
        detect_anomalous_params: bool | str = False,
        on_nonfinite: str | None = None,
    ) -> None:
        stages = StageOptions(clip_grad, amp, accumulate, schedules, detect_anomalous_params, on_nonfinite)
        options = {} if optimizer_params is None else optimizer_params
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise ArgumentTypeError(
                f"optimizer_params must be a dict of options by name, got {optimizer_params!r:.80}"
            )
        built = create_optimizer(optimizer, **options)
        if kvstore is not None:
            refuse_ddp(params)
        self._param_report: ParamReport | None = None
        if paramwise is not None:
            params, self._param_report = apply_paramwise(params, paramwise, options, built.hyper)
        groups = make_groups(params, built, optimizer)
        parameters = [p for group in groups for p in group["params"]]
        if kvstore is not None:
            refuse_parameters_of_ddp(parameters)
        row_sparse = claimable(groups)
        largest = max([0 if is_lazy(p) else p.numel() for p in parameters])
        selection = select_store(
            kvstore,
            update_on_kvstore,
            compression_params,
            built.aggregate_num,
            largest,
            has_row_sparse=bool(row_sparse),
            devices=devices_of(groups),
            replicas=policy_of(groups),
            is_joint=isinstance(built, TorchOptimizer) and built.is_joint,
        )
        if selection.updates_weights and isinstance(built, TorchOptimizer):
            spec_for_store(built)
        instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        super().__init__(groups, built, instance, selection, stages=stages)
        for name, parameter in row_sparse:
            parameter.claim(self, name)

    @by_one_thread
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for group in collect([param_group]) if self._is_built else ():
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if is_row_sparse(parameter):
                    raise ConfigurationError(
                        f"parameter {name!r} is row-sparse, which decides about the Trainer's store; give it to the "
                        "Trainer's constructor"
                    )
        super().add_param_group(param_group)

    add_param_group.__doc__ = LossPipeline.add_param_group.__doc__

    @classmethod
    def from_config(cls, model: Any, cfg: Mapping[str, Any], **overrides: Any) -> Trainer:
        """Build a Trainer from a configuration in the form of MMCV or mmengine.

        Args:
            model: What is trained; a Module, where the configuration has rules for parameters.
            cfg: Sections `optimizer` (with `paramwise_cfg` and `constructor`), `optimizer_config`, `fp16`, `lr_config`,
                `momentum_config`, `custom_imports`; or `optim_wrapper`; and arguments of the constructor by their
                names. An optimizer's type is torch's; "gluon:sgd" is Gluon's.
            overrides: arguments of the constructor, which win.

        Raises:
            ConfigurationError: something in it is unknown, wrong or said twice; nothing has been changed then.
        """
        from kvtrainer.config import check_overrides, trainer_arguments  # built around the Trainer

        check_overrides(cls, overrides)
        arguments = {**trainer_arguments(model, cfg), **overrides}
        buckets = {name: arguments.pop(name) for name in BUCKETS if name in arguments}
        trainer = cls(**arguments)
        if buckets:
            trainer.configure(**buckets)
        return trainer

    def describe_params(self) -> ParamReport:
        """Every parameter with its present options and the rules that decided them; as a str it is a table."""
        if self._param_report is None:
            return ParamReport(tuple(rows_of(self._named_groups())))
        return self._param_report.with_groups(self.param_groups)

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store; None where none is needed, and before the first step if it was given by name."""
        return self._link.store

    @property
    def schedules(self) -> tuple[BoundSchedule, ...]:
        """The schedules that the Trainer advances."""
        return tuple(self._schedules)

    @property
    def accumulation(self) -> Accumulation:
        """The count of backward passes; read only."""
        return self._accumulation

    @property
    def num_replicas(self) -> int:
        """How many copies of every parameter this process has."""
        return len(self._layout.devices)

    @property
    def has_begun(self) -> bool:
        """Whether there was a step or a `set_data`, so that a store may hold other weights than the model."""
        return self._link.is_started

    @property
    def amp_loss_scale(self) -> float:
        """The factor of the next loss. Raises AmpNotInitializedError before `kvtrainer.amp.init_trainer`."""
        return scaler_of(self).loss_scale

    @by_one_thread
    def set_data(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Make rank 0's present weights those of every worker and of the store; collective, between steps; blocks.

        Of replicas the weights on the first device count, and become those on the others.
        So training goes on from weights that the loop wrote: loaded, initialised again or edited in place. Optimizer
        state and update counts stay, of all parameters.

        Args:
            values: New weights by parameter name, which are written to the parameters first; rank 0's count. Of
                RowSparseParameters, only those that are named get new values.

        Raises:
            NotInitializedError: a parameter has no shape yet.
            ConfigurationError: `values` has an unknown name or a wrong shape; nothing has changed then.
            ParameterMovedError: the data of a parameter were replaced instead of written to.
        """
        self._refuse_in_join("set_data()")
        self._link.check_open()
        self._settle()
        if values is not None:
            self._layout.write(values)
        if not self._prepare():
            self._layout.check_in_place()
            self._link.assign(self._layout)
            self._share_weights()
            self._layout.accept_writes(self._link.has_weights)
        elif self._link.exchange is None:
            self._share_weights()

    @property
    def profiler(self) -> Profiler:
        """Profiles what this worker and the servers do for this Trainer's parameters.

        Makes the store if the first step has not yet; blocks until the servers answer.

        Raises:
            ConfigurationError: there is no store, or one whose workings are its own.
        """
        return self._link.profiler()

    @property
    def version(self) -> int:
        """How many updates are in the weights that this worker has, all workers' together; -1 without a store.

        Of several servers the one that had applied most counts.
        """
        return self._link.version

    @property
    def staleness(self) -> int:
        """How many updates others made between the weights of this worker's last gradient and its own update.

        Always 0 with synchronous rounds. Of several servers the one with most counts.
        """
        return self._link.staleness

    @by_one_thread
    def server_stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this Trainer's parameters, in server order; empty without a store.

        One dict for each server: in "tables" is one row, with the round, the version, bytes, and the ranks that the
        round waits for. Before the first step there is no store yet.
        """
        return self._link.stats()

    def close(self) -> None:
        """End training and leave the store; idempotent. Other workers' rounds that need this one then fail."""
        self._leave(None)

    def pull_weights(self) -> dict[Tensor, Tensor]:
        """Fetch the store's present weights by parameter, where workers' updates count one by one; blocks.

        The parameters here may lack what others gave since. Empty where they cannot, and without row-sparse ones.
        """
        holder = self._link.holder
        if holder is None or not self._link.updates_weights or holder.is_sync:
            return {}
        arenas, plan = holder.pull(), self._layout.plan
        rows = zip(self._layout.parameters, plan.specs, plan.key_offsets, strict=True)
        return {
            p: arenas[spec.dtype][at : at + spec.numel].view(spec.shape).clone()
            for p, spec, at in rows
            if not spec.row_sparse
        }

    def _row_sparse_pull(self, parameter: RowSparseParameter, ids: Tensor) -> Tensor:
        """The present values of rows of a row-sparse parameter; see `RowSparseParameter.row_sparse_data`."""
        self._link.check_open()
        self._settle()
        self._prepare()
        key = self._layout.tables.key_of(parameter)
        given = self._layout.tables.given(key)
        return self._link.pull_rows(key, ids) if given is None else given.view(parameter.shape[0], -1)[ids]

    def _row_sparse_write(self, parameter: RowSparseParameter, values: Tensor) -> None:
        """Keep new values for a row-sparse parameter until `set_data`; see `RowSparseParameter.copy_`."""
        self._layout.tables.give(self._layout.tables.key_of(parameter), values)

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self._warn_of_what_had_no_effect()
        self._layout.close()
        self._link.close(error)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _extra_states(self) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
        passes = self._accumulation.done if self._accumulation.counts > 1 else None
        residuals = self._link.residuals()
        return extra_states(self.loss_scaler, residuals, self._layout.names, self._schedules, passes)

    def _extra_problems(self, saved: SavedStates) -> Sequence[str]:
        return extra_problems(saved, self._layout, self._schedules, self.loss_scaler, self._accumulation)

    def _adopt_extra_states(self, saved: SavedStates) -> None:
        scaler = saved_scaler(saved)
        if scaler is not None and self.loss_scaler is not None:
            # It knows which scale the present gradients carry, and the script may hold on to it.
            self.loss_scaler.load_state_dict(saved_scaler_state(saved))
        elif scaler is not None:
            self.loss_scaler = scaler
        for schedule, state in zip(self._schedules, saved_schedules(saved), strict=False):
            schedule.load_state_dict(state)
        passes = saved_passes(saved)
        if passes is not None and self._accumulation.counts > 1:
            self._accumulation.set_progress(passes, self._accumulation.total)
        self._link.take_residuals(saved_residuals(saved, self._layout.names))
