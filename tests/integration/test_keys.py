"""Servers with keys: who gets in, who may do what, and what the others are told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import kvtrainer
from kvstore_server.keys import (
    CLIENTS,
    KEYS,
    SERVER_PUBLIC,
    ClientLimits,
    KeyHolder,
    Role,
    make_keys,
    read_client_keys,
    read_server_keys,
    rotate_server_key,
)
from kvstore_server.probe import probe_servers, read_probe_keys
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames
from kvstore_server.server import ServerOptions, make_server
from kvstore_server.transport import tcp
from kvstore_server.transport.tcp import Admission, secure_client_socket
from kvtrainer.errors import AccessDeniedError, ConfigurationError, ConnectTimeoutError
from kvtrainer.kvstore import DistKVStore
from tests.support.one_in import one_in
from tests.support.processes import (
    LIMIT,
    Members,
    Process,
    Processes,
    config_of_server,
    eventually,
    new_name,
    serving,
    together,
)
from tests.support.reachable import resident_bytes

NAMES = {
    "worker": KeyHolder("worker", b"", Role.WORKER),
    "observer": KeyHolder("observer", b"", Role.OBSERVER),
    "admin": KeyHolder("admin", b"", Role.ADMIN),
    "alice": KeyHolder("alice", b"", Role.WORKER, ("job-*",), frozenset({0})),
    "few": KeyHolder("few", b"", Role.WORKER, limits=ClientLimits(sessions=2, namespaces=1, memory=1 << 20)),
    "slow": KeyHolder("slow", b"", Role.WORKER, limits=ClientLimits(requests=40)),
    "narrow": KeyHolder("narrow", b"", Role.WORKER, limits=ClientLimits(bytes=1 << 20)),
    "curious": KeyHolder("curious", b"", Role.OBSERVER, limits=ClientLimits(requests=40)),
    "lonely": KeyHolder("lonely", b"", Role.OBSERVER, limits=ClientLimits(connections=1)),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's directory, and beside it one for each client."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "server", NAMES.values())
    for name in NAMES:
        copy_client(folder, name)
    return folder


def copy_client(folder: Path, name: str) -> str:
    own = folder / name
    own.mkdir(mode=0o700, exist_ok=True)
    for file in (SERVER_PUBLIC, f"{name}.secret"):
        shutil.copy(folder / "server" / file, own / file)
    return str(own)


@pytest.fixture(scope="module")
def two_servers(keys: Path) -> Iterator[list[Process]]:
    with Processes() as started:
        yield started.servers(2, "--keys", str(keys / "server"), "--spread-from", "1")


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", request.param)


def train(store: DistKVStore, rank: int) -> list[float]:
    weight = torch.nn.Parameter(torch.arange(4000.0))
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store) as trainer:
        for _ in range(3):
            weight.grad = torch.full_like(weight, rank + 1.0)
            trainer.step(1)
    return weight.tolist()


@pytest.mark.usefixtures("way")
def test_workers_with_a_key_train_as_without(two_servers: list[Process], keys: Path) -> None:
    with Members() as members:
        name = new_name()
        stores = [members.join(two_servers, rank, 2, name, keys=str(keys / "worker")) for rank in range(2)]
        found = together(*[lambda s=s, r=r: train(s, r) for r, s in enumerate(stores)])
    assert found == [(torch.arange(4000.0) - 9.0).tolist()] * 2


def refused(
    two_servers: list[Process], rank: int = 0, namespace: str = "", num_workers: int = 2, **options: str
) -> str:
    """Why a worker is refused; within a moment, not at the end of its time."""
    addresses = [one.address for one in two_servers]
    began = time.monotonic()
    with pytest.raises(AccessDeniedError) as caught:
        DistKVStore(
            rank=rank,
            num_workers=num_workers,
            servers=addresses,
            namespace=namespace or new_name(),
            connect_timeout=LIMIT,
            **options,
        )
    assert time.monotonic() - began < LIMIT / 2
    return str(caught.value)


def test_who_has_no_key_or_an_unknown_one_is_refused_at_once(
    two_servers: list[Process], keys: Path, tmp_path: Path
) -> None:
    assert KEYS in refused(two_servers)
    assert KEYS in refused(two_servers, keys="off")
    make_keys(tmp_path / "server", NAMES.values())
    shutil.copy(keys / "server" / SERVER_PUBLIC, tmp_path / "server" / SERVER_PUBLIC)
    assert "'worker'" in refused(two_servers, keys=copy_client(tmp_path, "worker"))


def test_a_key_is_for_its_role_namespaces_and_ranks(two_servers: list[Process], keys: Path) -> None:
    assert "observer" in refused(two_servers, keys=str(keys / "observer"))
    assert "other" in refused(two_servers, keys=str(keys / "alice"), namespace="other")
    assert "rank 1" in refused(two_servers, rank=1, keys=str(keys / "alice"), namespace="job-5")
    with Members() as members:
        members.join(two_servers, 0, 1, "job-5", keys=str(keys / "alice"))


def test_a_worker_may_not_send_commands_and_an_admin_may(two_servers: list[Process], keys: Path) -> None:
    with Members() as members:
        worker = members.join(two_servers, 0, 1, new_name(), keys=str(keys / "worker"))
        with pytest.raises(AccessDeniedError):
            worker.send_command_to_servers(7, "")
        worker.init("k", torch.zeros(3))
        worker.push("k", torch.ones(3))
        with pytest.raises(AccessDeniedError):
            worker.save("tag")
        admin = members.join(two_servers, 0, 1, new_name(), keys=str(keys / "admin"))
        with pytest.raises(
            kvtrainer.errors.CommandError
        ):  # it is allowed, but nothing answers such a command
            admin.send_command_to_servers(7, "")


def test_a_worker_that_wants_servers_with_keys_does_not_talk_to_others(keys: Path) -> None:
    with Processes() as started:
        servers = started.servers(1)
        assert "--keys" in refused(servers, keys=str(keys / "worker"))


def test_a_server_with_another_key_than_expected_gets_nothing(
    two_servers: list[Process], keys: Path, tmp_path: Path
) -> None:
    make_keys(tmp_path / "server", NAMES.values())
    shutil.copy(keys / "server" / "worker.secret", tmp_path / "server" / "worker.secret")
    with pytest.raises(ConnectTimeoutError, match=SERVER_PUBLIC):
        DistKVStore(
            rank=0,
            num_workers=1,
            servers=[one.address for one in two_servers],
            connect_timeout=1.0,
            keys=copy_client(tmp_path, "worker"),
        )


def test_an_observer_sees_the_status_and_how_many_were_refused(
    two_servers: list[Process], keys: Path
) -> None:
    addresses = [one.address for one in two_servers]
    own = read_probe_keys({KEYS: str(keys / "observer")})
    [before, _] = probe_servers(addresses, LIMIT, own)
    assert before is not None
    assert before["is_authenticated"]
    assert probe_servers(addresses, 0.5) == [None, None]
    refused(two_servers, keys=str(keys / "observer"))
    [after, _] = probe_servers(addresses, LIMIT, own)
    assert after is not None
    assert after["refused"] > before["refused"]


def test_a_client_that_is_listed_later_gets_in_and_one_that_is_removed_is_out(
    keys: Path, tmp_path: Path
) -> None:
    shutil.copytree(keys / "server", tmp_path / "server")
    with Processes() as started, Members() as members:
        servers = started.servers(1, "--keys", str(tmp_path / "server"))
        make_keys(tmp_path / "server", [KeyHolder("bob", b"", Role.WORKER)])
        own = copy_client(tmp_path, "bob")

        def is_in() -> bool:
            try:
                members.join(servers, 0, 1, new_name(), keys=own)
            except AccessDeniedError:
                return False
            return True

        assert eventually(is_in)
        (tmp_path / "server" / CLIENTS).write_text("[]")
        assert eventually(lambda: not is_in())


def test_a_job_goes_on_while_the_key_of_its_server_is_replaced(keys: Path, tmp_path: Path) -> None:
    shutil.copytree(keys / "server", tmp_path / "server")
    assert rotate_server_key(tmp_path / "server")  # from now on clients know both keys
    own = copy_client(tmp_path, "worker")
    with Processes() as started, Members() as members:
        [server] = started.servers(1, "--keys", str(tmp_path / "server"), "--supervise")
        store = members.join([server], 0, 1, new_name(), keys=own)
        store.init("k", torch.zeros(1000))
        assert not rotate_server_key(tmp_path / "server")
        child = next(pid for pid in children_of(server.pid))
        os.kill(child, 9)
        out = torch.ones(1000)
        store.push("k", torch.full((1000,), 3.0))
        store.pull("k", out=out)
        assert torch.equal(out, torch.full((1000,), 3.0))
        assert store._clients[-1]._session.num_reconnects == 1


def test_a_worker_that_knows_both_keys_finds_the_one_of_the_server_for_its_heartbeats_too(
    keys: Path, tmp_path: Path
) -> None:
    shutil.copytree(keys / "server", tmp_path / "server")
    assert rotate_server_key(tmp_path / "server")
    own = copy_client(tmp_path, "worker")
    assert not rotate_server_key(tmp_path / "server")
    with Processes() as started, Members() as members:
        store = members.join(
            started.servers(1, "--keys", str(tmp_path / "server")), 0, 1, new_name(), keys=own
        )
        session = store._client._session
        assert eventually(lambda: session.transport.last_heartbeat(0) > 0)


def test_a_key_that_was_replaced_under_its_name_is_out_also_where_it_has_connected_before(
    keys: Path, tmp_path: Path
) -> None:
    shutil.copytree(keys / "server", tmp_path / "server")
    with Processes() as started, Members() as members:
        servers = started.servers(1, "--keys", str(tmp_path / "server"))
        store = members.join(servers, 0, 1, new_name(), keys=copy_client(tmp_path, "worker"))
        store.init("k", torch.zeros(3))
        (tmp_path / "server" / CLIENTS).write_text("[]")
        (tmp_path / "server" / "worker.secret").unlink()
        make_keys(tmp_path / "server", [NAMES["worker"]])

        def is_out() -> bool:
            try:
                store.pull("k", out=torch.zeros(3))
            except AccessDeniedError:
                return True
            return False

        assert eventually(is_out)
        copy_client(tmp_path, "worker")
        members.join(servers, 0, 1, new_name(), keys=str(tmp_path / "worker"))


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("damage", ["lax", "missing", "no clients"])
def test_a_server_whose_keys_cannot_be_used_does_not_start(damage: str, keys: Path, tmp_path: Path) -> None:
    shutil.copytree(keys / "server", tmp_path / "server")
    if damage == "lax":
        (tmp_path / "server" / "server.secret").chmod(0o644)
    else:
        (tmp_path / "server" / ("server.secret" if damage == "missing" else CLIENTS)).unlink()
    command = [sys.executable, "-m", "kvstore_server", "--keys", str(tmp_path / "server")]
    with Processes() as started:
        code, err = started.start(command).end()
    assert code == 1
    assert str(tmp_path / "server") in err


@pytest.mark.parametrize("fault", ["a handler that accepts all", "no handler"])
def test_a_server_that_would_accept_an_unknown_key_does_not_start(
    fault: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no handler":
        # Without an answer libzmq accepts everybody, unless it is told otherwise.
        monkeypatch.setattr(tcp, "_ZAP", f"inproc://{new_name()}")
        monkeypatch.setattr("kvstore_server.server.secure_server_socket", _secure_without_domain)
    else:
        monkeypatch.setattr(Admission, "_key_of", lambda _self, _question: next(iter(_self._clients())))
    options = ServerOptions(keys=read_server_keys(str(keys / "server")))
    with pytest.raises(ConfigurationError, match="accepts any key"):
        make_server(config_of_server(), options)


def _secure_without_domain(socket: Any, pair: Any) -> None:
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = pair


def test_nobody_gets_in_while_the_handler_of_keys_does_not_answer(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(config_of_server(), ServerOptions(keys=read_server_keys(str(keys / "server"))))
    monkeypatch.setattr(Admission, "receive", lambda _self: None)
    with serving(server), pytest.raises(ConnectTimeoutError):
        DistKVStore(
            rank=0,
            num_workers=1,
            servers=[server.endpoint],
            namespace=new_name(),
            keys=str(keys / "worker"),
            connect_timeout=1.0,
        )


# Limits of one client.


def test_a_client_has_the_sessions_namespaces_and_memory_that_its_key_allows(
    two_servers: list[Process], keys: Path
) -> None:
    own, name = str(keys / "few"), new_name()
    with Members() as members:
        first = members.join(two_servers, 0, 3, name, keys=own)
        assert "namespaces" in refused(two_servers, keys=own)
        members.join(two_servers, 1, 3, name, keys=own)
        assert "sessions" in refused(two_servers, 2, name, 3, keys=own)
        with pytest.raises(ConfigurationError, match="'few'"):
            first.init("large", torch.zeros(1 << 20))
        members.join(two_servers, 0, 1, new_name(), keys=str(keys / "worker")).init("k", torch.zeros(1 << 20))
    with Members() as members:  # what was left is free again
        alone = members.join(two_servers, 0, 1, new_name(), keys=own)
        alone.init("small", torch.zeros(1000))


def push_often(store: DistKVStore, count: int, length: int) -> None:
    store.init("k", torch.zeros(length))
    for _ in range(count):
        store.push("k", torch.ones(length))
    out = torch.zeros(length)
    store.pull("k", out=out)
    assert torch.equal(out, torch.full((length,), 1.0))


BEYOND = {"slow": (10, 100), "narrow": (1 << 16, 10)}
"""Client → the length and the number of its pushes."""


@pytest.mark.parametrize(("way", "name"), one_in(2, ["auto", "tcp"], BEYOND), indirect=["way"])
def test_a_client_beyond_its_rate_is_slowed_and_another_one_is_not(way: None, keys: Path, name: str) -> None:
    length, count = BEYOND[name]
    with Processes() as started, Members() as members:
        [server] = started.servers(1, "--keys", str(keys / "server"))
        greedy = members.join([server], 0, 1, new_name(), keys=str(keys / name))
        other = members.join([server], 0, 1, new_name(), keys=str(keys / "worker"))
        times: dict[str, float] = {}

        def push(key: str, store: DistKVStore) -> None:
            began = time.monotonic()
            push_often(store, count, length)
            times[key] = time.monotonic() - began

        together(lambda: push("greedy", greedy), lambda: push("other", other))
        # What a second allows at once, and one message more, take no time; the rest does.
        assert times["greedy"] >= 1.2


def test_a_client_has_the_connections_that_its_key_allows(two_servers: list[Process], keys: Path) -> None:
    own = read_probe_keys({KEYS: str(keys / "lonely")})
    addresses = [one.address for one in two_servers]
    assert None not in probe_servers(addresses, LIMIT, own)
    with zmq.Context() as context:
        held = context.socket(zmq.DEALER)
        held.setsockopt(zmq.LINGER, 0)
        secure_client_socket(held, read_client_keys(str(keys / "lonely")))
        held.connect(addresses[0])
        held.send_multipart([bytes(one) for one in encode_frames(m.Request(0, 0, 1, m.GetStatus()))])
        assert held.poll(1000 * LIMIT)
        assert probe_servers(addresses, 1.0, own)[0] is None
        held.close()
        assert None not in probe_servers(addresses, LIMIT, own)


def test_an_observer_beyond_its_rate_is_slowed_and_not_refused(keys: Path) -> None:
    with Processes() as started, zmq.Context() as context:
        [server] = started.servers(1, "--keys", str(keys / "server"))
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        secure_client_socket(peer, read_client_keys(str(keys / "curious")))
        peer.connect(server.address)
        for number in range(60):
            peer.send_multipart([bytes(one) for one in encode_frames(m.Request(0, 0, number, m.GetStatus()))])
        answers = []
        for _ in range(60):
            assert peer.poll(1000 * LIMIT)
            answers.append(decode_frames([bytearray(one) for one in peer.recv_multipart()]))
        peer.close()
    assert [answer[2] for answer in answers] == list(range(60))
    assert {type(answer[-1]) for answer in answers} == {m.Status}


# The default: a job that kvlaunch or a local cluster starts is closed to other users.

INTRUDER = """
import os, sys
sys.path.insert(0, sys.argv[2])
import torch
from kvstore_server.probe import probe_servers
from kvtrainer.errors import KVStoreError
from kvtrainer.kvstore import DistKVStore
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # not before: the interpreter may lie where only root reads
assert probe_servers([sys.argv[1]], 1.0) == [None]
for transport in ("auto", "tcp", "shm"):
    os.environ["KVSTORE_TRANSPORT"] = transport
    try:
        DistKVStore(rank=0, num_workers=2, servers=[sys.argv[1]], namespace=sys.argv[3], connect_timeout=5.0)
    except KVStoreError as error:
        print(type(error).__name__)
    else:
        print("in")
