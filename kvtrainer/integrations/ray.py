"""Ray Train with parameter servers: Ray places and restarts workers and servers, and the script is a plain loop.

    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from kvtrainer.integrations.ray import KVTrainer

    trainer = KVTrainer(
        train, num_servers=2, scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()

Within `train` all of `ray.train` works as with Ray's own trainers: `report`, `get_checkpoint`, `get_dataset_shard`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_server.keys import KEYS, OFF
from kvtrainer.common.env import Topology, tcp_address
from kvtrainer.errors import ConfigurationError, ConnectTimeoutError
from kvtrainer.integrations import guard_import
from kvtrainer.jobs.cluster import ClusterProcesses, start_cluster_servers
from kvtrainer.jobs.guardian import make_keys_directory
from kvtrainer.jobs.job import JobTimeouts
from kvtrainer.jobs.job_keys import JobKeys
from kvtrainer.jobs.processes import server_command

with guard_import("ray"):
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass
class KVStoreConfig(BackendConfig):  # type: ignore[misc]
    """The servers of a job, used instead of Ray's `TorchConfig`.

    Args:
        num_servers: Number of servers, at least 1.
        resources_per_server: Resources that Ray reserves for each.
        placement_strategy: Strategy of the servers' placement group, as in `ScalingConfig`.
        server_args: Flags for every server, such as `["--import", "my_optimizers"]`.
        restart: How often the process of each server is started again when it is killed or fails, with its weights.
            When a worker, an actor or a host is lost, Ray starts the whole job again, as `FailureConfig` says.
        start_timeout: Seconds for Ray to place the servers, and for them to listen.

    Raises:
        ConfigurationError: There is no server, or a number is negative.
    """

    num_servers: int = 1
    resources_per_server: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement_strategy: str = "PACK"
    server_args: Sequence[str] = ()
    restart: int = 0
    start_timeout: float = JobTimeouts.start

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise ConfigurationError(f"num_servers is {self.num_servers}; a job on Ray has at least 1")
        if self.restart < 0:
            raise ConfigurationError(f"restart is {self.restart}; a server is started again at least 0 times")

    @property
    def backend_cls(self) -> type[Backend]:
        return RayBackend


class KVTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on workers with parameter servers. `fit()` returns Ray's Result or raises TrainingFailedError.

    If a worker, server or host is lost, the whole job fails and Ray restarts it, including the servers, up to
    `FailureConfig(max_failures=…)` times. The function continues from `ray.train.get_checkpoint()`.

    Args:
        train_loop_per_worker: The function; it may take `train_loop_config`. In it, `kvstore="dist_sync"` finds the
            servers.
        num_servers: Number of servers, 1 by default. For more options use `backend_config` instead.
        **options: As for Ray's other trainers: train_loop_config, scaling_config, run_config, datasets and so on.

    Raises:
        ConfigurationError: There is no worker or no server, or the number of servers is given twice.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        num_servers: int | None = None,
        backend_config: KVStoreConfig | None = None,
        **options: Any,
    ) -> None:
        scaling = options.get("scaling_config")
        if scaling is not None and scaling.num_workers == 0:
            raise ConfigurationError("num_workers of scaling_config is 0; a job on Ray has at least 1")
        if backend_config is not None and num_servers is not None:
            raise ConfigurationError(
                f"num_servers={num_servers} would have no effect beside backend_config; give that the number"
            )
        config = backend_config or KVStoreConfig(1 if num_servers is None else num_servers)
        super().__init__(train_loop_per_worker, backend_config=config, **options)


class RayBackend(Backend):  # type: ignore[misc]
    """Starts servers as actors in a placement group, and tells the workers their addresses.

    Keys are made for each start of the job, so servers accept no other client, and all traffic is encrypted. Ray
    carries them to the processes as arguments of calls, which it shows nowhere.
    """

    _placement: Any = None
    _servers: Sequence[Any] = ()

    def on_start(self, worker_group: Any, backend_config: KVStoreConfig) -> None:
        """Start the servers and set rank and server addresses in every worker's environment.

        Raises:
            ConnectTimeoutError: Ray cannot place the servers.
            ConfigurationError: KVSTORE_KEYS names a directory of keys that cannot be used.
        """
        try:
            self._start(backend_config)
            self._tell_workers(worker_group, backend_config)
        except BaseException:
            # Ray does not call on_shutdown for a backend that failed to start.
            self.on_shutdown(worker_group, backend_config)
            raise

    def on_shutdown(self, worker_group: Any, backend_config: KVStoreConfig) -> None:
        """End the servers. A guardian beside each ends its process when the actor is gone."""
        for server in self._servers:
            ray.kill(server)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)
        self._servers, self._placement = (), None

    def _start(self, config: KVStoreConfig) -> None:
        bundles = [config.resources_per_server] * config.num_servers
        self._placement = ray.util.placement_group(bundles, strategy=config.placement_strategy)
        if not self._placement.wait(config.start_timeout):
            raise ConnectTimeoutError(
                f"Ray found no room for {config.num_servers} servers with {config.resources_per_server} each within "
                f"{config.start_timeout:g} s, beside the workers; ask for less with "
                "KVStoreConfig(resources_per_server=…)"
            )
        actor = ray.remote(RayServer)
        self._servers = [
            actor.options(
                num_cpus=0,
                resources={},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=index
                ),
            ).remote(index)
            for index in range(config.num_servers)
        ]

    def _tell_workers(self, worker_group: Any, config: KVStoreConfig) -> None:
        """Make the servers listen where all workers reach them, and publish their addresses."""
        of_workers = worker_group.execute(_ray_node_address)
        hosts = {*of_workers, *ray.get([server.host.remote() for server in self._servers])}
        keys = JobKeys(os.environ)
        try:
            of_server, of_worker = keys.files_for(True), keys.files_for(False)
        finally:
            keys.close()
        is_public = len(hosts) > 1
        servers = tuple(ray.get([one.listen.remote(config, is_public, of_server) for one in self._servers]))
        told = []
        for rank, host in enumerate(of_workers):
            place = Topology(rank, len(of_workers), servers).as_variables(of_workers[:rank].count(host))
            told.append(worker_group.execute_single_async(rank, _set_ray_environment, place, of_worker))
        ray.get(told)


class RayServer:
    """An actor that owns one server process, which ends with the actor."""

    def __init__(self, index: int) -> None:
        self._index = index

    def host(self) -> str:
        return _ray_node_address()

    def listen(self, config: KVStoreConfig, is_public: bool, keys: dict[str, str]) -> str:
        """Start the server; `keys` are the files of its directory of keys, none without keys."""
        directory = make_keys_directory(keys) if keys else OFF
        self._group = ClusterProcesses(
            JobTimeouts.grace, threading.Condition(), {KEYS: directory}, directory if keys else ""
        )
        bind = tcp_address(_ray_node_address() if is_public else "127.0.0.1", 0)
        flags = ["--bind", bind, *config.server_args]
        command = server_command(self._index, config.num_servers, JobTimeouts.grace, flags, config.restart)
        [address] = start_cluster_servers(self._group, {self._index: command}, config.start_timeout)
        return address


def _ray_node_address() -> str:
    return str(ray.util.get_node_ip_address())


def _set_ray_environment(place: dict[str, str], keys: dict[str, str]) -> None:
    directory = make_keys_directory(keys) if keys else OFF
    if keys:
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ.update({**place, KEYS: directory})
