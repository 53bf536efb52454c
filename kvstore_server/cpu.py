"""Which instruction set torch uses here; results have the same bits only between equal ones."""

from __future__ import annotations

import platform

import torch


def capability() -> str:
    """For example `x86_64/AVX2`."""
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"
