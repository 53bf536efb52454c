"""Reading topology and time limits: arguments, then one launcher's variables, and errors that say what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore_server.errors import ConfigurationError
from kvtrainer.common.env import (
    DEFAULT_SECONDS,
    SOURCES,
    TRANSPORTS,
    Topology,
    attempt_from_env,
    local_rank_from_env,
    parse_address,
    read_place_from_env,
    read_timeout,
    read_topology_from_env,
    shows_debug_log,
    transport_from_env,
    workers_from_env,
)
from kvtrainer.jobs.processes import inherited_environment

ENVIRON = {
    "KVSTORE_RANK": "1",
    "KVSTORE_NUM_WORKERS": "3",
    "KVSTORE_SERVERS": "tcp://10.0.0.1:5000,tcp://10.0.0.2:5000",
}

LAUNCHERS = {
    "kvlaunch": {"KVSTORE_RANK": "1", "KVSTORE_NUM_WORKERS": "10"},
    "MXNet": {"DMLC_WORKER_ID": "2", "DMLC_NUM_WORKER": "11"},
    "torchrun": {"RANK": "3", "WORLD_SIZE": "12", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "13", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "Slurm": {"SLURM_PROCID": "5", "SLURM_NTASKS": "14", "SLURM_LOCALID": "0"},
    "MPI": {"PMI_RANK": "6", "PMI_SIZE": "15"},
}  # fmt: skip
NAMES = list(LAUNCHERS)


def test_topology_comes_from_the_environment() -> None:
    assert read_topology_from_env(ENVIRON) == Topology(1, 3, ("tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"))


@pytest.mark.parametrize("environ", [{}, {"RANK": "x", "KVSTORE_RANK": "y", "KVSTORE_SERVERS": "z"}])
def test_arguments_alone_are_enough_whatever_the_environment(environ: dict[str, str]) -> None:
    topology = read_topology_from_env(environ, rank=0, num_workers=1, servers="a:1, b:2")
    assert topology == Topology(0, 1, ("tcp://a:1", "tcp://b:2"))


@pytest.mark.parametrize("name", sorted(ENVIRON))
@pytest.mark.parametrize("empty", [False, True])
def test_missing_variable_is_named_together_with_both_ways_to_give_it(name: str, empty: bool) -> None:
    environ = {**ENVIRON, name: " "}
    if not empty:
        del environ[name]
    with pytest.raises(ConfigurationError, match=f"^{name} is not set") as caught:
        read_topology_from_env(environ)
    assert "kvlaunch -n" in str(caught.value)
    assert name.removeprefix("KVSTORE_").lower() + "=" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVSTORE_RANK", "one", "'one'; it must be a whole number"),
        ("KVSTORE_RANK", "1.0", "'1.0'"),
        ("KVSTORE_RANK", "3", r"is 3; .* must lie in 0\.\.2"),
        ("KVSTORE_RANK", "-1", "is -1"),
        ("KVSTORE_NUM_WORKERS", "0", "is 0; a job has at least 1 worker"),
        ("KVSTORE_NUM_WORKERS", "2_0", "'2_0'"),
        ("KVSTORE_NUM_WORKERS", "9" * 5000, "'9999"),
        ("KVSTORE_SERVERS", "tcp://a:1,,tcp://b:1", "'' is not the address"),
        ("KVSTORE_SERVERS", "tcp://a:1,a:1", "servers 0 and 1 .* same address tcp://a:1"),
        ("KVSTORE_SERVERS", "tcp://A:01,tcp://a:1", "same address tcp://a:1"),
    ],
)
def test_bad_variable_is_refused_with_its_value(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_topology_from_env({**ENVIRON, name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [True, 1.0, [1]])
def test_rank_of_a_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        read_topology_from_env(ENVIRON, rank=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([1], "^1 is not the address of a server"),
        (["a:1", None], "^None is not the address"),
        (b"a:1", "^97 is not the address"),
        (5, r"servers \(KVSTORE_SERVERS\) is 5; it must be a list"),
        ({"a:1": 0}, r"is \{'a:1': 0\}; it must be a list"),
        ([], r"list of servers .* is empty"),
    ],
)
def test_servers_that_are_no_list_of_addresses_are_refused(servers: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_topology_from_env(ENVIRON, servers=servers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        (" node-1.example.org:80 ", "tcp://node-1.example.org:80"),
        ("[::1]:65535", "tcp://[::1]:65535"),
        ("tcp://[fe80::1%eth0]:1", "tcp://[fe80::1%eth0]:1"),
    ],
)
def test_address_is_brought_to_one_form(text: str, address: str) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", ":5555", "host:0", "host:65536", "host:http", "ipc:///tmp/x", "udp://a:1", "tcp://*:5555",
        "tcp://a:1/path", "tcp://a b:1", "::1:5555", "tcp://a:1\ntcp://b:1",
    ],
)  # fmt: skip
def test_malformed_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


# The transport.


@pytest.mark.parametrize("word", TRANSPORTS)
def test_the_transport_is_the_one_of_the_variable_or_auto(word: str) -> None:
    assert transport_from_env({"KVSTORE_TRANSPORT": f" {word} "}) == word
    assert transport_from_env({"KVSTORE_TRANSPORT": ""}) == "auto"


def test_the_removed_transport_ipc_is_refused_with_those_to_use_instead() -> None:
    with pytest.raises(ConfigurationError, match=r"KVSTORE_TRANSPORT=ipc .*auto.*shared memory.*tcp"):
        transport_from_env({"KVSTORE_TRANSPORT": "ipc"})


# Launchers: the order, and one source for both numbers.


@pytest.mark.parametrize("launcher", NAMES)
def test_each_launcher_is_understood(launcher: str) -> None:
    place = 1 + NAMES.index(launcher)
    assert read_place_from_env(LAUNCHERS[launcher], None, None) == (place, 9 + place)
    assert workers_from_env(LAUNCHERS[launcher]) == (9 + place, SOURCES[place - 1].count)


@pytest.mark.parametrize("first", range(len(NAMES)))
def test_an_earlier_launcher_wins_over_all_later_ones(first: int) -> None:
    environ = {name: value for later in NAMES[first:] for name, value in LAUNCHERS[later].items()}
    assert read_place_from_env(environ, None, None) == (1 + first, 10 + first)


@pytest.mark.parametrize("name", ["DMLC_WORKER_ID", "DMLC_RANK", "DMLC_TASK_ID"])
def test_mxnets_launchers_say_the_rank_in_different_variables(name: str) -> None:
    assert read_place_from_env({name: "1", "DMLC_NUM_WORKER": "2"}, None, None) == (1, 2)


def test_a_local_rank_is_no_rank() -> None:
    with pytest.raises(ConfigurationError, match="KVSTORE_RANK is not set and no rank was given"):
        read_place_from_env({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, None, None)


HALVES = [(source.launcher, name) for source in SOURCES for name in (source.ranks[0], source.count) if name]


@pytest.mark.parametrize(("launcher", "only"), HALVES)
def test_half_of_a_source_is_never_completed_from_another(launcher: str, only: str) -> None:
    ranks, counts = ("RANK", "SLURM_PROCID", "PMI_RANK"), ("WORLD_SIZE", "SLURM_NTASKS", "PMI_SIZE")
    later = {**dict.fromkeys(ranks, "0"), **dict.fromkeys(counts, "2")}
    [source] = [source for source in SOURCES if source.launcher == launcher]
    earlier = {name for s in SOURCES[: SOURCES.index(source) + 1] for name in (*s.ranks, s.count)}
    environ = {name: value for name, value in later.items() if name not in earlier} | {only: "1"}
    with pytest.raises(ConfigurationError, match=rf"although {only}='1' was found \({launcher}\)") as caught:
        read_place_from_env(environ, None, None)
    text = str(caught.value)
    assert "Set KVSTORE_RANK and KVSTORE_NUM_WORKERS, or pass" in text
    if "PMI_RANK" in environ and only != "PMI_RANK":
        assert "Found, but not used:" in text
        assert "PMI_RANK='0', PMI_SIZE='2' (MPI)" in text


def test_pmix_needs_the_number_of_workers_as_an_argument() -> None:
    with pytest.raises(ConfigurationError, match="PMIx does not tell the number of workers"):
        read_place_from_env({"PMIX_RANK": "1"}, None, None)
    assert read_place_from_env({"PMIX_RANK": "1"}, None, 2) == (1, 2)


def test_an_argument_may_complete_half_a_source() -> None:
    assert read_place_from_env({"WORLD_SIZE": "4"}, 3, None) == (3, 4)
    assert read_place_from_env({"SLURM_PROCID": "1"}, None, 2) == (1, 2)


def test_an_empty_variable_does_not_make_a_source() -> None:
    environ = {"KVSTORE_RANK": " ", "KVSTORE_NUM_WORKERS": "", **LAUNCHERS["Slurm"]}
    assert read_place_from_env(environ, None, None) == (5, 14)


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
        read_place_from_env(environ, None, None)


def test_servers_come_from_our_own_variable_only() -> None:
    with pytest.raises(ConfigurationError, match=r"^KVSTORE_SERVERS is not set .*torchrun"):
        read_topology_from_env(LAUNCHERS["torchrun"])
    environ = {**LAUNCHERS["torchrun"], "KVSTORE_SERVERS": "h:1"}
    assert read_topology_from_env(environ).servers == ("tcp://h:1",)


def test_servers_may_be_listed_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("# two of them\nh:1\n\n tcp://h:2  # the other\n")
    environ = {**LAUNCHERS["kvlaunch"], "KVSTORE_SERVERS": f"@{file}"}
    assert read_topology_from_env(environ).servers == ("tcp://h:1", "tcp://h:2")
    assert read_topology_from_env({}, rank=0, num_workers=1, servers=f"@{file}").servers == (
        "tcp://h:1",
        "tcp://h:2",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read the list .*No such file"), ("# none\n", "is empty"), ("h\n", "'h' is not")],
)
def test_a_bad_file_of_servers_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "servers").write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_topology_from_env({}, rank=0, num_workers=1, servers=f"@{tmp_path / 'servers'}")
    assert isinstance(caught.value, FileNotFoundError) is (text is None)


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_NTASKS": "4"}, {"PMIX_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "x"}]
)
def test_where_no_launcher_places_this_process_the_size_is_unknown(environ: dict[str, str]) -> None:
    assert workers_from_env(environ) is None


# The log.


@pytest.mark.parametrize(("level", "shows"), [("debug", True), ("DEBUG", True), ("info", False), ("", False)])
def test_only_debug_shows_messages_and_rounds(level: str, shows: bool) -> None:
    assert shows_debug_log({"KVSTORE_LOG": level}) is shows


def test_a_level_that_the_log_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="KVSTORE_LOG is 'verbose'; it must be one of debug, info"):
        shows_debug_log({"KVSTORE_LOG": "verbose"})


# Time limits.


def test_timeout_is_the_argument_then_the_variable_then_the_default() -> None:
    environ = {"KVSTORE_TIMEOUT": "12.5"}
    assert read_timeout(environ, "KVSTORE_TIMEOUT", value=3) == 3.0
    assert read_timeout(environ, "KVSTORE_TIMEOUT") == 12.5
    assert read_timeout({"KVSTORE_TIMEOUT": ""}, "KVSTORE_TIMEOUT") == 600.0


def test_documented_defaults_of_the_time_limits() -> None:
    assert DEFAULT_SECONDS == {
        "KVSTORE_TIMEOUT": 600.0,
        "KVSTORE_CONNECT_TIMEOUT": 30.0,
        "KVSTORE_DEAD_AFTER": 60.0,
        "KVSTORE_SLOW_AFTER": 10.0,
    }


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_bad_timeout_is_refused_with_name_and_value(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"KVSTORE_DEAD_AFTER is '{text}'"):
        read_timeout({"KVSTORE_DEAD_AFTER": text}, "KVSTORE_DEAD_AFTER")


def test_under_mpirun_in_a_batch_script_of_slurm_each_process_is_the_worker_that_mpirun_says() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    of_mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_place_from_env({**script, **of_mpi}, None, None) == (3, 4)
    assert local_rank_from_env({**script, **of_mpi}) == 1


@pytest.mark.parametrize(
    ("environ", "rank", "expected"),
    [
        ({}, None, 0),
        ({"KVSTORE_RANK": "3", "KVSTORE_NUM_WORKERS": "4"}, None, 3),
        ({"KVSTORE_RANK": "3", "KVSTORE_NUM_WORKERS": "4", "LOCAL_RANK": "1"}, None, 1),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}, 5, 2),
        ({}, 6, 6),
    ],
)
def test_a_process_has_the_number_on_its_host_that_a_launcher_says_or_else_its_rank(
    environ: dict[str, str], rank: int | None, expected: int
) -> None:
    assert local_rank_from_env(environ, rank) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "1"}, 2),
        ({"SLURM_PROCID": "1", "SLURM_RESTART_COUNT": "3"}, 3),
        ({"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "KVSTORE_ATTEMPT": "7"}, 7),
        ({"KVSTORE_RANK": "1", "KVSTORE_ATTEMPT": "1"}, 1),
    ],
)
def test_the_attempt_of_a_job_is_the_launchers(environ: dict[str, str], expected: int) -> None:
    assert attempt_from_env(environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_RESTART_COUNT": "3"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_RESTART_COUNT": "3"},
        {"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "GROUP_WORLD_SIZE": "2"},
    ],
)
def test_a_count_that_not_all_processes_share_is_no_attempt(environ: dict[str, str]) -> None:
    assert attempt_from_env(environ) == 0


@pytest.mark.parametrize("text", ["second", "-3"])
def test_an_attempt_that_is_no_count_is_refused_with_its_variable(text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"KVSTORE_ATTEMPT.*{text}"):
        attempt_from_env({"KVSTORE_ATTEMPT": text})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_a_job_inherit_no_place_of_another_launcher(launcher: str) -> None:
    kept = inherited_environment({**LAUNCHERS[launcher], "HOME": "/home/me", "SLURM_JOB_ID": "9"})
    assert not kept.keys() & LAUNCHERS[launcher].keys()
    assert (kept["HOME"], kept["SLURM_JOB_ID"]) == ("/home/me", "9")


def test_a_worker_finds_the_topology_in_the_variables_that_say_it() -> None:
    topology = Topology(1, 3, ("tcp://127.0.0.1:5000", "tcp://[::1]:5001"))
    assert read_topology_from_env(topology.as_variables(0)) == topology
    assert local_rank_from_env(topology.as_variables(0)) == 0
    assert "KVSTORE_SERVERS" not in Topology(0, 1, ()).as_variables(0)
