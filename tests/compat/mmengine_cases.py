"""What holds of the parts that mmengine is given, one function for each; run in mmengine's own environment.

    python mmengine_cases.py DIRECTORY

prints as JSON what became of each function: null, or the traceback.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine._strategy import SingleDeviceStrategy
from mmengine.config import Config
from mmengine.logging import HistoryBuffer
from mmengine.utils.dl_utils import collect_env
from mmengine_parts import LOOP, SGD, prepared, refused, strategy, update
from mmengine_schedules import compare
from mmengine_training import Net, train
from torch import nn

from kvtrainer import Strategy, Trainer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, StateFileError, StateMismatchError
from kvtrainer.integrations.mmengine import (
    MMEngineStrategy,
    TrainerOptimWrapper,
    decode_mmengine_value,
    encode_mmengine_entries,
    encode_mmengine_value,
)


def a_checkpoint_of_mmengine_itself_is_resumed(folder: Path) -> None:
    question = {
        "world": 1,
        "epochs": 3,
        "wrapper": {"paramwise_cfg": None},
        "work_dir": str(folder / "plain"),
    }
    plain = {"type": "SingleDeviceStrategy"}
    expected = train({**question, "strategy": plain}).model.state_dict()
    ours = {"type": "MMEngineStrategy", "work_dir": str(folder / "ours")}
    saved = str(folder / "plain" / "epoch_2.pth")
    resumed = train({**question, "strategy": ours, "work_dir": str(folder / "ours"), "resume": saved})
    assert len(resumed.message_hub.get_scalar("train/lr").data[0]) == 9
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)


def the_checkpoint_of_a_strategy_of_mmengine_is_resumed_by_ours_with_its_schedules(folder: Path) -> None:
    schedules = [
        {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 4},
        {"type": "MultiStepLR", "by_epoch": False, "milestones": [6, 8], "gamma": 0.5},
        {"type": "CosineAnnealingLR", "by_epoch": True, "T_max": 4, "end": 4},
        {"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "begin": 0, "end": 12},
    ]
    cfg: Any = Config({"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}})
    run = {"max_iters": 20, "max_epochs": 4, "epoch_length": 5}
    given = {"param_scheduler": schedules, "dispatch_kwargs": run}

    def went_on(model: Any, wrapper: Any, mmengines: list[Any], passes: range) -> None:
        for done in passes:
            wrapper.update_params(model(torch.ones(2, 3)).square().mean())
            for one in mmengines:
                if not one.by_epoch or done % 5 == 4:
                    one.step()
            if not mmengines and done % 5 == 4:
                wrapper.end_epoch()

    theirs = SingleDeviceStrategy(work_dir=str(folder / "theirs"))
    model, wrapper, mmengines = theirs.prepare(
        nn.Linear(3, 1), optim_wrapper=cfg.to_dict(), **deepcopy(given)
    )
    went_on(model, wrapper, mmengines, range(7))
    theirs.save_checkpoint(str(folder / "saved.pth"), extra_ckpt={"meta": {"iter": 7, "epoch": 1}})
    went_on(model, wrapper, mmengines, range(7, 17))

    ours = Strategy(kvstore=None, work_dir=str(folder / "ours"))
    own, trainer, _ = ours.prepare(nn.Linear(3, 1), optim_wrapper=cfg, **given)
    ours.resume(str(folder / "saved.pth"))
    went_on(own, trainer, [], range(7, 17))
    ours.close()
    torch.testing.assert_close(own.state_dict(), model.state_dict(), atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(trainer.get_lr()["lr"], wrapper.get_lr()["lr"], rtol=1e-9)
    np.testing.assert_allclose(
        trainer.get_momentum()["momentum"], wrapper.get_momentum()["momentum"], rtol=1e-9
    )


def the_environment_is_described_in_mmengines_words(folder: Path) -> None:
    ours = Strategy(kvstore=None, work_dir=str(folder))
    described, _ = ours.collect_env()
    ours.close()
    assert set(collect_env()) - set(described) <= {"TorchVision", "MMEngine"}


def a_file_that_would_run_code_is_refused(folder: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "made"),)

    torch.save({"state_dict": {}, "message_hub": Harmful()}, folder / "harmful.pth")

    class Reaching:
        def __reduce__(self) -> Any:
            return getattr, (HistoryBuffer, "register_statistics")

    torch.save({"state_dict": {}, "message_hub": Reaching()}, folder / "reaching.pth")
    one = prepared(folder, {"optimizer": SGD})
    for name in ("harmful.pth", "reaching.pth"):
        refused(StateFileError, lambda name=name: one.load_checkpoint(str(folder / name)), name)
    assert not (folder / "made").exists()


def names_that_begin_like_a_wrapper_are_not_cut(folder: Path) -> None:
    model = nn.ModuleDict({"module1": nn.Linear(1, 1, bias=False)})
    one = strategy(folder)
    one.prepare(model)
    torch.save({"state_dict": {"module1.weight": torch.full((1, 1), 5.0)}}, folder / "one.pth")
    one.load_checkpoint(str(folder / "one.pth"), revise_keys=[(r"^module.", "")])
    assert model["module1"].weight.item() == 5.0


def several_optimizers_share_a_schedule_and_resume(folder: Path) -> None:
    wrapper = {
        "constructor": "ByPart",
        "backbone": {"type": "OptimWrapper", "optimizer": SGD},
        "head": {"type": "AmpOptimWrapper", "optimizer": {"type": "Adam", "lr": 0.01}, "dtype": "bfloat16"},
    }
    schedules = [{"type": "LinearMomentum", "start_factor": 0.5, "by_epoch": False, "end": 5}]
    first = prepared(folder, wrapper, schedules)
    assert {name: type(one) for name, one in first.optim_wrapper.items()} == {
        "backbone": TrainerOptimWrapper,
        "head": TrainerOptimWrapper,
    }

    def go_on(one: MMEngineStrategy, steps: int) -> None:
        for _ in range(steps):
            for name, its in one.optim_wrapper.items():
                update(its)
                for schedule in one.param_schedulers[name]:
                    schedule.step()

    go_on(first, 3)
    first.save_checkpoint(str(folder / "two.pth"), extra_ckpt={"meta": {"iter": 3, "epoch": 0}})
    go_on(first, 3)
    second = prepared(folder, wrapper, schedules)
    second.resume(str(folder / "two.pth"))
    go_on(second, 3)
    assert second.optim_wrapper.get_momentum() == first.optim_wrapper.get_momentum()
    assert second.optim_wrapper.get_lr() == first.optim_wrapper.get_lr()
    betas = first.optim_wrapper["head"].param_groups[0]["betas"]
    assert abs(betas[0] - 0.9) < 1e-9
    assert betas[1] == 0.999
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def a_wrapper_of_another_kind_is_refused(folder: Path) -> None:
    cfg = {"type": "Foreign", "optimizer": SGD}
    refused(ArgumentTypeError, lambda: prepared(folder, cfg), "Foreign", "TrainerOptimWrapper")


def a_torch_optimizer_alone_is_enough(folder: Path) -> None:
    model = Net(0.0)
    one = strategy(folder)
    _, wrapper = one.prepare(model, optim_wrapper=torch.optim.SGD(model.parameters(), lr=0.5))
    before = model.head.bias.clone()
    update(wrapper)
    torch.testing.assert_close(model.head.bias, before - 0.5)


def parameters_of_equal_options_are_in_one_group(folder: Path) -> None:
    cfg = {"optimizer": {**SGD, "weight_decay": 0.1}, "paramwise_cfg": {"norm_decay_mult": 0.0}}
    wrapper = prepared(folder, cfg).optim_wrapper
    assert [group["weight_decay"] for group in wrapper.optimizer.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in wrapper.optimizer.param_groups] == [4, 2]
    assert wrapper.get_lr() == {"base_lr": [0.1], "lr": [0.1, 0.1]}


def a_scaled_learning_rate_is_that_of_the_base_settings_too(folder: Path) -> None:
    cfg = {"optimizer": {**SGD, "weight_decay": 0.1}, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    scale = {"enable": True, "base_batch_size": 32}
    loop = {**LOOP, "train_micro_batch_size_per_gpu": 8}
    one = prepared(folder, cfg, loop=loop, auto_scale_lr=scale)
    assert one.optim_wrapper.get_lr() == {"base_lr": [0.025], "lr": [0.025, 0.05]}


def a_loss_is_divided_once_also_by_hand(folder: Path) -> None:
    wrapper = prepared(
        folder, {"optimizer": {"type": "SGD", "lr": 1.0}, "accumulative_counts": 3}
    ).optim_wrapper
    bias, moved = wrapper.optimizer.param_groups[0]["params"][-1], []
    start = bias.detach().clone()
    for _ in range(8):
        wrapper.backward(wrapper.scale_loss(bias.sum()))
        if wrapper.should_update():
            wrapper.step()
            wrapper.zero_grad()
        moved.append(round(float((start - bias)[0]), 5))
    assert moved == [0, 0, 1, 1, 1, 2, 2, 3], moved


def the_state_of_a_wrapper_goes_into_another(folder: Path) -> None:
    cfg = {
        "type": "AmpOptimWrapper",
        "loss_scale": {"init_scale": 4.0, "growth_interval": 2},
        "optimizer": {**SGD, "weight_decay": 0.1},
        "paramwise_cfg": {"bias_lr_mult": 2.0},
    }
    first, second = (prepared(folder, cfg, {"type": "StepLR", "step_size": 1}) for _ in range(2))
    for _ in range(3):
        update(first.optim_wrapper)
    for schedule in first.param_schedulers:
        schedule.step()
    state = first.optim_wrapper.state_dict()
    second.optim_wrapper.load_state_dict(state)
    second.model.load_state_dict(first.model.state_dict())
    assert second.optim_wrapper.get_lr() == first.optim_wrapper.get_lr()
    assert np.allclose(np.concatenate(list(first.optim_wrapper.get_lr().values())), [0.01, 0.01, 0.02])
    assert second.optim_wrapper.optimizer.amp_loss_scale == 8.0
    for one in (first, second):
        update(one.optim_wrapper)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def validation_needs_no_optimizer(folder: Path) -> None:
    one = strategy(folder)
    model = one.prepare(Net(0.0), dispatch_kwargs={"init_weights_for_test_or_val": False})
    assert isinstance(model, Net)
    one.save_checkpoint(str(folder / "weights.pth"))
    assert set(one.load_checkpoint(str(folder / "weights.pth"))) == {"ranks", "meta"}


def values_of_hooks_come_back_from_plain_ones(folder: Path) -> None:
    history = HistoryBuffer()
    for value in (1, 2.5):
        history.update(value, 2)
    given = {
        "milestones": Counter({3: 1, 5: 2}),
        "classes": ("cat", ["dog", (1, 2)]),
        "palette": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "score": np.float64(0.5),
        "log": history,
    }
    torch.save(encode_mmengine_value(given), folder / "values.pth")
    found = decode_mmengine_value(torch.load(folder / "values.pth", weights_only=True))
    assert found["milestones"] == given["milestones"]
    assert isinstance(found["milestones"], Counter)
    assert found["classes"] == given["classes"]
    assert found["score"] == 0.5
    assert found["palette"].dtype == np.uint8
    assert np.array_equal(found["palette"], given["palette"])
    assert [one.tolist() for one in found["log"].data] == [[1.0, 2.5], [2.0, 2.0]]
    assert found["log"].mean() == history.mean()
    assert encode_mmengine_entries({"hook": object(), "epoch": 3}, "message_hub") == {"epoch": 3}


def a_schedule_that_had_ended_goes_on_where_training_is_longer(folder: Path) -> None:
    def lr_after(epochs: int, one: MMEngineStrategy) -> float:
        for _ in range(epochs):
            update(one.optim_wrapper)
            for schedule in one.param_schedulers:
                schedule.step()
        return float(one.optim_wrapper.get_lr()["lr"][0])

    steps = [
        {"type": "MultiStepLR", "milestones": [1, 2, 4]},
        {"type": "OneCycleLR", "eta_max": 1.0, "by_epoch": False},
    ]
    short = prepared(folder, {"optimizer": SGD}, steps[0])
    lr_after(2, short)
    short.save_checkpoint(str(folder / "short.pth"), extra_ckpt={"meta": {"iter": 8, "epoch": 2}})
    long = prepared(folder, {"optimizer": SGD}, steps[0], {**LOOP, "max_epochs": 5})
    long.resume(str(folder / "short.pth"))
    assert abs(lr_after(0, long) - 0.001) < 1e-9
    assert abs(lr_after(2, long) - 0.0001) < 1e-9
    cycle = prepared(folder, {"optimizer": SGD}, {**steps[1], "total_steps": 8})
    cycle.save_checkpoint(str(folder / "cycle.pth"), extra_ckpt={"meta": {"iter": 0, "epoch": 0}})
    refused(StateMismatchError, lambda: prepared(folder, {"optimizer": SGD}, steps[:1] * 2).resume(
        str(folder / "cycle.pth")), "2 schedules")  # fmt: skip


def random_schedules_have_the_same_values(folder: Path) -> None:
    compare(300)


def options_beside_a_trainer_are_refused(folder: Path) -> None:
    trainer = Trainer(Net(0.0), "torch:SGD", {"lr": 0.1})
    assert TrainerOptimWrapper(trainer).optimizer is trainer
    refused(
        ConfigurationError, lambda: TrainerOptimWrapper(trainer, clip_grad={"max_norm": 1.0}), "clip_grad"
    )


def a_store_of_one_process_is_refused_in_a_job_of_two(folder: Path) -> None:
    os.environ.update(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    try:
        call = lambda: strategy(folder, kvstore="local", env_kwargs={"launcher": "pytorch"})  # noqa: E731
        refused(ConfigurationError, call, "2 processes", "'local'")
    finally:
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            del os.environ[name]


def checkpoints_go_to_files_only(folder: Path) -> None:
    one = prepared(folder, {"optimizer": SGD})
    refused(ConfigurationError, lambda: one.save_checkpoint("s3://bucket/epoch_1.pth"), "s3://")


CASES = [
    found
    for name, found in list(globals().items())
    if getattr(found, "__module__", "") == __name__ and "folder" in getattr(found, "__annotations__", {})
]  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    results: dict[str, str | None] = {}
    for case in CASES:
        folder = Path(sys.argv[1], case.__name__)
        folder.mkdir()
        torch.manual_seed(0)
        try:
            case(folder)
        except BaseException:
            results[case.__name__] = traceback.format_exc()
        else:
            results[case.__name__] = None
    Path(sys.argv[1], "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
