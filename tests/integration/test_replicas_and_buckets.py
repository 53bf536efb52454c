"""Two ranks of torch.distributed: what they sum in one collective, and replicas that each of them has."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential, Tanh

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.common.env import TRANSPORT
from tests.support.jobs import Job, Results, error_of, run_job

SHAPES = ((100,), (50, 3), (7,))
OPTIONS = {"lr": 0.1, "momentum": 0.9}


def counted(sizes: list[int]) -> Any:
    """What sums over ranks, and notes how much."""
    reduce = dist.all_reduce

    def note(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.numel() * tensor.itemsize)
        return reduce(tensor, *args, **options)

    return note


def trained(store: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Weights after two steps, and the bytes of the first one's collectives."""
    w = [Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    trainer = Trainer(w, "sgd", {"lr": 1.0}, kvstore=store)
    sizes: list[int] = []
    original, dist.all_reduce = dist.all_reduce, counted(sizes)
    try:
        for step in range(2):
            for at, p in enumerate(w):
                p.grad = torch.full_like(p, float(2**at * (dist.get_rank() + 1) + step))
            trainer.step(1)
    finally:
        dist.all_reduce = original
    return {"weights": [p.unique().tolist() for p in w], "sizes": sizes[: len(sizes) // 2]}


def buckets() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in (
        ("default", {}),
        ("one", {"bucket_size_mb": -1}),
        ("small", {"bucket_size_mb": 512 / 1024**2}),
        ("each", {"coalesce": False}),
    ):
        found[name] = trained(kvstore.create("device", **options))
    found["half"] = trained(kvstore.create("device", bucket_size_mb=512 / 1024**2), torch.float16)
    late: Any = kvstore.create("device")
    late.bucket_size_mb = 512 / 1024**2
    found["set before"] = trained(late)
    found["set after"] = error_of(lambda: setattr(late, "bucket_size_mb", -1))
    for name, option in (("bucket_size_mb", 1 + dist.get_rank()), ("coalesce", dist.get_rank() == 0)):
        store = kvstore.create("device", **{name: option})
        found[f"different {name}"] = error_of(lambda store=store: trained(store))  # type: ignore[misc]
    kv: Any = kvstore.create("device", bucket_size_mb=1 + dist.get_rank())
    kv.init("w", torch.zeros(2))
    found["different in a push"] = error_of(lambda: kv.push("w", torch.zeros(2)))
    return found


def squares(module: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(module(batch[0]), batch[1])


def net() -> Module:
    torch.manual_seed(1)
    return Sequential(Linear(3, 5), Tanh(), Linear(5, 2)).double()


def drawn() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)
    shapes = [(12, 3), (12, 2)] * 3
    drawn = [torch.randn(shape, dtype=torch.float64, generator=made) for shape in shapes]
    return list(zip(drawn[::2], drawn[1::2], strict=True))


def by_torch() -> list[Tensor]:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), **OPTIONS)  # type: ignore[arg-type]
    for batch in drawn():
        optimizer.zero_grad()
        squares(module, batch).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def over(name: str, in_store: bool) -> float:
    """How far replicas on all ranks end from one device with the whole batch."""
    model = DataParallel(net(), ["cpu"] * 3, reducer="tree")
    trainer = Trainer(model, torch.optim.SGD, OPTIONS, kvstore=name, update_on_kvstore=in_store)
    share = 12 // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for x, y in drawn():
        model.forward_losses((x[mine], y[mine]), squares).backward()
        trainer.step()
    trainer.close()
    pairs = zip(model.params, by_torch(), strict=True)
    return max((one - p).abs().max().item() for row, p in pairs for one in row)


def run_all(rank: int, ranks: int) -> Results:
    os.environ[TRANSPORT] = "tcp"  # in memory there are no buckets
    torch.set_num_threads(1)
    names = ("device", "dist_sync")
    errors = {f"{name} {in_store}": over(name, in_store) for name in names for in_store in (True, False)}
    return {"buckets": buckets(), "errors": errors}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("buckets")
    return run_job(run_all, folder, 2, 1, in_group=True)


def bucket(job: Job, name: str) -> Any:
    first, second = (found[name] for found in job["buckets"])
    assert first == second
    return first


def test_gradients_of_a_dtype_are_summed_in_one_bucket_if_they_fit(job: Job) -> None:
    assert len(bucket(job, "default")["sizes"]) == 1
    assert bucket(job, "one") == bucket(job, "default")


def test_buckets_are_no_larger_than_asked_for_and_the_sum_is_the_same(job: Job) -> None:
    whole, small = bucket(job, "default"), bucket(job, "small")
    assert small["weights"] == whole["weights"] == [[-(6.0 * 2**k) - 2] for k in range(3)]
    assert max(small["sizes"]) == 512
    assert sum(small["sizes"]) == sum(whole["sizes"])
    assert bucket(job, "set before") == small


def test_half_precision_is_counted_as_the_float32_that_travels(job: Job) -> None:
    assert max(bucket(job, "half")["sizes"]) == 512
    assert bucket(job, "half")["weights"] == bucket(job, "default")["weights"]


def test_without_coalescing_every_parameter_has_a_collective(job: Job) -> None:
    each = bucket(job, "each")
    assert each["weights"] == bucket(job, "default")["weights"]
    assert len(each["sizes"]) == 3


def test_bucket_size_stays_after_the_first_step(job: Job) -> None:
    assert "cannot change after the first step" in bucket(job, "set after")


@pytest.mark.parametrize("name", ["bucket_size_mb", "coalesce"])
def test_ranks_that_sum_in_different_pieces_are_told_so(job: Job, name: str) -> None:
    said = bucket(job, f"different {name}")
    assert said.startswith("PlanMismatchError")
    assert f"{name} is {'1' if name == 'bucket_size_mb' else 'True'} on rank 0" in said


def test_ranks_that_push_in_different_pieces_are_told_so(job: Job) -> None:
    assert "different options: bucket_size_mb is 1 on rank 0 and 2 on rank 1" in bucket(
        job, "different in a push"
    )


@pytest.mark.parametrize("in_store", [True, False])
@pytest.mark.parametrize("name", ["device", "dist_sync"])
def test_replicas_on_several_ranks_train_as_one_device_does_on_the_whole_batch(
    job: Job, name: str, in_store: bool
) -> None:
    assert all(found[f"{name} {in_store}"] < 1e-12 for found in job["errors"])
