"""Weights in and out of a model: wrappers, names, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.strategy.parts import load_weights, take_weights, unwrapped
from tests.support.strategies import SGD, Make, Net, make

__all__ = ["make"]


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module1 = nn.Linear(1, 1)


def test_weights_are_on_the_cpu_under_the_names_of_the_model_itself() -> None:
    net = Net()
    taken = take_weights(Wrapper(net))
    assert list(taken) == list(net.state_dict())
    assert all(value.device.type == "cpu" and not value.requires_grad for value in taken.values())
    assert unwrapped(torch.compile(Wrapper(net), backend="eager")) is net  # type: ignore[arg-type]


def test_a_model_with_one_part_is_no_wrapper_under_another_name() -> None:
    net = Numbered()
    assert unwrapped(net) is net


def test_prefix_of_a_wrapper_is_taken_away_and_nothing_else() -> None:
    net = Numbered()
    saved = {"module.module1.weight": torch.tensor([[3.0]]), "module.module1.bias": torch.tensor([4.0])}
    assert not load_weights(net, saved, strict=True)
    assert net.module1.weight.item() == 3.0
    own = {name: value + 1 for name, value in net.state_dict().items()}
    assert not load_weights(net, own, strict=True)
    assert net.module1.bias.item() == 5.0


def test_names_are_revised_as_asked() -> None:
    net = Numbered()
    saved = {"old.weight": torch.tensor([[3.0]]), "old.bias": torch.tensor([4.0])}
    assert not load_weights(net, saved, strict=True, revise_keys=[(r"^old\.", "module1.")])
    with pytest.raises(ConfigurationError, match=r"makes 'x' out of both 'old\.weight' and 'old\.bias'"):
        load_weights(net, saved, revise_keys=[(r".*", "x"), (r"xx", "x")])
    with pytest.raises(ConfigurationError, match="revise_keys must be"):
        load_weights(net, saved, revise_keys=[("(", "")])


def test_what_does_not_fit_is_reported_and_the_rest_is_loaded() -> None:
    net = Net()
    head = net.head.weight.detach().clone()
    saved = {"body.weight": torch.ones(3, 2), "head.weight": torch.ones(5, 3), "neck.weight": torch.ones(1)}
    report = load_weights(net, saved)
    assert report.missing == ["seen", "body.bias", "head.bias"]
    assert report.unexpected == ["neck.weight"]
    assert report.mismatched == ["head.weight ([5, 3] in the checkpoint, [1, 3] in the model)"]
    assert torch.equal(net.head.weight, head)
    assert (net.body.weight == 1).all()
    assert (
        "missing: seen, body.bias, head.bias; unexpected: neck.weight; of another shape: head.weight"
        in str(report)
    )


def test_a_value_that_is_no_tensor_is_reported_like_one_of_another_shape() -> None:
    net = nn.Linear(2, 1)
    given = {"weight": torch.ones(1, 2), "bias": 1.5}
    before = net.bias.detach().clone()
    assert load_weights(net, given).mismatched == ["bias (a float in the checkpoint, [1] in the model)"]
    assert torch.equal(net.bias, before)
    assert torch.equal(net.weight, given["weight"])  # type: ignore[arg-type]
    with pytest.raises(StateMismatchError, match="a float in the checkpoint"):
        load_weights(net, given, strict=True)


def test_nothing_is_loaded_if_all_must_fit_and_does_not() -> None:
    net = Net()
    before = net.body.weight.detach().clone()
    with pytest.raises(StateMismatchError, match=r"unchanged: missing: seen, body\.bias"):
        load_weights(net, {"body.weight": torch.ones(3, 2)}, strict=True)
    assert torch.equal(net.body.weight, before)


def test_strategy_logs_what_does_not_fit(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = make()
    strategy.prepare(Net())
    report = strategy.load_model_state_dict({"nose": torch.ones(1)})
    assert report.unexpected == ["nose"]
    assert "do not match: missing: seen, body.weight" in capsys.readouterr().err


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
    with pytest.raises(ConfigurationError, match="2 states for 0 schedules"):
        strategy.load_scheduler_state_dict([{}, {}])
    with pytest.raises(ConfigurationError, match="are a list"):
        strategy.load_scheduler_state_dict({"body": []})
    several = make()
    several.prepare(Net(), optim_wrapper={"body": SGD, "head": SGD})
    with pytest.raises(ConfigurationError, match="dict by their names"):
        several.load_scheduler_state_dict([])
    with pytest.raises(StateMismatchError, match="while the Trainers here are body, head"):
        several.load_scheduler_state_dict({"body": []})
