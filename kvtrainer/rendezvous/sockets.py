"""The sockets of the rendezvous: of the scheduler, of those who ask it, and of those who keep attendance."""

from __future__ import annotations

import ipaddress
import os
import socket as net
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import zmq

from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    KVStoreError,
    ProtocolError,
    describe,
)
from kvstore_server.tcp import watch
from kvtrainer.rendezvous import messages as m
from kvtrainer.rendezvous.attendance import Attendance
from kvtrainer.rendezvous.table import Rendezvous

_ASK_EVERY = 0.1
_SIGN_EVERY = 1.0
_STANDSTILL = 2.0
"""A turn of a loop that takes longer, in seconds, means that this process itself was stopped."""
_LAST_WORDS = 2.0
"""Seconds in which those who ask are told that the job cannot begin."""
_LINGER_MS = 1000

_A = TypeVar("_A", bound=m.Answer)


class Asking:
    """One process's side of the talk with the scheduler. Not thread-safe; another thread may take it over."""

    def __init__(self, root: str, token: str) -> None:
        self.token = token
        self._root = root
        self._context = zmq.Context()
        self._socket = _dealer(self._context, root)

    def ask(
        self,
        question: m.Question,
        wanted: type[_A],
        timeout: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> _A:
        """Ask until the answer is a `wanted`; blocks up to `timeout` seconds. The others learn if this fails.

        Raises:
            ConnectTimeoutError: the scheduler did not answer, or processes are missing; says which.
            KVStoreError: the scheduler's reason why the job cannot begin.
        """
        try:
            return self._ask(question, wanted, timeout, cancelled)
        except BaseException as error:
            self._send(m.GivingUp(self.token, describe(error)))
            raise

    def give_up(self, error: BaseException) -> None:
        """Tell the scheduler that this process cannot go on."""
        self._send(m.GivingUp(self.token, describe(error)))

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MS)
        self._context.term()

    def _ask(
        self, question: m.Question, wanted: type[_A], timeout: float, cancelled: Callable[[], bool]
    ) -> _A:
        deadline = time.monotonic() + timeout
        heard, missing = 0.0, ""
        while (now := time.monotonic()) < deadline and not cancelled():
            self._send(question)
            answer = self._receive(_ASK_EVERY)
            if answer is None:
                continue
            if isinstance(answer, wanted):
                return answer
            if isinstance(answer, m.Refused):
                raise answer.error()
            heard, missing = now, answer.missing if isinstance(answer, m.Waiting) else missing
            time.sleep(_ASK_EVERY)
        if now - heard < max(1.0, timeout / 2):
            raise ConnectTimeoutError(
                f"{missing or 'the scheduler was not done'}: waited {timeout:g} s; look for the last words of those "
                "who are missing (connect_timeout=… or KVSTORE_CONNECT_TIMEOUT raises the limit)"
            )
        raise ConnectTimeoutError(
            f"the scheduler at {self._root} {'fell silent' if heard else 'did not answer'} within {timeout:g} s; is "
            "the process with DMLC_ROLE=scheduler running, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT right? "
            "(connect_timeout=… or KVSTORE_CONNECT_TIMEOUT raises the limit)"
        )

    def _send(self, question: m.Question) -> None:
        with suppress(zmq.Again):  # nobody is connected; it is asked again
            self._socket.send(m.encode(question), zmq.NOBLOCK)

    def _receive(self, seconds: float) -> m.Answer | None:
        if not self._socket.poll(int(seconds * 1000)):
            return None
        try:
            return m.decode_answer(b"".join(self._socket.recv_multipart()))
        except ProtocolError as error:
            raise ProtocolError(
                f"what listens at {self._root} is no scheduler of this version: {error}"
            ) from None


