"""Which launcher's variables count: the order, one source for both numbers, and what errors say was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_server.errors import ConfigurationError
from kvtrainer.env import SOURCES, read_place, read_topology, workers_of_job

LAUNCHERS = {
    "kvlaunch": {"KVSTORE_RANK": "1", "KVSTORE_NUM_WORKERS": "10"},
    "MXNet": {"DMLC_WORKER_ID": "2", "DMLC_NUM_WORKER": "11"},
    "torchrun": {"RANK": "3", "WORLD_SIZE": "12", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "Slurm": {"SLURM_PROCID": "4", "SLURM_NTASKS": "13", "SLURM_LOCALID": "0"},
    "Open MPI": {
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_SIZE": "14",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    },
    "MPI": {"PMI_RANK": "6", "PMI_SIZE": "15"},
}
NAMES = list(LAUNCHERS)


@pytest.mark.parametrize("launcher", NAMES)
def test_each_launcher_is_understood(launcher: str) -> None:
    place = 1 + NAMES.index(launcher)
    assert read_place(LAUNCHERS[launcher], None, None) == (place, 9 + place)


@pytest.mark.parametrize("first", range(len(NAMES)))
def test_an_earlier_launcher_wins_over_all_later_ones(first: int) -> None:
    environ = {name: value for later in NAMES[first:] for name, value in LAUNCHERS[later].items()}
    assert read_place(environ, None, None) == (1 + first, 10 + first)


@pytest.mark.parametrize("name", ["DMLC_WORKER_ID", "DMLC_RANK", "DMLC_TASK_ID"])
def test_mxnets_launchers_say_the_rank_in_different_variables(name: str) -> None:
    assert read_place({name: "1", "DMLC_NUM_WORKER": "2"}, None, None) == (1, 2)


def test_a_local_rank_is_no_rank() -> None:
    with pytest.raises(ConfigurationError, match="KVSTORE_RANK is not set and no rank was given"):
        read_place({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, None, None)


HALVES = [(source.launcher, name) for source in SOURCES for name in (source.ranks[0], source.count) if name]


@pytest.mark.parametrize(("launcher", "only"), HALVES)
def test_half_of_a_source_is_never_completed_from_another(launcher: str, only: str) -> None:
    later = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "PMI_RANK": "0",
        "PMI_SIZE": "2",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
    }
    [source] = [source for source in SOURCES if source.launcher == launcher]
    earlier = {name for s in SOURCES[: SOURCES.index(source) + 1] for name in (*s.ranks, s.count)}
    environ = {name: value for name, value in later.items() if name not in earlier} | {only: "1"}
    with pytest.raises(ConfigurationError, match=rf"although {only}='1' was found \({launcher}\)") as caught:
        read_place(environ, None, None)
    text = str(caught.value)
    assert "Set KVSTORE_RANK and KVSTORE_NUM_WORKERS, or pass" in text
    if "PMI_RANK" in environ and only != "PMI_RANK":
        assert "Found, but not used:" in text
        assert "PMI_RANK='0', PMI_SIZE='2' (MPI)" in text


def test_pmix_needs_the_number_of_workers_as_an_argument() -> None:
    with pytest.raises(ConfigurationError, match="PMIx does not tell the number of workers"):
        read_place({"PMIX_RANK": "1"}, None, None)
    assert read_place({"PMIX_RANK": "1"}, None, 2) == (1, 2)


def test_an_argument_may_complete_half_a_source() -> None:
    assert read_place({"WORLD_SIZE": "4"}, 3, None) == (3, 4)
    assert read_place({"SLURM_PROCID": "1"}, None, 2) == (1, 2)


def test_arguments_alone_do_not_look_at_a_broken_environment() -> None:
    assert read_place({"RANK": "x", "KVSTORE_RANK": "y"}, 0, 1) == (0, 1)


def test_an_empty_variable_does_not_make_a_source() -> None:
    environ = {"KVSTORE_RANK": " ", "KVSTORE_NUM_WORKERS": "", **LAUNCHERS["Slurm"]}
    assert read_place(environ, None, None) == (4, 13)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, r"rank \(RANK\) is 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank \(RANK\) is 2; with num_workers \(WORLD_SIZE\) 2"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "0"}, r"num_workers \(SLURM_NTASKS\) is 0"),
    ],
)
def test_a_bad_number_is_refused_with_the_name_of_its_variable(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_place(environ, None, None)


def test_servers_come_from_our_own_variable_only() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^KVSTORE_SERVERS is not set .*torchrun, Slurm and MPI tell"
    ):
        read_topology(LAUNCHERS["torchrun"])
    environ = {**LAUNCHERS["torchrun"], "KVSTORE_SERVERS": "h:1"}
    assert read_topology(environ).servers == ("tcp://h:1",)


def test_servers_may_be_listed_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# two of them\nh:1\n\n tcp://h:2  # the other\n")
    environ = {**LAUNCHERS["kvlaunch"], "KVSTORE_SERVERS": f"@{file}"}
    assert read_topology(environ).servers == ("tcp://h:1", "tcp://h:2")
    assert read_topology({}, rank=0, num_workers=1, servers=f"@{file}").servers == ("tcp://h:1", "tcp://h:2")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read the list .*No such file"), ("# none\n", "is empty"), ("h\n", "'h' is not")],
)
def test_a_bad_file_of_servers_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "servers").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_topology({}, rank=0, num_workers=1, servers=f"@{tmp_path / 'servers'}")
    assert isinstance(caught.value, FileNotFoundError) is (text is None)


@pytest.mark.parametrize("launcher", NAMES)
def test_the_size_of_the_job_is_known_wherever_the_rank_is(launcher: str) -> None:
    place = 1 + NAMES.index(launcher)
    assert workers_of_job(LAUNCHERS[launcher]) == (9 + place, SOURCES[place - 1].count)


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_NTASKS": "4"}, {"PMIX_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "x"}]
)
def test_where_no_launcher_places_this_process_the_size_is_unknown(environ: dict[str, str]) -> None:
    assert workers_of_job(environ) is None
