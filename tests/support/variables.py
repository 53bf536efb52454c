"""Make docs/variables.md: every flag of the commands, from their parsers, and every variable that the sources name.

python -m tests.support.variables > docs/variables.md
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvstore_server import cli, keygen, probe
from kvstore_server.failpoints import POINTS
from kvtrainer.common.env import DEFAULT_SECONDS
from kvtrainer.jobs import kvlaunch
from kvtrainer.watch import top

ROOT = Path(__file__).parents[2]
PREFIXES = (
    "KVSTORE|DMLC|MXNET|SLURM|OMPI|PMIX?|OMP|MKL|MALLOC|PYTHON|MASTER|LOCAL|WORLD|CUBLAS|RANK|TORCHELASTIC"
)
_NAMED = re.compile(rf'"((?:{PREFIXES})(?:[A-Z_]*[A-Z_])?)"')
_TWIN = re.compile(r" ?\[(KVSTORE_[A-Z_]+(?:=1)?)\]")

_MACHINE = {"--max-memory": "four fifths of the memory of the machine or container"}
"""Defaults that depend on where the page is made."""

WORKER = {
    "KVSTORE_RANK": ("", "rank of this worker, from 0"),
    "KVSTORE_NUM_WORKERS": ("", "number of workers"),
    "KVSTORE_ELASTIC": (
        "",
        "MIN..MAX: the number of workers may change in this range, and begins with KVSTORE_NUM_WORKERS",
    ),
    "KVSTORE_BACKUP_WORKERS": (
        "0",
        "with KVSTORE_ELASTIC: how many of the slowest workers each step leaves out, as long as MIN are left",
    ),
    "KVSTORE_LOCAL_RANK": ("", "number of this worker on its host; chooses the CUDA device; default: the launcher's"),
    "KVSTORE_ATTEMPT": ("", "how often the job was restarted; each attempt has its own tables on the servers"),
    "KVSTORE_WORKER_MEMORY": (
        "",
        "path of a file in memory that outlives this worker's processes, for what only this worker has; "
        "`kvlaunch --restart` sets it",
    ),
    "KVSTORE_RESTARTS": ("0", "how often this process alone was started again; its launcher or supervisor sets it"),
    "KVSTORE_SERVERS": ("", "`tcp://HOST:PORT` of all servers, separated by commas, or `@FILE` with one per line"),
    "KVSTORE_KEYS": ("", "directory of keys that servers want, or `off`; kvlaunch sets it"),
    "KVSTORE_KEY_NAME": ("", "whose key of that directory to use, if it has several"),
    "KVSTORE_TIMEOUT": ("", "longest wait for a round, a pull or a barrier, in seconds"),
    "KVSTORE_CONNECT_TIMEOUT": ("", "longest wait for the first answer of a server, in seconds"),
    "KVSTORE_DEAD_AFTER": ("", "seconds of silence after which a peer counts as dead"),
    "KVSTORE_SLOW_AFTER": ("", "seconds of waiting for other workers after which the log names them"),
    "KVSTORE_CAPTURE": ("1", "0: rounds that repeat are not [captured](protocol/rounds.md#captured-rounds)"),
    "KVSTORE_TRANSPORT": ("auto", "`shm` or `tcp` force one transport to servers of the same host"),
    "KVSTORE_LOG": ("warning", "`debug`: a line for each message and each transition of a round; others: servers only"),
    "KVSTORE_FAILPOINT": ("", "for tests: where this process dies, stops, pauses or raises; servers read it, too"),
    "KVSTORE_FAILPOINT_DIR": ("", "for tests: each leaves a file in this directory, and happens once in the job"),
    "KVSTORE_FAULTS": ("", "for tests: shares of messages to lose, delay and duplicate"),
    "KVSTORE_STALENESS": ("1", "how far a worker of `dist_ssp` may run ahead"),
    "KVSTORE_COMPAT": (
        "mxnet2",
        "`mxnet1`: Gluon's optimizers compute as in MXNet 1.9.1; an argument `compat` takes precedence",
    ),
    "KVSTORE_ALLOW_UNAUTHENTICATED_BIND": ("", "1: servers of an MXNet job may listen on public addresses"),
    "KVSTORE_PROGRESS": ("", "1: show progress of long operations without a terminal; `kvlaunch` may set it"),
    "MXNET_UPDATE_ON_KVSTORE": ("1", "0: a Trainer without `update_on_kvstore` runs the optimizer on the workers"),
    "DMLC_PS_VAN_TYPE": ("zmq", "`p3`: pushes of higher priority overtake others that wait to be sent"),
    "DMLC_PS_WATER_MARK": ("10", "with `p3`: most messages in flight to one server"),
}  # fmt: skip
"""What a worker reads → default, meaning; defaults of waits come from the product."""

LAUNCHERS = {
    "DMLC_ROLE": "`worker`, `server` or `scheduler`, as MXNet's launcher sets it",
    "DMLC_PS_ROOT_URI": "host of the scheduler",
    "DMLC_PS_ROOT_PORT": "port of the scheduler",
    "DMLC_NUM_WORKER": "number of workers",
    "DMLC_NUM_SERVER": "number of servers",
    "DMLC_NODE_HOST": "address at which other processes reach this one",
    "DMLC_WORKER_ID": "rank of this worker",
    "DMLC_SERVER_ID": "index of this server",
    "DMLC_RANK": "rank or index of this process, if neither of the two above is set",
    "DMLC_TASK_ID": "orders processes without a rank",
    "RANK": "torchrun: rank of this worker",
    "WORLD_SIZE": "torchrun: number of workers",
    "LOCAL_RANK": "torchrun: number of this worker on its host, which chooses the CUDA device; default: the rank",
    "MASTER_ADDR": "torchrun: host of rank 0 (`Strategy` over torch.distributed)",
    "MASTER_PORT": "torchrun: port of rank 0",
    "TORCHELASTIC_RESTART_COUNT": "torchrun on one host: how often it has restarted the workers",
    "TORCHELASTIC_RUN_ID": "torchrun: not read; `kvlaunch` does not pass it on",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun: not read; `kvlaunch` does not pass it on",
    "SLURM_RESTART_COUNT": "Slurm: how often the job was restarted",
    "SLURM_NODEID": "Slurm: not read; `kvlaunch` does not pass it on",
    "SLURM_PROCID": "Slurm: rank of this worker",
    "SLURM_NTASKS": "Slurm: number of workers",
    "SLURM_LOCALID": "Slurm: number of this worker on its host",
    "SLURM_NNODES": "Slurm: number of hosts; with one, `MASTER_ADDR` is not needed",
    "SLURM_JOB_NUM_NODES": "Slurm: the same, in older versions",
    "OMPI_COMM_WORLD_RANK": "Open MPI: rank of this worker",
    "OMPI_COMM_WORLD_SIZE": "Open MPI: number of workers",
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI: number of this worker on its host",
    "OMPI_COMM_WORLD_NODE_RANK": "Open MPI: not read; `kvlaunch` does not pass it on",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI: workers on this host; if these are all, `MASTER_ADDR` is not needed",
    "PMI_RANK": "MPICH, Intel MPI: rank of this worker",
    "PMI_SIZE": "MPICH, Intel MPI: number of workers",
    "PMIX_RANK": "PMIx: rank of this worker; PMIx does not give the number of workers",
}
"""What other launchers set."""

SET = {
    "OMP_NUM_THREADS": "`kvlaunch`: cores divided by workers; `Strategy` in a job: 1 for child processes",
    "MKL_NUM_THREADS": "`Strategy` in a job: 1 for child processes",
    "PYTHONUNBUFFERED": "`kvlaunch`: 1, so that lines appear when they are printed",
    "MALLOC_MMAP_THRESHOLD_": "`kvlaunch`: 1 GiB, so that freed memory is used again. If none of these three is "
    "set, servers, and workers that reach them through sockets, set glibc's limits themselves (32 MiB, 1 GiB, 64 MiB)",
    "MALLOC_TRIM_THRESHOLD_": "`kvlaunch`: 1 GiB, for the same reason",
    "MALLOC_TOP_PAD_": "`kvlaunch`: 64 MiB, for the same reason",
    "NOTIFY_SOCKET": "`kvstore-server --supervise`, systemd: where a server says that it listens, and hands over the "
    "descriptors of its memory; `kvlaunch` does not pass on this one and the next four",
    "FDSTORE": "the same: how many descriptors are kept for a server",
    "LISTEN_FDS": "the same: how many descriptors a server that was started again finds, from 3 on",
    "LISTEN_FDNAMES": "the same: their names, separated by colons",
    "LISTEN_PID": "the same: the process that they are for",
    "LOCAL_WORLD_SIZE": "`integrations.accelerate.join`: the number of workers on this host, "
    "which accelerate reads",
    "CUBLAS_WORKSPACE_CONFIG": "`Strategy` with `deterministic`: `:4096:8`",
}
"""What is set for processes, unless you have set it."""

_HEAD = """\
# Environment variables and flags

