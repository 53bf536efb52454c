"""Flat storage of the weights and gradients of parameters, laid out by a Plan.

An Arena holds one flat tensor per dtype, so a fused update, a reduction or a transfer works on one long tensor.
Constructing it copies the values of the parameters there and lets `parameter.data` alias its part. Every alias has a
storage object of its own size, so saving one layer does not write the whole arena.

Gradients stay in `.grad`. `gather_grads` copies them into a second set of flat tensors before a step, except those that
can be used without a copy or go to buffers elsewhere; `scatter_grads` copies results back.

Invariants: Parameter objects keep their identity, hooks and attributes. Row-sparse parameters have a key in the plan
but no memory here. A parameter may belong to several arenas, and its data are in the one that was used last;
`check_in_place` fetches them back before each use, and raises if they are anywhere else. Writes to the weights are
detected by `writes`, see `write_watch`.
"""

from __future__ import annotations

import math
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
from kvtrainer.memory.views import FormerMemoryViews, has_shared_views
from kvtrainer.memory.write_watch import WriteDetector
from kvtrainer.types import NO_TARGETS

LONG = 8 << 10
"""Gradients of at least this many bytes may be used without a copy. For smaller ones the check costs more."""
_HUGE = 4 << 20
"""Bytes from which weights are in huge pages."""
HELD_DTYPES = frozenset(getattr(torch, name) for name in ITEM_SIZE)
_kind_of = attrgetter("dtype", "layout", "requires_grad")

# Address → parameter whose data an arena has put there. Tells whether data are in another Trainer's arena.
_placed: dict[int, weakref.ref[Parameter]] = {}
_placing = threading.RLock()


