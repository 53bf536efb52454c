"""What travels with the commits of a worker, so that another process can continue where it ends.

A `ClientRecord` has what the script gave (`user`) and what the Trainer itself needs (`own`: options, counts, loss
scale, schedules), both as plain values. `own` is that before the round of the commit, because how the round ends is
not known yet; the successor learns that from the servers. `user` is what the script needs after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore_server.errors import ConfigurationError, ProtocolError
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.protocol.messages import MAX_CLIENT_STATE
from kvtrainer.client.tables import Takeover

STEP, JOINED, ASSIGNED, LAST = "step", "joined", "assigned", "last"
"""The kinds of rounds: with gradients of this worker, without data in a join() block, of new weights, and the last one
before the Trainer goes over to other parameters, which have a table of their own."""
MAX_USER_STATE = MAX_CLIENT_STATE - (16 << 10)
"""The most bytes of what the script gives."""


class ClientRecord(NamedTuple):
    kind: str
    round: int
    """Of the Trainer's table."""
    steps: int
    """How many steps of the rank count once that round has ended."""
    own: Mapping[str, Any]
    user: bytes
    """Packed; empty if the script gave nothing."""

    def pack(self) -> bytes:
        """Return the record as bytes. Raises ConfigurationError if it has more than servers store."""
        packed = pack_control(list(self))
        if len(packed) > MAX_CLIENT_STATE:
            raise ConfigurationError(
                f"what another process would need to continue has {len(packed)} bytes, {len(self.user)} of them the "
                f"script's client_state; up to {MAX_CLIENT_STATE} are stored with a step. Use fewer parameter groups, "
                "or train without resume()"
            )
        return packed


def unpack_client_record(packed: bytes) -> ClientRecord | None:
    """Return the record that a server stored; None if it has none. Raises ProtocolError if it cannot be read."""
    if not packed:
        return None
    values = unpack_control(packed)
    kinds = (str, int, int, dict, bytes)
    is_fit = isinstance(values, list) and len(values) == len(kinds) and all(map(isinstance, values, kinds))
    if not is_fit:
        raise ProtocolError(f"a server has stored {values!r:.80} for this rank, which no Trainer has sent")
    return ClientRecord(*values)


class Records(NamedTuple):
    """The records that a process needs that takes a rank over."""

    last: ClientRecord | None
    """That of the last round that the rank has committed on every server; None if none of its rounds brought one."""
    repeated: ClientRecord | None
    """That of the round after it, which was committed on some servers only."""


def find_records(takeover: Takeover) -> Records:
    """Return the records of a takeover. Raises ProtocolError if they cannot be read."""
    found = [unpack_client_record(packed) for own in takeover.client_states.values() for packed in own]
    by_round = {one.round: one for one in found if one is not None}
    former = [number for number in by_round if number <= takeover.first]
    return Records(by_round[max(former)] if former else None, by_round.get(takeover.first + 1))


def pack_user_state(value: Any) -> bytes:
    """Pack what a script gives; None is nothing.

    Raises:
        ConfigurationError: It has something else than plain values, or is too long.
    """
    if value is None:
        return b""
    _check_plain_client_state("client_state", value)
    packed = pack_control(value)
    if len(packed) > MAX_USER_STATE:
        raise ConfigurationError(
            f"client_state has {len(packed)} bytes; up to {MAX_USER_STATE} travel with a step. Keep what is longer in "
            "a file, and its name here"
        )
    return packed


def unpack_user_state(packed: bytes) -> Any:
    return unpack_control(packed) if packed else None


def _check_plain_client_state(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise ConfigurationError(f"{name} has the key {key!r:.80}; keys are str or int")
            _check_plain_client_state(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            _check_plain_client_state(f"{name}[{at}]", item)
    elif type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ConfigurationError(f"{name} is {value}, which has more than 64 bits; give it as text")
    elif value is not None and type(value) not in (str, int, float, bool, bytes):
        raise ConfigurationError(
            f"{name} is a {type(value).__name__}; what another process gets is made of dicts, lists, str, bytes, "
            "numbers, bool and None"
        )
