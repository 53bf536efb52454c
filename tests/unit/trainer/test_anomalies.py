"""Which parameters a loss does not depend on, and losses that are not finite."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kvtrainer import RowSparseParameter, Trainer
from kvtrainer.anomalies import check_loss, describe_nonfinite, find_unused_parameters, report_anomalies
from kvtrainer.errors import (
    AnomalousParametersError,
    ArgumentTypeError,
    ConfigurationError,
    NonFiniteLossError,
)


class Model(nn.Module):
    """`forwarded` is computed but not in the loss, and `unused` is not even computed."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(2, 3)
        self.forwarded = nn.Linear(2, 4)
        self.unused = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.forwarded(x)
        loss: Tensor = self.used(x).sum()
        return loss


def names(loss: object, model: object) -> list[str]:
    return [name for name, _ in find_unused_parameters(loss, model)]


def test_parameters_that_were_not_computed_or_are_not_in_the_loss_are_found_with_names_and_shapes() -> None:
    model = Model()
    assert find_unused_parameters(model(torch.ones(1, 2)), model.named_parameters()) == [
        ("forwarded.weight", (4, 2)), ("forwarded.bias", (4,)), ("unused.weight", (5, 2)), ("unused.bias", (5,)),
    ]  # fmt: skip


def test_what_is_found_is_what_gets_no_gradient() -> None:
    model = Model()
    loss = model(torch.ones(1, 2))
    found = names(loss, model)
    loss.backward()
    assert found == [name for name, p in model.named_parameters() if p.grad is None]


def test_frozen_and_lazy_parameters_are_left_out() -> None:
    model = Model()
    model.unused.requires_grad_(False)
    model.forwarded = nn.LazyLinear(4)
    loss = model.used(torch.ones(1, 2)).sum()
    assert names(loss, model) == []


def test_graph_that_is_deeper_than_the_stack_is_walked() -> None:
    p, unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    loss: Tensor = p * 1
    for _ in range(20_000):
        loss = loss + 1
    assert names(loss, {"p": p, "unused": unused}) == ["unused"]


def test_views_shared_parameters_and_in_place_operations_count_as_use() -> None:
    p, shared = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    buffer = torch.zeros(4)
    buffer[:2] = p.view(2, 2)[0] * shared
    buffer[2:].add_(shared)
    assert names(buffer.sum(), {"p": p, "shared": shared}) == []


def test_sparse_embedding_counts_as_used() -> None:
    used, unused = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    loss = used(torch.tensor([1, 3])).sum()
    assert names(loss, {"used": used.weight, "unused": unused.weight}) == ["unused"]


def test_row_sparse_parameter_counts_as_used_where_rows_of_it_are() -> None:
    used, unused = RowSparseParameter((5, 2)), RowSparseParameter((5, 2))
    trainer = Trainer({"used": used, "unused": unused}, "sgd", kvstore="local")
    loss = used.row_sparse_data([1, 3]).sum()
    assert find_unused_parameters(loss, {"used": used, "unused": unused}) == [("unused", (5, 2))]
    trainer.close()


def test_checkpointed_activations_are_seen_unless_reentrant(caplog: pytest.LogCaptureFixture) -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    assert names(checkpoint(layer, x, use_reentrant=False).sum(), layer) == []
    report_anomalies(checkpoint(layer, x, use_reentrant=True).sum(), layer)
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    assert "false alarms" in caplog.records[-1].message


def test_losses_of_several_heads_count_together() -> None:
    p, q, r = (nn.Parameter(torch.ones(())) for _ in range(3))
    losses = {"cls": p * 2, "box": [q * 2]}
    assert names(losses, {"p": p, "q": q, "r": r}) == ["r"]


def test_parameter_with_replicas_is_used_if_one_of_them_is() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    loss = [(second * 2).sum(), torch.zeros(())]
    assert names(loss, {"split": [first, second], "alone": [third]}) == ["alone"]


def test_loss_without_a_graph_uses_nothing_and_one_that_is_a_parameter_uses_it() -> None:
    p, q = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    assert names(p.detach() * 2, {"p": p}) == ["p"]
    assert names(p, {"p": p, "q": q}) == ["q"]


def test_line_is_mmcvs(caplog: pytest.LogCaptureFixture) -> None:
    report_anomalies(torch.ones(()), {"p": nn.Parameter(torch.ones(2, 2))})
    assert caplog.messages == ["p with shape torch.Size([2, 2]) is not in the computational graph"]


def test_lines_go_to_the_logger_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    report_anomalies(torch.ones(()), {"p": nn.Parameter(torch.ones(()))}, logger=logging.getLogger("mine"))
    assert [record.name for record in caplog.records] == ["mine"]


def test_unused_parameters_raise_if_that_is_asked_for() -> None:
    model = Model()
    with pytest.raises(AnomalousParametersError, match=r"4 parameters .* unused.bias with shape \[5\]"):
        report_anomalies(model(torch.ones(1, 2)), model, "raise")
    assert report_anomalies(model.used(torch.ones(1, 2)).sum(), model.used, "raise") == []


def test_nothing_is_looked_for_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert report_anomalies(torch.ones(()), Model(), False) == []
    assert not caplog.records
    with pytest.raises(ConfigurationError, match="detect_anomalous_params must be"):
        report_anomalies(torch.ones(()), Model(), "loud")


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="a loss is a tensor"):
        find_unused_parameters("loss", Model())


@pytest.mark.parametrize(
    ("value", "problem"), [(math.nan, "Loss is NaN"), (math.inf, "Loss is infinite"), (1.0, None)]
)
def test_loss_that_is_not_finite_is_named(value: float, problem: str | None) -> None:
    loss = {"a": torch.ones(()), "b": torch.tensor([1.0, value], requires_grad=True)}
    assert describe_nonfinite(loss) == problem


def test_nan_loss_stops_training_with_a_critical_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NonFiniteLossError, match="Loss is NaN"):
        check_loss(torch.tensor(math.nan))
    assert [(r.levelname, r.message) for r in caplog.records] == [("CRITICAL", "Loss is NaN")]


def test_loss_that_is_not_finite_may_be_skipped_or_ignored() -> None:
    bad = torch.tensor(math.inf)
    assert [check_loss(bad, "skip"), check_loss(torch.ones(()), "skip")] == [False, True]
    assert check_loss(bad, "ignore")
    with pytest.raises(ConfigurationError, match="on_nonfinite must be"):
        check_loss(bad, "stop")
