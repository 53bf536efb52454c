"""One worker of a measured step, on any of the systems that know torch; started by `step_jobs.py`."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from steps import LEARNING_RATE, MOMENTUM, Array, Store, Work, run, worker_options
from torch import Tensor
from torch.nn import Parameter

_BUCKET = 25 << 20
"""Bytes of a bucket, DistributedDataParallel's default."""
CODECS = {
    "bf16": {"type": "bf16", "pull": "bf16"},
    "1bit": {"type": "1bit", "pull": "ternary"},
    "ternary": {"type": "ternary", "pull": "ternary"},
    "topk": {"type": "topk", "pull": "topk"},
}
"""What a Trainer is told of compression, by the name of a store."""


def make_updater(parameters: list[Parameter], optimizer: str, fused: bool = True) -> torch.optim.Optimizer:
    """torch's optimizer of a name."""
    if optimizer == "adam":
        return torch.optim.Adam(parameters, lr=LEARNING_RATE[optimizer], fused=fused)
    momentum = MOMENTUM if optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=LEARNING_RATE[optimizer], momentum=momentum, fused=fused)


def import_what_steps_need() -> None:
    """Take a step in this process: torch imports a lot then, which is no memory of the model."""
    parameter = Parameter(torch.zeros(1))
    updater = make_updater([parameter], "adam")
    parameter.sum().backward()
    updater.step()
    updater.zero_grad()


