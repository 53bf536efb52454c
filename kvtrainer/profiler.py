"""Profiling a worker and the servers that it uses: MXNet's `mx.profiler`, as an object of the store or the Trainer.

kv.profiler.set_config(filename="profile.json", profile_process="server")
kv.profiler.set_state("run", profile_process="server")
...
kv.profiler.set_state("stop", profile_process="server")  # writes rank0_profile.json, rank1_profile.json, …
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_server.engine import MAX_WORKERS
from kvstore_server.errors import ConfigurationError
from kvstore_server.tracing import CALLS, CATEGORIES, ROUND_LANE, ROUNDS, Trace, chrome_trace
from kvtrainer.comm.client import Client
from kvtrainer.comm.tracing import lane_name
from kvtrainer.errors import TraceFileError, file_error

WORKER, SERVER = "worker", "server"
_PROCESSES = (WORKER, SERVER)


_DEFAULTS: dict[str, bool] = {
    "profile_all": False, "profile_api": True, "profile_imperative": True, "profile_symbolic": True,
    "profile_memory": True, "continuous_dump": False, "aggregate_stats": False,
}  # fmt: skip
"""MXNet's switches; the first three have an effect."""
_OTHERS = ("filename", "dump_period", "gpu_memory_profile_filename_prefix")


@dataclass(frozen=True)
class ProfileConfig:
    """Where a trace goes, and what is in it.

    Args:
        path: The file that was named; see `file_of`.
        categories: Of events, as `kvstore_server.tracing` has them.
    """

    path: Path
    categories: tuple[str, ...] = CATEGORIES

    def file_of(self, index: int) -> Path:
        """Return the file of a worker or server: beside the path, with rank{index}_ before its name.

        MXNet's scripts put that before a worker's file themselves, so it is not put there twice.
        """
        prefix = f"rank{index}_"
        return (
            self.path
            if self.path.name.startswith(prefix)
            else self.path.with_name(f"{prefix}{self.path.name}")
        )


def read_profile_config(options: Mapping[str, Any]) -> ProfileConfig:
    """Check settings as `profiler.set_config` takes them; what is absent has MXNet's default.

    Raises:
        ConfigurationError: a key is unknown, a value wrong, or the file's folder does not exist.
    """
    for key, value in options.items():
        if key not in (*_DEFAULTS, *_OTHERS):
            known = ", ".join(sorted((*_DEFAULTS, *_OTHERS)))
            raise _improper(f"there is no {key!r}; it takes {known} and profile_process")
        if key in _DEFAULTS and not isinstance(value, bool):
            raise _improper(f"{key} must be True or False, got {value!r:.80}")
    name = options.get("filename", "profile.json")
    if not isinstance(name, str | os.PathLike) or not os.path.basename(os.fspath(name)):
        raise _improper(f"filename must be the path of a file, got {name!r:.80}")
    period = options.get("dump_period", 1.0)
    if isinstance(period, bool) or not isinstance(period, int | float) or not 0 < period < math.inf:
        raise _improper(f"dump_period must be a number of seconds above 0, got {period!r:.80}")
    prefix = options.get("gpu_memory_profile_filename_prefix", "")
    if not isinstance(prefix, str):
        raise _improper(f"gpu_memory_profile_filename_prefix must be a str, got {prefix!r:.80}")
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise _improper(f"filename is {name!r:.200}, but there is no folder {path.parent}")
    switches = _DEFAULTS | {key: value for key, value in options.items() if key in _DEFAULTS}
    wanted = {CALLS: switches["profile_api"], ROUNDS: switches["profile_imperative"]}
    return ProfileConfig(path, tuple(name for name in CATEGORIES if switches["profile_all"] or wanted[name]))


def _improper(problem: str) -> ConfigurationError:
    return ConfigurationError(f"improper profiler config passed from worker: {problem}")


