"""`kvlaunch`: the command line that starts servers and workers of one job on this machine."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence

from kvstore_server.errors import ConfigurationError
from kvtrainer._launcher import Launcher
from kvtrainer._limits import Limits, until_noticed

_DESCRIPTION = """\
Start parameter servers and workers on this machine, and end them together.

Servers start first; when all are ready, COMMAND is started once for every worker. When a worker fails, or a
server exits before the workers are done, the others get a while to end by themselves and are then stopped, and
kvlaunch exits with the code of that first failure (128 + n for signal n). When all workers are done, the
servers are stopped in good order. No process is left behind, even when kvlaunch itself is killed.
"""

_EPILOG = """\
environment that a worker finds:
  KVSTORE_RANK         which worker it is, from 0
  KVSTORE_NUM_WORKERS  how many workers there are
  KVSTORE_SERVERS      comma-separated tcp://HOST:PORT of the servers; unset with -s 0
  OMP_NUM_THREADS      cores divided by workers, at least 1, unless you have set it
  PYTHONUNBUFFERED     1, unless you have set it
  MALLOC_…             glibc keeps up to 1 GiB of freed memory for reuse, unless you have set them

environment that kvlaunch leaves to you, and that workers read:
  KVSTORE_TIMEOUT          longest wait for a round, a pull or a barrier, in seconds (600)
  KVSTORE_CONNECT_TIMEOUT  longest wait for the first answer of a server, in seconds (30)
  KVSTORE_DEAD_AFTER       a peer not heard from for so many seconds counts as dead (20); servers read it too

output: each line begins with [w0] for worker 0, [s1] for server 1, and so on; standard output and standard
error stay apart. Commands read no standard input.

example:
  kvlaunch -n 4 -s 2 -- python train.py --epochs 3
"""

_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Message buffers of a MiB come and go with every round; without this each is mapped and faulted in anew, which takes
longer than filling it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code; blocks until the job is over.

    Wrong usage exits with code 2 through SystemExit.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, command = _parse(arguments)
    # A server that still waits for a dead worker's round must have given up before it would be killed.
    drain = ["--drain-timeout", f"{max(0.8 * options.grace, 0.1):g}"]
    extra = [*drain, *options.server_arg, *_import_flags(options.imports)]
    server_command = _server_command(options.servers, extra)
    environ = {**_MALLOC, **os.environ}
    launcher = Launcher(command, options.workers, server_command, options.servers, environ, options.limits)
    return launcher.run()


def _limits(options: argparse.Namespace) -> Limits:
    linger = Limits.linger if options.linger is None else options.linger
    unheard = linger
    if options.linger is None and options.servers:
        unheard = until_noticed(os.environ)
    return Limits(options.start_timeout, linger, unheard, options.grace)


def _server_command(count: int, extra: Sequence[str]) -> Callable[[int, int], list[str]]:
    def command(index: int, ready_fd: int) -> list[str]:
        base = [sys.executable, "-m", "kvstore_server", "--bind", "tcp://127.0.0.1:0"]
        own = ["--index", str(index), "--num-servers", str(count), "--ready-fd", str(ready_fd)]
        return [*base, *own, *extra]

    return command


def _import_flags(modules: Sequence[str]) -> list[str]:
    return [part for module in modules for part in ("--import", module)]


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _make_parser()
    options, unknown = parser.parse_known_args(arguments[:cut])
    command = arguments[cut + 1 :]
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}; the command of the workers comes after '--'")
    if not command:
        parser.error(
            "no command for the workers; give it after '--', as in: kvlaunch -n 2 -s 1 -- python train.py"
        )
    try:
        options.limits = _limits(options)
    except ConfigurationError as error:
        parser.error(str(error))
    return options, command


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlaunch",
        usage="kvlaunch -n W [-s S] [options] -- COMMAND [ARG ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--workers", type=_at_least(1), required=True, metavar="W", help="how many workers to start")
    add("-s", "--servers", type=_at_least(0), default=1, metavar="S", help="how many servers to start (1)")
    add(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="let every server import MODULE, for optimizers of your own; may be repeated",
    )
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="pass ARG to every server; may be repeated; --server-arg=--flag if it begins with a dash",
    )
    waits = parser.add_argument_group("waits, in seconds")
    waits.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="SEC",
        default=Limits.start,
        help="for the servers to be ready (%(default)g)",
    )
    waits.add_argument(
        "--linger",
        type=_seconds,
        metavar="SEC",
        help="after the first failure, for the others to report it in their own words "
        f"({Limits.linger:g}; KVSTORE_DEAD_AFTER and a little more if they can only notice it by silence, because a "
        "signal has killed a worker, or a server is gone)",
    )
    waits.add_argument(
        "--grace",
        type=_seconds,
        metavar="SEC",
        default=Limits.grace,
        help="between SIGTERM and SIGKILL (%(default)g)",
    )
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
