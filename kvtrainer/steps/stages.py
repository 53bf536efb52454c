"""The stages of a step, one by one; `pipeline` puts them in order."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
import torch.optim

from kvstore_server.hyper import effective_hypers
from kvstore_server.norms import Decision, measure
from kvstore_server.optimizer import Optimizer
from kvtrainer.clipping import Limits, Verdict
from kvtrainer.errors import ConfigurationError, NoGradientWarning, StaleGradientError
from kvtrainer.flat_optimizer import FlatOptimizer
from kvtrainer.local_update import JointUpdate, ShardUpdate
from kvtrainer.memory.gradients import REPLACED
from kvtrainer.memory.memory import DeviceMemory, Memory
from kvtrainer.scaling import LossScaler
from kvtrainer.states.holder import StateHolder
from kvtrainer.steps.accumulation import Accumulation
from kvtrainer.sync.binding import Binding
from kvtrainer.sync.select import Selection
from kvtrainer.types import Group

_log = logging.getLogger(__name__)


class Stages(FlatOptimizer):
    """Which gradients are new, what they are multiplied by, and updates in this process; over replicas too.

    Args:
        groups, optimizer, instance: as of FlatOptimizer.
        selection: the store, and whether the optimizer runs in it.
    """

    loss_scaler: LossScaler | None = None
    """What the option `amp` or `kvtrainer.amp.init_trainer` sets. With one, a step in which a gradient overflows on any
    worker changes nothing on any of them."""
    _limits = Limits()
    _accumulation: Accumulation
    _needs_backward = ""
    """An option that only `backward` of the Trainer follows; empty if there is none."""
    _is_voting = False
    """Whether the script drives a scaler of its own, which needs to know if a gradient overflows on any worker."""
    _is_bad = False
    """Whether this worker knows already that the present gradients must not be used."""

    def __init__(
        self,
        groups: list[Group],
        optimizer: Optimizer,
        instance: torch.optim.Optimizer | None,
        selection: Selection,
    ) -> None:
        self._link = Binding(selection)
        self._effective: tuple[dict[str, Any], list[Any]] = ({}, [])
        """The options of the last update in this process, and what they mean for each key."""
        self._has_warned = False
        super().__init__(groups, optimizer, instance)

    def _update_here(self, present: Sequence[bool], scale: float) -> Verdict:
        """Update these keys with their gradients in the arena, limited; nothing happens if they are to be skipped."""
        options = self._options(present)
        if options != self._effective[0]:
            self._effective = (options, effective_hypers(self._layout.plan, self._optimizer, options))
        layout, numbers = self._layout, self._effective[1]
        places: list[tuple[DeviceMemory, ShardUpdate | JointUpdate, Sequence[bool]]] = [
            (layout.devices[0], self._local, present)
        ]
        if layout.has_replicas and self._link.exchange is None:
            # Without a store each replica goes its own way.
            updates = [self._local, *self._local_copies]
            places = list(zip(layout.devices, updates, layout.own_present, strict=True))
        verdicts = [self._judge(one, own, scale) for one, _, own in places]
        skipped = next((verdict for verdict in verdicts if verdict.decision.skip), None)
        if skipped is not None:
            return skipped
        for (one, local, own), verdict in zip(places, verdicts, strict=True):
            decision = verdict.decision
            local.apply(one.arena.grads, scale, own, numbers, one.rows, decision)
            one.arena.mark_updated(own)
            if self._link.exchange is None and isinstance(local, ShardUpdate):
                one.arena.trust_zeros(one.rows)
        if self._link.exchange is not None:
            self._share_weights(present)
        return verdicts[0]

    def _judge(self, layout: DeviceMemory, present: Sequence[bool], scale: float) -> Verdict:
        """What becomes of the gradients in an arena, once they are multiplied by `scale`."""
        limits = self._active_limits
        if self._is_bad:
            return Verdict(None, Decision(skip=True))
        if not limits.is_needed:
            return Verdict()
        measured = measure(layout.plan, layout.arena.grads, layout.rows, present, limits.norm_type, scale)
        return Verdict(measured, limits.decide(measured))

    def _gather(self, fresh: Sequence[bool]) -> float:
        """Copy new gradients into the arena; where there is a store, those of replicas are summed at once.

        Returns what they have been multiplied by: what is to be compressed loses its loss scale before, because the
        threshold and what is held back are of the gradient itself.
        """
        layout = self._layout
        layout.gather(fresh)
        factor = self._loss_factor() if self._link.is_lossy(layout.arena.grads) else 1.0
        layout.scale(factor)
        if layout.has_replicas and self._link.exchange is not None:
            # What overflows cannot be compressed; its sum overflows as well, which is a veto.
            is_plain = self._link.replicas is None or self._overflows()
            layout.sum_replicas(None if is_plain else self._link.replicas, self._link.selection.reducer)
        return factor

    def _limit_own(self, decision: Decision, scale: float) -> float:
        """Limit the elements in the arena; return the scale that limits the norm."""
        if decision.clip_value is not None:
            limit = decision.clip_value / abs(scale)
            # What a dtype cannot hold limits nothing but infinities, and torch refuses it.
            grads = [
                *self._layout.arena.grads.values(),
                *(rows.values for rows in self._layout.rows.values()),
            ]
            for grad in grads:
                bound = min(limit, torch.finfo(grad.dtype).max)
                grad.clamp_(-bound, bound)
        return scale * decision.coef

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

    def _check_backward(self, fresh: Sequence[bool]) -> None:
        """Raise ConfigurationError if the gradients came without what an option asks for."""
        needs = self._needs_backward
        is_scaled = needs == "amp" and self.loss_scaler is not None and self.loss_scaler.is_scaled
        if needs and any(fresh) and not self._accumulation.has_begun and not is_scaled:
            raise ConfigurationError(
                f"the option {needs} works in trainer.backward(loss) and trainer.update_params(loss), but "
                "the gradients came from loss.backward(); call one of those, or leave the option out"
            )

    def _is_accumulating(self) -> bool:
        """Whether more backward passes have to come before an update.

        Raises:
            KVStoreError: the Trainer is closed.
            ConfigurationError: nobody has counted them.
        """
        self._link.check_open()
        if self._accumulation.counts > 1 and not self._accumulation.has_begun:
            raise ConfigurationError(
                f"accumulate={self._accumulation.counts} counts the backward passes that trainer.backward(loss) or "
                "trainer.update_params(loss) make, and there was none since the last step; call that instead of "
                "loss.backward()"
            )
        return not self._accumulation.is_boundary

    def _share_weights(self, present: Sequence[bool] | None = None) -> None:
        self._layout.share_weights(present)

    def _num_averaged(self) -> int:
        """What the sum of a round is divided by for a mean: the gradients that meet, unless they carry shares."""
        is_alone = self._link.exchange is None
        return 1 if is_alone else self._link.num_workers * self._layout.num_averaged

    def _refuse_unsummed(self) -> None:
        if self._layout.has_replicas and self._link.exchange is not None:
            raise ConfigurationError(
                f"update() found gradients of {len(self._layout.devices)} replicas that were not summed; call "
                "allreduce_grads() before it, or step() instead of both"
            )

    def _fresh(
        self, is_strict: bool, summed: list[bool] | None = None, *, with_zeros: bool = False
    ) -> list[bool]:
        """Which parameters have a new gradient; after `allreduce_grads`, `summed` says so.

        Args:
            with_zeros: whether one counts that was set to zero, as for torch's optimizers.

        Raises:
            StaleGradientError: `is_strict`, and one that should has none.
        """
        self._link.check_open()
        self._settle()
        self._follow_instance()
        memory = self._layout
        memory.attach()
        if is_strict:
            try:
                return memory.fresh_or_raise(summed)
            except StaleGradientError:
                # Gradients do not come back to parameters that were moved, which is then what has to be said.
                memory.check_in_place()
                raise
        fresh = memory.fresh(with_zeros) if summed is None else summed
        if not any(fresh):
            memory.check_in_place()
        return fresh

    def _warn_of_no_gradient(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"step() gives nothing: none of the {len(self._layout.names)} parameters got a gradient since the "
                f"last step. {REPLACED} If it is meant, pass ignore_stale_grad=True. This is said once",
                NoGradientWarning,
                stacklevel=5,
            )

    def _options(self, coming: Sequence[bool]) -> dict[str, Any]:
        """The numbers of an update of these keys, checked; other workers may add keys to it."""
        self._schedule.apply(self.param_groups, coming if self._link.num_workers == 1 else None)
        return self._checked_options()

    def _agreed_options(self, coming: Sequence[bool]) -> dict[str, Any]:
        """The same with what else workers must have alike, or they come to different numbers of rounds, or scales."""
        stages: dict[str, Any] = {}
        if self._accumulation.counts > 1:
            stages["accumulate"] = self._accumulation.counts
        if self.loss_scaler is not None:
            stages["loss_scale"] = self.loss_scaler.loss_scale
        return {**self._options(coming), "stages": stages}

    def _overflows(self) -> bool:
        """Whether a gradient in the arena is infinite or not a number, where that matters."""
        return self._is_bad or (self._active_limits.checks_finite and not self._layout.is_finite())

    @property
    def _active_limits(self) -> Limits:
        """What is checked in the step that comes."""
        return self._limits.with_scaler(self.loss_scaler is not None or self._is_voting)

    def _scale(self, batch_size: float | None) -> float:
        """What gradients are multiplied by, before the mean over workers and without the loss scale."""
        if batch_size is None:
            return self._optimizer.rescale_grad
        is_number = isinstance(batch_size, Real) and not isinstance(batch_size, bool)
        if not is_number or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}")
        return self._optimizer.rescale_grad / float(batch_size)

    def _loss_factor(self) -> float:
        """What undoes the loss scale that the present gradients carry."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.factor

    def _kept_scale(self, undone: float) -> float:
        """How much of the loss scale the sums of a round go on carrying where workers update, alike on all of them.

        Without it float16 could not hold them. What is compressed has lost it before.

        Args:
            undone: the factor that takes the loss scale out of this worker's gradients.
        """
        exchange, grads = self._link.exchange, self._layout.arena.grads
        is_plain = "float16" not in grads or self._link.is_lossy(grads)
        if exchange is None or exchange.updates_weights or is_plain:
            return 1.0
        if exchange.num_workers == 1:
            return 1.0 / undone
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    def _refuse_in_store(self, method: str) -> None:
        self._decide()
        if not self._link.allows_halves:
            raise ConfigurationError(
                f"{method} has no meaning while the optimizer runs in the kvstore; build the Trainer with "
                "update_on_kvstore=False"
            )

    def _prepare(self) -> bool:
        """Make the store and give every worker rank 0's weights; once, collectively. Returns whether it was now."""
        self._decide()
        is_first = self._link.start(self._layout, self._optimizer)
        if is_first:
            if _log.isEnabledFor(logging.DEBUG):
                for name, takes_part in zip(self._layout.names, self._layout.participating(), strict=True):
                    if takes_part:
                        _log.debug("parameter %s will be updated", name)
            if self._link.exchange is not None:
                self._share_weights()
            self._layout.accept_writes(self._link.has_weights)
            self._hand_over_states()
        return is_first

    def _decide(self) -> None:
        """Where the optimizer runs, if that was left open until the first gradients are there."""
        if self._link.is_open:
            layouts = self._layout.devices
            grads = [p.grad for layout in layouts for p in layout.parameters]
            self._link.decide(any(grad is not None and grad.is_sparse for grad in grads))

    def _holder(self) -> StateHolder | None:
        if self._link.updates_weights:
            return self._link.holder
        return self._local if self._layout.is_settled else None

    def _updates_jointly(self) -> bool:
        # Without a store each replica goes its own way, so nothing can be kept for all of them.
        link = self._link
        return not link.updates_weights and not (self._layout.has_replicas and link.is_alone)

    def _can_grow(self) -> bool:
        return self._link.check_growth(self._layout)

    def _leave_store(self, former: Memory) -> None:
        self._link.leave(former)
