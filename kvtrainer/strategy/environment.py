"""Set up a training process: launcher, limits, threads, torch.distributed, random numbers, and log handlers.

Functions that interpret variables of launchers get them as an argument (`environ`). The others change the state of this
process: open-file limit, start method, generators, handlers. Nothing here is collective except `init_process_group`.

- `infer_launcher` and `processes_of_job` read the variables that launchers set, in the order of `kvtrainer.common.env`.
- `rng_state`, `check_rng_state` and `set_rng_state` save and restore python's, NumPy's and torch's generators as
  tensors and plain numbers, as a checkpoint needs them.
- `describe_system` lists versions and hardware, under mmengine's names.
"""

from __future__ import annotations

import importlib
import logging
import logging.handlers
import multiprocessing
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvstore_server import __version__, check
from kvtrainer.common.env import NUM_WORKERS, RANK, SOURCES, local_rank_from_env, read_place_from_env
from kvtrainer.errors import ArgumentTypeError, ConfigurationError

_log = logging.getLogger(__name__)

NONE = "none"
_SIGNS = (
    ("kvlaunch", (RANK, NUM_WORKERS)),
    ("dmlc", ("DMLC_ROLE", "DMLC_WORKER_ID")),
    ("pytorch", ("WORLD_SIZE",)),
    ("slurm", ("SLURM_NTASKS",)),
    ("mpi", ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")),
)
"""Launcher → variables that it sets, in the order in which kvtrainer.common.env reads ranks from them."""
LAUNCHERS = (NONE, *(name for name, _ in _SIGNS))

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SEEDS = 1 << 32
"""NumPy accepts seeds below this."""
_DEFAULT_PORT = "29500"


def infer_launcher(environ: Mapping[str, str]) -> str:
    """Return which of LAUNCHERS started this process, according to the environment."""
    for launcher, names in _SIGNS:
        if any(environ.get(name, "").strip() for name in names):
            return launcher
    return NONE


def raise_file_limit(limit: int) -> None:
    """Raise the soft limit of open files to `limit`, as far as the hard limit allows; it never falls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = max(limit, soft) if hard == resource.RLIM_INFINITY else min(max(limit, soft), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_multi_processing(
    mp_start_method: str | None = None, opencv_num_threads: int | None = None, *, is_distributed: bool = False
) -> None:
    """Set the start method of child processes, and OpenCV's threads; None changes nothing. In a distributed job,
    children get one thread each. Note that 'fork' copies neither CUDA's threads nor those of a kvstore's sockets.
    """
    if mp_start_method is not None:
        check.one_of("mp_start_method", mp_start_method, multiprocessing.get_all_start_methods())
        former = multiprocessing.get_start_method(allow_none=True)
        if former not in (None, mp_start_method):
            _log.warning("child processes are started by %r now, no longer by %r", mp_start_method, former)
        multiprocessing.set_start_method(mp_start_method, force=True)
    if opencv_num_threads is not None:
        with suppress(ImportError):  # without OpenCV there is nothing to set
            importlib.import_module("cv2").setNumThreads(opencv_num_threads)
    for name in _THREADS if is_distributed else ():
        if name not in os.environ:
            os.environ[name] = "1"
            _log.warning("%s is 1 for every child process; set it yourself for another number", name)


def choose_cuda_device(environ: Mapping[str, str]) -> None:
    """Select the CUDA device with this process's local rank, if there is CUDA."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank_from_env(environ) % torch.cuda.device_count())


def current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def init_process_group(environ: Mapping[str, str], **options: Any) -> None:
    """Join the other processes of the job in a torch.distributed group. Blocks until all have joined.

    MASTER_ADDR may be missing from `environ` if all processes are on one host. `options` are those of
    torch.distributed.init_process_group; the default backend is gloo, with NCCL for CUDA tensors if there is CUDA.
    """
    # 1. Rank and number of processes.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    options = {"backend": backend, **options}
    if "store" not in options:
        rank, count = read_place_from_env(environ, options.get("rank"), options.get("world_size"))
        options = {**options, "rank": rank, "world_size": count}
    # 2. The address of rank 0.
    if not options.keys() & {"store", "init_method"}:
        address = environ.get("MASTER_ADDR", "").strip()
        if not address and not _is_one_host(environ, options["world_size"]):
            raise ConfigurationError(
                f"the address of rank 0 of {options['world_size']} processes is unknown; set MASTER_ADDR and "
                "MASTER_PORT, or init_method in dist_cfg, or use kvstore='dist_sync', or launcher='none' to train alone"
            )
        port = environ.get("MASTER_PORT", "").strip() or _DEFAULT_PORT
        options["init_method"] = f"tcp://{address or '127.0.0.1'}:{port}"
    try:
        dist.init_process_group(**options)
    except TypeError as error:
        raise ConfigurationError(f"torch.distributed does not take an option of dist_cfg: {error}") from error


def processes_of_job(environ: Mapping[str, str]) -> int:
    """Return the number of processes according to the environment; 1 if it says nothing."""
    texts = [environ.get(source.count, "").strip() for source in SOURCES if source.count]
    if not any(text.isdecimal() and int(text) > 1 for text in texts):
        return 1
    return read_place_from_env(environ, None, None)[1]


def describe_system() -> dict[str, Any]:
    """Return platform, versions, GPUs and threads, with mmengine's keys. Runs the compilers for their versions."""
    # 1. Platform and generators.
    musa = getattr(torch, "musa", None)
    seeds: Any = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "sys.platform": sys.platform,
        "Platform": platform.platform(),
        "Python": sys.version.replace("\n", ""),
        "CUDA available": torch.cuda.is_available(),
        "MUSA available": musa is not None and bool(musa.is_available()),
        "numpy_random_seed": int(seeds[1][0]),
    }
    # 2. GPUs, grouped by model, and the CUDA toolchain.
    if torch.cuda.is_available():
        numbers: dict[str, list[str]] = {}
        for at in range(torch.cuda.device_count()):
            numbers.setdefault(torch.cuda.get_device_name(at), []).append(str(at))
        found |= {f"GPU {','.join(its)}": name for name, its in numbers.items()}
        found |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
        nvcc = shutil.which("nvcc")
        home = os.environ.get("CUDA_HOME") or (os.path.dirname(os.path.dirname(nvcc)) if nvcc else None)
        found |= {"CUDA_HOME": home, "NVCC": _version_of_program(nvcc or f"{home}/bin/nvcc", "release")}
    # 3. Compilers and libraries.
    found |= {
        "GCC": _version_of_program((sysconfig.get_config_var("CC") or "gcc").split()[0]),
        "PyTorch": torch.__version__,
        "PyTorch compiling details": torch.__config__.show(),
        "NumPy": np.__version__,
        "kvtrainer": __version__,
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "Threads": torch.get_num_threads(),
    }
    with suppress(metadata.PackageNotFoundError):
        found["TorchVision"] = metadata.version("torchvision")
    with suppress(ImportError):
        found["OpenCV"] = importlib.import_module("cv2").__version__
    return found


