"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch


def pytest_configure() -> None:
    """Let children see signals that this process was started to ignore, as `nohup … &` does.

    What is ignored is so in children as well; what has a handler is not.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests that share processes run in one of xdist's workers: those of a file, and all that share parity jobs."""
    if hasattr(config, "workerinput"):
        for item in items:
            shares = "part_of_job" in getattr(item, "fixturenames", ())
            group = "parity jobs" if shares else item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here: threads cost more than they bring, and beside busy processes wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
