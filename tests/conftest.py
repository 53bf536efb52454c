"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let children see Ctrl-C even where this process was started with SIGINT ignored, as `nohup … &` does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
