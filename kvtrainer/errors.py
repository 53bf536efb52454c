"""Every error that `kvtrainer` raises on purpose: those of stores, and those specific to a training loop."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from kvstore_server.errors import AccessDeniedError as AccessDeniedError
from kvstore_server.errors import CommandError as CommandError
from kvstore_server.errors import ConfigurationError as ConfigurationError
from kvstore_server.errors import ConnectTimeoutError as ConnectTimeoutError
from kvstore_server.errors import DeadlineError as DeadlineError
from kvstore_server.errors import FencedError as FencedError
from kvstore_server.errors import KeyNotFoundError as KeyNotFoundError
from kvstore_server.errors import KVStoreError as KVStoreError
from kvstore_server.errors import NonFiniteGradientError as NonFiniteGradientError
from kvstore_server.errors import OptimizerError as OptimizerError
from kvstore_server.errors import PlanMismatchError as PlanMismatchError
from kvstore_server.errors import ProtocolError as ProtocolError
from kvstore_server.errors import RoundAbortedError as RoundAbortedError
from kvstore_server.errors import SchedulerInUseError as SchedulerInUseError
from kvstore_server.errors import ServerLostState as ServerLostState
from kvstore_server.errors import ServerStoppingError as ServerStoppingError
from kvstore_server.errors import ServerUnreachableError as ServerUnreachableError
from kvstore_server.errors import ShapeMismatchError as ShapeMismatchError
from kvstore_server.errors import UnknownNameError as UnknownNameError
from kvstore_server.errors import VersionMismatchError as VersionMismatchError
from kvstore_server.errors import WorkerLostError as WorkerLostError

REPLACED = (
    "Did backward() run, and on the model that this Trainer was built for? load_state_dict(assign=True), and whatever "
    "else gives a module new Parameter objects, leaves the Trainer with the old ones: build a new Trainer then."
)
"""A hint for errors where no parameter has a new gradient."""

_Kind = TypeVar("_Kind", bound=KVStoreError)


def file_error(
    kind: type[_Kind], text: str, cause: BaseException | int, filename: str | os.PathLike[str]
) -> _Kind:
    """Return an error of this kind that is also Python's own for the cause, such as FileNotFoundError.

    Args:
        cause: The exception that was raised, or an `errno` number. Without a number the error is a plain `kind`.
        filename: As the user gave it.
    """
    number = cause if isinstance(cause, int) else getattr(cause, "errno", None)
    if not isinstance(number, int):
        return kind(text)
    made: Any = _with_oserror_base(kind, number)(text)  # type: ignore[arg-type]
    made.errno, made.strerror, made.filename = number, os.strerror(number), os.fspath(filename)
    return made  # type: ignore[no-any-return]


@functools.cache
def _with_oserror_base(kind: type[KVStoreError], number: int) -> type[KVStoreError]:
    native = type(OSError(number, ""))
    if issubclass(kind, native):
        return kind

    # The combined class is made at run time, so pickle rebuilds the error through `file_error`.
    def reduce(self: OSError) -> tuple[Any, ...]:
        return file_error, (kind, str(self), self.errno, self.filename)

    return type(kind.__name__, (kind, native), {"__module__": kind.__module__, "__reduce__": reduce})


def level_of_user() -> int:
    """Return the `stacklevel` with which a warning by the caller points to the user's line that called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_of_library(module: str) -> bool:
    """Return whether a module is part of this package, or torch's wrapper around `Optimizer.step`."""
    return module.partition(".")[0] == "kvtrainer" or module == "torch.optim.optimizer"


ROW_MAJOR = (
    "a Trainer keeps weights row-major, in the order in which workers exchange them. Convolutions compute in "
    "channels_last all the same where their input has it: give the model x.to(memory_format=torch.channels_last)"
)
"""Explains the memory format, and what to do instead."""


class ParameterMovedError(KVStoreError):
    """A parameter's storage was replaced after the Trainer took it over, so updates would not reach the model."""


class WeightsWrittenError(KVStoreError):
    """The training loop wrote to weights that a store owns. The next step would overwrite the changes."""

    @classmethod
    def of(cls, names: Sequence[str], total: int) -> WeightsWrittenError:
        """Build the error; `names` are the parameters that were written, of `total`."""
        return cls(
            f"{len(names)} of {total} parameters were written to since the last step, and this step would overwrite "
            f"them with the kvstore's weights: {', '.join(names)}. Call trainer.set_data() on every worker after such "
            "a write, which publishes rank 0's weights; or build the Trainer with update_on_kvstore=False, which keeps "
            "the weights in this process"
        )


