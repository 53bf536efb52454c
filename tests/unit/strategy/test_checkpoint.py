"""Checkpoints of a strategy: what is in them, where they are found, and how training goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.errors import (
    CheckpointKeyError,
    ConfigurationError,
    KVStoreError,
    StateFileError,
    StateMismatchError,
)
from kvtrainer.kvstore import create
from kvtrainer.strategy.checkpoint import find_last
from tests.support.strategies import SGD, Make, Net, make, same, steps, weights

__all__ = ["make"]
CFG = {
    "optimizer": {"type": "Adam", "lr": 0.1},
    "clip_grad": {"max_norm": 0.1},
    "type": "AmpOptimWrapper",
    "loss_scale": {"init_scale": 8.0, "growth_interval": 2},
    "accumulative_counts": 2,
}
RUN = {"max_iters": 12, "max_epochs": 3}
SCHEDULE = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5}


def prepared(make: Make, seed: int = 1, **more: Any) -> tuple[Any, Any, Any]:
    strategy = make(env_kwargs={"randomness": {"seed": seed}}, **more)
    model, trainer, _ = strategy.prepare(
        Net(), optim_wrapper=CFG, param_scheduler=SCHEDULE, dispatch_kwargs=RUN
    )
    return strategy, model, trainer


@pytest.mark.parametrize("place", ["device", "local", None, "store"])
def test_training_goes_on_with_the_same_bits(make: Make, tmp_path: Path, place: Any) -> None:
    """Loss scale, clipping, schedules, accumulation and random data; the optimizer here or in a store."""
    found = []
    for saved in (True, False):
        kvstore = create("local") if place == "store" else place
        strategy, model, trainer = prepared(make, seed=1 if saved else 9, kvstore=kvstore)
        if saved:
            steps(model, trainer, 6)
            strategy.save_checkpoint(str(tmp_path / "a.pt"), extra_ckpt={"meta": {"iter": 6}})
        else:
            rest = strategy.resume(str(tmp_path / "a.pt"))
            assert rest["meta"]["iter"] == strategy.dispatch_kwargs["cur_iter"] == 6
        steps(model, trainer, 5)
        found.append((weights(model), trainer.get_lr(), trainer.last, strategy.seed, float(torch.rand(()))))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


class Counting(torch.optim.SGD):
    """Divides each step by how many there were, which its state_dict has beside the state of parameters."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad /= self.count
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict(state_dict)


def test_what_an_optimizer_keeps_beside_parameters_goes_on(make: Make, tmp_path: Path) -> None:
    found = []
    for path in ("save", "resume"):
        net = Net()
        strategy = make()
        strategy.prepare(net, optim_wrapper=Counting(net.parameters(), lr=0.1))
        if path == "save":
            steps(net, strategy.optim_wrapper, 2)
            strategy.save_checkpoint(str(tmp_path / "a.pt"))
        else:
            strategy.resume(str(tmp_path / "a.pt"))
        steps(net, strategy.optim_wrapper, 2)
        found.append(weights(net))
    assert same(*found)


def test_a_running_trainer_can_go_back_to_a_checkpoint(make: Make, tmp_path: Path) -> None:
    strategy, model, trainer = prepared(make, kvstore=create("local"))
    steps(model, trainer, 4)
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    steps(model, trainer, 4)
    expected = weights(model)
    strategy.resume(str(tmp_path / "a.pt"))
    steps(model, trainer, 4)
    assert same(weights(model), expected)


def test_file_holds_plain_values_and_says_what_they_are(make: Make, tmp_path: Path) -> None:
    strategy, model, trainer = prepared(make, experiment_name="try")
    steps(model, trainer, 2)
    extra = {"meta": {"epoch": 1}, "data": {"seen": torch.arange(3)}}
    strategy.save_checkpoint(str(tmp_path / "sub" / "a.pt"), extra_ckpt=extra)
    assert list(extra["meta"]) == ["epoch"]
    saved = torch.load(tmp_path / "sub" / "a.pt", weights_only=True)
    assert set(saved) == {"state_dict", "optimizer", "param_schedulers", "ranks", "data", "meta"}
    assert list(saved["state_dict"]) == list(model.state_dict())
    assert set(saved["optimizer"]["parameters"]) == {name for name, _ in model.named_parameters()}
    assert "exp_avg" in saved["optimizer"]["parameters"]["head.bias"]["state"]
    assert len(saved["ranks"]) == 1
    meta = saved["meta"]
    assert (meta["epoch"], meta["seed"], meta["world_size"]) == (1, 1, 1)
    assert meta["experiment_name"] == strategy.experiment_name
    assert {"time", "kvtrainer", "torch"} <= set(meta)


