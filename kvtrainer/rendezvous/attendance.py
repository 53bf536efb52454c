"""Who of the workers is still there: what the scheduler and every server keep to know when the job is over."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrainer.rendezvous import messages as m


class Attendance:
    """The workers of a job that has begun; no sockets and no clock."""

    def __init__(self, workers: Sequence[str], dead_after: float, now: float) -> None:
        self._heard = dict.fromkeys(workers, now)
        self._dead_after = dead_after

    def handle(self, question: m.Question, now: float) -> None:
        """Take note of a sign of life, or of the end of a worker; others are no concern of this class."""
        if question.token in self._heard:
            if isinstance(question, m.Done):
                del self._heard[question.token]
            else:
                self._heard[question.token] = now

    def excuse_silence(self, now: float) -> None:
        """This process itself stood still: nobody could have been heard."""
        self._heard = dict.fromkeys(self._heard, now)

    def is_over(self, now: float) -> bool:
        """Whether every worker is done, or has not been heard from for longer than `dead_after` seconds."""
        return all(now - heard > self._dead_after for heard in self._heard.values())
