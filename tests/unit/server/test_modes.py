"""When a contribution counts: which modes there are, and what fits together."""

from __future__ import annotations

import pytest

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.errors import ConfigurationError


@pytest.mark.parametrize(
    "mode",
    [
        Mode(), Mode(by_host=True), Mode("async"), Mode("async", slow_down=True), Mode("ssp", 0),
        Mode("ssp", 7, slow_down=True),
    ],
)  # fmt: skip
def test_parts_that_fit_together_are_accepted(mode: Mode) -> None:
    mode.check()


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (Mode("eventual"), "must be 'sync', 'async' or 'ssp', got 'eventual'"),
        (Mode("ssp", -1), "staleness=-1 does not go with mode 'ssp'"),
        (Mode("async", 2), "staleness=2 does not go with mode 'async'"),
        (Mode("sync", 2), "staleness=2 does not go with mode 'sync'"),
        (Mode("sync", slow_down=True), "slow_down does not go with 'sync'"),
        (Mode("async", by_host=True), "by_host does not go with 'async'"),
        (Mode("ssp", 1, by_host=True), "by_host does not go with 'ssp'"),
    ],
)
def test_parts_that_do_not_are_named(mode: Mode, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        mode.check()


def test_only_bounded_staleness_has_a_bound_which_may_be_0() -> None:
    assert [Mode().bound, Mode("async").bound, Mode("ssp").bound, Mode("ssp", 3).bound] == [None, None, 0, 3]


def test_a_mode_reads_as_one_would_say_it() -> None:
    modes = [SYNCHRONOUS, Mode(by_host=True), Mode("ssp", 2, True)]
    assert list(map(str, modes)) == ["sync", "sync by_host", "ssp staleness=2 slow_down"]
