"""What live MXNet computes: weights after every step of its optimizers, and learning rates of its schedulers.

Runs inside an environment with MXNet and without this project: reads a JSON object from standard input, writes one to
standard output.

    {"optimizers": [{"name": "adam", "options": {...}, "dtype": "float32", "knows_names": true,
                     "keys": [{"name": "w", "shape": [2, 3], "weight": [...], "lr_mult": 1.0, "wd_mult": 1.0}, ...],
                     "steps": [{"lr": 0.1, "rescale": 0.5, "grads": [[...] per key], "rows": [0, 2]}, ...]}, ...],
     "schedulers": [{"name": "PolyScheduler", "arguments": {...}, "updates": [0, 1, ...]}, ...]}

    {"optimizers": [[[weights of a key, ...] after each step, ...] per case, ...], "schedulers": [[...] per case, ...]}

Weights and gradients are flat, in row-major order; in a step with rows a gradient is row-sparse and has those alone.
Without a `lr` that of MXNet's default counts. With `knows_names` MXNet is told the keys' names, without
`has_multipliers` not what they are multiplied by. SGLD's noise is made 1 standard deviation everywhere, so that there
is something to compare.
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
    keys, options = case["keys"], dict(case["options"])
    if case["knows_names"]:
        options["param_idx2name"] = {i: key["name"] for i, key in enumerate(keys)}
    if case["has_multipliers"]:
        options["param_dict"] = {
            i: SimpleNamespace(lr_mult=key["lr_mult"], wd_mult=key["wd_mult"]) for i, key in enumerate(keys)
        }
    if case["steps"][0]["lr"] is not None:
        options["learning_rate"] = case["steps"][0]["lr"]
    optimizer = mx.optimizer.create(case["name"], **options)
    updater = mx.optimizer.get_updater(optimizer)
    weights = [array(key["weight"], key["shape"], case["dtype"]) for key in keys]
    after = []
    for step in case["steps"]:
        if step["lr"] is not None:
            optimizer.set_learning_rate(step["lr"])
        optimizer.rescale_grad = step["rescale"]
        rows = step.get("rows")
        grads = [gradient(grad, key["shape"], case["dtype"], rows) for grad, key in zip(step["grads"], keys)]  # noqa: B905 (Python 3.8)
        updater(list(range(len(keys))), grads, weights)
        after.append([weight.asnumpy().astype("float64").reshape(-1).tolist() for weight in weights])
    return after


def array(values: list[float], shape: list[int], dtype: str) -> Any:
    return mx.nd.array(np.array(values, dtype=dtype).reshape(shape), dtype=dtype)


def gradient(values: list[float], shape: list[int], dtype: str, rows: list[int] | None) -> Any:
    if rows is None:
        return array(values, shape, dtype)
    given = array(values, [len(rows), *shape[1:]], dtype)
    return mx.nd.sparse.row_sparse_array((given, rows), shape=tuple(shape), dtype=dtype)


def learning_rates(case: dict[str, Any]) -> list[float]:
    scheduler = getattr(mx.lr_scheduler, case["name"])(**case["arguments"])
    return [float(scheduler(update)) for update in case["updates"]]


def one_deviation(mean: float, deviation: float, shape: Any, dtype: Any, ctx: Any) -> Any:
    return mx.nd.full(shape, mean + deviation, ctx=ctx, dtype=dtype)


def main() -> None:
    # 2.x has a module for it, 1.9.1 one for all.
    its_module = sys.modules.get("mxnet.optimizer.sgld", sys.modules["mxnet.optimizer.optimizer"])
    its_module.normal = one_deviation  # type: ignore[attr-defined]
    asked = json.load(sys.stdin)
    answer = {
        "optimizers": [trajectory(case) for case in asked.get("optimizers", [])],
        "schedulers": [learning_rates(case) for case in asked.get("schedulers", [])],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
