"""A rank of a torch.distributed group: how much is summed in one collective, and replicas beside ranks and servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, Parameter, Sequential, Tanh

from kvtrainer import DataParallel, Trainer, kvstore
from tests.support.group_verbs import error_of
from tests.support.jobs import deliver, own_place

RANK, SIZE = own_place()
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
                p.grad = torch.full_like(p, float(2**at * (RANK + 1) + step))
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
    for name, option in (("bucket_size_mb", 1 + RANK), ("coalesce", RANK == 0)):
        store = kvstore.create("device", **{name: option})
        found[f"different {name}"] = error_of(lambda store=store: trained(store))  # type: ignore[misc]
    kv: Any = kvstore.create("device", bucket_size_mb=1 + RANK)
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
    share = 12 // SIZE
    mine = slice(RANK * share, (RANK + 1) * share)
    for x, y in drawn():
        model.forward_losses((x[mine], y[mine]), squares).backward()
        trainer.step()
    trainer.close()
    pairs = zip(model.params, by_torch(), strict=True)
    return max((one - p).abs().max().item() for row, p in pairs for one in row)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=SIZE)
    errors = {
        f"{name} {in_store}": over(name, in_store)
        for name in ("device", "dist_sync")
        for in_store in (True, False)
    }
    deliver({"buckets": buckets(), "errors": errors})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