for name in os.listdir("/dev/shm"):
    if name.startswith("kvtrainer-keys-"):
        try:
            print(os.listdir(f"/dev/shm/{name}"))
        except PermissionError:
            print("closed")
"""


def look_from_outside(address: str) -> list[str]:
    """What another user of this host achieves against a server of a local cluster."""
    command = [sys.executable, "-c", INTRUDER, address, str(Path(kvtrainer.__file__).parents[1]), "store0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    # HOME and caches of root are closed to it.
    found = subprocess.run(
        command, env={**environ, "HOME": "/tmp"}, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def train_while_somebody_looks(place: str) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(3000))
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync") as trainer:
        for step in range(4):
            if step == 2 and trainer.rank == 0:
                Path(place, "found").write_text(" ".join(look_from_outside(os.environ["KVSTORE_SERVERS"])))
            weight.grad = torch.ones_like(weight)
            trainer.step()
    return [weight.min().item(), weight.max().item()]


@pytest.mark.usefixtures("forked_cluster")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_host_gets_no_answer_from_a_default_job(tmp_path: Path) -> None:
    with kvtrainer.local_cluster(2) as cluster:
        directory = cluster.keys
        assert cluster.run(train_while_somebody_looks, str(tmp_path)) == [[-4.0, -4.0]] * 2
    found = (tmp_path / "found").read_text().split()
    assert set(found[:3]) <= {"AccessDeniedError", "ConnectTimeoutError"}  # by TCP, shared memory and either
    assert set(found[3:]) <= {"closed"}
    assert not Path(directory).exists()


@pytest.mark.usefixtures("forked_cluster")
def test_a_cluster_tells_its_keys_for_a_store_beside_it() -> None:
    with kvtrainer.local_cluster(1) as cluster:
        with pytest.raises(AccessDeniedError):
            DistKVStore(rank=0, num_workers=1, servers=cluster.servers)
        DistKVStore(rank=0, num_workers=1, servers=cluster.servers, keys=cluster.keys).close()


def test_thirty_two_attackers_change_nothing_and_use_up_nothing(keys: Path) -> None:
    steps, before = 60, 0
    with Processes() as started, Members() as members:
        [server] = started.servers(1, "--keys", str(keys / "server"), "--log", "error")
        stores = [members.join([server], rank, 2, "job", keys=str(keys / "worker")) for rank in range(2)]
        [stolen] = stores[0]._client._session.transport.sockets(0)[1:2]
        weights = [torch.nn.Parameter(torch.zeros(5000)) for _ in stores]
        trainers = [
            kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
            for weight, store in zip(weights, stores, strict=True)
        ]

        def train_for(rank: int, count: int) -> None:
            for _ in range(count):
                weights[rank].grad = torch.full((5000,), rank + 1.0)
                trainers[rank].step(1)

        def all_train(count: int) -> None:
            for one in together(*[lambda r=r: train_for(r, count) for r in range(2)]):
                if isinstance(one, BaseException):
                    raise one

        all_train(10)
        before = resident_bytes(server.pid)
        arguments = [server.address, str(keys), stolen.hex()]
        attackers = started.start([sys.executable, "-m", "tests.support.attackers", *arguments])
        assert attackers.line() == "32"
        all_train(steps)
        observer = read_probe_keys({KEYS: str(keys / "observer")})

        def has_refused_many() -> bool:
            [facts] = probe_servers([server.address], LIMIT, observer)
            return facts is not None and facts["refused"] > 32

        assert eventually(has_refused_many)
        grown = resident_bytes(server.pid) - before
        assert attackers.popen.stdin is not None
        attackers.popen.stdin.close()
        assert attackers.end()[0] == 0
        for weight in weights:
            assert torch.equal(weight.detach(), torch.full((5000,), -3.0 * (10 + steps)))
        assert grown < 64 << 20
        for trainer in trainers:
            trainer.close()


# Connections that never say hello, without keys.


def raw_connection(address: str) -> socket.socket:
    """A connection on which the peer has said all that ZeroMQ wants before the first message, and nothing more."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    end = socket.create_connection((host, int(port)))
    end.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    end.sendall(b"\x04" + bytes([len(ready)]) + ready)
    end.settimeout(LIMIT)
    assert end.recv(64)
    return end


