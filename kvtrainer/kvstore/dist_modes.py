"""The names of the stores on servers, and what each says about when a contribution counts."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore_server.modes import ASYNC, SSP, SYNCHRONOUS, Mode
from kvtrainer.errors import ConfigurationError

STALENESS = "KVSTORE_STALENESS"
"""The environment variable with the default of `staleness`."""
DEFAULT_STALENESS = 1

P3_NAME = "p3"
VAN_TYPE, WATER_MARK = "DMLC_PS_VAN_TYPE", "DMLC_PS_WATER_MARK"
"""MXNet's variables: "p3" lets urgent messages overtake others that wait here; how many may be on their way."""
DEFAULT_WATER_MARK = 10

SYNC_NAMES = ("dist_sync", "dist", "dist_sync_device", "dist_device_sync", P3_NAME)
ASYNC_NAMES = ("dist_async", "dist_async_device", "dist_device_async")
SSP_NAMES = ("dist_ssp", "dist_ssp_device", "dist_device_ssp")


def mode_of(
    type: str, staleness: int | None, scale_lr_by_staleness: bool, environ: Mapping[str, str]
) -> Mode:
    """The mode of a store of that name.

    Raises:
        ConfigurationError: an option does not go with the name, or is no whole number of 0 or more.
    """
    name = type.lower()
    if name not in SSP_NAMES and staleness is not None:
        raise ConfigurationError(f"kvstore {type!r} takes no staleness, got {staleness!r}; 'dist_ssp' does")
    if not isinstance(scale_lr_by_staleness, bool):
        raise ConfigurationError(
            f"scale_lr_by_staleness must be True or False, got {scale_lr_by_staleness!r}"
        )
    if name in ASYNC_NAMES:
        return Mode(ASYNC, 0, scale_lr_by_staleness)
    if name in SSP_NAMES:
        return Mode(SSP, _read_staleness(staleness, environ), scale_lr_by_staleness)
    if scale_lr_by_staleness:
        raise ConfigurationError(
            f"scale_lr_by_staleness has no meaning for kvstore {type!r}, whose gradients are never stale; use "
            "'dist_async' or 'dist_ssp'"
        )
    return SYNCHRONOUS


def water_mark_of(type: str, environ: Mapping[str, str]) -> int:
    """How many messages for a server may be on their way while others queue by priority; 0: all, nothing queues.

    Raises:
        ConfigurationError: a variable has no value that is known.
    """
    van = environ.get(VAN_TYPE, "").strip().lower()
    if van not in ("", "zmq", P3_NAME):
        raise ConfigurationError(f"{VAN_TYPE} is {van!r}; this library knows 'zmq' and 'p3'")
    if P3_NAME not in (type.lower(), van):
        return 0
    given = environ.get(WATER_MARK, "").strip() or str(DEFAULT_WATER_MARK)
    if not given.isdecimal() or not 0 < int(given) < 1 << 31:
        raise ConfigurationError(f"{WATER_MARK} is {given!r}; it must be a whole number above 0")
    return int(given)


def _read_staleness(given: int | None, environ: Mapping[str, str]) -> int:
    value: object = given
    if given is None:
        text = environ.get(STALENESS, "").strip()
        value = int(text) if text.isdecimal() and len(text) < 10 else text or DEFAULT_STALENESS
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(
            f"staleness ({STALENESS}) is {value!r}; it must be a whole number of 0 or more"
        )
    return value
