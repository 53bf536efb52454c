"""The Trainer: one fixed pipeline from gradients to new weights, over any kvstore.

    fresh gradients? → gather → reduce over workers → update, here or in the store → new weights

Every feature is an option of one of these stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.optim

from kvstore_server.hyper import effective_hypers, pack_hypers
from kvstore_server.optimizer import Optimizer
from kvtrainer.errors import ConfigurationError, KVStoreError, StaleGradientError
from kvtrainer.exchange import Exchange, PluginExchange, StoreExchange
from kvtrainer.flat_optimizer import FlatOptimizer
from kvtrainer.groups import make_groups
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.states import StateHolder
from kvtrainer.store_choice import choose_store

__all__ = ["Trainer"]


class Trainer(FlatOptimizer):
    """Trains parameters with an optimizer over a kvstore; Gluon's Trainer and a torch.optim.Optimizer in one.

    Args:
        params: A Module, `named_parameters()`, a dict (taken in sorted order of its keys), a list of parameters, or
            torch parameter groups. Shared parameters count once. All workers must give the same.
        optimizer: A name ("sgd", "adam", …: Gluon's numbers), a torch.optim class or instance, "torch:Adam", or
            what `kvtrainer.optimizer.create` returns. It must be elementwise. A torch instance shares its groups,
            so schedulers bound to it reach the Trainer, and hands its state over at the first use.
        optimizer_params: Options of the optimizer, under Gluon's or torch's names; None beside an instance.
        kvstore: A name for `kvtrainer.kvstore.create`, a store object, or None. The store is made at the first
            step. In a single process a name without "dist" makes none: the update runs in place.
        compression_params: Gradient compression; no store of this release offers it, so anything but None is an
            error.
        update_on_kvstore: Whether the optimizer runs in the store: on the servers of "dist_sync", each holding a
            part of the weights and of the optimizer's state. The store's weights then count: what the loop itself
            writes into a parameter after the first step is overwritten by the next. None means: where the store can.

    The data of the parameters move into flat buffers; move the model to its device and dtype before. While the
    optimizer runs in the store, the weights live there: what the loop writes into a parameter after the first step
    is overwritten by the next one. To go on from other weights, build a new Trainer.
    Not thread-safe. As a context manager it closes its store.

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
    ) -> None:
        options = {} if optimizer_params is None else optimizer_params
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise ConfigurationError(
                f"optimizer_params must be a dict of options by name, got {optimizer_params!r:.80}"
            )
        built = create_optimizer(optimizer, **options)
        self._choice = choose_store(kvstore, update_on_kvstore, compression_params)
        self._exchange: Exchange | None = None
        self._is_ready = False
        self._is_closed = False
        self._options: tuple[dict[str, Any], list[Any]] = ({}, [])
        """The options of the last update in this process, and what they mean for each key."""
        self._sent_hyper = b""
        self._reduced: list[bool] | None = None
        """Between `allreduce_grads` and `update`: which gradients have been summed."""
        instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        super().__init__(make_groups(params, built, optimizer), built, instance)

    # ------------------------------------------------------------------ the pipeline

    def step(  # type: ignore[override]
        self,
        batch_size: float | Callable[[], Any] | None = None,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Reduce gradients over workers and update the weights; blocks until the new weights are here.

        With a batch size b, gradients are summed over workers, each divided by the b of its worker: pass the
        global batch size for a mean. Without one they are averaged over workers, as DistributedDataParallel does.
        Gradients stay readable until the next backward pass.

        Args:
            batch_size: A positive number; or the closure, as torch's optimizers take it.
            ignore_stale_grad: Leave out parameters without a new gradient instead of raising. Without a batch
                size they are always left out.
            closure: Called first, with gradients enabled; its result is returned.

        Raises:
            StaleGradientError: a parameter got no gradient since the last step; nothing has changed then.
            KVStoreError: the round failed on every worker; weights and optimizer state are as before.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        scale = self._scale(batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fresh = self._fresh(is_strict=batch_size is not None and not ignore_stale_grad)
        self._prepare()
        if self._exchange is None:
            self._layout.gather_grads(fresh)
            self._update_here(fresh, scale)
        else:
            present = self._reduce(
                fresh, scale if batch_size is not None else scale / self._exchange.num_workers
            )
            if not self._exchange.updates_weights:
                self._update_here(present, 1.0)
        self._finish(fresh)
        return loss

    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers, to be changed before `update`; blocks.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        self._refuse_in_store("allreduce_grads()")
        fresh = self._fresh(is_strict=False)
        self._prepare()
        if self._exchange is not None:
            self._reduced = self._reduce(fresh, 1.0)
            self._layout.arena.scatter_grads(self._reduced)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Raises:
            ConfigurationError: the optimizer runs in the store.
            StaleGradientError: as `step`.
        """
        self._refuse_in_store("update()")
        scale = self._scale(batch_size)
        is_strict = batch_size is not None and not ignore_stale_grad
        if self._reduced is None:
            present = self._fresh(is_strict)
        else:
            # Sums count as fresh, also where only other workers had a gradient; unless dropped since.
            rows = zip(self._reduced, self._layout.parameters, strict=True)
            present = self._fresh(is_strict, [has_sum and p.grad is not None for has_sum, p in rows])
        self._prepare()
        if self._exchange is not None and self._reduced is not None and batch_size is None:
            scale /= self._exchange.num_workers
        self._layout.gather_grads(present)
        self._update_here(present, scale)
        self._finish(present)

    def _reduce(self, fresh: list[bool], scale: float) -> list[bool]:
        """One round; returns which keys any worker contributed to. Raises before or after, never in the middle."""
        assert self._exchange is not None
        self._layout.gather_grads(fresh)
        arena = self._layout.arena
        hyper = pack_hypers(**self._checked_options(), update_on_kvstore=self._exchange.updates_weights)
        changed = hyper if hyper != self._sent_hyper else b""
        absent = frozenset(i for i, is_fresh in enumerate(fresh) if not is_fresh)
        # After a failed round nobody knows which servers took the change: it is sent again.
        self._sent_hyper = b""
        left_out = self._exchange.run(arena.grads, arena.weights, scale, absent, changed).left_out
        self._sent_hyper = hyper
        if self._exchange.updates_weights:
            arena.mark_updated(None)
        if not self._exchange.knows_left_out:
            return [
                takes_part and i not in left_out
                for i, takes_part in enumerate(self._layout.tracker.participating())
            ]
        # What is frozen here may not be so elsewhere, and weights must stay equal: the sum is what counts.
        return [i not in left_out for i in range(len(fresh))]

    def _update_here(self, present: Sequence[bool], scale: float) -> None:
        options = self._checked_options()
        if options != self._options[0]:
            self._options = (options, effective_hypers(self._layout.plan, self._optimizer, options))
        arena = self._layout.arena
        self._local.apply(arena.weights, arena.grads, scale, present, self._options[1])
        arena.mark_updated(present)

    def _finish(self, present: Sequence[bool]) -> None:
        self._layout.tracker.consume(i for i, is_present in enumerate(present) if is_present)
        self._reduced = None
        if self._instance is not None:
            # Schedulers bound to the instance warn unless they see it step.
            self._instance._opt_called = True  # type: ignore[attr-defined]

    def _fresh(self, is_strict: bool, summed: list[bool] | None = None) -> list[bool]:
        """Which parameters have a new gradient; raises StaleGradientError if one that should has none.

        After `allreduce_grads`, `summed` says which have one.
        """
        if self._is_closed:
            raise KVStoreError("this Trainer is closed; build a new one to go on")
        self._follow_instance()
        tracker, names = self._layout.tracker, self._layout.names
        tracker.attach()
        takes_part = tracker.participating()
        fresh = tracker.fresh(takes_part) if summed is None else summed
        if is_strict and fresh != takes_part:
            rows = zip(names, takes_part, fresh, strict=True)
            stale = [name for name, takes, is_fresh in rows if takes and not is_fresh]
            raise StaleGradientError(
                f"{len(stale)} of {len(names)} parameters got no gradient since the last step: {', '.join(stale)}. "
                "If the model uses only some of them on purpose, call step(batch_size, ignore_stale_grad=True)"
            )
        return fresh

    def _scale(self, batch_size: float | None) -> float:
        if batch_size is None:
            return self._optimizer.rescale_grad
        is_number = isinstance(batch_size, Real) and not isinstance(batch_size, bool)
        if not is_number or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}")
        return self._optimizer.rescale_grad / float(batch_size)

    def _refuse_in_store(self, method: str) -> None:
        if self._choice.updates_weights:
            raise ConfigurationError(
                f"{method} has no meaning while the optimizer runs in the kvstore; build the Trainer with "
                "update_on_kvstore=False"
            )

    # ------------------------------------------------------------------ the store

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store; None where none is needed, and before the first step if it was given by name."""
        return self._choice.store

    def server_stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this Trainer's parameters, in server order; empty without a store."""
        return self._exchange.stats() if self._exchange is not None else []

    def close(self) -> None:
        """End training and leave the store; idempotent. Other workers' rounds that need this one then fail."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        self._is_closed = True
        self._layout.tracker.close()
        self._choice.close(error)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)

    def _prepare(self) -> None:
        """Make the store and give every worker rank 0's weights; once, collectively."""
        if self._is_ready:
            return
        arena = self._layout.arena
        arena.check_in_place()
        if self._exchange is None:
            self._exchange = self._open_exchange()
        if self._exchange is not None:
            self._exchange.init(arena.weights)
            arena.mark_updated(None)
        self._is_ready = True
        self._hand_over_states()

    def _open_exchange(self) -> Exchange | None:
        choice, plan = self._choice, self._layout.plan
        choice.open()
        if choice.client is not None:
            return StoreExchange(choice.client, plan, self._optimizer if choice.updates_weights else None)
        return None if choice.store is None else PluginExchange(choice.store, plan)

    def _holder(self) -> StateHolder | None:
        if not self._choice.updates_weights:
            return self._local
        return self._exchange if self._is_ready and isinstance(self._exchange, StoreExchange) else None

    def _can_grow(self) -> bool:
        return self._exchange is None
