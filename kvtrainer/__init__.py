"""A Gluon-style imperative trainer for PyTorch over local and parameter-server key-value stores."""

from kvstore_server.version import __version__
from kvtrainer import kvstore, optimizer

__all__ = ["__version__", "kvstore", "optimizer"]