class StaleGradientError(KVStoreError, UserWarning):
    """A parameter has no new gradient since the last step.

    It is also a `UserWarning`, which Gluon raises in this case.
    """

    @classmethod
    def of(
        cls, names: Sequence[str], total: int, is_any_fresh: bool, written: Sequence[str] = ()
    ) -> StaleGradientError:
        """Build the error.

        Args:
            names: The parameters without a new gradient, of `total`.
            is_any_fresh: Whether any other parameter has one.
            written: Those of `names` whose used gradient was written in place.
        """
        hint = "" if is_any_fresh else f" {REPLACED}"
        if written:
            hint = (
                f" Those of {', '.join(written)} were used and then written in place; the values may be new, or old "
                "ones that were clipped. If they are new, assign them (p.grad = values), or call "
                "zero_grad(set_to_none=False) before you write."
            )
        return cls(
            f"{len(names)} of {total} parameters got no gradient since the last step: {', '.join(names)}.{hint} If the "
            "model uses only some of them on purpose, call step(batch_size, ignore_stale_grad=True)"
        )


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument has a wrong type."""


class RowIdError(ConfigurationError, IndexError):
    """A row id is outside of a key's rows."""


class RowSparseError(KVStoreError, RuntimeError):
    """A row-sparse parameter was used in a way that is not possible while a store has its values."""


class BackwardTwiceError(KVStoreError, RuntimeError):
    """The backward pass of a batch was started a second time."""


class ConcurrentCallError(KVStoreError, RuntimeError):
    """A Trainer or store was called while another thread was in a call of it."""


class AmpNotInitializedError(ConfigurationError):
    """A loss should be scaled, but the Trainer has no loss scaler."""


class AnomalousParametersError(KVStoreError, RuntimeError):
    """Parameters get no gradient from a loss, and the Trainer was told to raise then. Names them."""


class NonFiniteLossError(KVStoreError, FloatingPointError):
    """A loss is infinite or NaN."""


class NonFiniteNormWarning(UserWarning):
    """The norm of the gradients is infinite or NaN, so they were not clipped. Warned, not raised."""


class ScheduleWarning(UserWarning):
    """A schedule computed an impossible value, and the nearest possible one is used. Warned, not raised."""


class SparsePullWarning(UserWarning):
    """A pull into sparse tensors was ignored, as in MXNet; use `row_sparse_pull`. Warned once per store."""


class NoGradientWarning(UserWarning):
    """No parameter had a new gradient, so this worker contributed nothing to a step. Warned once per Trainer."""


class GradientWriteWarning(UserWarning):
    """Gradients that a step had used were written in place. Warned once per Trainer, not raised.

    The values may be new, or old ones that were clipped.
    """


class SharedWeightsWarning(UserWarning):
    """A process, NumPy array or tensor still uses the memory from which parameters were moved. Warned, not raised."""


class SparseGradientWarning(UserWarning):
    """Sparse gradients are treated as dense ones where torch's optimizer refuses them. Warned once per Trainer."""


class MemoryFormatWarning(UserWarning):
    """Parameters lose their memory format, such as channels_last. Warned once per Trainer."""


class TorchNameWarning(UserWarning):
    """A name spelled as a torch class selected Gluon's optimizer, whose defaults differ. Warned, not raised."""


class NotInitializedError(KVStoreError, RuntimeError):
    """A parameter has no shape yet, because its lazy module has not seen an input."""


class StateFileError(KVStoreError, OSError):
    """A file of saved states cannot be written or read, or is not one.

    If the operating system reported the cause, this is also that error (such as FileNotFoundError), with errno and
    filename.
    """


class ClusterError(KVStoreError, RuntimeError):
    """A process of a local cluster ended without an exception that could be raised in this one."""


class WorkerTraceback(KVStoreError):
    """Where a function failed on a worker: the cause of the exception that a cluster raises for it.

    Args:
        rank: The worker's rank.
        text: Its traceback, and how other workers failed after it.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n{self.text}"


class TraceFileError(KVStoreError, OSError):
    """The trace file of a profiler cannot be written."""


class StateMismatchError(ConfigurationError, RuntimeError):
    """Saved states are for another model or optimizer; the message names every difference.

    It is also a ValueError, as torch raises for an optimizer's states, and a RuntimeError, as torch raises for a
    model's.
    """


class JointStepError(KVStoreError, NotImplementedError):
    """Several Trainers were asked to do together what each must do on its own."""


class CheckpointKeyError(KVStoreError, KeyError):
    """A checkpoint lacks a part that should be resumed."""


class RegistryError(ConfigurationError, KeyError):
    """A name cannot be registered, or a configuration has no `type`."""


class UnregisteredNameError(RegistryError, UnknownNameError):
    """A configuration asks for a name that is not registered."""


class GroupValueError(ConfigurationError, KeyError):
    """A parameter group lacks the value that should be scheduled."""


class CustomImportError(ConfigurationError, ImportError):
    """A module listed in a configuration cannot be imported."""


class FailedImportWarning(UserWarning):
    """A module of `custom_imports` could not be imported, which the configuration allows. Warned, not raised."""


class UnmatchedRuleWarning(UserWarning):
    """A rule for parameter options matches no parameter. Warned, not raised."""


class DuplicateParameterWarning(UserWarning):
    """Parameters shared by several modules have the options of the first one. Warned, not raised."""
