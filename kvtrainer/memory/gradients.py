"""Which gradients are new since the last step, and when old ones are dropped.

One hook per parameter does both. It sits on the parameter's AccumulateGrad node and runs just before a
backward pass adds to `.grad`; `torch.autograd.grad` never executes that node, whereas it does run hooks of
the tensor. Nothing is attached to the parameter itself, so copying or pickling a model neither carries nor
meets a hook.
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
"""What `parameter.grad_req` may be; without that attribute a parameter follows the default rule."""
_gradient_of, _requires_grad, _version_of = map(attrgetter, ("grad", "requires_grad", "_version"))
# Parameters that are gone through together, where each takes objects that are short-lived: thousands more of them at
# once would have the garbage collector look through the whole process, which takes longer than all else here.
_FEW = 512


class GradientTracker:
    """Tells fresh gradients from used-up ones. Drops these when the next backward pass begins.

    `parameter.grad_req` is read each time that it matters, so it may change while training:

    * absent: gradients stay readable after a step; the first backward pass afterwards drops all of those and
      starts afresh; further ones before the next step add up. One that was zeroed in place, as by
      `zero_grad(set_to_none=False)`, stays, so that zeros are there where no backward pass comes. One that was
      written in place otherwise stays if the backward pass does not reach its parameter.
    * 'write': every backward pass overwrites. A parameter shared by several segments of reentrant activation
      checkpointing keeps the last segment's part only, because torch runs one backward pass per segment.
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
        """What was set on each parameter, or its class if that is one of its own: of most models nothing at all."""
        # A parameter refers to its node only weakly: the node, and the hook on it, live while we hold them, or a graph
        # does; of a parameter whose node we do not hold the hook does nothing.
        self._nodes: list[Node | None] = [None] * count
        # Others may hold the node, too, and would go on to call the hooks that are left there, which do nothing.
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._forward_handle: RemovableHandle | None = None
        self._listener: Callable[[int], None] | None = None
        self.grad_allocators: Mapping[int, Callable[[Tensor], Tensor | None]] = {}
        """Position → copies a new gradient of a parameter that has none to where it is to be; None if it may not."""
        # Those that required a gradient when they were looked at last.
        self._required: list[bool] = []
        self._fired = [False] * count
        # Weak, so that `zero_grad(set_to_none=True)` frees the memory of the gradients. Each is only ever compared
        # with a gradient that is held, so torch's slower TensorWeakRef is not needed.
        self._used: list[weakref.ref[Tensor] | None] = [None] * count
        self._used_versions = [0] * count
        # Those whose used gradient was zeroed in place: what is written there afterwards is new.
        self._cleared: set[int] = set()
        # Those whose used gradient was written in place otherwise before a backward pass, which has to reach them.
        self._doubtful: set[int] = set()
        self.written: list[int] = []
        """Those that `fresh` found last with a gradient that was used, then written in place: it may be new or old."""
        self.overwritten: set[int] = set()
        """Those of which a backward pass has dropped such a gradient; the reader empties it."""
        self._to_drop: Collection[int] = ()
        # The gradients as `fresh` found them, to be read once in a step; until they are used up or may be others.
        self._seen: list[Tensor | None] | None = None
        # One backward pass runs hooks in one thread per device.
        self._dropping = threading.Lock()
        # A module of another Trainer may end a forward pass, in another thread, while this one waits for shapes.
        self._attaching = threading.RLock()

    def attach(self) -> None:
        """Watch every parameter that requires a gradient and is not watched yet; cheap when there is none.

        A parameter of a lazy module can be watched from when it gets its shape, in the module's first forward pass.
        """
        with self._attaching:
            rows = zip(self._nodes, map(_requires_grad, self._parameters), strict=True)
            unwatched = [i for i, (node, is_trained) in enumerate(rows) if node is None and is_trained]
            if not unwatched and self._forward_handle is None:
                return
            lazy = set(map(id, lazy_among(self._parameters)))
            ready = [i for i in unwatched if id(self._parameters[i]) not in lazy] if lazy else unwatched
            me = weakref.ref(self)
            for at in range(0, len(ready), _FEW):
                few = ready[at : at + _FEW]
                for i, node in zip(few, _nodes_of([self._parameters[i] for i in few]), strict=True):
                    self._nodes[i] = node
                    self._handles.append(node.register_prehook(_BeforeAccumulation(me, i)))
                    if self._listener is not None:
                        self._handles.append(node.register_hook(partial(_after_accumulation, me, i)))
            is_waiting = len(ready) < len(unwatched)
            if is_waiting and self._forward_handle is None:
                self._forward_handle = register_module_forward_hook(partial(_after_forward, me))
                weakref.finalize(self, self._forward_handle.remove)
            elif not is_waiting:
                self._stop_waiting()

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call a function with each position whose gradient a backward pass has added to."""
        self._listener = listener
        me = weakref.ref(self)
        for i, node in enumerate(self._nodes):
            if node is not None:
                self._handles.append(node.register_hook(partial(_after_accumulation, me, i)))

    def fresh(self, among: Sequence[bool], with_edits: bool = False) -> list[bool]:
        """Tell which parameters are `among` those and have a gradient no `consume` took.

        That is a gradient that a backward pass has added to since, or another object than the one that was consumed (so
        one that the caller assigned), or one that was zeroed in place and then given values.

        Args:
            with_edits: Whether gradients count, too, that were otherwise written in place since they were consumed:
                zeroed; or given values that may be new, or what clipping and unscaling made of the old ones.
        """
        self.written = []
        grads = self._seen = list(map(_gradient_of, self._parameters))
        rows = zip(among, grads, self._fired, self._used, strict=True)
        found = [
            asked and grad is not None and (fired or used is None or used() is not grad)
            for asked, grad, fired, used in rows
        ]
        if found == among:
            return found
        missing = [
            i for i, (asked, is_in) in enumerate(zip(among, found, strict=True)) if asked and not is_in
        ]
        for i in missing:
            grad = grads[i]
            if not self._is_written(grad, i):
                continue
            is_zero = _is_zero(grad)
            found[i] = with_edits or (i in self._cleared and not is_zero)
            if not (is_zero or i in self._cleared):
                self.written.append(i)
        return found

    def note_zeroed(self) -> None:
        """Note that `zero_grad` has zeroed the gradients: what they had is gone."""
        self._cleared.update([i for i, used in enumerate(self._used) if used is not None])

    def gradients(self) -> Sequence[Tensor | None]:
        """Return all parameters' gradients, read anew where `fresh` may have seen others."""
        return list(map(_gradient_of, self._parameters)) if self._seen is None else self._seen

    def forget(self) -> None:
        """Hold no gradient that `fresh` has seen, and read them again: others may be assigned first."""
        self._seen = None

    def participating(self) -> list[bool]:
        """Tell which parameters require a gradient and have no `grad_req` of 'null'; watches those.

        Raises:
            ConfigurationError: a parameter has an unknown `grad_req`.
        """
        requires = list(map(_requires_grad, self._parameters))
        if requires != self._required or self._forward_handle is not None:
            self._required = requires
            self.attach()
        if not any(self.attributes):
            return requires
        return [required and self._mode(i) != "null" for i, required in enumerate(requires)]

    def consume(self, used: Sequence[bool]) -> None:
        """Take the present gradients of these parameters as used up: not fresh, and due to be dropped.

        So are those from now on that `fresh` has found to be written in place and that are not among these.
        """
        for i in self.written:
            if not used[i]:
                self._forget_write(i)
        count, grads = len(self._parameters), list[Any](compress(self.gradients(), used))
        self._seen = None
        try:
            versions, have_versions = list(map(_version_of, grads)), True
        except (AttributeError, RuntimeError):
            # None has no version, and torch counts no writes to what was made in inference mode.
            versions = [0 if grad is None or grad.is_inference() else grad._version for grad in grads]
            have_versions = False
        if have_versions and len(grads) == count:
            # Each few references take the place of as many.
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
        """Take over what another tracker knows of parameters that both have."""
        places = {id(p): key for key, p in enumerate(self._parameters)}
        moved = {old: places[id(p)] for old, p in enumerate(former._parameters) if id(p) in places}
        for old, new in moved.items():
            self._used[new], self._fired[new] = former._used[old], former._fired[old]
            self._used_versions[new] = former._used_versions[old]
        self._to_drop = {moved[old] for old in former._to_drop if old in moved}
        self._cleared = {moved[old] for old in former._cleared if old in moved}
        self._doubtful = {moved[old] for old in former._doubtful if old in moved}

    def _forget_write(self, i: int) -> None:
        """Take a gradient that was written in place for the old one after all."""
        grad = self._parameters[i].grad
        if self._is_used(grad, i):
            self._used_versions[i] = grad._version
            self._to_drop = {*self._to_drop, i}
            self._doubtful.discard(i)

    def close(self) -> None:
        """End all that hooks do. Gradients are left as they are; `attach` begins anew, for nobody who listens."""
        with self._attaching:
            self._listener = self._seen = None
            self.grad_allocators = {}
            self._stop_waiting()
            _remove(self._handles)
            self._nodes = [None] * len(self._parameters)

    def _stop_waiting(self) -> None:
        """Stop looking for shapes of lazy parameters after the modules' forward passes."""
        if self._forward_handle is not None:
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

    def _is_used(self, grad: Tensor | None, i: int) -> TypeGuard[Tensor]:
        used = self._used[i]
        return grad is not None and used is not None and used() is grad

    def _is_written(self, grad: Tensor | None, i: int) -> TypeGuard[Tensor]:
        """Tell whether a gradient was used up, and then written in place."""
        return self._is_used(grad, i) and not grad.is_inference() and grad._version != self._used_versions[i]

    def _drop_used(self) -> None:
        with self._dropping:
            has_modes = any(self.attributes)
            for i in self._to_drop:
                parameter = self._parameters[i]
                grad = parameter.grad
                mode = self._mode(i) if has_modes else None
                if i in self._cleared or not self._is_used(grad, i) or mode not in (None, "write"):
                    continue
                if not self._is_written(grad, i):
                    parameter.grad = None
                elif _is_zero(grad):
                    self._cleared.add(i)
                elif mode is None:
                    self._doubtful.add(i)
            # Last: until then other threads must wait, or they would add to a gradient that is to be dropped.
            self._to_drop = ()


