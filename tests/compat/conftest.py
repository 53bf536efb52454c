"""Live MXNet, 2.0.0b1 and 1.9.1, asked in environments of their own, which variables name."""

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

VARIABLES = {"mxnet2": "KVTRAINER_MXNET_ENV", "mxnet1": "KVTRAINER_MXNET1_ENV"}
"""Release, as `compat` calls it -> the variable that names its environment."""

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="session")
def ask_mxnet() -> Ask:
    """What `mxnet_trajectories.py` answers to a question, from the MXNet of a release in its environment."""

    def ask(release: str, question: dict[str, Any]) -> dict[str, Any]:
        environment = os.environ.get(VARIABLES[release])
        if not environment:
            pytest.skip(
                f"needs an environment with MXNet, named by {VARIABLES[release]}; see make test-mxnet"
            )
        process = subprocess.run(
            [Path(environment, "bin", "python").absolute(), "-W", "ignore", SCRIPT],
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
