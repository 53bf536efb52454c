"""Compressed gradients on real servers: MXNet's own expectations, and a second quantiser in numpy.

Weights are 0 or 1, sums of thresholds are exact in float32, and so every comparison is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import NonFiniteGradientError, RoundAbortedError
from kvtrainer.kvstore import DistKVStore
from tests.support.pairwise import pairwise
from tests.support.stores import Servers

RATE = 2
SMALL_SHAPES = {"small": (2, 3), "irregular": (61, 67), "big": (120, 257)}
FULL_SHAPES = {"small": (2, 3), "irregular": (1211, 1211), "big": (1200, 1200)}
DEFAULT = [(1, 1), (2, 3), (3, 2)]
GRID = [(workers, count) for workers in (1, 2, 3, 7) for count in (1, 2, 3)]
RANDOM_ROUNDS = 5

ONE_BIT = {"type": "1bit", "threshold": 0}
TWO_BIT = {"type": "2bit", "threshold": 0.5}
SCRIPTS: dict[str, tuple[dict[str, Any], list[tuple[float, float]]]] = {
    # What everybody pushes, and how far the weights are then from where they began, in RATE · workers.
    "1bit": (ONE_BIT, [(1, 1), (-1, 0), (2, 1), (0, 2), (-2, 1)]),
    "2bit": (
        TWO_BIT,
        [(0, 0), (0.4, 0), (0.1, 0.5), (0.2, 0.5), (0.3, 1), (0.5, 1.5), (-0.75, 1), (-0.25, 0.5)],
    ),
}
VERBS = ("push and pull", "pushpull")


def numpy_quantiser(kind: str, total: np.ndarray) -> np.ndarray:
    """What is said of residual plus gradient."""
    if kind == "1bit":
        return np.where(total > 0, np.float32(1), np.float32(-1))
    return np.select([total >= 0.5, total <= -0.5], [np.float32(0.5), np.float32(-0.5)], np.float32(0))


def random_gradient(shape: tuple[int, ...], round_: int, rank: int) -> np.ndarray:
    return np.random.default_rng([round_, rank]).normal(0, 0.6, shape).astype(np.float32)


def keys_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], float]]:
    """Each shape twice: with zeros and with ones to begin with."""
    return {f"{name}{value}": (shape, value) for name, shape in shapes.items() for value in (0, 1)}


def compressed_store(kv: DistKVStore, kind: str, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    """Compression first, then keys, then the optimizer, as MXNet's test does; returns what is there then."""
    keys = keys_of(shapes)
    kv.set_gradient_compression(SCRIPTS[kind][0])
    kv.init(list(keys), [torch.full(shape, float(value)) for shape, value in keys.values()])
    before = pulled(kv, keys)
    kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=float(RATE)))
    return before


def pulled(kv: DistKVStore, keys: dict[str, tuple[tuple[int, ...], float]]) -> list[Tensor]:
    outs = [torch.empty(shape) for shape, _ in keys.values()]
    kv.pull(list(keys), out=outs)
    return outs


def round_of(kv: DistKVStore, verb: str, keys: dict[str, Any], values: list[Tensor]) -> list[Tensor]:
    if verb == "push and pull":
        kv.push(list(keys), values)
        return pulled(kv, keys)
    outs = [torch.empty_like(value) for value in values]
    kv.pushpull(list(keys), values, out=outs)
    return outs


def run_script(
    kv: DistKVStore, kind: str, verb: str, shapes: dict[str, tuple[int, ...]]
) -> list[list[list[float]]]:
    """The distinct values of every key, at first and after each round."""
    keys = keys_of(shapes)
    seen = [[value.unique().tolist() for value in compressed_store(kv, kind, shapes)]]
    for value, _ in SCRIPTS[kind][1]:
        gradients = [torch.full(shape, float(value)) for shape, _ in keys.values()]
        seen.append([out.unique().tolist() for out in round_of(kv, verb, keys, gradients)])
    return seen


