"""Messages to whatever supervises this process, in systemd's protocol (sd_notify(3)); see `descriptor_store`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Environment variable with the address of the supervisor's socket."""
READY = "READY=1"
"""The process has started."""


def notify_socket_address(environ: Mapping[str, str]) -> str | None:
    """Return where the supervisor of a process listens: a path, or an abstract name after "@"; None if it has none."""
    address = environ.get(NOTIFY_SOCKET, "")
    return address if address.startswith(("/", "@")) else None


def connect_notify_socket(address: str, timeout: float | None = None) -> socket.socket:
    """Return a socket to a supervisor; raises OSError if nothing listens there."""
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.settimeout(timeout)
    try:
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    except OSError:
        sender.close()
        raise
    return sender


def send_notification(sender: socket.socket, message: str, descriptors: Sequence[int] = ()) -> None:
    """Send assignments, one on each line, and at most 253 descriptors, in one datagram."""
    if descriptors:
        socket.send_fds(sender, [message.encode()], list(descriptors))
    else:
        sender.send(message.encode())


def notify(environ: Mapping[str, str], message: str, descriptors: Sequence[int] = ()) -> bool:
    """Send a message and descriptors to the supervisor of a process, if it has one that listens.

    Blocks while the supervisor's queue is full. When it returns, the supervisor gets message and descriptors even if
    this process dies.

    Args:
        environ: The environment of the process.
        message, descriptors: As for `send_notification`.

    Returns:
        Whether there is such a supervisor.

    Raises:
        OSError: The socket cannot be reached.
    """
    address = notify_socket_address(environ)
    if address is None:
        return False
    with connect_notify_socket(address) as sender:
        send_notification(sender, message, descriptors)
    return True
