"""The lines of KVSTORE_LOG=debug on workers and servers: one for each message and each transition of a round.

Both kinds of lines have a fixed list of key=value pairs, separated by spaces; "-" stands for no value:

    message direction kind peer request table slots round bytes detail namespace
    round state table round rank waiting_for error namespace name

Tables and slots have the numbers that the server assigned. Several are written as 0,2 or 0..7, many as 0,2,5,…(40).
Names are JSON strings. docs/debugging.md explains every key.

Lines contain nothing else: no tensor values, no routing ids, tokens or nonces, no contents of commands. Heartbeats and
status queries are omitted, because they are sent every second.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvstore_server.protocol import messages as m
from kvstore_server.tracing import payload_in, payload_out

MESSAGE_KEYS = (
    "direction", "kind", "peer", "request", "table", "slots", "round", "bytes", "detail", "namespace",
)  # fmt: skip
ROUND_KEYS = ("state", "table", "round", "rank", "waiting_for", "error", "namespace", "name")
_REQUESTS_KEPT = 1024
"""How many requests' tables and rounds are remembered, because answers do not always name them."""
_LISTED = 4
"""How many numbers or names are listed individually."""


_LONGEST = 200
"""The longest name, in characters."""


class Peer(NamedTuple):
    name: str = "-"
    """server:INDEX, worker:RANK, or "-" for a process without a session."""
    namespace: str | None = None


