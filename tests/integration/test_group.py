"""Two and three ranks of torch.distributed train with kvstore 'device', as one process or dist_sync would.

They exchange numbers through memory; three of them by gloo as well. A scenario runs on every rank of one job, and gives
what was found there beside what it has to be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Embedding, Linear, Parameter

from kvtrainer import Trainer, kvstore, optimizer
from kvtrainer.common.env import TRANSPORT
from kvtrainer.ranks import process_group
from tests.support.jobs import Job, Results, begin_group, error_of, run_job
from tests.support.limits import SOON
from tests.support.replica_training import random_gradients, random_parameters
from tests.support.scenarios import Pairs, check_every_rank, scenarios_of
from tests.support.sparse_model import CASES, Embeddings, batches

LR = {"lr": 1.0}


def says(call: Callable[[], object], *parts: str) -> tuple[Any, Any]:
    """A pair that agrees if the error of a call has all these parts."""
    text = error_of(call)
    return ([part for part in parts if part not in text] and text), []


def parameters(*values: float) -> list[Parameter]:
    return [Parameter(torch.full((2, 3), value)) for value in values]


def backward(given: Sequence[Parameter], slopes: float | Sequence[float | None] = 1.0) -> None:
    each = slopes if isinstance(slopes, Sequence) else [slopes] * len(given)
    for p, slope in zip(given, each, strict=True):
        if slope is not None:
            (p * slope).sum().backward()


def first(given: Sequence[torch.Tensor]) -> list[float]:
    return [p.flatten()[0].item() for p in given]


def total(ranks: int) -> float:
    """The sum of rank + 1."""
    return ranks * (ranks + 1) / 2


def sums_with_momentum_follow_the_closed_form_from_rank_0s_weights(rank: int, ranks: int) -> Pairs:
    for in_store in (None, True, False):
        w, expected, velocity = parameters(5.0 + rank), 5.0, 0.0
        trainer = Trainer(w, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, update_on_kvstore=in_store)
        for slope, rate in ((1.0, 1.0),) * 3 + ((0.0, 0.5),):
            trainer.set_learning_rate(rate)
            backward(w, slope * (rank + 1.0))
            trainer.step(2)
            velocity = 0.5 * velocity - rate * slope * total(ranks) / 2
            expected += velocity
            yield first(w), [expected]


def step_without_batch_size_averages_and_each_ranks_own_batch_size_counts(rank: int, ranks: int) -> Pairs:
    w = parameters(0.0)
    trainer = Trainer(w, "sgd", LR)
    backward(w, rank + 1.0)
    trainer.step()
    mean = -total(ranks) / ranks
    yield first(w), [mean]
    backward(w)
    trainer.step(2**rank)
    yield first(w), [mean - sum(2.0**-other for other in range(ranks))]
    assert trainer.kvstore is not None
    yield [trainer.kvstore.rank, trainer.kvstore.num_workers], [rank, ranks]


def replicas_are_summed_before_ranks_and_count_in_the_mean(rank: int, ranks: int) -> Pairs:
    for name in ("device", "dist_sync_device"):
        w = parameters(0.0, 9.0)
        trainer = Trainer([w], "sgd", LR, kvstore=name)
        backward(w, rank + 1.0)
        trainer.step(1)
        yield first(w), [-2 * total(ranks)] * 2
        backward(w, [1.0, 3.0])
        trainer.step()
        yield first(w), [-2 * total(ranks) - 2] * 2


def weights_are_those_of_dist_sync_and_of_replicas_in_one_process(rank: int, ranks: int) -> Pairs:
    """Adam over several dtypes and buckets. Two addends have one sum; that of three by gloo has another order.

    Of replicas and ranks a half-precision sum is rounded before the update.
    """
    options, found = {"lr": 0.01, "multi_precision": True}, {}
    kept, process_group.BUCKET = process_group.BUCKET, 1024
    for name in ("device", "dist_sync"):
        w = random_parameters()
        trainer = Trainer(w, "adam", options, kvstore=name)
        for _ in random_gradients(rank, w):
            trainer.step(8)
        found[name] = [p.detach().clone() for p in w]
        trainer.close()
    process_group.BUCKET = kept
    copies = [random_parameters() for _ in range(ranks)]
    alone = Trainer([list(of_key) for of_key in zip(*copies, strict=True)], "adam", options, kvstore="local")
    for _ in zip(*(random_gradients(other, one) for other, one in enumerate(copies)), strict=True):
        alone.step(8)
    for mine, servers, here in zip(found["device"], found["dist_sync"], copies[0], strict=True):
        shared = mine.clone()
        dist.broadcast(shared, src=0)
        yield torch.equal(mine, shared), True
        half = mine.dtype == torch.float16
        near = 2e-3 if half else 1e-6 if os.environ[TRANSPORT] == "tcp" else 0.0
        yield torch.allclose(mine, servers, rtol=0, atol=near), True
        yield torch.allclose(here, servers, rtol=0, atol=2e-3 if half else 0.0), True


def key_that_a_rank_leaves_out_has_the_sum_of_the_others_and_of_none_is_not_touched(
    rank: int, ranks: int
) -> Pairs:
    w = parameters(1.0, 1.0, 1.0)
    trainer = Trainer(w, "sgd", {"lr": 1.0, "wd": 0.5})
    backward(w, [1.0, 1.0 if rank == 1 else None, None])
    trainer.step(1, ignore_stale_grad=True)
    yield first(w), [1 - ranks - 0.5, -0.5, 1.0]
    yield sorted(trainer.state_dict()["state"]), [0, 1]


def ranks_that_disagree_raise_the_same_error_and_take_no_step_until_they_agree(
    rank: int, ranks: int
) -> Pairs:
    w = parameters(0.0)
    trainer = Trainer(w, "sgd", LR)
    trainer.set_learning_rate(0.5 if rank == 1 else 1.0)
    backward(w)
    rates = "PlanMismatchError: ", "group 0 has lr=1.0 on rank 0 and 0.5 on rank 1"
    yield says(lambda: trainer.step(1), *rates)
    yield first(w), [0.0]
    trainer.set_learning_rate(0.25)
    trainer.step(1)
    yield first(w), [-0.25 * ranks]
    backward(w)
    calls = trainer.set_data if rank else lambda: trainer.step(1)
    yield says(calls, "ProtocolError: ", "step on rank 0, set_data on rank 1", "add_param_group")
    other = Trainer(parameters(0.0, *([1.0] if rank else [])), "sgd")
    missing = "key 1 is '1' float32[2, 3] in group 0 on rank 1 but missing on rank 0"
    yield says(other.set_data, "PlanMismatchError: ", missing)
    kinds = Trainer(parameters(0.0), "adam" if rank else "sgd")
    yield says(kinds.set_data, "PlanMismatchError: ", "name is 'sgd' on rank 0 and 'adam' on rank 1")


def row_sparse_gradients_give_every_rank_the_weights_of_a_dense_float64_loop(rank: int, ranks: int) -> Pairs:
    """The loop only for what torch has a dense form of; the same bits on every rank for all."""
    for name, (kind, options) in CASES.items():
        model = Embeddings()
        trainer = Trainer(model.parameters(), kind, options)
        for big, small in batches(rank):
            model(big, small).backward()
            trainer.step(1)
        for p in model.parameters():
            shared = p.detach().clone()
            dist.broadcast(shared, src=0)
            yield torch.equal(p, shared), True
        if name in ("sgd", "torch:SGD", "torch:Adagrad"):
            for found, one in zip(model.parameters(), in_float64(name, ranks), strict=True):
                yield torch.allclose(found.double(), one, rtol=1e-4, atol=1e-5), True


def in_float64(name: str, ranks: int) -> list[Parameter]:
    model = Embeddings().double()
    model.big.sparse = model.small.sparse = False
    given = list(model.parameters())
    loop: torch.optim.Optimizer = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    if name == "torch:Adagrad":
        loop = torch.optim.Adagrad(given, lr=0.1)
    for of_ranks in zip(*(batches(rank) for rank in range(ranks)), strict=True):
        loop.zero_grad()
        sum((model(big, small) for big, small in of_ranks), torch.zeros(())).backward()
        loop.step()
    return given


def rows_of_some_ranks_and_a_dense_gradient_of_another_are_summed(rank: int, ranks: int) -> Pairs:
    net = Embedding.from_pretrained(torch.zeros(6, 2), freeze=False, sparse=True)
    trainer = Trainer(net.parameters(), "sgd", LR)
    if rank:
        net(torch.tensor([rank, rank])).sum().backward()
    else:
        net.weight.grad = torch.full((6, 2), 0.5)
    trainer.step(1)
    expected = torch.full((6, 2), -0.5)
    expected[1:ranks] -= 2.0
    yield net.weight.tolist(), expected.tolist()
    if rank == 1:
        net(torch.tensor([5])).sum().backward()
    trainer.step(1, ignore_stale_grad=True)
    expected[5] -= 1.0
    yield net.weight.tolist(), expected.tolist()
    net(torch.tensor([0])).sum().backward()
    trainer.allreduce_grads()
    assert net.weight.grad is not None
    yield net.weight.grad.to_dense()[:, 0].tolist(), [ranks, 0, 0, 0, 0, 0]


def rows_of_ranks_with_data_reach_those_that_have_joined(rank: int, ranks: int) -> Pairs:
    net = Embedding.from_pretrained(torch.zeros(5, 2), freeze=False, sparse=True)
    trainer = Trainer(net.parameters(), "sgd", LR, update_on_kvstore=False)
    with trainer.join():
        for _ in range(rank + 1):
            (net(torch.tensor([1, 3])) * (rank + 1.0)).sum().backward()
            trainer.step(1)
    moved = -sum((other + 1.0) ** 2 for other in range(ranks))
    yield net.weight[:, 0].tolist(), [0.0, moved, 0.0, moved, 0.0]


def adding(rescale: float) -> Any:
    return optimizer.create("test", learning_rate=-1.0, rescale_grad=rescale)


def verbs_follow_the_closed_forms_and_what_cannot_be_done_raises_on_every_rank(
    rank: int, ranks: int
) -> Pairs:
    kv: Any = kvstore.create("device")
    yield [kv.rank, kv.num_workers, kv.type], [rank, ranks, "device"]
    value, out, s = torch.full((2,), rank + 1.0), torch.zeros(2), total(ranks)

    def pulled(key: int) -> float:
        kv.pull(key, out=out)
        return out[0].item()

    kv.init(3, value + 4.0)
    yield pulled(3), 5.0
    kv.push(3, value)
    yield pulled(3), s
    kv.push(3, [value] * 3)
    yield pulled(3), 3 * s
    summed = value.clone()
    kv.pushpull(3, summed)
    yield summed[0].item(), s
    kv.broadcast(4, value + 1.0, out)
    yield out[0].item(), 2.0
    kv.barrier()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: kv.push(8 + rank, value), "KeyNotFoundError: key "),
        (
            lambda: kv.push(3 if rank else 4, value),
            "ProtocolError: rank 0 calls push(['4']) and rank 1 push(['3'])",
        ),
        (lambda: kv.push(3, torch.zeros(2 + rank)), "ShapeMismatchError: key '3' holds float32[2], got "),
        (lambda: kv.init(9, torch.zeros(2 + rank)), "PlanMismatchError: workers have different models: "),
        (lambda: kv.init(4 if rank else 10, value), "ConfigurationError: key 4 is initialised already"),
        (
            kv.barrier if rank else lambda: kv.push(3, value),
            "ProtocolError: rank 0 calls push(['3']) and rank 1 barrier()",
        ),
        (
            lambda: kv.set_gradient_compression({"type": "2bit"}),
            "ConfigurationError: gradient compression is not supported between the ranks",
        ),
    ]
    for call, text in refused:
        yield says(call, text)
    kv.set_optimizer(adding(2.0))
    for i in range(3):
        kv.push(4, [value] * 2)
        yield pulled(4), 2 * 2 * s * (i + 1) + 2
    kv.set_optimizer(adding(2.0 + rank))
    yield says(lambda: kv.push(4, value), "ranks set different optimizers")


def pushed_rows_are_summed_over_replicas_and_ranks(rank: int, ranks: int) -> Pairs:
    """Rows on every rank, rows on one, and rows beside dense ones."""
    kv: Any = kvstore.create("local_allreduce_device")
    kv.init("e", torch.zeros(4, 2))
    kv.set_optimizer(adding(1.0))
    out, expected = torch.zeros(4, 2), torch.zeros(4)

    def rows(*ids: int) -> torch.Tensor:
        where = torch.tensor([ids], dtype=torch.int64)
        return torch.sparse_coo_tensor(where, torch.ones(len(ids), 2), (4, 2))

    for value, added in (
        ([rows(0, rank), rows(3)], [ranks + 1.0, 1.0, float(ranks > 2), float(ranks)]),
        (rows(1, 1) if rank == 1 else rows(), [0.0, 2.0, 0.0, 0.0]),
        (torch.ones(4, 2) if rank else rows(2), [ranks - 1.0, ranks - 1.0, float(ranks), ranks - 1.0]),
    ):
        kv.push("e", value)
        kv.pull("e", out=out)
        expected += torch.tensor(added)
        yield out[:, 0].tolist(), expected.tolist()


def module_under_ddp_is_refused_with_any_kvstore_but_none(rank: int, ranks: int) -> Pairs:
    module = Linear(2, 1)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    groups = [{"params": wrapped}]
    for call in (
        lambda: Trainer(wrapped, "sgd"),
        lambda: Trainer(groups, "sgd", kvstore="local"),
        lambda: Trainer(wrapped.parameters(), "sgd", kvstore="local"),
        lambda: Trainer(module, "sgd"),
    ):
        yield says(call, "DistributedDataParallel", "kvstore=None")
    yield error_of(lambda: Trainer(wrapped, "sgd", kvstore=None)), "nothing"
    yield error_of(lambda: Trainer(Linear(2, 1), "sgd")), "nothing"
    compressed = {"type": "fp16"}
    yield says(
        lambda: Trainer(parameters(0.0), "sgd", compression_params=compressed),
        "does not compress what the ranks",
    )
    unwrapped = Linear(2, 1)
    torch.nn.parallel.DistributedDataParallel(unwrapped)  # which is gone
    yield error_of(lambda: Trainer(unwrapped, "sgd")), "nothing"


def rank_that_does_not_come_is_a_deadline_error_within_the_groups_timeout(
    rank: int, ranks: int, folder: Path
) -> Pairs:
    """Rank 0 comes to a step that nobody else comes to. The last scenario: nothing works in the group after it."""
    w = parameters(0.0)
    trainer = Trainer(w, "sgd")
    trainer.set_data()
    backward(w)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SOON))
    store = dist.FileStore(str(folder / "absence"), ranks)
    if rank:
        store.wait(["over"])
        yield rank, rank
        return
    waited = f"DeadlineError: rank 0 of {ranks} waited for the other ranks"
    yield says(lambda: trainer.step(1), waited, "trainer.join()")
    yield first(w), [0.0]
    store.set("over", "yes")


SCENARIOS = scenarios_of(globals())
LAST = rank_that_does_not_come_is_a_deadline_error_within_the_groups_timeout
BEFORE = "what was built before the group says so"
FAST = ((2, "tcp"), (3, "shm"))
"""Ranks and the way of their messages in `make test`."""


def run(rank: int, ranks: int, transport: str, place: str) -> Results:
    os.environ[TRANSPORT] = transport
    early, early_store = Trainer(parameters(0.0), "sgd"), kvstore.create("device")
    updating = Trainer(parameters(0.0), "sgd", update_on_kvstore=True)
    begin_group(rank, ranks, Path(place, "meeting"))
    backward([p for one in (early, updating) for group in one.param_groups for p in group["params"]])
    found: dict[str, Any] = {BEFORE: []}
    for one in (early, updating):
        found[BEFORE].append(says(lambda one=one: one.step(1), "initialised after the Trainer was built"))
    store = says(
        lambda: Trainer(parameters(0.0), "sgd", kvstore=early_store), "after the kvstore was created"
    )
    found[BEFORE].append(store)
    found |= {name: list(one(rank, ranks)) for name, one in SCENARIOS.items() if one is not LAST}
    dist.destroy_process_group()
    begin_group(rank, ranks, Path(place, "meeting of the last"))
    return found | {LAST.__name__: list(LAST(rank, ranks, Path(place)))}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((ranks, transport), marks=() if (ranks, transport) in FAST else pytest.mark.full)
        for ranks in (2, 3)
        for transport in ("shm", "tcp")
    ],
    ids=str,
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("group")
    ranks, transport = request.param
    return run_job(run, folder, ranks, 1, transport, str(folder))


@pytest.mark.parametrize("scenario", [BEFORE, *SCENARIOS])
def test_on_every_rank(job: Job, scenario: str) -> None:
    check_every_rank(job, scenario)
