"""A worker that saves while the other one is already in the next round; both go on from what was saved afterwards."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import kvtrainer
from tests.support.jobs import deliver, own_place
from tests.support.limits import LIMIT
from tests.support.workers.states_matrix import OPTIMIZERS, Net, train, trainer_of, weights


def wait_until_it_waits(trainer: kvtrainer.Trainer, rank: int) -> None:
    """Return when the next round of every server lacks nobody but `rank`."""
    pause, deadline = threading.Event(), time.monotonic() + LIMIT
    while True:
        tables = [table for stats in trainer.server_stats() for table in stats["tables"]]
        if all(table["waiting_for"] == [rank] for table in tables):
            return
        assert time.monotonic() < deadline, f"the other worker never came to the next round: {tables}"
        pause.wait(0.01)


def run(base: Path, kind: str, saver: int) -> dict[str, object]:
    rank, _ = own_place()
    path = base / f"{kind}-{saver}"
    net = Net()
    results: dict[str, object] = {}
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        if rank == saver:
            wait_until_it_waits(trainer, rank)
            trainer.save_states(path)
            wait_until_it_waits(trainer, rank)
        train(net, trainer, 2, 2)
        results["after 4"] = weights(net)
        # Back to the states of step 2, with the weights of step 4; the third step made sure that the file is there.
        trainer.load_states(path)
        train(net, trainer, 2, 2)
        results["again"] = weights(net)
    return results


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    deliver({f"{kind} {saver}": run(folder, kind, saver) for kind in OPTIMIZERS for saver in (0, 1)})
