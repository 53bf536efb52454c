"""Helpers for a training loop; none of them needs a store.

- `split_data`, `split_and_load`: a batch over devices, as MXNet's functions of these names.
- `clip_global_norm`: in place, over gradients on any devices; the norm is computed in float64, without overflow.
- `get_random_state`, `set_random_state`: the global generators of Python, NumPy and torch as plain values, as
  `client_state` takes them.
- `ResumableBatches`, `shard`: the place in a data set from which a restarted worker goes on, and the part of it that
  belongs to one of several workers. Both are functions of plain numbers, so every process computes the same.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from kvstore_server import check
from kvtrainer.errors import ConfigurationError, NonFiniteNormWarning

Device = torch.device | str | int

_CHUNK = 1 << 18
"""Elements of a gradient that are converted to float64 at a time. More would cost memory, and time to allocate it."""


def split_data(
    data: Tensor | np.ndarray, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[Tensor]:
    """Split a batch along `batch_axis` into `num_slice` views.

    Args:
        data: A tensor, or a NumPy array, which is copied first; of any shape and dtype.
        num_slice: The number of slices.
        batch_axis: The axis to split; -1 is the last one.
        even_split: Whether all slices must have the same length. If not, the first ones may be longer by one.

    Raises:
        ConfigurationError: (a ValueError) The axis is not a multiple of `num_slice` with `even_split`, is shorter than
            `num_slice` without it, or does not exist.
    """
    num_slice = check.integer("num_slice", num_slice, 1)
    data = _as_tensor(data)
    shape = tuple(data.shape)
    if not check.is_integer(batch_axis, -len(shape), len(shape) - 1):
        raise ConfigurationError(f"data with shape {shape} has no batch_axis {batch_axis!r}")
    size = shape[batch_axis]
    if size < num_slice and (size == 0 or not even_split):
        raise ConfigurationError(
            f"data with shape {shape} has too few entries along axis {batch_axis} for {num_slice} slices; each slice "
            f"needs one, so use a batch size of at least {num_slice}, or fewer slices"
        )
    if even_split and size % num_slice:
        raise ConfigurationError(
            f"data with shape {shape} cannot be evenly split into {num_slice} slices along axis {batch_axis}; use a "
            f"batch size that is a multiple of {num_slice}, or even_split=False for slices of different lengths"
        )
    return list(data.tensor_split(num_slice, dim=batch_axis))


def split_and_load(
    data: Tensor | np.ndarray, ctx_list: Sequence[Device], batch_axis: int = 0, even_split: bool = True
) -> list[Tensor]:
    """Split a batch into one slice per device and move the slices there.

    Args:
        ctx_list: Devices as torch names them, such as 'cuda:0'; one may occur several times.
        data, batch_axis, even_split: As in `split_data`.

    Returns:
        A tensor for each device, in their order. If `data` is a tensor already on the device, it is a view.

    Raises:
        ConfigurationError: (a ValueError) As in `split_data`, or there is no device.
    """
    if isinstance(ctx_list, str | torch.device) or len(ctx_list) == 0:
        raise ConfigurationError(f"ctx_list must be a list of at least one device, got {ctx_list!r}")
    data = _as_tensor(data)
    if len(ctx_list) == 1:
        return [data.to(ctx_list[0])]
    slices = split_data(data, len(ctx_list), batch_axis, even_split)
    return [part.to(device) for part, device in zip(slices, ctx_list, strict=True)]


@overload
def clip_global_norm(
    arrays: Iterable[Tensor | None], max_norm: float, check_isfinite: Literal[True] = True
) -> float: ...
@overload
def clip_global_norm(
    arrays: Iterable[Tensor | None], max_norm: float, check_isfinite: bool
) -> float | Tensor: ...
@torch.no_grad()
def clip_global_norm(
    arrays: Iterable[Tensor | None], max_norm: float, check_isfinite: bool = True
) -> float | Tensor:
    """Scale gradients in place so that their joint 2-norm is at most `max_norm`.

    Every gradient is multiplied by `min(1, max_norm / (norm + 1e-8))`. If `norm` is infinite or NaN, no gradient
    changes (MXNet multiplies all the same, which leaves zeros and NaNs). With several workers, clip the reduced
    gradients, between the two halves of a step::

        trainer.allreduce_grads()
        kvtrainer.utils.clip_global_norm([p.grad for p in net.parameters()], max_norm * batch_size)
        trainer.update(batch_size)

    Args:
        arrays: Dense or sparse COO gradients of floating-point dtypes, on any devices. None, for a parameter without a
            gradient, is left out.
        max_norm: At least 0; with infinity the norm is only measured.
        check_isfinite: Whether to wait for the norm, and to warn `NonFiniteNormWarning` if it is not finite.

    Returns:
        The norm before clipping, computed in float64: a float, or without `check_isfinite` a 0-d float64 tensor on the
            first gradient's device. The latter blocks only if gradients are on several devices.

    Raises:
        ConfigurationError: There is no array, one is not a gradient (such as a Parameter), or `max_norm` is wrong.
    """
    # 1. Check every argument before any gradient changes.
    given = list(arrays)
    grads = [_checked_gradient(array) for array in given if array is not None]
    if not given:
        raise ConfigurationError("clip_global_norm needs at least one gradient, got none")
    check.number("max_norm", max_norm, 0, finite=False)
    norm = _global_norm(grads)
    # 2. Without the check everything stays on the devices, and nothing is waited for.
    if not check_isfinite:
        factor = torch.where(norm.isfinite(), (float(max_norm) / (norm + 1e-8)).clamp(max=1.0), 1.0)
        factors = {device: factor.to(device) for device in {grad.device for grad in grads}}
        for grad in grads:
            grad.mul_(factors[grad.device])
        return norm
    # 3. With it, only a norm above the limit costs a pass over the gradients.
    value = norm.item()
    if not math.isfinite(value):
        warnings.warn(
            f"the global norm of the gradients is {value}; they were not clipped and have not changed",
            NonFiniteNormWarning,
            stacklevel=3,
        )
    elif max_norm < value + 1e-8:
        for grad in grads:
            grad.mul_(max_norm / (value + 1e-8))
    return value


def _as_tensor(data: object) -> Tensor:
    if isinstance(data, np.ndarray):
        return torch.from_numpy(np.array(data, order="C"))
    if not isinstance(data, Tensor):
        raise ConfigurationError(f"data must be a tensor or a numpy array, got a {type(data).__name__}")
    return data


def _checked_gradient(array: object) -> Tensor:
    if isinstance(array, torch.nn.Parameter):
        raise ConfigurationError(
            "clip_global_norm got a Parameter; pass the gradients, p.grad, not the weights"
        )
    if not isinstance(array, Tensor):
        raise ConfigurationError(f"clip_global_norm needs tensors, got a {type(array).__name__}")
    if not array.is_floating_point() or array.layout not in (torch.strided, torch.sparse_coo):
        raise ConfigurationError(
            "clip_global_norm needs dense or sparse COO tensors of a floating-point dtype, got one of "
            f"{array.dtype} and {array.layout}"
        )
    return array


def _global_norm(grads: Sequence[Tensor]) -> Tensor:
    # Entries of one sparse gradient that share an index are summed before they are squared.
    flats = [(grad.coalesce().values() if grad.is_sparse else grad).reshape(-1) for grad in grads]
    norms = [
        _stable_norm(flat[start : start + _CHUNK])
        for flat in flats
        for start in range(0, flat.numel(), _CHUNK)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
    return _stable_norm(torch.stack([norm.to(grads[0].device) for norm in norms]))


def _stable_norm(flat: Tensor) -> Tensor:
    """Return the 2-norm in float64, without overflow or underflow of squares."""
    scale: Tensor | float = 1.0
    # Squares of narrower dtypes fit into float64 anyway.
    if flat.dtype == torch.float64:
        peak = flat.abs().max()
        scale = torch.where(peak.isfinite() & (peak > 0), peak, 1.0)
        flat = flat / scale
    norm: Tensor = vector_norm(flat, dtype=torch.float64)
    return norm * scale


def get_random_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global random generators, CUDA included, as plain values.

    About 8 KiB, and 16 bytes more for each CUDA device; for `Trainer.client_state`, with `set_random_state`.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": [version, np.array(internal, np.uint32).tobytes(), gauss],
        "numpy": [
            str(name),
            np.asarray(keys, np.uint32).tobytes(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [state.numpy().tobytes() for state in devices],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `get_random_state` returned.

    Raises:
        ConfigurationError: This is something else, or of another number of CUDA devices; nothing has changed then.
    """
    try:
        version, internal, gauss = state["python"]
        name, keys, position, has_gauss, cached = state["numpy"]
        python = (int(version), tuple(np.frombuffer(internal, np.uint32).tolist()), gauss)
        numpy = (str(name), np.frombuffer(keys, np.uint32), int(position), int(has_gauss), float(cached))
        cpu, *devices = [
            torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in (state["torch"], *state["cuda"])
        ]
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        torch.Generator().set_state(cpu)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"this is not what get_random_state() returns: {error}") from None
    count = torch.cuda.device_count() if devices else 0
    if len(devices) != count:
        raise ConfigurationError(f"the state has {len(devices)} CUDA devices, this process has {count}")
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if devices:
        torch.cuda.set_rng_state_all(devices)


