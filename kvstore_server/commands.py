"""Commands: what a job may ask of its servers beside the store's own work, by functions that the servers loaded.

A worker sends a number and a text. Only a function that this server's own `--import` registered under that number
answers it; what a peer sends is data to that function and never runs.

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
"""Bytes of UTF-8 that a command's body, or the answer to it, may have."""


class CommandContext(NamedTuple):
    """The place where a command is answered."""

    server: int
    """Index of the server, from 0."""
    num_servers: int


Handler = Callable[[str, CommandContext], str]
_HandlerT = TypeVar("_HandlerT", bound=Handler)

_handlers: dict[int, Handler] = {}


def register(head: int) -> Callable[[_HandlerT], _HandlerT]:
    """Let a function (body, context) → str answer the commands of one number.

    It runs in the server's only thread, so nothing else is served meanwhile: it must be over long before
    `--dead-after`. What it raises goes to the worker as CommandError. Taking over a number that is in use is logged.

    Raises:
        ConfigurationError: `head` is no number of a command.
    """
    head = check_head(head)

    def add(handler: _HandlerT) -> _HandlerT:
        if head in _handlers:
            _log.warning("the handler of command %d is replaced by %r", head, handler)
        _handlers[head] = handler
        return handler

    return add


def check_head(head: object) -> int:
    """Return a number that a command may have, 0 … 2³¹ - 1. Raises ConfigurationError if it is none."""
    return check.integer("the head of a command", head, 0, (1 << 31) - 1)


class Commands:
    """Answers each command to one server once, however often its request is repeated."""

    def __init__(self, context: CommandContext) -> None:
        self._context = context
        self._last: dict[int, tuple[int, m.ReplyBody]] = {}
        """Session → number and answer of its last command. A worker waits for one before it sends the next."""

    def answer(self, session: int, number: int, command: m.Command) -> m.ReplyBody:
        """Run a command, or say again what it gave: the numbers of a session's commands only ever grow."""
        last = self._last.get(session)
        if last is not None and number == last[0]:
            return last[1]
        if last is not None and number < last[0]:
            return m.Failed(
                "ProtocolError", f"command {command.head} was answered before a later one already"
            )
        answer: m.ReplyBody
        try:
            answer = m.Status({"answer": self._run(command)})
        except KVStoreError as error:
            answer = m.Failed(*to_wire(error))
        self._last[session] = (number, answer)
        return answer

    def forget(self, session: int) -> None:
        """Drop what is kept for a session that is over."""
        self._last.pop(session, None)

    def _run(self, command: m.Command) -> bytes:
        head, place = command.head, f"server {self._context.server}"
        try:
            body = command.body.decode()
        except UnicodeDecodeError as error:
            raise CommandError(f"{place} got command {head} with a body that is no text: {error}") from None
        handler = _handlers.get(head)
        if handler is None:
            known = ", ".join(map(str, sorted(_handlers))) or "none"
            raise CommandError(
                f"{place} has no handler for command {head} (body {body!r:.80}), only for: {known}. Start servers with "
                f"--import and a module that registers one: @kvstore_server.commands.register({head})"
            )
        try:
            with torch.enable_grad():  # which a server has turned off
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
