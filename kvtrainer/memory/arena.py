"""Flat storage for the weights and gradients of a list of parameters, laid out by a Plan.

A fused update, a reduction or a transfer then works on one long tensor. Each parameter stays the same object
and gets a storage of its own that aliases its piece, so that saving one layer writes that layer alone.

Who has written to the weights is known by torch's version counters and by sums of bits. Every write in place that torch
knows of raises `_version` of a tensor by one or more: `load_state_dict`, `nn.init`, `p.clamp_()` under no_grad. Reads,
gradients and backward passes do not. A write through `p.data`, NumPy or another library raises nothing, but changes
bits.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.plan import ALIGNMENT, Plan
from kvtrainer.errors import ConfigurationError, ParameterMovedError

WHOLE = 8 << 20
"""Bytes. An arena of up to this size is looked at as a whole; of a bigger one every EVERY-th block, in turn."""
EVERY = 8
_BLOCK = 8 << 10
_SUMMED = 1 << 10
"""The bytes in one sum; behind the last whole row of blocks it is a line of 64."""
_WORD = 8

_placed: dict[int, weakref.ref[Parameter]] = {}
"""Address → the parameter that an arena has put there: the data of one may lie in the arena of another Trainer."""


class Arena:
    """Weights and gradients of one list of parameters: one flat tensor per dtype, all on one device.

    Construction moves the values of the parameters into the arena and lets `parameter.data` alias them,
    row-major whatever the memory format was before. The Parameter objects keep their identity, hooks and
    attributes. Arenas may share parameters: their data are in the one that was used last.

    Args:
        parameters: on one device, in the order of `plan.specs`; none may share memory with another.
        names: one name per parameter, for messages.
        plan: gives each key its place.

    Raises:
        ConfigurationError: a parameter does not fit; nothing has been changed then.
    """

    weights: dict[str, Tensor]
    """Dtype name to a flat tensor of `plan.resident_sizes[dtype]` elements that starts on a 64-byte boundary.
    Padding is zero."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], plan: Plan) -> None:
        _check_parameters(parameters, names, plan)
        self._parameters = list(parameters)
        self._names = list(names)
        self._plan = plan
        self.device = parameters[0].device
        self.weights = self._allocate()
        self._grads: dict[str, Tensor] = {}
        self._grad_pieces: list[Tensor] = []
        self._zero: frozenset[int] = frozenset()
        """The gradients that are known to be zero."""
        self._resident = [i for i, spec in enumerate(plan.specs) if not spec.row_sparse]
        here = [self._parameters[i] for i in self._resident]
        pieces = self._own_pieces()
        _copy(pieces, list[Tensor](here))
        for parameter, piece in zip(here, pieces, strict=True):
            parameter.data = piece
        self.writes = WriteWatch(parameters, self.weights, plan)
        """What others than the Trainer do to the weights."""
        self._addresses = [p.data_ptr() for p in here]
        _place(self._addresses, here)

    @property
    def grads(self) -> dict[str, Tensor]:
        """Gradients in the layout of `weights`; allocated, as zeros, at first use."""
        if not self._grads:
            self._grads = self._allocate()
            self._grad_pieces = [self._piece(self._grads, i) for i in range(len(self._plan.specs))]
        return self._grads

    def gather_grads(self, present: Sequence[bool]) -> None:
        """Copy `.grad` of the parameters that are `present` into `grads`, and zero the pieces of the others.

        A present parameter must have a dense gradient; any memory format will do.
        """
        _, pieces = self.grads, self._grad_pieces
        here = [i for i, is_present in enumerate(present) if is_present]
        _copy([pieces[i] for i in here], self._grads_of(here))
        zero, self._zero = self._zero, frozenset()
        absent = [pieces[i] for i, is_present in enumerate(present) if not is_present and i not in zero]
        if absent:
            torch._foreach_zero_(absent)

    def trust_zeros(self, keys: Iterable[int]) -> None:
        """Take it that nobody writes to the places of these gradients, zeroed last, before the next `gather_grads`."""
        self._zero = frozenset(keys)

    def scatter_grads(self, present: Sequence[bool]) -> None:
        """Copy `grads` into `.grad` of the parameters that are `present`, in place.

        A present parameter without a gradient gets a new tensor: other workers had one.
        """
        _, pieces = self.grads, self._grad_pieces
        here = [i for i, is_present in enumerate(present) if is_present]
        with_grad = [i for i in here if self._parameters[i].grad is not None]
        _copy(self._grads_of(with_grad), [pieces[i] for i in with_grad])
        for i in here:
            if self._parameters[i].grad is None:
                self._parameters[i].grad = pieces[i].clone()

    def mark_updated(self, present: Sequence[bool] | None) -> None:
        """Tell autograd that the parameters that are `present` (None: all) were written through `weights`.

        A backward pass through a graph that saved their former values then raises, as after a torch
        optimizer's step.
        """
        marked: Iterable[bool] = [True] * len(self._parameters) if present is None else present
        torch.autograd.graph.increment_version(
            [p for p, is_in in zip(self._parameters, marked, strict=True) if is_in]
        )

    def check_in_place(self) -> None:
        """Check that the data of every parameter still lie where the constructor put them.

        Those that another Trainer's arena has taken since come back, with the values that they have there.

        Raises:
            ParameterMovedError: names every parameter whose data do not; nothing has come back then.
        """
        moved = [
            i
            for i, address in zip(self._resident, self._addresses, strict=True)
            if self._parameters[i].data_ptr() != address or not self._parameters[i].is_contiguous()
        ]
        lost = [self._names[i] for i in moved if not self._is_in_another(i)]
        if lost:
            raise ParameterMovedError(
                f"the data of {len(lost)} of {len(self._names)} parameters were replaced after the Trainer "
                f"was built, so updates would not reach the model: {', '.join(lost)}. Call model.to(...), "
                "model.half() and the like before building the Trainer, or build a new Trainer now"
            )
        if not moved:
            return
        places = dict(zip(self._resident, self._own_pieces(), strict=True))
        for i in moved:
            _copy([places[i]], [self._parameters[i].detach()])
            self._parameters[i].data = places[i]
            _place([places[i].data_ptr()], [self._parameters[i]])

    def _is_in_another(self, i: int) -> bool:
        """Whether an arena has put the data of a parameter where they are, in the form that they have here."""
        parameter, spec = self._parameters[i], self._plan.specs[i]
        form = (tuple(parameter.shape), parameter.dtype, parameter.device)
        there = _placed.get(parameter.data_ptr())
        is_placed = there is not None and there() is parameter and parameter.is_contiguous()
        return is_placed and form == (spec.shape, getattr(torch, spec.dtype), self.device)

    def _allocate(self) -> dict[str, Tensor]:
        return {
            dtype: _aligned_zeros(size, dtype, self.device)
            for dtype, size in self._plan.resident_sizes.items()
        }

    @torch.inference_mode(False)
    def _own_pieces(self) -> list[Tensor]:
        """The places of the resident keys, as tensors with storage objects of their own sizes."""
        aliases = {dtype: _aliases_of(flat) for dtype, flat in self.weights.items()}
        rows = [(self._plan.specs[i], self._plan.key_offsets[i]) for i in self._resident]
        flat = [aliases[spec.dtype](at, spec.numel) for spec, at in rows]
        return [
            piece if len(spec.shape) == 1 else piece.view(spec.shape)
            for piece, (spec, _) in zip(flat, rows, strict=True)
        ]

    def _piece(self, arenas: dict[str, Tensor], i: int) -> Tensor:
        spec = self._plan.specs[i]
        if spec.row_sparse:
            return arenas[spec.dtype].new_empty(0)
        return arenas[spec.dtype].narrow(0, self._plan.key_offsets[i], spec.numel).view(spec.shape)

    def _grads_of(self, keys: Iterable[int]) -> list[Tensor]:
        found = [self._parameters[i].grad for i in keys]
        return [grad for grad in found if grad is not None]


