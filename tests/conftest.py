"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children see signals that this process was started to ignore, as `nohup … &` does.

    What is ignored is so in children as well; what has a handler is not.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
