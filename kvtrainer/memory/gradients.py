"""Which gradients are new since the last step, and when old ones are dropped.

One hook per parameter does both. It sits on the parameter's AccumulateGrad node and runs just before a
backward pass adds to `.grad`; `torch.autograd.grad` never executes that node, whereas it does run hooks of
the tensor. Nothing is attached to the parameter itself, so copying or pickling a model neither carries nor
meets a hook.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import Plan, row_numel
from kvstore_server.reduction import RowSet
from kvtrainer.errors import ConfigurationError, StaleGradientError

GRAD_REQS = ("write", "add", "null")
"""What `parameter.grad_req` may be; without that attribute a parameter follows the default rule."""

REPLACED = (
    "Did backward() run, and on the model that this Trainer was built for? load_state_dict(assign=True), and whatever "
    "else gives a module new Parameter objects, leaves the Trainer with the old ones: build a new Trainer then."
)
"""What to look for where no parameter at all has a new gradient."""


class GradientTracker:
    """Tells fresh gradients from used-up ones, and drops the used-up ones when the next backward pass begins.

    `parameter.grad_req` is read each time that it matters, so it may change while training:

    * absent: gradients stay readable after a step; the first backward pass afterwards drops all of those and
      starts afresh; further ones before the next step add up. One that was zeroed in place, as by
      `zero_grad(set_to_none=False)`, stays, so that zeros are there where no backward pass comes.
    * 'write': every backward pass overwrites. A parameter shared by several segments of reentrant activation
      checkpointing keeps the last segment's part only, because torch runs one backward pass per segment.
    * 'add': never dropped; the caller zeroes.
    * 'null': takes no part in training, and `.grad` is left alone.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        count = len(self._parameters)
        # A parameter refers to its node only weakly: the node, and the hook on it, live while we hold them.
        self._nodes: list[Node | None] = [None] * count
        self._handles: list[RemovableHandle] = []
        self._forward_handle: RemovableHandle | None = None
        self._fired = [False] * count
        # Weak, so that `zero_grad(set_to_none=True)` frees the memory of the gradients. Each is only ever compared
        # with a gradient that is held, so torch's slower TensorWeakRef is not needed.
        self._used: list[weakref.ref[Tensor] | None] = [None] * count
        self._used_versions = [0] * count
        self._to_drop: set[int] = set()
        # One backward pass runs hooks in one thread per device.
        self._dropping = threading.Lock()

    def attach(self) -> None:
        """Watch every parameter that requires a gradient and is not watched yet; cheap when there is none.

        A parameter of a lazy module can be watched from when it gets its shape, in the module's first forward pass.
        """
        rows = zip(self._nodes, self._parameters, strict=True)
        unwatched = [i for i, (node, p) in enumerate(rows) if node is None and p.requires_grad]
        if not unwatched and self._forward_handle is None:
            return
        lazy = set(map(id, lazy_among(self._parameters)))
        ready = [i for i in unwatched if id(self._parameters[i]) not in lazy] if lazy else unwatched
        me = weakref.ref(self)
        for i, node in zip(ready, _nodes_of([self._parameters[i] for i in ready]), strict=True):
            self._handles.append(node.register_prehook(partial(_before_accumulation, me, i)))
            self._nodes[i] = node
        self._watch_forward(len(ready) < len(unwatched))

    def is_fresh(self, i: int) -> bool:
        """Whether parameter `i` has a gradient that came after the last `consume` of it.

        Fresh is a gradient that a backward pass has added to, or another object than the one that was
        consumed (so one that the caller assigned). Edits in place change nothing: clipping, unscaling,
        zeroing.
        """
        grad = self._parameters[i].grad
        if grad is None:
            return False
        return self._fired[i] or not self._is_used(i, grad)

    def fresh(self, among: Sequence[bool]) -> list[bool]:
        """For each parameter, whether it is `among` those asked for and has a fresh gradient; see `is_fresh`."""
        grads = [p.grad for p in self._parameters]
        rows = zip(among, grads, self._fired, self._used, strict=True)
        return [
            asked and grad is not None and (fired or used is None or used() is not grad)
            for asked, grad, fired, used in rows
        ]

    def fresh_or_zeroed(self, among: Sequence[bool]) -> list[bool]:
        """As `fresh`, where gradients count, too, that were set to zero since the last `consume` of them."""
        rows = zip(among, self.fresh(among), strict=True)
        return [is_fresh or (asked and self._is_zeroed(i)) for i, (asked, is_fresh) in enumerate(rows)]

    def fresh_or_raise(self, summed: Sequence[bool] | None = None) -> list[bool]:
        """For each parameter, whether it takes part; all that do must have a fresh gradient.

        Args:
            summed: which ones count as fresh, if that is known; otherwise see `is_fresh`.

        Raises:
            StaleGradientError: some have none; names all of them.
        """
        takes_part = self.participating()
        fresh = self.fresh(takes_part) if summed is None else list(summed)
        if fresh != takes_part:
            rows = zip(self._names, takes_part, fresh, strict=True)
            stale = [name for name, takes, is_fresh in rows if takes and not is_fresh]
            # What is frozen here may have a sum all the same, of other workers' gradients.
            if stale:
                raise stale_error(stale, len(self._names), any(fresh))
        return fresh

    def stale(self) -> list[int]:
        """The participating parameters without a fresh gradient, in ascending order.

        Raises:
            ConfigurationError: a parameter has an unknown `grad_req`.
        """
        return [i for i, takes_part in enumerate(self.participating()) if takes_part and not self.is_fresh(i)]

    def participating(self) -> list[bool]:
        """For each parameter, whether it requires a gradient and its `grad_req` is not 'null'.

        Raises:
            ConfigurationError: a parameter has an unknown `grad_req`.
        """
        requires = [p.requires_grad for p in self._parameters]
        if not any([getattr(p, "grad_req", None) for p in self._parameters]):
            return requires
        return [required and self._mode(i) != "null" for i, required in enumerate(requires)]

    def consume(self, indices: Iterable[int]) -> None:
        """Take the present gradients of these parameters as used up: not fresh, and due to be dropped."""
        for i in indices:
            grad = self._parameters[i].grad
            self._fired[i] = False
            self._used[i] = None if grad is None else weakref.ref(grad)
            self._used_versions[i] = _version_of(grad)
            self._to_drop.add(i)

    def close(self) -> None:
        """Remove the hooks. Gradients are left as they are; `attach` starts watching again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch_forward(False)
        self._nodes = [None] * len(self._parameters)

    def _watch_forward(self, is_waiting: bool) -> None:
        """While parameters wait for their shapes, look for them after the forward pass of any module."""
        if is_waiting and self._forward_handle is None:
            self._forward_handle = register_module_forward_hook(partial(_after_forward, weakref.ref(self)))
            weakref.finalize(self, self._forward_handle.remove)
        elif not is_waiting and self._forward_handle is not None:
            self._forward_handle.remove()
            self._forward_handle = None

    def _mode(self, i: int) -> str | None:
        mode: str | None = getattr(self._parameters[i], "grad_req", None)
        if mode is not None and mode not in GRAD_REQS:
            raise ConfigurationError(
                f"parameter {self._names[i]!r} has grad_req={mode!r}; set it to one of "
                f"{', '.join(map(repr, GRAD_REQS))}, or delete the attribute for the default rule"
            )
        return mode

    def _is_used(self, i: int, grad: Tensor) -> bool:
        used = self._used[i]
        return used is not None and used() is grad

    def _is_zeroed(self, i: int) -> bool:
        """Whether the gradient that was used up has been written to since, and is zero now."""
        grad = self._parameters[i].grad
        if grad is None or not self._is_used(i, grad) or _version_of(grad) == self._used_versions[i]:
            return False
        return not (grad._values() if grad.is_sparse else grad).any()

    def _drop_used(self) -> None:
        with self._dropping:
            for i in self._to_drop:
                parameter = self._parameters[i]
                grad = parameter.grad
                is_used = grad is not None and self._is_used(i, grad)
                if is_used and self._mode(i) in (None, "write") and not self._is_zeroed(i):
                    parameter.grad = None
            # Last: until then other threads must wait, or they would add to a gradient that is to be dropped.
            self._to_drop.clear()


class SparseGrads:
    """Knows which parameters have had row-sparse gradients, and reads those that they have now.

    Args:
        in_store: those that live in a store alone, by position.
    """

    def __init__(
        self, parameters: Sequence[Parameter], names: Sequence[str], in_store: Iterable[int] = ()
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._in_store = set(in_store)
        self._known: set[int] = set(self._in_store)
        """Those that had one once, or live in a store. Looking at every gradient in every step would take time."""

    def find(self, among: Sequence[bool]) -> bool:
        """Look at all gradients, because some are not dense; returns whether there is a sparse one not known yet."""
        grads = [p.grad if asked else None for p, asked in zip(self._parameters, among, strict=True)]
        found = {i for i, grad in enumerate(grads) if grad is not None and grad.layout is not torch.strided}
        is_new = not found <= self._known
        self._known |= found
        return is_new

    def present(self, among: Sequence[bool]) -> list[int]:
        """The parameters among those asked for whose gradient goes by rows now."""
        known = (i for i in sorted(self._known) if among[i])
        return [i for i in known if i in self._in_store or _is_sparse(self._parameters[i].grad)]

    @torch.no_grad()
    def rows(self, present: Iterable[int], plan: Plan) -> dict[int, RowSet]:
        """The rows of gradients, each row once: values of a row that appears several times are added in order.

        Parameters without elements have none.

        Raises:
            ConfigurationError: a gradient is sparse in another way than by rows, or its rows are too long.
        """
        return {i: self._rows(i, plan) for i in present if plan.specs[i].numel}

    def _rows(self, i: int, plan: Plan) -> RowSet:
        grad, spec = self._parameters[i].grad, plan.specs[i]
        assert grad is not None
        if grad.layout is torch.strided:
            # Of a row-sparse parameter, from elsewhere than its own backward pass: it has all rows.
            return RowSet(torch.arange(spec.shape[0]), grad.detach().reshape(spec.shape[0], row_numel(spec)))
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise ConfigurationError(
                f"the gradient of {self._names[i]!r} has layout {grad.layout}"
                + (f" with sparse_dim {grad.sparse_dim()}" if grad.layout is torch.sparse_coo else "")
                + "; a sparse gradient must be a sparse COO tensor with sparse_dim 1, which has whole rows"
            )
        if not plan.takes_rows(i):
            raise ConfigurationError(
                f"the gradient of {self._names[i]!r} is sparse, but its rows of {row_numel(spec)} {spec.dtype} "
                "elements are longer than the 1 MiB that are updated together; build the module with sparse=False"
            )
        ids, values = grad._indices()[0], grad._values()
        if values.dtype.itemsize < 4 and len(ids) > 1:
            ids, summed = coalesce_rows(ids, values.float(), spec.shape[0])
            values = summed.to(values.dtype)
        else:
            ids, values = coalesce_rows(ids, values, spec.shape[0])
        return RowSet(ids, values.reshape(len(ids), row_numel(spec)))


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def lazy_among(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Find the parameters of lazy modules that have no shape yet."""
    # By their classes first: of most models all parameters are plain ones.
    return [p for p in parameters if is_lazy(p)] if set(map(type, parameters)) != {Parameter} else []


