"""Reading the topology and time limits: arguments first, then the environment, and errors that help."""

from __future__ import annotations

import pytest

from kvstore_server.errors import ConfigurationError
from kvtrainer.env import DEFAULT_SECONDS, Topology, parse_address, read_timeout, read_topology

ENVIRON = {
    "KVSTORE_RANK": "1",
    "KVSTORE_NUM_WORKERS": "3",
    "KVSTORE_SERVERS": "tcp://10.0.0.1:5000,tcp://10.0.0.2:5000",
}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in ENVIRON.items() if key != name}


def test_topology_comes_from_the_environment() -> None:
    assert read_topology(ENVIRON) == Topology(1, 3, ("tcp://10.0.0.1:5000", "tcp://10.0.0.2:5000"))


def test_arguments_win_over_the_environment() -> None:
    topology = read_topology(ENVIRON, rank=0, num_workers=2, servers=["localhost:7000"])
    assert topology == Topology(0, 2, ("tcp://localhost:7000",))


def test_arguments_alone_are_enough() -> None:
    assert read_topology({}, rank=0, num_workers=1, servers="a:1, b:2").servers == ("tcp://a:1", "tcp://b:2")


def test_rank_zero_as_an_argument_is_not_taken_for_missing() -> None:
    assert read_topology(ENVIRON, rank=0).rank == 0


@pytest.mark.parametrize("name", sorted(ENVIRON))
@pytest.mark.parametrize("empty", [False, True])
def test_missing_variable_is_named_together_with_both_ways_to_give_it(name: str, empty: bool) -> None:
    environ = {**ENVIRON, name: " "} if empty else without(name)
    with pytest.raises(ConfigurationError, match=f"^{name} is not set") as caught:
        read_topology(environ)
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
        ("KVSTORE_SERVERS", "tcp://a:1,,tcp://b:1", "'' is not the address"),
        ("KVSTORE_SERVERS", "tcp://a:1,a:1", "servers 0 and 1 .* same address tcp://a:1"),
        ("KVSTORE_SERVERS", "tcp://A:01,tcp://a:1", "same address tcp://a:1"),
    ],
)
def test_bad_variable_is_refused_with_its_value(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_topology({**ENVIRON, name: value})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [True, 1.0, [1]])
def test_rank_of_a_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number"):
        read_topology(ENVIRON, rank=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ([1], "^1 is not the address of a server"),
        (["a:1", None], "^None is not the address"),
        (b"a:1", "^97 is not the address"),
        (5, r"servers \(KVSTORE_SERVERS\) is 5; it must be a list"),
        ({"a:1": 0}, r"is \{'a:1': 0\}; it must be a list"),
    ],
)
def test_servers_of_a_wrong_type_are_refused(servers: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_topology(ENVIRON, servers=servers)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["KVSTORE_RANK", "KVSTORE_NUM_WORKERS"])
def test_number_too_long_to_be_meant_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is '9999.*must be a whole number"):
        read_topology({**ENVIRON, name: "9" * 5000})


def test_empty_list_of_servers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"list of servers .* is empty"):
        read_topology(ENVIRON, servers=[])


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
        "",
        "host",
        "host:",
        ":5555",
        "host:0",
        "host:65536",
        "host:http",
        "ipc:///tmp/x",
        "udp://a:1",
        "tcp://*:5555",
        "tcp://a:1/path",
        "tcp://a b:1",
        "::1:5555",
        "tcp://a:1\ntcp://b:1",
    ],
)
def test_malformed_address_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_timeout_is_the_argument_then_the_variable_then_the_default() -> None:
    environ = {"KVSTORE_TIMEOUT": "12.5"}
    assert read_timeout(environ, "KVSTORE_TIMEOUT", value=3) == 3.0
    assert read_timeout(environ, "KVSTORE_TIMEOUT", 7.0) == 12.5
    assert read_timeout({}, "KVSTORE_TIMEOUT", 7.0) == 7.0
    assert read_timeout({"KVSTORE_TIMEOUT": ""}, "KVSTORE_TIMEOUT") == 600.0


def test_documented_defaults_of_the_time_limits() -> None:
    assert DEFAULT_SECONDS == {
        "KVSTORE_TIMEOUT": 600.0,
        "KVSTORE_CONNECT_TIMEOUT": 30.0,
        "KVSTORE_DEAD_AFTER": 20.0,
        "KVSTORE_SLOW_AFTER": 10.0,
    }


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_bad_timeout_is_refused_with_name_and_value(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"KVSTORE_DEAD_AFTER is '{text}'"):
        read_timeout({"KVSTORE_DEAD_AFTER": text}, "KVSTORE_DEAD_AFTER")
