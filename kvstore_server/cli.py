"""The command line of a server: flags and environment variables in, an exit code out.

Exit codes: 0 drained after SIGTERM or SIGINT, 1 a server-side failure, 2 wrong flags.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import gc
import importlib
import logging
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, NoReturn

import torch

from kvstore_server import __version__, check
from kvstore_server.descriptors import allow_descriptors
from kvstore_server.engine.memory import keep_free_memory, memory_limit
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import KVStoreError
from kvstore_server.failpoints import arm_failpoints
from kvstore_server.keys import KEYS, read_server_keys
from kvstore_server.keys import OFF as KEYS_OFF
from kvstore_server.log_limit import SLOW_AFTER, limited_log
from kvstore_server.notify import READY, notify
from kvstore_server.optimizer.base import capability
from kvstore_server.optimizer.registry import preload_optimizers
from kvstore_server.processes import DEAD_AFTER
from kvstore_server.protocol.frames import KEYS_PER_MESSAGE
from kvstore_server.server import OFF, PROCESS, Server, ServerOptions, make_server

_log = logging.getLogger("kvstore_server")

_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:]+\]|[^:/\[\]]+):(?P<port>[0-9]{1,5})")


def _parse_snapshot_flag(text: str) -> SnapshotPeriod:
    try:
        return SnapshotPeriod(*check.rounds_or_seconds(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of rounds nor, like 30s, one of seconds"
        ) from None


_VALUES: tuple[tuple[str, str, Any, Callable[[str], Any], str], ...] = (
    ("--bind", "KVSTORE_BIND", "tcp://127.0.0.1:0", str, "address to listen on; port 0 lets the system choose"),
    ("--index", "KVSTORE_SERVER_INDEX", 0, int, "which server of the job this is, from 0"),
    ("--num-servers", "KVSTORE_NUM_SERVERS", 1, int, "how many servers the job has"),
    ("--dead-after", "KVSTORE_DEAD_AFTER", DEAD_AFTER, float, "seconds of silence after which a worker counts as lost"),
    ("--rejoin-timeout", "KVSTORE_REJOIN_TIMEOUT", EngineConfig.rejoin_timeout, float,
     "seconds that workers wait for a process that takes over the rank of one that died and called Trainer.resume"),
    ("--slow-after", "KVSTORE_SLOW_AFTER", SLOW_AFTER, float, "seconds of waiting for a worker until the log names it"),
    ("--drain-timeout", "KVSTORE_DRAIN_TIMEOUT", 10.0, float, "seconds that rounds get to finish after SIGTERM"),
    ("--max-table-bytes", "KVSTORE_MAX_TABLE_BYTES", 1 << 40, int, "largest table, over all servers, that is accepted"),
    ("--max-memory", "KVSTORE_MAX_MEMORY", memory_limit() // 5 * 4, int,
     "bytes for weights, sums and optimizer state of all jobs; memory shared with workers of the host gets what is "
     "left of it"),
    ("--spill-dir", "KVSTORE_SPILL_DIR", "", str,
     "directory on a local disk for rows of hash tables (kvtrainer.Embedding), so that they may be larger than memory; "
     "they do not count against --max-memory then"),
    ("--max-namespaces", "KVSTORE_MAX_NAMESPACES", EngineConfig.max_namespaces, int,
     "how many Trainers and stores the server accepts at the same time"),
    ("--forget-after", "KVSTORE_FORGET_AFTER", EngineConfig.forget_after, float,
     "seconds of silence of all workers of a job after which its weights are freed"),
    ("--max-message-keys", "KVSTORE_MAX_MESSAGE_KEYS", KEYS_PER_MESSAGE, int,
     "how many keys, slices or tables one message may name"),
    ("--max-message-bytes", "KVSTORE_MAX_MESSAGE_BYTES", ServerOptions.max_message_bytes, int,
     "largest message with the optimizer state of one key, in bytes"),
    ("--spread-from", "KVSTORE_SPREAD_FROM", 1 << 20, int,
     "a Trainer's weights of fewer bytes lie on one server, not on all, if the servers listen for their own host only"),
    ("--http", "KVSTORE_HTTP", "", str, "serve a page that shows what this server does at this HOST:PORT, with "
     "/metrics for Prometheus, in a separate process"),
    ("--threads", "KVSTORE_THREADS", 1, int, "threads for sums and updates; more than one helps on idle cores only"),
    ("--durability", "KVSTORE_DURABILITY", OFF, str,
     "process: weights, optimizer state and rounds outlive this process if a supervisor keeps its memory (--supervise, "
     "kvlaunch or systemd), and the next process continues with them; off: they end with it"),
    ("--restart-timeout", "KVSTORE_RESTART_TIMEOUT", ServerOptions.restart_timeout, float,
     "seconds that workers wait for a restart of a server with --durability process or --state-dir"),
    ("--state-dir", "KVSTORE_STATE_DIR", "", str,
     "directory for snapshots, from which a job goes on when a host and the memory of its servers are lost; each "
     "server uses a directory server-INDEX in it"),
    ("--snapshot-every", "KVSTORE_SNAPSHOT_EVERY", "50", _parse_snapshot_flag,
     "with --state-dir: take a snapshot after this many rounds of a job whose workers call Trainer.resume, or with a "
     "number like 30s after as many seconds; 0: only when a worker calls kv.save"),
    ("--keys", KEYS, "", str,
     "directory of keys, which kvstore-server keygen makes: serve only clients that it lists, and encrypt all traffic"),
    ("--log", "KVSTORE_LOG", "warning", str, 
     "debug (a line for each message and each transition of a round), info, warning or error; to standard error"),
)  # fmt: skip
"""Flag, environment variable, default, type and help text."""


def build_server_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of the flags.

    Each has an environment variable that sets its default, but for --ready-fd and those of a supervisor.
    """
    parser = argparse.ArgumentParser(
        prog="kvstore-server",
        description="Hold weights and optimizer state for the workers of a training job, until SIGTERM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for flag, variable, default, kind, explanation in _VALUES:
        shown = f"{explanation} [{variable}]"
        # argparse converts a string default like an argument, so a bad variable is a usage error, too.
        parser.add_argument(flag, type=kind, default=environ.get(variable, default), help=shown)
    add, told = parser.add_argument, environ.get
    add(
        "--import", dest="imports", action="append", metavar="MODULE",
        default=[name for name in told("KVSTORE_IMPORT", "").split(",") if name],
        help="import this module first, so that optimizers and commands that it registers are known; may be repeated "
        "[KVSTORE_IMPORT]",
    )  # fmt: skip
    add(
        "--allow-mixed-cpu", action="store_true", default=told("KVSTORE_ALLOW_MIXED_CPU", "") == "1",
        help="accept workers whose CPU has another instruction set; the last bits of results may differ "
        "[KVSTORE_ALLOW_MIXED_CPU=1]",
    )  # fmt: skip
    add(
        "--no-capture", action="store_true", default=told("KVSTORE_CAPTURE", "") == "0",
        help="decode each message, also in rounds that repeat; slower, with the same bits [KVSTORE_CAPTURE=0]",
    )  # fmt: skip
    add(
        "--allow-unauthenticated-bind", action="store_true",
        default=told("KVSTORE_ALLOW_UNAUTHENTICATED_BIND", "") == "1",
        help="without --keys: listen on an address that other hosts can reach, although everybody there can then read "
        "and change all weights; for networks that you trust only [KVSTORE_ALLOW_UNAUTHENTICATED_BIND=1]",
    )  # fmt: skip
    add(
        "--allow-public-bind", action=check.RemovedFlag, nargs=0,
        const="make keys (kvstore-server keygen DIR) and give --keys DIR, or use --allow-unauthenticated-bind on a "
        "network that you trust", help=argparse.SUPPRESS,
    )  # fmt: skip
    add(
        "--ready-fd", type=int,
        help="write the address and a newline to this file descriptor once the server listens, then close it; for "
        "programs that start servers, so it has no variable in the environment",
    )  # fmt: skip
    add(
        "--supervise", action="store_true",
        help="run the server as the child of a small process that starts it again when it dies, at the same address; "
        "the small process also holds the server's memory (KVSTORE_DURABILITY=process, unless you have set it)",
    )  # fmt: skip
    add(
        "--restarts", type=int, metavar="N",
        help="with --supervise: start it again at most N times; by default until it dies ten times in a row soon after "
        "its start",
    )  # fmt: skip
    add("--version", action="version", version=__version__)
    return parser


def main(argv: Sequence[str] | None = None, announce: Callable[[Server], None] | None = None) -> int:
    """Run one server until SIGTERM or SIGINT; return its exit code.

    `announce` is called once the server listens, instead of printing the address to standard output or --ready-fd.
    """
    # 1. Flags, logging and limits of the process.
    parser = build_server_parser(os.environ)
    flags = parser.parse_args(argv)
    if flags.supervise:
        # The supervisor is a program of its own, without all that was imported here.
        arguments = sys.argv[1:] if argv is None else argv
        os.execv(sys.executable, [sys.executable, "-m", "kvstore_server", *arguments])
    _check_flags(parser, flags)
    logging.basicConfig(
        level=flags.log.upper(),
        format=f"%(asctime)s server {flags.index} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    torch.set_num_threads(flags.threads)
    allow_descriptors()  # each worker needs five
    keep_free_memory()
    with limited_log():
        try:
            arm_failpoints(os.environ, "server", flags.index)
            # 2. Load the user's modules first, because they register optimizers and commands.
            sys.path.insert(0, os.getcwd())
            for module in flags.imports:
                importlib.import_module(module)
            preload_optimizers()
            options = ServerOptions(
                flags.bind,
                flags.drain_timeout,
                max_message_bytes=flags.max_message_bytes,
                durability=flags.durability,
                restart_timeout=flags.restart_timeout,
                state_dir=flags.state_dir,
                snapshot_every=flags.snapshot_every,
                spill_dir=flags.spill_dir,
                captures=not flags.no_capture,
                keys=read_server_keys(flags.keys) if flags.keys not in ("", KEYS_OFF) else None,
            )
            if options.keys is None and not _is_bind_flag_local(flags.bind):
                _log.warning(
                    "unauthenticated: everybody who reaches %s can read and change all weights; --keys lets only those "
                    "in who have a key",
                    flags.bind,
                )
            numbers = {one.name: getattr(flags, one.name, one.default) for one in fields(EngineConfig)}
            numbers["restart_timeout"] = 0.0  # unless the state outlives this process
            own = {"server": flags.index, "run_id": secrets.randbits(62) | 1, "capability": capability()}
            if not _is_bind_flag_local(flags.bind):
                own["spread_from"] = 0
            server = make_server(EngineConfig(**{**numbers, **own}), options, environ=os.environ)
        except (KVStoreError, ImportError) as error:
            is_missing = isinstance(error, ModuleNotFoundError)
            advice = "; is its folder the current one, or on PYTHONPATH?" if is_missing else ""
            print(f"kvstore-server: {error}{advice}", file=sys.stderr)
            return 1
        # 3. Serve.
        return _serve_until_signal(
            server, flags, announce or (lambda server: _announce_endpoint(server.endpoint, flags.ready_fd))
        )


def run_server_cli() -> NoReturn:
    """Run a server, then end the process like Python does but without unloading modules."""
    # With torch loaded, unloading takes so long on a busy machine that supervisors would kill the server for it.
    code = main()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve_until_signal(server: Server, flags: argparse.Namespace, announce: Callable[[Server], None]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.request_stop())
    # Imported objects live as long as the process; freeze them, or every full collection would traverse them again.
    gc.collect()
    gc.freeze()
    try:
        announce(server)
        with suppress(OSError):  # the process that started this one may be gone
            notify(os.environ, READY)
        with _serve_page_for_flags(server, flags):
            server.run()
    except Exception:
        _log.exception("the server failed")
        return 1
    finally:
        server.close()
    return 0


@contextmanager
def _serve_page_for_flags(server: Server, flags: argparse.Namespace) -> Iterator[None]:
    """Serve a status page from another process, if --http is given; a thread of this process would delay sums."""
    if not flags.http:
        yield
        return
    public = ["--allow-unauthenticated-bind"] * flags.allow_unauthenticated_bind
    with_us = ["--with-parent", str(os.getpid()), "--http", flags.http, *public]
    # Started by module name, so that a server works without the rest of the package.
    command = [sys.executable, "-m", "kvtrainer.watch.top", *with_us, server.endpoint]
    environ = {**os.environ, KEYS: flags.keys} if flags.keys else None
    page = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ)
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def _check_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    if flags.num_servers < 1 or not 0 <= flags.index < flags.num_servers:
        parser.error(f"--index {flags.index} is not one of {flags.num_servers} servers")
    for flag, _, _, kind, _ in _VALUES:
        value = getattr(flags, flag.strip("-").replace("-", "_"))
        if kind in (int, float) and flag != "--index" and not value > 0:  # so NaN is refused, too
            parser.error(f"{flag} must be above 0, got {value}")
    if flags.max_message_keys < KEYS_PER_MESSAGE:
        least = f"the {KEYS_PER_MESSAGE} that workers send"
        parser.error(f"--max-message-keys must be at least {least}, got {flags.max_message_keys}")
    if flags.durability not in (OFF, PROCESS):
        parser.error(f"--durability must be {OFF} or {PROCESS}, got {flags.durability!r}")
    if flags.log.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        parser.error(f"--log must be debug, info, warning or error, got {flags.log!r}")
    address = _ADDRESS.fullmatch(flags.bind)
    if address is None or int(address["port"]) > 65535:
        parser.error(f"--bind {flags.bind} is not an address of the form tcp://HOST:PORT")
    has_keys = flags.keys not in ("", KEYS_OFF)
    if flags.http:
        host, _, port = flags.http.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            parser.error(f"--http {flags.http} is not HOST:PORT")
        if not (has_keys or flags.allow_unauthenticated_bind or check.is_loopback(host.strip("[]"))):
            parser.error(
                f"--http {flags.http} can be reached from other hosts; add --keys DIR, or --allow-unauthenticated-bind "
                "if everybody there may see it"
            )
    if flags.ready_fd is not None and (problem := _ready_fd_flag_problem(flags.ready_fd)) is not None:
        parser.error(f"--ready-fd {flags.ready_fd} {problem}")
    if not (has_keys or flags.allow_unauthenticated_bind or _is_bind_flag_local(flags.bind)):
        parser.error(
            f"--bind {flags.bind} can be reached from other hosts, and everybody there could read and change all "
            "weights; make keys (kvstore-server keygen DIR) and add --keys DIR, or add --allow-unauthenticated-bind on "
            "a network that you trust"
        )


def _is_bind_flag_local(bind: str) -> bool:
    """Return whether an address of the accepted form can be reached only from this host."""
    address = _ADDRESS.fullmatch(bind)
    return address is not None and check.is_loopback(address["host"])


def _ready_fd_flag_problem(ready_fd: int) -> str | None:
    """Return why a file descriptor cannot be written to; None if it can."""
    try:
        mode = fcntl.fcntl(ready_fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError):
        return "is not open in this process; the program that starts the server must pass it (pass_fds)"
    return "is open for reading only; pass the writing end of the pipe" if mode == os.O_RDONLY else None


def _announce_endpoint(endpoint: str, ready_fd: int | None) -> None:
    if ready_fd is None:
        print(f"kvstore-server: listening on {endpoint}", flush=True)
        return
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(endpoint + "\n")
