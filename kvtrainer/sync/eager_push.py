"""Pushes gradients to servers while the backward pass still computes others (`overlap=True`).

A slice goes when all of its keys have their gradients, those of the last layers first. It counts only with the
commit of the step, which sends again what has changed since, and what was never complete: any slice may be left to
the step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from kvstore_server.plan import Slice
from kvtrainer.errors import KVStoreError
from kvtrainer.memory.memory import DeviceMemory
from kvtrainer.sync.exchange import StoreExchange

_log = logging.getLogger(__name__)


class Overlap:
    """Pushes the slices of a Trainer's gradients as they become complete, from the only device, a CPU.

    A key whose gradient came in several backward passes in the last step is complete after as many of them in this
    one. `predict_hypers` packs the hyper-parameters that are new in the step, as far as they are known before it.
    """

    def __init__(
        self,
        exchange: StoreExchange,
        memory: DeviceMemory,
        predict_hypers: Callable[[], bytes],
    ) -> None:
        plan = exchange.plan
        self._exchange, self._predict_hypers = exchange, predict_hypers
        self._parameters = memory.parameters
        self._slices = [plan.slices_with(key) for key in range(len(plan.specs))]
        self._num_keys = [len(slice_.segments) for slice_ in plan.slices]
        self._missing = list(self._num_keys)
        """How many keys of each slice have yet to come."""
        self._passes = [0] * len(plan.specs)
        """In how many backward passes since the last step each key has come."""
        self._needed = [1] * len(plan.specs)
        """After how many it is complete."""
        self._thread = threading.get_ident()
        memory.tracker.listen(self._on_gradient)

    def begin_round(self) -> None:
        """Leave all other slices to the step; gradients that come from now on are those of the next one."""
        self._needed = [now or before for now, before in zip(self._passes, self._needed, strict=True)]
        self._passes, self._missing = [0] * len(self._passes), list(self._num_keys)
        self._thread = threading.get_ident()

    def _on_gradient(self, key: int) -> None:
        if getattr(self._parameters[key], "grad_req", None) == "null":
            return
        self._passes[key] += 1
        # Sockets belong to the thread that makes the steps.
        if self._passes[key] != self._needed[key] or threading.get_ident() != self._thread:
            return
        for slice_ in self._slices[key]:
            self._missing[slice_.index] -= 1
            if not self._missing[slice_.index]:
                self._send(slice_)

    @torch.no_grad()
    def _send(self, slice_: Slice) -> None:
        parts = []
        for key, _, start, numel in slice_.segments:
            grad = self._parameters[key].grad
            if grad is None or grad.layout is not torch.strided or not grad.is_contiguous() or grad.is_neg():
                return
            parts.append(grad.view(-1)[start : start + numel])
        try:
            self._exchange.push_eagerly(slice_, parts, self._predict_hypers)
        except KVStoreError as error:  # the step will raise it, if it still holds then
            _log.debug("slice %d was not sent ahead: %s", slice_.index, error)
