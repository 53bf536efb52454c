#!/usr/bin/env bash
# Library:   libzmq 4.3.5 in pyzmq 27.1.0: a client whose key an authenticator (ZAP) refuses.
# Expected:  it tries again, as after every other loss of a connection (RECONNECT_IVL), so that it gets in once its key has
#            been added; or an operation on it fails.
# Happens:   it never tries again. Messages are still taken and queued, `poll` and `recv` wait for ever, and no call
#            returns an error. Only a monitor of the socket tells (HANDSHAKE_FAILED_AUTH). A server that is down when the
#            client starts is tried again all the time; so is one that has another key than the client expects.
# Seen:      2026-11-29
# For users: watch a client's socket by a monitor, and make a new socket after HANDSHAKE_FAILED_AUTH.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check pyzmq==27.1.0
cat > "$folder/show.py" <<'PYTHON'
import sys

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

print("pyzmq", zmq.__version__, "libzmq", zmq.zmq_version())
context = zmq.Context()
public, secret = zmq.curve_keypair()
accepted = set()


class Accepts:
    def callback(self, domain, key):
        return key in accepted


authenticator = ThreadAuthenticator(context)
authenticator.start()
authenticator.configure_curve_callback(domain="*", credentials_provider=Accepts())
server = context.socket(zmq.ROUTER)
server.curve_server, server.curve_publickey, server.curve_secretkey = True, public, secret
port = server.bind_to_random_port("tcp://127.0.0.1")


def client():
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.curve_publickey, socket.curve_secretkey = own, own_secret
    socket.curve_serverkey = public
    monitor = socket.get_monitor_socket()
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send(b"hello")
    return socket, monitor


own, own_secret = zmq.curve_keypair()
refused, monitor = client()
events = []
while monitor.poll(1500):
    events.append(zmq.Event(recv_monitor_message(monitor)["event"]).name)
print("the refused client:", events)
accepted.add(own)
has_come = bool(server.poll(3000))
print("its message has come three seconds after its key was added:", has_come)
again, _ = client()
is_new_one_in = bool(server.poll(3000))
print("that of a new socket with the same key has come:", is_new_one_in)
retries = events.count("CONNECTED")
as_described = retries == 1 and "HANDSHAKE_FAILED_AUTH" in events and not has_come and is_new_one_in
print("as described" if as_described else "this has changed")
authenticator.stop()
context.destroy(linger=0)
sys.exit(not as_described)
PYTHON
"$folder/env/bin/python" -W ignore "$folder/show.py"
