"""torch.compile of functions that call a Trainer or a store, and of models with row-sparse parameters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer import amp, kvstore
from kvtrainer.errors import RowSparseError
from kvtrainer.kvstore import DeviceKVStore, DistKVStore, LocalKVStore
from kvtrainer.strategy import Strategy

ROOT = Path(__file__).parents[3]
BATCH = torch.full((2, 3), 0.25)
Step = Callable[[nn.Module, kvtrainer.Trainer, Tensor], object]
needs_newer_compiler = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="earlier compilers read the values of a parameter that they trace"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(step: Step, is_compiled: bool, **options: Any) -> list[Tensor]:
    """Train a network in three steps; its weights, to the bit as they are without a compiler."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for p in net.parameters():
        nn.init.constant_(p, 0.5)
    trainer = kvtrainer.Trainer(
        net.named_parameters(), "sgd", {"learning_rate": 0.25, "momentum": 0.5}, **options
    )

    def run(x: Tensor) -> None:
        step(net, trainer, x)

    call = torch.compile(run, backend="eager") if is_compiled else run
    for _ in range(3):
        call(BATCH)
    trainer.close()
    return [p.detach().clone() for p in net.parameters()]


def assert_that_compiling_changes_nothing(step: Step, **options: Any) -> None:
    compiled, plain = (train(step, is_compiled, **options) for is_compiled in (True, False))
    assert all(map(torch.equal, compiled, plain))
    assert not torch.equal(plain[0], torch.full_like(plain[0], 0.5))


def backward_and_step(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    net(x).sum().backward()
    return trainer.step(2)


@pytest.mark.parametrize(
    "options",
    [
        {"kvstore": None},
        {"kvstore": "local"},
        {"kvstore": "local", "update_on_kvstore": False},
        {"kvstore": "device"},
        {"kvstore": "local", "clip_grad": {"max_norm": 0.5}},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_compiled_function_steps_as_a_plain_one(options: dict[str, Any]) -> None:
    assert_that_compiling_changes_nothing(backward_and_step, **options)


def with_a_closure(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    def loss() -> Tensor:
        trainer.zero_grad()
        total: Tensor = net(x).sum()
        total.backward()
        return total

    return trainer.step(loss)


def in_two_calls(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    trainer.zero_grad()
    net(x).sum().backward()
    trainer.allreduce_grads()
    trainer.update(2)
    return trainer.pull_weights()


def in_a_context(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    with trainer.context():
        loss = net(x).sum()
    return trainer.update_params(loss)


def with_a_scaled_loss(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    amp.init_trainer(trainer)
    with amp.scale_loss(net(x).sum(), trainer) as loss:
        loss.backward()
    return trainer.step(2)


def with_what_a_loop_reads_and_sets(net: nn.Module, trainer: kvtrainer.Trainer, x: Tensor) -> object:
    trainer.set_learning_rate(trainer.learning_rate * 0.5)
    backward_and_step(net, trainer, x)
    trainer.load_state_dict(trainer.state_dict())
    trainer.set_data()
    return x * trainer.num_workers


@pytest.mark.parametrize(
    "step",
    [with_a_closure, in_two_calls, in_a_context, with_a_scaled_loss, with_what_a_loop_reads_and_sets],
    ids=lambda step: step.__name__.replace("_", " "),
)
# torch hides this warning, but not from those who want errors: tensors with a graph wait between compiled graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_every_way_to_step_may_be_in_a_compiled_function(step: Step) -> None:
    assert_that_compiling_changes_nothing(step, kvstore="local", update_on_kvstore=False)


def test_verbs_of_a_store_may_be_in_a_compiled_function() -> None:
    store = kvstore.create("local")

    def verbs(x: Tensor) -> Tensor:
        store.init("w", x)
        store.push("w", x * 2)
        store.pull("w", out=(out := torch.zeros_like(x)))
        return out + 1

    assert torch.equal(torch.compile(verbs, backend="eager")(BATCH), BATCH * 2 + 1)


@pytest.mark.parametrize(
    "kind",
    [
        kvtrainer.Trainer,
        kvtrainer.TrainerDict,
        Strategy,
        LocalKVStore,
        DeviceKVStore,
        DistKVStore,
        amp.GradScaler,
    ],
    ids=lambda kind: kind.__name__,
)
def test_all_calls_of_a_public_class_break_the_graph(kind: type) -> None:
    own = {name for base in kind.__mro__ if base.__module__.startswith("kvtrainer.") for name in vars(base)}
    public = {name: member for name in own if name[0] != "_" and callable(member := getattr(kind, name))}
    traced = [name for name, member in public.items() if not getattr(member, "_torchdynamo_disable", False)]
    assert public
    assert traced == []


# Row-sparse parameters.


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = kvtrainer.RowSparseParameter((6, 3), 0.5)
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table.row_sparse_data(ids) * self.scale).sum()


def trained(make: Callable[[nn.Module], Any]) -> list[Tensor]:
    model = Rows()
    trainer = kvtrainer.Trainer(model, "sgd", {"learning_rate": 0.25}, kvstore="local")
    call = make(model)
    for _ in range(3):
        call(torch.tensor([1, 4, 4])).backward()
        trainer.step(1)
    return [model.table.row_sparse_data(torch.arange(6)).detach(), model.scale.detach()]


@needs_newer_compiler
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_with_a_row_sparse_parameter_trains_as_a_plain_one(backend: str) -> None:
    compiled, plain = (
        trained(lambda model: torch.compile(model, backend=backend)),
        trained(lambda model: model),
    )
    assert all(map(torch.equal, compiled, plain))


@pytest.mark.parametrize(
    "export",
    [
        lambda model, ids: torch.export.export(model, (ids,)),
        pytest.param(
            lambda model, ids: torch.export.export(model, (ids,), strict=True), marks=needs_newer_compiler
        ),
        lambda model, ids: torch.jit.trace(model, (ids,)),
    ],
    ids=["export", "strict export", "trace"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_with_a_row_sparse_parameter_is_not_exported_and_says_what_to_put_in_its_place(
    export: Callable[[nn.Module, Tensor], object],
) -> None:
    model = Rows()
    trainer = kvtrainer.Trainer(model, "sgd", {"learning_rate": 0.25}, kvstore="local")
    with pytest.raises(RowSparseError, match=r"'table' cannot be exported.*nn\.Embedding\.from_pretrained"):
        export(model, torch.tensor([1, 4]))
    trainer.close()


def test_who_does_not_compile_does_not_load_the_compiler() -> None:
    script = """
import sys, torch, kvtrainer
weight = torch.nn.Parameter(torch.ones(1))
trainer = kvtrainer.Trainer({"w": weight}, "sgd", {"learning_rate": 0.5}, kvstore="local")
weight.sum().backward()
trainer.step(1)
print(weight.item(), "torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["0.5", "False"]
