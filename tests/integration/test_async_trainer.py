"""What a Trainer offers, where contributions count one by one: states, compression, set_data, vetoes, two at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import Members, new_name, together
from tests.support.stores import Servers
from tests.support.taking_turns import SHAPES, Worker, assert_close, gradient, start_of, workers

ASYNCHRONOUS = ["dist_async", "dist_ssp"]
FAR = {"dist_sync": {}, "dist_async": {}, "dist_ssp": {"staleness": 100}}
"""Options of a store in which nobody waits in these tests."""
ADAM = {"learning_rate": 0.1, "wd": 0.01}


@pytest.mark.parametrize("type", [*ASYNCHRONOUS, "dist_async_device", "dist_device_ssp"])
@pytest.mark.parametrize(("given", "in_store"), [(None, True), (True, True), (False, None)])
def test_the_optimizer_can_only_run_on_the_servers(
    jobs: Servers, type: str, given: bool | None, in_store: bool | None
) -> None:
    with Members() as members:
        kv = members.join(jobs.of(1), 0, 1, new_name(), type=type)
        weight = torch.zeros(3, requires_grad=True)
        for store in (kv, type):
            if in_store is None:
                with pytest.raises(ConfigurationError, match="update_on_kvstore=True"):
                    kvtrainer.Trainer([weight], "sgd", kvstore=store, update_on_kvstore=given)
                continue
            trainer = kvtrainer.Trainer([weight], "sgd", kvstore=store, update_on_kvstore=given)
            with pytest.raises(ConfigurationError):
                trainer.allreduce_grads()


def run(made: list[Worker], turns: range) -> dict[str, Any]:
    for turn in turns:
        made[turn % 2].step(turn)
    return made[turns[-1] % 2].values()


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_training_goes_on_from_saved_states_as_if_it_had_never_ended(
    jobs: Servers, type: str, tmp_path: Path
) -> None:
    with workers(jobs, type, "adam", ADAM, store=FAR[type]) as made:
        weights = run(made, range(4))
        made[0].trainer.save_states(tmp_path / "states")
        expected = run(made, range(4, 8))
    with workers(jobs, type, "adam", ADAM, store=FAR[type], num_servers=1) as made:
        given = {name: torch.from_numpy(value).float() for name, value in weights.items()}
        for outcome in together(*(lambda w=w: w.trainer.set_data(given) for w in made)):
            assert outcome is None
        for worker in made:
            worker.trainer.load_states(tmp_path / "states")
        np.testing.assert_equal(run(made, range(4, 8)), expected)


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_the_states_of_a_stores_own_keys_are_saved_and_loaded(
    jobs: Servers, type: str, tmp_path: Path
) -> None:
    def begun(members: Members, count: int, values: list[Tensor]) -> tuple[DistKVStore, DistKVStore]:
        pair = members.pair(jobs.of(count), type=type, **FAR[type])
        for kv in pair:
            kv.set_optimizer(kvtrainer.optimizer.create("adam", **ADAM))
        together(*(lambda s=s: s.init(list(SHAPES), values) for s in pair))
        return pair

    def pushed(pair: tuple[DistKVStore, DistKVStore], turns: range) -> list[Tensor]:
        outs = [torch.empty(shape) for shape in SHAPES.values()]
        for turn in turns:
            pair[turn % 2].pushpull(list(SHAPES), [gradient(name, turn) for name in SHAPES], outs)
        return outs

    with Members() as members:
        pair = begun(members, 2, [start_of(name) for name in SHAPES])
        weights = pushed(pair, range(3))
        pair[1].save_optimizer_states(tmp_path / "states")
        expected = pushed(pair, range(3, 6))
    with Members() as members:
        pair = begun(members, 1, weights)
        for kv in pair:
            kv.load_optimizer_states(tmp_path / "states")
        for found, wanted in zip(pushed(pair, range(3, 6)), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_compression_keeps_back_what_each_worker_could_not_say(jobs: Servers, type: str) -> None:
    codec = {"type": "2bit", "threshold": 0.5}
    sums = dict.fromkeys(SHAPES, 0.0)
    with workers(
        jobs, type, "sgd", {"learning_rate": 1.0}, store=FAR[type], compression_params=codec
    ) as made:
        residuals = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in made]
        for turn, rank in enumerate((0, 1, 0, 0, 1, 1)):
            made[rank].step(turn)
            for name in SHAPES:
                kept = residuals[rank][name] + gradient(name, turn).double().numpy()
                said = 0.5 * ((kept >= 0.5).astype(float) - (kept <= -0.5))
                residuals[rank][name] = kept - said
                sums[name] = sums[name] + said
            expected = {name: start_of(name).double().numpy() - sums[name] for name in SHAPES}
            assert_close(made[rank].values(), expected, atol=1e-5)


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_set_data_replaces_the_weights_of_all_and_nothing_is_lost_or_counted_twice(
    jobs: Servers, type: str
) -> None:
    with workers(jobs, type, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, store=FAR[type]) as made:
        made[1].step(0)
        given = {name: torch.full(shape, 7.0) for name, shape in SHAPES.items()}
        others = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
        values = (given, others)
        together(*(lambda w=w, v=v: w.trainer.set_data(v) for w, v in zip(made, values, strict=True)))
        for worker in made:
            assert_close(
                worker.values(), {name: np.full(shape, 7.0) for name, shape in SHAPES.items()}, atol=0
            )
        made[0].step(1)
        expected = {name: 7.0 - 0.5 * gradient(name, 0) - gradient(name, 1) for name in SHAPES}
        assert_close(made[0].values(), {name: value.double().numpy() for name, value in expected.items()})


@pytest.mark.parametrize("type", ASYNCHRONOUS)
def test_gradients_that_overflow_drop_this_workers_contribution_alone(jobs: Servers, type: str) -> None:
    with workers(jobs, type, "sgd", {"learning_rate": 1.0}, store=FAR[type]) as made:
        for worker in made:
            kvtrainer.amp.init_trainer(worker.trainer, kvtrainer.amp.LossScaler(1024.0))
        for rank, turn in ((0, 0), (1, 1)):
            loss = torch.stack([(w * gradient(n, turn)).sum() for n, w in made[rank].weights.items()]).sum()
            with kvtrainer.amp.scale_loss(
                loss * (float("inf") if rank else 1.0), made[rank].trainer
            ) as scaled:
                scaled.backward()
            made[rank].trainer.step(1)
        assert [worker.trainer.amp_loss_scale for worker in made] == [1024.0, 512.0]
        made[0].step(2)
        expected = {name: start_of(name) - gradient(name, 0) - gradient(name, 2) for name in SHAPES}
        assert_close(made[0].values(), {name: value.double().numpy() for name, value in expected.items()})
        assert made[0].trainer.server_stats()[0]["tables"][0]["rounds_applied"] == 2


@pytest.mark.parametrize("type", ["dist_sync", *ASYNCHRONOUS])
def test_two_trainers_share_a_store_as_generator_and_critic_do(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[list[float], list[float], list[float]]:
        nets = [torch.full((128, 64), start, requires_grad=True) for start in (10.0 + rank, 20.0 + rank)]
        rates = (1.0, 0.5)
        trainers = [
            kvtrainer.Trainer([("w", net)], "sgd", {"learning_rate": rate, "momentum": 0.0}, kvstore=kv)
            for net, rate in zip(nets, rates, strict=True)
        ]
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
        kv.init("w", torch.zeros(3))
        for at in range(6):
            for which in (1, 0) if at % 3 else (1, 1):  # the critic more often
                (nets[which] * (rank + 1.0)).sum().backward()  # type: ignore[no-untyped-call]
                trainers[which].step(1)
            kv.push("w", torch.ones(3))
        kv.barrier()
        for trainer in trainers:
            trainer.set_data({}) if type == "dist_sync" else _read_all(trainer)
        out = torch.empty(3)
        kv.pull("w", out)
        kv.barrier()
        return one_of(nets[0]), one_of(nets[1]), one_of(out)

    # Generator: 4 steps, critic: 8; three is the sum of what both workers contribute in a step.
    assert jobs.results(2, 2, body, type=type) == [([10.0 - 12.0], [20.0 - 12.0], [12.0])] * 2


def one_of(tensor: Tensor) -> list[float]:
    """The one value of all elements, or all values that there are."""
    values: list[float] = tensor.unique().tolist()  # type: ignore[no-untyped-call]
    return values


def _read_all(trainer: kvtrainer.Trainer) -> None:
    """A contribution of nothing, which brings the weights."""
    for group in trainer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    trainer.step(1)
