"""Types that many modules share."""

from __future__ import annotations

from typing import Any, TypeAlias

Group: TypeAlias = dict[str, Any]
"""A parameter group, as torch.optim has them."""
