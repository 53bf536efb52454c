"""What holds for all tests.

torch is imported where it is used: the process that deals tests to others has no use for it, and they wait for it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.stores import Servers


def pytest_configure() -> None:
    """Let children see signals that this process was started to ignore, as `nohup … &` does.

    What is ignored is so in children as well; what has a handler is not.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for a deadline, or for other processes."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here: threads cost more than they bring, and beside busy processes wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def jobs() -> Iterator[Servers]:
    """Servers that the jobs of all tests share, each in a namespace of its own."""
    from tests.support.stores import servers

    with servers() as started:
        yield started
