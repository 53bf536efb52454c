"""`kvlaunch`: the command line that starts servers and workers of one job, on this machine or over ssh.

This module only turns arguments into the commands and the environment of processes; `JobLauncher` (`job.py`) starts
them, watches them, starts again what may be restarted, and ends them.

- Everything is checked before the first process is started: wrong usage exits with code 2. Otherwise the exit code is
  that of the first process that failed.
- Where an option has a variable (in brackets in --help), the option comes first. Options that servers and workers read
  for themselves are passed on as variables (`_durability_variables`), so that scripts see what the launcher was told.
- What follows the command's name belongs to the command, even if it looks like an option.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvstore_server import __version__
from kvstore_server.check import RemovedFlag, is_loopback, rounds_or_seconds
from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import KEYS, OFF
from kvstore_server.supervisor import DURABILITIES, DURABILITY
from kvtrainer.common.env import (
    DEAD_AFTER,
    PROGRESS,
    REJOIN_TIMEOUT,
    SNAPSHOT_EVERY,
    STATE_DIR,
    parse_range,
    read_timeout,
)
from kvtrainer.jobs.job import (
    TO_REPORT,
    JobLauncher,
    JobTimeouts,
    Remote,
    bind_addresses,
    parse_hosts,
    place_servers,
    place_workers,
)
from kvtrainer.jobs.job_keys import JobKeys
from kvtrainer.jobs.processes import inherited_environment, server_command

_DESCRIPTION = """\
Start parameter servers and workers, on this machine or on the hosts of a file, and end them together.

Servers start first; when all are ready, COMMAND is started once for every worker. When a worker fails, or a
server exits before the workers are done, the others get a while to end by themselves and are then stopped, and
kvlaunch exits with the code of that first failure (128 + n for signal n). With --restart such a process is
started again instead, in the same place, unless it exits with code 75, which means that another one has taken
its place. When all workers are done, the servers are stopped in good order. No process is left behind, even
when kvlaunch itself is killed.
"""

_EPILOG = """\
environment that a worker finds:
  KVSTORE_RANK         which worker it is, from 0
  KVSTORE_NUM_WORKERS  how many workers there are
  KVSTORE_ELASTIC      with -n MIN..MAX: this range
  KVSTORE_BACKUP_WORKERS  with --backup-workers: this number
  KVSTORE_LOCAL_RANK   which worker of its host it is, from 0
  KVSTORE_SERVERS      comma-separated tcp://HOST:PORT of the servers; unset with -s 0
  OMP_NUM_THREADS      cores divided by workers, at least 1, unless you have set it
  KVSTORE_RESTARTS     with --restart: how often this worker was started again, 0 at first
  PYTHONUNBUFFERED     1, unless you have set it
  MALLOC_…             glibc keeps up to 1 GiB of freed memory for reuse, unless you have set these variables
It does not find what another launcher (torchrun, Slurm, MPI) has said of kvlaunch's own place: RANK, LOCAL_RANK,
SLURM_PROCID, SLURM_LOCALID and so on; --env passes them on all the same.

environment that kvlaunch leaves to you, and that workers read:
  KVSTORE_TIMEOUT          longest wait for a round, a pull or a barrier, in seconds (600)
  KVSTORE_CONNECT_TIMEOUT  longest wait for the first answer of a server, in seconds (30)
  KVSTORE_DEAD_AFTER       a peer counts as dead after this many seconds of silence (60); servers read it too
  KVSTORE_SLOW_AFTER       a wait for other workers that takes longer is logged, in seconds (10); servers read it too
  KVSTORE_TRANSPORT        auto: through shared memory on the same host; shm: fail without it; tcp: never use it
  KVSTORE_CAPTURE          0: rounds that repeat are not captured; slower, with the same bits
  KVSTORE_LOG              debug: a line for each message and each transition of a round; servers read it too

hosts: a line of HOSTFILE is HOST, HOST slots=N or HOST:N, where HOST may be USER@HOST; '#' begins a comment.
Every host takes as many consecutive ranks as it has slots (1), in the order of the file, starting over when all slots
are taken; servers go to one host after the other. Commands run over ssh, without a password, in the directory
of the same path; kvtrainer must be installed there for the same {python}. They get KVSTORE_…, MALLOC_…,
OMP_NUM_THREADS and what --env names, which are visible in the list of processes, and no other variables.

output: each line begins with [w0] for worker 0, [s1] for server 1, and so on; standard output and standard
error stay apart. Commands read no standard input.

