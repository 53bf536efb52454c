"""The probe of a server: its messages are those of the protocol, and what it says is true."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import zmq

from kvstore_server import PROTOCOL_VERSION, probe
from kvstore_server.errors import VersionMismatchError, to_wire
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import MAX_FRAME, encode_frames
from tests.support.limits import LIMIT, SOON
from tests.support.stores import Servers


def test_its_question_and_the_answers_that_it_understands_are_the_protocols() -> None:
    assert probe.probe_question() == [bytes(one) for one in encode_frames(m.Request(0, 0, 1, m.GetStatus()))]
    told = {"jobs": [{"name": "a", "rounds": 3, "late": 0.5}]}
    assert (
        probe.facts_in_probe_answer([bytes(one) for one in encode_frames(m.Reply(1, m.Status(told)))]) == told
    )
    refused = encode_frames(m.Reply(1, m.Failed(*to_wire(VersionMismatchError("another version")))))
    with pytest.raises(VersionMismatchError, match="another version"):
        probe.facts_in_probe_answer([bytes(one) for one in refused])
    assert probe.MAX_FRAME == MAX_FRAME


def test_servers_that_run_answer(jobs: Servers) -> None:
    addresses = [server.address for server in jobs.of(2)]
    assert [probe.main([address, "--timeout", str(LIMIT)]) for address in addresses] == [0, 0]


def _header(version: int = PROTOCOL_VERSION) -> bytes:
    return probe.HEADER.pack(b"KV", version, probe.INFO, 0, 1, 0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "no answer within 0.5 s"),
        ([b"HTTP/1.1 400"], "is not a kvstore-server"),
        ([_header(99) + b"\x80"], "speaks protocol version 99"),
        ([_header(15), b"\x80"], "speaks protocol version 15"),
        ([_header()[:-1]], "is not a kvstore-server"),
        ([_header()], "cannot be decoded"),
        ([_header() + b"\xc1"], "cannot be decoded"),
        ([_header() + b"\x91\x01"], "does not answer with"),
        (encode_frames(m.Reply(1, m.Heartbeat())), "does not answer with"),
        (
            encode_frames(m.Reply(1, m.Failed("ProtocolError", "no Look is known here"))),
            "no Look is known here",
        ),
    ],
)
def test_anything_else_is_one_line_and_exit_code_1(
    answer: list[bytes] | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def reply() -> None:
            peer, *_ = router.recv_multipart()
            if answer is not None:
                router.send_multipart([peer, *answer])

        thread = threading.Thread(target=reply)
        thread.start()
        seconds = SOON if answer is None else LIMIT
        assert probe.main([f"tcp://127.0.0.1:{port}", "--timeout", str(seconds)]) == 1
        thread.join()
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["127.0.0.1:5555"], ["tcp://127.0.0.1:0"], ["tcp://h:1", "--timeout", "nan"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(arguments)
    assert ended.value.code == 2
    assert "kvstore_server.probe: error: " in capsys.readouterr().err


@pytest.mark.parametrize("module", ["kvstore_server.probe", "kvtrainer.watch.top"])
def test_what_looks_at_servers_imports_neither_torch_nor_numpy(module: str) -> None:
    script = f"import sys, {module}; sys.exit(bool({{'torch', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=LIMIT).returncode == 0
