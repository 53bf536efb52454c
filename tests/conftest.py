"""What holds for all tests.

torch is imported where it is used: the process that deals tests to others has no use for it, and they wait for it.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.support.forks import ADDRESS, serve_forks

if TYPE_CHECKING:
    from tests.support.stores import Servers


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server of a run with several processes, load Hypothesis's profile, and reset ignored signals.

    Hypothesis draws the same examples in every run. `nohup … &` ignores signals, and children inherit that unless the
    parent has a handler.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if config.getoption("numprocesses", None):
        os.environ[ADDRESS] = serve_forks()
    if find_spec("hypothesis"):  # The tests of tests/gpu also run on machines that do not have it.
        from hypothesis import settings

        settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
        settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector pass over what was imported and collected: half a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
def num_descriptors() -> list[int]:
    """How many there were after the last collection."""
    return [0]


@pytest.fixture(autouse=True)
def few_descriptors(num_descriptors: list[int]) -> Iterator[None]:
    """Close the memory of servers that a test has killed in this process; they are in cycles of references."""
    yield
    if len(os.listdir("/proc/self/fd")) > num_descriptors[-1] + 200:
        gc.collect()
        num_descriptors[:] = [len(os.listdir("/proc/self/fd"))]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw the same random numbers in every run, whichever tests ran before in the same process."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed puts a note with a stack trace down for each kind of device that is not in use yet.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def jobs() -> Iterator[Servers]:
    """Servers that the jobs of all tests share, each in a namespace of its own."""
    from tests.support.stores import servers

    with servers() as started:
        yield started


@pytest.fixture
def sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers of this process wait long for answers, for tests that count bytes.

    A busy machine answers late, and what a worker sends again is counted again.
    """
    from kvtrainer.client import session
    from kvtrainer.common import env

    monkeypatch.setattr(session, "REPEAT_AFTER", 60.0)
    monkeypatch.setenv(env.DEAD_AFTER, "240")