example:
  kvlaunch -n 4 -s 2 python train.py --epochs 3
  kvlaunch -n 8 -s 4 -H hosts --allow-unauthenticated-bind --env DATA=/data -- python train.py
All that follows COMMAND belongs to it; a '--' before it is needed only where its name begins with a dash.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code. Blocks; wrong usage raises SystemExit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # 1. Make the servers' commands and the environment.
    options, command = _parse_arguments(arguments)
    imports = [part for module in options.imports for part in ("--import", module)]
    flags = [*options.server_arg, *imports]
    # A server without durable memory would come back empty. Its death ends the job, unless there are snapshots.
    of_servers = 0 if options.durability == "off" else options.restart
    servers = [
        server_command(index, options.servers, options.grace, ["--bind", bind, *flags], of_servers)
        for index, bind in enumerate(options.binds)
    ]
    environ = {**inherited_environment(os.environ), **options.env, **_durability_variables(options)}
    # 2. Tell the user what is unexpected about the command, and what is about to start.
    if options.remote is None and (other := _another_python(command[0], environ)):
        print(
            f"kvlaunch: {command[0]!r} is {other}, which is outside kvlaunch's environment; to use that environment, "
            f"run {sys.executable}",
            file=sys.stderr,
        )
    if sys.stderr.isatty():
        numbers = (
            f"{options.servers} server{'s' * (options.servers != 1)}" if options.servers else "no servers"
        )
        times = f"{options.workers} time{'s' * (options.workers != 1)}"
        print(
            f"kvlaunch: starts {numbers}, then {times}: {shlex.join(command)}",
            file=sys.stderr,
        )
        environ.setdefault(PROGRESS, "1")
    # 3. Run the job.
    viewer: list[str] = []
    if options.dashboard is not None:
        viewer = [sys.executable, "-m", "kvtrainer.watch.top", "--http", options.dashboard]
        viewer += ["--allow-unauthenticated-bind"] if options.allow_unauthenticated_bind else []
    limits, remote, restarts = options.limits, options.remote, options.restart
    of_lost = options.restart if environ.get(STATE_DIR) else 0
    try:
        keys = JobKeys(environ, options.keys) if options.servers else None
        if keys is not None and options.remote is not None:
            keys.files_for(is_server=True)  # refused before anything starts
    except ConfigurationError as error:
        print(f"kvlaunch: {error}", file=sys.stderr)
        return 2
    launcher = JobLauncher(
        command,
        options.workers,
        servers,
        environ,
        limits,
        remote,
        viewer,
        restarts,
        of_lost,
        options.elastic,
        options.backup_workers,
        keys=keys,
    )
    try:
        return launcher.run()
    finally:
        if keys is not None:
            keys.close()