class Desk:
    """A socket to which others bring questions."""

    def __init__(self, host: str, port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _bound(self._socket)
        try:
            self._socket.bind(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {host}, port {port}: {error}; is another process there, or is this not an address "
                "of this machine?"
            ) from None

    @property
    def address(self) -> str:
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def turn(self, answer: Callable[[m.Question, float], m.Answer | None]) -> bool:
        """Wait a moment for questions and answer them; whether this process stood still meanwhile."""
        began = time.monotonic()
        ready = self._socket.poll(int(_ASK_EVERY * 1000))
        now = time.monotonic()
        for _ in range(1000 if ready else 0):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                reply = answer(m.decode_question(b"".join(frames[1:])), now)
            except KVStoreError as error:
                reply = m.Refused.because(error)
            if reply is not None:
                with suppress(zmq.ZMQError):  # it is gone, or does not read
                    self._socket.send_multipart([frames[0], m.encode(reply)], zmq.NOBLOCK)
        return now - began > _STANDSTILL

    def close(self) -> None:
        self._socket.close(linger=_LINGER_MS)
        self._context.term()


def keep_the_meeting(desk: Desk, meeting: Rendezvous, timeout: float, dead_after: float) -> None:
    """The scheduler's work: let everybody find the others, then wait until all workers are done.

    Raises:
        KVStoreError: why the job could not begin; everybody who asked was told.
    """
    deadline = time.monotonic() + timeout
    while not meeting.is_complete and meeting.failure is None:
        desk.turn(meeting.handle)
        meeting.expire(time.monotonic())
        if time.monotonic() >= deadline and not meeting.is_complete:
            meeting.fail_late(timeout)
    if meeting.failure is not None:
        deadline = time.monotonic() + _LAST_WORDS
        while not meeting.is_everybody_told() and time.monotonic() < deadline:
            desk.turn(meeting.handle)
        raise meeting.failure
    attendance = Attendance(meeting.workers, dead_after, time.monotonic())

    def answer(question: m.Question, now: float) -> m.Answer | None:
        attendance.handle(question, now)
        return None if isinstance(question, m.Alive | m.Done) else meeting.handle(question, now)

    deadline = time.monotonic() + dead_after
    until_over(desk, attendance, answer, lambda: False)
    while not meeting.is_everybody_told() and time.monotonic() < deadline:
        desk.turn(answer)


def until_over(
    desk: Desk,
    attendance: Attendance,
    answer: Callable[[m.Question, float], m.Answer | None],
    cancelled: Callable[[], bool],
) -> None:
    """Keep attendance until no worker is left."""
    while not cancelled():
        if desk.turn(answer):
            attendance.excuse_silence(time.monotonic())
        if attendance.is_over(time.monotonic()):
            return


class Presence:
    """A worker's signs of life to the scheduler and to every server, from a thread of its own until `close`."""

    def __init__(self, token: str, addresses: Sequence[str]) -> None:
        self._token = token
        self._addresses = list(addresses)
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-presence", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that this process ends; takes a second at most. Does nothing in a forked process."""
        if os.getpid() == self._pid:
            self._stop.set()
            self._thread.join(_LINGER_MS / 1000 + 1.0)

    def _run(self) -> None:
        context = zmq.Context()
        sockets = [_dealer(context, address) for address in self._addresses]
        while not self._stop.wait(_SIGN_EVERY):
            _tell(sockets, m.Alive(self._token))
        _tell(sockets, m.Done(self._token))
        for socket in sockets:
            socket.close(linger=_LINGER_MS)
        context.term()


def resolve(host: str) -> str:
    """The numeric address of a host, which is what a socket can listen on.

    Raises:
        ConfigurationError: nobody knows the host.
    """
    try:
        return str(net.getaddrinfo(host.strip("[]"), None, type=net.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"cannot find the address of host {host!r}: {error}") from None


def host_towards(address: str) -> str:
    """The address that this machine has on the way to tcp://host:port; sends nothing."""
    parts = urlsplit(address)
    target = resolve(parts.hostname or "")
    family = net.AF_INET6 if ":" in target else net.AF_INET
    with net.socket(family, net.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, parts.port or 1))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigurationError(f"there is no way to {address}: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _tell(sockets: Sequence[Any], question: m.Question) -> None:
    for socket in sockets:
        with suppress(zmq.Again):  # whoever listened there has ended
            while socket.poll(0):
                socket.recv_multipart()
            socket.send(m.encode(question), zmq.NOBLOCK)


def _dealer(context: Any, address: str) -> Any:
    socket = context.socket(zmq.DEALER)
    _bound(socket)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing piles up for a peer that is not there
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.connect(address)
    return socket


def _bound(socket: Any) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_BYTES)
    socket.setsockopt(zmq.SNDHWM, 100)
    socket.setsockopt(zmq.RCVHWM, 100)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    watch(socket)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
