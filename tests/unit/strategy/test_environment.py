"""What a strategy does to the process: who started it, limits, multiprocessing, cuDNN, names and log."""

from __future__ import annotations

import abc
import logging
import multiprocessing
import os
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer.errors import ConfigurationError, UnknownNameError
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.strategy import BaseStrategy, Strategy, environment
from tests.support.strategies import Make, make

__all__ = ["make"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "DMLC_", "KVSTORE_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "none"),
        ({"WORLD_SIZE": "4"}, "pytorch"),
        ({"SLURM_NTASKS": "4"}, "slurm"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "mpi"),
        ({"KVSTORE_RANK": "0", "WORLD_SIZE": "2"}, "kvlaunch"),
        ({"DMLC_ROLE": "worker"}, "dmlc"),
        ({"WORLD_SIZE": "2", "SLURM_NTASKS": "2"}, "pytorch"),
    ],
)
def test_launcher_is_inferred_from_the_environment(variables: dict[str, str], launcher: str) -> None:
    assert environment.infer_launcher(variables) == launcher


def test_unknown_launcher_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="launcher must be one of"):
        make(env_kwargs={"launcher": "ray"})


def test_arguments_are_keywords_and_the_base_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseStrategy()  # type: ignore[abstract]
    assert issubclass(BaseStrategy, abc.ABC)
    assert BaseStrategy.__abstractmethods__ == {"prepare", "load_checkpoint", "resume", "save_checkpoint"}
    with pytest.raises(TypeError):
        Strategy("device", "work")  # type: ignore[misc]


def test_unknown_kvstore_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError):
        Strategy("nosuch", work_dir=str(tmp_path / "w"))
    assert not (tmp_path / "w").exists()


def test_directories_and_names_carry_the_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, named = make(work_dir="work"), make(experiment_name="try")
    assert re.fullmatch(r"\d{8}_\d{6}", plain.timestamp)
    assert abs(time.mktime(time.strptime(plain.timestamp, "%Y%m%d_%H%M%S")) - time.time()) < 60
    assert plain.work_dir == str(tmp_path / "work")
    assert plain.log_dir == os.path.join(plain.work_dir, plain.timestamp)
    assert os.path.isdir(plain.log_dir)
    assert plain.experiment_name == plain.timestamp
    assert named.experiment_name == f"try_{named.timestamp}"


def test_properties_of_a_process_alone_cannot_be_set(make: Make) -> None:
    strategy = make()
    assert (strategy.launcher, strategy.distributed, strategy.rank, strategy.world_size) == (
        "none",
        False,
        0,
        1,
    )
    assert strategy.randomness == {"seed": 1, "diff_rank_seed": False, "deterministic": False}
    for name in ("work_dir", "log_dir", "experiment_name", "launcher", "distributed", "seed", "rank", "world_size",
                 "timestamp", "randomness"):  # fmt: skip
        with pytest.raises(AttributeError):
            setattr(strategy, name, None)


def test_set_up_of_distributed_training_is_called_in_a_launched_job_only(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Mine(Strategy):
        def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs)

    make(cls=Mine)
    assert calls == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make(cls=Mine, env_kwargs={"dist_cfg": {"backend": "gloo"}}).distributed
    assert calls == [{"backend": "gloo"}]


def test_ranks_that_cannot_find_one_another_are_told_what_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_RANK", "0")
    monkeypatch.setenv("KVSTORE_NUM_WORKERS", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR.*dist_sync.*launcher='none'"):
        make("device")


def test_process_that_is_not_told_which_of_several_it_is_does_not_train_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigurationError, match="SLURM_PROCID is not set"):
        make("device")
    assert make("device", env_kwargs={"launcher": "none"}).world_size == 1


def test_ranks_that_were_started_by_hand_are_set_up_as_dist_cfg_says(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(environment, "init_process_group", lambda environ, **options: calls.append(options))
    options = {"init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 2}
    make(env_kwargs={"dist_cfg": options})
    assert calls == [options]


class PluginStore(KVStoreBase):
    type, num_workers, rank = "mine", 1, 0

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None: ...

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None: ...


def test_dist_cfg_without_effect_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="keeps to this process"):
        make("local", env_kwargs={"dist_cfg": {"timeout": 3}})
    for store in (None, PluginStore()):
        with pytest.raises(ConfigurationError, match="no effect"):
            make(store, env_kwargs={"dist_cfg": {"timeout": 3}})
    with pytest.raises(ConfigurationError, match="no launcher started this process"):
        make("device", env_kwargs={"dist_cfg": {"backend": "gloo"}})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ({"env_kwargs": {"randomnes": {}}}, "randomness"),
        ({"env_kwargs": {"mp_cfg": {"mp_start": "fork"}}}, "mp_start_method"),
        ({"log_kwargs": {"log_levl": "INFO"}}, "log_level"),
    ],
)
def test_argument_that_nothing_takes_is_refused_before_anything_is_made(
    wrong: dict[str, Any], meant: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=f"Did you mean '{meant}'") as raised:
        Strategy(work_dir=str(tmp_path / "work"), **wrong)
    assert isinstance(raised.value, TypeError)
    assert not (tmp_path / "work").exists()


