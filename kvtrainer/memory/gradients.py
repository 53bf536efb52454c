"""Tells which gradients are new since the last step, and drops old ones when the next backward pass begins.

Torch accumulates into `.grad` until it is zeroed. A Gluon-style loop has no `zero_grad()`, so a GradientTracker
remembers which gradient objects the last step consumed, and their version counters. A hook on each parameter's
AccumulateGrad node runs just before a backward pass adds to `.grad`: it marks the gradient as new and, once per
backward pass, drops all consumed gradients.

The hook is on the AccumulateGrad node because `torch.autograd.grad` never runs that node, whereas it does run hooks of
the tensor. Nothing is attached to the parameter itself, so a copied or pickled model carries no hooks.

Invariants: hooks refer to the tracker weakly, and consumed gradients are referred to weakly, so neither is kept alive.
Hooks run in one thread per device; `_dropping` lets one of them drop while the others wait. Gradients that were written
in place after they were consumed cannot always be told from new ones; these are kept in `written` for the caller to
warn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ConfigurationError

GRAD_REQS = ("write", "add", "null")
"""Values of `parameter.grad_req`. A parameter without that attribute follows the default rule."""
_gradient_of, _requires_grad, _version_of = map(attrgetter, ("grad", "requires_grad", "_version"))
# Parameters that are processed at a time where each needs short-lived objects. Thousands of these at once would trigger
# a full garbage collection, which takes longer than everything else here.
_FEW = 512


class GradientTracker:
    """Tells new gradients from consumed ones, and drops the latter when the next backward pass begins.

    `parameter.grad_req` is read each time it matters, so it may change during training:

    * absent: gradients stay readable after a step. The first backward pass afterwards drops all of them; further ones
      before the next step accumulate. A gradient zeroed in place, as by `zero_grad(set_to_none=False)`, is kept, so
      parameters that no backward pass reaches have zeros. One written in place otherwise is kept if the backward pass
      does not reach its parameter.
    * 'write': every backward pass overwrites. With reentrant activation checkpointing, which runs one backward pass per
      segment, a parameter shared by several segments keeps only the last segment's part.
    * 'add': never dropped; the caller zeroes.
    * 'null': takes no part in training, and `.grad` is left alone.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        count = len(self._parameters)
        self.attributes: list[Mapping[str, Any]] = [
            vars(p) if type(p) is Parameter else vars(type(p)) for p in self._parameters
        ]
        """Attributes set on each parameter, or on its class if that is a subclass. Usually all are empty."""
        # A parameter references its node weakly: the node and its hook live while we, or a graph, hold the node.
        # Hooks of nodes that are not in this list do nothing.
        self._nodes: list[Node | None] = [None] * count
        # Others may hold a node too and would keep calling its hooks, so they are removed.
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove_gradient_hooks, self._handles).atexit = False
        self._forward_handle: RemovableHandle | None = None
        self._listener: Callable[[int], None] | None = None
        self.grad_allocators: Mapping[int, Callable[[Tensor], Tensor | None]] = {}
        """Position → function that copies a parameter's first gradient into other memory, or returns None."""
        # requires_grad of each parameter when it was last checked.
        self._required: list[bool] = []
        self._fired = [False] * count
        # Consumed gradients. Weak, so that `zero_grad(set_to_none=True)` frees them. They are compared only with
        # gradients that are held, so torch's slower TensorWeakRef is not needed.
        self._used: list[weakref.ref[Tensor] | None] = [None] * count
        self._used_versions = [0] * count
        # Positions whose consumed gradient was zeroed in place: whatever is written to it later is new.
        self._cleared: set[int] = set()
        # Positions whose consumed gradient was otherwise written in place: dropped if a backward pass reaches it.
        self._doubtful: set[int] = set()
        self.written: list[int] = []
        """Positions whose gradient was consumed and then written in place, as `fresh` last found: new or old."""
        self.overwritten: set[int] = set()
        """Positions where a backward pass has dropped such a gradient. The reader clears it."""
        self._to_drop: Collection[int] = ()
        # The gradients that `fresh` last read, to read them once per step; None if they may have changed.
        self._seen: list[Tensor | None] | None = None
        # A backward pass runs hooks in one thread per device.
        self._dropping = threading.Lock()
        # Another Trainer's module may end a forward pass in another thread while this tracker waits for shapes.
        self._attaching = threading.RLock()

    def attach(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet; lazy ones once they have a shape."""
        with self._attaching:
            rows = zip(self._nodes, map(_requires_grad, self._parameters), strict=True)
            unwatched = [i for i, (node, is_trained) in enumerate(rows) if node is None and is_trained]
            if not unwatched and self._forward_handle is None:
                return
            lazy = set(map(id, lazy_parameters(self._parameters)))
            ready = [i for i in unwatched if id(self._parameters[i]) not in lazy] if lazy else unwatched
            # Hooks refer to the tracker weakly, or they would keep it alive as long as the graph.
            me = weakref.ref(self)
            for at in range(0, len(ready), _FEW):
                few = ready[at : at + _FEW]
                for i, node in zip(few, _gradient_nodes_of([self._parameters[i] for i in few]), strict=True):
                    self._nodes[i] = node
                    self._handles.append(node.register_prehook(_BeforeGradientAccumulation(me, i)))
                    if self._listener is not None:
                        self._handles.append(node.register_hook(partial(_after_gradient_accumulation, me, i)))
            is_waiting = len(ready) < len(unwatched)
            if is_waiting and self._forward_handle is None:
                self._forward_handle = register_module_forward_hook(partial(_track_after_forward, me))
                weakref.finalize(self, self._forward_handle.remove)
            elif not is_waiting:
                self._stop_waiting()

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call a function with the position of every gradient that a backward pass has accumulated."""
        self._listener = listener
        me = weakref.ref(self)
        for i, node in enumerate(self._nodes):
            if node is not None:
                self._handles.append(node.register_hook(partial(_after_gradient_accumulation, me, i)))

    def fresh(self, among: Sequence[bool], with_edits: bool = False) -> list[bool]:
        """Return which of the parameters in `among` have a gradient that no `consume` took.

        That is one that a backward pass has added to since, one that the caller assigned, or one that was zeroed in
        place and then written.

        Args:
            with_edits: Also count consumed gradients that were zeroed or otherwise written in place. The values may be
                new, or the old ones after clipping or unscaling.
        """
        self.written = []
        grads = self._seen = list(map(_gradient_of, self._parameters))
        rows = zip(among, grads, self._fired, self._used, strict=True)
        found = [
            asked and grad is not None and (fired or used is None or used() is not grad)
            for asked, grad, fired, used in rows
        ]
        # All are new in the common case. Only the others need a look at version counters and values.
        if found == among:
            return found
        missing = [
            i for i, (asked, is_in) in enumerate(zip(among, found, strict=True)) if asked and not is_in
        ]
        for i in missing:
            grad = grads[i]
            if not self._is_written(grad, i):
                continue
            is_zero = _is_zero_gradient(grad)
            found[i] = with_edits or (i in self._cleared and not is_zero)
            if not (is_zero or i in self._cleared):
                self.written.append(i)
        return found

    def record_zeroed(self) -> None:
        self._cleared.update([i for i, used in enumerate(self._used) if used is not None])

    def gradients(self) -> Sequence[Tensor | None]:
        """Return all gradients, as `fresh` read them if they cannot have changed since."""
        return list(map(_gradient_of, self._parameters)) if self._seen is None else self._seen

    def forget(self) -> None:
        """Release the gradients that `fresh` has read; they are read again when needed."""
        self._seen = None

    def participating(self) -> list[bool]:
        """Return which parameters require a gradient and do not have `grad_req` 'null'. Hooks them if necessary.

        Raises:
            ConfigurationError: A parameter has an unknown `grad_req`.
        """
        requires = list(map(_requires_grad, self._parameters))
        if requires != self._required or self._forward_handle is not None:
            self._required = requires
            self.attach()
        if not any(self.attributes):
            return requires
        return [required and self._checked_grad_req(i) != "null" for i, required in enumerate(requires)]

    def consume(self, used: Sequence[bool]) -> None:
        """Mark the current gradients of `used` parameters as consumed. Other edited ones count as old again."""
        for i in self.written:
            if not used[i]:
                self._forget_write(i)
        count, grads = len(self._parameters), list[Any](compress(self.gradients(), used))
        self._seen = None
        try:
            versions, have_versions = list(map(_version_of, grads)), True
        except (AttributeError, RuntimeError):
            # None has no version, and torch does not count writes to tensors made in inference mode.
            versions = [0 if grad is None or grad.is_inference() else grad._version for grad in grads]
            have_versions = False
        # All gradients were used and counted: replace the lists as a whole.
        if have_versions and len(grads) == count:
            # A few at a time, so that the weak references that are replaced are freed at once.
            for at in range(0, count, _FEW):
                self._used[at : at + _FEW] = map(weakref.ref, grads[at : at + _FEW])
            self._used_versions, self._fired, self._to_drop = versions, [False] * count, range(count)
            self._cleared.clear()
            self._doubtful.clear()
            return
        keys = list(compress(range(count), used))
        for i, grad, self._used_versions[i] in zip(keys, grads, versions, strict=True):
            self._used[i], self._fired[i] = None if grad is None else weakref.ref(grad), False
        self._to_drop = {*self._to_drop, *keys}
        self._cleared.difference_update(keys)
        self._doubtful.difference_update(keys)

    def succeed(self, former: GradientTracker) -> None:
        places = {id(p): key for key, p in enumerate(self._parameters)}
        moved = {old: places[id(p)] for old, p in enumerate(former._parameters) if id(p) in places}
        for old, new in moved.items():
            self._used[new], self._fired[new] = former._used[old], former._fired[old]
            self._used_versions[new] = former._used_versions[old]
        self._to_drop = {moved[old] for old in former._to_drop if old in moved}
        self._cleared = {moved[old] for old in former._cleared if old in moved}
        self._doubtful = {moved[old] for old in former._doubtful if old in moved}

    def _forget_write(self, i: int) -> None:
        """Treat a gradient that was written in place as the old one."""
        grad = self._parameters[i].grad
        if self._is_used(grad, i):
            self._used_versions[i] = grad._version
            self._to_drop = {*self._to_drop, i}
            self._doubtful.discard(i)

    def close(self) -> None:
        """Remove all hooks and keep the gradients. `attach` starts again, without a listener."""
        with self._attaching:
            self._listener = self._seen = None
            self.grad_allocators = {}
            self._stop_waiting()
            _remove_gradient_hooks(self._handles)
            self._nodes = [None] * len(self._parameters)

    def _stop_waiting(self) -> None:
        if self._forward_handle is not None:
            self._forward_handle.remove()
            self._forward_handle = None

    def _checked_grad_req(self, i: int) -> str | None:
        mode: str | None = getattr(self._parameters[i], "grad_req", None)
        if mode is not None and mode not in GRAD_REQS:
            raise ConfigurationError(
                f"parameter {self._names[i]!r} has grad_req={mode!r}; set it to one of "
                f"{', '.join(map(repr, GRAD_REQS))}, or delete the attribute for the default rule"
            )
        return mode

    def _is_used(self, grad: Tensor | None, i: int) -> TypeGuard[Tensor]:
        used = self._used[i]
        return grad is not None and used is not None and used() is grad

    def _is_written(self, grad: Tensor | None, i: int) -> TypeGuard[Tensor]:
        return self._is_used(grad, i) and not grad.is_inference() and grad._version != self._used_versions[i]

    def _drop_used(self) -> None:
        with self._dropping:
            # Several threads may get here in one backward pass; the first one drops.
            has_modes = any(self.attributes)
            for i in self._to_drop:
                parameter = self._parameters[i]
                grad = parameter.grad
                mode = self._checked_grad_req(i) if has_modes else None
                if i in self._cleared or not self._is_used(grad, i) or mode not in (None, "write"):
                    continue
                if not self._is_written(grad, i):
                    parameter.grad = None
                elif _is_zero_gradient(grad):
                    self._cleared.add(i)
                elif mode is None:
                    self._doubtful.add(i)
            # Cleared last: until then other threads wait, or they would add to a gradient that is about to be dropped.
            self._to_drop = ()


def _is_zero_gradient(grad: Tensor) -> bool:
    return not (grad._values() if grad.is_sparse else grad).any()


def _remove_gradient_hooks(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def lazy_parameters(parameters: Sequence[Parameter]) -> list[Parameter]:
    # Checks the set of classes first: usually all are plain Parameters.
    return [p for p in parameters if is_lazy(p)] if set(map(type, parameters)) != {Parameter} else []


def largest_numel(parameters: Sequence[Parameter]) -> int:
    shaped = [p for p in parameters if not is_lazy(p)] if lazy_parameters(parameters) else parameters
    return max(map(Tensor.numel, shaped), default=0)


class _GradientNodes(torch.autograd.Function):
    """Takes many tensors, to get the edges of its graph node in one call. One call each would cost much more."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise AssertionError("this function's result is never used")


def _gradient_nodes_of(parameters: Sequence[Parameter]) -> list[Node]:
    if not parameters:
        return []
    with torch.inference_mode(False), torch.enable_grad():
        # Bypasses Function.apply, which inspects each argument in Python for functorch.
        result: Tensor = super(torch.autograd.Function, _GradientNodes).apply(*parameters)  # type: ignore[no-untyped-call]
    assert result.grad_fn is not None
    return [node for node, _ in result.grad_fn.next_functions if node is not None]


@uncompiled
class _BeforeGradientAccumulation:
    """Pre-hook of an AccumulateGrad node. A class, because a partial is two objects for the garbage collector."""

    __slots__ = ("_i", "_tracker")

    def __init__(self, tracker: weakref.ref[GradientTracker], i: int) -> None:
        self._tracker = tracker
        self._i = i

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        """Return what to accumulate instead of `grads`, or None to leave it as it is."""
        tracker, i = self._tracker(), self._i
        if tracker is None or tracker._nodes[i] is None:
            return None
        # 1. The first hook of a backward pass drops what the last step consumed.
        tracker._seen = None
        if tracker._to_drop:
            tracker._drop_used()
        if grads[0] is None:
            # A custom autograd function returned no gradient: torch leaves `.grad` as it is.
            return None
        # 2. Mark the gradient as new, and drop what it must not be added to.
        tracker._fired[i] = True
        parameter = tracker._parameters[i]
        if i in tracker._doubtful:
            tracker._doubtful.discard(i)
            if tracker._is_used(parameter.grad, i):
                parameter.grad = None
                tracker.overwritten.add(i)
        if getattr(parameter, "grad_req", None) == "write":
            parameter.grad = None
        # 3. Add what torch cannot add on the CPU, float16 rows: they are summed when the gradient is gathered.
        former = parameter.grad
        is_half = former is not None and former.dtype is torch.float16 and former.is_cpu
        if former is not None and is_half and former.is_sparse and grads[0].is_sparse:
            parameter.grad = None
            return (_joined_rows(former, grads[0]),)
        # 4. Place a first gradient in other memory, if there is an allocator for it.
        allocator = tracker.grad_allocators.get(i)
        if allocator is None or former is not None:
            return None
        # The copy has no other reference, so torch adopts it as `.grad`.
        shared_grads = allocator(grads[0])
        return None if shared_grads is None else (shared_grads,)


def _joined_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return a sparse tensor with the rows of both, whose sum is that of both."""
    indices, values = torch.cat([a._indices(), b._indices()], 1), torch.cat([a._values(), b._values()])
    return torch.sparse_coo_tensor(indices, values, a.shape, check_invariants=False, device=values.device)


@uncompiled
def _after_gradient_accumulation(
    tracker_ref: weakref.ref[GradientTracker], i: int, _: object, grads: tuple[Tensor | None, ...]
) -> None:
    tracker = tracker_ref()
    if tracker is not None and tracker._listener is not None and grads[0] is not None:
        tracker._listener(i)


@uncompiled
def _track_after_forward(
    tracker_ref: weakref.ref[GradientTracker], module: Module, args: object, output: object
) -> None:
    tracker = tracker_ref()
    # Inference mode creates neither gradients nor nodes.
    if tracker is not None and not torch.is_inference_mode_enabled():
        tracker.attach()