def run_random(kv: DistKVStore, kind: str, rank: int, shapes: dict[str, tuple[int, ...]]) -> list[Tensor]:
    keys = keys_of(shapes)
    compressed_store(kv, kind, shapes)
    outs: list[Tensor] = []
    for round_ in range(RANDOM_ROUNDS):
        values = [torch.from_numpy(random_gradient(shape, round_, rank)) for shape, _ in keys.values()]
        outs = round_of(kv, VERBS[round_ % 2], keys, values)
    return outs


def expected_of_random(kind: str, workers: int, shapes: dict[str, tuple[int, ...]]) -> list[np.ndarray]:
    expected = []
    for shape, value in keys_of(shapes).values():
        weight = np.full(shape, value, np.float32)
        for rank in range(workers):
            residual = np.zeros(shape, np.float32)
            for round_ in range(RANDOM_ROUNDS):
                residual += random_gradient(shape, round_, rank)
                said = numpy_quantiser(kind, residual)
                residual -= said
                weight += RATE * said
        expected.append(weight)
    return expected


def check_script(jobs: Servers, workers: int, count: int, kind: str, verb: str, shapes: Any) -> None:
    moved = [0.0, *(distance for _, distance in SCRIPTS[kind][1])]
    expected = [
        [[value + distance * RATE * workers] for _, value in keys_of(shapes).values()] for distance in moved
    ]
    got = jobs.results(workers, count, lambda kv, rank: run_script(kv, kind, verb, shapes))
    assert got == [expected] * workers


def check_random(jobs: Servers, workers: int, count: int, kind: str, shapes: Any) -> None:
    expected = expected_of_random(kind, workers, shapes)
    for outs in jobs.results(workers, count, lambda kv, rank: run_random(kv, kind, rank, shapes)):
        assert all(np.array_equal(out.numpy(), one) for out, one in zip(outs, expected, strict=True))


@pytest.mark.parametrize(("size", "kind", "verb"), pairwise(DEFAULT, ["1bit", "2bit"], VERBS))
def test_constant_gradients_move_weights_exactly(
    jobs: Servers, size: tuple[int, int], kind: str, verb: str
) -> None:
    check_script(jobs, *size, kind, verb, SMALL_SHAPES)


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
@pytest.mark.parametrize(("workers", "count"), DEFAULT)
def test_each_workers_random_gradients_are_quantised_with_a_residual_of_its_own(
    jobs: Servers, workers: int, count: int, kind: str
) -> None:
    check_random(jobs, workers, count, kind, SMALL_SHAPES)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["1bit", "2bit"])
@pytest.mark.parametrize(("workers", "count"), GRID)
def test_all_sizes_of_keys_and_jobs_of_mxnet(jobs: Servers, workers: int, count: int, kind: str) -> None:
    check_script(jobs, workers, count, kind, VERBS[(workers + count) % 2], FULL_SHAPES)
    check_random(jobs, workers, count, kind, FULL_SHAPES)


