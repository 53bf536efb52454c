"""Key-value stores: where weights live and where gradients meet.

kv = kvtrainer.kvstore.create("local")
kv.init("w", torch.zeros(3))
kv.push("w", torch.ones(3))
kv.pull("w", out=w)
"""

from kvtrainer.kvstore.base import CAPABILITIES, KVStoreBase, capabilities, create, register
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.local import LocalKVStore

__all__ = [
    "CAPABILITIES",
    "DeviceKVStore",
    "DistKVStore",
    "KVStoreBase",
    "LocalKVStore",
    "capabilities",
    "create",
    "register",
]
