"""Encodes and decodes random gradients by one codec, checks that nothing was lost, and times both on one thread.

Started by compression.py in a process of its own. Speed is counted in bytes of float32 gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import usage
from torch import Tensor

from kvstore_server.codec import make_codec
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.client.tables import Compressor

KEYS = 8
WARM_UP = 2
COPY = "copy"
"""Not a codec: plain copies, slice by slice, which are the limit."""
Timed = tuple["Clock", "Clock"]
"""Of encoding; of decoding and adding."""


class Clock:
    """Seconds of rounds, and those of the CPU in all of them."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.cpu = 0.0

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """Measure a round, unless it only warms up."""
        began, used = time.perf_counter(), time.process_time()
        yield
        if number >= WARM_UP:
            self.rounds.append(time.perf_counter() - began)
            self.cpu += time.process_time() - used


def main() -> None:
    """Measure one kind and write {"encode": …, "decode and add": …} to OUT."""
    options = _options()
    torch.set_num_threads(1)
    plan = make_plan([TensorSpec(f"w{at}", (options.floats // KEYS,), "float32") for at in range(KEYS)], 1)
    run = _copy if options.kind == COPY else _compress
    usage.forget_peaks([os.getpid()])
    clocks = run(options.kind, plan, _gradients(plan), options.rounds)
    used = usage.measure([os.getpid()])
    amount = 4 * sum(slice_.used for slice_ in plan.slices) / 1e9
    measured = {
        name: {
            "median": statistics.median(clock.rounds),
            "rounds": clock.rounds,
            "amount": amount,
            "usage": {"cpu": clock.cpu, "peak_rss": used.peak_rss, "pss": used.pss},
        }
        for name, clock in zip(("encode", "decode and add"), clocks, strict=True)
    }
    Path(options.out).write_text(json.dumps(measured))


def _gradients(plan: Plan) -> Callable[[int], Tensor]:
    """The gradients of a round: random, and others in each."""
    length = max(slice_.offset + slice_.length for slice_ in plan.slices)
    drawn = torch.randn(length + 1024 * 16, generator=torch.Generator().manual_seed(1))
    return lambda number: drawn[number % 1024 * 16 :][:length]


def _compress(kind: str, plan: Plan, gradients: Callable[[int], Tensor], rounds: int) -> Timed:
    """Encode as a worker does, decode as a server does.

    Raises:
        AssertionError: what arrived and what is kept back is not the sum of the gradients.
    """
    codec = make_codec({"type": kind})
    compressor = Compressor(codec, plan)
    encoding, decoding = Clock(), Clock()
    space = torch.empty(max(slice_.used for slice_ in plan.slices))
    arrived, given = torch.zeros(2, len(gradients(0)))
    for number in range(rounds + WARM_UP):
        grads = gradients(number)
        with encoding.round(number):
            data = compressor.encode({"float32": grads}, plan.slices, frozenset())
            compressor.accept()
        with decoding.round(number):
            for slice_ in plan.slices:
                payload, values = data[slice_.index], space[: slice_.used]
                codec.check_payload(payload, "float32", slice_.used)
                codec.decode(payload, "float32", values)
                arrived[slice_.offset : slice_.offset + slice_.used].add_(values)
        given += grads
    for key, kept in compressor.residuals().items():
        part = slice(plan.key_offsets[key], plan.key_offsets[key] + len(kept))
        torch.testing.assert_close(arrived[part] + kept, given[part], rtol=1e-3, atol=1e-3)
    return encoding, decoding


def _copy(kind: str, plan: Plan, gradients: Callable[[int], Tensor], rounds: int) -> Timed:
    """Copy the gradients, which is the limit of both."""
    to = torch.zeros_like(gradients(0))
    clock = Clock()
    for number in range(rounds + WARM_UP):
        grads = gradients(number)
        with clock.round(number):
            for slice_ in plan.slices:
                part = slice(slice_.offset, slice_.offset + slice_.used)
                to[part].copy_(grads[part])
    return clock, clock


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--floats", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
