"""Records whether a step may have been applied only in part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvtrainer.errors import KVStoreError

_log = logging.getLogger(__name__)


class StepGuard:
    """Whether weights, optimizer state and counts may hold a part of a step, here or on other workers.

    A step calls `begin` before its first change and `end` after its last, so an interrupt in between leaves it
    incomplete, and `check` refuses to go on. A round within the step calls `sent` when other workers may apply it.
    """

    def __init__(self) -> None:
        self.is_incomplete = False
        self._may_be_applied = False

    def begin(self) -> None:
        """Weights, state or counts are about to change, and no round of the step was sent yet."""
        self.is_incomplete, self._may_be_applied = True, False

    def sent(self, may_be_applied: bool = True) -> None:
        """The round of this step was sent; call again with False once it is known that no worker applies it."""
        self._may_be_applied = may_be_applied

    def abort(self, is_missed: bool) -> None:
        """The round raised here; `is_missed` if this worker would lack the update that the others may apply."""
        self.is_incomplete = is_missed and self._may_be_applied

    def end(self) -> None:
        """All changes are made, or none, on every worker."""
        self.is_incomplete = False

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """End the step if the block raises an Exception, which leaves all workers alike; an interrupt does not."""
        try:
            yield
        except Exception:
            self.is_incomplete = False
            raise

    def check(self, has_store: bool, consequence: str) -> None:
        """Raise KVStoreError if a step is incomplete and there is a store.

        Without a store no other worker has weights that could differ, and a user who stops a loop in a notebook would
        lose more by a restart: then a warning is logged, once.

        Args:
            consequence: What becomes of weights and state as they are, for the warning.
        """
        if not self.is_incomplete:
            return
        if has_store:
            raise KVStoreError(
                "a step was interrupted when its update had begun, here or on other workers, so weights, optimizer "
                "state and counts may have only a part of it. Restart from the last saved states"
            )
        self.is_incomplete = False
        _log.warning(
            "a step was interrupted when its update had begun: some weights, optimizer state and counts may have it "
            "already; %s",
            consequence,
        )
