"""Hostile input in large numbers: nothing crashes or hangs, and what is refused is refused with a typed error.

    python -m tests.support.fuzzing [CASES [SEED]]

`make fuzz` runs it. The cases are divided among `KINDS`; each is drawn from a generator seeded with (SEED, kind).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ConfigurationError, FencedError, ProtocolError
from kvstore_server.keys import (
    CLIENTS,
    SERVER_PUBLIC,
    SERVER_SECRET,
    TOKEN,
    KeyHolder,
    Role,
    make_keys,
    read_client_keys,
    read_server_keys,
    read_token,
)
from kvstore_server.optimizer import checked_optimizer_spec, create
from kvstore_server.optimizer.state import pack_states
from kvstore_server.plan import HashTableOptions, Plan, hash_table_spec, make_plan, tensor_spec_from
from kvstore_server.probe import probe_servers, read_probe_keys
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames, pack_control
from kvstore_server.protocol.rows import PACKED_ROWS, RowSet, encode_rows
from kvstore_server.shard.shard import Shard
from tests.support.messages import contribution
from tests.support.processes import LIMIT, Process, Processes
from tests.support.reachable import resident_bytes

INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    -1,
    -2,
    255,
    1 << 16,
    1 << 31,
    (1 << 31) - 1,
    1 << 53,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 64,
)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "k", "float32", "sgd", "\0", "/", "..", "é" * 9, "x" * 5000, "*", "job/a")
SLOWEST = 20.0
"""Seconds that one case may take; only a guard against one that hangs."""
MOST_MEMORY = 256 << 20
"""Bytes by which a server may grow while it is attacked without pause."""


def draw_value(rng: random.Random, former: object = None, depth: int = 0) -> Any:
    """A value of the kind of `former`, or of any other kind."""
    if rng.random() < 0.75:
        if isinstance(former, bool):
            return not former
        if isinstance(former, int):
            return rng.choice((former + 1, former - 1, -former, rng.choice(INTEGERS), rng.getrandbits(20)))
        if isinstance(former, float):
            return rng.choice(NUMBERS)
        if isinstance(former, str):
            return rng.choice(TEXTS)
        if isinstance(former, bytes | bytearray):
            return bytes(damage(rng, bytearray(former)))
        if isinstance(former, tuple | list) and former and depth < 4:
            own = list(former)
            at = rng.randrange(len(own))
            change = rng.random()
            if change < 0.15:
                del own[at]
            elif change < 0.3:
                own.append(own[at])
            else:
                own[at] = draw_value(rng, own[at], depth + 1)
            return type(former)(own)
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: rng.randbytes(rng.choice((0, 1, 8, 16, 300))),
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: tuple(draw_value(rng, None, depth + 1) for _ in range(rng.randrange(4))) if depth < 3 else (),
        lambda: {rng.choice(TEXTS): draw_value(rng, None, depth + 1)} if depth < 3 else {},
    ]
    return rng.choice(kinds)()


def damage(rng: random.Random, data: bytearray) -> bytearray:
    """Replace, remove or insert bytes, up to three times."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(data))
        put = rng.choice(
            (b"", b"\xff" * 8, bytes(8), b"\xdf\xff\xff\xff\xff", rng.randbytes(rng.randrange(9)))
        )
        data[at : at + rng.choice((0, 1, 4, 8))] = put
    return data


def damaged_frames(rng: random.Random, frames: list[bytearray]) -> list[bytearray]:
    frames = [bytearray(one) for one in frames]
    damage(rng, rng.choice(frames))
    return rng.choice((frames, frames, frames, frames[:-1], [*frames, bytearray(8)]))


# ---------------------------------------------------------------- messages


def _peer(rank: int) -> bytes:
    return b"%016d" % rank


_HASHED = hash_table_spec("h", (3,), "float32", HashTableOptions(admit_after=2, expire_after=3), 1)
KEYS = (("k", (3, 4), "float32", 0, False), ("r", (5, 2), "float32", 1, True), _HASHED.fields)


