"""The Trainer: a torch.optim.Optimizer and a Gluon Trainer in one, over any kvstore.

This module is the public interface. The Trainer checks arguments, and delegates to its parts:

- `StepPipeline` (step.py): the stages of a step, from the loss to new weights.
- `ParameterGroups` (groups.py): parameter groups, and the hyper-parameters of each update.
- `OptimizerStates` (optimizer_states.py): the optimizer's state, here or in a store.
- `Binding` (sync/binding.py): the store, and the Trainer's table in it. The store is created at the first step.
- saving.py, join.py: saved states, and uneven data.

All arguments are checked before anything changes: a constructor that raises leaves parameters as they were. Methods
that change weights or state are marked `exclusive`: a call from a second thread raises, and does not wait. Options can
change until the first step (`configure`), parameter groups at any time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial, wraps
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.optim
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from kvstore_server import check
from kvstore_server.codec import torch_dtype
from kvstore_server.optimizer import Optimizer, checked_optimizer_spec
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvtrainer.client.profiler import Profiler
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, KVStoreError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.gradients import largest_numel
from kvtrainer.memory.row_sparse import RowSparseParameter, is_row_sparse, row_sparse_parameters
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.options.loss_scaler import PLAIN_SCALING, LossScaler, plain_scaling, scaler_of
from kvtrainer.options.paramwise import ParamReport, apply_paramwise, rows_of
from kvtrainer.options.stages import STAGES, Accumulation, StageOptions
from kvtrainer.parallel.replicas import COPIES, devices_of, flatten_replicas, policy_of
from kvtrainer.schedules.config import bind_schedules
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.states.delta import read_states
from kvtrainer.states.format import SavedStates, State, write_state_file
from kvtrainer.states.pretrained_rows import PretrainedRows, put_rows, rows_by_slice
from kvtrainer.states.row_file import RowTable, write_row_file
from kvtrainer.sync.binding import BUCKETS, Binding
from kvtrainer.sync.client_state import ASSIGNED, pack_user_state
from kvtrainer.sync.exchange import RoundResult
from kvtrainer.sync.select import select_store
from kvtrainer.trainer.bases import Bases
from kvtrainer.trainer.groups import ParameterGroups, make_groups, refuse_parameters_of_ddp
from kvtrainer.trainer.join import join
from kvtrainer.trainer.optimizer_states import OptimizerStates, OptimizerStateView
from kvtrainer.trainer.resume import Resumption, catch_up, describe_state, resume
from kvtrainer.trainer.saving import (
    adopt_other_saved_states,
    as_state_dict,
    check_fit,
    export_own_states,
    export_trainer_states,
)
from kvtrainer.trainer.step import StepPipeline
from kvtrainer.types import Group, StepResult

_log = logging.getLogger(__name__)
_SAVED = "they are saved as they are"


def _hooked(step: Any) -> Any:
    """Have step hooks and torch's profiler see a step, as torch has it by itself, but only if there are any.

    What torch does for that takes as long as a tenth of a small step.
    """
    seen = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def call(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        is_seen = (
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )
        try:
            return (seen if is_seen else step)(self, *args, **kwargs)
        except BaseException:
            # Torch's GradScaler removes what it has passed only after a step that returns; see `plain_scaling`.
            for name in PLAIN_SCALING:
                vars(self).pop(name, None)
            raise

    call.hooked = True  # type: ignore[attr-defined]  # torch wraps no step that has this mark
    return call


@uncompiled
class Trainer(torch.optim.Optimizer):
    """Trains parameters with an optimizer over a kvstore; both Gluon's Trainer and a torch.optim.Optimizer.

    Args:
        params: A Module, a DataParallel, `named_parameters()`, a dict (in sorted order of its keys), a list of
            parameters, or torch parameter groups. All workers must pass the same. With names, groups have
            "param_names", as in torch. Shared parameters count once. Parameters of lazy modules may get their shapes
            later, in a forward pass before the first step. A list of replicas may stand for a parameter, one per
            device, in the same order everywhere.
        optimizer: A name ("sgd", "adam", …: Gluon's), a torch.optim class or instance, "torch:Adam", or the result of
            `kvtrainer.optimizer.create`. A torch instance shares its groups, so schedulers bound to it work, and passes
            on its state at the first use.
        optimizer_params: Options of the optimizer, under Gluon's or torch's names; None with an instance. Gluon's
            include `compat`: "mxnet1" for the behaviour of MXNet 1.9.1 instead of 2.x. A `lr_scheduler` determines the
            learning rate of all groups.
        kvstore: A name for `kvtrainer.kvstore.create`, a store object, or None. The store is created at the first step.
            With a single device and process, names without "dist" create none: the update runs in place. "device" and
            "nccl" sum over the ranks of the torch.distributed group, if there is one.
        compression_params: How gradients are compressed on their way to a store: {"type": "2bit", "threshold": 0.5},
            "1bit" with its threshold, {"type": "topk", "ratio": 0.01}, "ternary", "int8", "fp16" or "bf16"; for
            "dist_sync" and "device". Without a store it has no effect. "pull": "bf16", alone or in addition, lets
            servers that update the weights send them rounded to bfloat16, in half the bytes, while they keep full
            precision; another codec, such as "pull": "ternary", sends encoded changes, with error feedback.
        update_on_kvstore: Whether the optimizer runs in the store: on the servers of "dist_sync", which each have a
            part of the weights and of the optimizer's state. The store's weights are then the reference; see
            `set_data`. None means: if the store can, unless the environment's MXNET_UPDATE_ON_KVSTORE is 0.
        paramwise: Options per parameter: a dict as MMCV's paramwise_cfg, a list of `kvtrainer.Rule`, or a function of
            the model that returns parameter groups.
        clip_grad: Limits the norm of the reduced gradient, dict(max_norm=35, norm_type=2), or each of its elements,
            dict(type="value", clip_value=0.1). This is the gradient of the step: unscaled, divided by the batch size,
            summed over workers and replicas; in asynchronous modes that of each contribution.
        amp: Mixed precision for `context` and `backward`: "dynamic", a loss scale, or a dict of `dtype`, `loss_scale`
            and the arguments of torch.amp.GradScaler.
        accumulate: The number of `backward` calls per update; their losses are averaged.
        schedules: Schedules that advance with updates, or with `end_epoch`: ParamSchedules, dicts that describe them,
            torch's learning rate schedulers, or functions that make one for an optimizer.
        detect_anomalous_params: Whether `backward` reports parameters on which the loss does not depend: True or "log"
            logs them as errors, "raise" raises.
        on_nonfinite: What to do if the loss or the reduced gradient is infinite or NaN: "raise", "skip" the step on
            every worker, or "ignore". None: "skip" if clip_grad or amp measure the gradient anyway.
        overlap: Whether gradients are sent to the servers of "dist_sync", or summed over the ranks of
            torch.distributed, during the backward pass, as they become complete, and not only in `step`. Results are
            the same to the bit; with more than two ranks that share no memory, up to rounding. Gradients that the loop
            changes before `step`, for example by clipping, are sent again.
        overlap_pull: Removed. True raises a ConfigurationError that names `overlap`; False has no effect.
        hierarchy: Whether workers of one host first sum their gradients in memory, so that with "dist_sync" each host
            sends one gradient to the servers and receives the weights once. The changed order of additions can change
            the last bits. All workers must pass the same.
        zero_copy: Whether parameters may be mapped to memory that a store writes: that of servers on this host, in
            synchronous rounds. If such a server dies in a round, the weights may mix two rounds, which the error says.
            A forked process that reads parameters sees them change.

    The parameters' data move into flat buffers; move the model to its device and dtype first. While the optimizer runs
    in the store, the weights are there: what the loop writes to a parameter after the first step must be published with
    `set_data`. Otherwise the next step raises WeightsWrittenError, also for writes through `p.data` or NumPy; small
    writes to more than 8 MiB may be noticed later, or never, on CUDA and without zero_copy. Several Trainers may have
    the same dense parameters. Not thread-safe. As a context manager it closes its store.

    Raises:
        ConfigurationError: An argument is wrong; nothing has changed then.

        trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
        loss_fn(net(x), y).backward()
        trainer.step(batch_size)
    """

    _pipeline: StepPipeline
    _is_built = False
    _has_warned_of_zeros = False
    _step_supports_amp_scaling = True
    """Tells torch.amp.GradScaler to always call `step`, because all workers must skip it together."""

    def __init__(
        self,
        params: Any,
        optimizer: str | type | Optimizer | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
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
        overlap: bool = False,
        overlap_pull: bool | None = False,
        hierarchy: bool = False,
        zero_copy: bool = True,
    ) -> None:
        if overlap_pull is not None and overlap_pull is not False:
            raise ConfigurationError(
                f"overlap_pull={overlap_pull!r:.80}: this option was removed; leave it out, and use overlap=True, "
                "which sends gradients during the backward pass"
            )
        # 1. Check the options, and create the optimizer.
        stages = StageOptions(clip_grad, amp, accumulate, schedules, detect_anomalous_params, on_nonfinite)
        options = {} if optimizer_params is None else check.as_mapping(optimizer_params)
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ArgumentTypeError(
                f"optimizer_params must be a dict of options by name, got {optimizer_params!r:.80}"
            )
        built = create_optimizer(optimizer, **options)
        if built.param_idx2name:
            raise ConfigurationError(
                "param_idx2name names the keys of a store; in a Trainer, as in MXNet's, a parameter's own wd_mult "
                "decides. Leave it out, and set wd_mult = 0 on the parameters that should not decay"
            )
        # 2. Build the parameter groups.
        self._param_report: ParamReport | None = None
        if paramwise is not None:
            params, self._param_report = apply_paramwise(params, paramwise, options, built.hyper)
        groups, are_named = make_groups(params, built, optimizer)
        row_sparse = row_sparse_parameters(groups)
        parameters = [p for group in groups for p in group["params"]]
        if kvstore is not None:
            refuse_parameters_of_ddp(parameters)
        # 3. Choose the store, and where the optimizer runs. Nothing is created yet.
        selection = select_store(
            kvstore,
            update_on_kvstore,
            compression_params,
            built.aggregate_num,
            largest_numel(parameters),
            has_row_sparse=bool(row_sparse),
            devices=devices_of(groups),
            replicas=policy_of(groups),
            is_joint=isinstance(built, TorchOptimizer) and built.is_joint,
            overlap=overlap,
            hierarchy=hierarchy,
        )
        if selection.updates_weights and isinstance(built, TorchOptimizer):
            checked_optimizer_spec(built)  # raises if it cannot travel
        # 4. Become a torch optimizer over these groups.
        instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = ParameterGroups([list(group["param_names"]) for group in groups], built, instance)
        groups = [flatten_replicas(group) for group in groups]
        if not are_named:  # as in torch, whose checkpoints have other keys with named parameters
            groups = [{n: v for n, v in group.items() if n != "param_names"} for group in groups]
        is_wrapped = hasattr(type(self).step, "hooked")  # that of a subclass may not be
        super().__init__(groups, self._groups.defaults)
        if not is_wrapped:
            uncompiled(type(self).step)  # torch wraps `step` once per class, which hides our mark
        if instance is not None:
            # One list of groups for both, so that schedulers bound to the instance reach this optimizer.
            self._groups.live = instance.param_groups
        # 5. Lay out the parameters. From here on the Trainer works.
        self._pipeline = StepPipeline(self._groups, Binding(selection, zero_copy))
        self._writer: Any = None
        """Writes scalars of each step; see `log_to`."""
        self._bases = Bases()
        self._client_state: Any = None
        self._packed_client_state = b""
        self._is_built = True
        self._take_options(stages, STAGES, stages.schedules)
        for name, parameter in row_sparse:
            parameter.claim(self, name)

    def __repr__(self) -> str:
        shown = super().__repr__()
        if not self._is_built:
            return shown
        binding = self._pipeline.binding
        store = binding.store or binding.selection.kvstore
        lines = [
            f"{type(self).__name__} (",
            f"optimizer: {self._groups.optimizer.registered_name}",
            f"kvstore: {store.type if isinstance(store, KVStoreBase) else store}",
            f"update_on_kvstore: {binding.updates_weights}",
            f"accumulate: {self.accumulation.counts}",
        ]
        return shown.replace(lines[0], "\n".join(lines), 1)

    @classmethod
    def from_config(cls, model: Any, cfg: Mapping[str, Any], **overrides: Any) -> Trainer:
        """Build a Trainer from a configuration in the form of MMCV or mmengine.

        Args:
            model: What to train; a Module, if the configuration has rules for parameters.
            cfg: Sections `optimizer` (with `paramwise_cfg` and `constructor`), `optimizer_config`, `fp16`, `lr_config`,
                `momentum_config`, `custom_imports`; or `optim_wrapper`; and arguments of the constructor under their
                names. An optimizer's type is torch's; "gluon:sgd" is Gluon's.
            overrides: Arguments of the constructor, which take precedence.

        Raises:
            ConfigurationError: Something is unknown, wrong or given twice; nothing has changed then.
        """
        from kvtrainer.config import check_overrides, trainer_arguments

        check_overrides(cls, overrides)
        arguments = {**trainer_arguments(model, cfg), **overrides}
        buckets = {name: arguments.pop(name) for name in BUCKETS if name in arguments}
        trainer = cls(**arguments)
        if buckets:
            trainer.configure(**buckets)
        return trainer

    def configure(self, **options: Any) -> None:
        """Change options before the first step: those of the constructor, by its names, and two more.

        Args:
            clip_grad, amp, accumulate, detect_anomalous_params, on_nonfinite: As in the constructor.
            schedules: Added to the present ones.
            bucket_size_mb: The size of one reduction over torch.distributed, in MiB; -1 for everything of a dtype.
            coalesce: False reduces every parameter separately there.

        Raises:
            ConfigurationError: An option is unknown or wrong, or there was a step; nothing has changed then.
        """
        binding = self._pipeline.binding
        if binding.is_started:
            raise ConfigurationError(
                f"{', '.join(options)} cannot change after the first step; call configure() before it"
            )
        buckets = {name: options.pop(name) for name in BUCKETS if name in options}
        stages = self._pipeline.stages.changed(options)
        if buckets:
            binding.check_buckets(buckets)
        self._take_options(stages, list(options), options.get("schedules", ()))
        if buckets:
            binding.set_buckets(buckets)

    def _take_options(self, stages: StageOptions, changed: Sequence[str], schedules: Sequence[Any]) -> None:
        bound = bind_schedules(schedules, self, None, self._pipeline.schedules)
        self._pipeline.take_options(stages, changed, bound)

    # Another process that continues.

    @exclusive
    def resume(self) -> Resumption:
        """Continue where an earlier process of this rank has ended; on a first start, begin. Blocks.

        Call it once, before the first step, on every worker. From then on each step stores on the servers what another
        process of this rank needs: `client_state`, options, update counts, loss scale and schedules. If this process
        dies, the other workers of "dist_sync" wait for a new one as long as the servers' --rejoin-timeout says. That
        one gets the weights after the last step of this one, and its `client_state`; no step is computed again, unless
        its commit has reached some of the servers only. A process that is still running, but was replaced, gets
        FencedError and, if nothing catches it, ends with exit code 75.

            start = trainer.resume()
            for step in range(start.round, num_steps):
                ...
                trainer.client_state = {"epoch": epoch, "random": kvtrainer.utils.get_random_state()}
                trainer.step(batch_size)

        Like the first step it creates the store, and on a first start gives every worker rank 0's weights. Without
        servers there is nothing to continue from, and the result is always that of a first start.

        Raises:
            ConfigurationError: The store is open already; `hierarchy`, or one of the options that the page on recovery
                names, keeps state that ends with the process; or compression or an update in this process needs
                KVSTORE_WORKER_MEMORY, which names no memory.
            WorkerLostError: The last step has to be repeated, and its former weights are not kept; or what this worker
                alone had is not there any more. Restart the job.
            KVStoreError: The last round of the earlier process has failed.
        """
        found = resume(self._pipeline, self.adopt_saved_states)
        if self._pipeline.binding.is_dist:
            self._pipeline.describe_state = self._describe_state
            self._pipeline.binding.is_resumable = True
            self._pipeline.catch_up = self._catch_up
        if found.client_state is not None:
            self.client_state = found.client_state  # another successor may be needed before the next step
        return found

    @property
    def client_state(self) -> Any:
        """What the script needs to continue after its next step: plain values, such as a data cursor.

        Set it before `step`; the last value is stored with each step after `resume`. Dicts, lists, str, bytes, numbers,
        bool and None; up to 48 KiB.
        """
        return self._client_state

    @client_state.setter
    def client_state(self, value: Any) -> None:
        self._packed_client_state = pack_user_state(value)
        self._client_state = value

    def _catch_up(self, late: RoundResult) -> None:
        found = catch_up(self._pipeline, late, self.adopt_saved_states)
        if found.client_state is not None:
            self.client_state = found.client_state

    def _describe_state(self, kind: str) -> bytes:
        return describe_state(self._pipeline, kind, self._packed_client_state)

    # Steps.

    @_hooked
    @exclusive
    def step(
        self,
        batch_size: float | SupportsIndex | Callable[[], Any] | None = None,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Reduce gradients over workers and update the weights. Blocks until the new weights are here.

        With a batch size b, gradients are summed over workers, each divided by its worker's b: pass the global batch
        size for a mean. It may differ between steps and workers. Without one, gradients are averaged over workers, as
        in DistributedDataParallel. Gradients stay readable until the next backward pass, without the loss scale.
        Replicas are summed or averaged like workers, and are equal afterwards; with kvstore=None each has its own
        update and state. While backward passes are being accumulated, `step` does nothing until the window is full.

        Returns the closure's result if there is a closure, otherwise the StepResult, which is also `last`.

        Args:
            batch_size: A positive number, or a tensor of one integer, which is read on the host; or the closure, as in
                torch's optimizers.
            ignore_stale_grad: Leave out parameters without a new gradient instead of raising. Without a batch size they
                are always left out, except those written in place since the last step, for example by
                `zero_grad(set_to_none=False)`; see "What counts as a new gradient" in the documentation.
            closure: Called first, with gradients enabled.

        Raises:
            StaleGradientError: A parameter has no new gradient since the last step; nothing has changed then.
            NotInitializedError: A parameter has no shape yet; nothing has changed then.
            ParameterMovedError: The data of a parameter were replaced; nothing has changed then.
            WeightsWrittenError: The loop has written weights that the store would overwrite; see `set_data`.
            NonFiniteGradientError: A gradient is not finite on some worker, and `on_nonfinite` is "raise". It is raised
                on every worker, and nothing has changed.
            KVStoreError: The round failed on every worker; weights and optimizer state are as before.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        # A plain torch.amp.GradScaler passes its arguments as attributes of the optimizer.
        scaling = partial(plain_scaling, self) if vars(self).keys() >= PLAIN_SCALING else None
        began = time.monotonic()
        result = self._pipeline.step(batch_size, ignore_stale_grad, closure, scaling)
        report = self._pipeline.binding.report
        report.steps, report.step_seconds = report.steps + 1, report.step_seconds + time.monotonic() - began
        if self._writer is not None:
            self._write_scalars(self._writer, time.monotonic() - began)
        return result

    def report(self, samples: int = 0, loss: float | None = None) -> None:
        """Report this worker's progress to the servers, for `kvtop` and other views of the job. This sends no message.

        The values travel with the next heartbeat, within a second. Steps and waiting times are counted anyway.

        Args:
            samples: How many more samples were trained on.
            loss: The present loss.

        Raises:
            ConfigurationError: `samples` is not an integer of at least 0, or the loss is not a number.
        """
        if type(samples) is not int or samples < 0 or not (loss is None or check.is_number(loss)):
            raise ConfigurationError(
                f"report() takes a number of samples and a loss as plain numbers, got {samples!r:.80}, {loss!r:.80}; "
                "for a tensor pass loss.item()"
            )
        report = self._pipeline.binding.report
        report.samples += samples
        report.loss = report.loss if loss is None else float(loss)

    def log_to(self, writer: Any) -> None:
        """Let rank 0 write scalars of every step to TensorBoard or another writer; other workers write nothing.

        The scalars are the learning rate, the loss given to `report`, the gradient's norm if it is measured, the loss
        scale, and the seconds of the step. Creates the store, as `rank` does.

        Args:
            writer: An object with `add_scalar(tag, value, step)`, such as torch.utils.tensorboard.SummaryWriter; None
                stops writing.

        Raises:
            ArgumentTypeError: It has no such method.
        """
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise ArgumentTypeError(
                f"log_to() takes a writer with add_scalar(tag, value, step), got {writer!r:.80}"
            )
        self._writer = writer if writer is not None and self.rank == 0 else None

    def _write_scalars(self, writer: Any, seconds: float) -> None:
        last, report = self.last, self._pipeline.binding.report
        assert last is not None
        found = {"lr": last.lr, "grad_norm": last.grad_norm, "loss": report.loss, "step_seconds": seconds}
        if self._pipeline.loss_scaler is not None:
            found["loss_scale"] = last.loss_scale
        for name, value in found.items():
            if value is not None and not math.isnan(value):
                writer.add_scalar(f"train/{name}", value, report.steps)

    def wait(self) -> NoReturn:
        """Raise ConfigurationError: this method was removed with the option `overlap_pull`, which needed it."""
        raise ConfigurationError(
            "Trainer.wait() was removed together with overlap_pull: when step() returns, the new weights are here; "
            "leave the call out"
        )

    def _step_voting(self, overflows: bool, carried: float, *args: Any, **kwargs: Any) -> StepResult:
        """Step for a GradScaler: all workers skip it if gradients overflow on any (`overflows`: on this one). `carried`
        is the factor of the loss, by which the gradients were already divided.
        """
        pipeline = self._pipeline
        was_bad, pipeline.voting = pipeline.is_bad, carried
        pipeline.is_bad = was_bad or overflows
        try:
            self.step(*args, **kwargs)
        except BaseException:
            pipeline.is_bad = was_bad
            raise
        finally:
            pipeline.voting = None
        assert self.last is not None
        return self.last

    def _named_fresh(self) -> list[tuple[str, Tensor]]:
        """Return the parameters, on all devices, whose gradients the coming step would use. Raises as `step`."""
        self._pipeline.follow_groups()
        memory = self._pipeline.memory
        return [
            (name, parameter)
            for one, own in zip(memory.devices, memory.fresh_by_device(with_edits=True), strict=True)
            for name, parameter, is_fresh in zip(one.names, one.parameters, own, strict=True)
            if is_fresh
        ]

    @exclusive
    def train(self) -> None:
        """Put the optimizer into training mode, if it has modes.

        Optimizers of the package schedulefree train other weights than they evaluate and save: `eval()` puts the latter
        into the parameters, `train()` the former. Call them on every worker, between steps. Other optimizers are not
        affected.

        Raises:
            ConfigurationError: The optimizer has modes, but runs in a store or key by key; nothing has changed then.
            OptimizerError: The optimizer raised; nothing has changed then.
        """
        self._pipeline.set_mode("train")

    @exclusive
    def eval(self) -> None:
        """Put the optimizer into evaluation mode, if it has modes; see `train`."""
        self._pipeline.set_mode("eval")

    @exclusive
    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers and replicas; the loop may change it before `update`. Blocks.

        With a loss scaler, gradients that overflow on any worker are left unchanged, and `update` skips the step.
        `update` also clips. While backward passes are being accumulated, this does nothing.

        Raises:
            ConfigurationError: The optimizer runs in the store, so there is no separate update.
        """
        self._pipeline.allreduce_grads()

    @exclusive
    def update(
        self, batch_size: float | SupportsIndex | None = None, ignore_stale_grad: bool = False
    ) -> StepResult:
        """Update the weights from the present gradients, after `allreduce_grads`. Arguments are those of `step`.

        For replicas, the gradients on the first device are used. Returns the result of the step, which is also `last`.

        Raises:
            ConfigurationError: The optimizer runs in the store; or replicas were not summed.
            StaleGradientError: As in `step`.
        """
        return self._pipeline.update(batch_size, ignore_stale_grad)

    def join(self) -> AbstractContextManager[None]:
        """Let workers take different numbers of steps in the block. Collective; it ends on all workers together.

            with trainer.join():
                for x, y in my_batches:
                    loss_fn(net(x), y).backward()
                    trainer.step(batch_size)

        A worker that leaves the block takes part in the others' rounds without data, until all have left. Then all have
        the same weights, update counts and options (those of the lowest rank that had data last). `step()` keeps
        dividing by the number of all workers, including joined ones. Gradients not used when the block ends are
        dropped, and windows of accumulation start over. Collective calls other than `step` are not needed in the block;
        `allreduce_grads` and `update` are refused, because a worker that has left cannot repeat what the loop does
        between them. If the block raises, it ends without waiting, and the others fail when this worker leaves the
        store.

        Raises:
            ConfigurationError: The store does not support it, or blocks are nested.
            KVStoreError: As in `step`.
        """
        return join(self._pipeline)

    @property
    def rank(self) -> int:
        """This worker's rank, from 0; with `num_workers`, the arguments of a DistributedSampler.

        Creates the store if necessary, blocks until its servers answer, and raises as `create` does.
        """
        return self._pipeline.binding.worker()[0]

    @property
    def num_workers(self) -> int:
        """The number of workers that train together. Creates the store, as `rank` does."""
        return len(self.members)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that take part in the next step, ascending.

        They change only in a job whose number of workers may change (`kvlaunch -n MIN..MAX`), and only in `step`;
        `kvtrainer.utils.shard` divides data over them. Creates the store, as `rank` does.
        """
        return self._pipeline.binding.members()

    @property
    def round(self) -> int:
        """How many steps have been made: the number of the next one.

        It grows by one with each `step` that sends gradients. With backup workers (`kvlaunch --backup-workers`) it
        grows by more if steps were made without this worker, so a loop is `while trainer.round < num_steps:`. It begins
        with the `round` that `resume` returns.
        """
        return self._pipeline.num_steps

    @property
    def num_left_out(self) -> int:
        """How many steps were made without this worker's gradient, because it came too late; see `round`."""
        return self._pipeline.num_left_out

    def leave(self) -> None:
        """Leave a job whose number of workers may change, after the last step of this worker; blocks.

        The others make the next step without this worker, and do not wait for another process of its rank. Closes the
        Trainer. Another process of this rank may join later.

        Raises:
            ConfigurationError: The number of workers does not change, or fewer than the least would be left.
            KVStoreError: A server did not answer.
        """
        self._pipeline.refuse_in_join("leave()")
        self._pipeline.binding.leave_rounds()
        self.close()

    @property
    def last(self) -> StepResult | None:
        """The result of the last step; None before the first one."""
        return self._pipeline.last

    # Losses.

    def context(self) -> AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss: torch.autocast according to `amp`, else an empty one."""
        self._pipeline.has_context = True
        precision = self._pipeline.stages.precision
        if precision is None:
            return nullcontext()
        device = next(p for group in self.param_groups for p in group["params"]).device
        return torch.autocast(device.type, precision.dtype)

    def backward(self, loss: Any) -> None:
        """Run the backward pass of a loss, or of the losses of several replicas in a list or dict.

        The loss is multiplied by the loss scale, which `step` undoes, and divided by the number of accumulated passes.

        Raises:
            ConfigurationError: There is no loss.
            BackwardTwiceError: These losses of replicas already had their backward pass.
            AnomalousParametersError: The loss does not depend on a parameter, and that should raise; nothing has
                happened then.
        """
        self._pipeline.backward(loss)

    def update_params(self, loss: Any, batch_size: float | SupportsIndex | None = None) -> StepResult:
        """`backward(loss)`, then `step(batch_size)`, which does nothing until a window of accumulation is full.

        Without a batch size gradients are averaged over workers, and `ignore_stale_grad` applies. Raises as both do.
        """
        self.backward(loss)
        self.step(batch_size)
        assert self.last is not None
        return self.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        accumulation = self._pipeline.accumulation
        if accumulation.pending and not self._has_warned_of_zeros:
            self._has_warned_of_zeros = True
            _log.warning(
                "zero_grad() drops the gradients of %d backward passes of a window of %d, which are lost; call it only "
                "after an update, or not at all: the Trainer drops used gradients itself. This warning appears once",
                accumulation.pending,
                accumulation.counts,
            )
        self._pipeline.drop_gradients()
        if not set_to_none:
            self._pipeline.memory.record_zeroed()

    zero_grad.__doc__ = torch.optim.Optimizer.zero_grad.__doc__

    def report_anomalies(
        self, loss: Any, mode: bool | str = "log", logger: logging.Logger | None = None
    ) -> None:
        """Log parameters on which a loss does not depend, or raise; see `kvtrainer.anomalies.report_anomalies`."""
        self._pipeline.report_anomalies(loss, mode, logger)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scaler, set by the option `amp` or `kvtrainer.amp.init_trainer`.

        With one, a step in which a gradient overflows on any worker changes nothing on all of them.
        """
        return self._pipeline.loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScaler | None) -> None:
        self._pipeline.loss_scaler = scaler

    @property
    def amp_loss_scale(self) -> float:
        """The factor for the next loss. Raises AmpNotInitializedError before `kvtrainer.amp.init_trainer`."""
        return scaler_of(self).loss_scale

    @property
    def accumulation(self) -> Accumulation:
        """The count of backward passes; read-only."""
        return self._pipeline.accumulation

    def set_progress(self, iteration: int, max_iterations: int | None = None) -> None:
        """Set how many backward passes were made before, and how many there are in total.

        With accumulation, a shorter last window is then averaged over its own length, and the very last pass ends in an
        update.

        Raises:
            ConfigurationError: The numbers are impossible.
        """
        self._pipeline.accumulation.set_progress(iteration, max_iterations)

    # Options of groups, and what advances them.

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups, as in torch's optimizers; options and parameters are read at every step.

        A script may therefore edit the lists: append, replace, remove or move a parameter, or add a group; with a
        store, on every worker between the same steps, with the limits of `add_param_group`. State stays with a
        parameter; pass that of a replaced one to the new one: `trainer.state[new] = state`. If something cannot be
        trained, the following calls raise ConfigurationError until it is corrected.
        """
        return self._groups.live

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        if self._is_built:
            self._groups.bind(groups)
        else:
            self._groups.live = groups

    @exclusive
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options. Optimizer state and update counts of other parameters are kept.

        With a store, call it on every worker between the same steps: the next step gives the store the new parameters,
        with rank 0's values, and otherwise fails on all workers. State on servers is fetched for this, and the servers
        keep the memory of the former table. In asynchronous modes, with row-sparse parameters, and in a third-party
        store, it is possible only before the first step.

        Raises:
            ConfigurationError: The store does not allow it any more, or an argument is wrong; nothing has changed.
            WeightsWrittenError: The loop has written weights that the store would overwrite; nothing has changed.
        """
        if not self._is_built:
            # Called by torch's constructor: `make_groups` has already checked everything.
            self.param_groups.append({**self.defaults, **param_group})
            return
        self._pipeline.follow_groups()
        group = self._new_group(param_group)
        names = group["param_names"]
        group = flatten_replicas(group)
        if "param_names" not in self.param_groups[0]:
            del group["param_names"]
        super().add_param_group(group)
        try:
            self._pipeline.lay_out([*self._groups.names, names])
        except KVStoreError:
            self.param_groups.pop()
            raise

    def _new_group(self, param_group: Any) -> Group:
        # 1. Whether parameters can be added at all.
        if not self._pipeline.can_grow():
            raise ConfigurationError(
                "the kvstore already has the parameters; in asynchronous modes, with row-sparse parameters, and in a "
                "third-party store no others can be added. Add parameter groups before the first step"
            )
        if not isinstance(param_group, dict):
            raise ArgumentTypeError(f"a parameter group is a dict, got {type(param_group).__name__}")
        # 2. The options, and names that are free.
        memory = self._pipeline.memory
        [group], _ = make_groups([param_group], self._groups.optimizer, None, taken=set(memory.names))
        # 3. Every parameter: dense, on the same devices as the others, and new.
        here = {
            id(p): name
            for device in memory.devices
            for p, name in zip(device.parameters, memory.names, strict=True)
        }
        rows = [
            (name, p)
            for of_device in [group["params"], *group.get(COPIES, ())]
            for name, p in zip(group["param_names"], of_device, strict=True)
        ]
        for name in [name for name, p in rows if is_row_sparse(p)]:
            raise ConfigurationError(
                f"parameter {name!r} is row-sparse, which determines the Trainer's store; pass it to the Trainer's "
                "constructor"
            )
        homes, theirs = [device.parameters[0].device for device in memory.devices], devices_of([group])
        if (memory.has_replicas or COPIES in group) and homes != theirs:
            raise ConfigurationError(
                f"all parameters must be on the same list of devices, but those of the new group are on "
                f"[{', '.join(map(str, theirs))}] while the others are on [{', '.join(map(str, homes))}]"
            )
        twice = [here[id(p)] for _, p in rows if id(p) in here]
        if twice:
            raise ConfigurationError(
                f"{', '.join(twice)}: already in a parameter group; add each parameter once"
            )
        return group

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's kind and options; with one parameter group, that group's present options."""
        return self._groups.optimizer

    @property
    def learning_rate(self) -> float:
        """The first parameter group's learning rate, before `lr_mult`; with a lr_scheduler, that of the last update."""
        optimizer, first = self._groups.optimizer, self.param_groups[0]
        if optimizer.lr_scheduler is not None or "lr" not in first:
            return optimizer.learning_rate
        return float(first["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on, wherever the optimizer runs.

        Raises:
            SchedulerInUseError: The optimizer has a lr_scheduler.
            ConfigurationError: `lr` is not a finite number.
        """
        if self._groups.optimizer.lr_scheduler is not None:
            self._groups.optimizer.set_learning_rate(lr)
        value = check.number("the learning rate", lr)
        self.learning_rate  # noqa: B018  (raises if the optimizer has none)
        for group in self.param_groups:
            group["lr"] = value

    def get_lr(self) -> dict[str, list[float]]:
        """Return {"lr": the learning rates of all groups}; the list is empty if the optimizer has none."""
        return {"lr": [float(group["lr"]) for group in self.param_groups if "lr" in group]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return {"momentum": that of every group}: betas[0] for Adam and its variants, 0 without momentum."""
        rows = self.param_groups
        found = [group["betas"][0] if "betas" in group else group.get("momentum", 0.0) for group in rows]
        return {"momentum": [float(momentum) for momentum in found]}

    def describe_params(self) -> ParamReport:
        """Return a report of every parameter, its present options, and the rules that set them; str() gives a table."""
        self._pipeline.follow_groups()
        if self._param_report is None:
            # Groups have no names if the caller gave none.
            called = {
                id(p): name
                for device in self._pipeline.memory.devices
                for p, name in zip(device.parameters, device.names, strict=True)
            }
            groups = [
                {"param_names": [called[id(p)] for p in group["params"]], **group}
                for group in self._groups.live
            ]
            return ParamReport(tuple(rows_of(groups)))
        return self._param_report.with_groups(self.param_groups)

    @property
    def schedules(self) -> tuple[BoundSchedule, ...]:
        """The schedules that the Trainer advances."""
        return tuple(self._pipeline.schedules)

    def end_epoch(self, metric: float | None = None) -> None:
        """Advance schedules that count epochs, and those that need a metric, such as ReduceLROnPlateau.

        Raises:
            ConfigurationError: A schedule needs a metric, but none was given; nothing has changed then.
        """
        schedules = self._pipeline.schedules
        if metric is None and any(schedule.by == "metric" for schedule in schedules):
            raise ConfigurationError(
                "a schedule needs a metric, such as the loss on validation data; call end_epoch(metric)"
            )
        for schedule in schedules:
            if schedule.by == "epoch":
                schedule.step()
            elif schedule.by == "metric":
                schedule.step(metric)  # type: ignore[call-arg]

    # State.

    @property  # type: ignore[override]
    def state(self) -> OptimizerStateView:
        """The optimizer state by parameter, wherever it is, with the entries of `state_dict`.

        Each access fetches a snapshot, and blocks for that; changes to what was read have no effect. `state[parameter]
        = {...}` replaces the state of one parameter; with servers, do it on every worker.
        """
        return OptimizerStateView(self._ready_states)

    @state.setter
    def state(self, value: Any) -> None:
        if self._is_built:
            raise ConfigurationError(
                "the optimizer's state cannot be replaced as a whole; use load_state_dict, or assign the state of "
                "single parameters: trainer.state[parameter] = {...}"
            )

    def _ready_states(self) -> OptimizerStates:
        self._pipeline.ready()
        return self._pipeline.states

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Return options and optimizer state in torch's form, wherever the state is. Blocks while it is fetched.

        Schedules and the loss scale are not included; `save_states` has them. Any single worker may call it between its
        steps. Before the first update there are entries with a step count of 0, because torch.distributed.checkpoint
        only loads into existing entries.
        """
        self._pipeline.binding.check_whole(_SAVED)
        self._pipeline.ready()
        if (joint := self._pipeline.states.joint) is not None:
            return joint.state_dict()
        with self._groups.without_replicas():
            return super().state_dict()

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and optimizer state of a Trainer or torch optimizer of the same kind.

        Call it on every worker, after building the Trainer. State for a store is passed on when the store exists: now,
        or at the first step.

        Raises:
            ConfigurationError: The state is for another model or optimizer; nothing has changed then.
        """
        found: dict[int, State] = {}
        states = self._ready_states()
        if states.joint is not None:
            states.take_jointly(state_dict)
            return

        def take_states(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            found.update(states.read(given))
            return {**given, "state": {}}

        former = self.param_groups
        # The last hook sees the dict after the user's hooks, but before torch rounds the float32 state of
        # half-precision parameters.
        hook = self.register_load_state_dict_pre_hook(take_states)
        try:
            with self._groups.without_replicas():
                super().load_state_dict(state_dict)
        finally:
            hook.remove()
        for group, before in zip(self.param_groups, former, strict=True):
            for name in self.defaults.keys() & before.keys():
                group.setdefault(name, before[name])
        states.take(found)
        if self._pipeline.binding.holder is not None:
            self._pipeline.binding.holder.rows.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by torch's load_state_dict with new groups; the state was taken by the hook.
        super().__setstate__({})
        self._groups.bind(state["param_groups"])

    def __getstate__(self) -> NoReturn:
        raise ConfigurationError(
            f"a {type(self).__name__} cannot be copied or pickled, because its parameters belong to a running model; "
            "save its state_dict() and load that into a new one"
        )

    @exclusive
    def save_states(
        self, fname: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None
    ) -> None:
        """Save what another Trainer needs, beside the weights, to continue as if never interrupted, in one file.

        The file has the optimizer state by parameter name, and the options of every group, wherever the optimizer runs.
        Blocks while state is fetched. Any single worker may save between its steps: no round ends without it, so the
        file belongs to its own last step.

        Args:
            fname: The file, which replaces an existing one.
            base: A file in the same folder that this Trainer has saved since it loaded states, or has loaded last. Then
                `fname` becomes a delta: of hash tables (`kvtrainer.Embedding`) it has only the rows that were updated,
                came or went since the base was saved; everything else is in it as usual. The base may be a delta, too.
                Keep it and its own bases, under their names: `load_states` needs them. `kvtrainer.merge_states` makes
                one file of them.

        Raises:
            KVStoreError: A step was interrupted in its update, so weights and state may have only a part of it; `step`
                and `state_dict` raise it, too. A Trainer without a store saves what it has, and logs that.
            StateFileError: The file cannot be written, or the base cannot be read; the former file is unchanged.
            StateMismatchError: There can be no delta since this base, because this Trainer has neither saved nor loaded
                it, or because a table has changed in another way than by updates since: states were loaded, the
                optimizer was replaced, or a server has restarted or gone back to a snapshot. Save without base then.
            ConfigurationError: A base is given but there is no hash table, the base is in another folder, or `fname` is
                the base or one of its bases.
        """
        if base is None:
            saved = self.export_saved_states()
        else:
            self._pipeline.binding.check_whole(_SAVED)
            self._pipeline.ready()
            saved = self._bases.export_delta(self._pipeline, base, fname)
        self._bases.remember_saved(saved, write_state_file(fname, saved))

    @exclusive
    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load the file of `save_states`, with any kvstore and any number of servers; it may be another job's.

        Collective: every worker calls it, between the same steps, with the same file. It blocks until all workers have
        loaded it, or none. It creates the store if necessary. Options in the file replace those with which the Trainer
        was built; `lr_mult` and `wd_mult` of parameters are kept. The file does not contain weights.

        A delta (`save_states` with a base) is loaded with its bases, which are looked for in its own folder under the
        names that they had; the result is that of a file that was saved without base at the same moment.

        Raises:
            StateFileError: It cannot be read, is not a file of saved states, or is damaged; or this is so of a base.
            StateMismatchError: It is for another model or optimizer; names every difference. Or a base is another file
                than the one on which the delta was saved.
            RoundAbortedError: Another worker cannot read it, or it does not fit there; says which and why.
            ConfigurationError: Several workers have a third-party store, through which they cannot agree.
            In each case nothing has changed, on any worker.
        """
        with closing(self._pipeline.binding.open_agreement("load_states()")) as agreement:
            with agreement.all_or_none(f"read {os.fspath(fname)!r}"):
                self._pipeline.ready()  # first, so that its errors are not hidden by those of the file
                saved = read_states(fname)
                self.check_saved_states(saved)
            # No worker continues while another may still replace state on servers.
            with agreement.all_or_none(f"take over the states of {os.fspath(fname)!r}"):
                self.adopt_saved_states(saved)

    def export_saved_states(self) -> SavedStates:
        """Return what `save_states` saves. Blocks while state is fetched. Raises KVStoreError as that does."""
        self._pipeline.binding.check_whole(_SAVED)
        self._pipeline.ready()
        return export_trainer_states(self._pipeline)

    def export_own_states(self) -> SavedStates:
        """Return the part of `export_saved_states` that only this worker has, such as residuals; fetches nothing."""
        self._pipeline.binding.check_whole(_SAVED)
        return export_own_states(self._pipeline)

    def adopt_saved_states(self, saved: SavedStates) -> None:
        """Load the result of `export_saved_states`, as `load_states` does; call it on every worker.

        Raises:
            StateMismatchError: It is for another model or optimizer; says how. Nothing has changed.
        """
        self.check_saved_states(saved)
        self._bases.forget()
        self.load_state_dict(as_state_dict(saved, self._pipeline.memory.names))
        adopt_other_saved_states(saved, self._pipeline)
        self._bases.remember_loaded(saved)

    def check_saved_states(self, saved: SavedStates) -> None:
        """Raise StateMismatchError unless `adopt_saved_states` can load this."""
        self._pipeline.ready()
        check_fit(saved, self._pipeline)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless `load_state_dict` can load this; not checked if hooks may change it first."""
        states = self._ready_states()
        if not self._optimizer_load_state_dict_pre_hooks and states.joint is None:
            states.read(state_dict)

    # Weights and the store.

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store; None if none is needed, and before the first step if it was given by name."""
        return self._pipeline.binding.store

    @property
    def num_replicas(self) -> int:
        """The number of copies of every parameter in this process."""
        return len(self._pipeline.memory.devices)

    @property
    def has_begun(self) -> bool:
        """Whether there was a step or a `set_data`. A store may then have other weights than the model."""
        return self._pipeline.binding.is_started

    @exclusive
    def set_data(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Copy rank 0's present weights to every worker and to the store. Collective, between steps. Blocks.

        Training then continues from weights that the loop has loaded, initialised or edited in place. With replicas,
        the first device's weights are used, and copied to the others. Optimizer state and update counts are kept.

        Args:
            values: New weights by parameter name, which are first written to the parameters; rank 0's count.
                RowSparseParameters only get new values if they are named.

        Raises:
            NotInitializedError: A parameter has no shape yet.
            ConfigurationError: `values` has an unknown name or a wrong shape; nothing has changed then.
            ParameterMovedError: The data of a parameter were replaced instead of written to.
        """
        pipeline = self._pipeline
        pipeline.refuse_in_join("set_data()")
        pipeline.binding.refuse_backup("set_data()")
        pipeline.binding.check_open()
        pipeline.ready()
        if values is not None:
            pipeline.memory.write(values)
        if pipeline.prepare():
            if pipeline.binding.exchange is None:
                pipeline.memory.share_weights()
            return
        pipeline.memory.check_in_place()
        if pipeline.num_assigns_known > 0:
            pipeline.binding.adopt_assigned(pipeline.memory)
            pipeline.num_assigns_known -= 1
        else:
            state = b"" if pipeline.describe_state is None else pipeline.describe_state(ASSIGNED)
            pipeline.binding.assign(pipeline.memory, state)
            pipeline.num_assigned += 1
        pipeline.memory.share_weights()
        pipeline.memory.accept_writes(pipeline.binding.has_weights)

    def pull_weights(self) -> dict[Tensor, Tensor]:
        """Fetch the store's present weights by parameter, in asynchronous modes. Blocks.

        The local parameters may lack other workers' latest updates and are not changed, nor does this affect the
        staleness of the next gradient. If all of the result is written into the parameters, they count as the store's
        weights; a copy is kept until the next step to detect that. Empty in synchronous modes. Row-sparse parameters
        are left out.
        """
        binding, memory = self._pipeline.binding, self._pipeline.memory
        if binding.holder is None or not binding.updates_weights or binding.holder.is_sync:
            return {}
        arenas = binding.holder.look()
        rows = zip(memory.parameters, memory.plan.specs, memory.plan.key_offsets, strict=True)
        return {
            p: arenas[spec.dtype][at : at + spec.numel].view(spec.shape).clone()
            for p, spec, at in rows
            if not spec.row_sparse and spec.shape == p.shape
        }

    def snapshot(self) -> NoReturn:
        """Raise ConfigurationError: this method was removed; use `p.detach().clone()` of each parameter."""
        raise ConfigurationError(
            "Trainer.snapshot() was removed; between two steps, copies of the weights by name are "
            "{name: p.detach().clone() for name, p in model.named_parameters()}"
        )

    @exclusive
    def prefetch(self, row_ids: Any) -> None:
        """Let the next `step` request the row-sparse rows of the next batch. Returns at once.

        The step requests them when its round is over, and does not wait: they arrive while the loop continues, and
        `row_sparse_data` uses them. Values are those of a run without this call; in asynchronous modes, those at the
        end of the step. One set of rows per parameter is kept until the next step; other ids are fetched when needed.

        Args:
            row_ids: A dict from RowSparseParameters of this Trainer, or their names, to ids as in `row_sparse_data`; or
                from an `Embedding`, `EmbeddingBag` or `EmbeddingBagCollection` to what it will be called with. Only the
                ids, if there is a single such parameter. They replace those of an earlier call.

        Raises:
            ConfigurationError: This is not such a parameter, or one appears twice, or ids are not integers, or a module
                does not take what is given for it.
            ArgumentTypeError: Ids of a parameter are a tuple.
            RowIdError: A table does not have these rows.

        Errors of the store are raised by `row_sparse_data`.
        """
        self._pipeline.memory.tables.want(row_ids)

    def row_sparse_pull(self, wanted: Sequence[tuple[RowSparseParameter, Tensor]]) -> list[Tensor]:
        """Fetch rows of row-sparse parameters, with one request to each server if they fit into a message. Blocks.

        With gradients disabled this is a mere read: it does not affect the staleness of later gradients.

        Args:
            wanted: Parameters, each with the rows that are wanted: int64, existing, distinct and ascending. A parameter
                may come several times.

        Returns:
            For each a CPU tensor of shape (number of ids, elements of a row).

        For errors see `RowSparseParameter.row_sparse_data`.
        """
        if torch.is_inference_mode_enabled():
            # What is made now, such as the store, is changed by later steps.
            with torch.inference_mode(False), torch.no_grad():
                return self.row_sparse_pull(wanted)
        keys = [self._key_of(parameter) for parameter, _ in wanted]
        given, binding = self._pipeline.memory.tables.given, self._pipeline.binding
        stored = [(key, ids) for key, (_, ids) in zip(keys, wanted, strict=True) if key not in given]
        rows = iter(binding.rows.pull(stored, torch.is_grad_enabled()))
        return [
            given[key].view(parameter.shape[0], -1)[ids] if key in given else next(rows)
            for key, (parameter, ids) in zip(keys, wanted, strict=True)
        ]

    def row_sparse_read(self, parameter: RowSparseParameter, ids: Tensor) -> Tensor | None:
        """Copy rows of a row-sparse parameter from its servers' shared memory; None if they must be fetched instead.

        Args:
            ids: int64, existing rows, in any order; the result has a row for each.
        """
        if torch.is_inference_mode_enabled():  # as in row_sparse_pull
            with torch.inference_mode(False), torch.no_grad():
                return self.row_sparse_read(parameter, ids)
        key, pipeline = self._key_of(parameter), self._pipeline
        if key in pipeline.memory.tables.given:
            return None
        return pipeline.binding.rows.read(key, ids, torch.is_grad_enabled())

    def _key_of(self, parameter: RowSparseParameter) -> int:
        """Return the key of a row-sparse parameter, after creating the store, which has its rows."""
        pipeline = self._pipeline
        pipeline.binding.check_open()
        pipeline.ready()
        pipeline.prepare()
        return pipeline.memory.tables.key_of(parameter)

    def row_sparse_write(self, parameter: RowSparseParameter, values: Tensor) -> None:
        """Keep new values for a row-sparse parameter until `set_data`; see `RowSparseParameter.copy_`."""
        tables = self._pipeline.memory.tables
        tables.give(tables.key_of(parameter), values)

    @exclusive
    def export_rows(
        self, parameter: RowSparseParameter, fname: str | os.PathLike[str], padding_idx: int | None
    ) -> None:
        """Write the rows of a hash table to a file; see `Embedding.export`."""
        pipeline = self._pipeline
        pipeline.binding.check_whole(_SAVED)
        key, holder = self._key_of(parameter), pipeline.binding.holder
        assert holder is not None
        spec = holder.plan.specs[key]
        assert spec.hash_table is not None
        table = RowTable(spec.key, spec.shape[1], torch_dtype(spec.dtype), spec.hash_table, padding_idx)
        write_row_file(fname, table, rows_by_slice(holder.plan, holder, key))

    @exclusive
    def load_rows(self, parameter: RowSparseParameter, read: Callable[[], PretrainedRows]) -> None:
        """Put rows into a hash table, collectively; see `Embedding.load_rows`."""
        pipeline = self._pipeline
        pipeline.refuse_in_join("load_rows()")
        with closing(pipeline.binding.open_agreement("load_rows()")) as agreement:
            with agreement.all_or_none("read the rows to be loaded"):
                pipeline.binding.check_whole()
                key = self._key_of(parameter)
                rows = read()
            # No worker continues while rank 0 still replaces rows on servers.
            with agreement.all_or_none("load the rows"):
                holder = pipeline.binding.holder
                assert holder is not None
                if agreement.rank == 0:
                    put_rows(holder.plan, holder, key, rows, pipeline.groups.optimizer)
                holder.rows.forget()

    @property
    def profiler(self) -> Profiler:
        """Profiles what this worker and the servers do for this Trainer's parameters.

        Creates the store if necessary, and blocks until the servers answer.

        Raises:
            ConfigurationError: There is no store, or one that cannot be profiled.
        """
        return self._pipeline.binding.profiler()

    @property
    def version(self) -> int:
        """The number of updates in this worker's weights, counting those of all workers; -1 without a store.

        With several servers, the greatest number counts.
        """
        return self._pipeline.binding.version

    @property
    def staleness(self) -> int:
        """How many updates other workers made since the weights with which this worker computed its last gradient.

        Counted up to that gradient's own update. Always 0 in synchronous modes. With several servers, the greatest
        number counts.
        """
        return self._pipeline.binding.staleness

    @exclusive
    def server_stats(self) -> list[dict[str, Any]]:
        """Return each server's counters for this Trainer's parameters, in server order; empty without a store.

        Each dict has one row in "tables", with the round, the version, bytes, and the ranks that the round waits for.
        Before the first step there is no store.
        """
        return self._pipeline.binding.stats()

    def close(self) -> None:
        """End training and leave the store. Idempotent. Rounds of other workers that need this one then fail."""
        self._leave(None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        try:
            if error is None:
                self._warn_of_what_had_no_effect()
        except BaseException as found:
            error = found
            raise
        finally:
            self._pipeline.memory.close()
            self._pipeline.binding.close(error)

    def _warn_of_what_had_no_effect(self) -> None:
        """Log options that have had no effect, when training ends."""
        accumulation = self._pipeline.accumulation
        if accumulation.pending:
            _log.warning(
                "the gradients of the last %d backward passes were not used, because an update needs %d; call "
                "set_progress() with the total number to update after a shorter last window",
                accumulation.pending,
                accumulation.counts,
            )
        # Not all kinds of schedules have a count in their state.
        told = [one.state_dict() for one in self._pipeline.schedules if one.by == "epoch"]
        waiting = [state for state in told if not state.get("count", state.get("last_epoch", 1))]
        if waiting and self.last is not None:
            _log.warning(
                "end_epoch() was never called, so %d schedules by epoch have not advanced; call it after each epoch",
                len(waiting),
            )
