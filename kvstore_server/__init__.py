"""What owns the weights of a job and runs as kvstore-server; it stands alone.

Here are the versions of the package and of the wire protocol.
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 17
"""Peers that speak different protocol versions refuse each other at hello."""