This page lists all flags of the commands and all environment variables. A flag takes precedence over its variable, and
an argument in code over the variable of the same meaning. `python -m tests.support.variables` generates the page from
the commands' parsers and the sources, and a test fails when it is outdated.
"""


def named_in_sources() -> set[str]:
    """The names of all environment variables that stand in the product's sources as strings."""
    sources = [path for package in ("kvtrainer", "kvstore_server") for path in (ROOT / package).rglob("*.py")]
    found = {name for path in sources for name in _NAMED.findall(path.read_text())}
    return found - {f"{prefix}_" for prefix in PREFIXES.split("|")}


def flags_of(parser: argparse.ArgumentParser) -> list[tuple[str, str, str, str]]:
    """Each flag of a command: its names, its variable, its default and what it does."""
    rows = []
    for action in parser._actions:
        if (
            action.help is argparse.SUPPRESS
            or not action.option_strings
            or action.dest in ("help", "version")
        ):
            continue
        text = (action.help or "").replace(" (%(default)g)", "")
        twin = _TWIN.search(text)
        value = f" {action.metavar or action.dest.upper()}" if action.nargs != 0 else ""
        name = ", ".join(f"`{one}{value}`" for one in action.option_strings)
        rows.append((name, f"`{twin[1]}`" if twin else "", _default(action), _TWIN.sub("", text)))
    return rows


