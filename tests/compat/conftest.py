"""Live MXNet, asked in its own environment, which KVTRAINER_MXNET_ENV names."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.limits import LIMIT

SCRIPT = Path(__file__).with_name("mxnet_trajectories.py")

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def ask_mxnet() -> Ask:
    """What `mxnet_trajectories.py` answers to a question, from MXNet in the environment."""
    environment = os.environ.get("KVTRAINER_MXNET_ENV")
    if not environment:
        pytest.skip(
            "needs an environment with MXNet 2.0.0b1, named by KVTRAINER_MXNET_ENV; see make test-mxnet"
        )
    python = Path(environment, "bin", "python").absolute()

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        process = subprocess.run(
            [python, "-W", "ignore", SCRIPT],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1"},
        )
        assert process.returncode == 0, process.stderr[-3000:]
        answer: dict[str, Any] = json.loads(process.stdout)
        return answer

    return ask
