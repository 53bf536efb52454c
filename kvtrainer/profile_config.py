"""The settings of a profiler, under MXNet's names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_server.errors import ConfigurationError
from kvstore_server.tracing import CALLS, CATEGORIES, ROUNDS


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.path.basename(os.fspath(value)))


def _is_period(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "filename": (_is_path, "the path of a file"),
    "profile_all": (_is_bool, "True or False"),
    "profile_api": (_is_bool, "True or False"),
    "profile_imperative": (_is_bool, "True or False"),
    "profile_symbolic": (_is_bool, "True or False"),
    "profile_memory": (_is_bool, "True or False"),
    "continuous_dump": (_is_bool, "True or False"),
    "aggregate_stats": (_is_bool, "True or False"),
    "dump_period": (_is_period, "a number of seconds above 0"),
    "gpu_memory_profile_filename_prefix": (lambda value: isinstance(value, str), "a str"),
}
"""Each key with what its value must be."""


@dataclass(frozen=True)
class ProfileConfig:
    """Where a trace goes, and what is in it.

    Args:
        path: The file that was named; see `file_of`.
        categories: Of events, as `kvstore_server.tracing` has them.
    """

    path: Path
    categories: tuple[str, ...] = CATEGORIES

    def file_of(self, index: int) -> Path:
        """The file of a worker's rank or a server's index: beside the path, with rank{index}_ before its name.

        MXNet's scripts put that before a worker's file themselves, so it is not put there twice.
        """
        prefix = f"rank{index}_"
        return (
            self.path
            if self.path.name.startswith(prefix)
            else self.path.with_name(f"{prefix}{self.path.name}")
        )


def read_profile_config(options: Mapping[str, Any]) -> ProfileConfig:
    """Check settings as `profiler.set_config` takes them; what is absent has MXNet's default.

    Raises:
        ConfigurationError: a key is unknown, a value wrong, or the file's folder does not exist.
    """
    for key, value in options.items():
        if key not in _KEYS:
            raise _improper(f"there is no {key!r}; it takes {', '.join(sorted(_KEYS))} and profile_process")
        is_right, expected = _KEYS[key]
        if not is_right(value):
            raise _improper(f"{key} must be {expected}, got {value!r:.80}")
    path = Path(options.get("filename", "profile.json")).absolute()
    if not path.parent.is_dir():
        raise _improper(f"filename is {options.get('filename')!r:.200}, but there is no folder {path.parent}")
    wanted = {CALLS: options.get("profile_api", True), ROUNDS: options.get("profile_imperative", True)}
    has_all = options.get("profile_all", False)
    return ProfileConfig(path, tuple(name for name in CATEGORIES if has_all or wanted[name]))


def _improper(problem: str) -> ConfigurationError:
    return ConfigurationError(f"improper profiler config passed from worker: {problem}")
