"""Initial values that one worker cannot give: refused there before the others are told, so init can be repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvtrainer.errors import ConfigurationError, DeadlineError
from tests.support.limits import SOON
from tests.support.processes import Members, Process, Processes, impatient, round_of, together


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Process]]:
    with Processes() as processes:
        yield processes.servers(2)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.ones(3, device="meta"), id="no values"),
        pytest.param(torch.ones(3, dtype=torch.int64), id="no dtype of a store"),
    ],
)
def test_a_refused_value_registers_nothing_and_init_works_with_a_good_one(
    servers: list[Process], value: Tensor
) -> None:
    with Members() as members:
        pair = members.pair(servers)
        with pytest.raises(ConfigurationError, match="'m'"):
            pair[0].init(["l", "m"], [torch.ones(3), value])
        keys, values = ["l", "m"], [torch.ones(3)] * 2
        assert together(*(lambda s=s: s.init(keys, values) for s in pair)) == [None, None]
        sums = together(*(lambda s=s: round_of(s, "m", torch.ones(3))[0].item() for s in pair))
        assert sums == [2, 2]


def test_a_worker_that_comes_after_the_others_gave_up_its_init_is_told_so(servers: list[Process]) -> None:
    with Members() as members:
        late, early = members.pair(servers)
        with impatient(early, timeout=SOON), pytest.raises(DeadlineError, match="rank 0"):
            early.init("m", torch.ones(3))
        with pytest.raises(ConfigurationError, match=r"round 1 of 'm'"):
            late.init("m", torch.ones(3))