class WriteWatch:
    """Compares the parameters with what the Trainer's own updates made of them.

    Counters cost a few dozen ns per parameter. Bits are summed only where a store has the weights too and will put its
    own in the place of what is written; that takes two passes over what is looked at.

    Args:
        parameters: in the order of `plan.specs`.
        weights: the arena that they lie in.
    """

    def __init__(self, parameters: Sequence[Parameter], weights: Mapping[str, Tensor], plan: Plan) -> None:
        self._parameters = list(parameters)
        self._weights = weights
        self._plan = plan
        self._accepted: list[int] = []
        self._total = 0
        self._own = 0
        self._is_in_store = False
        self._turn = 0
        self._sums: dict[str, Tensor] = {}

    def accept(self, is_in_store: bool) -> None:
        """From now on look for writes that come later; for unseen ones too if the weights are in a store as well."""
        self._accepted = [p._version for p in self._parameters]
        self._total = sum(self._accepted)
        self._own, self._is_in_store = 0, is_in_store
        self._take_sums()

    def count_own(self) -> None:
        """The Trainer has written to the weights, and raised each counter by one."""
        self._own += 1
        self._take_sums()

    def by_others(self) -> list[int]:
        """The parameters (by position) that somebody else has written to since `accept`, or that lie beside one."""
        found = {key for dtype in self._sums for key in self._changed(dtype)}
        # Counters only rise, so the sum tells whether any has: on most steps none.
        if sum([p._version for p in self._parameters]) != self._total + self._own * len(self._parameters):
            rows = zip(self._parameters, self._accepted, strict=True)
            found.update(i for i, (p, version) in enumerate(rows) if p._version != version + self._own)
        return sorted(found)

    def _take_sums(self) -> None:
        self._turn += 1
        self._sums = {dtype: self._sum(dtype) for dtype in self._weights if self._is_in_store}

    def _sum(self, dtype: str) -> Tensor:
        words = self._weights[dtype].view(torch.int64)
        return torch.cat([part.sum(-1).flatten() for part in self._looked_at(words)])

    def _looked_at(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks whose turn it is and the rest behind all blocks, cut into what is summed."""
        every = 1 if words.numel() * _WORD <= WHOLE else EVERY
        body = words.numel() // (every * _BLOCK // _WORD) * (every * _BLOCK // _WORD)
        blocks = words[:body].view(-1, every, _BLOCK // _SUMMED, _SUMMED // _WORD)
        return blocks[:, self._turn % every], words[body:].view(-1, ALIGNMENT // _WORD)

    def _changed(self, dtype: str) -> list[int]:
        """The keys of a dtype that have bytes in what has another sum now."""
        differs = self._sum(dtype) != self._sums[dtype]
        if not differs.any():
            return []
        flat, differs = self._weights[dtype], differs.cpu()
        size = flat.element_size()
        parts = self._looked_at(torch.arange(0, flat.numel() * size, _WORD))
        firsts = torch.cat([part[..., 0].flatten() for part in parts])[differs].tolist()
        ends = torch.cat([part[..., -1].flatten() for part in parts])[differs].add(_WORD).tolist()
        rows = zip(self._plan.specs, self._plan.key_offsets, strict=True)
        return [
            key
            for key, (spec, at) in enumerate(rows)
            if spec.dtype == dtype
            and not spec.row_sparse
            and bisect_right(ends, at * size) < bisect_left(firsts, (at + spec.numel) * size)
        ]


class _CudaPiece:
    """Some memory of a CUDA tensor, in the form that `torch.as_tensor` aliases; keeps the tensor alive.

    The protocol has no name for bfloat16, so the elements are declared as integers of the same size.
    """

    def __init__(self, flat: Tensor, offset: int, numel: int) -> None:
        self._flat = flat
        size = flat.element_size()
        self.__cuda_array_interface__ = {
            "data": (flat.data_ptr() + offset * size, False),
            "shape": (numel,),
            "strides": None,
            "typestr": f"<i{size}",
            "version": 2,
        }


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As a plan calls it: 'float32'."""
    return str(dtype).removeprefix("torch.")


@torch.inference_mode(False)
def _aligned_zeros(numel: int, dtype: str, device: torch.device) -> Tensor:
    """A flat tensor of zeros that starts on a 64-byte boundary; written once, so that its pages are there."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    nbytes = numel * torch_dtype.itemsize
    raw = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device).zero_()
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + nbytes].view(torch_dtype)


def _aliases_of(flat: Tensor) -> Callable[[int, int], Tensor]:
    """(offset, number of elements) → these elements of `flat`, as a tensor with a storage object of its own size."""
    if flat.device.type == "cuda":
        return lambda offset, numel: (
            torch.as_tensor(_CudaPiece(flat, offset, numel), device=flat.device).view(flat.dtype)
            if numel
            else flat.new_empty(0)
        )
    memory, dtype, size = flat.view(torch.uint8).numpy().data, flat.dtype, flat.element_size()
    frombuffer = torch.frombuffer
    return lambda offset, numel: (
        frombuffer(memory, dtype=dtype, count=numel, offset=offset * size) if numel else flat.new_empty(0)
    )


def _place(addresses: Sequence[int], parameters: Sequence[Parameter]) -> None:
    """Note which parameters lie where; those that are gone are forgotten before there would be more."""
    # A WeakValueDictionary does the same, at eight times the price.
    if len(_placed) >= len(addresses):
        for address in [address for address, there in _placed.items() if there() is None]:
            del _placed[address]
    _placed.update(zip(addresses, map(weakref.ref, parameters), strict=True))


@torch.no_grad()
def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_parameters(parameters: Sequence[Parameter], names: Sequence[str], plan: Plan) -> None:
    if not len(parameters) == len(names) == len(plan.specs):
        raise ConfigurationError(
            f"{len(parameters)} parameters, {len(names)} names and {len(plan.specs)} keys of the plan; "
            "there must be as many of each"
        )
    # Each of these relies on the ones before it having found nothing.
    problems: list[str] = []
    if not _are_plain(parameters, plan):
        problems = list(_off_device(parameters, names)) or list(_unfit(parameters, names, plan))
    here = [i for i, spec in enumerate(plan.specs) if not spec.row_sparse]
    problems = problems or list(_overlaps([parameters[i] for i in here], [names[i] for i in here]))
    if problems:
        raise ConfigurationError(f"the trainer cannot hold these parameters: {'; '.join(problems)}")


def _are_plain(parameters: Sequence[Parameter], plan: Plan) -> bool:
    """Whether nothing is wrong with any single parameter, as most often; found out without a look at each alone."""
    home = parameters[0].device
    return (
        home.type in ("cpu", "cuda")
        and {type(p) for p in parameters} == {Parameter}
        and {p.device for p in parameters} == {home}
        and {p.layout for p in parameters} == {torch.strided}
        and all([p.is_contiguous() for p in parameters])
        and [p.shape for p in parameters] == [spec.shape for spec in plan.specs]
        and [dtype_name(p.dtype) for p in parameters] == [spec.dtype for spec in plan.specs]
    )


def _unfit(parameters: Sequence[Parameter], names: Sequence[str], plan: Plan) -> Iterator[str]:
    """What is wrong with single parameters."""
    for parameter, name, spec in zip(parameters, names, plan.specs, strict=True):
        problem = None if spec.row_sparse else _problem_with(parameter)
        shape, dtype = parameter.shape, dtype_name(parameter.dtype)
        if problem is None and (shape != spec.shape or dtype != spec.dtype):
            problem = f"is {dtype}{list(shape)} but was planned as {spec.dtype}{list(spec.shape)}"
        if problem is not None:
            yield f"{name!r} {problem}"


def _problem_with(parameter: Parameter) -> str | None:
    """Why this parameter's data cannot be moved into an arena; None if they can."""
    # Of what is exactly a Parameter the data are exactly a Tensor, and to ask for them takes long.
    kind = Tensor if type(parameter) is Parameter else type(parameter.data)
    if kind is not Tensor:
        return f"holds a {kind.__name__}; only plain tensors can be stored"
    if parameter.device.type not in ("cpu", "cuda"):
        return f"is on device {parameter.device}; move the model to cpu or cuda first"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}; call .to_dense() first"
    if not parameter.is_contiguous() and not _is_dense(parameter):
        return (
            f"has shape {list(parameter.shape)} but strides {list(parameter.stride())}, so its elements "
            "repeat or leave gaps; set parameter.data = parameter.data.contiguous() first"
        )
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each place once, in whatever order of dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(pair for pair in dimensions if pair[1] != 1):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _off_device(parameters: Sequence[Parameter], names: Sequence[str]) -> Iterator[str]:
    """The parameters that are not where the first one is."""
    home = parameters[0].device
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.device != home:
            yield (
                f"{name!r} is on {parameter.device} but {names[0]!r} is on {home}; one trainer works on one "
                "device, so move the whole model there first"
            )


def _overlaps(parameters: Sequence[Parameter], names: Sequence[str]) -> Iterator[str]:
    """The parameters that share memory with one before them; all are dense and on one device."""
    starts = np.array([p.data_ptr() for p in parameters], dtype=np.int64)
    ends, order = starts + np.array([p.nbytes for p in parameters], dtype=np.int64), starts.argsort()
    if not (ends[order][:-1] > starts[order][1:]).any():
        return
    blocks = sorted([(p.data_ptr(), p.nbytes, i) for i, p in enumerate(parameters)])
    last_end, last = 0, 0
    for start, size, i in blocks:
        end = start + size
        if size and start < last_end:
            yield (
                f"{names[i]!r} shares memory with {names[last]!r}; give each its own, or tie them by using "
                "one Parameter object in both places"
            )
        if end > last_end:
            last_end, last = end, i
