"""A Trainer where contributions count one by one, against formulas in float64: optimizers, schedulers, states.

All workers are in one thread: nothing waits for anything, so a test says who acts when.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import SchedulerInUseError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import FactorScheduler
from tests.support.gluon_formulas import Reference
from tests.support.processes import Members, new_name, together
from tests.support.stores import Servers

ASYNCHRONOUS = ["dist_async", "dist_ssp"]
FAR = {"dist_sync": {}, "dist_async": {}, "dist_ssp": {"staleness": 100}}
"""Options of a store in which nobody waits in these tests."""
TURNS = (0, 1, 1, 0, 1, 1, 1, 0, 0, 1)
"""Which rank contributes at each turn."""
ADAM = {"learning_rate": 0.1, "wd": 0.01}
SHAPES = {"small": (3, 5), "sliced": (128, 64)}
"""Of the parameters; the second one lies on both servers."""


def start_of(name: str) -> Tensor:
    """A parameter's first values."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def gradient(name: str, turn: int) -> Tensor:
    """What is contributed to a parameter at the n-th turn of all workers together."""
    random = torch.Generator().manual_seed(100 * len(name) + turn)
    return torch.randn(SHAPES[name], generator=random)


class Worker:
    """A Trainer over both parameters, and its store."""

    def __init__(
        self, kv: DistKVStore, optimizer: Any, options: dict[str, Any] | None, extra: Mapping[str, Any]
    ) -> None:
        self.kv = kv
        self.weights = {name: start_of(name).mul_(kv.rank == 0).requires_grad_() for name in SHAPES}
        self.trainer = kvtrainer.Trainer(list(self.weights.items()), optimizer, options, kvstore=kv, **extra)

    def backward(self, turn: int, *names: str) -> None:
        """Compute the gradients of a turn, of these parameters or of all."""
        losses = [(self.weights[name] * gradient(name, turn)).sum() for name in names or SHAPES]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]

    def step(self, turn: int) -> None:
        """Contribute the gradients of a turn."""
        self.backward(turn)
        self.trainer.step(1)

    def values(self) -> dict[str, Any]:
        """Its weights, in float64."""
        return {name: weight.detach().double().numpy() for name, weight in self.weights.items()}


@contextmanager
def workers(
    jobs: Servers, type: str, optimizer: Any, options: dict[str, Any] | None = None, *,
    count: int = 2, num_servers: int = 2, store: Mapping[str, Any] | None = None, **extra: Any,
) -> Iterator[list[Worker]]:  # fmt: skip
    """The workers of a job, whose weights are those of rank 0 already."""
    name = new_name()
    with Members() as members:
        servers, given = jobs.of(num_servers), {"type": type, **(store or {})}
        stores = [members.join(servers, rank, count, name, **given) for rank in range(count)]
        made = [Worker(kv, optimizer, None if options is None else dict(options), extra) for kv in stores]
        start_all(made)
        yield made
        for worker in made:
            worker.trainer.close()


def start_all(made: list[Worker]) -> None:
    """The first thing that workers do together: publish rank 0's weights."""
    for outcome in together(*(worker.trainer.set_data for worker in made)):
        if isinstance(outcome, BaseException):
            raise outcome


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any], atol: float = 2e-6) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=atol, err_msg=name)


def starts() -> dict[str, Any]:
    return {name: start_of(name).double().numpy() for name in SHAPES}


def gradients(turn: int) -> dict[str, Any]:
    return {name: gradient(name, turn).double().numpy() for name in SHAPES}


class DelayCompensated:
    """DCASGD (Zheng et al., 2017) with the weights that each rank has read, written down anew."""

    def __init__(self, lr: float, momentum: float, lamda: float, wd: float) -> None:
        self.lr, self.momentum, self.lamda, self.wd = lr, momentum, lamda, wd
        self.weights = starts()
        self.buffers = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.read = [starts(), starts()]

    def push(self, rank: int, turn: int) -> None:
        for name, given in gradients(turn).items():
            w = self.weights[name]
            g = given + self.wd * w
            d = g + self.lamda * g * g * (w - self.read[rank][name])
            self.buffers[name] = self.momentum * self.buffers[name] - self.lr * d
            self.weights[name] = w + self.buffers[name]

    def pull(self, rank: int) -> None:
        self.read[rank] = dict(self.weights)


