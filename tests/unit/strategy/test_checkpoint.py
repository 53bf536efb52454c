"""Checkpoints of a strategy: what is in them, where they are found, what may be in one, and how training goes on."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import nn

from kvtrainer import Trainer
from kvtrainer.errors import (
    CheckpointKeyError,
    ConfigurationError,
    KVStoreError,
    StateFileError,
    StateMismatchError,
)
from kvtrainer.strategy import Strategy
from kvtrainer.strategy.checkpoint import find_last_checkpoint, pack_checkpoint_tree, unpack_checkpoint_tree
from tests.support.damage import damages
from tests.support.strategies import AMP, SCHEDULE, SGD, Make, Net, same, steps, weights


def prepared(make: Make, seed: int = 1, **more: Any) -> tuple[Any, Any, Any]:
    strategy = make(env_kwargs={"randomness": {"seed": seed}}, **more)
    cfg, run = {**AMP, "clip_grad": {"max_norm": 0.1}}, {"max_iters": 12, "max_epochs": 3}
    strategy.prepare(Net(), optim_wrapper=cfg, param_scheduler=SCHEDULE, dispatch_kwargs=run)
    return strategy, strategy.model, strategy.optim_wrapper


def simple(make: Make, net: nn.Module | None = None, **given: Any) -> Strategy:
    """A strategy without what checkpoints need the most care for."""
    strategy = make()
    strategy.prepare(net or Net(), **{"optim_wrapper": SGD, **given})
    return strategy


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


def test_a_failed_save_changes_nothing(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, _, _ = prepared(make)
    path = tmp_path / "a.pt"
    strategy.save_checkpoint(str(path))
    before, save = path.read_bytes(), torch.save

    def fail(content: Any, target: Any) -> None:
        if isinstance(target, io.BytesIO):  # what a worker tells, in memory
            return save(content, target)
        target.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(StateFileError, match=r"unchanged: No space left"):
        strategy.save_checkpoint(str(path))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("part", ["optimizer", "param_schedulers"])
def test_a_missing_part_is_an_error_unless_tolerated(make: Make, tmp_path: Path, part: str) -> None:
    strategy, model, trainer = prepared(make)
    options = {"save_optimizer": part != "optimizer", "save_param_scheduler": part == "optimizer"}
    path = str(tmp_path / "a.pt")
    strategy.save_checkpoint(path, **options)
    steps(model, trainer, 4)
    before, schedules = weights(model), strategy.scheduler_state_dict()
    with pytest.raises(CheckpointKeyError, match=f"has no '{part}', only .*'meta'"):
        strategy.resume(path)
    assert same(weights(model), before)
    with pytest.raises(ConfigurationError, match="missing must be"):
        strategy.resume(path, missing="ignore")
    strategy.resume(path, missing="warn")
    assert not same(weights(model), before)
    assert (strategy.scheduler_state_dict() == schedules) is (part == "param_schedulers")
    assert trainer.export_saved_states().num_update == (2 if part == "optimizer" else 0)
    strategy.resume(path, resume_optimizer=part != "optimizer", resume_param_scheduler=part == "optimizer")


def test_another_seed_is_warned_of_and_not_inherited(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = make(env_kwargs={"randomness": {"seed": 5}})
    strategy.prepare(Net())
    strategy.save_checkpoint(str(tmp_path / "a.pt"))
    other = make(env_kwargs={"randomness": {"seed": 6}})
    other.prepare(Net())
    other.resume(str(tmp_path / "a.pt"), resume_optimizer=False)
    assert "seed 5, which replaces 6" in capsys.readouterr().err
    assert (other.seed, other.randomness["seed"]) == (5, 5)
    assert make(env_kwargs=None).seed != 5


def test_another_world_size_restarts_seeds(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = make()
    strategy.prepare(Net())

    def second_rank(found: dict[str, Any]) -> None:
        found["ranks"] *= 2

    strategy.save_checkpoint(str(tmp_path / "a.pt"), callback=second_rank)
    torch.rand(3)
    strategy.resume(str(tmp_path / "a.pt"), resume_optimizer=False)
    assert "saved by 2 workers, but there are 1" in capsys.readouterr().err
    mine = float(torch.rand(()))
    torch.manual_seed(1)
    assert mine == float(torch.rand(()))


def test_subclass_may_change_every_step_of_saving_and_loading(make: Make, tmp_path: Path) -> None:
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


def saved(make: Make, name: str) -> Any:
    strategy = make()
    strategy.prepare(Net())
    strategy.save_checkpoint(os.path.join(strategy.work_dir, name), extra_ckpt={"name": name})
    return strategy


def test_the_latest_one_is_found_unless_another_is_named(make: Make) -> None:
    saved(make, "a.pt")
    strategy = saved(make, "b.pt")
    options: list[tuple[dict[str, Any], str]] = [({"resume": True}, "b.pt")]
    for first in (os.path.join(strategy.work_dir, "a.pt"), Path(strategy.work_dir, "a.pt")):
        ways = ({"resume": first}, {"resume": True, "load_from": first}, {"load_from": first})
        options += [(way, "a.pt") for way in ways]
    calls: list[str] = []
    kept = strategy.resume
    strategy.resume = lambda name: calls.append(name) or kept(name, resume_optimizer=False)  # type: ignore
    for options_given, name in options:
        assert strategy.load_or_resume(**options_given)["name"] == name
    assert [os.path.basename(name) for name in calls] == ["b.pt", *["a.pt"] * 4]


@pytest.mark.parametrize("name", ["a.pt", "weights/last/a.pt"])
def test_it_is_found_after_its_directory_was_moved(make: Make, tmp_path: Path, name: str) -> None:
    strategy = saved(make, name)
    moved = tmp_path / "moved"
    os.rename(strategy.work_dir, moved)
    assert find_last_checkpoint(str(moved)) == str(moved / name)


def test_a_note_that_cannot_be_read_is_no_reason_to_start_from_scratch(make: Make) -> None:
    strategy = saved(make, "a.pt")
    Path(strategy.work_dir, "last_checkpoint").write_bytes(b"\xff\xfe")
    with pytest.raises(StateFileError, match=r"cannot read in .* which checkpoint is the latest"):
        strategy.load_or_resume(resume=True)


def load(make: Make, name: str, **options: Any) -> Any:
    strategy = make()
    strategy.prepare(Net())
    return strategy.load_checkpoint(name, **options)


def test_a_damaged_file_is_named_whatever_torch_stumbles_over(make: Make, tmp_path: Path) -> None:
    path, strategy = tmp_path / "a.pt", make()
    strategy.prepare(Net())
    torch.save(Net().state_dict(), path, _use_new_zipfile_serialization=False)

    @given(damages(path.read_bytes()[:120]))
    @settings(max_examples=40, phases=[Phase.generate])
    def check(beginning: bytes) -> None:
        path.write_bytes(beginning + whole[120:])
        with suppress(StateFileError, StateMismatchError):
            strategy.load_checkpoint(str(path), strict=True)

    whole = path.read_bytes()
    check()


def test_addresses_are_downloaded_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(url: str, path: str, progress: bool) -> None:
        asked.append(url)
        torch.save({"state_dict": Net().state_dict(), "from": url}, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    urls = ["https://one.example/a.pt", "https://two.example/a.pt", "https://one.example/a.pt"]
    assert [load(make, url)["from"] for url in urls] == urls
    assert asked == urls[:2]


def test_nothing_has_changed_where_there_is_no_trainer(make: Make, tmp_path: Path) -> None:
    simple(make).save_checkpoint(str(tmp_path / "a.pt"))
    other = simple(make, optim_wrapper=None)
    before = weights(other.model)
    with pytest.raises(ConfigurationError, match="has no Trainer"):
        other.resume(str(tmp_path / "a.pt"))
    assert same(weights(other.model), before)


def test_what_does_not_fit_may_be_tolerated(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger model with another optimizer and no schedule takes the weights that it has in common."""
    first = simple(make, param_scheduler=SCHEDULE)
    steps(first.model, first.optim_wrapper, 2)
    first.save_checkpoint(str(tmp_path / "a.pt"))

    class Larger(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, 1)

    second = simple(make, Larger(), optim_wrapper={"optimizer": {"type": "Adam", "lr": 0.3}})
    with pytest.raises(StateMismatchError):
        second.resume(str(tmp_path / "a.pt"))
    second.resume(str(tmp_path / "a.pt"), missing="warn")
    mine, theirs = (one.model.get_parameter("head.weight") for one in (second, first))
    assert torch.equal(mine, theirs)
    assert second.optim_wrapper.get_lr()["lr"] == [0.3]
    said = capsys.readouterr().err
    assert "'optimizer' is not resumed" in said
    assert "'param_schedulers' is not resumed" in said


