"""One worker that makes steps until it is ended, and tells how far it is; started by `watching.py`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from step_worker import TrainerStep
from steps import Gradients, Work


class Progress:
    """How many steps rank 0 has made, and when the last one ended; a file that both sides map."""

    def __init__(self, path: Path, is_new: bool = False) -> None:
        if is_new:
            path.write_bytes(bytes(16))
        self._both = np.memmap(path, np.float64, "r+", shape=(2,))

    def tell(self, steps: int) -> None:
        """Say that one more has ended."""
        self._both[:] = steps, time.monotonic()

    def read(self) -> tuple[float, float]:
        """The number of steps, and the moment on the monotonic clock."""
        steps, at = self._both.tolist()
        return steps, at


def main() -> None:
    """Make steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", required=True, help="JSON of the fields of Work")
    parser.add_argument("--progress", required=True, help="file for rank 0 to tell")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work, store = Work(**json.loads(options.work)), TrainerStep()
    grads, progress = Gradients(work, store.rank), Progress(Path(options.progress))
    store.begin(work)
    number = 0
    while True:
        store.assign(grads.of(number))
        store.step()
        number += 1
        if store.rank == 0:
            progress.tell(number)


if __name__ == "__main__":
    main()
