"""The Trainer: one fixed pipeline from gradients to new weights, over any kvstore.

    fresh gradients? → gather → reduce over workers → update, here or in the store → new weights

Every feature is an option of one of these stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.optim
from torch import Tensor

from kvstore_server.hyper import effective_hypers, pack_hypers
from kvstore_server.optimizer import Optimizer
from kvstore_server.optimizer.base import canonical_options
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol.frames import unpack_control
from kvtrainer.arena import Arena
from kvtrainer.errors import ConfigurationError, StaleGradientError
from kvtrainer.exchange import Exchange, PluginExchange, StoreExchange
from kvtrainer.gradients import GradientTracker
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.local_update import LocalUpdate
from kvtrainer.optimizer import create as create_optimizer
from kvtrainer.parameters import collect
from kvtrainer.states import StateHolder, export_states, import_states
from kvtrainer.store_choice import choose_store

__all__ = ["Trainer"]


class Trainer(torch.optim.Optimizer):
    """Trains parameters with an optimizer over a kvstore; Gluon's Trainer and a torch.optim.Optimizer in one.

    Args:
        params: A Module, `named_parameters()`, a dict (taken in sorted order of its keys), a list of parameters, or
            torch parameter groups. Shared parameters count once. All workers must give the same.
        optimizer: A name ("sgd", "adam", …: Gluon's numbers), a torch.optim class or instance, "torch:Adam", or
            what `kvtrainer.optimizer.create` returns. It must be elementwise.
        optimizer_params: Options of the optimizer, under Gluon's or torch's names; None beside an instance.
        kvstore: A name for `kvtrainer.kvstore.create`, a store object, or None. The store is made at the first
            step. In a single process a name without "dist" makes none: the update runs in place.
        compression_params: Gradient compression; no store of this release offers it, so anything but None is an
            error.
        update_on_kvstore: Whether the optimizer runs in the store: on the servers of "dist_sync", each holding a
            part of the weights and of the optimizer's state. None means: where the store can.

    The data of the parameters move into flat buffers; move the model to its device and dtype before.
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
        self._optimizer = create_optimizer(optimizer, **(optimizer_params or {}))  # type: ignore[arg-type]
        self._option_names = tuple(self._optimizer.hyper)
        self._choice = choose_store(kvstore, update_on_kvstore, compression_params)
        self._arena: Arena | None = None
        self._exchange: Exchange | None = None
        self._is_ready = False
        groups = self._own_groups(params, optimizer)
        super().__init__(groups, dict(self._optimizer.hyper))
        if isinstance(optimizer, torch.optim.Optimizer):
            # One list of groups for both, so that schedulers bound to the instance reach this trainer.
            self.param_groups = optimizer.param_groups
        self._instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._build()

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
        if batch_size is None and self._exchange is not None:
            scale /= self._exchange.num_workers
        if self._exchange is None:
            self._gather(fresh)
            self._update_here(fresh, scale)
        else:
            present = self._reduce(fresh, scale)
            if not self._exchange.updates_weights:
                self._update_here(present, 1.0)
        self._finish(fresh)
        return loss

    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers, to be changed before `update`; blocks.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        fresh = self._fresh(is_strict=False)
        self._prepare()
        if self._exchange is None:
            return
        if self._exchange.updates_weights:
            raise ConfigurationError(
                "allreduce_grads() has no meaning while the optimizer runs in the kvstore; "
                "build the Trainer with update_on_kvstore=False"
            )
        self._reduced = self._reduce(fresh, 1.0)
        self._arena_now.scatter_grads(self._reduced)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Raises:
            ConfigurationError: the optimizer runs in the store.
            StaleGradientError: as `step`.
        """
        scale = self._scale(batch_size)
        present = self._fresh(is_strict=batch_size is not None and not ignore_stale_grad)
        self._prepare()
        if self._exchange is not None and self._exchange.updates_weights:
            raise ConfigurationError(
                "update() has no meaning while the optimizer runs in the kvstore; "
                "build the Trainer with update_on_kvstore=False"
            )
        if self._exchange is not None and self._reduced is not None:
            present = self._reduced
            if batch_size is None:
                scale /= self._exchange.num_workers
        self._gather(present)
        self._update_here(present, scale)
        self._finish(present)

    def _reduce(self, fresh: list[bool], scale: float) -> list[bool]:
        """One round; returns which keys any worker contributed to. Raises before or after, never in the middle."""
        assert self._exchange is not None
        self._gather(fresh)
        hyper = self._packed_hypers() if self._exchange.updates_weights else b""
        absent = frozenset(i for i, is_fresh in enumerate(fresh) if not is_fresh)
        changed = hyper if hyper != self._sent_hyper else b""
        self._sent_hyper = b""
        left_out = self._exchange.run(self._arena_now.grads, self._arena_now.weights, scale, absent, changed)
        self._sent_hyper = hyper
        if self._exchange.updates_weights:
            self._arena_now.mark_updated(None)
        return [
            takes_part and i not in left_out for i, takes_part in enumerate(self._tracker.participating())
        ]

    def _update_here(self, present: Sequence[bool], scale: float) -> None:
        packed = self._packed_hypers()
        if packed != self._local_hyper[0]:
            values = unpack_control(packed)
            self._local_hyper = (packed, effective_hypers(self._plan, self._optimizer, _with_tuples(values)))
        arena = self._arena_now
        self._local.apply(arena.weights, arena.grads, scale, present, self._local_hyper[1])
        arena.mark_updated(present)

    def _gather(self, present: Sequence[bool]) -> None:
        self._arena_now.check_in_place()
        self._arena_now.gather_grads(present)

    def _finish(self, present: Sequence[bool]) -> None:
        self._tracker.consume(i for i, is_present in enumerate(present) if is_present)
        self._reduced = None

    def _fresh(self, is_strict: bool) -> list[bool]:
        """Which parameters have a new gradient; raises StaleGradientError if one that should has none."""
        self._tracker.attach()
        stale = set(self._tracker.stale())
        reduced = self._reduced or [False] * len(self._names)
        wanting = [i for i in sorted(stale) if not reduced[i]]
        if is_strict and wanting:
            names = ", ".join(self._names[i] for i in wanting)
            raise StaleGradientError(
                f"{len(wanting)} of {len(self._names)} parameters got no gradient since the last step: {names}. If "
                "the model uses only some of them on purpose, call step(batch_size, ignore_stale_grad=True)"
            )
        return [takes_part and i not in stale for i, takes_part in enumerate(self._tracker.participating())]

    def _scale(self, batch_size: float | None) -> float:
        if batch_size is None:
            return self._optimizer.rescale_grad
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | float) or not batch_size > 0:
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}")
        return self._optimizer.rescale_grad / batch_size

    # ------------------------------------------------------------------ options

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's kind and numbers; with one parameter group, that group's numbers, live."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group, before `lr_mult`."""
        return float(self.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of every group, from the next step on, wherever the optimizer runs."""
        if isinstance(lr, bool) or not isinstance(lr, int | float):
            raise ConfigurationError(f"the learning rate must be a number, got {lr!r}")
        for group in self.param_groups:
            group["lr"] = float(lr)

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store; None before the first step, and where none is needed."""
        return self._choice.store

    def server_stats(self) -> list[dict[str, Any]]:
        """Each server's counters for this Trainer's parameters, in server order; empty without a store."""
        return self._exchange.stats() if self._exchange is not None else []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; allowed until the first step.

        Raises:
            ConfigurationError: the parameters are in a store already, or an option is unknown.
        """
        if self._is_ready:
            raise ConfigurationError(
                "the parameters are in the kvstore already; add parameter groups before the first step"
            )
        if self._arena is None:
            super().add_param_group(param_group)
            return
        [group] = collect([param_group])
        super().add_param_group(self._with_options(group))
        self._build()

    # ------------------------------------------------------------------ states

    def state_dict(self) -> dict[str, Any]:
        """Options and optimizer state in torch's form, wherever the state is kept; blocks while it is fetched.

        Any one worker may call it between its steps.
        """
        parameters = self._parameters
        states = self._pending_states if self._pending_states is not None else {}
        if self._pending_states is None and self._holder is not None:
            states = export_states(self._plan, self._holder)
        self.state.update({parameters[key]: state for key, state in states.items()})
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and optimizer state, of this class or of the torch optimizer of the same kind.

        Call it on every worker, after building the Trainer. State for a store is handed over when the store is
        there: now, or at the first step.

        Raises:
            ConfigurationError, ValueError: the state belongs to another model; optimizer state is as before.
        """
        try:
            super().load_state_dict(state_dict)
            states = {i: dict(self.state[p]) for i, p in enumerate(self._parameters) if p in self.state}
        finally:
            self.state.clear()
            self._bind_groups()
        self._pending_states = states
        if self._holder is not None:
            self._hand_over_states()

    @staticmethod
    def _process_value_according_to_param_policy(
        param: Tensor, value: Tensor, param_id: int, param_groups: list[dict[Any, Any]], key: Any = None
    ) -> Tensor:
        # torch would round the float32 state of half-precision parameters to half precision.
        return value.to(device=param.device) if value.dim() else value

    def _hand_over_states(self) -> None:
        if self._pending_states is not None and self._holder is not None:
            import_states(self._plan, self._holder, self._pending_states, self._arena_now.weights)
            self._pending_states = None

    # ------------------------------------------------------------------ making and ending

    def close(self) -> None:
        """Leave the kvstore that this Trainer made; idempotent. Other workers' rounds that need it then fail."""
        self._tracker.close()
        if self._exchange is not None:
            self._exchange.close()
        self._choice.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_groups(self, params: Any, optimizer: object) -> list[dict[str, Any]]:
        groups = [self._with_options(group) for group in collect(params)]
        if isinstance(optimizer, torch.optim.Optimizer):
            mine = {id(p) for group in groups for _, p in group["params"]}
            its = [p for group in optimizer.param_groups for p in group["params"]]
            if mine != {id(p) for p in its}:
                raise ConfigurationError(
                    f"the {type(optimizer).__name__} instance trains {len(its)} parameters, the Trainer was given "
                    f"{len(mine)}, and they are not the same ones; give both the same parameters"
                )
            names = {id(p): name for group in groups for name, p in group["params"]}
            return [
                {**group, "params": [(names[id(p)], p) for p in group["params"]]}
                for group in ({k: v for k, v in g.items() if k != "param_names"} for g in optimizer.param_groups)
            ]
        return groups

    def _with_options(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {name: value for name, value in group.items() if name != "params"}
        known = {name: None for name in self._option_names} | {"betas": self._optimizer.hyper.get("betas")}
        return {"params": group["params"], **canonical_options(options, known, self._optimizer.registered_name)}

    def _build(self) -> None:
        """Lay out the parameters and move them into the arena."""
        pairs = [
            (name, p, at)
            for at, group in enumerate(self.param_groups)
            for name, p in zip(group.get("param_names") or self._fallback_names(at), group["params"], strict=True)
        ]
        self._names = [name for name, _, _ in pairs]
        self._parameters = [p for _, p, _ in pairs]
        dtypes = [str(p.dtype).removeprefix("torch.") for p in self._parameters]
        rows = zip(pairs, dtypes, strict=True)
        specs = [TensorSpec(name, tuple(p.shape), dtype, at) for (name, p, at), dtype in rows]
        self._plan = make_plan(specs, 1)
        self._arena = Arena(self._parameters, self._names, self._plan)
        self._tracker = GradientTracker(self._parameters, self._names)
        self._tracker.attach()
        self._local = LocalUpdate(self._plan, self._optimizer)
        self._local_hyper: tuple[bytes, list[Any]] = (b"", [])
        self._sent_hyper = b""
        self._reduced: list[bool] | None = None
        self._pending_states: dict[int, Any] | None = None
        self._bind_groups()

    def _fallback_names(self, at: int) -> list[str]:
        first = sum(len(group["params"]) for group in self.param_groups[:at])
        return [str(first + i) for i in range(len(self.param_groups[at]["params"]))]

    def _bind_groups(self) -> None:
        if self._instance is not None:
            self._instance.param_groups = self.param_groups
        if len(self.param_groups) == 1:
            self._optimizer.hyper = self.param_groups[0]

    def _prepare(self) -> None:
        """Make the store and give every worker rank 0's weights; once, collectively."""
        if self._is_ready:
            return
        arena = self._arena_now
        arena.check_in_place()
        choice = self._choice.open()
        if choice.client is not None:
            self._exchange = StoreExchange(
                choice.client, self._plan, self._optimizer if choice.updates_weights else None
            )
        elif choice.store is not None:
            self._exchange = PluginExchange(choice.store, self._plan)
        if self._exchange is not None:
            self._exchange.init(arena.weights)
            arena.mark_updated(None)
        self._is_ready = True
        self._hand_over_states()

    @property
    def _arena_now(self) -> Arena:
        assert self._arena is not None
        return self._arena

    @property
    def _holder(self) -> StateHolder | None:
        """Where the optimizer state is; None before the store is there."""
        if isinstance(self._exchange, StoreExchange) and self._exchange.updates_weights:
            return self._exchange
        return self._local if self._is_ready or not self._choice.is_in_store else None

    def _packed_hypers(self) -> bytes:
        groups = [{name: group[name] for name in self._option_names} for group in self.param_groups]
        lr_mult, wd_mult = (
            {
                i: float(value)
                for i, p in enumerate(self._parameters)
                if (value := getattr(p, name, None)) is not None and value != 1
            }
            for name in ("lr_mult", "wd_mult")
        )
        return pack_hypers(groups, lr_mult, wd_mult)


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """msgpack turns tuples, such as betas, into lists."""
    groups = [
        {name: tuple(v) if isinstance(v, list) else v for name, v in group.items()} for group in values["groups"]
    ]
    return {**values, "groups": groups}