@pytest.mark.parametrize(("type", "momentum"), [("dist_async", 0.9), ("dist_ssp", 0.0)])
def test_delay_compensation_looks_at_what_the_contributing_worker_has_read(
    jobs: Servers, type: str, momentum: float
) -> None:
    options = {"learning_rate": 0.05, "momentum": momentum, "lamda": 2.0, "wd": 0.01}
    reference = DelayCompensated(0.05, momentum, 2.0, 0.01)
    with workers(jobs, type, "dcasgd", options, store=FAR[type]) as made:
        for turn, rank in enumerate(TURNS):
            made[rank].step(turn)
            reference.push(rank, turn)
            reference.pull(rank)
            assert_close(made[rank].values(), reference.weights, atol=1e-5)


BETAS = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "wd": 0.1}
ALONE: list[tuple[str, str, dict[str, Any]]] = [
    ("dist_async", "adamw", BETAS),
    ("dist_ssp", "lamb", {**BETAS, "bias_correction": True}),
    ("dist_async", "nag", {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}),
]


@pytest.mark.parametrize(("type", "name", "options"), ALONE)
def test_every_contribution_is_an_update_of_its_own(
    jobs: Servers, type: str, name: str, options: dict[str, Any]
) -> None:
    # AdamW and LAMB have aggregate_num 4, with which MXNet refuses every value of update_on_kvstore.
    reference, expected = Reference(name, {"lower_bound": None, "upper_bound": None, **options}), starts()
    with workers(jobs, type, name, options, store=FAR[type]) as made:
        for turn, rank in enumerate(TURNS):
            made[rank].step(turn)
            for key, g in gradients(turn).items():
                expected[key] = reference.update(
                    key, expected[key], g, options["learning_rate"], options["wd"]
                )
            assert_close(made[rank].values(), expected, atol=1e-5)


def scheduled(begin: int = 0) -> Iterator[float]:
    """The learning rates of the updates 1, 2, 3, … of FactorScheduler(2, 0.5), as MXNet 1.9.1 gives them."""
    rates = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.03125, 0.03125]
    return itertools.islice(rates, 1 + begin, None)


@pytest.mark.parametrize(("type", "begin"), [("dist_async", 2), ("dist_ssp", 0)])
def test_a_scheduler_counts_the_contributions_of_all_workers(jobs: Servers, type: str, begin: int) -> None:
    schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    options = {"lr_scheduler": schedule, "learning_rate": 1.0, "begin_num_update": begin}
    expected = starts()
    with workers(jobs, type, "sgd", options, store=FAR[type]) as made:
        for worker in made:
            worker.weights["small"].lr_mult = 0.5  # type: ignore[attr-defined]
        for (turn, rank), rate in zip(enumerate(TURNS), scheduled(begin), strict=False):
            made[rank].step(turn)
            g = gradients(turn)
            expected["small"] = expected["small"] - 0.5 * rate * g["small"]
            expected["sliced"] = expected["sliced"] - rate * g["sliced"]
            assert_close(made[rank].values(), expected, atol=1e-5)
        with pytest.raises(SchedulerInUseError):
            made[0].trainer.set_learning_rate(0.1)


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_the_learning_rate_of_rank_zero_holds_and_others_may_set_theirs_in_vain(
    jobs: Servers, type: str
) -> None:
    expected = starts()

    def step(worker: Worker, turn: int, rate: float) -> None:
        worker.step(turn)
        for name, g in gradients(turn).items():
            expected[name] = expected[name] - rate * g
        assert_close(worker.values(), expected, atol=1e-5)

    with workers(jobs, type, "sgd", {"learning_rate": 0.5}, store=FAR[type]) as made:
        step(made[0], 0, 0.5)
        made[1].trainer.set_learning_rate(8.0)
        step(made[1], 1, 0.5)
        made[0].trainer.set_learning_rate(0.25)
        step(made[0], 2, 0.25)
        step(made[1], 3, 0.25)


