"""A worker of `attacks.py`: trains 5,000 floats, and checks them. Rank 0 writes the seconds of each step."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import kvtrainer

_WARM_UP, _FLOATS = 200, 5000


def main() -> None:
    """Train before and after the attackers have begun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = kvtrainer.kvstore.create("dist_sync")
    weight = torch.nn.Parameter(torch.zeros(_FLOATS))
    times = []
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store) as trainer:
        for step in range(_WARM_UP + options.steps):
            if step == _WARM_UP and trainer.rank == 0:
                own = store._client._session.transport.sockets(0)[1]  # what an attacker would have to learn
                ready = options.out.with_suffix(".part")
                ready.write_text(own.hex())
                ready.replace(options.out.with_suffix(".ready"))
                while not options.out.with_suffix(".go").exists():
                    time.sleep(0.01)
            weight.grad = torch.full((_FLOATS,), trainer.rank + 1.0)
            began = time.perf_counter()
            trainer.step(1)
            times.append(time.perf_counter() - began)
        assert torch.equal(weight.detach(), torch.full((_FLOATS,), -3.0 * len(times)))
        if trainer.rank == 0:
            options.out.write_text(json.dumps({"steps": {"seconds": times[_WARM_UP:]}}))


if __name__ == "__main__":
    main()
