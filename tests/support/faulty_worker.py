"""A worker that trains until something happens to it or to others: as a program, and as a loop in a thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

import kvtrainer
from kvtrainer.errors import ServerLostState, ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.support.limits import LIMIT
from tests.support.processes import Call, eventually

SHAPE = (128, 64)
"""Of the weights: enough for two servers. Each worker adds one to a column of its own in every step."""
PAUSE = 0.02
"""Seconds that a step computes: long, because steps that only pass the time take it from other tests."""


class Training:
    """One worker's training, by the verbs of its store or by a Trainer."""

    def __init__(self, kv: DistKVStore, with_trainer: bool) -> None:
        self._kv = kv
        self._weight = torch.zeros(SHAPE, requires_grad=with_trainer)
        self._gradient = torch.zeros(SHAPE)
        self._gradient[:, kv.rank] = -1.0
        self._trainer: kvtrainer.Trainer | None = None
        if with_trainer:
            options = {"learning_rate": 1.0}
            self._trainer = kvtrainer.Trainer([("w", self._weight)], "sgd", options, kvstore=kv)
        else:
            kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0))
            kv.init("w", self._weight)

    def step(self) -> list[float]:
        """How many steps of each worker are in the weights now, on the server of the first row."""
        time.sleep(PAUSE)
        if self._trainer is None:
            self._kv.pushpull("w", self._gradient, self._weight)
        else:
            (self._weight * self._gradient).sum().backward()  # type: ignore[no-untyped-call]
            self._trainer.step(1)
        return self._weight[0, : self._kv.num_workers].tolist()

    def num_dead(self) -> int:
        """How many workers the servers miss."""
        return self._kv.num_dead_nodes()

    def seen(self) -> list[list[float]]:
        """As `step` returned it, for every row; all are equal where every server has applied the same steps."""
        rows = self._weight[:, : self._kv.num_workers].detach().tolist()
        return [list(row) for row in sorted({tuple(row) for row in rows})]


class Loop:
    """A training in a thread; what becomes of it can be asked."""

    def __init__(self, begin: Callable[[], Training]) -> None:
        self.counts: list[float] = []
        self.error: BaseException | None = None
        self.training: Training | None = None
        self._begin = begin
        self._stop = threading.Event()
        self._call = Call(self._run)

    def resume(self) -> None:
        """Go on after an error."""
        assert self._call.outcome() is None
        assert self.error is not None
        self.error = None
        self._call = Call(self._run)

    def goes_on(self, rank: int, steps: int = 5) -> bool:
        """Whether so many more steps of a worker come, without an error here."""
        assert self.counts or eventually(lambda: bool(self.counts or self.error))
        start = self.counts[rank] if self.counts else 0.0
        eventually(lambda: self.error is not None or self.counts[rank] >= start + steps)
        return self.error is None and self.counts[rank] >= start + steps

    def fails(self, seconds: float) -> bool:
        """Whether an error comes within the time."""
        return eventually(lambda: self.error is not None, seconds)

    def close(self) -> None:
        self._stop.set()
        self._call.outcome(LIMIT)

    def _run(self) -> None:
        try:
            if self.training is None:
                self.training = self._begin()
            while not self._stop.is_set():
                self.counts = self.training.step()
        except Exception as error:
            self.error = error


def main() -> None:
    """Train as rank 1 of the job that the environment describes: TYPE NAMESPACE DEAD_AFTER HOW."""
    type, namespace, dead_after, how = sys.argv[1:]
    print("loaded", flush=True)
    sys.stdin.readline()
    kv = kvtrainer.kvstore.create(
        type, namespace=namespace, timeout=LIMIT, connect_timeout=LIMIT, dead_after=float(dead_after)
    )
    assert isinstance(kv, DistKVStore)
    training = Training(kv, how == "trainer")
    try:
        while True:
            training.step()
    except (ServerLostState, ServerUnreachableError):
        # Were this worker to leave first, the other one might hear of that before it sees for itself.
        sys.stdin.readline()
        raise


if __name__ == "__main__":
    main()
