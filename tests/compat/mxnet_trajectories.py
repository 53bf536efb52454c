"""What live MXNet computes: weights after every step of its optimizers, and learning rates of its schedulers.

Runs inside an environment with MXNet and without this project: reads a JSON object from standard input, writes one to
standard output.

    {"optimizers": [{"name": "adam", "options": {...},
                     "keys": [{"name": "w", "shape": [2, 3], "weight": [...], "lr_mult": 1.0, "wd_mult": 1.0}, ...],
                     "steps": [{"lr": 0.1, "rescale": 0.5, "grads": [[...] per key]}, ...]}, ...],
     "schedulers": [{"name": "PolyScheduler", "arguments": {...}, "updates": [0, 1, ...]}, ...]}

    {"optimizers": [[[weights of a key, ...] after each step, ...] per case, ...], "schedulers": [[...] per case, ...]}

Weights and gradients are float32 and flat, in row-major order. SGLD's noise is made 1 standard deviation everywhere,
so that there is something to compare.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import mxnet as mx
import numpy as np


def trajectory(case: dict[str, Any]) -> list[list[list[float]]]:
    """Update the case's keys together, step by step."""
    keys = case["keys"]
    optimizer = mx.optimizer.create(
        case["name"],
        learning_rate=case["steps"][0]["lr"],
        param_idx2name={i: key["name"] for i, key in enumerate(keys)},
        param_dict={
            i: SimpleNamespace(lr_mult=key["lr_mult"], wd_mult=key["wd_mult"]) for i, key in enumerate(keys)
        },
        **case["options"],
    )
    updater = mx.optimizer.get_updater(optimizer)
    weights = [array(key["weight"], key["shape"]) for key in keys]
    after = []
    for step in case["steps"]:
        optimizer.set_learning_rate(step["lr"])
        optimizer.rescale_grad = step["rescale"]
        grads = [array(grad, key["shape"]) for grad, key in zip(step["grads"], keys)]  # noqa: B905 (Python 3.8)
        updater(list(range(len(keys))), grads, weights)
        after.append([weight.asnumpy().reshape(-1).tolist() for weight in weights])
    return after


def array(values: list[float], shape: list[int]) -> Any:
    return mx.nd.array(np.array(values, dtype="float32").reshape(shape))


def learning_rates(case: dict[str, Any]) -> list[float]:
    scheduler = getattr(mx.lr_scheduler, case["name"])(**case["arguments"])
    return [float(scheduler(update)) for update in case["updates"]]


def one_deviation(mean: float, deviation: float, shape: Any, dtype: Any, ctx: Any) -> Any:
    return mx.nd.full(shape, mean + deviation, ctx=ctx, dtype=dtype)


def main() -> None:
    sys.modules["mxnet.optimizer.sgld"].normal = one_deviation  # type: ignore[attr-defined]
    asked = json.load(sys.stdin)
    answer = {
        "optimizers": [trajectory(case) for case in asked.get("optimizers", [])],
        "schedulers": [learning_rates(case) for case in asked.get("schedulers", [])],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