def _plan() -> Plan:
    return make_plan(list(map(tensor_spec_from, KEYS)), 1, True)


def _of_hash_table() -> int:
    """The last slice of the hash table, which has the largest row numbers."""
    return _plan().slices_with(2)[-1].index


def _rows_of_hash_table() -> bytes:
    plan = _plan()
    rows = RowSet(torch.tensor([2**63 - 9, 2**63 - 1]), torch.ones(2, 3))
    return bytes(encode_rows(plan, plan.slices[_of_hash_table()], {0: rows}).numpy())


def _state_of_hash_table() -> tuple[dict[str, Any], bytes]:
    """A slice's summary and data, of a table that has two rows there."""
    shard, plan = Shard(), _plan()
    unit = shard.add(plan)
    rows = RowSet(torch.tensor([2**63 - 9, 2**63 - 1]), torch.ones(2, 3))
    adagrad = create("adagrad")
    for _ in range(2):
        shard.hash_tables[2].update(rows, np.ones(2, np.int64), adagrad, adagrad.hyper)
    return pack_states(shard.get_state(unit, _of_hash_table()))


def valid_bodies() -> list[Any]:
    """Messages that a rank of a job may send, with numbers that are those of `Ranks`."""
    spec = pack_control(checked_optimizer_spec(create("adam")))
    rows = struct.pack("<2q", 0, 2)
    return [
        m.Hello("job", 1, 2, 0, 1, "", "host:17", bytes(16), (_peer(1),)),
        m.Hello("job/other", 0, 1, 0, 1, "", "host:18", bytes(16), (_peer(0),), "async"),
        m.Register("k", KEYS, True),
        m.Register("h", (_HASHED.fields,), False),
        m.Register("l", (("l", (1000,), "bfloat16", 0, False),), False),
        contribution([(0, bytes(64))], 1, table=0, given=1, flags=m.WANTS_WEIGHTS),
        contribution([(0, bytes(64))], 0, table=0, given=1),
        contribution([], 1, table=0, given=0),
        m.Resolve(0, 1, 0.25, None, False),
        m.Abort(0, 1, "because", True),
        m.Pull((0,), 0.01),
        m.PullRows(0, (0,), (rows,), (b"",), 0.01),
        m.PullRows(0, (2,), (struct.pack("<2q", -5, 7),), (b"",), 0.01),
        m.PullRows(0, (2,), (struct.pack("<2q", -5, 7),), (struct.pack("<q2i", 3, 1, -1),), 0.01),
        contribution(
            [(_of_hash_table(), _rows_of_hash_table())],
            1, table=0, given=1, encoding=PACKED_ROWS, absent=((0, 0), (0, 1)),
        ),
        m.MapRows(0),
        m.SetOptimizer(spec),
        m.Gather(1, 0.01, b"mine"),
        m.GetState(0, 0),
        m.GetState(0, _of_hash_table()),
        m.GetState(0, _of_hash_table(), 1),
        m.SliceState(0, _of_hash_table(), *_state_of_hash_table(), 7),
        m.SliceState(0, 0, {"step": 3}, bytes(48)),
        m.Heartbeat(b"\x81\xa5steps\x07"),
        m.Leave("done", True),
        m.JoinRounds(0, 0.01),
        m.LeaveRounds(0),
        m.CloseRound(0, 1, 0, (0,)),
        m.Snapshot("list"),
        m.Stats(),
        m.Profile("run", ("calls",), 3),
        m.Command(7, b"text"),
        m.GetStatus(),
    ]  # fmt: skip


