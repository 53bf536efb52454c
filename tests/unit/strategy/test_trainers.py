"""Trainers out of what a configuration says of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import Trainer, TrainerDict
from kvtrainer.errors import ConfigurationError
from kvtrainer.registry import OPTIM_WRAPPERS, OPTIMIZER_CONSTRUCTORS
from tests.support.strategies import SGD, Make, Net, make

__all__ = ["make"]


class TestTrainers:
    def build(self, make: Make, cfg: Any, model: nn.Module | None = None) -> Any:
        return make().build_optim_wrapper(cfg, model)

    def test_one_that_is_built_is_returned(self, make: Make) -> None:
        trainer = Trainer(Net(), "sgd")
        assert self.build(make, trainer) is trainer
        several = TrainerDict(a=trainer)
        assert self.build(make, several) is several

    def test_torch_optimizer_is_taken_as_it_is_or_in_a_dict(self, make: Make) -> None:
        for cfg in (lambda o: o, lambda o: {"optimizer": o, "clip_grad": {"max_norm": 1.0}}):
            net = Net()
            optimizer = torch.optim.Adam(
                [{"params": net.body.parameters()}, {"params": net.head.parameters()}]
            )
            trainer = self.build(make, cfg(optimizer), net)
            assert trainer.param_groups is optimizer.param_groups
            assert list(trainer.export_saved_states().parameters) == [
                name for name, _ in net.named_parameters()
            ]

    def test_options_of_the_wrapper_reach_the_trainer(self, make: Make) -> None:
        cfg = {**SGD, "type": "AmpOptimWrapper", "loss_scale": 512, "clip_grad": {"max_norm": 1e-3},
               "accumulative_counts": 2, "paramwise_cfg": {"custom_keys": {"head": {"lr_mult": 0.1}}}}  # fmt: skip
        net = Net()
        trainer = self.build(make, cfg, net)
        assert sorted({round(group["lr"], 9) for group in trainer.param_groups}) == [0.01, 0.1]
        results = [trainer.update_params(net(torch.ones(1, 2)).sum()) for _ in range(2)]
        assert [one.updated for one in results] == [False, True]
        assert results[1].loss_scale == 512
        assert results[1].clip_coef < 0.1

    def test_registered_wrapper_makes_the_trainer(self, make: Make) -> None:
        class Mine(Trainer):
            pass

        OPTIM_WRAPPERS.register("strategy test wrapper", force=True)(Mine)
        assert isinstance(self.build(make, {**SGD, "type": "strategy test wrapper"}, Net()), Mine)

    def test_configuration_needs_the_model(self, make: Make) -> None:
        with pytest.raises(ConfigurationError, match="needs the model"):
            self.build(make, SGD)

    def test_options_by_parameter_beside_a_built_optimizer_are_refused(self, make: Make) -> None:
        net = Net()
        cfg = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "paramwise_cfg": {"bias_lr_mult": 2}}
        with pytest.raises(ConfigurationError, match="brings its own groups"):
            self.build(make, cfg, net)

    @pytest.mark.parametrize("makes_several", [False, True])
    def test_constructor_makes_the_optimizers(self, make: Make, makes_several: bool) -> None:
        class Halving:
            def __init__(self, cfg: Any, paramwise_cfg: Any = None) -> None:
                self.cfg, self.paramwise = cfg, paramwise_cfg

            def __call__(self, model: Any) -> Any:
                if not makes_several:
                    return torch.optim.SGD(model.parameters(), lr=self.cfg["lr"] * self.paramwise["factor"])
                parts = {name: getattr(model, name) for name in self.cfg}
                return {n: torch.optim.SGD(p.parameters(), **self.cfg[n]) for n, p in parts.items()}

        OPTIMIZER_CONSTRUCTORS.register("strategy test halving", force=True)(Halving)
        cfg: dict[str, Any] = {"constructor": "strategy test halving"}
        if makes_several:
            built = self.build(make, {**cfg, "body": {"lr": 1.0}, "head": {"lr": 2.0}}, Net())
            assert built.get_lr() == {"body.lr": [1.0], "head.lr": [2.0]}
        else:
            built = self.build(make, {**cfg, **SGD, "paramwise_cfg": {"factor": 0.5}}, Net())
            assert built.get_lr() == {"lr": [0.05]}

    def test_several_by_name_train_the_parts_of_that_name(self, make: Make) -> None:
        net = Net()
        built = self.build(make, {"body": SGD, "head": Trainer(net.head, "sgd")}, net)
        assert isinstance(built, TrainerDict)
        assert built["body"].param_groups[0]["params"][0] is net.body.weight
        with pytest.raises(ConfigurationError, match="no part of that name; it has body, head"):
            self.build(make, {"tail": SGD}, net)

    def test_items_that_are_no_optimizers_and_other_types_are_refused(self, make: Make) -> None:
        with pytest.raises(ValueError, match=r'each item must be an optimizer object when "type".*a=3'):
            self.build(make, {"a": 3})
        with pytest.raises(TypeError, match="should be a Trainer, a torch optimizer or a dict"):
            self.build(make, "sgd")
