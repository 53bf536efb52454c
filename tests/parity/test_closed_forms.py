"""MXNet's own closed-form results, exactly, on real servers and workers.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py, test_gluon_trainer.py) and of runs of MXNet
1.9.1. MXNet's optimizer "test" adds the rescaled gradient; ours is that of 2.x, `w -= lr · g`, so lr is −1.
S is the sum of what the workers push, 1 + 2 + … + W. A tensor is seen as its range (least, greatest value), so (w, w)
says that every element is exactly w.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.verbs import TableKVStore
from tests.support.jobs import Job, PartOfJob, Results
from tests.support.sizes import FAST, sizes

REPEATS = 7
SMALL, IRREGULAR, BIG = (2, 3), (511, 511), (500, 500)
PUSHED = {"3": SMALL, "5": SMALL, "7": SMALL, "98": IRREGULAR, "99": BIG}
HALF_PUSHED = {"4": SMALL, "6": SMALL, "8": SMALL, "100": BIG}
TRAINED = {"column": (10, 1), "odd": (7, 13), "sliced": (300, 301)}
RATES = (1.0, 0.5, 0.25, 2.0)
MODES = {"default": None, "store": True, "worker": False}

Range = tuple[float, float]


def run(rank: int, workers: int) -> Results:
    results: dict[str, Any] = {
        **pushes_with_optimizer(rank),
        "half pushes": {is_exact: half_pushes(rank, is_exact) for is_exact in (True, False)},
        "verbs": verbs_without_optimizer(rank),
        "init": init_of_many_keys(rank),
    }
    for mode, update_on_kvstore in MODES.items():
        results |= {f"{name} {mode}": seen for name, seen in trainer_cases(rank, update_on_kvstore).items()}
    return results


def pushes_with_optimizer(rank: int) -> dict[str, Any]:
    """Σ of (rank + 1) · 2 added at every push, `w -= lr · g` with lr = −1; then with lr = −1, −2, −3, …"""
    kv = _store()
    kv.init(list(PUSHED), [torch.ones(shape) for shape in PUSHED.values()])
    optimizer = kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=2.0)
    kv.set_optimizer(optimizer)
    constant = [_push_pull(kv, rank) for _ in range(REPEATS)]
    changing = []
    for i in range(REPEATS):
        optimizer.set_learning_rate(-(i + 1.0))
        changing.append(_push_pull(kv, rank))
    applied = [{row["table"]: row["rounds_applied"] for row in one["tables"]} for one in kv.server_stats()]
    kv.close()
    return {"constant lr": constant, "changing lr": changing, "rounds applied": applied}


def half_pushes(rank: int, is_exact: bool) -> list[list[Range]]:
    """As `pushes_with_optimizer` at the constant lr, with float16 keys; `is_exact` is the multi_precision."""
    kv = _store()
    half = [torch.ones(shape, dtype=torch.float16) for shape in HALF_PUSHED.values()]
    kv.init(list(HALF_PUSHED), half)
    options = {"learning_rate": -1.0, "rescale_grad": 2.0, "multi_precision": is_exact}
    kv.set_optimizer(kvtrainer.optimizer.create("test", **options))
    seen = []
    for _ in range(REPEATS):
        kv.push(list(HALF_PUSHED), [value * (rank + 1) for value in half])
        outs = [torch.empty_like(value) for value in half]
        kv.pull(list(HALF_PUSHED), out=outs)
        seen.append(_ranges(outs))
    kv.close()
    return seen


def verbs_without_optimizer(rank: int) -> dict[str, list[Range]]:
    """What each verb leaves behind for a small key and a sliced one, in order."""
    kv = _store()
    seen: dict[str, list[Range]] = {}
    for key, shape in (("small", SMALL), ("sliced", (300, 301))):
        ones = torch.ones(shape)
        kv.init(key, ones * (rank + 5))
        steps = [_pull(kv, key, shape)]
        for value in (ones * (rank + 1), ones * (rank + 1), [ones * (rank + 1)] * 3):
            kv.push(key, value)
            steps.append(_pull(kv, key, shape))
        for _ in range(2):
            buffer = ones * (rank + 1)
            kv.pushpull(key, buffer)
            steps.append(_range(buffer))
        out = torch.empty(shape)
        kv.broadcast(f"{key} too", ones * (rank + 2), out)
        seen[key] = [*steps, _range(out)]
    kv.close()
    return seen


def init_of_many_keys(rank: int) -> list[Range]:
    """200 keys, small and sliced, of three dtypes, that rank 0 initialises to their own number."""
    kv = _store()
    shapes = [SMALL if j < 100 else (70, 80) for j in range(200)]
    dtypes = [(torch.float16, torch.float32, torch.float64)[j % 3] for j in range(200)]
    kinds = list(zip(shapes, dtypes, strict=True))
    values = [torch.full(shape, j + 1000.0 * rank, dtype=dtype) for j, (shape, dtype) in enumerate(kinds)]
    kv.init(list(range(200)), values)
    outs = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    kv.pull(list(range(200)), out=outs)
    kv.close()
    return [_range(out) for out in outs]


def trainer_cases(rank: int, update_on_kvstore: bool | None) -> dict[str, Any]:
    """Gluon's cases, each with a Trainer of its own over three unequal parameters."""
    return {
        "rates": _rates(rank, update_on_kvstore),
        "momentum": _momentum(update_on_kvstore),
        "batch sizes": _batch_sizes(rank, update_on_kvstore),
        "multiplier": _multiplier(update_on_kvstore),
        "split step": _split_step(rank, update_on_kvstore),
    }


