"""Gradient compression: how the numbers of one slice become fewer bytes, and what is kept back meanwhile.

Every codec but 'none' rounds, and keeps what it rounded away in a residual beside the gradient, which the
sender adds to its next gradient (error feedback): nothing is lost, it only arrives later. Nothing here knows a
message, a key or a rank.
"""

from kvstore_server.codec.base import Codec
from kvstore_server.codec.registry import make_codec

__all__ = ["Codec", "make_codec"]
