"""Files of keys: what is made, what is refused, and who may do what."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_server import keygen
from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import (
    CLIENTS,
    KEY_NAME,
    KEYS,
    LIMITS,
    SERVER_PUBLIC,
    SERVER_SECRET,
    ClientLimits,
    ClientTable,
    KeyHolder,
    Role,
    client_keys_from_env,
    make_keys,
    read_client_keys,
    read_clients,
    read_server_keys,
    rotate_server_key,
    today,
)

WORKER, ADMIN = KeyHolder("worker", b"", Role.WORKER), KeyHolder("admin", b"", Role.ADMIN)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder, [WORKER, ADMIN])
    return folder


def test_made_keys_are_those_that_are_read(made: Path) -> None:
    server, worker = read_server_keys(str(made)), read_client_keys(str(made))
    assert worker.servers == (server.pair.public,)
    assert worker.name == "worker"
    clients = server.clients()
    assert clients[worker.pair.public].role is Role.WORKER
    assert {one.name for one in clients.values()} == {"worker", "admin"}
    assert (
        len({server.pair.secret, worker.pair.secret, read_client_keys(str(made), "admin").pair.secret}) == 3
    )


def test_only_the_user_can_read_secrets(made: Path) -> None:
    assert made.stat().st_mode & 0o777 == 0o700
    for path in made.iterdir():
        assert path.stat().st_mode & 0o777 == (0o600 if path.suffix in (".secret", ".token") else 0o644)


def test_keys_that_are_there_stay_and_new_clients_are_added(made: Path) -> None:
    before = {path.name: path.read_text() for path in made.glob("*.secret")}
    limited = KeyHolder("alice", b"", Role.WORKER, ("job-*", "test"), frozenset({0, 3}))
    assert make_keys(made, [WORKER, limited]) == ["alice"]
    assert {path.name: path.read_text() for path in made.glob("*.secret") if path.stem != "alice"} == before
    found = {one.name: one for one in read_clients(made).values()}["alice"]
    assert (found.role, found.namespaces, found.ranks) == (Role.WORKER, ("job-*", "test"), frozenset({0, 3}))
    assert [found.may_join(name) for name in ("job-7/trainer1", "test", "other", "tests")] == [
        True,
        True,
        False,
        False,
    ]


def test_limits_are_kept_with_a_client(made: Path) -> None:
    limited = KeyHolder("alice", b"", Role.WORKER, limits=ClientLimits(sessions=4, time=0.5))
    make_keys(made, [limited])
    make_keys(made, [KeyHolder("bob", b"", Role.WORKER)])
    found = {one.name: one.limits for one in read_clients(made).values()}
    assert found.pop("alice") == limited.limits
    assert found == dict.fromkeys(["worker", "admin", "bob"], ClientLimits())


@pytest.mark.parametrize("name", ["", "server", "../a", ".a", "a b", "a" * 65, "é"])
def test_a_name_that_could_be_another_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        make_keys(tmp_path / "keys", [KeyHolder(name, b"", Role.WORKER)])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(("name", "mode"), [(SERVER_SECRET, 0o640), (SERVER_SECRET, 0o604), ("worker.secret", 0o660),
                                            (CLIENTS, 0o666), (SERVER_PUBLIC, 0o664)])  # fmt: skip
def test_a_file_that_others_could_read_or_replace_is_refused_by_name(
    made: Path, name: str, mode: int
) -> None:
    (made / name).chmod(mode)
    read: Callable[[str], object] = (
        read_client_keys if name in ("worker.secret", SERVER_PUBLIC) else read_server_keys
    )
    with pytest.raises(ConfigurationError, match=f"{name}.*{mode:04o}.*chmod 600"):
        read(str(made))


def test_a_directory_that_others_could_write_to_is_refused(made: Path) -> None:
    made.chmod(0o770)
    for read in (read_server_keys, read_client_keys):
        with pytest.raises(ConfigurationError, match=r"0770.*chmod 700"):
            read(str(made))
    made.chmod(0o1777)  # as Kubernetes mounts secrets: nobody can replace a file of root
    if os.geteuid() == 0:
        assert read_client_keys(str(made)).name == "worker"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_file_of_somebody_else_is_refused(made: Path) -> None:
    os.chown(made / "worker.secret", 65534, 65534)
    with pytest.raises(ConfigurationError, match="owner 65534"):
        read_client_keys(str(made))


@pytest.mark.parametrize(
    "text", ["", "a b", "x" * 40, "\N{SNOWMAN}", f"{'0' * 40}\n{'1' * 40}\n", "0" * (5 << 20)]
)
def test_something_else_than_keys_is_refused_by_the_name_of_its_file(made: Path, text: str) -> None:
    (made / SERVER_SECRET).write_text(text)
    (made / SERVER_SECRET).chmod(0o600)
    with pytest.raises(ConfigurationError, match=SERVER_SECRET):
        read_server_keys(str(made))


GOOD = {"name": "a", "public": "0" * 40, "role": "worker"}


@pytest.mark.parametrize(
    "listed",
    [{}, [1], [{}], [{**GOOD, "role": "king"}], [{**GOOD, "public": "0" * 39}], [{**GOOD, "more": 1}], [GOOD, GOOD],
     [{**GOOD, "ranks": [True]}], [{**GOOD, "ranks": "0-3"}], [{**GOOD, "namespaces": "*"}], [{**GOOD, "name": "../a"}],
     [{**GOOD, "name": 3}], [{**GOOD, "role": None}], [{**GOOD, "limits": 5}], [{**GOOD, "limits": {"speed": 5}}],
     [{**GOOD, "limits": {"bytes": 0}}], [{**GOOD, "limits": {"bytes": True}}], [{**GOOD, "limits": {"bytes": "5"}}],
     [{**GOOD, "limits": {"bytes": 1e999}}], [{**GOOD, "limits": {"bytes": 10**400}}],
     [{**GOOD, "expires": 5}], [{**GOOD, "expires": "2027-02-30"}]],
)  # fmt: skip
def test_a_list_of_clients_that_is_none_is_refused(made: Path, listed: object) -> None:
    (made / CLIENTS).write_text(json.dumps(listed))
    with pytest.raises(ConfigurationError, match=CLIENTS):
        read_clients(made)


def test_a_missing_directory_file_or_name_says_what_to_do(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="directory of keys"):
        read_client_keys(str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="keygen"):
        read_client_keys(str(made), "bob")
    for name in ("worker", "admin"):
        (made / f"{name}.secret").rename(made / f"{name}-2.secret")
    with pytest.raises(ConfigurationError, match=f"admin-2, worker-2.*{KEY_NAME}"):
        read_client_keys(str(made))


def test_the_environment_says_which_key_to_use(made: Path) -> None:
    assert client_keys_from_env({}) is None
    assert client_keys_from_env({KEYS: "off"}) is None
    for environ, name in (({KEYS: str(made)}, "worker"), ({KEYS: str(made), KEY_NAME: "admin"}, "admin")):
        found = client_keys_from_env(environ)
        assert found is not None
        assert found.name == name
        assert found.pair.secret.decode() not in repr(found)


def test_a_server_key_is_replaced_in_two_steps_between_which_clients_know_both(made: Path) -> None:
    old = read_server_keys(str(made)).pair
    assert rotate_server_key(made)
    between = read_client_keys(str(made)).servers
    assert between[0] == old.public == read_server_keys(str(made)).pair.public
    assert len(between) == 2
    assert not rotate_server_key(made)
    assert read_server_keys(str(made)).pair.public == between[1]
    assert (
        read_client_keys(str(made)).servers == between[::-1]
    )  # for servers that are yet to be started again
    assert rotate_server_key(made)
    assert read_client_keys(str(made)).servers[0] == between[1]
    assert between[0] not in read_client_keys(str(made)).servers


def test_a_running_server_takes_clients_that_are_added_and_keeps_those_it_has_if_the_file_is_damaged(
    made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = ClientTable(read_server_keys(str(made)))

    def names() -> set[str]:
        return {one.name for one in table.by_key.values()}

    assert names() == {"worker", "admin"}
    make_keys(made, [KeyHolder("alice", b"", Role.OBSERVER)])
    table.refresh()
    assert names() == {"worker", "admin", "alice"}
    (made / CLIENTS).write_text("damaged")
    table.refresh()
    assert names() == {"worker", "admin", "alice"}
    assert CLIENTS in caplog.text


def test_keygen_makes_the_three_roles_and_named_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert keygen.main([str(folder)]) == 0
    assert {one.name: one.role for one in read_clients(folder).values()} == {one.value: one for one in Role}
    assert keygen.main([str(folder), "--client", "bob:observer", "--client", "eve:worker:a*,b:0-2,5"]) == 0
    clients = {one.name: one for one in read_clients(folder).values()}
    assert clients["bob"].role is Role.OBSERVER
    assert (clients["eve"].namespaces, clients["eve"].ranks) == (("a*", "b"), frozenset({0, 1, 2, 5}))
    assert keygen.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("already")
    secrets = [word for path in folder.glob("*.secret") for word in path.read_text().split()[1:]]
    assert not any(secret in capsys.readouterr().out for secret in secrets)


@pytest.mark.parametrize(
    "client", ["a:king", "a:worker:x:b", "a:worker:x:3-1", "a:worker:x:-1", "a:worker:x:0-70000"]
)
def test_keygen_refuses_a_client_that_is_none(client: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        keygen.main([str(tmp_path / "keys"), "--client", client])
    assert caught.value.code == 2
    assert not (tmp_path / "keys").exists()


def test_keygen_limits_the_clients_that_it_makes(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert keygen.main([str(folder)]) == 0
    assert (
        keygen.main([str(folder), "--client", "bob", "--limit", "memory=1e9", "--limit", "sessions=3"]) == 0
    )
    found = {one.name: one.limits for one in read_clients(folder).values()}
    assert found["bob"] == ClientLimits(memory=1e9, sessions=3)
    assert found["worker"] == ClientLimits()


@pytest.mark.parametrize(
    "limit", ["", "speed=3", "memory", "memory=", "memory=0", "memory=-1", "memory=inf", "time=x"]
)
def test_keygen_refuses_a_limit_that_is_none(limit: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        keygen.main([str(tmp_path / "keys"), "--limit", limit])
    assert caught.value.code == 2
    assert not (tmp_path / "keys").exists()


def test_an_expired_key_is_refused_by_name_and_servers_forget_it(made: Path) -> None:
    yesterday, tomorrow = today() - timedelta(days=1), today() + timedelta(days=1)
    for name, day in [("old", yesterday), ("now", today()), ("new", tomorrow)]:
        assert keygen.main([str(made), "--client", name, "--expires", day.isoformat()]) == 0
    for name in ("old", "now"):
        with pytest.raises(ConfigurationError, match=rf"{name}\.secret.*keygen"):
            read_client_keys(str(made), name)
    assert read_client_keys(str(made), "new").name == "new"
    days = [today()]
    table = ClientTable(read_server_keys(str(made)), lambda: days[-1])
    assert {one.name for one in table.by_key.values()} == {"worker", "admin", "new"}
    days.append(tomorrow)
    table.refresh()
    assert {one.name for one in table.by_key.values()} == {"worker", "admin"}


@pytest.mark.parametrize("day", ["", "tomorrow", "2027-13-01", "20270301", "2027-W01-1"])
def test_keygen_refuses_a_day_that_is_none(day: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        keygen.main([str(tmp_path / "keys"), "--expires", day])
    assert caught.value.code == 2


# Whatever a file has, it is keys or a ConfigurationError, and nothing is executed or runs out of memory.

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
CLIENT_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "name": st.text(max_size=20) | JSON_VALUES,
        "public": st.text(max_size=45) | JSON_VALUES,
        "role": st.sampled_from(["worker", "observer", "admin"]) | JSON_VALUES,
        "namespaces": st.lists(st.text(max_size=10)) | JSON_VALUES,
        "ranks": st.lists(st.integers()) | JSON_VALUES,
        "limits": st.dictionaries(st.sampled_from(LIMITS), st.floats() | st.integers()) | JSON_VALUES,
        "expires": st.dates().map(str) | JSON_VALUES,
        "more": JSON_VALUES,
    },
)


@given(
    data=st.binary(max_size=200),
    name=st.sampled_from([SERVER_SECRET, SERVER_PUBLIC, "worker.secret", CLIENTS]),
)
def test_any_bytes_are_keys_or_a_typed_error(data: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as top:
        made = Path(top) / "keys"
        make_keys(made, [WORKER])
        (made / name).write_bytes(data)
        for read in (read_server_keys, read_client_keys):
            with suppress(ConfigurationError):
                read(str(made))


@given(listed=st.lists(CLIENT_VALUES, max_size=3) | JSON_VALUES)
def test_any_list_of_clients_is_one_or_a_typed_error(listed: object) -> None:
    with tempfile.TemporaryDirectory() as top:
        path = Path(top) / CLIENTS
        path.write_text(json.dumps(listed))
        with suppress(ConfigurationError):
            found = read_clients(Path(top))
            assert len({one.name for one in found.values()}) == len(found)


@given(text=st.text(max_size=60))
def test_any_description_of_a_client_is_one_or_refused(text: str) -> None:
    with suppress(argparse.ArgumentTypeError):
        assert isinstance(keygen._parse_client(text), KeyHolder)