class _AllOf(torch.autograd.Function):
    """A function of many tensors, made for the edges of its graph; they cost much more one by one."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise AssertionError("nobody has this function's result")


def _nodes_of(parameters: Sequence[Parameter]) -> list[Node]:
    """The AccumulateGrad nodes of leaves that require a gradient."""
    if not parameters:
        return []
    with torch.inference_mode(False), torch.enable_grad():
        result: Tensor = _AllOf.apply(*parameters)  # type: ignore[no-untyped-call]
    assert result.grad_fn is not None
    return [node for node, _ in result.grad_fn.next_functions if node is not None]


def _version_of(grad: Tensor | None) -> int:
    """How often a gradient has been written to in place, as far as torch counts that."""
    return 0 if grad is None or grad.is_inference() else grad._version


def stale_error(stale: Sequence[str], count: int, is_any_fresh: bool) -> StaleGradientError:
    """What to raise when some of `count` parameters should have a new gradient and have none; `stale` names them."""
    hint = "" if is_any_fresh else f" {REPLACED}"
    return StaleGradientError(
        f"{len(stale)} of {count} parameters got no gradient since the last step: {', '.join(stale)}.{hint} If the "
        "model uses only some of them on purpose, call step(batch_size, ignore_stale_grad=True)"
    )


def _before_accumulation(
    tracker_ref: weakref.ref[GradientTracker], i: int, grads: tuple[Tensor | None, ...]
) -> None:
    """Runs in a backward pass, just before `grads[0]` is added to the gradient of parameter `i`."""
    tracker = tracker_ref()
    if tracker is None:
        return
    if tracker._to_drop:
        tracker._drop_used()
    if grads[0] is None:
        # A custom autograd function returned no gradient: torch will leave `.grad` as it is.
        return
    tracker._fired[i] = True
    parameter = tracker._parameters[i]
    if getattr(parameter, "grad_req", None) == "write":
        parameter.grad = None


def _after_forward(
    tracker_ref: weakref.ref[GradientTracker], module: Module, args: object, output: object
) -> None:
    tracker = tracker_ref()
    # There are no gradients to watch in inference mode, and no nodes.
    if tracker is not None and not torch.is_inference_mode_enabled():
        tracker.attach()