def test_several_replicas_on_a_worker_are_summed_before_they_are_compressed(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        kv.set_gradient_compression(TWO_BIT)
        kv.init("w", torch.zeros(3))
        kv.push("w", [torch.full((3,), 0.2)] * 3)  # 0.6 fires once; by themselves they would not
        out = torch.empty(3)
        kv.pull("w", out=out)
        return out.tolist()

    assert jobs.results(2, 2, body) == [[1.0] * 3] * 2


def test_int8_and_topk_arrive_as_they_are_where_nothing_is_rounded(jobs: Servers) -> None:
    whole = torch.arange(-127.0, 128.0)

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        kv.init(["v", "w"], [torch.zeros(255), torch.zeros(8)])
        seen, outs = [], [torch.empty(255), torch.empty(8)]
        kv.set_gradient_compression({"type": "int8"})
        kv.pushpull("v", whole, out=outs[0])
        kv.set_gradient_compression({"type": "topk", "ratio": 0.25})
        for _ in range(2):
            kv.pushpull("w", torch.arange(8.0), out=outs[1])
            seen.append(outs[1].tolist())
        return [outs[0].tolist(), *seen]

    # Of 0 to 7 the two largest are sent, and then of what is left with as much again: 0, 2, 4, 6, 8, 10, 6 and 7.
    first, second = [0.0] * 6 + [12.0, 14.0], [0.0] * 4 + [16.0, 20.0, 0.0, 0.0]
    assert jobs.results(2, 2, body) == [[(2 * whole).tolist(), first, second]] * 2


def steps_of_trainer(kv: DistKVStore, gradients: list[float], in_store: bool, params: Any) -> list[float]:
    """The one distinct weight after each step of plain descent with rate 1; an error's class instead, if any."""
    weight = torch.nn.Parameter(torch.zeros(40, 500))
    trainer = kvtrainer.Trainer(
        {"w": weight},
        "sgd",
        {"learning_rate": 1.0},
        kvstore=kv,
        update_on_kvstore=in_store,
        compression_params=params,
    )
    seen: list[Any] = []
    for gradient in gradients:
        weight.grad = None
        (weight * gradient).sum().backward()
        try:
            trainer.step(1)
        except (NonFiniteGradientError, RoundAbortedError) as error:
            seen.append(f"{type(error).__name__}: {error}")
        else:
            [value] = weight.detach().unique().tolist()
            seen.append(value)
    return seen


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_trainer_compresses_wherever_the_optimizer_runs(jobs: Servers, count: int, in_store: bool) -> None:
    got = jobs.results(2, count, lambda kv, rank: steps_of_trainer(kv, [0.3] * 4, in_store, TWO_BIT))
    assert got == [[0.0, -1.0, -1.0, -2.0]] * 2


@pytest.mark.parametrize("in_store", [True, False])
def test_a_gradient_that_is_not_finite_fails_the_step_for_all_and_leaves_residuals_alone(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        second = float("nan") if rank == 1 else 0.3
        return steps_of_trainer(kv, [0.3, second, 0.2, 0.4], in_store, TWO_BIT)

    others, own = jobs.results(2, 2, body)
    # 0.3 is kept back; 0.3 + 0.2 fires; had the second step counted, the third would not have.
    assert [others[0], *others[2:]] == [own[0], *own[2:]] == [0.0, -1.0, -1.0]
    assert own[1].startswith("NonFiniteGradientError: a gradient cannot be compressed")
    assert others[1].startswith(
        "RoundAbortedError: rank 1 aborted round 2 of 'parameters': NonFiniteGradientError: "
    )


def test_a_push_that_is_not_finite_fails_the_round_for_all_and_the_next_one_works(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Any]:
        kv.set_gradient_compression(TWO_BIT)
        kv.init(["v", "w"], [torch.zeros(3), torch.zeros(50, 300)])
        seen: list[Any] = []
        for gradient in (0.3, float("inf") if rank == 1 else 0.3, 0.2):
            values = [torch.full((3,), 0.25), torch.full((50, 300), gradient)]
            outs = [torch.empty_like(value) for value in values]
            try:
                kv.pushpull(["v", "w"], values, out=outs)
                seen.append([out.unique().tolist() for out in outs])
            except (NonFiniteGradientError, RoundAbortedError) as error:
                seen.append(type(error))
        return seen

    for error, seen in zip(
        [RoundAbortedError, NonFiniteGradientError], jobs.results(2, 3, body), strict=True
    ):
        assert seen == [[[0.0], [0.0]], error, [[1.0], [1.0]]]


def test_ranks_may_compress_differently_or_not_at_all(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        if rank:
            kv.set_gradient_compression([None, TWO_BIT, {"type": "fp16"}][rank])
        kv.init("w", torch.zeros(50, 300))
        out = torch.empty(50, 300)
        for _ in range(2):
            kv.pushpull("w", torch.full((50, 300), 0.3), out=out)
        return out.unique().tolist()

    # 0.3 as it is, 0.5 of the 0.6 so far, and 0.3 in half precision with its first error corrected.
    first = np.float32(0.3)
    half = np.float32(np.float16(first + (first - np.float32(np.float16(first)))))
    expected = [float(first + np.float32(0.5) + half)]
    assert jobs.results(3, 2, body) == [expected] * 3