class Arena:
    """Weights and gradients of a list of parameters: one flat tensor per dtype, all on one device.

    The constructor moves the parameters' values into the arena and lets `parameter.data` alias them. They become
    row-major, whatever memory format they had. Not thread-safe.

    Args:
        parameters: Parameters on one device that do not share memory; `plan` was made from their shapes and dtypes.
        names: One name per parameter, for messages.
        plan: The layout.

    Raises:
        ConfigurationError: A parameter cannot be moved. Nothing has been changed.
    """

    weights: dict[str, Tensor]
    """Dtype name → flat tensor of `plan.resident_sizes[dtype]` elements, 64-byte aligned. Padding is zero."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], plan: Plan) -> None:
        # 1. Check the parameters that are stored here, before anything is changed.
        self._parameters = list(parameters)
        self._names = list(names)
        self._plan = plan
        self._resident = [not spec.row_sparse for spec in plan.specs]
        here = list(compress(self._parameters, self._resident))
        nbytes = plan.key_nbytes
        _check_arena_parameters(parameters, names, here, self._resident, nbytes)
        # 2. Copy their values and point `data` at the copies.
        self.device = parameters[0].device
        self.weights = self._allocate(_HUGE)
        self.zeros: frozenset[int] = frozenset()
        """Keys whose buffers are known to be zero until the next `gather_grads`, which need not zero them again."""
        pieces = list(compress(self._views_of_keys(self.weights), self._resident))
        if here:
            with torch.no_grad():
                torch._foreach_copy_(pieces, list[Tensor](here))
        # 3. Start looking for writes, and for others that still see the former memory.
        former = FormerMemoryViews(here)
        for parameter, piece in zip(here, pieces, strict=True):
            parameter.data = piece
        self.writes = WriteDetector(self._parameters, self.weights, plan)
        """Detects writes to the weights by others than the Trainer."""
        self._here = here
        self._addresses = list(map(Tensor.data_ptr, pieces))
        # 4. Choose the keys whose gradients can be used without a copy: large, and a multiple of 64 bytes.
        whole = [key for key, size in enumerate(nbytes) if size >= LONG and not size % ALIGNMENT]
        self.long = frozenset([key for key in whole if plan.specs[key].dtype in ("float32", "float64")])
        """Keys (by index) whose gradients may be used without a copy."""
        # Their required dtype, layout and requires_grad.
        self._kinds = {key: (parameters[key].dtype, torch.strided, False) for key in self.long}
        # The last `zero_copy_keys` argument, and its sorted intersection with `long`.
        self._zero_copy_keys: tuple[Collection[int], list[int]] = (), []
        # The `targets` of the last `gather_grads`, and the buffers that gradients were copied to.
        self._targets: Mapping[int, Tensor] | None = None
        self._places: list[Tensor] = []
        # The last nonempty `targets`, with the buffers of all gradients then. Kept, as a loop may alternate.
        self._redirected: tuple[Mapping[int, Tensor], list[Tensor]] = NO_TARGETS, []
        _record_placed_in_arena(self._addresses, here)
        former.warn_of_views(list(compress(names, self._resident)))

    @cached_property
    def grads(self) -> dict[str, Tensor]:
        """Gradients in the layout of `weights`, initially zero. Pages that are never written take no memory."""
        return self._allocate()

    @cached_property
    def _grad_pieces(self) -> list[Tensor]:
        """Views of `grads` in the shapes of the parameters; empty tensors for row-sparse ones."""
        return self._views_of_keys(self.grads)

    @torch.no_grad()
    def gather_grads(
        self,
        given: Sequence[Tensor | None],
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> dict[int, Tensor]:
        """Copy the gradients of `present` parameters into `grads`, and zero the buffers of the others.

        Args:
            given: The gradient of every parameter. Those of present ones are dense, in any memory format.
            zero_copy_keys: Keys (by index) whose large gradients may be used without a copy.
            targets: Key (by index) → flat buffer that is used in place of its part of `grads`.

        Returns:
            The gradients that were not copied, by key. The contents of their buffers are undefined.
        """
        if targets is not self._targets:
            self._turn_to(targets)
        pieces, zeros, borrowed = self._places, self.zeros, dict[int, Tensor]()
        self.zeros = frozenset()
        # 1. Find the gradients that need no copy.
        if zero_copy_keys and self.device.type == "cpu":
            borrowed = self._borrow(given, present, zero_copy_keys)
        if len(borrowed) == len(pieces):
            return borrowed
        if borrowed:
            zeros = zeros | borrowed.keys()
            present = [is_in and key not in borrowed for key, is_in in enumerate(present)]
        # 2. Copy the other gradients in one call, and zero the buffers of those that are absent.
        if here := list(compress(pieces, present)):
            torch._foreach_copy_(here, list[Any](compress(given, present)))
        if not all(present):
            absent = [pieces[i] for i, is_in in enumerate(present) if not is_in and i not in zeros]
            if absent:
                torch._foreach_zero_(absent)
        return borrowed

    def _turn_to(self, targets: Mapping[int, Tensor]) -> None:
        # `_targets` is None until all is done, so that an interrupted call is repeated.
        own, self._targets, self.zeros = self._grad_pieces, None, frozenset()
        if targets and targets is not self._redirected[0]:
            moved = {key: flat.view(own[key].shape) for key, flat in targets.items()}
            self._redirected = targets, [moved.get(key, piece) for key, piece in enumerate(own)]
        # Gradients now go to the targets, so the arena's own buffers can give their memory back.
        for flat in self.grads.values() if targets else ():
            _give_arena_pages_back(flat)
        self._places = self._redirected[1] if targets else own
        self._targets = targets

    def _borrow(
        self, given: Sequence[Tensor | None], present: Sequence[bool], zero_copy_keys: Collection[int]
    ) -> dict[int, Tensor]:
        """Return the gradients that can be used without a copy, by key; see `gather_grads`."""
        if zero_copy_keys is not self._zero_copy_keys[0]:
            self._zero_copy_keys = zero_copy_keys, sorted(self.long.intersection(zero_copy_keys))
        keys = self._zero_copy_keys[1]
        if not all(present):
            keys = [key for key in keys if present[key]]
        # map() runs these checks in C: there may be thousands of parameters.
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
        """Copy `grads` into `.grad` of the `present` parameters, in place; into a new tensor where it is None."""
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
        """Tell autograd that `present` parameters (None: all) were written. Older graphs that saved them then raise."""
        is_all = present is None or all(present)
        marked = self._parameters if is_all else list(compress(self._parameters, present or ()))
        torch.autograd.graph.increment_version(marked)

    def release(self, keys: Sequence[int]) -> None:
        """Give parameters memory of their own, unless they have left the arena already."""
        places = dict(zip(compress(range(len(self._names)), self._resident), self._addresses, strict=True))
        for key in keys:
            parameter = self._parameters[key]
            if places.get(key) == parameter.data_ptr():
                parameter.data = parameter.detach().clone()

    def check_in_place(self) -> None:
        """Check that the data of every parameter are still in this arena.

        Data that another Trainer's arena has taken over are copied back.

        Raises:
            ParameterMovedError: Names every parameter whose data are elsewhere. Nothing has been copied back.
        """
        # 1. The common case: all addresses are unchanged.
        addresses = list(map(Tensor.data_ptr, self._here))
        if addresses == self._addresses and all(map(Tensor.is_contiguous, self._here)):
            return
        # 2. Find what has moved, and tell moves to another arena from other moves.
        rows = enumerate(zip(self._here, addresses, self._addresses, strict=True))
        moved = [at for at, (p, now, address) in rows if now != address or not p.is_contiguous()]
        keys = list(compress(range(len(self._names)), self._resident))
        lost = [self._names[keys[at]] for at in moved if not self._is_in_another(keys[at])]
        if lost and any(map(has_shared_views, map(self._here.__getitem__, moved))):
            raise ParameterMovedError(
                f"share_memory() has moved the data of {len(lost)} of {len(self._names)} parameters after the Trainer "
                f"was built, so updates would not reach the model: {', '.join(lost)}. The Trainer needs them in its "
                "own memory: build a new one now, and give other processes copies such as p.detach().clone()"
            )
        if lost:
            have_same_form = all([self._has_form(keys[at]) for at in moved])
            is_format = have_same_form and not any([self._here[at].is_contiguous() for at in moved])
            raise ParameterMovedError(
                f"the data of {len(lost)} of {len(self._names)} parameters were replaced after the Trainer "
                f"was built, so updates would not reach the model: {', '.join(lost)}. "
                + (
                    f"Their memory format has changed; {ROW_MAJOR}. Leave out model.to(memory_format=...), and "
                    "build a new Trainer now"
                    if is_format
                    else "Call model.to(...), model.half() and the like before building the Trainer, or build a new "
                    "Trainer now"
                )
            )
        # 3. Copy back what another arena has taken.
        pieces = list(compress(self._views_of_keys(self.weights), self._resident))
        for at in moved:
            parameter, piece = self._here[at], pieces[at]
            piece.copy_(parameter.detach())
            parameter.data = piece
            _record_placed_in_arena([piece.data_ptr()], [parameter])

    def _is_in_another(self, key: int) -> bool:
        parameter = self._parameters[key]
        there = _placed.get(parameter.data_ptr())
        is_placed = there is not None and there() is parameter and parameter.is_contiguous()
        return is_placed and self._has_form(key)

    def _has_form(self, key: int) -> bool:
        parameter, spec = self._parameters[key], self._plan.specs[key]
        form = (tuple(parameter.shape), parameter.dtype, parameter.device)
        return form == (spec.shape, getattr(torch, spec.dtype), self.device)

    @torch.inference_mode(False)
    def _allocate(self, huge: float = math.inf) -> dict[str, Tensor]:
        """Allocate zeros, on the CPU in pages of their own, which can be remapped and cost nothing until written.

        Memory of `huge` bytes or more is in huge pages where the system has them: rows of tables are read at random.
        """
        is_here, sizes = self.device.type == "cpu", self._plan.resident_sizes.items()
        make = (
            partial(_paged_arena_zeros, huge=huge) if is_here else partial(aligned_zeros, device=self.device)
        )
        return {dtype: make(size, getattr(torch, dtype)) for dtype, size in sizes}

    @torch.inference_mode(False)
    def _views_of_keys(self, flats: Mapping[str, Tensor]) -> list[Tensor]:
        """Return a view for every key, each with its own storage object; empty tensors for row-sparse keys."""
        plan, pieces = self._plan, []
        aliases = {dtype: _alias_of_arena(flat) for dtype, flat in flats.items()}
        rows = zip(self._parameters, plan.specs, plan.key_offsets, plan.numels, self._resident, strict=True)
        for parameter, spec, at, numel, is_here in rows:
            if numel and is_here:
                piece = aliases[spec.dtype](count=numel, offset=at * SIZES[spec.dtype])
            else:
                piece = flats[spec.dtype].new_empty(0)
            # resize_as_ costs less than a view.
            pieces.append(piece.resize_as_(parameter) if is_here and len(spec.shape) != 1 else piece)
        return pieces


def _paged_arena_zeros(numel: int, dtype: torch.dtype, huge: float) -> Tensor:
    """Allocate zeros in private pages of their own, which a fork copies on write."""
    nbytes = numel * dtype.itemsize
    pages = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= huge:
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.uint8)[:nbytes]).view(dtype)


def _give_arena_pages_back(flat: Tensor) -> None:
    """Zero a tensor of whole pages by replacing them with untouched ones."""
    nbytes = -(-flat.nbytes // PAGE) * PAGE
    # If it fails the pages stay; they are zeroed when they are used again.
    with suppress(OSError):
        put_pages(flat.data_ptr(), nbytes, -1, 0, mmap.PROT_READ | mmap.PROT_WRITE)


class _CudaArenaPiece:
    """Aliases a part of a CUDA tensor, as integers because the interface lacks bfloat16. Keeps the tensor alive."""

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
def _alias_of_arena(flat: Tensor) -> Callable[..., Tensor]:
    """Return a function (count=elements, offset=bytes) → alias of that part, with a storage of its own size."""
    if flat.device.type == "cuda":

        def alias(count: int, offset: int) -> Tensor:
            return torch.as_tensor(_CudaArenaPiece(flat, offset, count), device=flat.device).view(flat.dtype)

        return alias
    return partial(torch.frombuffer, flat.view(torch.uint8).numpy().data, dtype=flat.dtype)


def _record_placed_in_arena(addresses: Sequence[int], parameters: Sequence[Parameter]) -> None:
    # Eight times cheaper than a WeakValueDictionary.
    found = dict(zip(addresses, map(weakref.ref, parameters), strict=True))
    # Other threads build Trainers too, and may reuse the addresses of dead parameters.
    with _placing:
        if len(_placed) >= len(addresses):
            # copy() is atomic, even if the garbage collector runs meanwhile.
            for address, there in _placed.copy().items():
                if there() is None:
                    _placed.pop(address, None)
        _placed.update(found)


def _check_arena_parameters(
    parameters: Sequence[Parameter],
    names: Sequence[str],
    here: Sequence[Parameter],
    resident: Sequence[bool],
    nbytes: Sequence[int],
) -> None:
    """Raise ConfigurationError unless the parameters `here`, of `nbytes` bytes each, can move into one arena."""
    home, names_here = parameters[0].device, list(compress(names, resident))
    # All common cases pass these few checks; only otherwise is each parameter looked at.
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
        problems = problems or [
            f"{name!r} {problem}" for name, p in rows if (problem := _arena_problem_with(p))
        ]
    # Requires dense parameters on one device.
    problems = problems or list(_arena_overlap_problems(here, names_here, list(compress(nbytes, resident))))
    if problems:
        raise ConfigurationError(f"the trainer cannot hold these parameters: {'; '.join(problems)}")


def arena_can_hold(parameter: Parameter, home: torch.device) -> bool:
    if parameter.device != home or parameter.dtype not in HELD_DTYPES:
        return False
    is_usual = type(parameter) is Parameter and parameter.layout is torch.strided
    return (
        (is_usual and parameter.is_contiguous())
        or is_row_sparse(parameter)
        or not _arena_problem_with(parameter)
    )


def _arena_problem_with(parameter: Parameter) -> str | None:
    # `.data` is slow, and for exactly a Parameter it is always a plain Tensor.
    kind = Tensor if type(parameter) is Parameter else type(parameter.data)
    if kind is not Tensor:
        return f"holds a {kind.__name__}; only plain tensors can be stored"
    if parameter.device.type not in ("cpu", "cuda"):
        return f"is on device {parameter.device}; move the model to cpu or cuda first"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; call .to_dense() first"
    # Non-overlapping and dense in some order of dimensions: then empty_like() gives the same strides.
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return (
            f"has shape {list(parameter.shape)} but strides {list(parameter.stride())}, so its elements "
            "repeat or leave gaps; set parameter.data = parameter.data.contiguous() first"
        )
    return None


def _arena_overlap_problems(
    parameters: Sequence[Parameter], names: Sequence[str], nbytes: Sequence[int]
) -> Iterator[str]:
    """Yield a message for each parameter that shares memory with an earlier one. All are dense, on one device."""
    # Sorted by address, neighbours that do not overlap prove that none do: this is vectorised.
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
