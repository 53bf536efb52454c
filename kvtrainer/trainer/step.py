"""The pipeline of a step, over any kvstore.

    [anomalies? → scale by loss scale and 1/k → backward] → fresh gradients? → gather → reduce over workers and replicas
    → norm, finite? → skip, or clip and update, here or in the store → new weights → loss scale → schedules

Every feature is an option of one of these stages. `StepPipeline.step` runs all of them, in this order;
`allreduce_grads` and `update` are its two halves.

Invariants:

- Checks come before the round. A step that raises before or in its round changes no weight, state or count; what all
  workers must know (an overflow, a bad loss) travels in the round as a veto, so all of them skip the step.
- From the first change to the last the step is marked as incomplete. If it is interrupted in between, later steps and
  `state_dict` raise.
- Decisions about a gradient are functions of values that all workers have in common, so all workers decide the same.

In a `join` block, workers without data repeat what the others' rounds did (see join.py).
"""

from __future__ import annotations

import logging
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, SupportsIndex

import torch

from kvstore_server.check import is_number
from kvstore_server.engine.agreed_options import effective_hypers
from kvstore_server.optimizer.rows import bound_of
from kvstore_server.optimizer.torch_family import TorchOptimizer
from kvstore_server.shard.norms import Decision, measure
from kvtrainer.anomalies import describe_nonfinite, losses_of, report_anomalies
from kvtrainer.errors import (
    REPLACED,
    ConfigurationError,
    GradientWriteWarning,
    KVStoreError,
    NoGradientWarning,
    NonFiniteGradientError,
    SparseGradientWarning,
    level_of_user,
)
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.options.loss_scaler import LossScaler
from kvtrainer.options.stages import Accumulation, GradientCheck, GradientLimits, StageOptions
from kvtrainer.parallel.batch import ReplicaLosses
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.sync.binding import Binding
from kvtrainer.sync.client_state import STEP
from kvtrainer.sync.exchange import RoundResult
from kvtrainer.trainer.group_edits import read_edited
from kvtrainer.trainer.groups import ParameterGroups
from kvtrainer.trainer.optimizer_states import JointOptimizerUpdate, OptimizerStates
from kvtrainer.types import NO_TARGETS, StepResult

_log = logging.getLogger(__name__)


