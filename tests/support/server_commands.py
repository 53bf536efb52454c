"""Commands that servers of tests load with --import; they count what came to their own server."""

from __future__ import annotations

import sys

from kvstore_server import commands
from kvstore_server.commands import CommandContext

_bodies: list[str] = []


@commands.register(7)
def note(body: str, context: CommandContext) -> str:
    """Note the body; gives the server and how many came so far."""
    _bodies.append(body)
    return f"{context.server}/{context.num_servers} {len(_bodies)}"


@commands.register(9)
def modules(body: str, context: CommandContext) -> str:
    """The modules that this server has imported."""
    return " ".join(sorted(sys.modules))
