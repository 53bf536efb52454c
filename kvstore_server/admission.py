"""What an engine knows about its place, and which workers may come to it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass

from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.log_limit import SLOW_AFTER
from kvstore_server.plan import check_name
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.buffers import KEYS_PER_MESSAGE

MAX_WORKERS = 1 << 16
MAX_ADDRESS = 512
"""Characters in which a worker may say where it runs."""
MAX_REASON = 2000
"""Characters that are kept of the reason why a worker leaves, or gives a round up."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine has to know about its place.

    Args:
        server: Index of this server, from 0.
        num_servers: How many servers hold the job together.
        run: A number that no other server process has; 0 is not allowed.
        dead_after: Seconds of silence after which a worker counts as lost.
        slow_after: Seconds that a rank waits for others before the log says so.
        capability: Instruction set of this CPU; workers of another kind are refused, because their bits differ.
        allow_mixed_cpu: Let them in all the same.
        max_table_bytes: Largest table, over all servers, that is accepted.
        max_memory: Bytes that all namespaces may occupy together; 0: any number.
        max_namespaces: How many there may be at the same time.
        forget_after: Seconds after which a namespace of which no worker was heard from is freed, though it has weights.
        max_message_keys: Most keys, slices or tables that one message may name.
        integers: Whether keys may be integers, which no optimizer can update.
    """

    server: int = 0
    num_servers: int = 1
    run: int = 1
    dead_after: float = 20.0
    slow_after: float = SLOW_AFTER
    capability: str = ""
    allow_mixed_cpu: bool = False
    max_table_bytes: int = 1 << 40
    max_memory: int = 0
    max_namespaces: int = 1024
    forget_after: float = 86400.0
    max_message_keys: int = KEYS_PER_MESSAGE
    integers: bool = False


def check_hello(config: EngineConfig, hello: m.Hello) -> None:
    """Raise ConfigurationError unless this server may take that worker."""
    if (hello.server, hello.num_servers) != (config.server, config.num_servers):
        raise ConfigurationError(
            f"this is server {config.server} of {config.num_servers}, but rank {hello.rank} has it as server "
            f"{hello.server} of {hello.num_servers}; start every server with its --index and --num-servers, and give "
            "every worker the same KVSTORE_SERVERS, in index order"
        )
    check_name("a namespace", hello.namespace)
    if max(len(hello.address), len(hello.capability)) > MAX_ADDRESS:
        raise ConfigurationError(
            f"rank {hello.rank} says where it runs in {len(hello.address)} characters, and on what in "
            f"{len(hello.capability)}; {MAX_ADDRESS} are allowed"
        )
    if not 1 <= hello.num_workers <= MAX_WORKERS:
        raise ConfigurationError(f"num_workers must be 1 … {MAX_WORKERS}, got {hello.num_workers}")
    if hello.capability != config.capability and not config.allow_mixed_cpu:
        raise ConfigurationError(
            f"rank {hello.rank} runs on {hello.capability}, server {config.server} on {config.capability}; results "
            "would differ in their last bits. Start the servers with --allow-mixed-cpu to accept that"
        )


def check_number(config: EngineConfig, message: str, count: int) -> None:
    """Raise ProtocolError where a message names more keys, slices or tables than one may."""
    if count > config.max_message_keys:
        raise ProtocolError(
            f"a {message} names {count} keys, slices or tables, server {config.server} accepts up to "
            f"{config.max_message_keys} in one message (--max-message-keys)"
        )


def check_named(config: EngineConfig, message: str, named: Collection[Hashable]) -> None:
    """Raise ProtocolError where a message names too much, or the same twice, which would be answered twice."""
    check_number(config, message, len(named))
    if len(set(named)) < len(named):
        raise ProtocolError(f"a {message} names one of its {len(named)} tables or slices twice")
