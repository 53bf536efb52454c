"""Messages to whatever supervises this process, in systemd's protocol (sd_notify(3)); see `descriptor_store`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

NOTIFY_SOCKET = "NOTIFY_SOCKET"
"""Environment variable with the address of the supervisor's socket."""
READY = "READY=1"
"""The process has started."""


def notify(environ: Mapping[str, str], message: str, descriptors: Sequence[int] = ()) -> bool:
    """Send a message and descriptors to the supervisor of a process, if it has one that listens.

    Blocks while the supervisor's queue is full. When it returns, the supervisor gets message and descriptors even if
    this process dies.

    Args:
        environ: The environment of the process.
        message: Assignments, one on each line.
        descriptors: At most 253.

    Returns:
        Whether there is such a supervisor.

    Raises:
        OSError: The socket cannot be reached.
    """
    address = environ.get(NOTIFY_SOCKET, "")
    if not address.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        target = f"\0{address[1:]}" if address.startswith("@") else address
        sender.connect(target)
        if descriptors:
            socket.send_fds(sender, [message.encode()], list(descriptors))
        else:
            sender.send(message.encode())
    return True
