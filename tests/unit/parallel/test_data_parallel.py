"""A model on several devices of this process, which are all the CPU: its replicas, and how a batch is split."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Dropout, Linear, Module, Sequential

from kvtrainer import DataParallel, Trainer, build_data_parallel_model
from kvtrainer.errors import BackwardTwiceError, ConfigurationError
from kvtrainer.parallel.batch import PerReplica, scatter_batch

TWO = ["cpu", "cpu"]


def net() -> Sequential:
    return Sequential(Linear(3, 4), BatchNorm1d(4), Linear(4, 1))


def mean(replica: Module, x: Tensor) -> Tensor:
    return replica(x).mean()  # type: ignore[no-any-return]


def test_replicas_are_copies_and_the_first_is_the_module_itself() -> None:
    module = net()
    model = DataParallel(module, TWO)
    assert model.replicas[0] is module is model.module
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in module.named_parameters()]
    for (name, pair), (expected, p) in zip(model.named_replicas(), module.named_parameters(), strict=True):
        assert name == expected
        assert pair[0] is p
        assert pair[1] is not p
        assert torch.equal(pair[0], pair[1])
    assert len(model.params) == 6


def test_model_is_built_once_for_each_device_and_all_get_the_first_ones_weights() -> None:
    built: list[Module] = []

    def build() -> Module:
        built.append(net())
        return built[-1]

    model = DataParallel(build, ["cpu"] * 3)
    assert list(model.replicas) == built
    assert all(torch.equal(pair[0], other) for pair in model.params for other in pair[1:])


def test_replicas_with_different_parameters_are_refused_by_name() -> None:
    one = Linear(1, 1)
    for built, message in (
        ((Linear(3, 4), Linear(3, 5)), "replica 1 on cpu has 2 parameters .*: weight, bias"),
        ((Linear(3, 4), Linear(3, 4, bias=False)), "has 1 parameters and replica 0 has 2.*: bias"),
        ((BatchNorm1d(3), BatchNorm1d(3, track_running_stats=False)), "0 buffers .* has 3.*: running_mean"),
        ((one, one), "two devices the same parameters"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            DataParallel(iter(built).__next__, TWO)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DataParallel(3, TWO), "needs a Module or a function that builds one, got int"),  # type: ignore[arg-type]
        (lambda: DataParallel(lambda: 3, TWO), "function that builds one, got int"),  # type: ignore[arg-type, return-value]
        (lambda: DataParallel(net(), []), "a list of at least one device"),
        (lambda: DataParallel(net(), "cpu"), "a list of at least one device"),
        (lambda: DataParallel(net(), TWO, target=2), "a position in 2 devices.*got 2"),
        (lambda: DataParallel(net(), TWO, mode="eval"), "'train', 'forward' or 'test'"),
        (lambda: build_data_parallel_model(net, TWO, num_gpus=2), "devices or num_gpus, not both"),
        (lambda: build_data_parallel_model(net, num_gpus=99), "num_gpus must be between 1 and"),
        (lambda: build_data_parallel_model(net, TWO, reduser="tree"), "no option 'reduser'.*'reducer'"),
        (lambda: build_data_parallel_model(net, num_gpu=1), "no option 'num_gpu'.*Did you mean 'num_gpus'"),
        (lambda: build_data_parallel_model(net, TWO, mode="train"), "no option 'mode'"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_module_must_have_shapes_first() -> None:
    with pytest.raises(ConfigurationError, match="run a forward pass"):
        DataParallel(torch.nn.LazyLinear(2), TWO)


def test_training_mode_returns_the_output_of_every_replica_that_got_data() -> None:
    model = DataParallel(Linear(3, 2), ["cpu"] * 3)
    x = torch.randn(7, 3)
    outputs = model(x)
    assert [len(one) for one in outputs] == [3, 2, 2]
    assert torch.allclose(torch.cat(outputs), model.module(x))
    assert [len(one) for one in model(x[:2])] == [1, 1]
    assert [len(one) for one in model(input=x)] == [3, 2, 2]


def test_evaluation_takes_the_whole_batch_to_the_target() -> None:
    model = DataParallel(net(), TWO, target=1).eval()
    with torch.no_grad():
        list(model.replicas[1].parameters())[-1].fill_(100.0)
    x = torch.randn(5, 3)
    assert torch.equal(model(x), model.replicas[1](x))
    assert model(x).mean() > 50
    assert not any(one.training for replica in model.replicas for one in replica.modules())


def test_forward_only_model_has_one_replica_on_the_target_and_no_gradients() -> None:
    model = build_data_parallel_model(net, ["cpu"] * 3, target_gpu_id=2, only_build_forward_pass=True)
    assert len(model.replicas) == 1
    assert model.training
    assert not model(torch.randn(4, 3)).requires_grad
    with pytest.raises(ConfigurationError, match="mode='forward', without gradients"):
        model.forward_losses(torch.randn(4, 3), mean)


def test_model_built_for_testing_has_one_replica_in_evaluation_mode() -> None:
    model = build_data_parallel_model(net, TWO, train=False)
    assert len(model.replicas) == 1
    assert not model.module.training
    assert not model(torch.randn(1, 3)).requires_grad
    with pytest.raises(ConfigurationError, match="built with mode='test'"):
        model.train()


def test_losses_are_scaled_by_one_over_the_number_of_replicas() -> None:
    """Two devices with gradients .6 and .4: each counts by a half, and the sum is .5."""
    model = build_data_parallel_model(lambda: Linear(1, 1, bias=False), TWO, reducer="tree")
    losses = model.forward_losses(torch.tensor([[0.6], [0.4]]), mean)
    losses.backward()
    grads = [p.grad for p in model.params[0] if p.grad is not None]
    assert torch.cat(grads).flatten().tolist() == pytest.approx([0.3, 0.2])
    assert model.loss_scale == 0.5
    unscaled = DataParallel(Linear(1, 1, bias=False), TWO, loss_scale_by_replicas=False)
    unscaled.forward_losses(torch.tensor([[0.6], [0.4]]), mean).backward()
    assert [p.grad.item() for p in unscaled.params[0] if p.grad is not None] == pytest.approx([0.6, 0.4])


def test_losses_of_replicas_are_kept_for_metrics_and_their_total_is_the_mean() -> None:
    model = DataParallel(Linear(1, 1, bias=False), TWO)
    x = torch.tensor([[1.0], [2.0], [6.0]])
    losses = model.forward_losses(x, mean)
    assert [one.item() for one in losses.outputs] == [mean(model.module, x[:2]), mean(model.module, x[2:])]
    assert losses.total.item() == pytest.approx(mean(model.module, x).item())
    assert not losses.total.requires_grad


def test_several_losses_of_a_replica_are_added() -> None:
    model = DataParallel(Linear(1, 1, bias=False), TWO)

    def several(replica: Module, x: Tensor) -> dict[str, Any]:
        return {"one": replica(x).mean(), "others": [2 * replica(x).mean(), replica(x).sum(0)]}

    model.forward_losses(torch.ones(2, 1), several).backward()
    assert [p.grad.item() for p in model.params[0] if p.grad is not None] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("output", "got"), [(torch.zeros(2), r"a tensor of shape \[2\]"), (None, "NoneType"), ({}, "list")]
)
def test_loss_that_is_no_scalar_is_refused(output: Any, got: str) -> None:
    model = DataParallel(Linear(1, 1), TWO)
    with pytest.raises(ConfigurationError, match=f"loss of replica 0 .*; got {got}"):
        model.forward_losses(torch.ones(2, 1), lambda replica, part: output)


def test_module_that_returns_its_loss_is_called_with_what_is_in_its_part() -> None:
    class Loss(Linear):
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return (super().forward(x) * (1 if weight is None else weight)).mean()

    model = DataParallel(Loss(1, 1), TWO)
    x = torch.ones(4, 1)
    total = model.forward_losses(x).total.item()
    for batch in ((x, 2 * x), {"x": x, "weight": 2 * x}):
        assert model.forward_losses(batch).total.item() == pytest.approx(2 * total)


def test_loop_may_bring_a_part_for_each_replica() -> None:
    model = DataParallel(Linear(1, 1, bias=False), ["cpu"] * 3)
    losses = model.forward_losses(PerReplica([torch.ones(1, 1), None, torch.ones(4, 1)]), mean)
    losses.backward()
    assert [None if p.grad is None else p.grad.item() for p in model.params[0]] == [0.5, None, 0.5]
    for parts in ([None] * 3, [torch.ones(1, 1)] * 2):
        with pytest.raises(ConfigurationError, match="a part, or None, for each of 3 replicas"):
            model.forward_losses(PerReplica(parts), mean)


def test_second_backward_pass_of_the_same_losses_is_an_error() -> None:
    model = DataParallel(Linear(1, 1), TWO)
    losses = model.forward_losses(torch.ones(2, 1), mean)
    losses.backward(2.0)
    before = [p.grad.clone() for pair in model.params for p in pair if p.grad is not None]
    assert issubclass(BackwardTwiceError, RuntimeError)
    with pytest.raises(BackwardTwiceError):
        losses.backward()
    after = [p.grad for pair in model.params for p in pair if p.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_each_replica_has_statistics_of_its_own_and_the_first_ones_are_saved() -> None:
    model = DataParallel(BatchNorm1d(1, momentum=1.0), TWO)
    model(torch.tensor([[1.0], [3.0], [10.0], [30.0]]))
    assert [replica.running_mean.item() for replica in model.replicas] == [2.0, 20.0]  # type: ignore[union-attr, operator]
    assert model.state_dict()["running_mean"].item() == 2.0
    assert dict(model.named_buffers()).keys() == dict(model.module.named_buffers()).keys()
    model.broadcast()
    assert model.replicas[1].running_mean.item() == 2.0  # type: ignore[union-attr, operator]


def test_checkpoint_has_the_names_of_the_model_and_is_loaded_into_every_replica() -> None:
    saved = net().state_dict()
    model = DataParallel(net(), TWO)
    assert list(model.state_dict()) == list(saved)
    assert model.load_state_dict(saved).missing_keys == []
    for replica in model.replicas:
        assert all(torch.equal(value, saved[name]) for name, value in replica.state_dict().items())
    partial = {name: value for name, value in saved.items() if name != "0.bias"}
    assert model.load_state_dict(partial, strict=False).missing_keys == ["0.bias"]
    with pytest.raises(ConfigurationError, match="assign=True"):
        model.load_state_dict(saved, assign=True)


def test_checkpoint_that_fits_in_parts_only_leaves_replicas_equal() -> None:
    model = DataParallel(Linear(2, 1), TWO)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        model.load_state_dict({"weight": torch.zeros(1, 2), "bias": torch.zeros(3)})
    assert [replica.weight.tolist() for replica in model.replicas] == [[[0.0, 0.0]]] * 2


def test_what_torch_does_to_a_module_reaches_every_replica() -> None:
    model = DataParallel(Sequential(Linear(2, 2), Dropout()), TWO)
    model.apply(lambda one: torch.nn.init.ones_(one.weight) if isinstance(one, Linear) else None)
    assert all(torch.equal(p, torch.ones(2, 2)) for p in model.params[0])
    model.requires_grad_(False)
    assert not any(p.requires_grad for pair in model.params for p in pair)
    model.requires_grad_(True).double()
    assert all(p.dtype == torch.float64 for pair in model.params for p in pair)
    model.forward_losses(torch.ones(2, 2).double(), mean).backward()
    model.zero_grad()
    assert all(p.grad is None for pair in model.params for p in pair)
    with pytest.raises(ConfigurationError, match="stay on cpu, cpu"):
        model.to("meta")


def test_copies_and_pickles_are_data_parallel_models_of_their_own() -> None:
    model = DataParallel(net(), TWO)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        trainer = Trainer(other, "sgd", {"lr": 1.0})
        other.forward_losses(torch.randn(6, 3), mean).backward()
        trainer.step(1)
        assert all(torch.equal(pair[0], pair[1]) for pair in other.params)
        assert not torch.equal(other.params[-1][0], model.params[-1][0])


def test_single_replica_alone_is_not_trained_by_mistake() -> None:
    model = DataParallel(net(), TWO)
    for given in (model.module, model.named_parameters(), list(model.parameters()), model.replicas[1]):
        with pytest.raises(ConfigurationError, match="one replica of several in a DataParallel"):
            Trainer(given, "sgd")
    last = model.replicas[1]
    del model
    Trainer(last, "sgd")


def test_replicas_of_a_model_do_not_train_without_a_store() -> None:
    with pytest.raises(ConfigurationError, match="2 replicas of a DataParallel would each go their own way"):
        Trainer(DataParallel(net(), TWO), "sgd", kvstore=None)
    Trainer(DataParallel(net(), ["cpu"]), "sgd", kvstore=None)


CPU = torch.device("cpu")


class Sample(NamedTuple):
    x: torch.Tensor
    label: str


@pytest.mark.parametrize(
    ("size", "count", "lengths"),
    [(8, 2, [4, 4]), (5, 4, [2, 1, 1, 1]), (2, 3, [1, 1, None]), (1, 4, [1, None, None, None])],
)
def test_parts_differ_by_one_at_most_and_say_their_shares(size: int, count: int, lengths: list[Any]) -> None:
    batch = torch.arange(size)
    parts = scatter_batch(batch, [CPU] * count)
    assert [None if part is None else len(part) for part in parts] == lengths
    assert torch.equal(torch.cat([part for part in parts if part is not None]), batch)
    assert parts.shares == [(length or 0) / size for length in lengths]


def test_structure_is_kept_and_only_tensors_with_axes_are_split() -> None:
    batch: Any = {
        "x": [torch.arange(4), (torch.arange(8).view(4, 2),)],
        "sample": Sample(torch.arange(4) * 10, "cat"),
        "array": np.arange(4.0),
        "rate": torch.tensor(0.5),
        "flag": True,
        "nothing": None,
    }
    first, second = scatter_batch(batch, [CPU] * 2)
    assert first["x"][0].tolist() == [0, 1]
    assert second["x"][1][0].tolist() == [[4, 5], [6, 7]]
    assert isinstance(second["x"], list)
    assert isinstance(second["x"][1], tuple)
    assert isinstance(second["sample"], Sample)
    assert (second["sample"].x.tolist(), second["sample"].label) == ([20, 30], "cat")
    assert second["array"].tolist() == [2.0, 3.0]
    for part in (first, second):
        assert (part["rate"].item(), part["flag"], part["nothing"]) == (0.5, True, None)


def test_batch_is_split_along_the_axis_that_is_asked_for() -> None:
    batch = torch.arange(12).view(3, 4)
    for axis in (1, -1):
        first, second = scatter_batch(batch, [CPU] * 2, axis)
        assert torch.equal(first, batch[:, :2])
        assert torch.equal(second, batch[:, 2:])
    with pytest.raises(ConfigurationError, match=r"the batch\['x'\] has shape \[3\] and no axis 1"):
        scatter_batch({"x": torch.zeros(3)}, [CPU] * 2, axis=1)


def test_batch_without_tensors_goes_to_every_device_whole() -> None:
    parts = scatter_batch(["a", "b"], [CPU] * 2)
    assert list(parts) == [["a", "b"]] * 2
    assert parts.shares is None


def test_tensors_of_different_lengths_or_without_entries_are_refused() -> None:
    batch = {"x": torch.zeros(8, 2), "anchors": torch.zeros(100)}
    with pytest.raises(ConfigurationError, match=r"\['x'\] has 8, the batch\['anchors'\] has 100"):
        scatter_batch(batch, [CPU] * 2)
    with pytest.raises(ConfigurationError, match="no entry along axis 0"):
        scatter_batch(torch.zeros(0, 3), [CPU] * 2)
