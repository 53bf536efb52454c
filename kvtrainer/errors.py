"""Every error that `kvtrainer` raises on purpose: the store's, and those that only a training loop knows."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

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
"""What to look for where no parameter at all has a new gradient."""

_Kind = TypeVar("_Kind", bound=KVStoreError)


def file_error(
    kind: type[_Kind], text: str, cause: BaseException | int, filename: str | os.PathLike[str]
) -> _Kind:
    """Make an error of a kind that is also the one that Python has for this: FileNotFoundError and others.

    Args:
        cause: What was raised, or a number of `errno`. What is no error of the operating system adds nothing.
        filename: As the user gave it.
    """
    number = cause if isinstance(cause, int) else getattr(cause, "errno", None)
    if not isinstance(number, int):
        return kind(text)
    made: Any = _native(kind, number)(text)  # type: ignore[arg-type]
    made.errno, made.strerror, made.filename = number, os.strerror(number), os.fspath(filename)
    return made  # type: ignore[no-any-return]


@functools.cache
def _native(kind: type[KVStoreError], number: int) -> type[KVStoreError]:
    native = type(OSError(number, ""))
    if issubclass(kind, native):
        return kind

    def reduce(self: OSError) -> tuple[Any, ...]:
        return file_error, (kind, str(self), self.errno, self.filename)

    return type(kind.__name__, (kind, native), {"__module__": kind.__module__, "__reduce__": reduce})


def level_of_user() -> int:
    """Count the frames from the caller up to the script. A warning points there: at what called this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    """Return whether a module is of this package, or wraps the steps of optimizers."""
    return module.partition(".")[0] == "kvtrainer" or module == "torch.optim.optimizer"


ROW_MAJOR = (
    "a Trainer keeps weights row-major, in the order in which workers exchange them. Convolutions compute in "
    "channels_last all the same where their input has it: give the model x.to(memory_format=torch.channels_last)"
)
"""What to do about a memory format."""


class ParameterMovedError(KVStoreError):
    """A parameter's data were replaced after the trainer took it over: updates would not reach the model."""


class WeightsWrittenError(KVStoreError):
    """The loop changed weights that a store holds. The next step would overwrite the changes."""

    @classmethod
    def of(cls, names: Sequence[str], total: int) -> WeightsWrittenError:
        """Return the error that names the parameters, out of so many."""
        return cls(
            f"{len(names)} of {total} parameters were written to since the last step, but the kvstore's weights "
            f"count, which this step would put in their place: {', '.join(names)}. Call trainer.set_data() on every "
            "worker after such a write, which publishes rank 0's weights; or build the Trainer with "
            "update_on_kvstore=False, which keeps the weights here"
        )


class StaleGradientError(KVStoreError, UserWarning):
    """A parameter has had no new gradient since the last step.

    Also a `UserWarning`, which is what Gluon raises for the same mistake.
    """

    @classmethod
    def of(
        cls, names: Sequence[str], total: int, is_any_fresh: bool, written: Sequence[str] = ()
    ) -> StaleGradientError:
        """Name the parameters, out of so many, in an error; say more where no other one has a new gradient.

        Args:
            written: Those whose used gradient was written in place.
        """
        hint = "" if is_any_fresh else f" {REPLACED}"
        if written:
            hint = (
                f" Those of {', '.join(written)} were used and then written in place, which may be new values, or what "
                "clipping made of the old ones: if they are new, assign them (p.grad = values), or zero them by "
                "zero_grad(set_to_none=False) before you write."
            )
        return cls(
            f"{len(names)} of {total} parameters got no gradient since the last step: {', '.join(names)}.{hint} If the "
            "model uses only some of them on purpose, call step(batch_size, ignore_stale_grad=True)"
        )


class ArgumentTypeError(ConfigurationError, TypeError):
    """An argument has a type that cannot be meant."""


class RowIdError(ConfigurationError, IndexError):
    """Rows were asked for that a key does not have."""


class RowSparseError(KVStoreError, RuntimeError):
    """A row-sparse parameter was used in a way that values in a store do not allow."""


