"""Workers of a kvstore as frameworks know them: the ranks of a torch.distributed group beside the store.

Gradients and weights go through the store. Frameworks, and libraries of metrics, ask torch.distributed how many
processes there are, and reduce metrics over it; so the workers are put into such a group too, with the same ranks.
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
from kvtrainer.common.env import host_towards, local_rank, name_host, read_servers
from kvtrainer.config import wrapper_arguments
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import create
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.strategy import Agreement, agreement_of, environment
from kvtrainer.strategy.parts import share_weights
from kvtrainer.trainer.trainer import Trainer

Limit = Mapping[str, Any]


class Workers:
    """The workers of a store, who are also ranks of a torch.distributed group; collective, blocks until all are there.

    Args:
        kvstore: A store, or the name of one that is made here.

    Raises:
        ConfigurationError: the job has several processes that the store does not connect; or the process is another
            rank of a torch.distributed group already.
    """

    def __init__(self, kvstore: str | KVStoreBase) -> None:
        self.store = kvstore if isinstance(kvstore, KVStoreBase) else create(kvstore)
        self._agreement = agreement_of(self.store)
        self.rank, self.size = self._agreement.rank, self._agreement.size
        self._limits: WeakKeyDictionary[Trainer, Limit] = WeakKeyDictionary()
        become_ranks(self._agreement, self.store, environment.processes_of_job(os.environ))
        place, self.local_size = place_on_host(self._agreement)
        self.local_rank = local_rank(os.environ, place)
        """Which worker of its host this one is, of `local_size`; as a launcher says it, if one does."""

    def share(self, module: nn.Module) -> None:
        """Give every worker rank 0's weights and buffers, where they differ; collective."""
        if module.state_dict():
            share_weights(module, self._agreement)

    def share_buffers(self, module: nn.Module) -> None:
        """Give every worker rank 0's buffers, as of BatchNorm, where they differ; collective."""
        self.share(_Buffers(module))

    def trainer_of(self, optimizer: optim.Optimizer, model: nn.Module, **options: Any) -> Trainer:
        """Return a Trainer over the store for a torch optimizer; one that is a Trainer already stays as it is.

        Args:
            model: Where the names of parameters come from.
            options: more options of the Trainer.

        Raises:
            ConfigurationError: a Trainer does not train with all workers; or an option is wrong.
        """
        if not isinstance(optimizer, Trainer):
            read = wrapper_arguments(model, {"type": "OptimWrapper", "optimizer": optimizer})
            return Trainer(**{**read, "kvstore": self.store, **options})
        if options:
            raise ConfigurationError(
                f"{', '.join(options)} would have no effect on a Trainer that is there; give it them itself"
            )
        if optimizer.num_workers != self.size:
            raise ConfigurationError(
                f"the Trainer trains with {optimizer.num_workers} workers, but the job has {self.size}; build it with "
                f"kvstore={self.store.type!r}, or return the torch optimizer in its place"
            )
        return optimizer

    def limit(self, trainer: Trainer, clip_grad: Limit) -> None:
        """Have a Trainer limit all workers' gradient as a framework would limit one's.

        Args:
            clip_grad: as of the Trainer.

        Raises:
            ConfigurationError: it is another limit than that of the first step.
        """
        if self._limits.get(trainer) != clip_grad:
            trainer.configure(clip_grad=clip_grad)
            self._limits[trainer] = clip_grad


class _Buffers(nn.Module):
    """The buffers of a module alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for at, buffer in enumerate(module.buffers()):
            self.register_buffer(str(at), buffer)


def place_on_host(agreement: Agreement) -> tuple[int, int]:
    """Find out which worker of its host this one is, and how many there are; collective."""
    try:
        mine = name_host().encode()
    except OSError:
        mine = socket.gethostname().encode()
    here = [rank for rank, host in enumerate(agreement.all_gather(mine)) if host == mine]
    return here.index(agreement.rank), len(here)


def become_ranks(
    agreement: Agreement,
    kvstore: str | KVStoreBase | None,
    processes: int,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Make workers of a store ranks of torch.distributed, with equal numbers. Collective; blocks.

    Args:
        kvstore: Over which they agree; or its name, where each process is alone.
        processes: How many the job has.
        options: of torch.distributed.init_process_group, where there is no group yet.

    Raises:
        ConfigurationError: the job has several processes that the store does not connect; or this one is another rank.
    """
    name = kvstore.type if isinstance(kvstore, KVStoreBase) else kvstore
    if agreement.size == 1 and processes > 1:
        raise ConfigurationError(
            f"the job has {processes} processes, but kvstore {name!r} keeps to this one, so all would train on the "
            "same data and write the same files; use 'dist_sync'"
        )
    if agreement.size > 1 and not dist.is_initialized():
        servers = getattr(kvstore, "servers", None) or read_servers(os.environ)
        _make_group(agreement, servers or ("tcp://127.0.0.1:1",), options or {})
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if place != (agreement.rank, agreement.size):
        raise ConfigurationError(
            f"this process is rank {place[0]} of {place[1]} in torch.distributed, and worker {agreement.rank} of "
            f"{agreement.size} of kvstore {name!r}; start both in the same way"
        )


def _make_group(agreement: Agreement, servers: Sequence[str], options: Mapping[str, Any]) -> None:
    """Agree over the store where rank 0 listens, and meet there. Servers are reached from that address."""
    listener, told = None, b""
    if agreement.rank == 0:
        host = host_towards(servers[0])  # the loopback's where the servers are here
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        told = f"{host} {listener.getsockname()[1]}".encode()
    host, port = agreement.broadcast(told).decode().split()
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


def scaler_like(scaler: torch.amp.GradScaler) -> GradScaler:
    """Return a scaler of equal numbers for Trainers, which asks all workers."""
    return GradScaler(
        scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
