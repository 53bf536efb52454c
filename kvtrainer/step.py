"""The one fixed pipeline of a Trainer, over any kvstore.

    [anomalies? → scale by loss scale and 1/k → backward] → fresh gradients? → gather → reduce over workers and replicas
    → norm, finite? → skip, or clip and update, here or in the store → new weights → loss scale → schedules

Every feature is an option of one of these stages. `StepPipeline.step` is the whole of it, in this order;
`allreduce_grads` and `update` are its two halves, and `keep_company` is what a worker without data does of it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvstore_server.check import is_number
from kvstore_server.hyper import effective_hypers, unpack_hypers
from kvstore_server.norms import Decision, measure
from kvtrainer.anomalies import describe_nonfinite, losses_of, report_anomalies
from kvtrainer.clipping import Limits, Verdict
from kvtrainer.errors import (
    REPLACED,
    ConfigurationError,
    NoGradientWarning,
    NonFiniteGradientError,
)
from kvtrainer.groups import ParameterGroups
from kvtrainer.local_update import JointUpdate, ShardUpdate
from kvtrainer.lr_scheduler import UpdateCounter
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.optimizer_states import OptimizerStates
from kvtrainer.parallel.batch import ReplicaLosses
from kvtrainer.scaling import LossScaler, PlainScaling
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.stage_options import Accumulation, StageOptions
from kvtrainer.sync.binding import Binding
from kvtrainer.sync.contract import Outcome
from kvtrainer.types import StepResult

_log = logging.getLogger(__name__)


class StepPipeline:
    """The stages of a step, what they work on, and what they know from one step to the next.

    Args:
        groups: the options, and the optimizer.
        link: the store, and whether the optimizer runs in it.
        stages: what is done beside the plain step.
    """

    def __init__(self, groups: ParameterGroups, link: Binding, stages: StageOptions) -> None:
        self.groups = groups
        self.link = link
        self.memory = Memory(groups.live, groups.names)
        groups.bind(groups.live)
        self.counts = UpdateCounter(groups.optimizer)
        self.states = OptimizerStates(groups, self.memory, link, self.counts)
        self.stages = stages
        self.loss_scaler: LossScaler | None = None
        self.accumulation = Accumulation(stages.accumulate)
        self.schedules: list[BoundSchedule] = []
        self.last: StepResult | None = None
        self.has_context = False
        """Whether the context of the forward pass was ever asked for."""
        self.is_in_join = False
        self._needs_backward = ""
        """An option that only `backward` follows; empty if there is none."""
        self._voting: float | None = None
        """The loss scale of a scaler that the script drives, while that makes a step, which all workers may skip."""
        self._is_bad = False
        """Whether this worker knows already that the present gradients must not be used."""
        self._bad_loss = ""
        """What to say of a loss that was not finite here."""
        self._reduced: list[bool] | None = None
        """Between `allreduce_grads` and `update`: which gradients have been summed."""
        self._is_vetoed = False
        """Between `allreduce_grads` and `update`: whether a gradient overflowed on any worker."""
        self._effective: tuple[dict[str, Any], list[Any]] = ({}, [])
        """The options of the last update in this process, and what they mean for each key."""
        self._has_warned = False

    def take_options(
        self, stages: StageOptions, changed: Sequence[str], added: Sequence[BoundSchedule]
    ) -> None:
        """Go on with these options, of which some have `changed`; what belongs to the others stays as it is."""
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
        """Run a backward pass of losses as the options say; see `Trainer.backward`."""
        losses = losses_of(loss)
        if not losses:
            raise ConfigurationError(f"there is no loss in {loss!r:.80}, so there is nothing to learn from")
        if self.stages.detect_anomalous_params:
            self.report_anomalies(losses, self.stages.detect_anomalous_params)
        if isinstance(loss, ReplicaLosses):
            loss.mark_used()
        if self.stages.limits.on_nonfinite in ("raise", "skip") and (problem := describe_nonfinite(losses)):
            # All workers have to know, and the round tells them.
            self._is_bad, self._bad_loss = True, f"{problem}: "
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
        """Log parameters that a loss does not depend on, or raise."""
        replicas = zip(*(device.parameters for device in self.memory.devices), strict=True)
        report_anomalies(loss, dict(zip(self.memory.names, map(list, replicas), strict=True)), mode, logger)

    def drop_gradients(self) -> None:
        """Note that the present gradients were dropped; what was known of them is so no longer."""
        self._is_bad, self._bad_loss = False, ""
        if self.loss_scaler is not None:
            self.loss_scaler.mark_dropped()

    def step(
        self,
        batch_size: float | None,
        ignore_stale_grad: bool,
        closure: Callable[[], Any] | None,
        loops_scaling: Callable[[int], PlainScaling | None],
    ) -> Any:
        """Make a step; arguments, result and errors as of `Trainer.step`.

        Args:
            loops_scaling: number of workers → what a GradScaler of torch says of the gradients, if one makes the step.
        """
        scale = self._scale_of(batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_waiting():
            return self.last if closure is None else loss
        undone = self._loss_factor
        is_strict, is_torchs = batch_size is not None, batch_size is None
        fresh = self.fresh(
            is_strict and not ignore_stale_grad, with_zeros=is_torchs and not ignore_stale_grad
        )
        self._check_backward(fresh)
        if not ignore_stale_grad and not any(fresh):
            self._warn_of_no_gradient()
        self.prepare()
        plain = loops_scaling(self.link.num_workers)
        again = self._evaluator(closure, loss, scale)
        undone *= 1.0 if plain is None else plain.factor
        with self._knowing(plain is not None and plain.overflows):
            scale *= undone / self._gather(fresh)
            updated: list[bool] | None = fresh
            verdict, in_store = Verdict(), False
            if (exchange := self.link.exchange) is not None:
                kept = 1.0 if exchange.updates_weights else self._kept_scale(undone)
                mean = self._num_averaged if batch_size is None else 1
                updated, verdict = self._reduce(fresh, scale * kept / mean)
                scale, in_store = 1.0 / kept, exchange.updates_weights
            if updated is not None and not in_store:
                verdict = self._update_here(updated, scale, again)
                updated = None if verdict.decision.skip else updated
            elif updated is not None and self.memory.has_replicas:
                self.memory.share_weights()
        self._finish(fresh, updated, verdict)
        return self.last if closure is None else loss

    def step_voting(self, overflows: bool, carried: float, make: Callable[[], Any]) -> None:
        """Make a step that all workers skip if gradients overflow on any; `overflows` says so of this one's.

        Args:
            carried: the factor of its loss, which has been taken out of the gradients.
            make: makes the step.
        """
        self._voting = carried
        try:
            with self._knowing(overflows):
                make()
        finally:
            self._voting = None

    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum; see `Trainer.allreduce_grads`."""
        self.refuse_in_join("allreduce_grads()")
        self._refuse_in_store("allreduce_grads()")
        if self._is_waiting():
            return
        fresh = self.fresh(is_strict=False)
        self._check_backward(fresh)
        self.prepare()
        if self.link.exchange is None:
            return
        summed, _ = self._reduce(fresh, 1.0 / self._gather(fresh))
        if summed is not None and self._overflows():
            summed = None
        self._is_vetoed, self._reduced = summed is None, summed or fresh
        if summed is not None:
            if self.loss_scaler is not None and any(summed) and not any(fresh):
                self.loss_scaler.mark_scaled()  # the others' losses were, and so is the sum
            # Rows of a single gradient are their own sum.
            self.memory.scatter(summed, self.link.num_workers > 1 or self.memory.has_replicas)

    def update(self, batch_size: float | None, ignore_stale_grad: bool) -> StepResult:
        """Update the weights from the present gradients; see `Trainer.update`."""
        self.refuse_in_join("update()")
        self._refuse_in_store("update()")
        if self._is_waiting():
            assert self.last is not None
            return self.last
        scale = self._scale_of(batch_size) * self._loss_factor
        is_strict = batch_size is not None and not ignore_stale_grad
        if self._reduced is None:
            present = self.fresh(is_strict, with_zeros=batch_size is None and not ignore_stale_grad)
            self._check_backward(present)
        else:
            # Sums count as fresh, also where only other workers had a gradient; unless dropped since.
            rows = zip(self._reduced, self.memory.parameters, strict=True)
            present = self.fresh(is_strict, [has_sum and p.grad is not None for has_sum, p in rows])
        self.prepare()
        if self._reduced is None:
            if self.memory.has_replicas and self.link.exchange is not None:
                raise ConfigurationError(
                    f"update() found gradients of {len(self.memory.devices)} replicas that were not summed; call "
                    "allreduce_grads() before it, or step() instead of both"
                )
            self.memory.gather(present)
        else:
            if batch_size is None:
                scale /= self._num_averaged
            if not self._is_vetoed:
                self.memory.gather_sums(present)
        self._is_bad = self._is_bad or self._is_vetoed
        verdict = self._update_here(present, scale)
        return self._finish(present, None if verdict.decision.skip else present, verdict)

    # Before the gradients.

    def ready(self) -> None:
        """Bring groups, parameters and state to where the user has them by now.

        Raises:
            NotInitializedError: a parameter that takes part has no shape yet; names all of them.
            ConfigurationError: one got its shape too late for the store.
        """
        if not self.memory.is_settled:
            self.memory.settle()
            self.states.make_places()
        elif self.memory.left_out and (late := self.memory.latecomers()):
            if not self.can_grow():
                raise ConfigurationError(
                    f"{', '.join(late)}: took no part and had no shape when the other parameters went into the "
                    "kvstore; run a forward pass through the whole model before the first step"
                )
            self.grow(self.groups.names)
        if self.groups.instance is not None:
            self.groups.follow_instance()
            self.states.follow_instance()

    def can_grow(self) -> bool:
        """Ask the store whether parameters may still be added.

        Raises:
            WeightsWrittenError: the loop has written weights that the store would replace.
        """
        self.refuse_in_join("add_param_group()")
        return self.link.check_growth(self.memory)

    def grow(self, names: list[list[str]]) -> None:
        """Lay out all parameters that the groups have now; state, and what is known of gradients, go along."""
        memory = Memory(self.groups.live, names)
        memory.succeed(self.memory)
        self.memory, self.groups.names = memory, names
        self.groups.bind(self.groups.live)
        self.states.move(memory)

    def prepare(self) -> bool:
        """Make the store and give every worker rank 0's weights; once, collectively. Returns whether it was now."""
        self._decide()
        is_first = self.link.start(self.memory, self.groups.optimizer)
        if is_first:
            if _log.isEnabledFor(logging.DEBUG):
                for name, takes_part in zip(self.memory.names, self.memory.participating(), strict=True):
                    if takes_part:
                        _log.debug("parameter %s will be updated", name)
            if self.link.exchange is not None and self.memory.has_replicas:
                self.memory.share_weights()
            self.memory.accept_writes(self.link.has_weights)
            self.states.hand_over()
        return is_first

    def _decide(self) -> None:
        """Decide where the optimizer runs, if that was left open until the first gradients are there."""
        if self.link.is_open:
            grads = [p.grad for device in self.memory.devices for p in device.parameters]
            self.link.decide(any(grad is not None and grad.is_sparse for grad in grads))

    def _refuse_in_store(self, method: str) -> None:
        self._decide()
        if not self.link.allows_halves:
            raise ConfigurationError(
                f"{method} has no meaning while the optimizer runs in the kvstore; build the Trainer with "
                "update_on_kvstore=False"
            )

    def _is_waiting(self) -> bool:
        """Tell whether more backward passes have to come before an update; `last` says so then.

        Raises:
            KVStoreError: the Trainer is closed.
            ConfigurationError: nobody has counted them.
        """
        self.link.check_open()
        accumulation = self.accumulation
        if accumulation.counts > 1 and not accumulation.has_begun:
            raise ConfigurationError(
                f"accumulate={accumulation.counts} counts the backward passes that trainer.backward(loss) or "
                "trainer.update_params(loss) make, and there was none since the last step; call that instead of "
                "loss.backward()"
            )
        if accumulation.is_boundary:
            return False
        self.last = StepResult(lr=self._lr_of_step, loss_scale=self._loss_scale, updated=False)
        return True

    # Which gradients there are, and what they are multiplied by.

    def fresh(
        self, is_strict: bool, summed: list[bool] | None = None, *, with_zeros: bool = False
    ) -> list[bool]:
        """Find the parameters that have a new gradient; after `allreduce_grads`, `summed` says so.

        Args:
            with_zeros: whether one counts that was set to zero, as for torch's optimizers.

        Raises:
            StaleGradientError: `is_strict`, and one that should has none.
        """
        self.link.check_open()
        self.ready()
        self.memory.attach()
        return self.memory.fresh(is_strict, with_zeros, summed)

    def _check_backward(self, fresh: Sequence[bool]) -> None:
        """Raise ConfigurationError if the gradients came without what an option asks for."""
        if not any(fresh):
            return
        needs, precision = self._needs_backward, self.stages.precision
        is_scaled = needs == "amp" and self.loss_scaler is not None and self.loss_scaler.is_scaled
        if needs and not self.accumulation.has_begun and not is_scaled:
            raise ConfigurationError(
                f"the option {needs} works in trainer.backward(loss) and trainer.update_params(loss), but "
                "the gradients came from loss.backward(); call one of those, or leave the option out"
            )
        if precision is not None and precision.scaler is None and not self.has_context:
            raise ConfigurationError(
                "amp with dtype 'bfloat16' works in trainer.context(), which was never entered; compute the forward "
                "pass and the loss in it, or leave amp out"
            )

    def _warn_of_no_gradient(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"step() gives nothing: none of the {len(self.memory.names)} parameters got a gradient since the "
                f"last step. {REPLACED} If it is meant, pass ignore_stale_grad=True. This is said once",
                NoGradientWarning,
                stacklevel=6,
            )

    @contextmanager
    def _knowing(self, overflows: bool) -> Iterator[None]:
        """In the block the present gradients are known to be bad if they overflow; afterwards too, if it ends well."""
        before = self._is_bad
        self._is_bad = before or overflows
        try:
            yield
        except BaseException:
            self._is_bad = before
            raise

    def _scale_of(self, batch_size: float | None) -> float:
        """What gradients are multiplied by, before the mean over workers and without the loss scale."""
        rescale = self.groups.optimizer.rescale_grad
        if batch_size is None:
            return rescale
        if not is_number(batch_size) or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}")
        return rescale / float(batch_size)

    @property
    def _loss_factor(self) -> float:
        """What undoes the loss scale that the present gradients carry."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.factor

    @property
    def _loss_scale(self) -> float:
        """The factor that the loss of this step carries, on other workers if not here."""
        if self.loss_scaler is not None:
            return self.loss_scaler.loss_scale
        return 1.0 if self._voting is None else self._voting

    @property
    def _num_averaged(self) -> int:
        """What the sum of a round is divided by for a mean: the gradients that meet, unless they carry shares."""
        return 1 if self.link.exchange is None else self.link.num_workers * self.memory.num_averaged

    def _kept_scale(self, undone: float) -> float:
        """Part of the loss scale to leave in the sums where workers update, so that float16 does not underflow.

        It is the same on all workers. What is compressed has lost it before.

        Args:
            undone: the factor that takes the loss scale out of this worker's gradients.
        """
        exchange, grads = self.link.exchange, self.memory.arena.grads
        is_plain = "float16" not in grads or self.link.is_lossy(grads)
        if exchange is None or exchange.updates_weights or is_plain:
            return 1.0
        if exchange.num_workers == 1:
            return 1.0 / undone
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    def _evaluator(
        self, closure: Callable[[], Any] | None, loss: Any, scale: float
    ) -> Callable[[], Any] | None:
        """Make what a torch optimizer calls to evaluate the loss again; None if it has no closure for that.

        Args:
            closure: the script's.
            loss: what it gave already.
            scale: what gradients are multiplied by.
        """
        joint = None if closure is None else self.states.joint
        if joint is None or closure is None:
            return None
        is_alone = (
            self.link.exchange is None and not self.memory.has_replicas and self.accumulation.counts == 1
        )
        is_plain = is_alone and not self.limits.is_needed and self.loss_scaler is None
        had = [loss]

        def again() -> Any:
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
    def limits(self) -> Limits:
        """What is checked of the gradient in the step that comes."""
        return self.stages.limits.with_scaler(self.loss_scaler is not None or self._voting is not None)

    def _gather(self, fresh: Sequence[bool]) -> float:
        """Copy new gradients into the arena; where there is a store, those of replicas are summed at once.

        Returns what they have been multiplied by: what is to be compressed loses its loss scale before, because the
        threshold and what is held back are of the gradient itself.
        """
        memory, link = self.memory, self.link
        memory.gather(fresh)
        factor = self._loss_factor if link.is_lossy(memory.arena.grads) else 1.0
        if factor != 1.0:
            memory.scale(factor)
        if memory.has_replicas and link.exchange is not None:
            # What overflows cannot be compressed; its sum overflows as well, which is a veto.
            is_plain = link.replicas is None or self._overflows()
            memory.sum_replicas(None if is_plain else link.replicas, link.selection.reducer)
        return factor

    def _overflows(self) -> bool:
        """Tell whether a gradient in the arena is infinite or not a number, where that matters."""
        return self._is_bad or (self.limits.checks_finite and not self.memory.is_finite())

    def _reduce(self, fresh: list[bool], scale: float) -> tuple[list[bool] | None, Verdict]:
        """Make one round of the gradients in the arena. Returns which keys any worker gave, and the verdict.

        The keys are None, on all workers, if nothing may be updated. Where workers update, only a veto is known yet.
        Raises before or after the round, never in the middle.
        """
        exchange, memory = self.link.exchange, self.memory
        assert exchange is not None
        absent = frozenset(i for i, is_fresh in enumerate(fresh) if not is_fresh)
        own = Verdict()
        if exchange.updates_weights and not exchange.is_sync:
            # Every contribution is an update of its own.
            own = self._judge(memory.devices[0], fresh, scale)
            scale = self._limit_own(own.decision, scale)
        veto = own.decision.skip or self._overflows()
        # What workers must have alike, or they come to different numbers of rounds, or scales.
        stages: dict[str, Any] = {}
        if self.accumulation.counts > 1:
            stages["accumulate"] = self.accumulation.counts
        if self.loss_scaler is not None:
            stages["loss_scale"] = self.loss_scaler.loss_scale
        options = {**self._options(fresh), "stages": stages}
        outcome = self.link.round(memory, options, scale, absent, veto, self.limits)
        if outcome.skipped:
            return None, Verdict(own.measured or outcome.measured, Decision(skip=True))
        if not exchange.updates_weights:
            if outcome.rows is None:
                memory.devices[0].scale_rows(scale)  # those did not travel; what did has come back scaled
            else:
                memory.rows = outcome.rows
        verdict = Verdict(outcome.measured, outcome.decision) if exchange.is_sync else own
        # What is frozen here may not be so elsewhere, and weights must stay equal: the sum is what counts.
        candidates = [True] * len(fresh) if exchange.knows_left_out else memory.participating()
        return [is_in and i not in outcome.left_out for i, is_in in enumerate(candidates)], verdict

    def _limit_own(self, decision: Decision, scale: float) -> float:
        """Limit the elements in the arena; return the scale that limits the norm."""
        if decision.clip_value is not None:
            limit = decision.clip_value / abs(scale)
            rows = self.memory.rows.values()
            for grad in [*self.memory.arena.grads.values(), *(one.values for one in rows)]:
                # What a dtype cannot hold limits nothing but infinities, and torch refuses it.
                bound = min(limit, torch.finfo(grad.dtype).max)
                grad.clamp_(-bound, bound)
        return scale * decision.coef

    def _options(self, coming: Sequence[bool]) -> dict[str, Any]:
        """The numbers of an update of these keys, checked; other workers may add keys to it."""
        self.counts.apply(self.groups.live, coming if self.link.num_workers == 1 else None)
        return self.groups.options(self.memory)

    def _update_here(
        self, present: Sequence[bool], scale: float, again: Callable[[], Any] | None = None
    ) -> Verdict:
        """Update these keys with their gradients in the arena, limited; nothing happens if they are to be skipped.

        Args:
            again: evaluates the loss again.
        """
        options = self._options(present)
        if options != self._effective[0]:
            self._effective = (options, effective_hypers(self.memory.plan, self.groups.optimizer, options))
        numbers, by_device = self._effective[1], [present]
        if self.link.exchange is None and self.memory.has_replicas:
            by_device = list(self.memory.own_present)  # each replica goes its own way
        places = list(zip(self.memory.devices, self.states.here, by_device, strict=False))
        verdicts = [self._judge(device, own, scale) for device, _, own in places]
        skipped = next((verdict for verdict in verdicts if verdict.decision.skip), None)
        if skipped is not None:
            return skipped
        for (device, update, own), verdict in zip(places, verdicts, strict=True):
            self._apply(device, update, own, scale, numbers, verdict.decision, again)
        if self.link.exchange is not None and self.memory.has_replicas:
            self.memory.share_weights(present)
        return verdicts[0]

    def _judge(self, device: DeviceMemory, present: Sequence[bool], scale: float) -> Verdict:
        """Decide about the gradients in an arena, which are to be multiplied by `scale`."""
        if self._is_bad:
            return Verdict(None, Decision(skip=True))
        limits = self.limits
        if not limits.is_needed:
            return Verdict()
        measured = measure(device.plan, device.arena.grads, device.rows, present, limits.norm_type, scale)
        return Verdict(measured, limits.decide(measured))

    def _finish(self, used: Sequence[bool], updated: Sequence[bool] | None, verdict: Verdict) -> StepResult:
        """End a step: these gradients are used up; these keys were updated, or None if the step was skipped.

        Raises:
            NonFiniteGradientError: the step was skipped, and the script wants to stop then.
        """
        scale, limits, is_skipped = self._loss_scale, self.limits, updated is None
        self.memory.consume(used)
        self._reduced, self._is_vetoed, self._is_bad = None, False, False
        self.accumulation.end()
        norm = None
        if limits.reports_norm:
            # Not all workers have measured it where one knew before that the step is skipped.
            norm = math.inf if is_skipped or verdict.measured is None else verdict.measured.norm
        has_updated = updated is not None and any(updated)
        self.last = StepResult(norm, verdict.decision.coef, is_skipped, scale, self._lr_of_step, has_updated)
        self._count(updated)
        if self.groups.instance is not None:
            # Schedulers bound to the instance warn unless they see it step.
            self.groups.instance._opt_called = True  # type: ignore[attr-defined]
        said, self._bad_loss = self._bad_loss, ""
        if is_skipped and limits.on_nonfinite == "raise":
            raise NonFiniteGradientError(
                f"{said}a gradient or the loss is infinite or not a number, on this worker or another, so nothing was "
                "updated; torch.autograd.detect_anomaly finds the operation, and on_nonfinite='skip' goes on without "
                "such steps"
            )
        return self.last

    @property
    def _lr_of_step(self) -> float | None:
        """What the step has been made with; a lr_scheduler, too, writes it there before the update."""
        lr = self.groups.live[0].get("lr")
        return None if lr is None else float(lr)

    def _count(self, updated: Sequence[bool] | None) -> None:
        """Note that these keys were updated, or None if the step was skipped."""
        if updated is not None:
            self.counts.count(updated)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=updated is None)
        if updated is not None and any(updated):
            for schedule in self.schedules:
                if schedule.by == "step":
                    schedule.step()

    def _apply(
        self,
        device: DeviceMemory,
        update: ShardUpdate | JointUpdate,
        present: Sequence[bool],
        scale: float,
        numbers: Sequence[Any],
        decision: Decision,
        again: Callable[[], Any] | None = None,
    ) -> None:
        """Update these keys on one device, in this process."""
        arena = device.arena
        if isinstance(update, JointUpdate):
            update.closure = again
        update.apply(arena.grads, scale, present, numbers, device.rows, decision)
        arena.mark_updated(present)
        if self.link.exchange is None and isinstance(update, ShardUpdate):
            arena.zeros = frozenset(device.rows)

    # Blocks in which workers take different numbers of steps.

    def refuse_in_join(self, method: str) -> None:
        """Raise ConfigurationError in a block of `join`."""
        if self.is_in_join:
            raise ConfigurationError(
                f"{method} is not possible in a join() block: workers that have left it cannot take part; use step() "
                "in the block, and the rest outside"
            )

    def check_join(self) -> None:
        """Raise ConfigurationError if the store does not know workers without data."""
        exchange = self.link.exchange
        if exchange is not None and not exchange.can_shadow:
            raise ConfigurationError(
                f"kvstore {self.link.describe()!r} does not know workers without data, so join() is not possible; "
                "give every worker the same number of batches"
            )

    def keep_company(self) -> None:
        """Take part in the others' rounds with nothing, until all workers have no more data."""
        self.ready()
        self.prepare()
        self.check_join()
        exchange = self.link.exchange
        if exchange is None:
            return
        self._drop_ungiven()
        is_over = False
        while not is_over:
            shadowed = self.link.shadow(self.memory.arena)
            is_over = shadowed.is_over
            # Without rounds every worker's schedules go by its own updates, and have gone on since it gave its last.
            if shadowed.hyper and not (is_over if exchange.is_sync else self.schedules):
                self._adopt_options(shadowed.hyper)
            if not is_over:
                self._follow_round(shadowed.hyper, shadowed.outcome)
        self.memory.share_weights()
        self.memory.accept_writes(self.link.has_weights)

    def _drop_ungiven(self) -> None:
        """Leave gradients behind that no step took: the loss scale that they carry may be another one afterwards."""
        passes = self.accumulation.end_early()
        if passes and self.accumulation.counts > 1:
            _log.warning(
                "a join() block ends within a window of accumulation: the gradients of %d backward passes are dropped",
                passes,
            )
        self.memory.consume(self.fresh(is_strict=False))
        self._is_bad, self._bad_loss = False, ""

    def _follow_round(self, hyper: bytes, outcome: Outcome) -> None:
        """Do here what a round has done elsewhere, with the options that are in force."""
        assert self.link.exchange is not None
        updated = None
        if not outcome.skipped:
            updated = [i not in outcome.left_out for i in range(len(self.memory.names))]
        self.memory.rows = outcome.rows or {}
        said = unpack_hypers(hyper) if hyper else {}
        # A scaler that a loop drives is known to workers only while they have data.
        self._voting = 1.0 if (said.get("limits") or {}).get("checks_finite", False) else None
        try:
            if updated is not None and not self.link.exchange.updates_weights:
                device, scale = self.memory.devices[0], 1.0 / self._kept_scale(1.0)
                verdict = self._judge(device, updated, scale)
                if verdict.decision.skip:
                    updated = None
                else:
                    numbers = effective_hypers(self.memory.plan, self.groups.optimizer, said)
                    self._apply(device, self.states.here[0], updated, scale, numbers, verdict.decision)
                    self.memory.share_weights(updated)
            self._count(updated)
        finally:
            self._voting = None

    def _adopt_options(self, hyper: bytes) -> None:
        """Go on with the options that were in force last."""
        has_scheduler = self.groups.optimizer.lr_scheduler is not None
        for group, values in zip(self.groups.live, unpack_hypers(hyper)["groups"], strict=True):
            kept = {"lr": group["lr"]} if has_scheduler else {}
            group.update({**values, **kept})
