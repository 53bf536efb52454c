"""`python -m kvstore_server` is the same as `kvstore-server`."""

from kvstore_server.cli import run

run()
