"""The option `amp` of a Trainer: in which precision the forward pass computes, and how losses are scaled for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.precision.grad_scaler import make_loss_scaler
from kvtrainer.precision.loss_scaler import Scaler

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Precision(NamedTuple):
    """What `amp` asks for."""

    dtype: torch.dtype
    """In which torch.autocast computes what is safe in it."""
    scaler: Scaler | None
    """None where losses are not scaled, as with bfloat16."""


def make_precision(amp: Any) -> Precision | None:
    """What `amp` asks for; None for full precision.

    Args:
        amp: "dynamic", a number (a loss scale that does not change), or a dict of: `dtype`, "float16" (the default) or
            "bfloat16"; `loss_scale`, "dynamic" or a number; and the arguments of torch.amp.GradScaler.

    Raises:
        ConfigurationError: it is something else.
    """
    if amp is None:
        return None
    if isinstance(amp, str) and amp in _DTYPES:
        raise ConfigurationError(f"amp={amp!r} is a dtype; give it as amp=dict(dtype={amp!r})")
    given = dict(amp) if isinstance(amp, Mapping) else {"loss_scale": amp}
    dtype = given.pop("dtype", "float16")
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigurationError(f"amp computes in 'float16' or 'bfloat16', got dtype={dtype!r}")
    if name == "bfloat16":
        if given:
            raise ConfigurationError(
                f"bfloat16 has the range of float32, so losses are not scaled; leave out {', '.join(map(repr, given))}"
            )
        return Precision(torch.bfloat16, None)
    scale = given.pop("loss_scale", "dynamic")
    if given and scale != "dynamic":
        raise ConfigurationError(
            f"loss_scale={scale!r} does not change, so {', '.join(map(repr, given))} would do nothing; leave one out"
        )
    return Precision(torch.float16, make_loss_scaler(given or scale))
