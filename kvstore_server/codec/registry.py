"""Which codec `compression_params` means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvstore_server.codec.base import Codec
from kvstore_server.codec.half import BFloat16, Float16
from kvstore_server.codec.none import NoCompression
from kvstore_server.codec.quantised import OneBit, TwoBit
from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean

_CODECS = {cls.name: cls for cls in (NoCompression, OneBit, TwoBit, Float16, BFloat16)}


def make_codec(params: Mapping[str, Any] | None) -> Codec:
    """Return the codec that Gluon's `compression_params`, or a `Codec.spec`, describes.

    Args:
        params: `type`: 'none', '1bit', '2bit', 'fp16' or 'bf16', in any case; `threshold` for the bits (0.5).
            None: no compression.

    Raises:
        UnknownNameError: there is no such type; lists the valid ones.
        ConfigurationError: not a mapping, no type, an entry that the type does not know, or a bad threshold.
    """
    if params is None:
        return NoCompression()
    if not isinstance(params, Mapping):
        raise ConfigurationError(
            f"compression_params must be a dict such as {{'type': '2bit'}}, got {params!r:.80}"
        )
    options = dict(params)
    kind = options.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigurationError(
            f"compression_params needs a 'type', one of {', '.join(_CODECS)}; got {dict(params)!r:.80}"
        )
    cls = _CODECS.get(kind.lower())
    if cls is None:
        raise UnknownNameError(
            f"there is no compression type {kind!r}; known are {', '.join(_CODECS)}{did_you_mean(kind, _CODECS)}"
        )
    valid = [f.name for f in fields(cls) if f.init]
    unknown = [repr(name) for name in options if name not in valid]
    if unknown:
        raise ConfigurationError(
            f"compression {cls.name!r} does not take {', '.join(unknown)}; it takes {', '.join(['type', *valid])}"
        )
    return cls(**options)
