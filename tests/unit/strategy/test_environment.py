"""What a strategy does to the process: who started it, limits, multiprocessing, cuDNN, names and log."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import re
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore import KVStoreBase
from kvtrainer.strategy import Agreement, BaseStrategy, Strategy, environment
from kvtrainer.strategy.checkpoint import pack_checkpoint_tree, plain_checkpoint_copy, unpack_checkpoint_tree
from kvtrainer.strategy.environment import rng_state, set_rng_state
from tests.support.strategies import SGD, Make, Net


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "DMLC_", "KVSTORE_", "RANK", "WORLD_SIZE")):
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


def test_arguments_are_keywords_and_the_base_is_abstract() -> None:
    assert BaseStrategy.__abstractmethods__ == {"prepare", "load_checkpoint", "resume", "save_checkpoint"}
    with pytest.raises(TypeError):
        Strategy("device", "work")  # type: ignore[misc]


def test_names_and_folders_carry_the_time(
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


def test_ranks_that_cannot_connect_are_told_why(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_RANK", "0")
    monkeypatch.setenv("KVSTORE_NUM_WORKERS", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigurationError, match=r"MASTER_ADDR.*dist_sync.*launcher='none'"):
        make("device")


def test_a_process_of_several_without_a_rank_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigurationError, match="SLURM_PROCID is not set"):
        make("device")
    assert make("device", env_kwargs={"launcher": "none"}).world_size == 1


class Second(Strategy):
    """A strategy of rank 1."""

    def _meet(self) -> Agreement:
        agreement = Agreement()
        agreement.rank = 1
        return agreement


class PluginStore(KVStoreBase):
    type, num_workers, rank = "mine", 1, 0

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None: ...

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None: ...


def test_dist_cfg_without_effect_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="no effect"):
        make("local", env_kwargs={"dist_cfg": {"timeout": 3}})
    for store in (None, PluginStore()):
        with pytest.raises(ConfigurationError, match="no effect"):
            make(store, env_kwargs={"dist_cfg": {"timeout": 3}})
    with pytest.raises(ConfigurationError, match="no launcher started this process"):
        make("device", env_kwargs={"dist_cfg": {"backend": "gloo"}})


def test_threads_are_left_alone_unless_asked(
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


def test_a_strategy_that_is_closed_leaves_the_log_to_one_of_the_same_name(make: Make) -> None:
    first, second = (make(log_kwargs={"name": "of both"}) for _ in range(2))
    first.close()
    second.logger.info("still here")
    log = Path(second.log_dir, f"{second.timestamp}.log")
    assert "still here" in log.read_text()
    second.close()
    assert not second.logger.handlers


def test_other_ranks_write_errors_only_and_files_on_request(make: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "run.log")
    logger = make(cls=Second, log_kwargs={"log_file": path}).logger
    assert [handler.level for handler in logger.handlers] == [logging.ERROR]
    make(cls=Second, log_kwargs={"log_file": path, "distributed": True}).logger.info("here")
    assert "here" in (tmp_path / "run_rank1.log").read_text()


def test_log_takes_the_arguments_of_mmengines_logger(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    strategy = make()
    logger = strategy.build_logger(
        log_file=str(path), name="instance", logger_name="mine", distributed=True,
        file_handler_cfg={"type": "RotatingFileHandler", "maxBytes": 200, "backupCount": 1},
    )  # fmt: skip
    for _ in range(5):
        logger.info("a line of the log")
    assert " - mine - INFO - a line of the log" in path.read_text()
    assert (tmp_path / "run.log.1").exists()
    for wrong in ({"type": "SocketHandler"}, {}, {"type": "FileHandler", "maxBytes": 1}):
        with pytest.raises(ConfigurationError):
            strategy.build_logger(log_file=str(path), logger_name="other", file_handler_cfg=wrong)


def test_subclasses_find_the_names_of_mmengines_strategies(make: Make) -> None:
    asked = []

    class Mine(Strategy):
        def _build_param_scheduler(self, scheduler: Any, optim_wrapper: Any, default_args: Any) -> Any:
            asked.append((scheduler["type"], dict(default_args)))
            return super()._build_param_scheduler(scheduler, optim_wrapper, default_args)

        def _prepared_components(self) -> Any:
            return {"components": super()._prepared_components()}

    strategy: Any = make(cls=Mine, auto_scale_lr={"enable": False})
    assert (strategy._rank, strategy._world_size, strategy._auto_scale_lr) == (0, 1, {"enable": False})
    linear = {"type": "LinearLR", "start_factor": 0.5}
    made = strategy.prepare(
        Net(),
        optim_wrapper={"body": SGD, "head": SGD},
        param_scheduler=linear,
        dispatch_kwargs={"max_epochs": 4},
    )
    assert asked == [("LinearLR", {"max_epochs": 4})] * 2
    model, trainers, schedules = made["components"]
    assert model is strategy.model
    assert [list(one.schedules) for one in trainers.values()] == list(schedules.values())


def test_properties_of_a_process_alone_cannot_be_set(make: Make) -> None:
    strategy = make()
    expected: dict[str, Any] = {"launcher": "none", "distributed": False, "rank": 0, "world_size": 1}
    expected["randomness"] = {"seed": 1, "diff_rank_seed": False, "deterministic": False}
    assert {name: getattr(strategy, name) for name in expected} == expected
    for name in (*expected, "work_dir", "log_dir", "experiment_name", "seed", "timestamp"):
        with pytest.raises(AttributeError):
            setattr(strategy, name, None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kvstore": "nosuch"}, "nosuch"),
        ({"env_kwargs": {"randomnes": {}}}, "Did you mean 'randomness'"),
        ({"env_kwargs": {"mp_cfg": {"mp_start": "fork"}}}, "Did you mean 'mp_start_method'"),
        ({"log_kwargs": {"log_levl": "INFO"}}, "Did you mean 'log_level'"),
    ],
)
def test_unknown_argument_is_refused_first(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Strategy(work_dir=str(tmp_path / "work"), **wrong)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"env_kwargs": {"launcher": "ray"}}, "launcher.* 'ray'"),
        ({"log_kwargs": {"log_level": "CHATTY"}}, "log_level.* 'CHATTY'"),
        ({"env_kwargs": {"mp_cfg": {"mp_start_method": "thread"}}}, "mp_start_method.* 'thread'"),
        *(({"env_kwargs": {"randomness": {"seed": one}}}, "seed") for one in (-1, 2**32, 1.5, True, "1")),
        ({"env_kwargs": {"randomness": {"seeds": 3}}}, "Did you mean 'seed'"),
        ({"env_kwargs": {"randomness": 3}}, "randomness.* int"),
    ],
)
def test_value_that_cannot_be_is_refused(make: Make, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**wrong)


def test_distributed_training_is_set_up_in_a_job_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Mine(Strategy):
        def _setup_distributed(self, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs)

    make(cls=Mine)
    assert calls == []
    by_hand = {"init_method": "tcp://127.0.0.1:1", "rank": 0, "world_size": 2}
    make(cls=Mine, env_kwargs={"dist_cfg": by_hand})
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert make(cls=Mine, env_kwargs={"dist_cfg": {"backend": "gloo"}}).distributed
    assert calls == [by_hand, {"backend": "gloo"}]


def test_more_files_may_be_opened_but_never_fewer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [256, 8192]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.__setitem__(slice(None), pair))
    make()
    for limit, expected in ((4096, 4096), (100, 4096), (100000, 8192)):
        environment.raise_file_limit(limit)
        assert now == [expected, 8192]


def test_cudnn_and_opencv_are_as_asked(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """OpenCV also before a script imports it."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    (tmp_path / "cv2.py").write_text("threads = []\nsetNumThreads = threads.append\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cv2", raising=False)
    make(env_kwargs={"mp_cfg": {"opencv_num_threads": 2}, "cudnn_benchmark": True})
    assert sys.modules.pop("cv2").threads == [2]
    assert torch.backends.cudnn.benchmark


