"""The error tree, and the code of each class on the wire.

    KVStoreError
    ├── ConfigurationError (ValueError)      a wrong argument, option or environment variable
    │   ├── UnknownNameError                 no store or optimizer of that name; lists the valid ones
    │   └── PlanMismatchError                workers have different models, or disagree on a number
    ├── SchedulerInUseError (UserWarning)    a learning rate was set that a scheduler decides
    ├── KeyNotFoundError (KeyError)          push or pull of a key that was never initialised
    ├── ShapeMismatchError (ValueError)      wrong shape or dtype for a key
    ├── ProtocolError                        a malformed or unexpected message
    │   └── VersionMismatchError             the peer speaks another protocol version
    ├── DeadlineError (TimeoutError)         a wait reached its deadline; names who was missing
    │   ├── ConnectTimeoutError              no server answered at that address
    │   └── ServerUnreachableError           a server stopped answering in the middle of the job
    ├── AccessDeniedError                    a key that the server does not accept, or that is not for this
    ├── WorkerLostError                      a member of the round left, died or was not heard from
    │   └── RepeatedRoundError               and the others make the round again; no user sees it
    ├── RoundAbortedError                    a member raised in the middle of the round
    ├── FencedError                          this process may not speak for the rank, or no longer
    ├── ServerLostState                      the server was restarted and no longer holds this job
    ├── ServerStoppingError                  the server is draining and takes no new round, or was shut down
    ├── NonFiniteGradientError (FloatingPointError)   a gradient that cannot be compressed
    ├── RecoveryError                        what a server stored before its restart cannot be used
    ├── CommandError                         a command that no function on the servers answers, or that raised
    └── OptimizerError                       the optimizer raised while a round was applied

This module knows nothing about sockets or tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVStoreError(Exception):
    """Base of all errors that this project raises deliberately."""

    def __str__(self) -> str:
        # KeyError would print the repr of its message.
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigurationError(KVStoreError, ValueError):
    """An argument, option or environment variable is wrong."""


class UnknownNameError(ConfigurationError):
    """No store or optimizer is registered under that name."""


class PlanMismatchError(ConfigurationError):
    """Workers of one job disagree: on their model, their optimizer, a learning rate or the topology."""


class SchedulerInUseError(KVStoreError, UserWarning):
    """A learning rate was set on an optimizer that takes it from a scheduler.

    Also a `UserWarning`, which is what Gluon raises for the same mistake.
    """


class KeyNotFoundError(KVStoreError, KeyError):
    """A key was used before it was initialised."""


class ShapeMismatchError(KVStoreError, ValueError):
    """A value does not have the shape or dtype under which its key was initialised."""


class ProtocolError(KVStoreError):
    """A message could not be understood, or came out of turn."""


class VersionMismatchError(ProtocolError):
    """The peer speaks another version of the protocol."""


class DeadlineError(KVStoreError, TimeoutError):
    """A wait reached its deadline."""


class ConnectTimeoutError(DeadlineError):
    """No server answered at an address within the deadline."""


class ServerUnreachableError(DeadlineError):
    """A server that answered before has stopped answering."""


class AccessDeniedError(KVStoreError):
    """The server does not know this process's key, or the key does not allow what it asked for."""


class WorkerLostError(KVStoreError):
    """A worker that a round or a barrier needs has left, died or fallen silent."""


class RepeatedRoundError(WorkerLostError):
    """A worker was lost or raised in the middle of a round, and its job goes on without it.

    The round counts nowhere: servers that have applied it undo it, and the other members make it again.
    """


class RoundAbortedError(KVStoreError):
    """A worker raised in the middle of a round, so no contribution to it was applied."""


class FencedError(KVStoreError):
    """This process may not speak for its rank: another one has taken it over, or the session is not its own."""


class ServerLostState(KVStoreError):
    """The server at this address is not the one that holds this job's state."""


class ServerStoppingError(KVStoreError):
    """The server was shut down, or is draining before it stops and takes no new round."""


class OptimizerError(KVStoreError):
    """The optimizer raised while a round was being applied; the weights are as before the round."""


class RecoveryError(KVStoreError):
    """What a server stored for its restart is damaged, is of another server, or cannot be stored."""


class CommandError(KVStoreError):
    """A server has no handler for a command, or the handler raised."""


class NonFiniteGradientError(KVStoreError, FloatingPointError):
    """A gradient has an infinity or a NaN, or overflows when added to its residual."""


WIRE_ERRORS: dict[str, type[KVStoreError]] = {
    cls.__name__: cls
    for cls in (
        KVStoreError,
        ConfigurationError,
        UnknownNameError,
        PlanMismatchError,
        KeyNotFoundError,
        ShapeMismatchError,
        ProtocolError,
        VersionMismatchError,
        DeadlineError,
        ConnectTimeoutError,
        ServerUnreachableError,
        AccessDeniedError,
        WorkerLostError,
        RepeatedRoundError,
        RoundAbortedError,
        FencedError,
        ServerLostState,
        ServerStoppingError,
        OptimizerError,
        RecoveryError,
        CommandError,
    )
}


_LONGEST = 4000
"""The longest text of an error on the wire, in characters; a user's exception may have any length."""


def similar_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a wrong one may have been meant to be, best first; case does not matter."""
    by_case = {one.casefold(): one for one in known}
    return [by_case[found] for found in difflib.get_close_matches(name.casefold(), by_case)]


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the end of a message about wrong names: a question with similar names, or nothing."""
    names, right = [given] if isinstance(given, str) else given, list(known)
    wrong = [one for one in names if isinstance(one, str)] if isinstance(names, Iterable) else []
    near = list(dict.fromkeys(found for one in wrong for found in similar_names(one, right)))
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""


def describe(error: BaseException | None) -> str:
    """Return an error as the reason of another one: its class and text, shortened."""
    return f"{type(error).__name__}: {error}"[:500]


def to_wire(error: KVStoreError) -> tuple[str, str]:
    """Return the code and the text of an error for the wire."""
    code = type(error).__name__
    return (code if code in WIRE_ERRORS else KVStoreError.__name__), str(error)[:_LONGEST]


def from_wire(code: str, text: str) -> KVStoreError:
    """Rebuild an error that a peer reported; an unknown code becomes the base class."""
    return WIRE_ERRORS.get(code, KVStoreError)(text)
