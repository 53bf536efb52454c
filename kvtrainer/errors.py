"""Every error that `kvtrainer` raises on purpose: the store's, and two that only a training loop knows."""

from __future__ import annotations

from kvstore_server.errors import (
    ConfigurationError,
    ConnectTimeoutError,
    DeadlineError,
    FencedError,
    KeyNotFoundError,
    KVStoreError,
    OptimizerError,
    PlanMismatchError,
    ProtocolError,
    RoundAbortedError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    ShapeMismatchError,
    UnknownNameError,
    VersionMismatchError,
    WorkerLostError,
)

__all__ = [
    "ConfigurationError",
    "ConnectTimeoutError",
    "DeadlineError",
    "FencedError",
    "KVStoreError",
    "KeyNotFoundError",
    "OptimizerError",
    "ParameterMovedError",
    "PlanMismatchError",
    "ProtocolError",
    "RoundAbortedError",
    "ServerLostState",
    "ServerStoppingError",
    "ServerUnreachableError",
    "ShapeMismatchError",
    "StaleGradientError",
    "UnknownNameError",
    "VersionMismatchError",
    "WorkerLostError",
]


class ParameterMovedError(KVStoreError):
    """A parameter's data were replaced after the trainer took it over: updates would not reach the model."""


class StaleGradientError(KVStoreError, UserWarning):
    """A parameter has had no new gradient since the last step.

    Also a `UserWarning`, which is what Gluon raises for the same mistake.
    """
