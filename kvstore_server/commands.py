"""User-defined commands that a job sends to its servers, answered by functions that the servers loaded.

A worker sends a number and a text. Only a function that this server's own `--import` registered under that number
answers it; what a peer sends is data for that function and is never executed.

    # admin.py, for kvstore-server --import admin
    from kvstore_server import commands

    @commands.register(7)
    def where(body: str, context: commands.CommandContext) -> str:
        return f"server {context.server} of {context.num_servers} was asked {body!r}"
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from kvstore_server import check
from kvstore_server.errors import CommandError, KVStoreError, to_wire
from kvstore_server.protocol import messages as m

_log = logging.getLogger(__name__)

LONGEST = 1 << 20
"""The longest body or answer of a command, in bytes of UTF-8."""


class CommandContext(NamedTuple):
    """The server that runs a command."""

    server: int
    """Index of the server, from 0."""
    num_servers: int


Handler = Callable[[str, CommandContext], str]
_HandlerT = TypeVar("_HandlerT", bound=Handler)

_handlers: dict[int, Handler] = {}


def register(head: int) -> Callable[[_HandlerT], _HandlerT]:
    """Register a function (body, context) → str for the commands with one number.

    It runs in the server's only thread, so nothing else is served meanwhile: it must return long before
    `--dead-after`. An exception is sent to the worker as CommandError. Replacing another function is logged.

    Raises:
        ConfigurationError: `head` is not a valid number.
    """
    head = check_command_head(head)

    def add(handler: _HandlerT) -> _HandlerT:
        if head in _handlers:
            _log.warning("the handler of command %d is replaced by %r", head, handler)
        _handlers[head] = handler
        return handler

    return add


def check_command_head(head: object) -> int:
    """Return a valid number of a command, 0 … 2³¹ - 1. Raises ConfigurationError for anything else."""
    return check.integer("the head of a command", head, 0, (1 << 31) - 1)


class CommandAnswer(NamedTuple):
    """The answer to the last command of a session. A worker waits for it before it sends the next one."""

    number: int
    """Of the request."""
    body: m.ReplyBody


def repeated_answer(last: CommandAnswer | None, number: int, command: m.Command) -> m.ReplyBody | None:
    """Return what a repeated request gets; None for a new one. The numbers of a session's commands only increase."""
    if last is None or number > last.number:
        return None
    if number == last.number:
        return last.body
    return m.Failed("ProtocolError", f"command {command.head} was answered before a later one")


class Commands:
    """Runs commands on one server."""

    def __init__(self, context: CommandContext) -> None:
        self._context = context

    def interrupted(self, command: m.Command) -> m.Failed:
        """Return the answer to a command during which the process ended."""
        error = CommandError(
            f"server {self._context.server} was killed while it ran command {command.head} (body "
            f"{command.body!r:.80}); what the command did until then is not known, so it was not run again"
        )
        return m.Failed(*to_wire(error))

    def run(self, command: m.Command) -> m.ReplyBody:
        """Run a command; return what its sender is told."""
        try:
            return m.Status({"answer": self._run(command)})
        except KVStoreError as error:
            return m.Failed(*to_wire(error))

    def _run(self, command: m.Command) -> bytes:
        head, place = command.head, f"server {self._context.server}"
        try:
            body = command.body.decode()
        except UnicodeDecodeError as error:
            raise CommandError(f"{place} got command {head} with a body that is not text: {error}") from None
        handler = _handlers.get(head)
        if handler is None:
            known = ", ".join(map(str, sorted(_handlers))) or "none"
            raise CommandError(
                f"{place} has no handler for command {head} (body {body!r:.80}), only for: {known}. Start servers with "
                f"--import and a module that registers one: @kvstore_server.commands.register({head})"
            )
        try:
            with torch.enable_grad():  # a server has turned it off
                given = handler(body, self._context)
        except Exception as error:
            _log.exception("command %d failed", head)
            raise CommandError(
                f"command {head} (body {body!r:.80}) raised on {place}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(given, str):
            raise CommandError(
                f"command {head} gave a {type(given).__name__} on {place}; a handler must return a str"
            )
        answer = given.encode(errors="replace")
        if len(answer) > LONGEST:
            raise CommandError(
                f"command {head} gave {len(answer)} bytes on {place}; an answer may have {LONGEST}"
            )
        return answer
