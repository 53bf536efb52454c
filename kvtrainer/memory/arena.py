"""Flat storage of the weights and gradients of parameters, laid out by a Plan.

A fused update, a reduction or a transfer then works on one long tensor. Each parameter stays the same object
and gets a storage of its own that aliases its piece, so that saving one layer writes that layer alone.

Who has written to the weights is known by torch's version counters and by sums of bits. Every write in place that torch
knows of raises `_version` of a tensor by one or more: `load_state_dict`, `nn.init`, `p.clamp_()` under no_grad. Reads,
gradients and backward passes do not. A write through `p.data`, NumPy or another library raises nothing, but changes
bits.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import compress
from operator import attrgetter, eq
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.optimizer.state import aligned_zeros
from kvstore_server.plan import ALIGNMENT, ITEM_SIZE, PAGE, SIZES, Plan
from kvstore_server.transport.pages import put_pages
from kvtrainer.errors import ROW_MAJOR, ConfigurationError, ParameterMovedError
from kvtrainer.memory.row_sparse import is_row_sparse
from kvtrainer.memory.views import FormerMemory, is_shared
from kvtrainer.memory.write_watch import WriteWatch
from kvtrainer.types import NO_TARGETS

LONG = 8 << 10
"""Bytes of a gradient from which on it may be used where it lies: to copy it takes longer than to look at it."""
HELD_DTYPES = frozenset(getattr(torch, name) for name in ITEM_SIZE)
_kind_of = attrgetter("dtype", "layout", "requires_grad")

# Address → the parameter that an arena has put there: the data of one may lie in the arena of another Trainer.
_placed: dict[int, weakref.ref[Parameter]] = {}
_placing = threading.RLock()


class Arena:
    """Weights and gradients of one list of parameters: one flat tensor per dtype, all on one device.

    Construction moves the values of the parameters into the arena and lets `parameter.data` alias them,
    row-major whatever the memory format was before. The Parameter objects keep their identity, hooks and
    attributes. Arenas may share parameters: their data are in the one that was used last.

    Args:
        parameters: on one device; `plan` was made from their shapes and dtypes. None may share memory with another.
        names: one name per parameter, for messages.
        plan: gives each key its place.

    Raises:
        ConfigurationError: a parameter cannot be moved; nothing has been changed then.
    """

    weights: dict[str, Tensor]
    """Dtype name to a flat tensor of `plan.resident_sizes[dtype]` elements that starts on a 64-byte boundary.
    Padding is zero."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], plan: Plan) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._plan = plan
        self._resident = [not spec.row_sparse for spec in plan.specs]
        here = list(compress(self._parameters, self._resident))
        nbytes = plan.key_nbytes
        _check_parameters(parameters, names, here, self._resident, nbytes)
        self.device = parameters[0].device
        self.weights = self._allocate()
        self.zeros: frozenset[int] = frozenset()
        """Gradients that nobody writes to until the next `gather_grads`, and that are zero there already."""
        pieces = list(compress(self._pieces(self.weights), self._resident))
        if here:
            with torch.no_grad():
                torch._foreach_copy_(pieces, list[Tensor](here))
        former = FormerMemory(here)
        for parameter, piece in zip(here, pieces, strict=True):
            parameter.data = piece
        self.writes = WriteWatch(self._parameters, self.weights, plan)
        """What others than the Trainer do to the weights."""
        self._here = here
        self._addresses = list(map(Tensor.data_ptr, pieces))
        whole = [key for key, size in enumerate(nbytes) if size >= LONG and not size % ALIGNMENT]
        self.long = frozenset([key for key in whole if plan.specs[key].dtype in ("float32", "float64")])
        """Keys (by index) with long gradients, of whole lines."""
        # Of those the kind of a gradient that may be used where it lies.
        self._kinds = {key: (parameters[key].dtype, torch.strided, False) for key in self.long}
        # What may be left where it is, as that was asked last, and which keys of `long` these are, ascending.
        self._zero_copy_keys: tuple[Collection[int], list[int]] = (), []
        # As of the last `gather_grads`.
        self._targets: Mapping[int, Tensor] | None = None
        # Where gradients were gathered then.
        self._places: list[Tensor] = []
        # The same, of the last that had some, and the places of all gradients then.
        self._redirected: tuple[Mapping[int, Tensor], list[Tensor]] = NO_TARGETS, []
        _note_placed(self._addresses, here)
        former.warn_of_views(list(compress(names, self._resident)))

    @cached_property
    def grads(self) -> dict[str, Tensor]:
        """Gradients in the layout of `weights`, as zeros at first; what is never written takes no memory."""
        return self._allocate()

    @cached_property
    def _grad_pieces(self) -> list[Tensor]:
        """The places of all gradients, in the shapes of the parameters; empty of those that are not resident."""
        return self._pieces(self.grads)

    @torch.no_grad()
    def gather_grads(
        self,
        given: Sequence[Tensor | None],
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> dict[int, Tensor]:
        """Copy the gradients of parameters `present` into `grads`. Zero the pieces of the others.

        Args:
            given: every parameter's gradient; of a present one dense, in any memory format.
            zero_copy_keys: keys (by index) of which long gradients are left where they are. Returns those by key; what
                is in their pieces does not count.
            targets: by key (index), flat memory elsewhere that takes the place of its piece.
        """
        if targets is not self._targets:
            self._turn_to(targets)
        pieces, zeros, borrowed = self._places, self.zeros, dict[int, Tensor]()
        self.zeros = frozenset()
        if zero_copy_keys and self.device.type == "cpu":
            borrowed = self._borrow(given, present, zero_copy_keys)
        if len(borrowed) == len(pieces):
            return borrowed
        if borrowed:
            zeros = zeros | borrowed.keys()
            present = [is_in and key not in borrowed for key, is_in in enumerate(present)]
        if here := list(compress(pieces, present)):
            torch._foreach_copy_(here, list[Any](compress(given, present)))
        if not all(present):
            absent = [pieces[i] for i, is_in in enumerate(present) if not is_in and i not in zeros]
            if absent:
                torch._foreach_zero_(absent)
        return borrowed

    def _turn_to(self, targets: Mapping[int, Tensor]) -> None:
        """Have the places of some gradients elsewhere from now on; see `gather_grads`."""
        own, self._targets, self.zeros = self._grad_pieces, None, frozenset()  # None, until all is done
        if targets and targets is not self._redirected[0]:
            moved = {key: flat.view(own[key].shape) for key, flat in targets.items()}
            self._redirected = targets, [moved.get(key, piece) for key, piece in enumerate(own)]
        for flat in self.grads.values() if targets else ():
            _give_pages_back(flat)
        self._places = self._redirected[1] if targets else own
        self._targets = targets

    def _borrow(
        self, given: Sequence[Tensor | None], present: Sequence[bool], zero_copy_keys: Collection[int]
    ) -> dict[int, Tensor]:
        """Find those long gradients that can be used as they lie, by key; arguments as of `gather_grads`."""
        if zero_copy_keys is not self._zero_copy_keys[0]:
            self._zero_copy_keys = zero_copy_keys, sorted(self.long.intersection(zero_copy_keys))
        keys = self._zero_copy_keys[1]
        if not all(present):
            keys = [key for key in keys if present[key]]
        grads = list[Any](map(given.__getitem__, keys))
        are_usual = map(eq, map(_kind_of, grads), map(self._kinds.__getitem__, keys))
        looks = zip(
            are_usual, map(Tensor.is_contiguous, grads), map(Tensor.is_neg, grads), keys, grads, strict=True
        )
        return {
            key: grad
            for is_usual, is_whole, is_neg, key, grad in looks
            if is_usual and is_whole and not is_neg
        }

    @torch.no_grad()
    def scatter_grads(self, present: Sequence[bool]) -> None:
        """Copy `grads` into `.grad` of the parameters that are `present`, in place.

        A present parameter without a gradient gets a new tensor: other workers had one.
        """
        targets, sources = [], []
        for parameter, piece in compress(zip(self._parameters, self._grad_pieces, strict=True), present):
            if parameter.grad is None:
                parameter.grad = piece.clone()
            else:
                targets.append(parameter.grad)
                sources.append(piece)
        if targets:
            torch._foreach_copy_(targets, sources)

    def mark_updated(self, present: Sequence[bool] | None) -> None:
        """Tell autograd that the parameters that are `present` (None: all) were written through `weights`.

        A backward pass through a graph that saved their former values then raises, as after a torch
        optimizer's step.
        """
        is_all = present is None or all(present)
        marked = self._parameters if is_all else list(compress(self._parameters, present or ()))
        torch.autograd.graph.increment_version(marked)

    def release(self, keys: Sequence[int]) -> None:
        """Give parameters memory of their own, unless their data lie elsewhere already."""
        places = dict(zip(compress(range(len(self._names)), self._resident), self._addresses, strict=True))
        for key in keys:
            parameter = self._parameters[key]
            if places.get(key) == parameter.data_ptr():
                parameter.data = parameter.detach().clone()

    def check_in_place(self) -> None:
        """Check that the data of every parameter still lie where the constructor put them.

        Those that another Trainer's arena has taken since come back, with the values that they have there.

        Raises:
            ParameterMovedError: names every parameter whose data do not; nothing has come back then.
        """
        addresses = list(map(Tensor.data_ptr, self._here))
        if addresses == self._addresses and all(map(Tensor.is_contiguous, self._here)):
            return
        rows = enumerate(zip(self._here, addresses, self._addresses, strict=True))
        moved = [at for at, (p, now, address) in rows if now != address or not p.is_contiguous()]
        keys = list(compress(range(len(self._names)), self._resident))
        lost = [self._names[keys[at]] for at in moved if not self._is_in_another(keys[at])]
        if lost and any(map(is_shared, map(self._here.__getitem__, moved))):
            raise ParameterMovedError(
                f"share_memory() has moved the data of {len(lost)} of {len(self._names)} parameters after the Trainer "
                f"was built, so updates would not reach the model: {', '.join(lost)}. The Trainer needs them where "
                "they were: build a new one now, and give other processes copies, as of p.detach().clone()"
            )
        if lost:
            have_same_form = all([self._has_form(keys[at]) for at in moved])
            is_format = have_same_form and not any([self._here[at].is_contiguous() for at in moved])
            raise ParameterMovedError(
                f"the data of {len(lost)} of {len(self._names)} parameters were replaced after the Trainer "
                f"was built, so updates would not reach the model: {', '.join(lost)}. "
                + (
                    f"They have another memory format now; {ROW_MAJOR}. Leave out model.to(memory_format=...), and "
                    "build a new Trainer now"
                    if is_format
                    else "Call model.to(...), model.half() and the like before building the Trainer, or build a new "
                    "Trainer now"
                )
            )
        pieces = list(compress(self._pieces(self.weights), self._resident))
        for at in moved:
            parameter, piece = self._here[at], pieces[at]
            piece.copy_(parameter.detach())
            parameter.data = piece
            _note_placed([piece.data_ptr()], [parameter])

    def _is_in_another(self, key: int) -> bool:
        """Tell whether a parameter's data lie in an arena, in their form here."""
        parameter = self._parameters[key]
        there = _placed.get(parameter.data_ptr())
        is_placed = there is not None and there() is parameter and parameter.is_contiguous()
        return is_placed and self._has_form(key)

    def _has_form(self, key: int) -> bool:
        """Tell whether a parameter has its shape, dtype and device of the arena."""
        parameter, spec = self._parameters[key], self._plan.specs[key]
        form = (tuple(parameter.shape), parameter.dtype, parameter.device)
        return form == (spec.shape, getattr(torch, spec.dtype), self.device)

    @torch.inference_mode(False)
    def _allocate(self) -> dict[str, Tensor]:
        """Make room, on the CPU in pages of their own: those of weights may be others', of gradients never taken.

        Memory that was freed before would have to be cleared, which takes its pages at once.
        """
        is_here, sizes = self.device.type == "cpu", self._plan.resident_sizes.items()
        make = _paged_zeros if is_here else partial(aligned_zeros, device=self.device)
        return {dtype: make(size, getattr(torch, dtype)) for dtype, size in sizes}

    @torch.inference_mode(False)
    def _pieces(self, flats: Mapping[str, Tensor]) -> list[Tensor]:
        """Make the places of all keys in flat tensors, each with a storage of its own; those of tables are empty."""
        plan, pieces = self._plan, []
        aliases = {dtype: _alias_of(flat) for dtype, flat in flats.items()}
        rows = zip(self._parameters, plan.specs, plan.key_offsets, plan.numels, self._resident, strict=True)
        for parameter, spec, at, numel, is_here in rows:
            if numel and is_here:
                piece = aliases[spec.dtype](count=numel, offset=at * SIZES[spec.dtype])
            else:
                piece = flats[spec.dtype].new_empty(0)
            # To resize it costs less than a view.
            pieces.append(piece.resize_as_(parameter) if is_here and len(spec.shape) != 1 else piece)
        return pieces


def _paged_zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Make zeros in pages of their own, which a fork copies as they are written."""
    nbytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(pages, np.uint8)[:nbytes]).view(dtype)


def _give_pages_back(flat: Tensor) -> None:
    """Zero a flat tensor in pages of its own, which takes no memory then."""
    nbytes = -(-flat.nbytes // PAGE) * PAGE
    with suppress(OSError):  # they stay, then
        put_pages(flat.data_ptr(), nbytes, -1, 0, mmap.PROT_READ | mmap.PROT_WRITE)


class _CudaPiece:
    """Some memory of a CUDA tensor, in the form that `torch.as_tensor` aliases; keeps the tensor alive.

    The protocol has no name for bfloat16, so the elements are declared as integers of the same size.
    """

    def __init__(self, flat: Tensor, offset: int, numel: int) -> None:
        self._flat = flat
        self.__cuda_array_interface__ = {
            "data": (flat.data_ptr() + offset, False),
            "shape": (numel,),
            "strides": None,
            "typestr": f"<i{flat.element_size()}",
            "version": 2,
        }


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as a plan does: 'float32'."""
    return str(dtype).removeprefix("torch.")


def _alias_of(flat: Tensor) -> Callable[..., Tensor]:
    """Return (count=elements, offset=bytes) → that part of `flat`. Its storage object has its own size."""
    if flat.device.type == "cuda":

        def alias(count: int, offset: int) -> Tensor:
            return torch.as_tensor(_CudaPiece(flat, offset, count), device=flat.device).view(flat.dtype)

        return alias
    return partial(torch.frombuffer, flat.view(torch.uint8).numpy().data, dtype=flat.dtype)


def _note_placed(addresses: Sequence[int], parameters: Sequence[Parameter]) -> None:
    """Note which parameters lie where; those that are gone are forgotten before there would be more."""
    # A WeakValueDictionary does the same, at eight times the price.
    found = dict(zip(addresses, map(weakref.ref, parameters), strict=True))
    # Other threads build Trainers, too, and put parameters where those lay that are gone.
    with _placing:
        if len(_placed) >= len(addresses):
            for address, there in _placed.copy().items():  # one act, whatever garbage is collected meanwhile
                if there() is None:
                    _placed.pop(address, None)
        _placed.update(found)


def _check_parameters(
    parameters: Sequence[Parameter],
    names: Sequence[str],
    here: Sequence[Parameter],
    resident: Sequence[bool],
    nbytes: Sequence[int],
) -> None:
    """Raise ConfigurationError unless parameters `here` can move into one arena. They have so many bytes."""
    home, names_here = parameters[0].device, list(compress(names, resident))
    is_plain = (
        home.type in ("cpu", "cuda")
        and set(map(type, here)) <= {Parameter}
        and set(map(attrgetter("device"), parameters)) == {home}
        and set(map(attrgetter("layout"), here)) <= {torch.strided}
        and all(map(Tensor.is_contiguous, here))
    )
    problems = []
    if not is_plain:
        problems = [
            f"{name!r} is on {p.device} but {names[0]!r} is on {home}; one trainer works on one device, so move the "
            "whole model there first"
            for p, name in zip(parameters, names, strict=True)
            if p.device != home
        ]
        rows = zip(names_here, here, strict=True)
        problems = problems or [f"{name!r} {problem}" for name, p in rows if (problem := _problem_with(p))]
    # It relies on all being dense and on one device.
    problems = problems or list(_overlaps(here, names_here, list(compress(nbytes, resident))))
    if problems:
        raise ConfigurationError(f"the trainer cannot hold these parameters: {'; '.join(problems)}")


def can_hold(parameter: Parameter, home: torch.device) -> bool:
    """Return whether an arena on a device, or a store, takes this parameter."""
    if parameter.device != home or parameter.dtype not in HELD_DTYPES:
        return False
    is_usual = type(parameter) is Parameter and parameter.layout is torch.strided
    return (
        (is_usual and parameter.is_contiguous()) or is_row_sparse(parameter) or not _problem_with(parameter)
    )


def _problem_with(parameter: Parameter) -> str | None:
    """Say why this parameter's data cannot be moved into an arena; None if they can."""
    # Of what is exactly a Parameter the data are exactly a Tensor, and to ask for them takes long.
    kind = Tensor if type(parameter) is Parameter else type(parameter.data)
    if kind is not Tensor:
        return f"holds a {kind.__name__}; only plain tensors can be stored"
    if parameter.device.type not in ("cpu", "cuda"):
        return f"is on device {parameter.device}; move the model to cpu or cuda first"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; call .to_dense() first"
    # Only what fills one block of memory, in whatever order of dimensions, has the strides that torch gives its like.
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return (
            f"has shape {list(parameter.shape)} but strides {list(parameter.stride())}, so its elements "
            "repeat or leave gaps; set parameter.data = parameter.data.contiguous() first"
        )
    return None


def _overlaps(parameters: Sequence[Parameter], names: Sequence[str], nbytes: Sequence[int]) -> Iterator[str]:
    """Name the parameters that share memory with one before them; all are dense and on one device."""
    starts = np.fromiter(map(Tensor.data_ptr, parameters), np.int64)
    ends, order = starts + np.array(nbytes, np.int64), starts.argsort()
    if not (ends[order][:-1] > starts[order][1:]).any():
        return
    last_end, last = 0, 0
    for start, end, i in sorted(zip(starts.tolist(), ends.tolist(), range(len(parameters)), strict=True)):
        if start < min(end, last_end):
            yield (
                f"{names[i]!r} shares memory with {names[last]!r}; give each its own, or tie them by using "
                "one Parameter object in both places"
            )
        if end > last_end:
            last_end, last = end, i
