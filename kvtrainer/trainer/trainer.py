"""The Trainer: what a training script builds, and all that it may ask of it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.optim
from torch import Tensor

from kvstore_server import check
from kvstore_server.optimizer import Optimizer, spec_for_store
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvtrainer.client.profiler import Profiler
from kvtrainer.common.thread_guard import exclusive
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, KVStoreError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.memory.gradients import largest_of
from kvtrainer.memory.row_sparse import RowSparseParameter, claimable, is_row_sparse
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.options.loss_scaler import LossScaler, plain_scaling, scaler_of
from kvtrainer.options.paramwise import ParamReport, apply_paramwise, rows_of
from kvtrainer.options.stages import STAGES, Accumulation, StageOptions
from kvtrainer.parallel.replicas import COPIES, devices_of, policy_of, spread
from kvtrainer.schedules.config import bind_schedules
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.states.format import SavedStates, State, read_state_file, write_state_file
from kvtrainer.sync.binding import BUCKETS, Binding
from kvtrainer.sync.select import select_store
from kvtrainer.trainer.groups import ParameterGroups, make_groups, refuse_parameters_of_ddp
from kvtrainer.trainer.join import join
from kvtrainer.trainer.optimizer_states import OptimizerStates, StateView
from kvtrainer.trainer.saving import adopt_rest, as_state_dict, check_fit, export_own_states, export_states
from kvtrainer.trainer.step import StepPipeline
from kvtrainer.types import Group, StepResult

_log = logging.getLogger(__name__)
_SAVED = "they are saved as they are"


@uncompiled
class Trainer(torch.optim.Optimizer):
    """Trains parameters with an optimizer over a kvstore; Gluon's Trainer and a torch.optim.Optimizer in one.

    Args:
        params: A Module, a DataParallel, `named_parameters()`, a dict (taken in sorted order of its keys), a list of
            parameters, or torch parameter groups. With names, as in the second and third of these, groups have
            "param_names", as those of torch's optimizers have then. Shared parameters count once. All workers must give
            the same. Those of lazy modules may get their shapes later, in a forward pass before the first step. In
            place of a parameter there may be a list of its replicas, one for each device, in the same order everywhere.
        optimizer: A name ("sgd", "adam", …: Gluon's numbers), a torch.optim class or instance, "torch:Adam", or
            what `kvtrainer.optimizer.create` returns. A torch instance shares its groups, so schedulers bound to it
            reach the Trainer, and hands its state over at the first use.
        optimizer_params: Options of the optimizer, under Gluon's or torch's names; None beside an instance. Among
            Gluon's is `compat`: "mxnet1" for the numbers of MXNet 1.9.1 in place of 2.x's. With a
            `lr_scheduler` that alone decides the learning rate of all groups.
        kvstore: A name for `kvtrainer.kvstore.create`, a store object, or None. The store is made at the first
            step. For one device of a single process a name without "dist" makes none: the update runs in place.
            "device" and "nccl" sum over the ranks of the torch.distributed group, if there is one.
        compression_params: How gradients are compressed on their way to a store: {"type": "2bit", "threshold": 0.5},
            "1bit" with its threshold, {"type": "topk", "ratio": 0.01}, "ternary", "int8", "fp16" or "bf16"; for
            "dist_sync" and "device". Without a store it has no effect. "pull": "bf16", alone or beside it, has servers
            that update the weights send them rounded to bfloat16, in half the bytes, while they go on with their own;
            with another codec, such as "pull": "ternary", they send encoded changes, and what these leave out later.
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
        overlap: Whether gradients go to the servers of "dist_sync", or are summed over the ranks of torch.distributed,
            during the backward pass, as they become complete, and not only in `step`. The results are the same to the
            bit; of more than two ranks that share no memory, to rounding. What the loop changes before `step`, by
            clipping say, is sent a second time.
        overlap_pull: Has been removed; True raises a ConfigurationError that names `overlap`, and False has no effect.
        hierarchy: Whether workers of one host sum their gradients in memory, so that with "dist_sync" one gradient of
            each host goes to the servers, and the new weights come once. Sums are then made within a host first, which
            can change their last bits; all workers must say the same.
        zero_copy: Whether parameters show memory that the store writes, that of servers on this host in synchronous
            rounds. If such a server dies in a round they may then be of two rounds, which the error says. A forked
            process that reads them sees them move.

    The data of the parameters move into flat buffers; move the model to its device and dtype before. While the
    optimizer runs in the store, the weights live there: what the loop writes into a parameter after the first step
    must be published by `set_data`. The next step raises WeightsWrittenError if it was not, also of writes through
    `p.data` or NumPy; small ones to more than 8 MiB may be found later, or never, on CUDA and without zero_copy.
    Several Trainers may have the same dense parameters. Not thread-safe. As a context manager it closes its store.

    Raises:
        ConfigurationError: an argument is wrong; nothing has been changed then.

        trainer = kvtrainer.Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
        loss_fn(net(x), y).backward()
        trainer.step(batch_size)
    """

    _pipeline: StepPipeline
    _is_built = False
    _has_warned_of_zeros = False
    _step_supports_amp_scaling = True
    """Tells torch.amp.GradScaler to call `step` in any case: it is for all workers together to skip it."""

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
                f"overlap_pull={overlap_pull!r:.80}: this option was removed; leave it out, and give overlap=True, "
                "which has gradients travel during the backward pass"
            )
        stages = StageOptions(clip_grad, amp, accumulate, schedules, detect_anomalous_params, on_nonfinite)
        options = {} if optimizer_params is None else check.as_mapping(optimizer_params)
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise ArgumentTypeError(
                f"optimizer_params must be a dict of options by name, got {optimizer_params!r:.80}"
            )
        built = create_optimizer(optimizer, **options)
        if built.param_idx2name:
            raise ConfigurationError(
                "param_idx2name is for a store, whose keys it names; in a Trainer, as in MXNet's, a parameter's own "
                "wd_mult decides. Leave it out, and set wd_mult = 0 on the parameters that shall not decay"
            )
        self._param_report: ParamReport | None = None
        if paramwise is not None:
            params, self._param_report = apply_paramwise(params, paramwise, options, built.hyper)
        groups, are_named = make_groups(params, built, optimizer)
        row_sparse = claimable(groups)
        parameters = [p for group in groups for p in group["params"]]
        if kvstore is not None:
            refuse_parameters_of_ddp(parameters)
        selection = select_store(
            kvstore,
            update_on_kvstore,
            compression_params,
            built.aggregate_num,
            largest_of(parameters),
            has_row_sparse=bool(row_sparse),
            devices=devices_of(groups),
            replicas=policy_of(groups),
            is_joint=isinstance(built, TorchOptimizer) and built.is_joint,
            overlap=overlap,
            hierarchy=hierarchy,
        )
        if selection.updates_weights and isinstance(built, TorchOptimizer):
            spec_for_store(built)  # raises if it cannot travel
        instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = ParameterGroups([list(group["param_names"]) for group in groups], built, instance)
        groups = [spread(group) for group in groups]
        if not are_named:  # as in torch: its checkpoints of named and of unnamed groups have other keys
            groups = [{n: v for n, v in group.items() if n != "param_names"} for group in groups]
        is_wrapped = hasattr(type(self).step, "hooked")
        super().__init__(groups, self._groups.defaults)
        if not is_wrapped:
            uncompiled(type(self).step)  # torch has put its wrapper around it, once for the class
        if instance is not None:
            # One list of groups for both, so that schedulers bound to the instance reach this optimizer.
            self._groups.live = instance.param_groups
        self._pipeline = StepPipeline(self._groups, Binding(selection, zero_copy))
        self._writer: Any = None
        """What takes numbers of each step."""
        self._is_built = True
        self._take_options(stages, STAGES, stages.schedules)
        for name, parameter in row_sparse:
            parameter.claim(self, name)

    def __repr__(self) -> str:
        """Show the optimizer, the store and the accumulation, and what torch's show."""
        shown = super().__repr__()
        if not self._is_built:
            return shown
        link = self._pipeline.link
        store = link.store or link.selection.kvstore
        lines = [
            f"{type(self).__name__} (",
            f"optimizer: {self._groups.optimizer.registered_name}",
            f"kvstore: {store.type if isinstance(store, KVStoreBase) else store}",
            f"update_on_kvstore: {link.updates_weights}",
            f"accumulate: {self.accumulation.counts}",
        ]
        return shown.replace(lines[0], "\n".join(lines), 1)

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

    def configure(self, **options: Any) -> None:
        """Change options before the first step: those of the constructor, by its names, and two more.

        Args:
            clip_grad, amp, accumulate, detect_anomalous_params, on_nonfinite: as of the constructor.
            schedules: are added to those that there are.
            bucket_size_mb: how much one reduction over torch.distributed takes, in MiB; -1: all of a dtype.
            coalesce: False reduces every parameter by itself there.

        Raises:
            ConfigurationError: an option is unknown or wrong, or there was a step; nothing has changed then.
        """
        link = self._pipeline.link
        if link.is_started:
            raise ConfigurationError(
                f"{', '.join(options)} cannot change after the first step; call configure() before it"
            )
        buckets = {name: options.pop(name) for name in BUCKETS if name in options}
        stages = self._pipeline.stages.changed(options)
        if buckets:
            link.check_buckets(buckets)
        self._take_options(stages, list(options), options.get("schedules", ()))
        if buckets:
            link.set_buckets(buckets)

    def _take_options(self, stages: StageOptions, changed: Sequence[str], schedules: Sequence[Any]) -> None:
        bound = bind_schedules(schedules, self, None, self._pipeline.schedules)
        self._pipeline.take_options(stages, changed, bound)

    # Steps.

    @exclusive
    def step(  # type: ignore[override]
        self,
        batch_size: float | SupportsIndex | Callable[[], Any] | None = None,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Reduce gradients over workers and update the weights; blocks until the new weights are here.

        With a batch size b, gradients are summed over workers, each divided by the b of its worker: pass the
        global batch size for a mean. It may differ from step to step and from worker to worker. Without one they are
        averaged over workers, as DistributedDataParallel does. Gradients stay readable until the next backward pass,
        without the loss scale, whoever put that in.
        Replicas are summed or averaged as workers are, and are equal afterwards; with kvstore=None each has its own
        update and state. Where backward passes are accumulated, it does nothing until there were enough of them.

        Returns the closure's result if there is a closure, and otherwise the StepResult, which is also `last`.

        Args:
            batch_size: A positive number, or a tensor of one whole number, which is read on the host; or the closure,
                as torch's optimizers take it.
            ignore_stale_grad: Leave out parameters without a new gradient instead of raising. Without a batch
                size they are always left out, save those that were written in place since the last step, as zeros
                by `zero_grad(set_to_none=False)`; see "What counts as a new gradient" in the documentation.
            closure: Called first, with gradients enabled.

        Raises:
            StaleGradientError: a parameter got no gradient since the last step; nothing has changed then.
            NotInitializedError: a parameter has no shape yet; nothing has changed then.
            ParameterMovedError: the data of a parameter were replaced; nothing has changed then.
            WeightsWrittenError: the loop has written weights that the store would replace; see `set_data`.
            NonFiniteGradientError: a gradient is not finite on any worker, and `on_nonfinite` is "raise"; on every
                worker, and nothing has changed.
            KVStoreError: the round failed on every worker; weights and optimizer state are as before.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        # A plain torch.amp.GradScaler leaves what it wants in attributes.
        scaling = partial(plain_scaling, self) if {"found_inf", "grad_scale"} <= vars(self).keys() else None
        began = time.monotonic()
        result = self._pipeline.step(batch_size, ignore_stale_grad, closure, scaling)
        report = self._pipeline.link.report
        report.steps, report.step_seconds = report.steps + 1, report.step_seconds + time.monotonic() - began
        if self._writer is not None:
            self._write_scalars(self._writer, time.monotonic() - began)
        return result

    def report(self, samples: int = 0, loss: float | None = None) -> None:
        """Tell servers how this worker is doing, for `kvtop` and other views of the job; costs nothing by itself.

        Steps and waits are counted anyway. What is told goes along with the next sign of life, within a second.

        Args:
            samples: How many more examples were trained on.
            loss: The present loss.

        Raises:
            ConfigurationError: samples is no whole number of at least 0, or the loss is no number.
        """
        if type(samples) is not int or samples < 0 or not (loss is None or check.is_number(loss)):
            raise ConfigurationError(
                f"report() takes a number of samples and a loss as plain numbers, not {samples!r:.80}, {loss!r:.80}; "
                "of a tensor that is loss.item()"
            )
        report = self._pipeline.link.report
        report.samples += samples
        report.loss = report.loss if loss is None else float(loss)

    def log_to(self, writer: Any) -> None:
        """Have rank 0 write numbers of every step to TensorBoard, or to another writer.

        Those are the learning rate, the loss that `report` was told, the norm of the gradient where it is measured, the
        loss scale, and the seconds in the step. Makes the store as `rank` does; other workers write nothing.

        Args:
            writer: Has `add_scalar(tag, value, step)`, as torch.utils.tensorboard.SummaryWriter; None ends it.

        Raises:
            ArgumentTypeError: it has not.
        """
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise ArgumentTypeError(
                f"log_to() takes a writer with add_scalar(tag, value, step), got {writer!r:.80}"
            )
        self._writer = writer if writer is not None and self.rank == 0 else None

    def _write_scalars(self, writer: Any, seconds: float) -> None:
        last, report = self.last, self._pipeline.link.report
        assert last is not None
        found = {"lr": last.lr, "grad_norm": last.grad_norm, "loss": report.loss, "step_seconds": seconds}
        if self._pipeline.loss_scaler is not None:
            found["loss_scale"] = last.loss_scale
        for name, value in found.items():
            if value is not None and not math.isnan(value):
                writer.add_scalar(f"train/{name}", value, report.steps)

    def wait(self) -> NoReturn:
        """Raise ConfigurationError: this method was removed with the option `overlap_pull`, for which alone it was."""
        raise ConfigurationError(
            "Trainer.wait() was removed together with overlap_pull: when step() returns, the new weights are here; "
            "leave the call out"
        )

    def _step_voting(self, overflows: bool, carried: float, *args: Any, **kwargs: Any) -> StepResult:
        """Make a step for a GradScaler: all workers skip it if gradients overflow on any.

        Args:
            overflows: whether this worker's do.
            carried: the factor of its loss, which has been taken out of the gradients.
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
        """List the parameters, of every device, whose gradients the coming step would use. As `step`, raises."""
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
        """Put the optimizer into the mode of training, if it has modes.

        Those of the package schedulefree train some weights and evaluate, or save, others: `eval()` puts these into the
        parameters, and `train()` the former. Call them on every worker, between steps. Other optimizers stay as they
        are.

        Raises:
            ConfigurationError: the optimizer has modes and runs in a store, or key by key; nothing has changed then.
            OptimizerError: the optimizer raised; nothing has changed then.
        """
        self._pipeline.set_mode("train")

    @exclusive
    def eval(self) -> None:
        """Put the optimizer into the mode of evaluation, if it has modes; see `train`."""
        self._pipeline.set_mode("eval")

    @exclusive
    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers and replicas. Change it before `update`. Blocks.

        With a loss scaler, gradients that overflow on any worker stay as they are, and `update` skips the step. The
        gradient is limited by `update`. While backward passes are accumulated it does nothing.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        self._pipeline.allreduce_grads()

    @exclusive
    def update(
        self, batch_size: float | SupportsIndex | None = None, ignore_stale_grad: bool = False
    ) -> StepResult:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Of replicas the gradients on the first device count. Returns how the step ended, which is also `last`.

        Raises:
            ConfigurationError: the optimizer runs in the store; or there are replicas that were not summed.
            StaleGradientError: as `step`.
        """
        return self._pipeline.update(batch_size, ignore_stale_grad)

    def join(self) -> AbstractContextManager[None]:
        """Let workers take different numbers of steps in the block; collective, and it ends on all workers together.

            with trainer.join():
                for x, y in my_batches:
                    loss_fn(net(x), y).backward()
                    trainer.step(batch_size)

        A worker that leaves the block takes part in the others' rounds with nothing, until all have left it; then all
        have the same weights, update counts and options (those of the lowest rank that had data last) and go on
        together. `step()` goes on dividing by the number of all workers, joined ones too. Gradients that were not given
        when the block is left are dropped, and windows of accumulation begin anew. The block needs no
        other call that all workers make together; `allreduce_grads` and `update` are refused in it, because what the
        loop does between them cannot be repeated on a worker that has left. With an exception the block is left
        without waiting, and the others fail when this worker goes.

        Raises:
            ConfigurationError: the store cannot do that, or blocks are nested.
            KVStoreError: as `step`.
        """
        return join(self._pipeline)

    @property
    def rank(self) -> int:
        """Which worker this is, from 0: with `num_workers`, what a DistributedSampler wants to know.

        Makes the store if it is not there yet; blocks until its servers answer, and raises as `create` does.
        """
        return self._pipeline.link.worker()[0]

    @property
    def num_workers(self) -> int:
        """How many workers train together; makes the store as `rank` does."""
        return self._pipeline.link.worker()[1]

    @property
    def last(self) -> StepResult | None:
        """How the last step ended; None before the first one."""
        return self._pipeline.last

    # Losses.

    def context(self) -> AbstractContextManager[Any]:
        """Return what the forward pass and the loss belong in: torch.autocast as `amp` says, else nothing."""
        self._pipeline.has_context = True
        precision = self._pipeline.stages.precision
        if precision is None:
            return nullcontext()
        device = next(p for group in self.param_groups for p in group["params"]).device
        return torch.autocast(device.type, precision.dtype)

    def backward(self, loss: Any) -> None:
        """Run a backward pass of the loss, or of several replicas', as the options say. Several are a list or dict.

        The loss is multiplied by the loss scale, and divided by the number of backward passes that make one update.
        `step` undoes the former.

        Raises:
            ConfigurationError: there is no loss.
            BackwardTwiceError: these losses of replicas had their backward pass.
            AnomalousParametersError: a parameter does not contribute to the loss, and that is to raise; nothing has
                happened then.
        """
        self._pipeline.backward(loss)

    def update_params(self, loss: Any, batch_size: float | SupportsIndex | None = None) -> StepResult:
        """`backward(loss)`, then `step(batch_size)`. The step does nothing until a window of accumulation is full.

        Without a batch size gradients are averaged over workers; `ignore_stale_grad` holds then. Raises as both do.
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
                "zero_grad() drops the gradients of %d backward passes of a window of %d, which reach no weight; call "
                "it after an update only, or not at all: the Trainer drops gradients that were used. This is said once",
                accumulation.pending,
                accumulation.counts,
            )
        self._pipeline.drop_gradients()
        if not set_to_none:
            self._pipeline.memory.note_zeroed()

    zero_grad.__doc__ = torch.optim.Optimizer.zero_grad.__doc__

    def report_anomalies(
        self, loss: Any, mode: bool | str = "log", logger: logging.Logger | None = None
    ) -> None:
        """Log parameters that a loss does not depend on, or raise; see `kvtrainer.anomalies.report_anomalies`."""
        self._pipeline.report_anomalies(loss, mode, logger)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What the option `amp` or `kvtrainer.amp.init_trainer` sets.

        With one, a step in which a gradient overflows on any worker changes nothing on any of them.
        """
        return self._pipeline.loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScaler | None) -> None:
        self._pipeline.loss_scaler = scaler

    @property
    def amp_loss_scale(self) -> float:
        """The factor of the next loss. Raises AmpNotInitializedError before `kvtrainer.amp.init_trainer`."""
        return scaler_of(self).loss_scale

    @property
    def accumulation(self) -> Accumulation:
        """The count of backward passes; read only."""
        return self._pipeline.accumulation

    def set_progress(self, iteration: int, max_iterations: int | None = None) -> None:
        """Set how many backward passes were made before, and how many there are in all.

        With accumulation a last window that is shorter then counts in full, and the last pass of all ends in an update.

        Raises:
            ConfigurationError: the numbers are impossible.
        """
        self._pipeline.accumulation.set_progress(iteration, max_iterations)

    # Options of groups, and what advances them.

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups, as torch's optimizers have them; options and parameters are read at every step.

        So a script may edit the lists: append a parameter, replace it, take it out, move it, or add a group; where
        there is a store, on every worker between the same steps, with the limits of `add_param_group`. State goes with
        a parameter; give that of a replaced one to the new one: `trainer.state[new] = state`. What cannot be trained is
        a ConfigurationError of the next call, until it is put right.
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
        """Add parameters with options of their own; optimizer state and update counts of the others stay.

        Where there is a store, do it on every worker between the same steps: the store gets the new parameters, with
        rank 0's values, at the next step, which otherwise fails on all workers. State on servers is fetched for that,
        and the servers keep the memory of the former table. Without synchronous rounds, with row-sparse parameters, and
        in a third-party store, it is possible before the first step only.

        Raises:
            ConfigurationError: the store does not allow it any more, or an argument is wrong; nothing has changed.
            WeightsWrittenError: the loop has written weights that the store would replace; nothing has changed.
        """
        if not self._is_built:
            # `make_groups` has checked what torch would check of each parameter.
            self.param_groups.append({**self.defaults, **param_group})
            return
        self._pipeline.follow_groups()
        group = self._new_group(param_group)
        names = group["param_names"]
        group = spread(group)
        if "param_names" not in self.param_groups[0]:
            del group["param_names"]
        super().add_param_group(group)
        try:
            self._pipeline.lay_out([*self._groups.names, names])
        except KVStoreError:
            self.param_groups.pop()
            raise

    def _new_group(self, param_group: Any) -> Group:
        """Check a group that is to be added, and give it names and options."""
        if not self._pipeline.can_grow():
            raise ConfigurationError(
                "the parameters are in the kvstore already, and with row-sparse ones, without synchronous rounds and "
                "in a third-party store no others can follow; add parameter groups before the first step"
            )
        if not isinstance(param_group, dict):
            raise ArgumentTypeError(f"a parameter group is a dict, got {type(param_group).__name__}")
        memory = self._pipeline.memory
        [group], _ = make_groups([param_group], self._groups.optimizer, None, taken=set(memory.names))
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
                f"parameter {name!r} is row-sparse, which decides about the Trainer's store; give it to the Trainer's "
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
                f"{', '.join(twice)}: in a parameter group already; add each parameter once"
            )
        return group

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's kind and numbers; with one parameter group, that group's numbers, live."""
        return self._groups.optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group, before `lr_mult`; that of the last update, if there is a
        lr_scheduler."""
        optimizer, first = self._groups.optimizer, self.param_groups[0]
        if optimizer.lr_scheduler is not None or "lr" not in first:
            return optimizer.learning_rate
        return float(first["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on. The optimizer may run anywhere.

        Raises:
            SchedulerInUseError: the optimizer has a lr_scheduler.
            ConfigurationError: `lr` is not a finite number.
        """
        if self._groups.optimizer.lr_scheduler is not None:
            self._groups.optimizer.set_learning_rate(lr)
        value = check.number("the learning rate", lr)
        self.learning_rate  # noqa: B018  (an optimizer may have none, which this says)
        for group in self.param_groups:
            group["lr"] = value

    def get_lr(self) -> dict[str, list[float]]:
        """{"lr": the learning rate of every group}; an empty list of an optimizer without any."""
        return {"lr": [float(group["lr"]) for group in self.param_groups if "lr" in group]}

    def get_momentum(self) -> dict[str, list[float]]:
        """{"momentum": that of every group}: betas[0] of the Adams, 0 where there is none."""
        rows = self.param_groups
        found = [group["betas"][0] if "betas" in group else group.get("momentum", 0.0) for group in rows]
        return {"momentum": [float(momentum) for momentum in found]}

    def describe_params(self) -> ParamReport:
        """List every parameter with its present options and the rules that decided them; as a str it is a table."""
        self._pipeline.follow_groups()
        if self._param_report is None:
            # Groups lack the names where the caller gave none.
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
        """Advance schedules that go by epoch or by a metric, such as ReduceLROnPlateau.

        Raises:
            ConfigurationError: one goes by a metric, and there is none; nothing has changed then.
        """
        schedules = self._pipeline.schedules
        if metric is None and any(schedule.by == "metric" for schedule in schedules):
            raise ConfigurationError(
                "a schedule goes by a metric, such as the loss on validation data; call end_epoch(metric)"
            )
        for schedule in schedules:
            if schedule.by == "epoch":
                schedule.step()
            elif schedule.by == "metric":
                schedule.step(metric)  # type: ignore[call-arg]

    # State.

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The optimizer state by parameter, wherever it is, with `state_dict`'s entries.

        A snapshot: it is fetched each time that it is read, and blocks for that; changes of what was read have no
        effect. `state[parameter] = {...}` replaces the state of one parameter; on servers, do it on every worker.
        """
        return StateView(self._ready_states)

    @state.setter
    def state(self, value: Any) -> None:
        if self._is_built:
            raise ConfigurationError(
                "the optimizer's state does not lie in a dict; give it to load_state_dict, or assign that of single "
                "parameters: trainer.state[parameter] = {...}"
            )

    def _ready_states(self) -> OptimizerStates:
        self._pipeline.ready()
        return self._pipeline.states

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Options and optimizer state in torch's form, wherever the state is kept; blocks while it is fetched.

        It has neither schedules nor a loss scale; `save_states` has. Any one worker may call it between its steps.
        Before the first update the entries are there already, with a step count of 0, because
        torch.distributed.checkpoint loads only into what it finds.
        """
        self._pipeline.link.check_whole(_SAVED)
        self._pipeline.ready()
        if (joint := self._pipeline.states.joint) is not None:
            return joint.state_dict()
        with self._groups.without_replicas():
            return super().state_dict()

    @exclusive
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and optimizer state of a Trainer or a torch optimizer. It must be of the same kind.

        Call it on every worker, after building the Trainer. State for a store is handed over when the store is
        there: now, or at the first step.

        Raises:
            ConfigurationError: the state belongs to another model or optimizer; nothing has changed then.
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
        # As the last hook it sees what the user's hooks made of the dict, before torch rounds the float32 state of
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's load_state_dict puts new groups in the place of the former ones; state has gone its own way.
        super().__setstate__({})
        self._groups.bind(state["param_groups"])

    def __getstate__(self) -> NoReturn:
        raise ConfigurationError(
            f"a {type(self).__name__} cannot be copied or pickled, because its parameters belong to a running model; "
            "save its state_dict() and load that into a new one"
        )

    @exclusive
    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save in one file all that another Trainer needs, beside the weights, to go on. It is as if never interrupted.

        Optimizer state is in it by the name of the parameter, and the options of every group, wherever the optimizer
        runs; blocks while state is fetched. Any one worker may save between its steps: no round ends without it, so
        what it saves belongs to its own last step.

        Raises:
            KVStoreError: a step was interrupted in its update, so weights and state may have only a part of it; `step`
                says so, too, and `state_dict`. A Trainer without a store saves what there is, and logs that.
            StateFileError: the file cannot be written; the former one is unchanged.
        """
        write_state_file(fname, self.export_saved_states())

    @exclusive
    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Take over what `save_states` saved, with any kvstore and any number of servers. It may be another job's.

        Collective: every worker calls it, between the same steps, with the same file, and it blocks until all have
        taken it over, or none. It makes the store if the first step has not yet. The numbers in the file win over those
        that the Trainer was built with; `lr_mult` and `wd_mult` of the parameters stay as they are. The weights are not
        in the file.

        Raises:
            StateFileError: it cannot be read, or is no file of saved states, or a damaged one.
            StateMismatchError: it belongs to another model or optimizer; names every difference.
            RoundAbortedError: another worker cannot read it, or it does not fit there; says which and why.
            ConfigurationError: several workers have a third-party store, over which they cannot agree.
            In each case nothing has changed, on any worker.
        """
        with closing(self._pipeline.link.open_agreement()) as agreement:
            with agreement.all_or_none(f"read {os.fspath(fname)!r}"):
                self._pipeline.ready()  # what is missing here is said before what is wrong with a file
                saved = read_state_file(fname)
                self.check_saved_states(saved)
            # No worker goes on while another one may still replace what is on servers.
            with agreement.all_or_none(f"take over the states of {os.fspath(fname)!r}"):
                self.adopt_saved_states(saved)

    def export_saved_states(self) -> SavedStates:
        """Return what `save_states` saves, as one value; blocks while state is fetched. Raises KVStoreError as that."""
        self._pipeline.link.check_whole(_SAVED)
        self._pipeline.ready()
        return export_states(self._pipeline)

    def export_own_states(self) -> SavedStates:
        """Return what of `export_saved_states` is this worker's alone, such as residuals; nothing is fetched."""
        self._pipeline.link.check_whole(_SAVED)
        return export_own_states(self._pipeline)

    def adopt_saved_states(self, saved: SavedStates) -> None:
        """Take over what `export_saved_states` gave, as `load_states` does; call it on every worker.

        Raises:
            StateMismatchError: it belongs to another model or optimizer, of which nothing has changed; says how.
        """
        self.check_saved_states(saved)
        self.load_state_dict(as_state_dict(saved, self._pipeline.memory.names))
        adopt_rest(saved, self._pipeline)

    def check_saved_states(self, saved: SavedStates) -> None:
        """Raise StateMismatchError unless `adopt_saved_states` can take this."""
        self._pipeline.ready()
        check_fit(saved, self._pipeline)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless `load_state_dict` can take this; not if hooks are to change it first."""
        states = self._ready_states()
        if not self._optimizer_load_state_dict_pre_hooks and states.joint is None:
            states.read(state_dict)

    # Weights and the store.

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store; None where none is needed, and before the first step if it was given by name."""
        return self._pipeline.link.store

    @property
    def num_replicas(self) -> int:
        """How many copies of every parameter this process has."""
        return len(self._pipeline.memory.devices)

    @property
    def has_begun(self) -> bool:
        """Whether there was a step or a `set_data`. A store may then hold other weights than the model."""
        return self._pipeline.link.is_started

    @exclusive
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
        pipeline = self._pipeline
        pipeline.refuse_in_join("set_data()")
        pipeline.link.check_open()
        pipeline.ready()
        if values is not None:
            pipeline.memory.write(values)
        if pipeline.prepare():
            if pipeline.link.exchange is None:
                pipeline.memory.share_weights()
            return
        pipeline.memory.check_in_place()
        pipeline.link.assign(pipeline.memory)
        pipeline.memory.share_weights()
        pipeline.memory.accept_writes(pipeline.link.has_weights)

    def pull_weights(self) -> dict[Tensor, Tensor]:
        """Fetch the store's present weights by parameter, if updates count one by one; blocks.

        The parameters here may lack what others gave since, and go on as they are: the next gradient is as old as
        they are, whatever was pulled. Written into all parameters, the weights count as theirs; to know them again, a
        copy is kept until the next step. Empty where updates count together, and without row-sparse parameters.
        """
        link, memory = self._pipeline.link, self._pipeline.memory
        if link.holder is None or not link.updates_weights or link.holder.is_sync:
            return {}
        arenas = link.holder.look()
        rows = zip(memory.parameters, memory.plan.specs, memory.plan.key_offsets, strict=True)
        return {
            p: arenas[spec.dtype][at : at + spec.numel].view(spec.shape).clone()
            for p, spec, at in rows
            if not spec.row_sparse and spec.shape == p.shape
        }

    def snapshot(self) -> NoReturn:
        """Raise ConfigurationError: this method was removed; `p.detach().clone()` of each parameter takes its place."""
        raise ConfigurationError(
            "Trainer.snapshot() was removed; between two steps, copies of the weights by name are "
            "{name: p.detach().clone() for name, p in model.named_parameters()}"
        )

    @exclusive
    def prefetch(self, row_ids: Any) -> None:
        """Have the next `step` ask for the row-sparse rows of the next batch; returns at once.

        The step asks for all of them together when its round is over, and does not wait for them: they travel while the
        loop goes on, and `row_sparse_data` takes them. The numbers are those of a run without this call; where
        contributions count one by one, those of the moment when the step ended. What is kept is one set of rows for
        each parameter, until the next step; ids that were not named are fetched when they are needed.

        Args:
            row_ids: A dict of RowSparseParameters of this Trainer, or their names, and the ids, as of
                `row_sparse_data`; or the ids, if there is one such parameter alone. They replace those of an earlier
                call.

        Raises:
            ConfigurationError: this is no such parameter, or one is there twice, or these are no whole numbers.
            RowIdError: a table has no such rows.

        Errors of the store are raised by `row_sparse_data`.
        """
        self._pipeline.memory.tables.want(row_ids)

    def row_sparse_pull(self, parameter: RowSparseParameter, ids: Tensor) -> Tensor:
        """Fetch rows of a row-sparse parameter; see `RowSparseParameter.row_sparse_data`.

        Where gradients are disabled they are only looked at: they make no later gradient seem newer.
        """
        key, pipeline = self._key_of(parameter), self._pipeline
        given = pipeline.memory.tables.given.get(key)
        if given is not None:
            return given.view(parameter.shape[0], -1)[ids]
        return pipeline.link.rows.pull(key, ids, torch.is_grad_enabled())

    def row_sparse_read(self, parameter: RowSparseParameter, ids: Tensor) -> Tensor | None:
        """Copy rows of a row-sparse parameter where its servers have them; None where they have to be fetched.

        Args:
            ids: int64, of rows that there are, in any order; a row comes for each.
        """
        key, pipeline = self._key_of(parameter), self._pipeline
        if key in pipeline.memory.tables.given:
            return None
        return pipeline.link.rows.read(key, ids, torch.is_grad_enabled())

    def _key_of(self, parameter: RowSparseParameter) -> int:
        """Find the key of a row-sparse parameter, whose rows are there then; makes the store."""
        pipeline = self._pipeline
        pipeline.link.check_open()
        pipeline.ready()
        pipeline.prepare()
        return pipeline.memory.tables.key_of(parameter)

    def row_sparse_write(self, parameter: RowSparseParameter, values: Tensor) -> None:
        """Keep new values for a row-sparse parameter until `set_data`; see `RowSparseParameter.copy_`."""
        tables = self._pipeline.memory.tables
        tables.give(tables.key_of(parameter), values)

    @property
    def profiler(self) -> Profiler:
        """Profiles what this worker and the servers do for this Trainer's parameters.

        Makes the store if the first step has not yet; blocks until the servers answer.

        Raises:
            ConfigurationError: there is no store, or one whose workings are its own.
        """
        return self._pipeline.link.profiler()

    @property
    def version(self) -> int:
        """How many updates are in the weights that this worker has, all workers' together; -1 without a store.

        Of several servers the one that had applied most counts.
        """
        return self._pipeline.link.version

    @property
    def staleness(self) -> int:
        """How many updates others made since the weights of this worker's last gradient. Its update ends the count.

        Always 0 with synchronous rounds. Of several servers the one with most counts.
        """
        return self._pipeline.link.staleness

    @exclusive
    def server_stats(self) -> list[dict[str, Any]]:
        """Return each server's counters for this Trainer's parameters, in server order; empty without a store.

        One dict for each server: in "tables" is one row, with the round, the version, bytes, and the ranks that the
        round waits for. Before the first step there is no store yet.
        """
        return self._pipeline.link.stats()

    def close(self) -> None:
        """End training and leave the store; idempotent. Other workers' rounds that need this one then fail."""
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
            self._pipeline.link.close(error)

    def _warn_of_what_had_no_effect(self) -> None:
        """Training ends: log what was asked for and never came to anything."""
        accumulation = self._pipeline.accumulation
        if accumulation.pending:
            _log.warning(
                "the gradients of the last %d backward passes reached no weight: %d make an update; set_progress() "
                "with the number of all lets a shorter window count",
                accumulation.pending,
                accumulation.counts,
            )
        # As far as their states say so.
        told = [one.state_dict() for one in self._pipeline.schedules if one.by == "epoch"]
        waiting = [state for state in told if not state.get("count", state.get("last_epoch", 1))]
        if waiting and self.last is not None:
            _log.warning(
                "no epoch was ended, so %d schedules that go by epoch never moved; call end_epoch() after each epoch",
                len(waiting),
            )
