"""Scenarios that run on every rank of one job, and give what was found there beside what it has to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from tests.support.jobs import Job

Pairs = Iterator[tuple[Any, Any]]
"""What was found, and what it has to be."""


def scenarios_of(module: Mapping[str, Any]) -> dict[str, Callable[..., Pairs]]:
    """Every function of a module that gives Pairs, by its name and in its order."""
    functions = {name: one for name, one in module.items() if isinstance(one, FunctionType)}
    return {name: one for name, one in functions.items() if one.__annotations__.get("return") == "Pairs"}


def check_every_rank(job: Job, scenario: str) -> None:
    """Compare what the ranks found in a scenario with what it has to be."""
    for rank, pairs in enumerate(job[scenario]):
        assert pairs
        for found, expected in pairs:
            assert found == expected, f"rank {rank}"
