"""Makes the workers of a kvstore the ranks of a torch.distributed group.

Gradients and weights go through the store. But frameworks and metric libraries ask torch.distributed for the number of
processes and reduce metrics over it, so the workers also join such a group, with the same ranks.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn, optim

from kvtrainer.amp import GradScaler
from kvtrainer.common.env import host_towards, local_rank_from_env, name_host, read_servers_from_env
from kvtrainer.config import wrapper_arguments
from kvtrainer.errors import ConfigurationError, WorkerLostError
from kvtrainer.kvstore import create
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.strategy import Agreement, agreement_of, environment
from kvtrainer.strategy.parts import share_weights
from kvtrainer.trainer.trainer import Trainer

Limit = Mapping[str, Any]


class Workers:
    """The workers of a store, which are also ranks of a torch.distributed group. Collective; blocks.

    Args:
        kvstore: A store, or the name of one to create.

    Raises:
        ConfigurationError: The job has several processes that the store does not connect, or this process has another
            rank in a torch.distributed group already.
    """

    def __init__(self, kvstore: str | KVStoreBase) -> None:
        self.store = kvstore if isinstance(kvstore, KVStoreBase) else create(kvstore)
        self._agreement = agreement_of(self.store)
        self.rank, self.size = self._agreement.rank, self._agreement.size
        self._limits: WeakKeyDictionary[Trainer, Limit] = WeakKeyDictionary()
        make_workers_ranks(self._agreement, self.store, environment.processes_of_job(os.environ))
        place, self.local_size = place_worker_on_host(self._agreement)
        self.local_rank = local_rank_from_env(os.environ, place)
        """Rank among the `local_size` workers of this host, as the launcher gives it if it does."""

    def share(self, module: nn.Module) -> None:
        """Copy rank 0's weights and buffers to every worker, if they differ. Collective."""
        if module.state_dict():
            share_weights(module, self._agreement)

    def share_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers, such as those of BatchNorm, to every worker, if they differ. Collective."""
        self.share(_WorkerBuffers(module))

    def trainer_of(self, optimizer: optim.Optimizer, model: nn.Module, **options: Any) -> Trainer:
        """Return a Trainer over the store for a torch optimizer. A Trainer is returned unchanged.

        Args:
            model: Provides the names of the parameters.
            options: More options of the Trainer.

        Raises:
            ConfigurationError: A given Trainer does not train with all workers, or an option is wrong.
        """
        if not isinstance(optimizer, Trainer):
            read = wrapper_arguments(model, {"type": "OptimWrapper", "optimizer": optimizer})
            return Trainer(**{**read, "kvstore": self.store, **options})
        if options:
            raise ConfigurationError(
                f"{', '.join(options)} would have no effect on an existing Trainer; set it when building the Trainer"
            )
        if optimizer.num_workers != self.size:
            raise ConfigurationError(
                f"the Trainer trains with {optimizer.num_workers} workers, but the job has {self.size}; build it with "
                f"kvstore={self.store.type!r}, or return the torch optimizer instead"
            )
        return optimizer

    def limit(self, trainer: Trainer, clip_grad: Limit) -> None:
        """Make a Trainer clip the gradient of all workers as a framework would clip that of one.

        Raises:
            ConfigurationError: It differs from that of the first step.
        """
        if self._limits.get(trainer) != clip_grad:
            trainer.configure(clip_grad=clip_grad)
            self._limits[trainer] = clip_grad


class _WorkerBuffers(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for at, buffer in enumerate(module.buffers()):
            self.register_buffer(str(at), buffer)


def place_worker_on_host(agreement: Agreement) -> tuple[int, int]:
    """Return this worker's rank on its host and the number of workers there. Collective."""
    try:
        mine = name_host().encode()
    except OSError:
        mine = socket.gethostname().encode()
    here = [rank for rank, host in enumerate(agreement.all_gather(mine)) if host == mine]
    return here.index(agreement.rank), len(here)


def make_workers_ranks(
    agreement: Agreement,
    kvstore: str | KVStoreBase | None,
    processes: int,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Make the workers of a store ranks of torch.distributed, with the same numbers. Collective; blocks.

    Args:
        kvstore: The store, or its name if each process is alone.
        processes: Number of processes of the job.
        options: Options of torch.distributed.init_process_group, used if there is no group yet.

    Raises:
        ConfigurationError: The job has several processes that the store does not connect, or this one has another rank.
        WorkerLostError: An earlier process of this rank was in the group, which takes in no other.
    """
    name = kvstore.type if isinstance(kvstore, KVStoreBase) else kvstore
    if agreement.size == 1 and processes > 1:
        raise ConfigurationError(
            f"the job has {processes} processes, but kvstore {name!r} does not connect them, so all would train on the "
            "same data and write the same files; use 'dist_sync'"
        )
    if agreement.size > 1 and not dist.is_initialized():
        servers = getattr(kvstore, "servers", None) or read_servers_from_env(os.environ)
        _make_group_of_workers(agreement, servers or ("tcp://127.0.0.1:1",), options or {})
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if place != (agreement.rank, agreement.size):
        raise ConfigurationError(
            f"this process is rank {place[0]} of {place[1]} in torch.distributed, but worker {agreement.rank} of "
            f"{agreement.size} of kvstore {name!r}; start both in the same way"
        )


def _make_group_of_workers(agreement: Agreement, servers: Sequence[str], options: Mapping[str, Any]) -> None:
    """Create the group. Rank 0 listens on its address towards the servers, and tells it over the store."""
    # 1. Tell where rank 0 listens. A process that was started again is told what its predecessor said.
    listener, told = None, os.urandom(16)
    if agreement.rank == 0:
        host = host_towards(servers[0])  # loopback if the servers are on this host
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        told = f"{host} {listener.getsockname()[1]}".encode()
    heard = agreement.all_gather(told)
    if heard[agreement.rank] != told:
        if listener is not None:
            listener.close()
        raise WorkerLostError(
            f"an earlier process of rank {agreement.rank} has ended, and its successor cannot take its place: the "
            "workers of this framework are also ranks of a torch.distributed group, which takes in no other process. "
            "Start the job again from its last checkpoint. kvtrainer.Strategy, and a loop of your own with "
            "Trainer.resume(), need no such group: their workers come back"
        )
    # 2. Meet there.
    host, port = heard[0].decode().split()
    timeout = options.get("timeout", datetime.timedelta(minutes=5))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        agreement.size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    environment.init_process_group(
        os.environ, **{**options, "store": store, "rank": agreement.rank, "world_size": agreement.size}
    )


def scaler_for_workers(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler with the same settings for Trainers, which checks all workers."""
    return GradScaler(
        scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
