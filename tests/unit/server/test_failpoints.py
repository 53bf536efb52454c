"""Failpoints: what the variable says, when a point fires, and that every name stands in the code once."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvstore_server import failpoints
from kvstore_server.errors import ConfigurationError, KVStoreError
from kvstore_server.failpoints import ACTIONS, POINTS, ArmedFailpoint, Failpoints, parse_failpoints
from tests.support.processes import ROOT

NAME = "worker.round.commit"


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names at which "kill" was done, which here only takes a note."""
    names: list[str] = []
    monkeypatch.setitem(ACTIONS, "kill", names.append)
    return names


@pytest.fixture
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)
    monkeypatch.setattr(failpoints, "_armed_by", None)


def test_an_entry_has_a_name_a_process_a_number_and_an_action() -> None:
    assert parse_failpoints(f"{NAME}@1:7=stop, {NAME}=raise,{NAME},") == [
        ArmedFailpoint(NAME, 1, 7, "stop"),
        ArmedFailpoint(NAME, None, 1, "raise"),
        ArmedFailpoint(NAME, None, 1, "kill"),
    ]
    assert [parse_failpoints(str(entry)) for entry in parse_failpoints(f"{NAME}@1:7=stop,{NAME}")] == [
        [ArmedFailpoint(NAME, 1, 7, "stop")],
        [ArmedFailpoint(NAME, None, 1, "kill")],
    ]


def test_an_unknown_name_is_an_error_with_all_names() -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_failpoints("worker.round.comit")
    assert all(name in str(error.value) for name in POINTS)


@pytest.mark.parametrize(
    "text", [f"{NAME}:0", f"{NAME}:x", f"{NAME}=explode", f"{NAME}@", "Worker", f"{NAME} {NAME}"]
)
def test_a_malformed_entry_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KVSTORE_FAILPOINT"):
        parse_failpoints(text)


def test_a_point_fires_the_nth_time_and_then_no_more(reached: list[str]) -> None:
    points = Failpoints([ArmedFailpoint(NAME, nth=3)])
    fired = []
    for _ in range(6):
        points.reach(NAME)
        points.reach("worker.close")
        fired.append(len(reached))
    assert fired == [0, 0, 1, 1, 1, 1]


def test_entries_of_a_point_follow_each_other(reached: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIONS, "sleep", lambda _: reached.append("sleep"))
    Failpoints([ArmedFailpoint(NAME, action="sleep"), ArmedFailpoint(NAME)]).reach(NAME)
    assert reached == ["sleep", NAME]


def test_an_entry_fires_once_in_all_processes_that_share_a_directory(
    reached: list[str], tmp_path: Path
) -> None:
    for _ in range(3):
        Failpoints([ArmedFailpoint(NAME)], tmp_path).reach(NAME)
    assert (reached, [one.name for one in tmp_path.iterdir()]) == ([NAME], [f"{NAME}:1=kill"])


def test_a_process_arms_the_points_of_its_role_and_index(reached: list[str], disarmed: None) -> None:
    environ = {"KVSTORE_FAILPOINT": f"{NAME}@1:2"}
    for role, index, expected in (("worker", 0, 0), ("server", 1, 0), ("worker", 1, 1)):
        failpoints.arm_failpoints(environ, role, index)
        failpoints.failpoint(NAME)
        failpoints.failpoint(NAME)
        assert len(reached) == expected


def test_a_second_store_of_a_process_goes_on_counting(reached: list[str], disarmed: None) -> None:
    for _ in range(2):
        failpoints.arm_failpoints({"KVSTORE_FAILPOINT": f"{NAME}:2"}, "worker", 0)
        failpoints.failpoint(NAME)
    assert reached == [NAME]


def test_without_the_variable_nothing_is_armed(reached: list[str], disarmed: None) -> None:
    failpoints.arm_failpoints({}, "worker", 0)
    failpoints.failpoint(NAME)
    assert (failpoints._armed, reached) == (None, [])


def test_a_directory_that_is_not_there_is_an_error(disarmed: None, tmp_path: Path) -> None:
    environ = {"KVSTORE_FAILPOINT": NAME, "KVSTORE_FAILPOINT_DIR": str(tmp_path / "missing")}
    with pytest.raises(ConfigurationError, match="KVSTORE_FAILPOINT_DIR"):
        failpoints.arm_failpoints(environ, "worker", 0)


def test_the_action_raise_raises_an_error_of_our_tree_that_names_the_point() -> None:
    with pytest.raises(KVStoreError, match=NAME):
        Failpoints([ArmedFailpoint(NAME, action="raise")]).reach(NAME)


def test_the_action_kill_is_a_signal_that_no_handler_sees() -> None:
    script = (
        "import atexit\n"
        "from kvstore_server.failpoints import ArmedFailpoint, Failpoints\n"
        "atexit.register(print, 'not reached')\n"
        f"Failpoints([ArmedFailpoint({NAME!r})]).reach({NAME!r})\n"
        "print('not reached')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (-signal.SIGKILL, "")


def test_a_server_refuses_to_start_with_an_unknown_name() -> None:
    command = [sys.executable, "-m", "kvstore_server"]
    environ = {"KVSTORE_FAILPOINT": "server.nowhere"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert run.returncode == 1
    assert "server.nowhere" in run.stderr
    assert all(name in run.stderr for name in POINTS)


def test_every_name_stands_once_in_the_code_of_each_way_of_a_round() -> None:
    found: Counter[str] = Counter()
    captured: Counter[str] = Counter()
    for path in [*(ROOT / "kvtrainer").rglob("*.py"), *(ROOT / "kvstore_server").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoint":
                [name] = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}"
                (captured if path.name == "captured.py" else found)[str(name.value)] += 1
    assert found == Counter(list(POINTS))
    # A captured round passes points of the general path.
    assert captured == Counter([name for name in POINTS if name in captured])
    assert set(captured) >= {"worker.round.begin", "worker.round.committed", "worker.round.written"}
