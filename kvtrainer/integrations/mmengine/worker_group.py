"""A torch.distributed group of workers that sum elsewhere: mmengine asks it which worker a process is."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from kvtrainer.env import read_servers
from kvtrainer.strategy import environment
from kvtrainer.strategy.agreement import Agreement


def join_workers(agreement: Agreement, options: Mapping[str, Any]) -> None:
    """Put the workers of a store into a torch.distributed group, with the same ranks; collective, blocks.

    Where rank 0 listens is agreed on over the store, at an address that the servers are reached from.

    Args:
        options: of torch.distributed.init_process_group.
    """
    listener, told = None, b""
    if agreement.rank == 0:
        host = own_address(os.environ)
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


def own_address(environ: Mapping[str, str]) -> str:
    """The address of this host on the way to the first server: that of the loopback where the servers are here."""
    servers = read_servers(environ) or ("tcp://127.0.0.1:1",)
    host, _, port = servers[0].removeprefix("tcp://").rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
