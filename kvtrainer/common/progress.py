"""Progress of long work on a terminal: fetching states, writing files, sending weights.

Printed to standard error, only if it is a terminal, or if kvlaunch says that its own is one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO, TypeVar

from kvtrainer.common.env import PROGRESS

LONG = 1.0
"""Seconds after which progress is shown, and between two lines."""
LARGE = 256 << 20
"""Bytes from which on work without countable parts is reported."""

T = TypeVar("T")


def track_progress(
    items: Sequence[T],
    what: str,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] | None = None,
) -> Iterator[T]:
    """Yield items. On a terminal, print how many are done if `what` takes longer than a second."""
    stream = sys.stderr if stream is None else stream
    if not _shows_progress(stream, os.environ if environ is None else environ):
        yield from items
        return
    started = shown = clock()
    for done, item in enumerate(items):
        yield item
        if (now := clock()) - shown >= LONG:
            shown = now
            print(f"\r{what}: {done + 1} of {len(items)} parts", end="", file=stream, flush=True)
    if shown > started:
        print(f"\r{what}: {len(items)} parts in {clock() - started:.0f} s", file=stream, flush=True)


@contextmanager
def print_duration(
    what: str,
    nbytes: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Print the begin and the duration of work on many bytes that has no countable parts, on a terminal."""
    stream = sys.stderr if stream is None else stream
    if nbytes < LARGE or not _shows_progress(stream, os.environ if environ is None else environ):
        yield
        return
    started = clock()
    print(f"{what}: {nbytes / (1 << 30):.1f} GiB …", file=stream, flush=True)
    yield
    print(f"{what}: took {clock() - started:.0f} s", file=stream, flush=True)


def _shows_progress(stream: TextIO, environ: Mapping[str, str]) -> bool:
    return stream.isatty() or environ.get(PROGRESS) == "1"