def test_log_goes_to_a_file_named_after_the_time_also_after_others_have_closed_it(make: Make) -> None:
    strategy = make(experiment_name="try", log_kwargs={"log_level": "WARNING"})
    strategy.logger.info("quiet")
    strategy.logger.warning("one")
    for handler in strategy.logger.handlers:
        handler.close()
    strategy.logger.warning("two")
    assert strategy.logger.name == strategy.experiment_name
    lines = Path(strategy.log_dir, f"{strategy.timestamp}.log").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["one", "two"]


def test_environment_is_described_with_the_launcher_and_the_number_of_workers(make: Make) -> None:
    system, runtime = make(env_kwargs={"cudnn_benchmark": False, "randomness": {"seed": 4}}).collect_env()
    assert system["PyTorch"] == torch.__version__
    # What mmengine's collect_env has on a host without GPUs; "n/a" is what it says where no compiler is.
    names = {"sys.platform", "Python", "CUDA available", "MUSA available", "numpy_random_seed", "GCC"}
    assert {*names, "PyTorch compiling details"} <= set(system)
    assert system["PyTorch compiling details"] == torch.__config__.show()
    assert system["numpy_random_seed"] == 4  # the first word of a generator that was just seeded
    assert system["MUSA available"] is False
    randomness = {"seed": 4, "diff_rank_seed": False, "deterministic": False}
    job = {"Distributed launcher": "none", "Distributed training": False, "GPU number": 1}
    assert runtime == {"cudnn_benchmark": False, **randomness, **job}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    state = rng_state()
    yield
    set_rng_state(state)


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]


