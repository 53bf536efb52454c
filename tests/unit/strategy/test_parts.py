"""The parts of a run: weights in and out of a model, Trainers by a configuration, and their learning rates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer, TrainerDict, lr_scheduler
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.registry import OPTIM_WRAPPERS, OPTIMIZER_CONSTRUCTORS
from kvtrainer.strategy.parts import innermost_module, load_weights, scale_learning_rates
from tests.support.strategies import SGD, Make, Net, same, weights


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module1 = nn.Linear(1, 1)


def test_weights_are_on_the_cpu_under_the_names_of_the_model_itself(make: Make) -> None:
    net, strategy = Net(), make()
    strategy.prepare(Wrapper(net))
    taken = strategy.model_state_dict()
    assert list(taken) == list(net.state_dict())
    assert all(value.device.type == "cpu" and not value.requires_grad for value in taken.values())
    assert innermost_module(torch.compile(Wrapper(net), backend="eager")) is net  # type: ignore[arg-type]
    whole = nn.ModuleDict({"module": nn.Linear(1, 1), "head": nn.Linear(1, 1)})
    assert all(innermost_module(one) is one for one in (Numbered(), whole))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "a name that begins like a wrapper": Numbered,
    "a part called module": lambda: nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 1)}),
    "nothing but a part called module": lambda: nn.ModuleDict(
        {"module": nn.Linear(2, 2), "other": nn.Identity()}
    ),
}


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("make_net", MODELS.values(), ids=MODELS)
def test_only_the_prefix_of_a_wrapper_is_removed(make_net: Callable[[], nn.Module], prefix: str) -> None:
    net, saved = make_net(), {name: value + 1 for name, value in make_net().state_dict().items()}
    assert not load_weights(net, {f"{prefix}{name}": value for name, value in saved.items()}, strict=True)
    assert all(map(torch.equal, net.state_dict().values(), saved.values()))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, StateMismatchError])
def test_what_does_not_fit_is_the_error_that_torch_and_mmengine_raise(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        load_weights(Net(), {"weight": torch.zeros(1)}, strict=True)


def test_checkpoints_and_models_fit_whichever_of_their_parts_are_compiled() -> None:
    def net(compiled: str) -> nn.Module:
        made: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(2, 1)}))
        if compiled == "part":
            made[1]["head"] = torch.compile(made[1]["head"], backend="eager")  # type: ignore[index]
        return torch.compile(made, backend="eager") if compiled == "whole" else made  # type: ignore[return-value]

    for saved in ("", "whole", "part"):
        for loaded in ("", "whole", "part"):
            for prefix in ("", "module."):
                model, state = net(loaded), net(saved).state_dict()
                report = load_weights(model, {f"{prefix}{name}": v for name, v in state.items()}, strict=True)
                assert not report
                assert all(map(torch.equal, model.state_dict().values(), state.values()))


def test_averaged_weights_are_loaded_and_what_counts_them_is_reported() -> None:
    net, averaged = Net(), torch.optim.swa_utils.AveragedModel(Net())
    saved = {name: value + 1 for name, value in averaged.state_dict().items()}
    report = load_weights(net, saved)
    assert (report.missing, report.unexpected) == ([], ["n_averaged"])
    assert all(torch.equal(value, saved[f"module.{name}"]) for name, value in net.state_dict().items())


def test_names_are_revised_as_asked() -> None:
    net = Numbered()
    saved = {"old.weight": torch.tensor([[3.0]]), "old.bias": torch.tensor([4.0])}
    assert not load_weights(net, saved, strict=True, revise_keys=[(r"^old\.", "module1.")])
    with pytest.raises(ConfigurationError, match=r"makes 'x' of both 'old\.weight' and 'old\.bias'"):
        load_weights(net, saved, revise_keys=[(r".*", "x"), (r"xx", "x")])
    with pytest.raises(ConfigurationError, match="revise_keys must be"):
        load_weights(net, saved, revise_keys=[("(", "")])


def test_strategy_logs_what_does_not_fit(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = make()
    strategy.prepare(Net())
    strategy.load_model_state_dict({"nose": torch.ones(1), "seen": torch.ones(2), "body.bias": torch.ones(3)})
    said = "missing: body.weight, head.weight, head.bias; unexpected: nose; of another shape: seen"
    assert said in capsys.readouterr().err


def test_states_of_optimizers_and_schedules_go_from_one_strategy_to_another(make: Make) -> None:
    run = {"max_iters": 6}
    schedule = {"type": "MultiStepLR", "milestones": [3], "by_epoch": False}
    for cfg in (SGD, {"body": SGD, "head": SGD}):
        one, other = make(), make()
        net, trainer, _ = one.prepare(Net(), optim_wrapper=cfg, param_scheduler=schedule, dispatch_kwargs=run)
        _, again, _ = other.prepare(Net(), optim_wrapper=cfg, param_scheduler=schedule, dispatch_kwargs=run)
        for part in [trainer] if cfg is SGD else trainer.values():
            x = torch.randn(4, 2)
            for _ in range(4):
                part.zero_grad()
                net(x).square().mean().backward()
                part.step()
        assert one.scheduler_state_dict() != other.scheduler_state_dict()
        other.load_optim_state_dict(one.optim_state_dict())
        other.load_scheduler_state_dict(one.scheduler_state_dict())
        assert one.scheduler_state_dict() == other.scheduler_state_dict()
        assert again.get_lr() == trainer.get_lr()


def test_states_of_other_schedules_or_trainers_are_refused(make: Make) -> None:
    strategy = make()
    with pytest.raises(TypeError, match="no Trainer"):
        strategy.optim_state_dict()
    strategy.prepare(Net(), optim_wrapper=SGD)
    several = make()
    several.prepare(Net(), optim_wrapper={"body": SGD, "head": SGD})
    for one, states in ((strategy, ([{}, {}], {"body": []})), (several, ([], {"body": []}))):
        for wrong in states:
            with pytest.raises(StateMismatchError):
                one.load_scheduler_state_dict(wrong)


def build(make: Make, cfg: Any, model: nn.Module | None = None) -> Any:
    return make().build_optim_wrapper(cfg, model)


def test_torch_optimizer_is_taken_as_it_is_or_in_a_dict(make: Make) -> None:
    for cfg in (lambda o: o, lambda o: {"optimizer": o, "clip_grad": {"max_norm": 1.0}}):
        net = Net()
        optimizer = torch.optim.Adam([{"params": net.body.parameters()}, {"params": net.head.parameters()}])
        trainer = build(make, cfg(optimizer), net)
        assert trainer.param_groups is optimizer.param_groups
        assert list(trainer.export_saved_states().parameters) == [name for name, _ in net.named_parameters()]


def test_options_of_the_wrapper_reach_the_trainer(make: Make) -> None:
    cfg = {**SGD, "type": "AmpOptimWrapper", "loss_scale": 512, "clip_grad": {"max_norm": 1e-3},
           "accumulative_counts": 2, "paramwise_cfg": {"custom_keys": {"head": {"lr_mult": 0.1}}}}  # fmt: skip
    net = Net()
    trainer = build(make, cfg, net)
    assert sorted({round(group["lr"], 9) for group in trainer.param_groups}) == [0.01, 0.1]
    results = [trainer.update_params(net(torch.ones(1, 2)).sum()) for _ in range(2)]
    assert [one.updated for one in results] == [False, True]
    assert results[1].loss_scale == 512
    assert results[1].clip_coef < 0.1


def test_registered_wrapper_makes_the_trainer(make: Make) -> None:
    class Mine(Trainer):
        pass

    OPTIM_WRAPPERS.register("strategy test wrapper", force=True)(Mine)
    assert isinstance(build(make, {**SGD, "type": "strategy test wrapper"}, Net()), Mine)


@pytest.mark.parametrize("makes_several", [False, True])
def test_constructor_makes_the_optimizers(make: Make, makes_several: bool) -> None:
    def halving(cfg: Any, paramwise_cfg: Any = None) -> Any:
        def made(model: Any) -> Any:
            if not makes_several:
                return torch.optim.SGD(model.parameters(), lr=cfg["lr"] * paramwise_cfg["factor"])
            return {n: torch.optim.SGD(getattr(model, n).parameters(), **cfg[n]) for n in cfg}

        return made

    OPTIMIZER_CONSTRUCTORS.register("strategy test halving", force=True)(halving)
    cfg: dict[str, Any] = {"constructor": "strategy test halving"}
    if makes_several:
        built = build(make, {**cfg, "body": {"lr": 1.0}, "head": {"lr": 2.0}}, Net())
        assert built.get_lr() == {"body.lr": [1.0], "head.lr": [2.0]}
    else:
        built = build(make, {**cfg, **SGD, "paramwise_cfg": {"factor": 0.5}}, Net())
        assert built.get_lr() == {"lr": [0.05]}


def test_several_by_name_train_the_parts_of_that_name(make: Make) -> None:
    net = Net()
    built = build(make, {"body": SGD, "head": Trainer(net.head, "sgd")}, net)
    assert isinstance(built, TrainerDict)
    assert built["body"].param_groups[0]["params"][0] is net.body.weight
    with pytest.raises(ConfigurationError, match="no part of that name, only body, head"):
        build(make, {"tail": SGD}, net)


LOG = logging.getLogger("scaling")


@pytest.mark.parametrize(("workers", "micro", "expected"), [(1, 4, 0.025), (8, 2, 0.1), (8, 4, 0.2)])
def test_rate_grows_with_workers_and_their_batch(workers: int, micro: int, expected: float) -> None:
    trainer = Trainer(Net(), "torch:SGD", {"lr": 0.1})
    scale_learning_rates({"enable": True, "base_batch_size": 16}, {"": trainer}, micro, workers, LOG)
    assert trainer.get_lr()["lr"] == pytest.approx([expected])


def rates(make: Make, cfg: Any, wrapper: Any = SGD, **more: Any) -> list[float]:
    run = {"train_micro_batch_size_per_gpu": 4, "max_iters": 8}
    _, trainer = make(auto_scale_lr=cfg, **more).prepare(Net(), optim_wrapper=wrapper, dispatch_kwargs=run)
    return sorted({round(rate, 9) for its in trainer.get_lr().values() for rate in its})


ON = {"enable": True, "base_batch_size": 16}


def test_nothing_is_scaled_unless_enabled(make: Make) -> None:
    for cfg in (None, {"base_batch_size": 16}, {"enable": False}):
        assert rates(make, cfg) == [0.1]


def test_groups_and_several_trainers_are_scaled_alike(make: Make) -> None:
    by_parameter = {**SGD, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    assert rates(make, ON, by_parameter) == [0.025, 0.05]
    assert rates(make, ON, {"body": SGD, "head": by_parameter}) == [0.025, 0.05]


def test_replicas_count_and_accumulated_passes_only_on_request(make: Make) -> None:
    assert rates(make, ON, device=["cpu", "cpu"]) == [0.05]
    twice = {**SGD, "accumulative_counts": 2}
    assert rates(make, ON, twice) == [0.025]
    assert rates(make, {**ON, "count_accumulation": True}, twice) == [0.05]


@pytest.mark.parametrize(
    ("cfg", "micro", "match"),
    [
        ({"enable": True}, 4, "base_batch_size of auto_scale_lr must be"),
        (ON, None, "train_micro_batch_size_per_gpu of dispatch_kwargs"),
        ({**ON, "base_batch": 3}, 4, "'base_batch'"),
    ],
)
def test_what_is_missing_or_unknown_is_named(cfg: Any, micro: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        scale_learning_rates(cfg, {"": Trainer(Net(), "sgd")}, micro, 1, LOG)


def test_a_value_that_is_no_tensor_is_like_one_of_another_shape_and_nothing_is_loaded_strictly() -> None:
    net = nn.Linear(2, 1)
    given, before = {"weight": torch.ones(1, 2), "bias": 1.5}, weights(net)
    with pytest.raises(StateMismatchError, match="a float in the checkpoint"):
        load_weights(net, given, strict=True)
    assert same(weights(net), before)
    assert load_weights(net, given).mismatched == ["bias (a float in the checkpoint, [1] in the model)"]
    assert torch.equal(net.weight, torch.ones(1, 2))


@pytest.mark.parametrize(
    ("cfg", "error", "message"),
    [
        (SGD, ConfigurationError, "needs the model"),
        ({"a": SGD}, ConfigurationError, "needs the model"),
        ({"a": 3}, ConfigurationError, "a=3"),
        ("sgd", TypeError, "'sgd'"),
    ],
)
def test_what_is_no_optimizer_is_refused(make: Make, cfg: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(make, cfg)


def test_schedules_begin_with_the_scaled_rate_which_is_not_scaled_after_them(make: Make) -> None:
    run = {"train_micro_batch_size_per_gpu": 4, "max_iters": 8}
    cfg = {"type": "ConstantLR", "factor": 0.5, "by_epoch": False, "end": 2}
    strategy = make(auto_scale_lr=ON)
    _, bound, _ = strategy.prepare(Net(), optim_wrapper=SGD, param_scheduler=cfg, dispatch_kwargs=run)
    assert bound.get_lr()["lr"] == pytest.approx([0.0125])
    free = Trainer(Net(), "torch:SGD", {"lr": 0.1})
    with pytest.raises(RuntimeError, match="before it was scaled"):
        scale_learning_rates(ON, {"a": free, "b": bound}, 4, 1, LOG)
    assert free.get_lr()["lr"] == [0.1]


def test_a_scheduler_that_trainers_share_is_scaled_once_and_rates_may_be_tensors() -> None:
    shared = lr_scheduler.FactorScheduler(step=5, base_lr=0.1)
    trainers = {n: Trainer(Net(), "sgd", {"learning_rate": 0.1, "lr_scheduler": shared}) for n in "ab"}
    net = Net()
    adam = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    scale_learning_rates(ON, {**trainers, "c": Trainer(net, adam)}, 4, 1, LOG)
    assert shared.base_lr == pytest.approx(0.025)
    assert [one.learning_rate for one in trainers.values()] == pytest.approx([0.025, 0.025])
    assert float(adam.param_groups[0]["lr"]) == pytest.approx(0.025)