def _rates(rank: int, update_on_kvstore: bool | None) -> list[list[Range]]:
    parameters = _parameters(1.0 + rank)
    with _trainer(parameters, {"learning_rate": 1.0}, update_on_kvstore) as trainer:
        seen = []
        for rate in RATES:
            trainer.set_learning_rate(rate)
            _backward(parameters, rank + 1.0)
            trainer.step(1)
            seen.append(_ranges(parameters))
    return seen


def _momentum(update_on_kvstore: bool | None) -> list[list[Range]]:
    parameters = _parameters(0.0)
    options = {"learning_rate": 1.0, "momentum": 0.5, "rescale_grad": 2.0}
    with _trainer(parameters, options, update_on_kvstore) as trainer:
        seen = []
        for _ in range(3):
            _backward(parameters, 1.0)
            trainer.step(4)
            seen.append(_ranges(parameters))
    return seen


def _batch_sizes(rank: int, update_on_kvstore: bool | None) -> list[list[Range]]:
    """One step in which every rank divides by another batch size, 2 ** rank, and one that takes the mean."""
    parameters = _parameters(0.0)
    with _trainer(parameters, {"learning_rate": 1.0}, update_on_kvstore) as trainer:
        seen = []
        for batch_size in (2**rank, None):
            _backward(parameters, rank + 1.0)
            trainer.step(batch_size)
            seen.append(_ranges(parameters))
    return seen


def _multiplier(update_on_kvstore: bool | None) -> list[list[Range]]:
    parameters = _parameters(0.0)
    with _trainer(parameters, {"learning_rate": 1.0, "momentum": 0.5}, update_on_kvstore) as trainer:
        seen = []
        for multiplier in (1.0, 0.5):
            for parameter in parameters:
                parameter.lr_mult = multiplier  # type: ignore[attr-defined]
            _backward(parameters, 1.0)
            trainer.step(1)
            seen.append(_ranges(parameters))
    return seen


def _split_step(rank: int, update_on_kvstore: bool | None) -> dict[str, Any]:
    """`allreduce_grads` and `update` where the optimizer runs in the worker; refused, and `step`, where not."""
    parameters = _parameters(1.0)
    with _trainer(parameters, {"learning_rate": 1.0}, update_on_kvstore) as trainer:
        _backward(parameters, rank + 1.0)
        try:
            trainer.allreduce_grads()
        except ConfigurationError:
            trainer.step(1)
            return {"in store": True, "weights": _ranges(parameters)}
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        seen = {"in store": False, "grads": _ranges(grads)}
        trainer.update(1)
    return {**seen, "weights": _ranges(parameters)}


def _store() -> TableKVStore:
    kv = kvtrainer.kvstore.create("dist_sync")
    assert isinstance(kv, TableKVStore)
    return kv


def _push_pull(kv: TableKVStore, rank: int) -> list[Range]:
    kv.push(list(PUSHED), [torch.full(shape, rank + 1.0) for shape in PUSHED.values()])
    return [_pull(kv, key, shape) for key, shape in PUSHED.items()]


def _pull(kv: TableKVStore, key: str, shape: Sequence[int]) -> Range:
    out = torch.empty(shape)
    kv.pull(key, out=out)
    return _range(out)


def _parameters(start: float) -> list[Tensor]:
    return [torch.full(shape, start, requires_grad=True) for shape in TRAINED.values()]


def _trainer(
    parameters: Sequence[Tensor], options: dict[str, Any], update_on_kvstore: bool | None
) -> kvtrainer.Trainer:
    named = list(zip(TRAINED, parameters, strict=True))
    return kvtrainer.Trainer(named, "sgd", options, kvstore="dist_sync", update_on_kvstore=update_on_kvstore)


def _backward(parameters: Iterable[Tensor], slope: float) -> None:
    """Every element of every gradient is `slope`."""
    torch.stack([(slope * parameter).sum() for parameter in parameters]).sum().backward()  # type: ignore[no-untyped-call]


def _ranges(tensors: Iterable[Tensor]) -> list[Range]:
    return [_range(tensor) for tensor in tensors]


def _range(tensor: Tensor) -> Range:
    least, greatest = tensor.detach().aminmax()
    return float(least), float(greatest)