def _default(action: argparse.Action) -> str:
    for flag in action.option_strings:
        if flag in _MACHINE:
            return _MACHINE[flag]
    if action.default is None or action.default is False or action.default in ([], "") or action.required:
        return ""
    return f"`{action.default:g}`" if isinstance(action.default, float) else f"`{action.default}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def page() -> str:
    """The text of docs/variables.md. The environment of this process must set none of the variables."""
    columns = ("flag", "variable", "default", "what it does")
    commands = [
        ("kvlaunch", "starts servers and workers of one job", kvlaunch._make_parser()),
        ("kvstore-server", "is one server", cli.build_server_parser({})),
        ("kvstore-server keygen", "makes keys", keygen.build_keygen_parser()),
        ("python -m kvstore_server.probe", "asks a server whether it answers", probe.build_probe_parser()),
        ("kvtop", "shows a running job", top._make_top_parser()),
    ]
    parts = [_HEAD]
    for name, what, parser in commands:
        parts.append(f"## `{name}`\n\n`{name}` {what}.\n\n{_table(columns, list(flags_of(parser)))}")
    seconds = {name: f"{value:g}" for name, value in DEFAULT_SECONDS.items()}
    own = [
        (f"`{n}`", f"`{seconds.get(n, default)}`".replace("``", ""), what)
        for n, (default, what) in WORKER.items()
    ]
    others = [(f"`{name}`", what) for name, what in LAUNCHERS.items()]
    made = [(f"`{name}`", what) for name, what in SET.items()]
    read = _table(("variable", "default", "meaning"), list(own))
    parts.append(f"## Read by workers\n\nAn empty variable counts as not set.\n\n{read}")
    parts.append(
        "## Set by other launchers\n\nRank and number of workers come from one launcher, the first with any variable "
        "set, in this order: `KVSTORE_*`,\n`DMLC_*`, torchrun, Open MPI, Slurm, PMI, PMIx.\n\n"
        f"{_table(('variable', 'meaning'), list(others))}"
    )
    parts.append(
        "## Set for you\n\nThese are set unless you have set them.\n\n"
        f"{_table(('variable', 'set by, and value'), list(made))}"
    )
    points = [(f"`{name}`", f"{when[0].upper()}{when[1:]}.") for name, when in POINTS.items()]
    parts.append(
        "## Failpoints\n\nThe names that `KVSTORE_FAILPOINT` takes, and when a process gets there "
        "([Testing recovery](fault_injection.md)).\n\n"
        f"{_table(('name', 'when'), list(points))}"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
