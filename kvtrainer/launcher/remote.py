"""What runs on another host for `kvlaunch -H`: one process of a job, and its guardian, which is this program.

Standard input comes from the launcher. A byte asks for a signal; its end, which comes when the launcher, ssh or network
is gone, ends the process, all that it has started, and this program.

    python -m kvtrainer.launcher.remote [--grace SEC] [--share N] [--ready WORD] -- COMMAND [ARG ...]
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from kvtrainer.launcher.child import end_with_parent
from kvtrainer.launcher.guardian import MARK, end_all

TERMINATE, KILL = b"T", b"K"
_MAX_READY_LINE = 1024


class _Stopped(Exception):
    """This program was asked to end by a signal."""


def main(argv: Sequence[str]) -> int:
    """Run the command until it or standard input ends; return its exit code as a shell does."""
    options = _parse(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    mark = secrets.token_hex(16)
    reading, writing = os.pipe() if options.ready else (-1, -1)
    command = [*options.command, *(["--ready-fd", str(writing)] if options.ready else [])]
    try:
        process = subprocess.Popen(
            command,
            env=_environ(mark, options.share),
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,) if options.ready else (),
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    except (OSError, ValueError) as error:
        print(f"cannot start the command: {error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    if options.ready:
        os.close(writing)
    grace = options.grace
    try:
        grace = _watch(process, reading, options.ready, grace)
    except _Stopped:
        pass
    finally:
        end_all(mark, {process.pid}, grace)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _watch(process: subprocess.Popen[bytes], ready: int, word: str, grace: float) -> float:
    """Wait until the process or standard input ends; return the grace for what is left."""
    received = b""
    poll = select.poll()
    ended = os.pidfd_open(process.pid)
    for fd in (0, ended, *([ready] if word else [])):
        poll.register(fd, select.POLLIN)
    while True:
        events = [fd for fd, _ in poll.poll()]
        if ready in events:
            data = os.read(ready, _MAX_READY_LINE)
            received += data
            if not data or b"\n" in received or len(received) > _MAX_READY_LINE:
                poll.unregister(ready)
                if received:
                    # One write, so that no line of the process comes in between.
                    os.write(1, f"{word} ".encode() + received.partition(b"\n")[0] + b"\n")
        if 0 in events:
            data = os.read(0, 64)
            if not data or KILL in data:
                return 0.0 if data else grace
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        if ended in events:
            return grace


def _environ(mark: str, share: int) -> dict[str, str]:
    environ = {**os.environ, MARK: ":".join(filter(None, (os.environ.get(MARK), mark)))}
    if share:
        environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // share)))
    return environ


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Stopped


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtrainer.launcher.remote", allow_abbrev=False)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("--share", type=int, default=0)
    parser.add_argument("--ready", default="")
    parser.add_argument("command", nargs="+")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
