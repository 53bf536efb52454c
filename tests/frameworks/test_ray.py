"""Ray Train with servers as actors: a result beside a plain loop's, and what becomes of a job that loses an actor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer.errors import ConfigurationError
from tests.frameworks.jobs import need
from tests.support.limits import LIMIT

need("ray", "test-ray")

import ray  # noqa: E402
import ray.train  # noqa: E402
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig  # noqa: E402

from kvtrainer.integrations.ray import KVStoreConfig, KVTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
HALF = {"CPU": 0.5}
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this host, with as much time for its processes to start as a busy machine may need."""
    variables = pytest.MonkeyPatch()
    variables.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "300")
    variables.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    yield
    ray.shutdown()
    variables.undo()


def run(train: Any, config: dict[str, Any], folder: Path, max_failures: int = 0, **servers: Any) -> Any:
    """The result of a job of two workers and two servers."""
    trainer = KVTrainer(
        train,
        train_loop_config=config,
        backend_config=KVStoreConfig(**{"num_servers": 2, "resources_per_server": HALF, **servers}),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=HALF),
        run_config=RunConfig(
            storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)
        ),
    )
    return trainer.fit()


def train(config: dict[str, Any]) -> list[float]:
    """Train from the last checkpoint on; the first time, end some process after half of the steps."""
    import kvtrainer

    first, flag = 0, Path(config["flag"])
    weight = torch.zeros(4)
    found = ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as directory:
            first, weight = torch.load(Path(directory, "state"), weights_only=True)
    parameter = torch.nn.Parameter(weight)
    trainer = kvtrainer.Trainer({"w": parameter}, "sgd", {"learning_rate": 0.1}, kvstore="dist_sync")
    for step in range(first, STEPS):
        ((parameter - step - trainer.rank) ** 2).sum().backward()
        trainer.step()
        with tempfile.TemporaryDirectory() as directory:
            torch.save((step + 1, parameter.detach().clone()), Path(directory, "state"))
            kept = Checkpoint.from_directory(directory) if trainer.rank == 0 else None
            ray.train.report({"step": step, "from": first}, checkpoint=kept)
        if trainer.rank == 1 and step == STEPS // 2 and not flag.exists():
            flag.touch()
            end(config["victim"])
    values: list[float] = parameter.detach().tolist()
    return values


def end(victim: str) -> None:
    """Kill this process, or the actors of the servers, and wait until the servers are gone, too."""
    import psutil

    if victim == "worker":
        os.kill(os.getpid(), 9)
    actors = actors_of_servers()
    servers = [child for actor in actors for child in actor.children() if "kvstore_server" in child.cmdline()]
    assert len(servers) == 2
    for actor in actors:
        actor.kill()
    psutil.wait_procs(servers)


def actors_of_servers() -> list[Any]:
    """The processes of the actors that own servers."""
    import psutil

    siblings = psutil.Process().parent().children()
    return [one for one in siblings if "RayServer" in "".join([one.name(), *one.cmdline()])]


def kill_supervised(config: dict[str, Any]) -> str:
    """Kill the servers, but not their supervisors, and wait until all answer again; return their addresses."""
    import time

    import psutil

    from kvstore_server import probe

    servers = os.environ["KVSTORE_SERVERS"]
    if os.environ["KVSTORE_RANK"] == "0":
        supervisors = [child for actor in actors_of_servers() for child in actor.children()]
        killed = [one for supervisor in supervisors for one in supervisor.children()]
        assert len(killed) == 2
        for one in killed:
            one.kill()
        psutil.wait_procs(killed)
        while any(probe.probe_server(address, LIMIT) for address in servers.split(",")):
            time.sleep(0.05)
    return servers


def test_a_killed_server_process_comes_back_at_its_address_and_the_job_goes_on(tmp_path: Path) -> None:
    result = run(kill_supervised, {}, tmp_path, restart=1)
    assert result.error is None
    assert result.return_value.count("tcp://") == 2


def test_a_killed_worker_restarts_the_job_from_its_last_checkpoint_and_the_result_is_a_plain_loops(
    tmp_path: Path,
) -> None:
    result = run(train, {"flag": str(tmp_path / "killed"), "victim": "worker"}, tmp_path, max_failures=1)
    assert (tmp_path / "killed").exists()
    parameter = torch.nn.Parameter(torch.zeros(4))
    plain = torch.optim.SGD([parameter], lr=0.1)
    for step in range(STEPS):
        plain.zero_grad()
        sum(((parameter - step - rank) ** 2).sum() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        plain.step()
    assert result.error is None
    assert result.metrics["step"] == STEPS - 1
    assert result.metrics["from"] > 0
    with result.checkpoint.as_directory() as directory:
        step, weight = torch.load(Path(directory, "state"), weights_only=True)
    assert step == STEPS
    torch.testing.assert_close(weight, parameter.detach())


def test_killed_servers_fail_the_job_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError, match=r"server \d"):
        run(train, {"flag": str(tmp_path / "killed"), "victim": "server"}, tmp_path)
    assert (tmp_path / "killed").exists()


def test_servers_for_which_there_is_no_room_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError, match="Ray found no room for 2 servers"):
        run(train, {}, tmp_path, resources_per_server={"CPU": 64.0}, start_timeout=1.0)


def test_a_job_without_workers_or_servers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_workers"):
        KVTrainer(train, scaling_config=ScalingConfig(num_workers=0))
    with pytest.raises(ConfigurationError, match="num_servers is 0"):
        KVTrainer(train, num_servers=0)
    with pytest.raises(ConfigurationError, match="beside backend_config"):
        KVTrainer(train, num_servers=2, backend_config=KVStoreConfig(num_servers=3))
    with pytest.raises(ConfigurationError, match="restart is -1"):
        KVStoreConfig(restart=-1)