class Profiler:
    """Records what this worker and its servers do for one store or one Trainer, and writes it as Chrome traces.

    `profile_process` says of whom each call speaks: "worker" is this process, "server" means all servers. Every worker
    may make the same calls: for servers only those of rank 0 have an effect, and nobody waits for anybody.

    Files are written by workers alone: each its own, as rank{rank}_NAME beside the configured path, and rank 0 those
    of the servers, as rank{index}_NAME; no path is ever sent to a server. Times are those of each host's monotonic
    clock, so files of one host can be put together. Not thread-safe.
    """

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._configs = {process: read_profile_config({}) for process in _PROCESSES}
        self._trace: Trace | None = None
        self._is_running = self._is_paused = False

    def set_config(self, *, profile_process: str = WORKER, **options: Any) -> None:
        """Say where traces go and what is in them, from the next "run" on; every call sets all of it anew.

        Args:
            profile_process: "worker" or "server".
            **options: filename ("profile.json"; its folder must exist); profile_api (True), messages and requests;
                profile_imperative (True), rounds; profile_all (False), both. MXNet's other keys are checked and have
                no effect: profile_symbolic, profile_memory, continuous_dump, dump_period, aggregate_stats,
                gpu_memory_profile_filename_prefix.

        Raises:
            ConfigurationError: a key is unknown or a value wrong; nothing has changed.
        """
        self._configs[_checked(profile_process)] = read_profile_config(options)

    def set_state(self, state: str = "stop", profile_process: str = WORKER) -> None:
        """Begin ("run") to record, or end ("stop"), which writes what there is; waits for this worker's own pushes.

        Running again adds to what was recorded, until `dump` has finished it.

        Raises:
            ConfigurationError: there is no such state.
            TraceFileError: a file cannot be written.
            KVStoreError: a push under way failed, or a server did not answer; a stop is done all the same.
        """
        process = _checked(profile_process)
        if state not in ("run", "stop"):
            raise ConfigurationError(f"the state of a profiler is 'run' or 'stop', got {state!r:.80}")
        try:
            self._client.settle()
        finally:
            if state == "stop":
                self._switch(process, "stop")
                self._write(process)
        if state == "run":
            self._switch(process, "run")

    def pause(self, profile_process: str = WORKER) -> None:
        """Record nothing until `resume`."""
        self._switch(_checked(profile_process), "pause")

    def resume(self, profile_process: str = WORKER) -> None:
        """Go on after `pause`."""
        self._switch(_checked(profile_process), "resume")

    def dump(self, finished: bool = True, profile_process: str = WORKER) -> None:
        """Write all that was recorded so far.

        With `finished` nothing more is recorded, and the next "run" begins afresh. Requests under way are not in it.

        Raises:
            TraceFileError: a file cannot be written.
        """
        process = _checked(profile_process)
        self._write(process)
        if finished:
            self._switch(process, "finish")

    def _switch(self, process: str, action: str) -> None:
        if process == SERVER:
            if self._client.options.rank == 0:
                self._client.profile(action, self._configs[SERVER].categories)
            return
        if action in ("pause", "resume"):
            self._is_paused = action == "pause"
        else:
            self._is_running = action == "run"
        if action == "run":
            self._trace = self._trace or Trace(self._clock)
            self._trace.categories = frozenset(self._configs[WORKER].categories)
        self._client.trace_into(self._trace if self._is_running and not self._is_paused else None)
        if action == "finish":
            self._trace, self._is_paused = None, False

    def _write(self, process: str) -> None:
        config = self._configs[process]
        if process == WORKER:
            rank = self._client.options.rank
            trace = self._trace or Trace(self._clock)
            content = chrome_trace(trace.events, rank, f"worker {rank}", lane_name, trace.dropped)
            _write_file(config.file_of(rank), content)
        elif self._client.options.rank == 0:
            for server in range(self._client.num_servers):
                events, dropped = self._client.recorded(server)
                place = f"server {server}"
                # Beyond every rank, so that files of workers and servers can be put together.
                content = chrome_trace(events, MAX_WORKERS + server, place, _server_lane, dropped)
                _write_file(config.file_of(server), content)


def _server_lane(lane: int) -> str:
    return "rounds" if lane == ROUND_LANE else f"messages of rank {lane - 1}"


def _write_file(path: Path, content: Mapping[str, Any]) -> None:
    """Under another name first, so that whoever looks for the file finds all of it."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        text = f"cannot write the trace {str(path)!r}: {error.strerror or error}"
        raise file_error(TraceFileError, text, error, path) from error


def _checked(process: object) -> str:
    if process not in _PROCESSES:
        raise ConfigurationError(f"profile_process must be 'worker' or 'server', got {process!r:.80}")
    return str(process)