@pytest.fixture(scope="module", params=sizes(*FAST, servers=(1, 2, 3, 7)))
def job(request: pytest.FixtureRequest, part_of_job: PartOfJob) -> Job:
    return part_of_job("closed_forms", *request.param)


def total(job: Job) -> int:
    return job.workers * (job.workers + 1) // 2


def all_equal(values: Iterable[float], keys: int) -> list[list[tuple[float, float]]]:
    """What a worker sees in `keys` tensors when all their elements are one value, for a row of such moments."""
    return [[(value, value)] * keys for value in values]


def assert_everywhere(seen: list[Any], expected: Any) -> None:
    for rank, one in enumerate(seen):
        assert one == expected, f"rank {rank}"


def test_pushes_add_their_rescaled_sum(job: Job) -> None:
    expected = [1 + 2 * total(job) * (i + 1) for i in range(REPEATS)]
    assert_everywhere(job["constant lr"], all_equal(expected, len(PUSHED)))


@pytest.mark.parametrize("is_exact", [True, False])
def test_pushes_of_float16_add_up_exactly_with_and_without_multi_precision(job: Job, is_exact: bool) -> None:
    # Up to 393, with seven workers, every whole number is one of float16.
    expected = [1 + 2 * total(job) * (i + 1) for i in range(REPEATS)]
    seen = [one[is_exact] for one in job["half pushes"]]
    assert_everywhere(seen, all_equal(expected, len(HALF_PUSHED)))


def test_a_learning_rate_that_changes_at_every_push_reaches_every_server(job: Job) -> None:
    start = 1 + 2 * total(job) * REPEATS
    expected = [start + total(job) * (i + 1) * (i + 2) for i in range(REPEATS)]
    assert_everywhere(job["changing lr"], all_equal(expected, len(PUSHED)))


def test_a_big_key_is_updated_by_all_servers_and_a_small_one_by_one(job: Job) -> None:
    for applied in job["rounds applied"]:
        assert [counts.get("99") for counts in applied] == [2 * REPEATS] * job.servers
        assert [counts["3"] for counts in applied if "3" in counts] == [2 * REPEATS]


def test_every_server_holds_a_piece_of_the_sliced_parameter(job: Job) -> None:
    plan = make_plan([TensorSpec(name, shape, "float32") for name, shape in TRAINED.items()], job.servers)
    sliced = list(TRAINED).index("sliced")
    holders = {piece.server for piece in plan.slices for segment in piece.segments if segment.key == sliced}
    assert holders == set(range(job.servers))


def test_verbs_without_an_optimizer_replace_and_never_accumulate(job: Job) -> None:
    s = total(job)
    expected = [(float(value),) * 2 for value in (5, s, s, 3 * s, s, s, 2)]
    assert_everywhere(job["verbs"], {"small": expected, "sliced": expected})


def test_two_hundred_keys_are_initialised_to_their_own_number(job: Job) -> None:
    assert_everywhere(job["init"], [(float(j), float(j)) for j in range(200)])


@pytest.mark.parametrize("mode", MODES)
def test_step_subtracts_the_sum_from_rank_0s_weights_at_each_learning_rate(job: Job, mode: str) -> None:
    expected = [1 - total(job) * sum(RATES[: i + 1]) for i in range(len(RATES))]
    assert_everywhere(job[f"rates {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize("mode", MODES)
def test_momentum_with_rescale_and_batch_size_follows_mxnets_trajectory(job: Job, mode: str) -> None:
    expected = [-job.workers * value for value in (0.5, 1.25, 2.125)]
    assert_everywhere(job[f"momentum {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize("mode", MODES)
def test_each_gradient_is_divided_by_the_batch_size_of_its_own_worker(job: Job, mode: str) -> None:
    uneven = -sum((rank + 1) / 2**rank for rank in range(job.workers))
    for first, then in job[f"batch sizes {mode}"]:
        assert first == [(uneven, uneven)] * len(TRAINED)
        # Without a batch size the mean over workers is taken; a third or a seventh is rounded.
        assert then == [pytest.approx((uneven - (job.workers + 1) / 2,) * 2, rel=1e-6)] * len(TRAINED)


@pytest.mark.parametrize("mode", MODES)
def test_a_learning_rate_multiplier_set_between_steps_is_live(job: Job, mode: str) -> None:
    expected = [-job.workers * value for value in (1.0, 2.0)]
    assert_everywhere(job[f"multiplier {mode}"], all_equal(expected, len(TRAINED)))


@pytest.mark.parametrize(("mode", "in_store"), [("default", True), ("store", True), ("worker", False)])
def test_the_optimizer_runs_where_it_was_asked_to(job: Job, mode: str, in_store: bool) -> None:
    [weights] = all_equal([1.0 - total(job)], len(TRAINED))
    [grads] = all_equal([float(total(job))], len(TRAINED))
    expected = {"in store": in_store, "weights": weights, **({} if in_store else {"grads": grads})}
    assert_everywhere(job[f"split step {mode}"], expected)