def _is_zero(grad: Tensor) -> bool:
    return not (grad._values() if grad.is_sparse else grad).any()


def _remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks, whose handles are used up."""
    for handle in handles:
        handle.remove()
    handles.clear()


def lazy_among(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Find the parameters of lazy modules that have no shape yet."""
    # By their classes first: of most models all parameters are plain ones.
    return [p for p in parameters if is_lazy(p)] if set(map(type, parameters)) != {Parameter} else []


def largest_of(parameters: Sequence[Parameter]) -> int:
    """Count the elements of the largest parameter that has a shape; 0 where none has."""
    shaped = [p for p in parameters if not is_lazy(p)] if lazy_among(parameters) else parameters
    return max(map(Tensor.numel, shaped), default=0)


class _AllOf(torch.autograd.Function):
    """A function of many tensors, made for the edges of its graph; they cost much more one by one."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise AssertionError("nobody has this function's result")


def _nodes_of(parameters: Sequence[Parameter]) -> list[Node]:
    """Get the AccumulateGrad nodes of leaves that require a gradient."""
    if not parameters:
        return []
    with torch.inference_mode(False), torch.enable_grad():
        # Not by Function's own `apply`, which first looks in Python at each of them, for functorch's sake.
        result: Tensor = super(torch.autograd.Function, _AllOf).apply(*parameters)  # type: ignore[no-untyped-call]
    assert result.grad_fn is not None
    return [node for node, _ in result.grad_fn.next_functions if node is not None]


@uncompiled
class _BeforeAccumulation:
    """Runs in a backward pass just before the gradient of parameter `i` is added to.

    It is an object of its own, because that is one for the garbage collector to look at; a partial function is two.
    """

    __slots__ = ("_i", "_tracker")

    def __init__(self, tracker: weakref.ref[GradientTracker], i: int) -> None:
        self._tracker = tracker
        self._i = i

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        """Return what is added in place of `grads`, if it is something else."""
        tracker, i = self._tracker(), self._i
        if tracker is None or tracker._nodes[i] is None:
            return None
        tracker._seen = None
        if tracker._to_drop:
            tracker._drop_used()
        if grads[0] is None:
            # A custom autograd function returned no gradient: torch will leave `.grad` as it is.
            return None
        tracker._fired[i] = True
        parameter = tracker._parameters[i]
        if i in tracker._doubtful:
            tracker._doubtful.discard(i)
            if tracker._is_used(parameter.grad, i):
                parameter.grad = None
                tracker.overwritten.add(i)
        if getattr(parameter, "grad_req", None) == "write":
            parameter.grad = None
        allocator = tracker.grad_allocators.get(i)
        if allocator is None or parameter.grad is not None:
            return None
        # Nobody else has the copy, so torch makes it `.grad` as it is.
        shared_grads = allocator(grads[0])
        return None if shared_grads is None else (shared_grads,)


@uncompiled
def _after_accumulation(
    tracker_ref: weakref.ref[GradientTracker], i: int, _: object, grads: tuple[Tensor | None, ...]
) -> None:
    """Act just after a backward pass added `grads[0]` to `.grad` of parameter `i`."""
    tracker = tracker_ref()
    if tracker is not None and tracker._listener is not None and grads[0] is not None:
        tracker._listener(i)


@uncompiled
def _after_forward(
    tracker_ref: weakref.ref[GradientTracker], module: Module, args: object, output: object
) -> None:
    tracker = tracker_ref()
    # There are no gradients to watch in inference mode, and no nodes.
    if tracker is not None and not torch.is_inference_mode_enabled():
        tracker.attach()