def test_a_peer_that_speaks_an_old_version_of_zmtp_is_refused_like_any_other() -> None:
    with Processes() as started, Members() as members:
        [server] = started.servers(1)
        host, _, port = server.address.rpartition("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), LIMIT) as old:
            old.sendall(b"\x01\x00" + b"\x02\x00x")  # ZMTP 1.0: no identity, and a message of one byte
            assert eventually(lambda: "refused a message" in server.stderr())
        store = members.join([server], 0, 1, new_name())
        store.init("k", torch.zeros(10))


def is_ended(end: socket.socket) -> bool:
    end.settimeout(0.0)
    try:
        while end.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_a_message_of_endless_frames_ends_its_connection_and_not_the_memory() -> None:
    with Processes() as started, Members() as members:
        [server] = started.servers(1)
        store = members.join([server], 0, 1, new_name())
        store.init("k", torch.zeros(10))
        before = resident_bytes(server.pid)
        end = raw_connection(server.address)
        stop = threading.Event()

        def flood() -> None:
            frames = b"\x01\x01x" * 20_000  # each is one byte, and more follow
            try:
                while not stop.is_set():
                    end.sendall(frames)
            except OSError:
                return

        sender = threading.Thread(target=flood)
        sender.start()
        try:
            assert eventually(lambda: not sender.is_alive())
        finally:
            stop.set()
            end.close()
            sender.join()
        store.push("k", torch.ones(10))
        assert resident_bytes(server.pid) - before < 128 << 20
        assert eventually(lambda: "no whole message" in server.stderr())


IMPATIENT = """
from kvstore_server.cli import run_server_cli
from kvstore_server.transport import connections
connections.HELLO_TIME = 3.0
run_server_cli()
"""


def test_silent_connections_are_ended_and_a_worker_gets_in_meanwhile() -> None:
    with Processes() as started, Members() as members, ExitStack() as stack:
        flags = ["--dead-after", str(LIMIT), "--log", "info"]
        server = started.start([sys.executable, "-c", IMPATIENT, *flags])
        silent = [stack.enter_context(raw_connection(server.address)) for _ in range(300)]
        store = members.join([server], 0, 1, new_name())
        assert eventually(lambda: all(map(is_ended, silent)))
        store.init("k", torch.zeros(10))
        assert eventually(lambda: "silent" in server.stderr())