def _version_of_program(program: str, word: str = "") -> str:
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True)
        return next((line.strip() for line in asked.stdout.splitlines() if word in line), "n/a")
    return "n/a"


def _is_one_host(environ: Mapping[str, str], count: int) -> bool:
    if environ.get("SLURM_NTASKS", "").strip():
        nodes = environ.get("SLURM_NNODES", "") or environ.get("SLURM_JOB_NUM_NODES", "")
        return nodes.strip() == "1" or count == 1
    return environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "").strip() == str(count) or count == 1


def file_handler(cfg: Mapping[str, Any] | None, file_mode: str) -> Callable[[str], logging.Handler]:
    """Return a function that creates the log file's handler, according to mmengine's `file_handler_cfg`."""
    if cfg is None:
        return lambda path: logging.FileHandler(path, file_mode, encoding="utf-8")
    options = dict(check.mapping("file_handler_cfg", cfg, error=ArgumentTypeError))
    kinds = {**vars(logging.handlers), "FileHandler": logging.FileHandler}
    kinds = {
        n: one for n, one in kinds.items() if isinstance(one, type) and issubclass(one, logging.FileHandler)
    }
    kind = kinds[check.one_of("the type of file_handler_cfg", options.pop("type", None), sorted(kinds))]
    return lambda path: kind(**{"filename": path, "encoding": "utf-8", **options})


def close_logger(logger: logging.Logger, handlers: Iterable[logging.Handler] | None = None) -> None:
    """Remove and close all handlers of a logger, or only these."""
    for handler in list(logger.handlers if handlers is None else handlers):
        logger.removeHandler(handler)
        handler.close()


def check_seed(seed: object) -> int | None:
    """Return a seed from 0 to 2^32 - 1, or None. Raises ConfigurationError if it is neither."""
    return None if seed is None else check.integer("seed", seed, 0, SEEDS - 1)


def begin_randomness(seed: int, deterministic: bool) -> None:
    """Seed python's, NumPy's and torch's generators. `deterministic` lets torch use only algorithms that are."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not deterministic:
        return
    if torch.backends.cudnn.benchmark:
        _log.warning("cudnn_benchmark is disabled, because deterministic results were requested")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available():
        # Otherwise cuBLAS chooses algorithms by free workspace, and torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def rng_state(devices: Sequence[torch.device] = ()) -> dict[str, Any]:
    """Return the states of python's, NumPy's and torch's generators, and of those on CUDA `devices`."""
    version, internal, gauss = random.getstate()
    numbers = np.random.get_state(legacy=True)
    assert isinstance(numbers, tuple)
    return {
        "python": {"version": version, "state": torch.tensor(internal, device="cpu"), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(numbers[1].astype(np.int64)),
            "pos": int(numbers[2]),
            "has_gauss": int(numbers[3]),
            "gauss": float(numbers[4]),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _cuda_devices(devices)],
    }


def check_rng_state(state: Mapping[str, Any]) -> None:
    """Raise an error of any kind unless `set_rng_state` can restore this state. Nothing changes."""
    of_python, of_numpy = _rng_states_from_tensors(state)
    random.Random().setstate(of_python)
    np.random.RandomState().set_state(of_numpy)
    torch.Generator().set_state(state["torch"].cpu())
    len(state["cuda"])


def set_rng_state(state: Mapping[str, Any], devices: Sequence[torch.device] = ()) -> None:
    """Restore the result of `rng_state`; CUDA states in the order of `devices`, as far as both have them."""
    of_python, of_numpy = _rng_states_from_tensors(state)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(state["torch"].cpu())
    mine, saved = _cuda_devices(devices), state["cuda"]
    if len(mine) != len(saved):
        text = (
            "random states of %d CUDA devices were saved, but %d are used now: the others start from the seed"
        )
        _log.warning(text, len(saved), len(mine))
    for device, one in zip(mine, saved, strict=False):
        torch.cuda.set_rng_state(one.cpu(), device)


def _rng_states_from_tensors(state: Mapping[str, Any]) -> tuple[Any, Any]:
    python, numbers = state["python"], state["numpy"]
    key = numbers["key"].cpu().numpy().astype(np.uint32)
    return (
        (int(python["version"]), tuple(python["state"].tolist()), python["gauss"]),
        ("MT19937", key, numbers["pos"], numbers["has_gauss"], numbers["gauss"]),
    )


def _cuda_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    return list(dict.fromkeys(device for device in devices if device.type == "cuda"))
