"""A Gluon-style imperative trainer for PyTorch over local and parameter-server key-value stores."""

from kvstore_server.version import __version__
from kvtrainer import errors, kvstore, optimizer
from kvtrainer.trainer import Trainer

__all__ = ["Trainer", "__version__", "errors", "kvstore", "optimizer"]