class Ranks:
    """Two ranks of one job on an engine that they have not broken yet."""

    def __init__(self) -> None:
        self.engine = Engine(EngineConfig(run_id=1, max_memory=64 << 20, dead_after=5.0, max_namespaces=8))
        self.now = 0.0
        self.sessions = [0, 0]
        self._number = 0
        for rank in range(2):
            hello = m.Hello("job", rank, 2, 0, 1, "", f"h:{rank}", b"%016d" % rank, (_peer(rank),))
            for out in self.ask(rank, hello):
                if isinstance(out, m.Welcome):
                    self.sessions[rank] = out.session
        for rank in range(2):
            self.ask(rank, m.SetOptimizer(pack_control(checked_optimizer_spec(create("adagrad")))))
            self.ask(rank, m.Register("k", KEYS, True))
        slices = [(one.index, bytes(4 * one.length)) for one in _plan().slices]
        self.ask(0, contribution(slices, 0, table=0, given=len(slices)))
        self.ask(1, contribution([], 0, table=0, given=0))

    def ask(self, rank: int, body: Any) -> list[m.ReplyBody]:
        self._number += 1
        request = m.Request(1, self.sessions[rank], self._number, body)
        frames = [bytearray(bytes(one)) for one in encode_frames(request)]
        return self.send(rank, frames)

    def send(self, rank: int, frames: list[bytearray]) -> list[m.ReplyBody]:
        """Raises ProtocolError if they are no message; AssertionError if the engine has failed."""
        request: Any = m.Request(*decode_frames(frames))
        self.now += 0.001
        found = self.engine.handle(_peer(rank), request, self.now)
        found += self.engine.tick(self.now)
        for out in found:
            body = out.reply.body
            assert not (isinstance(body, m.Failed) and "failed with" in body.text), (request, body)
            encode_frames(out.reply)
        return [out.reply.body for out in found]


def fuzz_frames(rng: random.Random, count: int) -> None:
    """Bytes of messages that were changed: messages, or a ProtocolError."""
    whole = [
        [bytearray(bytes(one)) for one in encode_frames(m.Request(1, 2, number, body))]
        for number, body in enumerate(valid_bodies())
    ]
    for _ in range(count):
        with suppress(ProtocolError):
            decode_frames(damaged_frames(rng, rng.choice(whole)))


def fuzz_requests(rng: random.Random, count: int) -> None:
    """Messages of a member whose fields were changed: answers, or typed errors."""
    bodies = valid_bodies()
    ranks = Ranks()
    for case in range(count):
        body, rank = rng.choice(bodies), rng.randrange(2)
        fields = dataclasses.fields(body)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            if fields:
                name = rng.choice(fields).name
                with suppress(Exception):  # the class itself refuses it
                    body = dataclasses.replace(body, **{name: draw_value(rng, getattr(body, name))})
        ids = (
            (1, ranks.sessions[rank]) if rng.random() < 0.95 else (rng.choice(INTEGERS), rng.choice(INTEGERS))
        )
        try:
            frames = [bytearray(bytes(one)) for one in encode_frames(m.Request(*ids, case, body))]
        except Exception:  # only a hostile peer of its own making could send this
            continue
        with suppress(ProtocolError):
            answers = ranks.send(rank, frames)
            if any(isinstance(one, m.Failed) and one.code == FencedError.__name__ for one in answers):
                ranks = Ranks()


# ---------------------------------------------------------------- files of keys


