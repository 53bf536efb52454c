"""What processes say to the scheduler and what it answers: one msgpack list each, checked before it is used.

Each question is answered with the present state, so a process asks again and again until the answer is the one that
it waits for, and a lost or repeated message changes nothing.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import msgpack

from kvstore_server.errors import WIRE_ERRORS, ConnectTimeoutError, KVStoreError, ProtocolError
from kvtrainer.dmlc import SERVER, WORKER

VERSION = 1
MAX_BYTES = 1 << 20
"""The longest message: the addresses of all servers."""
_MAX_TEXT = 5000
_MAX_NUMBER = 1 << 62
_ERRORS: dict[str, type[KVStoreError]] = {**WIRE_ERRORS, ConnectTimeoutError.__name__: ConnectTimeoutError}


@dataclass(frozen=True)
class Join:
    """A server or a worker is there.

    Args:
        token: A random name of the process.
        rank: The rank that it must have; -1 for any.
        task: Orders processes without a rank; -1 where the launcher gives no such number.
        host, started, pid: Order the others: the host's name, and when it was started there, in any unit.
        machine: Equal for processes that reach each other on loopback.
    """

    token: str
    role: str
    num_workers: int
    num_servers: int
    rank: int
    task: int
    host: str
    started: int
    pid: int
    machine: str

    @property
    def name(self) -> str:
        return f"{self.role} on {self.host} (process {self.pid})"


@dataclass(frozen=True)
class Ready:
    """A server listens: for workers' requests at `address`, for signs of life of workers at `attendance`."""

    token: str
    address: str
    attendance: str


@dataclass(frozen=True)
class Alive:
    """A worker that has the table lives; also said to servers."""

    token: str


@dataclass(frozen=True)
class Done:
    """A worker's process ends; also said to servers."""

    token: str


@dataclass(frozen=True)
class GivingUp:
    """A process cannot go on, so nobody can."""

    token: str
    text: str


@dataclass(frozen=True)
class Waiting:
    """Some are still missing; says who."""

    missing: str


@dataclass(frozen=True)
class Assigned:
    """To a server: all are there, and it is number `rank`; `is_one_machine` if all reach each other on loopback."""

    rank: int
    is_one_machine: bool


@dataclass(frozen=True)
class Table:
    """All are there and all servers listen.

    Args:
        rank: Of the process that asked.
        servers: Addresses by index.
        attendance: Where the same servers take signs of life.
        workers: To servers, the tokens of all workers by rank; else empty.
    """

    rank: int
    servers: tuple[str, ...]
    attendance: tuple[str, ...]
    workers: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """The job cannot begin: an error of this code and text."""

    code: str
    text: str

    @classmethod
    def because(cls, error: KVStoreError) -> Refused:
        code = type(error).__name__
        return cls(code if code in _ERRORS else KVStoreError.__name__, str(error)[:_MAX_TEXT])

    def error(self) -> KVStoreError:
        return _ERRORS.get(self.code, KVStoreError)(self.text)


Question: TypeAlias = Join | Ready | Alive | Done | GivingUp
Answer: TypeAlias = Waiting | Assigned | Table | Refused

QUESTIONS: tuple[type[Any], ...] = (Join, Ready, Alive, Done, GivingUp)
ANSWERS: tuple[type[Any], ...] = (Waiting, Assigned, Table, Refused)
_KINDS = QUESTIONS + ANSWERS


def encode(message: Question | Answer) -> bytes:
    """The bytes of a message."""
    return bytes(msgpack.packb([VERSION, _KINDS.index(type(message)), *astuple(message)], use_bin_type=True))


def decode_question(data: bytes) -> Question:
    """What a process says. Raises ProtocolError as `decode_answer`."""
    return _decode(data, QUESTIONS)  # type: ignore[no-any-return]


def decode_answer(data: bytes) -> Answer:
    """What the scheduler says.

    Raises:
        ProtocolError: the bytes are no such message of this version, or a value has the wrong type or size.
    """
    return _decode(data, ANSWERS)  # type: ignore[no-any-return]


def _decode(data: bytes, allowed: tuple[type[Any], ...]) -> Any:
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0, max_bin_len=0, max_map_len=0)
    except Exception as error:  # msgpack raises a family of unrelated classes on hostile input
        raise ProtocolError(f"a message of {len(data)} bytes cannot be decoded: {error}") from None
    if not isinstance(values, list) or len(values) < 2 or values[0] != VERSION or type(values[1]) is not int:
        raise ProtocolError(f"no message of version {VERSION}: {values!r:.80}")
    kind = _KINDS[values[1]] if 0 <= values[1] < len(_KINDS) else None
    if kind is None or kind not in allowed:
        raise ProtocolError(f"a message of kind {values[1]} has no place here")
    declared = [field.type for field in kind.__dataclass_fields__.values()]
    if len(values) - 2 != len(declared) or not all(map(_fits, values[2:], declared)):
        raise ProtocolError(f"a {kind.__name__} message must not hold {values[2:]!r:.200}")
    message = kind(*(tuple(value) if isinstance(value, list) else value for value in values[2:]))
    if isinstance(message, Join) and message.role not in (SERVER, WORKER):
        raise ProtocolError(f"no role that joins: {message.role!r:.80}")
    return message


def _fits(value: Any, declared: str) -> bool:
    if declared == "str":
        return isinstance(value, str) and len(value) <= _MAX_TEXT
    if declared == "int":
        return type(value) is int and -1 <= value <= _MAX_NUMBER
    if declared == "bool":
        return isinstance(value, bool)
    return isinstance(value, list) and all(_fits(item, "str") for item in value)
