"""Ray Train with parameter servers: Ray places, watches and restarts workers and servers; the script is a plain loop.

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

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtrainer.common.env import Topology, tcp_address
from kvtrainer.errors import ConfigurationError, ConnectTimeoutError
from kvtrainer.integrations import needing
from kvtrainer.jobs.cluster import FollowedProcesses, start_servers
from kvtrainer.jobs.job import JobTimeouts
from kvtrainer.jobs.processes import server_command

with needing("ray"):
    import ray
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass
class KVStoreConfig(BackendConfig):  # type: ignore[misc]
    """The servers of a job, in the place of Ray's `TorchConfig`.

    Args:
        num_servers: How many there are, at least 1.
        resources_per_server: What Ray sets aside for each.
        placement_strategy: Of the servers' placement group, as in `ScalingConfig`.
        server_args: Flags for every server, such as `["--import", "my_optimizers"]`.
        allow_public_bind: Let servers listen where other hosts reach them, although traffic is neither authenticated
            nor encrypted; a job on several hosts needs it.
        start_timeout: Seconds for Ray to find room for the servers, and for them to listen.

    Raises:
        ConfigurationError: there is no server.
    """

    num_servers: int = 1
    resources_per_server: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    placement_strategy: str = "PACK"
    server_args: Sequence[str] = ()
    allow_public_bind: bool = False
    start_timeout: float = JobTimeouts.start

    def __post_init__(self) -> None:
        if self.num_servers < 1:
            raise ConfigurationError(f"num_servers is {self.num_servers}; a job on Ray has at least 1")

    @property
    def backend_cls(self) -> type[Backend]:
        return KVStoreBackend


class KVTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs a function on workers beside parameter servers; `fit()` returns Ray's Result or raises TrainingFailedError.

    When a worker, a server or a host is lost, the job as a whole fails and Ray starts all of it anew, servers too, up
    to `FailureConfig(max_failures=…)` times. The function goes on from `ray.train.get_checkpoint()`.

    Args:
        train_loop_per_worker: The function; it may take `train_loop_config`. `kvstore="dist_sync"` finds the servers.
        num_servers: How many servers there are, by default 1. More about them: `backend_config`, in its place.
        **options: As of Ray's other trainers: train_loop_config, scaling_config, run_config, datasets and so on.

    Raises:
        ConfigurationError: there is no worker or no server, or the number of servers is said twice.
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


class KVStoreBackend(Backend):  # type: ignore[misc]
    """A backend that starts servers as actors, and tells workers where they are. The actors have a placement group."""

    _placement: Any = None
    _servers: Sequence[Any] = ()

    def on_start(self, worker_group: Any, backend_config: KVStoreConfig) -> None:
        """Start the servers and tell every worker its rank and their addresses.

        Raises:
            ConnectTimeoutError: Ray has no room for the servers.
            ConfigurationError: workers or servers are on several hosts, and servers may not listen there.
        """
        try:
            self._start(backend_config)
            self._tell_workers(worker_group, backend_config)
        except BaseException:
            self.on_shutdown(worker_group, backend_config)  # nobody else ends what has begun
            raise

    def on_shutdown(self, worker_group: Any, backend_config: KVStoreConfig) -> None:
        """End the servers; a guardian beside each ends its process when the actor has gone."""
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
                f"{config.start_timeout:g} s, beside the workers; ask for less by KVStoreConfig(resources_per_server=…)"
            )
        actor = ray.remote(KVServer)
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
        """Let the servers listen, where all workers reach them, and say where."""
        of_workers = worker_group.execute(_host)
        hosts = {*of_workers, *ray.get([server.host.remote() for server in self._servers])}
        if len(hosts) > 1 and not config.allow_public_bind:
            raise ConfigurationError(
                f"the job is on the hosts {', '.join(sorted(hosts))}, and servers listen on loopback alone, as traffic "
                "is neither authenticated nor encrypted; on a network that you trust pass "
                "KVStoreConfig(allow_public_bind=True)"
            )
        servers = tuple(ray.get([one.listen.remote(config, len(hosts) > 1) for one in self._servers]))
        told = []
        for rank, host in enumerate(of_workers):
            place = Topology(rank, len(of_workers), servers).as_variables(of_workers[:rank].count(host))
            told.append(worker_group.execute_single_async(rank, _tell, place))
        ray.get(told)


class KVServer:
    """An actor that has one server, a process of its own, which ends with it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._group = FollowedProcesses(JobTimeouts.grace, threading.Condition())

    def host(self) -> str:
        """Return the address of the host."""
        return _host()

    def listen(self, config: KVStoreConfig, is_public: bool) -> str:
        """Start the server and return its address."""
        bind = tcp_address(_host() if is_public else "127.0.0.1", 0)
        flags = ["--bind", bind, *(["--allow-public-bind"] if is_public else []), *config.server_args]
        command = server_command(self._index, config.num_servers, JobTimeouts.grace, flags)
        [address] = start_servers(self._group, {self._index: command}, config.start_timeout)
        return address


def _host() -> str:
    return str(ray.util.get_node_ip_address())


def _tell(place: dict[str, str]) -> None:
    os.environ.update(place)
