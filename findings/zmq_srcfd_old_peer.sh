#!/usr/bin/env bash
# Library:   pyzmq 27.3.0 with libzmq 4.3.5: the option SRCFD of a frame.
# Expected:  it is the descriptor of the connection that has brought a message, for each message that came over TCP.
# Happens:   for a peer that speaks ZMTP 1.0, which libzmq still serves, reading it raises ZMQError with EINVAL.
# Seen:      2026-11-29
# For users: whoever reads SRCFD in a server must expect the error, since any peer can cause it.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check pyzmq==27.3.0

cat > "$place/run.py" <<'PYTHON'
import errno
import socket

import zmq

with zmq.Context() as context:
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def srcfd():
        assert router.poll(10_000)
        frames = router.recv_multipart(copy=False)
        try:
            return frames[-1].get(zmq.SRCFD) > 0
        except zmq.ZMQError as error:
            return f"ZMQError {errno.errorcode[error.errno]}"

    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"x")
    print("a peer of today:", srcfd())
    with socket.create_connection(("127.0.0.1", port)) as old:
        old.sendall(b"\x01\x00" + b"\x02\x00x")
        print("a peer that speaks ZMTP 1.0:", srcfd())
    dealer.close(linger=0)
    router.close(linger=0)
PYTHON

"$place/venv/bin/python" "$place/run.py" > "$place/seen"
cat > "$place/expected" <<'TEXT'
a peer of today: True
a peer that speaks ZMTP 1.0: ZMQError EINVAL
TEXT
cat "$place/seen"
diff "$place/expected" "$place/seen"
