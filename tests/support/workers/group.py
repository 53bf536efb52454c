"""A rank of a torch.distributed group over gloo: Trainers and stores named 'device' sum over its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter

from kvtrainer import Trainer, amp, kvstore, optimizer
from kvtrainer.comm import rank_group
from kvtrainer.errors import KVStoreError
from tests.support.jobs import Results
from tests.support.limits import LIMIT, SOON
from tests.support.replica_training import random_gradients, random_parameters
from tests.support.sparse_model import CASES, Embeddings, batches


def error_of(call: Callable[[], object]) -> str:
    """The class and the text of what a call raises."""
    try:
        call()
    except KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def verbs(rank: int) -> dict[str, Any]:
    """What the verbs of a store give on this rank."""
    kv: Any = kvstore.create("device")
    out = torch.zeros(2)
    found: dict[str, Any] = {"place": [kv.rank, kv.num_workers, kv.type]}

    def pulled(key: int) -> float:
        kv.pull(key, out=out)
        return out[0].item()

    kv.init(3, torch.full((2,), rank + 5.0))
    found["init"] = pulled(3)
    kv.push(3, torch.full((2,), rank + 1.0))
    found["push"] = pulled(3)
    kv.push(3, [torch.full((2,), rank + 1.0)] * 3)
    found["replicas"] = pulled(3)
    value = torch.full((2,), rank + 1.0)
    kv.pushpull(3, value)
    found["pushpull"] = value[0].item()
    kv.broadcast(4, torch.full((2,), rank + 2.0), out)
    found["broadcast"] = out[0].item()
    kv.barrier()
    found["refused"] = [
        error_of(lambda: kv.push(8 + rank, value)),
        error_of(lambda: kv.push(3 if rank else 4, value)),
        error_of(lambda: kv.push(3, torch.zeros(2 + rank))),
        error_of(lambda: kv.init(9, torch.zeros(2 + rank))),
        error_of(lambda: kv.init(4 if rank else 10, value)),
        error_of(kv.barrier if rank else lambda: kv.push(3, value)),
        error_of(lambda: kv.set_gradient_compression({"type": "2bit"})),
    ]
    kv.set_optimizer(kvstore_optimizer(2.0))
    rows = []
    for _ in range(3):
        kv.push(4, [torch.full((2,), rank + 1.0)] * 2)
        rows.append(pulled(4))
    found["optimizer"] = rows
    kv.set_optimizer(kvstore_optimizer(2.0 + rank))
    found["optimizers"] = error_of(lambda: kv.push(4, value))
    found["rows"] = rows_of(rank)
    return found


def rows_of(rank: int) -> list[list[float]]:
    """The first column of a key after pushes of rows on every rank, of rows on one, and of rows beside dense ones."""
    kv: Any = kvstore.create("local_allreduce_device")
    kv.init("e", torch.zeros(4, 2))
    kv.set_optimizer(kvstore_optimizer(1.0))
    out, found = torch.zeros(4, 2), []

    def rows(*ids: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([ids], dtype=torch.int64), torch.ones(len(ids), 2), (4, 2)
        )

    for value in (
        [rows(0, rank), rows(3)],
        rows(1, 1) if rank == 1 else rows(),
        torch.ones(4, 2) if rank else rows(2),
    ):
        kv.push("e", value)
        kv.pull("e", out=out)
        found.append(out[:, 0].tolist())
    return found


def kvstore_optimizer(rescale: float) -> Any:
    return optimizer.create("test", learning_rate=-1.0, rescale_grad=rescale)


def parameters(*values: float) -> list[Parameter]:
    return [Parameter(torch.full((2, 3), value)) for value in values]


def backward(given: Sequence[Parameter], slopes: float | Sequence[float | None] = 1.0) -> None:
    each = slopes if isinstance(slopes, Sequence) else [slopes] * len(given)
    for p, slope in zip(given, each, strict=True):
        if slope is not None:
            (p * slope).sum().backward()


def first(given: Sequence[torch.Tensor]) -> list[float]:
    return [p.flatten()[0].item() for p in given]


def closed_forms() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for in_store in (None, True, False):
        w = parameters(5.0 + dist.get_rank())
        options = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer(w, "sgd", options, update_on_kvstore=in_store)
        rows = []
        for _ in range(3):
            backward(w, dist.get_rank() + 1.0)
            trainer.step(2)
            rows += first(w)
        trainer.set_learning_rate(0.5)
        backward(w, 0.0)
        trainer.step(1)
        found[f"momentum {in_store}"] = rows + first(w)
    w = parameters(0.0)
    trainer = Trainer(w, "sgd", {"lr": 1.0})
    backward(w, dist.get_rank() + 1.0)
    trainer.step()
    found["mean"] = first(w)
    backward(w)
    trainer.step(2 ** dist.get_rank())
    found["own batch sizes"] = first(w)
    backward(w, dist.get_rank() + 1.0)
    trainer.allreduce_grads()
    found["sums"] = first([p.grad for p in w if p.grad is not None])
    for p in w:
        assert p.grad is not None
        p.grad.mul_(0.5)
    trainer.update(1)
    found["clipped"] = first(w)
    found["place"] = [trainer.kvstore.rank, trainer.kvstore.num_workers] if trainer.kvstore else None
    found["halves"] = error_of(Trainer(parameters(0.0), "sgd", update_on_kvstore=True).allreduce_grads)
    return found


def replicas() -> dict[str, Any]:
    w = parameters(0.0, 9.0)
    trainer = Trainer([w], "sgd", {"lr": 1.0})
    backward(w, dist.get_rank() + 1.0)
    trainer.step(1)
    summed = first(w)
    backward(w, [1.0, 3.0])
    trainer.step()
    averaged = first(w)
    w = parameters(0.0, 9.0)
    trainer = Trainer([w], "sgd", {"lr": 1.0}, kvstore="dist_sync_device")
    backward(w, dist.get_rank() + 1.0)
    trainer.step(1)
    return {"summed": summed, "averaged": averaged, "over servers": first(w)}


def random_weights() -> dict[str, Any]:
    """Adam over several dtypes and buckets, and the same over servers."""
    rank_group.BUCKET, kept = 1024, rank_group.BUCKET
    found: dict[str, Any] = {}
    try:
        for name in ("device", "dist_sync"):
            w = random_parameters()
            trainer = Trainer(w, "adam", {"lr": 0.01, "multi_precision": True}, kvstore=name)
            for _ in random_gradients(dist.get_rank(), w):
                trainer.step(8)
            found[name] = [p.detach().clone() for p in w]
            trainer.close()
    finally:
        rank_group.BUCKET = kept
    return found


def left_out() -> dict[str, Any]:
    w = parameters(1.0, 1.0, 1.0)
    trainer = Trainer(w, "sgd", {"lr": 1.0, "wd": 0.5})
    backward(w, [1.0, 1.0 if dist.get_rank() == 1 else None, None])
    trainer.step(1, ignore_stale_grad=True)
    return {"weights": first(w), "updates": sorted(trainer.state_dict()["state"])}


def veto() -> dict[str, Any]:
    w = parameters(0.0)
    trainer = Trainer(w, "sgd", {"lr": 1.0})
    amp.init_trainer(trainer, amp.LossScaler(8.0))
    found = []
    for slope in (float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0, 1.0):
        with amp.scale_loss((w[0] * slope).sum(), trainer) as loss:
            loss.backward()
        trainer.step(1)
        found.append((first(w), trainer.amp_loss_scale))
    return {"steps": found}


def disagreement() -> dict[str, Any]:
    w = parameters(0.0)
    trainer = Trainer(w, "sgd", {"lr": 1.0})
    trainer.set_learning_rate(0.5 if dist.get_rank() == 1 else 1.0)
    backward(w)
    found = {"rate": error_of(lambda: trainer.step(1)), "unchanged": first(w)}
    trainer.set_learning_rate(0.25)
    trainer.step(1)
    found["after"] = first(w)
    backward(w)
    found["calls"] = error_of(trainer.set_data if dist.get_rank() else lambda: trainer.step(1))
    other = Trainer(parameters(0.0, *([1.0] if dist.get_rank() else [])), "sgd")
    found["model"] = error_of(other.set_data)
    kinds = Trainer(parameters(0.0), "adam" if dist.get_rank() else "sgd")
    found["optimizer"] = error_of(kinds.set_data)
    return found


def states(folder: Path) -> dict[str, Any]:
    def trained(trainer: Trainer, w: list[Parameter], steps: int) -> None:
        for _ in range(steps):
            backward(w, dist.get_rank() + 1.0)
            trainer.step(4)

    w, again = parameters(1.0, 2.0), parameters(1.0, 2.0)
    trainer = Trainer(w, "adam", {"lr": 0.1})
    trained(trainer, w, 2)
    trainer.save_states(folder / f"states{dist.get_rank()}")
    values = {str(i): p.detach().clone() for i, p in enumerate(w)}
    trained(trainer, w, 2)
    other = Trainer(again, "adam", {"lr": 0.3})
    other.load_states(folder / f"states{dist.get_rank()}")
    other.set_data(values)
    trained(other, again, 2)
    return {"uninterrupted": [p.detach() for p in w], "resumed": [p.detach() for p in again]}


def sparse() -> dict[str, Any]:
    """Embeddings of which every rank has other rows; `dense_on_0` has a dense gradient on rank 0."""
    found: dict[str, Any] = {}
    for name, (kind, options) in CASES.items():
        model = Embeddings()
        trainer = Trainer(model.parameters(), kind, options)
        for big, small in batches(dist.get_rank()):
            model(big, small).backward()
            trainer.step(1)
        found[name] = [p.detach() for p in model.parameters()]
    net = torch.nn.Embedding.from_pretrained(torch.zeros(6, 2), freeze=False, sparse=True)
    trainer = Trainer(net.parameters(), "sgd", {"lr": 1.0})
    if dist.get_rank():
        net(torch.tensor([dist.get_rank(), dist.get_rank()])).sum().backward()
    else:
        net.weight.grad = torch.full((6, 2), 0.5)
    trainer.step(1)
    found["mixed"] = net.weight.detach().clone()
    if dist.get_rank() == 1:
        net(torch.tensor([5])).sum().backward()
    trainer.step(1, ignore_stale_grad=True)
    found["one rank only"] = net.weight.detach().clone()
    net(torch.tensor([0])).sum().backward()
    trainer.allreduce_grads()
    found["sums"] = net.weight.grad.to_dense().clone() if net.weight.grad is not None else None
    uneven = torch.nn.Embedding.from_pretrained(torch.zeros(5, 2), freeze=False, sparse=True)
    trainer = Trainer(uneven.parameters(), "sgd", {"lr": 1.0}, update_on_kvstore=False)
    with trainer.join():
        for _ in range(dist.get_rank() + 1):
            (uneven(torch.tensor([1, 3])) * (dist.get_rank() + 1.0)).sum().backward()
            trainer.step(1)
    found["in a block"] = uneven.weight[:, 0].tolist()
    return found


def refusals() -> dict[str, Any]:
    module = torch.nn.Linear(2, 1)
    wrapped = torch.nn.parallel.DistributedDataParallel(module)
    groups = [{"params": wrapped}]
    found = {
        "module": error_of(lambda: Trainer(wrapped, "sgd")),
        "group": error_of(lambda: Trainer(groups, "sgd", kvstore="local")),
        "parameters": error_of(lambda: Trainer(wrapped.parameters(), "sgd", kvstore="local")),
        "inner": error_of(lambda: Trainer(module, "sgd")),
        "none": error_of(lambda: Trainer(wrapped, "sgd", kvstore=None)),
        "other": error_of(lambda: Trainer(torch.nn.Linear(2, 1), "sgd")),
        "compression": error_of(lambda: Trainer(parameters(0.0), "sgd", compression_params={"type": "fp16"})),
    }
    return found


def after_ddp() -> str:
    """A Trainer of a module whose wrapper has gone."""
    module = torch.nn.Linear(2, 1)
    torch.nn.parallel.DistributedDataParallel(module)
    return error_of(lambda: Trainer(module, "sgd"))


def absence(folder: Path) -> dict[str, Any]:
    """Rank 0 comes to a step that nobody else comes to."""
    w = parameters(0.0)
    trainer = Trainer(w, "sgd")
    trainer.set_data()
    backward(w)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SOON))
    found = error_of(lambda: trainer.step(1)) if dist.get_rank() == 0 else "nothing"
    store = dist.FileStore(str(folder / "absence"), dist.get_world_size())
    if dist.get_rank() == 0:
        store.set("over", "yes")
    else:
        store.wait(["over"])
    return {"error": found, "weights": first(w)}


def late(early: Trainer, updating: Trainer, early_store: Any) -> dict[str, Any]:
    """The Trainers and the store were built before the group."""
    backward([p for one in (early, updating) for group in one.param_groups for p in group["params"]])
    return {
        "trainer": error_of(lambda: early.step(1)),
        "updating trainer": error_of(lambda: updating.step(1)),
        "store": error_of(lambda: Trainer(parameters(0.0), "sgd", kvstore=early_store)),
    }


def run(rank: int, ranks: int, place: str) -> Results:
    folder = Path(place)
    early, early_store = Trainer(parameters(0.0), "sgd"), kvstore.create("device")
    updating = Trainer(parameters(0.0), "sgd", update_on_kvstore=True)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    results = {
        "late": late(early, updating, early_store),
        "closed_forms": closed_forms(),
        "replicas": replicas(),
        "random": random_weights(),
        "left_out": left_out(),
        "veto": veto(),
        "disagreement": disagreement(),
        "states": states(folder),
        "sparse": sparse(),
        "verbs": verbs(rank),
        "refusals": {**refusals(), "dropped": after_ddp()},
    }
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"{meeting}2", rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT)
    )
    results["absence"] = absence(folder)
    return results