def run(made: list[Worker], turns: range) -> dict[str, Any]:
    for turn in turns:
        made[turn % 2].step(turn)
    return made[turns[-1] % 2].values()


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_training_goes_on_from_saved_states_as_if_it_had_never_ended(
    jobs: Servers, type: str, tmp_path: Path
) -> None:
    with workers(jobs, type, "adam", ADAM, store=FAR[type]) as made:
        weights = run(made, range(4))
        made[0].trainer.save_states(tmp_path / "states")
        expected = run(made, range(4, 8))
    with workers(jobs, type, "adam", ADAM, store=FAR[type], num_servers=1) as made:
        given = {name: torch.from_numpy(value).float() for name, value in weights.items()}
        for outcome in together(*(lambda w=w: w.trainer.set_data(given) for w in made)):
            assert outcome is None
        path = tmp_path / "states"
        assert together(*(lambda w=w: w.trainer.load_states(path) for w in made)) == [None, None]
        np.testing.assert_equal(run(made, range(4, 8)), expected)


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_set_data_replaces_the_weights_of_all_and_nothing_is_lost_or_counted_twice(
    jobs: Servers, type: str
) -> None:
    with workers(jobs, type, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, store=FAR[type]) as made:
        made[1].step(0)
        given = {name: torch.full(shape, 7.0) for name, shape in SHAPES.items()}
        others = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
        values = (given, others)
        together(*(lambda w=w, v=v: w.trainer.set_data(v) for w, v in zip(made, values, strict=True)))
        for worker in made:
            assert_close(
                worker.values(), {name: np.full(shape, 7.0) for name, shape in SHAPES.items()}, atol=0
            )
        made[0].step(1)
        expected = {name: 7.0 - 0.5 * gradient(name, 0) - gradient(name, 1) for name in SHAPES}
        assert_close(made[0].values(), {name: value.double().numpy() for name, value in expected.items()})


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_a_limit_of_each_element_leaves_the_row_sparse_gradient_of_the_loop_as_it_was(
    jobs: Servers, type: str
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        rows = torch.nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=True)
        limit = {"type": "value", "clip_value": 0.5}
        trainer = kvtrainer.Trainer(rows, "torch:SGD", {"lr": 1.0}, kvstore=kv, clip_grad=limit)
        (rows(torch.tensor([1])) * 3.0).sum().backward()
        trainer.step(1)
        assert rows.weight.grad is not None
        return [rows.weight.grad.to_dense()[1].tolist(), rows.weight[1].tolist()]

    assert jobs.results(1, 1, body, type=type) == [[[3.0, 3.0], [-0.5, -0.5]]]


@pytest.mark.parametrize("type", ["dist_sync", *ASYNCHRONOUS])
def test_two_trainers_share_a_store_as_generator_and_critic_do(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[list[float], list[float], list[float]]:
        nets = [torch.full((128, 64), start, requires_grad=True) for start in (10.0 + rank, 20.0 + rank)]
        rates = (1.0, 0.5)
        trainers = [
            kvtrainer.Trainer([("w", net)], "sgd", {"learning_rate": rate, "momentum": 0.0}, kvstore=kv)
            for net, rate in zip(nets, rates, strict=True)
        ]
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
        kv.init("w", torch.zeros(3))
        for at in range(6):
            for which in (1, 0) if at % 3 else (1, 1):  # the critic more often
                (nets[which] * (rank + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
                trainers[which].step(1)
            kv.push("w", torch.ones(3))
        kv.barrier()
        for trainer in trainers:
            trainer.set_data({}) if type == "dist_sync" else _read_all(trainer)
        out = torch.empty(3)
        kv.pull("w", out)
        kv.barrier()
        return one_of(nets[0]), one_of(nets[1]), one_of(out)

    # Generator: 4 steps, critic: 8; three is the sum of what both workers contribute in a step.
    assert jobs.results(2, 2, body, type=type) == [([10.0 - 12.0], [20.0 - 12.0], [12.0])] * 2


def one_of(tensor: Tensor) -> list[float]:
    """The one value of all elements, or all values that there are."""
    values: list[float] = tensor.unique().tolist()  # type: ignore[no-untyped-call]
    return values


def _read_all(trainer: kvtrainer.Trainer) -> None:
    """A contribution of nothing, which brings the weights."""
    for group in trainer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trainer.step(1)