def fuzz_keys(rng: random.Random, count: int) -> None:
    """Files of keys that were changed: keys, or a ConfigurationError."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as top:  # files are written at each case
        made = Path(top) / "keys"
        make_keys(made, [KeyHolder("worker", b"", Role.WORKER, ("a*",), frozenset({1, 2}))])
        files = {
            name: (made / name).read_bytes()
            for name in (SERVER_SECRET, SERVER_PUBLIC, CLIENTS, TOKEN, "worker.secret")
        }
        readers: dict[str, Callable[[str], object]] = {
            SERVER_SECRET: read_server_keys, SERVER_PUBLIC: read_client_keys, CLIENTS: read_server_keys,
            TOKEN: read_token, "worker.secret": read_client_keys,
        }  # fmt: skip
        for _ in range(count):
            name = rng.choice([*files, CLIENTS])
            data = bytes(damage(rng, bytearray(files[name])))
            if name == CLIENTS and rng.random() < 0.8:
                [listed] = json.loads(files[name])
                key = rng.choice([*listed, "limits", "expires", "more"])
                listed[key] = draw_value(rng, listed.get(key))
                with suppress(TypeError):  # bytes
                    data = json.dumps([listed]).encode()
            (made / name).write_bytes(data)
            with suppress(ConfigurationError):
                readers[name](str(made))
            (made / name).write_bytes(files[name])


# ---------------------------------------------------------------- connections

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"


def opening(rng: random.Random) -> bytes:
    """What a peer says first: nearly right, or nothing of the kind."""
    mechanism = rng.choice((b"NULL", b"CURVE", b"PLAIN", rng.randbytes(5)))
    data = bytearray(GREETING + mechanism.ljust(20, b"\0") + bytes(32))
    command = rng.choice((b"READY", b"HELLO", b"INITIATE", b"ERROR", rng.randbytes(6)))
    size = rng.choice((0, 10, 200, 194, 5000))
    body = bytes([len(command)]) + command + rng.randbytes(size)
    length = rng.choice((len(body), rng.choice(INTEGERS) & ((1 << 64) - 1)))
    flags = rng.choice((4, 6, 0, 1, 2, 3, rng.randrange(256)))
    data += bytes([flags]) + (struct.pack(">Q", length) if flags & 2 else bytes([length & 255])) + body
    data += rng.randbytes(rng.choice((0, 0, 100)))
    choice = rng.random()
    if choice < 0.5:
        return bytes(data)
    if choice < 0.8:
        return bytes(damage(rng, data))
    return bytes(data[: rng.randrange(len(data))]) if choice < 0.9 else rng.randbytes(rng.randrange(300))


def _attack(rng: random.Random, count: int, server: Process, keys: Any) -> None:
    host, _, port = server.address.rpartition("/")[2].rpartition(":")
    before = resident_bytes(server.pid)
    for case in range(count):
        with suppress(OSError), closing(socket.create_connection((host, int(port)), timeout=LIMIT)) as end:
            # It ends with a reset, so that the system keeps nothing of it.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.sendall(opening(rng))
            if rng.random() < 0.02:
                end.settimeout(0.02)
                end.recv(200)
        if case % 2000 == 0 or case == count - 1:
            assert server.popen.poll() is None, "the server has ended"
            assert probe_servers([server.address], SLOWEST, keys) != [None], "the server does not answer"
            assert resident_bytes(server.pid) - before < MOST_MEMORY, "the server has grown"


def fuzz_connections(rng: random.Random, count: int) -> None:
    """Anything as the beginning of a connection: a server with keys, and one without, goes on to answer."""
    with tempfile.TemporaryDirectory() as top, Processes() as started:
        folder = Path(top) / "keys"
        make_keys(folder, [KeyHolder("observer", b"", Role.OBSERVER)])
        [with_keys] = started.servers(1, "--keys", str(folder), "--log", "error")
        _attack(rng, count // 2, with_keys, read_probe_keys({"KVSTORE_KEYS": str(folder)}))
        [without] = started.servers(1, "--log", "error")
        _attack(rng, count - count // 2, without, None)


KINDS: dict[str, tuple[float, Callable[[random.Random, int], None]]] = {
    "frames": (0.40, fuzz_frames),
    "requests": (0.35, fuzz_requests),
    "keys": (0.15, fuzz_keys),
    "connections": (0.10, fuzz_connections),
}
"""Name → its share of the cases, and what plays them."""


def fuzz(kind: str, count: int, seed: int) -> None:
    """Play cases of one kind. Raises AssertionError, or whatever came of a case."""
    _, play = KINDS[kind]
    play(random.Random(f"{seed}/{kind}"), count)


def counts(cases: int) -> Iterator[tuple[str, int]]:
    for kind, (share, _) in KINDS.items():
        yield kind, round(cases * share)


def main(cases: int = 1_000_000, seed: int = 0) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.disable(logging.CRITICAL)  # what is refused is logged, too
    for kind, count in counts(cases):
        began = time.monotonic()
        fuzz(kind, count, seed)
        print(f"{kind}: {count} cases in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{cases} cases of seed {seed}: no crash, no hang, only typed errors")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