class BackwardTwiceError(KVStoreError, RuntimeError):
    """The gradients of the losses of one batch were to be computed a second time."""


class ConcurrentCallError(KVStoreError, RuntimeError):
    """A thread called a Trainer or a store while another thread was in a call of it."""


class AmpNotInitializedError(ConfigurationError):
    """A loss was to be scaled for a Trainer that has no loss scaler."""


class AnomalousParametersError(KVStoreError, RuntimeError):
    """Parameters get no gradient from a loss, and the Trainer was told to stop then; the message names them."""


class NonFiniteLossError(KVStoreError, FloatingPointError):
    """A loss is infinite or not a number."""


class NonFiniteNormWarning(UserWarning):
    """The norm of the gradients is infinite or not a number, so they were not clipped. Warned, not raised."""


class ScheduleWarning(UserWarning):
    """A schedule would write an impossible value, and writes the nearest possible one. Warned, not raised."""


class SparsePullWarning(UserWarning):
    """A pull into sparse tensors was ignored, as in MXNet; `row_sparse_pull` is meant. Warned once per store."""


class NoGradientWarning(UserWarning):
    """A step found no new gradient at all here, so this worker gave nothing. Warned, not raised, once per Trainer."""


class GradientWriteWarning(UserWarning):
    """Gradients that a step had used were written in place. Warned, not raised.

    They may have new values, or the old ones, clipped. It is said once per Trainer.
    """


class SharedWeightsWarning(UserWarning):
    """Something still sees the memory where parameters lay before they moved.

    It is another process, a NumPy array or a tensor. Warned, not raised.
    """


class SparseGradientWarning(UserWarning):
    """Sparse gradients count as dense ones, where torch's optimizer refuses them. Warned once per Trainer."""


class MemoryFormatWarning(UserWarning):
    """Parameters lose their memory format, such as channels_last. Warned once per Trainer."""


class TorchNameWarning(UserWarning):
    """An optimizer was named as torch spells it, and is Gluon's, with other numbers. Warned, not raised."""


class NotInitializedError(KVStoreError, RuntimeError):
    """A parameter has no shape yet, because its lazy module has seen no input."""


class StateFileError(KVStoreError, OSError):
    """A file of saved states cannot be written or read, or is no such file.

    Where the operating system says why, it is that error too (FileNotFoundError, …), with errno and filename.
    """


class ClusterError(KVStoreError, RuntimeError):
    """A process of a local cluster ended without an error that can be raised here."""


class WorkerTraceback(KVStoreError):
    """Where a function failed on a worker; the cause of the exception that a cluster raises for it.

    Args:
        rank: Of the worker.
        text: Its traceback, and how other workers failed after it.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n{self.text}"


class TraceFileError(KVStoreError, OSError):
    """The file of a profiler's trace cannot be written."""


class StateMismatchError(ConfigurationError, RuntimeError):
    """Saved states belong to another model or to another optimizer; the message names every difference.

    Also a ValueError, which torch raises of an optimizer's states, and a RuntimeError, which it raises of a model's.
    """


class JointStepError(KVStoreError, NotImplementedError):
    """Several Trainers were asked to do at once what each does by itself."""


class CheckpointKeyError(KVStoreError, KeyError):
    """A checkpoint lacks a part that is to be resumed."""


class RegistryError(ConfigurationError, KeyError):
    """A name cannot be registered, or a configuration does not say which one it means."""


class UnregisteredNameError(RegistryError, UnknownNameError):
    """Nothing is registered under a name that a configuration asks for."""


class GroupValueError(ConfigurationError, KeyError):
    """A parameter group has no number of the name that is to be scheduled."""


class CustomImportError(ConfigurationError, ImportError):
    """A module that a configuration asks to import cannot be imported."""


class FailedImportWarning(UserWarning):
    """A module of `custom_imports` could not be imported. The configuration allows that: warned, not raised."""


class UnmatchedRuleWarning(UserWarning):
    """A rule for options of parameters matches no parameter at all. Warned, not raised."""


class DuplicateParameterWarning(UserWarning):
    """Parameters that several modules share got their options where they appear first. Warned, not raised."""