def test_passes_are_counted_from_the_iteration_without_a_count(make: Make, tmp_path: Path) -> None:
    """Saved without accumulation: with four of seven passes made, the seventh is a window of its own."""
    path = str(tmp_path / "a.pt")
    simple(make).save_checkpoint(path, extra_ckpt={"meta": {"iter": 4}})
    simple(make).save_checkpoint(path + "w", save_optimizer=False, extra_ckpt={"meta": {"iter": 4}})
    for name, missing in ((path, "error"), (path + "w", "warn")):
        run = {"max_iters": 7}
        strategy = simple(make, optim_wrapper={**SGD, "accumulative_counts": 2}, dispatch_kwargs=run)
        strategy.resume(name, missing=missing)
        trainer = strategy.optim_wrapper
        found = [trainer.update_params(strategy.model(torch.ones(1, 2)).sum()).updated for _ in range(3)]
        assert found == [False, True, True]


@pytest.mark.parametrize("name", ["file://{}/a.pt", "{}/a.pt"])
def test_a_run_without_schedules_resumes_a_file_of_torch(make: Make, tmp_path: Path, name: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    meta = {"iter": 3, "seed": None}
    content = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "meta": meta}
    torch.save(content, tmp_path / "a.pt")
    strategy = simple(make)
    strategy.load_or_resume(load_from=name.format(tmp_path), resume=True)
    assert isinstance(strategy.optim_wrapper, Trainer)
    assert strategy.optim_wrapper.get_lr() == {"lr": [0.25]}
    assert same(weights(strategy.model), weights(net))