class DebugLog:
    """Writes the lines of one process, or of one session, to a logger."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._requests: OrderedDict[tuple[Peer, int], tuple[str, str]] = OrderedDict()
        """(peer, request) → the text of its tables and rounds."""

    def message(self, direction: str, peer: Peer, number: int, body: m.RequestBody | m.ReplyBody) -> None:
        """Log one message.

        Args:
            direction: "sent", "received", or "queued" if the peer is slow; it is then sent later.
            number: The number of the request, which its answers have, too.
        """
        if _is_routine_in_log(peer, body):
            return
        if isinstance(body, m.Hello):  # the server does not know its sender yet
            peer = peer if peer.namespace else Peer(f"worker:{body.rank}", body.namespace)
        table, round_ = _logged_table(body), _logged_round(body)
        if table != "-":
            self._requests[peer, number] = table, round_
            if len(self._requests) > _REQUESTS_KEPT:
                self._requests.popitem(last=False)
        else:
            table, known = self._requests.get((peer, number), ("-", "-"))
            round_ = known if round_ == "-" else round_
        values = (
            direction, type(body).__name__, peer.name, number, table, _logged_slots(body), round_, _logged_bytes(body),
            _logged_detail(body), _quote_logged_name(peer.namespace),
        )  # fmt: skip
        self._logger.debug("message %s", _format_log_fields(MESSAGE_KEYS, values))

    def round(
        self,
        state: str,
        namespace: str,
        tables: Iterable[int],
        rounds: Iterable[int],
        names: Sequence[str],
        rank: int | None = None,
        waiting_for: Iterable[str] = (),
        error: BaseException | None = None,
    ) -> None:
        """Log one transition of a round of some tables.

        Args:
            state: The new state of the round, or of a rank's part in it.
            rank: The rank whose state changed; None: all ranks.
            waiting_for: Peers, as in messages.
            error: Why it failed; only the class is logged, because the exception has the text.
        """
        shown = ",".join(map(_quote_logged_name, names[:_LISTED])) + f",…({len(names)})" * (
            len(names) > _LISTED
        )
        waiting = ",".join(waiting_for)
        values = (
            state, _format_logged_ids(tables), _format_logged_ids(rounds), "-" if rank is None else rank, waiting or
            "-", "-" if error is None else type(error).__name__, _quote_logged_name(namespace), shown or "-",
        )  # fmt: skip
        self._logger.debug("round %s", _format_log_fields(ROUND_KEYS, values))


def debug_log(name: str) -> DebugLog | None:
    """Return the log of the logger `name`, or None if debug lines are off. Callers keep the result."""
    logger = logging.getLogger(name)
    return DebugLog(logger) if logger.isEnabledFor(logging.DEBUG) else None


def _format_log_fields(keys: Sequence[str], values: Sequence[object]) -> str:
    return " ".join([f"{key}={value}" for key, value in zip(keys, values, strict=True)])


def _quote_logged_name(name: str | None) -> str:
    return "-" if name is None else json.dumps(name[:_LONGEST])


def _format_logged_ids(numbers: Iterable[int]) -> str:
    """Format distinct numbers in ascending order: a few individually, a contiguous range by its ends."""
    found = sorted(set(map(int, numbers)))
    if not found:
        return "-"
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}..{found[-1]}"
    listed = ",".join(map(str, found[:_LISTED]))
    return listed if len(found) <= _LISTED else f"{listed},…({len(found)})"


def _is_routine_in_log(peer: Peer, body: m.RequestBody | m.ReplyBody) -> bool:
    if isinstance(body, m.Heartbeat | m.GetStatus):
        return True
    is_heartbeat = isinstance(body, m.Pending) and not body.why
    return is_heartbeat or (isinstance(body, m.Status) and peer.namespace is None)


def _logged_table(body: Any) -> str:
    if isinstance(body, m.Contribute):
        return _format_logged_ids(body.commits[:, m.COMMIT_TABLE].tolist())
    if isinstance(body, m.Done):
        return _format_logged_ids(body.rounds[:, 0].tolist())
    if isinstance(body, m.Pull):
        return _format_logged_ids(body.tables)
    table = getattr(body, "table", -1)
    if isinstance(table, str):  # of a Register, before the table has a number
        return _quote_logged_name(table)
    return "-" if table < 0 else str(table)


def _logged_round(body: Any) -> str:
    if isinstance(body, m.Contribute):
        return _format_logged_ids(
            [*body.commits[:, m.COMMIT_ROUND].tolist(), *body.pushes[:, m.PUSH_ROUND].tolist()]
        )
    if isinstance(body, m.Done):
        return _format_logged_ids(body.rounds[:, 1].tolist())
    if isinstance(body, m.Registered):
        return str(body.next_round)
    round_ = getattr(body, "round", -1)
    return "-" if round_ < 0 else str(round_)


def _logged_slots(body: Any) -> str:
    words: list[int] = []
    if isinstance(body, m.Contribute):
        words = body.pushes[:, m.PUSH_SLOT].tolist()
    elif isinstance(body, m.Weights):
        words = [*body.parts[:, m.PART_SLOT].tolist(), *body.locations[:, m.LOCATION_SLOT].tolist()]
    elif isinstance(body, m.Missing):
        words = list(body.slots)
    return _format_logged_ids(m.unpack_slot(word)[0] for word in words)


_DATA: dict[type[Any], Callable[[Any], int]] = {
    m.Contribute: payload_in,
    m.Weights: payload_out,
    m.SliceState: lambda body: len(body.data),
    m.Gather: lambda body: len(body.data),
    m.Gathered: lambda body: sum(map(len, body.parts)),
    m.PullRows: lambda body: sum(map(len, body.ids)),
    m.Command: lambda body: len(body.body),
}


def _logged_bytes(body: Any) -> int:
    size = _DATA.get(type(body))
    return 0 if size is None else size(body)


def _logged_detail(body: Any) -> str:
    """Return the most important detail of a message that says why something does not proceed."""
    if isinstance(body, m.Failed):
        return body.code if body.code.isidentifier() else "-"  # a peer may have written anything
    if isinstance(body, m.Pending):
        return ",".join([f"worker:{rank}" for rank in body.waiting_for]) or "-"
    return ",".join([f"worker:{rank}" for rank in body.ranks]) or "-" if isinstance(body, m.Vetoed) else "-"
