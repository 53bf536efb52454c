"""Commands to the servers: who answers, how often, and what comes of those that nobody answers."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from kvstore_server import commands
from kvstore_server.commands import CommandContext, Commands
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, encode
from kvtrainer.client.client import Client, Loopback
from kvtrainer.client.session import SessionOptions
from kvtrainer.errors import CommandError, ConfigurationError
from kvtrainer.kvstore import LocalKVStore
from tests.support.engines import client_of


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The bodies with which command 7 was called; the registry is as before afterwards."""
    monkeypatch.setattr(commands, "_handlers", {})
    called: list[str] = []

    @commands.register(7)
    def note(body: str, context: CommandContext) -> str:
        called.append(body)
        return f"{context.server} of {context.num_servers}: {body} #{len(called)}"

    @commands.register(8)
    def broken(body: str, context: CommandContext) -> str:
        called.append(body)
        raise RuntimeError(f"cannot {body}")

    return called


class Losing(Loopback):
    """Loses the first answer to every command; its clock goes on by a tenth of a second at each look."""

    def __init__(self, engine: Engine) -> None:
        super().__init__([engine], lambda: next(self.seconds))
        self.seconds = itertools.count(100.0, 0.1)
        self._asked: set[int] = set()

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        super().send(server, request)
        if isinstance(request.body, m.Command) and request.number not in self._asked:
            self._asked.add(request.number)
            self._replies.clear()


def test_a_function_may_compute_gradients_in_a_server_that_has_turned_them_off() -> None:
    @commands.register(9)
    def slope(body: str, _: CommandContext) -> str:
        x = torch.tensor(float(body), requires_grad=True)
        (x * x).backward()
        return str(x.grad)

    with torch.no_grad():
        assert client_of(1).command(9, b"3") == [b"tensor(6.)"]


def test_every_server_answers_with_what_its_own_function_gave() -> None:
    answers = client_of(3).command(7, "größe".encode())
    assert [answer.decode() for answer in answers] == [f"{at} of 3: größe #{at + 1}" for at in range(3)]


def test_a_local_store_answers_by_what_its_process_has_registered(calls: list[str]) -> None:
    assert LocalKVStore().send_command_to_servers(7, "hello") == ["0 of 1: hello #1"]
    assert calls == ["hello"]


def test_an_unknown_command_names_server_head_and_body_and_those_that_are_known() -> None:
    with pytest.raises(CommandError, match=r"server 0.*command 9 \(body 'x'\).*for: 7, 8"):
        client_of(2).command(9, b"x")


def test_a_function_that_raises_is_an_error_with_its_text_and_the_server_goes_on(calls: list[str]) -> None:
    client = client_of(1)
    with pytest.raises(CommandError, match=r"command 8 \(body 'do'\).*0: RuntimeError"):
        client.command(8, b"do")
    assert client.command(7, b"next") == [b"0 of 1: next #2"]


@pytest.mark.parametrize(
    ("given", "text"), [(None, "gave a NoneType on server 0"), ("ä" * (1 << 20), "gave 2097152 bytes")]
)
def test_an_answer_that_is_no_text_of_reasonable_length_is_an_error(given: Any, text: str) -> None:
    commands.register(9)(lambda body, context: given)
    with pytest.raises(CommandError, match=text):
        client_of(1).command(9, b"")


def test_a_body_that_is_no_text_never_reaches_the_function(calls: list[str]) -> None:
    with pytest.raises(CommandError, match="command 7"):
        client_of(1).command(7, b"\xff")
    assert not calls


def test_a_command_runs_once_although_its_answer_is_lost_and_it_is_sent_again(calls: list[str]) -> None:
    transport = Losing(Engine(EngineConfig()))
    client = Client(transport, SessionOptions("job", 0, 1), lambda: next(transport.seconds))
    client.connect()
    assert client.command(7, b"a") + client.command(7, b"b") == [b"0 of 1: a #1", b"0 of 1: b #2"]
    with pytest.raises(CommandError, match="cannot c"):
        client.command(8, b"c")
    assert calls == ["a", "b", "c"]


def test_a_repetition_that_comes_after_a_later_command_is_not_run(calls: list[str]) -> None:
    desk = Commands(CommandContext(0, 1))
    for number in (3, 5, 3, 5):
        answer = desk.answer(1, number, m.Command(7, b"%d" % number))
    assert calls == ["3", "5"]
    assert answer == m.Status({"answer": b"0 of 1: 5 #2"})
    assert isinstance(desk.answer(2, 3, m.Command(7, b"other session")), m.Status)


def test_what_a_session_was_answered_is_forgotten_when_it_ends() -> None:
    engine = Engine(EngineConfig())
    client = client_of(1, [engine])
    client.command(7, b"a")
    assert engine._commands._last
    client.close()
    assert not engine._commands._last


def test_a_number_that_is_registered_again_is_taken_over_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        commands.register(7)(lambda body, context: "new")
    assert "the handler of command 7 is replaced" in caplog.text
    assert client_of(1).command(7, b"") == [b"new"]


@pytest.mark.parametrize("head", [-1, 1 << 31, True, "7", None, 1.0])
def test_what_is_no_number_of_a_command_is_refused(head: Any) -> None:
    with pytest.raises(ConfigurationError, match="head"):
        commands.register(head)
    with pytest.raises(ConfigurationError, match="head"):
        LocalKVStore().send_command_to_servers(head, "")


@pytest.mark.parametrize(
    ("body", "text"),
    [(b"x", "must be a str, got bytes"), ("\ud800", "cannot be written as UTF-8"), ("x" * (1 << 20) + "x", "1048577")],
)  # fmt: skip
def test_a_body_that_cannot_travel_is_refused_before_anything_is_sent(
    body: Any, text: str, calls: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        LocalKVStore().send_command_to_servers(7, body)
    assert not calls


def test_the_longest_body_and_answer_fit_into_a_frame() -> None:
    text = bytes(commands.LONGEST)
    request = encode(m.Request(1, 2, 3, m.Command((1 << 31) - 1, text)))
    reply = encode(m.Reply(3, m.Status({"answer": text})))
    assert max(len(frame) for frame in (*request, *reply)) <= MAX_FRAME
