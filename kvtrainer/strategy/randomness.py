"""Seed the random numbers of a process, and save and restore where they are."""

from __future__ import annotations

import logging
import os
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore_server import check
from kvtrainer.config.dicts import check_arguments

_log = logging.getLogger(__name__)

_SEEDS = 1 << 32
"""numpy takes seeds below this."""


@dataclass(frozen=True)
class Randomness:
    """How random numbers begin.

    Args:
        seed: From 0 up to 2^32 - 1; None: rank 0 draws one.
        diff_rank_seed: Every rank adds its number to the seed, for example to draw other noise than its neighbours.
        deterministic: Only algorithms that always give the same result, where torch has them; it raises where not.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    seed: int | None = None
    diff_rank_seed: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.seed is not None:
            object.__setattr__(self, "seed", check.integer("seed", self.seed, 0, _SEEDS - 1))

    @staticmethod
    def read(given: Mapping[str, Any] | None) -> Randomness:
        """Read a dict with the arguments. Raises ConfigurationError if it has others."""
        check_arguments("randomness", Randomness, given or {})
        return Randomness(**(given or {}))


def draw_seed() -> int:
    """Draw a random seed."""
    return secrets.randbelow(1 << 31)


def set_randomness(randomness: Randomness, shared_seed: int, rank: int) -> int:
    """Let python's, numpy's and torch's random numbers begin anew on all devices; return the seed of this rank."""
    seed = (shared_seed + rank) % _SEEDS if randomness.diff_rank_seed else shared_seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if randomness.deterministic:
        _be_deterministic()
    return seed


def rng_state(devices: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the states of python's, numpy's and torch's random numbers, on the CPU and on CUDA `devices`.

    Tensors and plain numbers.
    """
    version, internal, gauss = random.getstate()
    numbers = np.random.get_state(legacy=True)
    assert isinstance(numbers, tuple)
    return {
        "python": {"version": version, "state": torch.tensor(internal), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numbers[1].astype(np.int64)),
            "pos": int(numbers[2]),
            "has_gauss": int(numbers[3]),
            "gauss": float(numbers[4]),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _on_cuda(devices)],
    }


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Raise, an error of any kind, unless `set_rng_state` can take this; nothing changes."""
    python, numbers = _of_python(state), _of_numpy(state)
    random.Random().setstate(python)
    np.random.RandomState().set_state(numbers)
    torch.Generator().set_state(state["torch"].cpu())
    len(state["cuda"])


def set_rng_state(state: Mapping[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Go on where `rng_state` was; CUDA states in the order of `devices`, as many as there are of both."""
    random.setstate(_of_python(state))
    np.random.set_state(_of_numpy(state))
    torch.set_rng_state(state["torch"].cpu())
    mine, saved = _on_cuda(devices), state["cuda"]
    if len(mine) != len(saved):
        _log.warning(
            "the random numbers of %d CUDA devices were saved and %d are used now: the others begin with the seed",
            len(saved),
            len(mine),
        )
    for device, one in zip(mine, saved, strict=False):
        torch.cuda.set_rng_state(one.cpu(), device)


def _of_python(state: Mapping[str, Any]) -> tuple[int, tuple[int, ...], float | None]:
    python = state["python"]
    return int(python["version"]), tuple(python["state"].tolist()), python["gauss"]


def _of_numpy(state: Mapping[str, Any]) -> tuple[str, Any, int, int, float]:
    numbers = state["numpy"]
    key = numbers["key"].cpu().numpy().astype(np.uint32)
    return "MT19937", key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]


def _on_cuda(devices: Sequence[torch.device]) -> list[torch.device]:
    found = {device: None for device in devices if device.type == "cuda"}
    return list(found)


def _be_deterministic() -> None:
    if torch.backends.cudnn.benchmark:
        _log.warning("cudnn_benchmark is switched off, because deterministic results were asked for")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available():
        # Without it torch refuses matrix products, of which cuBLAS would choose the algorithm by what is free.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