def _durability_variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of options that servers and workers read for themselves."""
    given = {
        DURABILITY: options.durability,
        REJOIN_TIMEOUT: options.rejoin_timeout,
        STATE_DIR: options.state_dir,
        SNAPSHOT_EVERY: options.snapshot_every,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _another_python(command: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of the workers' `python` if it belongs to another environment, else None."""
    found = (
        shutil.which(command, path=environ.get("PATH")) if re.fullmatch(r"python[\d.]*", command) else None
    )
    if found is None or os.path.samefile(os.path.dirname(found), os.path.dirname(sys.executable)):
        return None
    # Ask it for its prefix, because the name may be that of a script that chooses an interpreter.
    ask = [found, "-c", "import sys; print(sys.prefix)"]
    try:
        told = subprocess.run(ask, env=environ, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None  # starting it will show what is wrong
    return None if told.stdout.strip() in ("", sys.prefix) else found


def _set_hosts(options: argparse.Namespace) -> None:
    """Set where processes run (`remote`) and servers listen (`binds`), and tell servers if that may be public."""
    options.remote = None
    options.binds = ["tcp://127.0.0.1:0"] * options.servers
    if options.hostfile is None:
        return
    try:
        text = Path(options.hostfile).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read the host file {options.hostfile}: {error}") from None
    hosts = parse_hosts(text, options.hostfile)
    workers, servers = place_workers(hosts, options.workers), place_servers(hosts, options.servers)
    remote_hosts = [host.name for host in (*workers, *servers) if not is_loopback(host.name)]
    if remote_hosts and servers and not options.has_keys:
        if not options.allow_unauthenticated_bind:
            raise ConfigurationError(
                f"with {remote_hosts[0]} in the job, servers must listen where other hosts reach them, and without "
                "keys everybody there could read and change all weights; let kvlaunch make keys, or add "
                "--allow-unauthenticated-bind on a network that you trust"
            )
        options.server_arg.append("--allow-unauthenticated-bind")
    options.binds = bind_addresses(servers, bool(remote_hosts))
    options.remote = Remote(workers, servers, options.grace, shlex.split(options.ssh), tuple(options.env))


def _parse_environment(given: Sequence[str]) -> dict[str, str]:
    environ = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not (equals or name in os.environ):
            raise ConfigurationError(
                f"--env {text!r:.80} is not NAME=VALUE, or the NAME of a variable that is set"
            )
        environ[name] = value if equals else os.environ[name]
    return environ


def _parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    # 1. Separate kvlaunch's own options from the command.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = _make_parser()
    options, unknown = parser.parse_known_args(arguments[:cut])
    # A '--' after the beginning of the command belongs to the command.
    command = options.command + arguments[cut:] if options.command else arguments[cut + 1 :]
    # 2. Check what argparse cannot.
    if unknown:
        parser.error(
            f"unknown arguments: {' '.join(unknown)}; options of the workers' command come after its name"
        )
    if not command:
        parser.error("no command for the workers; it comes last, as in: kvlaunch -n 2 -s 1 python train.py")
    if command[0].endswith(".py") and options.hostfile is None and shutil.which(command[0]) is None:
        parser.error(f"{command[0]} is no program that can be started; say: python {command[0]}")
    if options.snapshot_every and not options.state_dir:
        parser.error("--snapshot-every needs --state-dir, where snapshots are written")
    if options.dashboard is not None and not options.servers:
        parser.error("--dashboard shows what servers say, and there are none with -s 0")
    # 3. Compute limits, environment and hosts.
    options.elastic = None if isinstance(options.workers, int) else options.workers
    if options.backup_workers and options.elastic is None:
        parser.error(
            "--backup-workers needs -n MIN..MAX: each step goes on with fewer workers, but with MIN at least"
        )
    if options.elastic is not None:
        options.workers = options.elastic[1]
        if options.backup_workers >= options.workers:
            parser.error(
                f"--backup-workers {options.backup_workers} leaves none of {options.workers} workers to a step"
            )
        if not options.servers:
            parser.error(
                "-n MIN..MAX needs servers, which decide about the members, and there are none with -s 0"
            )
        names = [one.partition("=")[0] for one in options.env]
        is_given = options.rejoin_timeout is not None or REJOIN_TIMEOUT in {*names, *os.environ}
        if not is_given and not options.restart:
            options.rejoin_timeout = 0.001  # nobody starts a worker again, so the others need not wait
    try:
        linger = unheard = JobTimeouts.linger if options.linger is None else options.linger
        if options.linger is None and options.servers:
            unheard = read_timeout(os.environ, DEAD_AFTER) + TO_REPORT
        options.limits = JobTimeouts(options.start_timeout, linger, unheard, options.grace)
        options.env = _parse_environment(options.env)  # texts until here, names and values from now on
        options.has_keys = (options.keys or {**os.environ, **options.env}.get(KEYS, "")) != OFF
        _set_hosts(options)
    except ConfigurationError as error:
        parser.error(str(error))
    return options, command


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlaunch",
        usage="kvlaunch -n W [-s S] [options] [--] COMMAND [ARG ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("{python}", sys.executable),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # In the groups that follow, `add` adds to that group, under its heading in --help.
    add = parser.add_argument
    add(
        "-n",
        "--workers",
        type=_parse_workers,
        required=True,
        metavar="W",
        help="how many workers to start; MIN..MAX starts MAX, and the job goes on as long as MIN are left",
    )
    add(
        "--backup-workers",
        type=_integer_at_least(0),
        default=0,
        metavar="K",
        help="with -n MIN..MAX: each step goes on without the K slowest workers, but with MIN at least",
    )
    add(
        "-s",
        "--servers",
        type=_integer_at_least(0),
        default=1,
        metavar="S",
        help="how many servers to start (1)",
    )
    add(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="let every server import MODULE, for optimizers of your own; may be repeated",
    )  # fmt: skip
    add(
        "--server-arg", action="append", default=[], metavar="ARG",
        help="pass ARG to every server; may be repeated; --server-arg=--flag if it begins with a dash",
    )  # fmt: skip
    add(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="set a variable for all processes, or pass it on to other hosts; may be repeated",
    )  # fmt: skip
    add(
        "--dashboard", type=_parse_bind_address, metavar="[HOST:]PORT",
        help="serve a page that shows the job, as kvtop --http does; only to this host unless HOST says otherwise; "
        "port 0 takes a free one",
    )  # fmt: skip
    add = parser.add_argument_group("processes that die").add_argument
    add(
        "--restart", type=_integer_at_least(0), default=0, metavar="N",
        help="start each worker and each server again when it is killed or fails, at most N times (0); workers go on "
        "by Trainer.resume(), servers with the weights that they had",
    )  # fmt: skip
    add(
        "--durability", choices=DURABILITIES, default=os.environ.get(DURABILITY) or None,
        help="process: what servers hold outlives their processes, which --restart needs and then chooses; off: the "
        "death of a server ends the job [KVSTORE_DURABILITY]",
    )  # fmt: skip
    add(
        "--state-dir", metavar="DIR", default=os.environ.get(STATE_DIR) or None,
        help="let servers write snapshots to this directory of their hosts, from which a job goes on when their memory "
        "is lost; with --restart by itself, otherwise when it is started again [KVSTORE_STATE_DIR]",
    )  # fmt: skip
    add(
        "--snapshot-every", type=_parse_period, metavar="N",
        default=os.environ.get(SNAPSHOT_EVERY) or None,
        help="with --state-dir: take a snapshot after this many rounds (50), or with a number like 30s after as many "
        "seconds; 0: only when a worker calls kv.save [KVSTORE_SNAPSHOT_EVERY]",
    )  # fmt: skip
    add(
        "--rejoin-timeout", type=_parse_seconds, metavar="SEC",
        help="how long servers and the other workers wait for one that is started again [KVSTORE_REJOIN_TIMEOUT]",
    )  # fmt: skip
    add = parser.add_argument_group("other hosts").add_argument
    add("-H", "--hostfile", metavar="FILE", help="start all processes over ssh on the hosts of this file")
    add("--ssh", default="ssh", metavar="COMMAND", help="the program to use (ssh), with its arguments")
    add(
        "--allow-unauthenticated-bind", action="store_true",
        default=os.environ.get("KVSTORE_ALLOW_UNAUTHENTICATED_BIND", "") == "1",
        help="with --keys off: let servers listen on addresses that other hosts can reach, although everybody there "
        "can then read and change all weights; for networks that you trust only [KVSTORE_ALLOW_UNAUTHENTICATED_BIND=1]",
    )  # fmt: skip
    add(
        "--allow-public-bind", action=RemovedFlag, nargs=0,
        const="kvlaunch makes keys for the job, with which servers may listen anywhere; with --keys off use "
        "--allow-unauthenticated-bind on a network that you trust", help=argparse.SUPPRESS,
    )  # fmt: skip
    add = parser.add_argument_group("who may use the servers").add_argument
    add(
        "--keys", metavar="DIR", default="",
        help="a directory of keys, which kvstore-server keygen makes; by default keys are made for this job, and other "
        "users get no answer; off: everybody who reaches the servers can use them [KVSTORE_KEYS]",
    )  # fmt: skip
    add = partial(
        parser.add_argument_group("waits, in seconds").add_argument, type=_parse_seconds, metavar="SEC"
    )
    add(
        "--start-timeout",
        default=JobTimeouts.start,
        help="how long the servers may take to listen (%(default)g)",
    )
    # It has no default here, because that depends on how the others can notice the failure.
    add(
        "--linger",
        help="how long to wait after the first failure, so that other processes can report it, too "
        f"({JobTimeouts.linger:g}; slightly more than KVSTORE_DEAD_AFTER if they can notice it only by silence, "
        "because a signal has killed a worker or a server is gone)",
    )
    add(
        "--grace",
        default=JobTimeouts.grace,
        help="how long to wait between SIGTERM and SIGKILL (%(default)g)",
    )
    parser.add_argument("--version", action="version", version=__version__)
    # REMAINDER, so that options behind the command's name are the command's.
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _integer_at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _parse_workers(text: str) -> int | tuple[int, int]:
    if ".." not in text:
        return _integer_at_least(1)(text)
    try:
        return parse_range(text, "the number of workers")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_bind_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not [HOST:]PORT")
    return f"{host or '127.0.0.1'}:{port}"


def _parse_period(text: str) -> str:
    try:
        rounds_or_seconds(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of rounds nor, like 30s, one of seconds"
        ) from None
    return text


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