def test_more_files_may_be_opened_but_never_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [256, 8192]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.__setitem__(slice(None), pair))
    for limit, expected in ((4096, 4096), (100, 4096), (100000, 8192)):
        environment.raise_file_limit(limit)
        assert now == [expected, 8192]


def test_file_limit_is_raised_by_default(make: Make) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    make()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert soft >= min(4096, hard if hard > 0 else 4096)


def test_multiprocessing_and_threads_are_left_alone_unless_asked(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    set_to: list[str] = []
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda way, force: set_to.append(way))
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    make(env_kwargs={"launcher": "pytorch"})
    assert set_to == []
    assert "OMP_NUM_THREADS" not in os.environ
    make(env_kwargs={"launcher": "pytorch", "mp_cfg": {"mp_start_method": "spawn"}})
    assert set_to == ["spawn"]
    assert "started by 'spawn'" in caplog.text
    assert os.environ["OMP_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS is 1" in caplog.text
    with pytest.raises(ConfigurationError, match=r"mp_start_method.* 'thread'"):
        make(env_kwargs={"mp_cfg": {"mp_start_method": "thread"}})


def test_threads_of_opencv_are_set_also_before_a_script_imports_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cv2.py").write_text("threads = []\nsetNumThreads = threads.append\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    make(env_kwargs={"mp_cfg": {"opencv_num_threads": 2}})
    assert sys.modules.pop("cv2").threads == [2]


def test_cudnn_benchmark_is_as_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    make(env_kwargs={"cudnn_benchmark": True})
    assert torch.backends.cudnn.benchmark


def test_log_goes_to_a_file_named_after_the_time(make: Make) -> None:
    strategy = make(experiment_name="try", log_kwargs={"log_level": "WARNING"})
    strategy.logger.info("quiet")
    strategy.logger.warning("loud")
    assert strategy.logger.name == strategy.experiment_name
    text = Path(strategy.log_dir, f"{strategy.timestamp}.log").read_text()
    assert "loud" in text
    assert "quiet" not in text


def test_log_goes_on_after_others_have_closed_its_file(make: Make, tmp_path: Path) -> None:
    strategy = make(log_kwargs={"log_file": str(tmp_path / "sub" / "own.log")})
    strategy.logger.info("one")
    for handler in strategy.logger.handlers:
        handler.close()
    strategy.logger.info("two")
    lines = (tmp_path / "sub" / "own.log").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["one", "two"]


def test_a_strategy_that_is_closed_leaves_the_log_to_one_of_the_same_name(make: Make) -> None:
    first, second = (make(log_kwargs={"name": "of both"}) for _ in range(2))
    first.close()
    second.logger.info("still here")
    log = Path(second.log_dir, f"{second.timestamp}.log")
    assert "still here" in log.read_text()
    second.close()
    assert not second.logger.handlers


def test_other_ranks_write_errors_only_and_files_on_request(tmp_path: Path) -> None:
    from kvtrainer.strategy.environment import close_logger, make_logger

    path = str(tmp_path / "run.log")
    logger = make_logger("one of two", path, rank=1)
    assert [handler.level for handler in logger.handlers] == [logging.ERROR]
    logger = make_logger("one of two", path, rank=1, every_rank=True)
    logger.info("here")
    close_logger(logger)
    assert "here" in (tmp_path / "run_rank1.log").read_text()
    assert not logger.handlers


def test_wrong_log_level_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="log_level is 'CHATTY'"):
        make(log_kwargs={"log_level": "chatty".upper()})


def test_environment_is_described_with_the_launcher_and_the_number_of_workers(make: Make) -> None:
    system, runtime = make(env_kwargs={"cudnn_benchmark": False, "randomness": {"seed": 4}}).collect_env()
    assert system["PyTorch"] == torch.__version__
    assert {"Python", "CUDA available", "sys.platform"} <= set(system)
    assert runtime == {
        "cudnn_benchmark": False,
        "seed": 4,
        "diff_rank_seed": False,
        "deterministic": False,
        "Distributed launcher": "none",
        "Distributed training": False,
        "GPU number": 1,
    }
