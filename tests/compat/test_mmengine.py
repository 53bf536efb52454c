"""mmengine's FlexibleRunner over a kvstore, in mmengine's own environment, which KVTRAINER_MMENGINE_ENV names."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
TRAINING, CASES = (Path(__file__).with_name(f"mmengine_{name}.py") for name in ("training", "cases"))
WAYS = ("one process", "two ranks", "two workers and two servers")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and [argument.arg for argument in node.args.args] == ["folder"]
]
EVERYTHING = {
    "dropout": 0.3,
    "wrapper": {
        "type": "AmpOptimWrapper",
        "loss_scale": {"init_scale": 2.0**18, "growth_interval": 2},
        "accumulative_counts": 2,
    },
}
"""At a scale of 2**18 some gradients overflow, before and after the checkpoint."""

pytestmark = pytest.mark.compat


class Trained(NamedTuple):
    """What rank 0 delivered."""

    weights: dict[str, Tensor]
    answer: dict[str, Any]
    folder: Path


Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def python() -> Path:
    environment = os.environ.get("KVTRAINER_MMENGINE_ENV")
    if not environment:
        pytest.skip(
            "needs an environment with mmengine, named by KVTRAINER_MMENGINE_ENV; see make test-mmengine"
        )
    return Path(environment, "bin", "python").absolute()


def run(command: list[Any], cwd: Path) -> None:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    env = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(cwd)}
    process = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env, cwd=cwd)
    assert process.returncode == 0, process.stderr[-4000:]


@pytest.fixture(scope="module")
def train(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train in one of WAYS, or with mmengine's own strategy, and return what became of it."""

    def ask(way: str, folder: Path | None = None, **question: Any) -> Trained:
        folder = folder or tmp_path_factory.mktemp("run")
        own, kvstore = way == "mmengine", "dist_sync" if "servers" in way else "device"
        strategy = (
            {"type": "SingleDeviceStrategy"} if own else {"type": "MMEngineStrategy", "kvstore": kvstore}
        )
        world = 2 if way.startswith("two") else 1
        paths = {"work_dir": str(folder / "work"), "out": str(folder / "out.pt")}
        asked = json.dumps({"strategy": strategy, "world": world, **paths, **question})
        starter: list[Any] = {
            "two ranks": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            WAYS[2]: ["-m", "kvtrainer.jobs.kvlaunch", "-n", "2", "-s", "2", "--", python],
        }.get(way, [])
        run([python, *starter, TRAINING, asked], folder)
        found = torch.load(folder / "out.pt", weights_only=True)
        return Trained(found["weights"], json.loads(found["answer"]), folder)

    return ask


@pytest.fixture(scope="module")
def by_mmengine(train: Train) -> Trained:
    return train("mmengine", epochs=3)


@pytest.fixture(scope="module")
def results(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder = tmp_path_factory.mktemp("cases")
    run([python, CASES, folder], folder)
    found: dict[str, str | None] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_every_store_trains_as_the_strategy_of_mmengine_does(
    train: Train, by_mmengine: Trained, way: str
) -> None:
    trained = train(way, epochs=3)
    expected, answer = by_mmengine.answer, trained.answer
    for name, value in by_mmengine.weights.items():
        torch.testing.assert_close(trained.weights[name], value, atol=1e-6, rtol=1e-6)
    assert (answer["wrapper"], answer["trainer"]) == ("TrainerOptimWrapper", "Trainer")
    assert (answer["world"], answer["servers"]) == {"one process": (1, 0), "two ranks": (2, 0)}.get(
        way, (2, 2)
    )
    assert answer["count"] == expected["count"] == 24
    assert answer["logged"]["train/lr"] == pytest.approx(expected["logged"]["train/lr"])
    assert answer["logged"]["train/grad_norm"] == pytest.approx(
        expected["logged"]["train/grad_norm"], rel=1e-5
    )
    assert set(answer["lr"]) == set(expected["lr"])
    assert set(answer["momentum"]) == set(expected["momentum"])


@pytest.mark.parametrize("way", WAYS)
def test_two_epochs_and_a_resumed_one_are_three_bit_for_bit(train: Train, way: str) -> None:
    whole = train(way, epochs=3, **EVERYTHING)
    first = train(way, epochs=2, **EVERYTHING)
    second = train(way, first.folder, epochs=3, resume=True, **EVERYTHING)
    assert any(not torch.equal(first.weights[name], value) for name, value in whole.weights.items())
    assert all(torch.equal(second.weights[name], value) for name, value in whole.weights.items())
    for name in ("lr", "momentum", "logged"):
        assert json.dumps(second.answer[name]) == json.dumps(whole.answer[name])


def test_a_checkpoint_holds_plain_values_of_all_ranks_and_is_written_once(train: Train) -> None:
    trained = train(WAYS[2], epochs=1)
    work = trained.folder / "work"
    assert (work / "last_checkpoint").read_text() == str(work / "epoch_1.pth")
    found = torch.load(work / "epoch_1.pth", weights_only=True)
    assert len(found["ranks"]) == 2
    assert (found["meta"]["epoch"], found["meta"]["iter"], found["meta"]["mmengine"]) == (1, 3, "0.10.7")
    log = found["message_hub"]["log_scalars"]["train/lr"]["log"]
    assert log.tolist() == pytest.approx(trained.answer["logged"]["train/lr"])
    states = [one["state"] for one in found["optimizer"]["parameters"].values()]
    assert len(states) == 6
    assert all("momentum_buffer" in state for state in states)
    assert len([one for one in work.iterdir() if one.is_dir() and (one / f"{one.name}.log").exists()]) == 1


def test_only_importing_the_integration_imports_mmengine(python: Path, tmp_path: Path) -> None:
    script = """
import sys, kvtrainer, kvtrainer.strategy, kvtrainer.config, kvtrainer.hooks
assert "mmengine" not in sys.modules
from mmengine.registry import OPTIM_WRAPPERS, STRATEGIES
import mmengine.runner
assert STRATEGIES.get("MMEngineStrategy") is None and OPTIM_WRAPPERS.get("TrainerOptimWrapper") is None
import kvtrainer.integrations.mmengine as ours
assert STRATEGIES.get("MMEngineStrategy") is ours.MMEngineStrategy
assert STRATEGIES.get("KVStoreStrategy") is ours.KVStoreStrategy is ours.MMEngineStrategy
assert OPTIM_WRAPPERS.get("TrainerOptimWrapper") is ours.TrainerOptimWrapper
"""
    run([python, "-c", script], tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_of_the_parts(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]


def test_every_part_was_tried(results: dict[str, str | None]) -> None:
    assert sorted(results) == sorted(NAMES)