def test_parts_may_be_left_out(make: Make, tmp_path: Path) -> None:
    strategy, _, _ = prepared(make)
    strategy.save_checkpoint(str(tmp_path / "a.pt"), save_optimizer=False, save_param_scheduler=False)
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    assert not {"optimizer", "param_schedulers"} & set(saved)


def test_callbacks_may_change_what_is_written_and_what_is_read(make: Make, tmp_path: Path) -> None:
    strategy, model, _ = prepared(make)
    strategy.save_checkpoint(str(tmp_path / "a.pt"), callback=lambda found: found.update(more=5))

    def raise_bias(found: dict[str, Any]) -> None:
        found["state_dict"]["head.bias"] += found["more"]

    before = model.head.bias.item()
    rest = strategy.load_checkpoint(str(tmp_path / "a.pt"), callback=raise_bias)
    assert model.head.bias.item() == pytest.approx(before + 5)
    assert rest["more"] == 5
    assert "state_dict" not in rest


def test_what_cannot_be_loaded_without_code_is_refused_by_its_place(make: Make, tmp_path: Path) -> None:
    strategy, _, _ = prepared(make)
    path = tmp_path / "a.pt"
    with pytest.raises(ConfigurationError, match=r"checkpoint\['hub'\]\['loss'\] is a numpy\.ndarray"):
        strategy.save_checkpoint(str(path), extra_ckpt={"hub": {"loss": np.zeros(3)}})
    with pytest.raises(
        ConfigurationError, match=r"checkpoint\['rows'\] is a tensor of layout torch\.sparse_coo"
    ):
        strategy.save_checkpoint(str(path), extra_ckpt={"rows": torch.eye(2).to_sparse()})
    with pytest.raises(ConfigurationError, match=r"checkpoint\['keys'\] has the key \(1, 2\)"):
        strategy.save_checkpoint(str(path), extra_ckpt={"keys": {(1, 2): 0}})
    with pytest.raises(ConfigurationError, match="extra_ckpt has 'optimizer'"):
        strategy.save_checkpoint(str(path), extra_ckpt={"optimizer": {}})
    assert not path.exists()
    assert find_last(strategy.work_dir) is None


def test_a_file_without_the_optimizer_is_not_the_one_to_resume_from(make: Make, tmp_path: Path) -> None:
    strategy, _, _ = prepared(make)
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    strategy.save_checkpoint(str(tmp_path / "best.pt"), save_optimizer=False)
    assert find_last(strategy.work_dir) == str(tmp_path / "a.pt")