def test_a_file_without_states_is_not_the_one_to_resume_from(make: Make, tmp_path: Path) -> None:
    strategy, _, _ = prepared(make)
    assert strategy.load_or_resume() is strategy.load_or_resume(resume=True) is None
    strategy.save_checkpoint(f"file://{tmp_path}/a.pt")
    path = tmp_path / "best.pt"
    strategy.save_checkpoint(str(path), save_optimizer=False, save_param_scheduler=False)
    assert not {"optimizer", "param_schedulers"} & set(torch.load(path, weights_only=True))
    assert find_last_checkpoint(strategy.work_dir) == str(tmp_path / "a.pt")


def test_what_is_not_resumed_stays_as_it_is(make: Make, tmp_path: Path) -> None:
    strategy, model, trainer = prepared(make)
    steps(model, trainer, 8)
    strategy.save_checkpoint(str(tmp_path / "a.pt"), extra_ckpt={"meta": {"iter": 8}})
    other, _, again = prepared(make)
    before = [again.get_lr(), other.scheduler_state_dict(), again.loss_scaler.loss_scale]
    other.resume(str(tmp_path / "a.pt"), resume_optimizer=False, resume_param_scheduler=False)
    assert [again.get_lr(), other.scheduler_state_dict(), again.loss_scaler.loss_scale] == before
    assert trainer.loss_scaler.loss_scale != before[2]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hub": {"loss": np.zeros(3)}}, r"checkpoint\['hub'\]\['loss'\].* numpy\.ndarray"),
        ({"rows": torch.eye(2).to_sparse()}, r"checkpoint\['rows'\].* torch\.sparse_coo"),
        ({"keys": {(1, 2): 0}}, r"checkpoint\['keys'\].* \(1, 2\)"),
        ({"optimizer": {}}, "'optimizer'"),
    ],
)
def test_what_needs_code_is_refused(make: Make, tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    strategy = simple(make)
    with pytest.raises(ConfigurationError, match=message):
        strategy.save_checkpoint(str(tmp_path / "a.pt"), extra_ckpt=extra)
    assert not (tmp_path / "a.pt").exists()
    assert find_last_checkpoint(strategy.work_dir) is None


@pytest.mark.parametrize("name", ["s3://bucket/a.pt", "https://example.com/a.pt"])
def test_checkpoints_go_to_files_only(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = simple(make)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigurationError, match="written to files"):
        strategy.save_checkpoint(name)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", StateFileError, r"a\.pt"),
        (b"hello there, no checkpoint", StateFileError, r"a\.pt"),
        (None, FileNotFoundError, r"a\.pt"),
        ([1], StateFileError, "list"),
        ({"model": Net().state_dict(), "epoch": 1}, StateFileError, "model, epoch"),
        ({"state_dict": {}, "model": nn.Linear(1, 1)}, StateFileError, "more than tensors and plain values"),
        ({"state_dict": nn.Linear(2, 3).state_dict()}, StateMismatchError, "weight"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(
    make: Make, tmp_path: Path, content: Any, error: type[Exception], message: str
) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(error, match=message) as caught:
        load(make, str(path), strict=True)
    if content is None:
        assert (type(caught.value).__mro__.count(StateFileError), caught.value.filename) == (1, str(path))  # type: ignore[attr-defined]
    with pytest.raises(IsADirectoryError):
        load(make, str(tmp_path))


def test_names_of_weights_are_revised_as_asked(make: Make, tmp_path: Path) -> None:
    torch.save({"state_dict": nn.Linear(2, 3).state_dict()}, tmp_path / "a.pt")
    assert load(make, str(tmp_path / "a.pt"), revise_keys=[("^", "body.")]) == {}


@pytest.mark.parametrize("name", ["torchvision://vgg16", "open-mmlab://vgg16", "s3://a.pt", "http://b/a.pt"])
def test_addresses_other_than_protected_ones_are_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        load(make, name)


def test_a_strategy_needs_a_model_and_is_closed_with_its_trainers(make: Make) -> None:
    strategy = make()
    for method in (strategy.load_checkpoint, strategy.save_checkpoint):
        with pytest.raises(ConfigurationError, match=r"prepare\(\)"):
            method("a.pt")
    model, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
    strategy.close()
    strategy.close()
    with pytest.raises(KVStoreError, match="closed"):
        steps(model, trainer, 1)


def test_log_and_store_are_closed_after_an_error(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, closed = make(), []
    strategy.prepare(Net(), optim_wrapper=SGD)
    strategy._made_store = SimpleNamespace(close=lambda: closed.append("store"))  # type: ignore[assignment]

    def fail() -> None:
        raise KVStoreError("the round of the last step has failed")

    monkeypatch.setattr(strategy.optim_wrapper, "close", fail)
    with pytest.raises(KVStoreError, match="last step"):
        strategy.close()
    assert closed == ["store"]
    assert strategy.logger.handlers == []


def test_workers_tell_each_other_values_and_not_the_memory_that_these_are_views_of() -> None:
    whole = torch.arange(1_000_000.0)
    number = torch.tensor([1 + 2j])
    told = {
        "part": whole[3:6],
        "turned": whole[:6].view(2, 3).T,
        "number": [number, torch.view_as_real(number)],
    }
    packed = pack_checkpoint_tree(told)
    assert len(packed) < 100_000
    found = unpack_checkpoint_tree(packed)
    assert torch.equal(found["part"], told["part"])
    assert torch.equal(found["turned"], told["turned"])
    assert found["number"][1].tolist() == [[1.0, 2.0]]
