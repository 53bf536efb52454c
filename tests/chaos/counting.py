"""A worker whose pushes each add one to every weight, by name of a store that applies them one by one.

Run as `python -m tests.chaos.counting KVSTORE PUSHES FOLDER` by a launcher. Whole numbers are exact in any order, so
the weights at the end count all pushes. Each process says in a file that all ranks map how many of its rank's pushes
have been answered. With bounded staleness an answer may come only while no other rank is further behind than that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

import kvtrainer
from tests.chaos.training import append

SIZE = 40_000
"""Elements, enough for both servers."""
STALENESS = 3


def main(kvstore: str, pushes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(SIZE))
    options = {"staleness": STALENESS} if kvstore == "dist_ssp" else {}
    kv = kvtrainer.kvstore.create(kvstore, **options)
    trainer = kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kv)
    start = trainer.resume()
    rank, workers = trainer.rank, trainer.num_workers
    done = np.memmap(folder / "done", np.int64, "r+", shape=(workers,))
    # What was pushed and not answered before a death counts, and is not pushed again.
    cursor = start.client_state["cursor"] if start.client_state else 0
    done[rank] = cursor
    while cursor < pushes:
        append(folder / f"computed.{rank}", f"{cursor} {os.getpid()}")
        weight.grad = torch.full((SIZE,), -1.0)
        cursor += 1
        trainer.client_state = {"cursor": cursor}
        trainer.step(1)
        # The others' pushes count before they have said so here: one more of each may have been applied.
        ahead = cursor - int(done.min()) - 1
        if kvstore == "dist_ssp" and ahead > STALENESS:
            append(folder / f"result.{rank}", f"read {ahead} ahead")
        done[rank] = cursor
    # The last pushes of all ranks are in the weights.
    with contextlib.closing(kv.open_agreement()) as agreement:
        agreement.all_gather(b"done")
    found = next(iter(trainer.pull_weights().values()), weight).detach()
    append(folder / f"result.{rank}", " ".join(map(str, sorted(set(found.tolist())))))
    trainer.close()
    kv.close()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
