"""The server of a job, which owns its weights and runs as kvstore-server. It does not import kvtrainer.

Here are the versions of the package and of the wire protocol.
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 28
"""Peers with different protocol versions refuse each other at hello."""