class ResumableBatches:
    """The batches of a loader in epochs, which another process can continue in the middle of one.

        batches = kvtrainer.utils.ResumableBatches(loader)
        start = trainer.resume()
        if start.client_state is not None:
            batches.load_state_dict(start.client_state["batches"])
            set_random_state(start.client_state["random"])
        for epoch in range(batches.epoch, num_epochs):
            for x, y in batches:
                ...
                trainer.client_state = {"batches": batches.state_dict(), "random": get_random_state()}
                trainer.step(batch_size)

    To continue it begins the epoch with the random numbers with which that had begun, and passes over the batches that
    were used; their data are loaded again. Then the generators go on with the numbers that they had.

    Args:
        loader: A DataLoader, or another iterable, which draws from the global generators or not at all, and gives the
            same batches if these are in the same state.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        """The number of the present epoch, or of the next one between two, from 0."""
        self.position = 0
        """How many batches of it were given."""
        self._begin: Mapping[str, Any] | None = None
        """The states of the generators when the present epoch began; None between two epochs."""
        self._continues = False
        """Whether the next iteration continues the present epoch."""

    def __iter__(self) -> Iterator[Any]:
        now, begin = get_random_state(), self._begin if self._continues else None
        if begin is None:
            self._begin, self.position = now, 0
        else:
            set_random_state(begin)
        self._continues = False
        batches = iter(self.loader)
        for _ in islice(batches, self.position):
            pass
        if begin is not None:
            set_random_state(now)
        for batch in batches:
            self.position += 1
            yield batch
        self.epoch, self.position, self._begin = self.epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values, for a `client_state`; about 8 KiB within an epoch."""
        return {"epoch": self.epoch, "position": self.position, "random": self._begin}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration continue from a place that `state_dict` returned.

        Raises:
            ConfigurationError: It is something else; nothing has changed then.
        """
        known = isinstance(state_dict, Mapping) and set(state_dict) == {"epoch", "position", "random"}
        numbers = [state_dict["epoch"], state_dict["position"]] if known else []
        if not known or not all(type(one) is int and one >= 0 for one in numbers):
            raise ConfigurationError(f"this is not what state_dict() of batches returns: {state_dict!r:.80}")
        self.epoch, self.position = numbers
        self._begin, self._continues = state_dict["random"], state_dict["random"] is not None


def shard(
    length: int,
    members: Sequence[int],
    rank: int,
    *,
    epoch: int = 0,
    seed: int | None = None,
    start: int = 0,
) -> list[int]:
    """Return the indices of a data set that one of several workers trains on.

    The data set is divided round-robin: member number i of n gets every n-th index from the i-th on. All
    workers get equally many; what is left over at the end, fewer than n, is left out. When the members of a job have
    changed, call it again with the number of samples that all of them have used since the beginning of the epoch:
    what is left is divided over the present members, so no index comes twice in an epoch.

        members, used = trainer.members, 0
        own = iter(shard(len(data), members, trainer.rank, epoch=epoch, seed=0))
        ...
        if trainer.members != members:
            members = trainer.members
            own = iter(shard(len(data), members, trainer.rank, epoch=epoch, seed=0, start=used))

    Args:
        length: The number of samples of the data set.
        members: The ranks that train, as in `Trainer.members`.
        rank: One of them.
        epoch: The number of the pass over the data, from 0; each has an order of its own if there is a `seed`.
        seed: Shuffles the data set, alike on all workers; None: it is read in order.
        start: How many samples of this epoch all workers together have used already.

    Raises:
        ConfigurationError: The rank is no member, or a number is negative.
    """
    length, start = check.integer("length", length, 0), check.integer("start", start, 0)
    check.integer("epoch", epoch, 0)
    if rank not in members:
        raise ConfigurationError(f"rank {rank} is not one of the members {list(members)!r:.80}")
    if seed is None:
        order = np.arange(length)
    else:
        order = np.random.Generator(np.random.PCG64([check.integer("seed", seed, 0), epoch])).permutation(
            length
        )
    left = order[start:]
    own = left[: len(left) - len(left) % len(members)][sorted(members).index(rank) :: len(members)]
    return [int(index) for index in own]
