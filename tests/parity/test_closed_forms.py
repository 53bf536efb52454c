"""MXNet's own closed-form results, exactly, on real servers, and sums of half precision.

The numbers are those of MXNet's nightly tests (dist_sync_kvstore.py, test_gluon_trainer.py) and of runs of MXNet
1.9.1. MXNet's optimizer "test" adds the rescaled gradient; ours is that of 2.x, `w -= lr · g`, so lr is −1.
S is the sum of what the workers push, 1 + 2 + … + W. A tensor is seen as its range (least, greatest value), so (w, w)
says that every element is exactly w.

Half precision accumulates in float32 in every store: of a number n whose neighbour is n + 2, and 1 twice, half
precision would add up to n, and float32 adds up to n + 2, which half precision holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore
from tests.support.sizes import FAST, sizes
from tests.support.stores import Servers

REPEATS = 4
SMALL, IRREGULAR, BIG = (2, 3), (511, 511), (500, 500)
PUSHED = {"3": SMALL, "5": SMALL, "7": SMALL, "98": IRREGULAR, "99": BIG}
HALF_PUSHED = {"4": SMALL, "6": SMALL, "8": SMALL, "100": BIG}
TRAINED = {"column": (10, 1), "odd": (7, 13), "sliced": (300, 301)}

Range = tuple[float, float]
Size = tuple[int, int]
SITES = pytest.mark.parametrize("in_store", [True, False], ids=["store", "worker"])


@pytest.fixture(params=sizes(*FAST, servers=(1, 2, 3, 7)))
def size(request: pytest.FixtureRequest) -> Size:
    """Numbers of workers and servers."""
    workers, servers = request.param
    return workers, servers


def total(size: Size) -> int:
    return size[0] * (size[0] + 1) // 2


def ranges(tensors: Iterable[Tensor]) -> list[Range]:
    found = [tensor.detach().float().aminmax() for tensor in tensors]
    return [(float(least), float(greatest)) for least, greatest in found]


def all_equal(values: Iterable[float], keys: int = len(TRAINED)) -> list[list[Range]]:
    """What a worker sees in `keys` tensors when all their elements are one value, for a row of such moments."""
    return [[(value, value)] * keys for value in values]


def pulled(kv: DistKVStore, shapes: dict[str, Size], dtype: torch.dtype = torch.float32) -> list[Range]:
    outs = [torch.empty(shape, dtype=dtype) for shape in shapes.values()]
    kv.pull(list(shapes), out=outs)
    return ranges(outs)


def test_pushes_add_up_while_the_rate_changes(jobs: Servers, size: Size) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        kv.init(list(PUSHED), [torch.ones(shape) for shape in PUSHED.values()])
        optimizer = kvtrainer.optimizer.create("test", learning_rate=-1.0, rescale_grad=2.0)
        kv.set_optimizer(optimizer)
        seen = []
        for rate in [-1.0] * REPEATS + [-(i + 1.0) for i in range(REPEATS)]:
            optimizer.set_learning_rate(rate)
            kv.push(list(PUSHED), [torch.full(shape, rank + 1.0) for shape in PUSHED.values()])
            seen.append(pulled(kv, PUSHED))
        applied = [{r["table"]: r["rounds_applied"] for r in one["tables"]} for one in kv.server_stats()]
        return seen, [one.get("99") for one in applied], [one["3"] for one in applied if "3" in one]

    constant = [1 + 2 * total(size) * (i + 1) for i in range(REPEATS)]
    changing = [constant[-1] + total(size) * (i + 1) * (i + 2) for i in range(REPEATS)]
    # The big key is updated by all servers that hold a part of it (of seven, four), and a small one by one.
    holders = make_plan([TensorSpec("99", BIG, "float32")], size[1]).servers
    of_big = [2 * REPEATS if server in holders else None for server in range(size[1])]
    expected = all_equal([*constant, *changing], len(PUSHED)), of_big, [2 * REPEATS]
    assert jobs.results(*size, body) == [expected] * size[0]


@pytest.mark.parametrize("is_exact", [True, False])
def test_pushes_of_float16_add_up_exactly(jobs: Servers, size: Size, is_exact: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[Range]]:
        half = [torch.ones(shape, dtype=torch.float16) for shape in HALF_PUSHED.values()]
        kv.init(list(HALF_PUSHED), half)
        options = {"learning_rate": -1.0, "rescale_grad": 2.0, "multi_precision": is_exact}
        kv.set_optimizer(kvtrainer.optimizer.create("test", **options))
        seen = []
        for _ in range(REPEATS):
            kv.push(list(HALF_PUSHED), [value * (rank + 1) for value in half])
            seen.append(pulled(kv, HALF_PUSHED, torch.float16))
        return seen

    # Up to 225, with seven workers, every whole number is one of float16.
    expected = all_equal([1 + 2 * total(size) * (i + 1) for i in range(REPEATS)], len(HALF_PUSHED))
    assert jobs.results(*size, body) == [expected] * size[0]


@pytest.mark.parametrize("shape", [SMALL, (300, 301)], ids=["small", "sliced"])
def test_verbs_without_an_optimizer_replace(jobs: Servers, size: Size, shape: Size) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Range]:
        ones, out = torch.ones(shape), torch.empty(shape)
        kv.init("k", ones * (rank + 5))
        seen = pulled(kv, {"k": shape})
        for value in (ones * (rank + 1), ones * (rank + 1), [ones * (rank + 1)] * 3):
            kv.push("k", value)
            seen += pulled(kv, {"k": shape})
        for _ in range(2):
            buffer = ones * (rank + 1)
            kv.pushpull("k", buffer)
            seen += ranges([buffer])
        kv.broadcast("too", ones * (rank + 2), out)
        return [*seen, *ranges([out])]

    s = total(size)
    expected = [(float(value), float(value)) for value in (5, s, s, 3 * s, s, s, 2)]
    assert jobs.results(*size, body) == [expected] * size[0]


class Training:
    """A Trainer of plain SGD over three unequal parameters, all of one value."""

    def __init__(self, kv: DistKVStore, in_store: bool | None, start: float = 0.0, **options: float) -> None:
        self.parameters = [torch.full(shape, start, requires_grad=True) for shape in TRAINED.values()]
        named = list(zip(TRAINED, self.parameters, strict=True))
        given = {"learning_rate": 1.0, **options}
        self.trainer = kvtrainer.Trainer(named, "sgd", given, kvstore=kv, update_on_kvstore=in_store)

    def backward(self, slope: float) -> None:
        """Every element of every gradient is `slope`."""
        sums = [(slope * parameter).sum() for parameter in self.parameters]
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]

    def step(self, slope: float, batch_size: float | None = 1) -> list[Range]:
        self.backward(slope)
        self.trainer.step(batch_size)
        return ranges(self.parameters)


@SITES
def test_each_gradient_is_divided_by_the_batch_size_of_its_own_worker_from_rank_0s_weights_on(
    jobs: Servers, size: Size, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[Range]]:
        training = Training(kv, in_store, 1.0 + rank)
        return [training.step(rank + 1.0, batch_size) for batch_size in (2**rank, None)]

    uneven = 1 - sum((rank + 1) / 2**rank for rank in range(size[0]))
    for first, then in jobs.results(*size, body):
        assert first == [(uneven, uneven)] * len(TRAINED)
        # Without a batch size the mean over workers is taken; a third or a seventh is rounded.
        assert then == [pytest.approx((uneven - (size[0] + 1) / 2,) * 2, rel=1e-6)] * len(TRAINED)


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_every_server_holds_a_piece_of_the_sliced_parameter(servers: int) -> None:
    plan = make_plan([TensorSpec(name, shape, "float32") for name, shape in TRAINED.items()], servers)
    sliced = list(TRAINED).index("sliced")
    holders = {
        slice_.server for slice_ in plan.slices for segment in slice_.segments if segment.key == sliced
    }
    assert holders == set(range(servers))


LARGE = {torch.float16: 2048.0, torch.bfloat16: 256.0}
"""The number n of each dtype."""
SHAPES = {"sliced": (300, 101), "small": (7,)}
DTYPES = pytest.mark.parametrize("dtype", LARGE, ids=str)


def addends(dtype: torch.dtype) -> list[float]:
    """What the three workers, or the three replicas of one, give."""
    return [LARGE[dtype], 1.0, 1.0]


def full(dtype: torch.dtype, value: float) -> list[Tensor]:
    return [torch.full(shape, value, dtype=dtype) for shape in SHAPES.values()]


def seen(tensors: list[Tensor]) -> list[float]:
    """The one value of all elements, or all values that there are."""
    return sorted({value for tensor in tensors for value in tensor.detach().unique().tolist()})  # type: ignore[no-untyped-call]


def verbs(kv: Any, dtype: torch.dtype, values: list[float]) -> dict[str, list[float]]:
    """The sums after push and pull and after pushpull, and n minus the sum as an optimizer on the store has it."""
    keys, outs, given = (
        list(SHAPES),
        full(dtype, 0.0),
        list(zip(*(full(dtype, v) for v in values), strict=True)),
    )
    found = {}
    kv.init(keys, full(dtype, LARGE[dtype]))
    kv.push(keys, [list(one) for one in given])
    kv.pull(keys, out=outs)
    found["pushed"] = seen(outs)
    kv.pushpull(keys, [list(one) for one in given], out=outs)
    found["pushpulled"] = seen(outs)
    weights = [f"{key} weight" for key in keys]
    kv.init(weights, full(dtype, LARGE[dtype]))
    kv.set_optimizer(kvtrainer.optimizer.create("sgd", learning_rate=1.0, multi_precision=True))
    kv.pushpull(weights, [list(one) for one in given], out=outs)
    found["updated"] = seen(outs)
    return found


def in_float32(dtype: torch.dtype) -> dict[str, list[float]]:
    return {"pushed": [LARGE[dtype] + 2], "pushpulled": [LARGE[dtype] + 2], "updated": [-2.0]}


@DTYPES
def test_half_precision_would_lose_both_small_addends(dtype: torch.dtype) -> None:
    large, one, other = (torch.tensor(value, dtype=dtype) for value in addends(dtype))
    assert (large + one) + other == large
    assert torch.tensor(LARGE[dtype] + 2).to(dtype) == LARGE[dtype] + 2


@DTYPES
@pytest.mark.parametrize("given_by", ["workers", "replicas"])
def test_servers_sum_in_float32(jobs: Servers, dtype: torch.dtype, given_by: str) -> None:
    def body(kv: DistKVStore, rank: int) -> dict[str, list[float]]:
        own = [addends(dtype)[rank]]
        return verbs(kv, dtype, own if given_by == "workers" else addends(dtype) if rank == 0 else [0.0])

    assert jobs.results(3, 2, body) == [in_float32(dtype)] * 3


@DTYPES
@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_stores_of_one_process_sum_replicas_in_float32(kvstore: str, dtype: torch.dtype) -> None:
    assert verbs(kvtrainer.kvstore.create(kvstore), dtype, addends(dtype)) == in_float32(dtype)


@DTYPES
@pytest.mark.parametrize("in_store", [True, False])
def test_a_trainers_step_sums_in_float32(jobs: Servers, dtype: torch.dtype, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        parameters = [one.requires_grad_() for one in full(dtype, LARGE[dtype])]
        options = {"learning_rate": 1.0, "multi_precision": True}
        trainer = kvtrainer.Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)
        for parameter in parameters:
            (addends(dtype)[rank] * parameter).sum().backward()  # type: ignore[no-untyped-call]
        trainer.step(1)
        return seen(parameters)

    assert jobs.results(3, 2, body) == [[-2.0]] * 3


@DTYPES
def test_the_big_key_lies_on_both_servers(dtype: torch.dtype) -> None:
    plan = make_plan([TensorSpec("sliced", SHAPES["sliced"], str(dtype).removeprefix("torch."))], 2)
    assert {slice_.server for slice_ in plan.slices} == {0, 1}
