"""What prepare() makes of a configuration: model, weights, Trainers and schedules, in which order, and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.parallel import DataParallel
from kvtrainer.registry import MODELS
from kvtrainer.strategy import Strategy
from tests.support.strategies import SGD, ConfigObject, Make, Net, steps

MULTI = {"type": "MultiStepLR", "milestones": [2], "by_epoch": False}


def test_parts_are_returned_in_order_and_only_those_asked_for(make: Make) -> None:
    strategy = make()
    model, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
    assert isinstance(model, Net)
    assert isinstance(trainer, Trainer)
    again = strategy.prepare(Net(), optim_wrapper=SGD, dispatch_kwargs={"max_iters": 9})
    assert again[0] is model
    assert again[1] is trainer
    assert strategy.dispatch_kwargs == {"max_iters": 9}
    _, _, schedules = strategy.prepare(Net(), optim_wrapper=SGD, param_scheduler=MULTI)
    assert len(schedules) == 1
    assert strategy.prepare(Net())[2] is schedules


def test_parts_are_made_in_a_fixed_order_by_methods_that_may_be_overridden(make: Make) -> None:
    order: list[str] = []

    class Noting(Strategy):
        pass

    names = ("build_model", "_init_model_weights", "_wrap_model", "compile_model", "build_optim_wrapper", "_scale_lr",
             "_begin_to_count", "build_param_scheduler")  # fmt: skip
    for name in names:

        def noted(self: Any, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            order.append(_name)
            return getattr(Strategy, _name)(self, *args, **kwargs)

        setattr(Noting, name, noted)
    run = {"max_iters": 4}
    make(cls=Noting).prepare(Net(), optim_wrapper=SGD, param_scheduler=MULTI, dispatch_kwargs=run)
    assert order == list(names)


def test_the_callers_dicts_are_not_changed(make: Make) -> None:
    given = {**SGD, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    copies = [{**one} for one in (given, given["optimizer"], MULTI)]
    strategy, run = make(), {"max_iters": 5}
    _, trainer, _ = strategy.prepare(Net(), optim_wrapper=given, param_scheduler=[MULTI], dispatch_kwargs=run)
    assert [given, given["optimizer"], MULTI] == copies
    strategy.build_param_scheduler({"type": "LinearLR", "start_factor": 0.5, "by_epoch": False}, trainer, run)
    assert run == {"max_iters": 5}


def test_a_call_that_failed_can_be_made_again_with_what_was_missing(make: Make) -> None:
    net, cfg = Net(), {**SGD, "accumulative_counts": 3}
    strategy = make(auto_scale_lr={"enable": True, "base_batch_size": 16})
    run = {"train_micro_batch_size_per_gpu": 4}
    for given, missing in (({}, "train_micro_batch"), (run, "max_iters")):
        with pytest.raises(ConfigurationError, match=missing):
            strategy.prepare(net, optim_wrapper=cfg, dispatch_kwargs=given)
    _, trainer = strategy.prepare(net, optim_wrapper=cfg, dispatch_kwargs={"max_iters": 2})
    assert trainer.get_lr()["lr"] == pytest.approx([0.025])
    trainer.update_params(net(torch.ones(1, 2)).sum())
    assert trainer.update_params(net(torch.ones(1, 2)).sum()).updated


def test_the_model_of_a_call_that_failed_is_the_one_that_its_trainer_trains(make: Make) -> None:
    MODELS.register("strategy test net", force=True)(lambda width: nn.Linear(width, 1))
    strategy, cfg = make(), {"type": "strategy test net", "width": 5}
    with pytest.raises(ConfigurationError):
        strategy.prepare(cfg, optim_wrapper=SGD, param_scheduler={"type": "NoSuchLR"})
    run = {"max_iters": 4}
    model, trainer, _ = strategy.prepare(cfg, optim_wrapper=SGD, param_scheduler=MULTI, dispatch_kwargs=run)
    assert trainer.param_groups[0]["params"][0] is model.weight


class Initialised(Net):
    def init_weights(self) -> None:
        nn.init.constant_(self.body.weight, 7.0)


def test_weights_are_initialised_where_the_model_can_unless_it_is_loaded_next(make: Make) -> None:
    assert (make().prepare(Initialised()).body.weight == 7).all()
    kept = make().prepare(Initialised(), dispatch_kwargs={"init_weights_for_test_or_val": False})
    assert not (kept.body.weight == 7).any()


def test_several_trainers_get_the_same_or_their_own(make: Make) -> None:
    both = {"body": SGD, "head": SGD}
    run = {"max_epochs": 4, "max_iters": 4}
    linear = {"type": "LinearLR", "start_factor": 0.5}
    for given, names, rate in ((linear, ["body", "head"], 0.05), ({"head": [linear]}, ["head"], 0.1)):
        options = {"optim_wrapper": both, "param_scheduler": given, "dispatch_kwargs": run}
        _, trainers, schedules = make().prepare(Net(), **options)
        assert [(name, len(its)) for name, its in schedules.items()] == [(name, 1) for name in names]
        assert trainers.get_lr() == {"body.lr": [rate], "head.lr": [0.05]}


def test_configuration_may_be_objects_as_mmengines_config_is_one(make: Make) -> None:
    MODELS.register("strategy test net", force=True)(lambda width: nn.Linear(width, 1))
    one = ConfigObject
    strategy = make(
        env_kwargs=one(randomness=one(seed=3)), log_kwargs=one(log_level="ERROR"),
        auto_scale_lr=one(enable=True, base_batch_size=1),
    )  # fmt: skip
    model, trainer, schedules = strategy.prepare(
        one(type="strategy test net", width=2),
        optim_wrapper=one(optimizer=one(type="SGD", lr=0.1)),
        param_scheduler=one(type="ConstantLR", factor=0.5, by_epoch=False, end=2),
        compile=one(disable=True),
        dispatch_kwargs=one(train_micro_batch_size_per_gpu=2),
    )
    assert trainer.param_groups[0]["params"][0] is model.weight
    assert (trainer.get_lr()["lr"], len(schedules), strategy.seed) == ([0.1], 1, 3)
    _, several = make().prepare(Net(), optim_wrapper=one(body=one(**SGD), head=one(**SGD)))
    assert list(several) == ["body", "head"]


def test_other_things_are_refused(make: Make) -> None:
    strategy = make()
    with pytest.raises(TypeError, match="a schedule is"):
        strategy.build_param_scheduler("cosine", Trainer(Net(), "sgd"))
    with pytest.raises(TypeError, match="need the Trainer"):
        strategy.build_param_scheduler(MULTI, torch.optim.SGD(Net().parameters(), lr=0.1))  # type: ignore[arg-type]


def test_schedules_without_an_optimizer_are_refused_before_anything_is_built(make: Make) -> None:
    strategy = make()
    with pytest.raises(ConfigurationError, match="optim_wrapper"):
        strategy.prepare(Net(), param_scheduler=MULTI)
    assert not hasattr(strategy, "model")


CONVERTED: dict[str, Any] = {"convert_to_iter_based": True}


@pytest.mark.parametrize("when", [{"by_epoch": False}, CONVERTED, {**CONVERTED, "end": 2}])
def test_schedules_by_step_end_with_the_passes_and_not_in_the_middle(make: Make, when: Any) -> None:
    cfg = {"optimizer": {"type": "SGD", "lr": 1.0}, "accumulative_counts": 3}
    run = {"max_iters": 11, "max_epochs": 2, "epoch_length": 6}
    linear = {"type": "LinearLR", "start_factor": 1.0, "end_factor": 0.0, **when}
    net, strategy = Net(), make()
    _, trainer, _ = strategy.prepare(net, optim_wrapper=cfg, param_scheduler=linear, dispatch_kwargs=run)
    rates = [trainer.update_params(net(torch.ones(1, 2)).sum()).lr for _ in range(11)]
    # Four updates, the last after two passes; mmengine's factor is the last one after end - begin - 1 of them.
    assert [rates[at] for at in (2, 5, 8, 10)] == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])


def test_an_epoch_that_does_not_end_with_an_update_has_no_length(make: Make) -> None:
    by_epoch, twice = {"type": "StepLR", "step_size": 1, **CONVERTED}, {**SGD, "accumulative_counts": 2}
    run = {"max_iters": 10, "max_epochs": 2, "epoch_length": 5}
    with pytest.raises(ConfigurationError, match="the updates in an epoch"):
        make().prepare(Net(), optim_wrapper=twice, param_scheduler=by_epoch, dispatch_kwargs=run)


@pytest.mark.parametrize("target", [None, "forward", "train_step"])
def test_one_method_is_compiled_if_asked_and_names_of_weights_stay(make: Make, target: str | None) -> None:
    torch.compiler.reset()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    given: dict[str, Any] = {"backend": backend, **({"target": target} if target else {"disable": True})}
    copy = dict(given)
    model = make().prepare(Net(), compile=given)
    assert given == copy
    model(torch.ones(1, 2))
    model.train_step(torch.ones(1, 2))
    assert bool(seen) == bool(target)
    assert list(model.state_dict()) == list(Net().state_dict())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "resnet"}, ArgumentTypeError, "model.* str"),
        ({"compile": {"target": "predict"}}, ConfigurationError, "'predict'"),
        ({"compile": "yes"}, ArgumentTypeError, "compile"),
        ({"optim_wrapper": {**SGD, "accumulative_counts": 3}}, ConfigurationError, '"max_iters"'),
    ],
)
def test_impossible_parts_are_refused(
    make: Make, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make().prepare(**{"model": Net(), **given})


def test_the_trainer_advances_schedules_to_the_end_of_the_run_which_is_needed(make: Make) -> None:
    cosine = {"type": "CosineAnnealingLR", "eta_min": 0.0, "by_epoch": False}
    run = {"max_iters": 4}
    model, trainer, _ = make().prepare(Net(), optim_wrapper=SGD, param_scheduler=cosine, dispatch_kwargs=run)
    steps(model, trainer, 2)
    assert trainer.get_lr()["lr"] == pytest.approx([0.05])
    with pytest.raises(ValueError, match="max_iters"):
        make().prepare(Net(), optim_wrapper=SGD, param_scheduler=cosine)


def test_accumulation_beside_batch_norm_is_warned_of(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    twice = {**SGD, "accumulative_counts": 2}
    make().prepare(Net(), optim_wrapper={"body": SGD, "head": SGD})
    make().prepare(Net(), optim_wrapper=twice, dispatch_kwargs={"max_iters": 2})
    said = capsys.readouterr().err
    assert "set_progress" not in said
    assert "BatchNorm" not in said
    make().prepare(Net(), optim_wrapper={"body": twice, "head": SGD})
    assert "gradients of body are accumulated" in capsys.readouterr().err
    make().prepare(nn.BatchNorm1d(2), optim_wrapper=twice, dispatch_kwargs={"max_iters": 2})
    assert "BatchNorm" in capsys.readouterr().err


def test_several_devices_make_replicas_of_which_parameters_are_one(make: Make) -> None:
    strategy = make(device=["cpu", "cpu"])
    model, trainer = strategy.prepare(Net(), optim_wrapper=SGD)
    assert isinstance(model, DataParallel)
    assert strategy.device == torch.device("cpu")
    losses = model.forward_losses(torch.randn(4, 2), lambda net, x: net(x).square().mean())
    trainer.update_params(losses)
    assert torch.equal(model.replicas[0].body.weight, model.replicas[1].body.weight)
    strategy.load_model_state_dict({**Net().state_dict(), "body.bias": torch.full((3,), 4.0)})
    assert all((replica.body.bias == 4).all() for replica in model.replicas)
    net = Net()
    with pytest.raises(ConfigurationError):
        make(device=["cpu", "cpu"]).prepare(net, optim_wrapper=torch.optim.SGD(net.parameters(), lr=0.1))