class Parameters:
    """Parameters of zeros, and a loss with given gradients."""

    rank = 0
    is_continuous = False
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.loss = torch.zeros(())
        import_what_steps_need()

    def begin(self, work: Work) -> None:
        self.parameters = [Parameter(torch.zeros(numel, device=self.device)) for numel in work.numels]

    def end(self) -> None:
        self.parameters, self.loss = [], torch.zeros(())

    def assign(self, grads: list[Array]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = self.tensor(grad)

    def tensor(self, grad: Array) -> Tensor:
        """A gradient where the parameters are."""
        return torch.from_numpy(grad).to(self.device)

    def forward(self, grads: list[Array]) -> None:
        pairs = zip(self.parameters, grads, strict=True)
        self.loss = torch.stack([torch.dot(p, self.tensor(grad)) for p, grad in pairs]).sum()

    def backward(self) -> None:
        self.loss.backward()

    def weights(self) -> Array:
        result: Array = torch.cat([p.detach() for p in self.parameters]).cpu().numpy()
        return result


class TrainerStep(Parameters):
    """`Trainer.step` over `dist_sync`, whose servers have the optimizer, or in this process alone."""

    def __init__(
        self,
        kvstore: str | None = "dist_sync",
        compression: Mapping[str, str] | None = None,
        overlap: bool = False,
        hierarchy: bool = False,
        resumes: bool = False,
    ) -> None:
        super().__init__()
        self._resumes = resumes
        self._options: dict[str, Any] = {"compression_params": compression, "overlap": overlap}
        if hierarchy:  # other checkouts may not know it
            self._options["hierarchy"] = True
        self._kvtrainer = importlib.import_module("kvtrainer")
        self._is_alone = kvstore != "dist_sync"
        self._kv: Any = kvstore if self._is_alone else self._kvtrainer.kvstore.create(kvstore)
        self.rank = 0 if self._is_alone else self._kv.rank
        self._workers = 1 if self._is_alone else self._kv.num_workers
        self._trainer: Any = None

    def begin(self, work: Work) -> None:
        super().begin(work)
        options, name = {"learning_rate": LEARNING_RATE[work.optimizer]}, work.optimizer
        if name == "momentum":
            options, name = {**options, "momentum": MOMENTUM}, "sgd"
        self._trainer = self._kvtrainer.Trainer(
            self.parameters, name, options, kvstore=self._kv, **self._options
        )
        if self._resumes:
            self._trainer.resume()

    def end(self) -> None:
        super().end()
        self._trainer = None

    def forward(self, grads: list[Array]) -> None:
        self._trainer.zero_grad()
        super().forward(grads)

    def step(self) -> None:
        self._trainer.step(self._workers)

    def barrier(self) -> None:
        if not self._is_alone:
            self._kv.barrier()


class Fused(Parameters):
    """torch's fused optimizer in one process."""

    _updater: Any = None

    def begin(self, work: Work) -> None:
        super().begin(work)
        self._updater = make_updater(self.parameters, work.optimizer)

    def end(self) -> None:
        super().end()
        self._updater = None

    def step(self) -> None:
        self._updater.step()

    def barrier(self) -> None:
        """Wait for nobody."""


class PushPull(Parameters):
    """`pushpull` of all keys over `dist_sync`, with the optimizer on the servers."""

    def __init__(self) -> None:
        super().__init__()
        self._kvtrainer = importlib.import_module("kvtrainer")
        self._kv = self._kvtrainer.kvstore.create("dist_sync")
        self.rank = self._kv.rank
        self._keys: range = range(0)
        self._grads: list[Tensor] = []

    def begin(self, work: Work) -> None:
        super().begin(work)
        if not self._keys:
            rate, share = LEARNING_RATE[work.optimizer], 1 / self._kv.num_workers
            create = self._kvtrainer.optimizer.create
            self._kv.set_optimizer(create(work.optimizer, learning_rate=rate, rescale_grad=share))
            self._kv.barrier()
        self._keys = range(self._keys.stop, self._keys.stop + work.keys)
        self._kv.init(list(self._keys), [p.detach() for p in self.parameters])

    def end(self) -> None:
        super().end()
        self._grads = []

    def assign(self, grads: list[Array]) -> None:
        self._grads = [torch.from_numpy(grad) for grad in grads]

    def step(self) -> None:
        self._kv.pushpull(list(self._keys), self._grads, out=[p.detach() for p in self.parameters])

    def barrier(self) -> None:
        self._kv.barrier()


class Overlapped(PushPull):
    """Keys that are pushed, the last one first, while it computes backwards, and pulled when it needs them forwards.

    Sleeping stands for computing: a third of the seconds forwards, two thirds backwards, all keys alike.

    Args:
        is_urgent_first: keys of the first layers have a higher priority; otherwise all have the same, and go in order.
    """

    is_continuous = True

    def __init__(self, is_urgent_first: bool, seconds: float) -> None:
        super().__init__()
        self._is_urgent_first, self._seconds = is_urgent_first, seconds

    def step(self) -> None:
        layers = list(zip(self._keys, self._grads, self.parameters, strict=True))
        pause = self._seconds / 3 / len(layers)
        for key, grad, _ in reversed(layers):
            time.sleep(2 * pause)
            self._kv.push(key, grad, priority=-key if self._is_urgent_first else 0)
        for key, _, parameter in layers:
            self._kv.pull(key, out=parameter.detach())
            time.sleep(pause)


class OverlappedTrainer(TrainerStep):
    """A Trainer with or without `overlap`, and a model of layers that sleep, as of `Overlapped`."""

    is_continuous = True

    def __init__(self, seconds: float, overlap: bool = True) -> None:
        super().__init__(overlap=overlap)
        self._seconds = seconds
        self._grads: list[Tensor] = []

    def end(self) -> None:
        super().end()
        self._grads = []

    def assign(self, grads: list[Array]) -> None:
        self._grads = [torch.from_numpy(grad) for grad in grads]

    def step(self) -> None:
        x, pause = torch.zeros((), requires_grad=True), self._seconds / 3 / len(self.parameters)
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            x = _Layer.apply(x, parameter.view(-1), grad, pause)
        x.backward()
        super().step()


class _Layer(torch.autograd.Function):
    """Sleeps forwards, and for twice as long backwards, where it has a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, grad: Tensor, pause: float) -> Tensor:
        ctx.given = grad, pause
        time.sleep(pause)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad, pause = ctx.given
        time.sleep(2 * pause)
        return above[0], grad, None, None


class AllReduce(Parameters):
    """All-reduce of buckets that gradients are gathered in, and then torch's fused optimizer on every rank.

    Args:
        bucket: bytes of one; negative: all gradients are in one.
        is_flat: the optimizer knows all weights as one tensor, not as the parameters of a model.
    """

    def __init__(
        self, bucket: int, is_flat: bool, world: int, reduce: Callable[[list[Tensor]], None]
    ) -> None:
        super().__init__()
        self._bucket, self._is_flat, self._world, self._reduce = bucket, is_flat, world, reduce
        self._buckets: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._assigned: list[Tensor] = []
        self._updater: Any = None

    def begin(self, work: Work) -> None:
        flat, gradient = [torch.zeros(work.keys * work.floats, device=self.device) for _ in range(2)]
        self.parameters = [Parameter(one) for one in flat.split(work.floats)]
        self._slots = list(gradient.split(work.floats))
        keys = max(1, self._bucket // (4 * work.floats)) if self._bucket >= 0 else work.keys
        self._buckets = list(gradient.split(keys * work.floats))
        whole = Parameter(flat)
        whole.grad = gradient
        self._updater = make_updater([whole] if self._is_flat else self.parameters, work.optimizer)
        for parameter, slot in zip(self.parameters, self._slots, strict=True):
            parameter.grad = slot

    def end(self) -> None:
        super().end()
        self._buckets, self._slots, self._assigned, self._updater = [], [], [], None

    def assign(self, grads: list[Array]) -> None:
        self._assigned = list(map(self.tensor, grads))

    def forward(self, grads: list[Array]) -> None:
        torch._foreach_zero_(self._buckets)
        super().forward(grads)

    def step(self) -> None:
        if self._assigned:
            torch._foreach_copy_(self._slots, self._assigned)
        self._reduce(self._buckets)
        torch._foreach_div_(self._buckets, self._world)
        self._updater.step()


class Gloo(AllReduce):
    """All-reduce by torch.distributed, all buckets under way together as DistributedDataParallel has them."""

    def __init__(self, bucket: int, is_flat: bool = False) -> None:
        dist.init_process_group("gloo")
        super().__init__(bucket, is_flat, dist.get_world_size(), self._gloo)
        self.rank = dist.get_rank()

    def barrier(self) -> None:
        dist.barrier()

    @staticmethod
    def _gloo(buckets: list[Tensor]) -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()


class Mpi(AllReduce):
    """All-reduce of one flat buffer by MPI."""

    def __init__(self) -> None:
        self._mpi = importlib.import_module("mpi4py.MPI")
        self._ranks = self._mpi.COMM_WORLD
        super().__init__(-1, True, self._ranks.Get_size(), self._all_reduce)
        self.rank = self._ranks.Get_rank()

    def barrier(self) -> None:
        self._ranks.Barrier()

    def _all_reduce(self, buckets: list[Tensor]) -> None:
        for bucket in buckets:
            self._ranks.Allreduce(self._mpi.IN_PLACE, bucket.numpy())


class Ddp(Parameters):
    """DistributedDataParallel with gradients as views of its buckets, and then torch's fused optimizer."""

    def __init__(self) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._model: Any = None
        self._updater: Any = None

    def begin(self, work: Work) -> None:
        super().begin(work)
        self._model = torch.nn.parallel.DistributedDataParallel(
            _Dots(self.parameters), gradient_as_bucket_view=True, static_graph=True
        )
        self._updater = make_updater(self.parameters, work.optimizer)

    def end(self) -> None:
        super().end()
        self._model = self._updater = None

    def forward(self, grads: list[Array]) -> None:
        self._model.zero_grad()
        self.loss = self._model(list(map(self.tensor, grads)))

    def step(self) -> None:
        self._updater.step()

    def barrier(self) -> None:
        dist.barrier()


class _Dots(torch.nn.Module):
    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(parameters)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return torch.stack([torch.dot(p, grad) for p, grad in zip(self.parts, grads, strict=True)]).sum()


STORES: dict[str, Callable[[], Store]] = {
    "trainer": TrainerStep,
    **{name: functools.partial(TrainerStep, compression=params) for name, params in CODECS.items()},
    "resuming": functools.partial(TrainerStep, resumes=True),
    "by host": functools.partial(TrainerStep, hierarchy=True),
    "none": functools.partial(TrainerStep, None),
    "local": functools.partial(TrainerStep, "local"),
    "fused": Fused,
    "pushpull": PushPull,
    "flat": lambda: Gloo(-1, is_flat=True),
    "flat grads": lambda: Gloo(-1),
    "buckets": lambda: Gloo(_BUCKET),
    "tensors": lambda: Gloo(0),
    "ddp": Ddp,
    "mpi": Mpi,
}

OVERLAPPED: dict[str, Callable[[float], Store]] = {
    "urgent first": functools.partial(Overlapped, True),
    "fifo": functools.partial(Overlapped, False),
    "plain": functools.partial(OverlappedTrainer, overlap=False),
    "overlap": OverlappedTrainer,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=(*STORES, *OVERLAPPED), required=True)
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of a step of an overlapped store")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--device", default="cpu", help="where the parameters are")
    options = worker_options(parser).parse_args()
    torch.set_num_threads(options.threads)
    Parameters.device = torch.device(options.device)
    if options.store in OVERLAPPED:
        store: Store = OVERLAPPED[options.store](options.compute)
    else:
        store = STORES[options.store]()
    run(store, options, torch.cuda.synchronize if options.device != "cpu" else lambda: None)
    if dist.is_initialized():
        dist.destroy_process_group()
        os._exit(0)  # a thread of gloo that still holds an object of Python could abort the ordinary end
