"""Weights that the loop writes while a store has them too: found by the next step, and nothing else is taken for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel

from kvtrainer import Trainer, amp, kvstore
from kvtrainer.errors import WeightsWrittenError
from kvtrainer.memory.write_watch import EVERY, TURNS, WHOLE
from kvtrainer.sync.exchange import StoreExchange
from tests.support.saved_training import same, weights

X = torch.linspace(-1, 1, 15).view(5, 3)


def net_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def trainer_of(net: nn.Module, in_store: bool = True, **options: Any) -> Trainer:
    options = {"learning_rate": 0.1, "momentum": 0.9, **options}
    return Trainer(net, "sgd", options, kvstore=kvstore.create("local"), update_on_kvstore=in_store)


def backward(net: nn.Module) -> None:
    loss: Tensor = net(X.to(next(net.parameters()).dtype)).float().square().sum()
    loss.backward()  # type: ignore[no-untyped-call]


def train(net: nn.Module, trainer: Trainer) -> None:
    backward(net)
    trainer.step(5)


@torch.no_grad()
def clamp(net: Any) -> None:
    for p in net.parameters():
        p.clamp_(-0.01, 0.01)


def clamp_data(net: Any) -> None:
    for p in net.parameters():
        p.data.clamp_(-0.01, 0.01)


WRITES: dict[str, tuple[Callable[[Any], object], str]] = {
    "load_state_dict": (
        lambda net: net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}),
        "4 of 4 parameters .*: 0.weight, 0.bias, 2.weight, 2.bias. Call trainer.set_data",
    ),
    "nn.init": (lambda net: nn.init.constant_(net[2].bias, 7.0), "1 of 4 parameters .*: 2.bias. Call"),
    "clamping, as for a Wasserstein critic": (clamp, "4 of 4 parameters"),
    "clamping as torch's GAN examples do": (clamp_data, "4 of 4 parameters"),
    "NumPy": (lambda net: net[2].bias.detach().numpy().fill(7.0), "1 of 4 parameters .*: 2.bias. Call"),
    "one number": (lambda net: net[0].weight.data.view(-1)[-1:].neg_(), "1 of 4 parameters .*: 0.weight. Call"),
    "another optimizer": (lambda net: torch.optim.SGD(net[0].parameters(), lr=1.0).step(), "0.weight, 0.bias. Call"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITES)
def test_a_write_after_the_first_step_is_named_by_the_next_and_counts_after_set_data(case: str) -> None:
    write, message = WRITES[case]
    net, twin = net_of(), net_of()
    trainer, plain = trainer_of(net), torch.optim.SGD(twin.parameters(), lr=0.1 / 5, momentum=0.9)
    for model in (net, twin):
        backward(model)
    trainer.step(5)
    plain.step()
    plain.zero_grad()
    for model in (net, twin):
        backward(model)
        write(model)
    written = weights(net)
    for _ in range(2):
        with pytest.raises(WeightsWrittenError, match=message):
            trainer.step(5)
        assert same(weights(net), written)
    trainer.set_data()
    trainer.step(5)
    plain.step()
    # The gradients were not used up by the refusal, nor was the momentum touched.
    torch.testing.assert_close(weights(net), weights(twin))


def test_a_frozen_parameter_counts_too_because_the_store_would_overwrite_it() -> None:
    net = net_of()
    net[2].requires_grad_(False)
    trainer = trainer_of(net)
    train(net, trainer)
    nn.init.ones_(net[2].weight)  # type: ignore[arg-type]
    backward(net)
    with pytest.raises(WeightsWrittenError, match=r": 2\.weight\. Call"):
        trainer.step(5)


def test_weights_that_live_in_the_process_may_be_written_at_any_time() -> None:
    net = net_of()
    trainer = trainer_of(net, in_store=False, momentum=0.0)
    train(net, trainer)
    nn.init.constant_(net[2].bias, 7.0)  # type: ignore[arg-type]
    backward(net)
    assert net[2].bias.grad is not None
    expected = 7 - 0.1 / 5 * net[2].bias.grad
    trainer.step(5)
    torch.testing.assert_close(net[2].bias.detach(), expected)


def averaged(net: nn.Module, trainer: Trainer) -> None:
    mean = AveragedModel(net)
    mean.update_parameters(net)


def swapped(net: nn.Module, trainer: Trainer) -> None:
    """Evaluate other weights, and put the own ones back."""
    own = copy.deepcopy(net.state_dict())
    net.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    net(X)
    net.load_state_dict(own)


def swapped_unseen(net: nn.Module, trainer: Trainer) -> None:
    """The same as tools do it that average weights."""
    own = weights(net)
    for p in net.parameters():
        p.data.zero_()
    for p, value in zip(net.parameters(), own, strict=True):
        p.data.copy_(value)


def clipped(net: nn.Module, trainer: Trainer) -> None:
    backward(net)
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    trainer.step(5)


def overflowed(net: nn.Module, trainer: Trainer) -> None:
    """A step that is skipped, and so changes no weight."""
    amp.init_trainer(trainer)
    backward(net)
    for p in net.parameters():
        assert p.grad is not None
        p.grad.fill_(torch.inf)
    trainer.step(5)


def compiled(net: nn.Module, trainer: Trainer) -> None:
    fast = torch.compile(net, backend="aot_eager")
    fast(X).square().sum().backward()
    trainer.step(5)


HARMLESS: dict[str, Callable[[nn.Module, Trainer], object]] = {
    "nothing": lambda net, trainer: None,
    "zero_grad": lambda net, trainer: net.zero_grad(set_to_none=False),
    "several passes": lambda net, trainer: (backward(net), backward(net)),
    "evaluation": lambda net, trainer: (net.eval(), torch.inference_mode()(net)(X), net.train()),
    "clipping": clipped,
    "averaged model": averaged,
    "weights swapped out and in": swapped,
    "weights swapped through .data": swapped_unseen,
    "set_data of what was written through .data": lambda net, trainer: (clamp_data(net), trainer.set_data()),
    "set_data": lambda net, trainer: (clamp(net), trainer.set_data()),
    "set_data with values": lambda net, trainer: trainer.set_data({"0.bias": torch.ones(4)}),
    "copy": lambda net, trainer: copy.deepcopy(net),
    "load_state_dict of the Trainer": lambda net, trainer: trainer.load_state_dict(trainer.state_dict()),
    "freezing": lambda net, trainer: (net.requires_grad_(False), net.requires_grad_(True)),
    "to the same place": lambda net, trainer: net.to("cpu", torch.float32),
    "skipped step": overflowed,
    "torch.compile": compiled,
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_leaves_the_weights_is_not_taken_for_a_write(case: str) -> None:
    net = net_of()
    trainer = trainer_of(net)
    train(net, trainer)
    HARMLESS[case](net, trainer)
    for _ in range(2):
        before = weights(net)
        train(net, trainer)
        assert not any(map(torch.equal, weights(net), before))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_dtype_that_come_back_to_the_bit_are_not_taken_for_a_write(dtype: torch.dtype) -> None:
    net = net_of(dtype)
    trainer = trainer_of(net, multi_precision=dtype.itemsize < 4)
    train(net, trainer)
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    train(net, trainer)
    with torch.no_grad():
        net[0].weight[0, 0] = torch.nextafter(net[0].weight[0, 0], torch.tensor(9, dtype=dtype))  # type: ignore[index, operator]
    backward(net)
    with pytest.raises(WeightsWrittenError, match=r": 0\.weight\. Call"):
        trainer.step(5)


def step_of(trainer: Trainer, big: Parameter, small: Parameter) -> None:
    for p in (big, small):
        p.grad = torch.zeros_like(p)
    trainer.step(1)


def big_and_small() -> tuple[Trainer, Parameter, Parameter]:
    """One more row of blocks than is looked at as a whole, and something behind the last whole one."""
    big, small = Parameter(torch.zeros((WHOLE + 3 * 2**14) // 4)), Parameter(torch.zeros(7))
    named = {"big": big, "small": small}
    store = kvstore.create("local")
    return Trainer(named, "sgd", {"lr": 1.0}, kvstore=store, update_on_kvstore=True), big, small


def test_of_many_weights_a_number_that_is_written_in_every_step_is_found_soon() -> None:
    trainer, big, small = big_and_small()
    step_of(trainer, big, small)

    def train_on() -> None:
        for _ in range(EVERY):
            big.data[12345] = 1.0
            step_of(trainer, big, small)

    with pytest.raises(WeightsWrittenError, match=r": big\. Call"):
        train_on()


@pytest.mark.parametrize("at", [0, 4096, -(2**14)])
def test_of_many_weights_a_run_of_64_kib_that_is_written_once_is_found_at_once(at: int) -> None:
    trainer, big, small = big_and_small()
    for _ in range(EVERY):
        step_of(trainer, big, small)
        big.data[at:].view(-1)[: 2**14] += 1
        with pytest.raises(WeightsWrittenError, match=r": big\. Call"):
            step_of(trainer, big, small)
        trainer.set_data()


def table_of(width: int) -> tuple[Trainer, Parameter, Parameter]:
    """A table that is looked at in parts, and beside it a small parameter."""
    table, small = Parameter(torch.zeros(WHOLE // (4 * width) + 5, width)), Parameter(torch.zeros(7))
    store = kvstore.create("local")
    named = {"small": small, "table": table}
    rate = {"lr": 1.0, "lazy_update": True}
    return Trainer(named, "sgd", rate, kvstore=store, update_on_kvstore=True), table, small


def step_by_rows(trainer: Trainer, table: Parameter, small: Parameter, ids: Tensor) -> None:
    values = torch.ones(len(ids), table.shape[1])
    table.grad = torch.sparse_coo_tensor(ids[None], values, table.shape, check_invariants=False)
    small.grad = torch.ones_like(small)
    trainer.step(1)


@pytest.mark.parametrize("width", [1, 3, 64, 65])
def test_rows_that_the_store_sends_are_not_taken_for_writes(width: int, pulls: list[StoreExchange]) -> None:
    trainer, table, small = table_of(width)
    drawn = torch.Generator().manual_seed(width)
    expected = torch.zeros(table.shape)
    for number in range(TURNS + 2):
        ids = torch.randint(len(table), (50,), generator=drawn).unique()
        ids = torch.cat([ids, torch.tensor([len(table) - 1])]).unique()
        expected[ids] -= 1
        if number == 5:
            table.grad, small.grad = torch.ones_like(table), torch.ones_like(small)
            trainer.step(1)
            expected -= 1
        step_by_rows(trainer, table, small, ids)
    assert pulls == []
    assert torch.equal(table.detach(), expected)


@pytest.mark.parametrize("row", [0, 12345, -1])
def test_of_a_table_whose_rows_travel_a_number_that_is_written_once_is_found_in_time(row: int) -> None:
    trainer, table, small = table_of(64)
    ids = torch.tensor([3, 700])
    for _ in range(2):
        step_by_rows(trainer, table, small, ids)
    table.data[row, 5] = 9.0

    def train_on() -> None:
        for _ in range(TURNS):
            step_by_rows(trainer, table, small, ids)

    with pytest.raises(WeightsWrittenError, match=r": table\. Call"):
        train_on()


@pytest.mark.parametrize("at", [0, 4096, -(2**14)])
def test_of_a_table_whose_rows_travel_a_run_of_64_kib_is_found_at_once(at: int) -> None:
    trainer, table, small = table_of(64)
    ids = torch.tensor([3, 700])
    for _ in range(3):
        for _ in range(2):
            step_by_rows(trainer, table, small, ids)
        table.data.view(-1)[at:][: 2**14] += 1
        with pytest.raises(WeightsWrittenError, match=r": table\. Call"):
            step_by_rows(trainer, table, small, ids)
        trainer.set_data()


def test_beside_a_table_whose_rows_travel_a_write_to_another_parameter_is_found_at_once() -> None:
    trainer, table, small = table_of(64)
    for _ in range(2):
        step_by_rows(trainer, table, small, torch.tensor([3]))
    small.data[2] = 4.0
    with pytest.raises(WeightsWrittenError, match=r": small\. Call"):
        step_by_rows(trainer, table, small, torch.tensor([3]))


def test_after_a_failed_round_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of()
    trainer = trainer_of(net)
    train(net, trainer)

    def half_done(self: StoreExchange, grads: Any, weights: dict[str, Tensor], step: Any) -> NoReturn:
        weights["float32"][0] += 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreExchange, "run", half_done)
        with pytest.raises(KeyboardInterrupt):
            train(net, trainer)
    train(net, trainer)


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[StoreExchange]:
    """The exchanges that have been asked for the store's weights."""
    asked: list[StoreExchange] = []
    pull = StoreExchange.look

    def counted(self: StoreExchange) -> dict[str, Tensor]:
        asked.append(self)
        return pull(self)

    monkeypatch.setattr(StoreExchange, "look", counted)
    return asked


def test_the_stores_weights_are_pulled_only_after_an_unpublished_write(pulls: list[StoreExchange]) -> None:
    net = net_of()
    trainer = trainer_of(net)
    for _ in range(3):
        train(net, trainer)
    clamp(net)
    trainer.set_data()
    train(net, trainer)
    assert pulls == []
    swapped(net, trainer)
    for _ in range(3):
        train(net, trainer)
    assert len(pulls) == 1


def test_a_lazy_parameter_that_takes_no_part_is_not_in_the_store(pulls: list[StoreExchange]) -> None:
    used, spare = nn.Linear(3, 2), nn.LazyLinear(2)
    for parameter in spare.parameters():
        parameter.grad_req = "null"  # type: ignore[attr-defined]
    trainer = trainer_of(nn.ModuleList([used, spare]))
    train(used, trainer)
    spare(X)
    for _ in range(2):
        train(used, trainer)
    assert isinstance(spare.weight, Parameter)
    assert pulls == []
