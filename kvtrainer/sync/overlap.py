"""What travels while a model computes: gradients to servers in the backward pass, new weights in the next forward pass.

A slice goes when all of its keys have their gradients: the last layers' first. Nothing of it counts before the commit
of the step, which sends again what has changed since, and what was never complete: any slice may be left to the step.

For new weights whoever reads a parameter first waits. A step that returns when all is sent leaves its parameters as
objects of the class `Coming`. torch hands every operation on such a tensor to its class before it looks at numbers: of
a module, of a tied weight, of `state_dict`, of a script. What is asked for then comes first, and the parameter is a
plain one again. So nobody computes with former weights, whatever the way to a parameter; only C++ code that goes
around torch's dispatch has to be preceded by `Trainer.wait`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from kvstore_server.plan import Slice
from kvtrainer.comm.round import Round
from kvtrainer.errors import KVStoreError
from kvtrainer.memory.memory import DeviceMemory
from kvtrainer.sync.exchange import StoreExchange
from kvtrainer.uncompiled import uncompiled

_log = logging.getLogger(__name__)


class Overlap:
    """Sends the slices of a Trainer's gradients as they become complete.

    A key whose gradient came in several backward passes in the last step is complete after as many of them in this one.

    Args:
        exchange: synchronous rounds over servers.
        memory: of the only device, a CPU.
        settle: ends the round before, if that is still under way.
        foresee: packs the numbers that are new in the step, as far as they are known before it.
    """

    def __init__(
        self,
        exchange: StoreExchange,
        memory: DeviceMemory,
        settle: Callable[[], None],
        foresee: Callable[[], bytes],
    ) -> None:
        plan = exchange.plan
        self._exchange, self._settle, self._foresee = exchange, settle, foresee
        self._parameters = memory.parameters
        self._slices = [plan.slices_with(key) for key in range(len(plan.specs))]
        self._num_keys = [len(piece.segments) for piece in plan.slices]
        self._missing = list(self._num_keys)
        """How many keys of each slice have yet to come."""
        self._passes = [0] * len(plan.specs)
        """In how many backward passes since the last step each key has come."""
        self._needed = [1] * len(plan.specs)
        """After how many it is complete."""
        self._thread = threading.get_ident()
        memory.tracker.listen(self._arrived)

    def begin_round(self) -> None:
        """Leave what is left to the step; the gradients that come from now on are those of the next one."""
        self._needed = [now or before for now, before in zip(self._passes, self._needed, strict=True)]
        self._passes, self._missing = [0] * len(self._passes), list(self._num_keys)
        self._thread = threading.get_ident()

    def _arrived(self, key: int) -> None:
        """Note that a backward pass has added to the gradient of a key (by index)."""
        if getattr(self._parameters[key], "grad_req", None) == "null":
            return
        self._passes[key] += 1
        # Sockets belong to the thread that makes the steps.
        if self._passes[key] != self._needed[key] or threading.get_ident() != self._thread:
            return
        self._settle()
        for piece in self._slices[key]:
            self._missing[piece.index] -= 1
            if not self._missing[piece.index]:
                self._send(piece)

    @torch.no_grad()
    def _send(self, piece: Slice) -> None:
        parts = []
        for key, _, start, numel in piece.segments:
            grad = self._parameters[key].grad
            if grad is None or grad.layout is not torch.strided or not grad.is_contiguous() or grad.is_neg():
                return
            parts.append(grad.view(-1)[start : start + numel])
        try:
            self._exchange.send_ahead(piece, parts, self._foresee)
        except KVStoreError as error:  # the step will raise it, if it still holds then
            _log.debug("slice %d was not sent ahead: %s", piece.index, error)


# ---------------------------------------------------------------- during the next forward pass

_AWAITED = "_awaited"
"""Attribute of a parameter whose values are to come: who knows of them."""
_COMPILER = "torch._dynamo"
_FACTS = (
    "grad",
    "requires_grad",
    "shape",
    "dtype",
    "device",
    "layout",
    "is_leaf",
    "ndim",
    "grad_fn",
    "is_cuda",
)
"""Attributes of a tensor that are the same before and after."""


class Awaited:
    """A round whose new weights are still to come. Any thread may wait for it.

    Args:
        exchange: has begun the round.
        parameters: whose weights are to come.
        keys: id of a parameter → its key (by index).
        ended: is called once, when the round is over, with the keys (by index) whose weights came before that, and
            with the error that has ended it.
    """

    def __init__(
        self,
        exchange: StoreExchange,
        round_: Round,
        parameters: Sequence[Parameter],
        keys: Mapping[int, int],
        ended: Callable[[set[int], BaseException | None], None],
    ) -> None:
        self._exchange, self._round, self._ended = exchange, round_, ended
        self._parameters, self._keys = parameters, keys
        self._came: set[int] = set()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_over = False
        # First: whoever interrupts the rest has it ended.
        self._leaving = weakref.finalize(self, _leave, weakref.ref(self))
        for parameter in parameters:
            if type(parameter) is Parameter:
                vars(parameter)[_AWAITED] = self
                parameter.__class__ = Coming

    @torch.inference_mode(False)
    def wait(self) -> None:
        """Block until all weights are here.

        Raises:
            KVStoreError: the round has failed; or this process was forked while it was under way.
        """
        self._check_process()
        with self._lock:
            if self._is_over:
                return
            try:
                self._exchange.end(self._round)
            except BaseException as error:
                self.end(error)
                raise
            self.end(None)

    @torch.inference_mode(False)
    def wait_for(self, parameter: Parameter) -> None:
        """Block until the weights of one parameter are here; raises as `wait`."""
        self._check_process()
        with self._lock:
            if self._is_over or type(parameter) is Parameter:
                return
            key = self._keys[id(parameter)]
            try:
                is_over = self._exchange.wait_for(self._round, key)
            except BaseException as error:
                self.end(error)
                raise
            if is_over:
                self.wait()
                return
            self._came.add(key)
            _make_plain(parameter)
            torch.autograd.graph.increment_version(parameter)

    def end(self, error: BaseException | None) -> None:
        """Let parameters be plain ones with what they have now; once."""
        if self._is_over:
            return
        for parameter in self._parameters:
            _make_plain(parameter)
        self._leaving.detach()
        self._is_over = True  # now: whoever interrupts the rest leaves a round that can be awaited again
        self._ended(self._came, error)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise KVStoreError(
                f"process {os.getpid()} was forked while new weights were on their way to process {self._pid}; call "
                "trainer.wait() before the fork"
            )


@uncompiled
class Coming(Parameter):
    """A parameter whose new values are on their way: what reads or writes it waits for them."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what torch was asked for, with new values; at once where it is not about values."""
        named = kwargs or {}
        if func in _facts():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        # A write that leaves no trace in version counters would be taken for the store's, were the round not over.
        leaves_trace = torch.is_grad_enabled() and func not in _traceless()
        for parameter in list(_coming_in((args, named))):
            awaited: Awaited | None = vars(parameter).get(_AWAITED)
            if awaited is not None and leaves_trace:
                awaited.wait_for(parameter)
            elif awaited is not None:
                awaited.wait()
        return func(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for_all(self)
        return Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for_all(self)
        return Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


@cache
def _facts() -> frozenset[Callable[..., Any]]:
    """Functions that are not about the values of a tensor."""
    read = [getattr(Tensor, name).__get__ for name in _FACTS]
    sizes = [
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.element_size,
        Tensor.is_floating_point,
    ]
    grad: Any = vars(torch._C.TensorBase)["grad"]
    return frozenset([*read, grad.__set__, grad.__delete__, *sizes])


@cache
def _traceless() -> frozenset[Callable[..., Any]]:
    """Functions that give access to memory behind the back of version counters."""
    data: Any = vars(torch._C.TensorBase)["data"]
    return frozenset([data.__get__, data.__set__, Tensor.detach, Tensor.data_ptr, Tensor.untyped_storage])


def _coming_in(items: Iterable[Any]) -> Iterator[Coming]:
    """Find the parameters that are to come in arguments of a function."""
    for item in items:
        if isinstance(item, Coming):
            yield item
        elif isinstance(item, Mapping):
            yield from _coming_in(item.values())
        elif isinstance(item, list | tuple):
            yield from _coming_in(item)


def _wait_for_all(parameter: Parameter) -> None:
    """Wait for the round that a parameter is in; another thread may just have ended it."""
    awaited: Awaited | None = vars(parameter).get(_AWAITED)
    if awaited is not None:
        awaited.wait()


def _make_plain(parameter: Parameter) -> None:
    if isinstance(parameter, Coming):
        parameter.__class__ = Parameter  # type: ignore[assignment]
        # Last: what is not plain and waits for nothing would call itself for ever.
        del vars(parameter)[_AWAITED]


def wait_before(module: object, settle: Callable[[], None]) -> None:
    """Have a module that torch.compile made wait before each call: it looks at the classes of parameters first.

    Args:
        settle: a bound method, which waits; the module does not keep its object alive.
    """
    if isinstance(module, getattr(sys.modules.get(_COMPILER), "OptimizedModule", ())):
        assert isinstance(module, Module)
        module.register_forward_pre_hook(partial(_before_call, weakref.WeakMethod(settle)))


@uncompiled
def _before_call(settle: weakref.WeakMethod[Callable[[], None]], module: Module, args: object) -> None:
    wait = settle()
    if wait is not None:
        wait()


def _leave(awaited_ref: weakref.ref[Awaited]) -> None:
    """See to it that what was sent has got there, as the process ends; one that dies of an error lets others know."""
    awaited = awaited_ref()
    if awaited is not None and getattr(sys, "last_value", None) is None:
        try:
            awaited.wait()
        except BaseException:
            sys.stdout = _LastFlush(sys.stdout)
            raise


class _LastFlush:
    """Stands in for standard output when a process that failed ends. Nobody could catch the error.

    An exit handler cannot change the exit code by what it raises, and must not end the process before the others have
    run. But Python exits with code 120 when standard output cannot be flushed at the very end.
    """

    closed = False
    """What is closed Python does not flush."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None and not getattr(self._stream, "closed", False):
            self._stream.flush()
        if sys.is_finalizing():
            raise KVStoreError("the last round has failed, so the exit code is not 0")