def test_a_checkpoint_that_cannot_be_written_leaves_the_former_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy, _, _ = prepared(make)
    path = tmp_path / "a.pt"
    strategy.save_checkpoint(str(path))
    before = path.read_bytes()

    def fail(content: Any, name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(StateFileError, match=r"No space left.*unchanged"):
        strategy.save_checkpoint(str(path))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_optimizer_goes_on_with_its_learning_rate_so_that_momentum_can_be_corrected(
    make: Make, tmp_path: Path
) -> None:
    """The rate that was used last is in the file, although the configuration starts with another one."""
    cfg = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
    strategy = make()
    model, trainer = strategy.prepare(Net(), optim_wrapper=cfg)
    trainer.set_learning_rate(0.01)
    steps(model, trainer, 1)
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    other = make()
    _, again = other.prepare(Net(), optim_wrapper=cfg)
    other.resume(str(tmp_path / "a.pt"))
    assert again.get_lr() == {"lr": [0.01]}
    before = trainer.export_saved_states().parameters["head.bias"].state
    after = again.export_saved_states().parameters["head.bias"].state
    assert torch.equal(before["momentum_buffer"], after["momentum_buffer"])


def take_turns(model: Any, trainers: Any) -> None:
    for trainer in trainers.values():
        trainers.zero_grad()  # the loss of one has gradients for the other
        trainer.update_params(model(torch.randn(4, 2)).square().mean())


def test_several_trainers_are_saved_by_name(make: Make, tmp_path: Path) -> None:
    found = []
    for saved in (True, False):
        strategy = make(env_kwargs={"randomness": {"seed": int(saved)}})
        model, trainers = strategy.prepare(Net(), optim_wrapper={"body": SGD, "head": SGD})
        for _ in range(2 if saved else 0):
            take_turns(model, trainers)
        if saved:
            strategy.save_checkpoint(str(tmp_path / "a.pt"))
        else:
            strategy.resume(str(tmp_path / "a.pt"))
        take_turns(model, trainers)
        found.append(weights(model))
    assert same(*found)
    single = make()
    single.prepare(Net(), optim_wrapper=SGD)
    with pytest.raises(StateMismatchError, match="makes no sense"):
        single.resume(str(tmp_path / "a.pt"))


def test_state_of_torchs_optimizer_is_taken_too(make: Make, tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    content = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "meta": {"seed": None}}
    torch.save(content, tmp_path / "a.pt")
    strategy = make()
    _, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
    strategy.resume(str(tmp_path / "a.pt"), resume_param_scheduler=False)
    assert trainer.get_lr() == {"lr": [0.5]}


@pytest.mark.parametrize("part", ["optimizer", "param_schedulers"])
def test_a_missing_part_is_an_error_unless_it_is_left_out_or_tolerated(
    make: Make, tmp_path: Path, part: str
) -> None:
    strategy, model, trainer = prepared(make)
    options = {"save_optimizer": part != "optimizer", "save_param_scheduler": part == "optimizer"}
    path = str(tmp_path / "a.pt")
    strategy.save_checkpoint(path, **options)
    steps(model, trainer, 4)
    before, schedules = weights(model), strategy.scheduler_state_dict()
    with pytest.raises(KeyError, match=f"has no '{part}', only .*'meta'") as raised:
        strategy.resume(path)
    assert isinstance(raised.value, CheckpointKeyError)
    assert same(weights(model), before)
    with pytest.raises(ConfigurationError, match="missing must be"):
        strategy.resume(path, missing="ignore")
    strategy.resume(path, missing="warn")
    assert not same(weights(model), before)
    assert (strategy.scheduler_state_dict() == schedules) is (part == "param_schedulers")
    assert trainer.export_saved_states().num_update == (2 if part == "optimizer" else 0)
    strategy.resume(path, resume_optimizer=part != "optimizer", resume_param_scheduler=part == "optimizer")


def test_optimizer_and_schedules_stay_as_they_are_where_not_resumed(make: Make, tmp_path: Path) -> None:
    strategy, model, trainer = prepared(make)
    steps(model, trainer, 8)
    strategy.save_checkpoint(str(tmp_path / "a.pt"), extra_ckpt={"meta": {"iter": 8}})
    other, _, again = prepared(make)
    rate = again.get_lr()
    other.resume(str(tmp_path / "a.pt"), resume_optimizer=False, resume_param_scheduler=False)
    assert again.get_lr() == rate != trainer.get_lr()
    assert other.scheduler_state_dict() != strategy.scheduler_state_dict()
    assert again.loss_scaler.loss_scale == 8.0 != trainer.loss_scaler.loss_scale


def test_another_seed_in_the_configuration_is_warned_of_and_a_later_strategy_does_not_inherit_it(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = make(env_kwargs={"randomness": {"seed": 5}})
    strategy.prepare(Net())
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    other = make(env_kwargs={"randomness": {"seed": 6}})
    other.prepare(Net())
    other.resume(str(tmp_path / "a.pt"), resume_optimizer=False)
    assert "saved with seed 5, the configuration says 6" in capsys.readouterr().err
    assert (other.seed, other.randomness["seed"]) == (5, 5)
    assert make(env_kwargs=None).seed != 5


def test_another_number_of_workers_begins_with_the_seed(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = make()
    strategy.prepare(Net())

    def second_rank(found: dict[str, Any]) -> None:
        found["ranks"] *= 2

    strategy.save_checkpoint(str(tmp_path / "a.pt"), callback=second_rank)
    torch.rand(3)
    strategy.resume(str(tmp_path / "a.pt"), resume_optimizer=False)
    assert "saved by 2 workers and 1 go on" in capsys.readouterr().err
    mine = float(torch.rand(()))
    torch.manual_seed(1)
    assert mine == float(torch.rand(()))


def test_subclass_may_change_every_step_of_saving_and_loading(make: Make, tmp_path: Path) -> None:
    from kvtrainer.strategy import Strategy

    class Sharded(Strategy):
        def model_state_dict(self) -> dict[str, Any]:
            return {f"shard.{name}": value for name, value in super().model_state_dict().items()}

        def load_model_state_dict(self, state_dict: Any, **options: Any) -> Any:
            return super().load_model_state_dict({n.removeprefix("shard."): v for n, v in state_dict.items()})

    strategy = make(cls=Sharded)
    strategy.prepare(Net())
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    assert "shard.head.bias" in torch.load(tmp_path / "a.pt", weights_only=True)["state_dict"]
    assert not strategy.load_checkpoint(str(tmp_path / "a.pt")).keys() - {"ranks", "meta"}


def test_closing_ends_trainers_and_stores_that_it_made(make: Make) -> None:
    strategy = make()
    model, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
    strategy.close()
    strategy.close()
    assert isinstance(trainer, Trainer)
    with pytest.raises(KVStoreError, match="closed"):
        steps(model, trainer, 1)