class StepPipeline:
    """The stages of a step, what they work on, and what they keep from step to step. Not thread-safe."""

    def __init__(self, groups: ParameterGroups, binding: Binding) -> None:
        self.groups = groups
        self.binding = binding
        binding.read_hypers = weakref.WeakMethod(self._read_hypers)
        self.memory = Memory(groups.live, groups.names)
        groups.bind(groups.live)
        groups.set_trained(groups.names)
        self.states = OptimizerStates(groups, self.memory, binding)
        self.stages = StageOptions()
        self.loss_scaler: LossScaler | None = None
        self.accumulation = Accumulation()
        self.schedules: list[BoundSchedule] = []
        self.last: StepResult | None = None
        self.num_steps = 0
        """How many steps with a round this rank has made, in earlier processes, too."""
        self.last_described: tuple[int, dict[str, Any] | None] = (-1, None)
        """The round of the last step that was described to a successor, and options, counts and schedules before it."""
        self.last_ended: tuple[int, Sequence[bool] | None] = (-1, None)
        """The round of the last of these steps that has ended, and which keys it has updated; None: it was skipped."""
        self.num_assigned = 0
        """How often weights were published since the last step, by earlier processes, too."""
        self.num_assigns_known = 0
        """How many of these the script repeats because an earlier process made them: they are not made again."""
        self.num_left_out = 0
        """How many steps were made without a gradient of this worker, because it came too late."""
        self.catch_up: Callable[[RoundResult], None] | None = None
        """Takes over from another worker what rounds without this one have changed beside the weights."""
        self._late: RoundResult | None = None
        """The result of the round of this step, if this worker was left out of it."""
        self.describe_state: Callable[[str], bytes] | None = None
        """Packs what a successor needs if the coming round, of this kind, is the last one; None if none is wanted."""
        self.has_context = False
        """Whether the context of the forward pass was ever requested."""
        self.is_in_join = False
        self._needs_backward = ""
        """The option that only works in `backward`, or ''."""
        self.voting: float | None = None
        """The loss scale of the script's own scaler, during a step that all workers may skip for it."""
        self.is_bad = False
        """Whether this worker already knows that the present gradients must not be used."""
        self.bad_loss = ""
        """The text for an error about a non-finite loss on this worker."""
        self._reduced: list[bool] | None = None
        """Between `allreduce_grads` and `update`: which gradients were summed."""
        self._is_vetoed = False
        """Between `allreduce_grads` and `update`: whether a gradient overflowed on any worker."""
        self._effective: tuple[dict[str, Any], list[Any]] = ({}, [])
        """The options of the last update in this process, and the resulting ones of each key."""
        self._has_warned = self._has_warned_of_writes = self._has_warned_of_rows = False

    def take_options(
        self, stages: StageOptions, changed: Sequence[str], added: Sequence[BoundSchedule]
    ) -> None:
        """Use these options. Only parts that belong to `changed` options are built again."""
        scaler = None if stages.precision is None else stages.precision.scaler
        if "accumulate" in changed:
            self.accumulation = Accumulation(stages.accumulate)
        if "amp" in changed:
            self.loss_scaler = scaler
        self._needs_backward = "" if scaler is None else "amp"
        if stages.detect_anomalous_params:
            self._needs_backward = "detect_anomalous_params"
        self.stages = stages
        self.schedules += added

    def backward(self, loss: Any) -> None:
        """Run the backward pass of a loss, scaled by the loss scale and 1 / accumulate; see `Trainer.backward`.

        If `on_nonfinite` asks for that, a loss that is not finite makes the step skip, or fail, on all workers.
        """
        losses = losses_of(loss)
        if not losses:
            raise ConfigurationError(f"there is no loss in {loss!r:.80}, so there is nothing to learn from")
        if self.stages.detect_anomalous_params:
            self.report_anomalies(losses, self.stages.detect_anomalous_params)
        if isinstance(loss, ReplicaLosses):
            loss.mark_used()
        if self.stages.limits.on_nonfinite in ("raise", "skip") and (problem := describe_nonfinite(losses)):
            # All workers must skip the step, so it is sent with the round.
            self.is_bad, self.bad_loss = True, f"{problem}: "
        factor = 1.0 / self.accumulation.divisor
        if self.loss_scaler is not None:
            self.loss_scaler.mark_scaled()
            factor *= self.loss_scaler.loss_scale
        if factor != 1.0:
            losses = [one * factor for one in losses]
        self.memory.attach()
        torch.autograd.backward(losses)
        self.accumulation.count()

    def report_anomalies(
        self, loss: Any, mode: bool | str = "log", logger: logging.Logger | None = None
    ) -> None:
        replicas = zip(*(device.parameters for device in self.memory.devices), strict=True)
        report_anomalies(loss, dict(zip(self.memory.names, map(list, replicas), strict=True)), mode, logger)

    def drop_gradients(self) -> None:
        """Record that the present gradients were dropped, with what was known about them."""
        self.is_bad, self.bad_loss = False, ""
        if self.loss_scaler is not None:
            self.loss_scaler.mark_dropped()

    def step(
        self,
        batch_size: float | SupportsIndex | None,
        ignore_stale_grad: bool,
        closure: Callable[[], Any] | None,
        loops_scaling: Callable[[int], tuple[bool, float]] | None,
    ) -> Any:
        """Run a step. Arguments, result and errors are those of `Trainer.step`.

        If a torch GradScaler calls the step, `loops_scaling` returns, for a number of workers, whether that scaler has
        found an overflow, and the factor that undoes its scale.
        """
        # 1. Evaluate the closure, and refuse to continue from an incomplete step.
        scale = self._scale_of(batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.binding.check_open()
        self.binding.check_whole()
        if self.accumulation.counts > 1 and self._is_waiting():
            return self.last if closure is None else loss
        # 2. Find new gradients, and create the store at the first step.
        undone = carried = 1.0 if self.loss_scaler is None else self.loss_scaler.factor
        fresh = self.new_gradients(batch_size, ignore_stale_grad)
        if not ignore_stale_grad and not self._has_warned and not any(fresh):
            self._has_warned = True
            warnings.warn(
                f"step() contributes nothing: none of the {len(self.memory.names)} parameters got a gradient since the "
                f"last step. {REPLACED} If this is intended, pass ignore_stale_grad=True. This warning appears once",
                NoGradientWarning,
                stacklevel=5,
            )
        if not self.binding.is_started:
            self.prepare()
        # 3. Gather, reduce, and update here or in the store.
        was_bad = self.is_bad
        again = None if closure is None else self._make_evaluator(closure, loss, scale)
        if loops_scaling is not None:
            overflows, factor = loops_scaling(self.binding.num_workers)
            undone *= factor
            self.is_bad = was_bad or overflows
        try:
            scale *= undone / self._gather(fresh, carried)
            updated: list[bool] | None = fresh
            verdict, in_store = GradientCheck(), False
            if (exchange := self.binding.exchange) is not None:
                kept = 1.0 if exchange.updates_weights else self.kept_scale(undone)
                scale *= kept
                mean = (scale, self.memory.num_averaged) if batch_size is None else None
                parts = 1 if mean is None else self.binding.num_counted * self.memory.num_averaged
                updated, verdict = self._reduce(fresh, scale / parts, mean)
                scale, in_store = 1.0 / kept, exchange.updates_weights
            if updated is not None and not in_store:
                verdict = self.update_here(updated, scale, again)
                updated = None if verdict.decision.skip else updated
            elif updated is not None and self.memory.has_replicas:
                self.memory.share_weights()
        except BaseException:
            self.is_bad = was_bad
            raise
        # 4. Counts, loss scale, schedules, and rows for the next batch.
        self._finish(fresh, updated, verdict, undone)
        if self.memory.tables.wanted:
            self.binding.rows.prefetch(self.memory.tables.take_wanted())
        return self.last if closure is None else loss

    def allreduce_grads(self) -> None:
        """Write the gradients' sums over workers to `p.grad`, without an update; see `Trainer.allreduce_grads`."""
        self.refuse_in_join("allreduce_grads()")
        self._refuse_in_store("allreduce_grads()")
        self.binding.check_whole()
        if self.accumulation.counts > 1 and self._is_waiting():
            return
        fresh = self.new_gradients(None, True)
        self.prepare()
        if self.binding.exchange is None:
            return
        carried = 1.0 if self.loss_scaler is None else self.loss_scaler.factor
        summed, _ = self._reduce(fresh, 1.0 / self._gather(fresh, carried))
        if summed is not None and self.limits.checks_finite and not self.memory.is_finite():
            summed = None
        self._is_vetoed, self._reduced = summed is None, summed or fresh
        self.memory.forget_gradients()
        if summed is not None:
            if self.loss_scaler is not None and any(summed) and not any(fresh):
                self.loss_scaler.mark_scaled()  # this worker has no gradient, but those of others are scaled
            # The rows of a single gradient need not be written back.
            self.memory.scatter(summed, self.binding.num_workers > 1 or self.memory.has_replicas)
        self.binding.guard.end()

    def update(self, batch_size: float | SupportsIndex | None, ignore_stale_grad: bool) -> StepResult:
        """Update the weights here, by own gradients or the sums of `allreduce_grads`; see `Trainer.update`."""
        self.refuse_in_join("update()")
        self._refuse_in_store("update()")
        self.binding.check_whole()
        if self.accumulation.counts > 1 and self._is_waiting():
            assert self.last is not None
            return self.last
        scale = self._scale_of(batch_size)
        undone = 1.0 if self.loss_scaler is None else self.loss_scaler.factor
        scale *= undone
        # 1. The script's own gradients, without a sum, or the sums of allreduce_grads.
        if self._reduced is None:
            present = self.new_gradients(batch_size, ignore_stale_grad)
            self.prepare()
            if self.memory.has_replicas and self.binding.exchange is not None:
                raise ConfigurationError(
                    f"update() found gradients of {len(self.memory.devices)} replicas that were not summed; call "
                    "allreduce_grads() before it, or step() instead of both"
                )
            self.memory.gather(present)
        else:
            # Sums count as new, even if only other workers had a gradient; unless they were dropped since.
            rows = zip(self._reduced, self.memory.parameters, strict=True)
            has_sum = [was_summed and p.grad is not None for was_summed, p in rows]
            present = self.new_gradients(batch_size, ignore_stale_grad, has_sum)
            self.prepare()
            if batch_size is None and self.binding.exchange is not None:
                scale /= self.binding.num_workers * self.memory.num_averaged
            if not self._is_vetoed:
                self.memory.gather_sums(present)
        # 2. Update, unless any worker has vetoed.
        self.is_bad = self.is_bad or self._is_vetoed
        verdict = self.update_here(present, scale)
        return self._finish(present, None if verdict.decision.skip else present, verdict, undone)

    # Before the gradients.

    def ready(self) -> None:
        """Synchronise with what the user has changed: groups, parameters, and state of a torch instance."""
        self.follow_groups()
        if not self.memory.is_settled:
            self.memory.allocate()
            self.states.make_places()
        elif self.memory.left_out and (late := self.memory.latecomers()):
            if not self.can_grow("parameters that get their shape"):
                raise ConfigurationError(
                    f"{', '.join(late)}: could not be trained when the other parameters were added to the kvstore, "
                    "because of its shape or kind; run a forward pass through the whole model, and set requires_grad, "
                    "before the first step"
                )
            self.lay_out(self.groups.names)
        if self.groups.instance is not None:
            self.states.follow_instance()

    def follow_groups(self) -> None:
        """Adopt the present parameters of the groups, if a script has edited their lists.

        State stays with its parameter, also in another group. A parameter that is in no group any more keeps its values
        and is no longer trained; its state is kept as long as it exists, in case it returns.
        """
        # 1. The usual case: nothing was edited.
        self.groups.follow_instance()
        if not self.groups.are_edited():
            return
        if self.memory.has_replicas:
            raise ConfigurationError(
                f"the groups have the parameters of {len(self.memory.devices)} devices, so their lists cannot be "
                "edited; restore them, and add parameters with add_param_group"
            )
        # 2. Check the edits, and whether the store can follow.
        edited = read_edited(self.groups)
        if not self.can_grow("edited parameter groups"):
            raise ConfigurationError(
                "the parameter groups were edited, but the kvstore already has the parameters; in asynchronous modes, "
                "with row-sparse parameters, and in a third-party store they cannot change. Restore the groups, and "
                "edit them before the first step"
            )
        # 3. Lay the parameters out again. If that fails, restore the groups' entries.
        former = [dict(group) for group in self.groups.live]
        has_names = any("param_names" in group for group in former)
        for group, entries in zip(self.groups.live, edited, strict=True):
            group.update({n: v for n, v in entries.items() if has_names or n != "param_names"})
        try:
            self.lay_out([entries["param_names"] for entries in edited])
        except BaseException:
            for group, entries in zip(self.groups.live, former, strict=True):
                group.clear()
                group.update(entries)
            raise

    def can_grow(self, what: str = "add_param_group()") -> bool:
        """Return whether the store still accepts other parameters."""
        self.refuse_in_join(what)
        return self.binding.check_growth(self.memory)

    def lay_out(self, names: list[list[str]]) -> None:
        """Lay out the present parameters of the groups, and move state and facts about gradients to the new layout."""
        # What may fail comes first: fetching state, and checking parameters.
        states, former = self.states.current(), self.memory
        memory = Memory(self.groups.live, names)
        memory.succeed(former)
        self.memory = memory
        self.groups.bind(self.groups.live)
        self.groups.set_trained(names)
        self._effective = ({}, [])
        self.states.move(memory, states)

    def prepare(self, resumes: bool = False) -> bool:
        """Create the store, and give every worker rank 0's weights. Collective. Return whether this call did it.

        With `resumes`, go on instead where an earlier process of this rank has ended, if there was one.
        """
        if self.binding.is_started:
            return False
        self._decide()
        self.binding.start(self.memory, self.groups.optimizer, self.limits if resumes else None)
        if _log.isEnabledFor(logging.DEBUG):
            for name, takes_part in zip(self.memory.names, self.memory.participating(), strict=True):
                if takes_part:
                    _log.debug("parameter %s will be updated", name)
        if self.binding.exchange is not None and self.memory.has_replicas:
            self.memory.share_weights()
        self.memory.accept_writes(self.binding.has_weights)
        self.states.hand_over()
        self.binding.guard.end()
        return True

    def _decide(self) -> None:
        if self.binding.is_open:
            grads = [p.grad for device in self.memory.devices for p in device.parameters]
            self.binding.decide(any(grad is not None and grad.is_sparse for grad in grads))

    def refuse_in_join(self, method: str) -> None:
        if self.is_in_join:
            raise ConfigurationError(
                f"{method} is not possible in a join() block, because workers that have left it cannot take part; use "
                "step() in the block, and other methods outside"
            )

    def _refuse_in_store(self, method: str) -> None:
        self._decide()
        if not self.binding.allows_halves:
            raise ConfigurationError(
                f"{method} is not possible while the optimizer runs in the kvstore; build the Trainer with "
                "update_on_kvstore=False"
            )
        self.refuse_resumable(method)
        self.binding.check_open()

    def refuse_resumable(self, method: str) -> None:
        """Raise ConfigurationError if another process may continue this one, but could not repeat this method."""
        if self.describe_state is not None and not self.binding.updates_weights:
            raise ConfigurationError(
                f"{method} is not possible after resume() with update_on_kvstore=False: another process could not "
                "repeat it; use step()"
            )

    def _is_waiting(self) -> bool:
        """Return whether an update needs more backward passes; `last` then says that nothing was updated."""
        if not self.accumulation.in_window:
            raise ConfigurationError(
                f"accumulate={self.accumulation.counts} counts the backward passes that trainer.backward(loss) or "
                "trainer.update_params(loss) make, and there was none since the last step; call that instead of "
                "loss.backward()"
            )
        if not self.accumulation.is_boundary:
            self.last = self._result(updated=False)
        return not self.accumulation.is_boundary

    # Which gradients there are, and what they are multiplied by.

    def new_gradients(
        self, batch_size: float | SupportsIndex | None, ignores_stale: bool, summed: list[bool] | None = None
    ) -> list[bool]:
        """Return which parameters have a new gradient; `summed` ones are known, see `Memory.fresh`."""
        self.ready()
        # 1. Find them. Only a step with a batch size insists on all.
        is_strict = batch_size is not None
        fresh = self.memory.fresh(
            is_strict and not ignores_stale, not is_strict and not ignores_stale, summed
        )
        if self.memory.has_writes() and not self._has_warned_of_writes:
            self._warn_of_writes(is_counted=not is_strict and not ignores_stale)
        # 2. Options that only work in `backward` or `context`.
        needs, precision, scaler = self._needs_backward, self.stages.precision, self.loss_scaler
        is_scaled = needs == "amp" and scaler is not None and scaler.is_scaled
        if needs and not self.accumulation.in_window and not is_scaled and any(fresh):
            raise ConfigurationError(
                f"the option {needs} works in trainer.backward(loss) and trainer.update_params(loss), but "
                "the gradients came from loss.backward(); call one of those, or leave the option out"
            )
        if precision is not None and precision.scaler is None and not self.has_context and any(fresh):
            raise ConfigurationError(
                "amp with dtype 'bfloat16' works in trainer.context(), which was never entered; compute the forward "
                "pass and the loss in it, or leave amp out"
            )
        return fresh

    def _warn_of_writes(self, is_counted: bool) -> None:
        written, overwritten = self.memory.written(), self.memory.take_overwritten()
        self.memory.check_in_place()  # moving a model writes to its gradients, too; that error is clearer
        self._has_warned_of_writes = True
        what = f"step() {'counts' if is_counted else 'leaves out'} gradients"
        if not written:
            what = "the backward pass has dropped gradients"
        warnings.warn(
            f"{what} that the last step had used and that were written in place since, of "
            f"parameters {', '.join(map(repr, written or overwritten))}: these may be new values, or old ones that "
            "were clipped or unscaled. If they are new, assign them (p.grad = values), or call "
            "zero_grad(set_to_none=False) before you write; if not, set them to None. This warning appears once",
            GradientWriteWarning,
            stacklevel=level_of_user(),
        )

    def _scale_of(self, batch_size: float | SupportsIndex | None) -> float:
        """Return the factor for gradients, before the mean over workers and the loss scale."""
        rescale = self.groups.optimizer.rescale_grad
        if batch_size is None:
            return rescale
        is_known = type(batch_size) in (int, float) or is_number(batch_size)  # also NumPy's numbers
        number: Any = batch_size if is_known else _as_integer(batch_size)
        if number is None or not 0 < number < math.inf:
            more = "" if is_known else "; of a tensor or an array it takes one integer"
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}{more}")
        return rescale / float(number)

    def kept_scale(self, undone: float) -> float:
        """Return the part of the loss scale to leave in the sums where workers update, so that float16 does not
        underflow.

        It is the same on all workers. `undone` removes the loss scale from this worker's gradients. Codecs need
        unscaled ones.
        """
        exchange, grads = self.binding.exchange, self.memory.arena.grads
        if (
            exchange is None
            or exchange.updates_weights
            or "float16" not in grads
            or self.binding.is_lossy(grads)
        ):
            return 1.0
        if exchange.num_workers == 1:
            return 1.0 / undone
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    def _make_evaluator(
        self, closure: Callable[[], Any], loss: Any, scale: float
    ) -> Callable[[], Any] | None:
        """Return a function with which a torch optimizer evaluates the loss again; None for updates key by key."""
        joint = self.states.joint
        if joint is None:
            return None
        is_alone = (
            self.binding.exchange is None and not self.memory.has_replicas and self.accumulation.counts == 1
        )
        is_plain = is_alone and not self.limits.is_needed and self.loss_scaler is None
        had = [loss]

        def again() -> Any:
            """Return the loss that was computed already; later, evaluate it, with gradients scaled in the same way."""
            if had:
                return had.pop()
            if not is_plain:
                raise ConfigurationError(
                    f"{type(joint.instance).__name__} evaluates the loss again within a step, which goes only in one "
                    "process, on one device and without clip_grad, amp, on_nonfinite and accumulation"
                )
            with torch.enable_grad():
                found = closure()
            for parameter in self.memory.parameters:
                if parameter.grad is not None and scale != 1.0:
                    parameter.grad.mul_(scale)
            return found

        return again

    # Sums, limits and updates.

    @property
    def limits(self) -> GradientLimits:
        """What is checked about the gradient of the coming step."""
        limits = self.stages.limits
        return limits if self.loss_scaler is None and self.voting is None else limits.with_scaler

    def _gather(self, fresh: Sequence[bool], factor: float) -> float:
        """Copy new gradients into the arena; with a store, also sum those of replicas.

        Returns the factor that was applied: 1, or `factor`, which undoes the loss scale. Gradients to be compressed are
        unscaled first, because the threshold and the residuals are for unscaled gradients.
        """
        # 1. Which gradients can be read where they are, without a copy.
        memory, binding = self.memory, self.binding
        zero_copy_keys: Collection[int] = ()
        targets = NO_TARGETS
        if self.limits.is_needed and not binding.checks_sums(memory.arena.grads):
            pass  # none: the norm is measured on the arena
        elif binding.exchange is None:
            zero_copy_keys = memory.arena.long if self.groups.optimizer.takes_pieces else ()
        elif not memory.has_replicas and not (factor != 1.0 and binding.is_lossy(memory.arena.grads)):
            zero_copy_keys, shared_grads = binding.exchange.zero_copy_keys, binding.exchange.shared_grads
            targets = NO_TARGETS if shared_grads is None else shared_grads.targets()
        # 2. Copy the others, and undo the loss scale before compression.
        memory.gather(fresh, zero_copy_keys, targets)
        if not self._has_warned_of_rows and any([device.rows for device in memory.devices]):
            self._warn_of_rows()
        if factor != 1.0 and binding.is_lossy(memory.arena.grads):
            memory.scale(factor)
        else:
            factor = 1.0
        # 3. Sum over replicas, compressed if the store's option says so.
        if memory.has_replicas and binding.exchange is not None:
            compressor = binding.replicas
            if compressor is not None and (
                self.is_bad or (self.limits.checks_finite and not memory.is_finite())
            ):
                compressor = None  # the uncompressed sum overflows too, and so becomes a veto
            memory.sum_replicas(compressor, binding.selection.reducer)
        return factor

    def _warn_of_rows(self) -> None:
        optimizer, options, specs = self.groups.optimizer, self.groups.live, self.memory.plan.specs
        if not isinstance(optimizer, TorchOptimizer):
            return
        keys = {key for device in self.memory.devices for key in device.rows}
        dense = [
            self.memory.names[i]
            for i in sorted(keys)
            if specs[i].hash_table is None and optimizer.refuses_sparse(options[specs[i].group])
        ]
        if dense:
            self._has_warned_of_rows = True
            warnings.warn(
                f"the gradients of {', '.join(dense)} are sparse, which {optimizer.registered_name} does not support "
                "in torch; here they count as dense ones with zeros in all other rows, so rows without a gradient "
                "change by momentum and weight decay, and a step processes all rows. 'torch:SparseAdam', and "
                "'torch:SGD' and 'torch:Adagrad' without weight_decay, update by rows. This warning appears once",
                SparseGradientWarning,
                stacklevel=level_of_user(),
            )

    def _reduce(
        self, fresh: list[bool], scale: float, mean: tuple[float, int] | None = None
    ) -> tuple[list[bool] | None, GradientCheck]:
        """Run one round for the gradients in the arena. Return which keys any worker contributed, and the verdict.

        The keys are None, on all workers, if nothing may be updated. If workers update, only vetoes are known yet. It
        raises before or after the round, never in the middle.
        """
        exchange, memory = self.binding.exchange, self.memory
        assert exchange is not None
        absent = frozenset([] if all(fresh) else [i for i, is_fresh in enumerate(fresh) if not is_fresh])
        # 1. In asynchronous modes each contribution is limited separately, before it is sent.
        own = GradientCheck()
        if exchange.updates_weights and not exchange.is_sync:
            own = self._check_gradients(memory.devices[0], fresh, scale)
            scale = self._limit_own(own.decision, scale)
        # 2. Run the round, with this worker's veto.
        limits = self.limits
        veto = own.decision.skip or self.is_bad
        if limits.checks_finite and not self.binding.checks_sums(memory.arena.grads):
            veto = veto or not memory.is_finite()
        options = self._read_hypers(
            fresh if self.binding.num_workers == 1 else None
        )  # other workers may add keys
        describe_state = None if self.describe_state is None else partial(self.describe_state, STEP)
        outcome = self.binding.round(memory, options, scale, absent, veto, limits, describe_state, mean)
        self._late = None if outcome.missed is None else outcome
        if outcome.skipped:
            return None, GradientCheck(own.measured or outcome.measured, Decision(skip=True))
        # 3. Adopt the result.
        if not exchange.updates_weights:
            if outcome.rows is None:
                memory.devices[0].scale_rows(scale)  # rows were not sent; what was sent has come back scaled
            else:
                memory.devices[0].rows = dict(outcome.rows)
        verdict = GradientCheck(outcome.measured, outcome.decision) if exchange.is_sync else own
        # A parameter frozen on this worker may have a gradient on others, and weights must stay equal.
        candidates = [True] * len(fresh) if exchange.is_ours else memory.participating()
        if outcome.left_out:
            candidates = [is_in and i not in outcome.left_out for i, is_in in enumerate(candidates)]
        return candidates, verdict

    def _read_hypers(self, coming: Sequence[bool] | None = None) -> dict[str, Any]:
        """Read the hyper-parameters of the coming update; see `ParameterGroups.options`."""
        # Compared by the store: if these differed, workers would diverge in rounds, scales, or weights.
        stages: dict[str, Any] = {}
        if self.accumulation.counts > 1:
            stages["accumulate"] = self.accumulation.counts
        if self.loss_scaler is not None:
            stages["loss_scale"] = self.loss_scaler.loss_scale
        if self.binding.selection.pull_codec is not None:
            stages["compression_params['pull']"] = self.binding.selection.pull_codec.name
        return self.groups.options(self.memory, coming, stages)

    def _limit_own(self, decision: Decision, scale: float) -> float:
        """Clip the elements in the arena by value, or return the scale that limits the norm."""
        if decision.clip_value is not None:
            limit = decision.clip_value / abs(scale)
            for flat in self.memory.arena.grads.values():
                bound = bound_of(limit, flat)
                flat.clamp_(-bound, bound)
            home = self.memory.devices[0]
            for key, rows in home.rows.items():
                # Not in place, because these may be the memory of the loop's own gradient.
                bound = bound_of(limit, rows.values)
                home.rows[key] = rows._replace(values=rows.values.clamp(-bound, bound))
        return scale * decision.coef

    def update_here(
        self,
        present: Sequence[bool],
        scale: float,
        again: Callable[[], Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> GradientCheck:
        """Update keys with their gradients in the arena, clipped, unless the step is skipped."""
        guard = self.binding.guard
        was_incomplete = guard.is_incomplete
        try:
            return self._update_here(present, scale, again, options)
        except KVStoreError:
            guard.end()  # as on all workers: nothing has changed
            raise
        except BaseException as error:
            # An optimizer that runs user code undoes what it has begun. All else, such as no memory on a device, may
            # have come in the middle of an update.
            one = self.states.here[0]
            if isinstance(error, Exception) and isinstance(one, JointOptimizerUpdate):
                guard.end()
            elif isinstance(one, JointOptimizerUpdate) and one.was_undone:
                guard.is_incomplete = was_incomplete
            raise

    def set_mode(self, mode: str) -> None:
        """Switch an optimizer that has modes (`train` and `eval`, as schedule-free ones), which changes weights.

        Does nothing for other optimizers. Raises ConfigurationError where it updates key by key.
        """
        optimizer = self.groups.optimizer
        if not isinstance(optimizer, TorchOptimizer) or not callable(getattr(optimizer.cls, mode, None)):
            return
        self.refuse_in_join(f"{mode}()")
        self.binding.check_whole()
        self.ready()
        joint = self.states.joint
        if joint is None:
            raise ConfigurationError(
                f"{optimizer.registered_name} has modes, which change weights and state of all parameters together, "
                f"but here it updates key by key, so {mode}() is not possible. Build the Trainer without "
                "update_on_kvstore=True, an asynchronous store, replicas without a store, and register(..., "
                "elementwise=True)"
            )
        joint.set_mode(mode)
        if self.binding.is_started and self.memory.has_replicas:
            self.memory.share_weights()
        self.memory.accept_writes(self.binding.has_weights)

    def _update_here(
        self,
        present: Sequence[bool],
        scale: float,
        again: Callable[[], Any] | None,
        options: dict[str, Any] | None,
    ) -> GradientCheck:
        # 1. The hyper-parameters of each key; tried out, so that a bad one fails before the update.
        if options is None:
            options = self._read_hypers(present if self.binding.num_workers == 1 else None)
        if options != self._effective[0]:
            self._effective = options, effective_hypers(self.memory.plan, self.groups.optimizer, options)
        # 2. Decide, for every device, before any weight changes.
        effective, by_device = self._effective[1], [present]
        if self.binding.exchange is None and self.memory.has_replicas:
            by_device = list(self.memory.own_present)  # replicas are updated separately
        places = list(zip(self.memory.devices, self.states.here, by_device, strict=False))
        verdicts = [self._check_gradients(device, own, scale) for device, _, own in places]
        skipped = next((verdict for verdict in verdicts if verdict.decision.skip), None)
        if skipped is not None:
            return skipped
        self.binding.guard.begin()
        # 3. Update.
        for (device, update, own), (_, decision) in zip(places, verdicts, strict=True):
            if isinstance(update, JointOptimizerUpdate):
                device.tracker.forget()  # the optimizer may evaluate the loss again
                update.apply(scale, own, effective, decision, again)
            else:
                borrowed, device.borrowed = device.borrowed, {}
                update.apply(device.arena.grads, scale, own, effective, device.rows, decision, borrowed)
                if self.binding.exchange is None or (self.binding.holder and not self.memory.has_replicas):
                    device.arena.zeros = frozenset(device.rows)
            device.arena.mark_updated(own)
        if self.binding.exchange is not None and self.memory.has_replicas:
            self.memory.share_weights(present)
        return verdicts[0]

    def _check_gradients(self, device: DeviceMemory, present: Sequence[bool], scale: float) -> GradientCheck:
        if self.is_bad:
            return GradientCheck(None, Decision(skip=True))
        limits = self.limits
        if not limits.is_needed:
            return GradientCheck()
        measured = measure(device.plan, device.arena.grads, device.rows, present, limits.norm_type, scale)
        return GradientCheck(measured, limits.decide(measured))

    def _finish(
        self, used: Sequence[bool], updated: Sequence[bool] | None, verdict: GradientCheck, undone: float
    ) -> StepResult:
        """End a step: `used` gradients are no longer new; `updated` keys were updated, or None if it was skipped.

        `undone` removes the loss scale from the gradients, which stay readable. Raises if `on_nonfinite` is "raise".
        """
        # 1. Unscale the gradients, which the script may read, and mark them as used.
        limits, is_skipped = self.limits, updated is None
        if undone != 1.0:
            for device, own in zip(self.memory.devices, self.memory.own_present, strict=True):
                device.unscale(own, undone)
        for device in self.memory.devices:
            device.tracker.consume(used)
        self._reduced, self._is_vetoed, self.is_bad = None, False, False
        self.accumulation.in_window = 0
        late, self._late = self._late, None
        missed = None if late is None else late.missed
        if missed is not None and missed.applied < missed.first:
            updated, is_skipped = None, False  # the round has failed: there was no step
        if missed is None or missed.applied == missed.first:
            self.num_steps += 1
            self.num_left_out += missed is not None
        self.num_assigned = self.num_assigns_known = 0
        # 2. The result, and counts.
        norm = None
        if limits.max_norm is not None and missed is None:
            # If a worker vetoed the step in advance, not all workers have measured the norm.
            norm = math.inf if is_skipped or verdict.measured is None else verdict.measured.norm
        has_updated = updated is not None and any(updated)
        self.last = self._result(norm, verdict.decision.coef, is_skipped, has_updated)
        if late is not None and missed is not None and missed.applied != missed.first:
            self._follow_others(late)
        else:
            self.conclude(updated)
        if self.groups.instance is not None:
            # Schedulers bound to the instance warn if they have not seen its step().
            self.groups.instance._opt_called = True  # type: ignore[attr-defined]
        # 3. Raise at last, when everything is counted.
        said, self.bad_loss = self.bad_loss, ""
        if is_skipped and limits.on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f"{said}a gradient, its norm or the loss is infinite or not a number, on this worker or another, so "
                "nothing was updated; torch.autograd.detect_anomaly finds the operation, and on_nonfinite='skip' "
                "skips such steps"
            )
        return self.last

    def _follow_others(self, late: RoundResult) -> None:
        """Count as the others have since the round that this worker was left out of."""
        missed, before = late.missed, self.num_steps
        assert missed is not None
        if missed.applied > missed.first and self.catch_up is not None:
            with self.binding.guard.ended_by_errors():
                self.catch_up(late)
            self.num_left_out += self.num_steps - before
        self.binding.guard.end()

    def _result(
        self, norm: float | None = None, coef: float = 1.0, skipped: bool = False, updated: bool = True
    ) -> StepResult:
        lr = self.groups.live[0].get("lr")
        # The loss scale of this step, which may have been applied on other workers only.
        scale = 1.0 if self.voting is None else self.voting
        if self.loss_scaler is not None:
            scale = self.loss_scaler.loss_scale
        return StepResult(norm, coef, skipped, scale, None if lr is None else float(lr), updated)

    def conclude(self, updated: Sequence[bool] | None) -> None:
        """End a step: count it, by the keys that were updated, or None if it was skipped.

        Schedules are user code: an error of one reaches the loop, and all else of the step is done.
        """
        self.last_ended = self.last_described[0], updated
        guard = self.binding.guard
        try:
            if updated is not None:
                self.groups.counts.count(updated)
            if self.loss_scaler is not None:
                self.loss_scaler.update(overflow=updated is None)
            if updated is not None and any(updated):
                for schedule in self.schedules:
                    if schedule.by == "step":
                        schedule.step()
        except Exception:
            guard.end()
            raise
        guard.end()


def _as_integer(value: Any) -> int | None:
    """Return the single integer in a tensor or an array; None if it contains something else."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # several numbers, a fraction, or a meta tensor
        return None