def test_equal_seeds_give_equal_numbers_of_every_source(make: Make) -> None:
    found = []
    for _ in range(2):
        make(env_kwargs={"randomness": {"seed": 7}})
        found.append(draws())
    assert found[0] == found[1]
    torch.manual_seed(7)
    random.seed(7)
    assert [found[0][0], found[0][3]] == [random.random(), float(torch.rand(()))]


def test_ranks_differ_only_if_asked(make: Make) -> None:
    for given, seed in (({"seed": 7}, 7), ({"seed": 7, "diff_rank_seed": True}, 8)):
        assert make(cls=Second, env_kwargs={"randomness": given}).seed == seed
    last = {"seed": 2**32 - 1, "diff_rank_seed": True}
    assert make(cls=Second, env_kwargs={"randomness": last}).seed == 0


def test_deterministic_wins_over_cudnn_benchmark(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    try:
        make(env_kwargs={"cudnn_benchmark": True, "randomness": {"seed": 1, "deterministic": True}})
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert "cudnn_benchmark" in caplog.text
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_numbers_go_on_where_they_were_saved(tmp_path: Any) -> None:
    draws()
    state = rng_state()
    torch.save(plain_checkpoint_copy(state, "state"), tmp_path / "state.pt")
    expected = draws()
    set_rng_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draws() == expected
    set_rng_state(unpack_checkpoint_tree(pack_checkpoint_tree(state)))
    assert draws() == expected
    like_marks = {"d": {"t": "no tensor"}, 3: [b"\x00", {"b": 1.5}, None]}
    assert unpack_checkpoint_tree(pack_checkpoint_tree(like_marks)) == like_marks


def test_states_of_other_devices_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    set_rng_state(state)
    assert "1 CUDA devices were saved, but 0 are used" in caplog.text


def test_without_a_seed_one_is_drawn_and_the_dict_that_is_given_stays_as_it_is(make: Make) -> None:
    given: dict[str, Any] = {"seed": None}
    first, second = make(env_kwargs=None), make(env_kwargs={"randomness": given})
    assert first.seed != second.seed
    second.randomness["seed"] = 9
    assert given == {"seed": None}
    assert first.randomness["seed"] is second.randomness["seed"] is None
