"""Profiling of a worker and its servers: MXNet's `mx.profiler`, as an object of the store or the Trainer.

kv.profiler.set_config(filename="profile.json", profile_process="server")
kv.profiler.set_state("run", profile_process="server")
...
kv.profiler.set_state("stop", profile_process="server")  # writes rank0_profile.json, rank1_profile.json, …
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvstore_server import check
from kvstore_server.engine.engine import MAX_WORKERS
from kvstore_server.errors import ConfigurationError
from kvstore_server.tracing import CALLS, CATEGORIES, ROUND_LANE, ROUNDS, Recording, Trace, chrome_trace
from kvtrainer.client.client import Client
from kvtrainer.client.session import lane_name
from kvtrainer.errors import TraceFileError, file_error
from kvtrainer.states.atomic_file import replace_atomically

WORKER, SERVER = "worker", "server"
_SWITCHES = {
    "profile_all": False, "profile_api": True, "profile_imperative": True, "profile_symbolic": True,
    "profile_memory": True, "continuous_dump": False, "aggregate_stats": False,
}  # fmt: skip
"""MXNet's switches; the first three have an effect."""
_PREFIX = "gpu_memory_profile_filename_prefix"
_DEFAULTS = {"filename": "profile.json", "dump_period": 1.0, _PREFIX: "", **_SWITCHES}
_IMPROPER = "improper profiler config passed from worker: "


def read_profile_config(options: Mapping[str, Any]) -> tuple[Path, tuple[str, ...]]:
    """Check the settings of `set_config`; returns the file and the event categories.

    Raises:
        ConfigurationError: a key is unknown, a value wrong, or the file's folder does not exist.
    """
    check.known(f"{_IMPROPER}it", options, _DEFAULTS)
    config: dict[str, Any] = {**_DEFAULTS, **options}
    for key in _SWITCHES:
        check.boolean(f"{_IMPROPER}{key}", config[key])
    check.number(f"{_IMPROPER}dump_period, in seconds,", config["dump_period"], above=0)
    name = config["filename"]
    if not isinstance(name, str | os.PathLike) or not os.path.basename(os.fspath(name)):
        raise ConfigurationError(f"{_IMPROPER}filename must be the path of a file, got {name!r:.80}")
    if not isinstance(config[_PREFIX], str):
        raise ConfigurationError(f"{_IMPROPER}{_PREFIX} must be a str, got {config[_PREFIX]!r:.80}")
    path = Path(name).absolute()
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"{_IMPROPER}filename is {name!r:.200}, but there is no folder {path.parent}"
        )
    wanted = {CALLS: config["profile_api"], ROUNDS: config["profile_imperative"]}
    return path, tuple(name for name in CATEGORIES if config["profile_all"] or wanted[name])


class Profiler:
    """Profiles a worker and its servers for one store or Trainer, and writes Chrome traces.

    `profile_process` is "worker" for this process, or "server" for all servers. Every worker may make the same
    calls: for servers only those of rank 0 have an effect, and no call waits for other workers.

    Only workers write files: each its own, as rank{rank}_NAME beside the configured path, and rank 0 those of the
    servers, as rank{index}_NAME; no path is ever sent to a server. Times are those of each host's monotonic clock,
    so files of one host can be merged. Not thread-safe.
    """

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._configs = {process: read_profile_config({}) for process in (WORKER, SERVER)}
        self._recording = Recording()

    def set_config(self, *, profile_process: str = WORKER, **options: Any) -> None:
        """Set where traces go and what they contain, from the next "run" on; replaces all settings.

        Args:
            profile_process: "worker" or "server".
            **options: filename ("profile.json"; its folder must exist); profile_api (True), messages and requests;
                profile_imperative (True), rounds; profile_all (False), both. MXNet's other keys are checked and have
                no effect: profile_symbolic, profile_memory, continuous_dump, dump_period, aggregate_stats,
                gpu_memory_profile_filename_prefix.

        Raises:
            ConfigurationError: a key is unknown or a value wrong; nothing has changed.
        """
        self._configs[_check_profiled_process(profile_process)] = read_profile_config(options)

    def set_state(self, state: str = "stop", profile_process: str = WORKER) -> None:
        """Start recording ("run"), or stop it and write the file ("stop"). Waits for this worker's own pushes.

        Another "run" adds to what was recorded, until `dump` has finished it.

        Raises:
            ConfigurationError: there is no such state.
            TraceFileError: a file cannot be written.
            KVStoreError: an open push failed, or a server did not answer; a stop is done anyway.
        """
        process = _check_profiled_process(profile_process)
        check.one_of("the state of a profiler", state, ("run", "stop"))
        try:
            self._client.wait_pending()
        finally:
            if state == "stop":
                self._switch(process, "stop")
                self._write(process)
        if state == "run":
            self._switch(process, "run")

    def pause(self, profile_process: str = WORKER) -> None:
        self._switch(_check_profiled_process(profile_process), "pause")

    def resume(self, profile_process: str = WORKER) -> None:
        self._switch(_check_profiled_process(profile_process), "resume")

    def dump(self, finished: bool = True, profile_process: str = WORKER) -> None:
        """Write what was recorded so far, except for requests under way.

        With `finished` recording ends, and the next "run" starts from scratch.

        Raises:
            TraceFileError: a file cannot be written.
        """
        process = _check_profiled_process(profile_process)
        self._write(process)
        if finished:
            self._switch(process, "finish")

    def _switch(self, process: str, action: str) -> None:
        _, categories = self._configs[process]
        if process == WORKER:
            self._recording.switch(action, categories, self._clock)
            self._client.trace_into(self._recording.active)
        elif self._client.options.rank == 0:
            self._client.profile(action, categories)

    def _write(self, process: str) -> None:
        path, _ = self._configs[process]
        rank = self._client.options.rank
        if process == WORKER:
            trace = self._recording.trace or Trace(self._clock)
            content = chrome_trace(trace.events, rank, f"worker {rank}", lane_name, trace.dropped)
            _write_profile(path, rank, content)
        elif rank == 0:
            for server in range(self._client.num_servers):
                events, dropped = self._client.recorded(server)
                # Beyond every rank, so that files of workers and servers can be put together.
                pid = MAX_WORKERS + server
                content = chrome_trace(events, pid, f"server {server}", _profiled_server_lane, dropped)
                _write_profile(path, server, content)


def _profiled_server_lane(lane: int) -> str:
    return "rounds" if lane == ROUND_LANE else f"messages of rank {lane - 1}"


def _write_profile(path: Path, index: int, content: Mapping[str, Any]) -> None:
    # MXNet's scripts put that before a worker's file themselves, so it is not put there twice.
    prefix = f"rank{index}_"
    path = path if path.name.startswith(prefix) else path.with_name(f"{prefix}{path.name}")
    try:
        with replace_atomically(str(path)) as file:
            file.write(json.dumps(content).encode())
    except OSError as error:
        text = f"cannot write the trace {str(path)!r}: {error.strerror or error}"
        raise file_error(TraceFileError, text, error, path) from error


def _check_profiled_process(process: object) -> str:
    return check.one_of("profile_process", process, (WORKER, SERVER))
